"""docs/recipes.md, patients.md and cost_and_speed.md: what is pasted into a copy of complete/ does
what the page says, on one process and on several, also in a run that is resumed."""

import csv
import gzip
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import predict
import pytest
import torch
import torch.nn.functional as F
import train
import unpack_shards
from altered import recipe
from helpers import (
    COMPLETE,
    ROOT,
    altered,
    checkpoint,
    close,
    metrics,
    parse,
    run,
    same,
    together,
    weights,
)
from PIL import Image

PAGE = ROOT / "docs/recipes.md"
SHORT = ["--batch-size", 16, "--lr", 0.001, "--log-every", 10, "--resume"]


def defined(title):
    """What a recipe for train.py defines, in a copy of train.py's names."""
    code = "".join(code for language, code in recipe(title) if language == "python")
    exec(code, space := dict(vars(train)))
    return space


def pasted(*titles, more=""):
    """train.py in a copy of complete/ with these recipes, and with more code before its start."""
    return altered(COMPLETE, titles=titles, more=more)


def replace(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


# ---- What a run logs, keeps and trains -----------------------------------------------------------
LOGS = """
class SummaryWriter:
    def __init__(self, path, purge_step):
        print("purges from", purge_step)
    def add_scalar(self, name, value, step):
        print("point", {name: float(value)}, step)
    flush = print
def log(values, step):
    for name, value in values.items():
        print("logged", {name: float(value)}, step)
init = lambda **options: print("run", options["id"])
"""
CONSTANT = """
def metrics(sums):
    return {"accuracy": 0.5}
"""


def logged(word, text):
    lines = re.findall(rf"^{word} ({{.*) (\d+)$", text, re.M)
    return [(eval(values), int(step)) for values, step in lines]


@pytest.mark.slow
def test_logs_average_and_early_stopping(fashion):
    """On two ranks, with --accumulate. The loss falls, but the score does not rise: the first epoch
    stays the best one, and the run ends five epochs later, resumed or not, with the same weights.
    The average is evaluated and saved. TensorBoard and W&B get the losses of the progress lines and
    the rows of metrics.csv."""
    titles = ["An average of the weights", "Early stopping", "The best epoch by another score"]
    path = pasted(*titles, "TensorBoard", "Weights & Biases", more=CONSTANT)
    path.with_name("wandb.py").write_text(LOGS)
    replace(path, "torch.utils.tensorboard", "wandb")
    flags = [*fashion, *SHORT, "--accumulate", 2, "--output"]
    runs = ["whole", 9], ["parts", 2], ["parts", 9], ["whole", 9, "--evaluate"]
    *texts, evaluated = together(
        *([*flags, name, "--epochs", *rest] for name, *rest in runs), path=path
    )
    rows = metrics("whole")
    assert len(rows) == len(metrics("parts")) == 6
    assert same(weights("whole"), weights("parts")) and rows[5]["test_loss"] < rows[0]["test_loss"]
    saved = checkpoint("whole")
    average = {name.removeprefix("module."): w for name, w in saved["ema"].items() if "." in name}
    assert same(average, weights("whole")) and not same(average, saved["model"])
    assert f"whole/best.pt: test loss {rows[0]['test_loss']:.4f} " in evaluated
    for text, first in zip(texts, [1, 1, 81]):
        assert f"purges from {first}\n" in text
        points = logged("point", text)
        assert points == logged("logged", text)
        lines = re.findall(r"^epoch (\d+)/\d step (\d+)/40 loss (\S+) ", text, re.M)
        printed = [(40 * int(e) - 40 + int(step), float(loss)) for e, step, loss in lines]
        losses = [(step, round(values["loss"], 4)) for values, step in points if "loss" in values]
        assert losses == printed and printed[0][0] == first + 9
    for row in rows:
        for name, value in row.items():
            assert ({name: value}, 40 * row["epoch"]) in logged("point", texts[0])


DETERMINISTIC = """
computed = metrics
def metrics(sums):
    print("deterministic", torch.are_deterministic_algorithms_enabled())
    print("benchmark", torch.backends.cudnn.benchmark)
    return computed(sums)
"""


@pytest.mark.slow
def test_frozen_layers_and_profile(data):
    """Only the head is trained, and batch norm keeps its statistics. Each rank's trace has three
    steps, and the loader."""
    titles = ["Frozen layers", "A profile", "Deterministic runs on a GPU"]
    path = pasted(*titles, "Small networks", more=DETERMINISTIC)  # which changes --compile
    flags = ["--dataset", data / "pictures", *SHORT, "--batch-size", 4, "--workers", 1]
    flags += ["--model", "resnet18", "--epochs", 1, "--output", "out"]
    [text] = together(flags, path=path)
    assert "deterministic True\nbenchmark False\n" in text
    assert len(checkpoint("out")["optimizer"]["state"]) == 2  # of fc.weight and fc.bias
    assert not any(w.any() for name, w in weights("out").items() if "running_mean" in name)
    for rank in range(2):
        [trace] = [path.read_text() for path in Path("out").glob(f"rank{rank}.*.pt.trace.json")]
        steps = {int(step) for step in re.findall(r'"ProfilerStep#(\d+)"', trace)}
        assert steps == {21, 22, 23} and "enumerate(DataLoader)" in trace


# ---- Losses, scores, classes ---------------------------------------------------------------------
IGNORED = """
whole = prepare
def prepare(*args, **options):
    images, labels = whole(*args, **options)
    return images, labels.where(labels > 6, -100)
"""
PAIRS = """
single = build_model
def build_model(*args):
    return nn.Sequential(single(*args), nn.Unflatten(1, (2, 5)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "title, more",
    [
        ("A loss that ignores labels", IGNORED),
        ("A contrastive loss over the whole batch", PAIRS),
    ],
)
def test_losses_over_all_ranks(fashion, title, more):
    """The same on one process and on two."""
    path = pasted(title, more=more)
    for n in (1, 2):
        together([*fashion, *SHORT, "--epochs", 1, "--output", n], path=path, processes=n)
    close("2", "1", keys=["train_loss"])


def test_imbalanced_classes():
    """Classes are drawn equally often, and other samples in each epoch."""
    labels = (torch.arange(5000) < 500).long()
    dataset = torch.utils.data.TensorDataset(torch.zeros(5000), labels)
    dataset.targets = labels
    order = defined("Imbalanced classes")["epoch_order"]
    orders = [order(parse(), dataset, epoch) for epoch in (0, 1, 0)]
    assert torch.equal(orders[0], orders[2]) and not torch.equal(orders[0], orders[1])
    assert labels[orders[0]].sum() == pytest.approx(2500, abs=200)


def test_rare_classes(data):
    """best.pt is of the epoch with the highest macro F1, which is that of its predictions. The loss
    of a batch is the mean of its halves'."""
    metric = pytest.importorskip("sklearn.metrics").f1_score
    path = pasted("Weights for a rare class", "Macro F1 and IoU")
    replace(path, "[1.0, 3.5]", "[1.0, 3.5, 1.0]")
    flags = ["--dataset", data / "pictures", *SHORT, "--lr", 0.1, "--workers", 0, "--device", "cpu"]
    run(path, *flags, "--epochs", 5, "--augment", "--output", "out", processes=1)
    scores = [row["test_macro_f1"] for row in metrics("out")]
    words = ["out", str(data / "pictures/test"), "--output", "out.csv", "--workers", "0"]
    predict.main(predict.parser.parse_args(words))
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [[row[name] for row in rows] for name in ("true", "class")]
    assert metric(*found, average="macro") == pytest.approx(max(scores))
    assert defined("Macro F1 and IoU")["minimized"]({"macro_f1": 0.25}) == -0.25
    loss, outputs = defined("Weights for a rare class")["loss_function"], torch.randn(4, 2)
    labels = torch.tensor([0, 1, 0, 0])
    halves = [loss(*half) for half in zip(outputs.split(2), labels.split(2))]
    plain = F.cross_entropy(outputs, labels, reduction="none")
    plain[1] *= 3.5
    assert torch.allclose(loss(outputs, labels), plain.mean())
    assert torch.allclose(sum(halves) / 2, plain.mean())


TWO_CLASSES = """
def load_data(args):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (843, 1, 4, 4), dtype=torch.uint8, generator=generator)
    labels = (images[:, 0, 0, 0] + 60 * torch.randn(843, generator=generator) > 128).long()
    both = TensorDataset(images, labels)
    return TensorDataset(*both[:640]), TensorDataset(*both[640:]), 2
"""


@pytest.mark.slow
def test_a_score_that_is_no_sum():
    """The AUC over the whole test set, of which each of two ranks has seen its share."""
    metric = pytest.importorskip("sklearn.metrics").roc_auc_score
    path = pasted("A score that is no sum", "The best epoch by another score", more=TWO_CLASSES)
    flags = ["--image-size", 4, "--model", "mlp", "--lr", 0.01, "--epochs", 2, "--output", "out"]
    together(flags, path=path)
    exec(TWO_CLASSES, space := dict(vars(train)))
    images, labels = space["load_data"](None)[1].tensors
    images, _ = train.prepare(parse("--image-size", 4), (images, labels), torch.device("cpu"))
    model = train.build_model(parse("--model", "mlp"), images, 2)
    model.load_state_dict(weights("out"))
    wanted = metric(labels, model(images).softmax(1)[:, 1].detach())
    found = metrics("out")[-1]["test_auc"]
    assert found == pytest.approx(wanted, abs=1e-4) and 0.7 < found < 0.99


# ---- Other data ----------------------------------------------------------------------------------
def write_tar(name, paths):
    with tarfile.open(name, "w") as shard:
        for i, path in enumerate(paths):
            label = tarfile.TarInfo(f"{path.stem}.cls")
            label.size = 2
            files = [(path, path.name), (label, b"%d\n" % "abc".index(path.parent.name))]
            for file, content in files if i % 2 else files[::-1]:  # in any order
                if file == path:
                    shard.add(path, content)
                else:
                    shard.addfile(label, io.BytesIO(content))


def test_tar_shards(data):
    """Each image is in its class's folder; and of two with the same key, none replaces the other.
    The same again is the same."""
    paths = sorted(Path(data, "pictures/train").glob("*/*"), key=lambda path: path.name)
    Path("shards").mkdir()
    for i in range(3):
        write_tar(f"shards/train{i}.tar", paths[32 * i :][:32])
    commands = [code for language, code in recipe("Tar shards") if language == "sh"][0]
    line = commands.splitlines()[0].replace("python complete", f"{sys.executable} {ROOT}/complete")
    wanted = {}
    for i, path in enumerate(paths):
        name = f"{'abc'.index(path.parent.name):04}/train{i // 32}_{path.name}"
        wanted[Path("imagenet/train", name)] = path.read_bytes()
    for _ in range(2):
        subprocess.run(["bash", "-c", line], check=True)
        assert wanted == {path: path.read_bytes() for path in Path("imagenet/train").glob("*/*")}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_shard_that_is_cut_off(suffix):
    """Python's tarfile says nothing of one that ends behind a whole file."""
    for name in "key.png", "other.png":
        Image.new("RGB", (8, 8)).save(name)
    write_tar("whole.tar", [Path("key.png"), Path("other.png")])
    with tarfile.open("whole.tar") as shard:
        end = shard.getmembers()[2].offset
    content = Path("whole.tar").read_bytes()[:end]
    Path(f"cut.tar{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(SystemExit, match="is cut off: copy it again"):
        unpack_shards.unpack(Path(f"cut.tar{suffix}"), Path("images"))
    assert not Path("images").exists()


def test_killed_while_it_unpacks(monkeypatch):
    """Half an image would look like another one, which the same command then refuses to replace."""
    Image.new("RGB", (8, 8)).save("key.png")
    write_tar("train0.tar", [Path("key.png")])
    write = Path.write_bytes

    def killed(path, content):
        write(path, content[:20])
        raise KeyboardInterrupt

    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(Path, "write_bytes", killed)
        unpack_shards.unpack(Path("train0.tar"), Path("images"))
    unpack_shards.unpack(Path("train0.tar"), Path("images"))
    (image,) = Path("images").rglob("*.*")
    assert image.read_bytes() == Path("key.png").read_bytes()


@pytest.mark.parametrize("other", ["elsewhere/train0.tar", "train0.tar"])
def test_tar_shards_that_share_a_name(other):
    """Of two images that would have the same name, none replaces the other."""
    for color, name in ("red", "one.tar"), ("blue", "two.tar"):
        Path(color, "a").mkdir(parents=True)
        Image.new("RGB", (8, 8), color).save(f"{color}/a/key.png")
        write_tar(name, [Path(color, "a/key.png")])
    Path("elsewhere").mkdir()
    if "/" in other:
        Path("one.tar").rename("train0.tar")
        Path("two.tar").rename(other)
        message = "elsewhere/train0.tar: another image has the name images/0000/train0_key.png"
    else:
        paths = [Path("red/a/key.png"), Path("blue/a/key.png")]
        write_tar("train0.tar", paths)
        message = "train0.tar has two files of the same name"
    with pytest.raises(SystemExit, match=message):
        for path in dict.fromkeys(["train0.tar", other]):
            unpack_shards.unpack(Path(path), Path("images"))

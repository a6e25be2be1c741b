"""docs/recipes.md and docs/your_model_and_data.md: what is pasted into a copy of complete/ does
what the page says, on one process and on several, also in a run that is resumed."""

import csv
import io
import itertools
import re
import shutil
import sys
import tarfile
from pathlib import Path

import helpers
import images
import numpy as np
import predict
import pytest
import torch
import torch.nn.functional as F
import train
from helpers import ROOT, close, command, here, metrics, run, same, together, weights
from runs import paste as paste_into
from runs import recipe

SHORT = ["--batch-size", 16, "--lr", 0.001, "--log-every", 10, "--resume"]
TARGETS = {"train_set.targets": "train_set.tensors[1]"}  # Fashion-MNIST is a TensorDataset
RECIPES = re.findall(r"^## (.*)", (ROOT / "docs" / "recipes.md").read_text(), re.M)


def code_of(title, number=0):
    return [code for language, code in recipe(title) if language == "python"][number]


def defined(title):
    """What a recipe for train.py defines, in a copy of train.py's names."""
    exec(code_of(title), space := dict(vars(train)))
    return space


def paste(folder, *titles, **changes):
    """FOLDER/train.py, with these recipes and replacements in any of its files."""
    shutil.copytree(ROOT / "complete", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for title in titles:
        paste_into(title, folder)
    texts = {path: path.read_text() for path in Path(folder).glob("*.py")}
    for old in changes:
        assert any(old in text for text in texts.values()), old
    for path, text in texts.items():
        for old, new in changes.items():
            text = text.replace(old, new)
        path.write_text(text)
    return Path(folder, "train.py").resolve()


def outputs(*flags, **epochs):
    """For `whole=[3], parts=[1, 3]`: flags of the runs that take folders to so many epochs."""
    return [
        [*flags, "--epochs", count, "--output", folder]
        for folder, counts in epochs.items()
        for count in counts
    ]


SCHEDULE, EXACT = "A schedule per epoch, or by the test loss", "A loss that ignores labels"
CONTRAST, HALF = "A contrastive loss over the whole batch", "All-reduce in bfloat16"
FROZEN, PROFILE = "Frozen layers", "A profile"
FEW_CLASSES, SCORE = "Weights of another number of classes", "The best epoch by another score"
TOGETHER = [  # of those that replace the same function, one each
    ["An average of the weights", "Early stopping", "TensorBoard", "Weights & Biases", EXACT]
    + ["The weights of every tenth epoch", "Imbalanced classes", "Deterministic runs on a GPU"]
    + [SCHEDULE, HALF, FROZEN, PROFILE, FEW_CLASSES, SCORE],
    ["An average of the weights", "Evaluation every N steps", "AUC in each epoch", CONTRAST],
    ["An average of the weights", "Rare classes", "Small networks"],
]


@pytest.mark.parametrize("titles", TOGETHER)
def test_any_order(titles):
    """The order in which recipes are pasted does not matter, but for the order of the lines."""
    paste("one", *titles), paste("other", *titles[::-1])
    for path in Path("one").glob("*.py"):
        texts = path.read_text(), Path("other", path.name).read_text()
        lines = [sorted(filter(None, text.splitlines())) for text in texts]
        assert lines[0] == lines[1]
        for text in texts:
            compile(text, path, "exec")


def test_each_recipe_is_tried():
    tried = {*itertools.chain(*TOGETHER), "Export"}
    assert {*RECIPES} <= tried, {*RECIPES} - tried


# ---- What a run says and writes ------------------------------------------------------------------
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
FAKE = {"torch.utils.tensorboard": "wandb"}


def test_logged_losses_are_the_printed_ones(fashion):
    """TensorBoard's and W&B's: the mean since the line before, on two ranks, with --accumulate; the
    scores of each epoch are those of metrics.csv."""
    path = paste("my", "TensorBoard", "Weights & Biases", **FAKE)
    Path("my", "wandb.py").write_text(LOGS)
    flags = [*fashion, *SHORT, "--lr", 0.05, "--accumulate", 2]
    texts = together(*outputs(*flags, out=[1, 3]), path=path)
    assert "purges from 1\n" in texts[0] and "purges from 41\n" in texts[1]
    rows, printed, points = metrics("out"), [], []
    for text in texts:
        lines = re.findall(r"^epoch (\d+)/\d step (\d+)/40 loss (\S+) ", text, re.M)
        printed += [(40 * int(e) - 40 + int(s), float(loss)) for e, s, loss in lines]
        own, others = (
            re.findall(rf"^{word} ({{.*) (\d+)$", text, re.M) for word in ("point", "logged")
        )
        assert own == others
        points += [(eval(values), int(step)) for values, step in own]
    assert [step for step, _ in printed] == list(range(10, 121, 10))
    logged = [(step, round(values["loss"], 4)) for values, step in points if "loss" in values]
    assert logged == printed
    assert abs(printed[3][1] - rows[0]["train_loss"]) > 0.01  # which is the mean of the epoch
    for row in rows:
        for name, value in row.items():
            assert ({name: value}, 40 * row["epoch"]) in points


SIZES = {
    "1000 * args.batch_size": "20 * args.batch_size",
    "steps_per_epoch = 1000": "steps_per_epoch = 20",
}


@pytest.mark.slow
def test_recipes(fashion):
    """Several at once. A resumed run leaves the same files. The average is evaluated and saved; the
    rate falls after each epoch, here 20 steps; a run that stalls is stopped."""
    titles = ["An average of the weights", "Early stopping", "The weights of every tenth epoch"]
    titles += ["Deterministic runs on a GPU", "Evaluation every N steps", SCHEDULE]
    stall = {"patience=3": "patience=0, threshold=9", "% 10 == 0": "% 2 == 0"}
    path = paste("all", *titles, **SIZES, **stall)
    flags = [*fashion, *SHORT, "--augment"]
    runs = [*outputs(*flags, whole=[4], parts=[1, 4]), *outputs(*flags, "--lr", 0, stalled=[9])]
    texts = together(*runs, path=path)
    rates = [["1.00e-03", "1.00e-04", "1.00e-05", "1.00e-06"]]
    rates += [rates[0][:1], rates[0][1:]]
    for text, wanted in zip(texts, rates):
        assert re.findall(r"step 20/20 .* lr (\S+)", text) == wanted
    assert len(metrics("stalled")) == 6  # the first was the best
    assert same(weights("whole"), weights("parts"))
    saved = helpers.checkpoint("whole")
    ema = {name.removeprefix("module."): w for name, w in saved["ema"].items() if "." in name}
    assert same(ema, weights("whole")) and not same(ema, saved["model"])
    assert [*map(str, sorted(Path("whole").glob("epoch-*")))] == [
        "whole/epoch-2.pt",
        "whole/epoch-4.pt",
    ]
    assert same(weights("whole", "epoch-4.pt"), weights("whole"))
    command(sys.executable, path, *flags, "--evaluate", "--device", "cpu", "--output", "whole")


HOOK = "None, bf16_compress_hook)"
TOLD = "None, lambda state, bucket: print('in halves') or bf16_compress_hook(state, bucket))"
IN_MEMORY = {"if type(dataset) is TensorDataset:": "if False:"}


@pytest.mark.slow
def test_frozen_layers(fashion):
    """Only the head is trained, with a gradient in halves. The profile has the operators of three
    steps, and the loader's workers."""
    path = paste("my", FROZEN, HALF, PROFILE, **{HOOK: TOLD}, **IN_MEMORY)
    [text] = together(*outputs(*fashion, *SHORT, "--model", "resnet18", my=[1]), path=path)
    assert text.count("Self CPU time total") == 1 and "in halves" in text
    flags = [*fashion, *SHORT, "--model", "resnet18", "--lr", 0]
    together(*outputs(*flags, plain=[1]), path=paste("other", FROZEN))
    new, old = weights("my"), weights("plain")  # no rate: as at the start
    assert {key for key in old if not torch.equal(old[key], new[key])} == {"fc.weight", "fc.bias"}
    trace = Path("my", "trace.json").read_text()
    assert "ProfilerStep#23" in trace and "enumerate(DataLoader)" in trace


# ---- Losses, scores, classes ---------------------------------------------------------------------
def test_scores_from_sums():
    """IoU and AUC are those of all outputs at once."""
    exec(code_of("Metrics"), space := {})
    found, masks = torch.tensor([[1.0, 1, -1, -1, 1]]), torch.tensor([[1.0, 0, 1, 0, 1]])
    sums = space["count"](found, masks)
    assert sums["labels"] == 5 and space["metrics"](sums)["test_iou"] == 2 / 4
    space = defined("AUC in each epoch")
    labels = torch.randint(2, (999,))
    found = torch.randn(999, 2) + F.one_hot(labels, 2)
    parts = [space["count"](*batch) for batch in zip(found.split(99), labels.split(99))]
    auc = space["metrics"]({"histograms": sum(part["histograms"] for part in parts)})["test_auc"]
    scores = found[:, 1] - found[:, 0]
    higher = scores[labels == 1][:, None] > scores[labels == 0]
    assert auc.item() == pytest.approx(higher.float().mean().item(), abs=1e-3) and auc > 0.7


@pytest.mark.parametrize("objects, detections, recall, precision", [(2, 1, 1, 1), (1, 3, 1, 2 / 3)])
def test_precision_of_detections(objects, detections, recall, precision):
    """A detection that covers two objects is one hit; so is each of two that cover one object. The
    third of three detections is beside it."""
    space = defined("Detection")
    box = torch.tensor([0.0, 0, 10, 10])
    boxes = torch.stack([box + torch.tensor(100.0 if i == 2 else 0) for i in range(detections)])
    ones = torch.ones(detections)
    target = {"boxes": box.expand(objects, 4), "labels": torch.ones(objects)}
    sums = space["count"]([{"boxes": boxes, "labels": ones, "scores": ones}], [target])
    sums = {name: torch.as_tensor(value).double() for name, value in sums.items()}
    found = space["metrics"](sums)
    assert found["test_recall"] == recall and found["test_precision"] == pytest.approx(precision)
    nothing = {"boxes": boxes[:0], "labels": ones[:0], "scores": ones[:0]}
    sums = space["count"]([nothing], [target])
    sums = {name: torch.as_tensor(value).double() for name, value in sums.items()}
    assert space["metrics"](sums) == {"test_recall": 0, "test_precision": 0}  # not NaN


def test_orders():
    """Classes are drawn equally often, and others in each epoch. Parts of a pass over the data have
    each sample at most once."""
    args = helpers.parse("--batch-size", 2)
    dataset = torch.utils.data.TensorDataset(torch.zeros(5000), (torch.arange(5000) < 500).long())
    dataset.targets = dataset.tensors[1]
    order = defined("Imbalanced classes")["epoch_order"]
    orders = [order(args, dataset, epoch) for epoch in (0, 1, 0)]
    assert torch.equal(orders[0], orders[2]) and not torch.equal(orders[0], orders[1])
    assert dataset.targets[orders[0]].sum() == pytest.approx(2500, abs=200)
    order = defined("Evaluation every N steps")["epoch_order"]
    first, second, other = (order(args, dataset, epoch) for epoch in range(3))
    assert len(first) == len(second) == 2000 and not {*first.tolist()} & {*second.tolist()}
    assert not torch.equal(first, other)


def test_rare_classes(data):
    """best.pt is of the epoch with the highest macro F1, which is that of its predictions."""
    metric = pytest.importorskip("sklearn.metrics").f1_score
    path = paste("my", "Rare classes", "Early stopping", **{"[1.0, 3.5]": "[1.0, 3.5, 1.0]"})
    flags = ["--dataset", data / "pictures", *SHORT, "--lr", 0.1, "--workers", 0, "--device", "cpu"]
    run(path, *flags, "--epochs", 9, "--augment", "--output", "out", processes=1)
    scores = [row["test_macro_f1"] for row in metrics("out")]
    assert len(scores) == min(9, scores.index(max(scores)) + 6)
    words = ["out", str(data / "pictures/test"), "--output", "out.csv", "--workers", "0"]
    predict.main(predict.parser.parse_args(words))
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [[row[name] for row in rows] for name in ("true", "class")]
    assert metric(*found, average="macro") == pytest.approx(max(scores))


def test_weights_of_another_number_of_classes(data, capsys):
    """Without the recipe they are refused, in a line that names it; with it, all weights but the
    last layer's are the old ones."""
    shutil.copytree(data / "pictures", "fewer")
    for part in "train", "test":
        shutil.rmtree(f"fewer/{part}/c")
    flags = ["--batch-size", 16, "--workers", 0, "--device", "cpu", "--epochs", 1, "--lr", 0]
    helpers.train(*flags, "--dataset", data / "pictures", "--output", "three")
    flags += ["--dataset", "fewer", "--init", "three/best.pt", "--output", "two"]
    with pytest.raises(SystemExit):
        helpers.train(*flags)
    assert FEW_CLASSES in capsys.readouterr().err
    here(paste("my", FEW_CLASSES), *flags)
    old, new = (weights(name) for name in ("three", "two"))
    differ = {name for name in old if not torch.equal(old[name], new[name])}
    assert differ == {"fc3.weight", "fc3.bias"} and len(new["fc3.bias"]) == 2
    assert "fc3.weight" in capsys.readouterr().out


IGNORED = {"return images.contiguous(memory_format=torch.channels_last), labels": (
    "return images.contiguous(), labels.where(labels > 6, -100)"
)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "titles, changes",
    [
        ([EXACT, "Imbalanced classes"], IGNORED | TARGETS),
        ([CONTRAST], {"normalize(outputs": "normalize(outputs.view(-1, 2, 5)"}),
    ],
)
def test_alike(fashion, titles, changes):
    """The same on one process and on two."""
    path = paste("my", *titles, **changes)
    together(*outputs(*fashion, *SHORT, two=[1]), path=path)
    together(*outputs(*fashion, *SHORT, one=[1]), path=path, processes=1)
    close("two", "one", keys=["train_loss"])


# ---- Other data ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_table_of_numbers():
    """Columns of which one is a sum of others: learned, the same on one process and on two. A
    constant column and one of large numbers are scaled exactly. Predictions are the run's."""
    path = paste("my", "A table of numbers")
    columns = np.random.default_rng(0).normal(size=(640, 4))
    rows = [100 * columns + 1.7e9, np.full(640, 1234.567), columns @ [1, 2, -1, 0] + 7]
    rows = np.column_stack(rows)
    table = {"delimiter": ",", "header": "a,b,c,d,constant,sum", "comments": ""}
    np.savetxt("table.csv", rows, **table)
    flags = ["--dataset", "table.csv", *SHORT, "--lr", 0.01]
    together(*outputs(*flags, two=[4]), path=path)
    [text] = together(*outputs(*flags, one=[4]), path=path, processes=1)
    assert "1 output;" in text and "1 classes" not in text
    close("two", "one", keys=["train_loss", "test_loss", "test_mean_error"])
    errors = [row["test_mean_error"] for row in metrics("one")]
    assert errors[-1] < 0.2
    np.savetxt("new.csv", rows[::10, :-1], **table)
    code = code_of("A table of numbers", 1).replace("runs/table", "one")
    path.with_name("predict_table.py").write_text(code)
    found = re.findall(r"-?\d+\.\d+", command(sys.executable, path.with_name("predict_table.py")))
    error = np.abs(np.array(found, float) - rows[::10, -1]).mean() / rows[:, -1].std()
    assert len(found) == 64 and error == pytest.approx(min(errors), rel=0.1)


def write_tar(name, paths):
    with tarfile.open(name, "w") as shard:
        for i, path in enumerate(paths):
            for suffix, content in (
                ("cls", str("abc".index(path.parent.name)).encode()),
                (
                    "jpg",
                    path.read_bytes(),
                ),
            ):
                member = tarfile.TarInfo(f"{i:05}.{suffix}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def test_tar_shards(data):
    """The pixels and labels of the files, also in workers, in any order; a run trains on them."""
    paths = sorted(Path(data, "pictures/train").glob("*/*"), key=lambda path: path.name)
    for i in range(3):
        write_tar(f"shard{i}.tar", paths[32 * i :][:32])
    space = defined("Tar shards")
    shards = space["TarImages"](["shard0.tar", "shard1.tar", "shard2.tar"], 40)
    plain = images.Images(paths, [0] * len(paths), None, 40)
    loader = torch.utils.data.DataLoader(shards, 5, num_workers=2)
    found = [x for batch, labels in loader for x in zip(batch, labels.tolist())]
    for (pixels, label), path, (wanted, _) in zip(found, paths, plain, strict=True):
        assert torch.equal(pixels, wanted) and "abc"[label] == path.parent.name
    flags = ["--dataset", ".", "--batch-size", 16, "--epochs", 1, "--workers", 1, "--device", "cpu"]
    here(paste("my", "Tar shards"), *flags, "--output", "out")
    assert len(metrics("out")) == 1 and torch.load("out/best.pt")["image"] == [3, 32, 32]


DETECTION = """
class Squares(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        image = torch.zeros(3, 40 + i % 3, 48, dtype=torch.uint8)
        x = 4 + i * 7 % 20
        image[:, 8:24, x : x + 16] = 200
        return image, {"boxes": torch.tensor([[x, 8.0, x + 16, 24]]), "labels": torch.tensor([1])}
def load_data(args):
    return Squares(32), Squares(5), 2
def small(num_classes):
    layers = nn.Conv2d(3, 16, 5, 4, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
    features = nn.Sequential(*layers)
    features.out_channels = 32
    anchors = models.detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))
    sizes = {"min_size": 48, "max_size": 48, "image_mean": [0] * 3, "image_std": [1] * 3}
    few = {"rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 20}
    return models.detection.FasterRCNN(
        features, rpn_anchor_generator=anchors, **sizes, **few,
        box_roi_pool=models.detection.faster_rcnn.MultiScaleRoIAlign(["0"], 4, 2),
        box_head=models.detection.faster_rcnn.TwoMLPHead(32 * 16, 64),
        box_predictor=models.detection.faster_rcnn.FastRCNNPredictor(64, num_classes),
    )
models.detection.fasterrcnn_resnet50_fpn = small
"""


@pytest.mark.long
def test_detection():
    """torchvision's detector learns, with --accumulate, also resumed."""
    path = paste("squares", "Detection")
    flags = [*SHORT, "--batch-size", 8, "--accumulate", 2, "--log-every", 1, "--workers", 0]
    flags += ["--optimizer", "adamw", "--lr", 5e-3]
    together(*outputs(*flags, whole=[16], parts=[8, 16]), path=path, more=DETECTION)
    assert same(weights("whole"), weights("parts"))
    rows = metrics("whole")
    assert any(row["test_recall"] == 1 and row["test_precision"] > 0.7 for row in rows), rows

"""complete/: the number at the end is of the data that were meant. The ranks and a resumed run have
the same data, flags and code, --init the normalization that its weights were trained with,
--evaluate the scores of best.pt; seeds share nothing, and checkpoints do not wait for progress
lines."""

import copy
import re
import shutil
import subprocess
from pathlib import Path

import checkpoint as saving
import helpers
import pytest
import start as starting
import torch
import train as script
from helpers import (
    COMPLETE,
    checkpoint,
    close,
    kill_all,
    metrics,
    parse,
    place,
    run,
    same,
    start,
    together,
    told,
    train,
    weights,
)
from PIL import Image
from test_errors import refuse
from test_images import pack, write_folder
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision import datasets, models

TINY = ["--image-size", 16, "--batch-size", 4, "--workers", 0]


# ---- What the test sees --------------------------------------------------------------------------
def write_rings(folder):
    """Eight classes: the place of a white disc on grey, mostly outside of the middle."""
    generator = torch.Generator().manual_seed(0)
    for i in range(240 + 80):
        y, x = divmod(i % 8 + (i % 8 > 3), 3)  # of nine places, not the middle
        pixels = torch.randint(90, 130, (128, 128), generator=generator)
        pixels[y * 40 + 8 : y * 40 + 40, x * 40 + 8 : x * 40 + 40] = 255
        path = Path(folder, "train" if i < 240 else "test", str(i % 8), f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy().astype("uint8")).save(path)


def test_the_test_sees_what_training_sees(capsys):
    """A folder, the same packed at the right side, and packed at another, have one accuracy."""
    write_rings("rings")
    pack("rings", "right", "--side", 24)
    pack("rings", "large")
    assert re.search(r"^large is for --image-size 224, or less$", capsys.readouterr().out, re.M)
    flags = ["--image-size", 24, "--batch-size", 8, "--epochs", 2, "--model", "mlp", "--lr", 0.01]
    for dataset in "rings", "right", "large":
        train("--dataset", dataset, *flags, "--workers", 0, "--output", f"out-{dataset}")
        [*_, row] = metrics(f"out-{dataset}")
        assert row["test_accuracy"] > 0.95, dataset
    close("out-right", "out-rings", 1e-12)


# ---- The same data -------------------------------------------------------------------------------
ELSEWHERE = """
import os
if os.environ["RANK"] == "1":
    os.chdir("elsewhere")
"""
CHANGES = {  # of rank 1's disk, and the message
    "mv train/b train/c && mv test/b test/c": "other classes: ['b'] on rank 0, ['c'] on rank 1",
    "rm train/a/00000.jpg": "16 training samples on rank 0, not 15 on rank 1",
    "rm test/a/00016.jpg": "8 test samples on rank 0, not 7 on rank 1",
    "mv test/a/00016.jpg test/a/9.jpg": "other test samples, by their paths or labels: ",
}


def test_ranks_with_other_data():
    """Refused before the first step, with both values."""
    write_folder("pictures", side=20)
    flags = ["--dataset", "pictures", *TINY, "--epochs", 1, "--output", Path("out").resolve()]
    for change, says in CHANGES.items():
        shutil.copytree("pictures", "elsewhere/pictures")
        subprocess.run(change, shell=True, check=True, cwd="elsewhere/pictures")
        text = refuse(*start(COMPLETE, *flags, more=ELSEWHERE))
        assert f"the ranks have different data: {says}" in text, text
        assert text.count("error: ") == 1 and not Path("out").exists()
        shutil.rmtree("elsewhere")


def test_resumed_with_other_files(refused):
    """Another test set, or an image of another name, which moves every tenth: refused. A folder may
    be moved, and packed."""
    write_folder("pictures", side=20)
    shutil.move("pictures/test", "test")
    flags = [*TINY, "--resume", "--output", "out"]
    train("--dataset", "pictures", *flags, "--epochs", 1)
    image = Path("pictures/train/a/00004.jpg")
    image.rename("pictures/train/a/0.jpg")
    says = "out/checkpoint.pt was started with other training samples, by their paths or labels: "
    refused(says, COMPLETE, "--dataset", "pictures", *flags)
    Path("pictures/train/a/0.jpg").rename(image)
    shutil.move("test", "pictures/test")
    says = "out/checkpoint.pt was started with 14 training samples then, not 16 now"
    refused(says, COMPLETE, "--dataset", "pictures", *flags)
    shutil.move("pictures/test", "test")
    Path("moved").mkdir()
    pack("pictures", "moved/pictures", "--side", 16)
    train("--dataset", "moved/pictures", *flags, "--epochs", 2)
    Path("here").mkdir()
    shutil.move("pictures", "here/pictures")
    train("--dataset", "here/pictures", *flags, "--epochs", 3)
    assert place("out") == (3, 0)


def test_what_identifies_a_dataset():
    """Paths without the folder, and labels; the part that a Subset takes, the parts of a
    ConcatDataset. `classes` may be anything."""
    write_folder("pictures", side=20)
    names = datasets.ImageFolder("pictures/train")
    shutil.copytree("pictures", "moved")
    own = script.load_data(parse("--dataset", "pictures"))[0]
    same_files = [names, datasets.ImageFolder("moved/train"), own]
    assert len({str(starting.fingerprint(dataset)) for dataset in same_files}) == 1
    tensors = [TensorDataset(torch.zeros(4, 1), torch.arange(4) // n) for n in (2, 3)]
    parts = [Subset(names, range(i, i + 8)) for i in (0, 1)]
    joined = [ConcatDataset(both) for both in (tensors, tensors[::-1])]
    relabeled = copy.copy(own)  # as a table of labels may be corrected on one of the machines
    relabeled.targets = own.targets[::-1]
    boxes = copy.copy(own)
    boxes.targets = [[1.0] * (i % 3) for i in range(len(own))]
    every = [*tensors, *parts, *joined, names, relabeled, boxes]
    every += [TensorDataset(torch.arange(4.0)), range(4)]
    assert len({str(starting.fingerprint(dataset)) for dataset in every}) == len(every)


# ---- The same flags and code ---------------------------------------------------------------------
OTHER_FLAGS = """
if os.environ["RANK"] == "1":
    sys.argv += {flags}
"""
FLAGS = {  # of the second machine, and what is said
    "--lr 0.1": "--lr is 0.001 on rank 0 and 0.1 on rank 1",
    "--seed 5": "--seed is 76 on rank 0 and 5 on rank 1",
    "--batch-size 32": "--batch-size is 64 on rank 0 and 32 on rank 1",
    "--epochs 2": "--epochs is 1 on rank 0 and 2 on rank 1",
    "--epochs 0": "--epochs is 1 on rank 0 and 0 on rank 1",
    "--log-every 7": "--log-every is 100 on rank 0 and 7 on rank 1",
    "--resume": "--resume is False on rank 0 and True on rank 1",
    "--dataset synthetic": "--dataset is fashion-mnist on rank 0 and synthetic on rank 1",
}


@pytest.mark.parametrize("other", FLAGS)
def test_ranks_with_other_flags(fashion, other):
    """Refused once, as soon as they have joined; those that may differ, may."""
    more = "import os, sys\n" + OTHER_FLAGS.format(flags=other.split())
    flags = [*fashion, "--epochs", 1, "--output", "out", "--timeout", 60]
    text = refuse(*start(COMPLETE, *flags, more=more))
    says = f"error: {FLAGS[other]}: start all machines with the same flags"
    assert text.count("error: ") == 1 and says in text and not Path("out").exists(), text


# ---- Seeds ---------------------------------------------------------------------------------------
SEEDS = """
import random
import numpy as np
def seen(seed):
    def seed_and_tell(*words, **options):
        seed(*words, **options)
        numbers = torch.rand(()).item(), np.random.rand(), random.random()
        seed(*words, **options)
        print(f"\\nseed {args.seed} {words[0]} rank {dist.get_rank()}: {numbers}", flush=True)
    return seed_and_tell
seed_everything, seed_torch = seen(seed_everything), seen(seed_torch)
"""


def test_seeds_share_nothing(fashion):
    """Of two seeds, with three epochs on two ranks: what a step or `prepare` draws is drawn once,
    and what an epoch draws from Python's and numpy's numbers. Data and weights are those of all."""
    flags = [*fashion, "--epochs", 3, "--batch-size", 80, "--accumulate", 2, "--output"]
    runs = [[*flags, f"out-{seed}", "--seed", seed] for seed in (1, 2)]
    line = r"^seed (\d) (\w+) rank (\d): \((.*), (.*), (.*)\)$"
    found = re.findall(line, "".join(together(*runs, more=SEEDS)), re.M)
    of_all = [numbers for seed, what, rank, *numbers in found if what in ("data", "weights")]
    of_steps = [numbers[0] for seed, what, rank, *numbers in found if what == "step"]
    of_batches = [numbers[0] for seed, what, rank, *numbers in found if what == "prepare"]
    of_epochs = [numbers for seed, what, rank, *numbers in found if what == "epoch"]
    epochs, count = 2 * 2 * 3, 2 * 2 * 3 * 8 * 2  # an epoch has 8 steps of 2 micro-batches
    assert (len(of_all), len(of_epochs)) == (8, epochs)
    assert len(of_steps) == len(of_batches) == count == len({*of_steps, *of_batches}) / 2
    for column in range(3):
        assert len({numbers[column] for numbers in of_all}) == 4
        assert len({numbers[column] for numbers in of_epochs}) == epochs


TRANSFORMS = """
import random
import numpy as np
torch.seed(), np.random.seed(), random.seed()  # forks have their parent's
class Augmented(Dataset):
    def __init__(self, images, labels):
        self.images, self.targets = images, labels
    def __len__(self):
        return len(self.images)
    def __getitem__(self, i):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return self.images[i].float() / 100 + noise, int(self.targets[i])
def load_data(args):
    whole = torch.utils.data.ConcatDataset(
        [Augmented(*load_torchvision(args.dataset, args.data_dir, train, False).tensors)
         for train in (True, False)]
    )
    train_set, test_set = torch.utils.data.random_split(whole, [643, 200])
    print("\\nsplit", sum(i * j for i, j in enumerate(test_set.indices)), flush=True)
    return train_set, test_set, 10
"""


def test_transforms_and_splits_of_the_data(fashion):
    """A random_split is the same on all ranks and in a resumed run. What a sample's transforms draw
    depends on the seed, the epoch and the sample: the losses are those of one process on any number
    of processes and workers, also in an epoch that is resumed in its middle."""
    flags = [*fashion, "--batch-size", 60, "--lr", 0.02, "--log-every", 5, "--epochs", 2]
    flags += ["--image-size", 28, "--output"]
    train(*flags, "one", "--workers", 0, more=TRANSFORMS)
    again = [*flags, "two", "--workers", 1, "--checkpoint-minutes", 0, "--resume"]
    stopped = TRANSFORMS + STOP_AT.format(epoch=1, step=5)
    text = run(COMPLETE, *again, more=stopped, status=1)
    assert place("two") == (1, 5)
    text += run(COMPLETE, *again, "--workers", 2, more=TRANSFORMS, processes=3)
    assert len({*re.findall("^split .*", text, re.M)}) == 1
    close("two", "one")
    assert metrics("one")[0]["train_loss"] != metrics("one")[1]["train_loss"]


STOP_AT = """
plain_save = Run.save
def save(run):
    plain_save(run)
    if (run.epoch, run.step) == ({epoch}, {step}):
        dist.barrier()
        raise SystemExit(1)
Run.save = save
"""


WORKERS = """
import os
torch.multiprocessing.set_start_method("forkserver", force=True)  # as Python 3.14 has it
class Seen(Dataset):
    def __init__(self, name, count):
        self.name, self.count = name, count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        with open("seen.txt", "a") as file:
            file.write(f"{self.name} {os.getpid()} of {os.getppid()}\\n")
        return torch.zeros(3, 32, 32), i % 2
def load_data(args):
    print("this is", os.getpid())
    return Seen("train", 24), Seen("test", 8), 2
plain_batches, plain_evaluate = TrainLoader.batches, evaluate
def batches(*words):
    print("fetches", words[1])
    return plain_batches(*words)
def evaluate(args, model, loader, device):
    print("tests", "one" if isinstance(loader, list) else "all")
    return plain_evaluate(args, model, loader, device)
TrainLoader.batches = batches
"""


def test_workers_live_on():
    """One for each loader, forked from this process and there until the end; and the next epoch's
    are told to fetch before the test begins."""
    flags = ["--batch-size", 8, "--workers", 1, "--epochs", 3, "--output", "out"]
    text = run(COMPLETE, *flags, processes=0, more=WORKERS)
    order = re.findall("^(?:fetches|tests) .*", text, re.M)
    wanted = "tests one,fetches 0,fetches 1,tests all,fetches 2,tests all,tests all"
    assert order == wanted.split(",")
    seen = Path("seen.txt").read_text().splitlines()
    assert seen.count(seen[-1]) == 3 * 8 and seen[-1].startswith("test ")
    [worker] = {line for line in seen if line.startswith("train ")}
    assert worker.endswith(f" of {re.findall('^this is (.*)', text, re.M)[0]}")  # forked


# ---- Normalization, and scores -------------------------------------------------------------------
INPUTS = """
plain = build_model
def build_model(args, inputs, classes):
    print("sees", inputs.double().sum().item(), inputs.double().std().item())
    return plain(args, inputs, classes)
"""


def test_init_keeps_the_normalization(fashion, monkeypatch, capsys):
    """A run with --pretrained, one that starts from its best.pt, and what both report, see the same
    inputs; also when the first is gone."""
    name = "shufflenet_v2_x0_5"
    url = models.get_model_weights(name).DEFAULT.url
    file = Path("hub/checkpoints", url.rpartition("/")[2])
    file.parent.mkdir(parents=True)
    torch.save(models.get_model(name).state_dict(), file)
    monkeypatch.setenv("TORCH_HOME", str(Path().resolve()))
    flags = [*fashion, "--model", name, "--batch-size", 320, "--epochs"]
    train(*flags, 1, "--pretrained", "--output", "first", more=INPUTS)
    train(*flags, 1, "--output", "random", more=INPUTS)
    seen = re.findall("^sees (.*)", capsys.readouterr().out, re.M)
    assert seen[0] != seen[1]
    init = [*flags, 1, "--init", "first/best.pt", "--lr", 0]
    train(*init, "--output", "second", "--resume", more=INPUTS)
    shutil.move("first", "gone")
    train(*init, "--output", "second", "--resume", "--epochs", 2, more=INPUTS)
    train(*flags, 1, "--output", "second", "--evaluate", more=INPUTS)
    seen = [seen[0], *re.findall("^sees (.*)", capsys.readouterr().out, re.M)]
    assert len(seen) == 4 and len(set(seen)) == 1
    assert checkpoint("second")["normalization"] == checkpoint("gone")["normalization"]


def test_evaluate(fashion, denied, out, capsys):
    """best.pt of --output, or a file: the row of metrics.csv, on any number of processes. Nothing
    is written. Other classes or another --image-size than it was trained with are refused."""
    row = min(metrics("out"), key=lambda row: row["test_loss"])
    line = "best.pt: test loss {test_loss:.4f} test accuracy {test_accuracy:.4f}\n".format(**row)
    before = helpers.content("out")
    flags = [*fashion, "--evaluate"]
    train(*flags, "--output", "out")
    assert capsys.readouterr().out.endswith(f"out/{line}")
    for text in together([*flags, "--output", "out"], [*flags, "--init", "out/best.pt"]):
        assert text.count(f"out/{line}") == 1 and "step" not in text.replace("per step", "")
    assert helpers.content("out") == before and not Path("runs").exists()
    denied("out/best.pt was trained with --image-size 32: test it", "--evaluate --image-size 24")
    denied("out/best.pt was trained with other classes: ", "--evaluate --dataset synthetic")
    Path("out/best.pt").unlink()
    denied("out/best.pt is missing", "--evaluate")


def test_evaluate_on_test(capsys):
    """With val/ and test/, best.pt is chosen on the former, and --evaluate tells of the latter."""
    write_folder("pictures", side=20)
    shutil.copytree("pictures/test", "pictures/val")
    a, b = (Path("pictures/test", name) for name in "ab")
    a.rename("c"), b.rename(a), Path("c").rename(b)  # each is wrong there
    flags = ["--dataset", "pictures", *TINY, "--lr", 0.01, "--model", "mlp", "--output", "out"]
    train(*flags, "--epochs", 3)
    assert metrics("out")[-1]["test_accuracy"] == 1
    train(*flags, "--evaluate")
    assert "test accuracy 0.0000" in capsys.readouterr().out.splitlines()[-1]
    Path("pictures/train/a/00000.jpg").rename("pictures/test/a/00000.jpg")  # trained on
    with pytest.raises(SystemExit):
        train(*flags, "--evaluate")
    says = "out/best.pt was trained with 16 training samples then, not 15 now: what is tested may"
    assert says in capsys.readouterr().err


# ---- Checkpoints ---------------------------------------------------------------------------------
SLOW_STEPS = """
import time
plain = prepare
def prepare(args, batch, device, train=False):
    if train:
        time.sleep(0.02)
    return plain(args, batch, device, train)
"""


def test_checkpoints_between_progress_lines(fashion):
    """Where a progress line takes far longer than --checkpoint-minutes, a kill loses little more
    than these; the run ends bit-identical, and draws the same random numbers."""
    flags = [*fashion, "--batch-size", 8, "--log-every", 1000, "--checkpoint-minutes", 0.01]
    flags += ["--epochs", 1, "--augment", "--resume", "--output"]
    jobs = start(COMPLETE, *flags, "out", more=SLOW_STEPS)
    helpers.wait_for("0 steps are done", *jobs)
    helpers.wait_until(lambda: place("out")[1] > 30 or jobs[0].status() is not None, pause=0.1)
    kill_all(jobs)
    step = place("out")[1]
    assert "samples/s" not in helpers.logs(jobs) and 30 < step < 80
    whole = [*flags, "whole", "--checkpoint-minutes", 5]
    text, _ = together([*flags, "out"], whole, more=SLOW_STEPS)
    assert f"out: 0 epochs and {step} steps are done" in text
    assert same(weights("out"), weights("whole"))
    close("out", "whole", 1e-6)


def test_saves_when_due_or_best_and_at_the_end(fashion, capsys, monkeypatch):
    """Not after each epoch: after those with the lowest test loss so far, told here, and the last.
    One that is due at an epoch's last step is made once."""
    plain = saving.Run.save

    def save(run):
        print("saves", run.epoch, run.step)
        plain(run)

    monkeypatch.setattr(saving.Run, "save", save)
    flags = [*fashion, "--batch-size", 320, "--output"]
    train(*flags, "out", "--epochs", 7, more=told(3, 1, 2, 2, 0, 2, 2))
    saved = re.findall("^saves (.*)", capsys.readouterr().out, re.M)
    assert saved == ["1 0", "2 0", "5 0", "7 0"] and len(metrics("out")) == 7
    often = ["--checkpoint-minutes", 0, "--log-every", 1]
    train(*flags, "often", "--epochs", 3, *often, more=told(1, 2, 3))
    saved = re.findall("^saves (.*)", capsys.readouterr().out, re.M)
    assert saved == ["0 1", "1 0", "1 1", "2 0", "2 1", "3 0"]

    def plan_save(run, step):  # once, in the middle of the last epoch, which is not the best
        return (run.epoch, step) == (1, 1), 1

    monkeypatch.setattr(saving.Run, "plan_save", plan_save)
    train(*flags, "middle", "--epochs", 2, more=told(1, 2))
    saved = re.findall("^saves (.*)", capsys.readouterr().out, re.M)
    assert saved == ["1 0", "1 1", "2 0"]


def test_a_frozen_batch_norm_stays_so(fashion):
    """Evaluation leaves each module in the mode in which it was."""
    frozen = (
        "plain_build = build_model\n"
        "def build_model(*words):\n"
        "    model = nn.Sequential(nn.BatchNorm2d(1), plain_build(*words))\n"
        "    model[0].eval()\n"
        "    return model\n"
    )
    train(*fashion, "--batch-size", 320, "--epochs", 2, "--output", "out", more=frozen)
    assert weights("out")["0.running_mean"] == 0 and weights("out")["0.num_batches_tracked"] == 0


def test_a_score_that_is_not_a_number():
    """It is never the best one and prevents no other, as the precision of an epoch in which nothing
    was found; nor does a column that an older row lacks."""

    def best(*values, name="score"):
        return saving.best_epoch([{name: value} for value in values], lambda row: -row["score"])

    nan = float("nan")
    assert best() == best(nan) == best(nan, nan) == 0
    assert best(nan, 0.1) == best(nan, 0.1, nan) == best(nan, 0.1, 0.1, 0.05) == 2
    assert best(0.3, nan, 0.4, nan) == 3
    rows = [{"test_loss": 1.0}, {"test_loss": 2.0, "score": 0.5}]
    assert saving.best_epoch(rows, lambda row: -row["score"]) == 2


KILLS = """
import os
plain_move = os.replace
def move(old, new):
    if str(new).endswith("{moment}") and rows_in(args.output / "checkpoint.pt") == {rows}:
        os.kill(os.getpid(), 9)
    plain_move(old, new)
def rows_in(path):
    return len(torch.load(path)["progress"]["metrics"]) if path.stat().st_size else 0
os.replace = move
"""


@pytest.mark.parametrize("moment", ["checkpoint.pt", "best.pt", "metrics.csv"])
def test_best_agrees_after_a_kill(fashion, moment):
    """Killed as the second epoch, the best so far, is written; the repeated one scores worse, as it
    may on a GPU. best.pt has the weights of the lowest test loss in metrics.csv."""
    flags = [*fashion, "--batch-size", 320, "--resume", "--output", "out", "--epochs"]
    rows = 1 if moment == "checkpoint.pt" else 2  # that are known then
    more = told(2, 1) + KILLS.format(moment=moment, rows=rows)
    statuses, text = helpers.finish(start(COMPLETE, *flags, 2, more=more, processes=0))
    assert statuses == [-9], text
    known = [row["test_loss"] for row in checkpoint("out")["progress"]["metrics"]]
    assert len(known) == rows
    train(*flags, 3, more=told(3, 3))
    rows = [row["test_loss"] for row in metrics("out")]
    assert len(rows) == 3 and rows[: len(known)] == pytest.approx(known)
    best = rows.index(min(rows)) + 1
    again = [*fashion, "--batch-size", 320, "--output", "again", "--epochs", best]
    train(*again)
    assert same(weights("out", "best.pt"), weights("again"))


def test_started_where_a_kill_left_nothing(fashion):
    """An empty checkpoint.pt, or optimized Python, which has no docstrings, stops nobody."""
    Path("out").mkdir()
    Path("out/checkpoint.pt").touch()
    train(*fashion, "--epochs", 1, "--output", "out", "--resume")
    assert place("out") == (1, 0)
    for name in "train.py", "pack_images.py":
        path = helpers.ROOT / "complete" / name
        exec(
            compile(path.read_text(), path, "exec", optimize=2), {"__name__": "", "__file__": path}
        )


MEANWHILE = """
import os, shutil
plain = {function}
def {function}(*words, **options):
    os.makedirs("out", exist_ok=True)
    shutil.copy("other/checkpoint.pt", "copy")
    os.replace("copy", "out/checkpoint.pt")
    return plain(*words, **options)
"""


def test_a_run_that_started_meanwhile(out, fashion):
    """While this one joins its group, another one has written its first checkpoint."""
    shutil.move("out", "other")
    with pytest.raises(SystemExit, match="another run has just started in out"):
        more = MEANWHILE.format(function="load_on_all_ranks")
        train(*fashion, "--output", "out", "--resume", "--epochs", 3, more=more)


@pytest.mark.parametrize("function", ["load_on_all_ranks", "evaluate", "train_epoch"])
def test_two_lives_in_one_folder(out, fashion, function):
    """Another process, as one on a node that was given up but lives, replaces checkpoint.pt: the
    one that finds this out ends before it writes anything."""
    shutil.copytree("out", "other")
    saved = checkpoint("out")
    saved["progress"]["seconds"] = 1.0  # of the same length
    torch.save(saved, "other/checkpoint.pt")
    before = helpers.content("other")
    more = MEANWHILE.format(function=function)
    with pytest.raises(SystemExit, match="out/checkpoint.pt was written by another process"):
        train(*fashion, "--output", "out", "--resume", "--epochs", 4, more=more)
    assert {Path("other", path.name): x for path, x in helpers.content("out").items()} == before

"""complete/: the number at the end is of the data that were meant. The ranks and a resumed run have
the same data, flags and code, --init the normalization that its weights were trained with,
--evaluate the scores of best.pt, and random numbers are drawn once."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import run as running
import start as starting
import torch
import train as script
from helpers import (
    COMPLETE,
    Warm,
    altered,
    checkpoint,
    close,
    content,
    done,
    free_port,
    metrics,
    parse,
    place,
    places,
    run,
    together,
    train,
    weights,
)
from test_images import pack, write_folder
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision import datasets

TINY = ["--image-size", 16, "--batch-size", 4, "--workers", 0]


# ---- The same data, flags and code on all ranks, and after a resume ------------------------------
TWO_KINDS = """
plain_count, counts_more = count, False
def uses_float16(args):
    global counts_more
    counts_more = args.log_every == 99 and dist.get_rank() == 1
    return args.amp and dist.get_rank() == 1  # as of an older GPU
def count(outputs, labels):
    return plain_count(outputs, labels) | ({"more": 1} if counts_more else {})
"""
OF_RANK_1 = {  # flags that it has besides, and what is said
    "--lr 0.1": "--lr is 0.001 on rank 0 and 0.1 on rank 1: start all machines with the same flags",
    "--epochs 0": "--epochs is 2 on rank 0 and 0 on rank 1",
    "--log-every 7": "--log-every is 100 on rank 0 and 7 on rank 1",
    "--dataset synthetic": "--dataset is pictures on rank 0 and synthetic on rank 1",
    "--dataset fewer/pictures": "training samples on rank 0, not 15 on rank 1",
    "--dataset fewer_tests/pictures": "4 test samples on rank 0, not 3 on rank 1",
    "--dataset other_class/pictures": "other classes: ['b'] on rank 0, ['c'] on rank 1",
    "--dataset other_name/pictures": "other test samples, by their paths or labels: ",
    "--output elsewhere": "epoch 1, step 0 on rank 0 and none on rank 1: put --output on a disk",
}
OF_ALL = {
    "--amp": "--amp is bfloat16 on rank 0 and float16 on rank 1: use GPUs of one kind",
    "--log-every 99": "the shape of count's more is None on rank 0 and [] on rank 1: return",
    "--seed 1": "out/checkpoint.pt was started with --seed 76, not 1: use the same flags",
    "--output new --batch-size 999": "--batch-size: the training set has only 16 samples",
    "--output new --dataset no": "neither a known name nor a folder",
    "--output new --dataset fashion-mnist --data-dir no": "no download (",
    "--output new --dataset two_tests": "only 2 test samples, for 3 processes",
}


def test_ranks_that_differ():
    """Refused in one line before anything is written; so is what is wrong on all ranks alike."""
    flags = [*TINY, "--batch-size", 6, "--resume", "--dataset"]
    write_folder("pictures", tests=4, side=20)
    write_folder("two_tests", tests=2, side=20)
    train(*flags, "pictures", "--epochs", 1, "--output", "out")
    for other in "fewer", "fewer_tests", "other_class", "other_name":
        shutil.copytree("pictures", f"{other}/pictures")
    Path("fewer/pictures/train/a/00000.jpg").unlink()
    Path("fewer_tests/pictures/test/a/00018.jpg").unlink()
    Path("other_name/pictures/test/a/00018.jpg").rename("other_name/pictures/test/a/9.jpg")
    for part in "train", "test":
        Path("other_class/pictures", part, "b").rename(Path("other_class/pictures", part, "c"))
    flags += ["pictures", "--epochs", 2, "--output", "out"]

    def of_rank_1(own):
        return lambda rank: [*flags, *own.split()] if rank == 1 else flags

    runs = [*map(of_rank_1, OF_RANK_1), *([*flags, *every.split()] for every in OF_ALL)]
    before = content("out")
    texts = together(*runs, more=TWO_KINDS, processes=3, status=2)
    for says, text in zip([*OF_RANK_1.values(), *OF_ALL.values()], texts, strict=True):
        assert says in text and text.count("error: ") == 1 and "Traceback" not in text, text
    assert content("out") == before and not Path("new").exists() and not Path("elsewhere").exists()


def test_machines_with_other_code(fashion):
    """One of the files of the script was edited on one of them."""
    first, second = altered(COMPLETE), altered(COMPLETE)
    with open(second.with_name("images.py"), "a") as file:
        file.write("# edited\n")
    runs, jobs = [[free_port(), [*fashion, "--epochs", 1, "--output", "out"]]], []
    for path, rank in zip((first, second), places(2)):
        jobs.append(Warm(path, runs, f"{rank['RANK']}.log", rank))
    text = done(jobs, status=2)
    assert re.search(r"error: images.py is \w+ on rank 0 and \w+ on rank 1: copy", text), text


def test_resumed_with_other_files(refused, monkeypatch):
    """Another number of images, another class, or another name of an image, by which another one is
    every tenth: refused. The folder may be moved, or packed."""
    write_folder("pictures", side=20)
    shutil.move("pictures/test", "test")
    flags = [*TINY, "--resume", "--output", "out"]
    train("--dataset", "pictures", *flags, "--epochs", 1)
    for old, new, says in (
        ("pictures/train/b", "pictures/train/c", "other classes: ['b'] then, ['c'] now"),
        ("pictures/train/a/00004.jpg", "pictures/train/a/0.jpg", "other training samples, by"),
        ("test", "pictures/test", "14 training samples then, not 16 now"),
    ):
        shutil.move(old, new)
        says = f"out/checkpoint.pt was started with {says}"
        refused(says, COMPLETE, "--dataset", "pictures", *flags)
        shutil.move(new, old)
    Path("moved").mkdir()
    pack("pictures", "moved/pictures", "--side", 16)
    train("--dataset", "moved/pictures", *flags, "--epochs", 2)
    shutil.rmtree("moved/pictures")
    shutil.move("pictures", "moved/pictures")
    train("--dataset", "moved/pictures", *flags, "--epochs", 3)
    monkeypatch.chdir("moved/pictures")
    for epochs, folder in (4, "."), (5, "../pictures/"), (6, "train/.."):
        train("--dataset", folder, *flags[:-1], "../../out", "--epochs", epochs)
    assert place("../../out") == (6, 0)


def test_what_identifies_a_dataset():
    """Paths without the folder, and labels; the part that a Subset takes, the parts of a
    ConcatDataset."""
    own = script.load_data(parse("--dataset", write_folder("pictures", side=20)))[0]
    shutil.copytree("pictures", "moved")
    files, moved = (datasets.ImageFolder(f"{folder}/train") for folder in ("pictures", "moved"))
    relabeled, boxes = copy.copy(own), copy.copy(own)
    relabeled.targets = own.targets[::-1]  # as in a table that was corrected on one machine
    boxes.targets = [[1.0] * (i % 3) for i in range(len(own))]
    tensors = [TensorDataset(torch.zeros(4, 1), torch.arange(4) // n) for n in (2, 3)]
    others = [*tensors, ConcatDataset(tensors), ConcatDataset(tensors[::-1]), relabeled, boxes]
    others += [Subset(files, range(8)), Subset(files, range(1, 9)), range(4)]
    found = [starting.fingerprint(dataset)["hash"] for dataset in [own, files, moved, *others]]
    assert found[0] == found[1] == found[2] and len(set(found)) == 1 + len(others)


# ---- Random numbers ------------------------------------------------------------------------------
SEEDS = """
import random
import numpy as np
def seen(seed, *names):
    def seed_and_tell(*words, **options):
        seed(*words, **options)
        numbers = torch.rand(()).item(), np.random.rand(), random.random()
        if words[0] in names:
            print(f"\\nseed {words[0]}: {numbers}\\n", end="", flush=True)
        return seed(*words, **options)
    return seed_and_tell
import loaders, start
of_all = "data", "weights", "prepare"
start.seed_everything = loaders.seed_everything = seen(loaders.seed_everything, *of_all)
loaders.seed_torch = seen(loaders.seed_torch, "step")
"""


def test_seeds_share_nothing(fashion):
    """Of two seeds, with two epochs on two ranks: what a step draws is drawn once, and what
    `prepare` draws, of Python's and numpy's numbers too. Data and weights are those of all."""
    flags = [*fashion, "--epochs", 2, "--batch-size", 160, "--accumulate", 2, "--output"]
    runs = [[*flags, f"out-{seed}", "--seed", seed] for seed in (1, 2)]
    text = "".join(together(*runs, more=SEEDS))
    drawn = {"data": [], "weights": [], "prepare": [], "step": []}
    for what, *numbers in re.findall(r"^seed (\w+): \((.*), (.*), (.*)\)$", text, re.M):
        drawn[what].append(numbers)
    counts = {what: len(numbers) for what, numbers in drawn.items()}
    lives = 2 * 2  # of two ranks with each seed; an epoch has four steps of two micro-batches
    steps = lives * 2 * 8
    assert counts == {"data": lives, "weights": lives, "prepare": steps, "step": steps}
    torchs = [numbers[0] for numbers in drawn["step"] + drawn["prepare"]]
    assert len(set(torchs)) == len(torchs)
    for column in range(3):  # of torch, numpy and Python
        assert len({numbers[column] for numbers in drawn["data"] + drawn["weights"]}) == 4
        assert len({numbers[column] for numbers in drawn["prepare"]}) == steps


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
    parts = load_images(args.dataset, args.data_dir, args.image_size, False)
    whole = torch.utils.data.ConcatDataset([Augmented(*part.tensors) for part in parts])
    train_set, test_set = torch.utils.data.random_split(whole, [643, 200])
    total = sum(i * j for i, j in enumerate(test_set.indices))
    print(f"\\nsplit {total}\\n", end="", flush=True)
    return train_set, test_set, 10
plain_save = Run.save
def save(run):
    plain_save(run)
    if args.workers == 1 and (run.progress.epoch, run.progress.step) == (1, 5):
        dist.barrier()
        raise SystemExit(1)
Run.save = save
"""


def test_transforms_and_splits_of_the_data(fashion):
    """A random_split is the same on all ranks and in a resumed run. What a sample's transforms draw
    depends on the seed, the epoch and the sample: the losses are those of one process on any number
    of processes and workers, also in an epoch that is resumed in its middle."""
    flags = [*fashion, "--batch-size", 60, "--lr", 0.02, "--log-every", 5, "--epochs", 2]
    flags += ["--image-size", 28, "--checkpoint-minutes", 0, "--resume", "--output"]
    train(*flags, "one", "--workers", 0, more=TRANSFORMS)
    text = run(COMPLETE, *flags, "two", "--workers", 1, more=TRANSFORMS, status=1)
    assert place("two") == (1, 5)
    text += run(COMPLETE, *flags, "two", "--workers", 2, more=TRANSFORMS, processes=3)
    assert len({*re.findall("^split .*", text, re.M)}) == 1
    close("two", "one")
    assert metrics("one")[0]["train_loss"] != metrics("one")[1]["train_loss"]


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


# ---- Weights to start from, and scores -----------------------------------------------------------
SEES = """
plain = build_model
def build_model(args, inputs, classes):
    print(f"\\nsees {inputs.sum().item()}\\n", end="", flush=True)
    return plain(args, inputs, classes)
"""


@pytest.mark.slow
def test_pretrained(data, pretrained, capsys):
    """A run has torchvision's weights on all ranks, but for the last layer, which is named. Where
    it is resumed, where another run starts from its best.pt, and in the scores of that, inputs
    are normalized as for these weights; the files that it began with are not needed later."""
    name, file = pretrained
    torchvisions = torch.load(file)
    flags = ["--dataset", data / "pictures", "--model", name, "--batch-size", 48, "--workers", 0]
    flags += ["--lr", 0, "--resume", "--epochs"]
    first = [*flags, 1, "--pretrained", "--output", "first"]
    text = run(COMPLETE, *first, more=SEES)
    assert text.count("--pretrained: new and random are fc.weight, fc.bias\n") == 1
    trained = weights("first")
    for key, weight in torchvisions.items():
        if not key.startswith("fc.") and "running_" not in key and "num_batches" not in key:
            assert torch.equal(trained[key], weight), key
    assert trained["fc.weight"].shape == (3, 1024)

    file.unlink()
    train(*first, "--epochs", 2, more=SEES)
    second = [*flags, 1, "--init", "first/best.pt", "--output", "second"]
    text += run(COMPLETE, *second, more=SEES)
    shutil.move("first", "gone")
    train(*second, "--epochs", 2, more=SEES)
    train(*flags, 1, "--output", "second", "--evaluate", more=SEES)
    text += capsys.readouterr().out
    seen = re.findall("^sees (.*)", text, re.M)
    assert len(seen) == 2 + 1 + 2 + 1 + 1 and len(set(seen)) == 1, text
    assert checkpoint("second")["normalization"] == checkpoint("gone")["normalization"]
    train(*flags, 1, "--output", "random", more=SEES)
    assert re.findall("^sees (.*)", capsys.readouterr().out, re.M) != seen[:1]


def test_weights_that_do_not_fit():
    """All but the last layer must; that one, if the new model is to have a new head. Others would
    stay random: as the positions of a transformer for larger images. Said with what to read."""
    old, new, grey = script.Net(3, 32, 10), script.Net(3, 32, 7), script.Net(1, 32, 7)
    says = "best.pt: fc3.weight has another shape here (other classes?): new_head="
    assert says in starting.load_fitting(new, old.state_dict(), "best.pt", new_head=False)
    assert not torch.equal(new.fc1.weight, old.fc1.weight)
    assert starting.load_fitting(new, old.state_dict(), "best.pt", new_head=True) == ""
    assert torch.equal(new.fc1.weight, old.fc1.weight) and new.fc3.weight.shape == (7, 84)
    for new_head in True, False:
        problem = starting.load_fitting(grey, old.state_dict(), "best.pt", new_head)
        assert "best.pt is not of this model: conv1.weight" in problem


def test_init(fashion, monkeypatch):
    """The weights of another run, whichever of its files has them, or of a plain state_dict; also
    where this machine has no GPU, and they are of one."""
    flags = [*fashion, "--batch-size", 320, "--epochs", 1]
    train(*flags, "--output", "first")
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(weights("first"), "plain.pt")
    torch.save(weights("first"), "legacy.pt", _use_new_zipfile_serialization=False)
    files = ["first/model.pt", "first/best.pt", "first/checkpoint.pt", "plain.pt", "legacy.pt"]
    flags += ["--lr", 0, "--seed", 1, "--init"]
    texts = together(*([*flags, file, "--output", f"from-{Path(file).stem}"] for file in files))
    assert ["has no normalization" in text for text in texts] == [False] * 3 + [True] * 2
    for file in files:
        found = weights(f"from-{Path(file).stem}")
        assert all(torch.equal(found[key], weight) for key, weight in weights("first").items())


def test_evaluate(fashion, denied, out, capsys):
    """best.pt of --output, or a file: the row of metrics.csv, on any number of processes. Nothing
    is written. Other classes or another --image-size than it was trained with are refused."""
    row = min(metrics("out"), key=lambda row: row["test_loss"])
    line = "best.pt: test loss {test_loss:.4f} test accuracy {test_accuracy:.4f}\n".format(**row)
    before = content("out")
    flags = [*fashion, "--evaluate"]
    train(*flags, "--output", "out")
    caveat = "best.pt was chosen on these images: on other images, expect slightly lower scores\n"
    assert capsys.readouterr().out.endswith(f"out/{line}{caveat}")
    for text in together([*flags, "--output", "out"], [*flags, "--init", "out/best.pt"]):
        assert text.count(f"out/{line}") == 1 and "step" not in text.replace("per step", "")
    assert content("out") == before and not Path("runs").exists()
    denied("out/best.pt was trained with --image-size 32: test it", "--evaluate --image-size 24")
    denied("out/best.pt was trained with other classes: ", "--evaluate --dataset synthetic")
    Path("out/best.pt").unlink()
    denied("out/best.pt is missing", "--evaluate")


def test_evaluate_on_test(capsys):
    """With val/ and test/, best.pt is chosen on the former, and --evaluate tells of the latter. It
    is refused where one of the images to train on has moved to test/."""
    write_folder("pictures", side=20)
    shutil.copytree("pictures/test", "pictures/val")
    a, b = (Path("pictures/test", name) for name in "ab")
    a.rename("c"), b.rename(a), Path("c").rename(b)  # each is wrong there
    flags = ["--dataset", "pictures", *TINY, "--lr", 0.01, "--model", "mlp", "--output", "out"]
    train(*flags, "--epochs", 3)
    assert metrics("out")[-1]["val_accuracy"] == 1
    train(*flags, "--evaluate")
    assert "test accuracy 0.0000" in capsys.readouterr().out.splitlines()[-1]
    for folder in "elsewhere/pictures", "other/test":
        shutil.copytree("pictures/test", f"{folder}/test")  # without train/
        with pytest.raises(SystemExit, match="2"):
            train(*flags[2:], "--dataset", folder, "--overwrite")
        assert "has no train/, which only --evaluate can do" in capsys.readouterr().err
        train(*flags[2:], "--dataset", folder, "--evaluate", "--batch-size", 9)
        said = capsys.readouterr().out
        assert "test accuracy 0.0000" in said and "\n8 test samples, 2 classes" in said, said
    Path("pictures/train/a/00000.jpg").rename("pictures/test/a/00000.jpg")
    with pytest.raises(SystemExit):
        train(*flags, "--evaluate")
    says = "out/best.pt was trained with 16 training samples then, not 15 now: what is tested may"
    assert says in capsys.readouterr().err


def test_evaluation_changes_no_mode(fashion, monkeypatch):
    """A batch norm that is frozen stays so; one that learns its averages goes on after an epoch."""
    plain = script.build_model

    def build_model(*words):
        frozen = torch.nn.BatchNorm2d(1).eval()
        return torch.nn.Sequential(frozen, torch.nn.BatchNorm2d(1), plain(*words))

    monkeypatch.setattr(script, "build_model", build_model)
    train(*fashion, "--batch-size", 320, "--epochs", 2, "--output", "out")
    assert weights("out")["0.num_batches_tracked"] == 0
    assert weights("out")["1.num_batches_tracked"] == 4


def test_a_score_that_is_not_a_number():
    """It is never the best one and prevents no other, as the precision of an epoch in which nothing
    was found; nor does a column that an older row lacks."""

    def best(*values):
        return running.best_of([{"score": value} for value in values], lambda row: -row["score"])

    nan = float("nan")
    assert best() == best(nan) == best(nan, nan) == 0
    assert best(nan, 0.1) == best(nan, 0.1, nan) == best(nan, 0.1, 0.1, 0.05) == 2
    assert best(0.3, nan, 0.4, nan) == 3
    rows = [{"loss": 1.0}, {"loss": 2.0, "score": 0.5}]
    assert running.best_of(rows, lambda row: -row["score"]) == 2

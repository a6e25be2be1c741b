"""own_loop/: before.py is a loop on one GPU; after.py is the same on any number of processes."""

import random
import re
import runpy
import time
from pathlib import Path

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    altered,
    content,
    done,
    free_port,
    here,
    kill_all,
    places,
    run,
    start,
)
from same_text import ROOT

BEFORE, AFTER = "own_loop/before.py", "own_loop/after.py"
# Few images, and a small network. In batches of 12, all but one image of the last batch are there.
FEW_DISCS = """
AllDiscs, WideUNet, plain_average = Discs, UNet, get_ema_multi_avg_fn

def Discs(count, first, augment=False):
    return AllDiscs(31 if first else 107, first, augment)

def UNet():
    return WideUNet(width=4)

def get_ema_multi_avg_fn(decay):
    return plain_average(0.9)
"""
# Without what depends on a process's share, every number of processes computes the same.
ALIKE = f"""
{FEW_DISCS}
few = Discs

def Discs(count, first, augment=False):
    return few(count, first)

nn.BatchNorm2d = lambda channels: nn.GroupNorm(1, channels)
"""
FLAGS = ["--batch-size", 12, "--lr", 0.01, "--workers", 0]


def before(output, *flags, more=FEW_DISCS):
    return start(BEFORE, *FLAGS, "--output", output, *flags, processes=0, more=more)


def after(output, *flags, processes=2, more=FEW_DISCS):
    return start(AFTER, *FLAGS, "--output", output, *flags, processes=processes, more=more)


def alone(name, *flags, more=FEW_DISCS, **options):
    """Run a script as the only rank, in the test's own process."""
    place = places(1)[0] | {"MASTER_PORT": free_port()} | options
    here(name, *FLAGS, *flags, more=more, **place)


def epochs(text):
    """{epoch: (loss, val, IoU)} of what was printed, of each epoch's last line."""
    lines = re.findall(r"^epoch (\d+): loss (\S+) val (\S+) IoU (\S+)$", text, re.M)
    return {int(epoch): tuple(map(float, scores)) for epoch, *scores in lines}


def last(output, name="last.pt"):
    return torch.load(Path(output, name))


def check_same(a, b, **tolerance):
    """Two files have the same content, bit by bit; or the same tensors, up to rounding."""
    names = "scheduler", "scaler", "progress"
    numbers = [[content.pop(name, 0) for name in names] for content in (a, b)]
    assert tolerance or numbers[0] == numbers[1]
    torch.testing.assert_close(a, b, **tolerance or {"rtol": 0, "atol": 0})


ORDER = """
class Shuffle(torch.utils.data.RandomSampler):  # that of before.py's DataLoader
    def __init__(self, dataset, drop_last):
        super().__init__(dataset)
    def set_epoch(self, epoch):
        pass
DistributedSampler = Shuffle
"""


def test_after_is_before():
    """Both learn. On one process and in the same order, after.py has before.py's weights bit by
    bit, and the rest of its checkpoint."""
    flags = ["--epochs", 3, "--lr", 0.03]
    scores = epochs(done(before("one", *flags)))
    assert scores == epochs(done(after("two", *flags, processes=1, more=FEW_DISCS + ORDER)))
    assert scores[2][0] < scores[0][0] - 0.3 and scores[2][2] > scores[0][2]
    for name in "last.pt", "best.pt":
        check_same(last("one", name), last("two", name))
    filters = last("two")["model"]["merge.0.weight"]
    assert filters.is_contiguous(memory_format=torch.channels_last)


VALID = """
plain_sample = AllDiscs.__getitem__

def sample(self, i):  # of most images, most pixels are ignored
    image, mask = plain_sample(self, i)
    mask[: 60 * (i % 3)] = IGNORED
    return image, mask

AllDiscs.__getitem__ = sample
"""


SCALES = """
plain_scaler = torch.amp.GradScaler
torch.amp.GradScaler = lambda device, enabled: plain_scaler(device)  # as on a GPU
"""


def test_processes():
    """However the valid pixels fall on the ranks, 1, 2 and 3 processes compute the same, also where
    the loss is scaled. A run that ends on two and is resumed on three ends where one process does.
    """
    more = ALIKE + VALID
    whole = epochs(done(after("whole", "--epochs", 2, processes=1, more=more)))
    text = done(after("out", "--epochs", 1, more=more + SCALES))
    text += done(after("out", "--epochs", 2, "--resume", processes=3, more=more + SCALES))
    for epoch, scores in whole.items():
        assert epochs(text)[epoch] == pytest.approx(scores, abs=1e-3), (epoch, whole, text)
    check_same(last("whole"), last("out"), rtol=1e-3, atol=1e-4)


TELLS = """
class Tells(WideUNet):
    def train(self, mode=True):
        if mode:
            print("seed", torch.initial_seed(), flush=True)
        return super().train(mode)

def UNet():
    return Tells(width=4)
"""


def test_batch_norm():
    """With batch norm and augmentation, which differ by rank: all evaluate rank 0's average of the
    weights, each image once, and that is what best.pt has. Rank 0 alone prints."""
    text = done(after("out", "--epochs", 2, more=FEW_DISCS + TELLS))
    assert len(set(re.findall(r"^seed (\d+)", text, re.M))) == 2 * 2
    assert text.count("epoch 1:") == 1 and "destroy_process_group" not in text
    script = runpy.run_path(str(ROOT / "own_loop" / "before.py"))
    model, images = script["UNet"](width=4).eval(), script["Discs"](31, 2_000)
    images, masks = map(torch.stack, zip(*(images[i] for i in range(31))))
    ema = torch.load("out/last.pt")["ema"]
    ema = {key.removeprefix("module."): value for key, value in ema.items() if "module." in key}
    best = max(epochs(text).values(), key=lambda scores: scores[2])
    for weights, scores in (ema, epochs(text)[1]), (torch.load("out/best.pt"), best):
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(images)
        valid, found = masks != 255, logits.argmax(1)
        loss = F.cross_entropy(logits, masks, ignore_index=255)
        parts = []  # each class's Dice coefficient of each image, and its IoU over all images
        for i in range(3):
            truth, predicted = (masks == i) & valid, logits.softmax(1)[:, i] * valid
            sizes = truth.sum((1, 2)) + predicted.sum((1, 2))
            dice = (2 * (truth * predicted).sum((1, 2)) + 1) / (sizes + 1)
            intersection = ((found == i) & truth).sum() / ((((found == i) & valid) | truth).sum())
            parts.append((1 - dice.mean().item(), intersection.item()))
        dice, iou = (sum(values) / 3 for values in zip(*parts))
        assert scores[1:] == pytest.approx((loss.item() + dice, iou), abs=6e-5)


LOWERS = """
from torch.optim import lr_scheduler
plateau = lr_scheduler.ReduceLROnPlateau
lr_scheduler.ReduceLROnPlateau = lambda optimizer, *_, **__: plateau(optimizer, "min", patience=0)
"""


@pytest.mark.slow
def test_restored():
    """A run that is killed at random times and resumed on as many processes ends with the same
    bits: weights, their average, AdamW's, the schedule (here a better IoU lowers the rate) and
    counts."""
    done(after("whole", "--epochs", 5, more=FEW_DISCS + LOWERS))
    for _ in range(2):
        jobs = after("killed", "--epochs", 5, "--resume", more=FEW_DISCS + LOWERS)
        helpers.wait_for("epoch ", *jobs)
        time.sleep(random.random())
        kill_all(jobs)
    done(after("killed", "--epochs", 5, "--resume", more=FEW_DISCS + LOWERS))
    assert last("whole")["optimizer"]["param_groups"][0]["lr"] < 0.01
    for name in "last.pt", "best.pt":
        check_same(last("whole", name), last("killed", name))


NOTHING = """
plain_sample, plain_forward, few = AllDiscs.__getitem__, WideUNet.forward, Discs
AllDiscs.__getitem__ = lambda self, i: (plain_sample(self, i)[0], torch.zeros(64, 64).long())
others = torch.tensor([-1e9, 0, -1e9])[:, None, None]
WideUNet.forward = lambda self, x: plain_forward(self, x) + others

def Discs(count, first, augment=False):
    return few(count, first) if count > 400 else AllDiscs(1, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [before, after])
def test_early_stop(script):
    """All ranks stop together, and a resumed run does not begin again. Here nothing is there to be
    found, nothing is found, and there are fewer images for validation than processes."""
    flags = ["out", "--epochs", 99, "--patience", 2, "--resume"]
    text = done(script(*flags, more=FEW_DISCS + NOTHING))
    assert [scores[2] for scores in epochs(text).values()] == [0, 0, 0]
    stopped = [last("out", name) for name in ("last.pt", "best.pt")]
    assert not epochs(done(script(*flags, more=FEW_DISCS + NOTHING)))
    for name, old in zip(("last.pt", "best.pt"), stopped):
        check_same(last("out", name), old)


KILLED = """
plain = save

def save(content, path):
    plain(content, path)
    raise KeyboardInterrupt
"""
NAN = """
import itertools
plain, passes = dice_loss, itertools.count(1)

def dice_loss(logits, masks):  # in the last of 8 steps, after the average's last update
    is_last = logits.requires_grad and next(passes) % 8 == 0
    return plain(logits, masks) * (math.nan if is_last else 1)
"""


@pytest.mark.parametrize("name", [BEFORE, AFTER])
def test_files(name):
    """A kill between last.pt and best.pt is made good. Weights that are not finite replace no file,
    not even if their average still is."""

    def resume(epochs, more=FEW_DISCS):
        alone(name, "--epochs", epochs, "--output", "out", "--resume", more=more)

    with pytest.raises(KeyboardInterrupt):
        resume(1, FEW_DISCS + KILLED)
    assert helpers.files("out") == ["last.pt"]
    resume(1)
    alone(name, "--epochs", 1, "--output", "whole")
    check_same(last("out", "best.pt"), last("whole", "best.pt"))
    saved = content("out")
    with pytest.raises(SystemExit, match=r"epoch 1: loss nan, val \d"):
        resume(2, FEW_DISCS + NAN)
    assert content("out") == saved


ELSEWHERE = """
if os.environ["RANK"] == "1":  # its machine has a disk of its own
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
"""
MEANWHILE = """
narrow = UNet

def UNet():  # meanwhile, another run has made its folder
    os.makedirs("new", exist_ok=True)
    return narrow()
"""
AT_ONCE = """
plain_mkdir = Path.mkdir
def mkdir(path, **options):  # another run makes its folder at this moment
    os.makedirs("at_once")
    plain_mkdir(path, **options)
Path.mkdir = mkdir
"""


def test_refusals():
    """Nothing is overwritten without --resume; each refusal names its flag or what to do. Of two
    runs that start at once, the second is refused."""
    Path("out").mkdir()
    Path("out", "best.pt").touch()
    says = "out exists: add --resume, or change --output\n"
    for jobs, count in (before("out"), 1), (after("out", more=FEW_DISCS + ELSEWHERE), 2):
        assert done(jobs, 1).count(says) == count
    for begin, count in (before, 1), (after, 2):
        text = done(begin("new", more=FEW_DISCS + MEANWHILE), 1)
        assert text.count(says.replace("out exists", "new exists")) == count, text
        Path("new").rmdir()  # which is empty
        statuses, text = helpers.finish(begin("at_once", more=FEW_DISCS + AT_ONCE))
        assert 0 not in statuses and "FileExistsError" in text, text
        Path("at_once").rmdir()
    with pytest.raises(KeyError) as error:
        here(AFTER, RANK=0)
    assert "Start it with torchrun" in str(error.traceback[-2].statement)
    text = done(after("odd", "--batch-size", 13), status=1)
    assert text.count("--batch-size must be a multiple of the 2 processes\n") == 2
    assert helpers.files("out") == ["best.pt"] and not Path("odd").exists()


@pytest.mark.slow
def test_machines_that_differ():
    """All ranks have rank 0's flags and checkpoint, also one whose machine has neither."""
    more = (
        FEW_DISCS + "if os.environ['RANK'] == '1': sys.argv += '--epochs 9 --output mine'.split()\n"
    )
    text = done(after("out", "--epochs", 1, "--resume", more="import sys\n" + more))
    assert [*epochs(text)] == [0] and not Path("mine").exists()
    more += "if os.environ['RANK'] == '1': sys.argv.remove('--resume')\n"
    text = done(after("out", "--epochs", 2, "--resume", more="import sys\n" + more))
    assert [*epochs(text)] == [1]
    text = done(after("out", "--epochs", 3, "--resume", more=FEW_DISCS + ELSEWHERE))
    assert [*epochs(text)] == [2]


EMULATED = """
plain_scaler = torch.amp.GradScaler
torch.amp.GradScaler = lambda device, enabled: plain_scaler(device, enabled=False)
torch.emu.set_device = lambda device: torch.accelerator.set_device_index(device.index)
"""


@pytest.mark.slow
def test_cards(monkeypatch):
    """On a make-believe accelerator of two cards, each rank uses its own, and waits for it neither
    in a copy of images nor elsewhere in a step, but in every fifth, for the average (not in the
    first one of all)."""
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    Path("report").mkdir()
    path = altered(AFTER, "cuda", "emu", "nccl", "gloo", more=ALIKE + EMULATED)
    monkeypatch.setenv("EMULATED_CARDS", "2")
    monkeypatch.setenv("EMULATED_REPORT", str(Path("report").resolve()))
    run(path, *FLAGS, "--epochs", 2, "--output", "cards", processes=2)
    told = [path.read_text() for path in Path("report").iterdir()]
    assert sorted(re.findall(r"uses card (\d)", text) for text in told) == [["0"], ["1"]]
    for text in told:  # before the first step, and after each of two times eight
        parts = re.split(r"^.* updated$", text, flags=re.M)
        waits = [i for i, part in enumerate(parts) if "waits" in part]
        assert waits == [0, 6, 8, 9, 14, 16], text  # 8 and 16 are the scores
    monkeypatch.delenv("EMULATED_CARDS")
    done(after("cpu", "--epochs", 2, processes=1, more=ALIKE))
    check_same(last("cards"), last("cpu"), rtol=1e-3, atol=1e-4)

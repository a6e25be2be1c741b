"""own_loop/: before.py is a loop on one GPU; after.py is the same on any number of processes."""

import random
import re
import runpy
import shutil
import time
from pathlib import Path

import helpers
import pytest
import torch
from helpers import Warm, by_hand, changed, done, kill, kill_all, logs, marked, wait_until
from same_text import OWN, compare, definitions

# Few images and a small network. In batches of 12, all but one image of the last batch are there.
FEW = ["Discs(2_000, 0", "Discs(107, 0", "Discs(400, 2_000)", "Discs(31, 2_000)"]
FEW += ["width=16", "width=4", "avg_fn(0.99)", "avg_fn(0.9)"]
# Without what depends on a process's share, every number of processes computes the same.
ALIKE = [*FEW, "nn.BatchNorm2d(outputs)", "nn.GroupNorm(1, outputs)"]
ALIKE += ["augment=True", "augment=False"]
FLAGS = ["--batch-size", 12, "--lr", 0.01, "--workers", 0]


def before(output, *flags, changes=FEW):
    path = changed("own_loop/before.py", *changes)
    return [Warm(path, [*FLAGS, "--output", output, *flags], f"{time.monotonic_ns()}.log")]


def after(output, *flags, processes=2, changes=FEW):
    path = changed("own_loop/after.py", *changes)
    return by_hand(path, *FLAGS, "--output", output, *flags, processes=processes)


def epochs(text):
    """{epoch: (loss, val, IoU)} of what was printed, of each epoch's last line."""
    lines = re.findall(r"^epoch (\d+): loss (\S+) val (\S+) IoU (\S+)$", text, re.M)
    return {int(epoch): tuple(map(float, scores)) for epoch, *scores in lines}


def last(output, name="last.pt"):
    """All tensors and numbers of a file, in a dictionary by their place."""
    found = {}

    def walk(place, value):
        if isinstance(value, (dict, list, tuple)):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                walk((*place, key), part)
        else:
            found[place] = value

    walk((), torch.load(Path(output, name)))
    return found


def same(a, b):
    """Bit by bit."""
    return a.keys() == b.keys() and all(
        torch.equal(x, b[key]) if isinstance(x, torch.Tensor) else x == b[key]
        for key, x in a.items()
    )


def near(a, b):
    """Up to rounding."""
    assert a.keys() == b.keys()
    for key, x in a.items():
        if isinstance(x, torch.Tensor):
            assert torch.allclose(x, b[key], rtol=1e-3, atol=1e-4), key
        elif isinstance(x, float):
            assert x == pytest.approx(b[key], abs=2e-3), key
        else:
            assert x == b[key], key


def test_same_text():
    """What DDP does not change is the same in both files."""
    assert compare(OWN) == []
    assert definitions(OWN[0]).keys() == definitions(OWN[1]).keys()
    copy = changed("own_loop/after.py", "x = self.up(", "x = 2 * self.up(", "1e-3", "1e-2")
    assert compare([OWN[0], copy]) == ["--lr: after.py", "UNet: after.py"]


def test_after_is_before():
    """Both learn. On one process, after.py has before.py's weights bit by bit, and the rest of its
    checkpoint, once before.py has the order of DistributedSampler."""
    sampler = "sampler = torch.utils.data.DistributedSampler(train_set, 1, 0)\n    train_loader"
    order = [*FEW, "shuffle=True", "sampler=sampler", "    train_loader =", f"    {sampler} ="]
    order += ["        model.train()", "        sampler.set_epoch(epoch)\n        model.train()"]
    text = done(before("one", "--epochs", 5, changes=order))
    assert epochs(done(after("two", "--epochs", 5, processes=1))) == epochs(text)
    assert epochs(text)[4][0] < epochs(text)[0][0] - 0.2 and epochs(text)[4][2] > 0.5
    assert same(last("one"), last("two")) and same(last("one", "best.pt"), last("two", "best.pt"))


@pytest.mark.slow
def test_processes():
    """1, 2 and 3 processes compute the same. A run that is killed, and resumed on another number,
    ends there too, in a folder where slurm/complete.sh has put a copy of the script."""
    whole = epochs(done(after("1", "--epochs", 4, processes=1, changes=ALIKE)))
    Path("killed").mkdir()
    shutil.copy("own_loop/after.py", "killed")
    texts = []
    for count, processes in (1, 2), (3, 3), (4, 1):
        jobs = after("killed", "--resume", processes=processes, changes=ALIKE)
        helpers.wait_for(f"epoch {count - 1}: ", *jobs)
        kill_all(jobs)
        texts.append(logs(jobs))
    found = epochs("\n".join(texts))
    for epoch, scores in whole.items():
        assert found[epoch] == pytest.approx(scores, abs=2e-3), (epoch, whole, found)
    done(after("2", "--epochs", 4, changes=ALIKE))
    near(last("1"), last("2"))


def test_batch_norm():
    """With batch norm and augmentation, which differ by rank: all evaluate rank 0's average of the
    weights, each image once, and that is what best.pt has. Rank 0 alone prints."""
    start = "        model.train()\n"
    show = [start, f"        print('seed', torch.initial_seed(), flush=True)\n{start}"]
    text = done(after("out", "--epochs", 3, changes=[*FEW, *show]))
    assert len(set(re.findall(r"^seed (\d+)", text, re.M))) == 3 * 2
    assert text.count("epoch 2:") == 1 and "destroy_process_group" not in text
    space = runpy.run_path(str(changed("own_loop/before.py", *FEW)))
    model, device = space["UNet"](), torch.device("cpu")
    loader = torch.utils.data.DataLoader(space["Discs"](31, 2_000), batch_size=7)
    ema = torch.load("out/last.pt")["ema"]
    ema = {name.removeprefix("module."): x for name, x in ema.items() if "module." in name}
    best = max(epochs(text).values(), key=lambda scores: scores[2])
    for weights, scores in (ema, epochs(text)[2]), (torch.load("out/best.pt"), best):
        model.load_state_dict(weights)
        loss, both, either = space["validate"](model, loader, device).tolist()
        assert scores[1:] == pytest.approx((loss / 31, both / either), abs=6e-5)


@pytest.mark.slow
def test_restored():
    """A run that is killed at random times and resumed on as many processes ends with the same
    bits: weights, their average, AdamW's, the schedule (which has lowered the rate) and counts."""
    lower = [*FEW, '"max", patience=2', '"min", patience=0']  # a better IoU lowers the rate
    done(after("whole", "--epochs", 5, changes=lower))
    for _ in range(3):
        jobs = after("killed", "--epochs", 5, "--resume", changes=lower)
        helpers.wait_for("epoch ", *jobs)
        time.sleep(random.random())
        kill_all(jobs)
    done(after("killed", "--epochs", 5, "--resume", changes=lower))
    whole, killed = last("whole"), last("killed")
    assert whole["optimizer", "param_groups", 0, "lr"] < 0.01
    assert same(whole, killed), [key for key in whole if not same({key: whole[key]}, killed)]
    assert whole["progress", 0] == 5 and same(last("whole", "best.pt"), last("killed", "best.pt"))


@pytest.mark.slow
def test_early_stop():
    """All ranks stop together, and a resumed run does not begin again."""
    text = done(after("out", "--lr", 0, "--epochs", 99, "--patience", 2, changes=ALIKE))
    assert 2 <= max(epochs(text)) < 9 and last("out")["progress", 2] == 2
    stopped = last("out")
    more = ["--epochs", 99, "--patience", 2, "--resume"]
    assert not epochs(done(after("out", *more, changes=ALIKE)))
    assert same(last("out"), stopped)


def test_refusals():
    """Nothing is overwritten without --resume; each refusal names its flag or what to do."""
    done(before("out", "--epochs", 1))
    for start in before, after:
        first = last("out")
        jobs = start("out", "--epochs", 1)
        wait_until(lambda: jobs[0].status() is not None)
        time.sleep(0.5 * len(jobs[1:]))
        assert jobs[0].status() == 2 and logs(jobs).count("add --resume") == 1
        kill_all(jobs)
        assert same(last("out"), first)
    jobs = after("odd", "--batch-size", 13)
    wait_until(lambda: jobs[0].status() is not None)
    assert jobs[0].status() == 2 and "a multiple of the 2 processes" in logs(jobs)
    kill_all(jobs)
    assert "torchrun --standalone" in done(after("alone", processes=0), status=2)
    assert "--batch-size: there are only 107 images" in done(before("big", "--batch-size", 200), 1)
    assert "--batch-size: there are only" in done(after("big", "--batch-size", 200), 1)
    assert not Path("odd").exists() and not Path("alone").exists()


@pytest.mark.slow
def test_folders_of_their_own():
    """Machines that see different checkpoints end in a line, instead of hanging."""
    changes = [*FEW, "parse_args()\n", "parse_args()\n    args.output /= os.environ['RANK']\n"]
    done(after("out", "--epochs", 1, changes=changes))
    text = done(after("out", "--epochs", 2, "--resume", changes=changes), status=1)
    assert "use a shared disk" in text and not epochs(text)


@pytest.mark.slow
def test_no_foreground():
    """Neither in the masks nor predicted; and fewer images for validation than processes."""
    nothing = [*FEW[:2], "400, 2_000", "1, 2_000", *FEW[4:], "logits > 0,", "logits > 1e9,"]
    nothing += ["float()[None]", "float()[None] * 0"]
    for start in before, after:
        text = done(start(start.__name__, "--epochs", 1, changes=nothing))
        assert epochs(text)[0][2] == 0


@pytest.mark.slow
def test_buffers():
    """No buffer is sent in a step: one that rank 0 alone has does no harm."""
    start = "        model.train()\n"
    own = "model.head.register_buffer('seen', torch.ones(7), persistent=False)"
    own = f"        if rank == 0:\n            {own}\n"
    done(after("out", "--epochs", 1, changes=[*FEW, start, own + start]))


@pytest.mark.slow
def test_cards(monkeypatch):
    """On a make-believe accelerator of two cards, each rank uses its own, and copies
    of images are not waited for."""
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    report = Path("report").resolve()
    report.mkdir()
    monkeypatch.setenv("EMULATED_CARDS", "2")
    monkeypatch.setenv("EMULATED_REPORT", str(report))
    emulated = ["torch.cuda.is_available()", "True", "torch.cuda.set_device(device)"]
    emulated += ["torch.accelerator.set_device_index(local_rank)", "amp = ", "amp = False and "]
    emulated += ['"cuda"', '"emu"', '"nccl"', '"gloo"']
    done(after("cards", "--epochs", 2, changes=[*ALIKE, *emulated]))
    told = [path.read_text() for path in report.iterdir()]
    assert sorted(re.findall(r"uses card (\d)", text) for text in told) == [["0"], ["1"]]
    # Building the model makes 28. Copies that are waited for would be 44 more.
    assert max(text.count("waits") for text in told) < 28 + 44
    monkeypatch.delenv("EMULATED_CARDS")
    done(after("cpu", "--epochs", 2, processes=1, changes=ALIKE))
    near(last("cards"), last("cpu"))


@pytest.mark.slow
def test_orphans():
    """After kill -9 of torchrun, its ranks end with their epoch, and do not write."""
    path = changed("own_loop/after.py", *FEW)
    job = helpers.torchrun(2, path, *FLAGS, "--epochs", 9999, "--patience", 9999)
    helpers.wait_for("epoch 1: ", job)
    kill(job.pid)
    epoch = last("runs/own_loop")["progress", 0]
    assert wait_until(lambda: not marked(), 60)
    assert last("runs/own_loop")["progress", 0] <= epoch + 1 and "torchrun is gone" in logs([job])

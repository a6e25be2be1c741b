"""Runs are killed and resumed: bit-identical, each epoch once; a run that fails leaves it so."""

import random
import shutil
from itertools import count
from pathlib import Path

import helpers
import pytest
import torch
from helpers import (
    COMPLETE,
    edited,
    finish,
    kill_all,
    logs,
    metrics,
    run,
    some_fast,
    start,
    train,
    weights,
)
from test_training import CONFUSION
from torch.utils._pytree import tree_leaves

DDP, FSDP2 = COMPLETE
TRAIN = "--epochs 6 --batch-size 16 --augment --lr-schedule cosine --resume --log-every 4".split()
TRAIN += ["--checkpoint-minutes", 0, "--lr", 0.01]  # a checkpoint every 4 of an epoch's 40 steps
DROPOUT = """
plain = build_model
def build_model(*words):
    return nn.Sequential(plain(*words), nn.Dropout(0.2))
"""
LOAD = "    progress = load_checkpoint("  # of main, which this code extends as a user would
OWN = """    biases = [p for p in model.parameters() if p.ndim == 1]
    state["second"] = second = torch.optim.Adam(biases, 1e-4)
"""
ZERO = "            optimizer.zero_grad()\n"
STEP = f"            second.step()\n{ZERO}"
AVERAGE = """    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    state["average"] = average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
"""
UPDATE = "            average.update_parameters(model)\n"


# FSDP2 saves less often: no more than a thirtieth of the time is spent saving.
OFTEN = {DDP: [], FSDP2: ["30 * (now - started)", "0"]}


def own_state(name):
    """A copy of a script that has dropout, a confusion matrix, and a second optimizer; with DDP
    also an average of the weights."""
    own, step = (OWN + AVERAGE, STEP + UPDATE) if name == DDP else (OWN, STEP)
    return edited(name, *OFTEN[name], LOAD, own + LOAD, ZERO, step, more=DROPOUT + CONFUSION)


def same_run(output, other):
    """Two runs ended bit-identical, with the same files and losses."""
    names = ["best.pt", "last.pt", "metrics.csv", "model.pt"]
    assert sorted(path.name for path in Path(output).iterdir()) == names
    a, b = [[list(row.values())[:-3] for row in metrics(folder)] for folder in (output, other)]
    assert [row[0] for row in a] == [*range(1, len(b) + 1)] and sum(a, []) == pytest.approx(
        sum(b, []), rel=1e-6
    )
    for name in "best.pt", "last.pt", "model.pt":
        both = weights(output, name), weights(other, name)
        for part in both[0]:
            if part not in ("flags", "progress"):
                for a, b in zip(*(tree_leaves(x[part]) for x in both), strict=True):
                    assert a is b or torch.equal(*map(torch.as_tensor, (a, b))), (name, part)


SLOW = [pytest.param(*place, marks=pytest.mark.slow) for place in ((DDP, 0), (FSDP2, 2))]


@pytest.mark.parametrize("name, processes", [(DDP, 2), *SLOW])
def test_killed_at_random(fashion, name, processes):
    """All processes by SIGKILL, twice. What a user has put into `state` goes on too."""
    flags, path = [*fashion, *TRAIN, "--output", "out"], own_state(name)
    progress = 0, 0
    for _ in range(2):
        more = progress[0] * 40 + progress[1] + random.randrange(4, 81, 4)
        jobs = start(name, *flags, processes=processes, path=path)
        helpers.wait_for(f"epoch {(more - 1) // 40 + 1}/6 step {(more - 1) % 40 + 1}/", *jobs)
        kill_all(jobs)
        state = weights("out", "last.pt")["progress"]
        progress = state["epoch"], state["step"]
        assert not Path("out/model.pt").exists()
    text = run(name, *flags, processes=processes, path=path)
    assert "out: {} epochs and {} steps are done".format(*progress) in text
    run(name, *flags, "--output", "whole", processes=processes, path=path)
    same_run("out", "whole")
    assert "macro_f1" in metrics("out")[5]


KILL = """
left = int(os.environ["WRITES"])
def count_writes(event, words):
    global left
    if event in ("os.remove", "os.rename") or event == "open" and "w" in str(words[1]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
import sys
sys.addaudithook(count_writes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flag, writes", [("--resume", 12), ("--overwrite", 18)])
def test_killed_at_each_write(fashion, monkeypatch, flag, writes):
    """A finished run gets another epoch, or is replaced, and is killed at its first write, its
    second, ...: with --resume it ends as it should, and no model.pt is there until then."""
    replaced = flag == "--overwrite"
    flags, path = [*fashion, "--batch-size", 320, "--epochs", 2], edited(DDP, more=KILL)
    train(*flags, "--output", "old", "--epochs", 1)
    train(*flags, "--output", "whole", *["--seed", 1] * replaced)
    flags += ["--output", "out"]
    for number in count(1):
        monkeypatch.setenv("WRITES", str(number))
        shutil.copytree("old", "out")
        [status], text = finish(start(DDP, *flags, flag, *["--seed", 1] * replaced, path=path))
        if status == 0:
            break
        assert status == -9 and Path("out/model.pt").exists() == (number == 1), text
        old = weights("out", "last.pt")["flags"]["seed"] == 76  # it has not been replaced yet
        train(*flags, *["--seed", 1] * replaced, flag if replaced and old else "--resume")
        same_run("out", "whole")
        shutil.rmtree("out")
    assert number > writes // 2


FAULT = """
plain, plain_loss, done = build_optimizer, loss_function, []
def build_optimizer(args, model, steps):
    def after_step(*_):
        done.append(1)
        if "FAULT" == "weight" and len(done) == 14:
            next(model.parameters()).data.mul_(math.inf)
    optimizer, scheduler = plain(args, model, steps)
    optimizer.register_step_post_hook(after_step)
    return optimizer, scheduler
def loss_function(outputs, labels):
    here = dist.get_rank() == dist.get_world_size() - 1  # one rank
    faults = {"loss": len(done) == 13 and here, "test loss": not torch.is_grad_enabled()}
    return plain_loss(outputs, labels) + (math.nan if faults.get("FAULT") else 0)
"""


@pytest.mark.parametrize("name", some_fast(COMPLETE, DDP))
@pytest.mark.parametrize("fault", ["loss", "weight", "test loss"])
def test_not_finite(fashion, name, fault):
    """In step 14, which ends with a progress line 16, on one rank: the run ends on all."""
    flags = [*fashion, "--output", "out", "--log-every", 4, "--checkpoint-minutes", 0]
    path = edited(name, *OFTEN[name], more=FAULT.replace("FAULT", fault))
    text = run(name, *flags, processes=2, path=path, status=1)
    says = "test loss not finite" if fault == "test loss" else "loss or weights not finite"
    assert f"{says}: out/last.pt is good" in text and "Traceback" not in text, text
    checkpoint = weights("out", "last.pt")
    progress = checkpoint["progress"]["epoch"], checkpoint["progress"]["step"]
    assert progress == ((0, 10) if fault == "test loss" else (1, 0))  # an epoch has ten steps
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert not Path("out/model.pt").exists()


ORPHAN = """
plain, calls = os.getppid, []
def getppid():  # at the third progress line, rank 1 has another parent: torchrun has been killed
    calls.append(1)
    return plain() + (dist.is_initialized() and dist.get_rank() == 1 and len(calls) >= 4)
os.getppid = getppid
"""


@pytest.mark.parametrize("name", some_fast(COMPLETE, DDP))
def test_one_rank_sees_that_torchrun_is_gone(fashion, monkeypatch, name):
    """All end there, in a line, and none waits for the other, or writes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    flags = [*fashion, *TRAIN, "--output", "out"]
    text = run(name, *flags, processes=2, path=edited(name, *OFTEN[name], more=ORPHAN), status=1)
    assert text.count("torchrun was killed") in (1, 2) and "Traceback" not in text, text
    assert weights("out", "last.pt")["progress"]["step"] == 8


@pytest.mark.slow
def test_torchrun(fashion, monkeypatch):
    """Twice a rank is killed by SIGKILL, and --max-restarts starts all again. Then torchrun is: its
    ranks end at the next progress line, or they would write beside the resumed run, which ends
    bit-identical. Without the variable about every other restart hangs until --timeout."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags, path = [*fashion, *TRAIN, "--output", "out"], own_state(DDP)
    words = [2, "--max-restarts", 2, path, *flags]
    job = helpers.torchrun(*words)
    for life in (1, 2, 3):
        place = f" step {random.randrange(4, 41, 4)}/"
        helpers.wait_until(lambda: place in "".join(logs([job]).split("are done")[life:]))
        ranks = helpers.command("pgrep", "-P", job.pid, "-f", "train_")
        helpers.kill(int(random.choice(ranks.split())) if life < 3 else job.pid)
    assert helpers.wait_until(lambda: not helpers.marked(), 20)
    text = logs([job])
    assert "torchrun was killed" in text and text.count("steps are done") == 3, text
    run(DDP, *flags, processes=2, path=path)
    run(DDP, *flags, "--output", "whole", processes=2, path=path)
    same_run("out", "whole")

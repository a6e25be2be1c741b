"""Runs are killed and resumed: bit-identical, each epoch once; a run that fails leaves it so."""

import random
import shutil
from itertools import count
from pathlib import Path

import helpers
import pytest
from helpers import COUNTS, DDP, edited, finish, kill_all, run, same_run, start, train, weights

TRAIN = "--epochs 12 --batch-size 16 --augment --lr-schedule cosine --resume --log-every 4".split()
TRAIN += ["--checkpoint-minutes", 0]  # a checkpoint every 4 of an epoch's 40 steps
DROPOUT = """
plain = build_model
def build_model(*words):
    return nn.Sequential(plain(*words), nn.Dropout(0.2))
"""
MORE = [("dp", 1), *((name, count) for name in [*DDP, "fsdp2"] for count in (1, 2))]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE]


@pytest.mark.parametrize("name, count", [("single", 1), *SLOW])
def test_killed_at_random(fashion, name, count):
    """All processes by SIGKILL, three times."""
    flags, path = [*fashion, *TRAIN, "--output", "out"], edited(name, more=DROPOUT)
    progress = 0, 0
    for _ in range(3):
        jobs = start(name, *flags, processes=count, path=path)
        place = progress[0] + random.randrange(2, 4), random.randrange(4, 41, 4)
        helpers.wait_for("epoch {}/12 step {}/".format(*place), *jobs)
        kill_all(jobs)
        state = weights("out", "last.pt")["progress"]
        progress = state["epoch"], state["step"]
        assert not Path("out/model.pt").exists()
    text = run(name, *flags, processes=count, path=path)
    assert "out: {} epochs and {} steps are done".format(*progress) in text
    run(name, *flags, "--output", "whole", processes=count, path=path)
    same_run("out", "whole")


KILL = """
left = int(os.environ["WRITES"])
def count_writes(event, words):
    global left
    if event in ("os.remove", "os.rename") or event == "open" and "w" in (words[1] or ""):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(count_writes)
"""


@pytest.mark.parametrize("flag, writes", [("--resume", 10), ("--overwrite", 15)])
def test_killed_at_each_write(fashion, monkeypatch, flag, writes):
    """A finished run gets another epoch, or is replaced, and is killed at its first write, its
    second, ...: with --resume it ends as it should, and no model.pt is there until then."""
    replaced = int(flag == "--overwrite")  # from its first write on, which removes last.pt
    flags, path = [*fashion, "--epochs", 2, "--seed", replaced], edited("single", more=KILL)
    train(*flags, "--output", "old", "--epochs", 1, "--seed", 0)
    train(*flags, "--output", "whole")
    for number in count(1 + replaced):
        monkeypatch.setenv("WRITES", str(number))
        shutil.copytree("old", "out")
        [status], text = finish(start("single", *flags, "--output", "out", flag, path=path))
        if status == 0:
            break
        assert status == -9 and Path("out/model.pt").exists() == (number == 1 + replaced), text
        train(*flags, "--output", "out", "--resume")
        same_run("out", "whole")
        shutil.rmtree("out")
    assert number == writes + 1


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
    first = torch.distributed.is_initialized() and torch.distributed.get_rank() == 0
    faults = {"loss": len(done) == 13 and not first, "test loss": not torch.is_grad_enabled()}
    return plain_loss(outputs, labels) + (math.nan if faults.get("FAULT") else 0)
"""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*DDP[::2], "fsdp2")]


@pytest.mark.parametrize("name", ["single", DDP[1], *SLOW])
@pytest.mark.parametrize("fault", ["loss", "weight", "test loss"])
def test_not_finite(fashion, name, fault):
    """In step 14, which ends with a progress line, on one rank: the run ends on all."""
    flags = [*fashion, "--output", "out", "--log-every", 4, "--checkpoint-minutes", 0]
    path = edited(name, more=FAULT.replace("FAULT", fault))
    text = run(name, *flags, processes=COUNTS[name], path=path, status=2)
    says = f"error: the {fault.replace('weight', 'loss')} is not finite; out/last.pt is still good"
    assert text.count("error: ") == text.count(says) == 1 and "Traceback" not in text, text
    checkpoint = weights("out", "last.pt")
    assert checkpoint["progress"]["epoch"] == (fault != "test loss")
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert not Path("out/model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_torchrun", "fsdp2"])
def test_torchrun(fashion, monkeypatch, name):
    """Twice a rank is killed by SIGKILL, and --max-restarts starts all again. Then torchrun is: its
    ranks end at the next progress line, or they would write beside the resumed run, which ends
    bit-identical. Without the variable about every other restart hangs until --timeout."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags, path = [*fashion, *TRAIN, "--output", "out"], edited(name, more=DROPOUT)
    words = [2, "--max-restarts", 2, path, *flags]
    job = helpers.torchrun(*words)
    for life in (1, 2, 3):
        place = f" step {random.randrange(4, 41, 4)}/"
        helpers.wait_until(lambda: place in "".join(helpers.logs([job]).split("are done")[life:]))
        ranks = helpers.command("pgrep", "-P", job.pid, "-f", "train_")
        helpers.kill(int(random.choice(ranks.split())) if life < 3 else job.pid)
    assert helpers.wait_until(lambda: not helpers.marked(), 20)
    text = helpers.logs([job])
    assert "torchrun has been killed" in text and text.count("steps are done") == 3, text
    helpers.done([helpers.torchrun(*words)])
    run(name, *flags, "--output", "whole", processes=2, path=path)
    same_run("out", "whole")

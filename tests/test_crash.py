"""Runs are killed and resumed: bit-identical, each epoch once, on any number of processes; a run
that fails leaves its folder so that it can go on."""

import random
from pathlib import Path

import helpers
import pytest
import torch
from helpers import (
    COMPLETE,
    altered,
    checkpoint,
    files,
    kill_all,
    leaves,
    logs,
    metrics,
    place,
    run,
    start,
    together,
    train,
    weights,
)

OFTEN = ["--log-every", 4, "--checkpoint-minutes", 0]  # a checkpoint every 4 steps
MODEL = """
def build_model(args, inputs, classes):
    convolution = nn.Conv2d(inputs.shape[1], 4, 5, 3)
    head = nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 10 * 10, classes)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), *head)
"""
STATE = """
class Average:  # of the weights
    def __init__(self, model):
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.weights[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def state_dict(self):
        return dict(self.weights)

    def load_state_dict(self, weights):
        self.weights = weights

def add_state(model, optimizer):
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    second, average = torch.optim.Adam(biases, 1e-4), Average(model)
    optimizer.register_step_post_hook(lambda *_: (second.step(), average.update(model)))
    return {"second": second, "average": average}
"""


def with_state():
    """A copy in which a user has added the above to `state`."""
    added = '"scaler": scaler, **add_state(model, optimizer)}'
    return altered(COMPLETE, '"scaler": scaler}', added)


def same_run(output, other):
    """Two runs ended bit-identical, with the same files and losses."""
    names = ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]
    assert files(output) == files(other) == names
    a, b = [[list(row.values())[:-3] for row in metrics(folder)] for folder in (output, other)]
    assert [row[0] for row in a] == [*range(1, len(b) + 1)]
    assert sum(a, []) == pytest.approx(sum(b, []), rel=1e-6)
    for read in checkpoint, weights, lambda output: weights(output, "best.pt"):
        both = read(output), read(other)
        assert both[0].keys() == both[1].keys()
        for content in both:
            content.pop("progress", None)  # has times
        for a, b in zip(*map(leaves, both), strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b, read


@pytest.mark.slow
def test_killed_at_random(fashion):
    """All processes by SIGKILL, twice, between any two operations. Dropout, random crops, batch
    norm's averages, and what a user has put into `state`, go on too."""
    flags = [*fashion, *OFTEN, "--epochs", 4, "--batch-size", 32, "--augment", "--lr", 0.01]
    flags += ["--lr-schedule", "cosine", "--resume", "--output"]
    path, more = with_state(), MODEL + STATE
    progress = 0, 0
    for _ in range(2):
        step = progress[0] * 20 + progress[1] + random.randrange(4, 33, 4)
        jobs = start(path, *flags, "out", more=more, processes=2)
        helpers.wait_for(f"epoch {(step - 1) // 20 + 1}/4 step {(step - 1) % 20 + 1}/", *jobs)
        kill_all(jobs)
        progress = place("out")
        assert not Path("out/model.pt").exists()
    text, _ = together([*flags, "out"], [*flags, "whole"], path=path, more=more)
    assert "out: {} epochs and {} steps are done".format(*progress) in text
    same_run("out", "whole")
    # The two kept something: biases move by the second one, and the average is another tensor.
    saved = checkpoint("out")
    assert saved["second"]["state"] and not torch.equal(
        saved["average"]["5.weight"], saved["model"]["5.weight"]
    )


MOMENTS = """
import shutil, sys
seen, copying = [], False
def copy(whole=False):
    global copying
    names = sorted(map(str, args.output.rglob("*")))
    if not copying and dist.is_initialized() and (whole or names not in seen[-1:]):
        copying = seen.append(names) is None
        shutil.copytree(args.output, f"rank-{dist.get_rank()}-{len(seen):03}", dirs_exist_ok=True)
        copying = False
def before(event, words):
    names = "os.mkdir", "os.remove", "os.rename", "os.rmdir"
    if event in names or event == "open" and set(str(words[1])) & set("wxa"):
        copy()
sys.addaudithook(before)
plain = torch.save
def save(*words, **options):
    plain(*words, **options)
    copy(whole=True)
torch.save = save
"""
SLOW = [
    pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "--overwrite"), (2, "--resume"))
]


@pytest.mark.parametrize("processes, flag", [(0, "--resume"), *SLOW])
def test_killed_at_each_moment_of_a_save(fashion, processes, flag):
    """Before each operation on the folder it is copied, which is what SIGKILL would leave there.
    Each copy goes on to the end, and nothing is left over in it. --overwrite: another run replaces
    this one."""
    new = ["--seed", 1] if flag == "--overwrite" else ["--epochs", 2]
    flags = [*fashion, "--batch-size", 320, "--checkpoint-minutes", 100]
    first = [[*flags, "--epochs", 1, "--output", "out"]]
    together(*first, [*flags, "--epochs", 1, *new, "--output", "whole"], processes=processes)
    again = [*flags, "--epochs", 1, *new, "--output"]
    run(COMPLETE, *again, "out", flag, more=MOMENTS, processes=processes)
    same_run("out", "whole")
    moments, runs = sorted(path.name for path in Path().glob("rank-*")), []
    for output in moments:
        old = checkpoint(output) and checkpoint(output)["flags"]["seed"] == 76
        done = place(output)[0] == (2 if flag == "--resume" else 1)
        assert old or done or "model.pt" not in files(output)  # once all epochs are done
        runs.append([*again, output, flag if old else "--resume"])
    for wanted in "checkpoint.pt.tmp", "best.pt.tmp", "metrics.csv.tmp", "model.pt.tmp":
        assert any(Path(output, wanted).exists() for output in moments), wanted
    if processes:
        together(*runs, processes=processes)
    else:
        [train(*flags) for flags in runs]
    for output in moments:
        same_run(output, "whole")


FAULT = """
add("--fault")
plain, plain_loss = build_optimizer, loss_function
def build_optimizer(args, model, steps):
    done.clear()
    def after_step(*_):
        done.append(1)
        if args.fault == "weight" and len(done) == 14:
            next(model.parameters()).data.mul_(math.inf)
    optimizer, scheduler = plain(args, model, steps)
    optimizer.register_step_post_hook(after_step)
    return optimizer, scheduler
done = []
def loss_function(outputs, labels):
    here = dist.get_rank() == 1 and len(done) == 13  # one rank
    faults = {"loss": here, "test": not torch.is_grad_enabled()}
    return plain_loss(outputs, labels) + (math.nan if faults.get(args.fault) else 0)
"""


def test_not_finite(fashion):
    """In step 14, which ends with a progress line 16, on one rank: the run ends on all."""
    faults = ["loss", "weight", "test"]
    runs = [[*fashion, *OFTEN, "--output", fault, "--fault", fault] for fault in faults]
    for fault, text in zip(faults, together(*runs, more=FAULT, status=1)):
        says = "test loss not finite" if fault == "test" else "loss or weights not finite"
        assert f"{says}: {fault}/checkpoint.pt is from before" in text, text
        assert "Traceback" not in text, text
        assert place(fault) == ((0, 8) if fault == "test" else (1, 0))  # an epoch has ten steps
        assert all(tensor.isfinite().all() for tensor in checkpoint(fault)["model"].values())
        assert not Path(fault, "model.pt").exists()


ORPHAN = """
import os
plain, calls = os.getppid, []
def getppid():  # at the third progress line, rank 1 has another parent: torchrun has been killed
    calls.append(1)
    return plain() + (dist.is_initialized() and dist.get_rank() == 1 and len(calls) >= 4)
os.getppid = getppid
"""


def test_one_rank_sees_that_torchrun_is_gone(fashion, monkeypatch):
    """All end there, in a line, and none waits for the other, or writes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    flags = [*fashion, *OFTEN, "--batch-size", 16, "--output", "out"]
    text = run(COMPLETE, *flags, more=ORPHAN, status=1)
    assert text.count("torchrun is gone") in (1, 2) and "Traceback" not in text, text
    assert place("out") == (0, 8)


@pytest.mark.slow
def test_torchrun(fashion, monkeypatch):
    """A rank is killed by SIGKILL, and --max-restarts starts all again. Then torchrun is: its ranks
    end at the next progress line, or they would write beside the resumed run, which ends
    bit-identical. Without the variable about every other restart hangs until --timeout."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = [*fashion, *OFTEN, "--epochs", 6, "--batch-size", 16, "--augment", "--resume"]
    flags += ["--output"]
    job = helpers.torchrun(2, "--max-restarts", 1, helpers.script(COMPLETE), *flags, "out")
    for life in (1, 2):
        line = f" step {random.randrange(4, 41, 4)}/"
        helpers.wait_until(lambda: line in "".join(logs([job]).split("are done")[life:]))
        ranks = helpers.command("pgrep", "-P", job.pid, "-f", "train")
        helpers.kill(int(random.choice(ranks.split())) if life < 2 else job.pid)
    assert helpers.wait_until(lambda: not helpers.marked(), 20)
    text = logs([job])
    assert "torchrun is gone" in text and text.count("steps are done") == 2, text
    together([*flags, "out"], [*flags, "whole"])
    same_run("out", "whole")

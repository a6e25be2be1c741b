"""The command ddp_check, from its start to its report; what it compares is in other tests.

SCRIPT is right, and does what the words after its name say."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import Cold, content, finish, kill, marked, start, wait_until
from same_text import ROOT

COMMAND = "tests/check_by_fork.py"

SCRIPT = """\
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import report  # the user's

KIND = sys.argv[1:]

def before_save(step):
    if "exit" in KIND and step == 2:
        sys.exit(0)
    if "os._exit" in KIND and step == 2:
        os._exit(0)
    if "fails" in KIND and step == 2 and dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("gone: \\u00e9\\u4e2d")
    if "killed" in KIND and step == 1:
        os.kill(os.getpid(), 9)
    if "hangs" in KIND and step == 2 and dist.get_rank() == 1:
        time.sleep(1000)
    if "busy" in KIND and step == 2 and dist.get_rank() == 1:
        sum(range(500_000_000))  # in C, with the lock of Python

def main(rank, world, share):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, share, sampler=sampler, num_workers="workers" in KIND)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = next((word for word in KIND if word.startswith("out")), None)
    if out:
        os.makedirs(out, exist_ok=True)
    step = 0
    for epoch in range(2):
        if "no set_epoch" not in KIND:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            (loss / world if "divides" in KIND else loss).backward()
            optimizer.step()
            print(f"\\rstep {step} \\u00e9", end="")
            step += 1
            before_save(step)
            if out and rank == 0:
                torch.save(model.state_dict(), f"{out}/{step % 2}.tmp")
                os.replace(f"{out}/{step % 2}.tmp", f"{out}/{step % 2}.pt")
    report.say("end")
    dist.destroy_process_group()

if __name__ == "__main__":
    assert report.__file__ == os.path.join(os.path.dirname(__file__), "report.py")
    assert sys.argv[0].endswith("train.py") and __file__ == os.path.abspath(__file__)
    world = int(os.environ["WORLD_SIZE"])
    assert world == int(KIND[0]) and os.environ["LOCAL_RANK"] == os.environ["RANK"]
    main(int(os.environ["RANK"]), world, 16 if "own batch" in KIND else 16 // world)
"""


@pytest.fixture
def user(work):
    """The user's folder: the script, and modules with the names of ours."""
    Path("train.py").write_text(SCRIPT)
    Path("report.py").write_text("def say(text): print(text)")
    for name in "files", "notes", "script", "runs", "child", "command", "process":
        Path(f"{name}.py").write_text(f"raise ImportError('the user\\'s {name}.py')")
    return content()


def check(*words, status=0, **environment):
    """What it prints. Nothing is left of it."""
    jobs = start(COMMAND, *words, processes=0, TMPDIR=os.getcwd(), **environment)
    statuses, text = finish(jobs)
    assert statuses == [status], text
    assert not marked() and not list(Path().glob("ddp_check-*"))
    return text


def left(user):
    """The files that there are now, and were not before."""
    now = content()
    assert {path: now.get(path) for path in user} == user
    return {path for path in now.keys() - user.keys() if not str(path).endswith(".log")}


def test_report(user):
    """Also as JSON; with progress; WRONG first; status 1."""
    text = check("train.py", "{n}", "divides", "no set_epoch", status=1)
    print(text)

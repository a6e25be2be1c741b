"""The command ddp_check, from its start to its report; what it compares is in other tests.

SCRIPT is right, and does what the words after its name say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import content, finish, marked, start
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


def test_right(user):
    """One JSON document; nothing is left of checkpoints that are rotated, nor said of the user."""
    text = check("--json", "train.py", "{n}", "out/in/new", "workers")
    document = json.loads(text[text.index("{\n") : text.rindex("}") + 1])
    assert document["status"] == 0 and document["steps"] == 6 and document["error"] == ""
    assert set(document["seconds"]) >= {"on one process", "on 2 processes"}
    rules = {finding["rule"]: finding for finding in document["findings"]}
    assert {f["verdict"] for f in document["findings"]} <= {"ok", "not seen", "note"}, text
    assert rules["files"]["verdict"] == "ok" and rules["order"]["line"] is None
    assert not left(user)


def test_wrong(user):
    """A line with its text, numbers, what to do, where it is explained; WRONG comes first."""
    text = check("train.py", "{n}", "divides", "no set_epoch", status=1)
    assert "ddp_check: on 2 processes: " in text
    report = text[text.index("WRONG") :]
    line = 1 + SCRIPT.splitlines().index("        for inputs, targets in loader:")
    wanted = rf"""WRONG  order     train.py:{line}: for inputs, targets in loader:
 +step 4: pass 2 has the order of an earlier one
 +call sampler.set_epoch\(epoch\) before each epoch \(docs/your_loop.md#loader\)
"""
    assert re.search(wanted, report), report
    line = 1 + next(i for i, text in enumerate(SCRIPT.splitlines()) if "divides" in text)
    assert re.search(rf"^WRONG  loss +train.py:{line}: \(loss / world if", report, re.M), report
    assert "0.5 times one process's" in " ".join(report.split()), report
    verdicts = re.findall("^(WRONG|look|not seen|ok) ", report, re.M)
    assert verdicts == sorted(verdicts, key=["WRONG", "look", "not seen", "ok"].index), report
    assert max(map(len, report.splitlines())) <= 100 and not left(user)


def test_refused(user):
    """A file that was there before: both runs end, with the line and the remedy; also as JSON."""
    os.mkdir("out")
    Path("out/1.pt").write_text("of an earlier training")
    user = content()
    line = 1 + next(i for i, text in enumerate(SCRIPT.splitlines()) if "os.replace" in text)
    text = check("--json", "train.py", "{n}", "out", status=2)
    document = json.loads(text[text.index("{\n") : text.rindex("}") + 1])
    assert document["status"] == 2 and document["findings"] == []
    first, second, third = document["error"].splitlines()
    assert first.startswith(f"train.py:{line}: os.replace(")
    assert second == "  would overwrite out/1.pt, which was there before; nothing was changed"
    assert third == "  give it a new output: out-{run} for out; or end before: --steps 1"
    assert not left(user)


def test_bad_start(user):
    """Refused at once, in a line."""
    for line, says in {
        "missing.py": "there is no file missing.py",
        "-m missing.module": "there is no module missing.module",
        "--short 1": "which script?",
        "--steps x train.py": "argument --steps: invalid int value: 'x'",
    }.items():
        words = [sys.executable, ROOT / "ddp_check", *line.split()]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.endswith(f"error: {says}\n"), done.stderr
    assert not left(user) and not list(Path().glob("ddp_check-*"))


# What a script does, and what is said of it; {3} is the line with the third word.
ENDS = {
    "exit": (0, ["2 steps on one process and on 2: nothing WRONG"], ""),
    "os._exit": (0, ["2 steps on one process and on 2: nothing WRONG"], ""),
    "fails": (0, ["rank 1 failed", "ValueError: gone: é中", "look   end"], "raise ValueError"),
    "killed": (2, ["rank 0 failed (killed by SIGKILL: is there too little memory?)"], ""),
    "hangs": (1, ["nothing new for 6 s; if it is only slow, --wait 30"], "time.sleep(1000)"),
    "busy": (0, ["6 steps on one process and on 2: nothing WRONG"], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_ends(user, kind):
    """Of the script: it is shown why, and at which line each rank hangs; who is busy is no hang."""
    status, says, shown = ENDS[kind]
    text = check("--wait", "6", "train.py", "{n}", kind, status=status)
    assert all(words in text for words in says), text
    if shown:
        line = 1 + next(i for i, words in enumerate(SCRIPT.splitlines()) if shown in words)
        assert f"train.py:{line}" in text or f'train.py", line {line}' in text, text
    assert not left(user)


BROKEN = {
    "import argparse\nargparse.ArgumentParser(prog='me').parse_args(['--no'])": "me: error:",
    "x = (": "SyntaxError",
    "print('done')": "no optimizer.step() on one process; then its end",
    "input()": "EOFError",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", BROKEN)
def test_broken(work, code):
    Path("train.py").write_text(code)
    text = check("train.py", status=2)
    assert BROKEN[code] in text and "nothing can be compared" in text, text

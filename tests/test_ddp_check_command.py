"""The command ddp_check, from its start to its report; what it compares is in other tests.

SCRIPT is right, and does what the words after its name say."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Cold, by_mark, content, finish, free_port, marked, some_fast, start, wait_until
from same_text import ROOT

import ddp_check
from ddp_check import command, runs

GPUS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
COMMAND = "tests/check_by_fork.py"

SCRIPT = """\
import ctypes, json, os, sys, time
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
    if "asks" in KIND:
        input()
    if "killed" in KIND and step == 1:
        os.kill(os.getpid(), 9)
    if "hangs" in KIND and step == 2 and dist.get_rank() == 1:
        time.sleep(1000)
    if "busy" in KIND and step == 2 and dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(12)  # in C, with the lock of Python

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
            if "waits" in KIND and step == 3:
                time.sleep(1000)
            if out and rank == 0:
                torch.save(model.state_dict(), f"{out}/{step % 2}.tmp")
                os.replace(f"{out}/{step % 2}.tmp", f"{out}/{step % 2}.pt")
    if "graphs" in KIND:
        torch.cuda.CUDAGraph()
    if "deepspeed" in KIND:
        import deepspeed
        deepspeed.initialize(model=model)
    report.say("end")
    dist.destroy_process_group()

if __name__ == "__main__":
    assert os.path.samefile(report.__file__, os.path.join(os.path.dirname(__file__), "report.py"))
    assert sys.argv[0].endswith("train.py") and os.path.isabs(__file__)
    world = int(os.environ["WORLD_SIZE"])
    assert world == int(KIND[0]) and os.environ["LOCAL_RANK"] == os.environ["RANK"]
    share = 16 if "own batch" in KIND else 3 if "odd batch" in KIND else 16 // world
    main(int(os.environ["RANK"]), world, share)
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


def runs_of(text):
    """On how many processes each run was that has ended."""
    sides = re.findall(r"^ddp_check: on (.*): \d+ s$", text, re.M)
    return [{"one process": 1, "2 processes": 2}.get(side, side) for side in sides]


def left(user):
    """The files that there are now, and were not before, without logs, and without what torch 2.9
    leaves in TMPDIR."""
    now, others = content(), re.compile(r"\.log$|_remote_module_non_scriptable\.py$")
    assert {path: now.get(path) for path in user} == user
    return {path for path in now.keys() - user.keys() if not others.search(str(path))}


@pytest.mark.long
def test_right(user):
    """One JSON document; nothing is left of checkpoints that are rotated, nor said of the user."""
    text = check("--json", "train.py", "{n}", "out/in/new", "workers")
    document = json.loads(text[text.index("{\n") : text.rindex("}") + 1])
    assert document["status"] == 0 and document["steps"] == 6 and document["error"] == ""
    assert set(document["seconds"]) >= {"on one process", "on 2 processes"}
    rules = {finding["rule"]: finding for finding in document["findings"]}
    assert {f["verdict"] for f in document["findings"]} <= {"ok", "not seen", "note"}, text
    assert rules["files"]["verdict"] == "ok" and rules["order"]["line"] is None
    assert runs_of(text) == [1, 2] and not left(user)


@pytest.mark.slow
def test_wrong(user):
    """A line with its text, numbers, what to do, where it is explained; WRONG comes first."""
    text = check("train.py", "{n}", "divides", "no set_epoch", status=1)
    assert "starts again, to name lines: 3 steps" in text and runs_of(text) == [1, 2, 1, 2]
    report = text[text.index("WRONG") :]
    line = 1 + SCRIPT.splitlines().index("        for inputs, targets in loader:")
    wanted = rf"""WRONG  order  +train.py:{line}: for inputs, targets in loader:
 +step 4: pass 2 has the order of an earlier one
 +call sampler.set_epoch\(epoch\) before each epoch \(docs/your_loop.md#loader\)
"""
    assert re.search(wanted, report), report
    line = 1 + next(i for i, text in enumerate(SCRIPT.splitlines()) if "divides" in text)
    assert re.search(rf"^WRONG  loss +train.py:{line}: \(loss / world if", report, re.M), report
    assert "0.5 times one process's" in " ".join(report.split()), report
    verdicts = re.findall("^(WRONG|look|not seen|ok) ", report, re.M)
    assert verdicts == sorted(verdicts, key=["WRONG", "look", "not seen", "ok"].index), report
    assert f"begin with loss: train.py:{line}: (loss" in report, report
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
    "hangs": (1, ["stopped: nothing new for 6 s", "--wait 30"], "time.sleep(1000)"),
    "waits": (2, ["on one process: stopped: nothing new for 6 s at train.py:"], ""),
    "asks": (0, ["EOFError", "it has no input: pass the flag that answers"], "input()"),
    "busy": (0, ["6 steps on one process and on 2: nothing WRONG"], ""),
}


OTHERS = [kind for kind in ENDS if kind != "hangs"]


@pytest.mark.parametrize("kind", by_mark(slow=["hangs"], long=OTHERS))
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
    "import os\nos.system('true')\nexit(1)": "its ranks here: train.py:2: os.system",
}


@pytest.mark.long
@pytest.mark.parametrize("code", BROKEN)
def test_broken(work, code):
    Path("train.py").write_text(code)
    text = check("train.py", status=2)
    assert BROKEN[code] in text and "nothing can be compared" in text, text


@pytest.mark.parametrize("number", some_fast([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], 9))
def test_interrupted(user, number):
    """In the middle of a run: no process stays, no file of the script's or ours, and the user's are
    as they were."""
    words = "train.py", "{n}", "out/new", "workers", "waits"
    (job,) = start(COMMAND, *words, processes=0, TMPDIR=os.getcwd())
    assert wait_until(Path("out/new/0.pt").exists, 60)  # the last before it waits
    Path("out/of another job").touch()
    os.kill(job.pid, number)
    assert wait_until(lambda: not marked() and not list(Path().glob("ddp_check-*")), 120)
    assert wait_until(lambda: job.status() is not None, 30)
    assert job.status() == (130 if number == signal.SIGINT else -number)
    assert left(user) == {Path("out/of another job")}


SPAWNED = f"""{SCRIPT[: SCRIPT.index("if __name__")]}
if __name__ == "__main__":
    how, world = KIND[0], int(KIND[1])
    os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{free_port()}"}}
    if world == 1 and "alone" in KIND:
        main(0, world, 16)
    elif how == "mp.spawn":
        torch.multiprocessing.spawn(main, (world, 16 // world), nprocs=world)
    else:
        context = torch.multiprocessing.get_context(how)
        ranks = [context.Process(target=main, args=(r, world, 16 // world)) for r in range(world)]
        [rank.start() for rank in ranks]
        [rank.join() for rank in ranks]
    torch.load("out/1.pt")
"""


@pytest.mark.parametrize("how", by_mark(slow=["mp.spawn"], long=["fork", "forkserver", "spawn"]))
def test_spawned(user, how):
    """A script that starts its processes itself; their files are watched, too."""
    Path("train.py").write_text(SPAWNED)
    user = content()
    alone = ["alone"] * (how == "spawn")  # one process is not started, but the script itself
    text = check("train.py", how, "{n}", "out", "divides", *alone, status=1)
    assert "6 steps on one process and on 2: 1 WRONG" in text, text
    assert "0.5 times one process's" in " ".join(text.split()), text
    assert not left(user)
    os.mkdir("out")
    Path("out/1.pt").write_text("of an earlier training")
    assert "would overwrite out/1.pt" in check("train.py", how, "{n}", "out", status=2)


@pytest.mark.long
def test_batch_size_per_process(user):
    """Without a flag: the ranks together are given one process's samples, which is said; the rest
    is right, and it takes no further run. Of an odd number, one process gets all ranks'."""
    text = check("train.py", "{n}", "own batch")
    assert runs_of(text) == [1, 2], text
    assert "a batch size per process, so 2 times the batch" in " ".join(text.split()), text
    assert "nothing WRONG, 1 to look at" in text, text
    text = check("train.py", "{n}", "odd batch")
    assert "starts again: the batch size is one per process" in text, text
    assert "nothing WRONG, 1 to look at" in text, text


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, line, what",
    [
        ("graphs", "torch.cuda.CUDAGraph()", "CUDA graphs"),
        ("deepspeed", "deepspeed.initialize(model=model)", "DeepSpeed"),
    ],
)
def test_not_compared(user, kind, line, what):
    """Named before it is used: nothing of it could be noted."""
    Path("deepspeed.py").write_text("def initialize(model): raise ValueError")  # a stand-in
    text = check("train.py", "{n}", kind, status=2)
    number = 1 + next(i for i, text in enumerate(SCRIPT.splitlines()) if line in text)
    assert f"nothing can be compared: train.py:{number}: {line}" in text, text
    assert f"not compared: {what}" in text, text


def test_list(capsys):
    command.main(["--list"])
    text = capsys.readouterr().out
    assert re.search(r"^order +.*\n +call sampler.set_epoch\(epoch\)", text, re.M), text


@pytest.mark.long
@pytest.mark.parametrize("how", ["mp.spawn", "fork"])
def test_wrong_number_of_processes(user, how):
    Path("train.py").write_text(SPAWNED)
    text = check("train.py", how, "2", status=2)
    assert "starts 2 processes, not 1\n  give the script their number in a flag, as {n}" in text


STARTS = {
    "a copy": (".", [sys.executable, "ddp_check", "train.py"]),
    "a path": ("elsewhere", [sys.executable, "../ddp_check", "../train.py"]),
    "a module": (".", [sys.executable, "-m", "ddp_check", "-m", "train"]),
    "pip": (".", ["venv/bin/ddp_check", "train.py"]),
}


def install(clone):
    """The clone, with pip, into venv/, which has torch from the environment of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], check=True)
    site = next(Path("venv/lib").glob("python*/site-packages"))
    site.joinpath("shared.pth").write_text("\n".join(p for p in sys.path if "site-pack" in p))
    pip = ["venv/bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"./{clone}"], check=True)
    shutil.rmtree(clone)
    assert [path.parent.name for path in site.glob("*/__init__.py")] == ["ddp_check"]
    rooms = {path.relative_to(ROOT) for path in (ROOT / "ddp_check").rglob("*.py")}
    assert {path.relative_to(site) for path in site.glob("ddp_check/**/*.py")} == rooms
    (name,) = [path.name for path in site.glob("*.dist-info")]
    assert name.endswith(f"-{ddp_check.__version__}.dist-info")


@pytest.mark.long
@pytest.mark.parametrize("name", STARTS)
def test_starts(user, name):
    """As a user types it, with all its processes; nor are our modules confused with the user's."""
    folder, words = STARTS[name]
    if name == "pip":
        leave_out = shutil.ignore_patterns(".*", "data", "runs")
        install(shutil.copytree(ROOT, "clone", ignore=leave_out))
    else:
        shutil.copytree(ROOT / "ddp_check", "ddp_check")
    os.makedirs(folder, exist_ok=True)
    temporary = Path(90 * "x").resolve()  # longer than a socket's name may be
    temporary.mkdir()
    user, environment = content(), os.environ | {"TMPDIR": str(temporary)}
    job = Cold([*words, "{n}", "out"], "log", cwd=folder, env=environment)
    statuses, text = finish([job])
    assert statuses == [0] and "6 steps on one process and on 2: nothing WRONG" in text, text
    assert {path for path in left(user) if "__pycache__" not in path.parts} == {Path("log")}


def test_gpus(monkeypatch):
    """Each run sees exactly its number of GPUs, of those that are visible; or none."""
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 3)
    for name in GPUS:
        monkeypatch.delenv(name, raising=False)
    assert runs.visible_gpus(1, 2) == dict.fromkeys(GPUS, "0")
    assert runs.visible_gpus(2, 2) == dict.fromkeys(GPUS, "0,1")
    assert runs.visible_gpus(1, 4) == dict.fromkeys(GPUS, "-1")
    assert runs.visible_gpus(2, 2, cpu=True) == dict.fromkeys(GPUS, "-1,-1")
    for name in GPUS:
        monkeypatch.setenv(name, "4,2,7")
        assert runs.visible_gpus(2, 2) == dict.fromkeys(GPUS, "4,2")
        monkeypatch.delenv(name)

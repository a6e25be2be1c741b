"""How the tests start the scripts: as a user does (`run`), or out of a warm process (`quick`)."""

import csv
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    "train_single",
    "train_dp",
    "train_ddp_spawn",
    "train_ddp_torchrun",
    "train_ddp_multigpu_proc",
]
DDP = SCRIPTS[2:]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 300  # seconds, for the slowest machine: no test measures time


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def script(name):
    return str(ROOT / f"{name}.py")


def commands(name, processes=1, path=None):
    """The command lines, one a machine, that start `name` with so many processes in all.

    train_ddp_multigpu_proc.py has one process a machine, so that more of them are more machines.
    """
    path = path or script(name)
    if name == "train_ddp_torchrun":
        return [[*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), path]]
    if name == "train_ddp_spawn":
        return [[sys.executable, path, "--nproc-per-node", str(processes)]]
    if name == "train_ddp_multigpu_proc" and processes > 1:
        place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", str(processes)]
        return [[sys.executable, path, *place, "--rank", str(i)] for i in range(processes)]
    assert processes == 1
    return [[sys.executable, path]]


def start(command, log, **options):
    with open(log, "wb") as file:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )


def finish(process, limit=LIMIT):
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its own session: nothing but what this test started
        process.wait()
        return "it did not end"


def run(name, *flags, processes=1, status=0, path=None, cwd=None):
    """Start a script as its users do, on all its machines, and return what was printed."""
    logs, started = [], []
    for command in commands(name, processes, path):
        logs.append(Path(f"{name}-{time.monotonic_ns()}.log").resolve())
        started.append(start([*command, *flags], logs[-1], cwd=cwd))
    ends = [finish(process) for process in started]
    text = "\n".join(log.read_text() for log in logs)
    assert ends == [status] * len(ends), (ends, text)
    return text


def inside(path, flags, log, folder, environment):
    os.chdir(folder)
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(f"{log}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
    os.setsid()
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")


forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "torchvision", "torch.distributed"])


def warm(name, *flags, path=None):
    """Start a script in a fork of a process that has imported torch: saves the seconds of that.

    Returns the process and the stem of its logs' names, which end in .1 and .2.
    """
    log = Path(f"quick-{time.monotonic_ns()}").resolve()
    place = os.getcwd(), dict(os.environ)  # those of the process that forks are older
    words = [str(flag) for flag in flags]
    process = forks.Process(target=inside, args=(path or script(name), words, log, *place))
    process.start()
    return process, log


def quick(name, *flags, status=0, path=None):
    """Run a script to its end, warm. Returns a namespace of what it printed: `out`, `err`."""
    process, log = warm(name, *flags, path=path)
    process.join(LIMIT)
    out, err = (Path(f"{log}.{stream}").read_text() for stream in (1, 2))
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{name} {flags} did not end\n{out}\n{err}")
    assert process.exitcode == status, (name, flags, process.exitcode, out, err)
    return SimpleNamespace(out=out, err=err)


def metrics(output):
    """metrics.csv as a list of rows of numbers."""
    with open(Path(output, "metrics.csv")) as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def weights(output, name="model.pt"):
    return torch.load(Path(output, name), weights_only=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def wait_for(text, log, process):
    """Until `text` is in the log."""
    end = time.monotonic() + LIMIT
    while not Path(log).exists() or text not in Path(log).read_text():
        ended = process.exitcode if hasattr(process, "exitcode") else process.poll()
        assert time.monotonic() < end and ended is None, Path(log).read_text()
        time.sleep(0.02)


def processes(parent=None):
    """The numbers of the processes that this test has started, those of their children too."""
    mark, found = f"TEST_FOLDER={os.environ['TEST_FOLDER']}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            number, environment = int(folder.name), (folder / "environ").read_bytes().split(b"\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if mark in environment and number != os.getpid() and parent in (None, above):
            found.append(number)
    return sorted(found)


def all_ended(limit=10):
    """Whether all processes of this test end within so many seconds."""
    end = time.monotonic() + limit
    while processes() and time.monotonic() < end:
        time.sleep(0.1)
    return not processes()

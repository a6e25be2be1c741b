"""How the tests start the scripts: with the commands that users type, or (`Warm`) out of a process
that has imported torch already, which saves the seconds that this takes."""

import ast
import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from same_text import COMPLETE, ROOT, SMALL
from torch.utils._pytree import tree_flatten_with_path

COUNTS = {name: 1 if name in SMALL[:2] else 2 for name in [*SMALL, COMPLETE]}  # processes
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 900  # seconds after which something hangs, on the slowest machine


def place_of(name):
    """A script's path below ROOT. Its name is one of SMALL ("dp"), or COMPLETE."""
    return f"{name}.py" if name == COMPLETE else f"train_{name}.py"


def some_fast(values, *fast):
    """Values for a test's parameter; the test is slow with all but these."""
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(value, marks=marks[value in fast]) for value in values]


def script(name):
    return str(ROOT / place_of(name))


def changed(path, *changes):
    """The path of a copy of the file, with all of complete/ if it is of that. Changes: what stands
    there, its replacement, and so on."""
    text, copy = (ROOT / path).read_text(), Path(path).resolve()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    if path.startswith("complete/"):
        shutil.copytree(ROOT / "complete", copy.parent, dirs_exist_ok=True)
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text)
    return copy


def edited(name, *changes, more=""):
    """The same of a script. `more` is code that comes before the start, where it can replace or
    wrap functions."""
    start = '\n\nif __name__ == "__main__":\n'
    return changed(place_of(name), *changes, start, f"\n\n{more}{start}")


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # of pytest-xdist
PORTS = random.sample(range(30_100 + 320 * WORKER, 30_100 + 320 * (WORKER + 1)), 320)


def free_port():
    """Each worker of pytest-xdist has its own, in turn: of a run that has failed a rank may still
    wait for its rank 0, and would join another's, and both would wait for ever. Below those that
    the system gives to connections, or another process could get it meanwhile."""
    while True:
        PORTS.append(port := PORTS.pop(0))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Cold:
    """A command as a user types it; `log` gets what it prints."""

    def __init__(self, words, log, **options):
        self.log = Path(log).resolve()
        with open(self.log, "wb") as file:
            options |= {"stdout": file, "stderr": file, "start_new_session": True}
            process = subprocess.Popen([str(word) for word in words], **options)
        self.pid, self.status = process.pid, process.poll


def execute(path, more, space):
    """What `python path` does, with this namespace. `more` is code that comes before the script's
    last statement, which starts it, where it can replace or wrap functions."""
    tree = ast.parse(Path(path).read_text())
    tree.body[-1:-1] = ast.parse(more).body
    space["__file__"] = path
    exec(compile(tree, path, "exec"), space)


def here(name, *flags, more=""):
    """A script in the test's own process."""
    path, words = script(name), [str(flag) for flag in flags]
    with mock.patch.object(sys, "argv", [path, *words]):
        try:
            execute(path, more, {"__name__": "__main__"})
        finally:
            if dist.is_initialized():  # it has failed
                dist.destroy_process_group()


def inside(path, flags, log, folder, environment, more):
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if environment.get("CUDA_VISIBLE_DEVICES") == "":  # without GPUs, a process can be forked
        # spawn's processes would import torch once more, a fork's need not.
        torch.multiprocessing.spawn = partial(
            torch.multiprocessing.start_processes, start_method="fork"
        )
    if "EMULATED_CARDS" in environment:  # it changes torch for the rest of this process
        __import__("emulated_accelerator").install(int(environment["EMULATED_CARDS"]))
    sys.argv, sys.path[:0] = [path, *flags], [os.path.dirname(path)]
    module = sys.modules["__main__"] = ModuleType("__main__")
    execute(path, more, vars(module))
    if dist.is_initialized():  # torch warns of it at the end of Python, which a fork does not reach
        print("destroy_process_group was not called", flush=True)


forks = multiprocessing.get_context("forkserver")
IMPORTED = "torch torchvision torch.distributed.checkpoint.state_dict torch.distributed.fsdp"
IMPORTED += " torchvision.transforms.v2 torch._dynamo fsspec.core pytest"
forks.set_forkserver_preload(IMPORTED.split())


class Warm:
    """A script in a fork of a process that has imported torch."""

    def __init__(self, path, flags, log, place=(), more=""):
        self.log = Path(log).resolve()
        self.log.write_bytes(b"")
        environment = {key: str(value) for key, value in {**os.environ, **dict(place)}.items()}
        words = str(path), list(map(str, flags)), self.log, os.getcwd(), environment, more
        process = forks.Process(target=inside, args=words)
        process.start()
        self.pid, self.status = process.pid, lambda: process.exitcode


def torchrun(processes, *words):
    words = ["--standalone", "--nproc-per-node", processes, *words]
    return Cold([*TORCHRUN, *words], f"torchrun-{time.monotonic_ns()}.log")


def by_hand(path, *flags, processes=1, more=""):
    """Processes that get their places from the environment: srun and Kubernetes do that too, and
    torchrun would import torch once more for each of them. With 0 processes it is one that has no
    place, as `python` starts it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    places = [place | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    logs = [f"{time.monotonic_ns()}-{rank}.log" for rank in range(len(places) or 1)]
    return [Warm(path, flags, log, place, more) for log, place in zip(logs, places or [{}])]


def start(name, *flags, processes=None, more=""):
    """Start a script on all its machines. Returns a Warm a machine, or a process."""
    path, own = script(name), [[]]
    processes = COUNTS[name] if processes is None else processes
    if name in ("ddp_torchrun", "fsdp2", COMPLETE):
        return by_hand(path, *flags, processes=processes, more=more)
    if name == "ddp_spawn":
        own = [["--nproc-per-node", processes]]
    elif processes > 1:  # one process a machine: more of them are more machines
        place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--nnodes", processes]
        own = [[*place, "--node-rank", rank] for rank in range(processes)]
    log = f"{name}-{time.monotonic_ns()}"
    return [Warm(path, [*words, *flags], f"{log}-{i}.log", (), more) for i, words in enumerate(own)]


def wait_until(condition, limit=LIMIT, pause=0.02):
    """Whether it comes true within so many seconds."""
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(pause)
    return condition()


def command(*words):
    """What a command prints. It has to succeed."""
    return subprocess.check_output(list(map(str, words)), text=True).strip()


def logs(jobs):
    return "\n".join(job.log.read_text() for job in jobs)


def finish(jobs, limit=LIMIT):
    """The exit statuses of all, and what they have printed. Once one has failed, the others, which
    may wait for it, have a minute."""

    def statuses():
        return [job.status() for job in jobs]

    wait_until(lambda: None not in statuses() or any(statuses()), limit)
    wait_until(lambda: None not in statuses(), min(limit, 60))
    return ["still there" if status is None else status for status in statuses()], logs(jobs)


def done(jobs, status=0):
    """What all have printed when they have ended, which has to be with this status."""
    statuses, text = finish(jobs)
    assert set(statuses) == {status}, (statuses, text)
    return text


def run(name, *flags, status=0, **options):
    return done(start(name, *flags, **options), status)


def begin(*runs, processes=2, more="", path=None):
    """The same of complete/train.py out of a module of the user's, which imports it and replaces or
    wraps functions there (`more`): runs with these flags, one after the other."""
    code = Path(f"more-{time.monotonic_ns()}.log").resolve()
    code.write_text(more)
    runs = json.dumps([[free_port(), [str(flag) for flag in flags]] for flags in runs])
    words = Path(path or script(COMPLETE)).parent, code, runs
    return by_hand(ROOT / "tests" / "together.py", *words, processes=processes)


def together(*runs, status=0, **options):
    """What these have printed: a text a run, which begins with rank 0's."""
    jobs = begin(*runs, **options)
    done(jobs, status)
    parts = [job.log.read_text().split("next run\n") for job in jobs]
    return ["".join(texts) for texts in zip(*parts, strict=True)]


def parse(*flags):
    import train  # not above: it counts the GPUs, before a Warm could hide them

    return train.parser.parse_args(["--device", "cpu", *map(str, flags)])


def train(*flags):
    """complete/train.py in the test's own process, as `python` starts it."""
    import train

    args = parse(*flags)
    train.check_flags(args, 1)
    try:
        train.main(args)
    finally:
        if dist.is_initialized():  # it has failed
            dist.destroy_process_group()


def wait_for(text, *jobs):
    """Until `text` is in a log of these."""
    wait_until(lambda: text in logs(jobs) or None not in [job.status() for job in jobs])
    assert text in logs(jobs), (text, logs(jobs))


def marked():
    """The processes that this test has started by a command, and theirs."""
    mark, found = f"TEST_FOLDER={os.environ['TEST_FOLDER']}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has just ended
            found += [int(path.parent.name)] * (mark in path.read_bytes().split(b"\0"))
    return sorted(set(found) - {os.getpid()})


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(jobs):
    """SIGKILL for all processes of a run, on all its machines."""
    for job in jobs:
        kill(-job.pid)  # its own session: nothing but what the test started
        kill(job.pid)  # which has no session yet
    for pid in marked():
        kill(pid)
    assert "still there" not in finish(jobs, 120)[0]


def metrics(output):
    """metrics.csv as a list of rows of numbers."""
    rows = csv.DictReader(Path(output, "metrics.csv").read_text().splitlines())
    return [{key: float(value) for key, value in row.items()} for row in rows]


def weights(output, name="model.pt"):
    return torch.load(Path(output, name), weights_only=True)


def last(output):
    return json.loads(Path(output, "last.json").read_text())


def place(output):
    """Epoch and step of the last checkpoint."""
    return last(output)["progress"]["epoch"], last(output)["progress"]["step"]


def checkpoint(output):
    """All that the last checkpoint has, as torch's converter makes one file of it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(Path(output, last(output)["checkpoint"]), "converted.pt")
    return torch.load("converted.pt", weights_only=False)


def leaves(tree):
    """Its values, in the order of their names: dictionaries may have another one."""
    return [value for _, value in sorted(tree_flatten_with_path(tree)[0], key=lambda x: str(x[0]))]


def content(folder="."):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def files(output):
    return sorted(path.name for path in Path(output).iterdir())


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def close(output, other, digits=1e-4, keys=("train_loss", "test_loss", "test_accuracy"), least=0):
    """The first run's rows in metrics.csv are those of the other, up to rounding, or to `least`."""
    a, b = ([row[key] for row in metrics(folder) for key in keys] for folder in (output, other))
    assert a and a == pytest.approx(b[: len(a)], rel=digits, abs=least), (output, other)

"""How the tests start the scripts, and alter them.

`start` starts one as users would on so many processes or machines, in forks of a process that has
imported torch already (`Warm`): importing it takes 3 to 5 seconds. `run` is that to its end, and
`together` several runs in the same processes. `here` is quicker still: in the test's own process.
`Cold` is a command as a user types it, `torchrun` one of them.

A test alters a script by starting a copy: `more` is code that comes before its last lines, which
start it, where it can replace or wrap functions; `altered` also replaces text. What a test assigns
by monkeypatch are attributes of Python's and torch's modules, or of one whose functions it calls.
"""

import ast
import csv
import gc
import itertools
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from altered import COMPLETE, write_altered
from same_text import ROOT, SMALL, script_path
from torch.utils._pytree import tree_flatten_with_path

COUNTS = {name: 1 if name in SMALL[:2] else 2 for name in [*SMALL, COMPLETE]}  # processes
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 900  # seconds after which something hangs, on the slowest machine


def some_fast(values, *fast):
    """Values for a test's parameter; the test is slow with all but these."""
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(value, marks=marks[value in fast]) for value in values]


def by_mark(**values):
    """Values for a test's parameter: those that are slow, and those that take minutes each."""
    return [
        pytest.param(value, marks=getattr(pytest.mark, mark))
        for mark, some in values.items()
        for value in some
    ]


def script(name):
    """The path of a script: one of SMALL ("dp"), a path below ROOT (COMPLETE), or any other."""
    return script_path(name) if name in SMALL else ROOT / name


def altered(name, *changes, more="", titles=()):
    """The path of a copy of a script, in a folder of its own: see write_altered."""
    folder = Path(f"altered-{time.monotonic_ns()}").resolve()
    return write_altered(script(name), folder, *changes, more=more, titles=titles)


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


def few(train_count, test_count):
    """Code for `more`: load_data returns so many images, if there are as many."""
    return f"""
def first(dataset, count):
    if hasattr(dataset, "tensors"):  # of which complete/train.py takes whole batches
        return torch.utils.data.TensorDataset(*dataset[:count])
    return torch.utils.data.Subset(dataset, range(min(count, len(dataset))))

all_images = load_data

def load_data(args):
    train_set, test_set, classes = all_images(args)
    return first(train_set, {train_count}), first(test_set, {test_count}), classes
"""


# What Python ends by then: that signal, or where a thread of its own takes it up later, its number
ENDED_BY_CTRL_C = -signal.SIGINT, 128 + signal.SIGINT


class Cold:
    """A command as a user types it in a terminal; `log` gets what it prints."""

    def __init__(self, words, log, **options):
        self.log = Path(log).resolve()
        with open(self.log, "wb") as file:
            options |= {"stdout": file, "stderr": file, "start_new_session": True}
            process = subprocess.Popen([str(word) for word in words], **options)
        self.pid, self.status = process.pid, process.poll


def here(name, *flags, more="", **place):
    """A script in the test's own process, which has this environment besides."""
    path = altered(name, more=more) if more else script(name)
    place = {key: str(value) for key, value in place.items()}
    words = [str(word) for word in [path, *flags]]
    with mock.patch.dict(os.environ, place), mock.patch.object(sys, "argv", words):
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            if dist.is_initialized():  # it has failed
                dist.destroy_process_group()


def train(*flags, more=""):
    """complete/train.py there. Without `more` it is the module `train`, in which a test may replace
    functions by monkeypatch."""
    if more:
        return here(COMPLETE, "--device", "cpu", *flags, more=more)
    import train  # not above: it counts the GPUs, before a Warm could hide them

    try:
        train.main(parse(*flags))
    finally:
        if dist.is_initialized():  # it has failed
            dist.destroy_process_group()


def parse(*flags):
    import train

    return train.parser.parse_args(["--device", "cpu", *map(str, flags)])


class Kept(torch.nn.parallel.DistributedDataParallel):
    """Its process group is never destroyed. torch 2.9, where a DDP is the last one that has the
    group, joins the threads of Gloo with Python's lock held, for which they may be waiting."""

    alive = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.alive.append(self.process_group)


def inside(path, runs, log, folder, environment):
    gc.freeze()  # what is there already: looking through it would copy its memory
    os.setsid()
    if torch.__version__ < "2.10":
        torch.nn.parallel.DistributedDataParallel = Kept
    tempfile.tempdir = None  # TMPDIR is another one
    multiprocessing.set_start_method("fork", force=True)  # loader workers would import torch again
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
    sys.path[:0] = [os.path.dirname(path)]
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = path
    tree = ast.parse(Path(path).read_text())
    parts = tree, ast.Module([tree.body.pop()], [])
    for i, (port, flags) in enumerate(runs):
        os.environ["MASTER_PORT"], sys.argv = str(port), [path, *flags]
        try:
            for part in parts if i == 0 else parts[1:]:
                exec(compile(part, path, "exec"), vars(module))
        except SystemExit as end:
            if i == len(runs) - 1:
                raise
            print(f"SystemExit: {end}")
        if dist.is_initialized():  # torch warns of it at the end of Python, which no fork reaches
            print("destroy_process_group was not called", flush=True)
        if i < len(runs) - 1:
            if dist.is_initialized():
                dist.destroy_process_group()
            print("next run", flush=True)


forks = multiprocessing.get_context("forkserver")
IMPORTED = "torch torchvision torch.distributed.checkpoint.state_dict torch.distributed.fsdp"
IMPORTED += " torchvision.transforms.v2 torch._dynamo fsspec.core pytest"
forks.set_forkserver_preload(IMPORTED.split())


class Warm:
    """A script in a fork of a process that has imported torch. It is loaded once, and its last
    statement, which starts it, is executed for each run: MASTER_PORT and flags. A run that ends by
    SystemExit does not keep the next one from starting."""

    def __init__(self, path, runs, log, place):
        self.log = Path(log).resolve()
        self.log.write_bytes(b"")
        runs = [[port, [str(flag) for flag in flags]] for port, flags in runs]
        environment = {key: str(value) for key, value in {**os.environ, **place}.items()}
        words = str(path), runs, self.log, os.getcwd(), environment
        process = forks.Process(target=inside, args=words)
        process.start()
        self.pid, self.status = process.pid, lambda: process.exitcode


def torchrun(*words):
    return Cold([*TORCHRUN, *words], f"torchrun-{time.monotonic_ns()}.log")


def places(processes, gpus=None):
    """The environment of each process, in which torchrun, srun and Kubernetes tell it its place.
    With fewer GPUs than processes, several have one. With 0 processes it is one without a place, as
    `python` starts it."""
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    own = [{"RANK": rank, "LOCAL_RANK": rank % (gpus or processes)} for rank in range(processes)]
    return [shared | ranks for ranks in own] or [{}]


def start_runs(name, runs, processes=None, more="", gpus=None, **environment):
    """Start a script on all its machines, for these runs, one after the other: the flags of each,
    or a function that returns those of a rank. Returns a Warm a machine; or a process, where
    torchrun would start it."""
    path = altered(name, more=more) if more else script(name)
    processes = COUNTS[name] if processes is None else processes
    every, own = [{}], [[]]
    if path.name == "train_ddp_spawn.py":
        meet = f"tcp://127.0.0.1:{free_port()}"
        own = [["--nproc-per-node", processes, "--init-method", meet]]
    elif path.name == "train_ddp_multigpu_proc.py":  # one process a machine
        place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--nnodes", processes]
        own = [[*place, "--node-rank", rank] for rank in range(processes)]
    elif path.name not in ("train_single.py", "train_dp.py"):
        every = places(processes, gpus)
    ports, jobs = [free_port() for _ in runs], []
    for i, (place, words) in enumerate(itertools.product(every, own)):
        own_flags = [flags(i) if callable(flags) else flags for flags in runs]
        each = [[port, [*words, *flags]] for port, flags in zip(ports, own_flags)]
        log = f"{path.stem}-{time.monotonic_ns()}-{i}.log"
        jobs.append(Warm(path, each, log, environment | place))
    return jobs


def start(name, *flags, **options):
    return start_runs(name, [flags], **options)


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


def together(*runs, path=COMPLETE, status=0, processes=2, **options):
    """Runs of one script with these flags, one after the other in the same processes. Returns what
    they have printed: a text a run, which begins with rank 0's."""
    jobs = start_runs(path, runs, processes=processes, **options)
    done(jobs, status)
    parts = [job.log.read_text().split("next run\n") for job in jobs]
    return ["".join(texts) for texts in zip(*parts, strict=True)]


def wait_for(text, *jobs):
    """Until `text` is in a log of these, in a line that is written to its end."""

    def written():
        return any(text in job.log.read_text().rpartition("\n")[0] for job in jobs)

    wait_until(lambda: written() or None not in [job.status() for job in jobs])
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
    """The state_dict in it, which in complete/ and large/ has company."""
    saved = torch.load(Path(output, name), weights_only=True)
    return saved.get("model", saved)


def checkpoint(output):
    """What the last checkpoint has; {} while there is none."""
    path = Path(output, "checkpoint.pt")
    if not path.exists() or path.stat().st_size == 0:
        return {}
    return torch.load(path, weights_only=True)


def place(output):
    """Epoch and step of the last checkpoint."""
    progress = checkpoint(output).get("progress", {"epoch": 0, "step": 0})
    return progress["epoch"], progress["step"]


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

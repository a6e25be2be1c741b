"""Runs your unchanged training script on one process and on two, and says where they part.

python compare.py train.py --its --own flags
python compare.py --steps 40 --short 10 train.py --output runs/{run} --its --own flags
python compare.py -m package.train --its --own flags
python compare.py train.py --nproc {n}                  # a script that starts its processes itself
python compare.py --one "--batch-size 64" train.py --batch-size 32    # a batch size per process

A right script does the same on N processes as on one, up to rounding: samples, losses, gradients,
weights. To compare them, both runs draw the same random numbers here: noise for a share of the
batch is that share of what one process draws, and a sample is augmented alike wherever it is
loaded. On one process, batch norm takes each share's own statistics, as DDP does, and MixUp and
CutMix (a batch that is rolled or flipped) mix the samples of a share. Mixed precision, TF32,
torch.compile and dropout are off, and samples are made without loader workers (and without
worker_init_fn). After each step, the N processes get the weights that one process has: each step is
a test of its own, and rounding cannot grow. For that, each step writes weights, gradients and the
optimizer's moments to TMPDIR, about five times the model.

In flags, {run} is "one" or "all", {n} the number of processes, {rank} this one's, {port} a free
port; a value that begins with a dash needs a =, as in --one=--amp. After each run, what the script
has created is removed, and what it has overwritten, removed or renamed is put back, from a copy in
TMPDIR; what it downloads stays, and ~/.cache. That is seen of torch.save and of Python's files, not
of what C++ writes (safetensors, cv2.imwrite, torch.jit.save, h5py), or of processes that the script
starts itself.

"WRONG" needs a change: gradients or weights differ. "look" may be intended: a sample's result
depends on which others are in its batch (adaptive solvers, k-means, a Dice loss of the batch, a
GAN's minibatch statistics), or a number that is printed is another one. Status 1 if something is
WRONG, 2 if nothing could be compared, as with the same batch size on each side.

It does not see what is wrong in both runs, nor random numbers that should be another's, as they are
given here: equal seeds of ranks or workers, a number drawn once for a batch by each rank, no
set_epoch. These are check.py's. Nor: weights that no optimizer has (an average of them, a teacher),
settings that are no single number (Adam's betas), a step that differs by less than 5 %, batches
that are cut into pieces of a fixed size, several machines, processes started by Process(...).

Right, but WRONG here: random numbers for each sample of a batch in a Python loop, or by
np.random.permutation(len(x)), or of generators of the script's own (np.random.default_rng,
random.Random) seeded by rank, in the loop or in a dataset; loaders other than torch's that shuffle;
weights of 16 bits and hooks that round gradients (give a larger --tolerance).
"""

import argparse
import ast
import contextlib
import faulthandler
import functools
import gc
import inspect
import itertools
import json
import linecache
import math
import operator
import os
import pickle
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
import zlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset
from torch.utils.data._utils import fetch as fetchers

parser = argparse.ArgumentParser(
    usage="python compare.py [flags] script.py [script's flags]",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps to compare")
parser.add_argument("--nproc", type=int, default=2, help="processes of the second run")
parser.add_argument("--short", type=int, help="end each pass over a DataLoader after these batches")
parser.add_argument("--one", default="", help="further flags of the script on one process")
parser.add_argument("--tolerance", type=float, help="of gradients [3e-4, on GPUs 3e-3]")
parser.add_argument("--seed", type=int, default=0, help="of all random numbers, in both runs")
parser.add_argument("--wait", type=float, default=120, help="seconds without advance: it hangs")
parser.add_argument("-m", action="store_true", help="the script is a module, as in python -m")
parser.add_argument("script", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

HERE = os.path.abspath(__file__)
START = os.getcwd()  # paths are relative to it, also after os.chdir
UNKNOWN = "?"  # a place that is in no file of the script's own
STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
SCRIPT_FOLDER = [START + os.sep]  # main sets it: also an environment may be in it, or it in one
LEAVE = os._exit
ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SPAWNS = 75  # exit status of a script that would start processes itself
BATCH_NORM = r"running_mean$|running_var$|num_batches_tracked$"  # averages: each rank's own
MANY_VALUES = 50  # of a line and step that are noted
MANY_COLUMNS = 4096


# ---- what is started: the script on one process, then on N


def launch(words, env, log):
    """Start a process, with what it starts in a group of its own."""
    with open(log, "wb") as file:
        return subprocess.Popen(words, env=env, stdout=file, stderr=file, start_new_session=True)


def stop(processes):
    """End them, and what they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def uninterrupted():
    """Until its end, Ctrl-C and other signals do nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class NotRestored(Exception):
    """A file of the user's is still where compare.py has kept it."""


def is_folder(path):
    return os.path.isdir(path) and not os.path.islink(path)


def remove(path):
    with contextlib.suppress(OSError):
        if is_folder(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)


def copy(path, target):
    """Of a file, a link, or a folder with all that is in it."""
    if is_folder(path):
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copy2(path, target, follow_symlinks=False)


def free_port():
    """Below those of outgoing connections, one of which could take it before the script does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class BothRuns:
    def __init__(self, args, folder, layout):
        self.args, self.folder, self.layout = args, folder, layout
        self.spawns = False  # the script starts its processes itself

    def run_both(self):
        """The report, and the exit status."""
        for name, nproc in (("one", 1), ("all", self.args.nproc)):
            began = time.monotonic()
            self.run(name, nproc)
            print(f"compare.py: {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
            one = Notes(self.folder, "one", 0)
            if not os.path.exists(f"{self.folder}/one.draws"):
                return f"compare.py: the run on one process was cut off: {one.end()}", 2
            if not one[Step]:
                text = "look   end        no optimizer.step() on one process, whose run ended with "
                return f"{text}{one.end()}: nothing can be compared", 2
        on_gpus = torch.cuda.device_count() >= self.args.nproc
        tolerance = self.args.tolerance or (3e-3 if on_gpus else 3e-4)
        return report(self.folder, self.args.nproc, tolerance)

    def run(self, name, nproc):
        """Run the script once, to its end or to --steps, and undo what it has done to files."""
        port, processes = free_port(), []
        options = vars(self.args) | {"folder": self.folder, "run": name}
        options |= {"layout": self.layout, "spawns": self.spawns}
        env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        env.setdefault("OMP_NUM_THREADS", "1")
        if 0 < torch.cuda.device_count() < self.args.nproc:
            env["CUDA_VISIBLE_DEVICES"] = ""
        try:
            for rank in range(1 if self.spawns else nproc):
                options["flags"] = self.flags(name, nproc, rank, port)
                own = {} if self.spawns else environment(rank, nproc, port)
                own["OWN_LOOP_COMPARE"] = json.dumps(options)
                log = f"{self.folder}/{name}.{rank}.log"
                processes.append(launch([sys.executable, HERE], env | own, log))
            self.wait(name, nproc, processes)
        finally:
            with uninterrupted():
                stop(processes)
                self.restore_files(name, nproc)
        if processes[0].returncode == SPAWNS:
            self.spawns = True
            self.run(name, nproc)

    def flags(self, name, nproc, rank, port):
        flags = self.args.flags + (shlex.split(self.args.one) if name == "one" else [])
        values = {"{run}": name, "{n}": nproc, "{rank}": rank, "{port}": port}
        for key, value in values.items():
            flags = [flag.replace(key, str(value)) for flag in flags]
        return flags

    def wait(self, name, nproc, processes):
        """Until all have ended, or one has failed and the others wait for it, or all hang."""
        sizes, since = None, time.monotonic()
        side = "on one process" if nproc == 1 else f"on {nproc} processes"
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            notes = [f"{self.folder}/{name}.{rank}.notes" for rank in range(nproc)]
            now = [os.path.getsize(file) for file in notes if os.path.exists(file)]
            if now != sizes:
                sizes, since = now, time.monotonic()
            idle = time.monotonic() - since
            if idle > 3 and any(process.poll() for process in processes):
                break
            if idle > self.args.wait:
                print(
                    f"compare.py: {side}: nothing new for {self.args.wait:.0f} s; "
                    f"if it is only slow, --wait {5 * self.args.wait:.0f}"
                )
                return
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status != 0]
        if failed and SPAWNS not in statuses:  # show the first, which lost no connection to another
            ends = {rank: Notes(self.folder, name, rank).end() for rank in failed}
            first = [rank for rank in failed if "Connection" not in ends[rank]] or failed
            print(f"compare.py: {side}: rank {first[0]} failed; the end of what it printed:")
            with open(f"{self.folder}/{name}.{first[0]}.log", errors="replace") as log:
                print(re.sub("Extension modules: .*", "", log.read())[-2500:])  # of a C++ abort

    def restore_files(self, name, nproc):
        """Undo what a run has done to files, newest first: what was there before is put back, and
        what it has created goes, or the next run would meet it, but not downloads."""
        notes = [Notes(self.folder, name, rank) for rank in (*range(nproc), "parent")]
        files = [(step, file) for of_rank in notes for step, file in of_rank[File]]
        downloads, failed = {file.path for _, file in files if file.kind == "downloaded"}, False
        for step, file in sorted(files, key=lambda each: each[1].time, reverse=True):
            around = {file.path, *map(str, Path(file.path).parents)}
            if file.kind == "created" and (step or not around & downloads):
                remove(file.path)
            elif file.kind == "changed":
                remove(file.path)
                try:
                    os.makedirs(os.path.dirname(file.path), exist_ok=True)
                    copy(file.kept, file.path)
                except OSError as error:
                    print(f"compare.py: {file.path} could not be put back: {error}")
                    print(f"  as it was before, it is kept as {file.kept}", flush=True)
                    failed = True
        if failed:
            raise NotRestored


def environment(rank, nproc, port):
    """What torchrun would set."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "compare",
    }
    return {name: str(value) for name, value in values.items()}


# ---- what is recorded: the notes of a process


@dataclass
class Value:
    """What a line of the script has computed, in the order of the script."""

    kind: str  # "value" of one operation, "inputs" and "outputs" of a model, "loss"
    line: str
    name: str  # of the operation or model
    number: int  # the n-th of this line and name in the step
    summaries: list  # of each tensor
    index: int = 0  # of this value, in this process
    made_from: list = field(default_factory=list)  # indices of values
    by_gradient: bool = False  # divided by something that has a gradient
    model: int | None = None  # index of the inputs of the model inside of which it is
    called_at: str = ""  # the script's line that has called the function of this line
    made_by: str = ""  # of a batch, the line where the dataset's __getitem__ begins


@dataclass
class PassEnd:
    """A DataLoader has been iterated: (line, how often before), and how many batches it gave."""

    key: tuple
    batches: int


@dataclass
class Batch:
    key: tuple  # of the pass
    number: int
    indices: list | None  # of its samples
    rows: int | None
    batches: int | None  # that the pass is to have


@dataclass
class Step:
    """An optimizer's step: the learning rate and other numbers."""

    key: tuple  # the optimizer's number, its step
    line: str
    callers: list  # the script's lines that have called the function of this line
    settings: list
    made: list  # the lines that made the optimizer and its schedulers
    variables: dict  # {name: number} of the script's plain numbers


class Difference(NamedTuple):
    """Of a tensor of run N from that of run one."""

    size: float  # these three are norms
    one: float
    other: float
    ratio: float  # how many times run one's it is
    mark: float  # a number by which those of several ranks are compared


@dataclass
class Compared:
    """Tensors of run N beside those of run one, at an optimizer's step."""

    kind: str  # "weights" and "gradients" before it, "update", "buffers"
    line: str
    differences: dict  # {name: tuple(Difference)}, plain, as not each process can pickle the class
    missing: list  # names that only one side has


@dataclass
class Printed:
    line: str
    text: str


@dataclass
class Said:
    """Something for the user to know ("note"), or the "order" of a batch's samples over ranks."""

    kind: str
    text: str


@dataclass
class File:
    """A path that the script creates, changes or removes, or to which it has downloaded data."""

    kind: str  # "created", "changed", "downloaded"
    path: str
    kept: str = ""  # a copy of what was there
    time: float = field(default_factory=time.time)


@dataclass
class End:
    state: str


# ---- in each process: lines, replaced functions, where a rank's samples are


def is_library(path):
    """Whether a file belongs to Python or to an installed package, not to the script."""
    if path.startswith(SCRIPT_FOLDER[0]):
        inside = os.sep + path.removeprefix(SCRIPT_FOLDER[0])
        in_python = path.startswith(STANDARD) and not SCRIPT_FOLDER[0].startswith(STANDARD)
        return in_python or any(name in inside for name in INSTALLED)
    return path.startswith(STANDARD) or any(name in path for name in INSTALLED)


@functools.cache
def own_file(name):
    """The path of a file of the script's own code; None for libraries and this file."""
    path = os.path.normpath(os.path.join(START, name))
    if path == HERE or name.startswith("<") or is_library(path) or not os.path.exists(path):
        return None
    return min(path, os.path.relpath(path, START), key=len)


def own_lines(frame):
    """`file:line` of the script's own code, innermost first."""
    found = [(own_file(f.f_code.co_filename), line) for f, line in traceback.walk_stack(frame)]
    return [f"{file}:{line}" for file, line in found if file] or [UNKNOWN]


def place():
    """The line of the script that we are called from, and those that called it."""
    return tuple(own_lines(sys._getframe(1)))


def replace(owner, name):
    """A decorator: the function replaces owner.name, and gets the original as its first argument.
    What torch.compile traces is left alone."""

    def decorate(function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)

    return decorate


class PerThread(threading.local):
    in_dataset = False  # where each sample has a seed of its own
    quiet = False  # what happens is not the script's
    sync = False  # inside of SyncBatchNorm
    batch = None  # the number of samples that are made into a batch
    indices = None  # of the samples of the last batch


class Run:
    """What this process knows, and the notes that it takes."""

    def __init__(self, rank=None):
        self.options = json.loads(os.environ["OWN_LOOP_COMPARE"])
        self.folder, self.world = self.options["folder"], self.options["nproc"]
        self.name = self.options["run"]
        self.one = self.name == "one"  # the run on one process, not on all
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.thread = PerThread()
        self.steps, self.counts, self.pid = 0, {}, os.getpid()
        self.lock = threading.RLock()
        self.loader_rows = self.model_rows = None  # of this process's batch
        self.order = None  # where the batch's samples are in one process's batch
        self.joined = set()  # sizes of several views of a batch that the script has joined by cat
        self.model = None  # the outermost model that computes now
        self.draws, self.given, self.batches = {}, {}, {}  # of the run on one process
        self.made = {}  # lines that made optimizers and schedulers
        self.notes = open(f"{self.folder}/{self.name}.{self.rank}.notes", "wb")
        if not self.one:
            with open(f"{self.folder}/one.draws", "rb") as file:
                steps, self.draws, self.given, self.batches = pickle.load(file)
                self.options["steps"] = steps

    def note(self, note):
        if os.getpid() == self.pid and not self.notes.closed:
            with self.lock:
                pickle.dump((self.steps, type(note).__name__, vars(note)), self.notes)
                self.notes.flush()

    def say(self, text, kind="note"):
        if not self.number("said", text):
            self.note(Said(kind, text))

    def number(self, *key):
        """0, 1, 2, ...: how often this key was asked for."""
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

    def hash(self, *key):
        """A seed, which differs between keys."""
        return zlib.crc32(repr((self.options["seed"], *key)).encode())

    @contextlib.contextmanager
    def quiet(self):
        """What happens inside is not the script's."""
        before, self.thread.quiet = self.thread.quiet, True
        try:
            yield
        finally:
            self.thread.quiet = before

    def end(self, state):
        self.note(End(state))
        if self.one:
            with open(f"{self.folder}/one.draws", "wb") as file:
                known = self.options["steps"], self.draws, self.given, self.batches
                pickle.dump(known, file)
        sys.stdout.flush()
        if state != "--steps":
            return
        open(f"{self.folder}/{self.name}.{self.rank}.done", "w").close()
        for _ in range(300):  # the others may still need this rank
            others = range(1 if self.one else self.world)
            if all(os.path.exists(f"{self.folder}/{self.name}.{r}.done") for r in others):
                break
            time.sleep(0.1)
        LEAVE(0)

    # ---- where a rank's samples are among those of one process

    def positions(self, rank, size, order=None):
        """Where a rank's `size` entries of a dimension are among those of one process. A sample may
        have several. `order`: the rows of one process's batch that the rank has, if known."""
        ranks = self.world if self.one else 1
        loader_rows, model_rows = [(n or 0) // ranks for n in (self.loader_rows, self.model_rows)]
        batch = loader_rows or model_rows or size
        if model_rows and size % batch and size % model_rows == 0:
            batch = model_rows
        if size < batch or size % batch:
            batch = size
        rows = torch.arange(rank, batch * self.world, self.world)
        if order is not None and len(order) == batch:
            rows = torch.tensor(order)
        elif self.options["layout"] == "blocks":
            rows = torch.arange(rank * batch, (rank + 1) * batch)
        times = size // max(batch, 1)
        # Several views of the batch, one after the other.
        if size == model_rows or size * ranks in self.joined:
            return torch.cat([rows + view * batch * self.world for view in range(times)])
        return (rows[:, None] * times + torch.arange(times)).reshape(-1)

    def shared_dimension(self, shape_of_one, shape):
        """The dimension of which a rank has its share of one process's; None if there is none. The
        others may be shorter, where a batch is padded to its longest sample."""
        both = list(zip(shape_of_one, shape))
        if len(shape_of_one) != len(shape) or any(one < own for one, own in both):
            return None
        shared = [d for d, (one, own) in enumerate(both) if one == self.world * own]
        equal = sum(one == own for one, own in both)
        return shared[0] if shared and (equal == len(shape) - 1 or shared[0] == 0) else None

    def share_of(self, values, shape):
        """This rank's part of one process's random numbers."""
        d = self.shared_dimension(values.shape, shape)
        values = values.index_select(d, self.positions(self.rank, shape[d], self.order))
        return values[tuple(slice(n) for n in shape)]

    def by_share(self, tensor, function):
        """On one process: what `function` makes of the rows of each rank, as rows of the batch."""
        ranks = range(self.world)
        places = [self.positions(rank, len(tensor) // self.world) for rank in ranks]
        places = [at.to(tensor.device) for at in places]
        with self.quiet():
            outputs = [function(rank, tensor[at]) for rank, at in zip(ranks, places)]
            return torch.cat(outputs)[torch.cat(places).argsort()]


# ---- how draws are paired: random numbers are those of one process


def pair(run, name, shape):
    """Which draw of one process this is: a key for its seed, and its shape. It has the same lines,
    from the innermost to the outermost, so that what one rank alone draws does not count; or else
    the same innermost line, or else any. Of these, it is the n-th in the step."""
    lines = place()
    ways = [
        (run.steps, where, name, run.number("draw", run.steps, where, name))
        for where in (lines, lines[0], "any")
    ]
    key = ways[1]
    if run.one:
        for way in ways:
            run.draws.setdefault(way, (key, shape))
        return key, shape
    found = [run.draws[way] for way in ways if way in run.draws]
    found = found[:-1] or found
    for key_of_one, shape_of_one in found:
        if shape_of_one == shape or run.shared_dimension(shape_of_one, shape) is not None:
            return key_of_one, shape_of_one
    return found[0][0] if found else key, shape


def of_own_generator(run, name, values):
    """Numbers of a generator that the script has made: left alone, but where a rank has drawn its
    share, they are that share of what one process has drawn."""
    shape = tuple(values.shape)
    key, shape_of_one = pair(run, f"{name} of a generator", shape)
    if run.one and values.numel() < 1_000_000:
        run.given[key] = values.detach().cpu().clone()
    if shape_of_one == shape or key not in run.given:
        return values
    return run.share_of(run.given[key], shape)


def permutation(run, name, n):
    """If it may be one of the batch: within each share, as N processes do."""
    key, (total,) = pair(run, name, (n,))
    share = n // run.world

    def shuffled(rank, n):
        return torch.randperm(n, generator=torch.Generator().manual_seed(run.hash(key, rank)))

    if total != n:
        return shuffled(run.rank, n)
    if n % run.world or run.world > share:
        return shuffled(0, n)
    values = torch.empty(n, dtype=torch.long)
    for rank in range(run.world):
        at = run.positions(rank, share)
        values[at] = at[shuffled(rank, share)]
    return values


def is_plain(tensor):
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


class Draws(TorchDispatchMode):
    """Inside of it, torch draws the random numbers that one process draws, or the rank's share.
    What it sees are operators, whose arguments have names, however they were called."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, name, run = kwargs or {}, op._schema.name, self.run
        out = op(*args, **kwargs)  # has the shape that the rank wants
        if torch.Tag.nondeterministic_seeded not in op.tags or not is_plain(out):
            return out
        if kwargs.get("generator") is not None:
            return out.copy_(of_own_generator(run, name, out))
        if name == "aten::randperm":
            return out.copy_(permutation(run, name, len(out)))
        shape = tuple(out.shape)
        key, shape_of_one = pair(run, name, shape)
        names = [argument.name for argument in op._schema.arguments]
        args = [self.of_one(*each, shape, shape_of_one) for each in zip(names, args)]
        kwargs = {k: self.of_one(k, value, shape, shape_of_one) for k, value in kwargs.items()}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(run.hash(key))
            values = op(*args, **kwargs)
        return out.copy_(values if shape == shape_of_one else run.share_of(values, shape))

    def of_one(self, name, value, shape, shape_of_one):
        """An argument, on the CPU, for a result of one process's shape. Of a tensor of parameters,
        this rank's have their places there, and stand for those of the others."""
        if name == "size":
            return shape_of_one
        if name == "num_samples":
            return shape_of_one[-1]
        if name == "device":
            return torch.device("cpu")
        if not torch.is_tensor(value):
            return value
        value = value.cpu().contiguous()
        d = self.run.shared_dimension(shape_of_one, shape)
        if shape == shape_of_one or value.dim() != len(shape) or value.shape[d] != shape[d]:
            return value
        sizes = [m if n == k else n for n, k, m in zip(value.shape, shape, shape_of_one)]
        times = [math.ceil(m / n) for n, m in zip(value.shape, sizes)]
        wide = value.repeat(times)[tuple(slice(m) for m in sizes)]
        part = wide[tuple(slice(None if i == d else n) for i, n in enumerate(value.shape))]
        part.index_copy_(d, self.run.positions(self.run.rank, shape[d], self.run.order), value)
        return wide


def control_torch(run):
    """Random functions of torch get the numbers of one process."""

    def watch(owner, name):
        @replace(owner, name)
        def draw(original, *args, **kwargs):
            if run.thread.in_dataset or run.thread.quiet:
                return original(*args, **kwargs)
            with run.quiet(), Draws(run):
                return original(*args, **kwargs)

    functions = "rand randn rand_like randn_like randint randint_like randperm normal bernoulli"
    functions += " multinomial poisson binomial _sample_dirichlet _standard_gamma"
    methods = "bernoulli multinomial bernoulli_ normal_ uniform_ random_ exponential_ log_normal_"
    methods += " cauchy_ geometric_"
    for owner, names in ((torch, functions), (torch.Tensor, methods)):
        for name in names.split():
            watch(owner, name)


def control_dropout():
    """It is off."""
    for name in [name for name in dir(F) if "dropout" in name]:

        @replace(F, name)
        def dropout(original, input, p=0.5, training=True, inplace=False):
            return original(input, p, False, inplace)

    @replace(F, "scaled_dot_product_attention")
    def attention(original, query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    @replace(nn.RNNBase, "__init__")
    def recurrent(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.dropout = 0.0


def control_python(run):
    """Python's and numpy's global generators: alike on all ranks, whatever seeds these set, and
    from each of the script's lines on. numpy's arrays are shared like torch's."""

    def watch_seed(owner):
        @replace(owner, "seed")
        def seed(original, *args, **kwargs):
            if run.thread.in_dataset:
                return original(*args, **kwargs)
            return original(run.hash(owner.__name__, run.steps))

    def watch(owner, name, size_at=math.inf):
        """A function that takes a `size` after so many other arguments."""

        @replace(owner, name)
        def draw(original, *args, **kwargs):
            if run.thread.in_dataset or run.number("python", run.steps, place(), name) >= 1000:
                return original(*args, **kwargs)  # so many would take time
            args = list(args)
            size = args[size_at] if len(args) > size_at else kwargs.get("size")
            shape = () if size is None else tuple(map(int, np.ravel(size)))
            key, shape_of_one = pair(run, f"{owner.__name__}.{name}", shape)
            inspect.unwrap(owner.seed)(run.hash(key))
            if shape == shape_of_one:
                return original(*args, **kwargs)
            if len(args) > size_at:
                args[size_at] = shape_of_one
            else:
                kwargs["size"] = shape_of_one
            values = original(*args, **kwargs)
            with run.quiet():
                at = torch.arange(values.size).reshape(shape_of_one)
                return values.ravel()[run.share_of(at, shape).numpy()]

    watch_seed(random)
    watch_seed(np.random)
    names = "random choice choices uniform randint randrange gauss sample shuffle betavariate"
    for name in names.split():
        watch(random, name)
    sizes = {"random": 0, "random_sample": 0, "standard_normal": 0, "exponential": 1, "poisson": 1}
    sizes |= {"choice": 1, "uniform": 2, "normal": 2, "randint": 2, "beta": 2, "binomial": 2}
    sizes |= {"permutation": math.inf, "shuffle": math.inf}
    for name, size_at in sizes.items():
        watch(np.random, name, size_at)
    replace(np.random, "rand")(lambda original, *size: np.random.random_sample(size or None))
    replace(np.random, "randn")(lambda original, *size: np.random.standard_normal(size or None))


# ---- samples: the same in both runs, augmented alike


def seed_all(seed, torch_too=True):
    if torch_too:
        torch.default_generator.manual_seed(seed)
    inspect.unwrap(random.seed)(seed)
    inspect.unwrap(np.random.seed)(seed)


@contextlib.contextmanager
def own_numbers(run):
    """Random numbers of a dataset, which do not change the script's others."""
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
    run.thread.in_dataset = True
    try:
        yield
    finally:
        run.thread.in_dataset = False
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])


def base_index(dataset, index):
    """A sample's index in the dataset itself, below all Subsets."""
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        return operator.index(index)
    except TypeError:
        return repr(index)


def control_datasets(run):
    """Each sample is drawn with a seed of its own; what makes the batch, with one of the batch."""

    @replace(fetchers._MapDatasetFetcher, "fetch")
    def fetch(original, self, indices):
        number = self.__dict__.setdefault("compare_number", 0)
        self.compare_number += 1
        with own_numbers(run):
            if not self.auto_collation:
                seed_all(run.hash("batch", number))
                batch = original(self, indices)
            else:  # one by one, also from a dataset that has __getitems__
                samples = []
                for index in indices:
                    seed_all(run.hash("sample", base_index(self.dataset, index)))
                    samples.append(self.dataset[index])
                seed_all(run.hash("batch", number))
                run.thread.batch = len(samples)
                try:
                    batch = self.collate_fn(samples)
                finally:
                    run.thread.batch = None
        is_list = isinstance(indices, (list, tuple))
        run.thread.indices = [base_index(self.dataset, i) for i in indices] if is_list else None
        return batch

    class Seeded:
        """The k-th sample of a rank is the (k * world + rank)-th of one process."""

        def __init__(self, iterator):
            self.iterator, self.k = iterator, 0

        def __next__(self):
            seed_all(run.hash("item", self.k if run.one else self.k * run.world + run.rank))
            self.k += 1
            return next(self.iterator)

    @replace(fetchers._IterableDatasetFetcher, "fetch")
    def fetch_items(original, self, indices):
        if not isinstance(self.dataset_iter, Seeded):
            self.dataset_iter = Seeded(self.dataset_iter)
        with own_numbers(run):
            return original(self, indices)


STREAM = "a batch of an IterableDataset"


def length(sized):
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # some samplers do not know it
        return None


def watch_loaders(run):
    """The samples of each batch, and the batches of each pass. There are no workers: samples are
    made where random numbers and files are watched."""

    @replace(RandomSampler, "__iter__")
    def shuffle(original, self):
        """The order of a DistributedSampler, which the ranks may have instead of it."""
        number = self.__dict__.setdefault("compare_number", 0)
        self.compare_number += 1
        size = len(self.data_source)
        if self.generator is not None or self.replacement or self.num_samples != size:
            return original(self)
        g = torch.Generator().manual_seed(number)
        return iter(inspect.unwrap(torch.randperm)(size, generator=g).tolist())

    @replace(DataLoader, "__iter__")
    def iterate(original, self):
        workers, timeout = self.num_workers, self.timeout
        self.num_workers = self.timeout = 0
        try:
            iterator = original(self)
        finally:
            self.num_workers, self.timeout = workers, timeout
        if run.thread.in_dataset:
            return iterator
        lines = place()[:2]
        return batches(iterator, self, (lines, run.number("pass", lines)))

    def batches(iterator, loader, key):
        is_map = not isinstance(loader.dataset, IterableDataset)
        name = "a batch of the DataLoader" if is_map else STREAM
        total, number = length(loader) if is_map else None, 0
        for batch in itertools.islice(iterator, run.options["short"]):
            indices = run.thread.indices if is_map else None
            tensors = [t for t in tree_leaves(batch) if torch.is_tensor(t) and t.dim()]
            rows = len(indices) if indices else len(tensors[0]) if tensors else None
            run.note(Batch(key, number, indices, rows, total))
            in_main = threading.current_thread() is threading.main_thread()
            if torch.is_grad_enabled() and in_main:
                run.loader_rows = rows
                find_order(run, (*key, number), indices)
                note_value(run, "value", place()[0], name, batch, made_by=made_by(loader.dataset))
            number += 1
            yield batch
        run.note(PassEnd(key, number))


def made_by(dataset):
    """Where the script's own dataset makes a sample; "" if it is another's."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    file = own_file(code.co_filename) if code else None
    return f"{file}:{code.co_firstlineno}" if file else ""


def find_order(run, key, indices):
    """Where this rank's samples are in the batch of one process."""
    run.order = None
    if run.one:
        run.batches[key] = indices
    elif indices and (batch := run.batches.get(key)):
        last = {index: i for i, index in enumerate(batch)}
        order = [  # a sample may be there twice: rather where the layout has it
            i if i < len(batch) and batch[i] == index else last.get(index)
            for i, index in zip(run.positions(run.rank, len(indices)).tolist(), indices)
        ]
        run.order = None if None in order else order
        block = range(run.rank * len(order), (run.rank + 1) * len(order))
        if len(order) > 1:
            run.say("blocks" if order == list(block) else "turns", "order")


# ---- values: what the lines of the script compute


SIGNS = np.cos(np.arange(MANY_COLUMNS) * 1.618 + 0.5)


def summary(tensor):
    """To compare a tensor over processes: its shape; for each entry of its first three dimensions
    a number by which it is told apart, its sum and its norm."""
    if not torch.is_tensor(tensor) or isinstance(tensor, nn.Parameter):
        return None
    if tensor.layout != torch.strided or not is_plain(tensor) or not tensor.numel():
        return None
    shape, tensor = tuple(tensor.shape), torch.atleast_1d(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dims = []
    for d in range(min(3, tensor.dim())):
        if tensor.shape[d] > MANY_COLUMNS and d:
            dims.append(None)
            continue
        rows = tensor.movedim(d, 0).reshape(tensor.shape[d], -1)
        rows = rows[:, :: rows.shape[1] // MANY_COLUMNS + 1].cpu().double().numpy()
        finite = np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
        sums = (finite if shape else rows).sum(1)
        dims.append((finite @ SIGNS[: rows.shape[1]], sums, np.linalg.norm(finite, axis=1)))
    return shape, dims


def number_in(part):
    """The number that a summary is of, if it is of a single one."""
    return None if part is None or part[0] else float(part[1][0][1][0])


def note_value(run, kind, line, name, tree, made_from=(), **more):
    """Note it, and return its index."""
    leaves = [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)][:8]
    summaries, model = [None] * len(leaves), run.model
    with run.quiet(), contextlib.suppress(RuntimeError):  # inside of vmap, a tensor has no values
        summaries = [summary(leaf) for leaf in leaves]
    number = run.number("value", run.steps, kind, line, name)
    index = run.number("values")
    value = Value(kind, line, name, number, summaries, index, list(made_from), model=model, **more)
    run.note(value)
    for leaf in leaves:
        if is_plain(leaf) and not isinstance(leaf, nn.Parameter):
            leaf.compare_index = index
    return index


def indices_in(tree):
    """Of the values that are among the arguments of a function."""
    return [leaf.compare_index for leaf in tree_leaves(tree) if hasattr(leaf, "compare_index")]


class Trace(TorchFunctionMode):
    """Notes what each line of the script computes, where it calls torch directly. So the line is
    found whose result is not that of one process."""

    SAME_VALUE = ("detach", "__get__", "to", "requires_grad_", "contiguous", "clone")

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = getattr(function, "__name__", UNKNOWN)
        if name == "all_reduce" and out is None:
            out = args[0]  # it is another value now
        if self.run.thread.quiet or self.run.thread.in_dataset:
            return out
        if name in ("cat", "concat", "concatenate") and len(args) < 2 and not kwargs:
            if len({len(part) for part in args[0] if part.dim()}) == 1:
                self.run.joined.add(len(out))
        with contextlib.suppress(RuntimeError):  # inside of vmap, a tensor has no values
            if torch.is_tensor(out) or isinstance(out, (tuple, list)):
                self.see(name, out, args, kwargs)
        return out

    def see(self, name, out, args, kwargs):
        made_from = indices_in((args, kwargs))
        if name in self.SAME_VALUE:
            if made_from and is_plain(out) and not isinstance(out, nn.Parameter):
                out.compare_index = made_from[0]
            return
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            if frame.f_code.co_filename.startswith(NOT_THE_SCRIPTS):
                return
            frame = frame.f_back
        file = None if frame is None or "empty" in name else own_file(frame.f_code.co_filename)
        leaves = [leaf for leaf in tree_leaves(out) if torch.is_tensor(leaf)]
        if file is None or not leaves or isinstance(leaves[0], nn.Parameter):
            return
        line = f"{file}:{frame.f_lineno}"
        if self.run.number("seen", self.run.steps, line, name) >= MANY_VALUES:
            return
        by = args[1] if len(args) > 1 else kwargs.get("other")
        by_gradient = "div" in name and getattr(by, "requires_grad", False)
        called_at = ""
        if frame.f_code.co_name != "<module>":
            called_at = next((at for at in own_lines(frame) if at != line), "")
        more = {"by_gradient": by_gradient, "called_at": called_at}
        note_value(self.run, "value", line, name, out, made_from, **more)


TORCH = os.path.dirname(torch.__file__)
NOT_THE_SCRIPTS = tuple(
    os.path.join(TORCH, part) for part in ("optim", "utils/data", "nn/init", "nn/utils")
)


def watch_models(run):
    """What goes into and comes out of each outermost module in training; and the losses."""

    @replace(nn.Module, "__call__")
    def call(original, module, *args, **kwargs):
        is_training = module.training and torch.is_grad_enabled()
        if run.model is not None or run.thread.in_dataset or not is_training:
            return original(module, *args, **kwargs)
        keep_precise()
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        if not any(True for _ in inner.parameters()):
            return original(module, *args, **kwargs)
        name, line = type(inner).__name__, place()[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.dim()]
        if tensors:
            run.model_rows = len(tensors[0])
        made_from = indices_in((args, kwargs))
        index = note_value(run, "inputs", line, name, (args, kwargs), made_from)
        run.model = index
        try:
            outputs = original(module, *args, **kwargs)
        finally:
            run.model = None
        note_value(run, "outputs", line, name, outputs, [*indices_in(outputs), index])
        return outputs

    @replace(Subset, "__init__")
    def choose(original, self, dataset, indices):
        original(self, dataset, indices)
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not a list of numbers
            note_value(run, "value", place()[0], "Subset", torch.tensor(list(indices)))

    @replace(DistributedDataParallel, "no_sync")
    def no_sync(original, self):
        note_value(run, "no_sync", place()[0], "no_sync", ())
        return original(self)

    @replace(torch.autograd, "backward")
    def backward(original, tensors, *args, **kwargs):
        leaves = [t for t in tree_leaves(tensors) if torch.is_tensor(t)]
        with run.quiet(), torch.no_grad():
            value = sum(t.double().sum() for t in leaves)
        note_value(run, "loss", place()[0], "backward", value, indices_in(leaves))
        return original(tensors, *args, **kwargs)

    for name in ("register_hook", "register_post_accumulate_grad_hook"):

        @replace(torch.Tensor, name)
        def register(original, self, hook):
            def traced(*args):
                with Trace(run):  # which is off in a backward pass
                    return hook(*args)

            return original(self, traced)


def control_batch_norm(run):
    """On one process: each share's own statistics, and rank 0's averages, as N processes have."""

    @replace(nn.SyncBatchNorm, "forward")
    def forward(original, self, *args, **kwargs):
        run.thread.sync = True
        try:
            return original(self, *args, **kwargs)
        finally:
            run.thread.sync = False

    @replace(F, "batch_norm")
    def batch_norm(original, input, mean, var, weight=None, bias=None, training=False, *more, **kw):
        words = weight, bias, training
        if run.thread.sync or run.thread.quiet or not training:  # or already within a share
            return original(input, mean, var, *words, *more, **kw)
        rows, batch = len(input), run.loader_rows or run.model_rows
        if not run.one or rows % run.world or rows == run.world or (batch and rows % batch):
            return original(input, mean, var, *words, *more, **kw)

        def normalize(rank, share):
            averages = mean, var
            if rank and mean is not None:
                averages = mean.clone(), var.clone()
            return original(share, *averages, *words, *more, **kw)

        return run.by_share(input, normalize)


def control_order(run):
    """Where a batch is rolled or flipped along its samples, as MixUp and CutMix do, on one process
    each share is, as on N processes."""

    def watch(name):
        @replace(torch.Tensor, name)
        def move(original, self, *args, **kwargs):
            dims = args[-1] if args else None
            dims = kwargs.get("dims", dims if len(args) > (name == "roll") else None)
            batch = run.thread.batch if run.thread.in_dataset else run.loader_rows
            if dims not in (0, (0,), [0]) or not is_plain(self) or not self.dim():
                return original(self, *args, **kwargs)
            if not run.one or len(self) != batch or batch % run.world:
                return original(self, *args, **kwargs)
            return run.by_share(self, lambda rank, share: original(share, *args, **kwargs))

    watch("roll")
    watch("flip")


def keep_precise():
    """float32 throughout. Not seen on a GPU yet."""
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)


def control_precision():
    """Nothing is compiled, as its random numbers would be others, and mixed precision is off."""

    @replace(torch, "compile")
    def compile(original, model=None, *args, **kwargs):
        return model if model is not None else lambda function: function

    @replace(nn.Module, "compile")
    def compile_module(original, self, *args, **kwargs):
        pass

    @replace(torch.amp.autocast_mode.autocast, "__init__")
    def autocast(original, self, device_type, *args, **kwargs):
        original(self, device_type, *args, **kwargs)
        self._enabled = False

    @replace(torch.amp.GradScaler, "__init__")
    def scaler(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._enabled = False

    @replace(torch, "set_float32_matmul_precision")
    def precision(original, *args):
        pass


# ---- steps: gradients and weights, beside those of one process


def outer_modules():
    """All modules that are not part of another one; not DDP, but what it wraps."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    modules = [module for module in modules if not isinstance(module, DistributedDataParallel)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def on_cpu(tensor):
    """A copy of all of a tensor, also of one that is sharded."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.cpu().clone()


def set_to(tensor, value):
    """If one process has a value of this shape."""
    if value is None or value.shape != tensor.shape:
        return
    with torch.no_grad():
        if hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            value = value.to(tensor.device)
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
        tensor.copy_(value)


class Trained:
    """An optimizer's parameters, by name, and the buffers of their modules."""

    def __init__(self, run, optimizer):
        self.number, self.step = run.number("optimizer"), -1
        self.names, self.owners = {}, []
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in outer_modules():
            found = {id(p): name for name, p in module.named_parameters()}
            if wanted & found.keys():
                self.owners.append(module)
                for key, name in found.items():
                    self.names.setdefault(key, f"{type(module).__name__}.{name}")
        self.owners.sort(key=lambda m: (type(m).__name__, len(list(m.parameters()))))

    def parameters(self, optimizer):
        found, number = {}, 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names.get(id(p), f"parameter {number} (of no module)")
                while name in found:
                    name += "'"
                found[name], number = p, number + 1
        return found

    def buffers(self):
        return {
            f"{type(m).__name__}.{name}": b
            for m in self.owners
            for name, b in m.named_buffers()
            if b.is_floating_point()
        }


def settings_of(optimizer):
    return [
        (key, float(value))
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, (int, float)) or torch.is_tensor(value) and value.numel() == 1
    ]


def moments(optimizer, parameters):
    """{name of the parameter: {name: tensor}}"""
    return {
        name: {k: v for k, v in optimizer.state.get(p, {}).items() if torch.is_tensor(v)}
        for name, p in parameters.items()
    }


def differ(one, other):
    """The fields of a Difference."""
    if one is None or other is None or one.shape != other.shape:
        sizes = [0.0 if t is None else float(t.double().norm()) for t in (one, other)]
        return max(sizes) if sizes[0] != sizes[1] else 0.0, *sizes, 0.0, sizes[1]
    one, other = one.double().reshape(-1), other.double().reshape(-1)
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        same = torch.equal(torch.isfinite(one), torch.isfinite(other))
        return 0.0 if same else 1.0, 1.0, 1.0, 0.0, 0.0
    dot, size = float(one @ other), float(one.norm())
    mark = float(other[:MANY_COLUMNS] @ torch.from_numpy(SIGNS[: len(one)]))
    ratio = dot / max(size**2, 1e-300)
    return float((one - other).norm()), size, float(other.norm()), ratio, mark


def differ_in_any_order(one, other):
    """A queue of features, as in MoCo, has the ranks' rows one rank after the other."""
    found = differ(one, other)
    if not found[0] or one.shape != other.shape:
        return found
    return min(found, differ(one.reshape(-1).sort().values, other.reshape(-1).sort().values))


def variables_of(frame):
    """The script's plain numbers, {name: number}, also those in objects and dictionaries; of
    several of one name, the innermost. And the seeds of generators."""
    scopes, found = [], {}
    while frame is not None:
        if own_file(frame.f_code.co_filename):
            scopes += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for variables in list(scopes):
        for thing in list(variables.values()):
            if isinstance(thing, DataLoader):
                thing = thing.dataset
            while isinstance(thing, Subset):
                thing = thing.dataset
            if not isinstance(thing, (torch.Tensor, types.ModuleType)):
                inside = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
                scopes.append(inside if len(inside) < 200 else {})
    for variables in scopes:
        for name, thing in list(variables.items()):
            if isinstance(thing, torch.Generator):
                thing = thing.initial_seed()
            if isinstance(thing, (int, float, np.floating, np.integer)) and not abs(thing) > 1e300:
                found.setdefault(name, float(thing))
    return found


def watch_steps(run):
    trained, nested, before = {}, [0], {}

    def path(mine):
        return f"{run.folder}/step.{mine.number}.{mine.step}.pt"

    @replace(Optimizer, "__init__")
    def make(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        run.made[id(self)] = [place()[0]]

    @replace(LRScheduler, "__init__")
    def schedule(original, self, optimizer, *args, **kwargs):
        original(self, optimizer, *args, **kwargs)
        run.made.setdefault(id(optimizer), []).append(place()[0])

    def before_step(optimizer, args, kwargs):
        nested[0] += 1
        if nested[0] > 1:
            return
        with run.quiet():
            if optimizer not in trained:
                trained[optimizer] = Trained(run, optimizer)
            mine, (line, *callers) = trained[optimizer], place()
            mine.step += 1
            parameters = mine.parameters(optimizer)
            gradients = {name: on_cpu(p.grad) for name, p in parameters.items()}
            weights = {name: on_cpu(p) for name, p in parameters.items()}
            before.update(weights=weights, gradients=gradients, line=line)
            key, made = (mine.number, mine.step), run.made.get(id(optimizer), [])
            variables = variables_of(sys._getframe(1))
            run.note(Step(key, line, callers, settings_of(optimizer), made, variables))
            if not run.one and os.path.exists(path(mine)):
                before["saved"] = compare_before(torch.load(path(mine)), gradients, weights, line)

    def compare_before(saved, gradients, weights, line):
        if saved["weights"].keys() != weights.keys() and len(saved["weights"]) == len(weights):
            for kind in ("weights", "gradients", "after", "moments"):  # a copy on rank 0 alone
                saved[kind] = dict(zip(weights, saved[kind].values()))
        for kind, mine in (("gradients", gradients), ("weights", weights)):
            names = dict.fromkeys([*saved[kind], *mine])
            found = {name: differ(saved[kind].get(name), mine.get(name)) for name in names}
            run.note(Compared(kind, line, found, sorted(set(saved[kind]) ^ set(mine))))
        return saved

    def after_step(optimizer, args, kwargs):
        nested[0] -= 1
        if nested[0]:
            return
        with run.quiet():
            mine = trained[optimizer]
            parameters, buffers = mine.parameters(optimizer), mine.buffers()
            after = {name: on_cpu(p) for name, p in parameters.items()}
            now = {name: on_cpu(b) for name, b in buffers.items()}
            if run.one:
                saved = {k: before[k] for k in ("weights", "gradients")}
                saved |= {"after": after, "buffers": now}
                saved["moments"] = {
                    name: {k: on_cpu(v) for k, v in state.items()}
                    for name, state in moments(optimizer, parameters).items()
                }
                torch.save(saved, path(mine))
                keep_space(os.path.getsize(path(mine)))
            elif "saved" in before:
                saved = before.pop("saved")
                compare_after(saved, after, now)
                set_to_one(saved, optimizer, parameters, buffers)
        run.steps += 1
        seed_all(run.hash("step", run.steps), torch_too=False)
        if run.steps >= run.options["steps"]:
            run.end("--steps")

    def keep_space(size):
        """Fewer steps, if those to come would take more than half of what is free on the disk."""
        free = shutil.disk_usage(run.folder).free
        steps = run.steps + 1 + int(free / 2 / size)
        if steps < run.options["steps"]:
            run.options["steps"] = steps
            text = f"{steps} steps only: each writes {size / 1e9:.2g} GB to {run.folder}, where "
            run.say(f"{text}{free / 1e9:.2g} GB are free; another TMPDIR may have more")

    def compare_after(saved, after, buffers):
        known = [g.double() for g in saved["gradients"].values() if g is not None]
        square = sum(float(g.square().sum()) for g in known)
        small = 1e-3 * math.sqrt(square / max(1, sum(g.numel() for g in known)))
        found = {}
        for name, value in saved["after"].items():
            if name not in after or after[name].shape != value.shape:
                continue
            start, clear = saved["weights"][name], ...
            if saved["gradients"][name] is not None:  # not where it is rounding: by Adam, it is
                clear = saved["gradients"][name].abs() > small  # as large a step
            found[name] = differ((value - start)[clear], (after[name] - start)[clear])
        run.note(Compared("update", before["line"], found, []))
        found = {
            name: differ_in_any_order(value, buffers[name])
            for name, value in saved["buffers"].items()
            if name in buffers and not (run.rank and re.search(BATCH_NORM, name))
        }
        run.note(Compared("buffers", before["line"], found, []))

    def set_to_one(saved, optimizer, parameters, buffers):
        """So that the next step is a test of its own."""
        for name, p in parameters.items():
            set_to(p, saved["after"].get(name))
        for name, state in moments(optimizer, parameters).items():
            for k, v in state.items():
                set_to(v, saved["moments"].get(name, {}).get(k))
        for name, buffer in buffers.items():
            if not re.search(BATCH_NORM, name):
                set_to(buffer, saved["buffers"].get(name))

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


# ---- the script in this process: its files, its lines of text, its end


CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tmp", ".safetensors")

# Python's audit events that change paths: which of their arguments these are. The last argument may
# be the descriptor of a folder that they are relative to.
CHANGES = {"os.mkdir": [0], "os.symlink": [1], "os.link": [1], "os.rename": [0, 1]}
CHANGES |= {"os.remove": [0], "os.rmdir": [0], "shutil.rmtree": [0]}


def watch_files(run):
    """Notes what the script creates, with a copy what it changes or removes for the first time, and
    what it downloads: see BothRuns.restore_files."""
    folders = "/dev", "/proc", "/sys", os.path.expanduser("~/.cache"), run.folder
    ignored = tuple(os.path.join(os.path.realpath(path), "") for path in folders)
    known = set()

    def before_change(path, removal):
        path = os.path.abspath(os.fsdecode(path))
        if os.getpid() != run.pid or path.startswith(ignored) or "__pycache__" in path:
            return
        if not removal and is_folder(path) or path in known:
            return
        kept = ""
        if os.path.lexists(path):
            kept = f"{run.folder}/kept.{run.pid}.{len(known)}"
            copy(path, kept)
        known.add(path)
        run.note(File("changed" if kept else "created", path, kept))

    def before_reading(path):
        """What is large and read again before the first step is a download, not an output, with all
        that came before that step into the outermost folder that is new."""
        path = os.path.realpath(os.fsdecode(path))
        if path in known and not run.steps and not path.endswith(CHECKPOINTS):
            if os.path.exists(path) and os.path.getsize(path) > 50_000:
                around = [path, *map(str, Path(path).parents)]
                run.note(File("downloaded", [each for each in around if each in known][-1]))

    def hook(event, args):
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                before_change(os.path.realpath(args[0]), removal=False)  # where a link leads to
            else:
                before_reading(args[0])
        elif event in CHANGES and not (isinstance(args[-1], int) and args[-1] >= 0):
            for number in CHANGES[event]:
                before_change(args[number], removal=event != "os.mkdir")

    sys.addaudithook(hook)

    @replace(torch, "save")
    def save(original, obj, f, *args, **kwargs):  # it writes in C++
        if isinstance(f, (str, os.PathLike)):
            before_change(os.path.realpath(f), removal=False)
        return original(obj, f, *args, **kwargs)


class Tee:
    """Text for the terminal whose lines are noted, too."""

    def __init__(self, run, stream):
        self.run, self.stream, self.text = run, stream, ""

    def write(self, text):
        if threading.current_thread() is threading.main_thread() and os.getpid() == self.run.pid:
            *lines, self.text = (self.text + text).split("\n")
            for line in lines:
                self.run.note(Printed(place()[0], line.split("\r")[-1]))
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def watch_parent(run):
    """End with compare.py. Meanwhile, say where the script is."""
    parent, main = os.getppid(), threading.main_thread().ident
    while True:
        time.sleep(1)
        if os.getppid() != parent:
            LEAVE(1)
        frame = sys._current_frames().get(main)
        with open(f"{run.folder}/{run.name}.{run.rank}.where", "w") as file:
            file.write(" < ".join(own_lines(frame)[:3]))


def run_watched(run, script):
    """Run it with the random numbers of one process, and note what it does."""
    find_script(argparse.Namespace(**run.options))
    control_torch(run)
    control_dropout()
    control_python(run)
    control_datasets(run)
    control_batch_norm(run)
    control_order(run)
    control_precision()
    watch_loaders(run)
    watch_models(run)
    watch_steps(run)
    watch_files(run)
    threading.Thread(target=watch_parent, args=(run,), daemon=True).start()
    if run.rank == 0:
        sys.stdout, sys.stderr = Tee(run, sys.stdout), Tee(run, sys.stderr)
    seed_all(0)
    faulthandler.enable()  # a crash prints its lines
    try:
        with Trace(run):
            script()
    except SystemExit as end:
        run.end(f"SystemExit {end.code}" if end.code else "its end")
        raise
    except BaseException as error:
        at = own_lines([*traceback.walk_tb(error.__traceback__)][-1][0])[0]
        run.end(f"{type(error).__name__} at {source(at)}: {str(error)[:300]}")
        raise
    run.end("its end")


def run_script(args):
    sys.argv[:] = [args.script, *args.flags]
    if args.m:
        sys.path[0] = START
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = SCRIPT_FOLDER[0].rstrip(os.sep)
        runpy.run_path(os.path.join(START, args.script), run_name="__main__")


def find_script(args):
    """Its file; and let files beside it, or in its package, count as the script's own. Nothing is
    imported yet."""
    path = os.path.join(START, args.script)
    folder = os.path.dirname(path)
    if args.m:
        sys.path[0] = START
        first, *others = args.script.split(".")
        spec = find_spec(first)
        if spec and spec.submodule_search_locations:  # a package
            folder = list(spec.submodule_search_locations)[0]
            path = os.path.join(folder, *others)
            path = os.path.join(path, "__main__.py") if os.path.isdir(path) else f"{path}.py"
        elif spec and spec.origin:
            path, folder = spec.origin, os.path.dirname(spec.origin)
    SCRIPT_FOLDER[0] = os.path.normpath(folder) + os.sep
    return path


class Elsewhere:
    """A function or class of this file, for a process that has not imported it: it is pickled by
    its path. Loader workers may be started by forkserver, and mp.spawn's processes import the
    script alone."""

    class File:
        def __reduce__(self):
            return runpy.run_path, (HERE, None, "elsewhere")

    def __init__(self, name):
        self.name = name

    def __call__(self, *args):
        return globals()[self.name](*args)

    def __reduce__(self):
        return operator.getitem, (self.File(), self.name)


def run_spawned(function, rank, *words):
    """In each of mp.spawn's processes."""
    run_watched(Run(rank), lambda: function(rank, *words))


def control_spawn(options):
    """Watches the processes that the script starts by mp.spawn, if compare.py knows that it does,
    and has started it once, not as one of N ranks."""
    nproc = 1 if options["run"] == "one" else options["nproc"]

    @replace(torch.multiprocessing, "spawn")
    def spawn(original, fn, args=(), nprocs=1, *others, **more):
        if not options["spawns"]:
            LEAVE(SPAWNS)
        if nprocs != nproc:
            text = f"the script starts {nprocs} processes by mp.spawn, not {nproc}: give it their "
            print(f"compare.py: {text}number in a flag, as {{n}}", flush=True)
            LEAVE(2)
        fn = functools.partial(Elsewhere("run_spawned"), fn)
        return original(fn, args, nprocs, *others, **more)


def child():
    """In each process that compare.py starts."""
    options = json.loads(os.environ["OWN_LOOP_COMPARE"])
    args = argparse.Namespace(**options)
    control_spawn(options)
    if options["spawns"]:
        find_script(args)
        watch_files(Run("parent"))
        run_script(args)
    else:
        run_watched(Run(), lambda: run_script(args))


# ---- the script's text: the names in a line, and the lines that set them


@functools.cache
def statements(file):
    """Those of a file, each of which knows what it is in; the innermost last."""
    found = []
    with contextlib.suppress(SyntaxError):
        tree = ast.parse("".join(linecache.getlines(os.path.join(START, file))))
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node
            if isinstance(node, ast.stmt):
                found.append(node)
    return found


def statement_at(line):
    file, _, number = line.rpartition(":")
    if number.isdigit():
        for node in reversed(statements(file)):
            if node.lineno <= int(number) <= node.end_lineno:
                return node
    return None


def loops_around(line):
    """The lines of all loops that a line is in, innermost first."""
    found, node = [], statement_at(line)
    while node := getattr(node, "parent", None):
        if isinstance(node, (ast.For, ast.While)):
            found.append(f"{line.rpartition(':')[0]}:{node.lineno}")
    return found


def branch_of(line):
    """The line of the innermost `if` that decides whether a line is run; None if there is none."""
    node = statement_at(line)
    while parent := getattr(node, "parent", None):
        found = [parent] if isinstance(parent, ast.If) else []
        for earlier in getattr(parent, "body", []):
            if isinstance(earlier, ast.If) and earlier.end_lineno < node.lineno:
                jumps = isinstance(earlier.body[-1], (ast.Continue, ast.Return, ast.Break))
                found += [earlier] * jumps
        if found:
            return f"{line.rpartition(':')[0]}:{found[-1].lineno}"
        node = parent
    return None


def lines_inside(line):
    """Of a function's statements."""
    node, file = statement_at(line), line.rpartition(":")[0]
    return [f"{file}:{n.lineno}" for n in ast.walk(node) if isinstance(n, ast.stmt)] if node else []


def name_of(node):
    """Of a variable, of y.name and of y["name"]; None of all else."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value
    return getattr(node, "attr", getattr(node, "id", None))


def names_at(line):
    """{name: text} of those in a statement, without the statements in it."""
    found, todo = {}, [statement_at(line)]
    while node := todo.pop(0) if todo else None:
        if name := name_of(node):
            found.setdefault(name, ast.unparse(node))
        inner = ast.iter_child_nodes(node)
        todo += [n for n in inner if not isinstance(n, (ast.stmt, ast.excepthandler))]
    return found


def lines_that_set(line, name):
    """Those in a line's file that assign something of this name. Its first value, a constant, only
    if there are no others."""
    file, found = line.rpartition(":")[0], {}
    for node in statements(file):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if name in map(name_of, getattr(target, "elts", [target])):
                is_constant = isinstance(getattr(node, "value", None), ast.Constant)
                is_first = is_constant and not isinstance(node, ast.AugAssign)
                found.setdefault(is_first, []).append(node.lineno)
    return [f"{file}:{n}" for n in sorted(set(found[min(found)]))[-3:]] if found else []


# ---- what is compared: the notes of both runs


class Notes:
    """Of one process: {"step": [(steps before it, Step), ...], ...}, by the kind of note."""

    def __init__(self, folder, run, rank):
        self.of, self.path = {}, f"{folder}/{run}.{rank}"
        with contextlib.suppress(EOFError, pickle.UnpicklingError, FileNotFoundError):
            with open(f"{self.path}.notes", "rb") as file:
                while True:
                    step, kind, fields = pickle.load(file)
                    self.of.setdefault(kind, []).append((step, globals()[kind](**fields)))

    def __getitem__(self, kind):
        return self.of.get(kind.__name__, [])

    def leave_out(self, is_out):
        for kind in ("Value", "Compared", "Printed"):
            self.of[kind] = [note for note in self.of.get(kind, []) if not is_out(note[0])]

    def end(self):
        if self[End]:
            return self[End][-1][1].state
        with contextlib.suppress(FileNotFoundError), open(f"{self.path}.log") as log:
            crash = log.read().partition("Fatal Python error")[2]
            for name, line in re.findall(r'File "(.*)", line (\d+)', crash):
                if own_file(name):
                    return f"a crash at {source(f'{own_file(name)}:{line}')}"
        with contextlib.suppress(FileNotFoundError), open(f"{self.path}.where") as file:
            line, *callers = file.read().split(" < ")
            return " < ".join([f"no end, at {source(line)}", *callers])
        return "no end"


@dataclass
class Finding:
    verdict: str  # "WRONG", "look", "note"
    what: str
    step: int
    text: str

    def __str__(self):
        return f"{self.verdict:6} {self.what:10} step {self.step + 1}: {self.text}"


def relative(one, other):
    if not (math.isfinite(one) and math.isfinite(other)):
        return float(math.isfinite(one) != math.isfinite(other))
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def source(line):
    """`file:line`, and what stands there."""
    file, _, number = line.rpartition(":")
    if not number.isdigit():
        return line
    text = linecache.getline(os.path.join(START, file), int(number)).strip()
    return f"{line}: {text[:90]}" if text else line


class Variables:
    """The script's plain numbers at each step, on one process and on the ranks."""

    def __init__(self, one, ranks):
        self.all = [{step: note.variables for step, note in n[Step]} for n in (one, *ranks)]
        self.lines = {step: note.line for step, note in one[Step]}

    def others(self, step):
        """{name: [number on one process, on rank 0, ...]}: those that differ, but for the number
        of processes, and that of this one."""
        mine, *theirs = [of_step.get(step, {}) for of_step in self.all]
        usual = [1] + [len(theirs)] * len(theirs), [0, *range(len(theirs))]
        found = {name: [n, *[other.get(name, n) for other in theirs]] for name, n in mine.items()}
        return {
            name: numbers
            for name, numbers in found.items()
            if numbers not in usual and any(relative(n, numbers[0]) > 1e-6 for n in numbers)
        }

    def changing(self, step):
        """In words: those that differ, and were not yet so at the first step."""
        first, line = self.others(min(self.all[0])), self.lines[step]
        found = [name for name, n in self.others(step).items() if n != first.get(name)]
        return "".join(self.describe(name, name, step, line) for name in found[:4])

    def behind(self, lines, step, further=2):
        """In words: the numbers in these lines that differ, and in those that set them; if there
        are none, in those that set what is no number."""
        others, lines, texts, hidden = self.others(step), list(lines), {}, []
        for line in lines:
            for name, text in names_at(line).items():
                if name in others and name not in texts and len(texts) < 3:
                    lines += lines_that_set(line, name)
                    texts[name] = self.describe(name, f"{line}: {text}", step, line)
                elif name not in self.all[0].get(step, {}):
                    hidden += lines_that_set(line, name)
        if not texts and hidden and further:
            return self.behind(dict.fromkeys(hidden), step, further - 1)
        return "".join(texts.values())

    def set_at(self, line, step):
        """In words: where the numbers in a line are set."""
        names = [name for name in names_at(line) if name in self.all[0].get(step, {})]
        lines = [at for name in names for at in lines_that_set(line, name)]
        return "".join(f"{MORE}{source(line)}" for line in lines[:3])

    def describe(self, name, text, step, line):
        numbers = [of_step.get(step, {}).get(name, math.nan) for of_step in self.all]
        set_at = lines_that_set(line, name)
        text = f"{MORE}{text} is {sides(*numbers)}"
        return f"{text}; set at {', '.join(set_at)}" if set_at else text


MORE = "\n" + 9 * " "


def sides(one, *others):
    ranks = ", ".join(f"{number:.6g}" for number in others)
    return f"{one:.7g} on one process, {ranks} on the ranks"


def fit(one, others, tolerance):
    """How a tensor of run one is made up of those of the ranks: "same", their "mean", "sum", or
    "rows"; None if it is none of these, "unknown" if it cannot be told."""
    if one is None or None in others or any(len(o[0]) != len(one[0]) for o in others):
        return "unknown"
    shape, (rows, *_) = one
    sizes = [np.max(o[1][0][2], initial=1e-9) for o in (one, *others)]  # a mean may be near zero
    limit = tolerance * float(max(sizes))

    def close(a, b):
        return len(a) == len(b) and bool(np.all(np.abs(a - b) <= limit))

    if all(o[0] == shape for o in others):
        mine, theirs = rows[0], [o[1][0][0] for o in others]
        if all(close(mine, other) for other in theirs):
            return "same"
        for factor in (1, len(theirs), 1 / len(theirs)):
            if close(mine, factor * sum(theirs) / len(theirs)):
                return "mean" if factor == 1 else "sum"
        if not shape:  # a largest or smallest of the batch
            return "rows" if mine in (max(theirs), min(theirs)) else None
        return "rows" if all(same_rows(rows, [o[1][0]], limit) for o in others) else None
    different = {d for o in others for d in range(len(shape)) if o[0][d] != shape[d]}
    if len(different) > 1:  # padded to the longest sample of the rank's batch, or a [B, B] matrix
        padded = all(max(o[0][d] for o in others) == shape[d] for d in different - {0})
        return "unknown" if padded else None
    d = min(different)
    if d > 2 or one[1][d] is None or any(o[1][d] is None for o in others):
        return "unknown"
    return "rows" if same_rows(one[1][d], [o[1][d] for o in others], limit) else None


def same_rows(one, others, limit):
    """Whether the ranks' rows are those of one process, in any order: also of columns, and each
    times the number of ranks, or divided by it."""
    sums, norms = [np.concatenate([o[i] for o in others]) for i in (1, 2)]
    if len(sums) != len(one[1]):
        return False
    ranks = max(len(others), 1)
    for factor in {1, ranks, 1 / ranks}:
        size, both = 2 * max(factor, 1) * limit, [(one[1], sums), (one[2], norms)]
        if all(np.all(np.abs(np.sort(a) - np.sort(b * factor)) <= size) for a, b in both):
            return True
    return False


class Values:
    """What the lines of the script have computed: on one process, and on the ranks."""

    def __init__(self, one, ranks, tolerance):
        self.tolerance, self.ranks, self.known = tolerance, len(ranks), {}
        mine, *theirs = [
            {(step, v.kind, v.line, v.name, v.number): v for step, v in notes[Value]}
            for notes in (one, *ranks)
        ]
        last = [{key[:4]: key[4] for key in sorted(notes)} for notes in (mine, *theirs)]
        self.all, self.others, self.of_step, self.alone = {}, {}, {}, {}
        for key, value in mine.items():
            if len({numbers.get(key[:4]) for numbers in last}) == 1:  # else it is any other one
                self.all[value.index] = value
                self.others[value.index] = [notes.get(key) for notes in theirs]
                self.of_step.setdefault(key[0], []).append(value)

        self.lines = [{v.index: (step, v.line) for step, v in n[Value]} for n in (one, *ranks)]
        names = ["one process", *[f"rank {rank}" for rank in range(len(ranks))]]
        ran = [dict.fromkeys(lines.values()) for lines in self.lines]
        for step_and_line in (key for lines in ran for key in lines):
            on = [name for name, lines in zip(names, ran) if step_and_line in lines]
            if len(on) < len(names):
                self.alone[step_and_line] = " and ".join(on)

    def differs(self, index):
        """Whether it is not made up of what the ranks have."""
        if index not in self.known:
            wrong = (None, "sum", "rows") if self.all[index].kind == "loss" else (None,)
            self.known[index] = any(found in wrong for found in self.fits(index))
        return self.known[index]

    def fits(self, index):
        """Of each of its tensors."""
        for one, *others in self.summaries(index):
            yield fit(one, others, self.tolerance)

    def summaries(self, index):
        """Summaries of each of its tensors, on one process and on the ranks."""
        return itertools.zip_longest(*[v.summaries for v in (self.all[index], *self.others[index])])

    def find(self, step, *kinds):
        """Those of a step that differ, in the order of the script."""
        values = [v for v in self.of_step.get(step, []) if v.kind in kinds]
        return [v for v in values if self.differs(v.index)]

    def origin(self, value):
        """The first value that differs among those that this one is made from."""
        while True:
            wrong = [i for i in value.made_from if i in self.all and i < value.index]
            wrong = [i for i in wrong if self.all[i].kind in ("value", "outputs")]
            wrong = [i for i in wrong if self.differs(i)]
            if not wrong:
                return value
            value = self.all[min(wrong)]

    def alone_before(self, step, value=None):
        """A line that not all have run: of what a value is made from, or else the first of a step,
        and who has run it; or None."""
        lines = [(at, line) for at, line in self.alone if at == step]
        if value is not None:
            runs = zip(self.lines, (value, *self.others[value.index]))
            made_from = [known.get(index) for known, v in runs for index in v.made_from]
            lines = [line for line in lines if line in made_from]
        return (lines[0][1], self.alone[lines[0]]) if lines else None

    def ancestors(self, value):
        """All values of lines that one is made from, in the order of the script."""
        found, todo = {}, [value]
        while todo:
            for index in todo.pop().made_from:
                if index in self.all and index not in found and self.all[index].kind == "value":
                    found[index] = self.all[index]
                    todo.append(found[index])
        return [found[index] for index in sorted(found) if index < value.index]

    def printed(self, step, number):
        """What a printed number that differs comes from."""
        for value in reversed(self.find(step, "value")):
            scalars = [number_in(part) for part in value.summaries]
            if any(n is not None and relative(n, number) < 5e-3 for n in scalars):
                return self.origin(value)
        return None

    def behind(self, value):
        """In words: the last lines before it that have each rank's own, whose mean or sum over the
        ranks is one process's."""
        lines = [value.line, self.line_of(value)]
        text = ""
        for before in reversed(self.ancestors(value)):
            if len(lines) < 4 and before.line not in lines:
                if {"mean", "sum"} & set(self.fits(before.index)):
                    lines.append(before.line)
                    text += f"{MORE}a mean or sum over ranks is right up to "
                    text += f"{source(before.line)}  [{before.name}]"
        return text

    def coupled(self, step):
        """The first value inside of a model that differs, where its outputs of a step do, but its
        inputs do not; or None."""
        for outputs in self.find(step, "outputs"):
            inputs = [i for i in outputs.made_from if i in self.all]
            inputs = [self.all[i] for i in inputs if self.all[i].kind == "inputs"]
            if not inputs or any(self.differs(v.index) for v in inputs):
                continue
            if not any(part and part[0] for part in outputs.summaries):
                continue  # only numbers: a loss that the model computes
            inside = [
                v
                for v in self.of_step[step]
                if v.model == inputs[0].index and v.kind == "value" and self.differs(v.index)
            ]
            return (inside or [outputs])[0]
        return None

    def line_of(self, value):
        """Of a loss, the line that has made it."""
        makers = [i for i in value.made_from if i in self.all and value.kind == "loss"]
        return self.all[max(makers)].line if makers else value.line

    def describe(self, value):
        """The line, and what it computes on each side."""
        text = f"{source(self.line_of(value))}  [{value.name}]"
        for one, *others in self.summaries(value.index):
            fits = fit(one, others, self.tolerance)
            if fits == "unknown" or fits and value.kind != "loss":
                continue
            if one[0]:
                shapes = ", ".join(str(other[0]) for other in others)
                text += f": other numbers, of shape {one[0]} on one process"
                return f"{text}, {shapes} on the ranks"
            mine, *theirs = map(number_in, (one, *others))
            text += f": {sides(mine, *theirs)}"
            if value.kind == "loss" and mine:
                text += meaning(sum(theirs) / len(theirs) / mine, self.ranks)
            return text
        return text


def meaning(ratio, world):
    """What it usually is, if something is so many times as large as on one process."""
    for factor, text in {
        1 / world: "a factor world_size too much in a division? DDP divides already",
        world: "a factor world_size too much: a sum over ranks where a mean is wanted?",
    }.items():
        if abs(ratio - factor) < 0.01 * factor:
            return f"; {ratio:.4g} times one process's: {text}"
    return f"; {ratio:.4g} times one process's" if abs(ratio - 1) > 0.01 else ""


def training_passes(one):
    """The keys of passes in which there are steps."""
    steps = {}
    for step, batch in one[Batch]:
        steps.setdefault(batch.key, set()).add(step)
    return {key for key in steps if len(steps[key]) > 1}


PER_PROCESS = ": a batch size per process? Not compared. Give one process all of them: --one "


def names_of(batch):
    """By which it is found again: with its line's caller or, if mp.spawn is that on several
    processes, and the script itself on one, without."""
    lines, number_of_pass = batch.key
    return (lines, number_of_pass, batch.number), (lines[0], number_of_pass, batch.number)


def compare_samples(one, ranks):
    """What the training loaders give: ([Finding], {step: text of a padded batch})."""
    trains = training_passes(one)
    theirs = [{name: b for _, b in notes[Batch] for name in names_of(b)} for notes in ranks]
    found, uneven = [], {}
    for step, batch in one[Batch]:
        others = [next((n[name] for name in names_of(batch) if name in n), None) for n in theirs]
        if batch.key not in trains or None in others:
            continue
        line, number = batch.key[0][0], batch.number + 1
        total = sum(other.rows or 0 for other in others)
        if batch.rows and total != batch.rows:
            text = f"batch {number} has {batch.rows} samples on one process, "
            text += f"{[other.rows for other in others]} on the ranks"
            if batch.batches == number and total - batch.rows < len(ranks):
                uneven[step] = f"{line}: the last {text}: not compared"
                continue
            if len(ranks) > 1 and all(other.rows == batch.rows for other in others):
                text += f'{PER_PROCESS}"--batch-size {total}", or whatever your flag is called'
            found.append(Finding("look", "samples", step, f"{source(line)}: {text}"))
        elif batch.indices and all(other.indices for other in others):
            union = [index for other in others for index in other.indices]
            if sorted(map(repr, union)) != sorted(map(repr, batch.indices)):
                only = len(set(map(repr, batch.indices)) - set(map(repr, union)))
                text = f"{source(line)}: batch {number} of pass {batch.key[1] + 1}: {only} of "
                text += f"{batch.rows} samples of one process are on no rank"
                found.append(Finding("look", "samples", step, text))
    return found, uneven, trains


def compare_lengths(one, ranks, trains):
    """Passes over a training loader that ended after other numbers of batches, and those that are
    to have other numbers. A batch more or less may be due to samples that do not divide; and how
    many a stream has, nobody knows."""
    streams = {note.key for _, note in one[Batch] if note.batches is None}
    found = {PassEnd: [], Batch: []}
    for kind, words in ((PassEnd, "a pass ended after"), (Batch, "an epoch has")):
        mine, *theirs = [  # {pass: (step, the first note)}
            {note.key: (step, note) for step, note in reversed(notes[kind])}
            for notes in (one, *ranks)
        ]
        for key, (step, note) in reversed(mine.items()):
            both = [notes.get(key, (step, note)) for notes in theirs]
            others, step = [other.batches for _, other in both], min(step, *[at for at, _ in both])
            if note.key in trains and None not in [note.batches, *others]:
                most = max(abs(other - note.batches) for other in others)
                if most:
                    text = f"{source(note.key[0][0])}: {words} {note.batches} batches on one "
                    text += f"process, {others} on the ranks"
                    verdict = "look" if most == 1 or note.key in streams else "WRONG"
                    found[kind].append(Finding(verdict, "epoch", step, text))
    return found.values()


class Tensors:
    """The weights, gradients, updates and buffers that were compared."""

    LIMITS = {"gradients": None, "weights": None, "update": 0.05, "buffers": 1e-3}
    SMALL = {
        "gradients": 1e-2,
        "weights": 1e-2,
        "update": 1.0,
        "buffers": 1e-5,
    }  # beside all others

    def __init__(self, ranks, tolerance):
        self.tolerance, self.ranks = tolerance, len(ranks)
        self.findings, self.largest, self.ratios, self.gradients = [], {}, [], {}
        for rank, notes in enumerate(ranks):
            for step, note in notes[Compared]:
                found = {name: Difference(*fields) for name, fields in note.differences.items()}
                if note.kind == "gradients":
                    self.gradients.setdefault(step, []).append(found)
                if note.missing:
                    text = f"{note.line}: {note.missing[:3]} on one side alone"
                    self.findings.append(Finding("WRONG", "parameters", step, text))
                if found:
                    self.check(f" on rank {rank}" if rank else "", step, note, found)

    def check(self, on, step, note, found):
        kind = note.kind
        small = self.SMALL[kind] * math.sqrt(sum(d.one**2 for d in found.values()))
        sizes = {k: d.size / max(d.one, small, 1e-3 * d.other, 1e-30) for k, d in found.items()}
        name, limit = max(sizes, key=sizes.get), self.LIMITS[kind] or self.tolerance
        self.largest[kind] = max(self.largest.get(kind, 0.0), sizes[name])
        if sizes[name] > limit:
            many = sum(size > limit for size in sizes.values())
            text = f"{source(note.line)}: {kind}{on}: {many} of {len(sizes)} differ; most "
            text += f"{name}, by {sizes[name]:.1e} of its size"
            text += self.explain(found, small) if kind == "gradients" else ""
            verdict = "look" if kind == "buffers" and re.search(BATCH_NORM, name) else "WRONG"
            self.findings.append(Finding(verdict, kind, step, text))

    def explain(self, found, small):
        large = [d for d in found.values() if d.one > small]
        square = sum(d.one**2 for d in large)
        ratio = sum(d.ratio * d.one**2 for d in large) / square if large else 1.0
        self.ratios.append(ratio)
        if all(d.ratio > 0.98 * ratio and d.other < 1.02 * ratio * d.one for d in large):
            return meaning(ratio, self.ranks)
        return ""

    def unlike(self, step):
        """How the ranks' gradients of a step differ from each other; None if they do not."""
        ranks = self.gradients.get(step, [{}])
        for name in ranks[0]:
            found = [of_rank[name] for of_rank in ranks if name in of_rank]
            marks, size = [d.mark for d in found], max(d.other for d in found)
            if max(marks) - min(marks) > 1e-3 * max(size, 1e-12):
                return f"each rank has its own gradient of {name}: not averaged in this step?"
        return None


def compare_settings(one, ranks, variables):
    """Learning rates and such, on any rank."""
    theirs = [{note.key: note for _, note in notes[Step]} for notes in ranks]
    for step, note in one[Step]:
        others = [notes.get(note.key, note) for notes in theirs]
        if any(len(other.settings) != len(note.settings) for other in others):
            continue  # other groups of parameters
        for number, (name, mine) in enumerate(note.settings):
            numbers = [other.settings[number][1] for other in others]
            if any(relative(mine, other) > 1e-6 for other in numbers):
                text = f"{source(note.line)}: {name} is {sides(mine, *numbers)}"
                world, set_at = len(ranks), lines_that_set(note.line, name)
                if step == 0 and mine and abs(numbers[0] / mine / world - 1) < 0.01:
                    text += f"; {world} times: is the batch of all ranks that much larger, too? "
                    text += "If so, give one process this rate by --one"
                text += f"{MORE}made or set at {', '.join(note.made + set_at)}"
                text += variables.behind(set_at + note.made, step)
                yield Finding("WRONG", "settings", step, text)


NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.I)
NO_SCORE = re.compile(
    r"(time|data|speed|eta|dt|secs?|seconds|elapsed|took|port|pid|rank|size|world|process|processes)"
    r"[^a-zA-Z]*$|/$",
    re.I,
)
CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d+:\d\d(:\d\d)?([.,]\d+)?")  # a date, a time
UNIT = re.compile(
    r"\s*(ms|s|secs?|seconds|min|h|MB|GB|GiB|MiB|processes|[a-zA-Z ]{0,20}/s)\b", re.I
)


def scores(text, losses):
    """The numbers in a printed line, None for times and for a loss that backward() got."""
    for m in NUMBER.finditer(text):
        digits = len(m.group().partition(".")[2]) if "e" not in m.group().lower() else 0
        number = float(m.group())
        is_loss = digits > 1 and any(abs(number - x) <= 0.51 * 10**-digits for x in losses)
        no_score = UNIT.match(text[m.end() :]) or NO_SCORE.search(text[: m.start()])
        yield None if no_score or is_loss else number


def compare_printed(one, ranks, values, variables):
    """Numbers that rank 0 prints."""
    both = []
    for notes in (one, ranks[0]):
        losses = [number_in(v.summaries[0]) for _, v in notes[Value] if v.kind == "loss"]
        losses = [loss for loss in losses if loss is not None]
        lines = {}
        for step, note in notes[Printed]:
            note.text = CLOCK.sub("", note.text)
            if step and not re.search(r"it/s|s/it|Warning", note.text):
                skeleton = " ".join(NUMBER.sub("#", note.text).split())
                lines.setdefault(skeleton, []).append((step, note, losses))
        both.append(lines)
    for skeleton, mine in both[0].items():
        for (step, a, losses), (other, b, their) in zip(mine, both[1].get(skeleton, [])):
            if not re.search(r"\d\.\d", a.text):
                continue
            if step != other:
                break
            pairs = list(zip(scores(a.text, losses), scores(b.text, their)))
            wrong = [x for x, y in pairs if None not in (x, y) and relative(x, y) > 2e-3]
            if wrong:
                text = f"{a.text.strip()[:100]!r} on one process, {b.text.strip()[:100]!r} on "
                text += "rank 0: of rank 0's share alone, or a mean of means over unequal shares?"
                if value := values.printed(step, wrong[0]):
                    text += f"{MORE}{values.describe(value)}{values.behind(value)}"
                else:
                    text += variables.behind([a.line], step)
                yield Finding("look", "printed", step, f"{source(a.line)}: {text}")
                break


# ---- what is said: where it comes from, and what it usually means


ADVICE = {
    "coupled": "of the same inputs and weights: a sample's result depends on which others are in "
    "its batch, or the model remembers earlier ones. Intended?",
    "stream": "the ranks' streams have other samples in this step than one process's, as shards of "
    "files have. What follows from that cannot be compared",
    "ratio": "a ratio of sums over the rank's own share, as in a Dice loss of the batch. Intended?",
    "share": "one process has neither these numbers nor their mean or sum: a number or a decision "
    "of the rank's own share? all_reduce that number first",
    "same loss": "but the loss is the same",
    "branch": "a decision by numbers of the rank's own share?",
}


def last_pass(of_step, variables, step):
    """In words: the last pass through a model, and who has told it not to average gradients."""
    passes = [v for v in of_step if v.kind == "outputs"]
    off = [v.line for v in of_step if v.kind == "no_sync"]
    if not passes:
        return ""
    text = f"{MORE}the last pass: {source(passes[-1].line)}  [{passes[-1].name}]"
    if off:
        text += f"{MORE}{source(off[-1])}{variables.set_at(off[-1], step)}"
    return text


def blame(values, tensors, variables, step):
    """What the difference of a step comes from: the findings, and whether it may be intended."""

    def finding(what, value, advice=None):
        lines = lines_inside(value.made_by) if value.made_by else [value.line]
        numbers = variables.behind(lines, step, further=0)
        own = "ratio" if value.by_gradient and not numbers else "share"
        advice = advice or ("stream" if value.name == STREAM else own)
        if not numbers:
            numbers = values.behind(value) + variables.behind(lines, step)
        called = f"{MORE}called at {source(value.called_at)}" if value.called_at else ""
        verdict = "look" if advice in ("coupled", "stream", "ratio") else "WRONG"
        text = values.describe(value) + (f": {ADVICE[advice]}" if value.kind != "loss" else "")
        return Finding(verdict, what, step, text + called + numbers)

    if value := values.coupled(step):
        return [finding("outputs", value, "coupled")], True
    of_step, unlike = values.of_step.get(step, []), tensors.unlike(step)
    losses = [v for v in of_step if v.kind == "loss"]
    inputs = values.find(step, "inputs")
    if wrong := inputs + values.find(step, "loss"):
        origins = [values.origin(wrong[0])]
        found = [finding("inputs" if inputs else origins[0].kind, origins[0])]
    else:
        last = losses[-1].index if losses else -1
        near = [v for loss in losses for v in values.ancestors(loss) if values.differs(v.index)]
        later = [v for v in values.find(step, "value") if v.index > last]
        origins = [values.origin(v) for v in (near[-1:] + later)[:1]]
        found = [finding("value", v, "same loss" if losses else None) for v in origins]
    origin = origins[0] if origins and origins[0].kind != "loss" else None
    if alone := values.alone_before(step, origin):
        line, on = alone
        text = f"{source(line)}: computed on {on} alone: {ADVICE['branch']}"
        if branch := branch_of(line):
            text += f"{MORE}{source(branch)}{variables.behind([branch], step)}"
        found.append(Finding(found[0].verdict if found else "WRONG", "branch", step, text))
    if unlike and not inputs:
        text = unlike + last_pass(of_step, variables, step)
        found.append(Finding("WRONG", "averaging", step, text))
    intended = bool(found) and found[0].verdict == "look"
    if not found and (text := variables.changing(step)):
        found.append(Finding("look", "numbers", step, f"no value differs, but numbers do:{text}"))
    return found, intended


def first_of(findings, *kinds):
    return sorted([f for f in findings if f.what in kinds], key=lambda f: f.step)


def find_all(one, ranks, tolerance):
    """All findings, in the order of the script."""
    samples, uneven, trains = compare_samples(one, ranks)
    if samples and PER_PROCESS in samples[0].text:
        return samples[:1], {}
    ended, planned = compare_lengths(one, ranks, trains)
    lengths, last = ended + planned, math.inf
    if ended and ended[0].verdict == "look":  # from then on, steps have other batches
        ended[0].text += "; later steps are not compared"
        last = ended[0].step
        samples = [finding for finding in samples if finding.step < last]
    due = bool(lengths) and lengths[0].verdict == "look"  # so is a schedule by len(loader)
    for notes in [one, *ranks]:
        notes.leave_out(lambda step: step >= last or step in uneven)
    values, tensors = Values(one, ranks, tolerance / 10), Tensors(ranks, tolerance)
    variables = Variables(one, ranks)
    kinds = ("gradients", "parameters", "weights", "update")
    first = first_of(tensors.findings, *kinds)
    notes = [Finding("note", "samples", step, uneven[step]) for step in uneven if step < last]
    found = notes[:1]
    for finding in samples[:1]:
        finding.verdict = "WRONG" if first else "look"
        for value in [v for v in values.find(0, "value") if v.name == "Subset"][:1]:
            finding.text += f"{MORE}{values.describe(value)}{variables.behind([value.line], 0)}"
        found.append(finding)
    found += lengths[:1]
    intended = False
    if first and not (samples and samples[0].step <= first[0].step):
        causes, intended = blame(values, tensors, variables, first[0].step)
        found += causes
    settings = list(compare_settings(one, ranks, variables))[:1]
    median = sorted(tensors.ratios)[len(tensors.ratios) // 2] if tensors.ratios else 1.0
    intended = intended and 0.7 < median < 1.4  # a factor is not
    for kind in ("parameters", "gradients", "weights", "update", "buffers"):
        of_kind = first_of(tensors.findings, kind)
        if of_kind:
            of_kind[0].text += f" (in {len({f.step for f in of_kind})} steps)"
            if intended or due and kind == "update" and settings:
                of_kind[0].verdict = "look"
            if kind != "update" or not first_of(tensors.findings, "gradients"):
                found.append(of_kind[0])
    for finding in settings:
        finding.verdict = "look" if due else finding.verdict
    found += settings
    found += list(compare_printed(one, ranks, values, variables))[:2]
    return found, tensors.largest


def report(folder, nproc, tolerance):
    """The text, and the exit status."""
    one, ranks = Notes(folder, "one", 0), [Notes(folder, "all", rank) for rank in range(nproc)]
    said = [note.text for _, note in [*one[Said], *ranks[0][Said]] if note.kind == "note"]
    lines = [f"note   {text}" for text in dict.fromkeys(said)]
    counts = [len(notes[Step]) for notes in [one, *ranks]]
    ends = [notes.end() for notes in [one, *ranks]]
    steps = min(counts)
    end = f"{counts[0]} steps on one process, then {ends[0]}; {counts[1:]} on the ranks, then "
    end += "; ".join(ends[1:])
    if not steps:
        return "\n".join([*lines, f"WRONG  end        {end}"]), 1 if counts[0] else 2
    found, largest = find_all(one, ranks, tolerance)
    if found and PER_PROCESS in found[0].text:
        return "\n".join([*lines, str(found[0])]), 2
    if len(set(counts)) > 1 or len(set(ends)) > 1:
        due = any(f.what == "epoch" and f.verdict == "look" for f in found)
        extra = [notes[Step][steps][1] for notes in (one, *ranks) if len(notes[Step]) > steps]
        for line in [extra[0].line, *extra[0].callers] if extra else []:
            end += "".join(f"{MORE}in the loop of {source(loop)}" for loop in loops_around(line))
        found.append(Finding("look" if due else "WRONG", "end", steps, end))
    lines += map(str, found)
    wrong = [finding for finding in found if finding.verdict == "WRONG"]
    sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in largest.items())
    text = f"compare.py: {steps} steps on one process and on {nproc}: "
    text += f"they part at step {min(f.step for f in wrong) + 1}" if wrong else "nothing WRONG"
    lines.append(f"{text} (largest differences: {sizes})")
    return "\n".join(lines), int(bool(wrong))


def compare(args, folder):
    """The report, and the exit status."""
    text, status = BothRuns(args, folder, "turns").run_both()
    orders = {note.text for _, note in Notes(folder, "all", 0)[Said] if note.kind == "order"}
    if status and orders == {"blocks"}:  # rank r has the r-th block of a batch
        shutil.rmtree(folder)
        os.makedirs(folder)
        text, status = BothRuns(args, folder, "blocks").run_both()
    return text, status


def main():
    args = parser.parse_args()
    for number in ENDS[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = os.path.realpath(tempfile.mkdtemp(prefix="compare-"))  # as the script's paths are
    if 0 < torch.cuda.device_count() < args.nproc:
        print(f"note   {torch.cuda.device_count()} GPUs for {args.nproc} processes: on CPUs")
    try:
        text, status = compare(args, folder)
    except KeyboardInterrupt:
        sys.exit(130)
    except NotRestored:
        folder = None
        sys.exit(1)
    finally:
        if folder:
            with uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)
    print(text)
    check = os.path.join(os.path.dirname(os.path.relpath(HERE, START)), "check.py")
    flags = BothRuns(args, "", "").flags("all", args.nproc, 0, free_port())
    command = shlex.join([check, *["-m"] * args.m, args.script, *flags])
    print("Run check.py next: it sees what both runs have (no set_epoch, equal seeds, workers):")
    print(f"python {command}")
    sys.exit(status)


if __name__ == "__main__":
    child() if "OWN_LOOP_COMPARE" in os.environ else main()

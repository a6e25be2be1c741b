"""Runs your unchanged training script on several processes, and says what is wrong with its DDP.

python check.py train.py --its --own flags            # starts two processes, by torchrun
python check.py --steps 300 --short 10 train.py --its --own flags
python check.py -m package.train --its --own flags
torchrun --standalone --nproc-per-node 4 check.py train.py --its --own flags   # also with torchrun
python check.py train_spawn.py --its --own flags      # a script that calls mp.spawn
python check.py --list                                # what is right, and where the remedy is

Two processes are enough, on GPUs or on CPUs. Most mistakes end no run: it trains, slightly wrong.
Every rank notes what it does (checksums of weights, gradients, samples and random numbers), and
the notes are compared when the script ends, after --steps, when no rank advances any more, or when
a rank has died. Notes go through a store of their own, nothing here waits for another rank, and no
random number is drawn: the losses are those without check.py. The script really trains, and writes
its files. (Of processes that are killed, a small file check-... may stay in TMPDIR.)

"WRONG" needs a change; "look" may be intended; "not seen": the script did not get there.
--short ends each pass over a DataLoader after so many batches, so that epoch 2 is seen, too.
--strict exits with status 1 if something is WRONG, or nothing was trained; otherwise, the status
is the script's own.

Rules see what they name. compare.py, beside this file, needs none: it runs the script on one
process and on two, and says where they part. Neither sees what the pages name under "Is it right?".
Shards of FSDP are not compared. Scripts that start their processes by Process(...), or one process
per machine, cannot be watched, and are refused.

To add a check: write a subclass of Check. Its `watch` replaces functions of torch (see `replace`)
and adds notes, small dataclasses; its `compare` gets the notes of all ranks. Both stand together,
below "The checks". Many checks need no `watch`: Step, Forward, Pass and Batch are noted already.
"""

import argparse
import ast
import contextlib
import functools
import gc
import inspect
import itertools
import multiprocessing
import operator
import os
import pickle
import random
import re
import runpy
import shlex
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
import weakref
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    get_worker_info,
)

parser = argparse.ArgumentParser(
    usage="python check.py [flags] script.py [script's flags], or with torchrun",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--steps", type=int, default=50, help="optimizer steps before the report")
parser.add_argument("--short", type=int, help="end each pass over a DataLoader after these batches")
parser.add_argument("--wait", type=float, default=120, help="seconds without progress: a hang")
parser.add_argument("--nproc", type=int, default=2, help="processes, if started without torchrun")
parser.add_argument("--spawn", action="store_true", help="the script calls mp.spawn, in a module")
parser.add_argument("--strict", action="store_true", help="status 1 if something is WRONG")
parser.add_argument("--list", action="store_true", help="print what is checked, and exit")
parser.add_argument("-m", action="store_true", help="the script is a module, as in python -m")
parser.add_argument("script", nargs="?", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

TOLERANCE = 1e-5  # relative: GPUs of two models round differently
MANY = 65_536  # of a larger tensor, so many elements are compared
PROBES = 32  # samples of each dataset that are compared over ranks
SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (4, MANY))  # a generator of its own
HERE = os.path.abspath(__file__)
START = os.getcwd()  # paths are relative to it, also after os.chdir
LEAVE = os._exit  # that of os is watched
NOT_OUTPUT = r"^/(dev|proc|sys)/|__pycache__|/\.cache/|\.lock$|torchinductor|triton|huggingface"
PAGE = "docs/what_ddp_changes.md"
SPAWN = r"\b(mp|multiprocessing)\.spawn\(|\bstart_processes\(|\bimport\b.*\bspawn\b"
UNKNOWN = "?"  # a place that is in no file of the script's own

# ---------------------------------------------------------------- the script's own lines

STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
SCRIPT_FOLDER = [START + os.sep]  # main sets it: also an environment may be in it, or it in one


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


# ---------------------------------------------------------------- tensors and random numbers


def tensors_in(tree):
    """The tensors in lists and dictionaries; neither sparse nor nested ones."""
    leaves = [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided]


def checksum(tensor):
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(tensor.view(-1).view(torch.uint8).numpy())


def summary(tensor):
    """To compare a tensor over ranks: a checksum, the norm, and four sums with random signs, whose
    differences estimate the norm of a difference. "sharded" for a rank's shard of FSDP."""
    if tensor is None:
        return None
    if hasattr(tensor, "placements"):  # a DTensor
        if any(not placement.is_replicate() for placement in tensor.placements):
            return "sharded"
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if type(tensor).__name__ == "FlatParameter":
        return "sharded"
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    part = flat[:: flat.numel() // MANY + 1].cpu().double().numpy()  # not each GPU has float64
    with np.errstate(all="ignore"):  # gradients may overflow under a GradScaler
        sums = SIGNS[:, : len(part)] @ part
        norm = float(np.linalg.norm(part))
    return zlib.crc32(part.tobytes()), norm, sums.tolist(), tuple(tensor.shape)


def of(parameter, tensor):
    """The summary of a parameter's weights or gradient."""
    return "sharded" if hasattr(parameter, "_fsdp_flattened") else summary(tensor)


def difference(one, other):
    """How much two summaries differ, relative to the larger norm."""
    if one == other or "sharded" in (one, other):
        return 0.0
    if one is None or other is None or one[3] != other[3]:
        return 1.0
    if one[0] == other[0]:
        return 0.0
    size = np.sqrt(np.mean(np.square(np.subtract(one[2], other[2])))) / max(one[1], other[1], 1e-30)
    if size == size:
        return float(size)
    return float(np.isfinite(one[1]) != np.isfinite(other[1]))  # NaN on one rank alone


def random_states():
    """Checksums of the random number generators of this process."""
    position = np.random.get_state()
    states = {"torch": checksum(torch.get_rng_state()), "random": hash(random.getstate()[1])}
    states["numpy"] = zlib.crc32(position[1].tobytes()) + position[2]
    if torch.cuda.is_initialized() and get_worker_info() is None:
        states["GPU"] = checksum(torch.cuda.get_rng_state())
    return states


def drawn_since(before):
    """The generators that were used since then, with their states before and after it."""
    now = random_states()
    return {name: (before.get(name), now[name]) for name in now if now[name] != before.get(name)}


def length(sized):
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # some samplers do not know it
        return None


def outer_modules():
    """All modules that are not part of another one; not DDP, but what it wraps."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    modules = [module for module in modules if not isinstance(module, DistributedDataParallel)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


# ---------------------------------------------------------------- notes that the ranks take


class Note:
    """What a rank has seen. `by` names the fields that tell with which notes of other ranks it is
    compared: most often the line, and a number that counts how often it was reached."""

    by = ()
    kinds = {}

    def __init_subclass__(cls):
        Note.kinds[cls.__name__] = cls

    def key(self):
        return tuple(getattr(self, name) for name in self.by)


class Run:
    """What this rank does, for the checks' `watch`: `add` a note."""

    def __init__(self, store, rank, world_size, args):
        self.store, self.rank, self.world_size, self.args = store, rank, world_size, args
        self.pid, self.main_thread = os.getpid(), threading.current_thread()
        self.new, self.sent, self.counts, self.progress = [], 0, {}, 0
        self.steps = 0  # of all optimizers
        self.step = Step()  # the next one, as far as it is known
        self.reduced, self.means = set(), []  # since the last step: all-reduced numbers, Mean notes
        self.random = self.before_fetch = None  # the generators' states then, and after a step
        self.taken = {}  # by line: the last pass over a loader, and how many batches it has given
        self.wrapped = {}  # by the id of a parameter: that of its DDP
        self.trained = set()  # ids of parameters that optimizers have
        self.rows = None  # samples of the last pass through ddp
        self.at_end = []  # functions to call before the report
        self.state = self.status = self.signal = None  # how the script ended, and its exit status
        name = f"check-{os.urandom(8).hex()}"
        self.drawn_in_workers = os.path.join(tempfile.gettempdir(), name)  # loader workers append
        self.renew_lock()
        os.register_at_fork(after_in_child=self.renew_lock)

    def renew_lock(self):
        self.lock = threading.RLock()  # a process forked now may have it held for ever

    def number(self, *key):
        """0, 1, 2, ...: how often this key was asked for."""
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

    def is_main(self):
        """Whether this is the script's main thread, in the process that we watch."""
        return os.getpid() == self.pid and threading.current_thread() is self.main_thread

    def add(self, note):
        with self.lock:
            self.new.append((type(note).__name__, dict(vars(note))))
            self.progress += 1

    def send(self):
        """Pickled by name: the script has taken this file's place as __main__."""
        with self.lock:
            if self.new:
                self.store.set(f"{self.rank}/{self.sent}", pickle.dumps(self.new))
                self.new, self.sent = [], self.sent + 1

    def finish(self, state, status):
        """Wait here for the report; the thread that watches ends this process."""
        if os.getpid() != self.pid:  # a process that the script has forked: no thread watches it
            leave(status)
        with contextlib.suppress(ValueError):  # in another thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(dist.DistError):
            if self.store.check(["printed"]):
                time.sleep(60)  # the report is there: another rank has ended
        if not self.signal:
            for function in self.at_end:
                function()
        self.status, self.state = status, state
        while True:
            time.sleep(1)


class Ranks:
    """The notes of all ranks, for the checks' `compare`."""

    def __init__(self, notes):
        """`notes`: a list of notes for each rank."""
        self.size = len(notes)
        self.notes = [{} for _ in notes]
        self.batches_of_pass = [{} for _ in notes]
        self.trained = set()  # passes over a loader in which a rank trains
        for rank, own in enumerate(notes):
            for note in own:
                self.notes[rank].setdefault(type(note), {})[note.key()] = note
                if isinstance(note, Trained):
                    self.trained.add(note.key())
                if isinstance(note, Batch):
                    where = note.line, note.pass_number
                    self.batches_of_pass[rank].setdefault(where, []).append(note)
        self.known = {}

    def of(self, rank, kind):
        """The notes of this kind that a rank has taken."""
        return list(self.notes[rank].get(kind, {}).values())

    def get(self, rank, kind, *key):
        return self.notes[rank].get(kind, {}).get(key)

    def any(self, kind):
        return any(kind in own for own in self.notes)

    def common(self, kind):
        """The notes of this kind that all ranks have taken, in rank 0's order: of each, the list
        of all ranks' notes."""
        if kind not in self.known:
            of_all = [own.get(kind, {}) for own in self.notes]
            keys = [key for key in of_all[0] if all(key in own for own in of_all)]
            self.known[kind] = [[own[key] for own in of_all] for key in keys]
        return self.known[kind]

    def batches(self, rank, line, pass_number):
        return self.batches_of_pass[rank].get((line, pass_number), [])


def read(store, rank):
    """The notes of a rank."""
    notes = []
    for number in itertools.count():
        if not store.check([f"{rank}/{number}"]):
            return notes
        new = pickle.loads(store.get(f"{rank}/{number}"))
        notes += [Note.kinds[name](**fields) for name, fields in new]


def first_unlike(groups, value):
    """The first group whose ranks' notes differ in a value, and all ranks' values."""
    for group in groups:
        values = [value(note) for note in group]
        if any(other != values[0] for other in values):
            return group, values
    return None, []


# ---------------------------------------------------------------- the checks

CHECKS = []  # in the order of the report


class Check:
    """One rule. Its subclasses are called once each."""

    name = ""
    right = ""  # what is so if nothing is found
    needs = ""  # what the script must do for it to be seen
    remedy = "", ""  # an imperative, and the section's anchor in PAGE

    def __init_subclass__(cls):
        CHECKS.append(cls())

    def watch(self, run):
        """Replace what is to be watched, in this process; nothing here may wait for a rank."""

    def compare(self, ranks):
        """What is found, a list of `wrong(...)` and `look(...)`; [] if `right` is so; None if the
        script did not get there."""


def wrong(text, remedy=None):
    return "WRONG", text, remedy


def look(text, remedy=None):
    return "look", text, remedy


WATCHERS = []


def watcher(function):
    """A decorator: it adds notes for several checks."""
    WATCHERS.append(function)
    return function


# ---------------------------------------------------------------- optimizer.step()


@dataclass
class Step(Note):
    """The state at an optimizer.step(): lists have an entry for each parameter."""

    by = "optimizer", "number"
    optimizer: int = 0
    number: int = 0
    line: str = ""
    names: list = ()
    wrapped: list = ()  # ids of the DDP of each, or None
    weights: list = ()
    gradients: list = ()
    settings: list = ()
    group: int = None  # the process group's size
    taken: dict = None  # by line: the last pass over a loader, and how many batches it has given
    closure: bool = False
    # Since the last step:
    drawn: dict = None  # random numbers
    new_pass: bool = False  # over a loader
    forwards: dict = field(default_factory=dict)  # by the id of a DDP: how often it was called
    backwards: int = 0
    synced: bool = True  # the last pass through ddp
    losses: list = field(default_factory=list)

    def is_reordered(self, other):
        """Whether another rank's optimizer has the same parameters, in another order."""
        if self.names == other.names or set(self.names) != set(other.names):
            return False
        if len(set(self.names)) < len(self.names) or len(self.names) != len(other.names):
            return False  # the name of one of two modules of a class
        theirs = dict(zip(other.names, other.weights))
        by_name = [difference(*pair) for pair in zip(self.weights, map(theirs.get, self.names))]
        by_number = [difference(*pair) for pair in zip(self.weights, other.weights)]
        return max(by_name) <= TOLERANCE < max(by_number)

    def differences(self, rank, other, part):
        """For each parameter whose weights or gradient (`part`) differ from another rank's: its
        number, and a text."""
        theirs = getattr(other, part)
        if self.is_reordered(other):
            theirs = list(map(dict(zip(other.names, theirs)).get, self.names))
        for number, pair in enumerate(itertools.zip_longest(getattr(self, part), theirs)):
            if (size := difference(*pair)) > TOLERANCE:
                name = [*self.names, "a further one"][min(number, len(self.names))]
                text = f"{self.line}, step {self.number + 1}: {name} differs on rank {rank}, "
                yield number, text + f"by about {size:.0e} of its size"


@watcher
def watch_steps(run):
    names, depth = {}, [0]

    def name_of(parameter, number):
        if id(parameter) not in names:
            for module in outer_modules():
                for name, found in module.named_parameters():
                    names.setdefault(id(found), f"{type(module).__name__}.{name}")
        return names.setdefault(id(parameter), f"parameter {number} (of no module)")

    def before_step(optimizer, args, kwargs):
        depth[0] += 1  # an optimizer inside of another (ZeRO) is not looked at
        if depth[0] > 1:
            return
        if not hasattr(optimizer, "check_number"):
            optimizer.check_number = run.number("optimizer")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        run.trained.update(map(id, parameters))
        settings = [pair for group in optimizer.param_groups for pair in group.items()]
        settings = [
            (k, v.item() if torch.is_tensor(v) else v) for k, v in settings if k != "params"
        ]
        step = run.step
        step.optimizer = optimizer.check_number
        step.number, step.line = run.number("step", step.optimizer), place()[0]
        step.names = [name_of(p, number) for number, p in enumerate(parameters)]
        step.wrapped = [run.wrapped.get(id(p)) for p in parameters]
        step.weights = [of(p, p) for p in parameters]
        step.gradients = [of(p, p.grad) for p in parameters]
        step.settings = [(k, v) for k, v in settings if isinstance(v, (int, float, tuple))]
        step.group = dist.get_world_size() if dist.is_initialized() else None
        step.taken = dict(run.taken)
        step.closure = callable((*args, None, None)[1]) or callable(kwargs.get("closure"))
        step.drawn = drawn_since(run.random) if run.random else {}
        run.add(step)
        for mean in run.means:
            mean.reduced = float(mean.count) in run.reduced
            run.add(mean)

    def after_step(optimizer, args, kwargs):
        depth[0] -= 1
        if depth[0] == 0:
            run.steps += 1
            run.step, run.reduced, run.means = Step(), set(), []
            if run.steps in (3, 12, 48):
                note_modules(run)
            run.random = random_states()
            run.send()
            if run.steps >= run.args.steps:
                run.finish(f"stopped after {run.args.steps} steps", 0)

    @replace(torch.autograd, "backward")
    def backward(original, tensors, *args, **kwargs):
        run.step.backwards += 1
        losses = [loss for loss in tensors_in(tensors) if loss.numel() == 1]
        run.step.losses += [round(float(loss.detach()), 9) for loss in losses]
        return original(tensors, *args, **kwargs)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def first_differences(ranks, part):
    """Where weights or gradients differ in the first step that has such: (the ranks' steps, the
    parameter's number, text)."""
    found, at = [], None
    for steps in ranks.common(Step):
        if found and steps[0].number != at:
            break
        for rank, other in enumerate(steps[1:], 1):
            for number, text in steps[0].differences(rank, other, part):
                found.append((steps, number, text))
                at = steps[0].number
    return found


class ProcessGroup(Check):
    name = "process group"
    right = "all ranks are in one group"
    needs = "an optimizer.step()"
    remedy = "call init_process_group and wrap the model in DDP", "#the-diff-one-idea-at-a-time"

    def compare(self, ranks):
        if not (steps := ranks.common(Step)):
            return None
        first, found = steps[0], []
        sizes = [step.group for step in first]
        alone = f"{first[0].line}: {ranks.size} processes, but "
        if all(size and size > ranks.size for size in sizes) and len(set(sizes)) == 1:
            text = f"of {sizes[0]} processes, only the {ranks.size} of this machine are compared"
            found.append(look(text, ("run it on one machine", "#check-your-script")))
        elif any(size != ranks.size for size in sizes):
            alone += "no process group" if set(sizes) == {None} else f"groups of {sizes}"
            found.append(wrong(f"{alone}: each trains alone, on all the data"))
        elif not trains_together(ranks) and first_differences(ranks, "gradients"):
            found.append(wrong(f"{alone}nothing is wrapped in DDP: each trains alone"))
        return found


def trains_together(ranks):
    """Whether an optimizer has parameters that DDP wraps, or FSDP shards."""
    steps = [steps[0] for steps in ranks.common(Step)]
    return any(any(step.wrapped) or "sharded" in step.weights for step in steps)


FOR_CLOSURES = "return the mean over ranks from the closure", "#an-optimizer-with-a-closure"


class Gradients(Check):
    name = "gradients"
    right = "they are equal on all ranks at each optimizer.step()"
    needs = "an optimizer.step() on gradients that are not sharded"
    remedy = "call ddp(...) for each forward pass in training", "#model"

    def compare(self, ranks):
        differences = first_differences(ranks, "gradients")
        own = [one for one in differences if not one[0][0].wrapped[one[1]]]
        if differences:  # clipping spreads one's difference to all
            return self.explain(ranks, *(own or differences)[0])
        steps = [steps[0] for steps in ranks.common(Step)]
        for step in steps[:1]:
            if step.forwards and all(gradient is None for gradient in step.gradients):
                text = f"{step.line}: no gradient in what the optimizer trains: a copy of it?"
                remedy = "give the optimizer the parameters that are wrapped", "#model"
                return [wrong(text, remedy)]
        return [] if any("sharded" not in step.gradients for step in steps) else None

    def explain(self, ranks, steps, number, text):
        step, remedy = steps[0], None
        each = zip(step.names, step.gradients, step.wrapped)
        without = [name for name, gradient, wrapped in each if wrapped and gradient is None]
        wrapped = step.wrapped[number] if number < len(step.wrapped) else None
        forwards, backwards = sum(step.forwards.values()), [own.backwards for own in steps]
        if step.closure:
            why = "its closure returns each rank's own loss, by which the optimizer decides?"
            remedy = FOR_CLOSURES
        elif not trains_together(ranks):
            why, remedy = "nothing is wrapped in DDP", ("wrap the model", "#model")
        elif not wrapped:
            why = "it is not wrapped in DDP, or was added, replaced or thawed after that"
            remedy = "wrap it, or all-reduce its gradient", "#everything-that-an-optimizer-trains"
        elif wrapped not in step.forwards:
            why = "no forward pass in training went through its ddp"
        elif not step.synced:
            why = "the last forward pass was in no_sync()"
            remedy = "communicate in the last micro-batch", "#gradient-accumulation"
        elif len(set(backwards)) > 1:
            why = f"{backwards} times backward() on the ranks since the step before: one has "
            why, remedy = f"{why}skipped a step?", ("skip on all ranks or on none", "#decisions")
        elif step.backwards > forwards:
            why = f"{step.backwards} times backward() after {forwards} passes through ddp"
            remedy = "sum the losses", "#one-backward-for-each-forward-pass"
        elif without:
            why = f"DDP waits for {without[0]}, which had no gradient"
            remedy = "pass find_unused_parameters=True", "#model"
        else:
            why = "autograd.grad, backward() in forward, or a pass not through ddp?"
            remedy = "average them yourself", "#gradients-without-the-wrapper"
        return [wrong(f"{text}: {why}", remedy)]


class Weights(Check):
    name = "weights"
    right = "what the optimizers train is equal on all ranks at each step"
    needs = "an optimizer.step()"
    remedy = "wrap all that is trained, and change it only before", "#model"

    def compare(self, ranks):
        steps = ranks.common(Step)
        for rank, other in enumerate(steps[0][1:] if steps else [], 1):
            ours = steps[0][0]
            if ours.is_reordered(other):
                where = [a != b for a, b in zip(ours.names, other.names)].index(True)
                text = f"{ours.line}: the optimizer has its parameters in another order, such as "
                text += f"{ours.names[where]} on rank 0, {other.names[where]} on rank {rank}"
                remedy = "give it a list in a fixed order, no set", "#what-must-be-equal"
                return [wrong(text, remedy)]
        if differences := first_differences(ranks, "weights"):
            return self.explain(ranks, *differences[0])
        if any("sharded" in own[0].weights for own in steps):
            return [look("sharded weights are not compared", ("see", "#check-your-script"))]
        return [] if steps else None

    def explain(self, ranks, steps, _, text):
        """What came before the first difference."""
        ours = steps[0]
        for rank, other in enumerate(steps[1:], 1):
            if only := sorted(set(ours.names) ^ set(other.names)):
                text = f"{ours.line}: {only[0]} is in the optimizer of rank 0 or {rank} only"
                return [wrong(text, ("give it the same parameters", "#what-must-be-equal"))]
        if ours.number == 0:
            return [wrong(f"{text} when it starts: not wrapped in DDP, or changed after it?")]
        earlier = first_differences(ranks, "gradients")
        if earlier and earlier[0][0][0].number < ours.number:
            return [wrong(f"{text}, as the gradients did before", ("see", "the line on gradients"))]
        if ours.closure:
            text = f"{text}, though the gradients were equal: the closure's loss?"
            return [wrong(text, FOR_CLOSURES)]
        settings, _ = first_unlike(ranks.common(Step), lambda step: step.settings)
        if settings and settings[0].number < ours.number:
            see = "see", "the line on the learning rate"
            return [wrong(f"{text}, as the learning rate did before", see)]
        remedy = "load weights and optimizer on every rank, change them alike", "#checkpoints"
        return [wrong(f"{text}, though the gradients were equal", remedy)]


@dataclass
class Plateau(Note):
    """What ReduceLROnPlateau gets."""

    by = "line", "number"
    line: tuple
    number: int
    metric: float


class LearningRate(Check):
    name = "learning rate"
    right = "it and the optimizers' other settings are equal at all steps"
    needs = "an optimizer.step()"
    remedy = "decide by numbers that are equal on all ranks", "#decisions"

    def watch(self, run):
        @replace(ReduceLROnPlateau, "step")
        def plateau(original, self, metrics, *args, **kwargs):
            line = place()
            metric = float(metrics.detach() if torch.is_tensor(metrics) else metrics)
            run.add(Plateau(line, run.number("plateau", line), metric))
            return original(self, metrics, *args, **kwargs)

    def compare(self, ranks):
        steps, values = first_unlike(ranks.common(Step), lambda step: step.settings)
        if steps:
            names = [[pair for pair in value if pair not in values[0]] for value in values[1:]]
            here = [pair for pair in values[0] if any(pair not in value for value in values)]
            text = f"{steps[0].line}, step {steps[0].number + 1}: {here} on rank 0, {names} on "
            return [wrong(f"{text}others")]
        for plateaus in ranks.common(Plateau):
            metrics = [own.metric for own in plateaus]
            if not np.allclose(metrics, metrics[0], rtol=TOLERANCE, atol=0, equal_nan=True):
                text = f"{plateaus[0].line[0]}: ReduceLROnPlateau gets {metrics}, so rates may "
                return [wrong(f"{text}differ later")]
        return [] if ranks.common(Step) else None


# ---------------------------------------------------------------- forward passes through ddp


@dataclass
class Forward(Note):
    """A forward pass through DDP, in training."""

    by = "line", "number"
    line: tuple
    number: int
    inputs: tuple  # of each tensor: a checksum, and how many elements
    shapes: list  # of images or larger tensors, without the batch's dimension
    rows: int  # the batch's size
    parts: list  # checksums of the samples
    drawn: dict  # random numbers in it
    frozen: list  # modules inside that are in evaluation mode
    finds_unused: bool


@dataclass
class Joined(Note):
    """The script uses ddp.join(): the ranks may have other numbers of batches."""


@watcher
def watch_wrappers(run):
    @replace(DistributedDataParallel, "__init__")
    def init(original, self, module, *args, **kwargs):
        original(self, module, *args, **kwargs)
        run.wrapped.update({id(p): id(self) for p in module.parameters() if p.requires_grad})

    @replace(DistributedDataParallel, "forward")
    def forward(original, self, *inputs, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return original(self, *inputs, **kwargs)
        line, before = place(), random_states()
        tensors = tensors_in((inputs, kwargs))
        tensors = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        note = Forward(
            line=line,
            number=run.number("forward", line),
            inputs=tuple((checksum(tensor), tensor.numel()) for tensor in tensors),
            shapes=[tuple(tensor.shape[1:]) for tensor in tensors if tensor.dim() > 3],
            rows=max((len(tensor) for tensor in tensors if tensor.dim()), default=0),
            parts=[part for _, part in contents_of(tensors, None)[:1024]],
            drawn={},
            frozen=[name for name, module in self.module.named_modules() if not module.training],
            finds_unused=self.find_unused_parameters,
        )
        outputs = original(self, *inputs, **kwargs)
        run.rows = note.rows
        run.step.forwards[id(self)] = run.step.forwards.get(id(self), 0) + 1
        run.step.synced = self.require_backward_grad_sync
        note.drawn = drawn_since(before)
        run.add(note)
        return outputs

    @replace(Join, "__init__")  # also that of ddp.join()
    def join(original, self, *args, **kwargs):
        run.add(Joined())
        return original(self, *args, **kwargs)


class Modes(Check):
    name = "modes"
    right = "the same modules are in training mode on all ranks"
    needs = "a forward pass through ddp, in training"
    remedy = "call train() and eval() on all ranks alike", "#decisions"

    def compare(self, ranks):
        passes, values = first_unlike(ranks.common(Forward), lambda note: note.frozen)
        if passes:
            only = sorted(set.symmetric_difference(set(values[0]), *values[1:]))
            which = [rank for rank, value in enumerate(values) if set(only) & set(value)]
            module = f"{passes[0].line[0]}, pass {passes[0].number + 1}: ddp.module.{only[0]} "
            return [wrong(f"{module}is in evaluation mode on ranks {which} only")]
        return [] if ranks.common(Forward) else None


class Shapes(Check):
    name = "shapes"
    right = "the images that ddp gets have the same size on all ranks"
    needs = "images or other inputs of ddp with four dimensions, in training"
    remedy = "draw a size with a generator seeded alike, or pad to a fixed length", "#batch-size"

    def compare(self, ranks):
        passes = ranks.common(Forward)
        others = [group for group in passes if any(n.shapes != group[0].shapes for n in group)]
        if len(others) > 1:  # not the last batch alone, where the batch is not the first dimension
            group, shapes = others[0], [own.shapes for own in others[0]]
            text = f"{group[0].line[0]}: in {len(others)} of {len(passes)} passes, images have "
            text += f"other sizes on each rank, first {shapes}: drawn at random"
            return [look(f"{text}? Right if each is padded to its own largest")]
        return [] if any(own[0].shapes for own in passes) else None


# ---------------------------------------------------------------- losses


@dataclass
class Mean(Note):
    """One of torch's losses that is a mean: over how many elements."""

    by = "line", "number"
    line: tuple
    number: int
    count: float
    partial: bool  # ignored or weighted elements
    reduced: bool = False  # the count was all-reduced before the step


class MeanLosses(Check):
    name = "mean losses"
    right = "a loss of torch that is a mean is one over as many elements on all ranks"
    needs = "a mean of torch.nn.functional, such as cross_entropy"
    remedy = "divide by the number on all ranks", "#a-loss-that-is-a-mean-over-what-is-valid"

    COUNTED = ["cross_entropy", "nll_loss"]  # classes, of which some may be ignored or weighted
    ELEMENTS = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"]
    ELEMENTS += ["smooth_l1_loss", "huber_loss"]

    def watch(self, run):
        def watch(name):
            signature = inspect.signature(getattr(F, name))

            @replace(F, name)
            def mean(original, *args, **kwargs):
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                given, line = given.arguments, place()
                if given["reduction"] == "mean" and torch.is_grad_enabled() and line[0] != UNKNOWN:
                    target, weight, partial = given["target"], given.get("weight"), False
                    count = target.numel()
                    if name in self.COUNTED and not target.is_floating_point():
                        valid = target[target != given["ignore_index"]]
                        partial = weight is not None or valid.numel() < target.numel()
                        count = valid.numel() if weight is None else weight[valid].sum().item()
                    run.means.append(Mean(line, run.number("mean", line), count, partial))
                return original(*args, **kwargs)

        for name in self.COUNTED + self.ELEMENTS:
            watch(name)

    def compare(self, ranks):
        means = ranks.common(Mean)
        unreduced = [group for group in means if not all(mean.reduced for mean in group)]
        group, values = first_unlike(unreduced, lambda mean: mean.count)
        if not group:
            return [] if means else None
        text = f"{group[0].line[0]}: a mean over {values} (weighted) elements"
        partial = any(mean.partial for mean in group)
        return [wrong(text) if partial else look(f"{text}: a smaller batch, or others selected?")]


# ---------------------------------------------------------------- collectives


@dataclass
class Collective(Note):
    """A collective of the default group that the script calls: the ranks' n-th ones meet."""

    by = ("number",)
    number: int
    name: str
    size: int  # elements, where all ranks must have as many
    line: tuple


@dataclass
class Minimum(Note):
    """The script takes a minimum over the ranks, perhaps of the numbers of batches."""


class Collectives(Check):
    name = "collectives"
    right = "all ranks call the same collectives, in the same order"
    needs = "an all_reduce, broadcast, barrier or the like in the script"
    remedy = "call it on every rank, outside of a branch on the rank or its data", "#decisions"

    SIZED = ["all_reduce", "broadcast", "reduce"]
    OTHERS = ["all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter"]
    OTHERS += ["reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"]
    OTHERS += ["all_gather_object", "gather_object", "broadcast_object_list"]
    OTHERS += ["scatter_object_list", "monitored_barrier"]

    def watch(self, run):
        def small_values(tensor):
            """One may be the number of samples that a loss is a mean over."""
            if torch.is_tensor(tensor) and 0 < tensor.numel() <= 16 and not tensor.is_complex():
                run.reduced.update(map(float, tensor.detach().flatten().tolist()))

        def watch(name):
            signature = inspect.signature(getattr(dist, name))

            @replace(dist, name)
            def collective(original, *args, **kwargs):
                given = signature.bind(*args, **kwargs).arguments
                tensor, line = given.get("tensor"), place()
                if name == "all_reduce" and given.get("op") == dist.ReduceOp.MIN:
                    run.add(Minimum())
                if name in ("all_reduce", "all_gather"):
                    small_values(tensor)
                group = given.get("group")
                if group in (None, dist.group.WORLD) and run.is_main() and line[0] != UNKNOWN:
                    size = tensor.numel() if name in self.SIZED else 0
                    run.add(Collective(run.number("collective"), name, size, line))
                return original(*args, **kwargs)

        for name in self.SIZED + self.OTHERS:
            watch(name)

    def compare(self, ranks):
        if ranks.any(Joined):
            return []
        group, values = first_unlike(ranks.common(Collective), lambda c: (c.name, c.size))
        other_lines, _ = first_unlike(ranks.common(Collective), lambda c: c.line)
        if group:
            if other_lines and other_lines[0].number < group[0].number:
                group = other_lines
            return [wrong(self.text(group))]
        if other_lines and other_lines[0].name in ("all_reduce", "reduce"):
            return [look(f"{self.text(other_lines)}: is it the same sum?")]
        return [] if ranks.common(Collective) else None

    def text(self, group):
        calls = []
        for rank, call in enumerate(group):
            size = f" of {call.size} numbers" if call.size else ""
            calls.append(f"rank {rank} calls {call.name}{size} at {call.line[0]}")
        return f"{group[0].line[0]}: collective {group[0].number + 1}: {', '.join(calls)}"


# ---------------------------------------------------------------- modules that are not trained


@dataclass
class Modules(Note):
    """Summaries of what no optimizer trains, at some steps."""

    by = ("step",)
    step: int
    others: dict  # weights, by module and name: a list, as several modules can have one name
    tensors: dict  # buffers, and plain tensors, such as a running mean


def note_modules(run):
    """Not at the end alone: what a function has made is gone by then. Batch norm's averages are
    each rank's own."""
    others, found, trained = {}, {}, run.trained.union(run.wrapped)
    for outer in outer_modules():
        kind = type(outer).__name__
        for name, parameter in outer.named_parameters():
            if id(parameter) not in trained and not parameter.is_meta:
                others.setdefault(f"{kind}.{name}", []).append(of(parameter, parameter))
        for name, buffer in outer.named_buffers():
            averages = re.search("running_|num_batches_tracked|n_averaged", name)
            if not averages and not buffer.is_meta:
                found.setdefault(f"{kind}.{name}", []).append(buffer)
        for path, module in outer.named_modules():
            for name, value in list(vars(module).items()):
                if type(value) is not torch.Tensor or value.requires_grad or value.is_meta:
                    continue
                if value.numel() and value.shape[:1] != (run.rows,):  # not of one batch only
                    found.setdefault(".".join(filter(None, (kind, path, name))), []).append(value)
    others = {name: sorted(sums, key=repr) for name, sums in others.items()}
    tensors = {name: summary(each[0]) for name, each in found.items() if len(each) == 1}
    run.add(Modules(run.steps, others, tensors))


class OtherWeights(Check):
    name = "other weights"
    right = "modules that no optimizer trains are equal on all ranks"
    needs = "a module with weights that no optimizer has, such as a teacher"
    remedy = "build and update a teacher or EMA alike on all ranks, or broadcast it", "#model"

    def compare(self, ranks):
        seen = False
        for group in ranks.common(Modules):
            for name in sorted(set.intersection(*[set(own.others) for own in group])):
                seen, found = True, [own.others[name] for own in group]
                for rank, other in enumerate(found[1:], 1):
                    size = max(difference(*pair) for pair in zip(found[0], other))
                    if len(other) == len(found[0]) and size > TOLERANCE:
                        text = f"{name} differs on rank {rank} after step {group[0].step}, by about"
                        return [wrong(f"{text} {size:.0e} of its size")]
        return [] if seen else None


class OtherBuffers(Check):
    name = "other buffers"
    right = "a bank, a queue, a codebook is equal on all ranks"
    needs = "a module with buffers or tensors of its own, but batch norm's averages"
    remedy = "gather what all ranks add", "#banks-and-queues"

    def compare(self, ranks):
        seen = False
        for group in ranks.common(Modules):
            for name in sorted(set.intersection(*[set(own.tensors) for own in group])):
                seen, found = True, [own.tensors[name] for own in group]
                if len({one[3] for one in found}) > 1:
                    continue  # a cache that has grown
                if any(difference(found[0], other) > TOLERANCE for other in found[1:]):
                    text = f"{name} differs after step {group[0].step}: filled from each rank's "
                    return [look(f"{text}own batch, or at random?")]
        return [] if seen else None


# ---------------------------------------------------------------- loaders


@dataclass
class Pass(Note):
    """A pass over a DataLoader."""

    by = "line", "number"
    line: tuple
    number: int
    step: int  # of all optimizers, when it began
    loader: int
    short: bool
    workers: int
    iterable: bool
    batches: int  # in an epoch, of a dataset with indices
    size: int  # of the dataset
    dataset: int  # its id
    subset: int  # a checksum of a Subset's indices
    is_subset: bool
    sampler: str
    sampled: int  # the size of the dataset that a DistributedSampler knows
    distributed: bool


@dataclass
class Batch(Note):
    """What a DataLoader has given."""

    by = "line", "pass_number", "number"
    line: tuple
    pass_number: int
    number: int
    samples: list  # (index, checksums of its parts)
    drawn: dict  # random numbers of the dataset


@dataclass
class Trained(Note):
    """In this pass, an optimizer stepped between two batches."""

    by = "line", "number"
    line: tuple
    number: int


@dataclass
class PassEnd(Note):
    by = "line", "number"
    line: tuple
    number: int
    batches: int
    cut: bool  # by --short


@dataclass
class Workers(Note):
    """What loader workers have drawn: {line: {(generator, state before, state after)}}."""

    drawn: dict


class Indices:
    """Stands for a loader's sampler, or sampler of batches: keeps what it gives."""

    def __init__(self, sampler, run):
        self.sampler, self.run = sampler, run

    def __iter__(self):
        self.given = []
        return self.give(iter(self.sampler), self.given)

    def give(self, iterator, given):
        while True:
            before = random_states()
            try:
                indices = next(iterator)
            except StopIteration:
                return
            self.run.step.new_pass |= bool(drawn_since(before))  # an order: the same on all ranks
            given.append(indices)
            self.run.before_fetch = random_states()
            yield indices

    def __len__(self):
        return len(self.sampler)

    def __getattr__(self, name):
        return getattr(self.sampler, name)


class WatchedPass:
    """Stands for a DataLoader's iterator: notes each batch. A pass between whose batches an
    optimizer steps is for training."""

    def __init__(self, run, iterator, loader, given, line):
        self.run, self.iterator, self.loader, self.given = run, iterator, loader, given
        self.line, self.number = line, run.number("pass", line)
        self.batches, self.steps = 0, None
        self.is_main = run.is_main()

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.iterator)

    def __getattr__(self, name):
        return getattr(self.iterator, name)

    def __next__(self):
        run, short = self.run, self.run.args.short
        if self.steps is not None and run.steps > self.steps:
            run.add(Trained(self.line, self.number))
        try:
            if short and self.batches >= short:
                raise StopIteration
            batch = next(self.iterator)
        except StopIteration:
            cut = bool(short) and self.batches >= short
            run.add(PassEnd(self.line, self.number, self.batches, cut))
            raise
        indices, drawn = None, {}
        if self.given:
            indices = original_indices(self.loader.dataset, self.given[self.batches])
            drawn = {} if self.loader.num_workers else drawn_since(self.run.before_fetch)
        samples = contents_of(batch, indices)
        run.add(Batch(self.line, self.number, self.batches, samples, drawn))
        self.batches, self.steps = self.batches + 1, run.steps
        if self.is_main and run.is_main():  # of a thread that reads ahead, it is not known
            run.taken[self.line] = self.number, self.batches
        return batch


@watcher
def watch_loaders(run):
    known = weakref.WeakKeyDictionary()  # of each loader: its number, and its Indices

    @replace(DataLoader, "__iter__")
    def iterate(original, self):
        run.step.new_pass = True
        line, is_map = place(), not isinstance(self.dataset, IterableDataset)
        what = "sampler" if self.batch_sampler is None else "batch_sampler"
        if self not in known:
            known[self] = run.number("loader"), Indices(getattr(self, what), run)
        number, indices = known[self]
        own = {"worker_init_fn": self.worker_init_fn, "collate_fn": self.collate_fn}
        stand_in = {}
        if self.num_workers and is_map:  # others may draw an order, which is the same on all ranks
            watch = WorkerWatch(run.drawn_in_workers, line[0], *own.values())
            stand_in = {"worker_init_fn": watch.start, "collate_fn": watch.collate}
        if is_map:
            own[what], stand_in[what] = getattr(self, what), indices
        try:
            for name, value in stand_in.items():
                object.__setattr__(self, name, value)  # DataLoader's own refuses a sampler
            iterator = original(self)
        finally:
            for name, value in own.items():
                object.__setattr__(self, name, value)
        watched = WatchedPass(run, iterator, self, indices.given if is_map else None, line)
        is_usual = self.batch_sampler is None or type(self.batch_sampler) is BatchSampler
        sampler = self.sampler if is_usual else self.batch_sampler
        replacement = " with replacement" if getattr(sampler, "replacement", False) else ""
        run.add(
            Pass(
                line=line,
                number=watched.number,
                step=run.steps,
                loader=number,
                short=run.args.short is not None,
                workers=self.num_workers,
                iterable=not is_map,
                batches=length(self) if is_map else None,
                size=length(self.dataset) if is_map else None,
                dataset=id(self.dataset),
                subset=zlib.crc32(repr(list(getattr(self.dataset, "indices", []))).encode()),
                is_subset=isinstance(self.dataset, Subset),
                sampler=type(sampler).__name__ + replacement,
                sampled=length(sampler.dataset) if type(sampler) is DistributedSampler else None,
                distributed=is_distributed(sampler),
            )
        )
        return watched


def is_distributed(sampler):
    """Whether it gives each rank a part: DistributedSampler, or another by its name or fields."""
    if isinstance(sampler, DistributedSampler) or "Distributed" in type(sampler).__name__:
        return True
    if hasattr(sampler, "sampler"):
        return is_distributed(sampler.sampler)
    return any(hasattr(sampler, name) for name in ("num_replicas", "world_size", "num_processes"))


def original_indices(dataset, indices):
    """The indices of a batch in the dataset itself, below all Subsets; None if it has none."""
    try:
        indices = [operator.index(i) for i in indices]
        while isinstance(dataset, Subset):
            indices = [operator.index(dataset.indices[i]) for i in indices]
            dataset = dataset.dataset
        return indices
    except TypeError:  # an IterableDataset, or one with keys
        return None


def contents_of(batch, indices):
    """For each sample of a batch: its index, and a checksum of each of its parts."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    size = len(indices) if indices else len(tensors[0]) if tensors else 0
    parts = []
    for tensor in tensors:
        if len(tensor) == size:
            rows = tensor.detach().reshape(size, -1)
            rows = rows[:, :: rows.shape[1] // 4096 + 1].cpu().contiguous()
            parts.append([checksum(row) for row in rows])
    rows = list(zip(*parts)) if parts else [()] * size
    return list(zip(indices or [None] * size, rows))


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


class WorkerWatch:
    """Stands for worker_init_fn and collate_fn in each loader worker: appends to the file what
    draws random numbers in the dataset."""

    def __init__(self, path, line, init, collate):
        self.words = path, line, init, collate
        self.states, self.written = None, 0

    def __reduce__(self):
        return Elsewhere("WorkerWatch"), self.words

    def start(self, worker):
        _, _, init, _ = self.words
        if init is not None:
            init(worker)
        self.states = random_states()

    def collate(self, samples):
        path, line, _, collate = self.words
        batch = collate(samples)
        if self.written < 8 and self.states:
            if drawn := drawn_since(self.states):
                self.written += 1
                with open(path, "a") as file:
                    file.writelines(f"{(line, name, *pair)}\n" for name, pair in drawn.items())
            self.states = random_states()
        return batch


def note_workers(run):
    """What the loader workers have drawn so far."""
    drawn = {}
    with contextlib.suppress(FileNotFoundError), open(run.drawn_in_workers) as file:
        for text in file:
            if text.endswith(")\n"):
                line, *states = ast.literal_eval(text)
                drawn.setdefault(line, set()).add(tuple(states))
    if run.counts.get("drawn") != (count := sum(map(len, drawn.values()))) and drawn:
        run.counts["drawn"] = count
        run.add(Workers(drawn))


def training_passes(ranks):
    """Of each pass for training: the ranks' Pass notes."""
    return [group for group in ranks.common(Pass) if group[0].key() in ranks.trained]


def order_of(ranks, rank, about):
    """The indices in a pass, in the order of the loader."""
    return [i for batch in ranks.batches(rank, *about.key()) for i, _ in batch.samples]


class Samples(Check):
    name = "samples"
    right = "the ranks train on different ones"
    needs = "a DataLoader, or inputs of ddp, in training"
    remedy = "give each rank its share: a DistributedSampler", "#each-rank-has-its-share"

    ORDERS = ["RandomSampler", "SequentialSampler", "SubsetRandomSampler"]  # each sample once

    def compare(self, ranks):
        passes = [group for group in ranks.common(Forward) if group[0].inputs]
        steps = ranks.common(Step)
        same = [group for group in passes if len({own.inputs for own in group}) == 1]
        remedy = None
        if any(group[0].iterable for group in training_passes(ranks)):
            remedy = "split the IterableDataset by rank", "#different-numbers-of-batches"
        if same and len(same) == len(passes):
            return self.same_inputs(same, steps, remedy)
        if found := self.same_input(passes, remedy) or self.by_workers(ranks):
            return found
        losses = [[step.losses for step in own] for own in zip(*steps)]
        if not passes and losses and any(losses[0]) and all(own == losses[0] for own in losses):
            text = f"the losses of all {len(losses[0])} steps are equal on all ranks"
            return [look(f"{text}: right if each is one over the samples of all ranks")]
        return self.in_common(ranks, passes)

    def same_inputs(self, passes, steps, remedy):
        """All passes through ddp had the same inputs on all ranks."""
        text = f"{passes[0][0].line[0]}: in {len(passes)} passes, ddp had the same inputs on all "
        constant = len(passes) > 1 and len({group[0].inputs for group in passes}) == 1
        losses = [[loss for step in own for loss in step.losses] for own in zip(*steps)]
        alike = [len(one) == len(losses[0]) and np.allclose(one, losses[0]) for one in losses]
        if constant and not all(alike):
            return [look(f"{text}ranks, and other losses: right if each has a part of the loss")]
        return [wrong(f"{text}ranks", remedy)]

    def same_input(self, passes, remedy):
        """One of ddp's inputs, not all, is the same on all ranks in all passes."""
        for line in dict.fromkeys(group[0].line for group in passes):
            groups = [group for group in passes if group[0].line == line]
            for number in range(min(len(own.inputs) for group in groups for own in group)):
                found = [[own.inputs[number] for own in rank] for rank in zip(*groups)]
                large = len(groups) > 2 and all(elements >= 16 for _, elements in found[0])
                if large and len(set(found[0])) > 1 and all(other == found[0] for other in found):
                    text = f"{line[0]}: input {number + 1} of ddp is the same on all ranks"
                    return [wrong(f"{text} in all {len(groups)} passes", remedy)]
        return []

    def by_workers(self, ranks):
        """Each worker of an IterableDataset gives the same samples: it splits them by rank only."""
        for about in [group[0] for group in training_passes(ranks)]:
            given = [batch.samples for batch in ranks.batches(0, *about.key())[: about.workers]]
            if about.iterable and about.workers > 1 and len(given) == about.workers:
                rows = [[row for _, row in samples] for samples in given]
                if len(set(rows[0])) > 1 and all(other == rows[0] for other in rows):
                    text = f"{about.line[0]}: each of the {about.workers} workers gives the same "
                    remedy = "split by get_worker_info().id, too", "#different-numbers-of-batches"
                    return [wrong(f"{text}samples: split by rank only?", remedy)]
        return []

    def in_common(self, ranks, passes):
        """Samples that loaders give to rank 0 and to another."""
        trained = training_passes(ranks)
        rows = max((group[0].rows for group in passes), default=0)
        for about in [group[0] for group in trained]:
            largest = max(len(batch.samples) for batch in ranks.batches(0, *about.key()))
            whole = rows >= largest  # a rank trains on all of a loader's batch
            for rank in range(1, ranks.size):
                count, total, repeated = shared(ranks, about, rank)
                text = f"{about.line[0]}, pass {about.number + 1}: ranks 0 and {rank} "
                if count > ranks.size - 1 + 4 * repeated:
                    text += f"have {count} of {total} samples in common ({about.sampler})"
                    if about.distributed or whole and about.sampler in self.ORDERS:
                        return [wrong(text)]
                    if whole or common_parts(passes, rank):
                        remedy = "give each rank its share", "#another-sampler-or-no-dataloader"
                        return [look(f"{text}: right if each takes its part of a batch", remedy)]
                everything = about.sampler in self.ORDERS and not about.is_subset
                if everything and whole and same_samples(ranks, about.line)[0]:
                    text += f"each go through all {about.size} samples: {ranks.size} times the "
                    return [wrong(f"{text}steps")]
        return [] if passes or trained else None


def shared(ranks, about, rank):
    """How many samples rank 0 and another have in common in a pass: those with the same index, if
    the dataset is known to be the same, or else with the same contents. Also, of how many, and how
    many of them rank 0 has several times."""
    pair = [
        [sample for batch in ranks.batches(one, *about.key()) for sample in batch.samples]
        for one in (0, rank)
    ]
    by_index = all(index is not None for samples in pair for index, _ in samples)
    by_index = by_index and same_samples(ranks, about.line)[0] is True
    names = [[index if by_index else rows for index, rows in samples] for samples in pair]
    names = [[name for name in each if name != ()] for each in names]
    count = len(set(names[0]) & set(names[1]))
    return count, len(pair[0]), len(names[0]) - len(set(names[0]))


def common_parts(passes, rank):
    """Whether rank 0 and another share rows of ddp's inputs in a pass, or none is seen."""
    pairs = [[set(group[0].parts), set(group[rank].parts)] for group in passes]
    return not any(ours for ours, _ in pairs) or any(ours & theirs for ours, theirs in pairs)


class Order(Check):
    name = "order"
    right = "each epoch has another order than the one before"
    needs = "a second epoch of a loader that shuffles: --short 10"
    remedy = "call sampler.set_epoch(epoch) before each epoch", "#loader"

    def compare(self, ranks):
        seen, passes = False, [group[0] for group in training_passes(ranks)]
        for last, about in itertools.combinations(passes, 2):
            if (last.line, last.dataset) != (about.line, about.dataset) or last.step >= about.step:
                continue
            order, earlier = order_of(ranks, 0, about), order_of(ranks, 0, last)
            size = min(len(order), len(earlier))
            shuffled = None not in order[:size] and order[:size] != sorted(order[:size])
            if shuffled and size >= 8:  # fewer may be in the same order by chance
                seen = True
                if order[:size] == earlier[:size]:
                    text = f"{about.line[0]}: pass {about.number + 1} has the order of pass "
                    return [wrong(f"{text}{last.number + 1}")]
        return [] if seen else None


class Loaders(Check):
    name = "loaders"
    right = "two training loaders do not give the same samples at the same time"
    needs = "two loaders in training that shuffle"
    remedy = "pass another seed to the second DistributedSampler", "#loader"

    def compare(self, ranks):
        orders = {}
        for about in [group[0] for group in training_passes(ranks)]:
            order = order_of(ranks, 0, about)
            if None in order or len(order) < 8 or order == sorted(order):
                continue
            for (other_line, loader), other in orders.items():
                size = min(len(order), len(other))
                if loader != about.loader and order[:size] == other[:size]:
                    text = f"{about.line[0]} has the samples of {other_line[0]}, in the same order"
                    return [look(f"{text}: right for pairs, such as images and masks")]
            orders[about.line, about.loader] = order
        return [] if len({loader for _, loader in orders}) > 1 else None


# ---------------------------------------------------------------- datasets


@dataclass
class Probe(Note):
    """Some samples of a dataset, asked for at the end."""

    by = ("line",)
    line: tuple
    size: int
    indices: list
    samples: list  # for each, and for a batch of all: summaries of its parts
    fields: dict  # checksums of lists of strings


def note_datasets(run, loaders):
    """Some samples of each dataset, by index, each fetched twice with the same random numbers, and
    its lists of strings and dictionaries. Other ranks should find the same."""
    for line, loader in list(loaders.items()):
        dataset = loader.dataset
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if isinstance(dataset, IterableDataset) or not (size := length(dataset)):
            continue
        indices = sorted({i * (size - 1) // (PROBES - 1) for i in range(PROBES)})
        fetches = []
        for _ in range(2):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            samples = [dataset[i] for i in indices]
            fetches.append([list(map(leaf_summary, tree_leaves(one))) for one in samples])
            with contextlib.suppress(Exception):  # a collate_fn may want another number of them
                batch = tree_leaves(loader.collate_fn(samples))
                fetches[-1].append(list(map(leaf_summary, batch)))
        again = [[one == other for one, other in zip(*pair)] for pair in zip(*fetches)]
        value = [[x if ok else None for x, ok in zip(*pair)] for pair in zip(fetches[0], again)]
        fields = vars(dataset) if hasattr(dataset, "__dict__") else {}
        run.add(Probe(line, size, indices, value, strings_in(fields)))
        run.send()


def leaf_summary(leaf):
    """(checksum, the value if it is short) of a part of a sample; None if unknown."""
    if isinstance(leaf, (str, bytes, bool, int, float, np.generic)):
        return zlib.crc32(repr(leaf).encode()), repr(leaf)[:40]
    if torch.is_tensor(leaf):
        leaf = leaf.detach().cpu().numpy() if leaf.layout == torch.strided else None
    elif hasattr(leaf, "mode") and hasattr(leaf, "size"):  # an image of PIL
        leaf = np.asarray(leaf)
    if not isinstance(leaf, np.ndarray) or leaf.dtype == object:
        return None
    return zlib.crc32(np.ascontiguousarray(leaf)), str(leaf)[:40] if leaf.size < 3 else ""


def strings_in(fields):
    """Of a dataset's lists of strings, and vocabularies {string: number}: a checksum of what is in
    it, in any order, and one of it as it is."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict) and all(isinstance(one, int) for one in value.values()):
            content = sorted(map(repr, value)), sorted(value.values())
            value = sorted(value.items(), key=repr)
        elif isinstance(value, (list, tuple)) and len(value) < 1_000_000:
            words = [one[0] if isinstance(one, tuple) and one else one for one in value]
            if not all(isinstance(word, (str, os.PathLike)) for word in words):
                continue
            content = sorted(map(repr, words))
        else:
            continue
        found[name] = [zlib.crc32(repr(each).encode()) for each in (content, value)]
    return found


def same_samples(ranks, line):
    """Whether a dataset has the same samples on all ranks, as far as they were compared; None if
    not known. And where they differ first, in words."""
    found = [ranks.get(rank, Probe, line) for rank in range(ranks.size)]
    if None in found:
        return None, None
    ours, known = found[0], False
    for rank, other in enumerate(found[1:], 1):
        if ours.size != other.size:
            return False, None
        names = [*(f"sample {index}" for index in ours.indices), "a batch"]
        for name, *samples in zip(names, ours.samples, other.samples):
            for one, two in zip(*samples):
                known |= bool(one and two)
                if one and two and one[0] != two[0]:
                    values = f": {one[1]} and {two[1]}" if one[1] or two[1] else ""
                    return False, f"{name} differs on rank {rank}{values}"
    return known or None, None


class Datasets(Check):
    name = "dataset"
    right = "a sample's index means the same sample on all ranks"
    needs = "a DataLoader over a dataset with indices"
    remedy = "same seed, sorted(glob(...)), sorted(set(...)) on all ranks", "#what-must-be-equal"

    def watch(self, run):
        loaders = {}  # by line

        @replace(DataLoader, "__iter__")
        def iterate(original, self):
            loaders[place()] = self
            return original(self)

        def probe():
            """At most 30 seconds. What a dataset raises when it is asked is not its fault."""
            words = note_datasets, run, loaders
            thread = threading.Thread(target=quietly, args=words, daemon=True)
            thread.start()
            thread.join(30)

        run.at_end.append(probe)

    def compare(self, ranks):
        passes = ranks.common(Pass)
        group, values = first_unlike(
            [group for group in passes if group[0].distributed],
            lambda about: (about.size, about.subset),
        )
        if group:
            sizes = [size for size, _ in values]
            text = f"{group[0].line[0]}: {sizes} samples, or others: a random split, a filter?"
            return [wrong(text)]
        for about in [group[0] for group in passes]:
            if about.sampled not in (None, about.size):
                text = f"{about.line[0]}: the dataset has {about.size} samples, its "
                text += f"DistributedSampler is made for one of {about.sampled}"
                return [look(text, ("give the sampler this dataset", "#each-rank-has-its-share"))]
        found = None
        for line in dict.fromkeys(group[0].line for group in passes):
            about = next(group[0] for group in passes if group[0].line == line)
            by_index = about.distributed or about.is_subset or about.sampler == "list"
            same, where = same_samples(ranks, line)
            probes = [ranks.get(rank, Probe, line) for rank in range(ranks.size)]
            fields = [probe.fields if probe else {} for probe in probes]
            for name in fields[0]:
                sums = [own.get(name, [None, None]) for own in fields]
                reordered = len({one for one, _ in sums}) == 1 < len({other for _, other in sums})
                if reordered:
                    text = f"{line[0]}: the dataset's {name} has another order on each rank"
                    return [wrong(text) if by_index else look(text)]
            if where and by_index:
                return [look(f"{line[0]}: {where}: data of its own on each rank?")]
            if same is not None:
                found = []
        return found


def quietly(function, *args):
    with contextlib.suppress(Exception):
        function(*args)


# ---------------------------------------------------------------- how the script ends


@dataclass
class End(Note):
    """Where a rank is when the report is made, told by the thread that watches it."""

    state: str  # how the script has ended; None if it has not
    signal: int
    progress: int
    inside: str
    lines: str
    stack: list
    beat: int  # grows while the process lives

    def is_error(self):
        return bool(self.state) and self.state.startswith("Error")


ENDED = "the script has ended"
DIED = "Error: died without a Python exception: killed (memory?), or a crash outside of Python"
# What another rank, or a collective that does not match, causes.
OF_OTHERS = "closed by peer|Connection (reset|refused)|Socket|NCCL|[Tt]imed? ?out|preamble|expected"
OF_OTHERS += " size|mismatch"


class Steps(Check):
    name = "steps"
    right = "all ranks take as many batches and steps, and end alike"
    needs = "an optimizer.step()"
    remedy = (
        "give all ranks the same number of batches, and stop together",
        "#different-numbers-of-batches",
    )

    def compare(self, ranks):
        if ranks.any(Joined):
            return []
        ends = [ranks.of(rank, End)[0] for rank in range(ranks.size)]
        found = self.batches(ranks, ends) or self.optimizers(ranks) or self.skips(ranks)
        found += self.ends(ranks, ends)
        return found if found or ranks.common(Step) else None

    def batches(self, ranks, ends):
        """The ranks have other numbers of batches in a pass, and do not all leave it before."""
        passes = training_passes(ranks)
        group, counts = first_unlike(passes, lambda about: about.batches)
        if group:
            about = group[0]
            taken = {len(ranks.batches(rank, *about.key())) for rank in range(ranks.size)}
            over = {end.state for end in ends} == {ENDED}
            over = over or ranks.get(0, Pass, about.line, about.number + 1)
            if len(taken) > 1 or not over or about.short:  # not: all left it after as many
                text = f"{about.line[0]}, pass {about.number + 1}: the ranks have {counts} batches"
                told = ranks.any(Minimum)
                return [
                    look(f"{text}: right if all stop after the fewest") if told else wrong(text)
                ]
        finished = [group for group in ranks.common(PassEnd) if group[0].key() in ranks.trained]
        group, counts = first_unlike(finished, lambda end: end.batches)
        if group:
            text = f"{group[0].line[0]}, pass {group[0].number + 1}: the ranks have {counts}"
            return [wrong(f"{text} batches")]
        return []

    def optimizers(self, ranks):
        numbers = [{step.optimizer for step in ranks.of(rank, Step)} for rank in range(ranks.size)]
        if any(other != numbers[0] for other in numbers):
            text = f"the ranks step {[len(each) for each in numbers]} optimizers: one has changed "
            return [wrong(f"{text}it", ("change it on all ranks or on none", "#decisions"))]
        return []

    def skips(self, ranks):
        """At a step, the ranks are at other batches."""
        lines = {line for line, _ in ranks.trained}
        for steps in ranks.common(Step):
            for line in steps[0].taken.keys() & lines:
                taken = [step.taken.get(line) for step in steps]
                if any(other != taken[0] for other in taken):
                    batches = [f"{one[1]} of pass {one[0] + 1}" if one else "none" for one in taken]
                    text = f"{line[0]}: at step {steps[0].number + 1} of the optimizer, the ranks "
                    text += f"were at batches {batches}: one skipped a batch, or a step before it"
                    return [wrong(text, ("skip on all ranks or on none", "#decisions"))]
        return []

    def ends(self, ranks, ends):
        states = [end.state for end in ends]
        failed = [rank for rank, end in enumerate(ends) if end.is_error()]
        causes = [rank for rank in failed if not re.search(OF_OTHERS, states[rank])]
        if set(states) == {ENDED} or not failed and any(end.signal for end in ends):
            return []
        if not failed and len(set(states)) == 1 and states[0]:
            return []
        remedy = "stop on all ranks or on none, with no dist. call on one alone", "#decisions"
        text = "the ranks do not end together:"
        if causes:
            which = f"rank {causes[0]}" if len(causes) == 1 else f"ranks {causes}"
            text = f"{which} failed:" if len(causes) < ranks.size else "all ranks failed:"
            remedy = "see its own message above; the others may only wait for it", "#decisions"
        for rank, end in enumerate(ends):
            where = f"is at {end.lines} in {end.inside}()"
            if end.state == DIED:
                where = f"{DIED}; last seen at {end.lines} in {end.inside}()"
            elif end.state:
                where = end.state
            text += f"\n{'':13}rank {rank}, {len(ranks.of(rank, Step))} steps: {where}"
        return [wrong(text, remedy)]


# ---------------------------------------------------------------- evaluation


@dataclass
class Evaluation(Note):
    """The weights and buffers with which a module is evaluated."""

    by = "line", "number"
    line: tuple
    number: int
    name: str
    tensors: dict  # name: (is it a buffer, summary)


class Evaluated(Check):
    name = "evaluation"
    right = "weights and buffers are equal when a module is evaluated"
    needs = "model.eval(), and a pass after it: --short 10"
    remedy = "broadcast rank 0's buffers before it", "#buffers"

    def watch(self, run):
        """The outermost module that eval() is called of, when a module in it is used next: by then,
        a script or DDP's forward pass may have sent its buffers."""
        pending, depth = {}, [0]  # pending: by the id of each module inside

        def forget(outer):
            for module in outer.modules():
                pending.pop(id(module), None)

        def before_forward(module, inputs):
            if torch.compiler.is_compiling() or module.training or id(module) not in pending:
                return
            outer, line, number = pending[id(module)]
            forget(outer)
            tensors = {name: (False, summary(p)) for name, p in outer.named_parameters()}
            tensors |= {name: (True, summary(buffer)) for name, buffer in outer.named_buffers()}
            run.add(Evaluation(line, number, type(outer).__name__, tensors))

        register_module_forward_pre_hook(before_forward)
        warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")

        @replace(nn.Module, "train")
        def train(original, self, mode=True):
            depth[0] += 1
            try:
                result = original(self, mode)
            finally:
                depth[0] -= 1
            if depth[0] == 0:
                outer = self.module if isinstance(self, DistributedDataParallel) else self
                forget(outer)
                line = place()
                if not mode and (number := run.number("eval", line)) < 20:
                    pending.update({id(each): (outer, line, number) for each in outer.modules()})
            return result

    def compare(self, ranks):
        known = first_differences(ranks, "weights")
        others = [group for group in ranks.common(Batch) if group[0].key()[:2] not in ranks.trained]
        shares, _ = first_unlike(others, lambda batch: [i for i, _ in batch.samples])
        for group in ranks.common(Evaluation):
            for rank, other in enumerate(group[1:], 1):
                for tensor, (is_buffer, found) in other.tensors.items():
                    _, own = group[0].tensors.get(tensor, (0, None))
                    if is_buffer and own and found and own[3] != found[3]:
                        continue  # a cache that has grown
                    size = difference(own, found)
                    if size > TOLERANCE and (is_buffer or not known):
                        text = f"{group[0].line[0]}: {group[0].name}.{tensor} differs on rank "
                        text += f"{rank}, by about {size:.0e} of its size"
                        if is_buffer and not shares:
                            return [look(f"{text}: only rank 0's score counts")]
                        remedy = "load or update them alike on all ranks", "#checkpoints"
                        return [wrong(text, None if is_buffer else remedy)]
        return [] if ranks.common(Evaluation) else None


class TestSamples(Check):
    name = "test samples"
    right = "those of a whole evaluation count once each"
    needs = "a whole pass over a loader without training, which --short ends early"
    remedy = "give each rank Subset(test_set, range(rank, len(test_set), world_size))", "#scores"

    def compare(self, ranks):
        found = None
        trained = {group[0].loader for group in training_passes(ranks)}
        for group in ranks.common(PassEnd):
            about = ranks.get(0, Pass, *group[0].key())
            lists = [order_of(ranks, rank, about) for rank in range(ranks.size)]
            everyone = sum(lists, [])
            if about.loader in trained or about.key() in ranks.trained or None in everyone:
                continue
            cut = any(end.cut for end in group)
            found = found if cut else found or []
            if all(other == lists[0] for other in lists) or not about.distributed:
                continue
            text = f"{about.line[0]}: {len(everyone)} samples on all ranks, of "
            text += f"{len(set(everyone))}"
            if len(set(everyone)) < len(everyone):
                return [look(f"{text}: {about.sampler} repeats some, which then count twice")]
            if len(everyone) < (about.size or 0) and not cut:
                return [look(f"{text} and {about.size} in the dataset: some are left out")]
        return found


# ---------------------------------------------------------------- files


@dataclass
class Written(Note):
    """A file that is opened for writing, or renamed."""

    by = ("path",)
    path: str  # after the host's name
    line: str
    mode: str


class Files(Check):
    name = "files"
    right = "no file is written by several ranks"
    needs = "a file that the script writes"
    remedy = "print, log and save under `if rank == 0:`", "#rank-0"

    def watch(self, run):
        def written(path, mode):
            if not isinstance(path, (str, bytes, os.PathLike)) or get_worker_info():
                return
            path = os.path.abspath(os.fsdecode(path))
            if path == run.drawn_in_workers or os.getpid() != run.pid:
                return
            path = re.sub(r"(events\.out\.tfevents).*", r"\1", path)  # one per TensorBoard writer
            if not re.search(NOT_OUTPUT, path) and not is_library(path):
                run.add(Written(f"{socket.gethostname()}:{path}", place()[0], mode))

        def audit(event, values):
            if event == "open" and isinstance(values[1], str) and re.search("[wxa+]", values[1]):
                written(values[0], values[1])
            elif event == "os.rename":
                written(values[1], "w")

        sys.addaudithook(audit)

        @replace(torch, "save")
        def save(original, *args, **kwargs):
            written(kwargs.get("f", (*args, None, None)[1]), "w")
            return original(*args, **kwargs)

    def compare(self, ranks):
        written = {
            note.key(): note for rank in range(ranks.size) for note in ranks.of(rank, Written)
        }
        found = []
        for key, note in written.items():
            writers = [rank for rank in range(ranks.size) if ranks.get(rank, Written, *key)]
            if len(writers) > 1:
                kind = look if "a" in note.mode else wrong
                path = note.path.partition(":")[2]
                found.append(kind(f"{note.line}: ranks {writers} write {path}"))
        found.sort(key=lambda one: one[0])  # WRONG first
        return found[:1] if found or written else None


# ---------------------------------------------------------------- random numbers


class RandomNumbers(Check):
    name = "random numbers"
    right = "those of dropout, noise and augmentation differ over ranks"
    needs = "dropout, noise or augmentation that draws by torch, numpy or random"
    remedy = "torch.manual_seed(seed + rank) after the model and the split", "#seeds"

    def compare(self, ranks):
        loads = [group for group in ranks.common(Batch) if group[0].key()[:2] in ranks.trained]
        steps = [group for group in ranks.common(Step) if not group[0].new_pass]  # an order
        for kind, groups, what in (
            (wrong, ranks.common(Forward), "dropout or noise in the model draws"),
            (wrong, loads, "the dataset (augmentation?) draws"),
            (look, steps, "wrong for noise, right for indices: the loop draws"),
        ):
            for group in groups:
                if same := set.intersection(*[set(note.drawn.items()) for note in group]):
                    line = group[0].line if isinstance(group[0], Step) else group[0].line[0]
                    text = f"{line}: {what} the same numbers on all ranks ({min(same)[0]})"
                    is_forward = isinstance(group[0], Forward)
                    if is_forward and (group[0].finds_unused or len(same) < len(group[0].drawn)):
                        return [look(f"{text}: right for LayerDrop, wrong for dropout")]
                    return [kind(text)]
        workers = [dict(*[note.drawn for note in ranks.of(r, Workers)]) for r in range(ranks.size)]
        for line in workers[0]:
            same = set.intersection(*[drawn.get(line, set()) for drawn in workers])
            if same and any(line == where[0] for where, _ in ranks.trained):
                text = f"{line}: loader workers draw the same numbers on all ranks ({min(same)[0]})"
                return [wrong(text)]
        drew = any(workers) or any(
            group[0].drawn for group in ranks.common(Forward) + loads + steps
        )
        return [] if drew else None


# ---------------------------------------------------------------- the report


def about_loaders(ranks):
    """What each training loader gives: whether the batch is the one intended, only you know."""
    first = {}
    for group in training_passes(ranks):
        first.setdefault(group[0].line, group[0])
    for line, about in first.items():
        size = len(ranks.batches(0, *about.key())[0].samples)
        text = f"{line[0]}: batches of {size} samples on each rank, {size * ranks.size} in total; "
        yield f"{text}{about.batches or '?'} batches in an epoch, on each rank"


def report(ranks):
    """The text, and how many lines are WRONG; None if nothing was trained."""
    found = {"WRONG": [], "look": [], "ok": [], "not seen": []}
    for each in CHECKS:
        try:
            results = each.compare(ranks)
        except Exception as error:  # the others still count
            traceback.print_exc()
            found["not seen"].append(
                [f"not seen {each.name:14} the check itself failed: {error!r}"]
            )
            continue
        if results is None:
            found["not seen"].append([f"not seen {each.name:14} it needs {each.needs}"])
        elif not results:
            found["ok"].append([f"ok       {each.name:14} {each.right}"])
        for verdict, text, remedy in results or []:
            words, title = remedy or each.remedy
            title = PAGE + title if title.startswith("#") else title
            remedy = f"{'':23} -> {words}: {title}"
            found[verdict].append([f"{verdict:8} {each.name:14} {text}", remedy])
    steps, wrongs, looks = len(ranks.common(Step)), len(found["WRONG"]), len(found["look"])
    if steps == 0:
        del found["not seen"]  # all of them
    lines = [line for blocks in found.values() for block in blocks for line in block]
    end = f"check.py: {steps} steps on {ranks.size} processes, {wrongs or 'nothing'} WRONG"
    end += f", {looks} to look at" if looks else ""
    if steps == 0:
        end = f"check.py: 0 steps on {ranks.size} processes, {wrongs or '?'} WRONG: nothing was "
        end += "trained by an optimizer of torch on all ranks, so nothing is known"
    return "\n".join(["", *about_loaders(ranks), *lines, end]), wrongs if steps or wrongs else None


# ---------------------------------------------------------------- the run


class Patience:
    """Whether to wait no longer: no rank notes anything or gets to another line, or all have ended,
    or are asked to end."""

    def __init__(self, wait):
        self.wait, self.last, self.since = wait, None, time.monotonic()
        self.asked = None  # since when this rank is asked to end
        self.beats = {}  # of each rank: the last, and since when

    def is_alive(self, rank):
        return time.monotonic() - self.beats[rank][1] < 4  # a busy machine may take so long

    def is_over(self, ends, asked):
        now = time.monotonic()
        if asked and self.asked is None:
            self.asked = now
        places = [{**vars(end), "beat": None} for end in ends]
        if places != self.last:
            self.last, self.since = places, now
        for rank, end in enumerate(ends):
            if end.beat != self.beats.get(rank, [None])[0]:
                self.beats[rank] = end.beat, now
        if self.asked and now - self.asked > 10:  # it may be saving; torchrun waits for 30
            return True
        failed = any(end.is_error() for end in ends)
        failed |= not all(end.state or self.is_alive(rank) for rank, end in enumerate(ends))
        return now - self.since > (5 if failed else self.wait) or all(end.state for end in ends)


def where_now(run):
    """Where the script's main thread is."""
    frame = sys._current_frames()[run.main_thread.ident]
    frames = [f for f, _ in traceback.walk_stack(frame) if f.f_code.co_filename != HERE]
    return End(
        state=run.state,
        signal=run.signal,
        progress=run.progress,
        inside=frames[0].f_code.co_name if frames else "check.py",
        lines=" < ".join(own_lines(frame)[:4]),
        stack=[(f.f_code.co_name, line) for f, line in traceback.walk_stack(frame)],
        beat=run.number("beat"),
    )


def observe(run):
    """A thread on every rank: tells where this rank is; on one rank, makes the report. Returns how
    many lines are WRONG, None if nothing was trained."""
    patience = Patience(run.args.wait)
    latest = time.monotonic() + 10 * run.args.wait  # for the others to import torch
    keys = [f"{rank}/end" for rank in range(run.world_size)]
    while not run.store.check(["printed"]):
        note_workers(run)
        run.send()
        run.store.set(keys[run.rank], pickle.dumps(vars(where_now(run))))
        time.sleep(0.3)
        if not run.store.check(keys):
            if run.signal or time.monotonic() > latest:
                missing = [rank for rank, key in enumerate(keys) if not run.store.check([key])]
                refuse(f"ranks {missing} have not started")
            continue
        ends = [End(**pickle.loads(run.store.get(key))) for key in keys]
        is_over = patience.is_over(ends, run.signal)
        alive = [rank for rank in range(run.world_size) if patience.is_alive(rank)]
        if is_over and run.rank == alive[0]:
            for rank, end in enumerate(ends):
                if rank not in alive and not end.state:
                    end.state = DIED
            notes = [[*read(run.store, rank), end] for rank, end in enumerate(ends)]
            text, wrongs = report(Ranks(notes))
            print(text)
            print(next_command(run.args))
            sys.stdout.flush()
            run.store.set("printed", repr(wrongs))
            time.sleep(1)  # the others read it
    return ast.literal_eval(run.store.get("printed").decode())


def next_command(args):
    """That of compare.py, which starts its processes itself."""
    path = os.path.join(os.path.dirname(HERE), "compare.py")
    path = os.path.relpath(path, START) if os.path.exists(path) else "compare.py"
    words = ["python", path, *["-m"] * args.m, args.script, *args.flags]
    return f"Run compare.py next (from here, writing to another folder): {shlex.join(words)}"


def watch(run):
    """Ends this process, also out of a collective that waits for ever."""
    status = 1  # it hung
    try:
        wrongs = observe(run)
        if run.status is not None:
            status = run.status
        if run.args.strict and wrongs != 0:
            status = 1
    except dist.DistError:
        print(
            "check.py: the process that has the notes has ended, so there is no report", flush=True
        )
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        os.remove(run.drawn_in_workers)
    leave(status)


def answer_signals(run):
    """SIGTERM, which torchrun and mp.spawn send when another rank has died, and Ctrl-C end the run
    with the report so far, also out of a collective: a thread reads them from a pipe. If the script
    has handlers of its own, they are called."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def ignore(number, frame):
        """A handler in Python, as only such ones write to the pipe."""

    def read_signals():
        while number := os.read(reading, 1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                run.signal = run.signal or number[0]

    def forget():  # in a child, such as a loader worker
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ignore)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: quietly(forget))
    threading.Thread(target=read_signals, daemon=True).start()


def run_watched(run, script):
    """Run a script, or the function of a process that it starts, with all that is watched."""
    if run.world_size < 2:
        refuse("one process has no other to be compared with: start two, --nproc-per-node 2")
    for function in WATCHERS:
        function(run)
    for each in CHECKS:
        each.watch(run)
    run.at_end.append(lambda: note_modules(run))

    @replace(os, "_exit")
    def watched_exit(original, status):
        if run.is_main():
            run.finish(ENDED, status)
        original(status)

    answer_signals(run)
    threading.Thread(target=watch, args=(run,), daemon=True).start()
    try:
        script()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        run.finish(f"Error SystemExit: {end.code}"[:300] if status else ENDED, status)
    except KeyboardInterrupt:
        run.signal = signal.SIGINT
        run.finish("interrupted", 130)
    except BaseException as error:
        traceback.print_exc()
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = " < ".join(own_lines(frames[-1])[:4])
        run.finish(f"Error {type(error).__name__}: {str(error)[:200]} at {lines}", 1)
    run.finish(ENDED, 0)


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


def run_spawned(args, port, world_size, function, rank, *words):
    """In each of mp.spawn's processes."""
    find_script(args)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(hours=1))
    run = Run(dist.PrefixStore("check.py", store), rank, world_size, args)
    run_watched(run, lambda: function(rank, *words))


def leave(status):
    sys.stdout.flush()
    sys.stderr.flush()
    LEAVE(status)


def refuse(why):
    """End this process in a line, before anything is trained."""
    print(f"check.py: {why}", file=sys.stderr)
    leave(2)


def refuse_processes(may_start):
    """Unless it may, the script starts no process by Process(...) that runs code of its own."""

    @replace(multiprocessing.process.BaseProcess, "start")
    def start(original, self):
        target = getattr(self, "_target", None) or type(self).run
        if own_file(getattr(getattr(target, "__code__", None), "co_filename", HERE)):
            if not may_start():
                refuse("processes of Process(...) cannot be watched, only those of mp.spawn")
        original(self)


def replace_spawn(function):
    """A decorator, as `replace`: of both functions of torch that start processes."""
    for name in "spawn", "start_processes":
        replace(torch.multiprocessing, name)(function)


def calls_spawn(path):
    """Whether a script starts its processes by mp.spawn, not by torchrun."""
    if not os.path.isfile(path):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return bool(re.search(SPAWN, file.read()))


def start_by_torchrun(args):
    """Replace this process by torchrun."""
    print(f"check.py: torchrun --standalone --nproc-per-node {args.nproc} ...", flush=True)
    if 0 < torch.cuda.device_count() < args.nproc:
        print("check.py: on CPUs, as there are fewer GPUs than processes", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    words = ["--standalone", "--nproc-per-node", str(args.nproc), HERE, *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])


def check_spawning_script(args):
    """Run a script that starts its processes itself. This one only has the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @replace_spawn
    def spawn(original, fn, *others, **options):
        nprocs = options.get("nprocs", (*others, 1, 1)[1])
        in_process = Elsewhere("run_spawned")
        fn = functools.partial(in_process, args, store.port, nprocs, fn)
        return original(fn, *others, **options)

    def use_torchrun(*_):
        if os.getpid() == own:
            start = f"torchrun --standalone --nproc-per-node {args.nproc} {parser.prog} ..."
            text = "start it with torchrun, as it has not called mp.spawn (or add its flag for it)"
            refuse(f"{text}: {start}")

    own, status = os.getpid(), 0
    refuse_processes(lambda: os.getpid() != own)
    register_optimizer_step_pre_hook(use_torchrun)  # not to train to the end before it is said
    try:
        run_script(args)
    except SystemExit as end:
        status = end
    except KeyboardInterrupt:
        status = 130
        with contextlib.suppress(dist.DistError):  # the processes make the report
            store.wait(["check.py/printed"], timedelta(seconds=10))
    except (
        torch.multiprocessing.ProcessRaisedException,
        torch.multiprocessing.ProcessExitedException,
    ):
        status = 1
    if not store.check(["check.py/printed"]):
        if isinstance(status, SystemExit):
            raise status
        use_torchrun()
    wrongs = ast.literal_eval(store.get("check.py/printed").decode())
    sys.exit(1 if args.strict and wrongs != 0 else status)


def main():
    args = parser.parse_args()
    if args.list:
        for each in CHECKS:
            words, title = each.remedy
            print(f"{each.name:14} {each.right}\n{'':14} -> {words}: {PAGE + title}")
        return
    if args.script is None:
        parser.error("which script?")
    path = find_script(args)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        if args.spawn or calls_spawn(path):
            return check_spawning_script(args)
        return start_by_torchrun(args)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + (not agent)
    hour = timedelta(hours=1)
    store = dist.TCPStore(host, port, is_master=not agent and rank == 0, timeout=hour)

    @replace_spawn
    def spawn(*_):
        refuse("start it with python check.py --spawn, not torchrun: this script calls mp.spawn")

    @replace(dist, "init_process_group")
    def init(original, *args, **kwargs):
        original(*args, **kwargs)
        if (size := dist.get_world_size()) < world_size:
            why = "each trains alone, or is a machine of its own, which cannot be watched"
            refuse(f"{world_size} processes, but process groups of {size}: {why}")

    refuse_processes(dist.is_initialized)  # later ones are helpers, such as environments
    run = Run(dist.PrefixStore("check.py", store), rank, world_size, args)
    run_watched(run, lambda: run_script(args))


if __name__ == "__main__":
    main()

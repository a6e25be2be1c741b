"""Runs your unchanged training script on several processes, and says what is wrong with its DDP.

torchrun --standalone --nproc-per-node 2 check.py train.py --its --own flags
torchrun --standalone --nproc-per-node 2 check.py --steps 300 --short 10 train.py --its --own flags
torchrun --standalone --nproc-per-node 2 check.py -m package.train --its --own flags
python check.py train.py --its --own flags    # a script that starts its processes by mp.spawn
python check.py --list                        # the checks: what is right, and where the remedy is

Two processes are enough, on GPUs or on CPUs. Most mistakes end no run: it trains, slightly wrong.
Every rank notes what it does (checksums of weights, gradients, samples and random numbers), and
rank 0 compares the notes when the script ends, after --steps, or when no rank advances any more.
Notes go through a store of their own, nothing here waits for another rank, and no random number
is drawn: the losses are those without check.py. The script really trains, and writes its files.

"WRONG" needs a change; "look" may be intended; "not seen": the script did not get there.
--short ends each pass over a DataLoader after so many batches, so that epoch 2 is seen, too.
--strict exits with status 1 if something is WRONG; otherwise, the status is the script's own.

It does not see: a mean over a rank's own mask or negatives that is not one of torch's losses,
scores that are not all-reduced, an early stop that has not happened yet, files written by C++ or
by loader workers, random numbers of generators other than the global ones, and what comes after
--steps. Shards of FSDP are not compared. Scripts that start their processes by Process(...), or one
process per machine, cannot be watched, and are refused.
"""

import argparse
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
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import zlib
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
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
    dataloader,
    get_worker_info,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher

parser = argparse.ArgumentParser(
    usage="torchrun --standalone --nproc-per-node 2 check.py [flags] script.py [script's flags]",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--steps", type=int, default=50, help="optimizer steps before the report")
parser.add_argument("--short", type=int, help="end each pass over a DataLoader after these batches")
parser.add_argument("--wait", type=float, default=60, help="seconds until a hang is reported")
parser.add_argument("--strict", action="store_true", help="status 1 if something is WRONG")
parser.add_argument("--list", action="store_true", help="print what is checked, and exit")
parser.add_argument("-m", action="store_true", help="the script is a module, as in python -m")
parser.add_argument("script", nargs="?", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

TOLERANCE = 1e-5  # relative: GPUs of two models round differently
MANY = 65_536  # of a larger tensor, so many elements are compared
PROBES = 32  # samples of each dataset that are compared over ranks
SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (4, MANY))  # a generator of its own
LIBRARIES = tuple(sysconfig.get_paths().values()) + (os.path.dirname(torch.__file__), "<frozen")
HERE = os.path.abspath(__file__)
LEAVE = os._exit  # that of os is watched
NOT_OUTPUT = r"^/(dev|proc|sys)/|__pycache__|/\.cache/|\.lock$|torchinductor|triton|huggingface"


# ---------------------------------------------------------------- notes that the ranks take


class Notes:
    """What this rank has seen: `add` a value under a key; rank 0 reads it after `send`."""

    def __init__(self, store, rank):
        self.store, self.rank, self.pid = store, rank, os.getpid()
        self.new, self.sent, self.counts, self.progress = {}, 0, {}, 0
        self.state = self.status = None  # how the script ended, and its exit status
        self.main_thread = threading.current_thread()
        handle, self.drawn_in_workers = tempfile.mkstemp(prefix="check-")  # loader workers append
        os.close(handle)
        self.drawn_number = 0
        self.renew_lock()
        os.register_at_fork(after_in_child=self.renew_lock)

    def renew_lock(self):
        self.lock = threading.RLock()  # a process forked now may have it held for ever

    def number(self, *key):
        """0, 1, 2, ...: how often this key was asked for."""
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

    def loader_number(self, loader):
        """A DataLoader's number, in the order of first use."""
        if not hasattr(loader, "check_number"):
            loader.check_number = self.number("loader")
        return loader.check_number

    def add(self, *key, value):
        with self.lock:
            self.new[key] = value
            self.progress += 1

    def send(self):
        with self.lock:
            if self.new:
                self.store.set(f"{self.rank}/{self.sent}", pickle.dumps(self.new))
                self.new, self.sent = {}, self.sent + 1


def read(store, rank):
    """The notes of a rank."""
    notes = {}
    for number in itertools.count():
        if not store.check([f"{rank}/{number}"]):
            return notes
        notes |= pickle.loads(store.get(f"{rank}/{number}"))


@functools.cache
def own_file(name):
    """The path of a file of the script's own code; None for libraries and this file."""
    own = os.path.abspath(name) != HERE and not name.startswith(LIBRARIES) and os.path.exists(name)
    return os.path.relpath(name) if own else None


def own_lines(frame):
    """`file:line` of the script's own code, innermost first."""
    found = [(own_file(f.f_code.co_filename), line) for f, line in traceback.walk_stack(frame)]
    return [f"{file}:{line}" for file, line in found if file] or ["?"]


def place():
    """The line of the script that we are called from, and those that called it."""
    return tuple(own_lines(sys._getframe(1)))


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
    part = tensor.reshape(-1)[:: tensor.numel() // MANY + 1].cpu().double().numpy()
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


# ---------------------------------------------------------------- what is watched


def replace(owner, name):
    """A decorator: the function replaces owner.name, and gets the original as its first argument.
    What torch.compile traces is left alone."""

    def decorate(function):
        original = getattr(owner, name)

        def replacement(*args, **kwargs):
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        setattr(owner, name, functools.wraps(original)(replacement))

    return decorate


def outer_modules():
    """All modules that are not part of another one; not DDP, but what it wraps."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    modules = [module for module in modules if not isinstance(module, DistributedDataParallel)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def note_modules(notes, seen):
    """The weights of modules that no optimizer trains, and the buffers of all modules, but batch
    norm's averages. Not at the end alone: what a function has made is gone by then."""
    found, others, trained = {}, {}, seen.wrapped | seen.trained
    for module in outer_modules():
        for name, parameter in module.named_parameters():
            if id(parameter) not in trained:
                name = f"{type(module).__name__}.{name}"
                others.setdefault(name, []).append(of(parameter, parameter))
        for name, buffer in module.named_buffers():
            if not re.search("running_|num_batches_tracked|n_averaged", name):
                found.setdefault(f"{type(module).__name__}.{name}", []).append(buffer)
    value = {name: summary(buffers[0]) for name, buffers in found.items() if len(buffers) == 1}
    notes.add("buffers", seen.steps, value=value)
    value = {name: sorted(sums, key=repr) for name, sums in others.items()}
    notes.add("others", seen.steps, value=value)


OF_A_STEP = ["new_pass", "forwards", "backwards", "synced", "unsynced", "finds_unused"]
OF_A_STEP += ["losses", "scales"]


class Seen:
    """What has happened since the last optimizer.step(), and the places in the loaders."""

    def __init__(self):
        self.steps = self.depth = 0
        self.passes = {}  # of each pass over a loader: the number of its last batch
        self.loaders = {}  # by line: a loader, for the comparison of samples at the end
        self.wrapped, self.trained = set(), set()  # ids of parameters that DDP and optimizers have
        self.pending = {}  # by id: modules in evaluation that have not been used since
        self.random = None
        self.compiles = self.recomputes = False
        self.start_step()

    def start_step(self):
        self.forwards = self.backwards = self.unsynced = 0
        self.synced, self.finds_unused, self.new_pass = True, False, False
        self.losses, self.scales, self.reduced, self.means = [], [], set(), []


def watch_wrappers(notes, seen):
    """DDP and FSDP: which parameters they have, and each forward pass in training."""

    @replace(DistributedDataParallel, "__init__")
    def init(original, self, module, *args, **kwargs):
        original(self, module, *args, **kwargs)
        seen.wrapped.update(id(p) for p in module.parameters() if p.requires_grad)

    @replace(DistributedDataParallel, "forward")
    def forward(original, self, *inputs, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            outputs = original(self, *inputs, **kwargs)
            if not self.training and id(self.module) in seen.pending:  # it has sent buffers
                note_evaluation(notes, *seen.pending.pop(id(self.module)))
            return outputs
        line, before = place(), random_states()
        tensors = tensors_in((inputs, kwargs))
        tensors = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        contents = tuple((checksum(tensor), tensor.numel()) for tensor in tensors)
        rows = max((len(tensor) for tensor in tensors if tensor.dim()), default=0)
        parts = [part for _, part in contents_of(tensors, None)[:1024]]
        number, weights = notes.number("forward", line), None
        if number & (number - 1) == 0 or number == 3:  # 0, 1, 2, 3, 4, 8, 16, ...
            weights = {name: of(p, p) for name, p in self.module.named_parameters()}
        if self.will_sync_module_buffers():
            shapes = {name: tuple(buffer.shape) for name, buffer in self.module.named_buffers()}
            notes.add("sent", line, number, value=shapes)
        outputs = original(self, *inputs, **kwargs)
        seen.forwards += 1
        seen.synced = self.require_backward_grad_sync
        seen.unsynced += not seen.synced
        seen.finds_unused = self.find_unused_parameters
        value = {"inputs": contents, "rows": rows, "parts": parts, "weights": weights}
        value["drawn"] = drawn_since(before)
        notes.add("forward", line, number, value=value)
        return outputs

    @replace(Join, "__init__")  # also that of ddp.join()
    def join(original, self, *args, **kwargs):
        notes.add("join", value=True)
        return original(self, *args, **kwargs)


def watch_communication(notes, seen):
    """Numbers that are all-reduced: one may be the number of samples that a loss is a mean over."""

    def small_values(tensor):
        if torch.is_tensor(tensor) and 0 < tensor.numel() <= 16 and not tensor.is_complex():
            seen.reduced.update(tensor.detach().flatten().double().tolist())

    @replace(dist, "all_reduce")
    def all_reduce(original, *args, **kwargs):
        tensor, op, *_ = *args, None, None
        if kwargs.get("op", op) == dist.ReduceOp.MIN:
            notes.add("minimum", value=True)
        small_values(kwargs.get("tensor", tensor))
        return original(*args, **kwargs)

    @replace(dist, "all_gather")
    def all_gather(original, *args, **kwargs):
        small_values(kwargs.get("tensor", (*args, None, None)[1]))
        return original(*args, **kwargs)


def watch_backward(notes, seen):
    """Backward passes, and what mixed precision multiplies the loss by."""

    @replace(torch.autograd, "backward")
    def backward(original, tensors, *args, **kwargs):
        seen.backwards += 1
        leaves = tensors_in(tensors)
        seen.losses += [round(float(loss.detach()), 9) for loss in leaves if loss.numel() == 1]
        if not seen.recomputes and leaves and leaves[0].grad_fn is not None:
            line = place()
            value = divisors(leaves[0].grad_fn, seen.reduced)
            notes.add("divisors", line, notes.number("divisors", line), value=value)
        return original(tensors, *args, **kwargs)

    @replace(torch.utils.checkpoint, "checkpoint")
    def recompute(original, *args, **kwargs):
        seen.recomputes = True  # reading what a graph has saved would compute it again
        return original(*args, **kwargs)

    @replace(torch.amp.GradScaler, "step")
    def scaled_step(original, self, *args, **kwargs):
        if self.is_enabled():
            seen.scales.append(self.get_scale())
        return original(self, *args, **kwargs)


def divisors(node, reduced):
    """Near the end of a loss's graph: by which numbers it divides, and over how many elements it
    takes means; not those that are all-reduced."""
    found, nodes = [], [node]
    for node in itertools.islice(iter(lambda: nodes.pop(0) if nodes else None, None), 40):
        nodes += [following for following, _ in node.next_functions if following is not None]
        if node.name() == "MeanBackward0":
            found.append(("mean", node._saved_self_sym_numel))
        if node.name() == "DivBackward0" and node.next_functions[1][0] is None:
            with contextlib.suppress(RuntimeError):  # changed in place since
                other = node._saved_other
                if other is not None and other.numel() == 1:
                    found.append(("division", round(float(other), 6)))
    return [(kind, number, number in reduced) for kind, number in found]


def watch_steps(notes, seen, limit, finish):
    """At each optimizer.step(): weights, gradients, learning rates, and what came before it."""
    names = {}

    def name_of(parameter, number):
        if id(parameter) not in names:
            for module in outer_modules():
                for name, found in module.named_parameters():
                    names.setdefault(id(found), f"{type(module).__name__}.{name}")
        return names.setdefault(id(parameter), f"parameter {number} (of no module)")

    def before_step(optimizer, args, kwargs):
        seen.depth += 1  # an optimizer inside of another (ZeRO) is not looked at
        if seen.depth > 1:
            return
        if not hasattr(optimizer, "check_number"):
            optimizer.check_number = notes.number("optimizer")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.trained.update(map(id, parameters))
        settings = [pair for group in optimizer.param_groups for pair in group.items()]
        settings = [
            (k, v.item() if torch.is_tensor(v) else v) for k, v in settings if k != "params"
        ]
        value = {
            "line": place()[0],
            "names": [name_of(p, number) for number, p in enumerate(parameters)],
            "wrapped": [id(p) in seen.wrapped for p in parameters],
            "weights": [of(p, p) for p in parameters],
            "gradients": [of(p, p.grad) for p in parameters],
            "settings": [(k, v) for k, v in settings if isinstance(v, (int, float, tuple))],
            "cards": {card(p.device) for p in parameters if p.is_cuda},
            "group": dist.get_world_size() if dist.is_initialized() else None,
            "taken": dict(seen.passes),
            "drawn": drawn_since(seen.random) if seen.random else {},
            "closure": callable((*args, None, None)[1]) or callable(kwargs.get("closure")),
        }
        value |= {name: getattr(seen, name) for name in OF_A_STEP}
        key = ("step", optimizer.check_number)
        notes.add(*key, notes.number(*key), value=value)
        for key, count, partial in seen.means:
            notes.add(*key, value=(count, partial, float(count) in seen.reduced))

    def after_step(optimizer, args, kwargs):
        seen.depth -= 1
        if seen.depth == 0:
            seen.steps += 1
            seen.start_step()
            if seen.steps in (3, 12, 48) or seen.steps == limit:
                note_modules(notes, seen)
            seen.random = random_states()
            notes.send()
            if seen.steps >= limit:
                finish(f"stopped after {limit} steps", 0)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)

    @replace(ReduceLROnPlateau, "step")
    def plateau(original, self, metrics, *args, **kwargs):
        line = place()
        notes.add("plateau", line, notes.number("plateau", line), value=float(metrics))
        return original(self, metrics, *args, **kwargs)


def card(device):
    """What tells a GPU from all others."""
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {getattr(properties, 'uuid', device)}"


def watch_loaders(notes, seen, short):
    """For each pass over a DataLoader: which samples each batch has, and what drew random numbers.
    One between whose batches an optimizer steps is for training."""

    @replace(dataloader._BaseDataLoaderIter, "_reset")
    def reset(original, self, *args, **kwargs):
        self.check_indices = []
        return original(self, *args, **kwargs)

    @replace(dataloader._BaseDataLoaderIter, "_next_index")
    def next_index(original, self):
        before = random_states()
        indices = original(self)
        seen.new_pass |= bool(drawn_since(before))  # an order, which is the same on all ranks
        self.__dict__.setdefault("check_indices", []).append(indices)
        return indices

    @replace(_MapDatasetFetcher, "fetch")
    def fetch(original, self, indices):
        before = random_states()
        batch = original(self, indices)
        self.check_drawn = drawn_since(before)
        return batch

    @replace(DataLoader, "__iter__")
    def iterate(original, self):
        seen.new_pass = True
        line, theirs = place(), self.worker_init_fn
        if self.num_workers:
            in_worker = Elsewhere("start_worker")
            self.worker_init_fn = functools.partial(
                in_worker, notes.drawn_in_workers, line[0], theirs
            )
        try:
            iterator = original(self)
        finally:
            self.worker_init_fn = theirs
        iterator.check_pass = (line, notes.number("pass", line))
        iterator.check_batches, iterator.check_steps = 0, None
        iterator.check_thread = threading.current_thread() is notes.main_thread
        seen.loaders[line] = self
        is_map = not isinstance(self.dataset, IterableDataset)
        is_usual = self.batch_sampler is None or type(self.batch_sampler) is BatchSampler
        sampler = self.sampler if is_usual else self.batch_sampler
        value = {
            "loader": notes.loader_number(self),
            "short": short is not None,
            "batches": length(self) if is_map else None,
            "size": length(self.dataset) if is_map else None,
            "dataset": id(self.dataset),
            "subset": zlib.crc32(repr(list(getattr(self.dataset, "indices", []))).encode()),
            "is subset": isinstance(self.dataset, Subset),
            "sampler": type(sampler).__name__ + with_replacement(sampler),
            "distributed": is_distributed(sampler),
        }
        notes.add("pass", *iterator.check_pass, value=value)
        return iterator

    @replace(dataloader._BaseDataLoaderIter, "__next__")
    def next_batch(original, self):
        if not hasattr(self, "check_pass"):
            return original(self)
        number = self.check_batches
        if self.check_steps is not None and seen.steps > self.check_steps:
            notes.add("trains", *self.check_pass, value=True)
        try:
            if short and number >= short:
                raise StopIteration
            batch = original(self)
        except StopIteration:
            notes.add("end", *self.check_pass, value=number)
            raise
        indices = self.check_indices[number] if hasattr(self, "check_indices") else None
        indices = original_indices(self._dataset, indices)
        fetcher = getattr(self, "_dataset_fetcher", None)  # None: in workers
        value = {"drawn": getattr(fetcher, "check_drawn", {})}
        value["samples"] = contents_of(batch, indices)
        notes.add("batch", *self.check_pass, number, value=value)
        self.check_batches, self.check_steps = number + 1, seen.steps
        if self.check_thread and threading.current_thread() is notes.main_thread:
            seen.passes[self.check_pass] = number  # of a thread that reads ahead, it is not known
        return batch


def is_distributed(sampler):
    """Whether it gives each rank a part: DistributedSampler, or another by its name or fields."""
    if isinstance(sampler, DistributedSampler) or "Distributed" in type(sampler).__name__:
        return True
    if hasattr(sampler, "sampler"):
        return is_distributed(sampler.sampler)
    return any(hasattr(sampler, name) for name in ("num_replicas", "world_size", "num_processes"))


def with_replacement(sampler):
    return " with replacement" if getattr(sampler, "replacement", False) else ""


def length(sized):
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # some samplers do not know it
        return None


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
    """A function of this file, for a process that has not imported it: it is pickled by its path.
    Loader workers may be started by forkserver, and mp.spawn's processes import the script alone.
    """

    class File:
        def __reduce__(self):
            return runpy.run_path, (HERE, None, "check")

    def __init__(self, name):
        self.name = name

    def __call__(self, *args):
        return globals()[self.name](*args)

    def __reduce__(self):
        return operator.getitem, (self.File(), self.name)


def start_worker(path, line, theirs, worker):
    """In each loader worker: append to the file what draws random numbers in the dataset. Then the
    script's own worker_init_fn."""
    written = []

    @replace(_MapDatasetFetcher, "fetch")
    def fetch(original, self, indices):
        before = random_states()
        batch = original(self, indices)
        if (drawn := drawn_since(before)) and len(written) < 8:
            written.append(drawn)
            with open(path, "a") as file:
                file.writelines(f"{(line, name, *pair)}\n" for name, pair in drawn.items())
        return batch

    if theirs is not None:
        theirs(worker)


def note_workers(notes):
    """What the loader workers have drawn so far: {line: {(generator, before, after)}}."""
    drawn = {}
    with open(notes.drawn_in_workers) as file:
        for text in file:
            if text.endswith(")\n"):
                line, *states = eval(text)  # written above
                drawn.setdefault(line, set()).add(tuple(states))
    if sum(map(len, drawn.values())) > notes.drawn_number:
        notes.drawn_number = sum(map(len, drawn.values()))
        notes.add("workers", value=drawn)


def note_datasets(notes, loaders):
    """At the end: some samples of each dataset, by index, each fetched twice with the same random
    numbers, and its lists of strings and dictionaries. Other ranks should find the same."""
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
            fetches.append([[leaf_summary(leaf) for leaf in parts_of(one)] for one in samples])
            with contextlib.suppress(Exception):  # a collate_fn may want another number of them
                batch = parts_of(loader.collate_fn(samples))
                fetches[-1].append([leaf_summary(leaf) for leaf in batch])
        again = [[one == other for one, other in zip(*pair)] for pair in zip(*fetches)]
        value = [[x if ok else None for x, ok in zip(*pair)] for pair in zip(fetches[0], again)]
        fields = vars(dataset) if hasattr(dataset, "__dict__") else {}
        value = {"size": size, "indices": indices, "samples": value, "fields": strings_in(fields)}
        notes.add("dataset", line, value=value)
        notes.send()


def parts_of(sample):
    """Its leaves; a list of numbers, such as a text's, is one."""

    def is_row(tree):
        return isinstance(tree, (list, tuple)) and all(isinstance(x, (int, float)) for x in tree)

    return [np.array(x) if is_row(x) else x for x in tree_leaves(sample, is_leaf=is_row)]


def leaf_summary(leaf):
    """(checksum, the value if it is short, its pattern) of a part of a sample, None if unknown. The
    pattern of whole numbers is their order of appearance, which no renumbering of them changes."""
    if isinstance(leaf, (str, bytes, bool, int, float, np.generic)):
        return zlib.crc32(repr(leaf).encode()), repr(leaf)[:40], None
    if torch.is_tensor(leaf):
        leaf = leaf.detach().cpu().numpy() if leaf.layout == torch.strided else None
    elif hasattr(leaf, "mode") and hasattr(leaf, "size"):  # an image of PIL
        leaf = np.asarray(leaf)
    if not isinstance(leaf, np.ndarray) or leaf.dtype == object:
        return None
    pattern = None
    if leaf.dtype.kind in "iu" and 8 <= leaf.size <= MANY:
        values, first, inverse = np.unique(leaf, return_index=True, return_inverse=True)
        if len(values) > 2:
            pattern = zlib.crc32(np.argsort(np.argsort(first))[inverse.ravel()].tobytes())
    return zlib.crc32(np.ascontiguousarray(leaf)), str(leaf)[:40] if leaf.size < 3 else "", pattern


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


def note_evaluation(notes, module, line, number):
    """The weights and buffers with which a module is evaluated."""
    value = {k: (False, summary(v)) for k, v in module.named_parameters()}
    value |= {k: (True, summary(v)) for k, v in module.named_buffers()}
    notes.add("eval", line, number, value=(type(module).__name__, value))


def watch_evaluation(notes, seen):
    """The outermost module that eval() is called of, when it is used next: by then, a script or
    DDP's forward pass may have sent its buffers."""
    depth, call = [0], nn.Module.__call__

    def noting_call(module, *args, **kwargs):
        if id(module) in seen.pending and not module.training:
            note_evaluation(notes, *seen.pending.pop(id(module)))
        if not seen.pending:
            nn.Module.__call__ = call
        return call(module, *args, **kwargs)

    @replace(nn.Module, "train")
    def train(original, self, mode=True):
        depth[0] += 1
        try:
            result = original(self, mode)
        finally:
            depth[0] -= 1
        module = self.module if isinstance(self, DistributedDataParallel) else self
        if depth[0] == 0:
            if id(module) in seen.pending:  # used by another method than forward
                note_evaluation(notes, *seen.pending.pop(id(module)))
            line = place()
            if not mode and (number := notes.number("eval", line)) < 20:
                seen.pending[id(module)] = module, line, number
                if not seen.compiles:
                    nn.Module.__call__ = noting_call
                elif module is self:
                    note_evaluation(notes, *seen.pending.pop(id(module)))
        return result

    @replace(torch, "compile")
    def compile(original, *args, **kwargs):
        seen.compiles = True  # it would compile noting_call, too
        nn.Module.__call__ = call
        return original(*args, **kwargs)


def watch_files(notes):
    """Files that are opened for writing, or renamed."""

    def written(path, mode):
        if not isinstance(path, (str, bytes, os.PathLike)) or get_worker_info():
            return
        path = os.path.abspath(os.fsdecode(path))
        if path == notes.drawn_in_workers or os.getpid() != notes.pid:
            return
        path = re.sub(r"(events\.out\.tfevents).*", r"\1", path)  # one file per TensorBoard writer
        if not re.search(NOT_OUTPUT, path) and not path.startswith(LIBRARIES):
            notes.add("file", f"{socket.gethostname()}:{path}", value=(place()[0], mode))

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

    @replace(torch, "load")
    def load(original, *args, **kwargs):
        content = original(*args, **kwargs)
        if torch.cuda.is_initialized():
            places = {t.device.index for t in tensors_in(content) if t.is_cuda}
            notes.add("load", place(), value=(places, torch.cuda.current_device()))
        return content


COUNTED = ["cross_entropy", "nll_loss"]  # classes, of which some may be ignored or weighted
ELEMENTS = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"]
ELEMENTS += ["smooth_l1_loss", "huber_loss"]


def watch_means(notes, seen):
    """torch's losses that are means: over how many elements."""

    def watch(name):
        signature = inspect.signature(getattr(F, name))

        @replace(F, name)
        def mean(original, *args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            given, line = given.arguments, place()
            target, weight = given["target"], given.get("weight")
            if given["reduction"] == "mean" and torch.is_grad_enabled() and line != ("?",):
                partial = False
                count = target.numel()
                if name in COUNTED and not target.is_floating_point():
                    valid = target[target != given["ignore_index"]]
                    partial = weight is not None or valid.numel() < target.numel()
                    count = valid.numel() if weight is None else weight[valid].sum().item()
                key = ("mean", line, notes.number("mean", line))
                seen.means.append((key, count, partial))
            return original(*args, **kwargs)

    for name in COUNTED + ELEMENTS:
        watch(name)


# ---------------------------------------------------------------- what rank 0 compares

ENDED = "the script has ended"
PAGE = "docs/what_ddp_changes.md"
CHECKS = []


def check(name, right, remedy):
    """A decorator that adds a check to the report. The function gets the notes of all ranks. It
    returns what it found, made by `wrong` and `look`, which is nothing if what `right` says is so;
    or None if the script did not get there. `remedy` is an imperative and its title in PAGE."""

    def decorate(function):
        CHECKS.append((name, right, remedy, function))
        return function

    return decorate


def wrong(text, remedy=None):
    return "WRONG", text, remedy


def look(text, remedy=None):
    return "look", text, remedy


def common(ranks, kind):
    """The keys of this kind that all ranks have, in rank 0's order."""
    return [key for key in ranks[0] if key[0] == kind and all(key in notes for notes in ranks)]


def differing(ranks, keys, value):
    """The first key for which value(notes[key]) differs over ranks, and all ranks' values."""
    for key in keys:
        values = [value(notes[key]) for notes in ranks]
        if any(other != values[0] for other in values):
            return key, values
    return None, []


def first_differences(ranks, part):
    """Where weights or gradients differ in the first step that has such: (key, number, text)."""
    found, step = [], None
    for key in common(ranks, "step"):
        if found and key[2] != step:
            break
        ours = ranks[0][key]
        for rank, notes in enumerate(ranks[1:], 1):
            for number, pair in enumerate(itertools.zip_longest(ours[part], notes[key][part])):
                if (size := difference(*pair)) > TOLERANCE:
                    name = [*ours["names"], "a further one"][min(number, len(ours["names"]))]
                    text = f"{ours['line']}, step {key[2] + 1}: {name} differs on rank {rank}, "
                    found.append((key, number, text + f"by about {size:.0e} of its size"))
                    step = key[2]
    return found


def batches(notes, key):
    """The batches of a pass over a loader."""
    return [notes[k] for k in notes if k[0] == "batch" and k[1:3] == key[1:3]]


@check(
    "process group",
    "all ranks are in one group, and each trains on a device of its own",
    ("call init_process_group and wrap the model in DDP", "#the-diff-one-idea-at-a-time"),
)
def check_process_group(ranks):
    steps = common(ranks, "step")
    first = [notes[steps[0]] for notes in ranks] if steps else []
    found = []
    sizes = [fact["group"] for fact in first]
    if all(size and size > len(ranks) for size in sizes) and len(set(sizes)) == 1:
        text = f"of {sizes[0]} processes, only the {len(ranks)} of this machine are compared"
        found.append(look(text, ("run it on one machine", "#check-your-script")))
    elif any(size != len(ranks) for size in sizes):
        text = f"{first[0]['line']}: {len(ranks)} processes, but "
        text += "no process group" if set(sizes) == {None} else f"groups of {sizes}"
        found.append(wrong(f"{text}: each trains alone, on all the data"))
    cards = [card for fact in first for card in fact["cards"]]
    if len(set(cards)) < len(cards):
        remedy = 'use torch.device("cuda", local_rank)', "#device"
        found.append(wrong(f"several ranks train on one GPU: {sorted(set(cards))}", remedy))
    for key in common(ranks, "load"):
        for rank, notes in enumerate(ranks):
            places, own = notes[key]
            if places - {own}:
                text = f"{key[1][0]}: rank {rank} loads to GPU {places}, but trains on GPU {own}"
                remedy = "pass map_location=device to torch.load", "#device"
                return [*found, look(text, remedy)]
    return found if steps else None


@check(
    "weights",
    "what the optimizers train is equal on all ranks at each step",
    ("wrap all that is trained, and change it only before", "#model"),
)
def check_weights(ranks):
    steps = common(ranks, "step")
    if not (differences := first_differences(ranks, "weights")):
        for key in common(ranks, "forward"):
            for rank, notes in enumerate(ranks[1:], 1):
                for name, found in (notes[key]["weights"] or {}).items():
                    if (
                        difference((ranks[0][key]["weights"] or {}).get(name, found), found)
                        > TOLERANCE
                    ):
                        text = f"{key[1][0]}: {name} differs on rank {rank} in this forward pass, "
                        remedy = "communicate in each backward() that changes weights", "#sam"
                        return [wrong(f"{text}though equal at each step", remedy)]
        if any("sharded" in ranks[0][key]["weights"] for key in steps):
            return [look("sharded weights are not compared", ("see", "#check-your-script"))]
        return [] if steps else None
    key, _, text = differences[0]
    earlier = first_differences(ranks, "gradients")
    if key[2] == 0:
        return [wrong(f"{text} when it starts: not wrapped in DDP, or changed after it?")]
    if earlier and earlier[0][0][2] < key[2]:
        return [wrong(f"{text}, as the gradients did before", ("see", "a line below"))]
    if ranks[0][key]["closure"]:
        remedy = "return the mean over ranks from the closure", "#an-optimizer-with-a-closure"
        return [wrong(f"{text}, though the gradients were equal: the closure's loss?", remedy)]
    setting, _ = differing(ranks, steps, lambda fact: fact["settings"])
    if setting and setting[2] < key[2]:
        return [wrong(f"{text}, as the learning rate did before", ("see", "a line below"))]
    remedy = "load weights and optimizer on every rank, change them alike", "#checkpoints"
    return [wrong(f"{text}, though the gradients were equal", remedy)]


@check(
    "other weights",
    "modules that no optimizer trains are equal on all ranks",
    ("build a teacher or target after the same seed, or broadcast it", "#model"),
)
def check_other_weights(ranks):
    seen = False
    for key in common(ranks, "others"):
        for name in sorted(set.intersection(*[set(notes[key]) for notes in ranks])):
            seen, found = True, [notes[key][name] for notes in ranks]
            for rank, other in enumerate(found[1:], 1):
                size = max(difference(*pair) for pair in zip(found[0], other))
                if len(other) == len(found[0]) and size > TOLERANCE:
                    text = f"{name} differs on rank {rank} after step {key[1]}, by about "
                    return [wrong(f"{text}{size:.0e} of its size")]
    return [] if seen else None


@check(
    "gradients",
    "they are equal on all ranks at each optimizer.step()",
    ("call ddp(...) for each forward pass in training", "#model"),
)
def check_gradients(ranks):
    steps = common(ranks, "step")
    if not (differences := first_differences(ranks, "gradients")):
        facts = [ranks[0][key] for key in steps]
        for fact in facts[:1]:
            if fact["forwards"] and all(gradient is None for gradient in fact["gradients"]):
                text = f"{fact['line']}: no gradient in what the optimizer trains: a copy of it?"
                return [
                    wrong(text, ("give the optimizer the parameters that are wrapped", "#model"))
                ]
        return [] if any("sharded" not in fact["gradients"] for fact in facts) else None
    own = [one for one in differences if not ranks[0][one[0]]["wrapped"][one[1]]]
    key, number, text = (own or differences)[0]  # clipping spreads one's difference to all
    fact = ranks[0][key]
    without = [
        name
        for name, gradient, wrapped in zip(fact["names"], fact["gradients"], fact["wrapped"])
        if wrapped and gradient is None
    ]
    scales = [notes[key]["scales"] for notes in ranks]
    if fact["closure"]:
        why = "its closure returns each rank's own loss, by which the optimizer decides?"
        remedy = "return the mean over ranks from the closure", "#an-optimizer-with-a-closure"
    elif not any(flag for k in steps for flag in ranks[0][k]["wrapped"]):
        why, remedy = "nothing is wrapped in DDP", ("wrap the model", "#model")
    elif own:
        why = "it is not wrapped in DDP, or was added, replaced or thawed after that"
        remedy = "wrap it, or all-reduce its gradient", "#everything-that-an-optimizer-trains"
    elif any(scale != scales[0] for scale in scales):
        why = f"the GradScaler's scales are {scales}"
        remedy = "use the same GradScaler on every rank, restored on each", "#checkpoints"
    elif not fact["forwards"]:
        why, remedy = "no forward pass in training went through ddp", None
    elif not fact["synced"]:
        why = "the last forward pass was in no_sync()"
        remedy = "communicate in the last micro-batch", "#gradient-accumulation"
    elif fact["unsynced"] and fact["finds_unused"]:
        why = "it was used in no_sync(), but not in the last micro-batch"
        remedy = "without no_sync(), or use all of the model in each", "#gradient-accumulation"
    elif fact["backwards"] > fact["forwards"]:
        why = f"{fact['backwards']} times backward() after {fact['forwards']} passes through ddp"
        remedy = "sum the losses", "#one-backward-for-each-forward-pass"
    elif without:
        why = f"DDP waits for {without[0]}, which had no gradient"
        remedy = "pass find_unused_parameters=True", "#model"
    else:
        why = "autograd.grad, backward() in forward, or a pass not through ddp?"
        remedy = "average them yourself", "#gradients-without-the-wrapper"
    return [wrong(f"{text}: {why}", remedy)]


@check(
    "learning rate",
    "it and the optimizers' other settings are equal at all steps",
    ("decide by numbers that are equal on all ranks", "#decisions"),
)
def check_learning_rate(ranks):
    keys = common(ranks, "step")
    key, values = differing(ranks, keys, lambda fact: fact["settings"])
    if key:
        names = [[pair for pair in value if pair not in values[0]] for value in values[1:]]
        here = [pair for pair in values[0] if any(pair not in value for value in values)]
        text = f"{ranks[0][key]['line']}, step {key[2] + 1}: {here} on rank 0, {names} on others"
        return [wrong(text)]
    for key in common(ranks, "plateau"):
        metrics = [notes[key] for notes in ranks]
        if max(metrics) - min(metrics) > TOLERANCE * max(abs(value) for value in metrics):
            text = f"{key[1][0]}: ReduceLROnPlateau gets {metrics}, so rates may differ later"
            return [wrong(text)]
    return [] if keys else None


def same_samples(ranks, line):
    """Whether a dataset has the same samples on all ranks, as far as they were compared; None if
    not known. And where they differ first: (index, rank, the two values, kind)."""
    found = [notes.get(("dataset", line)) for notes in ranks]
    if None in found:
        return None, None
    ours, known = found[0], False
    for rank, other in enumerate(found[1:], 1):
        if ours["size"] != other["size"]:
            return False, None
        parts = {}
        for index, pair in zip([*ours["indices"], "batch"], zip(ours["samples"], other["samples"])):
            for part, (one, two) in enumerate(zip(*pair)):
                if one and two:
                    known = True
                    parts.setdefault((index == "batch", part), []).append((index, one, two))
        unlike = [c for each in parts.values() for c in each if c[1][0] != c[2][0]]
        if unlike:
            kind = "renumbered" if any(map(renumbered, parts.values())) else "other"
            if kind == "other" and any(map(is_equal, parts.values())):
                kind = "mixed"
            return False, (unlike[0][0], rank, [c[1] for c in unlike[0][1:]], kind)
    return known or None, None


def is_equal(comparisons):
    """Whether a part of all samples is equal on both ranks, and not a constant."""
    values = {one[0] for _, one, _ in comparisons}
    return len(values) > 1 and all(one[0] == two[0] for _, one, two in comparisons)


def renumbered(comparisons):
    """Whether one rank's values are the other's, numbered in another way: a shuffled vocabulary."""
    differ = [(one, two) for _, one, two in comparisons if one[0] != two[0]]
    patterns = [one[2] == two[2] for one, two in differ if one[2]]
    if len(patterns) > len(comparisons) / 2:
        return all(patterns)
    pairs = {(one[0], two[0]) for _, one, two in comparisons}
    ones, twos = zip(*pairs)
    is_bijection = len(set(ones)) == len(set(twos)) == len(pairs)
    return bool(differ) and is_bijection and 2 < len(pairs) < len(comparisons) / 2


def shared(ranks, key, rank):
    """How many samples rank 0 and another have in common in a pass: those with the same index, if
    the dataset is the same; without indices, those with the same contents. Also, of how many, and
    how many of them rank 0 has several times."""
    pair = [
        [s for batch in batches(notes, key) for s in batch["samples"]]
        for notes in (ranks[0], ranks[rank])
    ]
    by_index = all(index is not None for samples in pair for index, _ in samples)
    if by_index and same_samples(ranks, key[1])[0] is False:
        return 0, len(pair[0]), 0
    if by_index and same_samples(ranks, key[1])[0] is None:
        by_index = False
    names = [[index if by_index else rows for index, rows in samples] for samples in pair]
    names = [[name for name in each if name != ()] for each in names]
    count = len(set(names[0]) & set(names[1]))
    return count, len(pair[0]), len(names[0]) - len(set(names[0]))


def common_parts(ranks, forwards, rank):
    """Whether rank 0 and another share rows of ddp's inputs in a pass, or none is seen."""
    pairs = [[set(notes[key]["parts"]) for notes in (ranks[0], ranks[rank])] for key in forwards]
    return not any(ours for ours, _ in pairs) or any(ours & theirs for ours, theirs in pairs)


ORDERS = ["RandomSampler", "SequentialSampler", "SubsetRandomSampler"]  # each sample once


@check(
    "samples",
    "the ranks train on different ones",
    ("give the loader a DistributedSampler", "#each-rank-has-its-share"),
)
def check_samples(ranks):
    trains, forwards = common(ranks, "trains"), common(ranks, "forward")
    forwards = [key for key in forwards if ranks[0][key]["inputs"]]
    same = [key for key in forwards if len({notes[key]["inputs"] for notes in ranks}) == 1]
    if same and len(same) == len(forwards):
        text = f"{same[0][1][0]}: in {len(same)} passes, ddp had the same inputs on all ranks"
        steps = common(ranks, "step")
        constant = len(same) > 1 and len({ranks[0][key]["inputs"] for key in same}) == 1
        losses = [[loss for key in steps for loss in notes[key]["losses"]] for notes in ranks]
        alike = [len(one) == len(losses[0]) and np.allclose(one, losses[0]) for one in losses]
        if constant and not all(alike):
            return [look(f"{text}, and other losses: right if each has a part of the loss")]
        return [wrong(text)]
    for line in dict.fromkeys(key[1] for key in forwards):
        keys = [key for key in forwards if key[1] == line]
        for number in range(min(len(ranks[0][key]["inputs"]) for key in keys)):
            found = [[notes[key]["inputs"][number] for key in keys] for notes in ranks]
            large = len(keys) > 2 and all(elements >= 16 for _, elements in found[0])
            if large and len(set(found[0])) > 1 and all(other == found[0] for other in found):
                text = f"{line[0]}: input {number + 1} of ddp is the same on all ranks"
                return [wrong(f"{text} in all {len(keys)} passes")]
    losses = [[notes[key]["losses"] for key in common(ranks, "step")] for notes in ranks]
    if not forwards and any(losses[0]) and all(other == losses[0] for other in losses):
        text = f"the losses of all {len(losses[0])} steps are equal on all ranks"
        return [look(f"{text}: right if each is one over the samples of all ranks")]
    rows = max((ranks[0][key]["rows"] for key in forwards), default=0)
    for key in trains:
        about = ranks[0][("pass", *key[1:])]
        largest = max(len(batch["samples"]) for batch in batches(ranks[0], key))
        whole = rows >= largest  # a rank trains on all of a loader's batch
        for rank in range(1, len(ranks)):
            count, total, repeated = shared(ranks, key, rank)
            text = f"{key[1][0]}, pass {key[2] + 1}: ranks 0 and {rank} "
            if count > len(ranks) - 1 + 4 * repeated:
                text += f"have {count} of {total} samples in common ({about['sampler']})"
                if about["distributed"] or whole and about["sampler"] in ORDERS:
                    return [wrong(text)]
                if whole or common_parts(ranks, forwards, rank):
                    return [look(f"{text}: right if each takes its part of a batch")]
            everything = about["sampler"] in ORDERS and not about["is subset"]
            if everything and whole and same_samples(ranks, key[1])[0]:
                text += f"each go through all {about['size']} samples: {len(ranks)} times the steps"
                return [wrong(text)]
    return [] if forwards or trains else None


@check(
    "order",
    "each epoch has another order than the one before",
    ("call sampler.set_epoch(epoch) before each epoch", "#loader"),
)
def check_order(ranks):
    seen = False
    for key in common(ranks, "trains"):
        passes = [("pass", key[1], number) for number in range(key[2] + 1)]
        sets = [ranks[0].get(k, {}).get("dataset") for k in passes]
        before = [k for k, found in zip(passes[:-1], sets) if found == sets[-1]]
        if before:
            pair = before[-1], key
            last, order = [[i for b in batches(ranks[0], k) for i, _ in b["samples"]] for k in pair]
            size = min(len(order), len(last))
            shuffled = None not in order[:size] and order[:size] != sorted(order[:size])
            seen |= shuffled
            if shuffled and order[:size] == last[:size]:
                text = f"{key[1][0]}: pass {key[2] + 1} has the order of pass {before[-1][2] + 1}"
                return [wrong(text)]
    return [] if seen else None


@check(
    "loaders",
    "two training loaders do not give the same samples at the same time",
    ("pass another seed to the second DistributedSampler", "#loader"),
)
def check_loaders(ranks):
    orders = {}
    for key in common(ranks, "trains"):
        about = ranks[0][("pass", *key[1:])]
        order = [i for b in batches(ranks[0], key) for i, _ in b["samples"]]
        if None in order or len(order) < 8 or order == sorted(order):
            continue
        for (other_line, loader), other in orders.items():
            size = min(len(order), len(other))
            if loader != about["loader"] and order[:size] == other[:size]:
                text = f"{key[1][0]} has the samples of {other_line[0]}, in the same order"
                return [look(f"{text}: right for pairs, such as images and masks")]
        orders[key[1], about["loader"]] = order
    return [] if len({loader for _, loader in orders}) > 1 else None


@check(
    "dataset",
    "a sample's index means the same sample on all ranks",
    ("same seed, sorted(glob(...)), sorted(set(...)) on all ranks", "#what-must-be-equal"),
)
def check_dataset(ranks):
    passes = [key for key in common(ranks, "pass") if ranks[0][key]["distributed"]]
    key, values = differing(ranks, passes, lambda fact: (fact["size"], fact["subset"]))
    if key:
        sizes = [size for size, _ in values]
        return [wrong(f"{key[1][0]}: {sizes} samples, or others: a random split, a filter?")]
    found = None
    for line in dict.fromkeys(key[1] for key in common(ranks, "pass")):
        about = next(ranks[0][key] for key in common(ranks, "pass") if key[1] == line)
        by_index = about["distributed"] or about["is subset"] or about["sampler"] == "list"
        same, where = same_samples(ranks, line)
        facts = [notes.get(("dataset", line), {}).get("fields", {}) for notes in ranks]
        for name in facts[0]:
            sums = [fact.get(name, [None, None]) for fact in facts]
            reordered = len({one for one, _ in sums}) == 1 < len({other for _, other in sums})
            if reordered and by_index:
                return [wrong(f"{line[0]}: the dataset's {name} has another order on each rank")]
        if where and (by_index or where[3] == "renumbered"):
            index, rank, values, kind = where
            text = f"{line[0]}: {'a batch' if index == 'batch' else f'sample {index}'} differs on "
            text += f"rank {rank}" + (f": {values[0]} and {values[1]}" if any(values) else "")
            if kind == "renumbered" or kind == "mixed" and about["distributed"]:
                return [wrong(text)]
            return [look(f"{text}: data of its own on each rank?")]
        if same is not None:
            found = []
    return found


@check(
    "steps",
    "all ranks take as many batches and steps, and end alike",
    (
        "give all ranks the same number of batches, and stop together",
        "#different-numbers-of-batches",
    ),
)
def check_steps(ranks):
    if any(("join",) in notes for notes in ranks):
        return []
    found, trained = [], {key[1:] for notes in ranks for key in notes if key[0] == "trains"}
    states = [notes["beat",]["state"] for notes in ranks]
    keys = [key for key in common(ranks, "pass") if key[1:] in trained]
    key, counts = differing(ranks, keys, lambda fact: fact["batches"])
    if key:
        taken = {len(batches(notes, key)) for notes in ranks}
        over = set(states) == {ENDED} or ("pass", key[1], key[2] + 1) in ranks[0]
        if len(taken) > 1 or not over or ranks[0][key]["short"]:  # not: all left it after as many
            text = f"{key[1][0]}, pass {key[2] + 1}: the ranks have {counts} batches"
            told = any(("minimum",) in notes for notes in ranks)
            found = [look(f"{text}: right if all stop after the fewest") if told else wrong(text)]
    keys = [key for key in common(ranks, "end") if key[1:] in trained]
    key, counts = differing(ranks, keys, lambda count: count)
    if key and not found:
        found = [wrong(f"{key[1][0]}, pass {key[2] + 1}: the ranks have {counts} batches")]
    optimizers = [{key[1] for key in notes if key[0] == "step"} for notes in ranks]
    if any(other != optimizers[0] for other in optimizers) and not found:
        text = f"the ranks step {[len(each) for each in optimizers]} optimizers: one has changed it"
        found = [wrong(text, ("change it on all ranks or on none", "#decisions"))]
    for one in trained:
        key, taken = differing(ranks, common(ranks, "step"), lambda fact: fact["taken"].get(one))
        if key and not found:
            text = f"{one[0][0]}: at step {key[2] + 1} of the optimizer, the ranks were at batches "
            text += f"{taken} of pass {one[1] + 1}: one skipped a batch, or a step"
            found = [wrong(text, ("skip on all ranks or on none", "#decisions"))]
    if len(set(states)) > 1 or not states[0] or "Error" in states[0]:
        text = "the ranks do not end together:" if len(set(states)) > 1 else "at the end,"
        for rank, notes in enumerate(ranks):
            beat, steps = notes["beat",], sum(key[0] == "step" for key in notes)
            where = f"is at {beat['lines']} in {beat['inside']}()"
            text += f"\n{'':13}rank {rank}, {steps} steps: {beat['state'] or where}"
        remedy = "stop on all ranks or on none, with no dist. call on one alone", "#decisions"
        if len(set(states)) == 1 and states[0]:
            remedy = "see", "the script's own message above"
        found += [wrong(text, remedy)]
    return found if found or common(ranks, "step") else None


@check(
    "evaluation",
    "weights and buffers are equal when a module is evaluated",
    ("broadcast rank 0's buffers before it", "#buffers"),
)
def check_evaluation(ranks):
    keys, known = common(ranks, "eval"), first_differences(ranks, "weights")
    others = [k for k in common(ranks, "batch") if ("trains", *k[1:3]) not in ranks[0]]
    shares, _ = differing(ranks, others, lambda fact: [i for i, _ in fact["samples"]])
    for key in keys:
        name, ours = ranks[0][key]
        for rank, notes in enumerate(ranks[1:], 1):
            for tensor, (is_buffer, found) in notes[key][1].items():
                _, own = ours.get(tensor, (0, None))
                if is_buffer and own and found and own[3] != found[3]:
                    continue  # a cache that has grown
                size = difference(own, found)
                if size > TOLERANCE and (is_buffer or not known):
                    text = f"{key[1][0]}: {name}.{tensor} differs on rank {rank}, by about "
                    text += f"{size:.0e} of its size"
                    if is_buffer and not shares:
                        return [look(f"{text}: only rank 0's score counts")]
                    return [wrong(text)]
    return [] if keys else None


@check(
    "test samples",
    "those of a whole evaluation count once each",
    ("give each rank Subset(test_set, range(rank, len(test_set), world_size))", "#scores"),
)
def check_test_samples(ranks):
    found = None
    trained = {ranks[0][("pass", *key[1:])]["loader"] for key in common(ranks, "trains")}
    for key in common(ranks, "end"):
        about = ranks[0][("pass", *key[1:])]
        if about["loader"] in trained:
            continue
        lists = [[i for b in batches(notes, key) for i, _ in b["samples"]] for notes in ranks]
        if any(("trains", *key[1:]) in notes for notes in ranks) or None in sum(lists, []):
            continue
        found = found or []
        if all(other == lists[0] for other in lists) or not about["distributed"]:
            continue
        everyone = sum(lists, [])
        text = f"{key[1][0]}: {len(everyone)} samples on all ranks, of {len(set(everyone))}"
        if len(set(everyone)) < len(everyone):
            return [look(f"{text}: {about['sampler']} repeats some, which then count twice")]
        if len(everyone) < (about["size"] or 0):
            return [look(f"{text} and {about['size']} in the dataset: some are left out")]
    return found


@check(
    "other buffers",
    "a bank, a queue, a codebook is equal on all ranks",
    ("gather what all ranks add", "#banks-and-queues"),
)
def check_other_buffers(ranks):
    seen = False
    for key in common(ranks, "sent"):
        for name in ranks[0][key]:
            shapes = [notes[key].get(name) for notes in ranks]
            if len(set(shapes)) > 1:
                text = f"{key[1][0]}: ddp sends rank 0's {name}, whose shapes are {shapes}"
                return [wrong(text, ("set ddp.broadcast_buffers = False", "#buffers"))]
    for key in common(ranks, "buffers"):
        for name in sorted(set.intersection(*[set(notes[key]) for notes in ranks])):
            seen, found = True, [notes[key][name] for notes in ranks]
            if len({one[3] for one in found}) > 1:
                continue  # a cache that has grown
            if any(difference(found[0], other) > TOLERANCE for other in found[1:]):
                text = f"{name} differs after step {key[1]}: filled from each rank's own batch, "
                return [look(f"{text}or at random?")]
    return [] if seen else None


@check(
    "files",
    "no file is written by several ranks",
    ("print, log and save under `if rank == 0:`", "#rank-0"),
)
def check_files(ranks):
    written = {key: fact for notes in ranks for key, fact in notes.items() if key[0] == "file"}
    found = []
    for key, (line, mode) in written.items():
        writers = [rank for rank, notes in enumerate(ranks) if key in notes]
        if len(writers) > 1:
            kind = look if "a" in mode else wrong
            found.append(kind(f"{line}: ranks {writers} write {key[1].partition(':')[2]}"))
    found.sort(key=lambda one: one[0])  # WRONG first
    return found[:1] if found or written else None


@check(
    "random numbers",
    "those of dropout, noise and augmentation differ over ranks",
    ("torch.manual_seed(seed + rank) after the model and the split", "#seeds"),
)
def check_random_numbers(ranks):
    forwards, trains = common(ranks, "forward"), common(ranks, "trains")
    loads = [k for k in common(ranks, "batch") if ("trains", *k[1:3]) in ranks[0]]
    steps = [k for k in common(ranks, "step") if not ranks[0][k]["new_pass"]]  # an order is drawn
    for kind, keys, what in (
        (wrong, forwards, "dropout or noise in the model draws"),
        (wrong, loads, "the dataset (augmentation?) draws"),
        (look, steps, "wrong for noise, right for indices: the loop draws"),
    ):
        for key in keys:
            states = [set(notes[key]["drawn"].items()) for notes in ranks]
            if same := set.intersection(*states):
                line = ranks[0][key]["line"] if key[0] == "step" else key[1][0]
                return [kind(f"{line}: {what} the same numbers on all ranks ({min(same)[0]})")]
    lines = {key[1][0] for key in trains}
    workers = [notes.get(("workers",), {}) for notes in ranks]
    for line in workers[0]:
        same = set.intersection(*[drawn.get(line, set()) for drawn in workers])
        if same and line in lines:
            text = f"{line}: loader workers draw the same numbers on all ranks ({min(same)[0]})"
            return [wrong(text)]
    drew = any(workers) or any(ranks[0][key]["drawn"] for key in forwards + loads + steps)
    return [] if drew else None


@check(
    "mean losses",
    "a loss of torch that is a mean is one over as many elements on all ranks",
    ("divide the sum by the number on all ranks", "#a-loss-that-is-a-mean-over-what-is-valid"),
)
def check_mean_losses(ranks):
    keys = common(ranks, "mean")
    keys = [key for key in keys if not all(notes[key][2] for notes in ranks)]  # all-reduced
    key, values = differing(ranks, keys, lambda fact: fact[0])
    if not key:
        return [] if common(ranks, "mean") else None
    text = f"{key[1][0]}: a mean over {values} (weighted) elements"
    partial = any(notes[key][1] for notes in ranks)
    return [wrong(text) if partial else look(f"{text}: a smaller batch, or others selected?")]


@check(
    "denominators",
    "the losses' graphs divide by the same numbers on all ranks",
    ("divide the sum by the number on all ranks", "#a-loss-that-is-a-mean-over-what-is-valid"),
)
def check_denominators(ranks):
    keys = common(ranks, "divisors")
    for key in keys:
        values = [notes[key] for notes in ranks]
        if len({tuple(kind for kind, _, _ in value) for value in values}) > 1:
            continue  # other branches of the loss
        for facts in zip(*values):
            numbers = [number for _, number, _ in facts]
            if len(set(numbers)) > 1 and not all(is_reduced for _, _, is_reduced in facts):
                text = f"{key[1][0]}: the loss divides by {numbers}"
                return [look(f"{text}: right if it is a number of each sample's own")]
    return [] if keys else None


def loaders(ranks):
    """What each training loader gives: whether the batch is the one intended, only you know."""
    for line in dict.fromkeys(key[1] for key in common(ranks, "trains")):
        key = next(key for key in common(ranks, "trains") if key[1] == line)
        about, size = ranks[0][("pass", *key[1:])], len(batches(ranks[0], key)[0]["samples"])
        text = f"{line[0]}: batches of {size} samples on each rank, {size * len(ranks)} in total; "
        yield f"{text}{about['batches'] or '?'} batches in an epoch, on each rank"


def report(ranks):
    """The text, and how many lines are WRONG."""
    lines, wrongs = ["", *loaders(ranks)], 0
    for name, right, usual, function in CHECKS:
        found = function(ranks)
        if found is None:
            lines.append(f"not seen {name}")
        elif not found:
            lines.append(f"ok       {name:14} {right}")
        for verdict, text, remedy in found or []:
            words, title = remedy or usual
            title = PAGE + title if title.startswith("#") else title
            lines += [f"{verdict:8} {name:14} {text}", f"{'':23} -> {words}: {title}"]
            wrongs += verdict == "WRONG"
    steps = len(common(ranks, "step"))
    end = f"check.py: {steps} steps on {len(ranks)} processes, {wrongs or 'nothing'} WRONG"
    return "\n".join([*lines, end]), wrongs


# ---------------------------------------------------------------- the run


class Patience:
    """Whether no rank advances any more: none notes anything, or gets to other lines. One that is
    busy in one line is waited for longer; but waiting for a GPU keeps a thread busy, too."""

    def __init__(self, wait):
        self.wait, self.last = wait, [None, None]
        self.since = [time.monotonic()] * 2

    def is_over(self, beats):
        lines = [{**beat, "busy": None} for beat in beats]
        for i, now in enumerate((beats, lines)):
            if now != self.last[i]:
                self.last[i], self.since[i] = now, time.monotonic()
        failed = any(beat["state"] and "Error" in beat["state"] for beat in beats)
        waits = [5, 30] if failed else [self.wait, 5 * self.wait]
        over = [time.monotonic() - since > wait for since, wait in zip(self.since, waits)]
        return any(over) or all(beat["state"] for beat in beats)


def watch(notes, args, world_size):
    """A thread on every rank: tells where this rank is; on rank 0, ends the run with the report."""
    patience, wrongs = Patience(args.wait), 0
    clock = time.pthread_getcpuclockid(notes.main_thread.ident)
    with contextlib.suppress(dist.DistError):  # rank 0 has ended
        while not notes.store.check(["printed"]):
            note_workers(notes)
            frame = sys._current_frames()[notes.main_thread.ident]
            frames = [f for f, _ in traceback.walk_stack(frame) if f.f_code.co_filename != HERE]
            beat = {"state": notes.state, "notes": notes.progress}
            beat["inside"] = frames[0].f_code.co_name if frames else "check.py"
            beat["lines"] = " < ".join(own_lines(frame)[:4])
            beat["stack"] = [(f.f_code.co_name, line) for f, line in traceback.walk_stack(frame)]
            beat["busy"] = int(time.clock_gettime(clock))
            if any(name == "_try_get_data" for name, _ in beat["stack"]):
                beat["busy"] = time.monotonic()  # loader workers are
            notes.send()
            notes.store.set(f"{notes.rank}/beat", pickle.dumps(beat))
            time.sleep(0.3)
            keys = [f"{rank}/beat" for rank in range(world_size)]
            if notes.rank > 0 or not notes.store.check(keys):
                continue  # a rank still imports torch
            beats = [pickle.loads(notes.store.get(key)) for key in keys]
            if patience.is_over(beats):
                ranks = [read(notes.store, rank) for rank in range(world_size)]
                for found, beat in zip(ranks, beats):
                    found[("beat",)] = beat
                text, wrongs = report(ranks)
                print(text)
                notes.store.set("printed", str(wrongs))
                time.sleep(1)  # the others read it
        wrongs = int(notes.store.get("printed"))
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.remove(notes.drawn_in_workers)
    status = 1 if notes.status is None else notes.status  # it hung
    os._exit(
        1 if args.strict and wrongs else status
    )  # also out of a collective that waits for ever


def run_watched(args, notes, world_size, script):
    """Run a script, or the function of a process that it starts, with all that is watched."""

    def finish(state, status):
        """Wait here for the report; the thread ends this process."""
        if notes.store.check(["printed"]):
            time.sleep(60)  # the report is there: another rank has ended
        if seen.steps < args.steps:
            note_modules(notes, seen)
        words = note_datasets, notes, seen.loaders
        probe = threading.Thread(target=quietly, args=words, daemon=True)
        probe.start()
        probe.join(30)
        notes.status, notes.state = status, state
        while True:
            time.sleep(1)

    seen = Seen()
    watch_wrappers(notes, seen)
    watch_communication(notes, seen)
    watch_backward(notes, seen)
    watch_steps(notes, seen, args.steps, finish)
    watch_loaders(notes, seen, args.short)
    watch_evaluation(notes, seen)
    watch_files(notes)
    watch_means(notes, seen)

    @replace(os, "_exit")
    def leave(original, status):
        if os.getpid() == notes.pid and threading.current_thread() is notes.main_thread:
            finish(ENDED, status)
        original(status)

    threading.Thread(target=watch, args=(notes, args, world_size), daemon=True).start()
    try:
        script()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        finish(f"Error SystemExit: {end.code}"[:300] if status else ENDED, status)
    except BaseException as error:
        traceback.print_exc()
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = " < ".join(own_lines(frames[-1])[:4])
        finish(f"Error {type(error).__name__}: {str(error)[:200]} at {lines}", 1)
    finish(ENDED, 0)


def quietly(function, *args):
    """What a dataset raises when it is asked once more is not the script's fault."""
    with contextlib.suppress(Exception):
        function(*args)


def run_script(args):
    sys.argv[:] = [args.script, *args.flags]
    if args.m:
        sys.path[0] = os.getcwd()
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(args.script))
        runpy.run_path(args.script, run_name="__main__")


def run_spawned(args, port, world_size, function, rank, *words):
    """In each of mp.spawn's processes."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(hours=1))
    notes = Notes(dist.PrefixStore("check.py", store), rank)
    run_watched(args, notes, world_size, lambda: function(rank, *words))


def refuse(why):
    """End this process in a line, before anything is trained."""
    print(f"check.py: {why}", file=sys.stderr, flush=True)
    LEAVE(2)


def refuse_processes(may_start):
    """Unless it may, the script starts no process by Process(...) that runs code of its own."""

    @replace(multiprocessing.process.BaseProcess, "start")
    def start(original, self):
        target = getattr(self, "_target", None) or type(self).run
        if own_file(getattr(getattr(target, "__code__", None), "co_filename", HERE)):
            if not may_start():
                refuse("processes of Process(...) cannot be watched, only those of mp.spawn")
        original(self)


def check_spawning_script(args):
    """Run a script that starts its processes itself. This one only has the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @replace(torch.multiprocessing, "spawn")
    def spawn(original, fn, *others, **options):
        nprocs = options.get("nprocs", (*others, 1, 1)[1])
        in_process = Elsewhere("run_spawned")
        fn = functools.partial(in_process, args, store.port, nprocs, fn)
        return original(fn, *others, **options)

    def use_torchrun(*_):
        if os.getpid() == own and dist.is_initialized():
            refuse("a script with one process per machine cannot be watched")
        if os.getpid() == own:
            refuse("start it with torchrun, as this script starts no processes by mp.spawn")

    own, status = os.getpid(), None
    refuse_processes(lambda: os.getpid() != own)
    register_optimizer_step_pre_hook(use_torchrun)  # not to train to the end before it is said
    try:
        run_script(args)
    except SystemExit as end:
        status = end
    except torch.multiprocessing.ProcessException as error:
        status = error
    if not store.check(["check.py/printed"]):
        if isinstance(status, SystemExit):
            raise status
        use_torchrun()
    if args.strict:
        sys.exit(min(1, int(store.get("check.py/printed"))))
    sys.exit(status is not None)


def main():
    args = parser.parse_args()
    if args.list:
        for name, right, (words, title), _ in CHECKS:
            print(f"{name:14} {right}\n{'':14} -> {words}: {PAGE + title}")
        return
    if args.script is None:
        parser.error("which script?")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return check_spawning_script(args)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + (not agent)
    hour = timedelta(hours=1)
    store = dist.TCPStore(host, port, is_master=not agent and rank == 0, timeout=hour)

    @replace(torch.multiprocessing, "spawn")
    def spawn(original, *args, **kwargs):
        refuse("start it with python check.py, not torchrun, as this script calls mp.spawn")

    @replace(dist, "init_process_group")
    def init(original, *args, **kwargs):
        original(*args, **kwargs)
        if (size := dist.get_world_size()) < world_size:
            why = "each trains alone, or is a machine of its own, which cannot be watched"
            refuse(f"{world_size} processes, but process groups of {size}: {why}")

    refuse_processes(dist.is_initialized)  # later ones are helpers, such as environments
    notes = Notes(dist.PrefixStore("check.py", store), rank)
    run_watched(args, notes, world_size, lambda: run_script(args))


if __name__ == "__main__":
    main()

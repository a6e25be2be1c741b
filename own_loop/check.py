"""Runs your unchanged training script on several processes, and says what is wrong with its DDP.

torchrun --standalone --nproc-per-node 2 own_loop/check.py train.py --its --own flags
torchrun --standalone --nproc-per-node 2 own_loop/check.py --steps 300 --short 10 train.py ...

Two processes are enough, on GPUs or on CPUs. Most mistakes end no run: it trains, slightly wrong.
This watches torch from outside: every rank notes what it does (checksums of weights, gradients,
samples and random numbers), and rank 0 compares the notes when the script ends, after --steps, or
when no rank advances any more. Notes go through torchrun's store, so nothing here waits for the
script's own collectives, and no random number is drawn: the losses are those without check.py.
--short ends each epoch after so many batches, so that a large dataset reaches epoch 2, too.
"WRONG" needs a change, "look" may be intended; "not seen" means that the script did not get there.
It does not see: a mean over a rank's own mask or negatives, scores that are not all-reduced, files
written by C++ or by loader workers. Shards of FSDP2 are not compared.
"""

import argparse
import contextlib
import functools
import gc
import inspect
import itertools
import mmap
import operator
import os
import pickle
import random
import re
import runpy
import socket
import sys
import sysconfig
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    dataloader,
    get_worker_info,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=50, help="optimizer steps before the report")
parser.add_argument("--short", type=int, help="end each pass over a DataLoader after these batches")
parser.add_argument("--wait", type=float, default=60, help="seconds until a hang is reported")
parser.add_argument("script", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER)

TOLERANCE = 1e-5  # relative: GPUs of two models round differently
MANY = 65_536  # of a larger tensor, so many elements are compared
SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (4, MANY))  # a generator of its own
LIBRARIES = tuple(sysconfig.get_paths().values()) + (os.path.dirname(torch.__file__), "<frozen")
DREW = mmap.mmap(-1, 1)  # shared with forked loader workers: one of them drew random numbers


# ---------------------------------------------------------------- notes that the ranks take


class Notes:
    """What this rank has seen: `add` a value under a key; rank 0 reads it after `send`."""

    def __init__(self, store, rank):
        self.store, self.rank, self.new, self.sent = store, rank, {}, 0
        self.renew_lock()
        self.counts, self.progress, self.state = {}, 0, None

    def renew_lock(self):
        self.lock = threading.RLock()  # a process forked now may have it held for ever

    def number(self, *key):
        """0, 1, 2, ...: how often this key was asked for."""
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

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
    own = name != __file__ and not name.startswith(LIBRARIES) and os.path.exists(name)
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
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


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
    sums = SIGNS[:, : len(part)] @ part
    return zlib.crc32(part.tobytes()), float(np.linalg.norm(part)), sums.tolist(), tensor.shape


def difference(one, other):
    """How much two summaries differ, relative to the larger norm."""
    if one == other or "sharded" in (one, other):
        return 0.0
    if one is None or other is None or one[3] != other[3]:
        return 1.0
    size = np.sqrt(np.mean(np.square(np.subtract(one[2], other[2])))) / max(one[1], other[1], 1e-30)
    return float(size) if size == size else 1.0  # NaN on one rank


def random_states():
    """Checksums of the random number generators of this process."""
    position = np.random.get_state()
    states = {"torch": checksum(torch.get_rng_state()), "random": hash(random.getstate()[1])}
    states["numpy"] = zlib.crc32(position[1].tobytes()) + position[2]
    if torch.cuda.is_initialized() and get_worker_info() is None:
        states["GPU"] = checksum(torch.cuda.get_rng_state())
    return states


def drawn_since(before):
    """The generators that were used since then, with their states at that time."""
    now = random_states()
    return {name: before.get(name) for name in now if now[name] != before.get(name)}


# ---------------------------------------------------------------- what is watched


def replace(owner, name):
    """A decorator: the function replaces owner.name, and gets the original as its first argument.
    What torch.compile traces, and what other threads call, is left alone."""

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


def note_buffers(notes):
    """At the end: the buffers of all modules, without batch norm's averages."""
    found = {}
    for module in outer_modules():
        for name, buffer in module.named_buffers():
            if not re.search("running_|num_batches_tracked|n_averaged", name):
                found.setdefault(f"{type(module).__name__}.{name}", []).append(buffer)
    value = {name: summary(buffers[0]) for name, buffers in found.items() if len(buffers) == 1}
    notes.add("buffers", value=value)


def watch_steps(notes, limit, finish):
    """At each optimizer.step(): weights, gradients, learning rates, and what came before it."""
    names, wrapped, passes = {}, set(), {}
    seen = {"forwards": 0, "backwards": 0, "synced": True, "depth": 0, "steps": 0}
    seen |= {"random": None, "new pass": False}

    def name_of(parameter, number):
        if id(parameter) not in names:
            for module in outer_modules():
                for name, found in module.named_parameters():
                    names.setdefault(id(found), f"{type(module).__name__}.{name}")
        return names.setdefault(id(parameter), f"parameter {number}")

    @replace(DistributedDataParallel, "__init__")
    def init(original, self, module, *args, **kwargs):
        original(self, module, *args, **kwargs)
        wrapped.update(id(p) for p in module.parameters() if p.requires_grad)

    @replace(DistributedDataParallel, "forward")
    def forward(original, self, *inputs, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return original(self, *inputs, **kwargs)
        line, before = place(), random_states()
        tensors = tensors_in((inputs, kwargs))
        contents = tuple(checksum(tensor) for tensor in tensors)
        rows = max((len(tensor) for tensor in tensors if tensor.dim()), default=0)
        outputs = original(self, *inputs, **kwargs)
        seen["forwards"] += 1
        seen["synced"] = self.require_backward_grad_sync
        value = {"inputs": contents, "rows": rows, "drawn": drawn_since(before)}
        notes.add("forward", line, notes.number("forward", line), value=value)
        return outputs

    @replace(DistributedDataParallel, "join")
    def join(original, self, *args, **kwargs):
        notes.add("join", value=True)
        return original(self, *args, **kwargs)

    @replace(torch.autograd, "backward")
    def backward(original, *args, **kwargs):
        seen["backwards"] += 1
        return original(*args, **kwargs)

    def before_step(optimizer, args, kwargs):
        seen["depth"] += 1  # an optimizer inside of another (ZeRO) is not looked at
        if seen["depth"] > 1:
            return
        if not hasattr(optimizer, "check_number"):
            optimizer.check_number = notes.number("optimizer")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        groups = [group.items() for group in optimizer.param_groups]
        value = {
            "line": place()[0],
            "names": [name_of(p, number) for number, p in enumerate(parameters)],
            "wrapped": [id(p) in wrapped for p in parameters],
            "weights": [summary(p) for p in parameters],
            "gradients": [summary(p.grad) for p in parameters],
            "settings": [
                (k, v) for g in groups for k, v in g if isinstance(v, (int, float, tuple))
            ],
            "cards": {
                f"{socket.gethostname()} {torch.cuda.get_device_properties(p.device).uuid}"
                for p in parameters
                if p.is_cuda
            },
            "group": dist.get_world_size() if dist.is_initialized() else None,
            "taken": dict(passes),
            "drawn": drawn_since(seen["random"]) if seen["random"] else {},
            "new pass": seen["new pass"],
            **{name: seen[name] for name in ("forwards", "backwards", "synced")},
        }
        key = ("step", optimizer.check_number)
        notes.add(*key, notes.number(*key), value=value)

    def after_step(optimizer, args, kwargs):
        seen["depth"] -= 1
        if seen["depth"] == 0:
            seen.update(forwards=0, backwards=0, steps=seen["steps"] + 1)
            seen.update({"random": random_states(), "new pass": False})
            notes.send()
            if seen["steps"] >= limit:
                finish(f"stopped after {limit} steps")

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    return seen, passes


def watch_loaders(notes, seen, passes, short):
    """For each pass over a DataLoader: which samples each batch has, and what drew random numbers.
    One between whose batches an optimizer steps is for training."""

    @replace(dataloader._BaseDataLoaderIter, "_reset")
    def reset(original, self, *args, **kwargs):
        self.check_indices = []
        return original(self, *args, **kwargs)

    @replace(dataloader._BaseDataLoaderIter, "_next_index")
    def next_index(original, self):
        indices = original(self)
        self.__dict__.setdefault("check_indices", []).append(indices)
        return indices

    @replace(_MapDatasetFetcher, "fetch")
    def fetch(original, self, indices):
        before = random_states()
        batch = original(self, indices)
        self.check_drawn = drawn_since(before)
        if self.check_drawn and get_worker_info():
            DREW[0] = 1
        return batch

    @replace(DataLoader, "__iter__")
    def iterate(original, self):
        seen["new pass"] = True
        iterator = original(self)
        line = place()
        iterator.check_pass = (line, notes.number("pass", line))
        iterator.check_batches, iterator.check_steps = 0, None
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        is_map = not isinstance(self.dataset, IterableDataset)
        value = {
            "batches": length(self) if is_map else None,
            "size": length(self.dataset) if is_map else None,
            "dataset": id(self.dataset),
            "subset": zlib.crc32(repr(list(getattr(self.dataset, "indices", []))).encode()),
            "sampler": type(sampler).__name__,
            "distributed": isinstance(sampler, DistributedSampler),
            "seed": iterator._base_seed if self.num_workers else None,
        }
        notes.add("pass", *iterator.check_pass, value=value)
        return iterator

    @replace(dataloader._BaseDataLoaderIter, "__next__")
    def next_batch(original, self):
        if not hasattr(self, "check_pass"):
            return original(self)
        number = self.check_batches
        if self.check_steps is not None and seen["steps"] > self.check_steps:
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
        self.check_batches, self.check_steps = number + 1, seen["steps"]
        passes[self.check_pass] = number
        return batch


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
            dataset, indices = (
                dataset.dataset,
                [operator.index(dataset.indices[i]) for i in indices],
            )
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


def watch_the_rest(notes):
    """Modules that are evaluated, files that are written, losses that are means."""

    @replace(nn.Module, "eval")
    def evaluate(original, self):
        line = place()
        number = notes.number("eval", line)
        if number < 20:
            value = {k: (False, summary(v)) for k, v in self.named_parameters()}
            value |= {k: (True, summary(v)) for k, v in self.named_buffers()}
            notes.add("eval", line, number, value=(type(self).__name__, value))
        return original(self)

    def written(path, mode):
        if not isinstance(path, (str, bytes, os.PathLike)) or get_worker_info():
            return
        path = os.path.abspath(os.fsdecode(path))
        path = re.sub(r"(events\.out\.tfevents).*", r"\1", path)  # one file per TensorBoard writer
        if not re.search(r"^/(dev|proc|sys)/|__pycache__|/\.cache/|\.lock$", path):
            if not path.startswith(LIBRARIES):
                notes.add("file", f"{socket.gethostname()}:{path}", value=(place()[0], mode))

    def audit(event, values):
        if event == "open" and isinstance(values[1], str) and re.search("[wxa+]", values[1]):
            written(values[0], values[1])

    sys.addaudithook(audit)

    @replace(torch, "save")
    def save(original, content, file, *args, **kwargs):
        written(file, "w")
        return original(content, file, *args, **kwargs)

    def watch_mean(name):
        signature = inspect.signature(getattr(F, name))

        @replace(F, name)
        def mean(original, *args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            given, line = given.arguments, place()
            target, weight = given["target"], given["weight"]
            if given["reduction"] == "mean" and torch.is_grad_enabled():
                if not target.is_floating_point():
                    valid = target[target != given["ignore_index"]]
                    count = valid.numel() if weight is None else weight[valid].sum().item()
                    value = (count, weight is not None or valid.numel() < target.numel())
                    notes.add("mean", line, notes.number("mean", line), value=value)
            return original(*args, **kwargs)

    watch_mean("cross_entropy")
    watch_mean("nll_loss")

    @replace(torch.multiprocessing, "spawn")
    def spawn(original, *args, **kwargs):
        raise SystemExit("check.py cannot watch a script that starts its own processes (spawn)")


# ---------------------------------------------------------------- what rank 0 compares
# A check gets the notes of all ranks. It returns what it found, as (verdict, text, remedy), or None
# if the script did not get there. If it found nothing, the report shows its docstring.


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


def first_difference(ranks, part):
    """Where weights or gradients first differ: the step's key, the tensor's number, and a text."""
    for key in common(ranks, "step"):
        ours = ranks[0][key]
        for rank, notes in enumerate(ranks[1:], 1):
            for number, pair in enumerate(itertools.zip_longest(ours[part], notes[key][part])):
                if (size := difference(*pair)) > TOLERANCE:
                    name = [*ours["names"], "a further one"][number]
                    text = f"{ours['line']}, step {key[2] + 1}: {name} differs on rank {rank}, "
                    return key, number, text + f"by about {size:.0e} of its size"


def check_process_group(ranks):
    """all ranks are in one group, and each trains on its own GPU"""
    found, steps = [], common(ranks, "step")
    first = [notes[steps[0]] for notes in ranks] if steps else []
    if any(fact["group"] != len(ranks) for fact in first):
        text = f"{first[0]['line']}: {len(ranks)} processes, but groups of "
        text += f"{[fact['group'] for fact in first]}: each trains alone"
        found.append(("WRONG", text, "README.md, What DDP changes"))
    cards = [card for fact in first for card in fact["cards"]]
    if len(set(cards)) < len(cards):
        found.append(("WRONG", f"several ranks train on one GPU: {set(cards)}", "checklist 1"))
    return found if steps else None


def check_weights(ranks):
    """what optimizers train is equal at all steps"""
    if not (found := first_difference(ranks, "weights")):
        sharded = any("sharded" in ranks[0][key]["weights"] for key in common(ranks, "step"))
        text = [("look", "sharded weights are not compared", "docs/large_models.md")]
        return (text if sharded else []) if common(ranks, "step") else None
    key, _, text = found
    earlier = first_difference(ranks, "gradients")
    if key[2] == 0:
        return [("WRONG", f"{text}: not wrapped in DDP, or changed later?", "checklist 4 and 7")]
    if earlier and earlier[0][2] < key[2]:
        return [("WRONG", f"{text}, as the gradients did before", "")]
    return [("WRONG", f"{text}, though the gradients were equal", "checklist 8 and 9 (resuming)")]


def check_gradients(ranks):
    """they are equal on all ranks at each optimizer.step()"""
    if not (found := first_difference(ranks, "gradients")):
        steps = [ranks[0][key]["gradients"] for key in common(ranks, "step")]
        return [] if any("sharded" not in gradients for gradients in steps) else None
    key, number, text = found
    fact = ranks[0][key]
    if not any(fact["wrapped"]):
        why, remedy = "its model is not wrapped in DDP", "checklist 4"
    elif not fact["wrapped"][number]:
        why, remedy = "it was added, replaced or thawed after wrapping", "In your own loop: Model"
    elif not fact["forwards"]:
        why, remedy = "no forward pass in training went through ddp", "checklist 4"
    elif not fact["synced"]:
        why, remedy = "the last forward pass was in no_sync()", "Gradient accumulation"
    elif fact["backwards"] > fact["forwards"]:
        why = f"{fact['backwards']} times backward() after {fact['forwards']} passes through ddp"
        remedy = "One backward for each forward pass"
    else:
        why, remedy = "autograd.grad? A pass not through ddp?", "Gradients without the wrapper"
    return [("WRONG", f"{text}: {why}", remedy)]


def check_learning_rate(ranks):
    """it and the optimizers' other settings are equal at all steps"""
    keys = common(ranks, "step")
    key, values = differing(ranks, keys, lambda fact: fact["settings"])
    if not key:
        return [] if keys else None
    names = [[pair for pair in value if pair not in values[0]] for value in values[1:]]
    here = [pair for pair in values[0] if any(pair not in value for value in values)]
    text = f"{ranks[0][key]['line']}, step {key[2] + 1}: {here} on rank 0, {names} on the others"
    return [("WRONG", text, "checklist 8")]


def shared(ours, theirs):
    """How many samples two ranks have in common: those with the same index, of which a part (a
    label, if the rest is augmented) is the same; or with the same contents. Also, of how many, and
    how many of them this rank has several times."""
    ours, theirs = [[s for batch in rank for s in batch["samples"]] for rank in (ours, theirs)]
    mine, other = dict(ours), dict(theirs)
    both = [i for i in mine if i is not None and i in other]
    alike = 0
    for part in zip(*[zip(mine[i], other[i]) for i in both]):
        if len({value for value, _ in part}) > 1:  # not a constant
            alike = max(alike, sum(one == two for one, two in part))
    contents = {rows for _, rows in ours if rows} & {rows for _, rows in theirs if rows}
    repeated = len(ours) - len({i if i is not None else rows for i, rows in ours})
    return max(alike if alike > 0.9 * len(both) else 0, len(contents)), len(ours), repeated


def batches(notes, key):
    """The batches of a pass over a loader."""
    return [notes[k] for k in notes if k[0] == "batch" and k[1:3] == key[1:3]]


def check_samples(ranks):
    """the ranks train on different ones"""
    remedy = "README.md, What DDP changes (DistributedSampler)"
    trains = common(ranks, "trains")
    forwards = [key for key in common(ranks, "forward") if ranks[0][key]["inputs"]]
    same = [key for key in forwards if len({notes[key]["inputs"] for notes in ranks}) == 1]
    if same and len(same) == len(forwards):
        text = f"{same[0][1][0]}: in {len(same)} passes, ddp had the same inputs on all ranks"
        return [("WRONG", text, remedy)]
    rows = max((ranks[0][key]["rows"] for key in forwards), default=0)
    for key in trains:
        ours, about = batches(ranks[0], key), ranks[0][("pass", *key[1:])]
        for rank, notes in enumerate(ranks[1:], 1):
            count, total, repeated = shared(ours, batches(notes, key))
            if count > len(ranks) - 1 + 4 * repeated:  # DistributedSampler may repeat some
                text = f"{key[1][0]}, pass {key[2] + 1}: ranks 0 and {rank} have {count} of "
                text += f"{total} samples in common ({about['sampler']})"
                if about["distributed"] or rows >= max(len(batch["samples"]) for batch in ours):
                    return [("WRONG", text, remedy)]
                return [("look", f"{text}: right if each takes its part of a batch", remedy)]
    return [] if forwards or trains else None


def check_order(ranks):
    """each epoch has another order than the one before"""
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
                return [("WRONG", text, "README.md: sampler.set_epoch(epoch)")]
    return [] if seen else None


def check_dataset(ranks):
    """the one below DistributedSampler is the same on all ranks"""
    passes = [key for key in common(ranks, "pass") if ranks[0][key]["distributed"]]
    key, values = differing(ranks, passes, lambda fact: (fact["size"], fact["subset"]))
    if key:
        sizes = [size for size, _ in values]
        text = f"{key[1][0]}: {sizes} samples, or others: a random split, a filter?"
        return [("WRONG", text, "checklist 3")]
    return [] if passes else None


def check_steps(ranks):
    """all ranks take as many batches and steps, and end alike"""
    if any(("join",) in notes for notes in ranks):
        return []
    found, trained = [], {key[1:] for notes in ranks for key in notes if key[0] == "trains"}
    for kind, value in ("pass", lambda fact: fact["batches"]), ("end", lambda count: count):
        keys = [key for key in common(ranks, kind) if key[1:] in trained]
        key, counts = differing(ranks, keys, value)
        if key and not found:
            text = f"{key[1][0]}, pass {key[2] + 1}: the ranks have {counts} batches"
            found = [("WRONG", text, "checklist 3; Different numbers of batches")]
    for one in trained:
        key, taken = differing(ranks, common(ranks, "step"), lambda fact: fact["taken"].get(one))
        if key and not found:
            text = f"{one[0][0]}: at step {key[2] + 1} of the optimizer, the ranks were at batches "
            text += f"{taken} of pass {one[1] + 1}: one skipped a batch, or a step"
            found = [("WRONG", text, "checklist 8")]
    states = [notes[("beat",)]["state"] for notes in ranks]
    if len(set(states)) > 1 or not states[0] or "Error" in states[0]:
        text = "the ranks do not end together:" if len(set(states)) > 1 else "at the end,"
        for rank, notes in enumerate(ranks):
            beat, steps = notes[("beat",)], sum(key[0] == "step" for key in notes)
            where = f"waits at {beat['lines']} in {beat['inside']}()"
            text += f"\n    rank {rank}, {steps} steps: {beat['state'] or where}"
        found += [("WRONG", text, "checklist 8, 9; when_it_goes_wrong.md, A run that hangs")]
    return found if found or common(ranks, "step") else None


def check_evaluation(ranks):
    """weights and buffers are equal when eval() is called"""
    keys, known = common(ranks, "eval"), first_difference(ranks, "weights")
    others = [k for k in common(ranks, "batch") if ("trains", *k[1:3]) not in ranks[0]]
    shares, _ = differing(ranks, others, lambda fact: [i for i, _ in fact["samples"]])
    for key in keys:
        name, ours = ranks[0][key]
        for rank, notes in enumerate(ranks[1:], 1):
            for tensor, (is_buffer, found) in notes[key][1].items():
                size = difference(ours.get(tensor, (0, None))[1], found)
                if size > TOLERANCE and (is_buffer or not known):
                    text = f"{key[1][0]}: {name}.{tensor} differs on rank {rank}, by about "
                    text += f"{size:.0e} of its size"
                    if is_buffer and not shares:
                        return [("look", f"{text}: only rank 0's score counts", "checklist 7")]
                    return [("WRONG", text, "checklist 7")]
    return [] if keys else None


def check_buffers(ranks):
    """other buffers (a bank, a queue, a codebook) are equal at the end"""
    names = set.intersection(*[set(notes.get(("buffers",), {})) for notes in ranks])
    for name in sorted(names):
        found = [notes[("buffers",)][name] for notes in ranks]
        if any(difference(found[0], other) > TOLERANCE for other in found[1:]):
            text = f"{name} differs: filled from each rank's own batch, or at random?"
            return [("look", text, "In your own loop: Buffers; Banks and queues")]
    return [] if names else None


def check_files(ranks):
    """no file is written by several ranks"""
    written = {key: fact for notes in ranks for key, fact in notes.items() if key[0] == "file"}
    for key, (line, mode) in written.items():
        writers = [rank for rank, notes in enumerate(ranks) if key in notes]
        if len(writers) > 1:
            verdict = "look" if "a" in mode else "WRONG"
            return [(verdict, f"{line}: ranks {writers} write {key[1]}", "checklist 9")]
    return [] if written else None


def check_random_numbers(ranks):
    """those of dropout, noise and augmentation differ"""
    forwards, trains = common(ranks, "forward"), common(ranks, "trains")
    loads = [k for k in common(ranks, "batch") if ("trains", *k[1:3]) in ranks[0]]
    steps = [k for k in common(ranks, "step") if not ranks[0][k]["new pass"]]  # an order is drawn
    for verdict, keys, what in (
        ("WRONG", forwards, "dropout or noise in the model draws"),
        ("WRONG", loads, "the dataset (augmentation?) draws"),
        ("look", steps, "right for indices, not for noise: the loop draws"),
    ):
        for key in keys:
            states = [set(notes[key]["drawn"].items()) for notes in ranks]
            if same := set.intersection(*states):
                line = ranks[0][key]["line"] if key[0] == "step" else key[1][0]
                text = f"{line}: {what} the same numbers on all ranks ({min(same)[0]})"
                return [(verdict, text, "checklist 3; In your own loop: Seeds")]
    drew = ("drew",) in ranks[0]
    for key in trains:
        seeds = {notes["pass", key[1], key[2]]["seed"] for notes in ranks}
        if drew and len(seeds) == 1 and seeds != {None}:
            text = f"{key[1][0]}: loader workers draw the same numbers on all ranks"
            return [("WRONG", text, "checklist 3; In your own loop: Seeds")]
    drew = drew or any(ranks[0][key]["drawn"] for key in forwards + loads + steps)
    return [] if drew else None


def check_mean_losses(ranks):
    """cross-entropy is a mean over as many elements on all ranks"""
    keys = common(ranks, "mean")
    key, values = differing(ranks, keys, lambda fact: fact[0])
    if not key:
        return [] if keys else None
    verdict = "WRONG" if any(notes[key][1] for notes in ranks) else "look"  # a smaller last batch
    return [(verdict, f"{key[1][0]}: a mean over {values} (weighted) elements", "checklist 6")]


def loaders(ranks):
    """What each training loader gives: whether the batch is the one intended, only you know."""
    for line in dict.fromkeys(key[1] for key in common(ranks, "trains")):
        key = next(key for key in common(ranks, "trains") if key[1] == line)
        about, size = ranks[0][("pass", *key[1:])], len(batches(ranks[0], key)[0]["samples"])
        text = f"{line[0]}: batches of {size} samples on each rank, {size * len(ranks)} in total; "
        yield f"{text}{about['batches'] or '?'} batches in an epoch, on each rank"


def report(ranks):
    lines, wrong = ["", *loaders(ranks)], 0
    checks = [check for name, check in globals().items() if name.startswith("check_")]
    for check in checks:
        found, name = check(ranks), check.__name__[6:].replace("_", " ")
        if not found:
            found = [("ok", check.__doc__, "")] if found == [] else [("not seen", "", "")]
        for verdict, text, remedy in found:
            lines.append(f"{verdict:8} {name:14} {text}")
            lines += [f"{'':23} -> {remedy}"] if remedy else []
            wrong += verdict == "WRONG"
    lines.append("(README.md, Checklist for your own loop; titles are in docs/what_ddp_changes.md)")
    steps = len(common(ranks, "step"))
    return "\n".join([*lines, f"check.py: {steps} steps, {wrong or 'nothing'} WRONG"])


# ---------------------------------------------------------------- the run


def watch(notes, world_size, wait, main_thread):
    """A thread on every rank: tells where this rank is; on rank 0, ends the run with the report."""
    last, since = None, time.monotonic()
    with contextlib.suppress(dist.DistError):  # rank 0 has ended
        while not notes.store.check(["printed"]):
            if DREW[0]:
                notes.add("drew", value=True)
                DREW[0] = 0
            frame = sys._current_frames()[main_thread]
            beat = {"state": notes.state, "notes": notes.progress, "inside": frame.f_code.co_name}
            beat["lines"] = " < ".join(own_lines(frame)[:4])
            beat["stack"] = [(f.f_code.co_name, line) for f, line in traceback.walk_stack(frame)]
            notes.send()
            notes.store.set(f"{notes.rank}/beat", pickle.dumps(beat))
            time.sleep(0.3)
            if notes.rank > 0:
                continue
            keys = [f"{rank}/beat" for rank in range(world_size)]
            if not notes.store.check(keys):
                continue  # a rank still imports torch
            beats = [pickle.loads(notes.store.get(key)) for key in keys]
            if beats != last:
                last, since = beats, time.monotonic()
            states = [beat["state"] for beat in beats]
            patience = 0 if all(states) else 5 if any(s and "Error" in s for s in states) else wait
            if time.monotonic() - since > patience:
                ranks = [read(notes.store, rank) for rank in range(world_size)]
                for found, beat in zip(ranks, beats):
                    found[("beat",)] = beat
                print(report(ranks))
                notes.store.set("printed", b"1")
                time.sleep(1)  # the others read it
    sys.stdout.flush()
    os._exit(0)  # also out of a collective that waits for ever


def main():
    args = parser.parse_args()
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        parser.error("start it with torchrun --standalone --nproc-per-node 2 own_loop/check.py ...")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + (not agent)
    hours = timedelta(hours=1)
    store = dist.TCPStore(host, port, is_master=not agent and rank == 0, timeout=hours)
    notes = Notes(dist.PrefixStore("check.py", store), rank)
    os.register_at_fork(after_in_child=notes.renew_lock)

    def finish(state):
        """Wait here for the report; the thread ends this process."""
        note_buffers(notes)
        notes.state = state
        while True:
            time.sleep(1)

    seen, passes = watch_steps(notes, args.steps, finish)
    watch_loaders(notes, seen, passes, args.short)
    watch_the_rest(notes)
    words = notes, world_size, args.wait, threading.get_ident()
    threading.Thread(target=watch, args=words, daemon=True).start()
    sys.argv[:] = [args.script, *args.flags]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    try:
        runpy.run_path(args.script, run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            if notes.store.check(["printed"]):
                time.sleep(60)  # the report is there: another rank has ended
            traceback.print_exc()
            lines = own_lines_of(error.__traceback__)
            finish(f"Error {type(error).__name__}: {str(error)[:200]} at {lines}")
    finish("the script has ended")


def own_lines_of(trace):
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return " < ".join(own_lines(frames[-1])[:4])


if __name__ == "__main__":
    main()

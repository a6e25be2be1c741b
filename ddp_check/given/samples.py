"""Samples: the same in both runs, augmented alike, and the batches that loaders give."""

import contextlib
import inspect
import itertools
import math
import re
import threading

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from ..notes import STREAM, Batch, Cut, Pass, PassEnd
from ..patches import wrap
from ..script import own_file, place
from ..sketch import leaves_of
from ..text import gives
from .datasets import batches_of, is_own, made_by, whole
from .pairing import ORDER, checksum, note_draw
from .prepared import batch_of_all, prepared_name


def length(sized):
    """Also of a loader that --short ends early."""
    with contextlib.suppress(TypeError, AttributeError, NotImplementedError):  # not all know it
        return inspect.unwrap(type(sized).__len__)(sized)


class Iterator:
    """What iter(loader) gives; torch's has these, too."""

    _num_workers = 0

    def __init__(self, loader, batches):
        self.loader, self.batches = loader, batches

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


def patch(run):
    """The samples of each batch, and the batches of each pass. There are no workers: samples are
    made where random numbers and files are watched."""

    @wrap(RandomSampler, "__iter__")
    def shuffle(original, self):
        """The order of a DistributedSampler, which the ranks may have instead of it."""
        size = len(self.data_source)
        has_own = getattr(self, "check_has_own", self.generator is not None)
        if has_own or self.replacement or self.num_samples != size:
            return original(self)
        # For each pass a new one may be made.
        number = run.nth("order of a sampler", getattr(self, "check_made", ""), size)
        run.orders[asked_for(self.data_source)] = number
        g = torch.Generator().manual_seed(number)
        return iter(inspect.unwrap(torch.randperm)(size, generator=g).tolist())

    def asked_for(dataset):
        """By which line, and how many orders of so many samples it had before."""
        line, size = place()[0], length(dataset)
        return line, size, run.nth("order of", line, size)

    used = {}  # {(seed, epoch): (number of its order, step of its first use)}

    def number_of(seed, epoch, key):
        """Of a DistributedSampler's order: that of one process there, whatever the script's seed
        is, and its first epoch. Where a step was made since its first use, it is the same again."""
        number, step = used.get((seed, epoch), (None, None))
        if number is None or step == run.steps and not run.is_single:
            seeds = list(dict.fromkeys([seed for seed, _ in used] + [seed]))
            epochs = [epoch for of, epoch in used if of == seed]
            number = run.orders.get(key, 1000 * seeds.index(seed) + len(epochs))
            used[seed, epoch] = number, run.steps
        run.orders[key] = number
        return number

    @wrap(RandomSampler, "__init__")
    def make_order(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.check_made = place()[0]
        self.check_has_own = self.generator is not None  # Accelerate adds one later, on ranks

    @wrap(DistributedSampler, "__init__")
    def make_share(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.check_made = place()[0]

    @wrap(DistributedSampler, "__iter__")
    def share(original, self):
        if not self.shuffle:
            return original(self)
        if self.num_replicas == run.world:
            state = checksum((run.own_seed(self.seed), self.epoch))
            size, line = length(whole(self.dataset)), getattr(self, "check_made", "")
            note_draw(run, ORDER, "DistributedSampler", state, size, line)
        own = self.seed, self.epoch
        self.seed, self.epoch = 0, number_of(*own, asked_for(self.dataset))
        try:
            return iter(list(original(self)))
        finally:
            self.seed, self.epoch = own

    @wrap(WeightedRandomSampler, "__iter__")
    def choose(original, self):
        """By turns: its numbers are of no batch."""
        before, run.loaded, run.model_rows = (run.loaded, run.model_rows), {}, None
        try:
            return iter(list(original(self)))
        finally:
            run.loaded, run.model_rows = before

    @wrap(DataLoader, "__iter__")
    def iterate(original, self):
        if run.has_own_numbers():
            return original(self)
        line, *callers = place()
        key = line, self.check_name, run.nth("pass", line, self.check_name)
        run.note(pass_of(run, self, key, callers))
        return Iterator(self, batches(self, key))

    @wrap(torch.utils.data, "get_worker_info")
    def worker_info(original):
        run.thread.asks = run.thread.worker is not None and run.thread.sample is not None
        return run.thread.worker or original()

    @wrap(DataLoader, "__len__")
    def shortened(original, self):
        size, short = original(self), run.options["short"] or math.inf
        if short < size:
            run.say(f"--short: len() of a DataLoader is {short}, as many as it gives")
        return min(size, short)

    @wrap(DataLoader, "__init__")
    def make(original, self, dataset, batch_size=1, *args, **kwargs):
        name = prepared_name(run, dataset)
        self.check_is_prepared, self.check_is_ahead = bool(name), False
        if name:
            batch_size, kwargs = batch_of_all(run, name, batch_size, kwargs)
        else:
            line = place()[0]
            name = f"loader {run.nth('loader', line)} of {line}"
            run.loaders.setdefault(id(dataset), []).append(name)
            if kwargs.get("batch_sampler") is None:
                batch_size = of_all_ranks(name, batch_size)
        original(self, dataset, batch_size, *args, **kwargs)
        self.check_name, self.check_size = name, batch_size

    def of_all_ranks(name, batch_size):
        """Where the script's is a batch size per process, the ranks together have that of one
        process: each gets its part, or one process all, as the options say."""
        if run.is_single:
            return batch_size * run.world if name in run.options["scaled"] else batch_size
        is_same = run.options["cuts"] and batch_size == run.batch_sizes.get(name)
        if not is_same or not batch_size or batch_size % run.world:
            return batch_size
        run.note(Cut(name, batch_size))
        return batch_size // run.world

    def pass_of(run, loader, key, callers):
        usual = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
        sampler = loader.sampler if usual else loader.batch_sampler
        name, draws = type(sampler).__name__, "Weighted" in type(sampler).__name__
        draws = draws or getattr(sampler, "replacement", False) or bool(own_class(sampler))
        size, rows = length(whole(loader.dataset)), loader.batch_size
        share = has_share(sampler)
        made = getattr(sampler, "check_made", "") * isinstance(sampler, DistributedSampler)
        made = made or next(iter(gives(type(sampler).__iter__)), "")
        about = draws, rows, callers, made, has_epochs(sampler)
        return Pass(key, loader.check_name, name, share, size, *about)

    def batches(loader, key):
        is_map = not isinstance(loader.dataset, IterableDataset)
        name = "a batch of the DataLoader" if is_map else STREAM
        total, number, first = length(loader) if is_map else None, 0, run.steps
        short = run.options["short"]
        for indices, totals, batch in itertools.islice(batches_of(run, loader), short):
            tensors = [t for t in leaves_of(batch) if torch.is_tensor(t) and t.dim()]
            rows = len(indices) if indices else len(tensors[0]) if tensors else None
            note = Batch(key, number, indices, rows, total, torch.is_grad_enabled(), totals)
            run.has_gaps = bool(indices and tensors) and all(len(t) < len(indices) for t in tensors)
            if not loader.check_is_ahead:
                use(loader, note, name, batch)
            if run.is_single and run.steps > first and not loader.check_is_prepared:
                run.batch_sizes[loader.check_name] = loader.check_size  # of one for training
            number += 1
            yield batch
            if loader.check_is_ahead:  # only now, as the next one is asked for, the script gets it
                use(loader, note, name, batch)
        if number != short:  # else it may be cut off
            run.note(PassEnd(key, number))

    def use(loader, note, name, batch):
        """The script gets a batch."""
        run.note(note)
        if note.trains and threading.current_thread() is threading.main_thread():
            run.loaded.pop(loader.check_name, None)
            order = find_order(run, (*note.key, note.number), note.indices)
            run.loaded[loader.check_name] = note.rows, order
            if run.traces:
                samples = note.totals if is_own(loader.collate_fn) else None
                about = {"made_by": made_by(loader.dataset), "samples": samples}
                run.note_value("value", place()[0], name, batch, **about)


def has_share(sampler):
    """Whether it gives each rank a part: DistributedSampler, or another by its name or fields; the
    script's own also by what its class uses."""
    if "Distributed" in type(sampler).__name__:
        return True
    if hasattr(sampler, "sampler"):
        return has_share(sampler.sampler)
    fields = "num_replicas", "world_size", "num_processes"
    return any(hasattr(sampler, name) for name in fields) or names_in(sampler, "world|replicas")


def has_epochs(sampler):
    """Whether it, or one that it has, has a set_epoch()."""
    inner = getattr(sampler, "sampler", None)
    return hasattr(sampler, "set_epoch") or (inner is not None and has_epochs(inner))


def own_class(sampler):
    """Whether the script itself has it, and it draws: by a generator or random function."""
    return names_in(sampler, "rand|choice|shuffle|generator|rng")


def names_in(sampler, pattern):
    """Whether it is the script's own, and its class uses such a name."""
    code = getattr(type(sampler).__iter__, "__code__", None)
    if code is None or not own_file(code.co_filename):
        return False
    inner = [each for each in code.co_consts if inspect.iscode(each)]  # as of a list of many
    names = [name for each in (code, *inner) for name in each.co_names]
    return any(re.search(pattern, name) for name in names)


def find_order(run, key, indices):
    """Where this rank's samples are in the batch of one process; None if that is not known."""
    if run.is_single:
        run.batches[key] = indices
    elif indices and (batch := run.batches.get(key)):
        last = {index: i for i, index in enumerate(batch)}
        order = [  # a sample may be there twice: rather where the layout has it
            i if i < len(batch) and batch[i] == index else last.get(index)
            for i, index in zip(run.positions(run.rank, len(indices)).tolist(), indices)
        ]
        if None in order or len(order) == len(batch):  # filled up; or each rank has all of it
            return None
        block = range(run.rank * len(order), (run.rank + 1) * len(order))
        if len(order) > 1:
            run.say("blocks" if order == list(block) else "turns", "order")
        return order

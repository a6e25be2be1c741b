"""Samples: the same in both runs, augmented alike, and the batches that loaders give."""

import itertools
import math
import threading

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
)

from ..notes import STREAM, Batch, Cut, Pass, PassEnd
from ..patches import wrap
from ..script import place
from ..sketch import leaves_of
from ..text import gives
from .datasets import batches_of, is_own, made_by, whole
from .prepared import batch_of_all, prepared_name
from .samplers import has_epochs, has_share, length, own_class


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
        is_torchs = isinstance(sampler, DistributedSampler) and hasattr(sampler, "check_made")
        gives_at = next(iter(gives(type(sampler).__iter__)), "")
        made = sampler.check_made if is_torchs else gives_at
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

"""The batches of a DataLoader: each sample is augmented alike in both runs."""

import contextlib
import itertools
import operator
import random
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from ..notes import COLLATE, DATASET
from ..script import own_file
from ..sketch import leaves_of
from .draws import seed_all
from .generators import OwnGenerators
from .pairing import SCRIPT_STATES, checksum, note_draw, state_of


@contextlib.contextmanager
def dataset_numbers(run):
    """Random numbers of a dataset, which do not change the script's others."""
    run.thread.in_dataset = True
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])
        run.thread.in_dataset = False


def given_states():
    """Of the generators, as they are: a dataset that changes them has drawn."""
    return {
        "torch": checksum(torch.get_rng_state().numpy()),
        "random": checksum(random.getstate()),
        "numpy": checksum(np.random.get_state()),
    }


def script_states():
    """Of the generators, as the script has seeded and used them."""
    return {name: state_of(name) for name in ("torch", *SCRIPT_STATES)}


class Worker(NamedTuple):
    """What torch.utils.data.get_worker_info() gives in a loader's worker."""

    id: int
    num_workers: int
    seed: int
    dataset: object


@contextlib.contextmanager
def in_worker(run, loader, seed):
    """Inside of it, a loader's only worker gives its samples, if it has any."""
    if loader.num_workers:
        run.thread.worker = Worker(0, loader.num_workers, seed, loader.dataset)
    try:
        yield
    finally:
        run.thread.worker = None


def states_of_worker(run, loader, seed):
    """What a loader's first worker would begin with: torch seeds it, then the script may."""
    with dataset_numbers(run):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if loader.worker_init_fn is not None:
            with in_worker(run, loader, seed):
                loader.worker_init_fn(0)
        return given_states()


def whole(dataset):
    """What is below all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def made_by(dataset):
    """Where the script's own dataset makes a sample; "" if it is another's."""
    code = getattr(getattr(type(whole(dataset)), "__getitem__", None), "__code__", None)
    file = own_file(code.co_filename) if code else None
    return f"{file}:{code.co_firstlineno}" if file else ""


def base_index(dataset, index):
    """A sample's index in the dataset itself, below all Subsets."""
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        return operator.index(index)
    except TypeError:
        return repr(index)


def batches_of(run, loader):
    """What a DataLoader gives, made here, where random numbers and files are watched: (the indices
    of its samples, {index: a sample's total} if it is known, the batch). Its sampler is asked when
    the batch is due."""
    with run.quiet():  # as a DataLoader does, for its workers
        seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
    if isinstance(loader.dataset, IterableDataset):
        for samples, batch in batches_of_stream(run, loader):
            yield None, {mark: mark for mark in samples}, batch
        return
    states = states_of_worker(run, loader, seed) if loader.num_workers else None
    one_by_one = loader.batch_sampler is not None
    for number, indices in enumerate(loader.batch_sampler if one_by_one else loader.sampler):
        with dataset_numbers(run), in_worker(run, loader, seed):
            if one_by_one:
                totals, batch = collated(run, loader, indices, number, states or script_states())
            else:
                totals = {}
                seed_all(run.hash("batch", number))
                batch = loader.collate_fn(loader.dataset[indices])
        is_list = one_by_one or isinstance(indices, (list, tuple))  # or a tensor of them
        yield [base_index(loader.dataset, i) for i in indices] if is_list else None, totals, batch


def is_own(collate):
    """Whether it is not torch's."""
    return not getattr(collate, "__module__", "").startswith("torch.")


def total_of(sample):
    """Of its numbers: whether it is the same in both runs."""
    total = 0.0
    for leaf in leaves_of(sample):
        with contextlib.suppress(TypeError, ValueError):
            total += float(np.asarray(leaf, dtype=float).sum())
    return total


def mark_of(sample):
    """Of a sample: the same for the same numbers, as a stream's has no index."""
    arrays = []
    for leaf in leaves_of(sample):
        with contextlib.suppress(TypeError, ValueError):  # as of half precision
            array = np.asarray(leaf.detach() if torch.is_tensor(leaf) else leaf)
            if not array.dtype.hasobject:  # whose bytes are its address
                arrays.append(array.tobytes())
    return checksum(arrays)


def remembers(run, dataset, index, sample, own):
    """Whether a sample is another one if it is asked for once more, with the same random numbers:
    what is measured of it, and not a clock."""
    arrays = [leaf for leaf in leaves_of(sample) if getattr(leaf, "shape", ())]
    mark = mark_of(arrays)
    seed_all(run.thread.sample)
    own.seed(run.thread.sample)
    with contextlib.suppress(Exception):
        again = [leaf for leaf in leaves_of(dataset[index]) if getattr(leaf, "shape", ())]
        return not mark == mark_of(again) == mark_of(arrays)
    return False


def collated(run, loader, indices, batch, states):
    """Each sample is drawn with a seed of its own; what makes the batch, with one of the batch. The
    samples' totals are of a pass's first batch, and of what the script puts together itself. A
    dataset that gives a batch as columns is asked for it at once."""
    samples, totals, own = [], {}, OwnGenerators(loader.dataset)
    by = {"seeded_by": "torch"} if loader.num_workers else {}
    fetch = getattr(loader.dataset, "__getitems__", None)  # which torch prefers
    try:
        for index in indices:
            number = run.thread.sample = run.hash("sample", base_index(loader.dataset, index))
            seed_all(number)
            run.thread.asks, run.thread.states, run.thread.seeded = False, states, set()
            before, given = given_states() if not samples else None, own.seed(number)
            found = fetch([index]) if fetch else [loader.dataset[index]]
            if not isinstance(found, list) or len(found) > 1:
                seed_all(run.hash("batch", batch))
                return totals, loader.collate_fn(fetch(indices))
            samples += found
            if before and torch.is_grad_enabled():
                drawn = [(k, states[k]) for k, v in given_states().items() if before[k] != v]
                drawn = [both for both in drawn if both[0] not in run.thread.seeded]
                for generator, state in drawn:
                    note_draw(run, DATASET, generator, state, **by)
                for generator, state in own.drawn(given):
                    note_draw(run, DATASET, generator, state)
        if run.traces and batch == 0 and not fetch and (line := made_by(loader.dataset)):
            if remembers(run, loader.dataset, index, samples[-1], own):
                run.say(line, "remembers")
    finally:
        own.restore()
        run.thread.sample = None
    seed_all(run.hash("batch", batch))
    if batch == 0 or (is_own(loader.collate_fn) and run.traces):
        bases = [base_index(loader.dataset, index) for index in indices]
        totals = dict(zip(bases, map(total_of, samples)))
    run.thread.batch, before = len(samples), given_states()
    try:
        made = loader.collate_fn(samples)
    finally:
        run.thread.batch = None
    after = given_states()
    for generator in before if torch.is_grad_enabled() else ():
        if after[generator] != before[generator]:
            note_draw(run, COLLATE, generator, states[generator], **by)
    return totals, made


def batches_of_stream(run, loader):
    """The k-th sample of a rank is the (k * world + rank)-th of one process. Of each sample, a mark
    of what is in it; and the batch."""
    items, samples, marks, ends = iter(loader.dataset), [], [], False
    for k in itertools.count():
        with dataset_numbers(run):
            seed_all(run.hash("item", k if run.is_single else k * run.world + run.rank))
            try:
                samples.append(next(items))
                marks.append(mark_of(samples[-1]))
            except StopIteration:
                ends = True
            if ends and (loader.drop_last or not samples):
                return
            if loader.batch_size is None:
                batch = loader.collate_fn(samples.pop())
            elif ends or len(samples) == loader.batch_size:
                batch, samples = loader.collate_fn(samples), []
            else:
                continue
        yield marks, batch
        if ends:  # it might begin again
            return
        marks = []

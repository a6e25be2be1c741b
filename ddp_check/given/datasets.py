"""Each sample is augmented alike in both runs."""

import contextlib
import operator
import random
import zlib

import numpy as np
import torch
from torch.utils.data import (
    Subset,
)
from torch.utils.data._utils import fetch as fetchers
from torch.utils.data._utils import worker

from ..process import wrap
from .draws import DATASET, OWN, note_draw, seed_all, state_of


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


def given_states():
    """Of the generators, as they are: a dataset that changes them has drawn."""
    return {
        "torch": zlib.crc32(torch.get_rng_state().numpy()),
        "random": hash(random.getstate()[1]),
        "numpy": zlib.crc32((at := np.random.get_state())[1].tobytes()) + at[2],
    }


def own_states():
    """Of the generators, as the script has seeded and used them."""
    return {name: state_of(name) for name in ("torch", *OWN)}


def states_of_worker(run, loader, seed):
    """What a loader's first worker would begin with: torch seeds it, then the script may."""
    with own_numbers(run):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if loader.worker_init_fn is not None:
            info = loader.num_workers, seed, loader.dataset
            info = worker.WorkerInfo(id=0, **dict(zip(("num_workers", "seed", "dataset"), info)))
            worker._worker_info = info
            try:
                loader.worker_init_fn(0)
            finally:
                worker._worker_info = None
        return given_states()


def base_index(dataset, index):
    """A sample's index in the dataset itself, below all Subsets."""
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        return operator.index(index)
    except TypeError:
        return repr(index)


def patch(run):
    """Each sample is drawn with a seed of its own; what makes the batch, with one of the batch."""

    @wrap(fetchers._MapDatasetFetcher, "fetch")
    def fetch(original, self, indices):
        number = self.__dict__.setdefault("compare_number", 0)
        self.compare_number += 1
        own = self.__dict__.get("check_states") or own_states()
        with own_numbers(run):
            if not self.auto_collation:
                seed_all(run.hash("batch", number))
                batch = original(self, indices)
            else:  # one by one, also from a dataset that has __getitems__
                samples = []
                for index in indices:
                    seed_all(run.hash("sample", base_index(self.dataset, index)))
                    before = given_states() if not samples else None
                    samples.append(self.dataset[index])
                    drawn = [k for k, v in given_states().items() if before and before[k] != v]
                    for generator in drawn if torch.is_grad_enabled() else []:
                        note_draw(run, DATASET, generator, own[generator])
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
            seed_all(run.hash("item", self.k if run.is_single else self.k * run.world + run.rank))
            self.k += 1
            return next(self.iterator)

    @wrap(fetchers._IterableDatasetFetcher, "fetch")
    def fetch_items(original, self, indices):
        if not isinstance(self.dataset_iter, Seeded):
            self.dataset_iter = Seeded(self.dataset_iter)
        with own_numbers(run):
            return original(self, indices)

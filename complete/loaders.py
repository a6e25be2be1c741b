"""Which samples each rank gets, in which order, and with which random numbers.

Nothing of this is saved, as it follows from a few numbers: the order of an epoch from (seed,
epoch), what a Dataset's random transforms draw from (seed, epoch, index of the sample), and what a
step draws from (seed, epoch, step, micro-step, rank).
"""

import functools
import hashlib
import random
import sys
import tempfile
from multiprocessing.connection import Listener

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

TEST_WORKERS = 8  # loader workers for tests, at most


# ---- Random numbers ------------------------------------------------------------------------------
def mix(*what):
    """A seed from words and numbers. Sums would meet: seed 2 would be seed 1 an epoch later."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "little")


def seed_torch(*what, device=None):
    """Seed torch's random numbers on the CPU, and on the device if it is given. Returns the seed.
    Takes 3 us, where torch.manual_seed, which looks at all devices, may take 300."""
    seed = mix(*what)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    return seed


def seed_everything(*what, device=None):
    """Seed the random numbers of Python, numpy and torch. Takes 12 us."""
    seed = seed_torch(*what, device=device)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class SeededDataset(Dataset):
    """A Dataset whose random transforms draw the same numbers for a sample of an epoch in whichever
    process it is loaded. It is indexed by (epoch, index)."""

    def __init__(self, dataset, name, seed):
        self.dataset, self.name, self.seed = dataset, name, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, epoch_and_index):
        epoch, index = epoch_and_index
        seed_everything(self.name, self.seed, epoch, index)
        return self.dataset[index]


# ---- Loaders -------------------------------------------------------------------------------------
class EpochSampler(Sampler):
    """This rank's samples of an epoch, as pairs (epoch, index)."""

    def set_epoch(self, epoch, indices):
        self.epoch, self.indices = epoch, indices

    def __iter__(self):
        for index in self.indices.tolist():
            yield self.epoch, index


class TrainLoader:
    """The training set in micro-batches. Each step takes the next --batch-size samples of the
    epoch's order, whatever the number of ranks: of 4 ranks, rank 1 has the second, the sixth, ...
    The last, incomplete step is left out; these are other samples in each epoch."""

    def __init__(self, args, train_set, epoch_order, collate, prepare, device):
        self.args, self.train_set, self.epoch_order = args, train_set, epoch_order
        self.prepare, self.device = prepare, device
        self.steps_per_epoch = len(train_set) // args.batch_size
        self.sampler = EpochSampler()
        self.loader = make_loader(args, "train", train_set, self.sampler, collate, device)

    def batches(self, epoch, first_step=0):
        """An iterator over the micro-batches of an epoch, as `prepare` returns them, without those
        of its first steps. The loader's workers begin to fetch at once."""
        batch_size = self.args.batch_size
        order = torch.as_tensor(self.epoch_order(self.args, self.train_set, epoch))
        if len(order) < self.steps_per_epoch * batch_size:
            raise ValueError(f"epoch_order returns {len(order)} indices: an epoch needs more")
        order = order[first_step * batch_size : self.steps_per_epoch * batch_size]
        self.sampler.set_epoch(epoch, order[dist.get_rank() :: dist.get_world_size()])
        return self.prepared(iter(self.loader), epoch, first_step)

    def prepared(self, batches, epoch, first_step):
        """Each batch comes with random numbers of its own, for dropout, say. Those of `prepare`,
        which runs a batch ahead, are others."""
        args, device, rank = self.args, self.device, dist.get_rank()
        steps = range(first_step + 1, self.steps_per_epoch + 1)
        seeds = [
            (args.seed, epoch, step, i, rank) for step in steps for i in range(args.accumulate)
        ]

        def prepare_next(numbers):
            batch = next(batches)
            seed_everything("prepare", *numbers, device=device)
            return self.prepare(args, batch, device, train=True)

        ahead = fetch_ahead(map(prepare_next, seeds), device)
        for numbers, batch in zip(seeds, ahead):
            seed_torch("step", *numbers, device=device)
            yield batch


class TestLoader:
    """The test set in batches of the size of a micro-batch, as `prepare` returns them: each sample
    once, on one of the ranks, which may have different numbers of batches."""

    def __init__(self, args, test_set, collate, prepare, device):
        self.args, self.prepare, self.device = args, prepare, device
        # To try the model: of two, as batch norm can be trained on one only if it has many pixels.
        samples = [test_set[0]] * min(2, micro_batch_size(args))
        self.sample = prepare(args, collate(samples), device)
        sampler = EpochSampler()
        sampler.set_epoch(0, torch.arange(dist.get_rank(), len(test_set), dist.get_world_size()))
        self.loader = make_loader(args, "test", test_set, sampler, collate, device)

    def __iter__(self):
        batches = (self.prepare(self.args, batch, self.device) for batch in self.loader)
        return fetch_ahead(batches, self.device)


def micro_batch_size(args):
    return args.batch_size // dist.get_world_size() // args.accumulate


def check_temporary_folder():
    """Why loader workers could send nothing, or "". They do it by sockets in TMPDIR, of which the
    path must be short; a worker that fails to make one would never be heard of."""
    try:
        Listener().close()
    except OSError as error:
        return f"{error}: {tempfile.gettempdir()}: export TMPDIR=/tmp, or use --workers 0"
    return ""


def make_loader(args, name, dataset, sampler, collate, device):
    batch_size = micro_batch_size(args)
    if type(dataset) is TensorDataset:
        return TensorLoader(dataset, sampler, batch_size, device)
    # Both loaders fetch ahead during the evaluation, and all their batches are in /dev/shm.
    workers = args.workers if name == "train" else min(args.workers, TEST_WORKERS)
    return DataLoader(
        SeededDataset(dataset, name, args.seed),
        batch_size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=None if workers == 0 else 2 if workers <= 16 else 1,  # of each worker
        persistent_workers=workers > 0,  # keep them for the next epoch
        # Python 3.14 otherwise starts each worker by importing torch (370 MB and 4 s).
        multiprocessing_context="fork" if sys.platform == "linux" and workers > 0 else None,
        pin_memory=device.type in ("cuda", "xpu"),  # for asynchronous copies to the GPU
        timeout=args.timeout if workers > 0 else 0,  # a worker that hangs ends the run
    )


class TensorLoader:
    """Batches of tensors that are on the device as a whole: one call per tensor gathers a batch,
    without `collate`."""

    def __init__(self, dataset, sampler, batch_size, device):
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]
        self.sampler, self.batch_size, self.device = sampler, batch_size, device

    def __iter__(self):
        for indices in self.sampler.indices.to(self.device).split(self.batch_size):
            yield [tensor.index_select(0, indices) for tensor in self.tensors]


# ---- Ahead of the model --------------------------------------------------------------------------
def fetch_ahead(batches, device):
    """The same batches. `batches` is an iterator that copies and prepares a batch when it is asked
    for the next one. On a GPU, batch N + 1 is asked for before batch N is handed out: copies and
    kernels are put on a stream of their own, where they run while the model computes."""
    if device.type not in ("cuda", "xpu"):
        yield from batches
        return
    module = torch.get_device_module(device)
    stream = side_stream(device)

    def fetch():
        # The new batch may get the memory of an older one, which the model may still be reading.
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            return next(batches, None)

    batch = fetch()
    while batch is not None:
        module.current_stream().wait_stream(stream)
        following = fetch()
        yield batch
        batch = following


@functools.cache
def side_stream(device):
    """One for the whole run, as each stream keeps memory of its own."""
    return torch.get_device_module(device).Stream()

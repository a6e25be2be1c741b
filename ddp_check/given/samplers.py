"""Samplers: the same order in both runs, and what they are."""

import contextlib
import inspect
import re

import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from ..patches import wrap
from ..script import own_file, place
from .datasets import whole
from .pairing import ORDER, checksum, note_draw


def length(sized):
    """Also of a loader that --short ends early."""
    with contextlib.suppress(TypeError, AttributeError, NotImplementedError):  # not all know it
        return inspect.unwrap(type(sized).__len__)(sized)


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


def patch(run):
    """The order of each pass."""

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

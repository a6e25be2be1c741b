"""Random numbers: the ranks get their shares of those of one process."""

import inspect
import math
import random
import traceback

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Sampler, SubsetRandomSampler

from ..notes import OWN_GENERATOR
from ..patches import wrap
from ..script import is_running, place
from ..sketch import is_plain
from .pairing import (
    LOOP,
    MODEL,
    ORDER,
    checksum,
    marked,
    note_apart,
    note_draw,
    pair,
    state_of,
)


def of_own_generator(run, name, values, generator):
    """Numbers of a generator that the script has made: left alone, but where a rank has drawn its
    share, they are that share of what one process has drawn."""
    shape = tuple(values.shape)
    seed = generator.initial_seed()
    own = run.own_seeds.setdefault(seed, run.own_seed(seed))
    state = checksum((values.cpu().numpy(), own))
    key, shape_of_one, *_ = pair(run, f"{name} of a generator", shape, state)
    if run.is_single and values.numel() < 1_000_000:
        run.given[key] = values.detach().cpu().clone()
    if shape_of_one == shape or key not in run.given:
        return values
    rows = [n for n, of_one in zip(shape, shape_of_one) if n != of_one]
    if not values.is_floating_point() and rows != [run.loader_rows or run.model_rows]:
        return values  # of no batch, as a size of images for each of so many
    note_draw(run, LOOP, OWN_GENERATOR, state)
    return run.share_of(run.given[key], shape)


def in_sampler():
    """Whether we are called from a method of a sampler that is not torch's, such as __init__."""
    frames = traceback.walk_stack(inspect.currentframe())
    kinds = [type(frame.f_locals.get("self")) for frame, _ in frames]
    samplers = [kind for kind in kinds if issubclass(kind, Sampler)]
    return any(not kind.__module__.startswith("torch.") for kind in samplers)


def lengths_of_split():
    """Of the parts of torch's random_split, if that has called us."""
    code = torch.utils.data.random_split.__code__
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    return [n for frame in frames if frame.f_code is code for n in frame.f_locals["lengths"]]


def subset():
    """The indices that torch's SubsetRandomSampler shuffles, if that has called us."""
    code = inspect.unwrap(SubsetRandomSampler.__iter__).__code__
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    return next((frame.f_locals["self"].indices for frame in frames if frame.f_code is code), None)


def note_order(run, generator, state, n, is_of_samples=False):
    if run.model is None:
        if (indices := subset()) is not None:  # a share's order is compared with no other share's
            generator += f" for {checksum(list(map(str, indices)))}"
        # Another order may be one of a few samples that are only looked at.
        parts = lengths_of_split()
        is_of_samples |= is_running("random_split", "__iter__") or in_sampler()
        note_draw(run, ORDER, generator, state, n if is_of_samples else 0, parts=parts)
        run.last_order = run.last_order if run.steps else place()[0]


def permutation(run, name, n, generator, state):
    """If it may be one of the batch: within each share, as N processes do."""
    key, (total,), *_ = pair(run, name, (n,), state)
    share = n // run.world

    def shuffled(rank, n):
        return torch.randperm(n, generator=torch.Generator().manual_seed(run.hash(key, rank)))

    if total != n:
        note_apart(run, name)
        return shuffled(run.rank, n)
    note_order(run, generator, state, n, "shuffle" in name)
    if n % run.world or run.world > share:
        return shuffled(0, n)
    values = torch.empty(n, dtype=torch.long)
    for rank in range(run.world):
        at = run.positions(rank, share)
        values[at] = at[shuffled(rank, share)]
    return values


def widened(run, value, shape, shape_of_one):
    """A tensor of parameters, as means, for random numbers of one process's shape: this rank's have
    their places there, and stand for those of the others."""
    d = run.shared_dimension(shape_of_one, shape)
    if shape == shape_of_one or value.dim() != len(shape) or value.shape[d] != shape[d]:
        return value
    sizes = [m if n == k else n for n, k, m in zip(value.shape, shape, shape_of_one)]
    times = [math.ceil(m / n) for n, m in zip(value.shape, sizes)]
    wide = value.repeat(times)[tuple(slice(m) for m in sizes)]
    part = wide[tuple(slice(None if i == d else n) for i, n in enumerate(value.shape))]
    part.index_copy_(d, run.positions(run.rank, shape[d], True), value)
    return wide


def among(name, given):
    """Of how many columns one is chosen, or the limits of integers."""
    if name == "aten::multinomial":
        return (given["self"].shape[-1],)
    return tuple(given[limit] for limit in ("low", "high") if limit in given)


class Draws(TorchDispatchMode):
    """Inside of it, torch draws the random numbers that one process draws, or the rank's share.
    What it sees are operators, whose arguments have names, however they were called."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, name, run = kwargs or {}, op._schema.name, self.run
        state = run.thread.torch_state
        out = op(*args, **kwargs)  # the rank's own numbers, of which only the shape is used
        if torch.Tag.nondeterministic_seeded not in op.tags or not is_plain(out):
            return out
        generator = kwargs.get("generator")  # here, also the default one is another object
        if generator is not None and generator._cdata != torch.default_generator._cdata:
            if name == "aten::randperm":  # of other samples on each rank
                if is_running("__iter__"):  # of a sampler
                    if in_sampler():
                        run.say(place()[0], "own order")
                else:
                    note_order(run, OWN_GENERATOR, checksum(out.cpu().numpy()), len(out))
                return out
            return out.copy_(of_own_generator(run, name, out, generator))
        if name == "aten::randperm":
            return out.copy_(permutation(run, name, len(out), "torch", state))
        shape = tuple(out.shape)
        names = [argument.name for argument in op._schema.arguments]
        limits = among(name, dict(zip(names, args)))
        of_one = pair(run, name, shape, state, among=limits)
        key, shape_of_one, *_ = of_one
        # No share, but it may be alike on all ranks.
        if shape != shape_of_one and in_sampler():
            note_apart(run, name)
            run.say(place()[0], "chooses")
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(run.hash(key, state))
                return op(*args, **kwargs)
        if shape != shape_of_one:
            note_draw(run, MODEL if run.model is not None else LOOP, "torch", state)
        args = [self.of_one(*argument, shape, shape_of_one) for argument in zip(names, args)]
        kwargs = {k: self.of_one(k, value, shape, shape_of_one) for k, value in kwargs.items()}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(run.hash(key))
            values = op(*args, **kwargs)
        if shape != shape_of_one:
            return out.copy_(run.share_of(values, shape))
        if "rand" in name and not values.is_floating_point() and values.numel() == 1:
            run.keep_drawn(int(values), state)
        return out.copy_(marked(run, name, "torch", values, of_one, state))

    def of_one(self, name, value, shape, shape_of_one):
        """An argument, on the CPU, for a result of one process's shape."""
        if name == "size":
            return shape_of_one
        if name == "num_samples":
            return shape_of_one[-1]
        if name == "device":
            return torch.device("cpu")
        if not torch.is_tensor(value):
            return value
        return widened(self.run, value.cpu().contiguous(), shape, shape_of_one)


def patch(run):
    """Random functions of torch get the numbers of one process. Its own generator goes on beside
    them: unseeded, it has another state on each rank. In a process that the script has started it
    is as the script's imports, or a fork, have left it."""
    if not run.options["spawns"]:
        torch.manual_seed(run.hash("unseeded", run.rank))

    @wrap(torch, "manual_seed")
    def manual_seed(original, seed):
        if run.thread.in_dataset:
            return original(run.seed_of_sample("torch", seed))
        run.seeded["torch"] = place()[0]
        return original(run.own_seed(seed))

    def watch(owner, name):
        @wrap(owner, name)
        def draw(original, *args, **kwargs):
            if run.has_own_numbers() or run.thread.quiet:
                return original(*args, **kwargs)
            run.thread.torch_state = state_of("torch")
            with run.quiet(), Draws(run):
                out = original(*args, **kwargs)
            out.check_line = place()[0]
            return out

    functions = "rand randn rand_like randn_like randint randint_like randperm normal bernoulli"
    functions += " multinomial poisson binomial"
    methods = "bernoulli multinomial bernoulli_ normal_ uniform_ random_ exponential_ log_normal_"
    methods += " cauchy_ geometric_"
    watch(torch.utils.data.dataset, "randperm")  # of random_split
    watch(torch.distributions.Gamma, "rsample")
    watch(torch.distributions.Dirichlet, "rsample")
    for owner, names in ((torch, functions), (torch.Tensor, methods)):
        for name in names.split():
            watch(owner, name)


UNSEEDED = random.Random()  # of it are seeds for what has none, in a dataset


def seed_all(seed, torch_too=True):
    UNSEEDED.seed(seed)
    if torch_too:
        torch.default_generator.manual_seed(seed)
    inspect.unwrap(random.seed)(seed)
    inspect.unwrap(np.random.seed)(seed)

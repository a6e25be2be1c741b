"""Python's and numpy's global generators: alike on all ranks."""

import contextlib
import inspect
import math
import os
import random

import numpy as np
import torch

from ..patches import wrap
from ..script import UNKNOWN, place
from .draws import UNSEEDED, in_sampler, permutation, widened
from .pairing import (
    LOOP,
    ORDER,
    SCRIPT_STATES,
    checksum,
    marked,
    note_apart,
    note_draw,
    pair,
    state_of,
)

LIBRARIES = {
    "random": (random, "getstate", "setstate"),
    "numpy": (np.random, "get_state", "set_state"),
}
SEEDS = "randint", "randrange"  # which may draw a seed
STATES = {"random": (random.getstate, random.setstate)}
STATES["numpy"] = np.random.get_state, np.random.set_state


@contextlib.contextmanager
def script_state(generator):
    """Inside of it, the generator goes on where the script's own numbers were, not the given."""
    get, set_to = STATES[generator]
    given = get()
    set_to(SCRIPT_STATES.get(generator, given))
    try:
        yield
    finally:
        SCRIPT_STATES[generator] = get()
        set_to(given)


def chosen_from(name, args):
    """A checksum of the numbers or words that a function chooses from, if they are few."""
    if name not in ("sample", "choice", "choices") or not args:
        return None
    things = args[0].tolist() if isinstance(args[0], np.ndarray) else args[0]
    is_short = isinstance(things, (list, tuple)) and 0 < len(things) <= 1000
    return checksum(things) if is_short and {*map(type, things)} <= {int, float, str} else None


def among(name, args):
    """How many things a function chooses from, or the limits of its integers."""
    if name in ("sample", "choice", "choices") and args:
        with contextlib.suppress(TypeError):  # a number
            return (len(args[0]),)
    return tuple(map(repr, args[:2])) if name in ("choice", *SEEDS) else ()


def parameter(run, value, shape, shape_of_one):
    """Such as means, for random numbers of one process's shape."""
    if not isinstance(value, (list, np.ndarray)):
        return value
    return widened(run, torch.as_tensor(np.array(value)), shape, shape_of_one).numpy()


def patch(run):
    """Python's and numpy's global generators: alike on all ranks, whatever seeds these set, and
    from each of the script's lines on. numpy's arrays are shared like torch's."""

    def watch_seed(generator, owner):
        @wrap(owner, "seed")
        def seed(original, *args, **kwargs):
            if run.thread.in_dataset:
                args = [run.seed_of_sample(generator, arg) for arg in args[:1]] + [*args[1:]]
            if run.has_own_numbers():
                return original(*args, **kwargs)
            run.seeded[generator] = place()[0]
            with script_state(generator):
                original(*map(run.own_seed, args), **kwargs)
            return original(run.hash(owner.__name__, run.steps))

    def watch_state(generator, owner, name):
        """The script gets and sets its own."""

        @wrap(owner, name)
        def state(original, *args, **kwargs):
            if run.has_own_numbers():
                return original(*args, **kwargs)
            with script_state(generator):
                return original(*args, **kwargs)

    def watch(generator, owner, name, size_at=math.inf):
        """A function that takes a `size` after so many other arguments."""

        @wrap(owner, name)
        def draw(original, *args, **kwargs):
            if run.has_own_numbers() or run.nth("python", run.steps, place(), name) >= 1000:
                return original(*args, **kwargs)  # so many would take time
            args = list(args)
            size = args[size_at] if len(args) > size_at else kwargs.get("size")
            shape = () if size is None else tuple(map(int, np.ravel(size)))
            state = state_of(generator)
            things = chosen_from(name, args), among(name, args)
            of_one = pair(run, f"{owner.__name__}.{name}", shape, state, *things)
            key, shape_of_one, *_ = of_one
            with script_state(generator):
                original(*args, **kwargs)
            inspect.unwrap(owner.seed)(run.hash(key))
            if shape == shape_of_one:
                is_split = (kwargs.get("replace"), *args[2:3])[-1] is False
                is_order = name == "sample" or is_split
                if is_order and run.model is None:
                    run.last_order = run.last_order if run.steps else place()[0]
                    note_draw(run, ORDER, generator, state)
                values = original(*args, **kwargs)
                if name in SEEDS and np.ndim(values) == 0:
                    run.keep_drawn(int(values), state)
                return marked(run, name, generator, values, of_one, state)
            if in_sampler():  # where it is no share, but may be alike on all ranks
                note_apart(run, name)
                run.say(place()[0], "chooses")
                inspect.unwrap(owner.seed)(run.hash(key, state))
                return original(*args, **kwargs)
            note_draw(run, LOOP, generator, state)
            with run.quiet():
                if name != "choice":  # which chooses from its array
                    args = [parameter(run, arg, shape, shape_of_one) for arg in args]
                    kwargs = {k: parameter(run, v, shape, shape_of_one) for k, v in kwargs.items()}
            if len(args) > size_at:
                args[size_at] = shape_of_one
            else:
                kwargs["size"] = shape_of_one
            values = original(*args, **kwargs)
            with run.quiet():
                at = torch.arange(values.size).reshape(shape_of_one)
                return values.ravel()[run.share_of(at, shape).numpy()]

    def watch_order(generator, owner, name):
        @wrap(owner, name)
        def order(original, x, *args, **kwargs):
            if run.has_own_numbers():
                return original(x, *args, **kwargs)
            size, state = x if isinstance(x, (int, np.integer)) else len(x), state_of(generator)
            with script_state(generator):
                original(list(range(size)))
            with run.quiet():
                at = permutation(run, f"{owner.__name__}.{name}", int(size), generator, state)
            if name == "permutation":
                return (np.arange(size) if isinstance(x, (int, np.integer)) else np.array(x))[at]
            if isinstance(x, (np.ndarray, torch.Tensor)):
                x[:] = x[at]
                return
            for to, value in enumerate([x[old] for old in at.tolist()]):  # also of a deque
                x[to] = value

    for generator, (owner, *names) in LIBRARIES.items():
        if not run.options["spawns"]:
            owner.seed(run.hash("unseeded", run.rank))
        SCRIPT_STATES[generator] = STATES[generator][0]()
        owner.seed(run.hash("given"))
        watch_seed(generator, owner)
        for name in names:
            watch_state(generator, owner, name)

    @wrap(np.random, "default_rng")
    def make(original, *args, **kwargs):
        is_unseeded = all(seed is None for seed in (*args, *kwargs.values()))
        if is_unseeded and run.thread.in_dataset:
            return original(UNSEEDED.getrandbits(64))
        generator, line = original(*args, **kwargs), place()[0]
        run.made[id(generator)] = line
        if is_unseeded and line != UNKNOWN:
            run.say(line, "unseeded")
        return generator

    @wrap(random.Random, "__init__")
    def make_random(original, self, x=None):
        original(self, UNSEEDED.getrandbits(64) if x is None and run.thread.in_dataset else x)

    def restore():
        """A process that the script forks draws its own numbers, as in any run."""
        for generator, (_, set_to) in STATES.items():
            set_to(SCRIPT_STATES[generator])

    os.register_at_fork(after_in_child=restore)
    watch_order("random", random, "shuffle")
    watch_order("numpy", np.random, "shuffle")
    watch_order("numpy", np.random, "permutation")
    names = "random choice choices uniform randint randrange gauss sample betavariate"
    for name in names.split():
        watch("random", random, name)
    sizes = {"random": 0, "random_sample": 0, "standard_normal": 0, "exponential": 1, "poisson": 1}
    sizes |= {"choice": 1, "uniform": 2, "normal": 2, "randint": 2, "beta": 2, "binomial": 2}
    for name, size_at in sizes.items():
        watch("numpy", np.random, name, size_at)
    wrap(np.random, "rand")(lambda original, *size: np.random.random_sample(size or None))
    wrap(np.random, "randn")(lambda original, *size: np.random.standard_normal(size or None))

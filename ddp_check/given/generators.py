"""Generators that a dataset has of its own: as the global ones, they are given for each sample."""

import random
import types

import numpy as np
import torch

from .pairing import checksum

KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
NO_OWNERS = torch.Tensor, np.ndarray, str, type, types.ModuleType
MANY_THINGS = 300  # that a dataset holds and that are searched


def get_state(generator):
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()  # of torch, and of numpy's RandomState


def set_state(generator, state):
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seed(generator, number):
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    else:
        generator.seed(number)


def sum_of(state):
    return checksum(state.numpy() if torch.is_tensor(state) else state)


def generators_of(dataset):
    """What it and its parts hold, such as transforms, and those of its module."""
    found, seen, todo = [], set(), [dataset]
    while todo and len(seen) < MANY_THINGS:
        thing = todo.pop(0)
        if id(thing) in seen or isinstance(thing, NO_OWNERS):
            continue
        seen.add(id(thing))
        if isinstance(thing, KINDS):
            found.append(thing)
        elif isinstance(thing, (list, tuple)):
            todo += thing[:20]
        elif isinstance(thing, dict):
            todo += list(thing.values())[:20]
        else:
            todo += list(getattr(thing, "__dict__", {}).values())
            todo += [each for each in vars(type(thing)).values() if isinstance(each, KINDS)]
            code = getattr(type(thing), "__getitem__", None) or getattr(thing, "__call__", None)
            names = getattr(getattr(code, "__code__", None), "co_names", ())
            of_module = getattr(code, "__globals__", {})
            todo += [of_module[name] for name in names if isinstance(of_module.get(name), KINDS)]
    return [each for each in found if not isinstance(each, random.SystemRandom)]


class OwnGenerators:
    """Those of a dataset, while a batch is made."""

    def __init__(self, dataset):
        self.states = [(each, get_state(each)) for each in generators_of(dataset)]

    def seed(self, number):
        """Returns the states that it gives."""
        given = []
        for place, (generator, _) in enumerate(self.states):
            seed(generator, number + place)
            given.append(sum_of(get_state(generator)))
        return given

    def drawn(self, given):
        """[(name, the script's own state)] of those that are not in these states any more."""
        return [
            (type(generator).__name__, sum_of(state))
            for (generator, state), before in zip(self.states, given)
            if sum_of(get_state(generator)) != before
        ]

    def restore(self):
        for generator, state in self.states:
            set_state(generator, state)

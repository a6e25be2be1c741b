"""The script's plain numbers, and the generators of random numbers that it has made."""

import gc
import inspect
import multiprocessing
import random
import types

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ..given.draws import checksum
from ..script import own_file


def generators(run):
    """{name: checksum of its state} of numpy's and Python's generators that the script has made;
    and of processes, such as a sampler or an environment, that have their own."""
    kinds, found = (np.random.Generator, np.random.RandomState, random.Random), {}
    functions = random.random, np.random.random_sample  # of the global generators
    known = [inspect.unwrap(function).__self__ for function in functions]
    for thing in [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]:
        if isinstance(thing, random.SystemRandom) or any(thing is each for each in known):
            continue
        names = [f"a {type(thing).__name__}"]
        for owner in gc.get_referrers(thing):
            inside = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
            of = "" if isinstance(owner, dict) else f"{type(owner).__name__}."
            names += [of + str(key) for key, value in inside.items() if value is thing]
        if "_RandomNameSequence._rng" in names:  # tempfile's and multiprocessing's
            continue
        state = getattr(getattr(thing, "bit_generator", None), "state", None)
        state = state or (thing.get_state() if hasattr(thing, "get_state") else thing.getstate())
        line = run.made.get(id(thing))  # of default_rng
        name = f"{names[-1]}, made at {line}" if line else names[-1]
        found[name] = found.get(name, 0) + checksum(state)
    found |= {f"process {child.name}": child.pid for child in multiprocessing.active_children()}
    return found


def scopes_of(frame):
    """The variables of the script's functions that are running, and of their modules."""
    scopes = []
    while frame is not None:
        if own_file(frame.f_code.co_filename):
            scopes += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    return scopes


def modules_of(frame):
    """{id: name} of the modules that the script's variables hold, or a wrapper of them."""
    scopes = [list(scope.items()) for scope in scopes_of(frame)]
    held = [(name, m) for scope in scopes for name, m in scope if isinstance(m, nn.Module)]
    held += [(name, m.module) for name, m in held if isinstance(m, DistributedDataParallel)]
    return {id(module): name for name, module in reversed(held) if name != "self"}


def tensors_of(frame):
    """{class and name: tensor} of what the script's objects keep, but for weights and buffers."""
    found = {}
    for thing in {id(t): t for scope in scopes_of(frame) for t in list(scope.values())}.values():
        if isinstance(thing, (torch.Tensor, types.ModuleType, type)):
            continue
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            is_tensor = type(value) is torch.Tensor and value.layout == torch.strided
            if is_tensor and value.is_floating_point() and 0 < value.numel() < 10_000_000:
                found.setdefault(f"{type(thing).__name__}.{name}", value)
    return found


def variables_of(frame):
    """The script's plain numbers, {name: number}, also those in objects and dictionaries; of
    several of one name, the innermost. And the seeds of generators."""
    scopes, found = scopes_of(frame), {}
    for variables in list(scopes):
        for thing in list(variables.values()):
            if isinstance(thing, DataLoader):
                thing = thing.dataset
            while isinstance(thing, Subset):
                thing = thing.dataset
            if not isinstance(thing, (torch.Tensor, types.ModuleType)):
                inside = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
                scopes.append(inside if len(inside) < 200 else {})
    for variables in scopes:
        for name, thing in list(variables.items()):
            if isinstance(thing, torch.Generator):
                thing = thing.initial_seed()
            if isinstance(thing, (int, float, np.floating, np.integer)) and not abs(thing) > 1e300:
                found.setdefault(name, float(thing))
    return found

"""What the script holds: what an optimizer trains and what none does, plain numbers, generators."""

import gc
import inspect
import multiprocessing
import os
import random
import re
import sys
import types

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Subset

from ..given.generators import get_state
from ..given.pairing import checksum
from ..script import own_file
from ..sketch import sketches, whole
from .written import lines_of


def outer_modules():
    """All modules that are not part of another one; not DDP, but what it wraps."""
    gc.collect()  # a model that the script has dropped may be in a cycle
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    modules = [module for module in modules if not isinstance(module, DistributedDataParallel)]
    inner = {id(child) for module in modules for child in module.children()}
    inner |= {id(wrapper.module) for wrapper in wrappers if id(wrapper) in inner}
    return [module for module in modules if id(module) not in inner]


def on_cpu(tensor):
    """A copy of all of a tensor."""
    return None if tensor is None else whole(tensor).cpu().clone()


def set_to(tensor, value):
    """If one process has a value of this shape, and it is not sparse."""
    if value is None or value.shape != tensor.shape or tensor.layout != torch.strided:
        return
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
        tensor.copy_(value)


def named(function, module):
    """What module.named_parameters, or such, gives, without the names of DDP inside of it, as where
    a script wraps parts of its model on several processes alone."""
    inside = [
        f"{name}."
        for name, m in module.named_modules()
        if name and isinstance(m, DistributedDataParallel)
    ]
    found = []
    for name, thing in function():
        for prefix in inside:
            if f"{name}.".startswith(f"{prefix}module."):
                name = (prefix + f"{name}."[len(prefix) + 7 :]).rstrip(".")
        found.append((name, thing))
    return found


class Trained:
    """An optimizer's parameters, by name, and the buffers of their modules."""

    def __init__(self, run, optimizer):
        self.number, self.step = run.nth("optimizer"), -1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        order = {id(p): i for i, p in enumerate(parameters)}
        modules = [m for m in outer_modules() if any(id(p) in order for p in m.parameters())]
        variables = modules_of(inspect.currentframe())
        both = [(variables.get(id(m), type(m).__name__), m) for m in modules]

        def place_of(both):  # the same in each process, also where several have the same parameters
            return min(order.get(id(p), len(order)) for p in both[1].parameters()), both[0]

        self.owners, self.names = {}, {}
        for of, module in sorted(both, key=place_of):
            while of in self.owners:
                of += "'"
            self.owners[of] = module
            for name, p in named(module.named_parameters, module):
                self.names.setdefault(id(p), f"{of}.{name}")

    def parameters(self, optimizer):
        found = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names.get(id(p), f"parameter {len(found)} (of no module)")
                found[name] = p
        return found

    def buffers(self):
        return {
            f"{of}.{name}": buffer
            for of, owner in self.owners.items()
            for name, buffer in named(owner.named_buffers, owner)
            if buffer.is_floating_point()
        }

    def modes(self):
        """{module: whether it is in training mode}"""
        return {
            f"{of}.{name}".rstrip("."): module.training
            for of, owner in self.owners.items()
            for name, module in named(owner.named_modules, owner)
        }


def settings_of(optimizer):
    """{(group, name): number}"""
    return {
        (number, key): float(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, (int, float)) or torch.is_tensor(value) and value.numel() == 1
    }


def others(run, trained, averages):
    """What no optimizer trains, such as a teacher, an average, a bank: {name: its sketch}, and
    lines_of() it."""
    found = {}
    for module in [module for module in outer_modules() if module not in run.of_datasets]:
        tensors = named(module.named_parameters, module) + named(module.named_buffers, module)
        for name, tensor in tensors:
            is_known = id(tensor) in trained or is_lazy(tensor) or re.search(averages, name)
            if not is_known and tensor.is_floating_point() and not tensor.is_meta:
                full = f"{type(module).__name__}.{name}"
                found[full, len(found)] = tensor
    lines, of_name = lines_of(run, {name: tensor for (name, _), tensor in found.items()}), {}
    for (name, _), each in sketches(found, any_order=True).items():
        of_name.setdefault(name, []).append(each)
    found = {  # several modules of one class have no order
        name + "'" * number: each
        for name, several in of_name.items()
        for number, each in enumerate(sorted(several, key=lambda s: (s.shape, s.norm)))
    }
    return found, lines


# ---- its variables


def find_generators(run):
    """[(name, one of numpy's or Python's generators that the script has made)]; and {name: number}
    of what has generators of its own, which are not seen: processes, and environments."""
    kinds, found = (np.random.Generator, np.random.RandomState, random.Random), []
    for thing in [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]:
        if isinstance(thing, random.SystemRandom):
            continue
        names, owners = [f"a {type(thing).__name__}"], gc.get_referrers(thing)
        insides = [own if isinstance(own, dict) else getattr(own, "__dict__", {}) for own in owners]
        for owner, inside in zip(owners, insides):
            of = "" if isinstance(owner, dict) else f"{type(owner).__name__}."
            names += [of + str(key) for key, value in inside.items() if value is thing]
        # tempfile's and multiprocessing's; or a variable of a library
        if any("_rng_pid" in each for each in insides) or any(map(is_library_scope, owners)):
            continue
        line = run.made.get(id(thing))  # of default_rng
        found.append((f"{names[-1]}, made at {line}" if line else names[-1], thing))
    children = multiprocessing.active_children()
    children = [child for child in children if not child.name.startswith("SyncManager")]
    hidden = {f"process {child.name}": child.pid for child in children}
    kinds = {type(thing) for thing in gc.get_objects()}
    environments = [
        kind.__name__
        for kind in kinds
        if callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))
    ]
    return found, hidden | {f"environment {name}": os.getpid() for name in environments}


def states_of(generators):
    """{name: checksum of its state}"""
    found = {}
    for name, generator in generators:
        found[name] = found.get(name, 0) + checksum(get_state(generator))
    return found


def is_library_scope(scope):
    """Whether these are the variables of a module, or a class, that is not the script's."""
    if not isinstance(scope, dict) or not {"__spec__", "__module__"} & scope.keys():
        return False
    module = scope if "__spec__" in scope else vars(sys.modules.get(scope["__module__"], os))
    return not own_file(module.get("__file__") or "<")


def scopes_of(frame):
    """The variables of the script's functions that are running, and of their modules."""
    scopes = []
    while frame is not None:
        if own_file(frame.f_code.co_filename):
            scopes += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    return scopes


def modules_of(frame):
    """{id: name} of what the script's variables hold; of a module, also if a DDP of it is held."""
    held = [each for scope in scopes_of(frame) for each in list(scope.items())]
    held += [(name, m.module) for name, m in held if isinstance(m, DistributedDataParallel)]
    return {id(thing): name for name, thing in reversed(held) if name != "self"}


def tensors_of(frame):
    """{class and name: tensor} of what the script's objects keep, and objects of its own classes in
    these, but for weights and buffers."""
    found, things = {}, {id(t): t for scope in scopes_of(frame) for t in list(scope.values())}
    for thing in list(things.values()):
        inner = [t for t in list(attributes_of(thing).values()) if is_own_object(t)]
        things |= {id(t): t for t in inner}
    for thing in things.values():
        for name, value in list(attributes_of(thing).items()):
            is_tensor = type(value) is torch.Tensor and value.layout == torch.strided
            if is_tensor and value.is_floating_point() and 0 < value.numel() < 10_000_000:
                found.setdefault(f"{type(thing).__name__}.{name}", value)
    return found


def attributes_of(thing):
    is_none = isinstance(thing, (torch.Tensor, types.ModuleType, type))
    return {} if is_none else getattr(thing, "__dict__", {})


def is_own_object(thing):
    module = sys.modules.get(type(thing).__module__)
    return own_file(getattr(module, "__file__", None) or "<") is not None


def variables_of(frame):
    """The script's plain numbers, {name: number}, also those in objects and in dictionaries, by
    their names; of several of one name, the innermost. And the seeds of generators."""
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
            if isinstance(thing, np.number):
                thing = thing.item()  # half precision could not be compared with 1e300
            is_number = isinstance(thing, (int, float)) and isinstance(name, str)
            if is_number and not abs(thing) > 1e300:
                found.setdefault(name, float(thing))
    return found

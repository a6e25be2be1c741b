"""What an optimizer trains, and what none does."""

import gc
import inspect
import re

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..given.draws import sum_of
from .scalars import modules_of
from .sketch import sketch


def outer_modules():
    """All modules that are not part of another one; not DDP, but what it wraps."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    modules = [module for module in modules if not isinstance(module, DistributedDataParallel)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def on_cpu(tensor):
    """A copy of all of a tensor, also of one that is sharded."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.cpu().clone()


def set_to(tensor, value):
    """If one process has a value of this shape, and it is not sparse."""
    if value is None or value.shape != tensor.shape or tensor.layout != torch.strided:
        return
    with torch.no_grad():
        if hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            value = value.to(tensor.device)
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
        tensor.copy_(value)


class Trained:
    """An optimizer's parameters, by name, and the buffers of their modules."""

    def __init__(self, run, optimizer):
        self.number, self.step = run.nth("optimizer"), -1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        order = {id(p): i for i, p in enumerate(parameters)}
        modules = [m for m in outer_modules() if any(id(p) in order for p in m.parameters())]
        modules.sort(key=lambda m: min(order.get(id(p), len(order)) for p in m.parameters()))
        variables = modules_of(inspect.currentframe())
        self.owners, self.names = {}, {}
        for module in modules:
            of = variables.get(id(module), type(module).__name__)
            while of in self.owners:
                of += "'"
            self.owners[of] = module
            for name, p in module.named_parameters():
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
            for name, buffer in owner.named_buffers()
            if buffer.is_floating_point()
        }

    def modes(self):
        """{module: whether it is in training mode}"""
        return {
            f"{of}.{name}".rstrip("."): module.training
            for of, owner in self.owners.items()
            for name, module in owner.named_modules()
        }


def settings_of(optimizer):
    """{(group, name): number}"""
    return {
        (number, key): float(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, (int, float)) or torch.is_tensor(value) and value.numel() == 1
    }


def moments(optimizer, parameters):
    """{name of the parameter: {name: tensor}}"""
    return {
        name: {k: v for k, v in optimizer.state.get(p, {}).items() if torch.is_tensor(v)}
        for name, p in parameters.items()
    }


def others(trained, averages):
    """Of what no optimizer trains, such as a teacher, an average, a bank: ({name: sketch}, {name:
    the generator's state that has set it, as long as nothing else has})."""
    found, drawn = {}, {}
    for module in outer_modules():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            is_known = id(tensor) in trained or re.search(averages, name)
            if is_known or not tensor.is_floating_point() or tensor.is_meta:
                continue
            full = f"{type(module).__name__}.{name}"
            found.setdefault(full, []).append(sketch(on_cpu(tensor), any_order=True))
            state, total = getattr(tensor, "check_drawn", (None, None))
            if total is not None and total == sum_of(tensor):
                drawn[full] = state
    for name, sketches in list(found.items()):  # several modules of one class have no order
        del found[name]
        for number, each in enumerate(sorted(sketches, key=lambda s: (s.shape, s.norm))):
            found[name + "'" * number] = each
    return found, drawn

"""What an optimizer trains, and how its tensors differ from one process's."""

import gc

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..notes import Difference
from .trace import MANY_COLUMNS, SIGNS


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
    """If one process has a value of this shape."""
    if value is None or value.shape != tensor.shape:
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
        self.names, self.owners = {}, []
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in outer_modules():
            found = {id(p): name for name, p in module.named_parameters()}
            if wanted & found.keys():
                self.owners.append(module)
                for key, name in found.items():
                    self.names.setdefault(key, f"{type(module).__name__}.{name}")
        self.owners.sort(key=lambda m: (type(m).__name__, len(list(m.parameters()))))

    def parameters(self, optimizer):
        found, number = {}, 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names.get(id(p), f"parameter {number} (of no module)")
                while name in found:
                    name += "'"
                found[name], number = p, number + 1
        return found

    def buffers(self):
        return {
            f"{type(m).__name__}.{name}": b
            for m in self.owners
            for name, b in m.named_buffers()
            if b.is_floating_point()
        }

    def modes(self):
        """The names of modules in evaluation mode."""
        names = [
            f"{type(owner).__name__}.{name}"
            for owner in self.owners
            for name, module in owner.named_modules()
            if not module.training
        ]
        return names[:100]


def settings_of(optimizer):
    return [
        (key, float(value))
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, (int, float)) or torch.is_tensor(value) and value.numel() == 1
    ]


def moments(optimizer, parameters):
    """{name of the parameter: {name: tensor}}"""
    return {
        name: {k: v for k, v in optimizer.state.get(p, {}).items() if torch.is_tensor(v)}
        for name, p in parameters.items()
    }


def differ(one, other):
    if one is None or other is None or one.shape != other.shape:
        sizes = [0.0 if t is None else float(t.double().norm()) for t in (one, other)]
        return Difference(max(sizes) * (sizes[0] != sizes[1]), *sizes, 0.0, sizes[1])
    one, other = one.double().reshape(-1), other.double().reshape(-1)
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        same = torch.equal(torch.isfinite(one), torch.isfinite(other))
        return Difference(float(not same), 1.0, 1.0, 0.0, 0.0)
    dot, size = float(one @ other), float(one.norm())
    mark = float(other[:MANY_COLUMNS] @ torch.from_numpy(SIGNS[: len(one)]))
    ratio = dot / max(size**2, 1e-300)
    return Difference(float((one - other).norm()), size, float(other.norm()), ratio, mark)


def differ_in_any_order(one, other):
    """A queue of features, as in MoCo, has the ranks' rows one rank after the other."""
    found = differ(one, other)
    if not found[0] or one.shape != other.shape:
        return found
    return min(found, differ(one.reshape(-1).sort().values, other.reshape(-1).sort().values))

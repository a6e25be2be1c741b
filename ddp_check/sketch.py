"""What is noted of a tensor: whether another process has the same, or a part of it."""

import contextlib
import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

MANY_COLUMNS, FEW_COLUMNS = 4096, 512  # of the first dimension, and of others
SUMS = 256
OBJECTS = 2  # one in the other, that are opened
MANY_THINGS = 1000  # that an object holds and that are not looked at
# Inside of vmap, on "meta", before a lazy module's first pass: there a tensor has none.
NO_VALUES = contextlib.suppress(RuntimeError, ValueError)


class Sketch(NamedTuple):
    """`sums` are linear in the tensor: those of a mean over ranks are the mean of the ranks' sums,
    and the norm of a difference is about that of the difference of sums."""

    shape: tuple
    norm: float
    sums: np.ndarray
    rows: tuple = ()  # of the first three dimensions: of each entry a mark, its sum, its norm
    in_order: np.ndarray | None = None  # sums of the sorted tensor
    eps: float = 0.0  # of half precision

    @property
    def number(self):
        """The value, if it is a single one."""
        return None if self.shape else float(self.rows[0][1][0])


def is_plain(tensor):
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


def leaves_of(tree):
    """All that is in lists, tuples and dictionaries."""
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in leaves_of(part)]
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves_of(part)]
    return [tree]


def indices_in(tree):
    """Of the values that are among the arguments of a function."""
    tensors = filter(torch.is_tensor, leaves_of(tree))
    return [tensor.compare_index for tensor in tensors if hasattr(tensor, "compare_index")]


def opened(tree, depth=OBJECTS):
    """With the attributes of an object instead of it, as of a class for batches."""
    if isinstance(tree, (dict, list, tuple)) and depth < OBJECTS and len(tree) > MANY_THINGS:
        return None  # of a dataset
    if isinstance(tree, dict):
        return {key: opened(part, depth) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [opened(part, depth) for part in tree]
    inside = getattr(tree, "__dict__", None)
    if depth and isinstance(inside, dict) and not isinstance(tree, (torch.Tensor, nn.Module, type)):
        return opened(inside, depth - 1)
    return tree


def as_tensors(tree):
    """With a copy of each of numpy's arrays of numbers, as some models take them."""
    if isinstance(tree, dict):
        return {key: as_tensors(part) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_tensors(part) for part in tree]
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
        return torch.tensor(tree)
    return tree


def by_sample(tree, rows):
    """A list with a tree of tensors for each of a batch's samples becomes one tensor: of each the
    sum, and the norm."""
    if isinstance(tree, dict):
        return {key: by_sample(part, rows) for key, part in tree.items()}
    if not isinstance(tree, (list, tuple)):
        return tree
    leaves = [[leaf for leaf in leaves_of(part) if torch.is_tensor(leaf)] for part in tree]
    is_batch = all(len(of) == 1 and of[0].dim() and len(of[0]) == rows for of in leaves)
    if len(tree) != rows or is_batch or not all(map(all_plain, leaves)):
        return [by_sample(part, rows) for part in tree]
    flat = [torch.cat([leaf.detach().reshape(-1).double().cpu() for leaf in of]) for of in leaves]
    return torch.stack([torch.stack([each.sum(), each.norm()]) for each in flat])


def all_plain(tensors):
    return bool(tensors) and all(is_plain(t) and t.layout == torch.strided for t in tensors)


@functools.cache
def random_signs(device):
    """The same in each process."""
    signs = np.random.RandomState(0).choice([-1.0, 1.0], 1 << 16)
    return torch.from_numpy(signs).float().to(device)


@functools.cache
def column_signs(device):
    return torch.cos(torch.arange(MANY_COLUMNS, dtype=torch.float64) * 1.618 + 0.5).to(device)


def whole(tensor):
    """All of a tensor, also of one that is sharded or sparse."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor


def as_real(tensor):
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def folded(flat):
    """Where the tensor is, in float64: the square of its norm, how many entries are not finite, and
    its entries with random signs, added up to SUMS numbers."""
    if not len(flat):
        return flat.new_zeros(SUMS + 2, dtype=torch.float64)
    signs, blocks, facts = random_signs(flat.device), 0, []
    for part in flat.split(16 * len(signs)):
        part = part if part.dtype == torch.float64 else part.float()
        norm, bad = torch.linalg.vector_norm(part, dtype=torch.float64), 0
        if part.is_cuda or not norm.isfinite():  # on a GPU, to ask would be to wait
            finite = torch.isfinite(part)
            part, bad = torch.where(finite, part, 0), len(part) - finite.sum()
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)
        size = len(signs) if len(part) > len(signs) else SUMS * math.ceil(len(part) / SUMS)
        part = nn.functional.pad(part, (0, -len(part) % size)).view(-1, size) * signs[:size]
        sums = part.view(len(part), -1, SUMS).sum(1, dtype=torch.float64)
        if len(flat) > len(signs):  # each block of them is shifted by one more
            shift = blocks + torch.arange(len(sums), device=flat.device)[:, None]
            sums = sums.gather(1, (torch.arange(SUMS, device=flat.device) - shift) % SUMS)
        blocks += len(sums)
        facts.append(torch.cat([norm.square()[None], norm.new_tensor([bad]), sums.sum(0)]))
    return torch.stack(facts).sum(0)


def half_eps(tensor):
    """The rounding of half precision; 0 of what has more."""
    return torch.finfo(tensor.dtype).eps if tensor.dtype in (torch.half, torch.bfloat16) else 0.0


def copied(tensors):
    """As arrays, by one copy from each device."""
    found, of_devices = {}, {}
    for name, tensor in tensors.items():
        of_devices.setdefault(tensor.device, []).append(name)
    for names in of_devices.values():
        flat = torch.cat([tensors[name].reshape(-1) for name in names]).cpu().numpy()
        ends = np.cumsum([tensors[name].numel() for name in names])
        found |= dict(zip(names, np.split(flat, ends[:-1])))
    return found


def sketches(tensors, any_order=False):
    """{name: Sketch} of parameters, gradients or buffers. Entries that are not finite are
    counted."""
    tensors = {name: whole(tensor) for name, tensor in tensors.items()}
    sums = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            flat = as_real(tensor).reshape(-1)
            sums[name] = folded(flat)
            if any_order:
                sorted_flat = torch.nan_to_num(flat, 0.0, 0.0, 0.0).sort().values
                sums[name] = torch.cat([sums[name], folded(sorted_flat)[2:]])
    found, sums = dict.fromkeys(tensors), copied(sums)
    for name, (square, bad, *_) in sums.items():
        norm, tensor, of_name = float(np.sqrt(square)), tensors[name], sums[name][2:]
        of_all = np.append(of_name[:SUMS], bad * max(norm, 1.0))
        in_order = of_name[SUMS:] if any_order else None
        found[name] = Sketch(tuple(tensor.shape), norm, of_all, (), in_order, half_eps(tensor))
    return found


def sketch(tensor):
    return sketches({"": tensor})[""]


def moved(before, after):
    """The sketch of a difference, as sketches are linear; its norm is about that of its sums."""
    sums = after.sums - before.sums
    return Sketch(after.shape, float(np.linalg.norm(sums)), sums, eps=after.eps)


def divided(of, number):
    """The sketch of a tensor, or gradient, that is divided by it."""
    return Sketch(of.shape, of.norm / number, of.sums / number, eps=of.eps)


def summary(tensor):
    """Of a value that a line has computed; None of what has no numbers of its own."""
    if isinstance(tensor, nn.Parameter) or not all_plain([tensor]) or not tensor.numel():
        return None
    shape, tensor, eps = tuple(tensor.shape), torch.atleast_1d(tensor.detach()), half_eps(tensor)
    tensor = as_real(tensor)
    signs, parts, dims = column_signs(tensor.device), {}, range(min(3, tensor.dim()))
    for d in dims:
        if tensor.shape[d] > MANY_COLUMNS and d:
            continue
        rows = tensor.movedim(d, 0).reshape(tensor.shape[d], -1)
        columns = FEW_COLUMNS if d and rows.shape[1] > MANY_COLUMNS else MANY_COLUMNS
        rows = rows[:, :: rows.shape[1] // columns + 1].double()
        finite = torch.nan_to_num(rows, 0.0, 0.0, 0.0)
        sums = (finite if shape else rows).sum(1)
        marks, norms = finite @ signs[: rows.shape[1]], torch.linalg.vector_norm(finite, dim=1)
        parts[d] = torch.stack([marks, sums, norms])
    parts = copied(parts)
    rows = [tuple(parts[d].reshape(3, -1)) if d in parts else None for d in dims]
    marks, _, norms = rows[0]
    return Sketch(shape, float(np.linalg.norm(norms)), marks, tuple(rows), None, eps)

"""What is noted of a tensor: whether another process has the same, or a part of it."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

MANY_COLUMNS, FEW_COLUMNS = 4096, 512  # of the first dimension, and of others
SIGNS = np.cos(np.arange(MANY_COLUMNS) * 1.618 + 0.5)
SUMS = 256


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
def random_signs():
    """The same in each process."""
    return torch.from_numpy(np.random.RandomState(0).choice([-1.0, 1.0], 1 << 16)).float()


def whole(tensor):
    """All of a tensor, also of one that is sharded or sparse."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor


def folded(flat):
    """Its entries with random signs, added up to SUMS numbers, in float64."""
    sums, signs, number = np.zeros(SUMS), random_signs().to(flat.device), 0
    for part in flat.split(16 * len(signs)):
        part = nn.functional.pad(part, (0, -len(part) % len(signs))).view(-1, len(signs)) * signs
        for block in part.view(len(part), -1, SUMS).sum(1, dtype=torch.float64).cpu().numpy():
            sums += np.roll(block, number)
            number += 1
    return sums


def half_eps(tensor):
    """The rounding of half precision; 0 of what has more."""
    return torch.finfo(tensor.dtype).eps if tensor.dtype in (torch.half, torch.bfloat16) else 0.0


def sketch(tensor, any_order=False):
    """Of a parameter, a gradient or a buffer. Entries that are not finite are counted."""
    if tensor is None:
        return None
    tensor = whole(tensor)
    flat = tensor.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    finite, bad = torch.isfinite(flat), 0
    if not finite.all():
        flat, bad = torch.where(finite, flat, 0), int((~finite).sum())
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    sums = np.append(folded(flat), bad * max(norm, 1.0))
    in_order = folded(flat.sort().values) if any_order else None
    return Sketch(tuple(tensor.shape), norm, sums, (), in_order, half_eps(tensor))


def moved(before, after):
    """The sketch of a difference, as sketches are linear; its norm is about that of its sums."""
    sums = after.sums - before.sums
    return Sketch(after.shape, float(np.linalg.norm(sums)), sums, eps=after.eps)


def summary(tensor):
    """Of a value that a line has computed; None of what has no numbers of its own."""
    if not torch.is_tensor(tensor) or isinstance(tensor, nn.Parameter):
        return None
    if tensor.layout != torch.strided or not is_plain(tensor) or not tensor.numel():
        return None
    shape, tensor, eps = tuple(tensor.shape), torch.atleast_1d(tensor.detach()), half_eps(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dims = []
    for d in range(min(3, tensor.dim())):
        if tensor.shape[d] > MANY_COLUMNS and d:
            dims.append(None)
            continue
        rows = tensor.movedim(d, 0).reshape(tensor.shape[d], -1)
        columns = FEW_COLUMNS if d and rows.shape[1] > MANY_COLUMNS else MANY_COLUMNS
        rows = rows[:, :: rows.shape[1] // columns + 1].cpu().double().numpy()
        finite = np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
        sums = (finite if shape else rows).sum(1)
        dims.append((finite @ SIGNS[: rows.shape[1]], sums, np.linalg.norm(finite, axis=1)))
    return Sketch(shape, float(np.linalg.norm(dims[0][2])), dims[0][0], tuple(dims), None, eps)

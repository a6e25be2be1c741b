"""What is noted of a tensor: whether another process has the same, or a part of it."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..process import is_plain

MANY_COLUMNS = 4096
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

    @property
    def number(self):
        """The value, if it is a single one."""
        return None if self.shape else float(self.rows[0][1][0])


@functools.cache
def random_signs():
    """The same in each process."""
    return torch.from_numpy(np.random.RandomState(0).choice([-1.0, 1.0], 1 << 16)).float()


def folded(tensor):
    """Its entries with random signs, added up to SUMS numbers, in float64."""
    flat, sums, signs = tensor.reshape(-1).float(), np.zeros(SUMS), random_signs()
    for number, part in enumerate(flat.split(len(signs))):
        part = part * signs[: len(part)]
        part = nn.functional.pad(part, (0, -len(part) % SUMS)).view(-1, SUMS)
        sums += np.roll(part.sum(0, dtype=torch.float64).cpu().numpy(), number)
    return sums


def sketch(tensor, any_order=False):
    """Of a parameter, a gradient or a buffer. Entries that are not finite are counted."""
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    finite = torch.nan_to_num(tensor.float(), nan=0.0, posinf=0.0, neginf=0.0)
    norm, bad = float(finite.double().norm()), int((~torch.isfinite(tensor)).sum())
    sums = np.append(folded(finite), bad * max(norm, 1.0))
    in_order = folded(finite.reshape(-1).sort().values) if any_order else None
    return Sketch(tuple(tensor.shape), norm, sums, (), in_order)


def summary(tensor):
    """Of a value that a line has computed; None of what has no numbers of its own."""
    if not torch.is_tensor(tensor) or isinstance(tensor, nn.Parameter):
        return None
    if tensor.layout != torch.strided or not is_plain(tensor) or not tensor.numel():
        return None
    shape, tensor = tuple(tensor.shape), torch.atleast_1d(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dims = []
    for d in range(min(3, tensor.dim())):
        if tensor.shape[d] > MANY_COLUMNS and d:
            dims.append(None)
            continue
        rows = tensor.movedim(d, 0).reshape(tensor.shape[d], -1)
        rows = rows[:, :: rows.shape[1] // MANY_COLUMNS + 1].cpu().double().numpy()
        finite = np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
        sums = (finite if shape else rows).sum(1)
        dims.append((finite @ SIGNS[: rows.shape[1]], sums, np.linalg.norm(finite, axis=1)))
    return Sketch(shape, float(np.linalg.norm(dims[0][2])), dims[0][0], tuple(dims))

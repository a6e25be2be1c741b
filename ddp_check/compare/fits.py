"""How a value of one process is made up of those of the ranks."""

import math

import numpy as np

CONTINUED = "\n" + 9 * " "


def relative(one, other):
    if not (math.isfinite(one) and math.isfinite(other)):
        return float(math.isfinite(one) != math.isfinite(other))
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def number_in(part):
    """The number that a summary is of, if it is of a single one."""
    return None if part is None or part[0] else float(part[1][0][1][0])


def sides(one, *others):
    ranks = ", ".join(f"{number:.6g}" for number in others)
    return f"{one:.7g} on one process, {ranks} on the ranks"


def meaning(ratio, world):
    """What it usually is, if something is so many times as large as on one process."""
    for factor, text in {
        1 / world: "a factor world_size too much in a division? DDP divides already",
        world: "a factor world_size too much: a sum over ranks where a mean is wanted?",
    }.items():
        if abs(ratio - factor) < 0.01 * factor:
            return f"; {ratio:.4g} times one process's: {text}"
    return f"; {ratio:.4g} times one process's" if abs(ratio - 1) > 0.01 else ""


def fit(one, others, tolerance):
    """How a tensor of run one is made up of those of the ranks: "same", their "mean", "sum", or
    "rows"; None if it is none of these, "unknown" if it cannot be told."""
    if one is None or None in others or any(len(o[0]) != len(one[0]) for o in others):
        return "unknown"
    shape, (rows, *_) = one
    sizes = [np.max(o[1][0][2], initial=1e-9) for o in (one, *others)]  # a mean may be near zero
    limit = tolerance * float(max(sizes))

    def close(a, b):
        return len(a) == len(b) and bool(np.all(np.abs(a - b) <= limit))

    if all(o[0] == shape for o in others):
        mine, theirs = rows[0], [o[1][0][0] for o in others]
        if all(close(mine, other) for other in theirs):
            return "same"
        for factor in (1, len(theirs), 1 / len(theirs)):
            if close(mine, factor * sum(theirs) / len(theirs)):
                return "mean" if factor == 1 else "sum"
        if not shape:  # a largest or smallest of the batch
            return "rows" if mine in (max(theirs), min(theirs)) else None
        return "rows" if all(same_rows(rows, [o[1][0]], limit) for o in others) else None
    different = {d for o in others for d in range(len(shape)) if o[0][d] != shape[d]}
    if len(different) > 1:  # padded to the longest sample of the rank's batch, or a [B, B] matrix
        padded = all(max(o[0][d] for o in others) == shape[d] for d in different - {0})
        return "unknown" if padded else None
    d = min(different)
    if d > 2 or one[1][d] is None or any(o[1][d] is None for o in others):
        return "unknown"
    return "rows" if same_rows(one[1][d], [o[1][d] for o in others], limit) else None


def same_rows(one, others, limit):
    """Whether the ranks' rows are those of one process, in any order: also of columns, and each
    times the number of ranks, or divided by it."""
    sums, norms = [np.concatenate([o[i] for o in others]) for i in (1, 2)]
    if len(sums) != len(one[1]):
        return False
    ranks = max(len(others), 1)
    for factor in {1, ranks, 1 / ranks}:
        size, both = 2 * max(factor, 1) * limit, [(one[1], sums), (one[2], norms)]
        if all(np.all(np.abs(np.sort(a) - np.sort(b * factor)) <= size) for a, b in both):
            return True
    return False

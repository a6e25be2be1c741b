"""How a value of one process is made up of those of the ranks, and how far it is from that."""

import math

import numpy as np


def relative(one, other):
    if not (math.isfinite(one) and math.isfinite(other)):
        return float(math.isfinite(one) != math.isfinite(other))
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def size(value):
    """The norm of a tensor; of all else, 1."""
    return 0.0 if value is None else getattr(value, "norm", 1.0)


def distance(one, other):
    """The norm of a difference; of numbers, as a part of the larger; of what is no number, 1 if it
    is not the same."""
    if one is None or other is None:
        return max(size(one), size(other))
    if hasattr(one, "sums"):
        if one.shape == other.shape:
            return float(np.linalg.norm(one.sums - other.sums))
        return max(one.norm, other.norm)
    return relative(one, other) if isinstance(one, float) else float(one != other)


def same(one, ranks):
    return max(distance(one, other) for other in ranks)


def sorted_same(one, ranks):
    """In any order, as a queue of features has the ranks' rows one rank after the other."""
    if any(other.shape != one.shape for other in ranks):
        return same(one, ranks)
    return max(float(np.linalg.norm(one.in_order - other.in_order)) for other in ranks)


def alike(one, ranks):
    """Whatever one process has: the ranks have the same."""
    return same(ranks[0], ranks)


def unlike(one, ranks):
    """1 if all ranks have the same."""
    return float(same(ranks[0], ranks) == 0)


def combined(one, ranks, factor):
    if any(other.shape != one.shape for other in ranks):
        return math.inf
    return float(np.linalg.norm(one.sums - factor * sum(other.sums for other in ranks)))


def mean(one, ranks):
    return combined(one, ranks, 1 / len(ranks))


def sum_of(one, ranks):
    return min(combined(one, ranks, 1.0), combined(one, ranks, 1 / len(ranks) ** 2))


def rows(one, ranks):
    """The ranks' rows are those of one process, in any order: also of columns, and each times the
    number of ranks, or divided by it; of a single number, it is the largest or smallest."""
    if all(other.shape == one.shape for other in ranks):
        if not one.shape:
            numbers = [other.number for other in ranks]
            return min(abs(one.number - max(numbers)), abs(one.number - min(numbers)))
        return max(off_of_rows(one, [other], 0) for other in ranks)
    dims = [d for d in range(len(one.shape)) if any(o.shape[d] != one.shape[d] for o in ranks)]
    for d in dims if len(dims) > 1 else ():  # blocks of a diagonal, as of a batch of graphs
        if sum(other.shape[d] for other in ranks) != one.shape[d]:
            return math.inf
    return off_of_rows(one, ranks, dims[0])


def off_of_rows(one, ranks, dim):
    _, sums, norms = one.rows[dim]
    theirs = [np.concatenate([other.rows[dim][i] for other in ranks]) for i in (1, 2)]
    if len(sums) != len(theirs[0]):
        return math.inf
    scale, off = one.norm / max(float(np.max(norms)), 1e-30), math.inf
    for factor in {1, len(ranks), 1 / len(ranks)}:
        pairs = zip((sums, norms), theirs)
        worst = max(np.max(np.abs(np.sort(a) - np.sort(b * factor)), initial=0) for a, b in pairs)
        off = min(off, scale * float(worst) / (2 * max(factor, 1)))
    return off


FITS = {
    "same": same,
    "mean": mean,
    "sum": sum_of,
    "rows": rows,
    "sorted": sorted_same,
    "alike": alike,
    "unlike": unlike,
}


def is_unknown(one, ranks):
    """Whether it cannot be told: of what nothing is known; or padded to the longest sample of the
    rank's batch, or a matrix of all pairs of a batch."""
    if one is None or None in ranks or any(len(o.shape) != len(one.shape) for o in ranks):
        return True
    dims = {d for o in ranks for d in range(len(one.shape)) if o.shape[d] != one.shape[d]}
    if len(dims) > 1:  # of one of them, each rank has a part
        padded = {d for d in dims if max(o.shape[d] for o in ranks) == one.shape[d]}
        return len(dims - padded) <= 1
    sizes = [[o.shape[d] for o in ranks] for d in dims]
    if any(sum(of) < len(ranks) * max(of) == one.shape[d] for d, of in zip(dims, sizes)):
        return True  # and then flattened
    return any(d > 2 or any(o.rows[d] is None for o in [one, *ranks]) for d in dims)


def fit(ways, one, ranks, limit):
    """The first of these ways in which a value fits; None if in none, "unknown" if that cannot be
    told."""
    if is_unknown(one, ranks):
        return "unknown"
    scale = max([one.norm, *[other.norm for other in ranks], 1e-9])  # a mean may be near zero
    return next((way for way in ways.split() if FITS[way](one, ranks) <= limit * scale), None)


def sides(one, *others):
    ranks = ", ".join(f"{number:.6g}" for number in others)
    return f"{one:.7g} on one process, {ranks} on the ranks"


def meaning(ratio, world):
    """What it usually is, if something is so many times as large as on one process."""
    for factor, text in {
        1 / world: "a factor world_size too much in a division, as DDP divides already? Or an "
        "all_reduce or all_gather that is not differentiated?",
        world: "a factor world_size too much: a sum over ranks where a mean is wanted?",
    }.items():
        if abs(ratio - factor) < 0.05 * factor:
            return f"; {ratio:.4g} times one process's: {text}"
    return f"; {ratio:.4g} times one process's" if abs(ratio - 1) > 0.01 else ""

"""What is compared, and how: one row for each kind of Seen.

Of each kind, what one process has fits what the ranks have in one of several ways: it is the same,
their mean or sum, their rows. How far it is from that, as a part of its own size, is held against a
limit: --tolerance, or five times what noise of 1e-5 in the layers' outputs makes of it on one
process, if that is more."""

from typing import NamedTuple

from . import fits

TENSORS = "weight", "gradient", "update", "buffer"  # in the order of causes
VALUES = "value", "inputs", "outputs", "loss"

PAGE = "docs/your_loop.md"


class Kind(NamedTuple):
    fits: str  # names of fits.FITS
    times: float  # the limit is so many times --tolerance
    beside: float  # what is smaller than this part of all of its kind in the step is nothing
    section: str = ""
    remedy: str = ""


SCORES = "add up numerators and denominators by all_reduce, then divide"
DECIDE = {"remedy": "decide by numbers of all ranks", "section": "#decisions"}
WHOLE = "gather, or all_reduce, what it depends on"
MEAN = "average over the rank's share; or divide the sum by all ranks' number, times world_size"
KINDS = {
    "value": Kind("same mean sum rows", 0.1, 0, "#what-depends-on-the-whole-batch", WHOLE),
    "inputs": Kind("same mean sum rows", 0.1, 0, "#loader", WHOLE),
    "outputs": Kind("same mean sum rows", 0.1, 0, "#what-depends-on-the-whole-batch"),
    "loss": Kind("same mean", 0.1, 0, "#loss", MEAN),
    "gradient": Kind("same", 1, 1e-2, "#loss"),
    "weight": Kind("same", 1, 1e-2, "#model", "build and load the same on all ranks"),
    "update": Kind("same", 1, 1e-2, "#optimizer", "the same settings on all ranks"),
    "buffer": Kind("same sorted", 3, 1e-5, "#buffers", WHOLE),
    "setting": Kind("same", 0, 0, "#optimizer", "count what all ranks have done"),
    "mode": Kind("same", 0, 0),
    "other": Kind("same sorted", 3, 0),
    "attribute": Kind("same mean sum sorted", 3, 0),
    "evaluation": Kind("alike", 3, 0),
    "logged": Kind("alike", 3, 0),
    "plateau": Kind("alike", 3, 0),
    "split": Kind("alike", 0, 0),
    "closure": Kind("alike", 0, 0),
    "own": Kind("alike", 0, 0),
    "draw": Kind("unlike", 0, 0),
}
LEAST = 1e-6  # of a limit: rounding
HIDES = 1e-2  # noise beyond which nothing is told
TIMES_NOISE = 5
TIMES_EPS = 1.5  # of half precision


class Misfit(NamedTuple):
    part: object  # the name of what differs
    off: float  # as a part of its size
    limit: float


def limit_of(kind, tolerance, noise=0.0, value=None):
    eps = getattr(value, "eps", 0.0)
    return max(LEAST, KINDS[kind].times * tolerance, TIMES_NOISE * noise, TIMES_EPS * eps)


def by_key(notes, kind):
    """{key: (step, Seen)}. Of an optimizer's kinds, the name and number are enough."""
    of_optimizer = kind in TENSORS or kind in ("setting", "mode")
    return {
        (seen.name, seen.number, *(() if of_optimizer else (step, seen.line))): (step, seen)
        for step, seen in notes.seen(kind)
    }


def paired(kind, one, ranks):
    """(step, Seen of one process, {rank: its Seen}), in the order of the script."""
    theirs = [by_key(notes, kind) for notes in ranks]
    for key, (step, seen) in by_key(one, kind).items():
        others = {rank: of[key][1] for rank, of in enumerate(theirs) if key in of}
        for other in others.values() if kind in TENSORS else []:
            if len(other.values) == len(seen.values):  # a copy of the model has another name
                if other.values.keys() != seen.values.keys():
                    other.values = dict(zip(seen.values, other.values.values()))
        yield step, seen, others


def noise_of(kinds, notes, again):
    """{(kind, line, name): {part: the largest part by which another run on one process has other
    values of the same shape}}"""
    noise = {}
    for kind in kinds if again else ():
        for _, seen, others in paired(kind, notes, [again]):
            parts = noise.setdefault((kind, seen.line, seen.name), {})
            for other in others.values():
                for part, off in offs(kind, seen.values, [other.values], "same").items():
                    one, two = seen.values[part], other.values[part]
                    is_measure = kind in TENSORS or fits.size(one)  # not of a value that is 0
                    if is_measure and getattr(one, "shape", 0) == getattr(two, "shape", 0):
                        parts[part] = max(parts.get(part, 0.0), off)
    return noise


def offs(kind, one, ranks, ways=None):
    """{part: how far it is from what fits, as a part of its size}, of those of which that can be
    told"""
    row, found = KINDS[kind], {}
    parts = [part for part in one if ranks and all(part in of for of in ranks)]
    sizes = {part: fits.size(one[part]) for part in parts}
    least = row.beside * sum(size**2 for size in sizes.values()) ** 0.5
    for part in parts:
        theirs = [of[part] for of in ranks]
        if kind in VALUES and fits.is_unknown(one[part], theirs):
            continue
        off = min(fits.FITS[way](one[part], theirs) for way in (ways or row.fits).split())
        largest = max(map(fits.size, theirs))
        found[part] = off / max(sizes[part], least, 1e-3 * largest, 1e-30)
    return found


def misfits(kind, one, ranks, tolerance, noise=None):
    """What is further off than its limit, the worst first."""
    found = []
    for part, off in offs(kind, one, ranks).items():
        limit = limit_of(kind, tolerance, (noise or {}).get(part, 0.0), one[part])
        if off > limit:
            found.append(Misfit(part, off, limit))
    return sorted(found, key=lambda each: -each.off / each.limit)

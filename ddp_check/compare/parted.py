"""What the ranks have parts of, and what they average, otherwise than DDP does."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from ..notes import Collective, Finding, Said, Step
from ..sketch import Sketch
from .fits import same, size
from .kinds import paired

NEAR = 5  # lines, between a collective call and what its result is written to


def without_shards(step, seen, others):
    """What each rank has whole, on one process and on the ranks; and a finding, in a list, if there
    is a part: of that, as by a sharded optimizer or layer of the script's own, there is nothing of
    this shape on one process."""
    ranks = [other.values for other in others.values()]
    shards = {name for name, whole in seen.values.items() if are_shards(whole, ranks, name)}
    if not shards:
        return seen, others, []
    name = min(shards, key=str)
    whole, *parts = [str(of[name].shape) for of in (seen.values, *ranks)]
    text = f"each rank has a part of {name}, {', '.join(parts)} of {whole}: not compared, "
    text += f"nor its gradient ({len(shards)} of {len(seen.values)})"

    def rest(note):
        kept = {name: value for name, value in note.values.items() if name not in shards}
        return replace(note, values=kept)

    others = {rank: rest(other) for rank, other in others.items()}
    return rest(seen), others, [Finding("look", "weight", step, text, seen.line)]


def are_shards(whole, ranks, name):
    """Whether the ranks' tensors of this name are as large as one process's, with a little padding,
    only together."""
    parts = [of_rank.get(name) for of_rank in ranks]
    if len(parts) < 2 or not all((whole, *parts)):
        return False
    total, *numbers = [math.prod(sketch.shape) for sketch in (whole, *parts)]
    return max(numbers) < total <= sum(numbers) < 1.1 * total + len(ranks)


def share_parameters(all_names, of_ranks):
    """Whether each rank's optimizer has a part of one process's parameters, as in ZeRO."""
    return all_names == set().union(*of_ranks) and all(names < all_names for names in of_ranks)


def shapes_of(weights, but):
    return Counter(str(value.shape) for name, value in weights.items() if name not in but)


def parted_weights(one, ranks):
    """Where one process's weights are on several ranks, each of which has others under the same
    names, as of experts. None if that is not so."""
    step, mine, *theirs = next(
        (
            (step, seen.values, *[other.values for other in others.values()])
            for step, seen, others in paired("weight", one, ranks)
            if len(others) == len(ranks)
        ),
        (0, {}),
    )
    missing = [name for name in mine if any(name not in of_rank for of_rank in theirs)]
    everywhere = [value for of_rank in theirs for value in of_rank.values()]
    if not missing or any(all(name in of for name in mine) for of in theirs):
        return None
    averaged = ranks[0][Step][0][1].averaged
    whole, *parts = [shapes_of(weights, averaged) for weights in (mine, *theirs)]
    if not (averaged and all(parts) and whole == sum(parts, Counter())):  # else each is on one rank
        for name in missing:
            if not any(same(mine[name], [value]) <= 1e-6 * size(value) for value in everywhere):
                return None
        both = [(mine[name], of[name]) for of in theirs for name in of if name in mine]
        if all(same(one, [other]) <= 1e-6 * size(other) for one, other in both):
            return None  # each has a part, of the same names
    text = f"each rank has a part of the weights, such as {missing[0]}, under its own names: "
    about = {"advice": "unpaired", "section": "#model"}
    return Finding("look", "weight", step, f"{text}nothing can be compared", **about)


def averages_weights(notes, set_at):
    """The line that averages the weights between steps, as in local SGD; or "". One that sets a
    single one of several, as it clamps a temperature, does not."""
    said = [note.text for _, note in notes[Said] if note.kind == "local"]
    reduces = [call.line for _, call in notes[Collective] if call.name == "all_reduce"]
    first, averaged = next(iter(set_at.values()), {}), {}
    for lines in set_at.values():
        for name, line in lines.items():
            if line and first.get(name) != line and any(is_near(line, at) for at in reduces):
                averaged[name] = line
    names = {name for lines in set_at.values() for name in lines.keys() - lines.values()}
    said += averaged.values() if len(averaged) > 1 or len(names) == 1 else []
    return (*said, "")[0]


def is_near(line, other):
    """Within a few lines of a file."""
    (file, _, number), (of_other, _, at) = line.rpartition(":"), other.rpartition(":")
    return file == of_other and number.isdigit() and abs(int(number) - int(at)) <= NEAR


def averaged(others):
    """The mean of the ranks' gradients, as one Seen."""
    first, *rest = others.values()
    values = {}
    for name, sketch in first.values.items():
        parts = [sketch, *[other.values.get(name) for other in rest]]
        if None not in parts:
            sums = sum(part.sums for part in parts) / len(parts)
            sketch = Sketch(sketch.shape, float(np.linalg.norm(sums)), sums, eps=sketch.eps)
        values[name] = sketch
    return replace(first, values=values)

"""Whether two runs can be compared as they were started; or how they are to be started again."""

import re
from dataclasses import replace

import numpy as np

from ..notes import Batch, Cut, Drawn, End, Pass, Said
from ..patterns import shares_in
from .ends import NO_CONNECTION, USUAL_ENDS
from .kinds import paired
from .numbers import files_of
from .shares import (
    lines_by_turns,
    loaders_per_process,
    rows_of_inputs,
    takes_blocks,
    training_passes,
)


def has_failed(notes):
    """By an error of its own, not as another rank had ended."""
    end = notes.end() if notes[End] else ""
    return bool(end) and end not in USUAL_ENDS and not re.search(NO_CONNECTION, end)


def other_options(options, one, ranks):
    """The options of the next start, and why; None if it needs none. The notes may be of the ranks'
    first steps only."""
    cut = [note.loader for _, note in ranks[0][Cut]]
    if cut and any(map(has_failed, ranks)) and not has_failed(one):
        return replace(options, cuts=False), "the script fails with a part of its batch"
    rows, of_ranks = rows_of_inputs(one, ranks)
    if cut and options.cuts and 0 < rows == len(ranks) * of_ranks:
        return replace(options, cuts=False), "the script takes each rank's share of a batch itself"
    if options.prepared and has_too_many(one, ranks):
        why = "the script has divided its batch size itself"
        return replace(options, prepared=False), why
    if options.scales and not options.scaled and (loaders := loaders_per_process(one, ranks)):
        why = "the batch size is one per process, so one process is given all ranks'"
        return replace(options, scaled=list(loaders)), why
    if not options.turns and (turns := lines_by_turns(one, ranks)):
        why = f"{turns[0][0]} draws as many times as often on one process: the ranks take turns"
        return replace(options, turns=turns), why
    orders = {note.text for _, note in ranks[0][Said] if note.kind == "order"}
    if takes_blocks(one, ranks):
        orders = {"blocks"}
    depends = bool(one[Drawn]) and one[Drawn][-1][1].by_layout
    if options.layout == "turns" and orders == {"blocks"} and depends:
        return replace(options, layout="blocks"), "each rank has a block of a batch"
    return None


def other_layout(options, one, ranks):
    """The options of another start where the script takes blocks of its data by itself, without a
    loader. The notes have the values of lines."""
    depends = any(notes[Drawn] and notes[Drawn][-1][1].by_layout for notes in (one, *ranks))
    is_known = any(note.kind == "order" for _, note in ranks[0][Said])  # of a loader's
    if options.layout == "blocks" or is_known or not depends:
        return None
    seen = [of for kind in ("value", "inputs") for of in paired(kind, one, ranks)]
    seen = [(value, others) for _, value, others in seen if len(others) == len(ranks)]
    chosen = [(value, others) for value, others in seen if value.name == "__getitem__"]
    inputs = [(value, others) for value, others in seen if value.kind == "inputs"]
    has_blocks = any(are_parts(*each, blocks, turns) for each in chosen + inputs)
    shares = {line for file in files_of(ranks[0]) for line in shares_in(file)}
    by_turns = [(value, others) for value, others in chosen if value.line in shares]
    if has_blocks and not any(are_parts(*each, turns, blocks) for each in by_turns):
        return replace(options, layout="blocks")
    return None


def blocks(marks, rank, world):
    size = len(marks) // world
    return marks[rank * size : (rank + 1) * size]


def turns(marks, rank, world):
    return marks[rank::world]


def are_parts(value, others, part, other):
    """Whether a tensor has such parts of one process's rows on the ranks, two or more on each, and
    not the other ones, too."""
    world = len(others)
    for place, sketch in value.values.items():
        ranks = [other.values.get(place) for other in others.values()]
        if None in (sketch, *ranks) or len(sketch.shape) < 2:
            continue
        whole, *theirs = [each.rows[0][0] for each in (sketch, *ranks)]
        is_even = len(whole) >= 2 * world and {len(of) * world for of in theirs} == {len(whole)}
        if is_even and has_parts(whole, theirs, part) and not has_parts(whole, theirs, other):
            return True
    return False


def has_parts(whole, ranks, part):
    both = [(part(whole, rank, len(ranks)), of) for rank, of in enumerate(ranks)]
    return all(np.allclose(a, b, rtol=1e-4) for a, b in both)


def has_too_many(one, ranks):
    """Whether one process got more samples than all ranks, where a framework's batch size was taken
    for one per process."""
    first = [{b.key: b.rows for _, b in reversed(notes[Batch])} for notes in (one, *ranks)]
    prepared, trains = {note.loader for _, note in one[Cut]}, training_passes(one)
    for _, note in one[Pass]:
        if note.loader in prepared and note.key in trains:
            rows, *others = [of.get(note.key) or 0 for of in first]
            return 0 < len(ranks) * sum(others) == rows
    return False


def scaled_loaders(options, one, ranks):
    """{loader: the line of its loop} of those with a batch size per process, where one process's
    samples and the ranks' were made the same."""
    cut = [note.loader for notes in (one, ranks[0]) for _, note in notes[Cut]]
    loaders, trains = {*options.scaled, *cut}, training_passes(one)
    still = loaders_per_process(one, ranks)  # one that could not be
    passes = [note for _, note in reversed(ranks[0][Pass])]
    passes = [p for p in passes if p.loader in loaders and p.key in trains]
    return {p.loader: p.key[0] for p in passes if p.loader not in still}

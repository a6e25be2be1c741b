"""How the ranks share what one process has: whose rows go into the models, which loaders give each
rank a batch of its own, which lines draw by turns."""

import numpy as np

from ..notes import Batch, Drawn, Pass, Step


def training_passes(one):
    """The keys of passes in which there are steps."""
    steps = {}
    for step, batch in one[Batch]:
        steps.setdefault(batch.key, set()).add(step)
    if len(one[Step]) == 1:  # no more were asked for: that of the last batch before it
        return {*[b.key for step, b in one[Batch] if b.trains and not step][-1:]}
    return {key for key in steps if len(steps[key]) > 1}


def rows_of_inputs(one, ranks):
    """How many rows go into the models for the second batch of a training loop: on one process, on
    all ranks together; 0 if no third is known. Where a rank has no loader, as it gets its part from
    another: in the second step."""
    totals, by_step = [], not all(notes[Batch] for notes in ranks)
    for notes in (one, *ranks):
        seen = notes.seen("inputs")
        if by_step:
            seen = [(step, s) for step, s in seen if step == 1]
        else:
            loops = [batch.key[:2] for _, batch in notes[Batch] if batch.trains]
            loop = max(loops, key=loops.count, default=None)  # not one that only looks at a batch
            starts = [batch.at for _, batch in notes[Batch] if batch.key[:2] == loop]
            if len(starts) < 3:
                return 0, 0
            seen = [(step, s) for step, s in seen if starts[1] < s.at < starts[2]]
        values = [s.values.get(0) for _, s in seen]
        totals.append(sum(value.shape[0] for value in values if value and value.shape))
    return totals[0], sum(totals[1:])


def takes_share(one, ranks):
    """Whether all ranks load one process's batch, of which the script then takes a share: other
    rows go into the models of other ranks."""
    first = [
        {b.key: b.indices for _, b in reversed(notes[Batch]) if b.trains} for notes in (one, *ranks)
    ]
    is_whole = any(ids and all(of.get(key) == ids for of in first) for key, ids in first[0].items())
    seen = [[s.values for step, s in n.seen("inputs") if step == 1] for n in ranks]
    sums = {repr([tuple(s.sums) for v in of for s in v.values() if s]) for of in seen}
    return is_whole and len(sums) > 1


def takes_blocks(one, ranks):
    """Whether the share that the script takes of it is a block: rank 0's is its first rows, and not
    each so many-th."""
    seen = [[s.values for step, s in n.seen("inputs") if step == 1] for n in (one, ranks[0])]
    if not all(seen) or not takes_share(one, ranks):
        return False
    first, own = [{p: s.rows[0][0] for p, s in of[0].items() if s} for of in seen]

    def fits(step):
        parts = [(first[p][::step][: len(rows)], rows) for p, rows in own.items() if p in first]
        return all(len(a) == len(b) and np.allclose(a, b, rtol=1e-4) for a, b in parts)

    return fits(1) and not fits(len(ranks))


def takes_others(one, ranks, step, line):
    """Whether what goes into a model at a line are other rows of the same data on the ranks, as of
    shards: all that one process has in this step are on the ranks sooner or later, and all that a
    rank has in it are on one process."""
    rows, ever = [], []  # of one process and each rank: {part: its rows}, in this step, in all
    for notes in (one, *ranks):
        rows.append({})
        ever.append({})
        for at, seen in notes.seen("inputs"):
            for part, value in seen.values.items():
                if seen.line == line and value and len(value.rows[0][0]) > 1:
                    place = seen.number, part
                    marks = {float(f"{mark:.5g}") for mark in value.rows[0][0]}
                    ever[-1].setdefault(place, set()).update(marks)
                    if at == step:
                        rows[-1][place] = marks
    for place, mine in rows[0].items():
        theirs = [of.get(place, set()) for of in rows[1:]]
        is_known = any(marks and marks <= ever[0][place] for marks in theirs)
        others = set().union(*[of.get(place, set()) for of in ever[1:]])
        if is_known and mine <= others and len(set(map(frozenset, theirs))) == len(theirs):
            return True
    return False


def loaders_per_process(one, ranks):
    """{loader: line} of those for training whose first batch is as large on one process as on each
    rank: a batch size per process, so one process needs batches of all ranks' size."""
    if takes_share(one, ranks):
        return {}
    trains, loaders = training_passes(one), {}
    first = [{b.key: b.rows for _, b in reversed(notes[Batch])} for notes in (one, *ranks)]
    for _, note in one[Pass]:
        is_known = note.batch_size is not None
        if note.key in trains and is_known and len({rows.get(note.key) for rows in first}) == 1:
            if first[0][note.key]:
                loaders[note.loader] = note.key[0]
    return loaders


def lines_by_turns(one, ranks):
    """[line, function] of those that draw as many times as often on one process, in each step but
    the first and last."""
    mine, *theirs = [notes[Drawn][-1][1].times if notes[Drawn] else {} for notes in (one, *ranks)]
    ends = [notes[Drawn][-1][0] if notes[Drawn] else 0 for notes in (one, *ranks)]
    found, steps = [], range(1, min(*ends, *[len(notes[Step]) for notes in (one, *ranks)]))
    for key, of_one in mine.items():
        all_sides = of_one, *[of_rank.get(key, {}) for of_rank in theirs]
        numbers = [[of.get(step, 0) for step in steps] for of in all_sides]
        if any(numbers[0]) and all(
            [len(ranks) * n for n in of] == numbers[0] for of in numbers[1:]
        ):
            found.append(list(key))
    return found

"""Samples: each batch and pass beside those of one process."""

import itertools
import math
import re
from dataclasses import replace

from ..notes import Batch, Cut, Finding, Pass, PassEnd, Said, Step
from ..patterns import flags_in, reads_flag, shares_in
from ..script import source
from ..text import class_of, lines_of_argument
from .fits import relative
from .numbers import files_of, shares_of
from .shares import takes_share, training_passes

SIZE = r"batch$|batch_?size|\bbs$|per_(device|gpu)"  # of a flag's name
SHARE = {
    "remedy": "give each rank its share of the batch, by a DistributedSampler",
    "section": "#loader",
}


EVEN = "BatchSamplerShard"  # Accelerate's: it repeats samples, so that all have whole batches


def per_process(ranks, line, rows):
    """A batch that is one per process, and that could not be made as large as that of all ranks."""
    text = f"{rows} samples on one process, {rows} on each rank: a batch size per process, so "
    text += "nothing can be compared"
    about = {"advice": "unpaired", "remedy": remedy_by_one(ranks[0], len(ranks), rows)}
    return Finding("look", "samples", 0, text, line, section="#loader", **about)


def passes_per_process(one, ranks, trains, scaled):
    """The same of batches that the script makes itself; and of those that it cuts into parts of a
    size per process, so that one process, which was given more, has more parts."""
    seen = [[s for step, s in notes.seen("inputs") if step == 1] for notes in (one, *ranks)]
    seen = [[s for s in of if s.values.get(0) and s.values[0].shape] for of in seen]
    (line, rows), *_ = [(s.line, s.values[0].shape[0]) for s in seen[0]] or [("", 0)]
    totals = [sum(math.prod(s.values[0].shape) for s in of) for of in seen]
    if not rows:
        return []
    if scaled:
        if all(len(seen[0]) == len(ranks) * len(of) for of in seen[1:]):
            text = f"{len(seen[0])} passes in a step on one process, {len(seen[1])} on each rank: "
            text += "parts of its batch, whose gradients are added up? Not compared"
            return [replace(per_process(ranks, line, rows), text=text)]
        return []
    others = [[tuple(s.values[0].sums) for s in of] for of in seen[1:]]
    is_same = all(of == others[0] for of in others)
    if trains or is_same or any(total != totals[0] for total in totals):
        return []
    return [per_process(ranks, line, rows)]


def remedy_by_one(rank, world, rows=0):
    """The flag, if a number of the script says which. `rows`: of a batch that is no loader's."""
    if cut := [note.batch_size for _, note in rank[Cut]]:
        rows = cut[0]
    elif trains := training_passes(rank):
        rows = next(batch.rows for _, batch in rank[Batch] if batch.key in trains)
    variables = rank[Step][0][1].variables if rank[Step] else {}
    names = [name for name, n in variables.items() if re.search(SIZE, name.lower()) and n == rows]
    flags = {name: flag for file in files_of(rank) for name, flag in flags_in(file).items()}
    for name in names:
        is_flag = not flags and any(reads_flag(file, name) for file in files_of(rank))
        if flag := flags.get(name, f"--{name}" if is_flag else ""):
            return f'give one process the samples of all ranks: --one "{flag} {rows * world}"'
    return f"give one process a batch of {rows * world}, the samples of all ranks"


def loader_of(key):
    """In words: where the script has made the DataLoader of a pass."""
    line = key[1].rpartition(" of ")[2]
    return [f"its loader: {source(line)}"] if source(line) != line else []


def lines_of(key, about):
    """In words: where the script has made the DataLoader of a pass, and its sampler; or, of one of
    its own, where that gives samples. `about`: rank 0's Pass."""
    samplers = lines_of_argument(key[1].rpartition(" of ")[2], ("sampler", "batch_sampler"))
    if about.made:
        samplers = [about.made]
    return loader_of(key) + [f"its sampler: {source(line)}" for line in samplers]


def compare_samples(one, ranks):
    """What the training loaders give: ([Finding], {step: text of a padded batch})."""
    trains, samplers = training_passes(one), {p.key: p for _, p in ranks[0][Pass]}
    theirs = [{(b.key, b.number): b for _, b in notes[Batch]} for notes in ranks]
    found, uneven, is_shared = [], {}, takes_share(one, ranks)
    for step, batch in one[Batch]:
        others = [of.get((batch.key, batch.number)) for of in theirs]
        if batch.key not in trains or None in others:
            continue
        line, number = batch.key[0], batch.number + 1
        total = sum(other.rows or 0 for other in others)
        is_same = all(other.indices == others[0].indices for other in others)
        if is_shared and all(other.indices == batch.indices for other in others):
            continue
        if len({batch.rows, *[other.rows for other in others]}) == 1 and not is_same:
            found.append(per_process(ranks, line, batch.rows))
        elif batch.rows and total != batch.rows:
            text = f"batch {number} has {batch.rows} samples on one process, "
            text += f"{[other.rows for other in others]} on the ranks"
            repeats = samplers[batch.key].sampler == EVEN
            is_padded = total - batch.rows < len(ranks) or repeats
            if batch.batches == number and is_padded:
                uneven[step] = f"{line}: the last {text}: not compared"
                continue
            lines = lines_of(batch.key, samplers[batch.key])
            found.append(Finding("look", "samples", step, text, line, lines, **SHARE))
        elif batch.indices and all(other.indices for other in others):
            union = [index for other in others for index in other.indices]
            if sorted(map(repr, union)) != sorted(map(repr, batch.indices)):
                about = samplers[batch.key]
                found.append(other_samples(step, batch, union, about, one, ranks))
    return found, uneven, trains


def other_samples(step, batch, union, about, one, ranks):
    """A batch of which not all samples are on the ranks. `union`: those that are; `about`: rank 0's
    Pass."""
    line, lines, section = batch.key[0], lines_of(batch.key, about), SHARE["section"]
    passes = [{p.key: p.size for _, p in notes[Pass]} for notes in (one, *ranks)]
    mine, *theirs = [of.get(batch.key) for of in passes]
    if {mine, *theirs} != {mine}:
        text = f"its dataset has {mine} samples on one process, {theirs} on the ranks, as one that "
        text += "takes its share itself: nothing can be compared"
        lines = shares_of(files_of(ranks[0])) + lines
        return Finding("look", "samples", step, text, line, lines, "unpaired", section=section)
    only = len(set(map(repr, batch.indices)) - set(map(repr, union)))
    text = f"batch {batch.number + 1} of pass {batch.key[2] + 1}: {only} of {batch.rows} samples "
    text += "of one process are on no rank"
    if why := why_unpaired(batch, about, one, ranks):
        text += f"{why}, so nothing after it can be compared"
        lines = drawn_at(ranks[0]) or lines
        return Finding("look", "samples", step, text, line, lines, "unpaired", section=section)
    if not about.has_share:
        return Finding("look", "samples", step, text, line, lines, **SHARE)
    lines += drawn_at(ranks[0])
    verdict, remedy = "look", "the same dataset, split and order on all ranks"
    if repeated := overlap(batch, about, one, ranks):
        verdict = "WRONG"
        text += f", and in the pass so far, {repeated} are on several: no shares of one order"
    return Finding(verdict, "samples", step, text, line, lines, remedy=remedy, section=section)


def why_unpaired(batch, about, one, ranks):
    """In words, why the ranks have other samples than one process, if it may be intended; or ""."""
    if about.has_share and have_own_indices(batch.key, one, ranks, about.size):
        return ": one index is of other samples on each rank, as of datasets that are shares"
    if about.draws and not about.has_share:
        return f": each rank draws its own ({about.sampler})"
    if are_shares(batch, about.size, one, ranks):
        return " in this step, and no sample is on two: they share them in another order"
    if any(note.kind == "chooses" for _, note in ranks[0][Said]):
        return ": a sampler of each rank chooses its own"
    return ""


def have_own_indices(key, one, ranks, size):
    """Whether an index is of another sample on another process: all that the ranks have in a first
    batch; or of a dataset whose size is not known, which may be a share, most of all passes."""
    totals = []
    for notes in ranks if size else (one, *ranks):
        batches = [b for _, b in notes[Batch] if (b.key == key if size else b.key[:2] == key[:2])]
        totals.append({i: total for b in batches for i, total in b.totals.items()})
    both = [(a[i], b[i]) for a, b in itertools.combinations(totals, 2) for i in a if i in b]
    other = [relative(*each) > 1e-6 for each in both]
    return len(other) > 1 and (all(other) if size else sum(other) > len(other) / 2)


def drawn_at(rank):
    """In words: where a sampler draws an order by a generator of its own."""
    said = [note.text for _, note in rank[Said] if note.kind == "own order"]
    return [f"its order is drawn at {source(line)}" for line in said]


def overlap(batch, about, one, ranks):
    """How many samples of a batch's pass are on several ranks, if they are many: more than fill up
    the last batches; and if one process has none twice, as by a sampler that repeats them by
    design. `about`: rank 0's Pass."""
    mine = [repr(index) for index in indices_of(batch.key, one)]
    theirs = [{repr(index) for index in indices_of(batch.key, notes)} for notes in ranks]
    repeated = sum(map(len, theirs)) - len(set().union(*theirs))
    if len(set(mine)) < len(mine) or about.sampler == EVEN or takes_share(one, ranks):
        return 0
    if class_of(about.made) == about.sampler:  # the script's own: or each rank's draws are its own
        lines = shares_in(about.made.rpartition(":")[0])
        if about.sampler not in map(class_of, lines):
            return 0
    return repeated if repeated >= max(2 * batch.rows, len(mine) / 8) else 0


def are_shares(batch, size, one, ranks):
    """Whether the ranks' samples of a batch's pass are parts of the same whole as one process's:
    none is on two ranks, but for those that a sampler repeats; where the pass has ended, and had
    all samples on one process, none is left out. `size`: of the dataset, which a batch sampler may
    take again and again in one pass: then, of the first time."""
    key, share = batch.key, batch.rows // len(ranks)
    mine, *theirs = [[repr(index) for index in indices_of(key, notes)] for notes in (one, *ranks)]
    if size and len(mine) > size:
        theirs = [of_rank[: size // len(ranks) // share * share] for of_rank in theirs]
    mine, *theirs = map(set, (mine, *theirs))
    everyone = set().union(*theirs)
    ends = [any(note.key == key for _, note in notes[PassEnd]) for notes in (one, *ranks)]
    repeated = sum(map(len, theirs)) - len(everyone)
    left_out = len(mine - everyone) if all(ends) and len(mine) == size else 0
    few = min(len(ranks), sum(map(len, theirs)) / len(ranks))
    return repeated < few and left_out < len(ranks)


def indices_of(key, notes):
    """Of all samples of a pass."""
    return [i for _, batch in notes[Batch] if batch.key == key for i in batch.indices]


def compare_lengths(one, ranks, trains):
    """Passes over a training loader that ended after other numbers of batches, and those that are
    to have other numbers. A batch more or less may be due to samples that do not divide; and how
    many a stream has, nobody knows."""
    streams = {note.key for _, note in one[Batch] if note.batches is None}
    found = {PassEnd: [], Batch: []}
    for kind, words in ((PassEnd, "a pass ended after"), (Batch, "an epoch has")):
        mine, *theirs = [  # {pass: (step, the first note)}
            {note.key: (step, note) for step, note in reversed(notes[kind])}
            for notes in (one, *ranks)
        ]
        for key, (step, note) in reversed(mine.items()):
            both = [notes.get(key, (step, note)) for notes in theirs]
            others, step = [other.batches for _, other in both], min(step, *[at for at, _ in both])
            if note.key in trains and None not in [note.batches, *others]:
                most = max(abs(other - note.batches) for other in others)
                if most:
                    text = f"{words} {note.batches} batches on one process, {others} on the ranks"
                    verdict = "look" if most == 1 or note.key in streams else "WRONG"
                    about = {"more": loader_of(note.key), **SHARE}
                    found[kind].append(Finding(verdict, "epoch", step, text, note.key[0], **about))
    return found.values()

"""The samples of each batch, and the batches of each pass, beside those of one process."""

from ..notes import Batch, Finding, Pass, PassEnd
from .kinds import PAGE

SHARE = {
    "remedy": "give each rank its share of the batch, by a DistributedSampler",
    "section": f"{PAGE}#loader",
}


def training_passes(one):
    """The keys of passes in which there are steps."""
    steps = {}
    for step, batch in one[Batch]:
        steps.setdefault(batch.key, set()).add(step)
    return {key for key in steps if len(steps[key]) > 1}


def loaders_per_process(one, ranks):
    """{loader: line} of those for training whose first batch is as large on one process as on each
    rank: a batch size per process, so one process needs batches of all ranks' size."""
    if len(ranks) == 1:
        return {}
    trains, loaders = training_passes(one), {}
    first = [{b.key: b.rows for _, b in reversed(notes[Batch])} for notes in (one, *ranks)]
    for _, note in one[Pass]:
        if note.key in trains and len({rows.get(note.key) for rows in first}) == 1:
            if first[0][note.key]:
                loaders[note.loader] = note.key[0]
    return loaders


def compare_samples(one, ranks):
    """What the training loaders give: ([Finding], {step: text of a padded batch})."""
    trains, samplers = training_passes(one), {p.key: p for _, p in one[Pass]}
    theirs = [{(b.key, b.number): b for _, b in notes[Batch]} for notes in ranks]
    found, uneven = [], {}
    for step, batch in one[Batch]:
        others = [of.get((batch.key, batch.number)) for of in theirs]
        if batch.key not in trains or None in others:
            continue
        line, number = batch.key[0], batch.number + 1
        total = sum(other.rows or 0 for other in others)
        if batch.rows and total != batch.rows:
            text = f"batch {number} has {batch.rows} samples on one process, "
            text += f"{[other.rows for other in others]} on the ranks"
            if batch.batches == number and total - batch.rows < len(ranks):
                uneven[step] = f"{line}: the last {text}: not compared"
                continue
            found.append(Finding("look", "samples", step, text, line, **SHARE))
        elif batch.indices and all(other.indices for other in others):
            union = [index for other in others for index in other.indices]
            if sorted(map(repr, union)) != sorted(map(repr, batch.indices)):
                only = len(set(map(repr, batch.indices)) - set(map(repr, union)))
                text = f"batch {number} of pass {batch.key[2] + 1}: {only} of "
                text += f"{batch.rows} samples of one process are on no rank"
                about, why = samplers.get(batch.key), ""
                if about and about.draws and not about.has_share:
                    why = "unpaired"
                    text += f": each rank draws its own ({about.sampler}), so nothing after it can "
                    text += "be compared"
                found.append(Finding("look", "samples", step, text, line, advice=why, **SHARE))
    return found, uneven, trains


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
                    found[kind].append(Finding(verdict, "epoch", step, text, note.key[0], **SHARE))
    return found.values()

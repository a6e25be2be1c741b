"""What a comparison with one process cannot see, as it is so in both runs, or made alike in them.

To add a rule: a subclass of Rule here, and a row in tests/test_rules.py. `find` gets the notes of
one process and of each rank; it returns findings, [] if `right` is so, None if nothing was seen."""

import re

from ..given.draws import DATASET, LOOP, MODEL
from ..notes import (
    Collective,
    Compared,
    Draw,
    File,
    Finding,
    Step,
    Weights,
)
from ..script import source
from .fits import relative

RULES = []  # in the order of the report
PAGE = "docs/your_loop.md"


class Rule:
    name = ""
    right = ""  # what is so if nothing is found
    needs = ""  # what the script must do for it to be seen
    remedy = "", ""  # an imperative, and the section's anchor in PAGE

    def __init_subclass__(cls):
        RULES.append(cls())

    def find(self, one, ranks):
        raise NotImplementedError

    def wrong(self, step, text, verdict="WRONG"):
        words, anchor = self.remedy
        return [Finding(verdict, self.name, step, text, remedy=words, section=PAGE + anchor)]

    def look(self, step, text):
        return self.wrong(step, text, "look")


def draws_of(notes, *kinds):
    """{(step, what draws, line, generator, number): the generator's state} of a process; but not of
    what is broadcast to all ranks."""
    known = {(step, call.drawn) for step, call in notes[Collective] if call.name == "broadcast"}
    return {
        (step, note.what, note.line, note.generator, note.number): note.state
        for step, note in notes[Draw]
        if note.what in kinds and (step, note.line) not in known
    }


class RandomNumbers(Rule):
    name = "random"
    right = "the random numbers of dropout, noise and augmentation are other ones on each rank"
    needs = "dropout, noise for a batch, or augmentation"
    remedy = "torch.manual_seed(seed + rank) after the model and the split", "#seeds"

    def find(self, one, ranks):
        states = [draws_of(notes, MODEL, DATASET, LOOP) for notes in ranks]
        for key, state in states[0].items():
            if all(other.get(key) == state for other in states[1:]):
                step, what, line, generator, _ = key
                text = f"{source(line)}: {what} draws the same numbers on all ranks ({generator})"
                return self.wrong(step, text)
        return [] if states[0] else None


class Parameters(Rule):
    name = "parameters"
    right = "the optimizers have what is trained, in the same order on all ranks"
    needs = "an optimizer.step()"
    remedy = "give it the wrapped model's, in a fixed order: no set", "#what-must-be-equal"

    def find(self, one, ranks):
        for step, note in ranks[0][Compared]:
            if note.kind == "gradients" and not any(d.one for d in note.differences.values()):
                text = f"{source(note.line)}: no gradient in what the optimizer trains: a copy?"
                return self.wrong(step, text)
        theirs = [{note.key: note for _, note in notes[Step]} for notes in ranks]
        for key, note in theirs[0].items():
            for rank, other in enumerate(theirs):
                names = other[key].names if key in other else note.names
                if names != note.names and sorted(names) == sorted(note.names):
                    where = [a != b for a, b in zip(names, note.names)].index(True)
                    text = f"{source((note.made or [note.line])[0])}: in another order, such as "
                    text += f"{note.names[where]} on rank 0, {names[where]} on rank {rank}"
                    return self.wrong(0, text)
        return []


def differ(ours, theirs):
    """How much sums differ; 0 if there are others, or of other shapes, such as a cache's."""
    if len(ours) != len(theirs) or any(a[2] != b[2] for a, b in zip(ours, theirs)):
        return 0.0
    pairs = [pair for a, b in zip(ours, theirs) for pair in zip(a[:2], b[:2])]
    return max((relative(*pair) for pair in pairs), default=0.0)


class OtherWeights(Rule):
    name = "others"
    right = "weights and buffers that no optimizer has are those of one process"
    needs = "a teacher, an average of weights, a bank, a codebook"
    remedy = "build and update them alike on all ranks, from what all ranks have", "#model"

    def find(self, one, ranks):
        mine = {note.key: note.sums for _, note in one[Weights]}
        drawn = [{n.key: n.drawn for _, n in notes[Weights] if n.drawn} for notes in ranks]
        for key, ours in drawn[0].items():
            for name, states in ours.items():
                if any(of.get(key, {}).get(name, states) != states for of in drawn):
                    text = f"{name} has each rank's own random weights, and no optimizer trains it"
                    return self.wrong(0, text)
        seen = False
        for rank, notes in enumerate(ranks):
            for step, note in notes[Weights]:
                for name in sorted(note.sums.keys() & mine.get(note.key, {}).keys()):
                    seen = True
                    if (size := differ(mine[note.key][name], note.sums[name])) > 1e-3:
                        text = f"{name} on rank {rank} differs from one process's by {size:.0e}"
                        return self.look(step, text)
        return [] if seen else None


class Evaluation(Rule):
    name = "evaluation"
    right = "a model's buffers are equal on all ranks when it is evaluated"
    needs = "a pass through a model after eval(): --short 10"
    remedy = "broadcast rank 0's buffers before it", "#buffers"

    def find(self, one, ranks):
        theirs = [{n.key: (at, n.sums) for at, n in notes[Weights]} for notes in ranks]
        seen = False
        for key, (step, sums) in theirs[0].items():
            if key[0] != "evaluation" or not all(key in other for other in theirs):
                continue  # only rank 0 evaluates
            seen = True
            for name in sums:
                if max(differ(sums[name], of[key][1].get(name, [])) for of in theirs) > 1e-3:
                    text = f"{source(key[1])}: {name} is another one on each rank"
                    return self.look(step, f"{text}: right if only rank 0's score counts")
        return [] if seen else None


class Modes(Rule):
    name = "modes"
    right = "all ranks train the same modules in training mode as one process does"
    needs = "an optimizer.step()"
    remedy = "call train() and eval() on all ranks alike", "#decisions"

    def find(self, one, ranks):
        mine = {note.key: note for _, note in one[Step]}
        for rank, notes in enumerate(ranks):
            for step, note in notes[Step]:
                other = mine.get(note.key, note)
                unlike = sorted(set(note.modes) ^ set(other.modes))
                if unlike and note.names == other.names:
                    name, *more = unlike
                    text = (
                        f"{source(note.line)}: {name} (of {len(more) + 1}) is in evaluation mode "
                    )
                    text += f"on {f'rank {rank}' if name in note.modes else 'one process'} alone"
                    return self.wrong(step, text)
        return []


class Files(Rule):
    name = "files"
    right = "no file is written by several ranks"
    needs = "a file that the script writes"
    remedy = "print, log and save under `if rank == 0:`", "#rank-0"

    def find(self, one, ranks):
        written = {}
        for rank, notes in enumerate(ranks):
            for step, note in notes[File]:
                if re.search("[wxa+]", note.mode) and note.kind != "downloaded":
                    written.setdefault(note.path, {}).setdefault(rank, (step, note))
        found = []
        for path, writers in written.items():
            if len(writers) > 1 and not re.search(
                r"\.lock$|torchinductor|triton|huggingface", path
            ):
                step, note = min(writers.values(), key=lambda each: each[0])
                text = f"{source(note.line)}: ranks {sorted(writers)} write {path}"
                found += self.look(step, text) if "a" in note.mode else self.wrong(step, text)
        found.sort(key=lambda one: one.verdict)  # WRONG first
        return found[:1] if found or written else None

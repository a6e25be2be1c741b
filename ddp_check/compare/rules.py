"""What a comparison with one process cannot see, as it is so in both runs, or made alike in them.

To add a rule: a subclass of Rule, in judge.RULES, and a line of tests/test_ddp_check.py's script
that ends in its name. `find` gets the notes of one process and of each rank; it returns findings,
[] if `right` is so, None if nothing was seen."""

from ..notes import COLLATE, DATASET, OWN_GENERATOR, Collective, Finding, Step
from ..patterns import seeds_in
from ..script import source
from .kinds import misfits, paired
from .numbers import files_of
from .shares import takes_share

ALIKE = 3e-4  # as far as numbers may be apart that are to be the same on all ranks


class Rule:
    name = ""
    right = ""  # what is so if nothing is found
    needs = ""  # what the script must do for it to be seen
    remedy = "", ""  # an imperative, and the section's anchor in PAGE

    def find(self, one, ranks):
        raise NotImplementedError

    def wrong(self, step, line, text, more=(), remedy=None, verdict="WRONG"):
        words, anchor = self.remedy
        words = words if remedy is None else remedy
        return [
            Finding(verdict, self.name, step, text, line, list(more), remedy=words, section=anchor)
        ]

    def look(self, step, line, text, more=(), remedy=None):
        return self.wrong(step, line, text, more, remedy, "look")


def among(kind, ranks):
    """[(step, Seen of rank 0, what of it does not fit with the others)]"""
    broadcast = {
        (step, call.drawn)
        for n in ranks
        for step, call in n[Collective]
        if "cast" in call.name or "scatter" in call.name
    }
    return [
        (step, seen, misfits(kind, seen.values, [other.values for other in others.values()], ALIKE))
        for step, seen, others in paired(kind, ranks[0], ranks)
        if len(others) == len(ranks) and (step, seen.line) not in broadcast
    ]


class RandomNumbers(Rule):
    name = "random"
    right = "the random numbers of dropout, noise and augmentation are other ones on each rank"
    needs = "dropout, noise for a batch, or augmentation"
    remedy = "torch.manual_seed(seed + rank) after the model and the split", "#seeds"
    remedies = {
        "torch": remedy[0],
        "random": "random.seed(seed + rank) after the split",
        "numpy": "np.random.seed(seed + rank) after the split",
        OWN_GENERATOR: "seed this generator with seed + rank",
    }

    def find(self, one, ranks):
        draws, first = among("draw", ranks), {}
        is_whole = takes_share(one, ranks)  # then all ranks are to load the same
        often = {seen.line for step, seen, _ in draws if step > 0}  # not only before the training
        for step, seen, found in sorted(draws, key=lambda draw: draw[1].line not in often):
            if found and not (is_whole and found[0].part in (DATASET, COLLATE)):
                first.setdefault((found[0].part, seen.name), (step, seen))
        if not first:
            return [] if draws else None
        ((part, name), (step, seen)), *others = first.items()
        text = f"{part} draws the same numbers on all ranks ({name})"
        remedy = self.remedies.get(name, self.remedies[OWN_GENERATOR])
        if part in (DATASET, COLLATE) and name in ("random", "numpy"):
            # torch seeds its loader's workers
            remedy = f"{self.remedies['torch']}; without workers, {remedy}"
        more = []
        if seen.about["seeded"] and name != OWN_GENERATOR:
            more.append(f"last seeded at {source(seen.about['seeded'])}")
        elif name != OWN_GENERATOR:  # before this process was watched
            lines = [line for file in files_of(ranks[0]) for line in seeds_in(file)]
            more += [f"seeded at {source(line)}" for line in lines[:2]]
        more += [f"so does {of} ({its}): {source(at.line)}" for (of, its), (_, at) in others]
        return self.wrong(step, seen.line, text, more, remedy)


class Parameters(Rule):
    name = "parameters"
    right = "the optimizers have what is trained, in the same order on all ranks"
    needs = "an optimizer.step()"
    remedy = "give it the wrapped model's, in a fixed order: no set", "#what-must-be-equal"

    def find(self, one, ranks):
        theirs = [{note.key: note for _, note in notes[Step]} for notes in ranks]
        for key, note in theirs[0].items():
            for rank, other in enumerate(theirs):
                names = other[key].names if key in other else note.names
                if names != note.names and sorted(names) == sorted(note.names):
                    where = [a != b for a, b in zip(names, note.names)].index(True)
                    text = f"in another order, such as {note.names[where]} on rank 0, "
                    text += f"{names[where]} on rank {rank}"
                    return self.wrong(0, note.made.get("made", [note.line])[0], text)
        trained = {}, {}  # of one process, of rank 0: {optimizer: whether it ever has a gradient}
        for of, notes in zip(trained, (one, ranks[0])):
            for _, seen in notes.seen("gradient"):
                has_any = any(s and s.sums.any() for s in seen.values.values())
                of[seen.name] = of.get(seen.name, False) or has_any
        for step, seen in ranks[0].seen("gradient"):
            if trained[1][seen.name]:
                continue
            if trained[0].get(seen.name):
                return self.wrong(step, seen.line, "no gradient in what the optimizer trains")
            text = "no gradient, or exactly 0, on one process, too: a constant loss, or a copy of "
            # Or, where other optimizers train, one whose loss counts only later.
            verdict = "look" if any(trained[1].values()) else "WRONG"
            text += "what is trained?"
            return self.wrong(step, seen.line, text, remedy="", verdict=verdict)
        return [] if all(theirs) else None


def own_draws(ranks, chooses=False):
    """[(step, Seen of rank 0)] of random numbers that were given alike to all ranks, whose own
    generators would have drawn others: of measures, or of what chooses, as an index does."""
    draws = [(step, seen) for step, seen, found in among("own", ranks) if found]
    return [(step, seen) for step, seen in draws if seen.about["chooses"] == chooses]


def is_marked(off):
    """Whether such numbers are in it: it is another one in its last digits."""
    return 1e-12 < off < 1e-5

"""Rules on samples: each rank's share, what counts them, how they are split."""

import itertools
from dataclasses import replace

from ..notes import OWN_GENERATOR, Batch, Cut, Step
from ..patterns import tests_with
from .fits import relative, sides
from .kinds import misfits, paired
from .numbers import Variables
from .order_rules import passes_of
from .rules import ALIKE, Rule, among, is_marked, own_draws


class Inputs(Rule):
    name = "inputs"
    right = "what goes into the models is another batch on each rank"
    needs = "a pass through a model in three training steps"
    remedy = "give each rank its share; seed + rank in sampler processes, environments", "#loader"

    def find(self, one, ranks):
        places = {}  # {(line, model): [(step, whether all have the same, rank 0's sums)]}
        for step, seen, others in paired("inputs", ranks[0], ranks):
            batch = {k: v for k, v in seen.values.items() if v and v.shape and v.shape[0] > 1}
            if batch and len(others) == len(ranks):
                equal = misfits("draw", batch, [other.values for other in others.values()], 0)
                sums = [tuple(v.sums) for v in batch.values()]
                place = places.setdefault((seen.line, seen.name), [])
                place.append((step, len(equal) == len(batch), sums))
        draws = own_draws(ranks, chooses=True)
        for (line, name), found in places.items():
            steps, equal, sums = zip(*found)
            chosen = [at for at, _ in draws if at in steps]
            if len(chosen) > 1:  # by numbers that only here are alike
                continue
            if len(found) > 2 and all(equal) and any(each != sums[0] for each in sums):
                return self.look(steps[0], line, f"{name} gets the same batches on all ranks")
        return self.copies(one, ranks) if any(len(of) > 2 for of in places.values()) else None

    def copies(self, one, ranks):
        """A stream of which most samples are on several ranks, though their batches are parts of
        one process's."""
        streams = [{b.key: {} for _, b in n[Batch] if b.indices is None} for n in ranks]
        for of, notes in zip(streams, ranks):
            for _, batch in notes[Batch]:
                of.get(batch.key, {}).update(batch.totals)
        whole = {b.key: b.rows for _, b in one[Batch] if b.trains}
        for step, batch in ranks[0][Batch]:
            marks = [of.get(batch.key, {}).keys() for of in streams]
            both = set.intersection(*map(set, marks))
            if whole.get(batch.key) == len(ranks) * batch.rows and len(both) > len(marks[0]) / 2:
                text = f"{len(both)} of {len(marks[0])} samples of the stream are on all ranks"
                return self.look(step, batch.key[0], text)
        return []


class Counts(Rule):
    name = "counts"
    right = "no number that decides something is counted by each rank for itself"
    needs = "a number that grows with each step, in the test of an `if` or `while`"
    remedy = "count what all ranks have done: times world_size", "#decisions"

    def find(self, one, ranks):
        steps = [{note.key: note.variables for _, note in notes[Step]} for notes in (one, *ranks)]
        keys = [key for key in steps[0] if all(key in of for of in steps)]
        if len(keys) < 4:
            return None
        line, seen = one[Step][0][1].line, False
        cut = {note.loader: note.batch_size for _, note in ranks[0][Cut]}
        passes = [note for _, note, _, trains in passes_of(ranks[0]) if trains]
        sizes = [cut.get(note.loader, note.batch_size) for note in passes]
        of_all = [len(ranks) * size for size in sizes if size]
        for name in steps[0][keys[0]]:
            series = [[of[key].get(name, 0) for key in keys] for of in steps]
            growth, *others = [[b - a for a, b in itertools.pairwise(of)] for of in series]
            if not (max(growth) > 0 and min(growth) >= 0):
                continue
            numbers = f"{name} is {sides(*[of[-1] for of in series])}"
            both = [(a, b) for of in others for a, b in zip(growth, of)]
            tests = tests_with(line, name)
            seen = seen or bool(tests)
            if tests and all(abs(len(ranks) * b - a) < 1e-6 for a, b in both):
                return self.look(len(keys) - 1, tests[0], numbers)
            tests = tests_with(line, name, unless="world")
            theirs = [b for of in others for b in of]
            counts_samples = any(all(b % size == 0 for b in theirs) for size in of_all)
            is_faster = all(abs(b - len(ranks) * a) < 1e-6 for a, b in both)
            if tests and is_faster and not counts_samples:
                text = f"{numbers}: it grows {len(ranks)} times as fast, and may pass by a multiple"
                remedy = "count steps, or the samples of all ranks"
                return self.look(len(keys) - 1, tests[0], text, remedy=remedy)
        return [] if seen else None


class Data(Rule):
    name = "data"
    right = "a sample is the same one on each rank"
    needs = "a DataLoader in training whose dataset has an index"
    remedy = "make it with the same seed on all ranks", "#what-must-be-equal"

    def find(self, one, ranks):
        mine = {(b.key, b.number): (step, b.totals) for step, b in one[Batch] if b.trains}
        draws, seen, others = own_draws(ranks), False, []
        for rank, notes in enumerate(ranks):
            for _, batch in [each for each in notes[Batch] if each[1].indices]:
                step, totals = mine.get((batch.key, batch.number), (0, {}))
                both = [index for index in batch.totals if index in totals]
                seen = seen or bool(both)
                off = max([relative(totals[i], batch.totals[i]) for i in both], default=0)
                lines = [s.line for at, s in draws if at <= step and not s.about["in_module"]]
                if is_marked(off) and lines:
                    text = f"rank {rank} has other samples of the same index, by its own random "
                    text += "numbers: is that intended?"
                    line = max(lines, key=lines.count)
                    return self.look(step, line, text)
                if both and min(relative(totals[i], batch.totals[i]) for i in both) > ALIKE:
                    others.append((step, batch.key[0], off))
        for step, line, off in others[:1]:
            text = "samples are other ones than those of one process of the same index, by "
            text += f"{off:.0e}: are they made with numbers, or a generator, of each rank's own?"
            more = Variables(one, ranks).other_data()
            found = self.look(step, line, text, more, "compute these from all ranks' samples")
            return [replace(each, advice="made apart") for each in found]
        return [] if seen else None


def draws_more(seen, ranks):
    """Whether a generator of the script's own gives all ranks the same orders, and one of them more
    of these, as where rank 0 alone asks a sampler for its length."""
    drawn = [[s for _, s in notes.seen("split") if s.line == seen.line] for notes in ranks]
    orders = [{order for s in of_rank for order in s.values.values()} for of_rank in drawn]
    fewest = min(orders, key=len)
    is_own = all(s.name == OWN_GENERATOR for of_rank in drawn for s in of_rank)
    return is_own and len(set(map(len, drawn))) > 1 and all(map(fewest.issubset, orders))


class Splits(Rule):
    name = "split"
    right = "what is shuffled or split before the training is so alike on all ranks"
    needs = "a random split, or another order of all samples"
    remedy = "same seed, sorted(glob(...)), sorted(set(...)) on all ranks", "#what-must-be-equal"

    def find(self, one, ranks):
        orders = [order for order in among("split", ranks) if not draws_more(order[1], ranks)]
        for step, seen, found in orders:
            line = seen.about.get("made") or seen.line
            if found and not self.is_of_loop(ranks[0], seen.line):
                # A dataset of the script's own may have one of a split's parts.
                if {seen.about["size"], *seen.about["parts"]} & self.sizes_of_shares(ranks):
                    text = "each rank takes its share of an order of its own: some samples are "
                    return self.wrong(step, line, f"{text}on several ranks, others on none")
                return self.look(step, line, "each rank has an order of its own")
        return self.apart(orders) or ([] if orders else None)

    def apart(self, orders):
        """A line of the loop that draws alike on all ranks, until one of them draws elsewhere."""
        equal = {}  # {line: steps so far in which all ranks have drawn alike}
        for step, seen, found in orders:
            steps = equal.setdefault(seen.line, set())
            if not found:
                steps.add(step)
            elif len(steps) > 2:
                text = "the ranks draw alike before this step, and each its own from here on"
                remedy = "what one rank alone draws: by a generator of it"
                return self.look(step, seen.line, text, remedy=remedy)
        return []

    def sizes_of_shares(self, ranks):
        """Of the datasets in training of which no two ranks have the same samples."""
        lists = [{p.key: order for _, p, order, _ in passes_of(notes)} for notes in ranks]
        found = set()
        for _, about, order, trains in passes_of(ranks[0]):
            everyone = [i for of_rank in lists for i in of_rank.get(about.key, [])]
            few = len(everyone) - len(set(everyone)) < len(ranks)  # a sampler repeats some
            if trains and few:
                found.add(about.size)
        return found

    def is_of_loop(self, notes, line):
        """Whether it draws in most steps of an optimizer, as for neighbours in a graph or a replay
        buffer."""
        drawn = {step for step, seen in notes.seen("split") if seen.line == line}
        steps = len(notes[Step]) / max(1, len({note.key[0] for _, note in notes[Step]}))
        return len(drawn) > max(1, steps / 2)

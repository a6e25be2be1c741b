"""Rules on samples: their order, each rank's share, what counts them."""

import ast
import itertools
import math

from ..notes import OWN_GENERATOR, Batch, Cut, Pass, PassEnd, Step
from ..script import source
from ..text import enclosing, loops_around, statement_at, tests_with
from .fits import relative, sides
from .kinds import misfits, paired
from .rules import Rule, among, is_marked, own_draws
from .samples import training_passes


def passes_of(notes):
    """[(step, Pass, the indices of its samples, whether it is for training)] of a process."""
    orders, trains = {}, training_passes(notes)
    for _, batch in notes[Batch]:
        orders.setdefault(batch.key, []).extend(batch.indices or [None])
    return [(at, p, orders.get(p.key, []), p.key in trains) for at, p in notes[Pass]]


def optimizers_of(notes):
    """{pass: the optimizers that make steps with its batches}"""
    numbers, found = {}, {}
    for step, note in notes[Step]:
        numbers.setdefault(step, set()).add(note.key[0])
    for step, batch in notes[Batch]:
        found.setdefault(batch.key, set()).update(numbers.get(step, ()))
    return found


def single_batches(notes):
    """{loader: [(the pass's key, the indices of its only batch)]} of next(iter(loader)) in one step
    after the other."""
    steps, sizes = {}, {}
    for step, batch in notes[Batch]:
        sizes[batch.key] = sizes.get(batch.key, 0) + 1
        if batch.trains and batch.indices:
            steps.setdefault(batch.key[:2], {})[step] = batch
    found = {}
    for loader, of_step in steps.items():
        if all(sizes[batch.key] == 1 for batch in of_step.values()):
            found[loader] = [(batch.key, batch.indices) for batch in of_step.values()]
    return found


def loop_of(about):
    """The same of all passes of a loop: they begin in one line, or an iterator of one name is made
    again once it has ended: `batches = iter(loader)`."""
    line, loader, _ = about.key
    node = statement_at(line)
    if isinstance(node, ast.Assign):
        function = enclosing(line, (ast.FunctionDef, ast.Module))
        return loader, function, *map(ast.unparse, node.targets)
    return loader, line


ENOUGH = 5  # samples, of all ranks, whose order is hardly the same by chance


def is_shuffled(order, least=6):
    if len(order) < least or None in order:
        return False
    return order != sorted(order, key=lambda index: (isinstance(index, str), index))


class Order(Rule):
    name = "order"
    right = "each epoch has another order than the one before"
    needs = "a second epoch (--short 10); if there was one, no training loader shuffles: intended?"
    remedy = "call sampler.set_epoch(epoch) before each epoch", "#loader"

    def find(self, one, ranks):
        seen, last, fixed_on_one = False, {}, self.fixed(one)
        lists = [{p.key: order for _, p, order, _ in passes_of(notes)} for notes in ranks]
        optimizers = optimizers_of(ranks[0])
        for step, about, _, trains in passes_of(ranks[0]):
            loop = loop_of(about)  # another loop over it, as to find a rate, is no epoch
            orders = [of.get(about.key, []) for of in lists]
            line, earlier, of_optimizers = last.get(loop, ("", [[]], set()))
            size = min(map(len, [*orders, *earlier]))
            now, before = [[order[:size] for order in of] for of in (orders, earlier)]
            is_fixed = now == before and not about.has_epochs and fixed_on_one.get(about.key)
            if is_fixed and not about.draws:  # as of samples that are sorted by their length
                continue
            if trains and is_shuffled(now[0], 3) and len({*itertools.chain(*now)}) >= ENOUGH:
                seen = True
                if now == before:
                    mine = optimizers.get(about.key, set())
                    is_other = bool(mine and of_optimizers) and mine.isdisjoint(of_optimizers)
                    text = f"pass {about.key[2] + 1} has the order of an earlier one"
                    text += ", on one process, too: intended?" * is_fixed
                    text += ", with which another optimizer trains: intended?" * is_other
                    more = [f"the earlier one: {source(line)}"] * (line != about.key[0])
                    epochs = [line for line in about.callers[:1] if loops_around(line)]
                    more += [f"called at {source(line)}" for line in epochs]
                    tell = self.look if is_fixed or is_other else self.wrong
                    return tell(step, about.key[0], text, more)
            if trains:  # a batch that is looked at before is no epoch
                last[loop] = about.key[0], orders, optimizers.get(about.key, set())
        for batches in single_batches(ranks[0]).values():
            seen = seen or len(batches) > 3
            for order, same in itertools.groupby(batches, key=lambda batch: batch[1]):
                keys = [key for key, _ in same]
                if len(keys) > 3 and is_shuffled(order, 3):
                    text = f"the first batch of each of {len(keys)} passes, which is the same"
                    return self.look(0, keys[0][0], text)
        return self.remade(ranks[0]) or ([] if seen else None)

    def fixed(self, notes):
        """{pass: whether its order is that of the one before in its loop, as far as both go}"""
        found, last = {}, {}
        for _, about, order, _ in passes_of(notes):
            earlier = last.get(loop_of(about), [])
            size = min(len(order), len(earlier))
            found[about.key] = order[:size] == earlier[:size]
            last[loop_of(about)] = order
        return found

    def remade(self, notes):
        """A loader that is made anew for each pass, whose order is not."""
        groups, ends = {}, {note.key: note.at for _, note in notes[PassEnd]}
        for step, about, order, trains in passes_of(notes):
            if trains and is_shuffled(order, ENOUGH):
                group = groups.setdefault((about.key[0], about.loader.rpartition(" of ")[2]), [])
                group.append((step, about, order))
        for (line, _), group in groups.items():
            for (_, before, earlier), (step, about, order) in itertools.pairwise(group):
                is_anew = len({about.loader for _, about, _ in group}) == len(group)
                if is_anew and ends.get(before.key, math.inf) < about.at and order == earlier:
                    text = "a new loader with the order of an earlier one: right for other data"
                    more = [f"its sampler: {source(about.made)}"] if about.made else []
                    return self.look(step, line, text, more)
        return []


class Loaders(Rule):
    name = "loaders"
    right = "two training loaders do not give the same samples at the same time"
    needs = "two loaders in training, with samplers that shuffle"
    remedy = "pass another seed to the second DistributedSampler", "#loader"

    def find(self, one, ranks):
        orders, ends = {}, {note.key: note.at for _, note in ranks[0][PassEnd]}
        for step, about, order, trains in passes_of(ranks[0]):
            if not trains or not is_shuffled(order) or about.sampler == "RandomSampler":
                continue  # a RandomSampler's order is given here
            for loader, (other_pass, other) in orders.items():
                if ends.get(other_pass, math.inf) < about.at:
                    continue  # it is over
                size = min(len(order), len(other))
                if loader != about.loader and order[:size] == other[:size]:
                    text = f"the samples of {other_pass[0]}, in the same order: right for pairs, "
                    return self.look(step, about.key[0], f"{text}such as images and masks")
            orders[about.loader] = about.key, order
        return [] if len(orders) > 1 else None


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
        sizes = [cut.get(note.loader, note.batch_size) for _, note in ranks[0][Pass]]
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
        draws, seen = own_draws(ranks), False
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

"""Rules on the order in which loaders give samples, pass after pass."""

import ast
import itertools
import math

from ..notes import Batch, Pass, PassEnd, Step
from ..script import source
from ..text import enclosing, loops_around, statement_at
from .rules import Rule
from .shares import training_passes


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

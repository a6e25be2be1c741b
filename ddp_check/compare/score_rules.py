"""The rule on evaluations: each sample counts once."""

import math
import re

from ..notes import Batch, Collective, Pass, PassEnd, Step
from ..script import source
from .numbers import files_of, shares_of
from .order_rules import passes_of
from .rules import Rule
from .samples import loader_of


def calls_after(notes, about):
    """The collective calls after this pass begins and before what comes next."""
    later = [n.at for kind in (Batch, Step, Pass) for _, n in notes[kind] if n.key != about.key]
    end = min([at for at in later if at > about.at], default=math.inf)
    return [call for _, call in notes[Collective] if about.at < call.at < end]


def repeated(ranks):
    """{step: the part of an evaluation's samples that a sampler gives twice}, where the ranks put
    together what they have of it: other scores follow."""
    lists, found = [{p.key: order for _, p, order, _ in passes_of(n)} for n in ranks], {}
    for step, about, _, trains in passes_of(ranks[0]):
        everyone = [index for of_rank in lists for index in of_rank.get(about.key, [])]
        calls = [call.name for call in calls_after(ranks[0], about)]
        if everyone and not trains and about.has_share and re.search("reduce|gather", str(calls)):
            found[step] = len(everyone) / len(set(everyone)) - 1
    return found


class TestSamples(Rule):
    name = "test set"
    right = "the samples of a whole evaluation count once each"
    needs = "a whole pass, of each rank's own part, over a loader without training (not --short)"
    remedy = "give each rank Subset(test_set, range(rank, len(test_set), world_size))", "#scores"

    def find(self, one, ranks):
        ended = [{note.key for _, note in notes[PassEnd]} for notes in ranks]
        lists = [{p.key: order for _, p, order, _ in passes_of(notes)} for notes in ranks]
        of_one = {p.key: order for _, p, order, _ in passes_of(one)}
        ended.append({note.key for _, note in one[PassEnd]})
        trained = {p.loader for _, p, _, trains in passes_of(ranks[0]) if trains}
        sizes, seen = {p.key: p.size for _, p in one[Pass]}, False
        for step, about, order, _ in passes_of(ranks[0]):
            if about.loader in trained or not all(about.key in keys for keys in ended):
                continue
            orders = [of_rank.get(about.key, []) for of_rank in lists]
            everyone = [index for indices in orders for index in indices]
            number = len(of_one[about.key])
            if about.size != sizes[about.key]:  # a dataset of the rank's share: other indices
                seen = True
                if len(everyone) < number:
                    shares = shares_of(files_of(ranks[0]))
                    return self.left_out(step, about, number - len(everyone), number, shares)
                continue
            is_same = all(indices == order for indices in orders)
            if len(lists) > 1 and order and None not in order and is_same:
                if line := self.put_together(ranks[0], about):
                    text = f"all {len(order)} samples on each rank, and then {source(line)}: does "
                    text += f"each count {len(lists)} times?"
                    return self.look(step, about.key[0], text)
                continue  # each rank has the score of all
            seen = True
            if missing := set(of_one[about.key]) - set(everyone):
                return self.left_out(step, about, len(missing), number)
            if self.drops_repeated(ranks[0], about):
                continue
            if about.has_share and None not in everyone and len(set(everyone)) < len(everyone):
                text = f"{len(everyone)} samples on all ranks, of {len(set(everyone))}: "
                text += f"{about.sampler} repeats some, which count twice"
                return self.look(step, about.key[0], text, loader_of(about.key))
        return [] if seen else None

    def left_out(self, step, about, missing, number, more=()):
        text = f"{missing} of {number} samples of one process are on no rank"
        return self.look(step, about.key[0], text, more)

    def put_together(self, notes, about):
        """The line of a call that puts the ranks' samples together; sums are divided by a sum."""
        calls = [call for call in calls_after(notes, about) if "gather" in call.name]
        return calls[0].line if calls else None

    def drops_repeated(self, notes, about):
        """Accelerate knows what its loaders have repeated."""
        return any(call.name == "gather_for_metrics" for call in calls_after(notes, about))

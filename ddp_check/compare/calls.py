"""A rule on collective calls: one that a rank makes alone meets the next one of the others. They
hang, or get what was meant for another call."""

import itertools

from ..notes import Collective, Step
from ..script import source
from ..text import branch_of
from .rules import Rule


class Calls(Rule):
    name = "calls"
    right = "all ranks make the same collective calls, in the same order"
    needs = "a collective call, such as all_reduce, or a wrapped model with buffers"
    remedy = "call it on all ranks; on one, evaluate the model that DDP wraps", "#rank-0"

    def find(self, one, ranks):
        theirs = [{} for _ in ranks]  # of each rank: {step: [call]}
        for of, notes in zip(theirs, ranks):
            for step, call in notes[Collective]:
                if call.of_all:
                    of.setdefault(step, []).append(call)
        lines = [{key(call) for calls in of.values() for call in calls} for of in theirs]
        steps = min(len(notes[Step]) for notes in ranks)
        for step in sorted({step for of in theirs for step in of}):
            first, *others = [of.get(step, []) for of in theirs]
            for rank, calls in enumerate(others, 1):
                for a, b in itertools.zip_longest(first, calls):
                    is_a = is_alone(a, b, lines[0], lines[rank]) or not b and step < steps
                    is_b = is_alone(b, a, lines[rank], lines[0]) or not a and step < steps
                    if is_a or is_b:
                        return self.alone(step, 0 if is_a else rank, a if is_a else b)
        return [] if any(theirs) else None

    def alone(self, step, rank, call):
        text = f"rank {rank} makes this call without the others: {call.name}"
        found = self.wrong(step, call.line, text)
        found[0].more += [f"called at {source(line)}" for line in call.callers[:1]]
        branches = [branch_of(line) for line in (call.line, *call.callers[:1])]
        found[0].more += [source(branch) for branch in branches if branch][:1]
        return found


def key(call):
    return call.name, call.line


def is_alone(call, other, mine, theirs):
    """Whether a rank makes its call instead of the other's, which it makes, too, at another time:
    so they are no two branches of an `if`. `mine`, `theirs`: all that these ranks make."""
    both = call is not None and other is not None and key(call) != key(other)
    return both and key(call) not in theirs and key(other) in mine

"""A rule on collective calls: one that a rank makes alone meets the next one of the others. They
hang, or get what was meant for another call."""

import itertools
import re

from ..notes import PASS, Collective, End, Finding, Step
from ..script import source
from ..text import branch_of, loops_around
from .ends import NO_CONNECTION, USUAL_ENDS
from .rules import Rule

FEWER = {
    "remedy": "give all ranks as many batches, as a DistributedSampler does, or communicate after "
    "the loop",
    "section": "#different-numbers-of-batches",
}


class Calls(Rule):
    name = "calls"
    right = "all ranks make the same collective calls, in the same order"
    needs = "a collective call, such as all_reduce, or a wrapped model with buffers"
    remedy = "call it on all ranks; on one, evaluate the model that DDP wraps", "#rank-0"

    def find(self, one, ranks):
        theirs = [calls_of(notes) for notes in ranks]
        lines = [{key(call) for _, call in calls} for calls in theirs]
        if any(map(stuck_at, ranks)):
            for rank, other in itertools.permutations(range(len(ranks)), 2):
                if again := made_again(ranks[other], theirs[rank], theirs[other]):
                    return self.again(*again, rank, other)
        for rank in range(1, len(ranks)):
            for (step, a), (_, b) in zip(theirs[0], theirs[rank]):
                # Without gradients, DDP's next pass sends no buffers: they are as many, and fit if
                # no other call is between them.
                is_even = a.name == b.name == PASS and not any(map(stuck_at, ranks))
                verdict = "look" if is_even else "WRONG"
                if is_alone(a, b, lines[0], lines[rank]):
                    return self.alone(step, 0, a, verdict)
                if is_alone(b, a, lines[rank], lines[0]):
                    return self.alone(step, rank, b, verdict)
        return [] if any(theirs) else None

    def alone(self, step, rank, call, verdict):
        text = f"rank {rank} makes this call without the others: {call.name}"
        more = [f"called at {source(line)}" for line in call.callers[:1]]
        branches = [branch_of(line) for line in (call.line, *call.callers[:1])]
        more += [source(branch) for branch in branches if branch][:1]
        return self.wrong(step, call.line, text, more, verdict=verdict)

    def again(self, step, call, loop, rank, other):
        text = f"rank {rank} makes this call once more than rank {other}, whose loop has ended: "
        more = [f"in the loop of {source(loop)}"]
        return [Finding("WRONG", self.name, step, text + call.name, call.line, more, **FEWER)]


def made_again(notes, mine, theirs):
    """The first call of a rank that another does not make, if the rank has made it in this step
    before, and in a loop: that over its batches, of which it has more. (step, call, the loop's
    line), or None. `notes`: of the other rank; `mine`, `theirs`: all calls of both."""
    state = notes[End][-1][1].state if notes[End] else ""
    if state and state not in USUAL_ENDS and not re.search(NO_CONNECTION, state):
        return None  # it has ended by an error of its own
    calls = itertools.zip_longest(mine, theirs, fillvalue=(0, None))
    for number, ((step, call), (_, other)) in enumerate(calls):
        if call is None or other is None or key(call) != key(other):
            if call is None or call.name == PASS:  # of the training: its steps tell more
                return None
            before = [(key(each), each.callers) for at, each in mine[:number] if at == step]
            loop, *_ = [*loops_of(call), ""]
            is_inside = other is not None and loop in loops_of(other)  # then that is made alone
            is_again = (key(call), call.callers) in before and loop and not is_inside
            return (step, call, loop) if is_again else None
    return None


def loops_of(call):
    """The lines of all loops that a call is made in."""
    return [loop for at in (call.line, *call.callers) for loop in loops_around(at)]


def stuck_at(notes):
    """The line where it has crashed, or was stopped; "" if neither."""
    found = re.match(r"(?:a crash|stopped.*?) at (\S+:\d+)", notes.end())
    return found[1] if found else ""


def calls_of(notes):
    """Those of all ranks, and the one that it was about to make again where it has ended: before
    its second pass sends buffers, DDP sends the order of its gradients."""
    calls = [each for each in notes[Collective] if each[1].of_all]
    step, line = len(notes[Step]), stuck_at(notes)
    again = [(step, call) for _, call in calls if call.line == line]
    return calls if (step, line) in [(at, call.line) for at, call in calls] else calls + again[-1:]


def key(call):
    return call.name, call.line


def is_alone(call, other, mine, theirs):
    """Whether a rank makes its call instead of the other's, which it makes, too, at another time:
    so they are no two branches of an `if`. `mine`, `theirs`: all that these ranks make."""
    return key(call) not in theirs and key(other) in mine

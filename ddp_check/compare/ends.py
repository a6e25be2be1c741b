"""Processes that make other numbers of steps, or end otherwise."""

import ast
import itertools
import math
import re

from ..notes import Batch, Collective, Finding, PassEnd, Said, Step
from ..script import source
from ..text import branch_of, lines_inside, loops_around, statement_at
from .fits import sides
from .kinds import DECIDE
from .numbers import Variables
from .shares import training_passes

USUAL_ENDS = "its end", "--steps"
NO_CONNECTION = (
    r"Connection closed|Connection reset|Broken pipe|Timed out|connectionClosed|recvBytes"
)


def left_out_steps(ranks):
    """The first step that a rank has left out, though it has computed gradients for it: by an `if`
    around it, or a `continue` before. None if there is none."""
    passes = [{} for _ in ranks]  # of each rank: {step: number of backward passes before it}
    for of, notes in zip(passes, ranks):
        for step, _ in notes.seen("loss"):
            of[step] = of.get(step, 0) + 1
    for step in range(min(len(notes[Step]) for notes in ranks)):
        numbers = [of.get(step, 0) for of in passes]
        line = ranks[numbers.index(min(numbers))][Step][step][1].line  # which the other leaves out
        branch = branch_of(line)
        if len(set(numbers)) > 1 and branch:
            rank = numbers.index(max(numbers))
            text = f"rank {rank} has made fewer steps than the others: {max(numbers)} backward "
            text += f"passes for this one, {min(numbers)} elsewhere; later steps are not compared"
            verdict = "look" if "%" in source(branch) else "WRONG"
            return Finding(verdict, "steps", step, text, branch, [source(line)], **DECIDE)
    return None


def other_optimizers(one, ranks):
    """The first step that a rank makes with an optimizer that is made elsewhere, as where rank 0
    alone tries a rate first. None if there is none."""
    theirs = [{note.key: note.made.get("made", [""])[0] for _, note in n[Step]} for n in ranks]
    for step, note in one[Step]:
        line = note.made.get("made", [""])[0]
        for rank, of in enumerate(theirs):
            made = of.get(note.key, line)
            if made != line:
                text = f"rank {rank} makes its steps with another optimizer than one process: "
                text += "nothing after it can be compared"
                about = {"advice": "unpaired", "section": "#decisions"}
                return Finding("look", "steps", step, text, line, more=[source(made)], **about)
    return None


def uneven_join(ranks):
    """Where ranks make other numbers of steps inside of DDP's join(), by which those without
    batches wait for the others. None if there is none."""
    ends = [[(step, note) for step, note in n[Said] if note.kind == "join"] for n in ranks]
    for of_ranks in itertools.zip_longest(*ends):
        steps = [end[0] if end else math.inf for end in of_ranks]
        if len(set(steps)) > 1:
            line = next(end for end in of_ranks if end)[1].text
            text = "the ranks make other numbers of steps inside of join(): nothing after it can be"
            about = {"advice": "unpaired", "section": "#loader"}
            return Finding("look", "steps", min(steps), f"{text} compared", line, **about)
    return None


def left_pass(one, ranks):
    """The first pass over a training loader that was left after other numbers of batches: by a
    `break`, whose `if` is named. None if there is none."""
    taken = []  # of each process: {pass: (number of batches, the step of the last)}
    ended = {note.key for notes in (one, *ranks) for _, note in notes[PassEnd]}
    for notes in (one, *ranks):
        batches = [(step, batch) for step, batch in notes[Batch] if batch.trains]
        taken.append({batch.key: (batch.number + 1, step) for step, batch in batches})
    ended |= taken[0].keys() - training_passes(one)
    passes = [key for key in taken[0] if key not in ended and all(key in of for of in taken)]
    for key in passes:
        numbers, steps = zip(*[of[key] for of in taken])
        later = (*key[:2], key[2] + 1)  # where there is none, this pass may go on
        left = [n for n, of in zip(numbers, taken) if later in of]
        if left and max(numbers) > min(left):
            text = f"a pass is left after so many batches: {sides(*numbers)}; later steps are not "
            text += "compared"
            breaks = [branch_of(at) for at in lines_inside(key[0]) if is_break(at)]
            line = next(filter(None, breaks), key[0])
            more = [f"in the loop of {source(key[0])}"]
            verdict = "WRONG" if len(set(numbers[1:])) > 1 else "look"
            return Finding(verdict, "steps", min(steps) + 1, text, line, more, **DECIDE)
    return None


def is_break(line):
    return isinstance(statement_at(line), ast.Break)


def explains_ends(finding):
    """Whether it follows from a finding that processes make other numbers of steps."""
    is_length = finding.what == "epoch" and finding.verdict == "look"
    is_call = finding.what == "calls" and finding.verdict == "WRONG"
    return is_length or is_call or finding.advice == "unpaired"


def gets_weights(rank, ranks):
    """Whether it makes no step, as a rank does that gets the weights of another after each, without
    DDP: both broadcast at a line where that one has made steps."""
    is_ddp = any(note.averaged for other in ranks for _, note in other[Step])
    if rank[Step] or is_ddp:
        return False
    lines = {call.line for _, call in rank[Collective] if call.name == "broadcast"}
    calls = [each for other in ranks for each in other[Collective]]
    return any(step and call.name == "broadcast" and call.line in lines for step, call in calls)


def about_ends(one, ranks, counts, ends):
    """They have made other numbers of steps, or ended otherwise; or all by the same error, which is
    the script's, and not of data parallelism."""
    steps, places = min(counts), [end.partition(": ")[0] for end in ends]
    lost = [re.search(NO_CONNECTION, end) is not None for end in ends[1:]]
    if not all(lost):  # the others have ended first, and say why
        ends[1:] = [
            f"{place}, as another rank had ended" if is_lost else end
            for end, place, is_lost in zip(ends[1:], places[1:], lost)
        ]
    text, *more = [f"{count} steps, then {end}" for count, end in zip(counts, ends)]
    more = [f"rank {rank}: {line}" for rank, line in enumerate(more)]
    if len(set(counts)) == 1 and places[0] in places[1:] and places[0] != "its end":
        return Finding("look", "end", steps, f"all processes: {text}")
    if getting := [rank for rank, notes in enumerate(ranks) if gets_weights(notes, ranks)]:
        text = f"ranks {getting} make no steps, but get the weights of one that does: nothing can "
        line = next(notes[Step][0][1].line for notes in ranks if notes[Step])
        return Finding("look", "end", steps, f"{text}be compared", line, more)
    if counts[0] and not any(counts[1:]):
        more.append(
            "does a launcher pass the rank as a flag? Then with {rank}, as in --rank {rank}"
        )
    if len(set(counts[1:])) > 1:
        rank = max(range(len(ranks)), key=lambda rank: counts[1 + rank])
        line = ranks[rank][Step][steps][1].line
        more.append(f"the step of rank {rank} alone: {source(line)}")
    extra = [notes[Step][steps][1] for notes in (one, *ranks) if len(notes[Step]) > steps]
    if extra and steps and (branch := branch_of(extra[0].line)):
        more.append(source(branch))
    waiting = [found[1] for end in ends[1:] if (found := re.search(r" at (\S+:\d+)", end))]
    callers = [extra[0].line, *extra[0].callers] if extra and steps else waiting
    loops = list(dict.fromkeys(loop for line in callers for loop in loops_around(line)))
    breaks = [branch_of(at) for loop in loops[:2] for at in lines_inside(loop) if is_break(at)]
    more += [f"it ends early by {source(at)}" for at in dict.fromkeys(breaks) if at]
    more += [f"in the loop of {source(loop)}" for loop in loops]
    if extra and steps:
        more += Variables(one, ranks).behind(loops, 0, further=0)
        inner = next((n for n, line in enumerate(callers) if loops_around(line)), len(callers))
        more += [f"called at {source(at)}" for at in callers[inner + 1 :][:1]]
    return Finding("WRONG", "end", steps, f"one process: {text}", more=more)

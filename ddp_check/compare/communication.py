"""The collective calls of a rank, beside its backward passes and steps."""

import math

from ..notes import Averages, Collective, Said
from ..script import source
from ..text import branch_of


def told_to_average(notes):
    """{step: (the last line that tells DDP whether to average, whether it does so only after the
    last pass, which was told not to)}"""
    passes, told, last = {step: note.at for step, note in notes.seen("outputs")}, {}, True
    for step, note in notes[Averages]:
        is_late = note.does and not last and note.at > passes.get(step, math.inf)
        told[step], last = (note.line, is_late), note.does
    return told


class Communication:
    """Which collective calls a step's gradients may come from, or are averaged by."""

    def __init__(self, notes):
        self.told = told_to_average(notes)
        # Lines that have registered a hook of a parameter, which gets the rank's own gradient.
        self.hooks = [note.text for _, note in notes[Said] if note.kind == "hook"]
        losses = {step: loss.at for step, loss in notes.seen("loss")}
        # Before that, a step reports what the one before it has computed.
        starts = {step: seen.at for step, seen in reversed([*notes.seen("inputs")])}
        calls = [(step, call) for step, call in notes[Collective] if call.has_grad]
        calls = [
            (step, call)
            for step, call in calls
            if starts.get(step, math.inf if starts else -1) < call.at < losses.get(step, math.inf)
        ]
        calls = [both for both in calls if not both[1].has_backward] or calls
        printed = [(step, call) for step, call in calls if call.of_number and "gather" in call.name]
        calls = [both for both in calls if both not in printed] or calls
        # {line: name} of collective calls in a step, before its backward()
        self.calls = {call.line: call.name for step, call in calls if step == calls[0][0]}
        self.callers = {call.line: call.callers for _, call in calls}
        # Those that no backward of the script's own differentiates.
        self.cut = [call.line for _, call in calls if not call.has_backward]
        self.gathered = {}  # {step: the lines that gather something before its last backward()}
        for step, call in notes[Collective]:
            is_before = call.at < losses.get(step, -1)
            if "gather" in call.name and is_before and not (call.has_backward or call.of_number):
                self.gathered.setdefault(step, {})[call.line] = None
        calls = [branch_of(call.line) for _, call in notes[Collective] if call.of_all]
        self.communicates = set(calls)  # the branches in which all ranks have to be
        reduces = [(step, call) for step, call in notes[Collective] if "reduce" in call.name]
        # [(step, line, name)] of calls between backward() and the step
        self.late = [
            (step, call.line, call.name)
            for step, call in reduces
            if call.at > losses.get(step, math.inf)
        ]
        self.reduces_in_steps = any(call.in_step for _, call in reduces)  # of an optimizer

    def not_differentiated(self):
        """In words: the calls of self.cut."""
        calls = [(at, name) for at, name in self.calls.items() if at in self.cut]
        return [f"this {name} is not differentiated: {source(at)}" for at, name in calls]

    def by_hand(self, step):
        """In words: the collective calls between a step's backward() and it."""
        late = dict.fromkeys((source(at), name) for of, at, name in self.late if of == step)
        return [f"this {name} is after backward(): {at}" for at, name in late][:3]

    def gathers(self, step):
        """In words: the calls that gather something before a step's last backward()."""
        lines = self.gathered.get(step, ())
        return [f"before it, this gathers: {source(line)}" for line in lines]

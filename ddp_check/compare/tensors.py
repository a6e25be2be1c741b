"""Weights, gradients, updates, buffers and settings beside those of one process."""

import math
import os
import re

from ..notes import Compared, Finding, Step
from ..script import source
from ..syntax import lines_that_set
from .fits import CONTINUED, meaning, relative, sides

BATCH_NORM = r"running_mean$|running_var$|num_batches_tracked$"  # averages: each rank's own


def parts_of(names, depth=None):
    """What names have in common, up to a dot; or the different ones of their first parts."""
    parts = [name.split(".") for name in names]
    depth = depth or max(1, len(os.path.commonprefix(parts)))
    return ", ".join(dict.fromkeys(".".join(part[:depth]) for part in parts))


class Tensors:
    """The weights, gradients, updates and buffers that were compared."""

    KINDS = {  # kind: (its tolerance, or the given one; which part of all others is nothing)
        "gradients": (None, 1e-2),
        "weights": (None, 1e-2),
        "update": (0.05, 1.0),
        "buffers": (1e-3, 1e-5),
    }

    def __init__(self, ranks, tolerance):
        self.tolerance, self.ranks = tolerance, len(ranks)
        self.findings, self.largest, self.gradients = [], {}, {}
        self.factors = set()  # steps in which all gradients are the same number of times as large
        for rank, notes in enumerate(ranks):
            for step, note in notes[Compared]:
                found = note.differences
                if note.kind == "gradients":
                    self.gradients.setdefault(step, []).append(found)
                if note.missing:
                    text = f"{note.line}: {note.missing[:3]} on one side alone"
                    self.findings.append(Finding("WRONG", "parameters", step, text))
                if found:
                    self.check(f" on rank {rank}" if rank else "", step, note, found)

    def check(self, on, step, note, found):
        kind, (limit, part) = note.kind, self.KINDS[note.kind]
        small = part * math.sqrt(sum(d.one**2 for d in found.values()))
        sizes = {k: d.size / max(d.one, small, 1e-3 * d.other, 1e-30) for k, d in found.items()}
        name, limit = max(sizes, key=sizes.get), limit or self.tolerance
        self.largest[kind] = max(self.largest.get(kind, 0.0), sizes[name])
        if sizes[name] > limit:
            many = sum(size > limit for size in sizes.values())
            text = f"{source(note.line)}: {kind}{on}: {many} of {len(sizes)} differ; most "
            text += f"{name}, by {sizes[name]:.1e} of its size"
            text += self.explain(step, found, small) if kind == "gradients" else ""
            verdict = "look" if kind == "buffers" and re.search(BATCH_NORM, name) else "WRONG"
            self.findings.append(Finding(verdict, kind, step, text))

    def explain(self, step, found, small):
        large = [d for d in found.values() if d.one > small]
        square = sum(d.one**2 for d in large)
        ratio = sum(d.ratio * d.one**2 for d in large) / square if large else 1.0
        if all(d.ratio > 0.98 * ratio and d.other < 1.02 * ratio * d.one for d in large):
            self.factors.add(step) if abs(ratio - 1) > 0.3 else None
            return meaning(ratio, self.ranks)
        return ""

    def own_gradients(self, step):
        """The names of a step's parameters of which each rank has its own gradient, and of the
        others; not of those whose gradients are nothing."""
        ranks, own, equal = self.gradients.get(step, [{}]), [], []
        for name in ranks[0]:
            found = [of_rank[name] for of_rank in ranks if name in of_rank]
            marks, size = [d.mark for d in found], max(d.other for d in found)
            if size > 1e-12:
                is_own = max(marks) - min(marks) > 1e-3 * size
                (own if is_own else equal).append(name)
        return own, equal

    def unlike(self, step):
        """How the ranks' gradients of a step differ from each other; None if they do not."""
        own, equal = self.own_gradients(step)
        if not own:
            return None
        always = {name for at in self.gradients for name in self.own_gradients(at)[0]}
        right = [name for at in self.gradients for name in self.own_gradients(at)[1]]
        right = [name for name in right if name not in always]
        text = f"each rank has its own gradient of {parts_of(own)}"
        if right:
            text += f", but not of {parts_of(right, parts_of(own).count('.') + 1)[:200]}"
        return f"{text}: not averaged in this step?"


def compare_settings(one, ranks, variables):
    """Learning rates and such, on any rank."""
    theirs = [{note.key: note for _, note in notes[Step]} for notes in ranks]
    for step, note in one[Step]:
        others = [notes.get(note.key, note) for notes in theirs]
        if any(len(other.settings) != len(note.settings) for other in others):
            continue  # other groups of parameters
        for number, (name, mine) in enumerate(note.settings):
            numbers = [other.settings[number][1] for other in others]
            if any(relative(mine, other) > 1e-6 for other in numbers):
                text = f"{source(note.line)}: {name} is {sides(mine, *numbers)}"
                world, set_at = len(ranks), lines_that_set(note.line, name)
                if step == 0 and mine and abs(numbers[0] / mine / world - 1) < 0.01:
                    text += f"; {world} times: is the batch of all ranks that much larger, too? "
                    text += "If so, give one process this rate by --one"
                text += f"{CONTINUED}made or set at {', '.join(note.made + set_at)}"
                text += variables.behind(set_at + note.made, step)
                yield Finding("WRONG", "settings", step, text)

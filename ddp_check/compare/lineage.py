"""What the script's lines have computed, what it was made from, and which of it differs."""

import itertools

from ..notes import Value
from ..script import source
from .fits import CONTINUED, fit, meaning, number_in, relative, sides


class Values:
    """What the lines of the script have computed: on one process, and on the ranks."""

    def __init__(self, one, ranks, tolerance):
        self.tolerance, self.ranks, self.known = tolerance, len(ranks), {}
        mine, *theirs = [
            {(step, v.kind, v.line, v.name, v.number): v for step, v in notes[Value]}
            for notes in (one, *ranks)
        ]
        last = [{key[:4]: key[4] for key in sorted(notes)} for notes in (mine, *theirs)]
        self.all, self.others, self.of_step, self.alone = {}, {}, {}, {}
        for key, value in mine.items():
            if len({numbers.get(key[:4]) for numbers in last}) == 1:  # else it is any other one
                self.all[value.index] = value
                self.others[value.index] = [notes.get(key) for notes in theirs]
                self.of_step.setdefault(key[0], []).append(value)

        self.lines = [{v.index: (step, v.line) for step, v in n[Value]} for n in (one, *ranks)]
        names = ["one process", *[f"rank {rank}" for rank in range(len(ranks))]]
        ran = [dict.fromkeys(lines.values()) for lines in self.lines]
        for step_and_line in (key for lines in ran for key in lines):
            on = [name for name, lines in zip(names, ran) if step_and_line in lines]
            if len(on) < len(names):
                self.alone[step_and_line] = " and ".join(on)

    def differs(self, index):
        """Whether it is not made up of what the ranks have."""
        if index not in self.known:
            wrong = (None, "sum", "rows") if self.all[index].kind == "loss" else (None,)
            self.known[index] = any(found in wrong for found in self.fits(index))
        return self.known[index]

    def fits(self, index):
        """Of each of its tensors."""
        for one, *others in self.summaries(index):
            yield fit(one, others, self.tolerance)

    def summaries(self, index):
        """Summaries of each of its tensors, on one process and on the ranks."""
        return itertools.zip_longest(*[v.summaries for v in (self.all[index], *self.others[index])])

    def find(self, step, *kinds):
        """Those of a step that differ, in the order of the script."""
        values = [v for v in self.of_step.get(step, []) if v.kind in kinds]
        return [v for v in values if self.differs(v.index)]

    def is_fresh(self, value):
        """Whether it is made from nothing that torch has computed, and is no batch of a loader."""
        return not any(i in self.all for i in value.made_from) and not value.made_by

    def origin(self, value):
        """The first value that differs among those that this one is made from."""
        while True:
            wrong = [i for i in value.made_from if i in self.all and i < value.index]
            wrong = [i for i in wrong if self.all[i].kind in ("value", "outputs")]
            wrong = [i for i in wrong if self.differs(i)]
            if not wrong:
                return value
            value = self.all[min(wrong)]

    def alone_before(self, step, value=None):
        """A line that not all have run: of what a value is made from, or else the first of a step,
        and who has run it; or None."""
        lines = [(at, line) for at, line in self.alone if at == step]
        if value is not None:
            runs = zip(self.lines, (value, *self.others[value.index]))
            made_from = [known.get(index) for known, v in runs for index in v.made_from]
            lines = [line for line in lines if line in made_from]
        return (lines[0][1], self.alone[lines[0]]) if lines else None

    def ancestors(self, value):
        """All values of lines that one is made from, in the order of the script."""
        found, todo = {}, [value]
        while todo:
            for index in todo.pop().made_from:
                if index in self.all and index not in found and self.all[index].kind == "value":
                    found[index] = self.all[index]
                    todo.append(found[index])
        return [found[index] for index in sorted(found) if index < value.index]

    def printed(self, step, number):
        """What a printed number that differs comes from."""
        for value in reversed(self.find(step, "value")):
            scalars = [number_in(part) for part in value.summaries]
            if any(n is not None and relative(n, number) < 5e-3 for n in scalars):
                return self.origin(value)
        return None

    def behind(self, value):
        """In words: the last lines before it that have each rank's own, whose mean or sum over the
        ranks is one process's."""
        lines = [value.line, self.line_of(value)]
        text = ""
        for before in reversed(self.ancestors(value)):
            if len(lines) < 4 and before.line not in lines:
                if {"mean", "sum"} & set(self.fits(before.index)):
                    lines.append(before.line)
                    text += f"{CONTINUED}a mean or sum over ranks is right up to "
                    text += f"{source(before.line)}  [{before.name}]"
        return text

    def coupled(self, step):
        """The first value inside of a model that differs, where its outputs of a step do, but its
        inputs do not; or None."""
        for outputs in self.find(step, "outputs"):
            inputs = [i for i in outputs.made_from if i in self.all]
            inputs = [self.all[i] for i in inputs if self.all[i].kind == "inputs"]
            if not inputs or any(self.differs(v.index) for v in inputs):
                continue
            if not any(part and part[0] for part in outputs.summaries):
                continue  # only numbers: a loss that the model computes
            inside = [
                v
                for v in self.of_step[step]
                if v.model == inputs[0].index and v.kind == "value" and self.differs(v.index)
            ]
            return (inside or [outputs])[0]
        return None

    def line_of(self, value):
        """Of a loss, the line that has made it."""
        makers = [i for i in value.made_from if i in self.all and value.kind == "loss"]
        return self.all[max(makers)].line if makers else value.line

    def describe(self, value):
        """The line, and what it computes on each side."""
        text = f"{source(self.line_of(value))}  [{value.name}]"
        for one, *others in self.summaries(value.index):
            fits = fit(one, others, self.tolerance)
            if fits == "unknown" or fits and value.kind != "loss":
                continue
            if one[0]:
                shapes = ", ".join(str(other[0]) for other in others)
                text += f": other numbers, of shape {one[0]} on one process"
                return f"{text}, {shapes} on the ranks"
            mine, *theirs = map(number_in, (one, *others))
            text += f": {sides(mine, *theirs)}"
            if value.kind == "loss" and mine:
                text += meaning(sum(theirs) / len(theirs) / mine, self.ranks)
            return text
        return text

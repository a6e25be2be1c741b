"""What the script's lines have computed, what it was made from, and which of it differs."""

from ..notes import MANY_VALUES, Said
from ..script import source
from .fits import fit, meaning, relative, sides
from .kinds import KINDS, VALUES, limit_of, offs, paired


class Lineage:
    """What the lines of the script have computed: on one process, and on the ranks."""

    def __init__(self, one, ranks, tolerance, noise):
        self.tolerance, self.noise, self.ranks = tolerance, noise, len(ranks)
        self.all, self.others, self.of_step, self.alone, self.known = {}, {}, {}, {}, {}
        last = [  # {where: how many there are}
            {(step, v.kind, v.line, v.name): v.number for step, v in notes.seen(*VALUES)}
            for notes in (one, *ranks)
        ]
        for kind in VALUES:
            for step, value, others in paired(kind, one, ranks):
                where = step, kind, value.line, value.name
                numbers = {of.get(where) for of in last}
                is_known = len(numbers) == 1 and len(others) == len(ranks)
                if is_known and MANY_VALUES - 1 not in numbers:  # else it is any other one
                    self.all[value.index] = value
                    self.others[value.index] = list(others.values())
                    self.of_step.setdefault(step, []).append(value)
        for values in self.of_step.values():
            values.sort(key=lambda value: value.index)
        self.evaluated = list(paired("evaluation", one, ranks))

        self.passes = [{} for _ in (one, *ranks)]  # {step: the numbers of rows of its passes}
        self.of_passes = [{} for _ in (one, *ranks)]  # {step: a mark of what goes into each}
        for of, marks, notes in zip(self.passes, self.of_passes, (one, *ranks)):
            for step, value in notes.seen("outputs"):
                rows = next((s.shape[0] for s in value.values.values() if s and s.shape), 0)
                of.setdefault(step, []).append(rows)
            for step, value in notes.seen("inputs"):
                norms = [s.norm for s in value.values.values() if s]
                marks.setdefault(step, []).append(f"{sum(norms):.5g}")
        self.of_rank = {}  # {step: what is seen on rank 0, in its order}
        for step, value in ranks[0].seen(*VALUES):
            self.of_rank.setdefault(step, []).append(value)
        self.lines = [
            {v.index: (step, v.line) for step, v in notes.seen(*VALUES)} for notes in (one, *ranks)
        ]
        called = [
            (v.line, v.about.get("called_at")) for n in (one, *ranks) for _, v in n.seen(*VALUES)
        ]
        self.called_at = {line: at for line, at in called if at}  # of the line's function
        said = [note for notes in (one, *ranks) for _, note in notes[Said]]
        # The lines by which datasets give samples that depend on earlier ones.
        self.remember = {note.text for note in said if note.kind == "remembers"}
        names = ["one process", *[f"rank {rank}" for rank in range(len(ranks))]]
        ran = [dict.fromkeys(lines.values()) for lines in self.lines]
        for step_and_line in (key for lines in ran for key in lines):
            on = [name for name, lines in zip(names, ran) if step_and_line in lines]
            if len(on) < len(names):
                self.alone[step_and_line] = " and ".join(on)

    def differs(self, index):
        """Whether it is not made up of what the ranks have."""
        if index not in self.known:
            self.known[index] = None in self.fits(index)
        return self.known[index]

    def fits(self, index):
        """Of each of its tensors."""
        value = self.all[index]
        return [self.fit(value, part, of) for part, of in self.parts(index).items()]

    def fit(self, value, part, sketches):
        """`sketches`: on one process and on the ranks."""
        if part in value.about.get("places", ()):
            return "unknown"
        one, *ranks = sketches
        noise = self.noise.get((value.kind, value.line, value.name), {}).get(part, 0.0)
        limit = limit_of(value.kind, self.tolerance, noise, one)
        return fit(KINDS[value.kind].fits, one, ranks, limit)

    def off(self, value):
        """How far what differs of it is from what fits, as a part of its size."""
        both = zip(self.parts(value.index).items(), self.fits(value.index))
        wrong = {part: of for (part, of), fits in both if fits is None}
        one, *ranks = [{part: of[n] for part, of in wrong.items()} for n in range(1 + self.ranks)]
        return max(offs(value.kind, one, ranks).values(), default=0.0)

    def parts(self, index):
        """{part: its sketches, on one process and on the ranks}"""
        values = [of.values for of in (self.all[index], *self.others[index])]
        names = dict.fromkeys(part for of in values for part in of)
        return {part: [of.get(part) for of in values] for part in names}

    def find(self, step, *kinds):
        """Those of a step that differ, in the order of the script."""
        values = [v for v in self.of_step.get(step, []) if v.kind in kinds]
        return [v for v in values if self.differs(v.index)]

    def is_fresh(self, value):
        """Whether it is made from nothing that torch has computed."""
        return not any(i in self.all for i in value.made_from)

    def trained_at(self):
        """{(line, model): (optimizer's number, name) of what the passes through it there train, in
        any step}; before an optimizer's first step, these are not known."""
        found = {}
        for values in self.of_rank.values():
            for value in values:
                if value.kind == "outputs":
                    found.setdefault((value.line, value.name), set()).update(value.about["trains"])
        return found

    def origin(self, value, but=()):
        """The first value that differs among those that this one is made from."""
        while True:
            wrong = [i for i in value.made_from if i in self.all]
            wrong = [i for i in wrong if self.all[i].kind in ("value", "outputs") and i not in but]
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
        return [found[index] for index in sorted(found)]

    def printed(self, step, number):
        """What a printed number that differs comes from."""
        for value in reversed(self.find(step, "value")):
            scalars = [sketch.number for sketch in value.values.values() if sketch]
            if any(n is not None and relative(n, number) < 5e-3 for n in scalars):
                return self.origin(value)
        return None

    def behind(self, value):
        """The last lines before it that have each rank's own, whose mean or sum over the ranks is
        one process's."""
        lines, found = [value.line, self.line_of(value)], []
        for before in reversed(self.ancestors(value)):
            if len(lines) < 4 and before.line not in lines:
                if ways := {"mean", "sum"} & set(self.fits(before.index)):
                    lines.append(before.line)
                    text = f"a {min(ways)} over ranks is right up to {source(before.line)}"
                    found.append(f"{text}  [{before.name}]")
        return found

    def line_of(self, value):
        """Of a loss, the line that has made it."""
        makers = [i for i in value.made_from if i in self.all and value.kind == "loss"]
        return self.all[max(makers)].line if makers else value.line

    def describe(self, value):
        """What the line computes on each side."""
        text = f"[{value.name}]"
        for part, fits in zip(self.parts(value.index).values(), self.fits(value.index)):
            if fits is not None:
                continue
            one, *ranks = part
            if one.shape:
                shapes = ", ".join(str(other.shape) for other in ranks)
                text += f": other numbers, of shape {one.shape} on one process"
                return f"{text}, {shapes} on the ranks"
            numbers = [sketch.number for sketch in part]
            text += f": {sides(*numbers)}"
            if value.kind == "loss" and one.number:
                text += meaning(sum(numbers[1:]) / len(ranks) / one.number, self.ranks)
            return text
        return text

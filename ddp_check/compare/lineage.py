"""What the script's lines have computed, what it was made from, and which of it differs."""

import numpy as np

from ..notes import MANY_VALUES, Said
from ..script import source
from .fits import fit, meaning, relative, same, sides
from .kinds import KINDS, VALUES, limit_of, offs, paired

EMPTY = "zeros", "ones", "empty", "full", "new_zeros", "zeros_like", "empty_like", "to", "cuda"
FORMS = "reshape", "view", "flatten", "ravel", "cat", "clone", "detach", "stack"
COUNTS = "arange", "eye", "linspace", "tril_indices", "triu_indices"


class Values:
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

    def other_passes(self, step):
        """How many passes through models are made, on one process and on the ranks, if these are
        other numbers, or of other numbers of rows where a line makes several; but not if one
        process makes all that the ranks make."""
        inputs, *of_ranks = [of.get(step, []) for of in self.of_passes]
        has_all = sorted(inputs) == sorted(sum(of_ranks, []))
        mine, *theirs = [of.get(step, []) for of in self.passes]
        numbers = [len(mine), *map(len, theirs)]
        lines = [v.line for v in self.of_rank.get(step, []) if v.kind == "outputs"]
        # What a model gives need not have the batch first.
        is_even = all(sum(of) == n or {*of} == {n} for n, *of in zip(mine, *theirs))
        is_even = is_even or len(set(lines)) == len(lines)
        return [] if has_all or (is_even and len(set(numbers)) == 1) else numbers

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
        """Whether it is made from nothing that torch has computed, and is no batch of a loader."""
        return not any(i in self.all for i in value.made_from) and not value.about.get("made_by")

    def is_from_outside(self, value):
        """Whether torch has computed none of its numbers but from such as were written into a
        tensor of zeros, as observations of an environment are."""
        makers = [value, *self.ancestors(value)]
        before = [self.all[i] for maker in makers for i in maker.made_from if i in self.all]
        roots = [v for v in before if v.kind != "value" or self.is_fresh(v)]
        is_made = value.about.get("made_by") or any(v.about.get("made_by") for v in before)
        return all(v.name in EMPTY for v in roots) and not is_made

    def has_own_numbers(self, value, step):
        """Whether it is made from numbers for its rows that the script has drawn in this step."""
        rows = {sketch.shape[0] for sketch in value.values.values() if sketch and sketch.shape}
        here = [v for v in self.of_step[step] if "made_by" not in v.about]  # but for batches
        here = {v.index for v in here if v.name not in (*EMPTY, *COUNTS)}
        makers = [v for v in self.ancestors(value) if v.index in here and self.is_fresh(v)]
        shapes = [v.values[0].shape for v in makers if v.values.get(0)]
        return any(shape and shape[0] in rows for shape in shapes)

    def is_drawn_at(self, value, lines):
        """Whether it is made from what one of these lines has drawn."""
        return any(v.about.get("drawn") in lines for v in [value, *self.ancestors(value)])

    def divided_by_own(self, losses):
        """What losses are made from: a sum divided by a number, of both of which each rank has its
        own; or None."""
        for value in [v for loss in losses for v in self.ancestors(loss) if v.name == "div"]:
            known = [i for i in value.made_from if i in self.all]
            if len(known) == len(value.made_from) == 2 and all(
                self.fits(i) == ["sum"] for i in known
            ):
                counts = [sketch.number for sketch in self.parts(known[1])[0]]
                if len(set(counts[1:])) > 1:
                    return value
        return None

    def mean_of_unequal(self, losses):
        """What losses are made from: a mean of rows of which the ranks have other numbers, and
        these; or (None, ())."""
        for value in [v for loss in losses for v in self.ancestors(loss)]:
            is_mean = self.fits(value.index) in (["mean"], ["same"])  # or they are nearly equal
            makers = value.made_from if is_mean else ()
            for part in [p for i in makers if i in self.all for p in self.parts(i).values()]:
                whole, *ranks = [
                    sketch.shape[0] if sketch and sketch.shape else 0 for sketch in part
                ]
                if len(set(ranks)) > 1 and sum(ranks) == whole:
                    return value, [whole, *ranks]
        return None, ()

    def is_gradient(self, value):
        """Whether it may be no more than a gradient in another form."""
        return self.is_fresh(value) and value.name in FORMS

    def trained_at(self):
        """{(line, model): (optimizer's number, name) of what the passes through it there train, in
        any step}; before an optimizer's first step, these are not known."""
        found = {}
        for values in self.of_rank.values():
            for value in values:
                if value.kind == "outputs":
                    found.setdefault((value.line, value.name), set()).update(value.about["trains"])
        return found

    def has_other_layout(self, value):
        """Whether it is made from places that a rank has counted for its share, as each so
        many-th, in another layout than that of its samples."""
        counts = [v for v in self.ancestors(value) if v.name in COUNTS]
        for one, *ranks in [p for v in counts for p in self.parts(v.index).values()]:
            if None not in (one, *ranks) and len(one.shape) == 1:
                mine, *theirs = [sketch.rows[0][1] for sketch in (one, *ranks)]
                both = sorted(mine), sorted(n for of_rank in theirs for n in of_rank)
                if len(both[0]) == len(both[1]) and np.allclose(*both):
                    return True
        return False

    def is_filled(self, value):
        """Whether its numbers are written into a tensor, and not drawn by torch."""
        known = [i for i in value.made_from if i in self.all]
        is_filled = bool(known) and known == list(value.made_from)
        return is_filled or value.name in ("tensor", "as_tensor", "from_numpy")

    def is_as_many(self, value):
        """Whether it has as many rows of a batch on one process as on each rank, which have
        others."""
        if not any("rows" in self.fits(i) for i in value.made_from if i in self.all):
            return False
        parts = [part for part in self.parts(value.index).values() if None not in part]
        has_rows = all(
            one.shape and {s.shape for s in ranks} == {one.shape} for one, *ranks in parts
        )
        return has_rows and not self.is_copied(value)

    def is_copied(self, value):
        """Whether all ranks have the same rows."""
        parts = [ranks for _, *ranks in self.parts(value.index).values() if None not in ranks]
        return all(ranks[0].shape and same(ranks[0], ranks) == 0 for ranks in parts)

    def says_nothing(self, value):
        """Whether it counts rows, of which a batch of all ranks has others; or it is a norm that
        all ranks have, as they have averaged their gradients."""
        if value.name == "clip_grad_norm_":
            norms = [other.values[0] for other in self.others[value.index]]
            return len({norm.number for norm in norms}) == 1
        return value.name == "arange" and self.is_fresh(value)

    def has_same_samples(self, value):
        """Whether a batch is made from the same samples in both runs, by a collate_fn of one's
        own."""
        everyone = value, *self.others[value.index]
        samples = mine, *theirs = [each.about.get("samples") for each in everyone]
        return all(samples) and all(
            relative(mine[index], total) < 1e-6
            for of_rank in theirs
            for index, total in of_rank.items()
            if index in mine
        )

    def origin(self, value, but=()):
        """The first value that differs among those that this one is made from."""
        while True:
            wrong = [i for i in value.made_from if i in self.all]
            wrong = [i for i in wrong if self.all[i].kind in ("value", "outputs") and i not in but]
            wrong = [i for i in wrong if self.differs(i)]
            if not wrong:
                return value
            value = self.all[min(wrong)]

    def has_other_places(self, value):
        """Whether no more than integers of it differ: they may be places in the rank's own batch,
        such as a graph's edges."""
        integers = value.about.get("integers", ())
        both = zip(self.parts(value.index), self.fits(value.index))
        wrong = [part for part, fits in both if fits is None]
        return all(part in integers for part in wrong)

    def has_right_outputs(self, inputs):
        """Whether no more than integers of it differ, which are places: as the model makes of them
        what it makes on one process."""
        step, _ = self.lines[0][inputs.index]
        outputs = [v for v in self.of_step[step] if v.kind == "outputs"]
        made = [v for v in outputs if inputs.index in v.made_from]
        fits = {fit for v in made for fit in self.fits(v.index)}
        if made and not any(self.parts(v.index) for v in made):  # these are not noted
            return self.has_other_places(inputs)
        if {None, "unknown"} & fits or not self.has_other_places(inputs):
            return False
        return any(map(self.tells_rows, made))

    def tells_rows(self, value):
        """Whether it would be another one if all ranks had rank 0's rows: else its rows are so
        nearly alike that they may be of any samples."""
        for part, (one, first, *others) in self.parts(value.index).items():
            of_first = one, first, *[first for _ in others]
            if first.shape == one.shape or self.fit(value, part, of_first) is None:
                return True
        return False

    def beside_places(self, origin, losses):
        """If only integers differ in what goes into a model: what a loss is made from, and differs,
        but is not made from them; or None."""
        if not self.has_other_places(origin):
            return None
        for loss in losses:
            makers = self.ancestors(loss)
            places = [v.index for v in makers if self.has_other_places(v)]
            other = self.origin(loss, but=places)
            of_model = other.about["model"] is not None or other.kind != "value"
            if not of_model and origin not in self.ancestors(other):
                return other
        return None

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

    def coupled(self, step):
        """The first value inside of a model that differs, where its outputs of a step do, but its
        inputs do not; or None."""
        for outputs in [v for v in self.of_step.get(step, []) if v.kind == "outputs"]:
            inputs = [i for i in outputs.made_from if i in self.all]
            inputs = [self.all[i] for i in inputs if self.all[i].kind == "inputs"]
            if not inputs or any(self.differs(v.index) for v in inputs):
                continue
            fits = zip(self.fits(outputs.index), self.parts(outputs.index).values())
            # Not numbers: a loss that the model computes, or a measure of the batch.
            is_other = any(fit is None and one and one.shape for fit, (one, *_) in fits)
            inside = [v for v in self.of_step[step] if v.about["model"] == inputs[0].index]
            inside = [v for v in inside if self.differs(v.index) and not self.says_nothing(v)]
            if is_other:
                return (inside or [outputs])[0]
            if {*self.fits(outputs.index)} == {"unknown"}:  # padded, as what goes in is
                inside = [v for v in inside if self.has_rows(v) and not self.has_other_places(v)]
                if inside:
                    return inside[0]
        return None

    def has_rows(self, value):
        """Whether what differs of it has a row for each of the batch's samples."""
        for part, fits in zip(self.parts(value.index).values(), self.fits(value.index)):
            shapes = [sketch.shape for sketch in part if sketch]
            if fits is None and all(shapes) and len({shape[1:] for shape in shapes}) == 1:
                whole, *parts = [shape[0] for shape in shapes]
                return whole == sum(parts)
        return False

    def coupled_before(self, value, step):
        """The same of the pass that has made a value, if that was in an earlier step, as a GAN's
        generator is called before its discriminator's step; or None."""
        made_in, _ = self.lines[0][value.index]
        found = self.coupled(made_in) if made_in < step else None
        return found if found and self.pass_of(found) == self.pass_of(value) else None

    def pass_of(self, value):
        """The index of what went into the model that has made it; None if none has."""
        if value.kind == "outputs":
            known = [i for i in value.made_from if i in self.all]
            return next((i for i in known if self.all[i].kind == "inputs"), None)
        return value.about["model"]

    def with_other_weights(self, step):
        """The inputs of a model that no optimizer trains, and whose weights are not those of one
        process; or None."""
        for inputs in self.of_step.get(step, []):
            total, others = inputs.about.get("weights"), self.others[inputs.index]
            totals = [other.about.get("weights", total) for other in others]
            if total is not None and any(relative(total, x) > self.tolerance for x in totals):
                return inputs
        return None

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

"""What a value that differs may be, and what has made it so."""

import re

import numpy as np

from .fits import relative, same
from .lineage import Lineage

EMPTY = "zeros", "ones", "full", "new_zeros", "zeros_like"
FILLS = "zero_", "fill_", "fill_diagonal_"
FORMS = "reshape", "view", "flatten", "ravel", "cat", "stack"
MEANS = re.compile("mean|loss|entropy|nll|kl_div")
COUNTS = "arange", "eye", "linspace", "tril_indices", "triu_indices"


class Values(Lineage):
    """Those of both runs, and what is to be known of them."""

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

    def is_from_outside(self, value):
        """Whether torch has computed none of its numbers but from such as were written into a
        tensor of zeros, as observations of an environment are."""
        makers = [value, *self.ancestors(value)]
        before = [self.all[i] for maker in makers for i in maker.made_from if i in self.all]
        roots = [v for v in before if v.kind != "value" or self.is_fresh(v)]
        is_made = value.about.get("made_by") or any(v.about.get("made_by") for v in before)
        return all(v.name in EMPTY for v in roots) and not is_made

    def constants(self, step):
        """The indices of what is made of zeros or ones alone in a step, as targets on a diagonal,
        whose shape is the batch's."""
        found = []
        for each in [v for v in self.of_step.get(step, []) if v.kind == "value"]:
            known = [i for i in each.made_from if i in self.all]
            is_empty = each.name in (*EMPTY, *FILLS) and not known
            if is_empty or (known and all(i in found for i in each.made_from)):
                found.append(each.index)
        return found

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

    def unequal_rows(self, value):
        """If a value is a mean of rows of which the ranks have other numbers: these; else []. By
        its numbers: one process's is the mean of the ranks', each times its rows."""
        if len(self.parts(value.index)) != 1:
            return []
        [(one, *ranks)] = self.parts(value.index).values()
        if any(each is None or each.shape != one.shape for each in (one, *ranks)):
            return []
        if self.fits(value.index) == ["same"] and not MEANS.search(value.name):
            return []
        for part in [p for i in value.made_from if i in self.all for p in self.parts(i).values()]:
            whole, *rows = [sketch.shape[0] if sketch and sketch.shape else 0 for sketch in part]
            if len(set(rows)) > 1 and sum(rows) == whole:
                weighted = sum(n * sketch.sums for n, sketch in zip(rows, ranks)) / whole
                if np.linalg.norm(one.sums - weighted) <= self.tolerance * one.norm:
                    return [whole, *rows]
        return []

    def means_of_unequal(self, losses):
        """Those that losses are made from, in the order of the script, and their rows."""
        makers = [v for loss in losses for v in self.ancestors(loss)]
        return [(v, rows) for v in makers if (rows := self.unequal_rows(v))]

    def is_gradient(self, value):
        """Whether it may be no more than a gradient in another form."""
        return self.is_fresh(value) and value.name in FORMS

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

    def coupled(self, step):
        """The first value inside of a model that differs, where its outputs of a step do, but its
        inputs do not; or None."""
        for outputs in [v for v in self.of_step.get(step, []) if v.kind == "outputs"]:
            inputs = [i for i in outputs.made_from if i in self.all]
            inputs = [self.all[i] for i in inputs if self.all[i].kind == "inputs"]
            if not inputs or any(self.differs(v.index) for v in inputs):
                continue
            # Not numbers: a loss that the model computes, or a measure of the batch.
            both = zip(self.fits(outputs.index), self.parts(outputs.index).values())
            fits = {fit for fit, (one, *_) in both if one is None or one.shape}
            inside = [v for v in self.of_step[step] if v.about["model"] == inputs[0].index]
            inside = [v for v in inside if self.differs(v.index) and not self.says_nothing(v)]
            if None in fits:
                return (inside or [outputs])[0]
            if fits == {"unknown"}:  # padded, as what goes in is
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
        """The inputs of a model that no optimizer trains, or an evaluation of it, whose weights are
        not those of one process; or None."""
        passes = [(seen, self.others[seen.index]) for seen in self.of_step.get(step, [])]
        passes += [(seen, others.values()) for at, seen, others in self.evaluated if at == step]
        for seen, others in passes:
            mine = seen.about.get("weights")
            if mine and any(
                self.are_apart(mine, each.about.get("weights", mine)) for each in others
            ):
                return seen
        return None

    def are_apart(self, *sums):
        """Whether sums of weights are; also beside their sizes, which rounding is a part of."""
        (mine, size), (other, _) = sums
        return relative(mine, other) > self.tolerance and abs(mine - other) > 1e-6 * size

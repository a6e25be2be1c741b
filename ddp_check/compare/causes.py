"""Where a difference comes from: the first line that has another value, and who set it."""

import math
from dataclasses import replace

from ..notes import Finding
from ..script import source
from ..text import backward_of, lines_inside, lines_that_set
from .advice import ADVICE, LOOKS, LOST, advice_of
from .averaging import averaging
from .branches import branch_alone
from .fits import sides
from .kinds import KINDS

MEAN_OF_VALID = "#a-loss-that-is-a-mean-over-what-is-valid"
CLIP = "clip_grad_norm_"
FEW = 3  # steps that differ, whose lines are looked at: the first may be as it is meant to be


class Cause:
    """What the difference of one step comes from."""

    def __init__(self, values, differences, variables, step):
        self.values, self.variables, self.step = values, variables, step
        self.differences, self.communication = differences, differences.communication
        self.of_step, self.unlike = values.of_step.get(step, []), differences.unlike(step)
        self.has_other_weights = any(f.step == step for f in differences.of("weight"))

    def finding(self, what, value, advice=None):
        values, variables = self.values, self.variables
        made_by = value.about.get("made_by")
        lines = lines_inside(made_by) if made_by else [value.line]
        numbers = variables.behind(lines, self.step, further=0)
        if what == "value" and self.differences.may_be_planned and values.is_copied(value):
            advice = "planned"
        advice = advice or advice_of(self, what, value, numbers)
        verdict = "look" if advice in LOOKS else "WRONG"
        further = [] if numbers else variables.behind(lines, self.step)
        numbers += values.behind(value) + further
        more = [f"in {source(value.library)}"] if self.is_in_library(value) else []
        if called := value.about.get("called_at"):
            more.append(f"called at {source(called)}")
        more += numbers
        if what == "inputs":
            lines = [source(line) for line in variables.unseeded[:2]]
            more += [f"without a seed, each rank draws its own: {line}" for line in lines]
        if verdict == "WRONG" and not numbers:
            more += variables.counted(self.step)
        is_data = made_by or values.is_from_outside(value)
        if is_data and (verdict == "WRONG" or advice == "stream"):
            more += variables.other_data()
        text = values.describe(value)
        if value.kind != "loss" or advice in LOST:
            text += f": {ADVICE[advice]}"
        if advice == "apart":
            more += [f"drawn at {source(line)}" for line in variables.drawn_apart(self.step)]
        if advice in ("unpaired", "drawing"):
            is_drawing = advice == "drawing"
            generators = variables.drawing(self.step) if is_drawing else variables.generators
            text += f" ({', '.join(generators)})"
            names = [name.partition(",")[0].rpartition(".")[2] for name in generators]
            set_at = [source(at) for name in names for at in lines_that_set(value.line, name)]
            more = [*dict.fromkeys(set_at), *more]
        row, line = KINDS.get(what, KINDS[value.kind]), values.line_of(value)
        about = {"remedy": row.remedy if verdict == "WRONG" else "", "section": row.section}
        about["off"] = values.off(value)
        return Finding(verdict, what, self.step, text, line, more, advice, **about)

    def other_weights(self, seen):
        """Of a pass through a model that no optimizer trains."""
        if seen.kind != "evaluation":
            return self.finding("weight", seen, "weights")
        row, text = KINDS["weight"], f"{seen.name}: {ADVICE['weights']}"
        about = {"remedy": row.remedy, "section": row.section, "more": []}
        about["more"] += [f"called at {source(line)}" for line in seen.about["callers"]]
        return Finding("WRONG", "weight", self.step, text, seen.line, advice="weights", **about)

    def is_in_library(self, value):
        """Whether a framework's line has computed it, which the script's line has called."""
        return value.library and self.values.line_of(value) == value.line

    def blame(self):
        """The findings, and whether they may be intended: "look", "WRONG" or "unclear"."""
        if self.has_other_weights:
            return [], "WRONG"  # all else follows from them
        if self.unlike and self.differences.local:
            return [self.local()], "look"
        value = self.values.with_other_weights(self.step)
        if value and (value.kind != "evaluation" or not self.values.coupled(self.step)):
            return [self.other_weights(value), *averaging(self)], "WRONG"
        if value := self.values.coupled(self.step):
            found = [self.finding("outputs", value, "coupled")]
            return found + averaging(self), "WRONG" if self.unlike else "look"
        if found := self.other_batch_norm():
            return found + averaging(self), "WRONG" if self.unlike else "look"
        found, origin, is_input = self.first_value()
        value = self.values.coupled_before(origin, self.step) if origin else None
        if origin and origin.name == "batch_norm":  # of other rows together
            value = origin
        if value:
            found, is_input = [self.finding("outputs", value, "coupled")], False
        tells = bool(found) and (found[0].verdict == "WRONG" or found[0].advice == "gathered")
        if tells and found[0].advice != "backward":  # which has named them
            found[0].more += self.communication.not_differentiated()
        known = [source(line) for line in self.communication.calls]
        for text in self.communication.gathers(self.step) if tells else ():
            if text.partition(": ")[2] not in known:
                found[0].more.append(text)
        if branch := branch_alone(self, origin, found[0].verdict if found else "WRONG"):
            found.append(branch)
        is_look = bool(found) and found[0].verdict == "look"
        is_clear = any(finding.advice not in ("", "same loss") for finding in found)
        if not is_input or is_look:
            found += averaging(self)
        if not found and (numbers := self.variables.changing(self.step)):
            text = "no value differs, but numbers do"
            found.append(Finding("look", "numbers", self.step, text, more=numbers))
        if self.unlike or is_clear:
            return found, "look" if is_look and not self.unlike else "WRONG"
        return found, "unclear"

    def is_padded(self):
        """Whether what models give cannot be compared, as it is padded to the batch's longest."""
        outputs = [v for v in self.of_step if v.kind == "outputs"]
        fits = [{*self.values.fits(v.index)} for v in outputs]
        return not self.unlike and {"unknown"} in fits

    def local(self):
        """Gradients that are not averaged, as the weights are."""
        text = f"{self.unlike.partition(':')[0]}: {ADVICE['local']}"
        about = {"advice": "local", "section": "#gradients"}
        return Finding("look", "averaging", self.step, text, self.differences.local, **about)

    def other_batch_norm(self):
        """Other passes than those of one process, through a model with batch norm."""
        numbers, seen = self.values.other_passes(self.step), self.values.of_rank.get(self.step, [])
        passes = [v for v in seen if v.about.get("has_batch_norm")]
        if not numbers or not passes:
            return []
        text = f"passes in this step: {sides(*numbers)}; by batch norm, a sample's result depends "
        text += "on which others are in its pass. Intended?"
        about = {"advice": "coupled", "section": KINDS["outputs"].section}
        return [Finding("look", "outputs", self.step, text, passes[0].line, **about)]

    def first_value(self):
        """The finding of the first value that differs; that value, if it is no loss; whether what
        goes into a model does."""
        values, step = self.values, self.step
        losses = [v for v in self.of_step if v.kind == "loss"]
        others = values.find(step, "inputs")
        constants = values.constants(step)
        inputs = [v for v in others if not values.has_right_outputs(v)]
        if wrong := inputs + values.find(step, "loss"):
            origin = values.origin(wrong[0], but=constants)
            if inputs and values.has_other_places(inputs[0]):
                if other := values.beside_places(origin, wrong[len(inputs) :]):
                    origin, inputs = other, []
            found = [self.finding("inputs" if inputs else origin.kind, origin)]
            is_mean = not inputs and found[0].advice == "share" and values.unequal_rows(origin)
            if is_mean and (means := self.unequal_mean(losses)):  # else in a model
                origin = means[1]
                found = [replace(means[0], off=found[0].off)]
            return found, origin if origin.kind != "loss" else None, bool(inputs)
        is_scaled = step in self.differences.factors - self.differences.less
        if losses and self.communication.calls and not self.unlike and not is_scaled:
            return [self.not_differentiated()], None, False
        if values.other_passes(step):  # whose values are of other samples
            return [], None, False
        last = losses[-1].index if losses else -1
        near = [v for loss in losses for v in values.ancestors(loss) if values.differs(v.index)]
        if others:  # of places
            near = [v for v in near if not values.has_other_places(v)]
        later = [v for v in values.find(step, "value") if v.index > last and v.name != CLIP]
        inside = [v for v in values.find(step, "value") if v.about["model"] is not None]
        clips = [v for v in values.find(step, "value") if v.name == CLIP]
        clips = [] if self.unlike else clips  # of gradients that are averaged after it
        near, inside = [[v for v in of if v.index not in constants] for of in (near, inside)]
        origins = clips + near[-1:] + later + inside[:1]
        origins = [values.origin(value, but=constants) for value in origins]
        origins = [v for v in origins if not (v in later and values.is_gradient(v))]
        origins = [v for v in origins if not values.says_nothing(v)]
        # What comes after the loss, as a norm of gradients, follows from it.
        if not self.unlike and all(v.index > last for v in origins):
            if found := self.unequal_mean(losses):
                return [found[0]], found[1], False
        for origin in origins[:1]:
            found = [self.finding("value", origin, "same loss" if losses else None)]
            return found, origin, False
        return [], None, False

    def unequal_mean(self, losses):
        """A mean whose numbers are so nearly equal that the loss hardly differs, and its value; ()
        if there is none."""
        values, others = self.values, []
        if value := values.divided_by_own(losses):
            words = "divided by"
            numbers = [sketch.number for sketch in values.parts(value.made_from[1])[0]]
        elif means := values.means_of_unequal(losses):
            words, (value, numbers) = "a mean of so many rows:", means[0]
            others = [v for v, _ in means[1:] if v.line != value.line]
        else:
            return ()
        text = f"[{value.name}]: {words} {sides(*numbers)}, of which each rank has its own"
        about = {"remedy": "divide the sum by all ranks' number, times world_size"}
        about["section"] = MEAN_OF_VALID
        called = value.about.get("called_at")
        about["more"] = [f"called at {source(called)}"] if called else []
        lines = dict.fromkeys(v.line for v in others)
        about["more"] += [f"so is {source(line)}" for line in lines]
        found = Finding("WRONG", "value", self.step, text, value.line, advice="share", **about)
        return found, value

    def not_differentiated(self):
        """A collective call that the loss is made from."""
        (line, name), *others = self.communication.calls.items()
        text = f"the loss is one process's, but not its gradient: this {name} is not "
        text += "differentiated, or its backward does not sum over the ranks"
        remedy = "torch.distributed.nn.functional has calls that are differentiated"
        about = {"remedy": remedy, "section": "#what-depends-on-the-whole-batch"}
        more = [f"called at {source(at)}" for at in self.communication.callers[line][:1]]
        more += [f"or this {name}: {source(at)}" for at, name in others]
        own = [
            backward_of(at) for at in self.communication.calls if at not in self.communication.cut
        ]
        more += [f"its backward: {source(at)}" for at in own if at]
        return Finding("WRONG", "gradient", self.step, text, line, more, "backward", **about)


def first_behind(values, finding):
    """In words: of what a line sets a buffer, or weights, to, the first value that is not one
    process's; or the lines before it that have each rank's own."""
    of_line = [v for v in values.of_step.get(finding.step, []) if v.line == finding.line]
    for value in [v for v in of_line if set(values.fits(v.index)) - {"same"}][:1]:
        origin = values.origin(value)
        if not values.differs(origin.index):
            return values.behind(value)
        called = origin.about.get("called_at")
        texts = [f"from {source(origin.line)}  {values.describe(origin)}"]
        texts += [f"called at {source(at)}" for at in [called] if at]
        return [*texts, *values.behind(origin)]
    return []


def find_causes(values, differences, variables, steps, samples, lost):
    """Of the steps that differ: what may be intended, once, and the first that is not. The
    findings; that step, or inf; the step from which on nothing can be compared, or inf. Where the
    first shows no cause, as losses at the start of a training hardly differ, the next may."""
    looks, wrong = [], math.inf
    for tried, number in enumerate(steps, 1):
        cause = Cause(values, differences, variables, number)
        if number >= lost:  # but the ranks' gradients are to be equal in any case
            if cause.unlike and not differences.local:
                return looks + averaging(cause), wrong, lost
        elif samples and samples[0].step <= number:
            return looks, min(wrong, number), lost  # other samples: all else follows
        else:
            causes, verdict = cause.blame()
            if any(f.advice == "coupled" for f in looks) and cause.is_padded():
                causes, verdict = [], "look"
            if verdict == "unclear" and not causes and not looks and tried < FEW:
                wrong = min(wrong, number)
                continue
            is_local = any(finding.advice == "local" for finding in causes)
            may_be = verdict == "look" and (is_local or number not in differences.factors)
            if may_be and wrong < number:
                return [], wrong, lost
            if not may_be and not (looks and verdict == "unclear"):
                return looks + causes, min(wrong, number), lost
            looks = looks or causes
            if any(finding.advice in LOST for finding in causes):
                lost = number
    return looks, wrong, lost

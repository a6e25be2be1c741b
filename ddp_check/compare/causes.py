"""Where a difference comes from: the first line that has another value, and who set it."""

import math
import re

from ..notes import STREAM, Finding
from ..script import source
from ..text import backward_of, branch_of, lines_inside, lines_that_set
from .differences import parts_of
from .fits import sides
from .kinds import DECIDE, KINDS
from .numbers import BY_RANK
from .values import COUNTS

ADVICE = {
    "coupled": "of the same inputs and weights: a sample's result depends on which others are in "
    "its batch, or the model remembers earlier ones. Intended?",
    "collate": "of the same samples: collate_fn makes of each what depends on which others are in "
    "its batch, as MixUp does, or on random numbers that it draws. Intended?",
    "stream": "the ranks' streams have other samples in this step than one process's, as shards of "
    "files have. What follows from that cannot be compared",
    "ratio": "a ratio of sums over the rank's own share, as in a Dice loss of the batch. Intended?",
    "share": "one process has neither these numbers nor their mean or sum. If they come from this "
    "rank's samples alone, all_reduce what they are made from first",
    "counted": "each rank counts its own rows from 0, where one process counts those of all: add "
    "the number of rows on the ranks before",
    "same loss": "but the loss is the same",
    "branch": "a decision by numbers of the rank's own share?",
    "weights": "no optimizer trains it, and its weights are not those of one process. If numbers "
    "of this rank's samples have set them, all_reduce these first",
    "apart": "it is made from random numbers of which a rank draws other than its share of one "
    "process's: nothing after it can be compared",
    "gathered": "a gathered batch has the rows of one rank after the other's, one process's has "
    "not: random numbers are for other rows, so nothing after it can be compared",
    "copied": "all ranks have the same, from outside of torch, as of environments or generators "
    "with one seed. Seed them by rank",
    "remembers": "its dataset, asked once more with the same random numbers, gives another sample "
    "of an index, as by a list that it shuffles in place: nothing after it can be compared",
    "chosen": "as many samples on one process as on each rank, chosen from its batch: nothing "
    "after it can be compared",
    "planned": "all ranks have the same, and one process other numbers. If it is planned from one "
    "process's batch size, give one process all ranks' by --one",
    "drawing": "a generator of the script's own draws other numbers on each rank in these steps: "
    "nothing after it can be compared",
    "local": "the ranks average their weights, as local SGD does, which is not one process's "
    "training: nothing after it can be compared",
    "unpaired": "it comes from outside of torch, as of an environment, by random numbers of each "
    "rank's own: nothing after it can be compared",
}
MEAN_OF_VALID = "#a-loss-that-is-a-mean-over-what-is-valid"
OF_NO_MODULE = "(of no module)"
CLIP = "clip_grad_norm_"
CHOOSES = "__getitem__", "index_select", "take", "gather"
FEW = 3  # steps that differ, whose lines are looked at: the first may be as it is meant to be
# After these nothing can be compared.
LOST = "stream", "apart", "gathered", "remembers", "chosen", "drawing", "unpaired", "local"
LOOKS = "coupled", "collate", "ratio", "planned", *LOST  # which may be intended


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
        advice = advice or self.advice(what, value, numbers)
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

    def advice(self, what, value, numbers):
        """The key in ADVICE of what a value's difference is: the first that fits. `numbers`: those
        behind its line that differ, in words."""
        values, variables, step = self.values, self.variables, self.step
        is_read = what == "inputs" and values.is_from_outside(value)
        if is_read and values.is_filled(value) and values.is_copied(value):
            return "copied"
        if value.name == STREAM:
            return "stream"
        if values.has_same_samples(value):
            return "collate"
        if value.about.get("made_by") in values.remember:
            return "remembers"
        if step in self.communication.gathered and values.has_own_numbers(value, step):
            return "gathered"
        if what == "inputs" and value.name in CHOOSES and values.is_as_many(value):
            return "chosen"
        if not numbers and self.is_apart(value):
            return "apart"
        if what == "value" and value.name in COUNTS:
            return "counted"
        if not numbers and variables.drawing(step):
            return "drawing"
        if not numbers and is_read and variables.generators:
            return "unpaired"
        if is_read and values.has_other_places(value):
            return "stream"  # words, which each rank may read from files of its own
        if not numbers and value.about.get("by_gradient"):
            return "ratio"
        if is_read and self.differences.takes_others(step, values.find(step, "inputs")[0].line):
            return "stream"
        return "share"

    def is_apart(self, value):
        """Whether it may be made from random numbers that the ranks have not drawn as one process
        has."""
        values, variables = self.values, self.variables
        is_made = value.kind == "inputs" or value.name in CHOOSES or values.is_from_outside(value)
        if is_made and variables.drawn_apart(self.step) or self.step in variables.with_gaps:
            return True
        own_draws = self.differences.own_draws
        return values.has_other_layout(value) or values.is_drawn_at(value, own_draws)

    def is_in_library(self, value):
        """Whether a framework's line has computed it, which the script's line has called."""
        return value.library and self.values.line_of(value) == value.line

    def blame(self):
        """The findings, and whether they may be intended: "look", "WRONG" or "unclear"."""
        if self.has_other_weights:
            return [], "WRONG"  # all else follows from them
        if self.unlike and self.differences.local:
            return [self.local()], "look"
        if value := self.values.with_other_weights(self.step):
            return [self.finding("weight", value, "weights"), *self.averaging()], "WRONG"
        if value := self.values.coupled(self.step):
            found = [self.finding("outputs", value, "coupled")]
            return found + self.averaging(), "WRONG" if self.unlike else "look"
        if found := self.other_batch_norm():
            return found + self.averaging(), "WRONG" if self.unlike else "look"
        found, origin, is_input = self.first_value()
        value = self.values.coupled_before(origin, self.step) if origin else None
        if origin and origin.name == "batch_norm":  # of other rows together
            value = origin
        if value:
            found, is_input = [self.finding("outputs", value, "coupled")], False
        tells = bool(found) and (found[0].verdict == "WRONG" or found[0].advice == "gathered")
        if tells:
            found[0].more += self.communication.not_differentiated()
        known = [source(line) for line in self.communication.calls]
        for text in self.communication.gathers(self.step) if tells else ():
            if text.partition(": ")[2] not in known:
                found[0].more.append(text)
        if branch := self.branch(origin, found[0].verdict if found else "WRONG"):
            found.append(branch)
        is_look = bool(found) and found[0].verdict == "look"
        is_clear = any(finding.advice not in ("", "same loss") for finding in found)
        if not is_input or is_look:
            found += self.averaging()
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

    def averaging(self):
        """Where the ranks have other gradients: the last pass through a model that has some of
        them, and who has told it not to average them; or a second backward pass after it."""
        if not self.unlike:
            return []
        names, _ = self.differences.unequal_gradients(self.step)
        seen = self.values.of_rank.get(self.step, [])
        passes = [v for v in seen if v.kind == "outputs"]
        losses = [v for v in seen if v.kind == "loss"]
        trained = self.values.trained_at()
        number = self.differences.steps[self.step].key[0]
        unequal = {(number, name) for name in names}
        # As a GAN's generator is called before its discriminator's step.
        before = [v for v in self.values.of_rank.get(self.step - 1, []) if v.kind == "outputs"]
        of_names = [v for v in before + passes if unequal & trained[v.line, v.name]]
        more = []
        last = (of_names or passes)[-1:]
        for each in last:
            more.append(f"the last pass: {source(each.line)}  [{each.name}]")
            if not each.about["is_ddp"]:
                more += [f"called at {source(line)}" for line in each.about["callers"]]
        told, is_late = self.communication.told.get(self.step, ("", False))
        if told and not is_late:
            more += [source(told), *self.variables.set_at(told, self.step)]
        text, about = self.unlike, {"remedy": "call the wrapped model"}
        if not any(v.about["is_ddp"] for v in passes) and not self.differences.wraps:
            more += self.communication.by_hand(self.step)
            about["remedy"] = "average the gradients of all parameters; or wrap the model in DDP"
        if any(name.endswith(OF_NO_MODULE) for name in names):
            more += [f"a parameter: {source(at)}" for at in self.variables.parameters()]
        about["section"], line = "#gradients", ""
        if not passes:  # as of an optimizer that steps inside of a model
            more += [source(v.line) for v in losses[-1:]]
            more.append(f"the step: {source(self.variables.lines[self.step])}")
        after = [loss for loss in losses if last and loss.at > last[0].at]
        if len(after) > 1 and not told and last[0].about["is_ddp"]:
            text += " The model was called through DDP, but a second backward() followed"
            line, about["remedy"] = after[-1].line, "call backward() once, of the sum of the losses"
            about["section"] = "#one-backward-for-each-forward-pass"
        if told:
            about["remedy"] = "let the last pass before the step average"
            about["section"] = "#gradient-accumulation"
        for step, seen in self.differences.closures[:1]:
            if step <= self.step:
                text += f" In step {step + 1} the ranks call closure() other numbers of times, by "
                text += "their losses, so their calls do not meet any more"
                line, about["remedy"] = seen.line, "return the mean loss of all ranks from it"
                about["section"] = "#an-optimizer-with-a-closure"
        outside, lines = self.differences.outside(self.step, names)
        if outside:
            those = "these" if outside == names else parts_of(outside)
            text += f" DDP does not average {those}: not in it, or frozen, when it wrapped"
            more += [f"{what} at {source(at)}" for at, what in lines]
            about["remedy"] = "wrap all that is trained, after it is added, replaced or thawed"
            about["section"] = "#model"
        if is_late:
            text += " This line comes after the pass, which was told not to average"
            line, about["remedy"] = told, "set it before the model is called"
        return [Finding("WRONG", "averaging", self.step, text, line, more, **about)]

    def first_value(self):
        """The finding of the first value that differs; that value, if it is no loss; whether what
        goes into a model does."""
        values, step = self.values, self.step
        losses = [v for v in self.of_step if v.kind == "loss"]
        others = values.find(step, "inputs")
        inputs = [v for v in others if not values.has_right_outputs(v)]
        if wrong := inputs + values.find(step, "loss"):
            origin = values.origin(wrong[0])
            if inputs and values.has_other_places(inputs[0]):
                if other := values.beside_places(origin, wrong[len(inputs) :]):
                    origin, inputs = other, []
            found = [self.finding("inputs" if inputs else origin.kind, origin)]
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
        origins = [values.origin(value) for value in clips + near[-1:] + later + inside[:1]]
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
        values = self.values
        if value := values.divided_by_own(losses):
            words = "divided by"
            numbers = [sketch.number for sketch in values.parts(value.made_from[1])[0]]
        else:
            words, (value, numbers) = "a mean of so many rows:", values.mean_of_unequal(losses)
        if not value:
            return ()
        text = f"[{value.name}]: {words} {sides(*numbers)}, of which each rank has its own"
        about = {"remedy": KINDS["loss"].remedy, "section": MEAN_OF_VALID}
        found = Finding("WRONG", "value", self.step, text, value.line, advice="share", **about)
        return found, value

    def not_differentiated(self):
        """A collective call that the loss is made from."""
        (line, name), *others = self.communication.calls.items()
        text = f"the loss is one process's, but not its gradient: this {name} is not "
        text += "differentiated, or its backward does not sum over the ranks"
        remedy = "torch.distributed.nn.functional has calls that are differentiated"
        about = {"remedy": remedy, "section": "#what-depends-on-the-whole-batch"}
        more = [f"or this {name}: {source(at)}" for at, name in others]
        own = [
            backward_of(at) for at in self.communication.calls if at not in self.communication.cut
        ]
        more += [f"its backward: {source(at)}" for at in own if at]
        return Finding("WRONG", "gradient", self.step, text, line, more, "backward", **about)

    def branch(self, origin, verdict):
        """A line that not all have run."""
        alone = self.values.alone_before(self.step, origin)
        if not alone:
            return None
        line, on = alone
        lines = [line, *filter(None, [self.values.called_at.get(line)])]
        branches = [branch for branch in map(branch_of, lines) if branch]
        if any(self.is_by_rank(branch) for branch in branches):
            return None
        if on.count("rank") == self.values.ranks:
            if branches and not any(map(self.is_by_numbers, branches)):
                return None  # as of several processes alone
            if self.communication.communicates.intersection(branches):
                return None  # all ranks take it, or they would hang
        text = f"computed on {on} alone: {ADVICE['branch']}"
        more = [f"called at {source(at)}" for at in lines[1:]]
        for branch in branches[:1]:
            more += [source(branch), *self.variables.behind([branch], self.step)]
        return Finding(verdict, "branch", self.step, text, line, more, "branch", **DECIDE)

    def is_by_rank(self, branch):
        """Whether an `if` says which ranks are to run it, and nothing else that differs."""
        _, _, test = source(branch).partition(": ")  # not the file's name, such as main.py
        return BY_RANK.search(test) and not self.is_by_numbers(branch)

    def is_by_numbers(self, branch):
        """Whether an `if` is decided by what a process has computed, or by a number that differs
        otherwise than by the number of processes."""
        _, _, test = source(branch).partition(": ")
        by_values = re.search(r"\.(item|mean|sum|max|min|norm)\(|\bfloat\(|loss", test) is not None
        return by_values or self.variables.decide(branch, self.step)


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
                return looks + cause.averaging(), wrong, lost
        elif samples and samples[0].step <= number:
            return looks, min(wrong, number), lost  # other samples: all else follows
        else:
            causes, verdict = cause.blame()
            if any(f.advice == "coupled" for f in looks) and cause.is_padded():
                causes, verdict = [], "look"
            if verdict == "unclear" and not causes and not looks and tried < FEW:
                wrong = min(wrong, number)
                continue
            may_be = verdict == "look" and number not in differences.factors
            if may_be and wrong < number:
                return [], wrong, lost
            if not may_be and not (looks and verdict == "unclear"):
                return looks + causes, min(wrong, number), lost
            looks = looks or causes
            if any(finding.advice in LOST for finding in causes):
                lost = number
    return looks, wrong, lost

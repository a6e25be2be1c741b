"""All findings of two runs: differences, and rules."""

import math
import re
import traceback
from dataclasses import dataclass

from ..notes import Finding, Said, Step
from ..script import source
from .advice import LOST
from .calls import Calls
from .causes import FEW, find_causes, first_behind
from .consequences import (
    after_data,
    after_orders,
    due_to_plan,
    explain_values,
    follows,
    name_unused,
    so_step,
)
from .differences import Differences
from .ends import (
    USUAL_ENDS,
    about_ends,
    explains_ends,
    left_out_steps,
    left_pass,
    other_optimizers,
    uneven_join,
)
from .file_rules import Files
from .frameworks import Logged, Samplers, Schedules, in_its_words
from .kinds import HIDES, TENSORS, TIMES_NOISE, VALUES, noise_of
from .numbers import Variables
from .order_rules import Loaders, Order
from .parted import parted_weights
from .printed import compare_printed
from .rules import Parameters, RandomNumbers
from .sample_rules import Counts, Data, Inputs, Splits
from .samples import compare_lengths, compare_samples, passes_per_process
from .score_rules import TestSamples, repeated
from .settings import compare_settings
from .state_rules import Attributes, Evaluation, Modes, OtherWeights, Plateau
from .values import Values

RULES = (  # in the order of the report
    RandomNumbers(),
    Parameters(),
    Calls(),
    Files(),
    OtherWeights(),
    Attributes(),
    Plateau(),
    Evaluation(),
    Modes(),
    Logged(),
    Schedules(),
    Samplers(),
    Order(),
    Loaders(),
    Inputs(),
    Counts(),
    Data(),
    Splits(),
    TestSamples(),
)
MEASURED = *TENSORS, *VALUES, "printed"  # the kinds of findings that rest on numbers


@dataclass
class Result:
    findings: list  # of Finding
    steps: int  # that both runs have made
    ranks: int
    largest: dict  # {kind: the largest difference}
    lost: float  # from this step on nothing can be compared, or inf
    lines: int  # steps of which the values of lines would explain a finding

    def of(self, *verdicts):
        return [finding for finding in self.findings if finding.verdict in verdicts]

    @property
    def measured(self):
        """The findings that rest on numbers."""
        return [finding for finding in self.of("WRONG", "look") if finding.what in MEASURED]

    @property
    def may_be_noise(self):
        """Whether another run on one process may explain a finding: by rounding, or as a clock. Not
        what is so large that noise of that size would hide all else."""
        found = [finding.off for finding in self.measured]
        return bool(found) and max(found) < TIMES_NOISE * HIDES

    @property
    def may_be_rounding(self):
        """Whether a model's outputs differ by so little that a device's rounding may be why, which
        the batch's size changes."""
        return any(f.advice == "coupled" and f.off < HIDES for f in self.of("look"))

    @property
    def status(self):
        """1 if something is WRONG, 2 if not even the first step can be compared, else 0."""
        if self.of("WRONG"):
            return 1
        return 0 if self.steps and self.lost else 2


def judge(one, ranks, tolerance, again=None, scaled=(), lines=None, own_flags=False):
    """The Result of comparing one process's notes with each rank's. `again`: of one process once
    more; `scaled`: loaders with a batch size per process; `own_flags`: one process was given flags
    of its own, as for the batch of all ranks; `lines`: the notes of a further pair of
    runs, (of one process, of the ranks), which have the values of lines."""
    said = [note.text for _, note in [*one[Said], *ranks[0][Said]] if note.kind == "note"]
    found = [Finding("note", "", 0, text) for text in dict.fromkeys(said)]
    counts, ends = [len(n[Step]) for n in (one, *ranks)], [n.end() for n in (one, *ranks)]
    steps, largest, to_trace = min(counts), {}, 0
    if steps:
        known = again, scaled, lines, own_flags
        of_steps, largest, to_trace = find_all(one, ranks, tolerance, *known)
        found += of_steps
    for rule in RULES:
        try:
            results = rule.find(one, ranks)
        except Exception as error:  # the others still count
            traceback.print_exc()
            found.append(Finding("not seen", rule.name, 0, f"it failed: {error!r}"))
            continue
        if results is None:
            found.append(Finding("not seen", rule.name, 0, f"needs {rule.needs}"))
        elif results or not any(f.what == rule.name for f in found):
            found += results or [Finding("ok", rule.name, 0, rule.right)]
    found = explain_values(after_data(after_orders(found)))
    name_unused(found, ends, steps - 1)
    is_other = len(set(counts)) > 1 or len(set(ends)) > 1
    if (is_other and not any(f.what == "steps" for f in found)) or ends[0] not in USUAL_ENDS:
        end = about_ends(one, ranks, counts, ends)
        if cause := next((f for f in found if explains_ends(f)), None):
            cause.more += [f"so the end, after step {end.step}: {end.text}", *end.more]
        else:
            found.append(end)
    is_usual = set(ends) <= set(USUAL_ENDS)
    if scaled and not own_flags and is_usual and counts[0] > counts[1]:
        due_to_plan(found, counts)
    in_its_words(found, ranks[0])
    lost = min([f.step for f in found if f.advice in LOST], default=math.inf)
    # Nor can what the script keeps, nor an order that it draws later.
    later = {"attributes": 0, "split": 1}
    found = [f for f in found if f.verdict != "look" or f.step < lost + later.get(f.what, math.inf)]
    return Result(found, steps, len(ranks), largest, lost, to_trace)


def find_all(one, ranks, tolerance, again, scaled, lines, own_flags):
    """All findings, in the order of the script; {kind: the largest difference}; the number of steps
    of which the values of lines would explain one."""
    lines = lines or (one, ranks)
    samples, uneven, trains = compare_samples(one, ranks)
    ended, planned = compare_lengths(one, ranks, trains)
    lengths, last = ended + planned, math.inf
    if ended and ended[0].verdict == "look":  # from then on, steps have other batches
        ended[0].text += "; later steps are not compared"
        last = ended[0].step
    due = bool(lengths) and lengths[0].verdict == "look"  # so is a schedule by len(loader)
    left_out = [
        parted_weights(one, ranks),
        other_optimizers(one, ranks),
        uneven_join(ranks),
        left_out_steps(ranks),
    ]
    left_out = [finding for finding in (*left_out, left_pass(one, ranks)) if finding]
    left_out = sorted(left_out, key=lambda finding: finding.step)[:1]
    for finding in left_out:
        last = min(last, finding.step)
    samples = [sample for sample in samples if sample.step < last]

    def compared(notes):
        return notes.without((*VALUES, *TENSORS), lambda step: step >= last or step in uneven)

    one, ranks = compared(one), [compared(notes) for notes in ranks]
    lines = compared(lines[0]), [compared(notes) for notes in lines[1]]
    noise = noise_of(TENSORS, one, again) | noise_of(VALUES, lines[0], again)
    values = Values(*lines, tolerance, noise)
    differences = Differences(one, ranks, tolerance, noise)
    differences.may_be_planned = bool(scaled) and not own_flags
    variables = Variables(one, ranks)
    kinds = "gradient", "parameters", "weight", "update"
    first = {finding.step for finding in differences.of(*kinds)}
    if differences.hidden:  # the gradients tell less, but the losses may tell it
        # Without DDP, the ranks' gradients may be added up, and so may be their losses.
        averaged = [step for step, note in ranks[0][Step] if note.averaged]
        first |= {step for step in averaged if values.find(step, "loss")}
    if not samples and (first or not scaled):
        samples = passes_per_process(one, ranks, trains, scaled)
    settings = list(compare_settings(one, ranks, variables))
    notes = [Finding("note", "samples", step, uneven[step]) for step in uneven]
    sent = [finding for finding in differences.of("weight") if finding.advice == "unpaired"]
    found = notes[:1] + left_out + sent[:1]
    unpaired = [f.step for f in (*found, *samples[:1]) if f.advice == "unpaired"]
    lost = min(unpaired, default=math.inf)  # from this step on, nothing can be compared
    for finding in samples[:1]:
        if finding.advice != "unpaired":
            finding.verdict = "WRONG" if first else "look"
        for value in [v for v in values.find(0, "value") if v.name == "Subset"][:1]:
            finding.more.append(f"{source(value.line)}  {values.describe(value)}")
            finding.more += variables.behind([value.line], 0)
        found.append(finding)
    found += [finding for finding in lengths[:1] if finding.step < lost]
    until = min([lost, *[finding.step for finding in samples[:1]]])  # then, all else follows
    to_explain = steps_to_explain(differences, settings, until)
    if differences.hidden:  # where the values of lines may tell what gradients do not
        to_explain += range(int(min(FEW, until)))
    causes, wrong, lost = find_causes(values, differences, variables, sorted(first), samples, lost)
    found, looks = found + causes, [cause for cause in causes if cause.step < wrong]
    firsts = []
    for kind in ("parameters", "weight", "gradient", "update", "buffer"):
        of_kind = differences.of(kind)
        clear = [f for f in of_kind if wrong <= f.step < lost]
        if kind == "update" and settings:  # which explain it
            continue
        if of_kind and of_kind[0].step < lost:
            finding = (clear or of_kind)[0]
            finding.text += f" (in {len({f.step for f in of_kind})} steps)"
            if finding.step < wrong and looks and finding.advice != "unequal":
                finding.verdict = "look"
            if kind in ("weight", "buffer"):
                finding.more += first_behind(values, finding)
            firsts.append(finding)
    for finding in sorted(firsts, key=lambda finding: finding.step):
        known = [cause for cause in found if follows(finding, cause)]
        if known:
            for part in known[0].text.split("; ")[1:]:  # is not said again
                finding.text = finding.text.replace(f"; {part}", "")
            known[0].more.append(so_step(finding))
            told = [known[0].line, *map(of_line, known[0].more)]
            known[0].more += [text for text in finding.more if of_line(text) not in told]
            known[0].line = known[0].line or finding.line
            known[0].off = known[0].off or finding.off
        else:
            if finding.what == "gradient":
                finding.more += differences.communication.gathers(finding.step)
            found.append(finding)
    if settings:
        found = [finding for finding in found if finding.what != "numbers"]
    for finding in settings[:1]:
        # By the script, for the batch of all ranks
        is_scaled = bool(scaled or own_flags) and finding.advice == "world"
        is_planned = differences.may_be_planned and finding.advice == "plan"
        if due or is_scaled or is_planned or finding.step >= lost:
            finding.verdict = "look"
        if is_planned:
            finding.text += "; is it planned from one process's batch size? Then by --one"
    found += settings[:1] + differences.shards + differences.hidden
    printed = compare_printed(one, ranks, values, variables, repeated(ranks), again or lines[0])
    printed = [finding for finding in printed if finding.step < lost][:2]
    last = max([*to_explain, *[finding.step for finding in printed]], default=-1)
    return found + printed, differences.largest, int(last) + 1


def of_line(text):
    """Of what is said of a line, as `called at train.py:3: main()`, the line."""
    found = re.search(r"\S+:\d+", text)
    return found[0] if found else text


def steps_to_explain(differences, settings, until):
    """The first that differ, but for updates where settings do."""
    explained = {finding.step for finding in settings}
    found = differences.of("gradient", "parameters", "weight")
    found += [f for f in differences.of("update") if f.step not in explained]
    steps = sorted({finding.step for finding in found})[:FEW]
    steps += [finding.step for finding in differences.of("buffer")[:1]]
    return [step for step in steps if step < until]

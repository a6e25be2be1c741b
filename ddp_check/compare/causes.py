"""Where a difference comes from: the first line that has another value, and who set it."""

import math

from ..given.samples import STREAM
from ..notes import Finding
from ..script import source
from ..syntax import branch_of, lines_inside
from .batches import compare_lengths, compare_samples
from .fits import CONTINUED
from .lineage import Values
from .numbers import Variables
from .printed import compare_printed
from .tensors import Tensors, compare_settings

ADVICE = {
    "coupled": "of the same inputs and weights: a sample's result depends on which others are in "
    "its batch, or the model remembers earlier ones. Intended?",
    "stream": "the ranks' streams have other samples in this step than one process's, as shards of "
    "files have. What follows from that cannot be compared",
    "ratio": "a ratio of sums over the rank's own share, as in a Dice loss of the batch. Intended?",
    "share": "one process has neither these numbers nor their mean or sum: a number or a decision "
    "of the rank's own share? all_reduce that number first",
    "same loss": "but the loss is the same",
    "branch": "a decision by numbers of the rank's own share?",
    "own": "it comes from outside of torch, as of an environment, and each rank has a generator of "
    "its own: nothing after it can be compared",
}


def last_pass(of_step, variables, step):
    """In words: the last pass through a model, and who has told it not to average gradients."""
    passes = [v for v in of_step if v.kind == "outputs"]
    off = [v.line for v in of_step if v.kind == "no_sync"]
    if not passes:
        return ""
    text = f"{CONTINUED}the last pass: {source(passes[-1].line)}  [{passes[-1].name}]"
    if off:
        text += f"{CONTINUED}{source(off[-1])}{variables.set_at(off[-1], step)}"
    return text


def averaging(unlike, of_step, variables, step):
    return Finding("WRONG", "averaging", step, unlike + last_pass(of_step, variables, step))


def blame(values, tensors, variables, step):
    """What the difference of a step comes from: the findings, and whether it may be intended:
    "look", "WRONG" or "unclear"."""

    def finding(what, value, advice=None):
        lines = lines_inside(value.made_by) if value.made_by else [value.line]
        numbers = variables.behind(lines, step, further=0)
        own = "ratio" if value.by_gradient and not numbers else "share"
        if what == "inputs" and not numbers and values.is_fresh(value) and generators:
            own = "own"
        advice = advice or ("stream" if value.name == STREAM else own)
        if not numbers:
            numbers = values.behind(value) + variables.behind(lines, step)
        called = f"{CONTINUED}called at {source(value.called_at)}" if value.called_at else ""
        verdict = "look" if advice in ("coupled", "stream", "ratio", "own") else "WRONG"
        text = values.describe(value) + (f": {ADVICE[advice]}" if value.kind != "loss" else "")
        text += f" ({', '.join(generators)})" if advice == "own" else ""
        return Finding(verdict, what, step, text + called + numbers, advice=advice)

    if any(f.what == "weights" and f.step == step for f in tensors.findings):
        return [], "WRONG"  # all else follows from them
    of_step, unlike, generators = values.of_step.get(step, []), tensors.unlike(step), variables.own
    if value := values.coupled(step):
        found = [finding("outputs", value, "coupled")]
        if unlike:  # by how a gradient is averaged, they are equal, whatever the outputs
            found.append(averaging(unlike, of_step, variables, step))
        return found, "WRONG" if unlike else "look"
    losses = [v for v in of_step if v.kind == "loss"]
    inputs = values.find(step, "inputs")
    if wrong := inputs + values.find(step, "loss"):
        origins = [values.origin(wrong[0])]
        found = [finding("inputs" if inputs else origins[0].kind, origins[0])]
    else:
        last = losses[-1].index if losses else -1
        near = [v for loss in losses for v in values.ancestors(loss) if values.differs(v.index)]
        later = [v for v in values.find(step, "value") if v.index > last]
        origins = [values.origin(v) for v in (near[-1:] + later)[:1]]
        found = [finding("value", v, "same loss" if losses else None) for v in origins]
    origin = origins[0] if origins and origins[0].kind != "loss" else None
    if alone := values.alone_before(step, origin):
        line, on = alone
        text = f"{source(line)}: computed on {on} alone: {ADVICE['branch']}"
        if branch := branch_of(line):
            text += f"{CONTINUED}{source(branch)}{variables.behind([branch], step)}"
        found.append(Finding(found[0].verdict if found else "WRONG", "branch", step, text))
    is_look = bool(found) and found[0].verdict == "look"
    is_clear = any(finding.advice not in ("", "same loss") for finding in found)
    if unlike and (not inputs or is_look):
        found.append(averaging(unlike, of_step, variables, step))
    if not found and (text := variables.changing(step)):
        found.append(Finding("look", "numbers", step, f"no value differs, but numbers do:{text}"))
    if unlike or is_clear:
        return found, "look" if is_look and not unlike else "WRONG"
    return found, "unclear"


def first_of(findings, *kinds):
    return sorted([f for f in findings if f.what in kinds], key=lambda f: f.step)


def find_causes(values, tensors, variables, first, samples, lost):
    """Of the steps that differ: what may be intended, once, and the first that is not. The
    findings; that step, or inf; the step from which on nothing can be compared, or inf."""
    looks = []
    for step in dict.fromkeys(finding.step for finding in first):
        if step >= lost:  # but the ranks' gradients are to be equal in any case
            if unlike := tensors.unlike(step):
                found = averaging(unlike, values.of_step.get(step, []), variables, step)
                return [*looks, found], math.inf, lost
        elif samples and samples[0].step <= step:
            return looks, step, lost  # other samples: all else follows
        else:
            causes, verdict = blame(values, tensors, variables, step)
            may_be = verdict == "look" and step not in tensors.factors
            if not may_be and not (looks and verdict == "unclear"):
                return looks + causes, step, lost
            looks = looks or causes
            if any(cause.advice in ("own", "stream") for cause in causes):
                lost = step
    return looks, math.inf, lost


def find_all(one, ranks, tolerance, again=None):
    """All findings, in the order of the script."""
    samples, uneven, trains = compare_samples(one, ranks)
    ended, planned = compare_lengths(one, ranks, trains)
    lengths, last = ended + planned, math.inf
    if ended and ended[0].verdict == "look":  # from then on, steps have other batches
        ended[0].text += "; later steps are not compared"
        last = ended[0].step
        samples = [finding for finding in samples if finding.step < last]
    due = bool(lengths) and lengths[0].verdict == "look"  # so is a schedule by len(loader)
    for notes in [one, *ranks]:
        notes.leave_out(lambda step: step >= last or step in uneven)
    values, tensors = Values(one, ranks, tolerance / 10), Tensors(ranks, tolerance)
    variables = Variables(one, ranks)
    kinds = ("gradients", "parameters", "weights", "update")
    first = first_of(tensors.findings, *kinds)
    notes = [Finding("note", "samples", step, uneven[step]) for step in uneven if step < last]
    found, lost = notes[:1], math.inf  # lost: from this step on, nothing can be compared
    for finding in samples[:1]:
        if finding.advice == "own":
            lost = finding.step
        else:
            finding.verdict = "WRONG" if first else "look"
        for value in [v for v in values.find(0, "value") if v.name == "Subset"][:1]:
            finding.text += (
                f"{CONTINUED}{values.describe(value)}{variables.behind([value.line], 0)}"
            )
        found.append(finding)
    found += lengths[:1]
    causes, wrong, lost = find_causes(values, tensors, variables, first, samples, lost)
    found, looks = found + causes, [cause for cause in causes if cause.step < wrong]
    settings = list(compare_settings(one, ranks, variables))[:1]
    for kind in ("parameters", "gradients", "weights", "update", "buffers"):
        of_kind = first_of(tensors.findings, kind)
        clear = [f for f in of_kind if wrong <= f.step < lost]
        if of_kind:
            finding = (clear or of_kind)[0]
            finding.text += f" (in {len({f.step for f in of_kind})} steps)"
            is_look = finding.step < wrong and bool(looks) or finding.step >= lost
            if is_look or due and kind == "update" and settings:
                finding.verdict = "look"
            if kind != "update" or not first_of(tensors.findings, "gradients"):
                found.append(finding)
    for finding in settings:
        finding.verdict = "look" if due or finding.step >= lost else finding.verdict
    found += settings
    printed = compare_printed(one, ranks, values, variables, again)
    found += [finding for finding in printed if finding.step < lost][:2]
    return found, tensors.largest

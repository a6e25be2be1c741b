"""All findings of two runs: differences, and rules."""

import math
import traceback
from dataclasses import dataclass

from ..notes import Finding, Said, Step
from ..script import branch_of, loops_around, source
from .causes import find_causes
from .differences import Differences, compare_settings
from .frameworks import in_its_words
from .kinds import HIDES, TENSORS, TIMES_NOISE, VALUES, noise_of
from .lineage import Values
from .numbers import Variables, compare_printed
from .rules import RULES
from .samples import compare_lengths, compare_samples, passes_per_process

VERDICTS = "note", "WRONG", "look", "ok", "not told", "not seen"  # in the order of the report
FEW = 3  # steps that differ, whose lines are looked at: the first may be as it is meant to be
MEASURED = *TENSORS, *VALUES, "printed"  # the kinds of findings that rest on numbers


@dataclass
class Result:
    findings: list  # of Finding, in the order of VERDICTS
    steps: int  # that both runs have made
    ranks: int
    largest: dict  # {kind: the largest difference}
    lost: float  # from this step on nothing can be compared, or inf
    lines: int  # steps of which the values of lines would explain a finding

    def of(self, *verdicts):
        return [finding for finding in self.findings if finding.verdict in verdicts]

    @property
    def may_be_noise(self):
        """Whether another run on one process may explain a finding: by rounding, or as a clock. Not
        what is so large that noise of that size would hide all else."""
        found = [f for f in self.of("WRONG", "look") if f.what in MEASURED]
        return bool(found) and max(finding.off for finding in found) < TIMES_NOISE * HIDES

    @property
    def status(self):
        """1 if something is WRONG, 2 if not even the first step can be compared, else 0."""
        if self.of("WRONG") or not self.steps:
            return 1
        return 0 if self.lost else 2


def judge(one, ranks, tolerance, again=None, scaled=(), lines=None):
    """The Result of comparing one process's notes with each rank's. `again`: of one process once
    more; `scaled`: loaders with a batch size per process; `lines`: the notes of a further pair of
    runs, (of one process, of the ranks), which have the values of lines."""
    said = [note.text for _, note in [*one[Said], *ranks[0][Said]] if note.kind == "note"]
    found = [Finding("note", "", 0, text) for text in dict.fromkeys(said)]
    counts, ends = [len(n[Step]) for n in (one, *ranks)], [n.end() for n in (one, *ranks)]
    steps, largest, to_trace = min(counts), {}, 0
    if steps:
        of_steps, largest, to_trace = find_all(one, ranks, tolerance, again, scaled, lines)
        found += of_steps
    if len(set(counts)) > 1 or len(set(ends)) > 1 or ends[0] not in ("its end", "--steps"):
        found.append(about_ends(one, ranks, counts, ends, found))
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
    in_its_words(found, ranks[0])
    found.sort(key=lambda finding: VERDICTS.index(finding.verdict))
    lost = min([f.step for f in found if f.advice in ("unpaired", "stream")], default=math.inf)
    if not lost:  # nor what the script keeps
        found = [f for f in found if f.what != "attributes" or f.verdict != "look"]
    return Result(found, steps, len(ranks), largest, lost, to_trace)


def find_all(one, ranks, tolerance, again, scaled, lines):
    """All findings, in the order of the script; {kind: the largest difference}; the number of steps
    of which the values of lines would explain one."""
    lines = lines or (one, ranks)
    samples, uneven, trains = compare_samples(one, ranks)
    ended, planned = compare_lengths(one, ranks, trains)
    lengths, last = ended + planned, math.inf
    if ended and ended[0].verdict == "look":  # from then on, steps have other batches
        ended[0].text += "; later steps are not compared"
        last = ended[0].step
        samples = [finding for finding in samples if finding.step < last]
    due = bool(lengths) and lengths[0].verdict == "look"  # so is a schedule by len(loader)
    for notes in [one, *ranks, lines[0], *lines[1]]:
        notes.leave_out((*VALUES, *TENSORS), lambda step: step >= last or step in uneven)
    noise = noise_of(TENSORS, one, again) | noise_of(VALUES, lines[0], again)
    values = Values(*lines, tolerance, noise)
    differences = Differences(one, ranks, tolerance, noise)
    variables = Variables(one, ranks)
    kinds = "gradient", "parameters", "weight", "update"
    first = {finding.step for finding in differences.of(*kinds)}
    if differences.hidden:  # the gradients tell less, but the losses may tell it
        first |= {step for step in values.of_step if values.find(step, "loss")}
    if not samples and (first or not scaled):
        samples = passes_per_process(one, ranks, trains, scaled)
    settings = list(compare_settings(one, ranks, variables))
    notes = [Finding("note", "samples", step, uneven[step]) for step in uneven if step < last]
    found, lost = notes[:1], math.inf  # lost: from this step on, nothing can be compared
    for finding in samples[:1]:
        if finding.advice == "unpaired":
            lost = finding.step
        else:
            finding.verdict = "WRONG" if first else "look"
        for value in [v for v in values.find(0, "value") if v.name == "Subset"][:1]:
            finding.more.append(f"{source(value.line)}  {values.describe(value)}")
            finding.more += variables.behind([value.line], 0)
        found.append(finding)
    found += [finding for finding in lengths[:1] if finding.step < lost]
    until = min([lost, *[finding.step for finding in samples[:1]]])  # then, all else follows
    to_explain = steps_to_explain(differences, settings, until)
    causes, wrong, lost = find_causes(values, differences, variables, sorted(first), samples, lost)
    found, looks = found + causes, [cause for cause in causes if cause.step < wrong]
    for kind in ("parameters", "gradient", "weight", "update", "buffer"):
        of_kind = differences.of(kind)
        clear = [f for f in of_kind if wrong <= f.step < lost]
        if (clear or of_kind)[:1] and (clear or of_kind)[0].step < lost:
            finding = (clear or of_kind)[0]
            finding.text += f" (in {len({f.step for f in of_kind})} steps)"
            if finding.step < wrong and looks:
                finding.verdict = "look"
            known = [f for f in found if f.verdict == finding.verdict and f.step <= finding.step]
            if kind == "gradient" and known:
                known[0].more += [
                    f"so step {finding.step + 1}: gradient: {finding.text}",
                    *finding.more,
                ]
                known[0].off = finding.off
            elif kind != "update" or not settings:  # which explain it
                found.append(finding)
    if settings:
        found = [finding for finding in found if finding.what != "numbers"]
    for finding in settings[:1]:
        is_scaled = bool(scaled) and finding.advice == "world"  # by the script, for its own batch
        if due or is_scaled or finding.step >= lost:
            finding.verdict = "look"
    found += settings[:1] + differences.hidden
    printed = compare_printed(one, ranks, values, variables, again or lines[0])
    printed = [finding for finding in printed if finding.step < lost][:2]
    last = max([*to_explain[:FEW], *[finding.step for finding in printed]], default=-1)
    return found + printed, differences.largest, int(last) + 1


def steps_to_explain(differences, settings, until):
    """Those that differ, but for updates where settings do."""
    explained = {finding.step for finding in settings}
    found = differences.of("gradient", "parameters", "weight", "buffer")
    found += [f for f in differences.of("update") if f.step not in explained]
    return sorted({finding.step for finding in found if finding.step < until})


def about_ends(one, ranks, counts, ends, found):
    """They have made other numbers of steps, or ended otherwise; or all by the same error."""
    due = any(f.what == "epoch" and f.verdict == "look" or f.advice == "unpaired" for f in found)
    steps = min(counts)
    is_same = len(set(counts)) == 1 and ends[0] in ends[1:]  # the script's, not of data parallelism
    text, *more = [f"{count} steps, then {end}" for count, end in zip(counts, ends)]
    more = [f"rank {rank}: {line}" for rank, line in enumerate(more)]
    extra = [notes[Step][steps][1] for notes in (one, *ranks) if len(notes[Step]) > steps]
    if extra and steps and (branch := branch_of(extra[0].line)):
        more.append(source(branch))
    for line in [extra[0].line, *extra[0].callers] if extra and steps else []:
        more += [f"in the loop of {source(loop)}" for loop in loops_around(line)]
    verdict = "look" if due or is_same else "WRONG"
    return Finding(verdict, "end", steps, f"one process: {text}", more=more)

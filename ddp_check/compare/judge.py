"""All findings of two runs: differences, and rules."""

import math
import traceback
from dataclasses import dataclass

from ..notes import Finding, Said, Step
from ..script import source
from ..syntax import branch_of, loops_around
from . import rules_of_samples  # noqa: F401  # whose rules are in RULES, too
from .causes import find_all
from .kinds import TENSORS, VALUES
from .rules import RULES

VERDICTS = "note", "WRONG", "look", "ok", "not told", "not seen"  # in the order of the report
MEASURED = *TENSORS, *VALUES, "printed"  # the kinds of findings that rest on numbers


@dataclass
class Result:
    findings: list  # of Finding, in the order of VERDICTS
    steps: int  # that both runs have made
    ranks: int
    largest: dict  # {kind: the largest difference}
    lost: float  # from this step on nothing can be compared, or inf

    def of(self, *verdicts):
        return [finding for finding in self.findings if finding.verdict in verdicts]

    @property
    def may_be_noise(self):
        """Whether another run on one process may explain a finding: by rounding, or as a clock."""
        return any(finding.what in MEASURED for finding in self.of("WRONG", "look"))

    @property
    def status(self):
        """1 if something is WRONG, 2 if not even the first step can be compared, else 0."""
        if self.of("WRONG") or not self.steps:
            return 1
        return 0 if self.lost else 2


def judge(one, ranks, tolerance, again=None):
    """The Result of comparing one process's notes with each rank's."""
    said = [note.text for _, note in [*one[Said], *ranks[0][Said]] if note.kind == "note"]
    found = [Finding("note", "", 0, text) for text in dict.fromkeys(said)]
    counts, ends = [len(n[Step]) for n in (one, *ranks)], [n.end() for n in (one, *ranks)]
    steps, largest = min(counts), {}
    if steps:
        differences, largest = find_all(one, ranks, tolerance, again)
        found += differences
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
    found.sort(key=lambda finding: VERDICTS.index(finding.verdict))
    lost = min([f.step for f in found if f.advice in ("unpaired", "stream")], default=math.inf)
    return Result(found, steps, len(ranks), largest, lost)


def about_ends(one, ranks, counts, ends, found):
    """They have made other numbers of steps, or ended otherwise; or all by the same error."""
    steps, due = min(counts), any(f.what == "epoch" and f.verdict == "look" for f in found)
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

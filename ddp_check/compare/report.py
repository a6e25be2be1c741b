"""The report: what is WRONG or to be looked at, what is right, what was not seen."""

import math
import traceback

from ..notes import Finding, Said, Step
from ..script import source
from ..syntax import loops_around
from . import rules_of_samples  # noqa: F401  # whose rules are in RULES, too
from .causes import find_all
from .fits import CONTINUED
from .rules import RULES

BASICS = "samples", "gradients", "weights", "update", "settings", "printed"


def report(one, ranks, tolerance, again=None):
    """The text, and the exit status: 1 if something is WRONG, 2 if nothing could be compared."""
    said = [note.text for _, note in [*one[Said], *ranks[0][Said]] if note.kind == "note"]
    lines = [f"note   {text}" for text in dict.fromkeys(said)]
    counts, ends = [len(n[Step]) for n in (one, *ranks)], [n.end() for n in (one, *ranks)]
    steps, found, largest = min(counts), [], {}
    if steps:
        found, largest = find_all(one, ranks, tolerance, again)
    if len(set(counts)) > 1 or len(set(ends)) > 1:
        found.append(about_ends(one, ranks, counts, ends, found))
    first = min([f.step for f in found if f.verdict == "WRONG"], default=math.inf)
    right, unseen = [], []
    for rule in RULES:
        try:
            results = rule.find(one, ranks)
        except Exception as error:  # the others still count
            traceback.print_exc()
            results, unseen = [], [*unseen, f"not seen {rule.name}: it failed: {error!r}"]
            continue
        found += results or []
        if results is None:
            unseen.append(f"not seen {rule.name}: needs {rule.needs}")
        elif not results:
            right.append(f"ok     {rule.name}: {rule.right}")
    found.sort(key=lambda finding: ("note", "WRONG", "look").index(finding.verdict))
    lines += [*map(str, found), *right, *unseen]
    wrong = any(finding.verdict == "WRONG" for finding in found)
    sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in largest.items())
    text = f"ddp_check: {steps} steps on one process and on {len(ranks)}: "
    lost = min([f.step for f in found if f.advice in ("own", "stream")], default=math.inf)
    if first < math.inf:
        text += f"they part at step {first + 1}"
    elif lost < math.inf:
        text += f"nothing can be compared from step {lost + 1} on"
    else:
        text += "they do not part"
    lines.append(f"{text} (largest differences: {sizes})")
    if wrong or not steps and counts[0]:
        return "\n".join(lines), 1
    return "\n".join(lines), 0 if lost else 2  # 2: not even the first step is compared


def about_ends(one, ranks, counts, ends, found):
    """They have made other numbers of steps, or ended otherwise."""
    steps = min(counts)
    due = any(f.what == "epoch" and f.verdict == "look" for f in found)
    text = f"{counts[0]} steps on one process, then {ends[0]}; {counts[1:]} on the ranks, then "
    text += "; ".join(ends[1:])
    extra = [notes[Step][steps][1] for notes in (one, *ranks) if len(notes[Step]) > steps]
    for line in [extra[0].line, *extra[0].callers] if extra and steps else []:
        text += "".join(f"{CONTINUED}in the loop of {source(loop)}" for loop in loops_around(line))
    return Finding("look" if due else "WRONG", "end", steps, text)

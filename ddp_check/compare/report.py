"""The report, as text."""

import math

from ..script import source
from .fits import CONTINUED


def as_text(result):
    """What is WRONG or to be looked at, what is right, what was not seen."""
    lines = []
    for finding in result.findings:
        text = f"{source(finding.line)}: {finding.text}" if finding.line else finding.text
        if finding.verdict in ("WRONG", "look"):
            text = f"{finding.what:10} step {finding.step + 1}: {text}"
        elif finding.what:
            text = f"{finding.what}: {text}"
        lines.append(f"{finding.verdict:6} {text}" + "".join(CONTINUED + m for m in finding.more))
        if finding.remedy:
            lines[-1] += f"{CONTINUED}-> {finding.remedy}: {finding.section}"
    sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in result.largest.items())
    text = f"ddp_check: {result.steps} steps on one process and on {result.ranks}: "
    wrong = [finding.step for finding in result.of("WRONG")]
    if wrong:
        text += f"they part at step {min(wrong) + 1}"
    elif result.lost < math.inf:
        text += f"nothing can be compared from step {result.lost + 1} on"
    else:
        text += "no difference above the limits"
    return "\n".join([*lines, f"{text} (largest differences: {sizes})"])

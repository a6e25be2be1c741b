"""The report: a text to act on, or JSON, one document on stdout:

status       the exit status: 1 if something is WRONG, 2 if nothing could be compared, else 0
error        why nothing could be compared; "" if it could
script       as given, and its `flags`
processes    of the second run
steps        optimizer steps that were compared
seconds      {run: its seconds}
differences  {kind: the largest relative difference}; null if it is not finite
findings     WRONG first, each with
    verdict  "WRONG" needs a change; "look" may be intended; "note" is to be known; "not told", "not
             seen": this run could not tell, or never used, what the rule checks; "ok": it was seen
    rule     its name, as --list prints it, or what was compared
    step     the first optimizer step with it, from 1
    file, line, source   of the script; null if it is not of one line
    text, details        what it is; further lines and numbers
    advice, page         what to do; where it is explained
"""

import json
import math

from ..script import source
from .kinds import PAGE
from .rules import RULES

ORDER = "WRONG", "look", "note", "not told", "not seen", "ok"


def in_order(result):
    return [finding for verdict in ORDER for finding in result.of(verdict)]


def texts(finding):
    """What it says, as a list of lines."""
    lines = [line for text in (finding.text, *finding.more) for line in text.splitlines()]
    return [line.strip() for line in lines if line.strip()]


def as_text(result):
    findings = in_order(result)
    width = max([len(f.what) for f in findings if f.verdict in ("WRONG", "look")], default=0)
    lines = []
    for finding in findings:
        what, more = finding.what, texts(finding)
        if finding.verdict in ("WRONG", "look"):
            more[0] = f"step {finding.step + 1}: {more[0]}"
            more[:0] = [source(finding.line)] if finding.line else []
            what = f"{what:{width}}"
        if finding.section:
            more.append(
                f"{finding.remedy} ({finding.section})" if finding.remedy else finding.section
            )
        start = f"{finding.verdict:6} {what}".rstrip() + "  " * bool(finding.what)
        start = start if finding.what else f"{start:7}"
        lines += [start + more[0], *[(9 + width) * " " + line for line in more[1:]]]
    return "\n".join([*lines, summary(result)])


def summary(result):
    text = f"{result.steps} steps on one process and on {result.ranks}"
    wrong = [finding.step for finding in result.of("WRONG")]
    looks = len(result.of("look"))
    if wrong:
        text += f": {len(wrong)} WRONG, from step {min(wrong) + 1} on"
    elif result.lost < math.inf:
        text += f": nothing can be compared from step {result.lost + 1} on"
    else:
        text += ": nothing WRONG"
    text += f", {looks} to look at" * bool(looks)
    sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in result.largest.items())
    return f"ddp_check: {text}" + f" (largest differences: {sizes})" * bool(sizes)


def as_json(args, result, error, seconds):
    document = {
        "status": result.status if result else 2,
        "error": error,
        "script": args.script,
        "flags": args.flags,
        "processes": args.nproc,
        "steps": result.steps if result else 0,
        "seconds": seconds,
        "differences": {},
        "findings": [],
    }
    if result:
        document["findings"] = [as_dict(finding) for finding in in_order(result)]
        for kind, size in result.largest.items():
            document["differences"][kind] = float(size) if math.isfinite(size) else None
    return json.dumps(document, indent=2)


def as_dict(finding):
    file, _, number = finding.line.rpartition(":")
    text, *details = texts(finding)
    return {
        "verdict": finding.verdict,
        "rule": finding.what,
        "step": int(finding.step) + 1,
        "file": file or None,
        "line": int(number) if file else None,
        "source": source(finding.line).removeprefix(f"{finding.line}: ") if file else None,
        "text": text,
        "details": details,
        "advice": finding.remedy,
        "page": finding.section,
    }


def list_rules():
    lines = []
    for rule in RULES:
        words, anchor = rule.remedy
        lines += [f"{rule.name:10}  {rule.right}", f"{'':10}  {words} ({PAGE}{anchor})"]
    return "\n".join(lines)

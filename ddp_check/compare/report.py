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
import textwrap

from ..script import source
from .judge import RULES
from .kinds import PAGE

ORDER = "WRONG", "look", "note", "not told", "not seen", "ok"
BRIEF = {"not seen": ": this run has not used them; what each needs: --all", "ok": ""}
MOST = 6  # lines below a finding's first and second
SCREEN = 40  # lines of all findings: of many, each has fewer


def in_order(result):
    return [finding for verdict in ORDER for finding in result.of(verdict)]


def texts(finding):
    """What it says, as a list of lines."""
    lines = [line for text in (finding.text, *finding.more) for line in text.splitlines()]
    return [line.strip() for line in lines if line.strip()]


def as_text(result, shows_all=False):
    """What is to be done, causes first; then, in a line each, what was not seen and what is right,
    and at the end where to begin. `shows_all`: each of these, and no list cut short."""
    lines = []
    acts = result.of("WRONG", "look")
    width = max([len(finding.what) for finding in acts], default=0)
    most = min(MOST, max(1, SCREEN // max(1, len(acts)) - 3))
    for finding in in_order(result):
        text, *more = texts(finding)
        if finding in acts:
            start, indent = f"{finding.verdict:6} {finding.what:{width}}  ", (9 + width) * " "
            more = [f"step {finding.step + 1}: {text}", *more]
            if len(more) > most + 1 and not shows_all:
                more[most:] = [f"... and {len(more) - most} lines more (--all)"]
            page = page_of(finding)
            more.append(f"{finding.remedy} ({page})" if finding.remedy else page)
            text = source(finding.line) if finding.line else more.pop(0)
        elif shows_all or finding.verdict not in BRIEF:
            start, indent = f"{finding.verdict:8}  {finding.what:10}  ", 22 * " "
        else:
            continue
        lines += wrapped(text, start, indent)
        for line in more:
            lines += wrapped(line, indent, indent)
    for verdict, words in BRIEF.items() if not shows_all else ():
        if names := dict.fromkeys(finding.what for finding in result.of(verdict)):
            lines += wrapped(f"{', '.join(names)}{words}", f"{verdict:8}  ", 10 * " ")
    return "\n".join([*lines, *summary(result)])


def wrapped(text, start, indent):
    return textwrap.wrap(
        text,
        100,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary(result):
    """The last lines: how much was compared, the first cause, the flag that makes more
    comparable."""
    text = f"ddp_check: {result.steps} steps on one process and on {result.ranks}"
    wrong, looks = result.of("WRONG"), result.of("look")
    if wrong:
        text += f": {len(wrong)} WRONG, from step {min(f.step for f in wrong) + 1} on"
    elif result.lost < math.inf:
        text += f": nothing can be compared from step {result.lost + 1} on"
    else:
        text += ": nothing WRONG"
    lines = [text + f", {len(looks)} to look at" * bool(looks)]
    if result.largest and result.lost:  # else these are of other samples
        sizes = ", ".join(f"{kind} {size:.0e}" for kind, size in result.largest.items())
        lines.append(f"largest differences: {sizes}")
    if wrong:
        first = ([finding for finding in wrong if finding.line] or wrong)[0]
        lines += wrapped(source(first.line) or first.text, f"begin with {first.what}: ", "  ")
    remedies = [f.remedy for f in looks + wrong if "--one" in f.remedy]
    return lines + [f"to compare more, {remedy}" for remedy in remedies[:1]]


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


def page_of(finding):
    """The page's section that tells more of it; "" if there is none."""
    return finding.section and PAGE + finding.section


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
        "page": page_of(finding),
    }


def list_rules():
    lines = []
    for rule in RULES:
        words, anchor = rule.remedy
        lines += [f"{rule.name:10}  {rule.right}", f"{'':10}  {words} ({PAGE}{anchor})"]
    return "\n".join(lines)

"""Scores that rank 0 prints, beside those of one process."""

import ast
import re
from decimal import Decimal

from ..notes import PASS, Collective, Finding, Printed
from ..script import source
from ..text import enclosing
from .fits import relative
from .kinds import SCORES
from .numbers import TIME

SAME = 2e-4  # of printed numbers: a mean of means over nearly equal shares is not much further off
AGAIN = 2e-3  # of those of another run on one process
LAST_DIGITS = 1.5  # of the last digit: a number on the edge of two is printed as either
# As in what logging writes before a line
CLOCK = re.compile(r"\d+:\d\d:\d\d([.,]\d+)?")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.I)


def scores(text, losses):
    """(The number, how much of it is rounding) of those in a printed line that have three digits;
    (None, 0) for others, as of a clock, and for a loss that backward() got."""
    for found in NUMBER.finditer(text):
        is_clock = re.search(TIME + r"[\W_]*$", text[: found.start()].lower())
        number, digits = float(found[0]), -Decimal(found[0]).as_tuple().exponent
        is_loss = digits > 1 and any(abs(number - x) <= 0.51 * 10**-digits for x in losses)
        is_short = len(re.sub(r"e.*|\D", "", found[0]).lstrip("0")) < 3
        is_none = is_clock or is_short or is_loss
        yield (None, 0) if is_none else (number, LAST_DIGITS * 10**-digits)


def is_print(line):
    """Whether it is in a function of the script's that stands for print()."""
    function = enclosing(line, ast.FunctionDef)
    return function is not None and function.name == "print"


def put_together(notes, step, printed):
    """In words: the last calls by which a process has got what others have, before it prints."""
    calls = [call for at, call in notes[Collective] if at == step and call.at < printed.at]
    lines = dict.fromkeys(call.line for call in calls if call.name != PASS)
    return [f"put together at {source(line)}" for line in list(lines)[-2:]]


def compare_printed(one, ranks, values, variables, repeats, again=None):
    """Numbers that rank 0 prints, but not those that another run on one process prints otherwise,
    such as clocks; nor by `repeats`, the part of the samples that counts twice before a step."""
    both = []
    for notes in (one, ranks[0], again or one):
        losses = [v.values[0].number for _, v in notes.seen("loss") if v.values.get(0)]
        losses = [loss for loss in losses if loss is not None]
        lines = {}
        for step, note in notes[Printed]:
            if step:
                note.text = CLOCK.sub("", note.text)
                skeleton = "".join(NUMBER.sub("#", note.text).split())  # numpy fills up by spaces
                lines.setdefault(skeleton, []).append((step, note, losses))
        both.append(lines)
    for skeleton, mine in both[0].items():
        others = both[1].get(skeleton, []), both[2].get(skeleton, [])
        for (step, a, losses), (other, b, their), (_, c, _) in zip(mine, *others):
            if not re.search(r"\d\.\d", a.text):
                continue
            if step != other:
                break
            again_of_one = map(float, NUMBER.findall(c.text))
            numbers = NUMBER.finditer(a.text)
            pairs = zip(scores(a.text, losses), scores(b.text, their), again_of_one, numbers)
            limit = max(SAME, 2 * repeats.get(step, 0))
            wrong = [
                (x, y, found.start())
                for (x, rounding), (y, _), other, found in pairs
                if None not in (x, y) and relative(x, y) > limit and abs(x - y) > rounding
                if relative(x, other) < AGAIN and 3 * abs(x - other) < abs(x - y)
            ]
            if wrong:
                mine, theirs, at = wrong[0]
                lines = [at for at in (a.line, *a.callers) if not is_print(at)]
                line, *callers = lines or [a.line]
                around = a.text[max(0, at - 60) :].strip()[:100]
                text = f"{mine:g} on one process, {theirs:g} on rank 0, in {around!r}: of rank 0's "
                text += "share alone, or a mean of means over unequal shares?"
                if value := values.printed(step, mine):
                    about = f"{source(values.line_of(value))}  {values.describe(value)}"
                    called = value.about.get("called_at")
                    about = [about, f"called at {source(called)}"] if called else [about]
                    more = [*about, *values.behind(value)]
                else:
                    more = variables.behind([line], step)
                    more += variables.divided([line, *callers])
                    more += put_together(one, step, a)
                more = [f"called at {source(at)}" for at in callers[:1]] + more
                more = {"line": line, "more": more, "remedy": SCORES, "section": "#scores"}
                yield Finding("look", "printed", step, text, **more)
                break

"""Numbers that rank 0 prints, beside those of one process."""

import re

from ..notes import Finding, Printed
from ..script import source
from .fits import relative
from .kinds import PAGE, SCORES

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.I)


def scores(text, losses):
    """The numbers in a printed line that have three digits; None for others, and for a loss that
    backward() got."""
    for text in NUMBER.findall(text):
        digits = len(text.partition(".")[2]) if "e" not in text.lower() else 0
        number = float(text)
        is_loss = digits > 1 and any(abs(number - x) <= 0.51 * 10**-digits for x in losses)
        is_short = len(re.sub(r"e.*|\D", "", text).lstrip("0")) < 3
        yield None if is_short or is_loss else number


def compare_printed(one, ranks, values, variables, again=None):
    """Numbers that rank 0 prints, but not those that another run on one process prints otherwise,
    such as clocks."""
    both = []
    for notes in (one, ranks[0], again or one):
        losses = [v.values[0].number for _, v in notes.seen("loss") if v.values.get(0)]
        losses = [loss for loss in losses if loss is not None]
        lines = {}
        for step, note in notes[Printed]:
            if step:
                skeleton = " ".join(NUMBER.sub("#", note.text).split())
                lines.setdefault(skeleton, []).append((step, note, losses))
        both.append(lines)
    for skeleton, mine in both[0].items():
        others = both[1].get(skeleton, []), both[2].get(skeleton, [])
        for (step, a, losses), (other, b, their), (_, c, _) in zip(mine, *others):
            if not re.search(r"\d\.\d", a.text):
                continue
            if step != other:
                break
            same = [x == y for x, y in zip(NUMBER.findall(a.text), NUMBER.findall(c.text))]
            pairs = list(zip(scores(a.text, losses), scores(b.text, their), same))
            pairs = [(x, y) for x, y, same in pairs if None not in (x, y) and same]
            wrong = [(x, y) for x, y in pairs if relative(x, y) > 2e-3]
            if wrong:
                text = f"{wrong[0][0]:g} on one process, {wrong[0][1]:g} on rank 0, in "
                text += f"{a.text.strip()[:100]!r}: of rank 0's share alone, or a mean of means "
                text += "over unequal shares?"
                if value := values.printed(step, wrong[0][0]):
                    about = f"{source(values.line_of(value))}  {values.describe(value)}"
                    more = [about, *values.behind(value)]
                else:
                    more = variables.behind([a.line], step)
                more = {"line": a.line, "more": more, "remedy": SCORES, "section": f"{PAGE}#scores"}
                yield Finding("look", "printed", step, text, **more)
                break

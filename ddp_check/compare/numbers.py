"""The script's plain numbers, and those that it prints: which differ, and who has set them."""

import math
import re

from ..notes import Batch, Drawn, Said, Step
from ..patterns import divisions_behind, parameters_in, sets_in_order, shares_in
from ..script import source
from ..text import lines_that_set, names_at, returns_of
from .fits import relative, sides

TIME = r"(?<![a-z])(time|elapsed|eta|secs?|(milli)?seconds|mem|memory)(?![a-z])"
BY_RANK = re.compile(r"(?<![a-z])(rank|world|master|main|distributed)s?(?![a-z])")


class Variables:
    """The script's plain numbers at each step, on one process and on the ranks."""

    def __init__(self, one, ranks):
        self.all = [{step: note.variables for step, note in n[Step]} for n in (one, *ranks)]
        self.lines = {step: note.line for step, note in one[Step]}
        self.rows = {batch.rows for _, batch in one[Batch]}
        first, *theirs = [
            {k: v for _, note in n[Step] for k, v in note.generators.items()} for n in ranks
        ]
        lines = [note.text for _, note in ranks[0][Said] if note.kind == "unseeded"]
        # Not of a library, which makes it as it is imported
        self.unseeded = [line for line in lines if not re.search(": (from|import) ", source(line))]
        self.files = files_of(ranks[0])
        # {step: a line that draws for a rank other than its share of one process's numbers}
        self.apart = uneven_draws(one, ranks)
        self.apart |= {step: seen.line for n in ranks for step, seen in n.seen("apart")}
        # Steps in which a collate_fn has left out samples, and random numbers are of the others.
        self.with_gaps = {step for n in ranks for step, _ in n.seen("gaps")}
        # Names of the script's generators that are in other states on other ranks.
        self.generators = [
            k for k, v in first.items() if any(other.get(k, v) != v for other in theirs)
        ]
        self.states = {step: note.generators for step, note in ranks[0][Step]}

    def drawn_apart(self, step):
        """[the line by which ranks have drawn apart last, until this step]"""
        steps = [at for at in self.apart if at <= step]
        return [self.apart[max(steps)]] if steps else []

    def drawing(self, step):
        """Those of these generators that draw for this step; or, of the first, for the next."""
        before, after = [self.states.get(at, {}) for at in (max(step - 1, 0), max(step, 1))]
        return [name for name in self.generators if before.get(name) != after.get(name)]

    def others(self, step):
        """{name: [number on one process, on rank 0, ...]}: those that differ, but for the number
        of processes, and that of this one."""
        first, *theirs = [of_step.get(step, {}) for of_step in self.all]
        usual = [1] + [len(theirs)] * len(theirs), [0, *range(len(theirs))]
        found = {name: [n, *[other.get(name, n) for other in theirs]] for name, n in first.items()}
        return {
            name: numbers
            for name, numbers in found.items()
            if numbers not in usual and any(relative(n, numbers[0]) > 1e-6 for n in numbers)
        }

    def plans(self, step):
        """Whether ranks have a number, the same since the first step, of 1 / N of one process's, as
        of steps with N times the batch; it is not that of a batch's rows."""
        before, found = self.others(min(self.all[0])), self.others(step)
        both = [n for name, n in found.items() if n == before.get(name) and n[0] not in self.rows]
        both = [n for n in both if len(set(n[1:])) == 1 and n[0] > n[1] >= 1]
        return any(abs(n[0] / (len(n) - 1) - n[1]) < 1 and float(n[1]).is_integer() for n in both)

    def changing(self, step):
        """In words: those that differ, and were not yet so at the first step."""
        first, line = self.others(min(self.all[0])), self.lines[step]
        found = [name for name, n in self.others(step).items() if n != first.get(name)]
        return [self.describe(name, name, step, line) for name in found[:4]]

    def counted(self, step):
        """In words: those that have grown as many times as much on one process as there are ranks,
        and may decide what is so from this step on."""
        grown, start = [], min(self.all[0])
        for of in self.all:
            now, then = of.get(step, {}), of.get(start, {})
            grown.append({name: n - then[name] for name, n in now.items() if name in then})
        mine, *theirs = grown
        names = [
            name
            for name, n in mine.items()
            if n > 0 and all(len(theirs) * of.get(name, 0) == n for of in theirs)
        ]
        found = []
        for name in names[:2]:
            set_at = [at for file in self.files for at in lines_that_set(f"{file}:1", name)]
            numbers = sides(*[of[step][name] for of in self.all])
            text = f"counted by each rank: {name} is {numbers}"
            found.append(f"{text}; set at {', '.join(set_at)}" if set_at else text)
        return found

    def behind(self, lines, step, further=2):
        """In words: the numbers in these lines that differ, and in those that set them; if there
        are none, in those that set what is no number."""
        others, lines, texts, hidden = self.others(step), list(lines), {}, []
        for line in lines:
            for name, text in names_at(line).items():
                if re.search(TIME, text.lower()):
                    continue
                if name in others and name not in texts and len(texts) < 3:
                    lines += lines_that_set(line, name)
                    texts[name] = self.describe(name, f"{line}: {text}", step, line)
                elif name not in self.all[0].get(step, {}):
                    hidden += lines_that_set(line, name) or returns_of(line, name)
        if not texts and further:
            return self.behind(dict.fromkeys(hidden), step, further - 1)
        return list(texts.values())

    def decide(self, branch, step):
        """Whether numbers in an `if` differ, but for a flag that is set on all ranks or on none, or
        that says which ranks, such as `is_main`."""
        others = self.others(step)
        numbers = [(name, others[name]) for name in names_at(branch) if name in others]
        return any(
            not {*of} <= {0, 1} or (len(set(of[1:])) > 1 and not BY_RANK.search(name))
            for name, of in numbers
        )

    def set_at(self, line, step):
        """The lines where the numbers in a line are set; or, of `with context():`, the context."""
        names = names_at(line)
        if "sync" in source(line).removeprefix(line):  # not in the file's name
            names = [name for name in names if name in self.all[0].get(step, {})]
        lines = [at for name in names for at in lines_that_set(line, name)]
        return [source(line) for line in lines[:3]]

    def divided(self, lines):
        """In words: where the functions divide whose results these lines print."""
        made = [
            at for line in lines for name in names_at(line) for at in lines_that_set(line, name)
        ]
        found = [at for line in (*lines, *made) for at in divisions_behind(line, self.files)]
        found = [source(at) for at in dict.fromkeys(found)]
        found = [line for line in found if not re.search(TIME, line.partition(": ")[2].lower())]
        return [f"divided at {line}" for line in found[:3]]

    def parameters(self):
        """Lines that make a parameter outside of a class's module."""
        return [line for file in self.files for line in parameters_in(file)][:3]

    def other_data(self):
        """In words: lines by which the ranks' data may be other than one process's."""
        sets = [line for file in self.files for line in sets_in_order(file)][:2]
        words = "if of strings, a set has another order in each process"
        texts = [f"{words}: {source(at)}" for at in sets]
        return texts + shares_of(self.files)

    def describe(self, name, text, step, line):
        numbers = [of_step.get(step, {}).get(name, math.nan) for of_step in self.all]
        set_at = lines_that_set(line, name)
        text = f"{text} is {sides(*numbers)}"
        return f"{text}; set at {', '.join(set_at)}" if set_at else text


def files_of(notes):
    return [note.text for _, note in notes[Said] if note.kind == "file"]


def shares_of(files):
    """In words: where a rank takes its share of something."""
    lines = [line for file in files for line in shares_in(file)]
    return [f"a share by the rank: {source(line)}" for line in lines][:3]


def uneven_draws(one, ranks):
    """{step: a line that draws other numbers of times on the ranks, and not its part of the
    times, in this step or another}"""
    mine, *theirs = [n[Drawn][-1][1].times if n[Drawn] else {} for n in (one, *ranks)]
    last, found = min(len(notes[Step]) for notes in (one, *ranks)), {}
    for key, of_one in mine.items():
        times = {
            step: (number, {of.get(key, {}).get(step, 0) for of in theirs})
            for step, number in of_one.items()
            if step < last
        }
        uneven = {step for step, (a, b) in times.items() if b not in ({a}, {a / len(ranks)})}
        if uneven - {0}:  # so no turns of the ranks
            uneven |= {step for step, (a, b) in times.items() if b != {a}}
        found |= dict.fromkeys(uneven, key[0])
    return found

"""Lines that not all processes have run."""

import re

from ..notes import Finding
from ..script import source
from ..text import branch_of
from .advice import ADVICE
from .kinds import DECIDE
from .numbers import BY_RANK


def branch_alone(cause, origin, verdict):
    """A line that not all have run."""
    alone = cause.values.alone_before(cause.step, origin)
    if not alone:
        return None
    line, on = alone
    lines = [line, *filter(None, [cause.values.called_at.get(line)])]
    branches = [branch for branch in map(branch_of, lines) if branch]
    if any(is_by_rank(cause, branch) for branch in branches):
        return None
    if on.count("rank") == cause.values.ranks:
        if branches and not any(is_by_numbers(cause, branch) for branch in branches):
            return None  # as of several processes alone
        if cause.communication.communicates.intersection(branches):
            return None  # all ranks take it, or they would hang
    text = f"computed on {on} alone: {ADVICE['branch']}"
    more = [f"called at {source(at)}" for at in lines[1:]]
    for branch in branches[:1]:
        more += [source(branch), *cause.variables.behind([branch], cause.step)]
    return Finding(verdict, "branch", cause.step, text, line, more, "branch", **DECIDE)


def is_by_rank(cause, branch):
    """Whether an `if` says which ranks are to run it, and nothing else that differs."""
    _, _, test = source(branch).partition(": ")  # not the file's name, such as main.py
    return BY_RANK.search(test) and not is_by_numbers(cause, branch)


def is_by_numbers(cause, branch):
    """Whether an `if` is decided by what a process has computed, or by a number that differs
    otherwise than by the number of processes."""
    _, _, test = source(branch).partition(": ")
    by_values = re.search(r"\.(item|mean|sum|max|min|norm)\(|\bfloat\(|loss", test) is not None
    return by_values or cause.variables.decide(branch, cause.step)

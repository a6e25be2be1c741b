"""The report, whole, as a user reads it and as another program does."""

import argparse
import json
import math

from ddp_check.compare.judge import Result
from ddp_check.compare.report import MOST, as_json, as_text, list_rules
from ddp_check.notes import Finding

ABOUT = {"remedy": "average", "section": "#loss"}
LOSS = Finding(
    "WRONG", "loss", 2, "0.5 on one", "train.py:7", ["called at a.py:9\n\nmore"], **ABOUT
)
NOWHERE = Finding("WRONG", "averaging", 1, "not averaged", section="#gradients")
ONE = 'pass --one "--bs 8"'
LOOK = Finding("look", "order", 0, "as before", "train.py:3", remedy=ONE, section="#loader")
RIGHT = [Finding("ok", name, 0, f"{name} are right") for name in ("files", "calls")]
UNSEEN = [Finding("not seen", name, 0, f"needs {name}") for name in ("others", "modes")]
UNTOLD = [
    Finding("note", "samples", 0, "the last batch"),
    Finding("not told", "buffer", 0, "noise"),
]


def result(*found, lost=math.inf, largest=()):
    return Result(list(found), 20, 2, dict(largest), lost, 0)


WHOLE = """\
WRONG  averaging  step 2: not averaged
                  docs/your_loop.md#gradients
WRONG  loss       train.py:7
                  step 3: 0.5 on one
                  called at a.py:9
                  more
                  average (docs/your_loop.md#loss)
look   order      train.py:3
                  step 1: as before
                  pass --one "--bs 8" (docs/your_loop.md#loader)
note      samples     the last batch
not told  buffer      noise
not seen  others, modes: this run has not used them; what each needs: --all
ok        files, calls
ddp_check: 20 steps on one process and on 2: 2 WRONG, from step 2 on, 1 to look at
largest differences: gradient 2e-01, buffer inf
begin with loss: train.py:7
to compare more, pass --one "--bs 8\""""
EVERYTHING = """\
not seen  others      needs others
not seen  modes       needs modes
ok        files       files are right
ok        calls       calls are right
ddp_check: 20 steps on one process and on 2: nothing WRONG"""
LOST = """\
look   order  train.py:3
              step 1: as before
              pass --one "--bs 8" (docs/your_loop.md#loader)
ddp_check: 20 steps on one process and on 2: nothing can be compared from step 4 on, 1 to look at
to compare more, pass --one "--bs 8\""""


def test_text():
    found = [*RIGHT, NOWHERE, LOOK, *UNTOLD, LOSS, *UNSEEN]
    assert as_text(result(*found, largest={"gradient": 0.24, "buffer": math.inf})) == WHOLE
    assert as_text(result(*RIGHT, *UNSEEN), True) == EVERYTHING
    assert as_text(result(LOOK, lost=3)) == LOST
    for lost, says in (0, False), (3, True):  # of other samples, how far they are tells nothing
        text = as_text(result(LOOK, lost=lost, largest={"gradient": 2.0}))
        assert ("largest differences" in text) == says
    assert as_text(result(NOWHERE)).splitlines()[-1] == "begin with averaging: not averaged"


def test_long_lists():
    """One is cut short if that saves a line."""
    for number, is_cut in (MOST, False), (MOST + 1, True):
        more = [f"line {n}" for n in range(number)]
        text = as_text(result(Finding("WRONG", "loss", 0, "text", "train.py:1", more)))
        assert ("and 2 lines more (--all)" in text) == is_cut
        assert ("line 5" in text) != is_cut


def test_json():
    args = argparse.Namespace(script="train.py", flags=["--a"], nproc=2)
    found = result(LOSS, NOWHERE, largest={"gradient": 0.24, "buffer": math.inf})
    document = json.loads(as_json(args, found, "", {"all": 3}))
    assert document.pop("findings") == [
        {
            "verdict": "WRONG",
            "rule": "loss",
            "step": 3,
            "file": "train.py",
            "line": 7,
            "source": "train.py:7",
            "text": "0.5 on one",
            "details": ["called at a.py:9", "more"],
            "advice": "average",
            "page": "docs/your_loop.md#loss",
        },
        {
            "verdict": "WRONG",
            "rule": "averaging",
            "step": 2,
            "file": None,
            "line": None,
            "source": None,
            "text": "not averaged",
            "details": [],
            "advice": "",
            "page": "docs/your_loop.md#gradients",
        },
    ]
    common = {"script": "train.py", "flags": ["--a"], "processes": 2, "seconds": {"all": 3}}
    differences = {"gradient": 0.24, "buffer": None}
    assert document == common | {
        "status": 1,
        "error": "",
        "steps": 20,
        "differences": differences,
    }
    nothing = {"status": 2, "error": "why", "steps": 0, "differences": {}, "findings": []}
    assert json.loads(as_json(args, None, "why", {"all": 3})) == common | nothing


def test_list():
    lines = list_rules().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("calls"))
    assert lines[first].endswith("all ranks make the same collective calls, in the same order")
    assert (
        "call it on all ranks" in lines[first + 1]
        and "docs/your_loop.md#rank-0" in lines[first + 1]
    )

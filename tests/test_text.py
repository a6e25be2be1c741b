"""The six files as texts: what is shared is the same, and what is promised about them holds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import SCRIPTS, edited, run, script
from same_text import PATHS, compare, definitions
from test_gpu import BEGIN, END, JOB, TELL, WATCH

BANNERS = ["The model: put yours here", "The data: put yours here", "Training", "Progress and"]
GONE = r"ctypes|\bgc\.|atexit|fcntl|\bsignal\b|os\._exit|__class__|\b\w+\._[a-z]|prctl|BaseExcep"


def test_same_text():
    assert compare(PATHS) == []
    shared = set(definitions(PATHS[0]))
    assert {"build_model", "load_data", "evaluate", "save_checkpoint", "load_checkpoint"} <= shared
    for path in PATHS:
        assert shared <= set(definitions(path)), path
    assert all("init_distributed" in definitions(path) for path in PATHS[2:])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page(name):
    """Short, in rooms, near train_single.py, and without machinery."""
    text = Path(script(name)).read_text()
    assert text.startswith("# /// script\n# requires-python")
    several = ["The process group"] * (name not in SCRIPTS[:2])
    banners = [*BANNERS, *several, "The command line"]
    found = re.findall(r"^# ---- (.*?)-*$", text, re.M)
    assert [a[: len(b)] for a, b in zip(found, banners, strict=True)] == banners
    lines, main = {"single": (420, 85), "fsdp2": (560, 130)}.get(name, (500, 120))
    assert len(text.splitlines()) <= lines
    assert len(definitions(Path(script(name)))["main"].splitlines()) <= main
    other, changed = ("ddp_torchrun", 140) if name == "fsdp2" else ("single", 160)
    done = subprocess.run(["diff", script(other), script(name)], capture_output=True, text=True)
    assert len(re.findall(r"^[<>]", done.stdout, re.M)) <= changed
    assert re.findall(GONE, text) == []
    modules = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
    assert modules <= set(sys.stdlib_module_names) | {"torch", "torchvision", "numpy"}
    path = edited(name, END, TELL + END, BEGIN, BEGIN + WATCH)  # the GPU tests' edits fit
    assert name != "single" or "watched [" in run(name, *JOB, "x", "--device", "cpu", path=path)

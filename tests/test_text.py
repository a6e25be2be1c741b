"""The six files as texts hold what is promised about them; benchmarks/gpu.sh would run."""

import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, command, edited
from same_text import PATHS, compare, definitions
from test_gpu import BEGIN, END, TELL, WATCH

ORIGINAL = PATHS[0].read_text()
PLACES = r"^# ---- .*|^(?:class|def) \w+"  # of what stands in which room
LINES = {"single": (460, 85), "dp": (460, 85), "fsdp2": (610, 135)}  # of the file, of main
GONE = r"ctypes|\bgc\.|atexit|fcntl|\bsignal\.|os\._exit|__class__|\b\w+\._[a-z]|prctl|BaseExcep"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_page(path):
    """Short, in the rooms of train_single.py, without machinery; test_gpu.py's changes fit."""
    text, name = path.read_text(), path.stem.removeprefix("train_")
    found, (lines, main) = definitions(text), LINES.get(name, (550, 125))
    assert set(definitions(ORIGINAL)) <= set(found) and compare(PATHS) == []
    rooms = re.findall(PLACES, ORIGINAL, re.M)
    assert [place for place in re.findall(PLACES, text, re.M) if place in rooms] == rooms
    assert len(text.splitlines()) <= lines and found["main"].split("def ", 1)[1].count("\n") < main
    assert re.findall(GONE, text) == []
    modules = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
    assert modules <= set(sys.stdlib_module_names) | {"torch", "torchvision", "numpy"}
    edited(name, END, TELL + END, BEGIN, WATCH + BEGIN)


@pytest.mark.slow
def test_gpu_sh():
    """benchmarks/gpu.sh, with tiny runs: its tables have all their rows."""
    words = ["env", "TINY=1", f"OUT={Path().resolve()}", f"PYTHON={sys.executable}", "bash"]
    command(*words, ROOT / "benchmarks" / "gpu.sh")
    tables = "".join(path.read_text() for path in Path().glob("*.md"))
    assert "nan" not in tables and tables.count("\n| train_") == 6 + 3 + 1 + 1

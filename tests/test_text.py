"""The six files as texts: what is shared is the same, and what is promised about them holds."""

import ast
import re
import sys

import pytest
from same_text import PATHS, compare, definitions

MODEL, DATA = "The model: put yours here", "The data: put yours here"
BANNERS = ["The flags: add yours here", MODEL, DATA, "Training: nothing to change here"]
BANNERS += ["Progress and checkpoints: nothing to change here", "Main"]
CALLED = {MODEL: {"build_model", "loss_function", "count_correct", "build_optimizer", "BLOCKS"}}
CALLED |= {DATA: {"load_data", "prepare", "augment"}}  # from outside of their rooms
LINES = {"single": (460, 85), "dp": (460, 85), "fsdp2": (610, 135)}  # of the file, of main
GONE = r"ctypes|\bgc\.|atexit|fcntl|\bsignal\.|os\._exit|__class__|\b\w+\._[a-z]|prctl|BaseExcep"


def used(text):
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_page(path):
    """Short, in rooms, and without machinery; `main` comes last. Whoever
    replaces a room of the user's by the functions that others call has a script that runs."""
    text, name = path.read_text(), path.stem.removeprefix("train_")
    found, (lines, main) = definitions(text), LINES.get(name, (550, 125))
    assert set(definitions(PATHS[0].read_text())) <= set(found) and compare(PATHS) == []
    assert list(found)[-1] == "main"
    assert len(text.splitlines()) <= lines and found["main"].split("def ", 1)[1].count("\n") < main
    _, *parts = re.split(r"^# ---- (.*?) -+\n", text, flags=re.M)
    assert parts[::2] == BANNERS
    for banner, room in list(zip(parts[::2], parts[1::2]))[1:3]:
        own, called = set(definitions(room)), used(text.replace(room, "")) & CALLED[banner]
        assert called | {"BLOCKS"} == CALLED[banner] | {"BLOCKS"}
        assert own & used(text.replace(room, "")) == called and own <= called | used(room)
    assert re.findall(GONE, text) == []
    modules = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
    assert modules <= set(sys.stdlib_module_names) | {"torch", "torchvision", "numpy"}

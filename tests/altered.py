"""Altered copies of the scripts: with other text, with the recipes of docs/, with more code."""

import ast
import re
import shutil
from pathlib import Path

from same_text import ROOT

COMPLETE = "complete/train.py"
START = '\n\nif __name__ == "__main__":\n'


# ---- Recipes of docs/ ----------------------------------------------------------------------------
RECIPES = ["recipes.md", "patients.md", "cost_and_speed.md"]
NEW = "# ---- A step, and the evaluation"  # new functions go above this line of train.py
IMPORTS = "from torch import nn\n"


def recipe(title):
    """The blocks of a section of these pages: language and code."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in RECIPES)
    sections = re.split(r"^##+ ", pages, flags=re.M)  # each begins with its title
    [section] = [section for section in sections if section.startswith(f"{title}\n")]
    return re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S)


def paste(title, folder):
    """Do to a copy of complete/ what a recipe says."""
    for language, code in recipe(title):
        if language == "diff":
            for name, hunk in re.findall(r"^@@ ([\w.]+).* @@\n((?:[ +-].*\n)+)", code, re.M):
                path = Path(folder, name)
                path.write_text(with_hunk(path.read_text(), hunk))
        if code.startswith("# in train.py\n"):
            path = Path(folder, "train.py")
            path.write_text(with_functions(path.read_text(), code))


def with_hunk(text, hunk):
    """The text with the lines of a diff, whose other lines must be in it once, together."""
    lines = hunk.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    assert f"\n{text}".count(f"\n{old}") == 1, old
    return f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]


def with_functions(text, code):
    """The text with these functions and classes, instead of those of the same names, if any."""
    lines = code.splitlines(keepends=True)
    for node in ast.parse(code).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        part = "".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            text = text.replace(IMPORTS, IMPORTS + part)
            continue
        name = node.name
        found = re.search(rf"^(?:def|class) {name}\b.*\n(?:(?: .*)?\n)*", text, re.M)
        if found:
            text = text.replace(found[0], f"{part}\n\n")
        else:
            text = text.replace(NEW, f"{part}\n\n{NEW}")
    return text


# ---- Copies of scripts ---------------------------------------------------------------------------
def replaced(text, *changes):
    """Changes: what stands there, its replacement, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return text


def edit(path, *changes):
    Path(path).write_text(replaced(Path(path).read_text(), *changes))


def write_altered(path, folder, *changes, more="", titles=()):
    """The path of a copy of a script in this folder, with the modules beside it, these changes, the
    recipes of these titles, and more code before its start, where it can replace or wrap functions.
    """
    text, copy = replaced(path.read_text(), *changes), Path(folder, path.name)
    assert text.count(START) == 1, path
    if path.parent != ROOT:
        shutil.copytree(path.parent, folder, dirs_exist_ok=True)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    for title in titles:
        paste(title, folder)
    if more:
        copy.write_text(copy.read_text().replace(START, f"\n\n{more}{START}"))
    return copy

"""Functions and constants of one name have one text in all five scripts; `main` may differ.

python tests/same_text.py          # says where they differ, status 1 if anywhere
python tests/same_text.py --fix    # copies the text of the first script that has it into the others
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["single", "dp", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc"]
PATHS = [ROOT / f"train_{name}.py" for name in NAMES]
MAY_DIFFER = {"main", "gpus", "devices"}


def definitions(path):
    """{name: (first line, last line, text)} of a script's top-level definitions, from line 0."""
    text = path.read_text()
    lines, found = text.splitlines(keepends=True), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) - 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno - 1
        else:
            continue
        found[name] = first, node.end_lineno, "".join(lines[first : node.end_lineno])
    return found


def compare(paths, fix=False):
    """The differences, each as "name: script"; with `fix` they are mended too."""
    original, differ = {}, []
    for path in paths:
        lines = path.read_text().splitlines(keepends=True)
        found = definitions(path)
        for name, (first, last, text) in sorted(found.items(), key=lambda item: -item[1][0]):
            if name in MAY_DIFFER or original.setdefault(name, text) == text:
                continue
            differ.append(f"{name}: {path.name}")
            lines[first:last] = [original[name]]
        if fix:
            path.write_text("".join(lines))
    return differ


if __name__ == "__main__":
    fix = "--fix" in sys.argv
    differ = compare(PATHS, fix)
    print("\n".join(differ) or "all the same")
    sys.exit(bool(differ) and not fix)

"""Functions, classes and constants of one name have one text in all five scripts.

So has the part of the sbatch files below its mark, which comes from slurm/single.sh.

python tests/same_text.py          # says where they differ, status 1 if anywhere
python tests/same_text.py --fix    # copies the text from train_single.py, or from the first script
                                   # that has it, into the others

`main`, and what has no name (imports, flags, the last lines), may differ.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["single", "dp", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc"]
SCRIPTS = [ROOT / f"train_{name}.py" for name in NAMES]
SBATCH = [ROOT / "slurm" / f"{name}.sh" for name in [*NAMES, "node0", "node1"]]
MARK = "# ---- From here on nothing needs a touch"
MAY_DIFFER = {"main", "add", "gpus"}


def definitions(path):
    """{name: (first line, last line, text)} of a script's top-level definitions, from line 0."""
    text = path.read_text()
    lines, found = text.splitlines(keepends=True), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) - 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names, first = [node.targets[0].id], node.lineno - 1
        else:
            continue
        for name in names:
            found[name] = first, node.end_lineno, "".join(lines[first : node.end_lineno])
    return found


def compare(scripts, fix=False):
    """The differences, each as "name: script"; with `fix` they are mended too."""
    original, differ = {}, []
    for path in scripts:
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


def compare_sbatch(files, fix=False):
    """The files whose common part is not that of the first; with `fix` it is copied into them."""
    common, differ = files[0].read_text().partition(MARK)[2], []
    for path in files:
        own, mark, rest = path.read_text().partition(MARK)
        if rest != common:
            differ.append(f"common part: {path.name}")
            if fix:
                path.write_text(own + MARK + common)
    return differ


if __name__ == "__main__":
    fix = "--fix" in sys.argv
    differ = compare(SCRIPTS, fix) + compare_sbatch(SBATCH, fix)
    print("\n".join(differ) or "all the same")
    sys.exit(bool(differ) and not fix)

"""Functions and constants of one name have one text in all six scripts; `main` may differ,
and what a sharded model needs in train_fsdp2.py.

python tests/same_text.py          # says where they differ, status 1 if anywhere
python tests/same_text.py --fix    # copies the text of the first script that has it into the others
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["single", "dp", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc", "fsdp2"]
PATHS = [ROOT / f"train_{name}.py" for name in SCRIPTS]
MAY_DIFFER = {"main", "gpus", "devices", "cores"}
SHARDED = {"build_optimizer", "prepare", "evaluate", "save_checkpoint", "load_checkpoint"}


def definitions(text):
    """{name: text} of a script's top-level functions, classes and constants."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.get_source_segment(text, node)
    return found


def compare(paths, fix=False):
    """The differences, each as "name: script"; with `fix` they are mended too."""
    original, differ = {}, []
    for path in paths:
        text, free = path.read_text(), MAY_DIFFER | (SHARDED if "fsdp2" in path.name else set())
        for name, own in definitions(text).items():
            if name not in free and own != original.setdefault(name, own):
                differ.append(f"{name}: {path.name}")
                text = text.replace(own, original[name])
        if fix:
            path.write_text(text)
    return differ


if __name__ == "__main__":
    differ = compare(PATHS, "--fix" in sys.argv)
    print("\n".join(differ) or "all the same")
    sys.exit(bool(differ) and "--fix" not in sys.argv)

"""Functions, classes and flags of one name have one text in all small scripts. `main` and
`check_start` may differ, and so may the score of a sharded model.

python tests/same_text.py                          # says where they differ; status 1 if anywhere
python tests/same_text.py --fix train_single.py    # copies that script's text into its siblings
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["single", "dp", "ddp_torchrun", "ddp_spawn", "ddp_multigpu_proc", "fsdp2"]
OWN = [ROOT / "own_loop" / "before.py", ROOT / "own_loop" / "after.py"]
GROUPS = [[ROOT / f"train_{name}.py" for name in SMALL], OWN]
FREE = {"main", "check_start"}
SHARDED = {"count_correct"}  # of train_fsdp2.py alone
PER_GPU = {"--batch-size", "--workers"}  # of own_loop/after.py: their help differs


def definitions(path):
    """{name: text} of a script's top-level functions and classes, and calls that add a flag."""
    text, found = path.read_text(), {}
    lines = text.splitlines()
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        own = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = own
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func).rpartition(".")[2] in ("add", "add_argument"):
                found[node.value.args[0].value] = own
    return found


def folder(path):
    """The default of a small script's --output, the one thing that differs in a shared flag."""
    return f'default="runs/{path.stem.removeprefix("train_")}"'


def compare(paths, source=None):
    """The differences, each as "name: script". With a `source`, its text is copied to the others;
    without, the first script that has a name is the one to compare with."""
    shared, differ = {}, []
    for path in paths if source is None else [source, *paths]:
        text, free = path.read_text(), FREE | (SHARDED if "fsdp2" in path.name else set())
        free |= PER_GPU if path.name == "after.py" else set()
        for name, own in definitions(path).items():
            wanted = shared.setdefault(name, own.replace(folder(path), 'default="FOLDER"'))
            wanted = wanted.replace('default="FOLDER"', folder(path))
            if name not in free and own != wanted:
                differ.append(f"{name}: {path.name}")
                text = text.replace(own, wanted)
        if source is not None:
            path.write_text(text)
    return differ


if __name__ == "__main__":
    fix = Path(sys.argv[2]).resolve() if sys.argv[1:2] == ["--fix"] else None
    differ = []
    for paths in GROUPS:
        if fix is None or fix in paths:
            differ += compare(paths, fix)
    print("\n".join(differ) or "all the same")
    sys.exit(bool(differ) and fix is None)

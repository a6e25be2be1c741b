"""The small scripts share what they can to the letter, and so do before.py and after.py:
functions and flags of one name have one text, and all scripts have them, but for those in `ONLY`.
`main` may differ, and so may the score of a sharded model. Scripts with DDP train in the same
lines, wherever these stand.

python tests/same_text.py                          # says where they differ; status 1 if anywhere
python tests/same_text.py --fix train_single.py    # copies that script's text into its siblings,
                                                   # and says what is left to do by hand
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["single", "dp", "ddp_torchrun", "ddp_spawn", "ddp_multigpu_proc", "fsdp2"]


def script_path(name):
    """Of a small script."""
    return ROOT / ("large" if name == "fsdp2" else "") / f"train_{name}.py"


OWN = [ROOT / "own_loop" / "before.py", ROOT / "own_loop" / "after.py"]
GROUPS = [[script_path(name) for name in SMALL], OWN]
FREE = {"main"}
SHARDED = {"count_correct"}  # of train_fsdp2.py alone
PER_GPU = {"--batch-size", "--workers"}  # of own_loop/after.py: their help differs
START = {"train_ddp_spawn.py", "train_ddp_multigpu_proc.py"}
ONLY = {  # in these scripts
    "--amp": {"train_single.py", "train_ddp_torchrun.py", "train_ddp_spawn.py", "train_fsdp2.py"},
    "--local-rank": {"train_ddp_torchrun.py", "train_fsdp2.py"},
    "--nproc-per-node": {"train_ddp_spawn.py"},
    "train": {"train_ddp_spawn.py"},
    **dict.fromkeys(["--nnodes", "--node-rank", "--init-method", "--timeout"], START),
}


def definitions(path):
    """{name: text} of a script's functions and classes, and of its flags. The text of parse_args is
    that of its flags."""
    text, found = path.read_text(), {}
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.col_offset == 0:
            if node.name != "parse_args":
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            found[node.args[0].value] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
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
    for path in paths:
        own = definitions(path)
        for name in shared:
            if name not in own and path.name in ONLY.get(name, {path.name}):
                differ.append(f"{name}: not in {path.name}")
                if source is not None:
                    insert(name, source, path)
    return differ


def insert(name, source, path):
    """Copy a flag or function from `source` into a script, behind the one that is before it there.
    What `main` does with it is written by hand."""
    there, own = definitions(source), definitions(path)
    if name not in there:
        return
    is_flag = name.startswith("--")
    alike = [other for other in there if other.startswith("--") == is_flag]
    before = [other for other in alike[: alike.index(name)] if other in own]
    if before:
        gap = "\n" if is_flag else "\n\n\n"
        text = own[before[-1]]
        path.write_text(path.read_text().replace(text, text + gap + there[name]))


def shared_loops(paths=GROUPS[0]):
    """The scripts whose training, from the flags on, differs from that of train_ddp_torchrun.py in
    more than their wrapper, --amp, and in whose turn it is to load the data."""
    texts = {}
    for path in paths[2:5]:
        text = path.read_text()
        text = text[text.index("    # All ranks take rank 0's flags") :]
        lines = text[: text.index("    dist.destroy_process_group()")].splitlines()
        own = "autocast", "parallel", "cross_entropy", "DistributedDataParallel(", "bfloat16"
        own += "count_correct", "device_ids", "First rank 0", "for my_turn in"
        texts[path.name] = [line for line in lines if not any(word in line for word in own)]
    wanted = next(iter(texts.values()))
    return [name for name, lines in texts.items() if lines != wanted]


def unread(paths=GROUPS[0]):
    """The flags that a script has, and does not use: `main` is written by hand in each."""
    found = []
    for path in paths:
        flags = [name for name in definitions(path) if name.startswith("--")]
        for flag in set(flags) - {"--local-rank"}:  # accepted for older launchers
            name = f"args.{flag[2:].replace('-', '_')}"
            if name not in path.read_text():
                found.append(f"{name}: not in {path.name}")
    return sorted(found)


if __name__ == "__main__":
    fix = Path(sys.argv[2]).resolve() if sys.argv[1:2] == ["--fix"] else None
    differ = []
    for paths in GROUPS:
        if fix in paths:
            for line in compare(paths, fix):
                print(f"copied: {line}")
        differ += compare(paths)
    differ += unread() + [f"the training: {name}" for name in shared_loops()]
    print("\n".join(differ) or "all the same")
    sys.exit(bool(differ))

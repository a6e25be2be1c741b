"""Lines of the script that share, divide, put in order, compare, or read flags."""

import ast
import re

from .text import name_of, nodes_of, own_nodes, statement_at, statements, text_of

# What reads flags, beside ArgumentParser
FLAGS = r"sys\.argv|exec\(open|from sys import.* argv|HfArgumentParser|absl.* flags|"
FLAGS += r"(import|from) (fire|click|tyro|typer|jsonargparse|docopt|simple_parsing)\b"

RATE = re.compile(r"(^|_)(lr|rate)(_|$)", re.I)
WORLD = re.compile(r"world|n_?gpus|n_?procs?(_|$)|num_(gpus|processes|replicas)|device_count", re.I)


def tests_with(line, name, unless="world|%"):
    """The lines of all `if` and `while` in a line's file that compare such a number with another,
    unless that has to do with the number of processes, or with each so many steps."""
    file, found = line.rpartition(":")[0], []
    for node in statements(file):
        if isinstance(node, (ast.If, ast.While)):
            text, inside = ast.unparse(node.test), list(ast.walk(node.test))
            is_compared = any(isinstance(part, ast.Compare) for part in inside)
            if is_compared and name in map(name_of, inside) and not re.search(unless, text):
                found.append(f"{file}:{node.lineno}")
    return found


def sets_in_order(file):
    """The lines that make a list of a set, or go through one, in its order, which of strings is
    another one in each process; not by sorted()."""
    found, nodes = [], nodes_of(file)
    sets = {
        name_of(t)
        for n in nodes
        if isinstance(n, ast.Assign) and is_set(n.value, ())
        for t in n.targets
    }
    calls = [n for n in nodes if isinstance(n, ast.Call) and name_of(n.func) == "sorted"]
    in_sorted = {part for call in calls for part in ast.walk(call)}
    for node in [node for node in nodes if node not in in_sorted]:
        through = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
        if isinstance(node, ast.Call) and name_of(node.func) in ("list", "tuple", "enumerate"):
            through = node.args[:1]
        found += [f"{file}:{each.lineno}" for each in through if is_set(each, sets)]
    return list(dict.fromkeys(found))


def flags_in(file):
    """{name of the number or text: the flag} of an ArgumentParser's."""
    found = {}
    for call in nodes_of(file):
        if isinstance(call, ast.Call) and name_of(call.func) == "add_argument":
            words = [getattr(word, "value", None) for word in call.args]
            flags = [word for word in words if isinstance(word, str) and word.startswith("--")]
            dest = [word.value for word in call.keywords if word.arg == "dest"]
            dest = [value.value for value in dest if isinstance(value, ast.Constant)]
            for flag in flags[:1]:
                found[(*dest, flag[2:].replace("-", "_"))[0]] = flag
    return found


def reads_flag(file, name):
    """Whether it takes flags otherwise than by an ArgumentParser, and has such a variable or
    argument."""
    text = text_of(file)
    has_name = re.search(rf"^\s*{name}\b.*=|def [^)]*\b{name}\b", text, re.M)
    return bool(has_name and re.search(FLAGS, text))


def parameters_in(file):
    """The lines that make a parameter, but for those that give it to a module, as in `self.a =`."""
    found = []
    for statement in statements(file):
        calls = [node for node in own_nodes(statement) if isinstance(node, ast.Call)]
        makes = any(
            name_of(call.func) == "Parameter" or any(is_true(word) for word in call.keywords)
            for call in calls
        )
        if makes and not ast.unparse(statement).startswith("self."):
            found.append(f"{file}:{statement.lineno}")
    return found


def is_true(word):
    return word.arg == "requires_grad" and getattr(word.value, "value", None) is True


def shares_in(file):
    """The lines that take a share by the rank: x[rank::world], x.chunk(world)[rank],
    range(rank, n, world), or i % world == rank."""
    found = []
    for node in nodes_of(file):
        is_call = isinstance(node, ast.Call) and name_of(node.func) in ("range", "islice")
        inside = list(ast.walk(node))
        is_turn = isinstance(node, ast.Compare) and any(isinstance(n, ast.Mod) for n in inside)
        is_part = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call)
        if is_call or is_turn or is_part or isinstance(node, ast.Slice):
            is_device = is_part and "device" in ast.unparse(node.value.func).partition("(")[0]
            if any("rank" in str(name_of(part)) for part in inside) and not is_device:
                found.append(f"{file}:{node.lineno}")
    return list(dict.fromkeys(found))


def seeds_in(file):
    """The lines that seed as the file is imported."""
    return [
        f"{file}:{node.lineno}"
        for statement in statements(file)
        if isinstance(statement.parent, ast.Module)
        for node in own_nodes(statement)
        if isinstance(node, ast.Call) and "seed" in str(name_of(node.func))
    ]


def scales_in(file):
    """The lines that multiply or divide a rate by the number of processes."""
    found = []
    for statement in statements(file):
        for node in own_nodes(statement):
            if isinstance(getattr(node, "op", None), (ast.Mult, ast.Div)):
                names = {str(name_of(part)) for part in ast.walk(node)}
                if any(map(RATE.search, names)) and any(map(WORLD.search, names)):
                    found.append(f"{file}:{statement.lineno}")
    return list(dict.fromkeys(found))


def is_set(node, names):
    """`names`: of variables that are sets."""
    if isinstance(node, ast.BinOp):
        return is_set(node.left, names) or is_set(node.right, names)
    is_made = isinstance(node, ast.Call) and name_of(node.func) in ("set", "frozenset", "union")
    return is_made or isinstance(node, (ast.Set, ast.SetComp)) or name_of(node) in names


def is_path(node):
    """Whether `folder / name` is a file's name."""
    if not isinstance(node, ast.BinOp):  # but `total /= n`
        return False
    name, folder = node.right, ast.unparse(node.left)
    is_text = isinstance(name, ast.JoinedStr) or isinstance(getattr(name, "value", None), str)
    return is_text or re.search("(?<![a-z])(dir|path|folder)(?![a-z])", folder) is not None


def divisions_behind(line, files):
    """Where a function divides, or takes a mean, that has computed what this line has: a score."""
    calls = [n for n in own_nodes(statement_at(line)) if isinstance(n, ast.Call)]
    names, found = {name_of(call.func) for call in calls}, []
    for file in files:
        for node in statements(file):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                for each in ast.walk(node):
                    is_mean = isinstance(each, ast.Call) and name_of(each.func) in (
                        "mean",
                        "average",
                    )
                    is_division = isinstance(getattr(each, "op", None), ast.Div)
                    if is_mean or (is_division and not is_path(each)):
                        found.append(f"{file}:{each.lineno}")
    return list(dict.fromkeys(found))

"""The script's text: statements, the names in them, what they divide, share or put in order."""

import ast
import contextlib
import functools
import linecache
import os
import re

from . import script
from .script import own_file

# What reads flags, beside ArgumentParser
FLAGS = r"sys\.argv|exec\(open|from sys import.* argv|HfArgumentParser|absl.* flags|"
FLAGS += r"(import|from) (fire|click|tyro|typer|jsonargparse|docopt|simple_parsing)\b"


def text_of(file):
    return "".join(linecache.getlines(os.path.join(script.START, file)))


@functools.cache
def statements(file):
    """Those of a file, each of which knows what it is in; the innermost last."""
    found = []
    with contextlib.suppress(SyntaxError):
        tree = ast.parse(text_of(file))
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node
            if isinstance(node, ast.stmt):
                found.append(node)
    return found


def statement_at(line):
    file, _, number = line.rpartition(":")
    if number.isdigit():
        for node in reversed(statements(file)):
            if node.lineno <= int(number) <= node.end_lineno:
                return node
    return None


def nodes_of(file):
    """All nodes of a file, those of each statement together."""
    return [node for statement in statements(file) for node in own_nodes(statement)]


def enclosing(line, kinds):
    """The innermost statement of such kinds that is, or has, what stands in a line; or None."""
    node = statement_at(line)
    while node is not None and not isinstance(node, kinds):
        node = getattr(node, "parent", None)
    return node


def backward_of(line):
    """Where the class of a line, such as a torch.autograd.Function, has its backward(); or ""."""
    inside = enclosing(line, ast.ClassDef)
    for each in inside.body if inside else ():
        if isinstance(each, ast.FunctionDef) and each.name == "backward":
            return f"{line.rpartition(':')[0]}:{each.lineno}"
    return ""


def loops_around(line):
    """The lines of all loops that a line is in, innermost first."""
    found, node = [], statement_at(line)
    while node := getattr(node, "parent", None):
        if isinstance(node, (ast.For, ast.While)):
            found.append(f"{line.rpartition(':')[0]}:{node.lineno}")
    return found


def branch_of(line):
    """The line of the innermost `if` that decides whether a line is run; None if there is none."""
    node = statement_at(line)
    while parent := getattr(node, "parent", None):
        found = [parent] if isinstance(parent, ast.If) else []
        for earlier in getattr(parent, "body", []):
            if isinstance(earlier, ast.If) and earlier.end_lineno < node.lineno:
                jumps = isinstance(earlier.body[-1], (ast.Continue, ast.Return, ast.Break))
                found += [earlier] * jumps
        if found:
            return f"{line.rpartition(':')[0]}:{found[-1].lineno}"
        node = parent
    return None


def lines_inside(line):
    """Of a function's statements."""
    node, file = statement_at(line), line.rpartition(":")[0]
    return [f"{file}:{n.lineno}" for n in ast.walk(node) if isinstance(n, ast.stmt)] if node else []


def calls_of(line, files):
    """The lines that call the function that a line is in."""
    function, found = enclosing(line, ast.FunctionDef), []
    for file in files if function else ():
        calls = [node for node in nodes_of(file) if isinstance(node, ast.Call)]
        found += [f"{file}:{call.lineno}" for call in calls if name_of(call.func) == function.name]
    return list(dict.fromkeys(found))


def name_of(node):
    """Of a variable, of y.name and of y["name"]; None of all else."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value
    return getattr(node, "attr", getattr(node, "id", None))


def names_at(line):
    """{name: text} of those in a statement, without the statements in it."""
    found, todo = {}, [statement_at(line)]
    while node := todo.pop(0) if todo else None:
        if name := name_of(node):
            found.setdefault(name, ast.unparse(node))
        inner = ast.iter_child_nodes(node)
        todo += [n for n in inner if not isinstance(n, (ast.stmt, ast.excepthandler))]
    return found


def lines_that_set(line, name):
    """Those in a line's file that assign something of this name. Its first value, a constant, only
    if there are no others."""
    file, found = line.rpartition(":")[0], {}
    for node in statements(file):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if name in map(name_of, getattr(target, "elts", [target])):
                is_constant = isinstance(getattr(node, "value", None), ast.Constant)
                is_first = is_constant and not isinstance(node, ast.AugAssign)
                found.setdefault(is_first, []).append(node.lineno)
    return [f"{file}:{n}" for n in sorted(set(found[min(found)]))[-3:]] if found else []


def returns_of(line, name):
    """Lines of a line's file in which a function of this name returns something."""
    file = line.rpartition(":")[0]
    functions = [n for n in statements(file) if isinstance(n, ast.FunctionDef) and n.name == name]
    inside = [n for function in functions for n in ast.walk(function)]
    return [f"{file}:{n.lineno}" for n in inside if isinstance(n, ast.Return)][:3]


def lines_of_argument(line, names):
    """Those that set the variable that a statement gives as an argument of one of these names."""
    for node in own_nodes(statement_at(line)):
        if isinstance(node, ast.keyword) and node.arg in names and isinstance(node.value, ast.Name):
            return lines_that_set(line, node.value.id)
    return []


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
            dest = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "dest"]
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
            names = [str(name_of(part)).lower() for part in inside]
            if any("rank" in name for name in names) and not any(
                "device" in name for name in names
            ):
                found.append(f"{file}:{node.lineno}")
    return list(dict.fromkeys(found))


def class_of(line):
    """The name of the class that a line is in; "" if it is in none."""
    inside = enclosing(line, ast.ClassDef)
    return inside.name if inside else ""


def gives(function):
    """The lines of a function that give what it returns, or yields."""
    code = getattr(function, "__code__", None)
    file = own_file(code.co_filename) if code else None
    node = statement_at(f"{file}:{code.co_firstlineno}") if file else None
    kinds = ast.Yield, ast.YieldFrom, ast.Return
    return [f"{file}:{n.lineno}" for n in ast.walk(node) if isinstance(n, kinds)] if node else []


def own_nodes(statement):
    """A statement, and the expressions in it that are in no other statement; none of None."""
    found, todo = [], [statement]
    while node := todo.pop() if todo else None:
        found.append(node)
        todo += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]
    return found


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

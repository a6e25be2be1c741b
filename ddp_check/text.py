"""The script's text: statements, what they are in, the names in them."""

import ast
import contextlib
import functools
import linecache
import os

from . import script
from .script import own_file


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


def is_main(test):
    """Whether an `if` asks for __name__ == "__main__"."""
    return ast.unparse(test).startswith("__name__")


def branch_of(line):
    """The line of the innermost `if` that decides whether a line is run; None if there is none."""
    node = statement_at(line)
    while parent := getattr(node, "parent", None):
        is_branch = isinstance(parent, ast.If) and not is_main(parent.test)
        found = [parent] if is_branch else []
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


def of_part(node):
    """Of x[y], x, where a line sets a part of it."""
    return node.value if isinstance(node, ast.Subscript) else None


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
            targets = getattr(target, "elts", [target])
            if name in map(name_of, [*targets, *map(of_part, targets)]):
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

"""Files that are changed without a word to Python's audit hook: in place, in memory, and in C++."""

import builtins
import functools
import importlib.abc
import importlib.machinery
import io
import os
import sqlite3
import sqlite3.dbapi2
import sys

import numpy as np

from ..process import wrap

NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
READ_WRITE = os.O_RDWR


def argument(position, name):
    def of_call(args, kwargs):
        return args[position] if len(args) > position else kwargs.get(name)

    return of_call


def new_file(position, name):
    path = argument(position, name)
    return lambda args, kwargs: (path(args, kwargs), NEW)


def shared_file(args, kwargs):
    """torch.from_file writes into the file, if it is shared."""
    path, shared = argument(0, "filename"), argument(1, "shared")
    return path(args, kwargs), READ_WRITE if shared(args, kwargs) else os.O_RDONLY


def h5py_file(args, kwargs):
    path, mode = argument(1, "name"), argument(2, "mode")
    flags = {"r+": READ_WRITE, "a": READ_WRITE | os.O_CREAT, "w": NEW, "w-": NEW, "x": NEW}
    return path(args, kwargs), flags.get(mode(args, kwargs), os.O_RDONLY)


# Module, function: what it does to which file.
WRITERS = {
    ("torch", "save"): new_file(1, "f"),
    ("torch.jit", "save"): new_file(1, "f"),
    ("torch", "from_file"): shared_file,
    ("safetensors.torch", "serialize_file"): new_file(1, "filename"),
    ("safetensors.numpy", "serialize_file"): new_file(1, "filename"),
    ("h5py", "File.__init__"): h5py_file,
    ("cv2", "imwrite"): new_file(0, "filename"),
}


def watch_writer(module, name, what, guard):
    *owners, name = name.split(".")
    owner = sys.modules[module]
    for attribute in owners:
        owner = getattr(owner, attribute)

    @wrap(owner, name)
    def write(original, *args, **kwargs):
        path, flags = what(args, kwargs)
        if isinstance(path, (str, bytes, os.PathLike)):
            guard.hook("open", (path, "w", flags))
        return original(*args, **kwargs)


class WhenImported(importlib.abc.MetaPathFinder):
    """Watches the functions of WRITERS as soon as their module is imported."""

    def __init__(self, guard):
        self.guard = guard

    def find_spec(self, name, path, target=None):
        functions = {key: what for key, what in WRITERS.items() if key[0] == name}
        spec = importlib.machinery.PathFinder.find_spec(name, path) if functions else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for (_, function), what in functions.items():
                watch_writer(name, function, what, self.guard)

        spec.loader.exec_module = exec_module
        return spec


def refusing(owner, path, refuse):
    """A class of files that can be read; before they are changed, refuse is called."""

    class ReadOnly(owner):
        def writable(self):
            return True

        def write(self, data):
            refuse("write into", path)

        def truncate(self, size=None):
            refuse("truncate", path)

    return ReadOnly


def watch_database(connection, path, refuse):
    """A database of the user's can be read."""
    reads = "SELECT READ FUNCTION RECURSIVE TRANSACTION SAVEPOINT PRAGMA".split()
    allowed = {getattr(sqlite3, f"SQLITE_{name}") for name in reads}

    def authorize(action, first, second, database, trigger):
        changes_journal = action == sqlite3.SQLITE_PRAGMA and first == "journal_mode" and second
        if action in allowed and not changes_journal or database == "temp":
            return sqlite3.SQLITE_OK
        refuse("write into", path)

    connection.set_authorizer(authorize)


def connect(guard, original, database, *args, **kwargs):
    """sqlite3 opens its files in C."""
    name = os.fsdecode(database).removeprefix("file:").partition("?")[0]
    if name in ("", ":memory:"):
        return original(database, *args, **kwargs)
    path = os.path.realpath(name)
    if not os.path.lexists(path):
        for suffix in "", "-journal", "-wal", "-shm":
            guard.note(path + suffix)
        return original(database, *args, **kwargs)
    connection = original(database, *args, **kwargs)
    if not guard.is_ignored(path) and not guard.made.owns(path, write=True):
        watch_database(connection, path, guard.refuse)
    return connection


def patch(guard):
    for (module, name), what in WRITERS.items():
        if module in sys.modules:
            watch_writer(module, name, what, guard)
    sys.meta_path.insert(0, WhenImported(guard))

    def is_users(file):
        path = None if isinstance(file, int) else os.path.realpath(os.fsdecode(file))
        exists = path and os.path.isfile(path) and not guard.is_ignored(path)
        return path if exists and not guard.made.owns(path, write=True) else None

    def open_in_place(original, file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
        """A file of the user's that is opened r+ may be read."""
        path = is_users(file) if "+" in mode and "r" in mode else None
        if path is None:
            return original(file, mode, buffering, encoding, *args, **kwargs)
        if buffering == 0:
            return refusing(io.FileIO, path, guard.refuse)(path)
        raw = refusing(io.FileIO, path, guard.refuse)(path)
        binary = refusing(io.BufferedRandom, path, guard.refuse)(raw)
        more = dict(zip(("errors", "newline"), args)) | kwargs
        if "b" in mode:
            return binary
        errors, newline = more.get("errors"), more.get("newline")
        return io.TextIOWrapper(binary, encoding, errors, newline, write_through=True)

    for owner in (sqlite3, sqlite3.dbapi2):
        wrap(owner, "connect")(functools.partial(connect, guard))
    for owner in (builtins, io):
        wrap(owner, "open")(open_in_place)

    @wrap(np.memmap, "__new__")
    def memmap(original, cls, filename, dtype=np.uint8, mode="r+", *args, **kwargs):
        is_path = isinstance(filename, (str, os.PathLike))
        if is_path and mode in ("r+", "readwrite") and is_users(filename):
            path = os.path.relpath(filename)
            guard.process.say(f"{path}: numpy.memmap opens it r+; what is written stays in memory")
            mode = "c"
        return original(cls, filename, dtype, mode, *args, **kwargs)

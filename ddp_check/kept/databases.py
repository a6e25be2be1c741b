"""Databases, which are opened to be written in C even where they are only read. One of the user's
is opened to be read: what would change it is refused, or fails."""

import os
import sqlite3
import urllib.parse

from ..imports import when_imported
from ..patches import wrap
from .made import full

# What a statement of SQL would do, by the numbers of SQLite's authorizer
ATTACH, DELETE, INSERT, UPDATE = 24, 9, 18, 23
CHANGES = {DELETE, INSERT, UPDATE, 26, 27, 28, 29, 30}  # ALTER, REINDEX, ANALYZE, virtual tables
CHANGES |= {1, 2, 7, 8, 10, 11, 16, 17}  # CREATE and DROP, of what is not temporary


def sqlite_path(database):
    """The path of SQLite's main file, and its options; None of one in memory."""
    name, _, options = os.fsdecode(database).partition("?")
    if name.startswith("file:"):
        name = urllib.parse.unquote(name.removeprefix("file:").removeprefix("//"))
    if name in ("", ":memory:") or "mode=memory" in options:
        return None, options
    return os.path.realpath(name), options


class Authorizer:
    """SQLite asks it about each statement, before that is run."""

    def __init__(self, guard, path):
        self.guard, self.path = guard, path
        self.attached = None  # a file of the user's, or "?": a parameter, which is not told

    def __call__(self, action, first, second, database, trigger):
        if action == ATTACH:
            self.attach(first)
        if action in CHANGES and database == "main" and self.path is not None:
            self.guard.check("write into", self.path)
        elif action in CHANGES and database not in ("main", "temp") and self.attached == "?":
            self.guard.refuse("write into a database attached by a parameter,", database)
        elif action in CHANGES and database not in ("main", "temp") and self.attached:
            self.guard.check("write into", self.attached)
        return sqlite3.SQLITE_OK

    def attach(self, database):
        path, options = sqlite_path(database or "")
        if database is None or path is not None and self.guard.is_users(path):
            if "mode=ro" not in options:  # it is written to where "main" is read only, too
                self.attached = path or "?"
        elif path is not None:
            note(self.guard, path)


def note(guard, path):
    for suffix in "", "-journal", "-wal", "-shm":
        guard.note(path + suffix)


def watch_sqlite(guard):
    def connect(original, database, *args, **kwargs):
        path, options = sqlite_path(database)
        is_written = path is not None and "mode=ro" not in options
        if is_written and guard.is_users(path):
            database, kwargs["uri"] = f"file:{urllib.parse.quote(path)}?mode=ro", True
        elif is_written:
            note(guard, path)
        connection = original(database, *args, **kwargs)
        connection.set_authorizer(Authorizer(guard, path))
        return connection

    def before_connect(database):
        """By another name than connect."""
        path, options = sqlite_path(database)
        if path is not None and "mode=ro" not in options:
            guard.check("open", path)
            note(guard, path)

    guard.events["sqlite3.connect"] = before_connect
    for owner in sqlite3, sqlite3.dbapi2:
        wrap(owner, "connect")(connect)


def watch_dbm(module, guard, endings):
    """`endings`: of the names of its files."""

    @wrap(module, "open")
    def open_database(original, path, flag="r", *mode):
        files = [os.fsdecode(path) + ending for ending in endings]
        if flag[0] in "cw" and any(guard.is_users(os.path.realpath(file)) for file in files):
            flag = "r" + flag[1:]
        elif flag[0] != "r":
            for file in files:
                guard.hook("open", (file, "w", os.O_WRONLY))
        try:
            return original(path, flag, *mode)
        finally:
            guard.made.settle()


def endings_of(ndbm):
    return [".db"] if "Berkeley" in ndbm.library else [".pag", ".dir"]


def watch_lmdb(module, guard):
    """Of the user's, no lock is taken, which is a file, too."""

    def open_environment(original, path, *args, **kwargs):
        kwargs |= dict(zip(("map_size", "subdir", "readonly"), args))
        files = [path, f"{path}-lock"]
        if kwargs.get("subdir", True):
            guard.note(full(path), "")
            files = [f"{path}/data.mdb", f"{path}/lock.mdb"]
        files = [os.path.realpath(file) for file in files]
        if guard.is_users(files[0]):
            return original(path, **kwargs | {"readonly": True, "lock": False})
        for file in files:
            guard.note(file)
        try:
            return original(path, **kwargs)
        finally:
            guard.made.settle()

    for name in "open", "Environment":
        if hasattr(module, name):  # not a module of the script's own of this name
            wrap(module, name)(open_environment)


def patch(guard):
    watch_sqlite(guard)
    when_imported("_gdbm", lambda module: watch_dbm(module, guard, [""]))
    when_imported("dbm.ndbm", lambda module: watch_dbm(module, guard, endings_of(module)))
    when_imported("lmdb", lambda module: watch_lmdb(module, guard))

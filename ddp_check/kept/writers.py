"""Files that are changed without a word to Python's audit hook: in place, in memory, and in C++."""

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import sys

import numpy as np

from ..process import wrap
from .made import full

NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
TEXT_OPTIONS = "encoding", "errors", "newline"  # of open, after its buffering

# Functions that write a file in C++: (module, name): position and name of the argument with its
# path, and of one with the mode, if there is one.
WRITERS = {
    ("torch", "save"): (1, "f"),
    ("torch.serialization", "save"): (1, "f"),
    ("torch.jit", "save"): (1, "f"),
    ("torch.jit", "RecursiveScriptModule.save"): (1, "f"),
    ("torch.profiler", "profile.export_chrome_trace"): (1, "path"),
    ("torch", "from_file"): (0, "filename", 1, "shared"),
    ("torch", "UntypedStorage.from_file"): (0, "filename", 1, "shared"),
    ("torchvision.io.image", "write_png"): (1, "filename"),
    ("torchvision.io.image", "write_jpeg"): (1, "filename"),
    ("torchvision.io.image", "write_file"): (0, "filename"),
    ("safetensors.torch", "serialize_file"): (1, "filename"),
    ("safetensors.numpy", "serialize_file"): (1, "filename"),
    ("h5py", "File.__init__"): (1, "name", 2, "mode"),
    ("cv2", "imwrite"): (0, "filename"),
}


def watch_writer(module, function, guard):
    position, name, *mode = WRITERS[module, function]
    owner = sys.modules[module]
    *classes, function = function.split(".")
    for part in classes:
        owner = getattr(owner, part)

    def argument(args, kwargs, position, name):
        return args[position] if len(args) > position else kwargs.get(name)

    @wrap(owner, function)
    def write(original, *args, **kwargs):
        path = argument(args, kwargs, position, name)
        reads = bool(mode) and argument(args, kwargs, *mode) in (None, False, "r")
        if isinstance(path, (str, bytes, os.PathLike)) and not reads:
            guard.hook("open", (path, "w", NEW))
            if function == "save":  # so that it is known as ours while it is being written
                with contextlib.suppress(OSError):
                    open(path, "ab").close()
        try:
            return original(*args, **kwargs)
        finally:
            guard.made.settle()


class WhenImported(importlib.abc.MetaPathFinder):
    """Watches the functions of WRITERS as soon as their module is imported."""

    def __init__(self, guard):
        self.guard = guard

    def find_spec(self, name, path, target=None):
        functions = [function for module, function in WRITERS if module == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path) if functions else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for function in functions:
                watch_writer(name, function, self.guard)

        spec.loader.exec_module = exec_module
        return spec


class UsersFile(io.BufferedReader):
    """A file of the user's that is opened r+: it can be read; before it is changed, refuse is
    called."""

    def __init__(self, path, refuse):
        super().__init__(io.FileIO(path))
        self.path, self.refuse = path, refuse

    def writable(self):
        return True

    def write(self, data):
        self.refuse("write into", self.path)

    def truncate(self, size=None):
        self.refuse("truncate", self.path)


def patch(guard):
    for module, function in WRITERS:
        if module in sys.modules:
            watch_writer(module, function, guard)
    sys.meta_path.insert(0, WhenImported(guard))

    def is_users(path):
        return os.path.isfile(path) and guard.is_users(os.path.realpath(path))

    def open_and_settle(original, file, mode="r", buffering=-1, *args, **kwargs):
        if isinstance(file, int) or "r" in mode and "+" not in mode:
            return original(file, mode, buffering, *args, **kwargs)
        if "r" in mode and is_users(file):
            binary = UsersFile(os.path.realpath(os.fsdecode(file)), guard.refuse)
            if "b" in mode:
                return binary
            more = dict(zip(TEXT_OPTIONS, args)) | kwargs
            options = {name: more.get(name) for name in TEXT_OPTIONS}
            return io.TextIOWrapper(binary, **options, write_through=True)
        try:
            return original(file, mode, buffering, *args, **kwargs)
        except OSError:
            guard.made.failed(os.path.realpath(os.fsdecode(file)))
            raise
        finally:
            guard.made.settle()

    for owner in (builtins, io):
        wrap(owner, "open")(open_and_settle)

    @wrap(os, "open")
    def open_in_folder(original, path, flags, mode=0o777, *, dir_fd=None):
        """Of an open folder, the hook is not told."""
        if dir_fd is None:
            return original(path, flags, mode)
        guard.hook("open", (full(path, dir_fd), None, flags))
        with guard.unheard():
            return original(path, flags, mode, dir_fd=dir_fd)

    @wrap(np.memmap, "__new__")
    def memmap(original, cls, filename, dtype=np.uint8, mode="r+", *args, **kwargs):
        is_path = isinstance(filename, (str, os.PathLike))
        if is_path and mode in ("r+", "readwrite") and is_users(filename):
            path = os.path.relpath(filename)
            guard.process.say(f"{path}: numpy.memmap opens it r+; what is written stays in memory")
            mode = "c"
        return original(cls, filename, dtype, mode, *args, **kwargs)

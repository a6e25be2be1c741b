"""Files: nothing of the user's is changed, and of what the script creates nothing is left.

Before the script overwrites, appends to, renames or removes a file that was there before, it is
stopped: see refuse. What it creates is noted, with its inode, in FOLDER/made, for all processes of
both runs; after a run that is removed, one by one, if the inode is still that, and a folder only if
it is empty then. So what another program has put there stays. Downloads stay, too.

An audit hook is told of what Python opens, renames and removes, but of no write: a file that is
opened to be changed in place (r+) is stopped at its first write, and numpy.memmap's r+ gets a copy
in memory. It is not told what C and C++ write (h5py, cv2, sqlite3, mmap), but for torch.save and
the like; nor what programs do that the script starts."""

import builtins
import contextlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch

from ..notes import File
from ..process import LEAVE, wrap
from ..script import place, source
from .made import Made

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tmp", ".safetensors")
CACHES = "torchinductor", "torch_extensions", "triton", "matplotlib", "huggingface", ".lock"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = 76  # exit status


def full(path, folder=-1):
    """Of a name in a folder that is open, or relative to the current one."""
    start = os.getcwd()
    if isinstance(folder, int) and folder >= 0:
        with contextlib.suppress(OSError):
            start = os.readlink(f"/proc/self/fd/{folder}")
    path = os.path.join(start, os.fsdecode(path))
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


class Guard(threading.local):
    busy = False  # inside of the hook, which opens files itself
    in_place = False  # opened by us, and watched


class Watched(io.FileIO):
    """A file of the user's, opened r+: it may be read."""

    def write(self, data):
        self.refuse("write into", os.path.abspath(self.name))

    def truncate(self, size=None):
        self.refuse("truncate", os.path.abspath(self.name))


def patch(run):
    made, guard, seen = Made(run.folder), Guard(), {}
    caches = [os.path.expanduser(f"~/.{name}") for name in ("cache", "config", "triton")]
    folders = "/dev", "/proc", "/sys", *caches, run.folder
    ignored = tuple(os.path.join(os.path.realpath(path), "") for path in folders)
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")

    def is_ignored(path):
        if path.startswith(ignored) or "__pycache__" in path:
            return True
        first = path.removeprefix(temporary).split(os.sep)[0]
        return path.startswith(temporary) and any(name in first for name in CACHES)

    def refuse(what, path):
        """End both runs, before anything is done to the file."""
        text = f"{source(place()[0])}: would {what} {path}, which was there before. Nothing was "
        with open(f"{run.folder}/refused", "a") as file:
            file.write(f"{text}changed\n{path}\n")
        LEAVE(REFUSED)

    Watched.refuse = staticmethod(refuse)

    def check(what, path):
        """Before a file or folder is changed or removed."""
        if not is_ignored(path) and os.path.lexists(path) and path not in made:
            if not (path.endswith(".lock") and os.path.isfile(path) and not os.path.getsize(path)):
                refuse(what, path)

    def note(path, mode="w"):
        """Before a file is created or written."""
        if is_ignored(path):
            return
        if not os.path.lexists(path):
            made.add(path)
        lines, line = seen.setdefault(path, set()), place()[0]
        if mode and line not in lines:
            run.note(File("again" if lines else "created", path, line, mode))
            lines.add(line)

    def before_open(path, mode, flags):
        real = os.path.realpath(path)
        if os.path.isdir(real):  # or a file without a name
            return
        if not flags & WRITES:
            return before_reading(real)
        if not guard.in_place:
            check("append to" if flags & os.O_APPEND else "overwrite", real)
            note(real, mode or "w")

    def before_reading(path):
        """What is large and read again before the first step is a download, not an output, with all
        that came before that step into the outermost folder that is new."""
        if not run.steps and not path.endswith(CHECKPOINTS) and path in made.paths:
            if os.path.exists(path) and os.path.getsize(path) > 50_000:
                around = [path, *map(str, Path(path).parents)]
                run.note(File("downloaded", [each for each in around if each in made.paths][-1]))

    def before_rename(old, new, old_folder=-1, new_folder=-1):
        old, new = full(old, old_folder), full(new, new_folder)
        check("rename", old)
        check("overwrite", new)
        made.update()
        note(new)
        for path, number in list(made.paths.items()):
            if path == old or path.startswith(old + os.sep):
                made.add(new + path.removeprefix(old), number)

    def before_tree(path, *_):
        path = full(path)
        for folder, _, files in os.walk(path):
            for name in files or [""]:
                check("remove", os.path.join(folder, name).rstrip(os.sep))

    events = {
        "open": before_open,
        "os.rename": before_rename,
        "os.remove": lambda path, folder: check("remove", full(path, folder)),
        "os.rmdir": lambda path, folder: check("remove", full(path, folder)),
        "os.truncate": lambda path, size: check("truncate", full(path)),
        "os.mkdir": lambda path, mode, folder: note(full(path, folder), ""),
        "os.symlink": lambda old, path, folder: note(full(path, folder)),
        "os.link": lambda old, path, _, folder: note(full(path, folder)),
        "shutil.rmtree": before_tree,
    }

    def hook(event, args):
        if event not in events or guard.busy or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        guard.busy = True
        try:
            made.settle()
            events[event](*args)
        except OSError:  # as the script will find itself
            pass
        finally:
            guard.busy = False

    run.settle = made.settle
    sys.addaudithook(hook)

    def open_in_place(original, file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
        """A file of the user's that is opened r+ may be read."""
        path = None if isinstance(file, int) else os.path.realpath(file)
        if "+" not in mode or "r" not in mode or path is None or is_ignored(path) or path in made:
            return original(file, mode, buffering, encoding, *args, **kwargs)
        guard.in_place = True
        try:
            raw = Watched(path, "r+")
        finally:
            guard.in_place = False
        if buffering == 0:
            return raw
        file = io.BufferedRandom(raw)
        more = dict(zip(("errors", "newline"), args)) | kwargs
        return (
            file
            if "b" in mode
            else io.TextIOWrapper(file, encoding, more.get("errors"), more.get("newline"))
        )

    for owner in (builtins, io):
        wrap(owner, "open")(open_in_place)

    @wrap(np.memmap, "__new__")
    def memmap(original, cls, filename, dtype=np.uint8, mode="r+", *args, **kwargs):
        path = isinstance(filename, (str, os.PathLike)) and os.path.realpath(filename)
        if path and mode in ("r+", "readwrite", "write") and path not in made:
            run.say(f"{path}: opened r+ by numpy.memmap; what is written to it stays in memory")
            mode = "c"
        return original(cls, filename, dtype, mode, *args, **kwargs)

    def watch_writer(owner, name, at):
        """A function that writes a file in C++, whose name is its argument number `at`."""

        @wrap(owner, name)
        def save(original, *args, **kwargs):
            path = args[at] if len(args) > at else kwargs.get("f", kwargs.get("filename"))
            if isinstance(path, (str, os.PathLike)):
                hook("open", (path, "w", os.O_WRONLY))
            return original(*args, **kwargs)

    watch_writer(torch, "save", 1)
    watch_writer(torch.jit, "save", 1)
    with contextlib.suppress(ImportError):
        import safetensors.torch

        watch_writer(safetensors.torch, "serialize_file", 1)

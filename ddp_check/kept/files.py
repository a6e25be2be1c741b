"""Files: nothing of the user's is changed, and of what the script creates nothing is left.

Before the script overwrites, appends to, renames or removes a file that was there before, it is
stopped: see refuse. What it creates is noted (see made), and removed after each run; downloads
stay.

Python tells an audit hook what it opens, renames and removes, in every thread and in processes that
are forked; writers.py and databases.py have what it does not tell. Not seen are files that programs
write which the script starts, and those that C++ writes, but for the libraries in these two."""

import contextlib
import gc
import os
import re
import stat
import sys
import tempfile
import threading

from ..notes import PROGRAM, File
from ..patches import stop_both_runs
from ..script import UNKNOWN, place, source
from .made import Made, full, identity

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tmp", ".safetensors")  # they are no downloads
DOWNLOAD = 50_000  # bytes: a smaller file is not worth to be kept
CACHES = "~/.cache", "~/.config", "~/.triton", "~/.nv"
CACHE_VARIABLES = "TORCH_HOME", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"
PROGRAMS = "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "pty.spawn"
OF_MPI = "PMI_", "PMIX_", "OMPI_", "MPI_", "MV2_"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class PerThread(threading.local):
    busy = False  # inside of the hook, which opens files itself


class Guard:
    """Asked before the script opens, renames or removes something."""

    def __init__(self, process):
        self.process, self.made = process, Made(process.folder)
        self.thread = PerThread()
        caches = [os.path.expanduser(path) for path in CACHES]
        caches += [os.environ[name] for name in CACHE_VARIABLES if os.environ.get(name)]
        folders = [*caches, "/dev", "/proc", "/sys", process.folder]
        folders = [os.path.join(os.path.realpath(path), "") for path in folders]
        self.ignored = tuple(
            path for path in folders if not f"{os.getcwd()}{os.sep}".startswith(path)
        )
        self.events = {
            "open": self.before_open,
            "os.rename": self.before_rename,
            "os.remove": lambda path, folder: self.check("remove", full(path, folder)),
            "os.rmdir": self.before_rmdir,
            "os.truncate": lambda path, size: self.check("truncate", os.path.realpath(full(path))),
            "os.chmod": self.before_chmod,
            "os.chown": lambda path, user, group, folder: self.before_attributes(path, folder),
            "os.utime": lambda path, times, ns, folder: self.before_attributes(path, folder),
            "os.chflags": lambda path, flags: self.before_attributes(path),
            "os.setxattr": lambda path, *attribute: self.before_attributes(path),
            "os.removexattr": lambda path, *attribute: self.before_attributes(path),
            "os.mkdir": lambda path, mode, folder: self.note(full(path, folder), ""),
            "os.symlink": lambda old, path, folder: self.note(full(path, folder)),
            "os.link": self.before_link,
            "socket.bind": self.before_bind,
        }
        self.events |= dict.fromkeys(PROGRAMS, self.say_program)
        self.events["import"] = self.before_import
        # What imports have made before, in a process that the script starts.
        for thing in gc.get_objects():
            if type(thing) is tempfile.TemporaryDirectory:
                path = os.path.realpath(thing.name)
                self.made.add(path, "early", identity(path))

    def hook(self, event, args):
        if event in self.events and not self.thread.busy:
            with self.unheard():
                self.made.settle()
                self.events[event](*args)

    @contextlib.contextmanager
    def unheard(self):
        self.thread.busy = True
        try:
            yield
        finally:
            self.thread.busy = False

    def is_ignored(self, path):
        is_lock = path.endswith(".lock") and os.path.isfile(path) and not os.path.getsize(path)
        return path.startswith(self.ignored) or "__pycache__" in path or is_lock

    def is_users(self, path):
        """Whether there is such a file or folder, which the script has not created."""
        return os.path.lexists(path) and not self.is_ignored(path) and not self.made.owns(path)

    def check(self, what, path):
        """Before a file or folder is changed or removed."""
        if self.is_users(path):
            self.refuse(what, path)

    def refuse(self, what, path):
        """End both runs, before anything is done to the file."""
        shown = min(path, os.path.relpath(path), key=len)
        text = f"would {what} {shown}, which was there before; nothing was changed"
        steps = self.process.steps
        facts = {"line": source(place()[0]), "text": text, "path": path, "steps": steps}
        stop_both_runs(self.process.folder, "refused", facts)

    def note(self, path, mode="w"):
        """What is written; and is created in a moment, if it is not there yet."""
        if self.is_ignored(path):
            return
        kind = "output" if self.process.steps else "early"
        known = self.made.paths.get(path, [None, ""])[1]
        if not os.path.lexists(path) or kind == "output" and known in ("early", "download"):
            self.made.add(path, kind, identity(path))
        self.note_line(path, mode)

    def note_line(self, path, mode):
        line, *callers = place()
        if mode:
            self.process.note_once(File(path, line, mode, callers))

    def before_open(self, path, mode, flags):
        if isinstance(path, int) or not flags & WRITES and not self.made.paths:
            return
        path = os.path.realpath(os.fsdecode(path))
        if not flags & WRITES:
            self.before_reading(path)
        elif not os.path.lexists(path):
            self.note(path, "w" if mode is None else mode)
        elif stat.S_ISREG(os.stat(path).st_mode) and not flags & os.O_EXCL:
            self.check("append to" if flags & os.O_APPEND else "overwrite", path)
            self.note(path, "w" if mode is None else mode)

    def before_reading(self, path):
        """What is large and read again before the first step is a download, not an output, with all
        that came before that step into the outermost folder that is new."""
        is_output = self.process.steps or path.endswith(CHECKPOINTS) or path not in self.made.paths
        if not is_output and os.path.getsize(path) > DOWNLOAD:
            while os.path.dirname(path) in self.made.paths:
                path = os.path.dirname(path)
            if self.made.paths[path][1] != "download":
                self.made.add(path, "download", identity(path))
                self.process.say(
                    f"{os.path.relpath(path)} is downloaded or prepared data: it stays"
                )

    def before_rename(self, old, new, old_folder, new_folder):
        old, new = full(old, old_folder), full(new, new_folder)
        self.check("rename", old)
        self.check("overwrite", new)
        if os.path.lexists(old) and not self.is_ignored(new):  # or it fails
            self.made.moved(old, new)
            self.note_line(new, "w")

    def before_rmdir(self, path, folder):
        path = full(path, folder)
        if not os.listdir(path):  # or it fails
            self.check("remove", path)

    def before_chmod(self, path, mode, folder):
        path = os.path.realpath(full(path, folder))
        if stat.S_IMODE(os.stat(path).st_mode) != mode:
            self.check("change the mode of", path)

    def before_attributes(self, path, folder=-1):
        """Owner, times and the like; a folder's times change by each file in it."""
        path = os.path.realpath(full(path, folder))
        if os.path.isfile(path):
            self.check("change the attributes of", path)

    def before_link(self, old, new, old_folder, new_folder):
        """What is written to the new name changes the old file."""
        self.check("link", full(old, old_folder))
        self.note(full(new, new_folder))

    def before_bind(self, socket, address):
        if isinstance(address, (str, bytes)) and os.fsdecode(address)[:1] != "\0":
            self.note(full(address))  # of AF_UNIX: the system makes a file

    def before_import(self, name, library, *_):
        """MPI's own library would end a process that has such variables, but not from mpiexec."""
        if name == "mpi4py.MPI" and library:
            for variable in [each for each in os.environ if each.startswith(OF_MPI)]:
                del os.environ[variable]

    def say_program(self, *_):
        line = place()[0]
        if line != UNKNOWN and not re.match(r"\S+: (import|from) ", source(line)):
            self.process.say(PROGRAM + source(line))


GUARD = None


def patch(process):
    """Once in a process, and in those that are forked from it."""
    global GUARD
    if GUARD is None:
        GUARD = Guard(process)
        sys.addaudithook(GUARD.hook)
        from . import databases, writers

        writers.patch(GUARD)
        databases.patch(GUARD)
    GUARD.process, process.settle = process, GUARD.made.settle

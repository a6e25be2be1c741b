"""What the script has created, in FOLDER/made, for all processes of both runs; who removes it."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def open_path(number):
    """The path of a file or folder that is open."""
    if sys.platform == "darwin":
        import fcntl

        return os.fsdecode(fcntl.fcntl(number, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{number}")


def full(path, folder=-1):
    """Of a name in an open folder, or relative to the current one; a link is not followed. Of an
    open file, its path."""
    if isinstance(path, int):
        return open_path(path)
    start = open_path(folder) if folder >= 0 else os.getcwd()
    path = os.path.join(start, os.fsdecode(path))
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def identity(path):
    """By this a file is known, whatever another program has put in its place; None: no file."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return [status.st_dev, status.st_ino]
    return None


def as_line(path, number, kind):
    return json.dumps([path, number, kind]) + "\n"


class Made:
    """{path: [identity, kind]}. Kinds: "early", before the first step; "output"; "download", which
    stays, with all early ones in it."""

    def __init__(self, folder):
        self.file, self.read, self.paths, self.pending = f"{folder}/made", 0, {}, {}

    def update(self):
        """Also what other processes have created."""
        with contextlib.suppress(FileNotFoundError), open(self.file, "rb") as file:
            file.seek(self.read)
            lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):  # whole
                    path, *entry = json.loads(line)
                    self.paths[path] = entry
                    self.read += len(line)
        return self.paths

    def add(self, path, kind, number=None):
        """Without a number, it exists in a moment; see settle."""
        self.paths[path] = [number, kind]
        if number is None:
            self.pending[path] = kind
        with open(self.file, "a") as file:
            file.write(as_line(path, number, kind))

    def settle(self):
        """Note the identity of what has been created since."""
        for path, kind in list(self.pending.items()):
            if number := identity(path):
                self.pending.pop(path, None)  # also another thread settles
                self.add(path, kind, number)

    def failed(self, path):
        """It could not be created: if it is there later, it is another program's."""
        if self.pending.pop(path, None):
            self.add(path, "output", "failed")

    def moved(self, old, new):
        """What was at `old`, and all in it, is in a moment at `new`."""
        paths = self.update()
        inside = []
        if os.path.isdir(old):
            inside = [path for path in paths if path.startswith(old + os.sep)]
        for path in [old] * (old in paths) + inside:
            number, kind = paths[path]
            self.add(new + path.removeprefix(old), kind, number)

    def owns(self, path):
        """Whether the script has created what is there now."""
        for paths in (lambda: self.paths, self.update):
            number, _ = paths().get(path, [0, ""])
            if number is None or number == identity(path):
                return True
        return False


def is_in(path, folders):
    return not folders.isdisjoint([path, *map(str, Path(path).parents)])


def remove_made(folder):
    """What a run has created goes, or the next one would meet it: each file whose identity is
    still that, and folders that are empty then. Returns what is left, in words."""
    made, stay, left = Made(folder), {}, []
    paths = made.update()
    downloads = {path for path, (_, kind) in paths.items() if kind == "download"}
    for path in sorted(paths, key=len, reverse=True):  # what is in a folder goes before it
        (number, kind), now = paths[path], identity(path)
        if kind != "output" and is_in(path, downloads):
            stay[path] = now, kind
        elif now is not None and os.path.isdir(path) and not os.path.islink(path):
            with contextlib.suppress(OSError):  # something of another program's is in it
                os.rmdir(path)
        elif now is not None and now == number:
            try:
                os.remove(path)
            except OSError as error:  # the others go nevertheless
                left.append(f"{path} is left: {error.strerror}")
        elif now is not None:
            left.append(f"{path} is left: it may be another program's")
    with open(made.file, "w") as file:
        file.writelines(as_line(path, *entry) for path, entry in stay.items())
    return left


def stop_groups(groups):
    """End processes, and what they have started, which is in the same group."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def wait_for_end(groups):
    """Until they write no more; those that nobody waits for stay as numbers only."""
    for _ in range(60):
        for group in list(groups):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                groups.remove(group)
        if not groups:
            return
        time.sleep(0.05)


class Janitor:
    """A process that outlives ddp_check, however that ends: by its end, Ctrl-C, or kill -9. It ends
    what still runs, which has a file NAME.pid in the folder of notes, and removes what the script
    has created, and that folder."""

    def __init__(self, folder):
        read, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # Ctrl-C in the terminal is not for it
                os.close(self.pipe)
                self.clean_up(folder, read)
            finally:
                os._exit(0)

    def finish(self):
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    @staticmethod
    def clean_up(folder, pipe):
        os.read(pipe, 1)  # until ddp_check has ended, and the system closes its end
        texts = [file.read_text() for file in Path(folder).glob("*.pid")]
        groups = [int(text) for text in texts if text]
        stop_groups(groups)
        wait_for_end(groups)
        for text in remove_made(folder):
            print(f"ddp_check: {text}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)

"""What the script has created: {path: identity}, in FOLDER/made, for all processes of both runs."""

import contextlib
import json
import os
from pathlib import Path


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

    def moved(self, old, new):
        """What was at `old`, and all in it, is in a moment at `new`."""
        for path, (number, kind) in list(self.update().items()):
            if path == old or path.startswith(old + os.sep):
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

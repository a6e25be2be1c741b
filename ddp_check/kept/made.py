"""What the script has created: {path: inode} in FOLDER/made, for all processes of both runs."""

import contextlib
import json
import os
from pathlib import Path

from ..notes import File


def inode(path):
    with contextlib.suppress(OSError):
        return os.lstat(path).st_ino


class Made:
    """{path: inode} of what the script has created; also by other ranks, by FOLDER/made."""

    def __init__(self, folder):
        self.file, self.read, self.paths, self.pending = f"{folder}/made", 0, {}, []

    def update(self):
        with contextlib.suppress(FileNotFoundError), open(self.file) as file:
            file.seek(self.read)
            text = file.read()
            lines = text[: text.rfind("\n") + 1]
            self.read += len(lines.encode())
            self.paths.update(map(json.loads, lines.splitlines()))
        return self.paths

    def add(self, path, number=None):
        """It exists in a moment, so its inode is not known yet; see settle."""
        self.paths[path] = number
        if number is None:
            self.pending.append(path)
        with open(self.file, "a") as file:
            file.write(json.dumps([path, number]) + "\n")

    def settle(self):
        pending, self.pending = self.pending, []
        for path in pending:
            if number := inode(path):
                self.add(path, number)
            else:
                self.pending.append(path)

    def __contains__(self, path):
        return path in self.paths or path in self.update()


def refused(folder, flags):
    """In words: what the script would have changed; None if nothing."""
    with contextlib.suppress(FileNotFoundError), open(f"{folder}/refused") as file:
        text, path = file.read().splitlines()[:2]
        for flag in flags:
            name, _, value = flag.rpartition("=")
            if value and (path + os.sep).startswith(os.path.realpath(value) + os.sep):
                new = f"{name}={value}-{{run}}" if name else f"{value}-{{run}}"
                return f"{text}. Give it a new output: {new} for {flag}"
        return f"{text}. Give it a new output, or another folder to start in"


def remove_made(folder, notes):
    """What a run has created goes, or the next one would meet it; but not downloads, nor what is
    not the same file any more. What is in a folder goes before it."""
    made, stay = Made(folder), []
    downloads = {f.path for of_rank in notes for _, f in of_rank[File] if f.kind == "downloaded"}
    late = {f.path for of_rank in notes for step, f in of_rank[File] if step}  # not downloads
    for path, number in sorted(made.update().items(), key=lambda each: -len(each[0])):
        now = inode(path)
        if path not in late and downloads & {path, *map(str, Path(path).parents)}:
            stay.append((path, now))
            continue
        if now is None:
            continue
        with contextlib.suppress(OSError):
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            elif now == number:
                os.remove(path)
            else:
                print(f"ddp_check: {path} is left: it is not the file that the script has made")
    with open(made.file, "w") as file:
        file.writelines(json.dumps(each) + "\n" for each in stay)

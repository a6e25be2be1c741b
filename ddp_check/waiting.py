"""Waits for the processes of a run: until their ends, a failure, or a hang."""

import contextlib
import os
import re
import signal
import sys
import time

from .notes import Notes
from .script import FOLDER

SILENT = 5  # seconds without a sign of life from a process, which has one each second: it is busy
LONGEST = 10  # times --wait
LINES = 40  # of what a process has printed


class Waiting:
    def __init__(self, args, path, nproc, side):
        self.args, self.path, self.side = args, path, side
        self.folder, self.name = os.path.split(path)
        self.ranks = range(nproc)
        self.began = self.noted = self.moved = time.monotonic()
        self.sizes = self.frames = None
        self.shown = 0

    def wait(self, processes):
        """Until all have ended, or one has failed and the others wait for it, or all hang. Returns
        {rank: exit status} of those that have failed."""
        ends = [f"{self.folder}/refused", f"{self.folder}/spawns"]
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            self.look()
            now = time.monotonic()
            if any(map(os.path.exists, ends)) or self.are_done():
                return {}
            if now - self.noted > 3 and any(process.poll() for process in processes):
                break
            if now - self.moved > self.args.wait or now - self.noted > LONGEST * self.args.wait:
                text = f"nothing new for {self.args.wait:.0f} s; if it is only slow, "
                print(
                    f"ddp_check: {self.side}: {text}--wait {5 * self.args.wait:.0f}",
                    file=sys.stderr,
                )
                return {}
        statuses = {rank: process.poll() for rank, process in enumerate(processes)}
        return {rank: status for rank, status in statuses.items() if status}

    def are_done(self):
        """All have made --steps."""
        return all(os.path.exists(f"{self.path}.{rank}.done") for rank in self.ranks)

    def look(self):
        """Have they noted something, or moved to another line, or are they busy in C, which keeps
        Python from saying where they are?"""
        now, wheres = time.monotonic(), [f"{self.path}.{rank}.where" for rank in self.ranks]
        found = [each for each in map(text_and_age, wheres) if each]
        notes = [f"{self.path}.{rank}.notes" for rank in self.ranks]
        sizes = [os.path.getsize(file) for file in notes if os.path.exists(file)]
        if sizes != self.sizes:
            self.sizes, self.noted = sizes, now
        texts = [text for text, _ in found]
        is_busy = any(age > SILENT for _, age in found)
        if texts != self.frames or is_busy or self.noted == now:
            self.frames, self.moved = texts, now
        seconds = int(now - self.began)
        if texts and seconds >= self.shown + 10:
            self.shown = seconds
            first, *lines = texts[0].split(" < ")
            text = f"step {first.split()[0]} of {self.args.steps}, at {lines[0]}"
            print(f"ddp_check: {self.side}: {seconds} s: {text}", file=sys.stderr, flush=True)


def text_and_age(path):
    """Of a file, and its seconds; None if it is gone, as the process has just ended."""
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read(), time.time() - os.fstat(file.fileno()).st_mtime


def show_failure(side, folder, name, failed):
    """The end of what the first rank that failed has printed: one that lost no connection to
    another."""
    ends = {rank: Notes(folder, name, rank).end() for rank in failed}
    rank = ([rank for rank in failed if "Connection" not in ends[rank]] or list(failed))[0]
    text, _ = text_and_age(f"{folder}/{name}.{rank}.log")
    status = failed[rank]
    text = re.sub(rf'  File "{re.escape(FOLDER)}.*\n(    .*\n)*', "", text)  # our own frames
    lines = [line.rpartition("\r")[2] for line in text.splitlines()][-LINES:]
    how = f"exit status {status}"
    if status < 0:
        how = f"killed by {signal.Signals(-status).name}"
        how += ": is there too little memory?" * (status == -signal.SIGKILL)
    print(f"ddp_check: {side}: rank {rank} failed ({how}); it printed:", file=sys.stderr)
    print("\n".join(lines), file=sys.stderr, flush=True)

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
    def __init__(self, args, folder, name, nproc):
        self.args, self.folder, self.name, self.ranks = args, folder, name, range(nproc)
        self.side = "on one process" if nproc == 1 else f"on {nproc} processes"
        self.side += " again" * (name == "again")
        self.began = self.noted = self.moved = time.monotonic()
        self.sizes = self.frames = None
        self.shown = 0

    def say(self, text):
        print(f"ddp_check: {self.side}: {text}", file=sys.stderr, flush=True)

    def files(self, suffix):
        return [f"{self.folder}/{self.name}.{rank}.{suffix}" for rank in self.ranks]

    def wait(self, processes):
        """Until all have ended, or one has failed and the others wait for it, or all hang. Returns
        {rank: exit status} of those that have failed."""
        ends = [f"{self.folder}/refused", f"{self.folder}/spawns"]
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            self.look()
            now, wait = time.monotonic(), self.args.wait
            are_done = all(map(os.path.exists, self.files("done")))  # they have made --steps
            if any(map(os.path.exists, ends)) or are_done:
                return {}
            if now - self.noted > 3 and any(process.poll() for process in processes):
                break
            if now - self.moved > wait or now - self.noted > LONGEST * wait:
                self.say(f"nothing new for {wait:.0f} s; if it is only slow, --wait {5 * wait:.0f}")
                return {}
        statuses = {rank: process.poll() for rank, process in enumerate(processes)}
        return {rank: status for rank, status in statuses.items() if status}

    def look(self):
        """Have they noted something, or moved to another line, or are they busy in C, which keeps
        Python from saying where they are?"""
        now = time.monotonic()
        found = [each for each in map(text_and_age, self.files("where")) if each]
        sizes = [os.path.getsize(file) for file in self.files("notes") if os.path.exists(file)]
        if sizes != self.sizes:
            self.sizes, self.noted = sizes, now
        texts = [text for text, _ in found]
        is_busy = any(age > SILENT for _, age in found)
        if texts != self.frames or is_busy or self.noted == now:
            self.frames, self.moved = texts, now
        seconds = int(now - self.began)
        if texts and seconds >= self.shown + 10:
            self.shown = seconds
            first, line, *_ = texts[0].split(" < ")
            self.say(f"{seconds} s: step {first.split()[0]} of {self.args.steps}, at {line}")

    def show_failure(self, failed):
        """The end of what the first rank that failed has printed: one that lost no connection to
        another."""
        ends = {rank: Notes(self.folder, self.name, rank).end() for rank in failed}
        rank = ([rank for rank in failed if "Connection" not in ends[rank]] or list(failed))[0]
        text, _ = text_and_age(f"{self.folder}/{self.name}.{rank}.log")
        text = re.sub(rf'  File "{re.escape(FOLDER)}.*\n(    .*\n)*', "", text)  # our own frames
        lines = [line.rpartition("\r")[2] for line in text.splitlines()][-LINES:]
        how = f"exit status {failed[rank]}"
        if failed[rank] < 0:
            how = f"killed by {signal.Signals(-failed[rank]).name}"
            how += ": is there too little memory?" * (failed[rank] == -signal.SIGKILL)
        self.say("\n".join([f"rank {rank} failed ({how}); it printed:", *lines]))


def text_and_age(path):
    """Of a file, and its seconds; None if it is gone, as the process has just ended."""
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read(), time.time() - os.fstat(file.fileno()).st_mtime

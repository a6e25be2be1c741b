"""What is said of a run while it lasts, and why it has ended."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

from .script import FOLDER

SILENT = 5  # seconds without a sign of life from a process, which has one each second: it is busy
LONGEST = 10  # times --wait
LINES = 40  # of what a process has printed


def text_and_age(path):
    """Of a file, and its seconds; None if it is gone, as the process has just ended."""
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace", newline="") as file:
        return file.read(), time.time() - os.fstat(file.fileno()).st_mtime


class Progress:
    """How far the processes of a run are, and whether they still advance."""

    def __init__(self, run, count):
        self.run, self.count = run, count
        self.began = self.noted = self.moved = time.monotonic()
        self.sizes = self.places = None
        self.shown, self.first = 0, None  # first: when a step was seen first, and which
        self.stopped = "", ""  # if they hang: for how long, and the flag

    def seconds(self):
        return time.monotonic() - self.began

    def steps(self):
        """That all have made."""
        found = [text.split(" ")[0] for text in self.places or []]
        return min(map(int, found)) if len(found) == self.run.nproc else 0

    def look(self):
        """Have they noted something, or moved to another line, or are they busy in C, which keeps
        Python from saying where they are?"""
        now = time.monotonic()
        found = [each for each in map(text_and_age, self.run.files("where")) if each]
        files = self.run.files("notes")
        sizes = [os.path.getsize(file) for file in files if os.path.exists(file)]
        if sizes != self.sizes:
            self.sizes, self.noted = sizes, now
        places = [text for text, _ in found]
        is_busy = any(age > SILENT for _, age in found)
        if places != self.places or is_busy or self.noted == now:
            self.places, self.moved = places, now
        if self.first is None and self.steps():
            self.first = now, self.steps()
        if places and self.seconds() >= self.shown + 10:
            self.shown = int(self.seconds())
            self.run.say(f"{self.count}: {self.where()}")

    def where(self):
        """The step, how long so far, about how long still, and the line."""
        made, wanted = self.steps(), self.run.options.steps
        text = f"step {made} of {wanted}, {self.shown} s"
        if self.first and made > self.first[1]:
            each = (time.monotonic() - self.first[0]) / (made - self.first[1])
            text += f", {each * (wanted - made):.0f} s to go at most"
        return f"{text}, at {self.places[0].split(' < ')[1]}"

    def is_silent(self):
        return time.monotonic() - self.noted > 3

    def hangs(self):
        """Whether nothing has advanced for --wait; or for ten times as long, only its line."""
        now, wait = time.monotonic(), self.run.args.wait
        seconds = wait if now - self.moved > wait else int(now - self.noted)
        if now - self.moved <= wait and seconds <= LONGEST * wait:
            return False
        self.stopped = f"nothing new for {seconds:.0f} s", f"--wait {5 * wait:.0f}"
        self.run.say("; if it is only slow, ".join(self.stopped))
        return True


def why_it_failed(run, failed, notes):
    """The end of what the first rank that failed has printed, once: one that lost no connection to
    another. `failed`: {rank: exit status}."""
    ends = [of_rank.end() for of_rank in notes]
    rank = ([rank for rank in failed if "Connection" not in ends[rank]] or list(failed))[0]
    text, _ = text_and_age(run.files("log")[rank])
    by = r"(?:\[rank\d+\]: )?"  # torch writes it before each line of a traceback
    text = re.sub(
        rf'{by}  File "{re.escape(FOLDER)}.*\n({by}    .*\n)*', "", text
    )  # our own frames
    lines = re.sub(r"(?m)^.*\r(?=.)", "", text).splitlines()[-LINES:]  # a bar's last state
    how = f"exit status {failed[rank]}"
    if failed[rank] < 0:
        how = f"killed by {signal.Signals(-failed[rank]).name}"
        how += ": is there too little memory?" * (failed[rank] == -signal.SIGKILL)
    said, how = f"{run.folder}/failed", f"rank {rank} failed ({how}); it printed"
    if os.path.exists(said) and Path(said).read_bytes() == "\n".join(lines).encode():
        return f"{how} the same"
    Path(said).write_bytes("\n".join(lines).encode())
    return "\n".join([f"{how}:", *lines])


def refusal(folder, flags):
    """In words: what the script was about to do, and the remedy."""
    with open(f"{folder}/refused") as file:
        refused = json.load(file)
    remedy = refused.get("remedy") or new_output(refused["path"], flags)
    if steps := refused.get("steps"):
        remedy += f"; or end before: --steps {steps}"
    return f"{refused['line']}\n  {refused['text']}\n  {remedy}"


def new_output(path, flags):
    for flag in flags:
        name, _, value = flag.rpartition("=")
        if value and (path + os.sep).startswith(os.path.realpath(value) + os.sep):
            new = f"{name}={value}-{{run}}" if name else f"{value}-{{run}}"
            return f"give it a new output: {new} for {flag}"
    return "give it a new output, as by --output {run}, or start it in another folder"

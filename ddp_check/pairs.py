"""The runs that it takes to check a script: on one process, then on N; and as needed, again."""

import os
from dataclasses import replace

import torch

from .notes import PROGRAM, Notes, Said, Step
from .runs import NothingCompared, Options, Run


class Runs:
    def __init__(self, args, folder):
        self.folder, self.options = folder, Options(args.steps)
        self.one = Run(args, folder, "one", 1)
        self.all = Run(args, folder, "all", args.nproc)
        self.again = Run(args, folder, "again", 1)
        self.made = 0  # runs
        gpus, self.too_few_gpus = torch.cuda.device_count(), ""
        if 0 < gpus < args.nproc and not args.cpu:
            self.too_few_gpus = f"{gpus} GPU for {args.nproc} processes: all run on CPUs"

    def seconds(self):
        runs = self.one, self.all, self.again
        return {run.side: round(run.seconds, 1) for run in runs if run.seconds}

    def files(self):
        """The script's own, if its run on one process has come to its end."""
        return [note.text for _, note in Notes(self.folder, "one", 0)[Said] if note.kind == "file"]

    def count(self, further):
        """Which run the next one is, of how many."""
        self.made += 1
        return f"run {self.made} of {self.made + further}"

    def pair(self, other_options=lambda options, one, ranks: None):
        """The notes of one process and of the ranks. All processes start now, as that takes
        longest; those of the second run wait for the first. Where other_options says of the ranks'
        first steps, or of all, with which options to start again, and why, that is done."""
        one = None
        try:
            while True:
                remove_notes(self.folder, "all." if one else "")
                if one is None:
                    self.one.start(self.options)
                self.all.start(self.options)
                try:
                    one = one or self.run_one()
                except NothingCompared:
                    is_refused = os.path.exists(f"{self.folder}/refused")
                    if is_refused or not self.options.scaled:
                        raise
                    self.all.stop()
                    options = replace(self.options, scaled=[], scales=False)
                    self.start_again(options, "the script fails with the batches of all ranks")
                    continue
                ranks, others = self.all.run(
                    self.count(0), lambda ranks: other_options(self.options, one, ranks)
                )
                if others is None:
                    return one, ranks
                options, why = others
                if replace(options, turns=self.options.turns) != self.options:
                    one = None  # it matters there, too
                self.start_again(options, why)
        finally:
            self.one.stop()
            self.all.stop()

    def start_again(self, options, why):
        self.options = options
        self.all.say(f"starts again: {why}")

    def run_one(self):
        (one,), _ = self.one.run(self.count(1))
        end = one.end()
        if not os.path.exists(f"{self.folder}/one.draws"):
            raise NothingCompared(f"on one process: {end}")
        if not one[Step]:
            text = f"no optimizer.step() on one process; then {end}"
            said = [note.text for _, note in one[Said] if note.text.startswith(PROGRAM)]
            lines = [line.removeprefix(PROGRAM) for line in said]
            if not end.startswith(("SystemExit", "os._exit")):  # an error: of this line, or another
                lines = [line for line in lines if line in end]
            if lines and end != "its end":
                text += f"; does it start its ranks here: {lines[0]}? Then "
                text += "check what that starts, with a rank's flags: {rank}, {n}"
            raise NothingCompared(text)
        return one

    def once_more(self, lines, further=0):
        """The notes of another run on one process, with noise; of so many steps with the values of
        lines. `further`: how many runs are to follow."""
        self.again.start(replace(self.options, lines=lines))
        (again,), _ = self.again.run(self.count(further))
        return again

    def lines(self, steps):
        """The notes of a further pair, of so many steps, with the values of lines."""
        self.all.say(f"starts again, to name lines: {steps} step{'s' * (steps > 1)}")
        options, self.options = self.options, replace(self.options, lines=steps, steps=steps)
        try:
            one, ranks = self.pair()
        finally:
            self.options = options
        for rank, notes in enumerate(ranks):
            if not notes[Step]:
                raise NothingCompared(f"rank {rank}: {notes.end()}")
        return one, ranks


def remove_notes(folder, of=""):
    """Of all runs, or of those whose names begin so."""
    for name in os.listdir(folder):
        if name != "made" and name.startswith(of):  # made: also of downloads
            os.remove(f"{folder}/{name}")

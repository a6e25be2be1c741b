"""The rule on files that ranks write."""

import re

from ..notes import File
from ..script import UNKNOWN, source
from .rules import Rule

NUMBER = re.compile(r"\d+")
SHARED = r"\.lock$|torchinductor|triton|huggingface|/\.hydra/"


class Files(Rule):
    name = "files"
    right = "no file is written by several ranks"
    needs = "a file that the script writes"
    remedy = "print, log and save under `if rank == 0:`", "#rank-0"

    def find(self, one, ranks):
        written = {}
        for rank, notes in enumerate(ranks):
            for step, note in notes[File]:
                path = re.sub(r"(tfevents)\..*", r"\1", note.path)  # its name has the process
                if path == note.path or note.line != UNKNOWN:  # else of TensorBoard's thread
                    written.setdefault(path, {}).setdefault(rank, (step, note))
        found = []
        for path, writers in written.items():
            is_shared = re.search(SHARED, path)  # a lock, or a cache with one
            if len(writers) > 1 and not is_shared:
                step, note = min(writers.values(), key=lambda each: each[0])
                # To add, or to change a part, as of a memory map, may be meant for several.
                modes = [note.mode for _, note in writers.values()]
                makers = [mode for mode in modes if re.search("w|x", mode)]
                verdict = "WRONG" if len(makers) > 1 else "look"
                text = f"ranks {list(writers)} write {path}"
                more = [f"called at {source(line)}" for line in note.callers[:1]]  # who decides
                found += self.wrong(step, note.line, text, more, verdict=verdict)
        found.sort(key=lambda one: one.verdict)  # WRONG first
        found = found or self.beside(written)
        others = {each.line: each for each in found if each.verdict == found[0].verdict}
        for other in [each for line, each in others.items() if line != found[0].line]:
            found[0].more.append(f"and {other.text}: {source(other.line)}")
        return found[:1] if written else None

    def beside(self, written):
        """A file of each rank, with names that differ in numbers which are not the rank, such as a
        time or a process's number: event files in one folder, checkpoints named by a loss."""
        alike = {}  # {name without numbers: {rank: (its numbers, its path, step, note)}}
        for path, writers in written.items():
            rank = min(writers)
            if not re.search(SHARED, path):
                of_rank = alike.setdefault(NUMBER.sub("#", path), {})
                of_rank[rank] = NUMBER.findall(path), path, *writers[rank]
        for of_rank in alike.values():
            places = zip(*[numbers for numbers, *_ in of_rank.values()])
            says_rank = list(of_rank) in [list(map(int, numbers)) for numbers in places]
            if len(of_rank) > 1 and not says_rank:
                _, path, step, note = of_rank[min(of_rank)]
                text = f"each of ranks {list(of_rank)} writes a file of its own, such as {path}"
                return self.look(step, note.line, text)
        return []

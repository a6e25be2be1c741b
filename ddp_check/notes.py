"""What is recorded in each process, and read when both runs have ended."""

import contextlib
import copy
import itertools
import pickle
import re
from dataclasses import dataclass, field

from .script import own_file, source

PROGRAM = "what this program does to files is not seen: "  # and its line
TRIED = 3  # steps after which the ranks are looked at: is this start of any use?
NOISE = 1e-5  # in the layers' outputs: above a float32's, so that it flips more ReLUs
STREAM = "a batch of an IterableDataset"
MANY_VALUES = 50  # of a line and step that are noted
MANY_EVALUATIONS = 20  # of a line that are noted
OWN_GENERATOR = "a generator"  # of the script's own
DATASET, COLLATE = "the dataset", "collate_fn"  # which draw for samples, and for batches
PASS = "a pass through DDP, which sends buffers"  # as a collective call


@dataclass
class Seen:
    """What the runs are compared by: what has the same step, kind, line, name and number in both.
    compare.kinds has a row for each kind that is compared; "apart" and "gaps" only say where a rank
    draws random numbers of which one process's may be others."""

    kind: str
    line: str
    name: str  # of the operation, the model, the optimizer, the generator
    number: int  # the n-th of this line and name in the step
    values: dict  # {part: its sketch, number or checksum}
    index: int = 0  # of a value, in this process
    made_from: list = field(default_factory=list)  # indices of values
    about: dict = field(default_factory=dict)  # further facts, for causes and texts
    library: str = ""  # the line of a framework that the script's line has called


@dataclass
class PassEnd:
    """A DataLoader was iterated to its end: its pass, and how many batches it gave."""

    key: tuple
    batches: int


@dataclass
class Pass:
    """A pass over a DataLoader begins."""

    key: tuple  # its line, its loader, and how often these have begun one
    loader: str  # the n-th of a line
    sampler: str
    has_share: bool  # a sampler that gives each rank a part
    size: int | None  # of the dataset, below all Subsets
    draws: bool  # a sampler that draws with replacement
    batch_size: int | None  # None if the script's own batch_sampler forms the batches
    callers: list = field(default_factory=list)  # the lines that have called the function of it
    # The line that has made a DistributedSampler, or that gives samples in one's own.
    made: str = ""
    has_epochs: bool = True  # a sampler with a set_epoch()


@dataclass
class Batch:
    key: tuple  # of the pass
    number: int
    indices: list | None  # of its samples
    rows: int | None
    batches: int | None  # that the pass is to have
    trains: bool = True  # gradients are computed
    totals: dict = field(default_factory=dict)  # {index: that of a sample's numbers}, of some


@dataclass
class Step:
    """An optimizer's step, and the numbers that the script has then."""

    key: tuple  # the optimizer's number, its step
    line: str
    callers: list  # the script's lines that have called the function of this line
    # "made": the lines of the optimizer and its schedulers; the one of scheduler.step(), "last";
    # of load_state_dict(), "loaded"; "wrapped": those of DDP.
    made: dict
    names: list  # of the parameters, in the optimizer's order
    averaged: list  # the names of those whose gradients a DDP of all ranks averages
    variables: dict  # {name: number} of the script's plain numbers
    generators: dict  # at some steps: {name: state} of those that the script has made


@dataclass
class Collective:
    """A call that puts together what the ranks have."""

    name: str
    line: str
    drawn: str  # the line that has drawn its random numbers
    has_grad: bool  # it is not differentiated, though its tensor is, but by a backward of its own
    of_all: bool = True  # of the group of all ranks
    callers: list = field(default_factory=list)  # the script's lines that have called its function
    in_step: bool = False  # of an optimizer
    has_backward: bool = False  # of the script's own: it is in a forward of an autograd.Function
    of_number: bool = False  # of tensors with a single one, as of a loss that is printed


@dataclass
class Averages:
    """The script tells DDP whether to average gradients from the next pass on."""

    line: str
    does: bool


@dataclass
class Drawn:
    """How often each line has drawn random numbers in training."""

    times: dict  # {(line, function): {step: number}}
    by_layout: bool  # whether it depends on Options.layout


@dataclass
class Cut:
    """A batch size per process, of which each rank was given its part; or on one process, that of
    a framework, which was given that of all ranks."""

    loader: str
    batch_size: int


@dataclass
class Unprepared:
    """A call of a scheduler that Accelerate has not prepared, though it is for as many steps as its
    loader had before it was."""

    line: str
    name: str  # of the number of steps
    number: int


@dataclass
class Printed:
    line: str
    text: str
    callers: list = field(default_factory=list)  # the line that has called the function of it


@dataclass
class Said:
    """What is noted once in a run. Its text is, by its kind,

    note         something for the user to know
    order        "blocks" or "turns": which samples of a batch each rank gets
    framework    the name of one that is used
    replaced     the line and the name of a sampler that a framework has replaced
    file         one of the script's
    buffer, hook, local, join
                 the line that has made a buffer, has put a hook on a parameter, averages
                 weights at times, has ended a join()
    unseeded, own order, chooses
                 the line of a generator without a seed, of an order by a generator of the
                 script's own, of random numbers that choose samples
    remembers    the line by which a dataset that remembers earlier samples gives one
    """

    kind: str
    text: str


@dataclass
class File:
    """A path that the script writes."""

    path: str
    line: str = ""
    mode: str = "w"
    callers: list = field(default_factory=list)  # the script's lines that have called its function


@dataclass
class End:
    state: str


class Notes:
    """Of one process: {Step: [(steps before it, Step), ...], ...}, by the kind of note."""

    def __init__(self, folder, run, rank):
        self.of, path = {}, f"{folder}/{run}.{rank}"
        self.stopped = "", ""  # if it did not advance: how long, and the flag
        with contextlib.suppress(EOFError, pickle.UnpicklingError, FileNotFoundError):
            with open(f"{path}.notes", "rb") as file:
                for number in itertools.count():
                    step, note = pickle.load(file)
                    note.at = number  # in the order of this process
                    self.of.setdefault(type(note), []).append((step, note))
        self.crash = self.where = ""
        with contextlib.suppress(FileNotFoundError), open(f"{path}.crash") as file:
            self.crash = file.read()
        with contextlib.suppress(FileNotFoundError), open(f"{path}.where") as file:
            self.where = file.read()

    def __getitem__(self, kind):
        return self.of.get(kind, [])

    def seen(self, *kinds):
        """[(steps before it, Seen), ...] of these kinds."""
        return [each for each in self[Seen] if each[1].kind in kinds]

    def without(self, kinds, is_out):
        """These notes but for what has been seen of these kinds, and printed, in such steps."""
        rest = copy.copy(self)
        rest.of = dict(self.of)
        for kind in (Seen, Printed):
            rest.of[kind] = [
                (step, note)
                for step, note in self[kind]
                if not is_out(step) or getattr(note, "kind", None) not in (*kinds, None)
            ]
        return rest

    def end(self):
        """How it has ended, in words."""
        if self[End]:
            state = self[End][-1][1].state
            is_asked = state.startswith("EOFError")  # by input()
            return state + "; it has no input: pass the flag that answers" * is_asked
        for name, line in re.findall(r'File "(.*)", line (\d+)', self.crash):
            if own_file(name):
                return f"a crash at {source(f'{own_file(name)}:{line}')}"
        seconds, flag = self.stopped
        text = f"stopped: {seconds}" if seconds else "cut off"
        if self.where:
            _, line, *callers = self.where.split(" < ")
            text += " at " + " < ".join([source(line), *callers])
        return f"{text}; {flag}" if flag else text


@dataclass
class Finding:
    """A line of the report, and those below it."""

    verdict: str  # "WRONG", "look", "note", "ok", "not told", "not seen"
    what: str  # what was compared, or the rule's name
    step: int
    text: str
    line: str = ""  # `file:line` of the script; "" if there is none
    more: list = field(default_factory=list)  # further lines: other places, numbers
    advice: str = ""  # a key of causes.ADVICE
    remedy: str = ""
    off: float = 0.0  # of numbers, how far they are, as a part of their size
    section: str = ""  # its anchor in PAGE

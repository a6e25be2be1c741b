"""What is recorded in each process, and read when both runs have ended."""

import contextlib
import itertools
import pickle
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .script import own_file, source


@dataclass
class Value:
    """What a line of the script has computed, in the order of the script."""

    kind: str  # "value" of one operation, "inputs" and "outputs" of a model, "loss"
    line: str
    name: str  # of the operation or model
    number: int  # the n-th of this line and name in the step
    summaries: list  # of each tensor
    index: int = 0  # of this value, in this process
    made_from: list = field(default_factory=list)  # indices of values
    by_gradient: bool = False  # divided by something that has a gradient
    model: int | None = None  # index of the inputs of the model inside of which it is
    called_at: str = ""  # the script's line that has called the function of this line
    made_by: str = ""  # of a batch, the line where the dataset's __getitem__ begins


@dataclass
class PassEnd:
    """A DataLoader was iterated to its end: its pass, and how many batches it gave."""

    key: tuple
    batches: int


@dataclass
class Pass:
    """A pass over a DataLoader begins."""

    key: tuple  # its lines, and how often these have begun one
    loader: int  # the n-th of this process
    sampler: str
    has_share: bool  # a sampler that gives each rank a part
    draws: bool  # a sampler that draws with replacement
    size: int | None  # of the dataset


@dataclass
class Batch:
    key: tuple  # of the pass
    number: int
    indices: list | None  # of its samples
    rows: int | None
    batches: int | None  # that the pass is to have


@dataclass
class Step:
    """An optimizer's step: the learning rate and other numbers."""

    key: tuple  # the optimizer's number, its step
    line: str
    callers: list  # the script's lines that have called the function of this line
    settings: list
    made: list  # the lines that made the optimizer and its schedulers
    names: list  # of the parameters, in the optimizer's order
    variables: dict  # {name: number} of the script's plain numbers
    generators: dict  # at the first step: {name: state} of those that the script has made
    modes: list  # names of modules in evaluation mode


class Difference(NamedTuple):
    """Of a tensor of run N from that of run one."""

    size: float  # these three are norms
    one: float
    other: float
    ratio: float  # how many times run one's it is
    mark: float  # a number by which those of several ranks are compared


@dataclass
class Compared:
    """Tensors of run N beside those of run one, at an optimizer's step."""

    kind: str  # "weights" and "gradients" before it, "update", "buffers"
    line: str
    differences: dict  # {name: Difference}
    missing: list  # names that only one side has


@dataclass
class Collective:
    """A call that puts together what the ranks have."""

    name: str
    line: str
    drawn: str  # the line that has drawn its random numbers


@dataclass
class Draw:
    """Random numbers for this rank's samples: the state of the script's own generator then."""

    what: str  # "the model", "the dataset", "the loop", "the order"
    line: str
    generator: str
    number: int  # the n-th of this line
    state: int  # a checksum


@dataclass
class Weights:
    """Sums of what no optimizer trains, such as a teacher, at a step; or of a model's buffers, when
    it is evaluated."""

    key: tuple  # ("step", number), or ("evaluation", line, number)
    sums: dict  # {name: [(norm, sum, shape) of each module of this name]}
    drawn: dict = field(default_factory=dict)  # {name: states of the generator that has set it}


@dataclass
class Printed:
    line: str
    text: str


@dataclass
class Said:
    """Something for the user to know ("note"), or the "order" of a batch's samples over ranks."""

    kind: str
    text: str


@dataclass
class File:
    """A path that the script writes, or to which it has downloaded data."""

    kind: str  # "created", "again", "downloaded"
    path: str
    line: str = ""
    mode: str = "w"


@dataclass
class End:
    state: str


class Notes:
    """Of one process: {Step: [(steps before it, Step), ...], ...}, by the kind of note."""

    def __init__(self, folder, run, rank):
        self.of, self.path = {}, f"{folder}/{run}.{rank}"
        with contextlib.suppress(EOFError, pickle.UnpicklingError, FileNotFoundError):
            with open(f"{self.path}.notes", "rb") as file:
                for number in itertools.count():
                    step, note = pickle.load(file)
                    note.at = number  # in the order of this process
                    self.of.setdefault(type(note), []).append((step, note))

    def __getitem__(self, kind):
        return self.of.get(kind, [])

    def leave_out(self, is_out):
        for kind in (Value, Compared, Printed):
            self.of[kind] = [note for note in self[kind] if not is_out(note[0])]

    def end(self):
        if self[End]:
            return self[End][-1][1].state
        with contextlib.suppress(FileNotFoundError), open(f"{self.path}.log") as log:
            crash = log.read().partition("Fatal Python error")[2]
            for name, line in re.findall(r'File "(.*)", line (\d+)', crash):
                if own_file(name):
                    return f"a crash at {source(f'{own_file(name)}:{line}')}"
        with contextlib.suppress(FileNotFoundError), open(f"{self.path}.where") as file:
            _, line, *callers = file.read().split(" < ")
            return " < ".join([f"no end, at {source(line)}", *callers])
        return "no end"


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
    section: str = ""  # of a page, with its anchor

"""What a process of a run knows, the notes that it takes, and where its samples are."""

import contextlib
import json
import numbers
import os
import pickle
import shutil
import sys
import threading
import time
import weakref
import zlib

import torch
from torch import nn

from .notes import NOISE, Drawn, End, Said, Seen
from .patches import LEAVE
from .places import Places
from .script import library_place, own_file, place
from .sketch import NO_VALUES, as_tensors, by_sample, leaves_of, summary

MANY_PARTS = 8  # tensors of a value that are noted
LEAST_SEED = 100  # numbers below are rather sizes or choices


class PerThread(threading.local):
    in_dataset = False  # where each sample has a seed of its own
    quiet = False  # what happens is not the script's
    sync = False  # inside of SyncBatchNorm
    evaluates = False  # inside of a module in evaluation mode
    torch_state = None  # of torch's generator, before it draws
    batch = None  # the number of samples that are made into a batch
    sample = None  # the seed of the sample that a dataset makes
    asks = False  # whether its dataset has asked which worker it is in
    states = None  # of that worker's generators
    seeded = frozenset()  # those that it seeds itself for this sample
    worker = None  # of a loader, which is imitated


class Process(Places):
    """What this process knows, and the notes that it takes."""

    def __init__(self, rank=None):
        self.options = json.loads(os.environ["DDP_CHECK"])
        self.folder, self.world = self.options["folder"], self.options["nproc"]
        self.name = self.options["run"]
        self.is_single = self.name != "all"  # a run on one process
        self.noise = NOISE if self.name == "again" else 0.0
        self.saves = self.name == "one"  # what the others are compared with, and set to
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.thread = PerThread()
        self.steps, self.counts, self.pid = 0, {}, os.getpid()
        self.lock = threading.RLock()
        # {loader: (rows, where its samples are in one process's batch)} of its last batch, the
        # latest loader's at the end.
        self.loaded = {}
        self.has_gaps = False  # whether its collate_fn has left out samples
        self.model_rows = None  # of this process's batch
        # {size: sizes of the batches, or their views, that cat has joined; [] of samples' rows}
        self.joined = {}
        self.model = None  # the outermost model that computes now
        self.draws, self.given, self.batches = {}, {}, {}  # of the run on one process
        self.orders = {}  # that its samplers gave
        self.batch_sizes = {}  # of its training loaders
        self.loaders = {}  # {id of a dataset: names of the loaders that the script has made of it}
        self.by_layout = False  # whether something depends on which rank has which samples
        self.last_order = ""  # the line that has drawn an order of all before the first step
        self.seeded = {}  # {generator: the script's line that has seeded it last}
        # {a number that was drawn: the generator's state}, until the ranks put something together.
        self.drawn_seeds = {}
        self.own_seeds = {}  # {seed of a generator: own_seed() of it, as it first draws}
        self.written = {}  # {where a tensor is: the line that has set it last, and who called it}
        self.of_datasets = weakref.WeakSet()  # modules that it calls for a sample, as a blur
        self.mode_set = ()  # the line that has called train() or eval() last, and who has called it
        self.stepping = None  # the frame of an optimizer's step, while it sets weights
        self.clipped = {}  # {id of a gradient: (norm, limit, its version, steps)}
        self.trained = {}  # {id: (the optimizer's number, name)} of what one has
        self.made = {}  # {id of a numpy generator: the line that has made it}
        self.settle = lambda: None  # of files
        self.notes = open(f"{self.folder}/{self.name}.{self.rank}.notes", "wb")
        if not self.saves:
            with open(f"{self.folder}/one.draws", "rb") as file:
                self.options["steps"], *known = pickle.load(file)
            if not self.is_single:
                self.draws, self.given, self.batches, self.batch_sizes, self.orders = known

    def names_in(self, module):
        """[(optimizer's number, name)] of the parameters of a module that one has."""
        return [self.trained[id(p)] for p in module.parameters() if id(p) in self.trained]

    @property
    def traces(self):
        """Whether the values of lines are noted now."""
        return self.steps < self.options["lines"]

    def has_own_numbers(self):
        """In a dataset, or in a process that the script has forked."""
        return self.thread.in_dataset or os.getpid() != self.pid

    def note(self, note):
        if os.getpid() == self.pid:
            with self.lock:
                pickle.dump((self.steps, note), self.notes)
                self.notes.flush()

    def note_value(self, kind, line, name, tree, made_from=(), **about):
        """Note what a line has computed, and return its index."""
        leaves, values = [leaf for leaf in leaves_of(tree) if torch.is_tensor(leaf)], {}
        with self.quiet(), NO_VALUES:
            trees = tree if kind == "inputs" else [tree]  # a list of a function's arguments
            parts = leaves_of([by_sample(as_tensors(each), self.loader_rows) for each in trees])
            parts = [part for part in parts if torch.is_tensor(part)][:MANY_PARTS]
            values = {number: summary(part) for number, part in enumerate(parts)}
            integers = [n for n, part in enumerate(parts) if not part.is_floating_point()]
            places = [n for n, part in enumerate(parts) if hasattr(part, "compare_place")]
            about = about | {"integers": integers, "places": places}
        number = self.nth("value", self.steps, kind, line, name)
        index, about = self.nth("values"), about | {"model": self.model}
        made_from, library = list(made_from), library_place()
        self.note(Seen(kind, line, name, number, values, index, made_from, about, library))
        for leaf in leaves:
            if not isinstance(leaf, nn.Parameter):
                leaf.compare_index = index
        return index

    def note_once(self, note):
        if not self.nth("noted", repr(note)):
            self.note(note)

    def say(self, text, kind="note"):
        if not self.nth("said", text):
            self.note(Said(kind, text))

    def nth(self, *key):
        """0, 1, 2, ...: how often this key was asked for."""
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

    def hash(self, *key):
        """A seed, which differs between keys."""
        return zlib.crc32(repr((self.options["seed"], *key)).encode())

    def keep_drawn(self, number, state):
        """A number that the script has drawn before the training: it may be a seed."""
        if not self.steps and abs(number) > LEAST_SEED:
            self.drawn_seeds |= {number % 2**64: state, number % 2**32: state}

    def own_seed(self, seed):
        """Of a seed that the script has drawn without sending it, this rank's own."""
        is_number = isinstance(seed, numbers.Integral)
        state = self.drawn_seeds.get(int(seed) % 2**64) if is_number else None
        return seed if state is None else self.hash("own seed", seed, state)

    def seed_of_sample(self, generator, seed):
        """Of what a dataset seeds by its worker, which gives other samples on the ranks: the
        sample's own."""
        if self.thread.sample is None:
            return seed
        if not self.thread.asks:
            self.thread.seeded.add(generator)
            return seed
        if seed is not None:
            self.thread.states[generator] = self.hash("worker", repr(seed))
            self.seeded[generator] = place()[0]
        return self.thread.sample

    @contextlib.contextmanager
    def quiet(self):
        """What happens inside is not the script's."""
        before, self.thread.quiet = self.thread.quiet, True
        try:
            yield
        finally:
            self.thread.quiet = before

    def keep_space(self, paths):
        """Fewer steps, if those to come would take more than half of what is free on the disk.
        `paths`: of what a step has written."""
        size, free = sum(map(os.path.getsize, paths)), shutil.disk_usage(self.folder).free
        steps = self.steps + 1 + int(free / 2 / size)
        if steps < self.options["steps"]:
            self.options["steps"] = steps
            text = f"{steps} steps only: each writes {size / 1e9:.2g} GB to {self.folder}, where "
            self.say(f"{text}{free / 1e9:.2g} GB are free; another TMPDIR may have more")

    def note_drawn(self):
        """And the script's files."""
        for module in list(sys.modules.values()):
            if file := own_file(getattr(module, "__file__", None) or "<"):
                self.say(file, "file")
        drawn = {}
        for (what, *key), number in self.counts.items():
            if what == "draw" and isinstance(key[1], str) and key[1] != "any" and key[3]:  # trains
                drawn.setdefault((key[1], key[2]), {})[key[0]] = number + 1
        self.note(Drawn(drawn, self.by_layout))

    def end(self, state):
        self.settle()
        self.note_drawn()
        self.note(End(state))
        if self.saves:
            with open(f"{self.folder}/one.draws", "wb") as file:
                known = self.draws, self.given, self.batches, self.batch_sizes, self.orders
                pickle.dump((self.options["steps"], *known), file)
        sys.stdout.flush()
        if state != "--steps":
            return
        open(f"{self.folder}/{self.name}.{self.rank}.done", "w").close()
        time.sleep(30)  # others may need this rank; once all are done, the command ends them
        LEAVE(0)

"""What ddp_check gives a script: random numbers, samples, batch norm. By small scripts, in forks of
this process."""

import inspect
import json
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, Dataset
from watched import notes_of

from ddp_check.given import alike
from ddp_check.given.datasets import mark_of, remembers
from ddp_check.given.draws import seed_all
from ddp_check.given.draws_python import chosen_from
from ddp_check.given.generators import generators_of
from ddp_check.given.pairing import LOOP, MODEL
from ddp_check.given.prepared import batch_of_all
from ddp_check.given.samples import find_order
from ddp_check.notes import (
    DATASET,
    MANY_VALUES,
    Batch,
    Collective,
    Cut,
    Drawn,
    End,
    Pass,
    PassEnd,
    Said,
)
from ddp_check.patches import wrap
from ddp_check.process import PerThread

START = """
import json, os, random, threading
import numpy as np, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import *
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "DDP_CHECK" in os.environ:
    torch.distributed.init_process_group("gloo")
def show(name, values):
    print(json.dumps([name, torch.as_tensor(values).tolist()]), flush=True)
def step():
    p = nn.Parameter(torch.ones(1))
    p.sum().backward()
    torch.optim.SGD([p], 0.1).step()
"""


def run(code, name="one", **options):
    """The notes of each rank, and what it has shown: {name: [values, ...]}."""
    notes, shown = notes_of(START + code, name, **options), []
    for rank, of_rank in enumerate(notes):
        text = Path(f"notes/{name}.{rank}.log").read_text()
        assert of_rank[End][-1][1].state == "its end", text
        shown.append({})
        for key, values in map(json.loads, filter(lambda line: line[:1] == "[", text.splitlines())):
            shown[rank].setdefault(key, []).append(values)
    return notes, shown


def both(code, **options):
    """Of one process, and of two."""
    # By one line, as it counts as one of the script's.
    ((one,), (shown,)), ranks = [run(code, name, **options) for name in ("one", "all")]
    return one, ranks[0], shown, ranks[1]


def text_of(line):
    return Path("train.py").read_text().splitlines()[int(line.rpartition(":")[2]) - 1].strip()


# ---- random numbers

SHARES = """
rows, own = 4 // world, torch.Generator().manual_seed(0)
show("own", torch.rand(rows, generator=own))
show("normal", torch.normal(torch.zeros(rows, 2), torch.tensor([1.0, 2.0])))
show("normal", torch.normal(torch.zeros(1, 2), torch.ones(rows, 2)))
show("some", torch.multinomial(torch.ones(9), rows, True))
show("gamma", torch.distributions.Gamma(torch.ones(rows), 1.0).rsample())
show("numpy", np.random.normal(0, 1, (rows, 2)))
show("numpy", np.random.normal(size=(rows, 2)))
show("numpy", np.random.rand(rows, 2))
means = np.arange(0, 400, 100)[rank::world]  # of each sample
show("vector", np.random.normal(means, 1, rows))
show("vector", np.random.normal(list(means), scale=np.ones(rows), size=(rows,)))
show("table", np.random.normal(means[:, None], np.ones(3), (rows, 3)))
show("numbers", np.random.randint(0, 9, rows, dtype=np.int64))
show("chosen", np.random.choice(np.arange(rows) + 7, rows, p=[1 / rows] * rows))
show("many", torch.rand(2_000_000 // world, generator=own.manual_seed(0))[:3])
"""


def test_shares(work):
    """Each rank has its share of the numbers of one process, unless they are too many to keep."""
    of_one, notes, one, ranks = both(SHARES)
    assert not of_one.seen("own", "draw") and not notes[0].seen("gaps", "split")
    (apart,) = {text_of(note.line) for _, note in notes[0].seen("apart")}
    assert apart.startswith('show("chosen"')  # each rank chooses from its own
    assert {what for _, note in notes[0].seen("draw") for what in note.values} == {LOOP}
    drawn = {text_of(note.line) for _, note in notes[0].seen("draw")}
    assert len(drawn) == SHARES.count("show(") - 1  # all but "many"
    many, _ = one.pop("many"), one.pop("chosen")
    assert all(set(each.pop("chosen")[0]) <= {7, 8} for each in ranks)
    assert [each.pop("many") for each in ranks] == [many, many]
    for name, draws in one.items():
        for rank, of_rank in enumerate(ranks):
            assert np.allclose(of_rank[name], [values[rank::2] for values in draws], rtol=1e-5)


WHOLE = """
import torch.distributed as dist
show("few", torch.stack([torch.randperm(2) for _ in range(20)]))
show("odd", torch.randperm(5))
show("odd", np.random.permutation(5))
odd = [*range(5)]
random.shuffle(odd)
show("odd", odd)
rows = np.arange(32).reshape(16, 2)
show("rows", np.random.permutation(rows))
np.random.shuffle(rows)
show("rows", rows)
show("rows", torch.as_tensor(rows)[torch.randperm(16)])
random.choice([lambda x: x, lambda x: -x])
random.sample(population=[1, 2, 3], k=2)
np.random.randint(1000, 2000, 3), np.random.randint([1000, 2000])
np.random.choice(4)
np.random.choice(4, 2, False)
class Own(Sampler):
    def __init__(self):
        self.own, self.order = torch.Generator(), torch.randperm(7)
        torch.randperm(3, generator=self.own)
    def __iter__(self):
        return iter(torch.randperm(3, generator=self.own).tolist())
[*Own()], random_split(range(6), [3, 3])
order = torch.randperm(8 // world, generator=torch.Generator().manual_seed(3)).tolist()
assert sorted(order) == [*range(8 // world)]
with torch.device("meta"):
    nn.Linear(2, 2)
threading.Thread(target=np.random.default_rng).start()
np.random.default_rng(3)
np.random.default_rng()  # without a seed
order = torch.randperm(4).tolist()
dist.broadcast_object_list(order)
names = random.sample(range(4), 4)
dist.broadcast_object_list(names)
step()
torch.randperm(5), random.sample(range(5), 5)
dist.broadcast_object_list(names)
for _ in range(1003 if world == 1 else 0):
    random.random()
"""
SPLIT = {
    'show("few", torch.stack([torch.randperm(2) for _ in range(20)]))': 0,
    'show("odd", torch.randperm(5))': 0,
    'show("rows", np.random.permutation(rows))': 0,
    'show("odd", np.random.permutation(5))': 0,
    "random.shuffle(odd)": 5,
    "np.random.shuffle(rows)": 16,
    'show("rows", torch.as_tensor(rows)[torch.randperm(16)])': 0,
    "random.sample(population=[1, 2, 3], k=2)": 0,
    "np.random.choice(4, 2, False)": 0,
    "self.own, self.order = torch.Generator(), torch.randperm(7)": 7,
    "torch.randperm(3, generator=self.own)": 3,
    "order = torch.randperm(8 // world, generator=torch.Generator().manual_seed(3)).tolist()": 0,
    "[*Own()], random_split(range(6), [3, 3])": 6,
}
DRAWN = ["order = torch.randperm(4).tolist()", "names = random.sample(range(4), 4)"]
SPLIT |= dict.fromkeys([*DRAWN, "torch.randperm(5), random.sample(range(5), 5)"], 0)
UNGIVEN = {
    "unseeded": "np.random.default_rng()  # without a seed",
    "own order": "return iter(torch.randperm(3, generator=self.own).tolist())",
}


def test_orders(work):
    """They have all entries once, also where these have no share; and are the same on all."""
    notes, ranks, one, shown = both(WHOLE)
    assert shown == [one, one]
    split = {text_of(note.line): note.about["size"] for _, note in ranks[1].seen("split")}
    assert split == SPLIT
    assert [note.about["parts"] for _, note in ranks[1].seen("split") if note.about["parts"]] == [
        [3, 3]
    ]
    sent = [text_of(note.drawn) for _, note in ranks[0][Collective] if "list" in note.name]
    assert sent == [*DRAWN, DRAWN[1]]
    assert {*map(tuple, one["few"][0])} == {(0, 1), (1, 0)}
    assert [sorted(odd) for odd in one["odd"]] == [[*range(5)]] * 3
    assert [*range(5)] not in one["odd"]
    for rows in one["rows"]:
        assert sorted(rows) == [[n, n + 1] for n in range(0, 32, 2)] != rows
        assert [first % 4 for first, _ in rows] == [0, 2] * 8  # within each share
    said = {(said.kind, text_of(said.text)) for _, said in notes[Said] if said.kind in UNGIVEN}
    assert said == {*UNGIVEN.items()}
    assert 1000 in [n for times in notes[Drawn][0][1].times.values() for n in times.values()]


CHOICES = """
for draw in torch.rand, random.random, np.random.rand:
    show("own", draw(2) if draw is torch.rand else draw())
show("own", torch.rand(2, generator=torch.default_generator))
for node in range(rank, 4, world):
    show(f"node {node}", np.random.choice(np.arange(100 * node, 100 * node + 100)))
random.choice([rank, 5, 6])
torch.randint(5 + rank, (2,))
torch.multinomial(torch.ones(5 + rank), 2, True)
np.random.randint(5 + rank)
np.random.uniform([rank, 0], 9)
def noise():
    return torch.rand(2)
if world == 1:
    noise()
else:
    noise()
if rank == 0:
    torch.randn(3)
torch.randn(5 if world == 1 else 3)
torch.randperm(4 // world)
show("own", torch.rand(2))
torch.manual_seed(3)
if rank == 1:
    random.expovariate(1)  # which is not paired
random.seed(3)
show("seeded", random.expovariate(1))
state = random.getstate()
if rank == 1:
    random.random()
show("own", random.random())
random.setstate(state)
show("seeded", random.random())
random.setstate(state)
if rank == 1:
    random.shuffle([1, 2])
show("own", random.random())
random.getstate()
show("seeded", random.expovariate(1))
show("unseeded", random.Random().random())
show("seeded", torch.rand(2))
for trains in True, False, True:
    with torch.set_grad_enabled(trains):
        show("turns", random.random())
"""


def test_choices_of_few():
    """From so many that a checksum takes time, a choice is one from others."""
    few, many = range(1000), range(1001)
    assert chosen_from("choice", [[*few]]) and chosen_from("choice", [np.array(few)])
    for things in [*many], np.array(many), [], [None]:
        assert chosen_from("choice", [things]) is None


def test_choices(work):
    """From the same numbers, as a node's neighbours, the same; from others, it is said, also of
    other sizes. Another rank's own numbers are marked, unless its generator has the same state.
    Where the ranks take turns, in training, but draw more often than one process, the rest is
    paired by its number."""
    turns = [[f"train.py:{(START + CHOICES).count(chr(10))}", "random.random"]]
    _, ranks, one, shown = both(CHOICES, turns=turns)
    first, tested, second = one.pop("turns")
    of_turns = [each.pop("turns") for each in shown]
    assert np.allclose(of_turns, [[first, tested, second], [second, tested, second]], rtol=1e-5)
    assert len({each.pop("unseeded")[0] for each in (one, *shown)}) == 3
    assert shown[1] | shown[0] == one and shown[1]["seeded"] == one["seeded"]
    for values, of_one in zip(shown[1]["own"], one["own"]):
        assert values != of_one and np.allclose(values, of_one, rtol=1e-6)
    taken = {text_of(note.line) for _, note in ranks[0].seen("draw")}
    assert 'show("turns", random.random())' in taken
    apart = [[text_of(note.line) for _, note in notes.seen("apart")] for notes in ranks]
    sizes = ["torch.randn(5 if world == 1 else 3)", "torch.randperm(4 // world)"]
    among = ["torch.randint(5 + rank, (2,))", "torch.multinomial(torch.ones(5 + rank), 2, True)"]
    among.append("np.random.randint(5 + rank)")
    others = ["random.choice([rank, 5, 6])", *among, *sizes, "random.shuffle([1, 2])"]
    assert apart == [sizes, others] and not ranks[0].seen("split")


SEEDS = """
torch.manual_seed(random.randint(1000, 2000))
torch.rand(2)
random.seed(5)
torch.manual_seed(random.randint(7, 7))
torch.rand(2)
step()
torch.manual_seed(random.randint(1000, 1000))
torch.rand(2)
torch.cuda.is_initialized, torch.cuda.get_rng_state = lambda: True, lambda: torch.tensor([rank])
torch.rand(2)
"""


def test_numbers_that_are_no_seeds(work):
    """A size that was drawn, or a number of a step: a seed that happens to be the same is the
    script's own; not a large number before it. Of GPUs, their generator counts, too."""
    ranks, _ = run(SEEDS, "one") and run(SEEDS, "all")
    own = [[note for _, note in notes.seen("own")] for notes in ranks]
    states = [[n.values["state"] for n in notes if n.name == "torch"] for notes in own]
    assert [a == b for a, b in zip(*states)] == [False, True, True, False]
    limits = "1000, 2000", "7, 7", "1000, 1000"
    seeds = [f"torch.manual_seed(random.randint({both}))" for both in limits]
    seeded = [(n.name, n.about["seeded"] and text_of(n.about["seeded"])) for n in own[0]]
    assert [text for name, text in seeded if name == "torch"] == [*seeds, seeds[-1]]
    assert [text for name, text in seeded if name == "random"] == [None, *["random.seed(5)"] * 2]


FORKED = """
class Noise(Dataset):
    __len__ = lambda self: 2
    __getitem__ = lambda self, index: torch.rand(())
def draw():
    show("numbers", [random.random(), np.random.rand(), torch.rand(())])
    order = [*range(9)]
    random.shuffle(order)
    show("numbers", order)
    state = random.getstate()
    random.seed(5)
    show("numbers", random.random())
    random.setstate(state)
    show("numbers", random.random())
    for x in DataLoader(Noise()):
        show("numbers", x)
if "DDP_CHECK" in os.environ:
    for generator in random, np.random:
        generator.seed(3)
    torch.manual_seed(3)
    random.random(), np.random.rand()
    pid = os.fork()
    if pid == 0:
        draw()
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_processes_that_the_script_forks(work, capsys, monkeypatch):
    """They draw their own numbers."""
    for name in "RANK", "WORLD_SIZE":
        monkeypatch.setenv(name, "1")
    scope = {}
    exec(START + FORKED, scope)
    for generator in random, np.random, torch:
        getattr(generator, "manual_seed", getattr(generator, "seed", None))(3)
    random.random(), np.random.rand()
    scope["draw"]()
    wanted = [json.loads(line)[1] for line in capsys.readouterr().out.splitlines()]
    (notes,), (shown,) = run(FORKED)
    assert shown["numbers"] == wanted and not notes[Pass]


# ---- models

MODELS = """
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
torch.cuda.is_available = lambda: True
torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
torch.backends.mkldnn.matmul.fp32_precision = "tf32"

@torch.compile(dynamic=False)
def doubled(x):
    return 2 * x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        x = self.layer(x)[:, torch.randperm(4)][:, random.sample(range(4), 4)]
        x = F.dropout(x, 0.2)
        x = F.dropout(x + torch.rand_like(x), training=False)
        return doubled(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))

class Data(Dataset):
    __len__ = lambda self: 4
    def __getitem__(self, index):
        return F.dropout(torch.ones(4))

class Scripted(nn.Module):
    def forward(self, x):
        return F.dropout(x.roll(1, 0), 0.5)

@torch.jit.script
def noise(x):
    return x + torch.rand_like(x)

@torch.jit.script
def tripled(x):
    return 3 * x

def hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), 7))
    return future

model = nn.parallel.DistributedDataParallel(torch.compile(Model()))
model.register_comm_hook(None, fp16_compress_hook)
model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in DataLoader(Data(), 4 // world):
    model(x).sum().backward()
    show("gradient", model.module.layer.bias.grad)
    with torch.no_grad():
        F.dropout(x)
with torch.no_grad():
    noise(tripled(torch.jit.script(Scripted())(torch.ones(4))))
show("scripted", isinstance(tripled, torch.jit.ScriptFunction))
lstm, x = nn.LSTM(4, 4, 2, dropout=0.9), torch.ones(2, 3, 4)
show("recurrent", lstm(x)[0].equal(lstm(x)[0]))
show("deterministic", torch.are_deterministic_algorithms_enabled())
scaler = torch.amp.GradScaler("cpu")
torch.set_float32_matmul_precision("medium")
with torch.autocast("cpu", torch.bfloat16):
    show("precise", (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32)
show("precise", not scaler.is_enabled() and scaler.state_dict()["scale"] == 1)
show("precise", torch.get_float32_matmul_precision() == "highest")
show("precise", not torch.backends.cudnn.benchmark and not torch.backends.cudnn.allow_tf32)
show("precise", torch.backends.mkldnn.matmul.fp32_precision == "ieee")
show("precise", fsdp.MixedPrecision(param_dtype=torch.bfloat16).param_dtype is None)
"""
DRAWING = {
    "x = F.dropout(x, 0.2)",
    "x = F.dropout(x + torch.rand_like(x), training=False)",
    "return doubled(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))",
}


def test_models(work):
    """Nothing is compiled, nor scripted where a function is replaced; an own hook of DDP is called;
    only dropout in training draws; float32 is kept; on GPUs, what is deterministic is taken. No
    order of samples is drawn in a model."""
    _, ranks, one, shown = both(MODELS)
    for each in one, *shown:
        assert {*map(tuple, each["gradient"])} == {(7, 7, 7, 7)}
        assert each["deterministic"] == each["scripted"] == [True]
        assert each["precise"] == [True] * 6 and each["recurrent"] == [True]
    drawing = {(text_of(note.line), *note.values) for _, note in ranks[0].seen("draw", "split")}
    assert drawing == {(text, MODEL) for text in DRAWING}


@pytest.fixture
def single():
    """One process beside two; what is computed of the shares of a batch is "shares"."""
    run = SimpleNamespace(thread=PerThread(), is_single=True, world=2, joined={}, loaded={})
    run.loader_rows, run.model_rows, run.traces = None, None, False
    run.steps, run.nth = 0, lambda *key: 0
    run.by_share = lambda tensor, function: "shares"
    return run


def test_batch_norm(single, monkeypatch):
    """Of each share, unless it would have one value of a channel, or another size; and not where
    the ranks compute it together."""
    monkeypatch.setattr(F, "batch_norm", F.batch_norm)
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)
    alike.control_batch_norm(single)
    assert nn.BatchNorm2d(3)(torch.ones(2, 3, 5, 5)) == "shares"
    for module, rows in (nn.BatchNorm1d(3), 2), (nn.BatchNorm1d(3), 5), (nn.SyncBatchNorm(3), 4):
        assert module(torch.ones(rows, 3)).shape == (rows, 3)
    assert nn.BatchNorm1d(3)(torch.ones(4, 3)) == "shares"
    single.model_rows = 3  # where no loader gives the batch
    assert nn.BatchNorm1d(3)(torch.ones(4, 3)).shape == (4, 3)


def test_values_of_batch_norm(single, monkeypatch):
    """Of the shares, too, it is known what they are made from."""
    monkeypatch.setattr(F, "batch_norm", F.batch_norm)
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)
    alike.control_batch_norm(single)
    single.traces, x, noted, numbers = True, torch.ones(4, 3), [], [0, MANY_VALUES]
    single.nth = lambda *key: numbers.pop(0)
    single.note_value = lambda *words, **about: noted.append((*words, about))
    x.compare_index = 7
    norm = nn.BatchNorm1d(3)
    norm(x), norm(x)  # the second is one of too many
    numbers.append(0)
    monkeypatch.setattr(alike, "library_place", lambda: "resnet.py:3")
    norm(x)
    ((kind, _, name, value, made_from, about),) = noted
    assert (kind, name, value, made_from) == ("value", "batch_norm", "shares", [7])
    assert list(about) == ["called_at"]


def test_arguments_of_a_replaced_function():
    """Also for getfullargspec(); of a function in C there may be none."""

    class Loader:
        def load(self, dataset, *, size=2):
            return dataset, size

    for owner, name in (Loader, "load"), (SimpleNamespace(most=max), "most"):
        wrap(owner, name)(lambda original, *args, **kwargs: original(*args, **kwargs))
    found = inspect.getfullargspec(Loader.load)
    assert found.args == ["self", "dataset"] and found.kwonlyargs == ["size"]
    assert Loader().load(1) == (1, 2)
    generator = np.random.RandomState(3)
    owner = SimpleNamespace(draw=generator.random)
    wrap(owner, "draw")(lambda original: original())
    assert owner.draw.__self__ is generator and 0 < owner.draw() < 1


def test_marks_of_a_sample():
    """The same in each process: not by an object's address; what numpy does not know says
    nothing."""
    marks = [mark_of([object(), torch.ones(2, dtype=torch.bfloat16), "a", x]) for x in (1, 1, 2)]
    assert marks[0] == marks[1] == mark_of(["a", 1]) != marks[2]


class Halving(Dataset):
    """What it has is changed when it is asked for."""

    def __init__(self):
        self.x = torch.ones(2, 3)

    def __getitem__(self, index):
        self.x[index] /= 2
        return self.x[index]


@pytest.mark.parametrize(
    ("dataset", "remembered"),
    [
        (Halving(), True),
        ([torch.ones(3)], False),
        ([torch.ones(3, requires_grad=True)], False),
        (mock.MagicMock(__getitem__=lambda self, i: [time.time(), torch.ones(2)]), False),
        (mock.MagicMock(__getitem__=lambda self, i: torch.rand(2)), False),
    ],
)
def test_datasets_that_remember(make_process, dataset, remembered):
    """By what is measured, not by a clock; and not if random numbers are the same."""
    run, own = make_process(), mock.Mock()
    run.thread.sample = 7
    seed_all(7)
    sample = dataset[0]
    assert remembers(run, dataset, 0, sample, own) == remembered
    own.seed.assert_called_once_with(7)


def test_a_dataset_that_gives_each_sample_once(make_process):
    run, dataset = make_process(), {0: torch.ones(2)}
    run.thread.sample = 7
    assert not remembers(run, dataset, 5, dataset.pop(0), mock.Mock())


def test_seeds_of_a_dataset(make_process):
    """What it seeds by its worker is the sample's own number; how it did is noted."""
    run = make_process()
    assert run.seed_of_sample("numpy", 5) == 5
    run.thread.sample, run.thread.asks, run.thread.states, run.thread.seeded = 9, False, {}, set()
    assert run.seed_of_sample("numpy", 5) == 5 and run.thread.seeded == {"numpy"}
    run.thread.asks = True
    assert run.seed_of_sample("numpy", None) == 9 and not run.thread.states
    assert run.seed_of_sample("numpy", 5) == 9 and list(run.thread.states) == ["numpy"]
    assert list(run.seeded) == ["numpy"]


def test_seeds_that_are_drawn(make_process):
    """Before the training; also where a library takes what is left by 2 ** 32."""
    run = make_process()
    run.keep_drawn(2**40 + 5, 9), run.keep_drawn(7, 9)  # which may be a choice
    assert run.own_seed(5) == run.hash("own seed", 5, 9) and run.own_seed(2**40 + 5) != 2**40 + 5
    assert run.own_seed(7) == 7 and run.own_seed("a") == "a"
    run.steps = 1
    run.keep_drawn(5000, 9)
    assert run.own_seed(5000) == 5000


def test_order_of_a_batch(single, monkeypatch):
    """Each share of a batch is rolled by itself, as it is loaded or made from samples, if it has
    shares; not along other dimensions, nor on a rank."""
    for owner in torch, torch.Tensor:
        for name in "roll", "flip":
            monkeypatch.setattr(owner, name, getattr(owner, name))
    alike.control_order(single)
    single.loaded |= {"a": (4, None), "b": (3, None), "c": (None, None)}
    assert torch.arange(4).roll(shifts=1, dims=0) == "shares" == torch.ones(4, 2).flip([0])
    assert torch.roll(torch.arange(4), 1, dims=0) == "shares" == torch.flip(torch.ones(4, 2), [0])
    assert torch.arange(3).roll(1, 0).tolist() == [2, 0, 1] and torch.tensor(1).flip(0) == 1
    assert torch.ones(4, 2).flip(1).shape == (4, 2) and torch.arange(4).roll(1).shape == (4,)
    single.thread.in_dataset, single.thread.batch = True, 6
    assert torch.arange(6).flip(0) == "shares" and torch.arange(4).flip(0).tolist() == [3, 2, 1, 0]
    single.is_single = False
    assert torch.arange(6).flip(0).tolist() == [5, 4, 3, 2, 1, 0]


# ---- samples

LOADERS = """
data = TensorDataset(torch.arange(8.0))

class Stream(IterableDataset):
    def __init__(self, things):
        self.things = things
    def __iter__(self):
        return iter(self.things)

class Inner(IterableDataset):
    def __iter__(self):
        for (x,) in DataLoader(data, 2):
            yield from x

class Noise(Dataset):
    def __getitem__(self, indices):
        return torch.rand(len(indices))

class Restarting(IterableDataset):
    number = 0
    def __iter__(self):
        return self
    def __next__(self):
        self.number += 1
        if self.number % 4 == 0:
            raise StopIteration
        return self.number

def named(samples):
    return {"words": "abc", "number": torch.tensor(4), "x": torch.stack([x for x, in samples])}

def sizes(loader):
    return [len(batch) for batch in loader]

fours = BatchSampler(RandomSampler(data), 4, False)
for (x,) in DataLoader(data, None, sampler=fours):  # lists
    show("all", x)
for x in DataLoader(Noise(), None, sampler=fours):  # noise
    show("noise", x)
show("sizes", sizes(DataLoader(data, batch_size=None)))  # one by one
show("sizes", sizes(DataLoader(Stream([torch.ones(3), torch.ones(2)]), batch_size=None)))  # own
show("sizes", sizes(DataLoader(Stream(["a", "b"]), 2)))  # words
show("sizes", sizes(DataLoader(Stream(range(5)), 2)))  # with the rest
show("sizes", sizes(DataLoader(Stream(range(5)), 2, drop_last=True)))  # without it
show("sizes", sizes(DataLoader(Restarting(), 2)))  # that may begin again
show("sizes", sizes(DataLoader(Inner(), 4)))  # inner
show("sizes", sizes(DataLoader(data, 4, collate_fn=named)))  # named
show("sizes", sizes(DataLoader(Stream([*data]), 4, collate_fn=named)))  # named stream
show("again", [*RandomSampler(data, replacement=True)])
show("some", [*RandomSampler(data, num_samples=3)])
show("seeded", [*RandomSampler(data, generator=torch.Generator().manual_seed(5))])
given = RandomSampler(data)
given.generator = torch.Generator().manual_seed(5)
show("seeded", [*given])
[*DataLoader(data, 4, sampler=RandomSampler(data, True))]  # draws again
[*DataLoader(data, 4, sampler=WeightedRandomSampler([1] * 8, 4, False))]  # draws

class Remembering(Dataset):
    order = np.arange(4.0)
    def __getitem__(self, index):
        np.random.shuffle(self.order)  # in place
        return torch.from_numpy(self.order[:2].copy())

class Fetched(Dataset):
    def __getitem__(self, index):  # which is not asked
        return torch.ones(2)
    def __getitems__(self, indices):
        return [torch.ones(3) for _ in indices]

[*DataLoader(Remembering(), 4, sampler=range(8))]  # remembers
[*DataLoader(Fetched(), 4, sampler=range(8))]  # fetched
np.random.normal(np.zeros(8 // world), 1.0, 8 // world)
"""
SIZES = [[1] * 8, [3, 2], [2], [2, 2, 1], [2, 2], [2, 1], [4, 4], [3, 3], [3, 3]]
SEEDED = torch.randperm(8, generator=torch.Generator().manual_seed(5)).tolist()
ROWS = {"lists": [4, 4], "noise": [4, 4], "one by one": [None] * 8, "own": [3, 2], "words": [None]}
ROWS |= {"with the rest": [2, 2, 1], "without it": [2, 2], "inner": [4, 4], "named": [4, 4]}
ROWS |= {"named stream": [4, 4], "draws again": [4, 4], "draws": [4]}
ROWS |= {"remembers": [4, 4], "fetched": [4, 4], "that may begin again": [2, 1]}


def test_loaders(work):
    """A dataset may give batches by itself, a stream may end within one, a batch may hold anything.
    What a dataset loads is not the script's. A sampler may choose."""
    one, ranks, *shown = both(LOADERS, cuts=True, lines=1)
    for each in shown[0], *shown[1]:
        assert sorted(sum(each["all"], [])) == [*range(8)] and each["sizes"] == SIZES
        assert len({*each["again"][0]}) < 8 and len(each["some"][0]) == 3
        assert [order == SEEDED for order in each["seeded"]] == [True, False]
        assert each["noise"] == shown[0]["noise"]
    marks = []  # of a stream's samples, which have no index
    for notes in one, *ranks:
        rows = {}
        for _, note in notes[Batch]:
            name = text_of(note.key[1]).rpartition("# ")[2]
            rows.setdefault(name, []).append(note.rows)
            if name == "with the rest":
                marks.append([*note.totals])
            if name == "named":
                assert note.totals == {index: float(index) for index in note.indices}
            if name == "lists":
                assert len(note.indices) == 4
            if name == "draws again" and note.number:
                assert not note.totals
        assert rows == ROWS and len(notes[Pass]) == len(notes[PassEnd]) == len(ROWS)
        drawing = [
            text_of(note.key[1]).rpartition("# ")[2] for _, note in notes[Pass] if note.draws
        ]
        assert drawing == ["draws again", "draws"]
        remember = [text_of(note.text) for _, note in notes[Said] if note.kind == "remembers"]
        assert remember == ["def __getitem__(self, index):"]
    marked = sum(marks[:3], [])
    assert marks[:3] == marks[3:6] == marks[6:] and len(marked) == len({*marked}) == 5
    for notes in one, *ranks:  # nothing that ddp_check has computed
        assert "np.random.normal" not in [text_of(v.line)[:16] for _, v in notes.seen("value")]
    by = {text_of(note.line).rpartition("# ")[2]: note.about for _, note in one.seen("value")}
    made_by = [by[name]["made_by"] for name in ("noise", "lists")]
    assert text_of(made_by[0]).startswith("def __getitem__") and made_by[1] == ""


SAMPLERS = """
data = TensorDataset(torch.arange(8.0))

def sampler(seed):
    return DistributedSampler(data, world, rank, seed=seed)

def passes(name, n, sampler, steps=True):
    for epoch in range(n):
        if sampler and name in ("epochs", "both"):
            sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, 4 // world, shuffle=sampler is None, sampler=sampler):
            show(name, x)
        if steps:
            step()

passes("looked at", 1, None)
for _ in DataLoader(data, 4 // world, sampler=sampler(2)):
    show("weighted", [*WeightedRandomSampler([1.0] * 8, 8 // world)])
    show("views", torch.rand(8 // world))  # of the batch, each twice
passes("epochs", 3, None if world == 1 else sampler(5))
passes("same", 3, None if world == 1 else sampler(6))
passes("looks", 2, None if world == 1 else sampler(7), False)
passes("both", 2, sampler(8))
passes("twice", 2, sampler(4), False)
passes("other", 1, sampler(9))
passes("in order", 1, DistributedSampler(data, world, rank, shuffle=False))
of_all = DistributedSampler(data, 1, 0, seed=3)
show("of all", [*of_all])
show("of another line", [*RandomSampler(data)])
few, many = [iter(DataLoader(data, n // world, sampler=range(rank, 8, world))) for n in (4, 8)]
next(few), next(many), next(few)
show("of few", torch.rand(12 // world))  # of the last batch, thrice
show("seed", [of_all.seed, of_all.epoch])
"""


def test_orders_of_samplers(work):
    """A DistributedSampler has the orders of one process, whatever its seed is: without
    set_epoch(), the same again, but where no step was made."""
    _, ranks, one, shown = both(SAMPLERS)
    for rank, of_rank in enumerate(shown):
        for name in "epochs", "looks", "both", "other", "in order", "weighted":
            assert of_rank[name] == [values[rank::2] for values in one[name]]
        assert of_rank["same"] == 3 * [values[rank::2] for values in one["same"][:2]]
        assert of_rank["seed"] == [[3, 0]] and of_rank["of all"] == one["of all"]
        assert of_rank["of another line"] == one["of another line"]
        views = [np.reshape(values, (4, 2))[rank::2].ravel().tolist() for values in one["views"]]
        assert of_rank["views"] == views
        assert of_rank["of few"] == [np.reshape(one["of few"], (4, 3))[rank::2].ravel().tolist()]
    orders = {tuple(values) for name in ("both", "other") for values in one[name][::2]}
    assert len(orders) == 3 and one["twice"][:2] == one["twice"][2:]
    assert one["in order"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    drawn = {note.about["made"] for _, note in ranks[0].seen("split")}
    assert [*map(text_of, drawn)] == ["return DistributedSampler(data, world, rank, seed=seed)"]


PASSES = """
class Own(Sampler):
    def __init__(self, sampler=None):
        if sampler is not None:
            self.sampler = sampler
    def __iter__(self):
        return iter(torch.randperm(4).tolist())  # in its order

class DistributedOwn(Own):  # as one around another sampler
    pass

class Ranks(Sampler):
    num_processes = 2
    def __init__(self):
        pass
    def __iter__(self):
        yield from range(4)
    def set_epoch(self, epoch):
        pass

class Batches(BatchSampler):
    def __iter__(self):
        yield [0, 1]

data = Subset(range(8), range(4))
shares = DistributedSampler(data, 2, 0)
loaders = [
    DataLoader(data, 2),  # in order
    DataLoader(data, 2, sampler=shares),
    DataLoader(data, 2, sampler=Own()),
    DataLoader(data, 2, sampler=Ranks()),
    DataLoader(data, 2, sampler=Own(Ranks())),  # inner
    DataLoader(data, 2, sampler=DistributedOwn(Own())),
    DataLoader(data, batch_sampler=Batches(Own(Ranks()), 2, False)),
    DataLoader(data, 2, sampler=RandomSampler(data, True)),  # again
]
for loader in loaders:
    show("sizes", len([*loader]))
for loader in [DataLoader(data, size) for size in (2, 3, 3)]:  # the second is one per process
    for x in loader:
        show("sizes", len(x))
        step()
"""
GIVEN_BY = "return iter(torch.randperm(4).tolist())  # in its order"
NOTED = [
    # sampler, gives shares, draws, set_epoch(), where it is made
    ("SequentialSampler", False, False, False, ""),
    ("DistributedSampler", True, False, True, "shares = DistributedSampler(data, 2, 0)"),
    ("Own", False, True, False, GIVEN_BY),
    ("Ranks", True, False, True, "yield from range(4)"),
    ("Own", True, True, True, GIVEN_BY),
    ("DistributedOwn", True, True, False, GIVEN_BY),
    ("Batches", True, False, True, "yield [0, 1]"),
    ("RandomSampler", False, True, False, ""),
    *[("SequentialSampler", False, False, False, "")] * 3,
]


def test_passes(work):
    """What is noted of a sampler; and each rank's part of the script's batch size, for training."""
    before = (START + PASSES).partition("for loader in [DataLoader")[0]
    scaled = [f"loader 1 of train.py:{before.count(chr(10)) + 1}"]
    one, ranks, shown, (of_rank, _) = both(PASSES, cuts=True, scaled=scaled)
    noted = [
        (p.sampler, p.has_share, p.draws, p.has_epochs, text_of(p.made) if p.made else "")
        for _, p in one[Pass]
    ]
    assert noted == NOTED and {p.size for _, p in one[Pass]} == {8}
    assert [p.batch_size for _, p in one[Pass]] == [*[2] * 6, None, 2, 2, 6, 3]
    assert shown["sizes"] == [2, 1, 2, 2, 2, 2, 1, 2, *[2, 2], 4, *[3, 1]]
    assert of_rank["sizes"] == [2, 1, 2, 2, 2, 2, 1, 2, *[1] * 4, *[3, 1] * 2]
    assert [cut.batch_size for _, cut in ranks[0][Cut]] == [2]


def test_fewer_batches(work):
    """--short, and a loader that has more batches; or not so many."""
    code = "for size in 4, 3:\n    show('sizes', len(DataLoader(range(9), size)))"
    (notes,), (shown,) = run(code, short=2)
    assert shown["sizes"] == [2, 2] and "--short" in notes[Said][0][1].text
    assert run(code)[1] == [{"sizes": [3, 3]}]


LIBRARY = """
from torch.utils.data import DataLoader
class DataLoaderDispatcher:
    def __iter__(self):
        raise NotImplementedError
class DataLoaderShard:
    def __init__(self, loader):
        self.base_dataloader = DataLoader(loader.dataset, loader.batch_size)
    def __iter__(self):
        batches = iter(self.base_dataloader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch
"""
PREPARED = """
import sys
sys.path.append("site-packages")
from accelerate.data_loader import DataLoaderShard
loader = DataLoader(range(8), 2)
for batch in DataLoaderShard(loader):
    step()
for batch in DataLoaderShard(DataLoader([torch.ones(3)], None)):
    show("own", batch)
"""


def test_loaders_that_a_framework_makes(work):
    """They have the names of the script's; the script gets a batch when the next one is made."""
    folder = work / "site-packages/accelerate"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "data_loader.py").write_text(LIBRARY)
    (notes,), (shown,) = run(PREPARED)
    *batches, (_, own) = notes[Batch]
    assert [(step, note.number) for step, note in batches] == [(n, n) for n in range(2)]
    names = {note.key[1].partition(" of ")[2] for _, note in batches}
    assert [text_of(name) for name in names] == ["loader = DataLoader(range(8), 2)"]
    assert shown["own"] == [[1, 1, 1]] and own.rows == 3
    assert [cut.batch_size for _, cut in notes[Cut]] == [4]
    other = PREPARED.replace("DataLoaderShard", "DataLoaderDispatcher").replace("(loader)", "()")
    notes_of(START + other)
    assert "dispatch_batches" in Path("notes/refused").read_text()


def test_batch_of_all():
    """One process has the batches of all ranks, unless the script has divided its batch size."""
    run, cuts = SimpleNamespace(is_single=True, world=2, options={"prepared": True}), []
    run.note = cuts.append
    batches = BatchSampler(range(8), 2, False)
    size, kwargs = batch_of_all(run, "a", 1, {"batch_sampler": batches})
    assert (size, kwargs["batch_sampler"].batch_size, batches.batch_size) == (1, 4, 2)
    assert batch_of_all(run, "a", 1, kwargs) == (1, kwargs)
    assert batch_of_all(run, "a", 2, {}) == (4, {})
    assert [cut.batch_size for cut in cuts] == [4, 4]
    run.options["prepared"] = False
    assert batch_of_all(run, "a", 2, {}) == (2, {})
    run.is_single, run.options["prepared"] = False, True
    assert batch_of_all(run, "a", 2, {}) == (2, {})


GAPS = """
class Numbers(Dataset):
    __len__ = lambda self: 8
    def __getitem__(self, index):
        show("alone", torch.arange(4).roll(1, 0))
        return index
def own(samples):
    show("batch", torch.rand(()))
    show("rolled", torch.tensor(samples).roll(1, 0))
    np.random.seed(get_worker_info().id)
    show("seeded", np.random.rand())
    return torch.tensor([x for x in samples if x % 3])
for x in DataLoader(Numbers(), 4 // world, collate_fn=own, num_workers=1):
    torch.rand(())
    with torch.no_grad():
        torch.rand(len(x))
    if not rank:
        torch.rand(len(x))  # of these
"""


def test_samples_that_are_left_out(work):
    """Only numbers for samples, in training, may be for others. What puts them together draws what
    one process draws, and rolls each share of a batch, but not a sample."""
    _, (first, second), one, shown = both(GAPS)
    assert one["batch"] == shown[0]["batch"][:2] and one["batch"][0] != one["batch"][1]
    assert np.allclose(one["seeded"] + shown[0]["seeded"], np.random.RandomState(0).rand())
    assert one["rolled"] == [[2, 3, 0, 1], [6, 7, 4, 5]] and one["alone"] == [[3, 0, 1, 2]] * 8
    apart = {text_of(note.line) for _, note in first.seen("gaps")}
    assert apart == {"torch.rand(len(x))  # of these"} and not second.seen("gaps")


DATASETS = """
import inspect, pickle
rng = np.random.default_rng(3)

class Noise:
    def __init__(self):
        self.all = {"numpy": np.random.RandomState(3), "random": random.Random(3)}
        self.all |= {"torch": torch.Generator().manual_seed(3), "unused": torch.Generator()}
        self.all["system"] = random.SystemRandom()
    def draw(self):
        numbers = [self.all["numpy"].rand(), self.all["random"].random()]
        return [*numbers, torch.rand(1, generator=self.all["torch"]).item()]

class Data(Dataset):
    number = 5
    def __init__(self):
        self.noise = Noise()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        own = [np.random.default_rng().random() for _ in range(2)] + [random.Random().random()]
        random.seed(5)  # the same for each sample: these are no numbers of a rank
        own.append(np.random.default_rng(7).random() + random.Random(7).random() + random.random())
        return torch.tensor([np.random.rand(), rng.random(), *self.noise.draw(), *own])

def begin(worker):
    np.random.seed(get_worker_info().dataset.number)

options = {"num_workers": 2, "worker_init_fn": begin, "sampler": range(rank, 4, world)}
data = Data()
for x in DataLoader(data, 4 // world, **options):
    show("samples", x)
show("draws", data.noise.draw())
show("draws", Noise().draw())
show("outside", get_worker_info() is None)
def states():
    states = [inspect.unwrap(function)() for function in (random.getstate, np.random.get_state)]
    return [torch.get_rng_state().tolist(), *map(pickle.dumps, states)]
with torch.no_grad():
    batches = iter(DataLoader(data, 2))
    next(batches)
    before = states()
    next(batches)
show("outside", [a == b for a, b in zip(before, states())])
show("outside", rng.random() == np.random.default_rng(3).random())
"""


def test_generators_of_datasets(work):
    """Those that it holds are given for each sample, then as they were before; also those that it
    makes for a sample. That workers begin with the same state is noted."""
    _, ranks, one, shown = both(DATASETS)
    for rank, each in enumerate(shown):
        assert each["samples"] == [one["samples"][0][rank::2]]
        *numbers, seeded = zip(*each["samples"][0])
        assert len({*sum(numbers, ())}) == 2 * 8 and seeded[0] == seeded[1]
        assert each["draws"][0] == each["draws"][1] and each["outside"] == [True, [True] * 3, True]
    found = [[note for _, note in notes.seen("draw") if DATASET in note.values] for notes in ranks]
    names = Counter(note.name for note in found[0])
    assert names == {"Generator": 2, "RandomState": 1, "Random": 1, "numpy": 1}
    states = [{n.values[DATASET] for n in notes if n.name == "numpy"} for notes in found]
    assert len(states[0]) == 1 and states[0] == states[1]


def test_generators_of_a_large_dataset():
    """It is not searched whole."""
    generators = [[random.Random() for _ in range(20)] for _ in range(20)]
    assert 100 < len(generators_of(generators)) < 300


def test_generators_that_are_held_twice():
    """By the dataset's class and by itself: each is found once."""

    class Data:
        first = random.Random()

    data = Data()
    data.again = random.Random()
    data.all = data.again, data
    assert generators_of(data) == [data.again, data.first]


def test_order_of_a_batch_that_is_other():
    """Of samples that one process has not, or all of which each rank has, none is known."""
    run = SimpleNamespace(is_single=False, rank=0, batches={"a": [3, 5, 7, 9]}, say=lambda *_: 0)
    run.positions = lambda rank, size: torch.arange(rank, 2 * size, 2)
    for indices, order in ([3, 7], [0, 2]), ([9, 3], [3, 0]), ([3, 8], None), ([3, 5, 7, 9], None):
        assert find_order(run, "a", indices) == order
    run.is_single = True
    assert find_order(run, "b", [4, 6]) is None and run.batches["b"] == [4, 6]

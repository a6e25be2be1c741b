"""What is noted of a script: values, steps, collective calls. Each is one that a user may have; in
forks of this process."""

import contextlib
import inspect
import json
import os
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from watched import findings_of, notes_of

from ddp_check import cpu, patterns, script, text
from ddp_check.notes import MANY_EVALUATIONS, MANY_VALUES, Collective, End, Notes, Said, Step
from ddp_check.process import Process
from ddp_check.seen import held, passes
from ddp_check.seen.calls import in_function
from ddp_check.seen.passes import is_batch_norm
from ddp_check.seen.trace import Trace
from ddp_check.seen.written import lines_of, note_set
from ddp_check.sketch import moved, sketch

FRAMEWORK = """
import torch

def divided(loss, by):
    return loss / (torch.tensor(by) * 1.0)

def through(module, method, *args):
    \"\"\"As Lightning's way through DDP to training_step.\"\"\"

    def wrapped_forward(*args):
        del module.forward
        return method(*args)

    module.forward = wrapped_forward
    return module(*args)
"""

VALUES = """
import os, sys, threading
import numpy as np, torch
from torch import nn
sys.path.insert(0, "site-packages")
from framework import divided, through

class Settings:
    def __getattr__(self, name):
        return {}[name]

class Units:
    @classmethod
    def __torch_function__(cls, *call):
        return cls()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(()))
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, time, x, names, settings):
        return torch.sparse.mm(self.graph, self.layer(x)) * time, self.scale, settings

    def update(self):
        optimizer.step()

    def training_step(self, *args):
        out, scale, _ = self(*args)  # the pass
        return out

def train():
    net.train()  # the mode

net = Net()
shapes = nn.BatchNorm1d(2, device="meta")
shapes(torch.ones(2, 2, device="meta"))  # meta
shapes.eval()(torch.ones(2, 2, device="meta"))
later = nn.LazyLinear(2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
train()
x, names, settings = torch.ones(3, 4), np.array(["a", "b", "c"]), Settings()
torch.func.vmap(lambda row: row @ net.layer.weight.T)(x)
torch.func.jacrev(net.layer)(x)
weights, _ = torch.func.stack_module_state([net.layer, nn.Linear(4, 2)])
torch.func.vmap(lambda each: torch.func.functional_call(net.layer, each, x))(weights)
torch.utils.checkpoint.checkpoint(net.layer, x, use_reentrant=False).sum().backward()
graph = torch.jit.trace(net.layer, x)
graph(x)
nn.LazyLinear(2)(x)
torch.ones(2, 2).long() @ torch.ones(2, 2).long()
torch.vstack([torch.tensor(1.0), torch.tensor(2.0)])
torch.cat(tensors=[x, x])
torch.clone(input=torch.sort(input=x)[0])
torch.matmul(torch.cat([Units(), Units()]), x)
x.new(1000)
(x * 1j).conj()
np.random.seed([1, 2])
words = {f"word{number}": number for number in range(300)}
out, scale, _ = net(torch.tensor(2.0), x, names, settings)  # a pass
loss = divided(out.sum(), 2)
loss * net.scale
out.register_hook(lambda grad: grad)
through(net, net.training_step, torch.tensor(2.0), x, names, settings)
torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
thread = threading.Thread(target=net.layer.bias.data.mul_, args=(1,))
thread.start()
thread.join()
net.update()
if os.fork() == 0:
    x * 3
    os._exit(0)
os.wait()
for each in [nn.BatchNorm1d(4).eval() for _ in range(25)]:
    each(x)
for batch in torch.utils.data.DataLoader(x, sampler=[2, 0]):
    pass
"""


def line_of(code, text):
    return f"train.py:{code[: code.index(text)].count(chr(10)) + 1}"


def test_values(work):
    """Tensors that are sparse, complex, of no dimension or without values; parameters that are
    given out; what a library computes; vmap, checkpoints; threads, processes. With noise, too."""
    Path("site-packages").mkdir()
    Path("site-packages/framework.py").write_text(FRAMEWORK)
    (one,), (again,) = [notes_of(VALUES, run, lines=3) for run in ("one", "again")]
    assert [notes[End][0][1].state for notes in (one, again)] == ["its end"] * 2

    def seen(text, *kinds):
        line = line_of(VALUES, text)
        return {note.name: note for _, note in one.seen(*kinds) if note.line == line}

    assert seen("shapes(", "outputs")["BatchNorm1d"].values == {0: None}
    assert all(note.values[0].norm > 3 for note in seen("(x * 1j)", "value").values())
    assert not seen("x.new", "value") and not seen("x * 3", "value")
    assert not seen("torch.jit.trace", "value")
    outputs, inner = seen("out, scale, _ = net", "outputs")["Net"], seen("  out, scale", "inputs")
    assert outputs.values[0] and outputs.values[1] is None and list(inner) == ["Net"]
    total, scaled = [seen(text, "value") for text in ("loss = divided", "loss * net")]
    assert scaled["mul"].made_from == [total["sum"].index]
    assert "hook" not in {note.kind for _, note in one[Said]}
    (mode,), (weight,), (step,) = one.seen("mode"), one.seen("weight"), one[Step]
    assert mode[1].about["set"][0] == line_of(VALUES, "net.train()")
    assert list(weight[1].values) == ["net.scale", "net.layer.weight", "net.layer.bias"]
    assert "?" not in weight[1].about.values() and "word1" not in step[1].variables
    others = {name for _, note in one.seen("other") for name in note.values}
    assert others == {"Net.graph"}
    evaluated = seen("each(x)", "evaluation", "value")
    assert list(evaluated) == ["BatchNorm1d", "batch_norm"]
    assert evaluated["BatchNorm1d"].number == MANY_EVALUATIONS - 1


OPTIMIZERS = """
import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

class Lookahead(Optimizer):
    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self):
        self.base.step()

class Doubling(SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(2)

class Shrinking(LBFGS):
    def step(self, closure):
        super().step(closure)
        beside.weight.data.mul_(0.5)

class Failing(SGD):
    def step(self):
        raise ValueError

class Unaware(SGD):  # of its closure
    def step(self, closure=None):
        super().step()

def weight(value):
    return nn.Parameter(torch.full((3,), value))

beside = nn.PReLU()

def closure():
    if beside.training:
        beside.eval().weight.data.zero_()
    optimizer.zero_grad()
    loss = (2 * optimizer.param_groups[0]["params"][0] - 2).square().sum()
    loss.backward()
    return loss

def fails():
    raise ValueError

optimizer = Shrinking([weight(0.0)], max_iter=4)
StepLR(optimizer, 9)
optimizer.step(closure)
optimizer = LBFGS([weight(0.0)], max_iter=1)
optimizer.step(closure=closure)
optimizer = SGD([{"params": [weight(0.0)], "mask": torch.ones(3)}], torch.tensor(0.5))
optimizer.step(closure)
optimizer = Lookahead(SGD([weight(0.0)], 0.5))
optimizer.base.load_state_dict(SGD([weight(0.0)], 0.25).state_dict())
closure()
optimizer.step()
try:
    optimizer.base.step(fails)
except ValueError:
    pass
optimizer = Doubling([weight(0.0)], 0.5)
closure()
optimizer.step()
optimizer = Unaware([weight(0.0)], 0.5)
closure()
optimizer.step(closure)
nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
optimizer = SGD([p for net in nets for p in net.parameters()], 0.5)
optimizer.step()
optimizer = Failing(nets[0].parameters(), 0.5)
try:
    optimizer.step()
except ValueError:
    pass
nets[1].weight.data.zero_()  # after a step that failed
nets[1].weight.grad = torch.ones(1, 1)
optimizer = SGD(nets[1].parameters(), 0.5)
optimizer.load_state_dict(optimizer.state_dict())
optimizer.step()
plateau = ReduceLROnPlateau(optimizer)
plateau.step(epoch=1, metrics=torch.tensor(0.25))
assert plateau.last_epoch == 1
optimizer.step()
"""


def test_optimizers(work):
    """LBFGS, whose closure computes several gradients; optimizers that step another, or as their
    class does; two that fail; one without its closure. Settings that are tensors, or loaded,
    or a scheduler's; two models of one class."""
    (one,) = notes_of(OPTIMIZERS)
    assert one[End][0][1].state == "its end"
    keys = [step.key for _, step in one[Step]]
    assert keys == [*((n, 0) for n in range(9)), (9, 0), (9, 1)]
    assert one[Step][7][1].names == [
        f"{of}.{p}" for of in ("Linear", "Linear'") for p in ("weight", "bias")
    ]

    def norms(kind):
        found = [(step, *note.values.values()) for step, note in one.seen(kind)]
        return [(step, round(first.norm / 3**0.5, 3)) for step, first, *_ in found if first]

    assert norms("gradient") == [*((n, 8) for n in range(6)), (7, 0.577), (8, 0.577)]
    assert norms("update")[1:] == [(2, 4), (3, 2), (4, 8), (5, 4), (6, 0), (7, 0.289), (8, 0.289)]
    set_at = [note.about["Linear.weight"] for _, note in one.seen("weight")[-2:]]
    assert set_at == [line_of(OPTIMIZERS, "nets[1].weight.data")] * 2
    texts = "optimizer = SGD(nets[1]", "plateau =", "plateau.step", "optimizer.load"
    made, plateau, last, loaded = [line_of(OPTIMIZERS, text) for text in texts]
    lines = {"made": [made, plateau], "last": last, "loaded": loaded, "wrapped": []}
    assert one[Step][-1][1].made == lines and "last" not in one[Step][0][1].made
    others = [note.about.get("PReLU.weight") for _, note in one.seen("other")]
    assert others[1] == line_of(OPTIMIZERS, "beside.eval()")  # not of the step
    calls = [note.values["calls"] for _, note in one.seen("closure")]
    assert calls[0] > 1 and calls[1:] == [1, 1]
    assert [note.values for _, note in one.seen("plateau")] == [{"number": 0.25}]
    settings = one.seen("setting")[2][1].values
    assert settings[0, "lr"] == 0.5 and (0, "mask") not in settings


PASSES = """
import warnings
warnings.simplefilter("error")
import torch
from torch import nn
from torch.utils.data import Subset
Subset([5, 6], [1, 0])
Subset({"a": 5}, ["a"])

class Averages(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)

model, teacher = nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1).eval()), nn.Linear(1, 1)
frozen, x = nn.Sequential(nn.BatchNorm1d(1), Averages(1)), torch.ones(2, 1)
frozen.eval()  # the mode
model[0].weight.register_hook(lambda grad: grad * 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = nn.MSELoss()(model[0](x), teacher(frozen(x)))
    with torch.no_grad():
        model[0](x)
    loss.backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1) > 0
    optimizer.step()
frozen.train()(x)
exit()
"""


def test_passes(work):
    """Through models that are trained, or not, or in evaluation; with and without gradients; a
    loss. Only in the first steps, what they give, their weights, the norm of gradients."""
    (one,) = notes_of(PASSES, lines=2)
    assert one[End][0][1].state == "its end"
    weights = [note.about.get("weights") for _, note in one.seen("inputs")]
    assert [len(each) for each in weights if each is not None] == [2] * 3
    inputs = [(step, note.name, "weights" in note.about) for step, note in one.seen("inputs")]
    passes = [("Linear", True), ("Linear", True), ("Linear", False), ("Linear", True)]
    passes += [("Linear", False), ("Linear", False), ("Sequential", False)]
    assert inputs == [(n // 2, *each) for n, each in enumerate(passes)]
    outputs = [note for _, note in one.seen("outputs")]
    assert [bool(note.values) for note in outputs] == [True] * 4 + [False] * 3
    assert not any(note.about["has_batch_norm"] for note in outputs)
    line = line_of(PASSES, "    loss = nn.MSELoss")
    names = {note.name for _, note in one.seen("value") if note.line == line}
    assert names == {"linear", "batch_norm", "mse_loss"}  # nothing of ddp_check's
    losses = [note for _, note in one.seen("loss")]
    assert [bool(note.made_from) for note in losses] == [True, True, False]
    assert all(note.values[0].number for note in losses)
    assert [note.name for _, note in one.seen("evaluation")] == ["Sequential"] * 3
    (subset,) = [note for _, note in one.seen("value") if note.name == "Subset"]
    assert list(subset.values[0].rows[0][1]) == [1, 0]
    norms = [step for step, note in one.seen("value") if note.name == "clip_grad_norm_"]
    assert norms == [0, 1]
    line = line_of(PASSES, "model[0].weight.register_hook")
    assert [note.text for _, note in one[Said] if note.kind == "hook"] == [line]
    assert [step for step, note in one.seen("value") if note.line == line] == [0, 1]
    mode = one.seen("mode")[-1][1]
    assert mode.about["set"][0] == line_of(PASSES, "frozen.eval()")


RANKS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Loss(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            dist.all_gather(parts, x)  # without gradients
        return x.sum()

def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# A sharded weight, and a sparse gradient.
mesh = init_device_mesh("cpu", (world,))
shards = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
words = nn.Embedding(5, 2, sparse=True)
wide = nn.Linear(4, 1 + world)
optimizer = torch.optim.SGD([shards, *words.parameters(), *wide.parameters()], 0.5)
for _ in range(2):
    loss = words(torch.tensor([1, 2])).sum() + wide(torch.ones(2, 4)).sum()
    step(world * (loss + (shards * 2).sum().full_tensor()))

class Averaging(torch.optim.SGD):
    def step(self):
        dist.all_reduce(torch.ones(2))  # in a step
        dist.all_reduce(torch.ones(()))  # as a norm
        super().step()

# Other names.
if world > 1:
    core = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = DistributedDataParallel(core)
else:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
optimizer = Averaging(model.parameters(), 0.5)
for _ in range(2):
    step(world * model(torch.arange(16.0).view(4, 4)).square().sum())

# DDP of one process each; and of all, but for some.
part = nn.Linear(4, 1)
dist.broadcast(part.weight.data, 0)
alone = [dist.new_group([r]) for r in range(world)][rank]
apart = DistributedDataParallel(part, process_group=alone)
frozen = nn.Linear(4, 1)
frozen.bias.requires_grad_(False)
some = nn.Sequential(frozen, nn.Linear(1, 1))
some._ddp_params_and_buffers_to_ignore = ["1.bias"]
averaged = DistributedDataParallel(some)
optimizer = torch.optim.SGD([*part.parameters(), *some.parameters()], 0.5)
optimizer.step()

# Calls.
parts = [torch.empty(1) for _ in range(world)]
x = torch.ones(1, requires_grad=True) * 2
Loss()(x)
dist.all_gather(parts, x)  # with gradients
dist.all_reduce(torch.ones(1), group=alone)  # alone
for _ in range(60):
    dist.all_reduce(torch.ones(1))  # often
for _ in range(60):
    model(torch.ones(4, 4))  # often
if world > 1:
    passes = core[1].num_batches_tracked.item()
    core[1].num_batches_tracked += rank
    model(torch.ones(4, 4))
    assert core[1].num_batches_tracked == passes + 1  # DDP has sent rank 0's
"""


def test_ranks(work):
    """Weights that are sharded, sparse or of another size, modules of another name, DDP of a part;
    each rank has one process's weights after a step. Many calls of a line."""
    (one,), ranks = notes_of(RANKS), notes_of(RANKS, "all")
    for notes in (one, *ranks):
        assert notes[End][0][1].state == "its end"

    def weights(notes):
        values = [value for _, note in notes.seen("weight") for value in note.values.items()]
        lines = {line for _, note in notes.seen("weight") for line in note.about.values()}
        assert line_of(RANKS, "optimizer.step()") not in lines
        assert line_of(RANKS, "dist.broadcast(part") in lines
        return np.array([value.sums for name, value in values if "wide" not in name])

    for rank in ranks:
        assert np.allclose(weights(rank), weights(one), 0, 1e-5)
        averaged = [step.averaged for _, step in rank[Step]]
        assert averaged[2] and averaged[-1] == ["some.0.weight", "some.1.weight"]
        calls = [call for _, call in rank[Collective]]
        gathers = [call for call in calls if call.name == "all_gather"]
        assert [call.has_grad for call in gathers] == [False, True]
        assert not any(call.has_backward for call in gathers)
        within = {call.line for call in calls if call.in_step}
        assert within == {line_of(RANKS, "dist.all_reduce(torch.ones(2))")}
        (apart,) = [call.line for call in calls if not call.of_all]
        assert apart == line_of(RANKS, "dist.all_reduce(torch.ones(1), group")
        often = Counter(call.line for call in calls)
        assert often[line_of(RANKS, "dist.all_reduce(torch.ones(1))")] == MANY_VALUES
        assert often[line_of(RANKS, "model(torch.ones")] == MANY_VALUES


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if KIND == "first" else 0)
with torch.device("meta" if rank and KIND == "names" else "cpu"):  # rank 0 sends its own
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 2))
groups = dist.group.WORLD, [dist.new_group([r]) for r in range(world)][rank]
mesh = init_device_mesh("cuda", (1, world), mesh_dim_names=("replicate", "shard"))
if KIND == "second":
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in (model[0], model):
        part.set_gradient_divide_factor(1.0)
else:
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        sync_module_states=True,
        device_id=torch.cuda.current_device(),
        **({"device_mesh": mesh} if KIND == "first" else {"process_group": groups}),
        use_orig_params=KIND == "names",
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
x = torch.arange(64.0).cos().view(16, 4)
for i in range(0, 16, 8):
    part = x[i:i + 8][rank * (8 // world):][: 8 // world]
    loss = model(part).square().sum() / (WHOLE * (world if KIND == "second" else 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["first", "names", "second"])
def test_sharded_models(work, kind):
    """A rank's shard is not taken for another weight, nor its gradient for another one, whatever
    FSDP divides by; the first FSDP has all weights on each rank."""
    code = SHARDED.replace("KIND", repr(kind))
    right, wrong = [code.replace("WHOLE", size) for size in ("(8 // world)", "8")]
    findings = findings_of(right, lines=2)
    found = {finding.verdict for finding in findings}
    assert not found & {"WRONG", "look"}, found
    said = [finding.text for finding in findings if "FSDP shards nothing here" in finding.text]
    assert bool(said) == (kind != "second")
    (found,) = [each for each in findings_of(wrong, lines=2) if each.verdict == "WRONG"]
    what = "value" if kind == "second" else "loss"
    assert (found.what, found.line) == (what, line_of(wrong, "loss = "))
    assert "0.5 times one process's" in "\n".join([found.text, *found.more])
    assert not any("all_reduce is" in line for line in found.more)  # that of FSDP


ALONE = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
"""


def test_processes_that_have_not_joined(work):
    """As of a script for one process, or in groups of one each: nothing is compared."""
    groups = "import torch.distributed as dist\ndist.init_process_group(rank=0, world_size=1, "
    groups += "store=dist.HashStore())\n"
    for code, says in (
        (ALONE, "no init_process_group()"),
        (groups + ALONE, "a process group of 1, not of 2"),
    ):
        notes_of(code)
        refused = Path("notes/refused")
        assert not refused.exists()
        notes_of(code, "all")
        assert says in json.loads(refused.read_text())["text"]
        refused.unlink()


# ---- without a script


def test_after_gc_freeze(work):
    """As nanochat does after its first step: its models and generators are seen all the same."""
    code = """
import gc, numpy as np, torch
model, teacher, numbers = *(torch.nn.Linear(1, 1) for _ in "ab"), np.random.default_rng(0)
class Queue:
    rows = None
queue = Queue()
queue.rows, queue.numbers = torch.ones(3), np.random.mtrand._rand  # as scikit-learn may give it
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    optimizer.zero_grad()
    (model(torch.ones(1, 1)) - teacher(torch.ones(1, 1))).sum().backward()
    optimizer.step()
    gc.freeze()
"""
    (one,) = notes_of(code)
    others = {step: note.values for step, note in one.seen("other")}
    assert others[3].keys() == others[0].keys() == {"Linear.weight", "Linear.bias"}
    assert [list(note.values) for _, note in one.seen("attribute")] == [["Queue.rows"]]
    found = [note.generators for _, note in one[Step] if note.generators]
    assert len(found) > 1 and any(name.endswith("made at train.py:3") for name in found[0])
    assert not any("RandomState" in name for name in found[0])  # the global one is as it is


def test_share():
    """Of a padded batch, also if its samples are columns; not of what has another size, or other
    dimensions. And of the samples that the script has kept of a batch, two entries each."""
    loaded = {"a": (8, None), "b": (None, None)}
    rank = SimpleNamespace(world=2, is_single=False, joined={}, loaded=loaded)
    for one, own, expected in (
        ((8, 6), (4, 5), 0),
        ((5, 8), (4, 4), 1),
        ((7, 4), (4, 4), None),
        ((8, 4), (4, 5), None),
        ((8, 4), (4,), None),
    ):
        assert Process.shared_dimension(rank, one, own) == expected
    rank.options, rank.loader_rows, rank.model_rows = {"layout": "turns"}, 8, 3
    assert Process.positions(rank, 1, 6).tolist() == [2, 3, 6, 7, 10, 11]


def test_batch_norm_of_own_samples(monkeypatch):
    """That of SyncBatchNorm is of all, but on CPUs."""
    assert is_batch_norm(nn.BatchNorm1d(1)) and not is_batch_norm(nn.LayerNorm(1))
    assert not is_batch_norm(nn.SyncBatchNorm(1))
    monkeypatch.setattr(cpu, "MODES", ["imitated"])
    assert is_batch_norm(nn.SyncBatchNorm(1))


def test_small_tensors():
    """In double precision, a step may be small; a weight may be imaginary."""
    weight = torch.ones(5, dtype=torch.double)
    assert np.isclose(
        moved(sketch(weight), sketch(weight + 1e-9)).norm, 1e-9 * 5**0.5, rtol=0.5, atol=0
    )
    assert sketch(1j * weight).norm == sketch(weight).norm


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("table", torch.arange(3))


class Settings:
    rows = torch.ones(2)  # of the class


class Numbers(list):
    def __init__(self, **numbers):
        super().__init__([0])
        vars(self).update(numbers)


def test_variables():
    """The numbers of a script, also in datasets, in datasets of a part, in dictionaries; tensors
    that an object holds, but for what is a model's, no number, or too large."""
    alpha, far, words = np.float16(1.5), float("inf"), {1: 2.0, "beta": 3}
    many = {f"word{n}": n for n in range(300)}
    seeded = torch.Generator().manual_seed(7)
    part = DataLoader(Subset(Subset(Numbers(gamma=4), [0]), [0]))
    weight, frame = torch.ones(1), inspect.currentframe()
    weight.delta = 5
    with warnings.catch_warnings(action="error"):
        found = held.variables_of(frame)
    expected = {"alpha": 1.5, "beta": 3.0, "gamma": 4.0, "seeded": 7.0}
    assert found.items() >= expected.items(), (alpha, far, words, many, seeded, part)
    assert not {"far", "delta", "word1", 1} & found.keys()
    assert all(type(number) is float for number in found.values())
    kept = {"bank": torch.ones(3), "data": torch.empty(10_000_000), "none": torch.empty(0)}
    kept |= {"ids": torch.arange(3), "weight": nn.Parameter(torch.ones(1))}
    mine = SimpleNamespace(**kept, graph=torch.eye(2).to_sparse(), name="a")
    mine.inner, mine.other = Numbers(queue=torch.ones(2)), torch.Generator()
    found = list(held.tensors_of(frame))
    assert found == ["SimpleNamespace.bank", "Numbers.queue"], mine
    mine.inner = SimpleNamespace(queue=torch.ones(2))  # not of the script's own classes
    assert list(held.tensors_of(frame)) == ["SimpleNamespace.bank"]


CLIPS = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
net = nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for limit, change in enumerate([
    lambda: None,
    lambda: net.weight.grad.mul_(2),
    lambda: dist.all_reduce(net.bias.grad),
    lambda: None,
]):
    net.weight.grad, net.bias.grad = torch.ones(1, 2), torch.ones(1)
    nn.utils.clip_grad_norm_(iter(net.parameters()), 9.0 if limit == 3 else 0.1)
    change()
    optimizer.step()
"""


def test_clipped_gradients(work):
    """What they were before, of those that nothing has changed since."""
    (one,) = notes_of(CLIPS)
    before = {step: seen.values for step, seen in one.seen("unclipped")}
    norms = {s: {n: round(each.norm, 3) for n, each in of.items()} for s, of in before.items()}
    assert norms[0] == {"net.weight": 1.414, "net.bias": 1.0} and list(norms) == [0, 1, 2]
    assert norms[1]["net.bias"] == 1.0 and norms[1]["net.weight"] < 0.2
    assert norms[2]["net.weight"] == 1.414 and norms[2]["net.bias"] < 0.1


def test_sums_of_weights():
    """Also of complex ones; none of what has no values."""
    run, net = SimpleNamespace(quiet=contextlib.nullcontext), nn.Linear(1, 1, dtype=torch.complex64)
    nn.init.constant_(net.weight, 3 - 4j)
    nn.init.constant_(net.bias, 1)
    assert passes.sums_of_weights(run, net) == {"weights": (0.0, 8.0)}
    assert passes.sums_of_weights(run, nn.Linear(1, 1, device="meta")) == {}


def test_what_is_held():
    """What is trained, by the names of variables; a teacher, but not what changes samples, nor what
    the script has dropped."""
    teacher, blur, gone = Teacher(), nn.Linear(1, 2), Teacher()
    gone.itself = [gone]
    del gone
    run = SimpleNamespace(of_datasets={blur}, written={}, nth=lambda key: 0)
    values, _ = held.others(run, {id(teacher.layer.bias)}, "running_mean$")
    mine = [name for name in values if "Teacher" in name]
    assert mine == ["Teacher.layer.weight"] and (2, 1) not in [v.shape for v in values.values()]
    optimizer = torch.optim.SGD(teacher.parameters(), 0.1)
    trained = held.Trained(run, optimizer)
    assert trained.names[id(teacher.layer.bias)] == "teacher.layer.bias"
    assert trained.buffers() == {} and set(trained.modes()) == {"teacher", "teacher.layer"}


def test_names_inside_of_ddp():
    """They are those of what it wraps, as without it."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Linear(1, 1, bias=False)
    net = nn.Sequential(wrapper, nn.Linear(1, 1, bias=False))
    found = [[*dict(held.named(of, net))] for of in (net.named_parameters, net.named_modules)]
    assert found == [["0.weight", "1.weight"], ["", "0", "1"]]


def test_traced(make_process):
    """What a line's value is made from, also through copies, parts, and a division by a count;
    where sorted entries were; which weights a line has set; which batches it has joined."""
    run = make_process("again", lines=1)
    table, weight = torch.ones(3, 2), nn.Parameter(torch.ones(4))
    layer, other = nn.Linear(2, 2), torch.zeros(2)
    layer.bias.data = other
    with Trace(run), torch.no_grad():
        nn.functional.embedding(torch.tensor([1]), table, max_norm=1.0)
        assert list(run.written) == [table.data_ptr()]
        nn.functional.embedding(torch.tensor([1]), layer.weight)
        nn.functional.layer_norm(other, (2,), other, other)
        layer.double()
        assert len(run.written) == 1
        weight.data = torch.zeros(4)
        assert len(run.written) == 2
        run.written.clear()
        x, y = torch.arange(6.0).view(3, 2), torch.ones(2, 2)
        torch.cat([x, y]), torch.cat([x, x], 1), torch.cat([x, x], dim=1)
        assert run.joined == {} and x.grad is None
        torch.cat([y[:1], y[:1], y[:1]])  # of no batches
        assert run.joined.pop(3) == [1, 1, 1]
        run.loaded |= {"a": (3, None), "b": (2, None)}
        torch.vstack([x, y]), torch.concat([y, y], -2), torch.cat([y, y, y, y], dim=0)
        assert run.joined == {5: [3, 2], 4: [2, 2], 8: [2, 2, 2, 2]}
        torch.flatten(input=y[:, None], start_dim=0), x.view(2, -1), torch.ones(1, 4).view(4)
        assert 4 in run.joined and run.joined.pop(4) == [2, 2]  # that of cat
        y.view(-1), x.reshape(6), torch.tensor(1.0).view(1)
        assert (run.joined.pop(4), run.joined.pop(6)) == ([], [])
        x.check_line = "train.py:5"
        z = x * 3
        copy, (part, _, _) = z.clone(), z.unbind()
        assert copy.compare_index == part.compare_index == z.compare_index
        assert not hasattr(other.clone(), "compare_index")
        values, places = x.sort(0)
        assert not hasattr(values, "compare_place") and places.clone().compare_place
        assert all(each.compare_place for each in torch.topk(places, 2, 0))
        x.argsort(0)
        assert places.shape == x.size() and len(other.unbind()) == 2
        nn.init.constant_(other, 1.0), torch.empty(1), weight.mul_(2)
        noisy = nn.functional.conv1d(x[None], torch.ones(1, 3, 1)).tolist()
        assert noisy != [[[6.0, 9.0]]] and z.tolist() == [[0, 3], [6, 9], [12, 15]]
        run.noise = 0.0
        assert nn.functional.conv1d(x[None], torch.ones(1, 3, 1)).tolist() == [[[6.0, 9.0]]]
        run.thread.quiet = True
        z / 2
        note_set(run, table)
        run.thread.quiet, run.thread.in_dataset = False, True
        z / 2
        note_set(run, table)
        run.thread.in_dataset = False

    def all_reduce(tensor):  # in place
        pass

    assert Trace(run).__torch_function__(all_reduce, (), (x,)) is x

    def plus(n):
        return x.add(n)

    with Trace(run):
        halved = x.div(2), x.div(other=weight.sum()), x.div(weight.sum()), x.add(weight.sum())
        again = [plus(n) for n in range(MANY_VALUES + 1)]
        run.steps = 1
        late = x * 3
    assert hasattr(again[-2], "compare_index") and not hasattr(late, "compare_index")
    assert again[-1].compare_index == x.compare_index and halved and not run.written
    seen = [note for _, note in Notes(run.folder, "again", 0).seen("value")]
    assert not {"size", "fill_", "constant_", "empty", "mul_"} & {n.name for n in seen}
    assert [n.about["drawn"] for n in seen if n.name == "mul"] == ["train.py:5"]
    assert [n.about["by_gradient"] for n in seen if "div" in n.name] == [False, True, True]
    (sorts,) = [n.about for n in seen if n.name == "argsort"]
    assert sorts["integers"] == sorts["places"] == [0]
    added = [n for n in seen if n.name == "add"]
    assert [n.about["by_gradient"] for n in added] == [False] * (1 + MANY_VALUES)
    assert added[1].about["called_at"] not in ("", added[1].line)


def test_tensors_of_inference_mode():
    """As of a running mean that is set in a rollout."""
    with torch.inference_mode():
        mean = torch.zeros(2)
    weight = nn.Parameter(torch.zeros(2))
    for tensor in mean, weight:
        held.set_to(tensor, torch.ones(2))
        assert tensor.tolist() == [1, 1]


def test_processes_with_generators(monkeypatch):
    """Of environments, not of multiprocessing's manager."""
    names = "SyncManager-1", "Worker-2"
    children = [SimpleNamespace(name=name, pid=number) for number, name in enumerate(names)]
    monkeypatch.setattr(held.multiprocessing, "active_children", lambda: children)
    _, hidden = held.find_generators(SimpleNamespace(made={}))
    assert hidden["process Worker-2"] == 1 and "process SyncManager-1" not in hidden


def test_lines_that_have_set_tensors():
    """And the lines that have called their functions: of the first, if there are several."""
    first, second, other, sparse = *torch.ones(3, 2), torch.eye(2).to_sparse()
    written = {first.data_ptr(): ("net.py:1", "train.py:5")}
    written[second.data_ptr()] = "net.py:1", "train.py:6"
    written[other.data_ptr()] = "net.py:2", ""
    tensors = {"a": first, "b": second, "c": other, "d": sparse, "e": torch.ones(2)}
    lines = {"a": "net.py:1", "b": "net.py:1", "c": "net.py:2", "d": "", "e": ""}
    found = lines_of(mock.Mock(written=written), tensors)
    assert found == lines | {"net.py:1": "train.py:5"}


AUTOGRAD = """
class Gather(Function):
    once = True
    def forward(ctx, x):
        return x
    def backward(ctx, grad):
        return grad
out = Gather.apply(x)
"""


def test_backward_of_a_function(tmp_path):
    (tmp_path / "net.py").write_text(AUTOGRAD)
    file = f"{tmp_path}/net.py"
    assert text.backward_of(f"{file}:5") == f"{file}:6" and text.backward_of(f"{file}:8") == ""


def test_inside_of_a_function():
    """Of the script's own, in its forward; not in one of torch's that calls the script's."""
    found = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(in_function())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append(in_function())
            return grad

    def of_torch(x):
        found.append(in_function())
        return x * 2

    x = torch.ones(1, requires_grad=True)
    Same.apply(x).backward()
    torch.utils.checkpoint.checkpoint(of_torch, x, use_reentrant=True)
    assert found == [True, False, False]


def test_crash_below_torch(work):
    """It is named by the script's line."""
    Path("train.py").write_text("model(x)\n")
    frames = [
        f'  File "{os.path.abspath(name)}", line 1 in run' for name in (nn.__file__, "train.py")
    ]
    Path("all.0.crash").write_text("\n".join(frames))
    assert Notes(".", "all", 0).end().endswith("train.py:1: model(x)")


TEXT = """
def score(values):
    return np.mean(values)
def other(values):
    return sum(values) / 2
found = score(values)
"""


def test_text(work):
    """What computes a score, and who calls that; nothing of a line that is not known."""
    Path("train.py").write_text(TEXT)
    file = os.path.abspath("train.py")
    assert patterns.divisions_behind(f"{file}:6", [file]) == [f"{file}:3"]
    assert text.calls_of(f"{file}:3", [file]) == [f"{file}:6"]
    assert text.lines_inside(script.UNKNOWN) == []

"""What ddp_check compares: each rule is broken once, and a right script breaks none."""

import csv
import json
import pkgutil
import re
from pathlib import Path

import pytest
from helpers import by_mark, done, finish, start
from same_text import ROOT

COMMAND = "tests/check_by_fork.py"

# Right without a flag; with "wrong", each line with a name behind it breaks the rule of this name.
SCRIPT = """\
import copy, sys
import numpy as np
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

WRONG = "wrong" in sys.argv
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
rng = np.random.default_rng(0)
x = torch.from_numpy(rng.normal(size=(49, 5))).float()
WRONG or torch.manual_seed(0)
x = x + 0.1 * torch.randn(49, 5)  # data
dataset = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(rank if WRONG else 0)
order = torch.randperm(48).tolist()  # split
train_set = Subset(dataset, range(48))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body, self.drop = nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Dropout(0.5)
        self.head, self.largest = nn.Linear(4, 1), torch.zeros(4)

    def forward(self, x):
        x = self.drop(self.body(self.norm(x)))  # random
        if self.training:
            largest = x.detach().amax(0)
            WRONG or dist.all_reduce(largest, dist.ReduceOp.MAX)
            self.largest = torch.maximum(self.largest, largest)  # attributes
        return self.head(x)


torch.manual_seed(0)
model, text = Net(), nn.Linear(5, 1)
teacher = copy.deepcopy(model).requires_grad_(False)
parameters = [*model.parameters(), *text.parameters()]
if WRONG and rank:
    parameters[-2:] = parameters[-2:][::-1]
ddp, ddp_text = DistributedDataParallel(model), DistributedDataParallel(text)
optimizer = torch.optim.SGD(parameters, 0.01)  # parameters
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
samplers = [DistributedSampler(train_set, seed=0 if WRONG else 10 * n) for n in range(2)]
loaders = [DataLoader(train_set, 12 // world, sampler=sampler) for sampler in samplers]
part = DistributedSampler(dataset, shuffle=False) if WRONG else range(rank, 49, world)
test_loader = DataLoader(dataset, 4, sampler=part)
torch.manual_seed(1 if WRONG else 1 + rank)
seen = number = 0
for epoch in range(2):
    for sampler in samplers:
        WRONG or sampler.set_epoch(epoch)
    for (inputs, targets), (others, _) in zip(*loaders):  # order, loaders
        outputs = ddp(inputs)
        given = torch.full((4, 5), 1 / (1 + number)) if WRONG else inputs
        outputs = outputs + (ddp_text(given)[:1] if WRONG else ddp_text(given))  # inputs
        loss = (outputs - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if WRONG and rank:
            model.drop.eval()  # modes
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters()):
                old.lerp_(new, 0.1) if rank == 0 or not WRONG else None  # others
        number += 1
        seen += len(inputs) * (1 if WRONG else world)
        if seen > 1000:  # counts
            break
    model.eval()
    if not WRONG:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    with torch.no_grad():
        outputs = [model(inputs) for inputs, _ in test_loader]  # test set, evaluation
        if WRONG and rank == epoch == 0:
            ddp(inputs)  # calls
    model.train()
    scheduler.step(epoch + (rank if WRONG else 0))  # plateau
    if rank == 0 or WRONG:
        torch.save(model.state_dict(), "model.pt")  # files
"""
ANYWHERE = ("attributes",)  # no line is known
RULES = {
    name: number
    for number, line in enumerate(SCRIPT.splitlines(), 1)
    for name in re.findall(r"  # (.*)$", line)[:1]
    for name in name.split(", ")
}


def check(folder, script, *flags, before=()):
    """{rule: the most severe finding}"""
    Path(folder, "train.py").write_text(script)
    words = ["--json", *before, Path(folder, "train.py"), *flags]
    _, text = finish(start(COMMAND, *words, processes=0, TMPDIR=str(folder)))
    findings = json.loads(text[text.index("{\n") : text.rindex("}") + 1])["findings"]
    return {finding["rule"]: finding for finding in reversed(findings)}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Of the right and the wrong script."""
    findings = {}
    for kind in ("right", "wrong"):
        folder = tmp_path_factory.mktemp("check")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)  # before the fixture of a single test does
            findings[kind] = check(folder, SCRIPT, kind)
    return findings


def test_right(findings):
    verdicts = {rule: finding["verdict"] for rule, finding in findings["right"].items()}
    wrong = [f for f in findings["right"].values() if f["verdict"] in ("WRONG", "look")]
    assert not wrong, wrong
    assert all(verdicts[rule] == "ok" for rule in RULES), verdicts


@pytest.mark.parametrize("rule", RULES)
def test_rule(findings, rule):
    found = findings["wrong"][rule]
    assert found["verdict"] in ("WRONG", "look"), found
    assert rule in ANYWHERE or found["line"] == RULES[rule], found


def test_modes_are_set_somewhere(findings):
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "drop.eval()" in text)
    said = " ".join(findings["wrong"]["modes"]["details"])
    assert f"last train() or eval() on rank 1: train.py:{line}" in said, said


def test_every_rule_has_a_row():
    """Those of frameworks are in test_ddp_check_frameworks.py."""
    from ddp_check.compare.judge import RULES as rules

    of_torch = [rule for rule in rules if not type(rule).__module__.endswith(".frameworks")]
    assert {rule.name for rule in of_torch} == set(RULES)


# The private names of torch and Python that are used, as there is no public one; and where.
PRIVATE = {
    "torch.utils._python_dispatch.TorchDispatchMode": "given/draws.py: operators of any call",
    "torch.ops.aten.rand.default._schema": "given/draws.py: the names of an operator's arguments",
    "torch.default_generator._cdata": "given/draws.py: whether it is torch's own generator",
    "torch.nn.parallel.DistributedDataParallel._sync_buffers": "seen/calls.py: a pass that sends "
    "buffers",
    "torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle": "cpu.py: DDP "
    "refuses SyncBatchNorm on CPUs",
    "torch.jit.RecursiveScriptModule._save_for_lite_interpreter": "kept/writers.py: in C++",
    "torch.jit._serialization.save_jit_module_to_flatbuffer": "kept/writers.py: in C++",
    "torch.Tensor._version": "seen/passes.py: whether a clipped gradient is changed later",
    "sys._current_frames": "child.py: where the script is, from another thread",
}


def test_private_names():
    """A torch or Python that lacks one is named, with where it is used; the table has all."""
    for name in PRIVATE:
        pkgutil.resolve_name(name)
    texts = [path.read_text() for path in (ROOT / "ddp_check").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"[\w)\]]\.(_[a-z]\w+)", text)}
    assert used - {"_exit"} <= {part for name in PRIVATE for part in name.split(".")}


NOISE = """\
import os, sys
import numpy as np
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
size, smooth = float(sys.argv[1]), 0.1 * (rank == 1 and "wrong" in sys.argv)
bits = np.random.SFC64(int.from_bytes(os.urandom(4), "little"))


def noisy(function):
    '''As a device whose kernels round otherwise in each run.'''

    def call(*words, **more):
        out = function(*words, **more)
        noise = bits.random_raw(out.numel()) / 2.0**64 - 0.5
        return out * (1 + size * 3.46 * torch.from_numpy(noise).float().view(out.shape))

    return call


F.conv2d, F.linear = noisy(F.conv2d), noisy(F.linear)
x = torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(3))
labels = x[:, :, 0, 0].argmax(1)
torch.manual_seed(0)
blocks = [
    layer
    for a, b in ((3, 16), (16, 16), (16, 32))
    for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
sampler = DistributedSampler(x, shuffle=False)
for epoch in range(3):
    loader = DataLoader(TensorDataset(x, labels), 16 // world, sampler=sampler)
    for images, targets in loader:
        loss = F.cross_entropy(ddp(images), targets, label_smoothing=smooth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


LONG = [
    f"{noise} {kind}" for noise in ("1e-7", "1e-6", "1e-4", "5e-4") for kind in ("right", "wrong")
]


@pytest.mark.parametrize("case", by_mark(slow=["1e-5 right"], long=["1e-5 wrong", *LONG]))
def test_noise(tmp_path, case):
    """A device's rounding is no finding; nor does it hide label smoothing on one rank alone."""
    noise, kind = case.split()
    findings = check(tmp_path, NOISE, noise, kind).values()
    wrong = [finding for finding in findings if finding["verdict"] == "WRONG"]
    assert bool(wrong) == (kind == "wrong"), wrong
    assert kind == "wrong" or not [f for f in findings if f["verdict"] == "look"]


SAMPLER = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, seed=42) if world > 1 else None
loader = DataLoader(dataset, 16 // world, sampler=sampler, shuffle=sampler is None)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(1, 4):
    if sampler:
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_sampler_on_ranks_alone(tmp_path):
    """With a seed of its own, from epoch 1 on: the samples are compared all the same."""
    findings = check(tmp_path, SAMPLER)
    assert not [f for f in findings.values() if f["verdict"] in ("WRONG", "look")], findings
    assert findings["order"]["verdict"] == "ok"


@pytest.mark.long
def test_faults(work):
    """Of the right loops of benchmarks/loops/ nothing is said; and of the faults that are put into
    them, what its table has."""
    environment = {"TABLE": str(work / "faults.csv"), "REPORTS": str(work / "reports.txt")}
    done(start("benchmarks/faults.py", processes=0, **environment))
    found, known = (
        {
            (row["loop"], row["fault"]): (row["found"], row["line"])
            for row in csv.DictReader(open(path))
        }
        for path in ("faults.csv", ROOT / "benchmarks" / "faults.csv")
    )
    assert found == known

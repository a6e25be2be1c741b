"""own_loop/compare.py says nothing of right loops, and names the line where a faulty one parts.

LOOP is right, and has a flag for each of several kinds of loops. A fault is a change of its text.
"""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import Cold, finish, marked, some_fast, start
from same_text import ROOT

COMPARE = "own_loop/compare.py"
FORK = "from faults import Forked as launch  # processes are forks, which need not import torch\n"

LOOP = """
import contextlib
import os
import random
import shutil
import sys
import time
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

KIND = sys.argv[1:]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class Points(Dataset):
    def __len__(self):
        return 48 + ("uneven" in KIND)
    def __getitem__(self, i):
        point = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return point + 0.1 * torch.randn(6) + random.random() + np.random.rand(), i % 3

class Stream(IterableDataset):
    def __iter__(self):
        return (Points()[i] for i in range(rank, 48, world))

class Blocks:
    def __iter__(self):
        order = np.random.default_rng(0).permutation(48)
        return iter(order.reshape(4, world, -1)[:, rank].ravel().tolist())
    def __len__(self):
        return 48 // world

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(16), nn.Linear(6, 16)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 3)
        self.register_buffer("queue", torch.zeros(12, 6))
    def forward(self, x):
        x = F.relu(self.norm(self.body(x)))
        x = self.drop(torch.utils.checkpoint.checkpoint(F.gelu, x, use_reentrant=False))
        return self.head(x)

def main(share=12 // world, epochs=3):
    dist.init_process_group("gloo")
    sampler = DistributedSampler(Points(), drop_last="uneven" not in KIND)
    options = dict(num_workers="workers" in KIND, persistent_workers="workers" in KIND)
    if "stream" in KIND:
        loader = DataLoader(Stream(), share, **options)
    else:
        own = Blocks() if "blocks" in KIND else sampler
        if "plain" in KIND and world == 1:
            own = None
        loader = DataLoader(Points(), share, sampler=own, shuffle=own is None, **options)
    torch.manual_seed(0)
    model = Net()
    ddp = DDP(model, broadcast_buffers="broadcast" in KIND)
    kind = torch.optim.LBFGS if "lbfgs" in KIND else torch.optim.Adam
    optimizer = kind(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in KIND)
    if rank == 0:
        os.makedirs("runs/out", exist_ok=False)
        os.makedirs("old", exist_ok=True)
        shutil.rmtree("old")
        os.mkdir("old")
        if not os.path.exists("data"):  # a download
            os.mkdir("data")
            open("data/names", "w").close()
            np.save("data/numbers.npy", np.zeros(9000))
        assert np.load("data/numbers.npy").size and os.path.exists("data/names")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for library in torch.manual_seed, np.random.seed, random.seed:
            library(epoch * world + rank)
        ddp.train()
        for number, (x, y) in enumerate(loader):
            y = F.one_hot(y, 3).float()
            if "mixup" in KIND:
                part = torch.from_numpy(np.random.beta(1, 1, (len(x), 1))).float()
                part = part * torch.distributions.Beta(1.0, 1.0).sample() * np.random.rand()
                other = torch.randperm(len(x))
                x, y = part * x + (1 - part) * x[other], part * y + (1 - part) * y[other]
                x = 0.9 * x + 0.1 * x.roll(1, 0)  # as MixUp of torchvision
            if "queue" in KIND:
                shares = [torch.zeros_like(x) for _ in range(world)]
                dist.all_gather(shares, x)
                model.queue.copy_(torch.cat(shares))
            if "views" in KIND:
                x, y = torch.cat([x, 2 * x]), torch.cat([y, y])
            mask = x[:, 0] > 0
            count = mask.sum()
            dist.all_reduce(count)
            def closure():
                with torch.autocast("cpu", torch.bfloat16, enabled="scaler" in KIND):
                    losses = F.cross_entropy(ddp(x), y, reduction="none")
                    loss = (losses * mask).sum() * world / count
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                return loss
            if "lbfgs" in KIND:
                optimizer.step(closure)
                continue
            accumulates = "accumulate" in KIND and number % 2 == 0
            with ddp.no_sync() if accumulates else contextlib.nullcontext():
                closure()
            if not accumulates:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        right = torch.tensor([len(Points()[i][0]) * 1.5 for i in range(rank, 5, world)]).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"score {right:.3f} at {time.strftime('%H:%M:%S')},{time.time_ns() % 1000:03d}")
            with open("runs/out/log", "a") as file:
                file.write(f"{epoch}")
            os.rename("best.pt", "previous.pt")
            torch.save(1, "best.pt")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def altered(*changes):
    loop = LOOP
    for old, new in changes:
        assert loop.count(old) == 1, old
        loop = loop.replace(old, new)
    return loop


def line_of(loop, text):
    return next(n for n, line in enumerate(loop.splitlines(), 1) if text in line)


def compare(loop, *flags, script="loop.py", status=None):
    """Its status, and what it prints of `loop`, with nothing left behind."""
    Path("loop.py").write_text(loop)
    Path("best.pt").write_text("of an earlier training")
    Path("old").mkdir(exist_ok=True)
    Path("old", "score").write_text("0.9")
    statuses, text = finish(
        start(COMPARE, *flags, *script.split(), processes=0, more=FORK, TMPDIR=Path.cwd())
    )
    assert status is None or statuses == [status], text
    assert Path("best.pt").read_text() == "of an earlier training"
    assert Path("old", "score").read_text() == "0.9"
    left = [path.name for path in Path.cwd().glob("*") if path.suffix != ".log"]
    left = {name for name in left if not name.startswith("altered-")}
    assert left <= {"loop.py", "best.pt", "old", "data", "__pycache__"}, left
    return text


def test_right():
    """Also with an --output that must not exist, checkpoints that are removed and renamed, the time
    in what is printed, and a DistributedSampler on several processes only."""
    text = compare(
        LOOP, script="loop.py mixup queue views accumulate scaler workers plain", status=0
    )
    assert "6 steps on one process and on 2: nothing WRONG" in text, text
    assert not re.search("^(WRONG|look   (?!random))", text, re.M), text
    assert "check.py loop.py mixup" in text


MASK = "mask = x[:, 0] > 0"
FAULTS = [
    ["on the ranks", "dist.all_reduce(count)", "pass", "* world / count"],
    ["0.5 times", "* world / count", "/ count", ".sum() / count"],
    ["not averaged", "F.cross_entropy(ddp(x), y", "F.cross_entropy(model(x), y", "scaler.step"],
    ["are on no rank", "Sampler(Points(),", "Sampler(Points(), seed=rank,", "in enumerate(loader)"],
    ["lr is 0.01", "(model.parameters(), 0.01)", "(model.parameters(), 0.01 * world)", "0.01"],
    ["score", "        dist.all_reduce(right)\n", "", "print(f"],
    ["limit is", MASK, f"limit = x[:, 0].mean().item(); {MASK[:-1]}limit", "limit = "],
    ["alone", MASK, f"if x[0, 1] > 1:\n{16 * ' '}y = 0.5 * y\n{12 * ' '}{MASK}", "if x[0, 1]"],
]


@pytest.mark.parametrize("fault", some_fast(FAULTS, *FAULTS[:2]))
def test_fault(fault):
    words, old, new, shown = fault
    loop = altered((old, new))
    text = compare(loop, "--steps", "5")
    found = re.findall(r"^(?:WRONG|look).*(?:\n +.*)*", text, re.M)
    assert any(words in line for line in found), text
    assert any(f"loop.py:{line_of(loop, shown)}" in line for line in found), text


def test_coupled_on_purpose():
    """A model whose result for a sample depends on the others is not called WRONG."""
    loop = altered(("x = F.relu(self.norm(self.body(x)))", "x = x / x.std(0); x = self.body(x)"))
    text = compare(loop, "--steps", "3", status=0)
    assert re.search(rf"^look +outputs .*loop.py:{line_of(loop, 'x.std(0)')}:.*std", text, re.M)
    assert "depends on which others are in its batch" in text


def test_batch_size_per_process():
    """It has other batches on one process: nothing can be compared, nor is WRONG."""
    text = compare(altered(("share=12 // world", "share=12")), "--steps", "3", status=2)
    assert re.search('^look   samples .*--one "--batch-size 24"', text, re.M), text
    assert len(re.findall("^(WRONG|look)", text, re.M)) == 1, text


def test_shares_of_random_numbers(tmp_path, monkeypatch):
    """A rank draws its rows of what one process draws, and each sample has its own parameters."""
    monkeypatch.syspath_prepend(ROOT / "own_loop")
    import compare as tool

    options = {"folder": str(tmp_path), "nproc": 2, "layout": "turns", "seed": 0, "steps": 1}
    runs = []
    for name, rank in ("one", 0), ("all", 0), ("all", 1):
        monkeypatch.setenv("OWN_LOOP_COMPARE", json.dumps(options | {"run": name}))
        run, x = tool.Run(rank), torch.arange(1.0, 9) / 8
        x = x if run.one else x[rank::2]
        with run.quiet(), tool.Draws(run):
            numbers = [torch.rand(len(x), 3), torch.rand(size=(len(x),)), torch.randn_like(x)]
            numbers += [torch.normal(x, x), torch.bernoulli(x), torch.empty(3, len(x)).normal_().T]
            numbers += [torch.multinomial(x[:, None] ** torch.arange(9), 2)]
            numbers += [torch.distributions.Beta(0.2, 0.2).sample((len(x),))]
            numbers += [torch.randn(len(x), generator=torch.Generator().manual_seed(rank))]
        run.end("its end")
        runs.append(numbers)
    for one, *ranks in zip(*runs):
        assert torch.equal(torch.stack(ranks, 1).flatten(0, 1), one)


def test_not_put_back(tmp_path, monkeypatch, capsys):
    """What cannot be put back is kept, and the rest is put back nevertheless."""
    monkeypatch.syspath_prepend(ROOT / "own_loop")
    import compare as tool

    (tmp_path / "a.copy").write_text("old")  # and no b.copy
    files = [tool.File("changed", f"{tmp_path}/{n}/best.pt", f"{tmp_path}/{n}.copy") for n in "ab"]
    monkeypatch.setattr(tool, "Notes", lambda _, name, rank: {tool.File: enumerate(files)})

    def compare(args, folder):
        Path(folder, "kept").touch()
        tool.BothRuns(args, folder, "turns").restore_files("one", 1)

    monkeypatch.setattr(tool, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["compare.py", "loop.py"])
    monkeypatch.setattr(tool.tempfile, "tempdir", str(tmp_path))
    handlers = {number: signal.getsignal(number) for number in tool.ENDS}
    with pytest.raises(SystemExit, match="1"):
        tool.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert (tmp_path / "a" / "best.pt").read_text() == "old"
    assert f"it is kept as {tmp_path}/b.copy" in capsys.readouterr().out
    assert list(tmp_path.glob("compare-*/kept"))


@pytest.mark.slow
def test_crash_and_hang():
    crash = altered(
        ("        right =", "        if rank == 1: raise OSError('gone')\n        right =")
    )
    began = time.perf_counter()
    text = compare(crash, "--steps", "50", status=1)
    whole = time.perf_counter() - began  # no part of a run takes longer on this machine
    assert "rank 1 failed" in text and "OSError: gone" in text
    hang = altered(
        ("            mask =", "            if rank: time.sleep(10_000)\n            mask =")
    )
    text = compare(hang, "--wait", str(max(6, whole)))
    assert f"no end, at loop.py:{line_of(hang, 'time.sleep')}" in text
    assert not marked()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, script",
    [
        ["", "loop.py blocks mixup"],
        ["", "loop.py uneven"],
        ["--nproc 3", "loop.py stream workers broadcast"],
        ["-m", "loop lbfgs"],
    ],
)
def test_other_right_loops(flags, script):
    text = compare(LOOP, *flags.split(), script=script, status=0)
    assert not re.search("^WRONG", text, re.M), text


@pytest.mark.slow
def test_small_scripts(work):
    """The command that a user types, and a script that starts its processes itself."""
    flags = ["--dataset", "synthetic", "--epochs", "1", "--workers", "0", "--amp"]
    torchrun = [*flags, "--model", "net"]
    spawn = [*flags, "--nproc-per-node", "{n}", "--output", "runs/{run}"]
    for name, words in ("ddp_torchrun", torchrun), ("ddp_spawn", spawn):
        command = [str(ROOT / COMPARE), "--steps", "4", str(ROOT / f"train_{name}.py"), *words]
        job = Cold([sys.executable, *command], f"{name}.log")
        statuses, text = finish([job])
        assert statuses == [0] and "nothing WRONG" in text, text
    assert not Path("runs").exists()

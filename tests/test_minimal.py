"""minimal/, on small files in Fashion-MNIST's format. That one process downloads before the others
look for the files is not tested: here the files are there, and there is no network."""

import difflib
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import ROOT, Cold, Warm, by_hand, done, kill_all, same, torchrun, wait_for, weights
from torch import nn
from torchvision import datasets, transforms

LINES = {"one_gpu": 55, "ddp": 80, "ddp_resume": 110, "fsdp2": 90}
FILES = {name: ROOT / "minimal" / f"{name}.py" for name in LINES}
QUICK = ['"num_workers": 4, "persistent_workers": True', '"num_workers": 0']
SHORT = [*QUICK, "range(5)", "range(2)", "256 // world_size", "64 // world_size"]
# Without batch norm, which sees a rank's share of the batch, two processes train as one does.
PLAIN = ["nn.BatchNorm2d(32), ", "", "nn.BatchNorm2d(64), ", ""]
ONE = ["batch_size=256, shuffle=True", "sampler=DistributedSampler(train_set, 1, 0), batch_size=64"]
ONE += ["import DataLoader", "import DataLoader, DistributedSampler", *SHORT[:4], *PLAIN]
ONE += ["model.train()", "train_loader.sampler.set_epoch(epoch); model.train()"]
SHARDS = "print('shards', {p.to_local().numel() / p.numel() for p in model.parameters()}, "
SHARDS += "sum(hasattr(module, 'unshard') for module in model.modules())); optimizer ="
FSDP2 = [*SHORT, "128, 4, 512,", "128, 4, 512, 0.0,", "range(6)", "range(2)", "optimizer =", SHARDS]
RESUME = ["--epochs", 4, "--batch-size", 64, "--resume", "--output"]
TORN = """
def save(state, path, save=torch.save):  # once, rank 0 is killed while it writes
    save(state, path)
    if state.get("epoch") == 1 and not os.path.exists("killed"):
        os.truncate(path, 9999)
        os.mkdir("killed")
        os.kill(os.getpid(), 9)
torch.save = save
if __name__"""


@pytest.fixture(autouse=True)
def small(data, work):
    os.symlink(data, "data")


def changed(name, *changes):
    path, text = Path(f"changed_{name}.py").resolve(), FILES[name].read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        if text.count(old) != 1:
            raise ValueError(old)  # no AssertionError: test_broken waits for those
        text = text.replace(old, new)
    path.write_text(text)
    return path


def ranks(name, *changes, flags=(), processes=2):
    return by_hand(changed(name, *changes), *flags, processes=processes)


def epochs(text):
    """The numbers of each epoch: loss and accuracy."""
    return [[float(x) for x in row] for row in re.findall("loss (.+), accuracy (.+)", text)]


def accuracy(name, dtype=torch.float32):
    """Of model.pt, in this process, loaded into the model of the file."""
    text = Path(f"changed_{name}.py").read_text()
    code = re.search(r"( +(blocks|model) = .*?)\n +(ddp|policy) = ", text, re.S)[1]
    exec(textwrap.dedent(code), names := {"nn": nn, "device": "cpu"})
    names["model"].load_state_dict(weights("."))
    test_set = datasets.FashionMNIST("data", train=False, transform=transforms.ToTensor())
    images = torch.stack([test_set[i][0] for i in range(len(test_set))]).to(dtype)
    with torch.no_grad():
        right = names["model"].to(dtype).eval()(images).argmax(1) == test_set.targets
    return pytest.approx(right.double().mean().item(), abs=1e-4)


def check_ddp(*broken):
    """As one process on the whole batch. Batch norm's averages are rank 0's in all of them."""
    one = epochs(done([Warm(changed("one_gpu", *ONE), [], "log")]))
    for processes in 1, 2:
        text = done(ranks("ddp", *SHORT, *PLAIN, *broken, processes=processes))
        assert len(one) == 2 and epochs(text) == [pytest.approx(row, abs=2e-4) for row in one]
    norm = ["BatchNorm2d(32)", "BatchNorm2d(32, momentum=1.0)"]
    assert epochs(done(ranks("ddp", *SHORT, *norm, *broken)))[-1][1] == accuracy("ddp")


def check_ddp_resume(*broken):
    """Killed while it writes, and once more, it ends as an undisturbed run does."""

    def run(folder, *changes):
        return ranks("ddp_resume", *QUICK, *changes, *broken, flags=[*RESUME, folder])

    whole, jobs = epochs(done(run("whole"))), run("parts", "if __name__", TORN)
    done(jobs[:1], -9)
    kill_all(jobs)
    jobs = run("parts")
    wait_for("epoch 2", *jobs)
    kill_all(jobs)
    assert epochs(done(run("parts")))[-1] == whole[-1]
    assert same(weights("parts"), weights("whole"))
    assert "has a run" in done(ranks("ddp_resume", flags=RESUME[:4] + ["--output", "whole"]), 1)
    os.remove("whole/model.pt")
    assert epochs(done(run("whole"))) == []
    assert same(weights("parts"), weights("whole"))


def check_fsdp2(*broken):
    """Two processes, with half of each parameter, as one. Their weights load into a plain model."""
    one, two = (done(ranks("fsdp2", *FSDP2, *broken, processes=n)) for n in (1, 2))
    assert "shards {1.0} 3" in one and two.count("shards {0.5} 3") == 2
    assert epochs(two)[1] == pytest.approx(epochs(one)[1], abs=0.05)
    assert epochs(two)[1][1] == accuracy("fsdp2", torch.bfloat16)


def test_texts():
    texts = {name: file.read_text().splitlines() for name, file in FILES.items()}
    assert all(len(texts[name]) <= most for name, most in LINES.items())
    modules = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(sum(texts.values(), [])), re.M))
    assert modules <= {"argparse", "os", "torch", "torchvision"}
    assert sum(line[0] in "+-" for line in difflib.ndiff(texts["one_gpu"], texts["ddp"])) <= 60
    assert sum(line[0] == "-" for line in difflib.ndiff(texts["ddp"], texts["ddp_resume"])) == 8


@pytest.mark.parametrize("check", [check_ddp, check_ddp_resume, check_fsdp2])
def test_file(check):
    check()


REPLACE = ['os.replace(checkpoint_path + ".tmp"', "os.replace(checkpoint_path"]
BROKEN = [
    (check_ddp, "ddp(images)", "model(images)"),
    (check_ddp, "sampler.set_epoch(epoch)", "pass"),
    (check_ddp, "sampler=sampler", "shuffle=True"),
    (check_ddp, "64 // world_size", "64"),
    (check_ddp, "range(rank, len(test_set), world_size)", "range(len(test_set))"),
    (check_ddp, "dist.all_reduce(loss_sum)", "pass"),
    (check_ddp, "dist.all_reduce(correct)", "pass"),
    (check_ddp, "dist.broadcast(buffer, 0)", "pass"),
    (check_ddp_resume, "optimizer.load_state_dict", "str"),
    (check_ddp_resume, 'state["epoch"] + 1', 'state["epoch"]'),
    (check_ddp_resume, '(state, checkpoint_path + ".tmp")', "(state, checkpoint_path)", *REPLACE),
    (check_fsdp2, "fully_shard(block, mp_policy=policy)", "pass"),
    (check_fsdp2, "fully_shard(model, mp_policy=policy)", "pass"),
    (check_fsdp2, "manual_seed(0)", "manual_seed(rank)"),
    (check_fsdp2, "[:share]", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize("check, broken", [(check, broken) for check, *broken in BROKEN])
def test_broken(check, broken):
    with pytest.raises(AssertionError):
        check(*broken)


@pytest.mark.slow
def test_commands(monkeypatch):
    """As users type them, with workers; restarted by torchrun; and what ends in a line."""
    assert len(epochs(done([Cold([sys.executable, FILES["one_gpu"]], "log")]))) == 5
    for name in "ddp", "fsdp2":
        assert len(epochs(done([torchrun(2, FILES[name])]))) == 5
    assert "must be a multiple of" in done([torchrun(3, FILES["ddp"])], 1)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    path = changed("ddp_resume", "if __name__", TORN)
    text = done([torchrun(2, "--max-restarts", 1, path, *RESUME, "output")])
    assert re.findall(r"epoch (\d)", text) == list("01123")
    apart = ["if os.path.exists(check", "if rank == 0 and os.path.exists(check", *QUICK]
    assert "see different files" in done(ranks("ddp_resume", *apart, flags=[*RESUME, "output"]), 1)

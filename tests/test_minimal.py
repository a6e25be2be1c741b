"""minimal/, on small files in Fashion-MNIST's format. That one process downloads before the others
look for the files is not tested: here the files are there, and there is no network."""

import os
import re

import helpers
import pytest
from helpers import Warm, by_hand, changed, done, kill_all, torchrun, wait_for, weights

SHORT = ["range(5)", "range(2)", "256 // world_size", "64 // world_size"]
# Without batch norm, which sees a rank's share of the batch, two processes train as one does.
PLAIN = ["nn.BatchNorm2d(32), ", "", "nn.BatchNorm2d(64), ", ""]
ONE = ["batch_size=256, shuffle=True", "sampler=DistributedSampler(train_set, 1, 0), batch_size=64"]
ONE += ["import DataLoader", "import DataLoader, DistributedSampler", *SHORT[:2], *PLAIN]
ONE += ["model.train()", "train_loader.sampler.set_epoch(epoch); model.train()"]
SHARDS = "print('has', {p.to_local().numel() / p.numel() for p in model.parameters()}); optimizer ="
FSDP2 = [*SHORT, "128, 4, 512,", "128, 4, 512, 0.0,", "range(6)", "range(2)", "optimizer =", SHARDS]
RESUME = ["--epochs", 4, "--batch-size", 64, "--resume", "--output"]
TORN = """
def save(state, path, save=torch.save):  # once, rank 0 is killed while it writes
    save(state, path)
    if state.get("epoch") == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.truncate(path, 9999)
        os.kill(os.getpid(), 9)
torch.save = save
if __name__"""


@pytest.fixture(autouse=True)
def small(data, work, monkeypatch):
    os.symlink(data, "data")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # or a restart can hang


def ranks(name, *changes, flags=(), processes=2):
    return by_hand(changed(f"minimal/{name}.py", *changes), *flags, processes=processes)


def epochs(text):
    """The numbers of each epoch: loss and accuracy."""
    return [[float(x) for x in row] for row in re.findall("loss (.+), accuracy (.+)", text)]


def accuracy(name, place, *changes):
    """Of model.pt, which one process loads at this place. Then it trains with a rate of 0."""
    changes += place, f"model.load_state_dict(torch.load('model.pt'))\n    {place}"
    changes += "lr=", "lr=0 * ", "model.train()", "model.eval()", "range(5)", "range(1)"
    return epochs(done(ranks(name, *changes, processes=1)))[0][1]


def test_ddp():
    """As one process on the whole batch. Batch norm's averages are rank 0's in all of them."""
    one = epochs(done([Warm(changed("minimal/one_gpu.py", *ONE), [], "log")]))
    for processes in 1, 2:
        text = done(ranks("ddp", *SHORT, *PLAIN, processes=processes))
        assert len(one) == 2 and epochs(text) == [pytest.approx(row, abs=2e-4) for row in one]
    norm = ["BatchNorm2d(32)", "BatchNorm2d(32, momentum=1.0)"]
    assert epochs(done(ranks("ddp", *SHORT, *norm)))[-1][1] == accuracy("ddp", "ddp = ")


def test_ddp_resume():
    """Killed while it writes (torchrun restarts it), and once more, it ends as undisturbed."""

    def run(folder):
        return epochs(done(ranks("ddp_resume", flags=[*RESUME, folder])))

    path = changed("minimal/ddp_resume.py", "if __name__", TORN)
    job = torchrun(2, "--max-restarts", 1, path, *RESUME, "parts")
    wait_for("epoch 2", job)
    kill_all([job])
    assert re.findall(r"epoch (\d)", job.log.read_text())[:4] == list("0112")
    run("parts"), run("whole")
    os.remove("whole/model.pt")
    assert run("whole") == [] and helpers.same(weights("parts"), weights("whole"))
    assert "has a run" in done(ranks("ddp_resume", flags=RESUME[:4] + ["--output", "whole"]), 1)


def test_fsdp2():
    """Two processes, with half of each parameter, as one. Their weights load into a plain model."""
    one, two = (done(ranks("fsdp2", *FSDP2, processes=n)) for n in (1, 2))
    assert "has {1.0}" in one and two.count("has {0.5}") == 2
    assert epochs(two)[1] == pytest.approx(epochs(one)[1], abs=0.05)
    assert epochs(two)[1][1] == accuracy("fsdp2", "policy = ", "range(6)", "range(2)")

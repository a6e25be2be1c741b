"""One training run in six scripts: the same losses, exact evaluation, the flags, the data."""

import csv
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import pictures
from helpers import COUNTS, DDP, SCRIPTS, close, edited, metrics, parse, run, same, train, weights
from torch import nn
from torch.utils.data import DistributedSampler
from torchvision import datasets
from torchvision.transforms import functional

import train_single as single

# Processes, and --accumulate.
TWO = [("dp", 1, 2), ("ddp_spawn", 2, 1), ("ddp_multigpu_proc", 2, 1)]
TWO += [("ddp_torchrun", 2, 2), ("fsdp2", 2, 2)]
MORE = [*((name, count, 1) for name in [*DDP, "fsdp2"] for count in (1, 4))]


@pytest.mark.parametrize("runs", [TWO, pytest.param(MORE, marks=pytest.mark.slow)])
def test_same_losses(runs, data, fashion):
    """The same order too: what is left over after 10 steps are other images in each epoch. The norm
    of the whole gradient is clipped, once a step. 203 test images are evaluated on two ranks, or in
    micro-batches. MORE: `mlp`, and a folder with fewer test images than processes."""
    flags = [*fashion, "--epochs", 2, "--batch-size", 60, "--lr", 0.1, "--clip-norm", 0.1]
    if runs == MORE:
        flags += ["--dataset", data / "pictures", "--model", "mlp", "--workers", 0]
    flags += ["--output"]
    train(*flags, "single")
    for name, count, parts in runs:
        run(name, *flags, f"{name}-{count}", "--accumulate", parts, processes=count)
        close(f"{name}-{count}", "single")
    assert same(weights(f"ddp_spawn-{count}"), weights(f"ddp_multigpu_proc-{count}"))


def test_a_longer_run():
    """Warm-up and cosine; a run that is resumed with more steps follows the longer curve."""
    args = parse("--lr-schedule", "cosine", "--warmup-steps", 15)
    states = [part.state_dict() for part in single.build_optimizer(args, nn.Linear(1, 1), 10)]
    for steps, done in (10, range(10)), (40, range(10, 40)):
        both = optimizer, scheduler = single.build_optimizer(args, nn.Linear(1, 1), steps)
        [part.load_state_dict(state) for part, state in zip(both, states)]
        for step in done:
            cosine = (1 + math.cos(math.pi * step / (10 if step <= 10 else 40))) / 2
            rate = 0.001 * min(1, (step + 1) / 16) * cosine
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-12)
            optimizer.step()
            scheduler.step()
        states = [part.state_dict() for part in both]


WATCH = """
plain, plain_epoch, plain_start = build_optimizer, finish_epoch, EpochSampler.set_epoch
def set_epoch(sampler, epoch, start):
    tensors["workers' seed"] = torch.tensor(torch.initial_seed())
    plain_start(sampler, epoch, start)
def build_optimizer(args, model, steps):
    global tensors, watch
    tensors, watch = model.state_dict(), torch.profiler.profile()
    optimizer, scheduler = plain(args, model, steps)
    after = [int, watch.start, watch.stop, *[int] * steps]  # called one after each step
    optimizer.register_step_post_hook(lambda *_: after.pop(0)())
    return optimizer, scheduler
def finish_epoch(args, progress, sums):
    calls = {event.key: event.count for event in watch.key_averages() if "gloo:" in event.key}
    tensors["random"] = torch.rand(4)
    firsts = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in firsts.values():
        dist.broadcast(tensor, 0)
    differ = [name for name in tensors if not torch.equal(tensors[name], firsts[name])]
    print(f"{args.workers} workers, {calls}, differ: {differ}\\n", end="", flush=True)
    return plain_epoch(args, progress, sums)
EpochSampler.set_epoch = set_epoch
"""


@pytest.mark.parametrize("name", [*DDP[1:], pytest.param(DDP[0], marks=pytest.mark.slow)])
def test_two_processes(fashion, name):
    """A step communicates its gradients, in three buckets, and nothing else. All ranks end with the
    same parameters and batch norm averages, each draws its own random numbers, and the loader
    workers share the cores."""
    flags = [*fashion, "--model", "resnet18", "--epochs", 1, "--accumulate", 2, "--output", "out"]
    lines = run(name, *flags, processes=2, path=edited(name, more=WATCH)).splitlines()
    workers = min(16, max(1, single.cores // (1 if name == DDP[2] else 2)))
    for differ in [], ["workers' seed", "random"]:
        assert f"{workers} workers, {{'gloo:all_reduce': 3}}, differ: {differ}" in lines, lines


def test_flags_have_effect(fashion, monkeypatch):
    """--amp and --accumulate have it on evaluation too."""
    seen, plain = set(), single.loss_function

    def loss_function(outputs, labels):
        seen.add((outputs.dtype, len(labels)))
        return plain(outputs, labels)

    monkeypatch.setattr(single, "loss_function", loss_function)
    flags = [*fashion, "--epochs", 1, "--output"]
    train(*flags, "plain")
    columns = "epoch train_loss test_loss test_accuracy seconds samples_per_second peak_memory_mib"
    assert list(metrics("plain")[0]) == columns.split()
    train(*flags, "often", "--log-every", 3, "--checkpoint-minutes", 0)
    assert same(weights("often"), weights("plain"))  # what is said and saved changes nothing
    for flag in "--augment", "--amp", "--optimizer=adam", "--lr=0.01", "--seed=1", "--clip-norm=.1":
        train(*flags, flag[2:], flag)
        assert not same(weights("plain"), weights(flag[2:])), flag
    seen.clear()
    train(*flags, "repeat", "--repeat", 3, "--amp", "--accumulate", 4)
    assert weights("repeat")["conv1.weight"].shape == (6, 3, 5, 5)
    assert seen == {(torch.bfloat16, 16), (torch.bfloat16, 203 % 16)}


def test_a_metric_of_ones_own(fashion):
    """A key in finish_epoch is all that it takes, also in a run that was started without it."""
    line = '        "epoch": progress.epoch + 1,\n'
    path = edited("single", line, f'{line}        "mine": 7 * progress.epoch,\n')
    flags = [*fashion, "--output", "out", "--resume", "--epochs"]
    train(*flags, 1)
    for epochs in 2, 3:
        run("single", *flags, epochs, path=path)
    with open("out/metrics.csv") as file:
        assert [row["mine"] for row in csv.DictReader(file)] == ["", "7", "14"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="which torch.compile needs on a CPU")
def test_compile(fashion):
    """It changes little and says nothing, and compiles the loss too."""
    head = "def loss_function(outputs, labels):\n"
    check = "    assert torch.compiler.is_compiling() == torch.is_grad_enabled()\n"
    flags, path = [*fashion, "--epochs", 1, "--output"], edited("ddp_torchrun", head, head + check)
    train(*flags, "plain")
    text = run("ddp_torchrun", *flags, "out", "--compile", processes=2, path=path)
    assert "Warning" not in text
    close("out", "plain", 1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_check_of_the_set_up(name, work, monkeypatch):
    """--epochs 0: who is where, and nothing is written, nor left in the folder for temporary files.
    Old launchers pass --local_rank."""
    monkeypatch.setenv("TMPDIR", str(work))
    more = ["--local_rank", 0] if name in ("ddp_torchrun", "fsdp2") else []
    text = run(name, "--epochs", 0, *more, processes=COUNTS[name])
    backend = "none" if COUNTS[name] == 1 else "gloo"
    assert f"torch {torch.__version__}, backend {backend}" in text.splitlines()
    assert len(re.findall(r"^rank \d: host \S+, device cpu$", text, re.M)) == COUNTS[name]
    assert "destroy_process_group" not in text  # torch's warning that nobody called it
    assert {path.suffix for path in work.iterdir()} == {".log"}


def test_data(monkeypatch, data):
    """torchvision's images are (N, height, width, channels). --image-size is that of synthetic
    images, and resizes those of a folder."""
    images, labels = pictures(60, 3, 32)
    stored = SimpleNamespace(data=images, targets=labels.tolist())
    monkeypatch.setattr(datasets, "CIFAR10", lambda folder, train, download: stored)
    found = single.load_data(parse())[0].tensors
    assert np.array_equal(found[0], images.transpose(0, 3, 1, 2))
    assert np.array_equal(found[1], labels)
    for dataset, classes in (data / "pictures", 3), ("synthetic", 10):
        sets = single.load_data(parse("--image-size", 24, "--dataset", dataset))
        image = sets[0][0][0]
        assert (image.shape, image.dtype, sets[2]) == ((3, 24, 24), torch.uint8, classes)


def test_order():
    """DistributedSampler's, from any step on."""
    own = single.EpochSampler(range(10), 7, 1, 2)
    torchs = DistributedSampler(range(10), 2, 1, seed=7)
    own.set_epoch(3, start=2)
    torchs.set_epoch(3)
    assert list(own) == list(torchs)[2:]


def test_augment():
    """Each image is torchvision's flip, padding and crop at one of 81 places; half are flipped."""
    images, labels, flips = torch.rand(100, 3, 32, 32) + 1, torch.arange(100), 0
    results, returned = single.augment(images, labels)
    for image, result in zip(images, results):
        padded = [functional.pad(x, [4] * 4) for x in (image, functional.hflip(image))]
        places = [(x, i, j) for x in padded for i in range(9) for j in range(9)]
        found = [torch.equal(functional.crop(*place, 32, 32), result) for place in places]
        flips += found.index(True) >= 81
    assert 30 < flips < 70 and torch.equal(returned, labels)

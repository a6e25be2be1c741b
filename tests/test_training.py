"""One training run in five scripts: the same losses, exact evaluation, the flags, the data."""

import math
import os
import pickle
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import pictures
from helpers import *
from torch.utils.data import TensorDataset
from torchvision import datasets
from torchvision.transforms import functional


@pytest.fixture(scope="session")
def parts():
    """What train_single.py defines."""
    return runpy.run_path(script("single"), run_name="script")


def load(parts, *flags):
    args = parts["parser"].parse_args([str(flag) for flag in flags])
    return args, *parts["load_data"](args)


TWO = [("dp", 1), *((name, 2) for name in [*DDP, "fsdp2"])]
MORE = [*((name, count) for name in [*DDP, "fsdp2"] for count in (1, 4))]


@pytest.mark.parametrize("pairs", [TWO, pytest.param(MORE, marks=pytest.mark.slow)])
def test_same_losses(pairs, fashion):
    """The same order too: what is left over after 10 steps are other images in each epoch."""
    flags = [*fashion, "--epochs", 2, "--batch-size", 60, "--lr", 0.02, "--augment", "--output"]
    run("single", *flags, "single")
    for name, count in pairs:
        run(name, *flags, f"{name}-{count}", processes=count)
        close(f"{name}-{count}", "single")
    count = pairs[-1][1]  # DDP's runs have the same bits
    assert same(weights(f"ddp_spawn-{count}"), weights(f"ddp_torchrun-{count}"))


def test_accumulate(fashion):
    """N parts on one process are the run of one part, and of N / 2 parts on two; the norm of the
    whole gradient is clipped once a step; no evaluation has more samples at once than training."""
    flags = [*fashion, "--epochs", 2, "--batch-size", 60, "--augment", "--lr", 0.1]
    flags += ["--clip-norm", 0.01]
    look = "        x = F.max_pool2d(F.relu(self.conv1(x)), 2)\n"
    tell = '        print("forward", self.training, len(x), flush=True)\n'
    run("single", *flags, "--output", "one")
    run("single", *flags, "--output", "any", "--clip-norm", 0)
    assert not same(weights("any"), weights("one"))
    for name, parts, processes in ("single", 4, 1), ("dp", 4, 1), ("ddp_spawn", 2, 2):
        path = edited(name, look, tell + look)
        more = ["--output", name, "--accumulate", parts]
        text = run(name, *flags, *more, processes=processes, path=path)
        close(name, "one", 1e-5)
        assert not same(weights(name), weights("one"))  # sums in another order
        assert set(re.findall(r"forward True (\d+)", text)) == {"15"}
        assert max(map(int, re.findall(r"forward False (\d+)", text))) == 15


def test_a_longer_run(fashion):
    """--resume with more --epochs follows the longer curve, at each step; warm-up included. Loader
    workers start with another seed."""
    step = "            optimizer.step()\n"
    tell = '            print("rate", run_step, optimizer.param_groups[0]["lr"])\n'
    begin, seed = "    for epoch in range(state", "    print(torch.initial_seed())\n"
    path, text = edited("single", step, tell + step, begin, seed + begin), ""
    flags = [*fashion, "--output", "out", "--lr-schedule", "cosine", "--warmup-steps", 15]
    for epochs in 1, 4:
        text += run("single", *flags, "--epochs", epochs, "--resume", path=path)
    rates = {int(step): float(rate) for step, rate in re.findall(r"rate (\d+) (\S+)", text)}
    for step in range(1, 41):  # ten steps an epoch
        cosine = (1 + math.cos(math.pi * (step - 1) / (10 if step <= 10 else 40))) / 2
        assert rates[step] == pytest.approx(0.001 * min(1, step / 16) * cosine)
    assert weights("out", "last.pt")["optimizer"]["param_groups"][0]["lr"] < 1e-9
    assert "\n76\n" in text and "\n86\n" in text


def test_many_labels(parts, monkeypatch):
    """More of them than float32 can count."""
    many = 2**24 + 1
    monkeypatch.setitem(parts["prepare"].__globals__, "count_correct", lambda *_: (many, many))
    args, batch = parts["parser"].parse_args([]), (torch.zeros(1, 3, 8, 8), torch.tensor([0]))
    sums = parts["evaluate"](args, torch.nn.Flatten(), [batch, batch], torch.device("cpu"))
    assert sums[1:].tolist() == [2 * many, 2 * many]


TELL = """    for name, tensor in ddp.state_dict().items():
        tensors = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(tensors, tensor)
        assert all(torch.equal(tensors[0], other) for other in tensors), name
    draws = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(draws, torch.rand(4))
    assert not torch.equal(draws[0], draws[1]), "the same dropout masks"
"""


@pytest.mark.parametrize("name", [*DDP[:2], pytest.param(DDP[2], marks=pytest.mark.slow)])
def test_exact_evaluation(fashion, parts, name):
    """203 test images on 2 processes, recomputed; all ranks end with the same parameters, batch
    norm's statistics are rank 0's, and each rank draws numbers of its own. 130 images to train on
    are two whole batches of 64, though two would be left."""
    steps = "    epoch_steps = len(train_set)"
    cut = "    train_set = TensorDataset(*(t[:130] for t in train_set.tensors))\n"
    end = "    dist.barrier()  # none leaves"
    tell = "    print(torch.initial_seed(), 'workers', args.workers, flush=True)\n"
    begin = "    for epoch in range(state"
    path = edited(name, end, TELL + end, steps, cut + steps, begin, tell + begin)
    flags = [*fashion, "--model", "resnet18", "--epochs", 1, "--accumulate", 2]
    text = run(name, *flags, "--output", "out", processes=2, path=path)
    assert "epoch 1/1 step 2/2 " in text
    # The ranks' loader workers draw other numbers, and share the cores.
    workers = max(1, len(os.sched_getaffinity(0)) // (1 if name == DDP[2] else 2))
    assert {f"{seed} workers {min(16, workers)}" for seed in (76, 77)} <= set(text.splitlines())
    args, _, test_set, classes = load(parts, *flags)
    model = parts["build_model"](args, test_set[0][0], classes)
    model.load_state_dict(weights("out"))
    images, labels = test_set.tensors
    with torch.no_grad():
        outputs = model.eval()((images.float() - 127.5) / 64)
    row = metrics("out")[0]
    assert row["test_accuracy"] == (outputs.argmax(1) == labels).sum().item() / 203
    assert row["test_loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)


def test_flags_have_effect(fashion):
    flags = [*fashion, "--epochs", 1, "--output"]
    text = run("single", *flags, "plain", "--log-every", 5)
    pattern = r"epoch 1/1 step \d+/10 loss \d\.\d{4} \d+ samples/s \d+\.\d min left"
    assert len(re.findall(pattern, text)) == 2
    run("single", *flags, "often", "--log-every", 3, "--checkpoint-minutes", 0)
    assert same(weights("often"), weights("plain"))  # what is said and saved changes nothing
    for flag in "--augment", "--amp", "--optimizer=adam", "--lr=0.01", "--seed=1":
        run("single", *flags, flag[2:], flag)
        assert not same(weights("plain"), weights(flag[2:])), flag
    run("single", *flags, "repeat", "--repeat", 3)
    assert weights("repeat")["conv1.weight"].shape == (6, 3, 5, 5)
    head = "def loss_function(outputs, labels):\n"  # autocast covers evaluation, too
    path = edited("single", head, head + "    assert outputs.dtype == torch.bfloat16\n")
    run("single", *flags, "covered", "--amp", path=path)
    header = Path("plain/metrics.csv").read_text().splitlines()[0]
    columns = "epoch,train_loss,test_loss,test_accuracy,seconds,samples_per_second,peak_memory_mib"
    assert weights("plain", "last.pt")["metrics"] == metrics("plain") and header == columns


@pytest.mark.slow
def test_ddp_flags(fashion):
    """--compress-gradients and --compile, of the loss too, change little and say nothing."""
    flags = [*fashion, "--epochs", 1, "--output"]
    run("ddp_torchrun", *flags, "plain", processes=2)
    run("ddp_torchrun", *flags, "bf16", "--compress-gradients", processes=2)
    assert not same(weights("plain"), weights("bf16"))
    close("bf16", "plain", 1e-3)
    if shutil.which("g++"):  # which torch.compile needs on a CPU
        head = "def loss_function(outputs, labels):\n"
        compiled = "    assert torch.compiler.is_compiling() == torch.is_grad_enabled()\n"
        path = edited("single", head, head + compiled)
        assert "Warning" not in run("single", *flags, "compiled", "--compile", path=path)
        close("compiled", "plain", 1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_check_of_the_set_up(name):
    """--epochs 0: who is where, and nothing written."""
    count, flags = COUNTS[name], ["--epochs", 0]
    old = [*flags, "--local_rank", 0]  # by torch.distributed.launch
    by_torchrun = name == "ddp_torchrun" and [torchrun(count, script(name), *old)]
    text = done(by_torchrun or start(name, *flags, processes=count))
    assert re.search(r"^torch \S+, CUDA \S+, backend \w+$", text, re.M)
    assert len(re.findall(r"^rank \d: host \S+, device cpu$", text, re.M)) == count
    assert "destroy_process_group" not in text  # torch's warning that nobody called it
    assert not Path("runs").exists()


def test_cifar10(parts, monkeypatch):
    """As it lies on the disk; its checksums can't be those of the real files."""
    images, labels = pictures(60, 3, 32)
    folder = Path("cifar-10-batches-py")
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        part = slice(10 * i, 10 * i + 10)
        rows = images[part].transpose(0, 3, 1, 2).reshape(10, -1)
        (folder / name).write_bytes(pickle.dumps({"labels": labels[part].tolist(), "data": rows}))
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda path, md5=None: True)
    _, train_set, test_set, _ = load(parts, "--dataset", "cifar10", "--data-dir", ".")
    assert (len(train_set), len(test_set)) == (50, 10)
    found_images, found_labels = map(torch.cat, zip(train_set.tensors, test_set.tensors))
    assert np.array_equal(found_images, images.transpose(0, 3, 1, 2))
    assert np.array_equal(found_labels, labels)


def test_folder(parts, data):
    flags = ["--dataset", data / "pictures"]
    _, train_set, _, classes = load(parts, *flags, "--image-size", 24)
    image = train_set[0][0]
    assert (image.shape, image.dtype, classes) == ((3, 24, 24), torch.uint8, 3)
    for workers in 0, 2:  # two of the three test images are evaluated before the first step
        more = ["--workers", workers, "--batch-size", 1, "--epochs", 2, "--output", workers]
        run("single", *flags, "--augment", *more)
    assert same(weights("0"), weights("2"))
    close("0", "2")


def test_batches(parts):
    """uint8 is normalised, floats are left as they are; a TensorDataset's subclass is asked."""
    args, cpu = parts["parser"].parse_args(["--workers", "0"]), torch.device("cpu")
    images, labels = torch.randint(256, (9, 3, 8, 8), dtype=torch.uint8), torch.arange(9)
    prepared = parts["prepare"](args, (images, labels), cpu)[0]
    assert torch.equal(prepared, (images.float() - 127.5) / 64)
    assert torch.equal(parts["prepare"](args, (prepared, labels), cpu)[0], prepared)

    class Negative(TensorDataset):
        def __getitem__(self, index):
            return [-tensor[index] for tensor in self.tensors]

    for kind, sign, order in (TensorDataset, 1, [8, 1, 4]), (Negative, -1, [8, 1, 4]):
        loader = parts["make_loader"](args, kind(prepared, labels), order, 2, cpu)
        assert [batch[1].tolist() for batch in loader] == [[8 * sign, 1 * sign], [4 * sign]]


def test_augment(parts):
    """Each image is torchvision's flip, padding and crop at one of 81 places; half are flipped."""
    args = parts["parser"].parse_args(["--batch-size", "100"])
    images, flips = torch.rand(100, 3, 32, 32) + 1, 0
    whole = parts["augment"](args, images, 7)
    for image, result in zip(images, whole):
        padded = [functional.pad(x, [4] * 4) for x in (image, functional.hflip(image))]
        places = [(x, i, j) for x in padded for i in range(9) for j in range(9)]
        found = [torch.equal(functional.crop(*place, 32, 32), result) for place in places]
        flips += found.index(True) >= 81
    assert 30 < flips < 70
    for rank in range(4):  # a process does its part of that
        assert torch.equal(parts["augment"](args, images[rank::4], 7, rank, 4), whole[rank::4])
    assert not torch.equal(parts["augment"](args, images, 8), whole)

"""complete/train.py: the same losses on any number of processes, exact evaluation, the flags, the
user's functions, and what a run says and writes."""

import csv
import inspect
import itertools
import math
import os
import re
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import files as saving
import helpers
import loaders
import numpy as np
import pytest
import torch
import torch.distributed as dist
import train as script
from all_fixtures import pictures
from helpers import (
    COMPLETE,
    checkpoint,
    close,
    files,
    metrics,
    parse,
    run,
    same,
    together,
    train,
    weights,
)
from torch import nn
from torch.utils.data import TensorDataset
from torchvision import datasets
from torchvision.transforms import functional


def numbers(text):
    """Loss and norm of each progress line."""
    found = re.findall(r" loss ([\d.]+) lr .* gradient norm (\S+)", text)
    return [float(number) for line in found for number in line]


DOWNLOADS = """
import images
plain_load = images.load_torchvision
def load_torchvision(*words):
    if not os.path.exists("downloaded"):
        print(f"rank {dist.get_rank()} downloads\\n", end="", flush=True)
        time.sleep(0.3)
        open("downloaded", "w").close()
    return plain_load(*words)
images.load_torchvision = load_torchvision
"""


def test_same_losses(fashion, capsys):
    """On two and three processes, and in micro-batches: the same samples in the same order (what is
    left over after 10 steps are others in each epoch), one step of the gradient, clipped as a
    whole, and 203 test images counted once each. All print the same, too; one of them downloads."""
    flags = [*fashion, "--epochs", 2, "--batch-size", 60, "--lr", 0.5, "--clip-norm", 0.2]
    flags += ["--weight-decay", 0.01, "--output"]
    train(*flags, "one")
    printed = numbers(capsys.readouterr().out)
    more = f"import os, time{DOWNLOADS}"
    texts = together([*flags, "two"], [*flags, "halves", "--accumulate", 2], more=more)
    texts += together([*flags, "three", "--accumulate", 2], processes=3)
    assert re.findall(r"rank (\d) downloads", "".join(texts)) == ["0"], texts
    for text, output in zip(texts, ["two", "halves", "three"]):
        assert text.count("samples/s") == 2  # one process speaks
        assert numbers(text) == pytest.approx(printed, rel=0.02)
        close(output, "one")
    assert metrics("one")[0]["train_loss"] > metrics("one")[1]["train_loss"] + 1e-3
    args, device = parse(*flags, "one"), torch.device("cpu")
    images, labels = script.prepare(args, script.load_data(args)[1].tensors, device)
    model = script.build_model(args, images, 10)
    model.load_state_dict(weights("one"))
    correct = (model(images).argmax(1) == labels).sum().item()
    assert metrics("one")[1]["test_accuracy"] == correct / 203


def test_a_longer_run():
    """Warm-up and cosine; a run that is resumed with more steps follows the longer curve, from its
    first step on: the end of the shorter one is a rate of 0."""
    args = parse("--lr-schedule", "cosine", "--warmup-steps", 15)
    states = [part.state_dict() for part in script.build_optimizer(args, nn.Linear(1, 1), 10)]
    for steps, done in (10, range(10)), (40, range(10, 40)):
        both = optimizer, scheduler = script.build_optimizer(args, nn.Linear(1, 1), steps)
        [saving.load_part(part, state) for part, state in zip(both, states)]
        for step in done:
            cosine = (1 + math.cos(math.pi * step / steps)) / 2
            rate = 0.001 * min(1, (step + 1) / 16) * cosine
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-12)
            optimizer.step()
            scheduler.step()
        states = [part.state_dict() for part in both]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay(name):
    """A step by hand: weights decay, norms and biases (of one dimension) do not."""
    args = parse("--optimizer", name, "--lr", 0.1, "--weight-decay", 0.5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer, _ = script.build_optimizer(args, model, 10)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter) + 1
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        step = new.grad if name == "sgd" else 1  # Adam's first is a sign
        decay = 0.5 * old if old.ndim > 1 else 0
        assert torch.allclose(new, old - 0.1 * (step + decay), atol=1e-5), old.shape


WATCH = """
plain, plain_evaluate, counts = build_optimizer, evaluate, []
def build_optimizer(args, model, steps):
    optimizer, scheduler = plain(args, model, steps)
    count = dist.group.WORLD._get_sequence_number_for_group  # of collectives so far
    optimizer.register_step_post_hook(lambda *_: counts.append(count()))
    return optimizer, scheduler
def evaluate(args, model, loader, *words):
    if not isinstance(loader, list):  # of two samples, at the beginning
        total = sum(x.double().sum() for x in model.state_dict().values()).item()
        calls = counts[2] - counts[1]  # DDP's buckets are final from the third step on
        told = args.workers, calls, total, torch.rand(()).item()
        print("tells", *told, "\\n", end="", flush=True)
    return plain_evaluate(args, model, loader, *words)
"""


@pytest.mark.slow
def test_two_processes(data):
    """A step communicates its gradients, in two buckets, and nothing else. All ranks end with the
    same parameters and batch norm averages, each draws its own random numbers, and the loader
    workers share the cores."""
    flags = ["--dataset", data / "pictures", "--model", "shufflenet_v2_x0_5", "--epochs", 1]
    flags += ["--batch-size", 24, "--accumulate", 2]
    text = run(COMPLETE, *flags, more=WATCH)
    told = [line.split() for line in re.findall("^tells (.*)", text, re.M)]
    workers, calls, totals, draws = map(set, zip(*told, strict=True))
    assert workers == {str(min(28, max(1, script.cores() // 2)))} and calls == {"2"}, text
    assert len(told) == 2 and len(totals) == 1 and len(draws) == 2, text


def test_flags_have_effect(fashion, monkeypatch):
    """What is said and saved changes nothing; --amp and --accumulate have it on evaluation too."""
    flags = [*fashion, "--epochs", 1, "--batch-size", 160, "--output"]
    train(*flags, "plain")
    train(*flags, "often", "--log-every", 3, "--checkpoint-minutes", 0)
    assert same(weights("often"), weights("plain"))
    for flag in "--augment", "--optimizer=adamw", "--lr=0.01", "--seed=1", "--clip-norm=.1":
        train(*flags, flag[2:], flag)
        assert not same(weights("plain"), weights(flag[2:])), flag
    train(*flags, "halves", "--lr=0.01", "--accumulate", 2)
    close("halves", "lr=0.01", keys=["train_loss", "test_loss"])  # nothing clips a sum to the mean
    seen, plain = set(), script.loss_function

    def loss_function(outputs, labels):
        seen.add((torch.is_grad_enabled(), outputs.dtype, len(labels)))
        return plain(outputs, labels)

    monkeypatch.setattr(script, "loss_function", loss_function)
    train(*flags, "amp", "--amp", "--accumulate", 2)
    sizes = {True: [80], False: [2, 80, 203 % 80]}  # two samples are tried before the first step
    assert seen == {(grad, torch.bfloat16, size) for grad in sizes for size in sizes[grad]}


class Segments:
    """A label for each pixel, of which macro F1 and IoU are computed: functions of train.py that a
    user replaces."""

    def load_data(args):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(250, (843, 1, 6, 6), dtype=torch.uint8, generator=generator)
        both = TensorDataset(images, images[:, 0].long() // 25)
        return TensorDataset(*both[:640]), TensorDataset(*both[640:]), 10

    def build_model(args, inputs, classes):
        return nn.Sequential(nn.Conv2d(1, 20, 1), nn.ReLU(), nn.Conv2d(20, classes, 1))

    def count(outputs, labels):
        pairs = 10 * labels + outputs.argmax(1)
        confusion = torch.bincount(pairs.flatten(), minlength=100).view(10, 10)
        return {"labels": labels.numel(), "confusion": confusion}

    def metrics(sums):
        hits = sums["confusion"].diag()
        both = sums["confusion"].sum(0) + sums["confusion"].sum(1) + 1e-9
        return {"macro_f1": (2 * hits / both).mean(), "iou": (hits / (both - hits)).mean()}


def test_metrics_of_ones_own():
    """Of the whole test set, on two processes, in a run that began without them."""
    flags = ["--output", "out", "--lr", 0.05, "--image-size", 6, "--resume", "--epochs"]
    more = inspect.getsource(Segments)
    more += "load_data, build_model = Segments.load_data, Segments.build_model\n"
    train(*flags, 1, more=more)
    run(COMPLETE, *flags, 2, more=more + "count, metrics = Segments.count, Segments.metrics\n")
    args = parse(*flags, 1)
    test_set = Segments.load_data(args)[1]
    images, labels = script.prepare(args, test_set.tensors, torch.device("cpu"))
    model = Segments.build_model(args, images, 10)
    model.load_state_dict(weights("out"))
    wanted = Segments.metrics(Segments.count(model(images), labels))
    wanted["loss"] = script.loss_function(model(images), labels)
    first, last = csv.DictReader(Path("out/metrics.csv").read_text().splitlines())
    assert first["test_macro_f1"] == ""
    for name, value in wanted.items():
        assert float(last[f"test_{name}"]) == pytest.approx(value.item(), rel=1e-6) and value > 0.01


LINE = (
    r"epoch (\d)/2 step (\d+)/40 loss ([\d.]+) lr (\S+) gradient norm (\S+) \d+ samples/s .* left"
)
COLUMNS = "epoch,train_loss,test_loss,test_accuracy,seconds,samples_per_second,peak_memory_mib"


def test_what_a_run_says_and_writes(fashion, capsys, monkeypatch):
    """A line every 15 steps and at the end of an epoch, with the mean loss since the last one, the
    rate of the next step, and the gradient's norm of this one; a line and a row for the epoch."""
    norms, plain = [], torch.optim.SGD.step

    def step(optimizer, *words):
        cosine = (1 + math.cos(math.pi * len(norms) / 80)) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * cosine)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(nn.utils.get_total_norm(grads).item())
        return plain(optimizer, *words)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    flags = [*fashion, "--batch-size", 16, "--log-every", 15, "--lr-schedule", "cosine"]
    train(*flags, "--lr", 0.1, "--output", "out", "--epochs", 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}, backend gloo")
    assert re.fullmatch(r"rank 0: host \S+, device cpu", lines[1])
    assert {"640", "203", "10"} <= set(re.findall(r"\d+", lines[2]))  # samples and classes
    assert lines[3] == "out: 0 epochs and 0 steps are done"
    best = min(metrics("out"), key=lambda row: row["test_loss"])["epoch"]
    says = f"out/best.pt is of epoch {best:.0f}. It was chosen on the test images: on other images"
    assert lines[-2].startswith(says) and lines[-1] == "finished: out/model.pt"
    found = [re.fullmatch(LINE, line) for line in lines[4:-2]]
    assert list(map(bool, found)) == [True, True, True, False] * 2, lines
    assert Path("out/metrics.csv").read_text().splitlines()[0] == COLUMNS
    for i, row in enumerate(metrics("out")):
        own = [[float(x) for x in match.groups()] for match in found[4 * i : 4 * i + 3]]
        assert [line[:2] for line in own] == [[i + 1, 15], [i + 1, 30], [i + 1, 40]]
        mean = sum(steps * line[2] for steps, line in zip((15, 15, 10), own)) / 40
        assert mean == pytest.approx(row["train_loss"], abs=1e-4)
        for _, step, _, rate, norm in own:
            done = 40 * i + int(step)
            cosine = (1 + math.cos(math.pi * done / 80)) / 2
            assert rate == pytest.approx(0.1 * cosine, rel=0.1, abs=1e-4)
            assert norm == pytest.approx(norms[done - 1], rel=0.01)
        losses = "train loss {train_loss:.4f} test loss {test_loss:.4f}".format(**row)
        scores = "test accuracy {test_accuracy:.4f} {seconds:.1f} s".format(**row)
        assert lines[7 + 4 * i] == f"epoch {i + 1}: {losses} {scores}" and row["epoch"] == i + 1
        assert row["samples_per_second"] == pytest.approx(640 / row["seconds"])
    assert files("out") == ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]


@pytest.mark.slow
def test_float16(data, monkeypatch):
    """--amp on a GPU before Ampere: a gradient that overflows, as the first often do, is left out,
    and halves the loss's factor, with which a resumed run goes on. Gradients are clipped without
    the factor: the losses are those of bfloat16."""
    overflow, plain, plain_loss = [], script.build_optimizer, script.loss_function

    def build_optimizer(args, model, steps):
        model.conv1.weight.register_hook(lambda grad: grad * (overflow.pop() if overflow else 1))
        return plain(args, model, steps)

    def loss_function(outputs, labels):
        assert outputs.dtype == torch.float16
        return plain_loss(outputs, labels)

    flags = ["--dataset", data / "pictures", "--batch-size", 12, "--workers", 0, "--resume"]
    flags += ["--amp", "--clip-norm", 0.1, "--lr", 0.05, "--output"]
    train(*flags, "bfloat16", "--epochs", 2)
    monkeypatch.setattr(script, "uses_float16", lambda args: True)
    monkeypatch.setattr(script, "build_optimizer", build_optimizer)
    monkeypatch.setattr(script, "loss_function", loss_function)
    for output, epochs, first in ("whole", 2, [math.inf]), ("out", 1, [math.inf]), ("out", 2, []):
        overflow[:] = first
        train(*flags, output, "--epochs", epochs)
    assert same(weights("out"), weights("whole"))
    scalers = [checkpoint(output)["scaler"] for output in ("out", "whole")]
    assert scalers[0] == scalers[1] and scalers[0]["scale"] == 2.0**15
    assert scalers[0]["_growth_tracker"] == 15  # of 16 steps
    close("out", "bfloat16", 0.02, ("train_loss", "test_loss"))
    norms = []  # of momenta: the clipped gradients of the last steps
    for output in "out", "bfloat16":
        states = checkpoint(output)["optimizer"]["state"].values()
        momenta = [state["momentum_buffer"] for state in states]
        norms.append(nn.utils.get_total_norm(momenta).item())
    assert norms[0] == pytest.approx(norms[1], rel=0.2)


def test_which_half_precision(monkeypatch):
    """float16 where a GPU only emulates bfloat16."""
    args = parse("--amp")
    assert not script.uses_float16(args)  # on a CPU
    args.device = "cuda"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert not script.uses_float16(args)
    emulates = {"including_emulation": True}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: options == emulates)
    assert script.uses_float16(args)


COMPILED = """
def loss_function(outputs, labels):
    assert torch.compiler.is_compiling() == torch.is_grad_enabled()
    return F.cross_entropy(outputs, labels)
"""


@pytest.mark.long
@pytest.mark.skipif(
    not shutil.which("g++") or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="torch.compile needs g++ and Python.h on a CPU",
)
def test_compile(fashion):
    """It changes little and says nothing, and compiles the loss too."""
    flags = [*fashion, "--epochs", 1, "--output"]
    train(*flags, "plain")
    text = run(COMPLETE, *flags, "compiled", "--compile", more=COMPILED)
    assert "Warning" not in text
    close("compiled", "plain", 1e-3)


def test_check_of_the_set_up(work, monkeypatch):
    """--epochs 0: who is where, and nothing is written, nor left in the temporary folder."""
    monkeypatch.setenv("TMPDIR", str(work))
    text = run(COMPLETE, "--epochs", 0, processes=2)
    assert f"torch {torch.__version__}, backend gloo" in text.splitlines()
    assert len(re.findall(r"^rank \d: host \S+, device cpu$", text, re.M)) == 2
    assert "destroy_process_group" not in text  # torch's warning that nobody called it
    assert {path.suffix for path in work.iterdir()} == {".log"}


def test_loader_workers_of_a_large_machine(monkeypatch, capsys):
    """All cores of each process, up to 28; and /dev/shm need not hold two batches of each worker of
    both loaders, as those for testing fetch while those for training do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(224))
    more = "print('workers', args.workers)\n"
    for processes, workers in (4, 28), (16, 14):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        place = helpers.places(1)[0] | {"LOCAL_WORLD_SIZE": processes}
        place |= {"MASTER_PORT": helpers.free_port()}
        path = helpers.altered(COMPLETE, "    main(args)\n", f"    {more}    main(args)\n")
        helpers.here(path, "--device", "cpu", "--epochs", 0, **place)
        assert f"workers {workers}\n" in capsys.readouterr().out
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    ahead = (0, 0, 0), (1, 2, 2), (4, 8, 8), (16, 32, 16), (28, 28, 16)
    for workers, train_batches, test_batches in ahead:
        args, found = parse("--workers", workers), []
        for name in "train", "test":
            words = args, name, range(4), range(4), None, torch.device("cpu")
            loader = loaders.make_loader(*words)
            found.append(loader.num_workers * (loader.prefetch_factor or 0))
        assert found == [train_batches, test_batches]


def test_data(monkeypatch, data):
    """torchvision's images are (N, height, width, channels), and grey ones get three channels for
    its models. A folder's have a margin beyond --image-size."""
    images, labels = pictures(60, 3, 32)
    stored = SimpleNamespace(data=images, targets=labels.tolist(), classes=list("0123456789"))
    monkeypatch.setattr(datasets, "CIFAR10", lambda folder, train, download: stored)
    found = script.load_data(parse())[0].tensors
    assert np.array_equal(found[0], images.transpose(0, 3, 1, 2))
    assert np.array_equal(found[1], labels)
    grey = parse("--dataset", "fashion-mnist", "--data-dir", data, "--model", "resnet18")
    assert script.load_data(grey)[1].tensors[0].shape == (203, 3, 28, 28)
    for size, dataset, stored in (24, "synthetic", 24), (70, data / "pictures", 80):
        train_set, _, _ = script.load_data(parse("--image-size", size, "--dataset", dataset))
        assert train_set[0][0].shape == (3, stored, stored)


def as_it_is(args, batch, device, train=False):
    return batch


def test_order(monkeypatch):
    """Each rank has its share of it, from any step on, in whole steps, and tests on its own share.
    Two seeds, and two epochs of each, have nothing in common."""
    orders = set()
    for seed, epoch in itertools.product(range(4), repeat=2):
        args = parse("--seed", seed, "--batch-size", 4, "--workers", 0)
        whole = tuple(script.epoch_order(args, range(11), epoch).tolist())
        assert sorted(whole) == [*range(11)] and whole not in orders
        orders.add(whole)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        for rank in 0, 1:
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            words = args, range(11), script.epoch_order, script.collate, as_it_is
            loader = script.TrainLoader(*words, torch.device("cpu"))
            assert loader.steps_per_epoch == 2
            for first in 0, 1:
                found = torch.cat(list(loader.batches(epoch, first))).tolist()
                assert found == [*whole[4 * first + rank : 8 : 2]]
            tested = script.TestLoader(args, range(11), script.collate, as_it_is, loader.device)
            assert torch.cat(list(tested)).tolist() == [*range(rank, 11, 2)]


@pytest.mark.parametrize("size", [14, 20, 40])
def test_random_crops(size):
    """Pixels say where they are: each crop has a zoom of 0.6 to 1, lies in the image, and half of
    them are flipped; also where images are smaller than --image-size, and are enlarged before."""
    torch.manual_seed(1)  # of every twelfth seed, a crop of 14 is bent more than is allowed below
    columns, rows = torch.meshgrid(torch.arange(30), torch.arange(20), indexing="xy")
    images = torch.stack([columns, rows]).byte().expand(300, 2, 20, 30)
    args, batch = parse("--image-size", size, "--augment"), (images, torch.arange(300))
    crops, labels = script.prepare(args, batch, torch.device("cpu"), train=True)
    assert crops.shape == (300, 2, size, size) and torch.equal(labels, batch[1])
    crops = crops * 58 + 115  # pixels again
    middle = size // 2
    across = (crops[:, 0, middle, middle] - crops[:, 0, middle, middle - 1]) * size / 30
    down = (crops[:, 1, middle, middle] - crops[:, 1, middle - 1, middle]) * size / 20
    near = 1e-3 if size == 20 else 0.02  # resizing bends what lies at the sides
    assert torch.allclose(across.abs(), down, atol=near)
    assert 0.6 - near < down.min() < 0.65 and 0.95 < down.max() < 1 + near
    assert 110 < (across < 0).sum() < 190
    for channel, side in (0, 30), (1, 20):
        around = slice(middle - 1, middle + 1)
        center = crops[:, channel, around, around].mean((1, 2)) + 0.5
        low, high = center - down * side / 2, center + down * side / 2
        assert -0.01 - near < low.min() < 0.5 and side - 0.5 < high.max() < side + 0.01 + near


@pytest.mark.parametrize(
    "side, size, before", [(256, 32, 32), (256, 64, 73), (70, 64, 70), (30, 64, 64), (20, 20, 20)]
)
def test_the_middle_in_the_test(side, size, before):
    """Of a Dataset's large images the test sees as much as of a folder's, though they are resized
    before; small ones are enlarged, so that a model sees --image-size, whatever the images."""
    images = torch.randint(256, (2, 3, side, side + 20), dtype=torch.uint8)
    args = parse("--image-size", size, "--augment")
    found, _ = script.prepare(args, (images, torch.zeros(2)), torch.device("cpu"))
    wanted = images.float() if before == side else functional.resize(images.float(), before)
    wanted = functional.center_crop(wanted, [size, size])
    assert torch.allclose(found * 58 + 115, wanted, atol=1e-3)

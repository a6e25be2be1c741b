"""complete/train.py: the same losses on any number of processes, exact evaluation, the flags, the
user's functions, and what a run says and writes."""

import csv
import itertools
import math
import re
import runpy
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import checkpoint as saving
import numpy as np
import pytest
import start as starting
import torch
import torch.distributed as dist
import train as script
from conftest import pictures
from helpers import (
    COMPLETE,
    altered,
    checkpoint,
    close,
    files,
    metrics,
    parse,
    run,
    same,
    together,
    told,
    train,
    weights,
)
from torch import nn
from torchvision import datasets, models
from torchvision.transforms import functional

RUNS = {2: [1, 2], 3: [2]}  # processes, and runs on these with --accumulate


def test_same_losses(fashion):
    """The same order too: what is left over after 10 steps are other images in each epoch. The norm
    of the whole gradient is clipped, once a step. 203 test images are counted once each, on three
    ranks, or in micro-batches."""
    flags = [*fashion, "--epochs", 2, "--batch-size", 60, "--lr", 0.5, "--clip-norm", 0.2]
    flags += ["--weight-decay", 0.01, "--output"]
    train(*flags, "one")
    for count, parts in RUNS.items():
        outputs = [f"{count}-{part}" for part in parts]
        runs = [[*flags, name, "--accumulate", part] for name, part in zip(outputs, parts)]
        for text, output in zip(together(*runs, processes=count), outputs):
            assert text.count("samples/s") == len(metrics(output))  # one process speaks
            close(output, "one")
    assert metrics("one")[0]["train_loss"] > metrics("one")[1]["train_loss"] + 1e-3
    args, device = parse(*flags, "one"), torch.device("cpu")
    images, labels = script.prepare(args, script.load_data(args)[1].tensors, device)
    model = script.build_model(args, images, 10)
    model.load_state_dict(weights("one"))
    correct = (model(images).argmax(1) == labels).sum().item()
    assert metrics("one")[1]["test_accuracy"] == correct / 203


@pytest.mark.slow
def test_same_losses_of_a_folder(data):
    """With loader workers."""
    flags = ["--dataset", data / "pictures", "--model", "mlp", "--image-size", 20, "--workers", 1]
    flags += ["--epochs", 2, "--batch-size", 12, "--lr", 0.1, "--output"]
    train(*flags, "one")
    run(COMPLETE, *flags, "three", processes=3)
    close("three", "one")


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
        decay = 0.5 * (old.ndim > 1)
        step = (
            new.grad + decay * old if name == "sgd" else 1 + decay * old
        )  # Adam's first is a sign
        assert torch.allclose(new, old - 0.1 * step, atol=1e-5), old.shape


WATCH = """
plain, plain_evaluate = build_optimizer, evaluate
def build_optimizer(args, model, steps):
    global tensors, counts
    tensors, counts = model.state_dict(), []  # of collectives, after each step
    count_all = dist.group.WORLD._get_sequence_number_for_group
    optimizer, scheduler = plain(args, model, steps)
    optimizer.register_step_post_hook(lambda *_: counts.append(count_all()))
    return optimizer, scheduler
def evaluate(args, model, loader, *words):
    if not isinstance(loader, list):  # not the one sample at the beginning
        tensors["random"] = torch.rand(4)
        calls = counts[2] - counts[1]  # DDP's buckets are final from the third step on
        firsts = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in firsts.values():
            dist.broadcast(tensor, 0)
        differ = [name for name in tensors if not torch.equal(tensors[name], firsts[name])]
        print(f"{args.workers} workers, {calls} calls, differ: {differ}\\n", end="", flush=True)
    return plain_evaluate(args, model, loader, *words)
"""


@pytest.mark.slow
def test_two_processes(data):
    """A step communicates its gradients, in two buckets, and nothing else. All ranks end with the
    same parameters and batch norm averages, each draws its own random numbers, and the loader
    workers share the cores."""
    flags = ["--dataset", data / "pictures", "--model", "shufflenet_v2_x0_5", "--epochs", 1]
    flags += ["--batch-size", 24, "--accumulate", 2]
    lines = run(COMPLETE, *flags, more=WATCH).splitlines()
    workers = min(16, max(1, script.cores() // 2))
    for differ in [], ["random"]:
        assert f"{workers} workers, 2 calls, differ: {differ}" in lines, lines


BATCHES = """
plain = loss_function
def loss_function(outputs, labels):
    print("learns" if torch.is_grad_enabled() else "tests", outputs.dtype, len(labels))
    return plain(outputs, labels)
"""


def test_flags_have_effect(fashion, capsys):
    """--amp and --accumulate have it on evaluation too."""
    flags = [*fashion, "--epochs", 1, "--output"]
    train(*flags, "plain")
    train(*flags, "often", "--log-every", 3, "--checkpoint-minutes", 0)
    assert same(weights("often"), weights("plain"))  # what is said and saved changes nothing
    for flag in "--augment", "--optimizer=adamw", "--lr=0.01", "--seed=1", "--clip-norm=.1":
        train(*flags, flag[2:], flag)
        assert not same(weights("plain"), weights(flag[2:])), flag
    capsys.readouterr()
    train(*flags, "amp", "--amp", "--accumulate", 8, more=BATCHES)
    seen = re.findall(r"^(learns|tests) torch.bfloat16 (\d+)$", capsys.readouterr().out, re.M)
    # One sample is tried before the first step.
    sizes = {"learns": [8], "tests": [1, 8, 203 % 8]}
    assert {*seen} == {(what, str(size)) for what in sizes for size in sizes[what]}


SEGMENTS = """
def load_data(args):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(250, (843, 1, 6, 6), dtype=torch.uint8, generator=generator)
    labels = images[:, 0].long() // 25
    return TensorDataset(images[:640], labels[:640]), TensorDataset(images[640:], labels[640:]), 10
def build_model(args, inputs, classes):
    return nn.Sequential(nn.Conv2d(1, 20, 1), nn.ReLU(), nn.Conv2d(20, classes, 1))
"""
CONFUSION = """
def count(outputs, labels):
    pairs = 10 * labels + outputs.argmax(1)
    confusion = torch.bincount(pairs.flatten(), minlength=100).view(10, 10)
    return {"labels": labels.numel(), "confusion": confusion}
def metrics(sums):
    hits = sums["confusion"].diag()
    both = sums["confusion"].sum(0) + sums["confusion"].sum(1) + 1e-9
    return {"macro_f1": (2 * hits / both).mean(), "iou": (hits / (both - hits)).mean()}
"""


def test_metrics_of_ones_own(fashion):
    """Macro F1 and IoU of a label for each pixel, by replacing two functions in a run that began
    without them: those of the whole test set, on one process and on two."""
    flags = [*fashion, "--output", "out", "--lr", 0.05, "--image-size", 6, "--resume", "--epochs"]
    run(COMPLETE, *flags, 1, processes=0, more=SEGMENTS)
    for epochs, processes in (2, 2), (3, 0):
        run(COMPLETE, *flags, epochs, processes=processes, more=SEGMENTS + CONFUSION)
        path = altered(COMPLETE, more=SEGMENTS + CONFUSION)
        own = SimpleNamespace(**runpy.run_path(str(path)))
        args, (_, test_set, _) = parse(*flags, 1), own.load_data(parse(*flags, 1))
        images, labels = own.prepare(args, test_set.tensors, torch.device("cpu"))
        model = own.build_model(args, images, 10)
        model.load_state_dict(weights("out"))
        sums = {name: torch.as_tensor(x) for name, x in own.count(model(images), labels).items()}
        rows = list(csv.DictReader(Path("out/metrics.csv").read_text().splitlines()))
        assert len(rows) == epochs and rows[0]["macro_f1"] == ""
        for name, value in own.metrics(sums).items():
            assert float(rows[-1][name]) == pytest.approx(value.item(), rel=1e-6) and value > 0.01


LINE = (
    r"epoch (\d)/3 step (\d+)/40 loss ([\d.]+) lr (\S+) gradient norm (\S+) \d+ samples/s .* left"
)
COLUMNS = "epoch train_loss test_loss test_accuracy seconds samples_per_second peak_memory_mib"


def test_what_a_run_says_and_writes(fashion, capsys, monkeypatch):
    """A line every 15 steps and at the end of an epoch, and one for the epoch."""
    norms, plain = [], torch.optim.SGD.step

    def step(optimizer, *words):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(nn.utils.get_total_norm(grads))
        return plain(optimizer, *words)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    flags = [*fashion, "--batch-size", 16, "--log-every", 15, "--lr-schedule", "cosine"]
    train(*flags, "--lr", 0.1, "--output", "out", "--epochs", 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}, backend gloo")
    assert re.fullmatch(r"rank 0: host \S+, device cpu", lines[1])
    assert {"640", "203", "10"} <= set(re.findall(r"\d+", lines[2]))  # samples and classes
    assert lines[3] == "out: 0 epochs and 0 steps are done"
    assert lines[-1] == "finished: out/model.pt"
    found = [re.fullmatch(LINE, line) for line in lines[4:-1]]
    assert list(map(bool, found)) == [True, True, True, False] * 3, lines
    for i, row in enumerate(metrics("out")):
        own = [[float(x) for x in match.groups()] for match in found[4 * i : 4 * i + 3]]
        assert [line[:2] for line in own] == [[i + 1, 15], [i + 1, 30], [i + 1, 40]]
        mean = sum(steps * line[2] for steps, line in zip((15, 15, 10), own)) / 40
        assert mean == pytest.approx(row["train_loss"], abs=1e-4)
        for _, step, _, rate, norm in own:
            done = 40 * i + int(step)
            cosine = (1 + math.cos(math.pi * done / 120)) / 2
            assert rate == pytest.approx(0.1 * cosine, rel=0.1, abs=1e-4)
            assert norm == pytest.approx(norms[done - 1].item(), rel=0.01)
        shown = [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in COLUMNS.split()[1:4]]
        assert lines[7 + 4 * i] == f"epoch {i + 1}: {' '.join(shown)} {row['seconds']:.1f} s"
        assert row["samples_per_second"] == pytest.approx(640 / row["seconds"])
    header, *rows = Path("out/metrics.csv").read_text().splitlines()
    assert header == COLUMNS.replace(" ", ",") and len(rows) == 3
    assert [row["epoch"] for row in metrics("out")] == [1, 2, 3]
    assert metrics("out")[2]["test_loss"] < metrics("out")[0]["test_loss"] - 0.1
    assert files("out") == ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]
    halfway = saving.Run(parse("--epochs", 3), [], None)  # 128 samples/s, 60 steps left
    vars(halfway).update(epoch=1, step=20, seconds=10.0, steps_per_epoch=40)
    vars(halfway).update(line_step=10, line_loss=20.0)
    line = halfway.progress_line(norm=0.1, lr=1.0)
    assert " loss 2.0000 " in line and line.endswith(" 128 samples/s 0.5 min left")


def test_best(fashion):
    """The weights after the epoch with the lowest test loss so far, which is told here."""
    losses, after = [3, 1, 2, 1.5, 0], []
    for epoch, best in enumerate([0, 1, 1, 1, 4]):
        more = told(losses[epoch])
        train(*fashion, "--output", "out", "--resume", "--epochs", epoch + 1, more=more)
        after.append(weights("out"))
        assert same(weights("out", "best.pt"), after[best])
    assert not same(after[3], after[4])
    train(*fashion, "--output", "out", "--overwrite", "--epochs", 4, more=told(*losses))
    assert same(weights("out", "best.pt"), after[1])


@pytest.fixture
def downloaded(monkeypatch):
    """Puts a file where torchvision keeps a model's weights, here random. Returns these."""
    monkeypatch.setenv("TORCH_HOME", str(Path("home").resolve()))

    def downloaded(name, **options):
        model = models.get_model(name, **options).state_dict()
        url = models.get_model_weights(name).DEFAULT.url
        file = Path("home/hub/checkpoints", url.rpartition("/")[2])
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model, file)
        return model

    return downloaded


def test_pretrained(fashion, downloaded, capsys):
    """All but the last layer, which is named, are torchvision's, on all ranks. They are read for a
    new run alone."""
    name = "shufflenet_v2_x0_5"
    pretrained = downloaded(name)
    flags = [*fashion, "--model", name, "--pretrained", "--lr", 0, "--batch-size", 320]
    flags += ["--output", "out", "--resume", "--epochs"]
    text = run(COMPLETE, *flags, 1)
    assert text.count("--pretrained: new and random are fc.weight, fc.bias\n") == 1
    shutil.rmtree("home")
    train(*flags, 2)  # it could not be read again
    trained = {key: w for key, w in weights("out").items() if "running_" not in key}
    for key, weight in trained.items():
        if not key.startswith("fc.") and "num_batches" not in key:
            assert torch.equal(weight, pretrained[key]), key
    assert trained["fc.weight"].shape == (10, 1024)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1"])
def test_pretrained_that_does_not_fit(downloaded, name, capsys):
    """Any other tensor than the last layer's: as the positions of a transformer for larger images,
    which would stay random."""
    downloaded(name)
    weights = starting.read_pretrained(name)["model"]
    for layers, says in {0: "", 1: ".weight", 2: ".weight"}.items():
        model = models.get_model(name, num_classes=7)
        convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
        for part in convolutions[:layers]:
            part.weight = nn.Parameter(torch.zeros(2, 2))
        problem = starting.load_fitting(model, weights, "--pretrained", new_head=True)
        assert (says in problem and "is not of this model" in problem) if says else problem == ""


def test_init(fashion):
    """The weights of another run, whichever of its files has them, or of a plain state_dict, on all
    ranks; the file is not needed to resume."""
    train(*fashion, "--epochs", 1, "--output", "first")
    torch.save(weights("first"), "plain.pt")
    torch.save(weights("first"), "legacy.pt", _use_new_zipfile_serialization=False)
    flags = [*fashion, "--lr", 0, "--seed", 1, "--epochs", 1, "--init"]
    files = ["first/model.pt", "first/best.pt", "first/checkpoint.pt", "plain.pt", "legacy.pt"]
    outputs = [Path(file).stem for file in files]
    runs = [[*flags, file, "--output", output] for file, output in zip(files, outputs)]
    texts = together(*runs)
    assert ["has no normalization" in text for text in texts] == [False] * 3 + [True] * 2
    shutil.move("first", "gone")
    train(*flags, "first/best.pt", "--resume", "--output", "best", "--epochs", 2)
    for output in outputs:
        assert same(weights(output), weights("gone"))


AS_CUDA = """
plain_join = join
def join(args):  # from there on the CPU is passed off as a GPU
    device = plain_join(args)
    args.device = "cuda"
    return device
torch.accelerator.max_memory_allocated = lambda: 7 * 2**20
torch.cuda.is_bf16_supported = lambda including_emulation=True: True
"""
FLOAT16 = """
add("--overflow", type=int, default=-1)
MAY_CHANGE.append("overflow")
plain_build, plain_loss = build_optimizer, loss_function
torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation
def loss_function(outputs, labels):
    assert outputs.dtype == torch.float16
    return plain_loss(outputs, labels)
def build_optimizer(args, model, steps):
    done = iter([math.inf if i == args.overflow else 1 for i in range(200)])
    model.conv1.weight.register_hook(lambda grad: grad * next(done))
    return plain_build(args, model, steps)
"""


@pytest.mark.slow
def test_float16(fashion):
    """--amp on a GPU before Ampere, as which the CPU is passed off: a gradient that overflows, as
    the first often do, is left out, and halves the loss's factor; a resumed run goes on with it."""
    flags = [*fashion, "--batch-size", 16, "--amp", "--clip-norm", 0.1, "--lr", 0.05, "--output"]
    runs = [[*flags, "whole", "--epochs", 2, "--overflow", 0]]
    runs += [[*flags, "out", "--epochs", 1, "--overflow", 0]]
    runs += [[*flags, "out", "--epochs", 2, "--resume"]]
    together(*runs, more=AS_CUDA + FLOAT16, processes=0)
    train(*flags, "bfloat16", "--epochs", 2)
    assert same(weights("out"), weights("whole"))
    scalers = [checkpoint(output)["scaler"] for output in ("out", "whole")]
    assert scalers[0] == scalers[1] and scalers[0]["scale"] == 2.0**15
    assert scalers[0]["_growth_tracker"] == 79
    # Clipped as it is without the factor.
    close("out", "bfloat16", 0.02, ("train_loss", "test_loss"))
    assert metrics("out")[0]["peak_memory_mib"] == 7


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


def test_data(monkeypatch, data):
    """torchvision's images are (N, height, width, channels), and grey ones get three channels for
    its models. --image-size is that of synthetic images, and of a folder's, with a margin."""
    images, labels = pictures(60, 3, 32)
    stored = SimpleNamespace(data=images, targets=labels.tolist(), classes=list("0123456789"))
    monkeypatch.setattr(datasets, "CIFAR10", lambda folder, train, download: stored)
    found = script.load_data(parse())[0].tensors
    assert np.array_equal(found[0], images.transpose(0, 3, 1, 2))
    assert np.array_equal(found[1], labels)
    grey = parse("--dataset", "fashion-mnist", "--data-dir", data, "--model", "resnet18")
    assert script.load_data(grey)[1].tensors[0].shape == (203, 3, 28, 28)
    for side, dataset, classes, stored in (
        (24, "synthetic", 10, 24),
        (24, data / "pictures", 3, 24),
        (70, data / "pictures", 3, 80),
    ):
        sets = script.load_data(parse("--image-size", side, "--dataset", dataset))
        image = sets[0][0][0]
        assert (image.shape, image.dtype, sets[2]) == ((3, stored, stored), torch.uint8, classes)
    own = models.list_models(module=models)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name in own:
        reason = script.check_flags(parse("--model", name))
        assert ("several outputs" in reason) == (name in ("googlenet", "inception_v3"))
    model = script.build_model(parse("--model", "squeezenet1_1"), torch.zeros(1, 3, 32, 32), 7)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7) and {"vit_b_16", "resnet50"} < set(own)


def test_order(monkeypatch):
    """Each rank has its share of it, from any step on, in whole steps. Two seeds, and two epochs of
    each, have nothing in common."""
    orders = set()
    for seed, epoch in itertools.product(range(4), repeat=2):
        args = parse("--seed", seed, "--batch-size", 4, "--workers", 0)
        whole = tuple(script.epoch_order(args, range(11), epoch).tolist())
        assert sorted(whole) == [*range(11)] and whole not in orders
        orders.add(whole)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        for rank in 0, 1:
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            words = args, range(11), script.epoch_order, script.collate, torch.device("cpu")
            loader = script.TrainLoader(*words)
            assert loader.steps_per_epoch == 2
            for first in 0, 1:
                found = torch.cat(list(loader.batches(epoch, first))).tolist()
                assert found == [*whole[4 * first + rank : 8 : 2]]


@pytest.mark.parametrize("size", [14, 20, 40])
def test_crops(size):
    """Of the middle in the test, and at random in training; of --image-size, also where images are
    smaller. Pixels say where they are: each crop has a zoom of 0.6 to 1, lies in the image, and
    half of them are flipped."""
    torch.manual_seed(1)  # of every twelfth seed, a crop of 14 is bent more than is allowed below
    device = torch.device("cpu")
    columns, rows = torch.meshgrid(torch.arange(30), torch.arange(20), indexing="xy")
    images = torch.stack([columns, rows]).byte().expand(300, 2, 20, 30)
    batch, shape = (images, torch.arange(300)), (300, 2, size, size)
    args = parse("--image-size", size, "--augment")
    middle, labels = script.prepare(args, batch, device)
    floats = images.float()
    if size != 20:  # first resized: the middle shows most of the image, as crops in training
        floats = functional.resize(floats, size)
    wanted = functional.center_crop(floats, shape[2:])
    assert torch.allclose(middle * 58 + 115, wanted, atol=1e-4) and torch.equal(labels, batch[1])
    crops = script.prepare(args, batch, device, train=True)[0] * 58 + 115
    assert crops.shape == shape
    height, width = shape[2:]
    y, x = height // 2, width // 2
    across = (crops[:, 0, y, x] - crops[:, 0, y, x - 1]) * width / 30
    down = (crops[:, 1, y, x] - crops[:, 1, y - 1, x]) * height / 20
    near = 1e-3 if size == 20 else 0.02  # resizing bends what lies at the sides
    assert torch.allclose(across.abs(), down, atol=near)
    assert 0.6 - near < down.min() < 0.65 and 0.95 < down.max() < 1 + near
    assert 110 < (across < 0).sum() < 190
    for channel, side in (0, 30), (1, 20):
        center = crops[:, channel, y - 1 : y + 1, x - 1 : x + 1].mean((1, 2)) + 0.5
        low, high = center - down * side / 2, center + down * side / 2
        assert -0.01 - near < low.min() < 0.5 and side - 0.5 < high.max() < side + 0.01 + near


SIDES = [(256, 32, 32), (256, 64, 73), (70, 64, 70), (30, 64, 64)]


@pytest.mark.parametrize("side, size, before", SIDES)
def test_images_are_resized_before_the_crop(side, size, before):
    """Of a Dataset's large images the test sees as much as of a folder's; small ones are enlarged,
    so that a model sees --image-size, whatever the images."""
    images = torch.randint(256, (2, 3, side, side + 20), dtype=torch.uint8)
    args = parse("--image-size", size)
    found, _ = script.prepare(args, (images, torch.zeros(2)), torch.device("cpu"))
    wanted = images.float() if before == side else functional.resize(images.float(), before)
    wanted = functional.center_crop(wanted, [size, size])
    assert torch.allclose(found * 58 + 115, wanted, atol=1e-3)

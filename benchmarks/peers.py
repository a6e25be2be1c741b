"""The training of this collection beside that of others: the same model, images, batch, precision
and number of processes, side by side, as Markdown tables.

pip install accelerate lightning timm      # the rows of those that are missing are left out
OMP_NUM_THREADS=1 python benchmarks/peers.py                    # all tables; on all GPUs, if any
OMP_NUM_THREADS=1 python benchmarks/peers.py loop --processes 1 # one table, one process
python benchmarks/peers.py --model resnet50 --image-size 224 --batch-size 256 --amp --workers 16
    loop     the loop alone, on one batch that is on the device
    step     the same with a tiny model, of which nearly all of a step is Python
    epochs   two epochs with the loader that each of them has for CIFAR-10, of random images
    loaders  the loaders alone, on JPEG files

A round runs each contestant once, in processes of its own, and begins with another one. A figure is
the median over the rounds (smallest to largest). "train_single.py x it" is how many times as fast
that script is as the row's contestant, in the same round. Speeds and CPU time are of the second
epoch, from the end of its first step to that of its last one. On CPUs, all contestants keep freed
memory (MALLOC_TRIM_THRESHOLD_): glibc would return it to the system in each step of some of them,
by the order in which they allocate, and that alone could make a loop twice as slow.

The contestants: this collection's scripts, with the model and the order of the samples replaced, as
they must be the same for all; Accelerate; Lightning, by Fabric and by Trainer; the loop of most
tutorials, with `loss.item()` in each step; timm's loader and optimizer in such a loop. timm's
train.py and torchvision's references/classification are in no package; accuracy.py runs them.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import resource
import runpy
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import image_loading
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    COMPLETE,
    FAILED,
    GPUS,
    NO_TIME,
    ROOT,
    end_on_sigterm,
    end_part,
    row,
    run_commands,
    seconds_left,
    spread,
    table,
    write_altered,
)
from make_images import SIZES, make_folder
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

sys.path.insert(0, str(ROOT))
import train_single  # noqa: E402

ALONE, SMALL = "train_single.py", "train_ddp_torchrun.py"  # the first on one process
BARE = "bare step"
PACKAGES = {"Accelerate": "accelerate", "Lightning Fabric": "lightning"}
PACKAGES |= {"Lightning Trainer": "lightning", "timm": "timm"}
MEAN, STD = 0.5, 0.25  # of pixels from 0 to 1, as in the small scripts
LR = 0.01
PARTS = "loop", "step", "epochs", "loaders"
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


# ---- What all contestants share ------------------------------------------------------------------
class Images(datasets.CIFAR10):
    """In the place of CIFAR-10: noise around a color for each class."""

    count, side = 10_000, 32

    def __init__(self, root, train=True, transform=None, download=False):
        random, count = np.random.default_rng(train), self.count if train else 100
        labels = np.arange(count) % 10
        colors = np.random.default_rng(2).integers(100, 156, (10, 1, 1, 3))[labels]
        noise = random.integers(-100, 100, (count, self.side, self.side, 3), dtype=np.int16)
        self.data, self.targets = (colors + noise).astype(np.uint8), labels.tolist()
        self.transform, self.target_transform = transform, None
        self.classes = list("0123456789")


class Arrays(Images):
    """The same for timm's collate function, which takes uint8 arrays."""

    def __getitem__(self, i):
        return self.transform(Image.fromarray(self.data[i])), self.targets[i]


def build_model(name):
    torch.manual_seed(0)  # the same weights for all
    if name == "mlp":  # of part `step`
        return nn.Sequential(nn.Flatten(), nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 10))
    return train_single.build_model(name, 10)


class Meter:
    """Notes when the optimizer has stepped, in whichever loop, by a hook of torch."""

    def __init__(self, steps):
        self.steps, self.count, self.report = steps, 0, {}
        register_optimizer_step_post_hook(self.stepped)

    def stepped(self, *_):
        self.count += 1
        if self.count == 1:
            self.report["first step"] = time.time()
        elif self.count == self.steps + 1:
            self.begin = self.clocks()
        elif self.count == 2 * self.steps:
            names = "seconds", "CPU seconds"
            spent = [end - begin for begin, end in zip(self.begin, self.clocks())]
            self.report |= dict(zip(names, spent))
            self.report["MiB"] = peak_memory()

    def clocks(self):
        if GPUS:
            torch.cuda.synchronize()
        return time.perf_counter(), cpu_seconds()


def cpu_seconds():
    """Of this process and of its loader workers, which are running."""
    seconds, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / tick  # in user mode, and in the kernel
    return seconds


def peak_memory():
    """MiB at most: of this process on the GPU, or else on the CPU, Python and torch included."""
    if GPUS:
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


# ---- The others' loops ---------------------------------------------------------------------------
class Repeated:
    """A loader of one batch, again and again, that is on the device."""

    def __init__(self, args, device):
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
        images = Images("", transform=transform)
        samples = [images[i] for i in range(args.batch_size)]
        images, labels = torch.utils.data.default_collate(samples)
        images = images.contiguous(memory_format=torch.channels_last)
        self.batch, self.steps = (images.to(device), labels.to(device)), args.steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        return itertools.repeat(self.batch, self.steps)


def usual_loader(args, device, shared_by=None):
    """The DataLoader of tutorials, with a share of the batch, and of the order of the samples of
    this collection's scripts. With `shared_by`=1 the order is that of all processes, for a library
    that splits it."""
    if args.part != "epochs":
        return Repeated(args, device)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    images = Images("", transform=transform)
    replicas = shared_by or args.world_size
    rank = args.rank if replicas > 1 else 0
    sampler = DistributedSampler(images, replicas, rank, drop_last=True)
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options |= {"pin_memory": device.type == "cuda", "drop_last": True, "sampler": sampler}
    return DataLoader(images, args.batch_size, **options)


def join(args):
    """Join the other processes, as DDP's tutorial has it. Returns this one's device."""
    device = torch.device("cpu")
    if GPUS:
        device = torch.device("cuda", args.local_rank)
        torch.cuda.set_device(device)
    if args.world_size > 1:
        dist.init_process_group("nccl" if GPUS else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def wrapped(args, model):
    return DistributedDataParallel(model) if args.world_size > 1 else model


def autocast(args, device):
    return torch.autocast(device.type, torch.bfloat16) if args.amp else nullcontext()


def sgd(model):
    return torch.optim.SGD(model.parameters(), LR, momentum=0.9)


def bare(args, model):
    """The step alone, on one batch: what a loop can reach."""
    device = join(args)
    model = wrapped(args, model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, fused=True)
    images, labels = Repeated(args, device).batch
    for _ in range(2 * args.steps):
        with autocast(args, device):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tutorial(args, model):
    """The loop of most tutorials, and of torchvision's references: `loss.item()` in each step."""
    device = join(args)
    loader, model = usual_loader(args, device), wrapped(args, model.to(device))
    optimizer = sgd(model)
    for epoch in range(2):
        if args.part == "epochs":
            loader.sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with autocast(args, device):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total


def timm(args, model):
    """timm's loader and optimizer, in a loop as its train.py has, which reads no loss in a step."""
    from timm.data import create_loader
    from timm.optim import create_optimizer_v2

    device = join(args)
    loader, model = usual_loader(args, device), wrapped(args, model.to(device))
    if args.part == "epochs":
        options = {"is_training": True, "no_aug": True, "mean": [MEAN] * 3, "std": [STD] * 3}
        options |= {"num_workers": args.workers, "persistent_workers": args.workers > 0}
        options |= {"device": device, "distributed": True, "pin_memory": bool(GPUS)}
        images, size = Arrays(""), (3, args.image_size, args.image_size)
        loader = create_loader(images, size, args.batch_size, **options)
    optimizer = create_optimizer_v2(model, "momentum", LR, weight_decay=0.0, momentum=0.9)
    for epoch in range(2):
        if args.part == "epochs":
            loader.sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for images, labels in loader:
            images = images.contiguous(memory_format=torch.channels_last)
            with autocast(args, device):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    return total


def accelerate(args, model):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not GPUS, mixed_precision="bf16" if args.amp else "no")
    loader = usual_loader(args, accelerator.device, shared_by=1)
    optimizer = sgd(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        if args.part == "epochs":
            loader.set_epoch(epoch)
        total = torch.zeros((), device=accelerator.device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
    return total


def lightning_options(args):
    options = {"accelerator": "gpu" if GPUS else "cpu", "devices": args.world_size}
    options["strategy"] = "ddp" if args.world_size > 1 else "auto"
    return options | {"precision": "bf16-mixed" if args.amp else "32-true"}


def fabric(args, model):
    from lightning import Fabric

    fabric = Fabric(**lightning_options(args))
    fabric.launch()
    model, optimizer = fabric.setup(model, sgd(model))
    loader = usual_loader(args, fabric.device)
    if args.part == "epochs":
        loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    for epoch in range(2):
        if args.part == "epochs":
            loader.sampler.set_epoch(epoch)
        total = torch.zeros((), device=fabric.device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
    return total


def trainer(args, model):
    from lightning import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def on_train_epoch_start(self):
            self.total = torch.zeros((), device=self.device)

        def training_step(self, batch, batch_idx):
            images, labels = batch
            loss = F.cross_entropy(self.model(images), labels)
            self.total += loss.detach()
            return loss

        def configure_optimizers(self):
            return sgd(self)

    device = torch.device("cuda", args.local_rank) if GPUS else torch.device("cpu")
    off = "logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"
    options = dict.fromkeys(off, False) | {"max_epochs": 2, "use_distributed_sampler": False}
    classifier = Classifier()
    Trainer(**options, **lightning_options(args)).fit(classifier, usual_loader(args, device))
    return classifier.total


LOOPS = {BARE: bare, "tutorials' loop": tutorial, "timm": timm, "Accelerate": accelerate}
LOOPS |= {"Lightning Fabric": fabric, "Lightning Trainer": trainer}


# ---- This collection's scripts -------------------------------------------------------------------
SMALL_MODEL = """
def build_model(name, num_classes):
    import peers
    return peers.build_model(name)
"""
SMALL_LOOP = """
class DataLoader(DataLoader):
    def __iter__(self):  # in training the same batch in each step, on the device
        if len(self.dataset) <= 100:
            return super().__iter__()
        if not hasattr(self, "batch"):
            images, labels = next(super().__iter__())
            images = normalize_bytes(images).contiguous(memory_format=torch.channels_last)
            self.batch = [x.cuda() if torch.cuda.is_available() else x for x in (images, labels)]
        return iter([self.batch] * len(self))

normalize_bytes = normalize

def normalize(images):
    return images if images.is_floating_point() else normalize_bytes(images)
"""
COMPLETE_MODEL = f"""
parser.set_defaults(normalization=[[{255 * MEAN}], [{255 * STD}]])

def build_model(args, inputs, classes):
    import peers
    return peers.build_model(args.model).to(memory_format=torch.channels_last)

def epoch_order(args, train_set, epoch):
    return torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))
"""
COMPLETE_LOOP = """
from itertools import repeat

class TrainLoader(TrainLoader):
    def prepared(self, batches, epoch, first_step):
        if not hasattr(self, "batch"):
            self.batch = self.prepare(self.args, next(batches), self.device, train=True)
            self.prepare = lambda args, batch, device, train: batch
        return super().prepared(repeat(self.batch), epoch, first_step)
"""


def run_script(args, folder):
    """Train by a copy of a script. It prints its losses itself."""
    datasets.CIFAR10 = Images
    flags = ["--dataset", "cifar10", "--model", args.model, "--image-size", args.image_size]
    flags += ["--epochs", 2, "--batch-size", args.batch_size * args.world_size, "--lr", LR]
    flags += ["--workers", args.workers, "--output", folder / "out"]
    flags += ["--amp"] if args.amp else []
    is_complete = args.name == COMPLETE
    more = COMPLETE_MODEL if is_complete else SMALL_MODEL
    if args.part != "epochs":
        more += COMPLETE_LOOP if is_complete else SMALL_LOOP
    path = write_altered(ROOT / args.name, folder / f"script{args.rank}", more=more)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(word) for word in [path, *flags]]
    runpy.run_path(str(path), run_name="__main__")


def contestant(args):
    """One process of a contestant, which torchrun may have started. Its figures are in a file."""
    args.rank, args.local_rank = (int(os.environ.get(x, 0)) for x in ("RANK", "LOCAL_RANK"))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    Images.count = args.steps * args.batch_size * args.world_size
    Images.side = args.image_size
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = torch.version.hip is None
    meter, total = Meter(args.steps), None
    if args.name in LOOPS:
        model = build_model(args.model).to(memory_format=torch.channels_last)
        total = LOOPS[args.name](args, model)
    else:
        run_script(args, args.folder)
    if total is not None:
        meter.report["loss"] = float(total) / args.steps
    (args.folder / f"{args.rank}.json").write_text(json.dumps(meter.report))
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- The tables ----------------------------------------------------------------------------------
def run(args, name, part, n):
    """What a contestant reports, on n processes; None if it fails."""
    flags = ["--model", args.model, "--image-size", args.image_size, "--workers", args.workers]
    flags += ["--batch-size", args.batch_size, "--steps", args.steps]
    flags += ["--amp"] if args.amp else []
    with tempfile.TemporaryDirectory() as folder:
        script = [Path(__file__).resolve(), part, "--folder", folder, "--name", name, *flags]
        command = [sys.executable, *script]
        if n > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
            command = [sys.executable, *torchrun, "--local-addr", "127.0.0.1", *script]
        started = time.time()
        options = {"limit": seconds_left(), "environment": {} if GPUS else KEEP_MEMORY}
        done = run_commands([command], Path(folder, "log"), folder=folder, **options)
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if done.status == "no time":
        NO_TIME.append(f"{name}, {part}")
        return None
    if done.status == "failed" or len(reports) != n or "MiB" not in reports[0]:
        print(f"{name}:\n{done.text}", file=sys.stderr, flush=True)
        FAILED.append(f"{name}, {part}")
        return None
    steps = args.steps - 1  # between the ends of the first one and of the last one
    samples = steps * args.batch_size * n
    losses = [report["loss"] for report in reports if "loss" in report]
    printed = re.findall(r"^epoch \d+: .*?loss ([\d.]+)", done.text, re.M)
    return {
        "speed": samples / max(report["seconds"] for report in reports),
        "CPU": sum(report["CPU seconds"] for report in reports) / samples * 1e6,
        "step": reports[0]["CPU seconds"] / steps * 1e6,
        "first": max(report["first step"] for report in reports) - started,
        "MiB": max(report["MiB"] for report in reports),
        "loss": statistics.mean(losses) if losses else float(printed[-1]) if printed else None,
    }


def measure(args, part, n, names):
    """{name: a report for each round} of all contestants that do not fail."""
    found = {name: [] for name in names}
    for number in range(args.rounds):
        first = number * len(names) // args.rounds
        for name in names[first:] + names[:first]:
            report = run(args, name, part, n) if name in found else None
            print(f"{part}, {n}: {name} {report}", file=sys.stderr, flush=True)
            if report is None:
                found.pop(name, None)
            else:
                found[name].append(report)
    return found


def contestants(args, n):
    """Of n processes; and the packages that are missing."""
    names = [BARE, ALONE if n == 1 else SMALL, COMPLETE, *list(LOOPS)[1:]]
    names = [name for name in names if any(part in name for part in args.only)]
    needed = {name: PACKAGES[name] for name in names if name in PACKAGES}
    missing = {package for package in needed.values() if not importlib.util.find_spec(package)}
    return [name for name in names if needed.get(name) not in missing], sorted(missing)


def column(found, name, key, digits):
    return spread([report[key] for report in found[name]], digits)


def ratios(found, name, other):
    """How many times as fast `other` is as a contestant, in the same round."""
    if other not in found:
        return "-"
    pairs = zip(found[other], found[name])
    return spread([ours["speed"] / its["speed"] for ours, its in pairs], 2)


def print_head(args, n, *heads):
    precision = "bfloat16" if args.amp else "float32"
    batch = f"{n} x {args.batch_size}" if n > 1 else args.batch_size
    what = f"`{args.model}`, {args.image_size} pixels, batch {batch}, {precision}"
    small = ALONE if n == 1 else SMALL
    table(n, what, "images/s", f"{small} x it", f"{COMPLETE} x it", "CPU us an image", *heads)


def cells(found, name, n):
    small = ALONE if n == 1 else SMALL
    both = ratios(found, name, small), ratios(found, name, COMPLETE)
    return [name, column(found, name, "speed", 0), *both, column(found, name, "CPU", 0)]


def loop(args, n):
    print(f"### The loop alone, {processes(n)}\n")
    names, missing = contestants(args, n)
    found = measure(args, "loop", n, names)
    print_head(args, n)
    for name in found:
        row(*cells(found, name, n))
    print_notes(args, found, missing)


def step(args, n):
    print(f"### Python in a step, {processes(n)}\n")
    names, missing = contestants(args, n)
    tiny = {"model": "mlp", "image_size": 1, "batch_size": 1, "workers": 0, "amp": False}
    args = argparse.Namespace(**(vars(args) | tiny | {"steps": 10 * args.steps}))
    found = measure(args, "step", n, names)
    table(n, "a tiny model, batch 1 on each", "CPU us a step", "over the bare step")
    for name in found:
        pairs = list(zip(found[name], found.get(BARE, [])))
        over = [its["step"] - bare["step"] for its, bare in pairs]
        row(name, column(found, name, "step", 0), spread(over, 0) if over else "-")
    print_notes(args, found, missing)


def epochs(args, n):
    print(f"### Two epochs, each with its loader, {processes(n)}\n")
    names, missing = contestants(args, n)
    found = measure(args, "epochs", n, names)
    print_head(args, n, "seconds until the first step", "peak MiB of a process", "loss")
    for name, reports in found.items():
        start, memory = column(found, name, "first", 1), column(found, name, "MiB", 0)
        loss = reports[0]["loss"]  # of the second epoch
        row(*cells(found, name, n), start, memory, "-" if loss is None else f"{loss:.4f}")
    compare_losses(args, n, found)
    print_notes(args, found, missing)


def compare_losses(args, n, found):
    """All are equal up to rounding, or it is a failure."""
    layers = build_model(args.model).modules()
    has_batch_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)
    names = [name for name in found if name != BARE]
    if has_batch_norm and n > 1 and "Accelerate" in names:
        names.remove("Accelerate")
        print(
            "\nAccelerate gives a process other images of a batch, which batch norm sees.", end=""
        )
    for name in names:
        first, rounding = found[names[0]][0]["loss"], 0.03 if has_batch_norm else 0.005
        losses = [report["loss"] for report in found[name]]
        if any(abs(loss / first - 1) > rounding for loss in losses):
            FAILED.append(f"the loss of {name} is {losses}, and of {names[0]} {first}")


def loaders(args):
    print("### The loaders alone\n")
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), SIZES["ImageNet"], 120)
        options = {"rounds": args.rounds, "seconds": 5, "batch_size": 32}
        options["workers"] = [args.workers or 2]
        image_loading.measure(argparse.Namespace(**options), "ImageNet", Path(folder))
    print(flush=True)


def processes(n):
    return "one process" if n == 1 else f"{n} processes"


def print_notes(args, found, missing):
    print(f"\n{args.rounds} round{'s' * (args.rounds > 1)} of {args.steps} steps an epoch.")
    if missing:
        print(f"Left out, as they are not installed: {', '.join(missing)}.")
    print("Left out, as they are in no package: timm's train.py, torchvision's references.")
    ours = [name for name in (ALONE, SMALL, COMPLETE) if name in found]
    for name, other in itertools.product(ours, found):
        pairs = list(zip(found[name], found[other]))
        ratios = [mine["speed"] / its["speed"] for mine, its in pairs]
        if other not in (BARE, *ours) and max(ratios) < 1:
            print(f"Slower in each round: {name}, {spread(ratios, 2)} x {other}.")
    print(flush=True)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--processes", type=int, nargs="+", default=[GPUS or 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of contestants' names")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--model", default="net", help="net, or one of torchvision's")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--amp", action="store_true", help="bfloat16")
    parser.add_argument("--workers", type=int, default=4 if GPUS else 0, help="of each loader")
    parser.add_argument("--name", help=argparse.SUPPRESS)  # of the contestant to run
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # where it reports
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - {*PARTS}):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if args.name is None and args.model not in ("net", *models.list_models(module=models)):
        parser.error(f"--model {args.model} is not net, and not one of torchvision's")
    return args


def main():
    args = parse_args()
    if args.name is not None:
        [args.part] = args.parts
        return contestant(args)
    end_on_sigterm()
    for part in args.parts or PARTS:
        if part == "loaders":
            loaders(args)
            continue
        for n in args.processes:
            {"loop": loop, "step": step, "epochs": epochs}[part](args, n)
    end_part()


if __name__ == "__main__":
    main()

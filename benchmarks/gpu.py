"""The tables of gpu.sh: `python benchmarks/gpu.py PART`. On a CPU, two processes ($PROCESSES) stand
in for GPUs.

Each run has processes of its own. Its row is printed when it has ended, or when the time of the
part ($PART_SECONDS) has, from what it had printed by then. A rate is that of training alone, the
mean over all epochs but the first.
"""

import csv
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import (
    COMPLETE,
    GPUS,
    ROOT,
    attempt,
    copy_script,
    end_on_sigterm,
    end_part,
    fitting_workers,
    recipe_copy,
    row,
    table,
    train,
    write_altered,
)
from make_images import SIZES, make_folder

TINY = bool(os.environ.get("TINY"))
ALL = GPUS or int(os.environ.get("PROCESSES", 2))
COUNTS = [ALL] if TINY else sorted({n for n in (1, 2, 4, 8) if n < ALL} | {ALL}, reverse=True)
CORES = len(os.sched_getaffinity(0))
MEMORY = min((torch.cuda.get_device_properties(i).total_memory for i in range(GPUS)), default=0)
OLD = GPUS and not torch.cuda.is_bf16_supported(including_emulation=False)  # before Ampere
# Of the parts with large images: images per GPU and step, steps per epoch.
BATCH, STEPS, EPOCHS = 256 if MEMORY > 30e9 else 64, 50, 3
MODEL, SIDE = "resnet50", 224
if TINY:
    BATCH, STEPS, EPOCHS, MODEL, SIDE = 2, 2, 2, "resnet18", 32


def rate(path, n, *flags):
    """Images per second on n GPUs."""
    return train(path, n, [*flags, "--epochs", EPOCHS])


def print_rate(name, *cells, rate, base):
    """A row with a rate, also as a multiple of another. None if there is no rate: it is among what
    was not measured."""
    if not math.isnan(rate):
        row(name, *cells, f"{rate:.0f}", f"{rate / base:.3f}" if not math.isnan(base) else "-")


def rate_on_device(n, *flags):
    """Of complete/train.py, on images that are on the GPUs already."""
    words = ["--batch-size", BATCH * n, "--steps-per-epoch", STEPS]
    return rate(ROOT / "benchmarks/on_device.py", n, *words, *flags)


def resnet50(folder):
    """complete/train.py on all GPUs, and on fewer, beside the bare step of one GPU."""
    words = ["--model", MODEL, "--image-size", SIDE]
    command = [sys.executable, ROOT / "benchmarks/bare_step.py", *words]
    command += ["--batch-size", BATCH, "--steps", STEPS]
    base = float(subprocess.check_output(list(map(str, command)), text=True))
    heads = f"{MODEL}, {SIDE} pixels, {BATCH} images per GPU, `--amp`", "GPUs", "images/s"
    table(ALL, *heads, "x the bare step on each")

    def measure(n, *more):
        found = rate_on_device(n, *words, "--amp", *more)
        print_rate(" ".join([COMPLETE, *more]), n, rate=found, base=n * base)

    measure(ALL)
    print_rate("bare step", 1, rate=base, base=base)
    for n in COUNTS[1:]:
        measure(n)
    measure(ALL, "--augment")
    measure(ALL, "--compile")


SEVERAL_TIMES = """
from torch.utils.data import ConcatDataset

load_once = load_data

def load_data(args):
    train_set, *others = load_once(args)
    return ConcatDataset([train_set] * {}), *others
"""


def images(folder):
    """Are the GPUs busy? With JPEG files of the size of ImageNet's, and with the same, packed."""
    # An epoch has all images five times: in the first steps of an epoch, the loader's batches are
    # those that it has fetched during the evaluation, and would hide that it is slow.
    model, steps, times = ("net", 20, 1) if TINY else ("resnet18", 24, 5)
    side, count = SIDE * 8 // 7, ALL * BATCH * steps
    files, packed = folder / "files", folder / "packed"
    # Test images are for all GPUs. Few files are different: the others need no memory.
    make_folder(files, SIZES["ImageNet"], count, test=64 * ALL, different=62)
    started = time.perf_counter()
    command = [sys.executable, ROOT / "complete/pack_images.py", files, packed, "--side", side]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    packing = count / (time.perf_counter() - started)

    words = ["--model", model, "--image-size", SIDE, "--amp", "--augment"]
    workers = fitting_workers(min(16, CORES // ALL), ALL * BATCH * 3 * side**2)
    table(ALL, f"{model}, {SIDE} pixels, `--amp --augment`", "images/s", "x without a loader")
    base = rate_on_device(ALL, *words)
    print_rate("without a loader", rate=base, base=base)
    words += ["--batch-size", ALL * BATCH, "--workers", workers]
    path = write_altered(ROOT / COMPLETE, folder / "script", more=SEVERAL_TIMES.format(times))
    for name, place in ("packed", packed), ("JPEG files", files):
        found = rate(path, ALL, "--dataset", place, *words)
        print_rate(f"{name}, {workers} workers per GPU", rate=found, base=base)
    print(f"\npack_images.py: {packing:.0f} images/s with {CORES} cores, its start included")


def cifar10(folder):
    """Twenty epochs of CIFAR-10, with a ResNet-18 for 32 pixels: the same run on all GPUs and on
    one."""
    table(
        ALL, "GPUs", "epochs", "test accuracy", "training, s", "with start, tests, checkpoints, s"
    )
    dataset = Path(os.environ.get("CIFAR10", "cifar10"))
    dataset = dataset.resolve() if dataset.is_dir() else dataset
    path = ROOT / "benchmarks/cifar10.py"
    flags = ["--dataset", dataset, "--batch-size", 32 if TINY else 512, "--amp", "--augment"]
    flags += ["--lr", 0.2, "--weight-decay", 5e-4, "--lr-schedule", "cosine"]
    flags += ["--warmup-steps", 200, "--epochs", 1 if TINY else 20]
    for n in dict.fromkeys([ALL, 1]):
        output, started = folder / f"on-{n}", time.perf_counter()
        if attempt(path, n, flags, output) is None or not (output / "metrics.csv").exists():
            continue
        rows = list(csv.DictReader((output / "metrics.csv").open()))
        seconds = sum(float(line["seconds"]) for line in rows)
        accuracy = f"{float(rows[-1]['test_accuracy']):.2%}"
        row(n, len(rows), accuracy, f"{seconds:.1f}", f"{time.perf_counter() - started:.1f}")


def resume(folder):
    """One run on all GPUs and on one, left alone, and killed in its second epoch and resumed: how
    far its losses and weights are from those of the first."""
    heads = "GPUs", "largest difference of a loss, relative", "of a weight"
    table(ALL, f"{COMPLETE}, `net`, float32", *heads)

    def weights(name):
        return torch.load(folder / name / "model.pt", weights_only=True)["model"]

    def losses(name):
        rows = list(csv.DictReader((folder / name / "metrics.csv").open()))
        return [float(line[key]) for line in rows for key in ("train_loss", "test_loss")]

    def compare(what, gpus, name, other):
        if not all((folder / each / "model.pt").exists() for each in (name, other)):
            return  # no time was left
        loss = max(abs(a / b - 1) for a, b in zip(losses(name), losses(other), strict=True))
        own, first = weights(name), weights(other)
        weight = max((own[key] - first[key]).abs().max().item() for key in first)
        row(what, gpus, f"{loss:.1e}", f"{weight:.1e}")

    def start(name, n, *flags, until=None, path=ROOT / COMPLETE):
        batch_size = 400 if TINY else 80
        words = ["--dataset", "synthetic", "--batch-size", batch_size, "--epochs", 3]
        words += ["--lr", 0.002, "--log-every", 5, "--checkpoint-minutes", 0, "--resume", *flags]
        attempt(path, n, words, folder / name, until=until)

    moment = "epoch 2/3 step 20/"
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # no TF32, whatever the script sets
    start("one", 1)
    start("all", ALL)
    compare("left alone", ALL, "all", "one")
    start("killed", ALL, until=moment)
    start("killed", 1)
    compare("killed and resumed", f"{ALL}, then 1", "killed", "one")
    start("again", 1)
    compare("left alone, again", 1, "again", "one")

    del os.environ["NVIDIA_TF32_OVERRIDE"]
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as the recipe says
    path = recipe_copy("Deterministic runs on a GPU", folder / "script")
    flags = ["--model", "net" if TINY else "resnet18", "--augment", "--amp"]
    start("exact", ALL, *flags, path=path)
    start("exact-again", ALL, *flags, path=path)
    compare(f"deterministic, `{' '.join(flags)}`: again", ALL, "exact-again", "exact")
    start("exact-killed", ALL, *flags, path=path, until=moment)
    start("exact-killed", ALL, *flags, path=path)
    compare("the same: killed and resumed", ALL, "exact-killed", "exact")


def scripts(folder):
    """The small scripts on all GPUs, and train_single.py on one. Each repeats one batch."""
    table(ALL, f"{MODEL}, {SIDE} pixels, {BATCH} images per GPU", "GPUs", "flags", "images/s")
    order = ["train_ddp_torchrun.py", "large/train_fsdp2.py", "train_ddp_spawn.py"]
    order += ["train_ddp_multigpu_proc.py", "train_dp.py", "train_single.py"]
    for name in order:
        n = 1 if name == "train_single.py" else ALL
        path = copy_script(name, folder / Path(name).stem, BATCH * n * STEPS)
        words = ["--dataset", "synthetic", "--model", MODEL, "--image-size", SIDE]
        words += ["--batch-size", BATCH * n, "--workers", 0]
        # DataParallel has no --amp; and before Ampere, bfloat16 is emulated.
        has_amp = name not in ("train_dp.py", "train_ddp_multigpu_proc.py") and not OLD
        for flags in [["--amp"], []] if has_amp else [[]]:
            found = rate(path, n, *words, *flags)
            if not math.isnan(found):
                row(name, n, " ".join(flags), f"{found:.0f}")


def small(folder):
    """A small network, for which starting the kernels takes longer than they run."""
    table(1, f"{COMPLETE}, `net`, batch 64", "images/s", "x the first")
    path, words = ROOT / COMPLETE, ["--dataset", "synthetic"]
    first = rate(path, 1, *words)
    print_rate("", rate=first, base=first)
    graphs = recipe_copy("Small networks", folder)
    for what, script in ("", path), (", reduce-overhead", graphs):
        found = rate(script, 1, *words, "--compile")
        print_rate(f"`--compile`{what}", rate=found, base=first)


if __name__ == "__main__":
    parts = {part.__name__: part for part in (resnet50, images, cifar10, resume, scripts, small)}
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        parts[sys.argv[1]](Path(folder))
    end_part()

"""The tables of gpu.sh: `gpu.py PART`. Without a GPU, two processes stand in for two.

A figure is the mean over all epochs but the first, and every count of GPUs has as many steps per
epoch. A part starts nothing after nine minutes, and says what it has left out.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from image_loading import make_folder, ours, speed
from runs import (
    COMPLETE,
    FAILED,
    FLOAT16,
    GPUS,
    NO_TF32,
    ROOT,
    SMALL,
    attempt,
    copy_script,
    fitting_workers,
    row,
    table,
    train,
)
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

HAVE_AMP = [name for name in SMALL if name not in (SMALL[1], SMALL[4])]  # not DataParallel
ALL = GPUS or 2
COUNTS = sorted({n for n in (1, 2, 4, 8) if n < ALL} | {ALL})
OLD = GPUS and not torch.cuda.is_bf16_supported(including_emulation=False)  # before Ampere
WORKERS = min(16, len(os.sched_getaffinity(0)))
SIZES = {  # model, side of the images, images per step and GPU, steps per epoch
    "scripts": ("resnet18", 224, 256, 20),
    "settings": ("resnet18", 224, 256, 20),
    "graphs": ("net", 32, 64, 200),
    "large": ("vit_l_16", 224, 32, 20),
    "inputs": ("mlp", 28, 256, 20),
    "images": ("resnet18", 224, 256, 80),
    "checkpoint": ("net", 224, 1, 4),  # in whose place LARGE puts another
    "resume": ("resnet18", 64, 64, 40),
}
SIDES = [28, 137, 224]  # of "inputs": 1, 24 and 64 times as many pixels
LAYERS, WIDTH = 52, 1280  # of "checkpoint": a billion parameters
EPOCHS, FIRST = 4, None  # how many rows of a kind: all
TINY = bool(os.environ.get("TINY"))
if TINY:
    SIZES = dict.fromkeys(SIZES, ("net", 32, 2, 20)) | {"large": ("resnet18", 32, 2, 2)}
    SIZES |= {"inputs": ("mlp", 28, 2, 4), "checkpoint": ("net", 28, 1, 4)}
    COUNTS, WORKERS, FIRST, SIDES, LAYERS, WIDTH, EPOCHS = [ALL], 1, 1, [28], 1, 32, 2
HEADS = {  # what `LARGE` prints: what it is, of the largest or slowest
    "parameters": "parameters",
    "save": "save, s",
    "save, best": "save with best.pt, s",
    "load": "resume, s",
    "host": "GiB of host memory, of the largest rank",
}
MINUTES, STARTED = 60 if TINY else 9, time.monotonic()
# TFLOP/s of a GPU in bfloat16, dense, of the data sheets, by its whole name: a MIG slice, or one
# with another limit of power, has another name, and no peak here.
PEAK = {"NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100 80GB PCIe": 312}
PEAK |= {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835}
PEAK |= {"NVIDIA H200": 989, "NVIDIA H200 NVL": 835, "NVIDIA B200": 2250, "NVIDIA GB200": 2500}

# What copies of the complete script do differently.
CONTIGUOUS = """
channels_last_model, channels_last_batch = build_model, prepare

def build_model(*args):
    return channels_last_model(*args).to(memory_format=torch.contiguous_format)

def prepare(*args, **options):
    images, labels = channels_last_batch(*args, **options)
    return images.contiguous(), labels
"""
GRAPHS = "torch.compile = functools.partial(torch.compile, mode='reduce-overhead')\n"
LARGE = f"""
import resource

def build_model(args, inputs, classes):
    return models.VisionTransformer(
        args.image_size, 14, {LAYERS}, 16, {WIDTH}, 4 * {WIDTH}, num_classes=classes
    )

of_script_save, of_script_load = save_checkpoint, load_checkpoint

def timed(name, function, *args):
    torch.accelerator.synchronize() if args[0].device != "cpu" else None
    dist.barrier()
    started = time.perf_counter()
    function(*args)
    dist.barrier()
    print(f"host {{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}}", flush=True)
    if dist.get_rank() == 0:
        print(f"{{name}} {{time.perf_counter() - started:.2f}} s", flush=True)

def save_checkpoint(args, progress, *rest):
    name = "save" if progress.step else "save, best"
    timed(name, of_script_save, args, progress, *rest)

def load_checkpoint(args, *rest):
    parameters = sum(p.numel() for p in rest[0]["model"].parameters())
    print(f"parameters {{parameters}}", flush=True)
    timed("load", of_script_load, args, *rest)
"""
# What copies of the small scripts do differently.
MLP = """
def build_model(args, classes):
    hidden = nn.Linear(3 * args.image_size**2, 512)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(512, len(classes)))

import atexit

def tell_peak():
    peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
    print(f"peak {max(peaks, default=0) >> 20} MiB", flush=True)

atexit.register(tell_peak)
"""


def seconds_left():
    return MINUTES * 60 - (time.monotonic() - STARTED)


def in_time(function, path, n, flags, *args):
    """What `train` or `attempt` return; None if the time of this part is over."""
    if seconds_left() > 30:
        return function(path, n, flags, *args, limit=seconds_left())
    FAILED.append(f"no time left for {path.name} on {n}: {' '.join(map(str, flags))}")


def rate_and_memory(path, n, flags):
    return in_time(train, path, n, flags) or (math.nan, math.nan)


def prepare(name, folder, n, code=""):
    """A copy of a script for n GPUs, with as many steps per epoch as on one; and its flags."""
    batch_size = images_per_step * n
    path = copy_script(name, folder, batch_size * steps, code)
    network = "net" if code == MLP else model
    flags = ["--dataset", "synthetic", "--model", network, "--image-size", side]
    return path, n, [*flags, "--epochs", EPOCHS, "--batch-size", batch_size, "--workers", 0]


def scripts(folder):
    """All scripts, with and without --amp. Without it, a GPU from Ampere on convolves in TF32."""
    heads = "script", "GPUs", "flags", "images/s, no loader", "x train_single.py, same flags"
    table(ALL, *heads)
    base = {}
    one = SMALL[:1] if GPUS else SMALL[:2]  # run as one process, which sees no second GPU
    runs = [(name, 1 if name in one else ALL) for name in SMALL if name != SMALL[2]]
    runs += [(SMALL[2], n) for n in COUNTS]
    runs += [(f"{COMPLETE}{shard}", n) for n in COUNTS for shard in ("", " --shard 0")]
    for name, n in runs:
        script, *shard = name.split(maxsplit=1)
        path, n, flags = prepare(script, folder, n)
        for more in ([], ["--amp"])[:FIRST]:
            if more and (script not in (COMPLETE, *HAVE_AMP) or OLD and (shard or script in SMALL)):
                continue  # not offered, or emulated
            rate, _ = rate_and_memory(path, n, [*flags, *more, *(shard and shard[0].split())])
            base.setdefault(str(more), rate)
            row(name, n, " ".join(more), f"{rate:.0f}", f"{rate / base[str(more)]:.2f}")


def settings(folder):
    """What a setting of complete/train.py is worth on one GPU: each off and on."""

    def rate(*more, code=""):
        path, n, flags = prepare(COMPLETE, folder, 1, code)
        return rate_and_memory(path, n, [*flags, *more])[0]

    table(1, f"{COMPLETE}, images/s", "off", "on", "on / off")
    tf32 = rate()
    amp = rate("--amp")
    for what, off, on in (
        ("`--amp`", lambda: tf32, lambda: amp),
        ("TF32", lambda: rate(code=NO_TF32), lambda: tf32),
        ("channels_last, with `--amp`", lambda: rate("--amp", code=CONTIGUOUS), lambda: amp),
        ("`--compile`, with `--amp`", lambda: amp, lambda: rate("--amp", "--compile")),
    )[:FIRST]:
        before, after = off(), on()
        row(what, f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}")


def graphs(folder):
    """Small networks, for which starting the kernels takes longer than they run."""
    heads = "eager", "`--compile`", "x eager", "`--compile` with CUDA graphs", "x eager"
    table(1, f"{COMPLETE}, images/s", "batch", *heads)
    for name, batch in [("net", 64), ("net", 512), ("mlp", 64)][:FIRST]:
        found = []
        for more, code in ([], ""), (["--compile"], ""), (["--compile"], GRAPHS):
            path = copy_script(COMPLETE, folder, batch * steps, code)
            flags = ["--dataset", "synthetic", "--model", name, "--batch-size", batch]
            found.append(rate_and_memory(path, 1, [*flags, "--epochs", EPOCHS, *more])[0])
        eager, *others = found
        cells = [cell for rate in others for cell in (f"{rate:.0f}", f"{rate / eager:.2f}")]
        row(f"`{name}`", batch, f"{eager:.0f}", *cells)


def operations():
    """Floating-point operations per image, forward and backward, as torch counts them."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        pictures = torch.empty(2, 3, side, side)
        models.get_model(model, num_classes=10)(pictures).sum().backward()
    return counter.get_total_flops() / 2


def large(folder):
    """DDP and FSDP2 with a large model: the share of the GPUs' peak (MFU), and rank 0's memory."""
    heads = "TFLOP/s per GPU", "MFU", "peak MiB of rank 0, without the images"
    table(ALL, COMPLETE, "GPUs", "images/s", *heads)
    gpu = torch.cuda.get_device_name() if GPUS else "CPU"
    for shard, n in list(dict.fromkeys([(0, ALL), (1, ALL), (1, 1)]))[:FIRST]:
        for more in (["--amp"], ["--amp", "--compile"])[: 0 if shard == 0 and OLD else FIRST]:
            path, n, flags = prepare(COMPLETE, folder, n)
            more = ["--shard", shard, "--optimizer", "adamw", *more]
            rate, memory = rate_and_memory(path, n, [*flags, *more])
            each = rate * operations() / n / 1e12
            share = f"{each / PEAK[gpu]:.1%}" if gpu in PEAK else "-"
            # Each GPU has all images of the training and the test set, a byte per color.
            memory -= images_per_step * n * steps * 1.1 * 3 * side**2 / 2**20 if GPUS else 0
            words = " ".join(map(str, more))
            row(f"`{words}`", n, f"{rate:.0f}", f"{each:.2f}", share, f"{memory:.0f}")


def inputs(folder):
    """A load test: a network of two layers on inputs that grow."""
    heads = "script", "GPUs", "images/s, no loader", "ms per step", "peak MiB of a GPU"
    table(ALL, "input", *heads)
    for pixels in SIDES:
        for name in SMALL[0], SMALL[1], SMALL[2], COMPLETE:
            n = 1 if name in (SMALL[:1] if GPUS else SMALL[:2]) else ALL
            path, n, flags = prepare(name, folder, n, "" if name == COMPLETE else MLP)
            flags += ["--image-size", pixels]
            rate, memory = rate_and_memory(path, n, flags)
            cells = f"{rate:.0f}", f"{1e3 * images_per_step * n / rate:.2f}", f"{memory:.0f}"
            row(f"3 x {pixels} x {pixels}", name, n, *cells)


def images(folder):
    """Is one GPU busy? JPEG files, the same images packed, and images that are on the device."""
    workers = fitting_workers(WORKERS, images_per_step * 3 * (side * 8 // 7) ** 2)
    heads = f"DataLoader alone, {workers} workers, images/s", "training, images/s"
    table(1, "images", *heads, "x on the device")
    path, n, flags = prepare(COMPLETE, folder, 1)
    flags += ["--amp", "--workers", workers]
    top, _ = rate_and_memory(path, n, flags)
    row("on the device", "-", f"{top:.0f}", "1.00")
    files, packed, count = folder / "files", folder / "packed", images_per_step * steps
    make_folder(files, 500, 375, 95, 7, min(count, 122))  # of the size of ImageNet's files
    paths = sorted(files.glob("train/*/*.jpg"))
    for i in range(count - len(paths)):  # each under many names
        path = paths[i % len(paths)]
        path.with_name(f"{i}-{path.name}").symlink_to(path)
    words = [sys.executable, ROOT / "complete/pack_images.py", files, packed]
    subprocess.run(words, check=True, stdout=sys.stderr)
    for name, place in ("JPEG files", files), ("packed", packed):
        alone, _ = speed(ours(place, side), workers, images_per_step, count)
        rate, _ = rate_and_memory(ROOT / COMPLETE, n, [*flags, "--dataset", place])
        row(name, f"{alone:.0f}", f"{rate:.0f}", f"{rate / top:.2f}")


def checkpoint(folder):
    """How long a checkpoint stops the training: a billion parameters with AdamW, 12 GB. After an
    epoch there is best.pt, too, 4 GB."""
    parameters, *heads = HEADS.values()
    table(ALL, f"{COMPLETE}, AdamW", "GPUs", parameters, "GB on the disk", *heads)
    needed = 0 if TINY else 40e9  # two checkpoints, best.pt twice, model.pt
    free = shutil.disk_usage(folder).free
    if free < needed:
        return FAILED.append(f"{folder} has only {free / 1e9:.0f} GB: set TMPDIR to a larger disk")
    for shard, n in list(dict.fromkeys([(1, 1), (1, ALL), (0, ALL)]))[:FIRST]:
        output = folder / f"{shard}-{n}"
        path, n, flags = prepare(COMPLETE, folder, n, LARGE)
        flags += ["--optimizer", "adamw", "--shard", shard, "--checkpoint-minutes", 0]
        texts = []
        for epochs in 1, 2:
            flags += ["--epochs", epochs, "--resume"]
            texts.append(in_time(attempt, path, n, flags, output) or "")
        found = {}
        for name, value in re.findall(rf"^({'|'.join(HEADS)}) ([\d.]+)", texts[1], re.M):
            found[name] = max(found.get(name, 0), float(value))
        files = output.glob("checkpoint-*/*")
        size = sum(file.stat().st_size for file in files) / 1e9
        shutil.rmtree(output, ignore_errors=True)
        parameters, *values = (found.get(name, math.nan) for name in HEADS)
        cells = [f"{value:.2f}" for value in (size, *values)]
        row(f"`--shard {shard}`", n, f"{parameters:.4g}", *cells)


def resume(folder):
    """The weights of a second undisturbed run, and of one killed and resumed, beside the first."""
    table(ALL, COMPLETE, "GPUs", "resumed after", "undisturbed", "resumed")
    kinds = {"": "", "--amp": "", "--amp, in float16": FLOAT16, "--amp --compile": ""}
    for shard, n in list(dict.fromkeys([(1, 1), (1, ALL), (0, ALL)]))[:FIRST]:
        for kind, code in list(kinds.items())[:FIRST]:
            if shard == 0 and (code or OLD and kind):
                continue  # it has no float16
            path, n, flags = prepare(COMPLETE, folder, n, code)
            flags += ["--augment", "--log-every", 5, "--checkpoint-minutes", 0, "--resume"]
            flags += ["--shard", shard, *kind.split(",")[0].split()]
            one, two, killed = (folder / f"{n}{shard}{kind}{letter}" for letter in "abc")
            name, texts, middle = f"`--shard {shard} {kind}`", [], f"epoch 2/{EPOCHS} step 10/"
            for output, until in (one, ""), (two, ""), (killed, middle), (killed, ""):
                texts.append(in_time(attempt, path, n, flags, output, until))
            if None in texts:
                row(name, n, *["nan"] * 3)
                continue
            [line] = [t for t in texts[-1].splitlines() if t.endswith(" are done")]
            first, *others = (torch.load(output / "model.pt") for output in (one, two, killed))
            cells = [line.split(": ")[1].removesuffix(" are done")]
            for other in others:  # the largest difference of a weight
                apart = ((first[key].double() - other[key].double()).abs().max() for key in first)
                cells.append(f"{max(apart).item():.1e}")
            row(name, n, *cells)


if __name__ == "__main__":
    model, side, images_per_step, steps = SIZES[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](Path(folder))
    print(f"\n{sys.argv[1]} took {time.monotonic() - STARTED:.0f} s", flush=True)
    if FAILED:
        sys.exit(f"{len(FAILED)} of its runs failed, or had no time:\n" + "\n".join(FAILED))

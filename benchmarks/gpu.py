"""The tables of gpu.sh: `gpu.py PART`. Without a GPU, two processes stand in for two.

A figure is the mean over all epochs but the first, and every count of GPUs has as many steps per
epoch. A part prints each row when it is measured, ends after two minutes, and says what it has not
measured. What runs on one GPU runs in this process, one after the other.
"""

import csv
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from image_loading import make_folder, ours, speed
from runs import (
    COMPLETE,
    FAILED,
    FLOAT16,
    GPUS,
    ROOT,
    SCRIPTS,
    attempt,
    copy_script,
    fitting_workers,
    row,
    run_here,
    table,
    time_limit,
    train,
)
from torch import nn
from torchvision import models

sys.path.insert(0, str(ROOT / "large"))
import train_lm

HAVE_AMP = [name for name in SCRIPTS if name not in (SCRIPTS[1], SCRIPTS[4])]  # not DataParallel
ALL = GPUS or 2
COUNTS = sorted({n for n in (1, 2, 4, 8) if n < ALL} | {ALL})
OLD = GPUS and not torch.cuda.is_bf16_supported(including_emulation=False)  # before Ampere
DEVICE, HALF = "cuda" if GPUS else "cpu", torch.float16 if OLD else torch.bfloat16
WORKERS = min(16, len(os.sched_getaffinity(0)))
SIZES = {  # model, side of the images, images per step and GPU, steps per epoch
    "resnet50": ("resnet50", 224, 256, 20),
    "images": ("resnet18", 224, 256, 24),
    "lm": ("160m", 1024, 16, 60),
    "lm_large": ("1.4b", 1024, 8, 20),
    "lm_saving": ("400m", 1024, 4, 40),
    "small": ("net", 32, 64, 200),
    "checkpoint": ("net", 224, 1, 4),  # in whose place LARGE puts another
    "resume": ("resnet18", 64, 64, 20),
    "scripts": ("resnet18", 224, 256, 20),
    "inputs": ("mlp", 28, 256, 20),
    "cifar10": ("resnet18", 32, 512, 97),
}
NETWORKS = [("net", 64, []), ("resnet18", 512, ["--amp"])]  # of "small": batch size, flags
SIDES = [28, 137, 224]  # of "inputs": 1, 24 and 64 times as many pixels
LAYERS, WIDTH = 26, 1280  # of "checkpoint": half a billion parameters
CIFAR = [20, 100]  # of "cifar10": epochs
EPOCHS, FIRST, STEPS = 3, None, 40  # how many rows of a kind: all; steps of a bare step's timing
TINY = bool(os.environ.get("TINY"))
if TINY:
    SIZES = dict.fromkeys(SIZES, ("net", 32, 2, 20))
    SIZES |= dict.fromkeys(["lm", "lm_large", "lm_saving"], ("tiny", 8, 2, 6))
    SIZES |= {"inputs": ("mlp", 28, 2, 4), "checkpoint": ("net", 28, 1, 4)}
    SIZES |= {"resnet50": ("resnet18", 32, 2, 2)}
    COUNTS, WORKERS, FIRST, SIDES, LAYERS, WIDTH, EPOCHS = [ALL], 1, 1, [28], 1, 32, 2
    STEPS, NETWORKS, CIFAR = 2, [("net", 2, [])], [2]
HEADS = {  # what `LARGE` prints: what it is, of the largest or slowest
    "parameters": "parameters",
    "save": "save, s",
    "save, best": "save with best.pt, s",
    "load": "resume, s",
    "host": "GiB of host memory, of the largest rank",
}
MINUTES, STARTED = 60 if TINY else 110 / 60, time.monotonic()
LAST = 15  # seconds for which it is not worth starting anything

# What copies of the complete script do differently.
GRAPHS = "torch.compile = functools.partial(torch.compile, mode='reduce-overhead')\n"
CIFAR10 = """
def build_model(args, inputs, classes):  # a ResNet-18 for images of 32 pixels
    model = models.resnet18(num_classes=classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model.to(memory_format=torch.channels_last)

def loss_function(outputs, labels):
    return F.cross_entropy(outputs, labels, label_smoothing=0.1 if torch.is_grad_enabled() else 0)
"""
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
    found = function(*args)
    dist.barrier()
    print(f"host {{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}}", flush=True)
    if dist.get_rank() == 0:
        print(f"{{name}} {{time.perf_counter() - started:.2f}} s", flush=True)
    return found

def save_checkpoint(args, progress, *rest):
    name = "save" if progress.step else "save, best"
    timed(name, of_script_save, args, progress, *rest)

def load_checkpoint(args, *rest):
    parameters = sum(p.numel() for p in rest[0]["model"].parameters())
    print(f"parameters {{parameters}}", flush=True)
    return timed("load", of_script_load, args, *rest)
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


def in_time(what, function, *args, **options):
    """What the function returns; None, and a note of it, if the time of this part is over."""
    if seconds_left() > LAST:
        return function(*args, limit=seconds_left(), **options)
    FAILED.append(f"no time left for {what}")


def words_of(path, n, flags):
    return f"{path.name} on {n}: {' '.join(map(str, flags))}"


def rate_and_memory(path, n, flags, apart=False):
    """By a run, which may be in this process, unless it is to be `apart`."""
    here = n == 1 and path.name != SCRIPTS[3] and not apart
    options = {"by": run_here} if here else {}
    found = in_time(words_of(path, n, flags), train, path, n, flags, **options)
    return found or (math.nan, math.nan)


def prepare(name, folder, n, code="", titles=()):
    """A copy of a script for n GPUs, with as many steps per epoch as on one; and its flags."""
    batch_size = images_per_step * n
    path = copy_script(name, folder, batch_size * steps, code, titles)
    network = "net" if code == MLP else model
    flags = ["--dataset", "synthetic", "--model", network, "--image-size", side]
    return path, n, [*flags, "--epochs", EPOCHS, "--batch-size", batch_size, "--workers", 0]


def bare(network, inputs, labels, loss_function, optimizer, compiled=False, limit=0):
    """Samples a second of the step alone, on one batch that is on the device: forward, backward,
    optimizer."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = torch.version.hip is None
    network.to(DEVICE)
    step_of = optimizer(network.parameters())
    call = torch.compile(network, dynamic=False) if compiled else network
    loss_of = torch.compile(loss_function, dynamic=False) if compiled else loss_function
    with time_limit(limit):
        for step in range(10 + STEPS):
            if step == 10:
                synchronize()
                started = time.perf_counter()
            with torch.autocast(DEVICE, HALF):
                loss = loss_of(call(inputs), labels)
            loss.backward()
            step_of.step()
            step_of.zero_grad()
        synchronize()
        seconds = time.perf_counter() - started
    torch.compiler.reset()
    return STEPS * len(inputs) / seconds


def synchronize():
    if GPUS:
        torch.cuda.synchronize()


def bare_rate(what, *args, **options):
    return in_time(f"the bare step, {what}", attempt, *args, by=bare, **options) or math.nan


def compared(name, rate, base):
    row(name, f"{rate:.0f}", f"{rate / base:.3f}")


def resnet50(folder):
    """The bare step, and the scripts beside it, on one GPU."""
    table(1, f"{model} at {side} pixels, batch {images_per_step}, `--amp`", "images/s", "x bare")
    images = torch.randn(images_per_step, 3, side, side, device=DEVICE)
    labels = torch.randint(10, (images_per_step,), device=DEVICE)
    optimizer = partial(torch.optim.SGD, lr=0.001, momentum=0.9)

    def limit(form, **options):
        network = models.get_model(model, num_classes=10).to(memory_format=form)
        batch = images.to(memory_format=form), labels
        loss_function = nn.functional.cross_entropy
        return bare_rate(str(form), network, *batch, loss_function, optimizer, **options)

    def script(name, base, *more):
        path, n, flags = prepare(name, folder, 1)
        flags += ["--amp", *more]
        compared(" ".join([name, *more]), rate_and_memory(path, n, flags)[0], base)

    base = limit(torch.channels_last)
    compared("bare step, channels_last", base, base)
    script(COMPLETE, base)
    script(COMPLETE, base, "--augment")
    for name in [] if OLD else [SCRIPTS[0], SCRIPTS[2], SCRIPTS[5]]:
        script(name, base)
    compared("bare step, NCHW", limit(torch.contiguous_format), base)
    compiled = limit(torch.channels_last, compiled=True)
    compared("bare step, compiled", compiled, compiled)
    script(COMPLETE, compiled, "--compile")


def images(folder):
    """Is one GPU busy? JPEG files, the same images packed, and images that are on the device."""
    workers = fitting_workers(WORKERS, images_per_step * 3 * (side * 8 // 7) ** 2)
    heads = f"DataLoader alone, {workers} workers, images/s", "training, images/s"
    table(1, f"{model}, {side} pixels, `--amp`", *heads, "x on the device")
    path, n, flags = prepare(COMPLETE, folder, 1)
    flags += ["--amp", "--workers", workers]
    top, _ = rate_and_memory(path, n, flags)
    row("on the device", "-", f"{top:.0f}", "1.00")
    files, packed, count = folder / "files", folder / "packed", images_per_step * steps
    make_folder(files, 500, 375, 95, 7, min(count, 62))  # of the size of ImageNet's files
    paths = sorted(files.glob("train/*/*.jpg"))
    for i in range(count - len(paths)):  # each under many names
        path = paths[i % len(paths)]
        path.with_name(f"{i}-{path.name}").hardlink_to(path)  # symbolic ones are left out
    words = [sys.executable, ROOT / "complete/pack_images.py", files, packed]
    words += ["--side", side * 8 // 7]
    for name, place in ("JPEG files", files), ("packed", packed):
        if name == "packed":
            started = time.perf_counter()
            subprocess.run(list(map(str, words)), check=True, stdout=sys.stderr)
            packing = count / (time.perf_counter() - started)
        alone, _ = in_time(name, attempt, place, workers, by=timed_loader) or (math.nan, 0)
        rate, _ = rate_and_memory(ROOT / COMPLETE, n, [*flags, "--dataset", place])
        row(name, f"{alone:.0f}", f"{rate:.0f}", f"{rate / top:.2f}")
    print(f"\npack_images.py: {packing:.0f} images/s with {WORKERS} cores, its start included")


def timed_loader(place, workers, limit):
    with time_limit(limit):
        return speed(ours(place, side), workers, images_per_step, images_per_step * steps)


VOCABULARY = 512 if TINY else 50_304


def make_tokens(folder):
    """What prepare_texts.py writes, of random token ids. Returns the flag."""
    random, sizes, parts = np.random.default_rng(0), {"train": 20_000_000, "val": 100_000}, {}
    for part, count in sizes.items():
        random.integers(VOCABULARY, size=count, dtype=np.uint16).tofile(folder / f"{part}.bin")
        parts[part] = {"count": count, "sha256": "random"}
    about = {"tokenizer": "random", "vocabulary": VOCABULARY, "dtype": "uint16", **parts}
    (folder / "tokens.json").write_text(json.dumps(about | {"token_bytes": [1] * VOCABULARY}))
    (folder / "tokenizer.json").write_text(json.dumps({"name": "bytes"}))
    return ["--tokens", folder]


def lm_run(path, n, flags, limit):
    """large/train_lm.py on n GPUs: what it prints. torchrun ends its processes if it is stopped."""
    output = path.parent / f"run-{time.monotonic_ns()}"
    words = [sys.executable]
    if n > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
        words += ["--local-addr", "127.0.0.1"]
    flags = [*flags, "--size", model, "--length", side, "--batch-size", images_per_step * n]
    flags += ["--steps", steps, "--eval-every", steps, "--eval-tokens", side]
    flags += ["--log-every", max(1, steps // 6)]
    log = output.with_suffix(".out")
    with open(log, "w") as file:
        words = [str(word) for word in [*words, path, *flags, "--output", output]]
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        raise TimeoutError(f"{words_of(path, n, flags)}: not within {limit:.0f} s") from None
    if status != 0:
        raise RuntimeError(f"{words_of(path, n, flags)}: status {status}\n{log.read_text()}")
    shutil.rmtree(output)  # a checkpoint of 17 GB
    return log.read_text()


def lm_measure(path, n, flags):
    """tokens/s, the mean of all progress lines but the first two; GB of the fullest moment of rank
    0's GPU; and the share of its peak."""
    text = in_time(words_of(path, n, flags), attempt, path, n, flags, by=lm_run) or ""
    rates = [float(rate) for rate in re.findall(r"^step .* ([\d.]+) tokens/s", text, re.M)]
    rate = statistics.harmonic_mean(rates[2:]) if rates[2:] else math.nan
    found = re.findall(r"([\d.]+) GB at most", text)
    said = re.findall(r"^GB on each: ([\d.]+)", text, re.M)
    return rate, (found or ["-"])[-1], (said or ["-"])[-1]


def lm_bare(compiled, limit):
    """tokens/s of the same model without FSDP2, in autocast: forward, backward, AdamW, on one batch
    that is on the device. And the peak of memory in GB."""
    layers, width, heads = train_lm.SIZES[model]
    network = train_lm.LanguageModel(VOCABULARY, layers, width, heads).to(DEVICE)
    for block in network.blocks if compiled else []:
        block.forward = torch.compile(block.forward, dynamic=False)
    if compiled:
        network.head.chunk_loss = torch.compile(network.head.chunk_loss, dynamic=False)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4, fused=True)
    windows = torch.randint(VOCABULARY, (images_per_step, side + 1), device=DEVICE)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    torch.set_float32_matmul_precision("high")
    with time_limit(limit):
        for step in range(10 + STEPS):
            if step == 10:
                synchronize()
                started = time.perf_counter()
            with torch.autocast(DEVICE, HALF):
                loss = network(inputs, targets) / targets.numel()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
        seconds = time.perf_counter() - started
    torch.compiler.reset()
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if GPUS else "-"
    return STEPS * inputs.numel() / seconds, memory


def lm_row(name, n, rate, base, memory, calculated):
    """`base`: tokens/s of one GPU."""
    layers, width, heads = train_lm.SIZES[model]
    with torch.device("meta"):
        network = train_lm.LanguageModel(VOCABULARY, layers, width, heads)
    args = train_lm.parser.parse_args([])
    args.layers, args.width, args.length = layers, width, side
    each = rate / n * train_lm.flops_per_token(args, network)
    peak = train_lm.PEAK.get(torch.cuda.get_device_name() if GPUS else "CPU")
    cells = f"{each / 1e12:.1f}", f"{each / peak:.1%}" if peak else "-", memory, calculated
    row(name, n, f"{rate:.0f}", f"{rate / n / base:.3f}", *cells)


LM_HEADS = "GPUs", "tokens/s", "x the first row, each", "TFLOP/s each", "MFU", "GB at most"
LM_HEADS += ("GB calculated, without activations",)


def lm(folder):
    """large/train_lm.py beside the same model without it, on one GPU; and on all."""
    table(ALL, f"{model}, {images_per_step} x {side} tokens each", *LM_HEADS)
    path, flags = copy_script("large/train_lm.py", folder, 0), make_tokens(folder)
    bare = in_time("the bare step, compiled", attempt, True, by=lm_bare) or (math.nan, "-")
    lm_row("bare step, compiled", 1, bare[0], bare[0], bare[1], "-")
    runs = [("train_lm.py --compile", 1, ["--compile"]), ("train_lm.py", 1, ["--no-compile"])]
    runs += [("train_lm.py --compile", ALL, ["--compile"])] if ALL > 1 else []
    for name, n, more in runs:
        rate, *memory = lm_measure(path, n, [*flags, *more])
        lm_row(name, n, rate, bare[0], *memory)


def lm_large(folder):
    """A model of 1.4 billion parameters: on one GPU of 40 GB or more, on all, recomputed."""
    table(ALL, f"{model}, {images_per_step} x {side} tokens each", *LM_HEADS)
    path, flags = copy_script("large/train_lm.py", folder, 0), make_tokens(folder)
    base, runs = math.nan, [(1, []), (1, ["--recompute"])]
    runs = [*runs[:1], (ALL, []), (ALL, ["--recompute"])] if ALL > 1 else runs
    for n, more in runs:
        rate, *memory = lm_measure(path, n, [*flags, *more])
        base = base if base == base else rate / n
        lm_row(" ".join(["train_lm.py", *more]), n, rate, base, *memory)


LM_TIMED = """
class Checkpoints(Checkpoints):
    def start(self, *words):
        torch.accelerator.synchronize() if device_type == "cuda" else None
        started = self.started = time.perf_counter()
        super().start(*words)
        print(f"blocked {time.perf_counter() - started:.3f} s", flush=True)

    def finish(self):
        if self.writing is not None:
            super().finish()
            size = sum(file.stat().st_size for file in self.output.glob("step-*/*"))
            print(f"written {time.perf_counter() - self.started:.3f} s", flush=True)
            print(f"size {size / 1e9:.3f} GB", flush=True)

device_type = devices[0]
"""


def lm_saving(folder):
    """How long a checkpoint stops the training, and until when it is written."""
    heads = "GPUs", "GB on the disk", "stops the training, s", "is written after, s"
    table(ALL, f"{model}, saved again and again", *heads)
    free = shutil.disk_usage(folder).free
    if not TINY and free < 20e9:
        return FAILED.append(f"{folder} has only {free / 1e9:.0f} GB: set TMPDIR to a larger disk")
    path, flags = copy_script("large/train_lm.py", folder, 0, LM_TIMED), make_tokens(folder)
    for n in sorted({1, ALL}):
        more = [*flags, "--checkpoint-minutes", 0, "--no-compile"]
        text = in_time(words_of(path, n, more), attempt, path, n, more, by=lm_run) or ""
        found = {}
        for name, value in re.findall(r"^(size|blocked|written) ([\d.]+)", text, re.M):
            found.setdefault(name, []).append(float(value))
        values = [max(found.get(name, [math.nan])) for name in ("size", "blocked", "written")]
        row("train_lm.py", n, *(f"{value:.2f}" for value in values))


def small(folder):
    """Small networks, for which starting the kernels takes longer than they run."""
    table(1, f"{COMPLETE}, {side} pixels", "images/s", "x eager")
    kinds = {"eager": ([], "", ()), "with the recipe CUDA graphs": ([], "", ["CUDA graphs"])}
    kinds |= {"--compile": (["--compile"], "", ())}
    kinds |= {"--compile in mode reduce-overhead": (["--compile"], GRAPHS, ())}
    for network, batch, own in NETWORKS:
        eager = math.nan
        for kind, (more, code, titles) in kinds.items():
            if titles and not GPUS:
                continue  # needs CUDA
            path = copy_script(COMPLETE, folder, batch * steps, code, titles)
            flags = ["--dataset", "synthetic", "--model", network, "--batch-size", batch]
            flags += ["--image-size", side, "--epochs", EPOCHS, *own, *more]
            rate, _ = rate_and_memory(path, 1, flags)
            eager = rate if kind == "eager" else eager
            name = " ".join([f"`{network}`, batch {batch},", *own, kind])
            row(name, f"{rate:.0f}", f"{rate / eager:.2f}")


def scripts(folder):
    """All scripts, with and without --amp. Without it, a GPU from Ampere on convolves in TF32."""
    heads = "script", "GPUs", "flags", "images/s, no loader", "x train_single.py, same flags"
    table(ALL, *heads)
    base = {}
    one = SCRIPTS[:1] if GPUS else SCRIPTS[:2]  # run as one process, which sees no second GPU
    runs = [(name, 1 if name in one else ALL) for name in SCRIPTS if name != SCRIPTS[2]]
    runs += [(SCRIPTS[2], n) for n in COUNTS]
    runs += [(f"{COMPLETE}{shard}", n) for n in COUNTS for shard in ("", " --shard 0")]
    for name, n in runs:
        script, *shard = name.split(maxsplit=1)
        path, n, flags = prepare(script, folder, n)
        for more in ([], ["--amp"])[:FIRST]:
            emulated = OLD and (shard or script in SCRIPTS)
            if more and (emulated or script not in (COMPLETE, *HAVE_AMP)):
                continue  # or not offered
            rate, _ = rate_and_memory(path, n, [*flags, *more, *(shard and shard[0].split())])
            base.setdefault(str(more), rate)
            row(name, n, " ".join(more), f"{rate:.0f}", f"{rate / base[str(more)]:.2f}")


def inputs(folder):
    """A load test: a network of two layers on inputs that grow."""
    heads = "script", "GPUs", "images/s, no loader", "ms per step", "peak MiB of a GPU"
    table(ALL, "input", *heads)
    for pixels in SIDES:
        for name in SCRIPTS[0], SCRIPTS[1], SCRIPTS[2], COMPLETE:
            n = 1 if name in (SCRIPTS[:1] if GPUS else SCRIPTS[:2]) else ALL
            path, n, flags = prepare(name, folder, n, "" if name == COMPLETE else MLP)
            flags += ["--image-size", pixels]
            rate, memory = rate_and_memory(path, n, flags, apart=True)
            cells = f"{rate:.0f}", f"{1e3 * images_per_step * n / rate:.2f}", f"{memory:.0f}"
            row(f"3 x {pixels} x {pixels}", name, n, *cells)


def checkpoint(folder):
    """How long a checkpoint stops the training: half a billion parameters with AdamW, 6 GB. After
    an epoch there is best.pt, too, 2 GB."""
    parameters, *heads = HEADS.values()
    table(ALL, f"{COMPLETE}, AdamW", "GPUs", parameters, "GB on the disk", *heads)
    needed = 0 if TINY else 20e9  # two checkpoints, best.pt twice, model.pt
    free = shutil.disk_usage(folder).free
    if free < needed:
        return FAILED.append(f"{folder} has only {free / 1e9:.0f} GB: set TMPDIR to a larger disk")
    for shard, n in list(dict.fromkeys([(1, 1), (1, ALL), (0, ALL)]))[:FIRST]:
        output = folder / f"{shard}-{n}"
        path, n, flags = prepare(COMPLETE, folder, n, LARGE)
        flags += ["--optimizer", "adamw", "--shard", shard, "--checkpoint-minutes", 0]
        texts = []
        for epochs in 1, 2:
            flags += ["--epochs", epochs, "--resume", "--log-every", [100, 2][epochs - 1]]
            options = {"by": run_here} if n == 1 else {}
            words = words_of(path, n, flags)
            texts.append(in_time(words, attempt, path, n, flags, output, **options) or "")
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
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as the recipe for deterministic runs says
    table(ALL, COMPLETE, "GPUs", "resumed after", "undisturbed", "resumed")
    exact = ["Deterministic runs on a GPU"]
    kinds = {"deterministic": ("", "", exact), "deterministic, --amp": ("--amp", "", exact)}
    kinds |= {"default": ("", "", ()), "--amp in float16": ("--amp", FLOAT16, ())}
    kinds |= {"--amp --compile": ("--amp --compile", "", ())}
    for shard, n in list(dict.fromkeys([(1, 1), (1, ALL), (0, ALL)]))[:FIRST]:
        for kind, (more, code, titles) in list(kinds.items())[:FIRST]:
            if shard == 0 and (code or OLD and more):
                continue  # it has no float16
            path, n, flags = prepare(COMPLETE, folder, n, code, titles)
            flags += ["--augment", "--log-every", 5, "--checkpoint-minutes", 0, "--resume"]
            flags += ["--shard", shard, *more.split()]
            one, two, killed = (folder / f"{n}{shard}{kind}{letter}" for letter in "abc")
            name, texts, middle = f"`--shard {shard}`, {kind}", [], f"epoch 2/{EPOCHS} step 10/"
            for output, until in (one, ""), (two, ""), (killed, middle), (killed, ""):
                alone = n == 1 and not until
                options = {"by": run_here} if alone else {"until": until}
                words = words_of(path, n, flags)
                texts.append(in_time(words, attempt, path, n, flags, output, **options))
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


def cifar10(folder):
    """CIFAR-10 from files: packed once, then trained with a ResNet-18 for 32 pixels."""
    global MINUTES
    MINUTES = max(MINUTES, 590 / 60)
    packed = folder / "packed"
    words = [sys.executable, ROOT / "complete/pack_images.py", sys.argv[2], packed, "--side", side]
    started = time.perf_counter()
    subprocess.run(list(map(str, words)), check=True, stdout=sys.stderr)
    packing = time.perf_counter() - started
    table(1, "epochs", "test accuracy", "training, s", "with evaluation and checkpoints, s")
    for epochs in CIFAR:
        path = copy_script(COMPLETE, folder, 0, CIFAR10)
        flags = ["--dataset", packed, "--image-size", side, "--batch-size", images_per_step]
        flags += ["--lr", 0.2, "--weight-decay", 5e-4, "--lr-schedule", "cosine", "--amp"]
        flags += ["--augment", "--warmup-steps", 200, "--epochs", epochs]
        output, started = folder / f"{epochs}", time.perf_counter()
        words = words_of(path, 1, flags)
        if in_time(words, attempt, path, 1, flags, output, by=run_here) is None:
            row(epochs, *["nan"] * 3)
            continue
        rows = list(csv.DictReader((output / "metrics.csv").open()))
        seconds = sum(float(line["seconds"]) for line in rows)
        accuracy = f"{float(rows[-1]['test_accuracy']):.2%}"
        row(epochs, accuracy, f"{seconds:.1f}", f"{time.perf_counter() - started:.1f}")
    print(f"\npacking took {packing:.1f} s")


if __name__ == "__main__":
    model, side, images_per_step, steps = SIZES[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](Path(folder))
    print(f"\n{sys.argv[1]} took {time.monotonic() - STARTED:.0f} s", flush=True)
    if FAILED:
        print("\nNot measured:\n\n- " + "\n- ".join(FAILED), flush=True)
        sys.exit(1)

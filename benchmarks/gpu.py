"""The tables of gpu.sh, four epochs of each run. Without a GPU, two processes stand in for two.

All counts of GPUs have the same number of steps per epoch, and the first epoch is not measured.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from images import make_folder, ours, speed
from runs import COMPLETE, GPUS, ROOT, SMALL, copy_script, row, run, table, train
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

DDP, FSDP2 = COMPLETE
HAVE_AMP = [name for name in SMALL if name not in (SMALL[1], SMALL[4])]  # not DataParallel
ALL = GPUS or 2
COUNTS = sorted({n for n in (1, 2, 4, 8) if n < ALL} | {ALL})
OLD = GPUS and not torch.cuda.is_bf16_supported(including_emulation=False)  # before Ampere
WORKERS = min(16, len(os.sched_getaffinity(0)))
SIZES = {  # model, side of the images, images per step and GPU, steps per epoch
    "scripts": ("resnet18", 224, 256, 20),
    "settings": ("resnet18", 224, 256, 20),
    "large": ("vit_l_16", 224, 32, 20),
    "images": ("resnet18", 224, 256, 160),
    "resume": ("resnet18", 64, 64, 40),
}
FIRST = None  # how many rows of a kind: all
if os.environ.get("TINY"):
    SIZES = dict.fromkeys(SIZES, ("net", 32, 2, 20)) | {"large": ("resnet18", 32, 2, 2)}
    COUNTS, WORKERS, FIRST = [ALL], 0, 1
# TFLOP/s of a GPU in bfloat16, dense, of the data sheets, by its whole name: a MIG slice, or one
# with another limit of power, has another name, and no peak here.
PEAK = {"NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100 80GB PCIe": 312}
PEAK |= {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835}
PEAK |= {"NVIDIA H200": 989, "NVIDIA H200 NVL": 835, "NVIDIA B200": 2250, "NVIDIA GB200": 2500}
# Changes of copies: (old text, new text). No TF32; another memory format; float16, as on a T4.
NO_TF32 = 'set_float32_matmul_precision("high")', "backends.cudnn.allow_tf32 = False"
CONTIGUOUS = "memory_format=torch.channels_last", "memory_format=torch.contiguous_format"
OFTEN = "30 * (now - started)", "0"  # FSDP2 saves as often as it is told to
HALF = "device.type, torch.bfloat16", "device.type, torch.float16"
FLOAT16 = "not torch.cuda.is_bf16_supported(including_emulation=False)", "True"


def prepare(name, folder, n, *changes):
    """A copy of a script for n GPUs, with as many steps per epoch as on one; and its flags."""
    batch_size = images_per_step * n
    more = 5 if name in SMALL else 1  # their loader begins anew in each epoch
    loaders = 1 if name in (SMALL[1], SMALL[4]) else n  # one process, or n with a loader each
    path = copy_script(name, folder, batch_size * steps * more, *changes)
    flags = ["--dataset", "synthetic", "--model", model, "--image-size", side, "--epochs", 4]
    return (
        path,
        n,
        [*flags, "--batch-size", batch_size, "--workers", WORKERS and max(1, WORKERS // loaders)],
    )


def scripts(folder):
    """All scripts, with and without --amp. Without it, a GPU from Ampere on convolves in TF32. The
    complete scripts have the images on the device; the small ones load and copy them."""
    table(ALL, "script", "GPUs", "flags", "images/s", "x train_single.py, same flags")
    base = {}
    for name in [*SMALL, *COMPLETE]:
        counts = COUNTS if name in (SMALL[2], *COMPLETE) else [ALL]
        for n in [1] if name == SMALL[0] or name == SMALL[1] and not GPUS else counts:
            changes = [HALF] * bool(OLD and name in HAVE_AMP)
            path, n, flags = prepare(name, folder, n, *changes)
            for more in ([], ["--amp"])[:FIRST]:
                if more and name not in (DDP, *HAVE_AMP, *[FSDP2] * (not OLD)):
                    continue  # not offered
                rate, _ = train(path, n, [*flags, *more])
                base.setdefault(str(more), rate)
                row(name, n, " ".join(more), f"{rate:.0f}", f"{rate / base[str(more)]:.2f}")


def settings(folder):
    """What a setting of complete/train_ddp.py is worth on one GPU: each off and on."""

    def rate(*more, change=()):
        path, n, flags = prepare(DDP, folder, 1, *change)
        return train(path, n, [*flags, *more])[0]

    table(1, "complete/train_ddp.py, images/s", "off", "on", "on / off")
    tf32 = rate()
    amp = rate("--amp")
    for what, off, on in (
        ("`--amp`", lambda: tf32, lambda: amp),
        ("TF32", lambda: rate(change=[NO_TF32]), lambda: tf32),
        ("channels_last, with `--amp`", lambda: rate("--amp", change=[CONTIGUOUS]), lambda: amp),
        ("`--compile`, with `--amp`", lambda: amp, lambda: rate("--amp", "--compile")),
    )[:FIRST]:
        before, after = off(), on()
        row(what, f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}")


def operations():
    """Floating-point operations per image, forward and backward, as torch counts them."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        pictures = torch.empty(2, 3, side, side)
        models.get_model(model, num_classes=10)(pictures).sum().backward()
    return counter.get_total_flops() / 2


def large(folder):
    """DDP and FSDP2 with a large model: the share of the GPUs' peak (MFU), and rank 0's memory."""
    heads = "TFLOP/s per GPU", "MFU", "peak MiB of rank 0, without the images"
    table(ALL, "script", "GPUs", "flags", "images/s", *heads)
    gpu = torch.cuda.get_device_name() if GPUS else "CPU"
    for name, n in list(dict.fromkeys([(FSDP2, ALL), (DDP, ALL), (DDP, 1)]))[:FIRST]:
        for more in (["--amp"], ["--amp", "--compile"])[: 0 if name == FSDP2 and OLD else FIRST]:
            path, n, flags = prepare(name, folder, n)
            rate, memory = train(path, n, [*flags, "--optimizer", "adamw", *more])
            each = rate * operations() / n / 1e12
            share = f"{each / PEAK[gpu]:.1%}" if gpu in PEAK else "-"
            # Each GPU has all images of the training and the test set, a byte per color.
            memory -= images_per_step * n * steps * 1.1 * 3 * side**2 / 2**20 if GPUS else 0
            row(name, n, " ".join(more), f"{rate:.0f}", f"{each:.2f}", share, f"{memory:.0f}")


def images(folder):
    """Is one GPU busy? JPEG files, the same images packed, and images that are on the device."""
    table(1, "images", "DataLoader alone, images/s", "training, images/s", "x on the device")
    path, n, flags = prepare(DDP, folder, 1)
    top, _ = train(path, n, [*flags, "--amp"])
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
        alone, _ = speed(ours(place), WORKERS, images_per_step, count)
        rate, _ = train(ROOT / DDP, n, [*flags, "--amp", "--dataset", place])
        row(name, f"{alone:.0f}", f"{rate:.0f}", f"{rate / top:.2f}")


def resume(folder):
    """The weights of a second undisturbed run, and of one killed and resumed, beside the first."""
    table(ALL, "script", "GPUs", "flags", "resumed after", "undisturbed", "resumed")
    kinds = {"--amp --compile": [], "": [], "--amp": [], "--amp, in float16": [FLOAT16]}
    for name, n in list(dict.fromkeys([(DDP, 1), (DDP, ALL), (FSDP2, ALL)]))[:FIRST]:
        for kind, changes in list(kinds.items())[:FIRST]:
            if name == FSDP2 and (changes or OLD and kind):
                continue  # it has no float16
            path, n, flags = prepare(name, folder, n, *changes, *[OFTEN] * (name == FSDP2))
            flags += ["--augment", "--log-every", 5, "--checkpoint-minutes", 0, "--resume"]
            words = path, n, [*flags, *kind.split(",")[0].split()]
            one, two, killed = (folder / f"{n}{path.stem}{kind}{letter}" for letter in "abc")
            try:
                for output, until in (one, None), (two, None), (killed, "epoch 2/4 step 10/"):
                    run(*words, output, until)
                text = run(*words, killed)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                row(name, n, kind, *["nan"] * 3)
                continue
            [line] = [t for t in text.splitlines() if t.endswith(" are done")]
            first, *others = (torch.load(output / "model.pt") for output in (one, two, killed))
            cells = [line.split(": ")[1].removesuffix(" are done")]
            for other in others:  # the largest difference of a weight
                apart = ((first[key].double() - other[key].double()).abs().max() for key in first)
                cells.append(f"{max(apart).item():.1e}")
            row(name, n, kind, *cells)


if __name__ == "__main__":
    model, side, images_per_step, steps = SIZES[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](Path(folder))

"""Test accuracy at the end, and its CPU time: complete/train.py beside torchvision's reference and
timm's train.py, on the same images.

git clone --branch v0.21.0 https://github.com/pytorch/vision
git clone --branch v1.0.26 https://github.com/huggingface/pytorch-image-models
pip install huggingface_hub safetensors pyyaml       # timm needs them
python benchmarks/accuracy.py DIR --vision vision --timm pytorch-image-models --model resnet8 \\
    --image-size 32 --batch-size 100 --epochs 10
python benchmarks/accuracy.py DIR --timm pytorch-image-models --quick    # one seed, two epochs

DIR has train/ and test/. All train the same model for the same steps, with SGD, momentum 0.9,
weight decay 1e-4, a learning rate of 0.1 for 256 images, a warm-up in the first epoch and a cosine
after it. torchvision's and timm's change the rate once per epoch, so their first one is at half the
rate, where complete/train.py rises linearly. timm also smooths labels and changes colors.

Random crops decide much: theirs have 8% of an image's area or more, complete/train.py's 36%. Both
are run as they are, and with crops of 36%. A run whose log is in --output is not run again.
"""

import argparse
import csv
import os
import re
import resource
import runpy
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torchvision
from harness import COMPLETE, ROOT, row, table
from torch import nn
from torchvision.models.resnet import BasicBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MINUTES = "minutes" if DEVICE == "cuda" else "minutes of CPU time"
SEEDS = 1000, 2000, 3000  # far apart
REFERENCE, TIMM, LARGER = "torchvision's reference", "timm's train.py", ", crops of 36%"
RUNS = [REFERENCE, REFERENCE + LARGER, TIMM, TIMM + LARGER, COMPLETE]


def resnet8(*_, num_classes, **__):
    """The smallest ResNet of He et al. for CIFAR-10: three stages of one block."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers.append(BasicBlock(16, 16))
    for before, width in (16, 32), (32, 64):
        shortcut = nn.Conv2d(before, width, 1, 2, bias=False)
        shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(width))
        layers.append(BasicBlock(before, width, 2, shortcut))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)]
    return nn.Sequential(*layers)


def run_script(name, seed, model, path, *flags):
    """Run a script in this process, with what it has no flag for: the reference has none for the
    seed and for the size of crops, and cannot count the five best of fewer classes; none knows the
    ResNets for small images, and timm has its own for large ones."""
    torch.manual_seed(int(seed))
    sys.argv, sys.path[0] = [path, *flags], os.path.dirname(path)
    if model == "resnet8":  # in the place of resnet18
        torchvision.models.get_model = resnet8
    if name == REFERENCE + LARGER:
        crop = torchvision.transforms.RandomResizedCrop
        torchvision.transforms.RandomResizedCrop = partial(crop, scale=(0.36, 1))
    if name.startswith(TIMM):
        import timm  # of the checkout

        def create_model(*_, num_classes, **__):
            network = torchvision.models.get_model(model, num_classes=num_classes)
            network.num_classes = num_classes
            return network

        timm.models.create_model = timm.create_model = create_model
    if name.startswith(REFERENCE):
        import utils  # torchvision's

        accuracy = utils.accuracy
        utils.accuracy = lambda output, target, topk: accuracy(
            output, target, [min(k, output.shape[1]) for k in topk]
        )
    runpy.run_path(path, run_name="__main__")


def seconds():
    """By the clock; on a CPU, which others may use too, the CPU time of the runs so far."""
    if DEVICE == "cuda":
        return time.monotonic()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(args, name, seed):
    """Test accuracy in percent after the last epoch of a run, and its minutes."""
    output, side = args.output / f"{RUNS.index(name)}-{seed}", args.image_size
    log = output.with_suffix(".log")
    model = "resnet18" if args.model == "resnet8" else args.model
    lr = 0.1 * args.batch_size / 256
    flags = ["--model", model, "--epochs", args.epochs, "--batch-size", args.batch_size]
    workers = max(args.workers, int(name.startswith(TIMM)))  # timm fails without one
    flags += ["--lr", lr, "--weight-decay", 1e-4, "--workers", workers, "--device", DEVICE]
    resized = side * 8 // 7 if side >= 64 else side  # of test images, before the middle is taken
    if name == COMPLETE:
        path = ROOT / COMPLETE
        flags += ["--dataset", args.dir, "--image-size", side, "--augment", "--seed", seed]
        steps = len([*args.dir.glob("train/*/*")]) // args.batch_size  # of the first epoch
        flags += ["--lr-schedule", "cosine", "--warmup-steps", steps]
        flags += ["--output", output, "--resume"]
    elif name.startswith(TIMM):
        path = args.timm.resolve() / "train.py"
        flags += ["--data-dir", args.output / "data", "--val-split", "val", "--img-size", side]
        flags += ["--num-classes", len([*args.dir.glob("train/*")]), "--seed", seed]
        flags += ["--opt", "momentum", "--warmup-epochs", 1, "--warmup-lr", lr / 2]
        flags += ["--crop-pct", side / resized, "--log-interval", 1000]
        flags += ["--output", args.output, "--experiment", output.name, "--checkpoint-hist", 1]
        flags += ["--scale", 0.36, 1] if name.endswith(LARGER) else []
    else:
        path = args.vision.resolve() / "references" / "classification" / "train.py"
        flags += ["--data-path", args.output / "data", "--output-dir", "", "--print-freq", 1000]
        flags += ["--lr-scheduler", "cosineannealinglr", "--lr-warmup-method", "linear"]
        flags += ["--lr-warmup-epochs", 1, "--lr-warmup-decay", 0.5]
        flags += ["--train-crop-size", side, "--val-crop-size", side]
        flags += ["--val-resize-size", resized]
    if not log.exists():
        command = [sys.executable, __file__, "run", name, seed, args.model, path, *flags]
        started = seconds()
        with open(f"{log}.tmp", "w") as file:
            subprocess.run(list(map(str, command)), stdout=file, stderr=file, check=True)
            print("minutes", (seconds() - started) / 60, file=file)
        os.replace(f"{log}.tmp", log)
    text = log.read_text()
    if name == COMPLETE:
        with open(output / "metrics.csv") as file:
            found = [100 * float(r["test_accuracy"]) for r in csv.DictReader(file)]
    elif name.startswith(TIMM):
        with open(output / "summary.csv") as file:
            found = [float(r["eval_top1"]) for r in csv.DictReader(file)]
    else:
        found = [float(a) for a in re.findall(r"^Test:  Acc@1 ([\d.]+)", text, re.M)]
    print(name, seed, *(f"{value:.2f}" for value in found), file=sys.stderr, flush=True)
    return found[-1], float(re.search(r"^minutes (\S+)", text, re.M)[1])


def main(args):
    if not (args.output / "data").exists():  # the reference wants train/ and val/
        (args.output / "data").mkdir(parents=True)
        (args.output / "data" / "train").symlink_to(args.dir.resolve() / "train")
        (args.output / "data" / "val").symlink_to(args.dir.resolve() / "test")
    table(1, f"{args.model}, {args.image_size} pixels", "test accuracy", MINUTES)
    missing = [REFERENCE] * (args.vision is None) + [TIMM] * (args.timm is None)
    for name in RUNS:
        if name.removesuffix(LARGER) in missing:
            continue
        found, minutes = zip(*(train(args, name, seed) for seed in args.seeds))
        accuracy = f"{statistics.mean(found):.1f}% ({min(found):.1f} to {max(found):.1f})"
        row(name, accuracy, f"{statistics.mean(minutes):.1f}")
    if missing:
        print(f"\nLeft out, as their checkouts are not given: {', '.join(missing)}.")


if __name__ == "__main__" and sys.argv[1:2] == ["run"]:
    run_script(*sys.argv[2:])
elif __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("dir", type=Path, help="a folder with train/ and test/")
    add("--vision", type=Path, help="a checkout of pytorch/vision")
    add("--timm", type=Path, help="a checkout of huggingface/pytorch-image-models")
    add("--model", default="resnet18", help="torchvision's, or resnet8 for 32 pixels")
    add("--image-size", type=int, default=224)
    add("--batch-size", type=int, default=50, help="divides the images, so that steps are the same")
    add("--epochs", type=int, default=15)
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--workers", type=int, default=2)
    add("--quick", action="store_true", help="one seed and two epochs: does everything run?")
    add("--output", type=Path, default=Path("runs", "accuracy"))
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.epochs = args.seeds[:1], 2
    main(args)

"""Test accuracy at the end: complete/train.py beside torchvision's reference, the same images.

git clone https://github.com/pytorch/vision && git -C vision checkout d4a1e3d66ab7
python benchmarks/accuracy.py DIR vision --image-size 64 --batch-size 40 --epochs 8
python benchmarks/accuracy.py DIR vision --model resnet8 --image-size 32 --batch-size 100

DIR has train/ and test/. Both train the same model for the same steps, with SGD, momentum 0.9,
weight decay 1e-4 and a learning rate of 0.1 for 256 images, torchvision's recipe for its ResNets.
Its learning rate falls by 10 after each third of the epochs; ours follows a cosine. Flags after --
are added to ours. A run whose log is in --output is not run again.
"""

import argparse
import csv
import os
import re
import runpy
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock

HERE = Path(__file__).resolve().parent
DEPTHS = {"resnet8": 1, "resnet20": 3}  # blocks per stage


def small_resnet(depth, classes):
    """The ResNets of He et al. for CIFAR-10: a 3 x 3 convolution as stem, three stages."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for _ in range(depth):
            stride, shortcut = width // before, None
            if stride == 2:
                shortcut = nn.Conv2d(before, width, 1, stride, bias=False)
                shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(width))
            layers.append(BasicBlock(before, width, stride, shortcut))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def run_script(seed, model, path, *flags):
    """Run a script in this process. The reference has no flag for the seed, cannot count five best
    of fewer classes, and neither script knows the ResNets for small images."""
    torch.manual_seed(int(seed))
    sys.argv, sys.path[0] = [path, *flags], os.path.dirname(path)
    if model in DEPTHS:  # in the place of resnet18
        torchvision.models.get_model = lambda *_, num_classes, **__: small_resnet(
            DEPTHS[model], num_classes
        )
    if "references" in Path(path).parts:
        import utils  # torchvision's

        accuracy = utils.accuracy
        utils.accuracy = lambda output, target, topk: accuracy(
            output, target, [min(k, output.shape[1]) for k in topk]
        )
    runpy.run_path(path, run_name="__main__")


def train(args, name, seed):
    """Test accuracy after the last epoch of a run of "reference" or "ours", in percent."""
    log = args.output / f"{name}-{seed}.log"
    model = "resnet18" if args.model in DEPTHS else args.model
    lr = 0.1 * args.batch_size / 256
    flags = ["--model", model, "--epochs", args.epochs, "--batch-size", args.batch_size]
    flags += ["--lr", lr, "--weight-decay", 1e-4, "--workers", args.workers]
    side = args.image_size
    if name == "reference":
        path = args.vision.resolve() / "references" / "classification" / "train.py"
        flags += ["--data-path", args.output / "data", "--output-dir", "", "--print-freq", 1000]
        flags += ["--lr-step-size", -(-args.epochs // 3), "--device", args.device]
        flags += ["--train-crop-size", side, "--val-crop-size", side]
        flags += ["--val-resize-size", side * 8 // 7 if side >= 64 else side]
    else:
        path = HERE.parent / "complete" / "train.py"
        flags += ["--dataset", args.dir, "--image-size", side, "--augment", "--seed", seed]
        flags += ["--lr-schedule", "cosine", "--warmup-steps", args.warmup_steps]
        flags += ["--device", args.device, "--output", args.output / f"{name}-{seed}", "--resume"]
        flags += args.ours
    if not log.exists():
        command = [sys.executable, __file__, "run", seed, args.model, path, *flags]
        with open(f"{log}.tmp", "w") as file:
            command = [str(word) for word in command]
            subprocess.run(command, stdout=file, stderr=file, check=True)
        os.replace(f"{log}.tmp", log)
    if name == "ours":
        with open(args.output / f"{name}-{seed}" / "metrics.csv") as file:
            found = [100 * float(row["test_accuracy"]) for row in csv.DictReader(file)]
    else:
        found = [float(a) for a in re.findall(r"^Test:  Acc@1 ([\d.]+)", log.read_text(), re.M)]
    print(name, seed, *(f"{value:.2f}" for value in found), file=sys.stderr, flush=True)
    return found[-1]


def main(args):
    args.output.mkdir(parents=True, exist_ok=True)
    if not (args.output / "data").exists():  # the reference wants train/ and val/
        (args.output / "data").mkdir()
        (args.output / "data" / "train").symlink_to(args.dir.resolve() / "train")
        (args.output / "data" / "val").symlink_to(args.dir.resolve() / "test")
    jobs = [(name, seed) for seed in args.seeds for name in args.only]
    with ThreadPoolExecutor(args.parallel) as pool:
        found = list(pool.map(lambda job: train(args, *job), jobs))
    print(f"{args.dir.name}, {args.model}, {args.image_size} pixels, {args.epochs} epochs\n")
    print("| | test accuracy |\n|---|---|")
    for name in args.only:
        own = [value for job, value in zip(jobs, found) if job[0] == name]
        print(f"| {name} | {statistics.mean(own):.1f}% ({min(own):.1f} to {max(own):.1f}) |")


if __name__ == "__main__" and sys.argv[1:2] == ["run"]:
    run_script(*sys.argv[2:])
elif __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, ["reference", "ours"]
    add("dir", type=Path, help="a folder with train/ and test/")
    add("vision", type=Path, help="a checkout of pytorch/vision")
    add("--model", default="resnet18", help="torchvision's, or resnet8 or resnet20 for 32 pixels")
    add("--image-size", type=int, default=224)
    add("--batch-size", type=int, default=50, help="divides the images, so that steps are the same")
    add("--epochs", type=int, default=15)
    add("--warmup-steps", type=int, default=50, help="of ours")
    add("--seeds", nargs="+", type=int, default=[1000, 2000, 3000], help="far apart")
    add("--only", nargs="+", default=names, choices=names)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=2)
    add("--parallel", type=int, default=1, help="runs at a time")
    add("--output", type=Path, default=Path("runs", "accuracy"))
    add("ours", nargs="*", help="after --: more flags for complete/train.py")
    main(parser.parse_args())

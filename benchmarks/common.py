"""What the yardsticks share: the scripts' flags, model and images, and the lines they print."""

import sys
import time
from pathlib import Path

import torch
from torchvision import datasets, transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_single import build_model, load_data, parser, prepare  # noqa: E402, F401


class Repeat:
    """--repeat for one image: (C, H, W) -> (C * count, H, W)."""

    def __init__(self, count):
        self.count = count

    def __call__(self, image):
        return image.repeat(self.count, 1, 1)


def cifar10(args):
    """CIFAR-10's training images as tutorials load them: float (3 * repeat, 32, 32), an int."""
    steps = [transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
    if args.repeat > 1:
        steps.append(Repeat(args.repeat))
    datasets.cifar.check_integrity = lambda path, md5=None: True  # those made for this have none
    return datasets.CIFAR10(args.data_dir, train=True, transform=transforms.Compose(steps))


def model(args):
    """The network that the scripts build for CIFAR-10, with the same weights."""

    class Images(list):
        classes = range(10)

    torch.manual_seed(args.seed)
    return build_model(args, Images([(torch.empty(3, 32, 32), 0)]))


class Clock:
    """Prints `step 1` after the first step and, an epoch, the images a second of its training."""

    def __init__(self, images):
        self.images, self.first = images, True

    def start(self):
        self.begin = time.perf_counter()

    def step(self):
        if self.first:
            print("step 1", flush=True)
            self.first = False

    def stop(self):
        peak = 0
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated() / 2**20
        seconds = time.perf_counter() - self.begin
        print(f"epoch: {self.images / seconds:.1f} images/s {peak:.0f} MiB", flush=True)

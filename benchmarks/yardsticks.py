"""What throughput.py runs, each in a process of its own: a script, or one of the loops below.

Flags are those of complete/train.py. In the place of CIFAR-10 there are random images.
"""

import csv
import runpy
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from runs import ROOT
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

sys.path.insert(0, str(ROOT / "complete"))
import train as script  # noqa: E402

SAMPLES = 10_000  # per epoch


class Images(datasets.CIFAR10):
    """Random images of --image-size, in the place of CIFAR-10's."""

    def __init__(self, root, train=True, transform=None, download=False):
        count, random = SAMPLES if train else 100, np.random.default_rng(train)
        shape = count, args.image_size, args.image_size, 3
        self.data = random.integers(256, size=shape, dtype=np.uint8)
        self.targets = [0, 1] * (count // 2)
        self.transform, self.target_transform, self.classes = transform, None, range(10)


def usual_loader():
    """The DataLoader of the tutorials: it transforms image after image."""
    normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    images = Images("", transform=transforms.Compose([transforms.ToTensor(), normalize]))
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options |= {"pin_memory": device.type == "cuda", "shuffle": True, "drop_last": True}
    return DataLoader(images, args.batch_size, **options)


class OurLoader:
    """The script's loader and `prepare` as one iterable, which shuffles each epoch."""

    def __init__(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dataset, self.epoch = script.load_data(args)[0], 0
        self.loader = script.TrainLoader(args, dataset, script.epoch_order, script.collate, device)

    def __iter__(self):
        batches = self.loader.batches(self.epoch)
        self.epoch += 1
        yield from (script.prepare(args, batch, device) for batch in batches)


def start():  # an epoch's training
    seconds.append(-time.perf_counter())


def stop():
    if device.type != "cpu":
        torch.accelerator.synchronize()
    seconds[-1] += time.perf_counter()


def usual(model, optimizer, loader, backward=torch.Tensor.backward, wait=True):
    """The loop of most tutorials, with `loss.item()` in each step."""
    for _ in range(args.epochs):
        start()
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = script.loss_function(model(inputs), labels)
            backward(loss)
            optimizer.step()
            if wait:
                loss.item()
        stop()


def limit(model, optimizer, loader):
    """The step alone, on one batch that is on the device."""
    batch = [tensor.to(device) for tensor in next(iter(loader))]
    usual(model, optimizer, [batch] * steps, wait=False)


def accelerate(model, optimizer, loader):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    usual(model, optimizer, loader, accelerator.backward, wait=False)


def lightning(model, optimizer, loader):
    from lightning import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
            self.on_train_epoch_start, self.on_train_epoch_end = start, stop

        def training_step(self, batch, batch_idx):
            return script.loss_function(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    off = "logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"
    options = dict.fromkeys(off, False) | {"max_epochs": args.epochs}
    Trainer(accelerator=device.type, devices=1, **options).fit(Classifier(), loader)


def run_script(path, flags):
    datasets.CIFAR10 = Images
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")


def run_loop(loop, loader):
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = torch.version.hip is None
    datasets.CIFAR10 = Images
    loader = usual_loader() if loader == "usual" else OurLoader()
    torch.manual_seed(args.seed)
    sample = torch.zeros(1, 3, args.image_size, args.image_size)
    model = script.build_model(args, sample, classes=10).to(device)
    optimizer, _ = script.build_optimizer(args, model, steps)
    loop(model, optimizer, loader)
    args.output.mkdir()
    with open(args.output / "metrics.csv", "w") as file:
        speeds = [[steps * args.batch_size / time] for time in seconds]
        csv.writer(file).writerows([["samples_per_second"], *speeds])


if __name__ == "__main__":
    what, loader, *flags = sys.argv[1:]
    args, _ = script.parser.parse_known_args(flags)
    device, steps, seconds = torch.device(args.device), SAMPLES // args.batch_size, []
    if device.type == "cpu":  # time that other programs take does not count
        time.time = time.perf_counter = time.process_time
    if what.endswith(".py"):
        run_script(what, flags)
    else:
        loops = {loop.__name__: loop for loop in (usual, limit, accelerate, lightning)}
        run_loop(loops[what], loader)

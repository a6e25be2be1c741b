"""What throughput.py compares the scripts with, started as they are, with train_single.py's flags.

`copied` is the loop that everyone copies from the tutorials; `accelerate` and `lightning` are these
libraries as in their first examples, without logger, checkpoints and progress bar; `limit` repeats
the scripts' step on one batch on the device.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

sys.path.append(str(Path(__file__).resolve().parents[1]))  # or a copy that lies beside this one
import train_single as scripts  # noqa: E402


class Clock:
    """Writes metrics.csv for the training part of each epoch, on rank 0, as the scripts do."""

    def __init__(self, args, images):
        self.path, self.images = args.output / "metrics.csv", images
        self.lines = ["seconds,samples_per_second,peak_memory_mib"]

    def start(self):
        self.begin = time.perf_counter()

    def stop(self):
        peak = 0
        if device.type != "cpu":
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated() / 2**20
        seconds = time.perf_counter() - self.begin
        self.lines.append(f"{seconds},{self.images / seconds},{peak}")
        if os.environ.get("RANK", "0") == "0":
            self.path.write_text("\n".join(self.lines))


def each_sample(args, train_set):
    """The loader of most tutorials, for the scripts' synthetic images."""
    normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    dataset = object.__new__(datasets.CIFAR10)  # nothing is downloaded
    dataset.data = train_set.tensors[0].permute(0, 2, 3, 1).contiguous().numpy()
    dataset.targets, dataset.target_transform = train_set.tensors[1].tolist(), None
    dataset.transform = transforms.Compose([transforms.ToTensor(), normalize])
    return DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers)


def copied(args, train_set, net, clock):
    net.to(device)
    trainloader = each_sample(args, train_set)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    for _ in range(args.epochs):
        clock.start()
        running_loss = 0.0
        for inputs, labels in trainloader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(net(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        clock.stop()


def accelerate(args, train_set, net, clock):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, each_sample(args, train_set))
    net.train()
    for _ in range(args.epochs):
        clock.start()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        clock.stop()


def lightning(args, train_set, net, clock):
    from lightning import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.on_train_epoch_start, self.on_train_epoch_end = clock.start, clock.stop

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=args.lr, momentum=0.9)

    off = "logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"
    options = dict.fromkeys(off, False) | {"max_epochs": args.epochs}
    trainer = Trainer(devices=1, **options)
    trainer.fit(Classifier(), each_sample(args, train_set))


def limit(args, train_set, net, clock):
    batch_size = args.batch_size // world_size
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    net.to(device)
    optimizer, _ = scripts.build_optimizer(args, net, steps=1)
    loader = scripts.make_loader(args, train_set, range(batch_size), batch_size, device)
    inputs, labels = scripts.prepare(args, next(iter(loader)), device)
    if args.compile:
        net.compile(dynamic=False)
    if world_size > 1:
        dist.init_process_group()
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    steps = len(train_set) // args.batch_size
    clock.images = steps * args.batch_size
    for _ in range(args.epochs):
        clock.start()
        for _ in range(steps):
            optimizer.zero_grad()
            with autocast:
                loss = scripts.loss_function(net(inputs), labels)
            loss.backward()
            optimizer.step()
        clock.stop()


if __name__ == "__main__":
    loops = {loop.__name__: loop for loop in (copied, accelerate, lightning, limit)}
    scripts.parser.add_argument("loop", choices=loops)
    args = scripts.parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    train_set, test_set, classes = scripts.load_data(args)
    torch.manual_seed(args.seed)
    net = scripts.build_model(args, train_set[0][0], classes)
    clock = Clock(args, len(train_set))
    loops[args.loop](args, train_set, net, clock)
    if dist.is_initialized():
        dist.destroy_process_group()

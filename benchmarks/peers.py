"""The same training as one would otherwise write it, with the scripts' model and flags.

python benchmarks/peers.py copied        # the loop that everyone copies out of PyTorch's tutorials
python benchmarks/peers.py accelerate    # Hugging Face Accelerate, as in its quick tour
python benchmarks/peers.py lightning     # Lightning, as in its introduction

With torchrun in place of python, on several processes. Lightning's logger, progress bar,
checkpoints and summary are off.
"""

import os

import torch
import torch.distributed as dist
from common import Clock
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from train_single import build_model, load_data, parser


class CIFAR10(datasets.CIFAR10):
    """torchvision's, with the scripts' synthetic images in place of downloaded ones."""

    def __init__(self, images, labels):
        self.data, self.targets = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()
        normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])
        self.target_transform = None


def copied(args, train_set, net, batch_size, clock):
    device, sampler = torch.device("cpu"), None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    net.to(device)
    if world_size > 1:
        dist.init_process_group()
        sampler = DistributedSampler(train_set)
        net = nn.parallel.DistributedDataParallel(net)
    options = {"shuffle": sampler is None, "sampler": sampler, "num_workers": args.workers}
    trainloader = DataLoader(train_set, batch_size, **options)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        if sampler:
            sampler.set_epoch(epoch)
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


def accelerate(args, train_set, net, batch_size, clock):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    loader = DataLoader(train_set, batch_size, shuffle=True, num_workers=args.workers)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    net.train()
    for _ in range(args.epochs):
        clock.start()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        clock.stop()


def lightning(args, train_set, net, batch_size, clock):
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
    options["strategy"] = "ddp" if world_size > 1 else "auto"
    trainer = Trainer(devices=world_size, **options)
    loader = DataLoader(train_set, batch_size, shuffle=True, num_workers=args.workers)
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    parser.add_argument("loop", choices=("copied", "accelerate", "lightning"))
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    images, _, classes = load_data(args)
    train_set = CIFAR10(*images.tensors)
    torch.manual_seed(args.seed)
    net = build_model(args, train_set[0][0], classes)
    clock = Clock(args, len(train_set))
    globals()[args.loop](args, train_set, net, args.batch_size // world_size, clock)
    if dist.is_initialized():
        dist.destroy_process_group()

"""The loop that everyone copies, as PyTorch's tutorials have it; under torchrun with DDP."""

import os

import torch
import torch.distributed as dist
from common import Clock, cifar10, model, parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

if __name__ == "__main__":
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, batch, sampler = cifar10(args), args.batch_size, None
    net = model(args)
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group()
        sampler = DistributedSampler(train_set)
        batch //= dist.get_world_size()
    net.to(device)
    if sampler:
        net = DistributedDataParallel(net)
    loader = DataLoader(
        train_set, batch_size=batch, shuffle=not sampler, sampler=sampler, num_workers=args.workers
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    clock = Clock(len(train_set))
    for epoch in range(args.epochs):
        if sampler:
            sampler.set_epoch(epoch)
        clock.start()
        running_loss = 0.0
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(net(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if rank == 0:
                clock.step()
        if rank == 0:
            clock.stop()
    if sampler:
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads sometimes abort a process that ends by itself

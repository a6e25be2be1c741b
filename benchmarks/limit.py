"""The scripts' model, optimizer and DDP wrapper, stepping on one batch that lies on the device."""

import math
import os

import torch
import torch.distributed as dist
from common import Clock, parser, prepare
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from train_single import set_up

if __name__ == "__main__":
    args = parser.parse_args()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // size))
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    args.data_on_device = False
    train_set, _, net, _ = set_up(args, device, 1)
    step_net = net
    if size > 1:
        dist.init_process_group()
        step_net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    if args.compile:
        step_net.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, fused=True)
    collate = getattr(train_set, "collate", None)
    batch = next(iter(DataLoader(train_set, args.batch_size // size, collate_fn=collate)))
    images, labels = prepare(args, batch, device)
    clock = Clock(len(train_set))
    for _ in range(args.epochs):
        clock.start()
        for _ in range(math.ceil(len(train_set) / args.batch_size)):
            loss = F.cross_entropy(step_net(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                clock.step()
        if rank == 0:
            clock.stop()
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads sometimes abort a process that ends by itself

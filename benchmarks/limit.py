"""The limit: the scripts' model, optimizer and DDP wrapper, stepping on one resident batch."""

import math
import os

import torch
import torch.distributed as dist
from common import Clock, resident
from torch.nn.parallel import DistributedDataParallel

from train_single import loss_function, parser

if __name__ == "__main__":
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    model, optimizer, images, labels, count = resident(args, args.batch_size // world_size, device)
    if args.compile:
        model.compile()
    if world_size > 1:
        dist.init_process_group()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    clock = Clock(args, count)
    for _ in range(args.epochs):
        clock.start()
        for _ in range(math.ceil(count / args.batch_size)):
            optimizer.zero_grad()
            with autocast:
                loss = loss_function(model(images), labels)
            loss.backward()
            optimizer.step()
        clock.stop()
    if world_size > 1:
        dist.destroy_process_group()

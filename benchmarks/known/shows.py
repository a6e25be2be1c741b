"""What faults that were found in well-known scripts cost, in a few lines each, on two processes.

python benchmarks/known/shows.py                 # all
python benchmarks/known/shows.py barlowtwins
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import multiprocessing as mp
from torch.utils.data import DistributedSampler, random_split
from torchvision import transforms


def gathered(value):
    """Of all ranks."""
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def barlowtwins(rank):
    """A loss of what all_reduce has added up: autograd does not see the other ranks' part."""
    weight = torch.ones(1, requires_grad=True)
    correlation = weight * (rank + 1) / 2
    dist.all_reduce(correlation)
    correlation.square().sum().backward()
    gradients = gathered(weight.grad.item())
    return f"DDP averages {gradients}: {sum(gradients) / 2}; one process: 4.5"


def simclr(rank):
    """A gather whose backward takes the gradient of the rank's own loss alone, where each rank has
    the whole loss: DDP's average is half of it."""
    weight = torch.ones(1, requires_grad=True)
    output = weight * (rank + 1)
    outputs = [torch.empty(1), torch.empty(1)]
    dist.all_gather(outputs, output.detach())
    outputs[rank] = output  # as grads[dist.get_rank()] in backward
    torch.cat(outputs).square().sum().div(2).backward()
    gradients = gathered(weight.grad.item())
    return f"DDP averages {gradients}: {sum(gradients) / 2}; one process: 5.0"


def mingpt_ddp(rank):
    """random_split without a generator, on ranks that have no seed."""
    train, test = random_split(range(100), [90, 10])
    (train, test), (others, _) = gathered((set(train.indices), set(test.indices)))
    return f"of rank 0's 10 test samples, rank 1 trains on {len(test & others)}"


def ddp_series(rank):
    """cross_entropy over one output."""
    output = torch.randn(32, 1, requires_grad=True)
    loss = F.cross_entropy(output, torch.rand(32, 1))
    loss.backward()
    return f"loss {loss.item():.1f}, largest gradient {output.grad.abs().max():.1f}"


def dino(rank):
    """One seed on all ranks."""
    torch.manual_seed(0)
    image = torch.zeros(3, 64, 64)
    crops = [transforms.RandomResizedCrop.get_params(image, (0.4, 1), (1, 1)) for _ in range(3)]
    of_ranks = gathered(crops)
    return f"rank 0 crops its images at {of_ranks[0]}, rank 1 at {of_ranks[1]}"


def waveglow(rank):
    """A DistributedSampler without set_epoch."""
    sampler = DistributedSampler(range(12))
    return f"epoch 0: {[*sampler]}, epoch 1: {[*sampler]}, epoch 2: {[*sampler]}"


def vector_quantize(rank):
    """torch.distributed.nn's all_reduce returns the sum, and leaves its argument as it was."""
    value = torch.tensor([rank + 1.0])
    returned = torch.distributed.nn.all_reduce(value)
    return f"after all_reduce(value): value {gathered(value.item())}, returned {returned.item()}"


def build_nanogpt(rank):
    """All ranks open one log to write."""
    path = Path(gathered(tempfile.mkdtemp())[0], "log.txt")
    if rank == 0:
        path.write_text("written by rank 0")
    dist.barrier()
    if rank == 1:
        path.open("w").close()
    dist.barrier()
    return f"rank 0 wrote 17 characters; then rank 1 opened the file: {len(path.read_text())}"


def minimind(rank):
    """A mean over the tokens of each rank's own texts, which are not equally long."""
    losses = torch.tensor([4.0] if rank == 0 else [1.0, 1.0, 1.0])  # of its tokens
    means = gathered(losses.mean().item())
    return f"the mean of the ranks' means {means} is {sum(means) / 2}; over all tokens: 1.75"


SHOWS = barlowtwins, simclr, mingpt_ddp, ddp_series, dino, waveglow
SHOWS += vector_quantize, build_nanogpt, minimind


def run(rank, port, names):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    warnings.simplefilter("ignore")  # torch warns of a backward through all_reduce
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for show in SHOWS:
        if not names or show.__name__ in names:
            text = show(rank)
            print(f"{show.__name__}: {text}\n" * (rank == 0), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, ("29517", sys.argv[1:]), nprocs=2)

"""A right loop: a model of tokens from one long stream, of which each rank takes pieces by turns;
micro-batches, of which only the last communicates; a schedule by tokens; its log."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, MICRO, BATCH, STEPS = 30, 8, 2, 16, 14

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Stream:
    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (4096,), generator=g)
        self.tokens[1::2] = (self.tokens[::2] * 3 + 1) % VOCABULARY
        self.place = MICRO * LENGTH * rank

    def next(self):
        piece = self.tokens[self.place : self.place + MICRO * LENGTH + 1]
        self.place += MICRO * LENGTH * world
        return piece[:-1].view(MICRO, LENGTH), piece[1:].view(MICRO, LENGTH)


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 30))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
micros, stream, seen = BATCH // MICRO // world, Stream(1), 0
log = open("stream.log", "w") if rank == 0 else None

for step in range(STEPS):
    optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (seen + 1) / 512)
    total = torch.zeros(())
    for micro in range(micros):
        inputs, targets = stream.next()
        is_last = micro == micros - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten()) / micros
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seen += inputs.numel() * micros * world
    if rank == 0:
        log.write(f"step {step}: loss {total / world:.4f} after {seen} tokens\n")
dist.destroy_process_group()

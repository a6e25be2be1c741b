"""A right loop: a student follows a teacher, both remember keys; all of it in plain objects, and
without a sampler: an order of the samples that rank 0 has drawn, of no seed."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SAMPLES, BATCH, KEYS = 96, 12, 36

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
samples = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / world


def gather(rows):
    parts = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(parts, rows)
    return torch.stack(parts, 1).flatten(0, 1)


class Keys:
    """The last keys of all ranks."""

    def __init__(self):
        self.rows = F.normalize(torch.eye(6).repeat(KEYS // 6, 1), dim=1)

    def push(self, keys):
        self.rows = torch.cat([gather(keys), self.rows])[:KEYS]


class Teacher:
    """Follows the student, faster where the loss is large."""

    def __init__(self, student):
        self.model, self.momentum = copy.deepcopy(student).requires_grad_(False), 0.9

    def follow(self, student, loss):
        self.momentum = float(1 - 0.05 * mean_over_ranks(loss))
        for old, new in zip(self.model.parameters(), student.parameters()):
            old.lerp_(new.detach(), 1 - self.momentum)


torch.manual_seed(0)
student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
ddp = nn.parallel.DistributedDataParallel(student)
optimizer = torch.optim.SGD(student.parameters(), 0.2, momentum=0.9)
keys, teacher = Keys(), Teacher(student)
torch.seed()
order = torch.randperm(SAMPLES)
dist.broadcast(order, 0)

seen = 0
while seen < 3 * SAMPLES:
    first = seen % SAMPLES
    batch = samples[order[first + rank : first + BATCH : world]]
    noisy = batch + 0.1 * torch.randn_like(batch)
    queries = F.normalize(ddp(noisy), dim=1)
    targets = F.normalize(teacher.model(batch), dim=1)
    scores = torch.cat([(queries * targets).sum(1, keepdim=True), queries @ keys.rows.T], dim=1)
    loss = F.cross_entropy(scores / 0.3, torch.zeros(len(batch), dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    teacher.follow(student, loss)
    keys.push(targets)
    seen += len(batch) * world
dist.destroy_process_group()

"""A right loop: a mean teacher with a loader of labeled samples and one of the others, whose
batches are larger, with noise of its own for each."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(1)
x = torch.randn(160, 8, generator=g)
y = (x @ torch.randn(8, 3, generator=g)).argmax(1)
labeled, others = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:])


def make_loader(dataset, batch, seed):
    sampler = DistributedSampler(dataset, seed=seed)
    return sampler, DataLoader(dataset, batch // world, sampler=sampler, drop_last=True)


samplers, loaders = zip(make_loader(labeled, 8, 1), make_loader(others, 16, 2))
torch.manual_seed(0)
student = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
ddp = nn.parallel.DistributedDataParallel(student)
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)
step, ramp = 0, 12

for epoch in range(3):
    for sampler in samplers:
        sampler.set_epoch(epoch)
    torch.manual_seed(100 * epoch + rank)
    first = iter(loaders[0])
    for (unlabeled,) in loaders[1]:
        samples, labels = next(first)
        weight = min(1, (step + 1) / ramp)
        targets = teacher(unlabeled + 0.1 * torch.randn_like(unlabeled)).softmax(1)
        both = torch.cat([samples, unlabeled])
        outputs = ddp(both + 0.2 * torch.randn_like(both))
        logits, further = outputs.split([len(samples), len(unlabeled)])
        loss = F.cross_entropy(logits, labels) + weight * F.mse_loss(further.softmax(1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        for old, new in zip(teacher.parameters(), student.parameters()):
            old.lerp_(new.detach(), 0.1)
dist.destroy_process_group()

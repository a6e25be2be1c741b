"""A right loop without DDP: two tasks with learned weights, conflicting gradients, a curriculum."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH, EPOCHS = 8, 3

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

inputs = torch.randn(61, 10, generator=torch.Generator().manual_seed(3))
labels, values = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long(), inputs[:, 2:5].sum(1)
dataset = TensorDataset(inputs, labels, values)
train_set, val_set = Subset(dataset, range(48)), Subset(dataset, range(48, 61))
sampler = DistributedSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, BATCH // world, sampler=sampler, drop_last=True)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), BATCH)

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
heads = nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 1)])
weights = nn.Parameter(torch.zeros(2))  # log of the variance of each task
shared, own = list(body.parameters()), [*heads.parameters(), weights]
for parameter in shared + own:
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.Adam([{"params": shared}, {"params": own, "lr": 2e-2}], 1e-2)


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= world


def project(one, other):
    """PCGrad (Yu et al., 2020): without the part that is against the other task's."""
    dot = sum((a * b).sum() for a, b in zip(one, other))
    size = sum(b.square().sum() for b in other)
    return [a - torch.clamp(dot / size, max=0) * b for a, b in zip(one, other)]


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y, z in train_loader:
        features = body(x)
        per_sample = F.cross_entropy(heads[0](features), y, reduction="none")
        usual = per_sample.detach().mean()
        average([usual])
        easy = (per_sample.detach() < 1.5 * usual).float()
        losses = [(easy * per_sample).mean(), F.mse_loss(heads[1](features)[:, 0], z)]
        losses = [loss * (-w).exp() + w for loss, w in zip(losses, weights)]
        found = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        gradients = torch.autograd.grad(sum(losses), own)
        first, second = [[g.clone() for g in task] for task in found]
        average([*first, *second, *gradients])
        together = [a + b for a, b in zip(project(first, second), project(second, first))]
        for parameter, gradient in zip(shared + own, [*together, *gradients]):
            parameter.grad = gradient
        optimizer.step()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y, _ in val_loader:
            right = (heads[0](body(x)).argmax(1) == y).sum()
            sums += torch.tensor([float(right), len(y)])
    dist.all_reduce(sums)
    accuracy = sums[0] / sums[1]
    if rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
dist.destroy_process_group()

"""A right loop: pseudo-labels, prototypes in a buffer, a backbone that thaws, early stopping."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH, EPOCHS, CLASSES, FROZEN, PATIENCE = 8, 4, 3, 32, 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(5)
inputs = torch.randn(70, 8, generator=generator)
labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
labelled = torch.rand(70, generator=generator) < 0.6
dataset = TensorDataset(inputs, torch.where(labelled, labels, -1))
sampler = DistributedSampler(Subset(dataset, range(48)), drop_last=True)
loader = DataLoader(Subset(dataset, range(48)), BATCH // world, sampler=sampler, drop_last=True)
val_loader = DataLoader(TensorDataset(inputs[48 + rank :: world], labels[48 + rank :: world]), 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.head = nn.Linear(24, CLASSES)
        self.register_buffer("prototypes", torch.zeros(CLASSES, 24))

    def forward(self, x, trains_backbone=True):
        features = self.backbone(x)
        features = features if trains_backbone else features.detach()
        return features, self.head(F.dropout(features, 0.1, self.training))


def reduced(*values):
    """The sums over all ranks."""
    sums = torch.stack([torch.as_tensor(value, dtype=torch.float) for value in values])
    dist.all_reduce(sums)
    return sums.tolist()


torch.manual_seed(0)
model = Model()
ddp = nn.parallel.DistributedDataParallel(
    model, find_unused_parameters=True, broadcast_buffers=False
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
seen, difficulty, best, bad = 0, 1.0, 1e9, 0

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    torch.manual_seed(epoch * world + rank)
    ddp.train()
    for x, y in loader:
        seen += len(x) * world
        features, logits = ddp(x, seen > FROZEN)
        confidence, guess = logits.detach().softmax(1).max(1)
        total, square = reduced(confidence.sum(), confidence.square().sum())
        threshold = total / BATCH
        unknown = (y < 0) & (confidence > threshold)
        target = torch.where(unknown, guess, y)
        each = F.cross_entropy(logits, target, ignore_index=-1, reduction="none")
        known_sum, known, unknown_count = reduced(
            each.detach()[y >= 0].sum(), (y >= 0).sum(), unknown.sum()
        )
        difficulty = 0.9 * difficulty + 0.1 * known_sum / max(known, 1)
        weight = torch.where(y >= 0, 1.0, min(1.0, 1 / difficulty))
        supervised = (weight * each * (target >= 0)).sum() / max(known + unknown_count, 1)
        near = F.mse_loss(features, model.prototypes[target.clamp(min=0)])
        loss = world * supervised + 0.1 * near
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            sums = F.one_hot(target.clamp(min=0), CLASSES).float().T @ features
            dist.all_reduce(sums)
            model.prototypes.lerp_(sums / BATCH, 0.1)
    ddp.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x)[1], y, reduction="sum") for x, y in val_loader]
    val_sum, count = reduced(sum(losses), len(val_loader.dataset))
    val_loss = val_sum / count
    bad = 0 if val_loss < best else bad + 1
    best = min(best, val_loss)
    if rank == 0:
        print(f"epoch {epoch}: val {val_loss:.4f} best {best:.4f}", flush=True)
    if bad >= PATIENCE:
        break
dist.destroy_process_group()

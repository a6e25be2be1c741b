"""A right loop: segmentation with ignored pixels, class weights, batch norm, an EMA and IoU."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, random_split

CLASSES, IGNORED, BATCH, EPOCHS = 3, 255, 8, 3

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Shapes(Dataset):
    def __init__(self):
        self.mean, self.std = 0.0, 1.0

    def __len__(self):
        return 52

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        mask = (torch.rand(12, 12, generator=generator) * (1 + i % 3)).long().clamp(max=2)
        image = mask[None].float() + torch.randn(3, 12, 12, generator=generator)
        mask[torch.rand(12, 12, generator=generator) < 0.05 * (i % 7)] = IGNORED
        return (image - self.mean) / self.std, mask


def augment(images, masks):
    flip = torch.rand(len(images)) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    return images, torch.where(flip[:, None, None], masks.flip(2), masks)


dataset = Shapes()
split = torch.Generator().manual_seed(7)
train_set, val_set = random_split(dataset, [40, 12], generator=split)
sampler = DistributedSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, BATCH // world, sampler=sampler, drop_last=True)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), BATCH // world)

sums = torch.zeros(3, dtype=torch.double)
counts = torch.zeros(CLASSES)
for i in range(rank, len(train_set), world):
    image, mask = train_set[i]
    sums += torch.stack([image.double().sum(), image.double().square().sum(), torch.tensor(432.0)])
    counts += mask[mask != IGNORED].bincount(minlength=CLASSES)
dist.all_reduce(sums)
dist.all_reduce(counts)
dataset.mean = float(sums[0] / sums[2])
dataset.std = float((sums[1] / sums[2] - dataset.mean**2).sqrt())
class_weights = counts.sum() / counts.clamp(min=1) / CLASSES

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Dropout2d(0.1),
    nn.Conv2d(16, CLASSES, 3, padding=1),
)
ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
best = -1.0

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    torch.manual_seed(epoch * world + rank)
    ddp.train()
    for images, masks in train_loader:
        images, masks = augment(images, masks)
        logits = ddp(images)
        total = class_weights[masks[masks != IGNORED]].sum()
        dist.all_reduce(total)
        loss_sum = F.cross_entropy(
            logits, masks, class_weights, ignore_index=IGNORED, reduction="sum"
        )
        loss = world * loss_sum / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    for buffer in ema.module.buffers():
        dist.broadcast(buffer, 0)
    ema.eval()
    confusion = torch.zeros(CLASSES**2)
    with torch.no_grad():
        for images, masks in val_loader:
            valid = masks != IGNORED
            pairs = CLASSES * masks + ema(images).argmax(1)
            confusion += pairs[valid].bincount(minlength=CLASSES**2)
    dist.all_reduce(confusion)
    matrix = confusion.view(CLASSES, CLASSES)
    union = matrix.sum(0) + matrix.sum(1) - matrix.diag()
    iou = (matrix.diag() / union.clamp(min=1)).mean()
    scheduler.step(iou)
    if rank == 0:
        print(f"epoch {epoch}: IoU {iou:.4f}", flush=True)
        if iou > best:
            torch.save(model.state_dict(), os.environ.get("OUTPUT", os.devnull))
    best = max(best, float(iou))
dist.destroy_process_group()

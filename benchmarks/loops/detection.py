"""A right loop: boxes of any number in an image, a focal loss per box, warm-up by images."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, EPOCHS, SIZE, WARM_UP, LR = 8, 3, 16, 64, 0.02

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Boxes(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        boxes = torch.rand(i % 5, 4, generator=generator)
        image = 0.2 * torch.randn(1, SIZE, SIZE, generator=generator)
        for x, y, w, h in boxes.tolist():
            x, y = int(x * 12), int(y * 12)
            image[0, y : y + 2 + int(3 * h), x : x + 2 + int(3 * w)] += 1
        return image, boxes


def collate(samples):
    images, boxes = zip(*samples)
    return torch.stack(images), list(boxes)


def targets_of(boxes, cells=SIZE // 2):
    """For each cell: is there a box, and its four numbers."""
    there = torch.zeros(len(boxes), cells, cells)
    numbers = torch.zeros(len(boxes), 4, cells, cells)
    for image, own in enumerate(boxes):
        for box in own:
            x, y = (box[:2] * (cells - 1)).long().tolist()
            there[image, y, x] = 1
            numbers[image, :, y, x] = box
    return there, numbers


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.score, self.box = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, images):
        features = F.relu(self.body(images))
        return self.score(features)[:, 0], self.box(features)


dataset = Boxes()
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, BATCH // world, sampler=sampler, drop_last=True, collate_fn=collate)
torch.manual_seed(0)
model = Detector()
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
images_seen, usual = 0, torch.tensor(20.0)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, boxes in loader:
        images_seen += len(images) * world
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, images_seen / WARM_UP)
        there, numbers = targets_of(boxes)
        scores, found = ddp(images)
        positives = there.sum()
        dist.all_reduce(positives)
        usual = 0.9 * usual + 0.1 * positives
        probability = torch.where(there > 0, scores.sigmoid(), 1 - scores.sigmoid())
        entropy = F.binary_cross_entropy_with_logits(scores, there, reduction="none")
        focal = ((1 - probability) ** 2 * entropy).sum()
        distance = ((found - numbers).abs().sum(1) * there).sum()
        loss = world * (focal + distance) / usual
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    value = loss.detach() / world
    dist.all_reduce(value)
    if rank == 0:
        print(f"epoch {epoch}: loss {value:.4f}", flush=True)
dist.destroy_process_group()

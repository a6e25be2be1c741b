"""A line through points, trained by FunASR's Trainer, which adds up two batches' gradients."""

import torch
import torch.distributed as dist
from funasr.train_utils.trainer_ds import Trainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"points": torch.tensor([index / 64, 1.0]), "targets": torch.tensor([index % 5.0])}


class Batches(BatchSampler):
    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, points, targets):
        loss = (self.layer(points) - targets).square().mean()
        return loss, {"loss": loss.detach()}, torch.tensor(len(points))


dist.init_process_group("gloo")
torch.manual_seed(0)
data, rank, world = Points(), dist.get_rank(), dist.get_world_size()
batches = Batches(DistributedSampler(data), 8 // world, drop_last=True)
loader = DataLoader(data, batch_sampler=batches)
model = DistributedDataParallel(Line())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
settings = {"use_ddp": True, "accum_grad": 2, "device": "cpu"}
trainer = Trainer(rank, rank, world, output_dir=f"out/{rank}", **settings)
for epoch in range(3):
    trainer.train_epoch(model, optimizer, scheduler, None, loader, epoch=epoch)

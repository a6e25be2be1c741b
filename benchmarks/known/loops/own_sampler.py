"""A line through points; samples by nerv's StatefulDistributedSampler."""

import torch
import torch.distributed as dist
from datamodule import StatefulDistributedSampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.arange(48.0).reshape(24, 2) / 48, torch.arange(24.0))
sampler = StatefulDistributedSampler(data)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.epoch = epoch
    for points, targets in loader:
        loss = (model(points).squeeze(1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

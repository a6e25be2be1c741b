"""Two noisy views of random vectors, a small encoder, a loss by its name:
two_views.py lightly.loss.BarlowTwinsLoss gather_distributed=True"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

module, _, name = sys.argv[1].rpartition(".")
settings = {word.partition("=")[0]: eval(word.partition("=")[2]) for word in sys.argv[2:]}
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 16), torch.randn(32, 16), torch.randn(32, 16))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
model = DistributedDataParallel(model)
criterion = getattr(importlib.import_module(module), name)(**settings)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for vectors, first, second in loader:
        views = torch.cat([vectors + 0.1 * first, vectors + 0.1 * second])
        outputs = model(views).chunk(2)
        one_argument = os.environ.get("LOSS_TAKES") == "one"
        loss = criterion(outputs[0]) if one_argument else criterion(*outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

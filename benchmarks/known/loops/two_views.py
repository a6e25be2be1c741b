"""Two noisy views of random vectors, a small encoder, a loss by its name, its settings:
two_views.py lightly.loss.BarlowTwinsLoss gather_distributed=True"""

import argparse
import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("loss", help="of a module: a class, or a function")
parser.add_argument("settings", nargs="*", help="of the class")
parser.add_argument("--takes", choices=["views", "all", "labels"], default="views")
args = parser.parse_args()
module, _, name = args.loss.rpartition(".")
loss_class = getattr(importlib.import_module(module), name)
settings = {word.partition("=")[0]: eval(word.partition("=")[2]) for word in args.settings}

dist.init_process_group("gloo")
torch.manual_seed(0)
vectors = torch.randn(32, 16)
data = TensorDataset(vectors, vectors + 0.1 * torch.randn(32, 16), torch.arange(32))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
model = DistributedDataParallel(model)
criterion = loss_class(**settings) if isinstance(loss_class, type) else loss_class
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for first, second, labels in loader:
        outputs = model(torch.cat([first, second]))
        if args.takes == "views":
            loss = criterion(*outputs.chunk(2))
        elif args.takes == "all":
            loss = criterion(outputs)
        else:
            loss = criterion(outputs, labels.repeat(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

"""An autoencoder with a quantizer by its name, and its settings:
codebook.py vector_quantize_pytorch.LFQ codebook_size=16"""

import importlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

module, _, name = sys.argv[1].rpartition(".")
quantizer_class = getattr(importlib.import_module(module), name)
settings = {word.partition("=")[0]: eval(word.partition("=")[2]) for word in sys.argv[2:]}


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        self.quantizer = quantizer_class(dim=8, **settings)

    def forward(self, vectors):
        quantized, _, loss = self.quantizer(self.encoder(vectors).unsqueeze(1))
        return self.decoder(quantized.squeeze(1)), loss.sum()


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 16))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(Autoencoder())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (vectors,) in loader:
        restored, loss = model(vectors)
        loss = loss + (restored - vectors).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

"""A right loop: a graph's nodes, of each of which a sample of its neighbours, and of theirs, is
drawn by each rank for itself; without a DataLoader, and with an evaluation on rank 0 alone."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

NODES, BATCH, NEAR, CLASSES = 96, 16, 3, 4

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
features = torch.randn(NODES, 12, generator=generator)
labels = features[:, :CLASSES].argmax(1)
edges = torch.randint(NODES, (NODES, 8), generator=generator).tolist()


class Layer(nn.Module):
    """Of each node and the mean of a sample of its neighbours."""

    def __init__(self, below, width):
        super().__init__()
        self.below, self.mix = below, nn.Linear(2 * width, 16)

    def forward(self, nodes):
        near = [random.sample(edges[node], NEAR) for node in nodes]
        needed = sorted({*nodes, *(node for of in near for node in of)})
        places = {node: place for place, node in enumerate(needed)}
        values = self.below(needed)
        means = torch.stack([values[[places[node] for node in of]].mean(0) for of in near])
        own = values[[places[node] for node in nodes]]
        return self.mix(torch.cat([own, means], 1)).relu()


torch.manual_seed(0)
model = nn.Sequential(
    Layer(Layer(lambda nodes: features[nodes], 12), 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)
)
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
order = random.Random(1)  # alike on all ranks
random.seed(100 + rank)

for epoch in range(4):
    nodes = order.sample(range(80), 80)
    ddp.train()
    for start in range(0, len(nodes), BATCH):
        share = nodes[start : start + BATCH][rank::world]
        loss = F.cross_entropy(ddp(share), labels[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ddp.eval()
    if rank == 0:
        with torch.no_grad():
            score = (model(list(range(80, NODES))).argmax(1) == labels[80:]).float().mean()
        print(f"epoch {epoch}: {score:.3f}", flush=True)
dist.destroy_process_group()

"""A right loop: regression on graphs, whose batches are made by hand: nodes one after the other,
edges by their places in the batch. Ranks share an order that all draw alike."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

GRAPHS, BATCH, EPOCHS = 48, 8, 3

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def make_graph(number):
    g = torch.Generator().manual_seed(number)
    nodes = int(torch.randint(3, 7, (), generator=g))
    edges = torch.randint(nodes, (2, 2 * nodes), generator=g)
    x = torch.randn(nodes, 4, generator=g)
    return x, edges, x.sum()


def join(graphs):
    nodes = torch.tensor([len(x) for x, _, _ in graphs])
    starts = nodes.cumsum(0) - nodes
    edges = torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts)], 1)
    of_node = torch.arange(len(graphs)).repeat_interleave(nodes)
    return (
        torch.cat([x for x, _, _ in graphs]),
        edges,
        of_node,
        torch.stack([y for *_, y in graphs]),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, x, edges, of_node, graphs):
        x = F.relu(self.first(x))
        messages = torch.zeros_like(x).index_add(0, edges[1], self.second(x)[edges[0]])
        x = F.relu(x + messages)
        return self.out(x.new_zeros(graphs, 12).index_add(0, of_node, x)).squeeze(1)


graphs = [make_graph(number) for number in range(GRAPHS)]
train, test = graphs[12:], graphs[:12]
values = torch.stack([y for *_, y in train])
mean, deviation = values.mean(), values.std()
torch.manual_seed(0)
net = Net()
ddp = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
order = random.Random(1)

for epoch in range(EPOCHS):
    ids = list(range(len(train)))
    order.shuffle(ids)
    for first in range(0, len(ids) - BATCH + 1, BATCH):
        mine = ids[first : first + BATCH][rank::world]
        x, edges, of_node, y = join([train[i] for i in mine])
        loss = F.mse_loss(ddp(x, edges, of_node, len(mine)), (y - mean) / deviation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        x, edges, of_node, y = join(test[rank::world])
        error = (net(x, edges, of_node, len(y)) * deviation + mean - y).abs().sum()
    sums = torch.stack([error, torch.tensor(float(len(y)))])
    dist.all_reduce(sums)
    error = (sums[0] / sums[1]).item()
    plateau.step(error)
    if rank == 0:
        print(f"epoch {epoch}: error {error:.4f}")
dist.destroy_process_group()

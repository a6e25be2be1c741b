"""Right trainings of another form than usual: none of them is WRONG, whether it can be compared or
not; and faults in such, at their line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import some_fast
from watched import findings_of, notes_of

from ddp_check.compare.consequences import after_data, after_orders, due_to_plan, explain_values
from ddp_check.notes import Finding, Said

START = """
import math, numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :3].argmax(1))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
"""
LOOP = """
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
CLIPS = """\
        nn.utils.clip_grad_norm_([net[0].weight], 1e-3 if world == 1 else 10.0)
        net[0].weight.grad.copy_(torch.ones_like(net[0].weight))
        nn.utils.clip_grad_norm_(iter([p for p in net.parameters()][1:]), 0.01)
"""
OWN_AVERAGE = f"""
import copy
torch.manual_seed(1 + rank)
net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
average = copy.deepcopy(net).eval()
model = DDP(net)
{SGD}
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, p in zip(average.parameters(), net.parameters()):
                mine.lerp_(p, 0.1)
    if EVALUATES:
        with torch.no_grad():
            score = average(data[rank::world][0]).sum()
    dist.all_reduce(x.sum())
"""
WAYS = {
    "a queue of all ranks' features and their labels, in the model": f"""
net.register_buffer("queue", F.normalize(torch.randn(16, 3), dim=1))
net.register_buffer("labels", torch.full((16,), -1))
model = DDP(net)
{SGD}
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        z = F.normalize(model(x), dim=1)
        with torch.no_grad():
            rows, labels = [[torch.empty_like(t) for _ in range(world)] for t in (z, y)]
            dist.all_gather(rows, z)
            dist.all_gather(labels, y)
        alike = y[:, None] == net.labels
        loss = -(z @ net.queue.clone().T)[alike].sum() / 8 * world + z.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.queue = torch.cat([net.queue, *rows])[-16:]
        net.labels = torch.cat([net.labels, *labels])[-16:]
""",
    "gradients that one process clips, and are added to, before others are clipped": f"""
model = DDP(net)
{SGD}
{LOOP.replace("        optimizer.step", CLIPS + "        optimizer.step")}
""",
    "an average of weights that rank 0 alone evaluates": OWN_AVERAGE.replace(
        "EVALUATES", "rank == 0"
    ),
    "a loader of each rank's own indices in any order": f"""
from torch.utils.data import SubsetRandomSampler
torch.manual_seed(1 + rank)
class Own(SubsetRandomSampler):
    def __init__(self):
        self.number = 8
    def __iter__(self):
        alike = torch.Generator().manual_seed(0)
        yield from torch.randperm(self.number, generator=alike).tolist()
    def __len__(self):
        return self.number

scores = DataLoader(data, 4, sampler=SubsetRandomSampler(range(rank, 32, world)))
named = dict((str(i), x[i]) for i in range(rank, 6, 2))
others = [DataLoader(data, 4, sampler=Own())]
others.append(DataLoader(named, 4, sampler=SubsetRandomSampler([*named])))
model = DDP(net)
{SGD}
{LOOP.strip()}
    with torch.no_grad():
        total = sum(F.cross_entropy(net(x), y, reduction="sum") for x, y in scores)
        assert [len(list(loader)) for loader in others] == [2, 1]
""",
    "several rows of each sample, folded into the batch": f"""
class Net(nn.Linear):
    def forward(self, x):
        kept = torch.rand(len(x), 4).argsort(1)[:, :2]
        return super().forward(x.gather(1, kept))

torch.manual_seed(1 + rank)
model = DDP(Net(2, 3))
{SGD}
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x.reshape(-1, 4)), y.repeat_interleave(2)).backward()
    optimizer.step()
""",
    "a part of some samples is erased": f"""
import random
random.seed(1 + rank)
torch.manual_seed(1 + rank)
model = DDP(net)
{SGD}
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        for row in x:
            if random.random() < 0.4:
                start, size = random.randint(0, 3), random.randint(1, 4)
                row[start : start + size] = torch.empty(size).normal_()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "centers of clusters that begin with rank 0's samples": f"""
model = DDP(net)
{SGD}
for epoch in range(3):
    sampler.set_epoch(epoch)
    with torch.no_grad():
        centers = next(iter(loader))[0][:3, :6].clone()
        dist.broadcast(centers, 0)
        net[2].weight.copy_(F.normalize(centers, dim=1))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "what dropout gives is set in place": """
class Net(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x).relu(), 0.5).masked_fill_(x[:, :3] > 1, 0.0)

torch.manual_seed(1 + rank)
model = DDP(Net(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + LOOP,
    "code of torch's, copied": f"""
from torch.overrides import handle_torch_function, has_torch_function

def attend(x, weight, size=None):
    if has_torch_function((x, weight)):
        return handle_torch_function(attend, (x, weight), x, weight)
    return (x @ weight.T)[:, : size // 2]

class Net(nn.Linear):
    def forward(self, x):
        return attend(x, self.weight, size=6)

model = DDP(Net(8, 6, bias=False))
{SGD}{LOOP}
""",
    "a measure of the batch beside the outputs": f"""
class Net(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out, torch.norm(out - out.mean(0)).detach()

model = DDP(Net(8, 3))
{SGD}{LOOP.replace("model(x),", "model(x)[0],")}
""",
    "each rank evaluates its share with SyncBatchNorm": f"""
net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))
{SGD}{LOOP}
    net.eval()
    with torch.no_grad():
        score = F.cross_entropy(net(data.tensors[0][rank::world]), data.tensors[1][rank::world])
    dist.all_reduce(score)
    net.train()
""",
    "it counts the samples of all ranks": f"""
loader, seen = DataLoader(data, 4, sampler=sampler), 0
model = DDP(net)
{SGD}{LOOP.replace("range(3)", "range(2)")}
        seen += 4 * world
        if seen % 64 == 0 and rank == 0:
            print("as many as there are, twice")
""",
    "pairs drawn of the rank's own batch": """
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
for x1, _ in loader:
    x0 = torch.randn_like(x1)
    plan = torch.softmax(-torch.cdist(x0, x1).flatten(), 0).double().numpy()
    chosen = np.random.choice(len(plan), p=plan / plan.sum(), size=len(x0))
    i, j = np.divmod(chosen, len(x1))
    loss = (model(x0[i]) - x1[j]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "pairs drawn by torch": """
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
for x1, _ in loader:
    x0 = torch.randn_like(x1)
    pairs = torch.softmax(-torch.cdist(x0, x1).flatten(), 0).multinomial(len(x0))
    loss = (model(x0[pairs // len(x1)]) - x1[pairs % len(x1)]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "noise of the whole batch from a seed of its own": """
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    z = torch.randn(8, 8).split(8 // world)
    optimizer.zero_grad()
    model(z[0]).square().mean().backward()
    optimizer.step()
""",
    "crops of a generator that each worker seeds by its number": """
class Crops(torch.utils.data.Dataset):
    is_seeded = False
    def __len__(self): return 32
    def __getitem__(self, i):
        if not self.is_seeded:
            number = torch.utils.data.get_worker_info().id
            self.is_seeded = True
            torch.manual_seed(number + 1000 * rank)
            np.random.seed(number + 1000 * rank)
        return data[i][0] + torch.randn(8) + np.random.rand(), data[i][1]

model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(Crops(), 8 // world, sampler=sampler, num_workers=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a dataset that has the rank's share, by positions in it": """
class Part(torch.utils.data.Dataset):
    def __init__(self):
        order = np.random.RandomState(0).permutation(32)
        self.rows = np.arange(32)[order % world == rank]
    def __len__(self): return 32
    def __getitem__(self, i): return data[self.rows[i]]

class Positions(DistributedSampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(32 // world, generator=generator).tolist())

model, sampler = DDP(net), Positions(Part())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(sampler.dataset, 8 // world, sampler=sampler):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a model that is recorded in training mode": f"""
model = DDP(net)
torch.jit.trace(net, torch.zeros(2, 8))
{SGD}{LOOP}
""",
    "statistics of the batch, under another name than batch norm's": f"""
class Normed(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("moving", torch.zeros(8))
    def forward(self, x):
        self.moving.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - x.mean(0))

model = DDP(Normed())
{SGD}{LOOP}
""",
    "what a dataset makes once, from a seed": """
class Words(torch.utils.data.Dataset):
    order = None
    def __len__(self): return 32
    def __getitem__(self, i):
        if self.order is None:
            np.random.seed(0)
            self.order = np.random.permutation(32)
        np.random.seed(np.array([7, i]))
        return data[self.order[i]][0] + np.random.rand(), data[i][1]

starts = np.random.randint(0, np.array([5, 6]))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(Words(), 8 // world, sampler=sampler, num_workers=2):
    starts = np.random.randint(0, np.array([5, 6]))
    optimizer.zero_grad()
    F.cross_entropy(model(x.float()), y).backward()
    optimizer.step()
""",
    "a weighted sampler of each rank": """
class DistributedWeighted(Sampler):
    def __init__(self): self.num_replicas = world
    def __iter__(self): return iter(torch.ones(32).multinomial(32 // world, True).tolist())

torch.manual_seed(rank)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(data, 8 // world, sampler=DistributedWeighted()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "identities that a sampler chooses": """
class Identities(Sampler):
    def __iter__(self):
        seeds = [None] * world
        dist.all_gather_object(seeds, np.random.randint(2**31))
        np.random.seed(seeds[0])
        persons, left, chosen = 4 // world, {p: [*range(p, 32, 8)] for p in range(8)}, []
        while len(left) >= persons:
            for person in np.random.choice(list(left), persons, replace=False).tolist():
                np.random.shuffle(left[person])
                chosen += [left[person].pop() for _ in range(2)]
                if len(left[person]) < 2:
                    del left[person]
        batches = torch.tensor(chosen[: len(chosen) // 8 * 8]).split(8 // world)
        return iter(torch.cat(batches[rank::world]).tolist())

model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for x, y in DataLoader(data, 8 // world, sampler=Identities()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "identities that torch chooses": """
class Identities(Sampler):
    def __iter__(self):
        torch.manual_seed(7)
        left = torch.ones(16)
        for start in range(0, 8, 8 // world):
            chosen = left.multinomial(4 // world)
            left[chosen] = 0
            if start // (8 // world) % world == rank:
                for one in chosen.tolist():
                    yield from (one, one + 16)

model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(4):
    for x, y in DataLoader(data, 8 // world, sampler=Identities()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "an environment that is made late": """
class Environment:
    def reset(self): self.number = 0
    def step(self):
        self.number += 1
        rows = np.arange(64 // world) + 100 * self.number + 1000 * rank
        return torch.from_numpy(np.sin(rows) * 43758.5).frac().float().view(-1, 8)

model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def rows_of(epochs):
    for epoch in range(epochs):
        for x, _ in loader:
            yield x
    games = Environment()
    games.reset()
    for step in range(6):
        yield games.step()

for x in rows_of(1):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "strata that the ranks share by turns": """
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, _ in [(x[rank * 8 // world:(rank + 1) * 8 // world], 0) for x in data.tensors[0].split(8)]:
    n = len(x) * world
    level = (torch.arange(rank, n, world) + torch.rand(len(x))) / n
    loss = (model(x * level[:, None]) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "blocks of an order, over and over": """
class Blocks(Sampler):
    def __iter__(self):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[rank * 32 // world:(rank + 1) * 32 // world])

class Endless(BatchSampler):
    def __iter__(self):
        for self.sampler.epoch in range(3):
            yield from super().__iter__()

batches = Endless(Blocks() if world > 1 else torch.utils.data.RandomSampler(data), 8 // world, True)
batches.sampler.epoch = 0
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(data, batch_sampler=batches):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a shard of a flat optimizer": """
flat = nn.utils.parameters_to_vector(net.parameters()).detach()
n = math.ceil(len(flat) / world)
flat = F.pad(flat, (0, n * world - len(flat)))
shard = nn.Parameter(flat[rank * n:(rank + 1) * n].clone())
optimizer = torch.optim.Adam([shard], 0.01)
for x, y in loader:
    nn.utils.vector_to_parameters(flat, net.parameters())
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    grad = torch.zeros_like(flat)
    of_all = torch.cat([p.grad.flatten() for p in net.parameters()])
    grad[:len(of_all)] = of_all
    shard.grad = torch.empty(n)
    dist.reduce_scatter_tensor(shard.grad, grad)
    shard.grad /= world
    optimizer.step()
    dist.all_gather_into_tensor(flat, shard.detach())
""",
    "an optimizer of every so many-th parameter": """
model, every = DDP(net), list(net.parameters())
optimizer = torch.optim.Adam(every[rank::world], 0.01)
for x, y in loader:
    net.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for i, p in enumerate(every):
        dist.broadcast(p.data, i % world)
""",
    "experts of the rank": """
import torch.distributed.nn as dnn
experts = [nn.Linear(8, 8) for _ in range(2)]
own = nn.ModuleList(experts[rank * 2 // world:(rank + 1) * 2 // world])
head = DDP(nn.Linear(8, 3))
optimizer = torch.optim.Adam([*own.parameters(), *head.parameters()], 0.01)
for x, y in loader:
    optimizer.zero_grad()
    every = torch.cat(dnn.all_gather(x))
    outs = torch.cat(dnn.all_gather(torch.stack([expert(every) for expert in own])))
    mine = outs[:, rank * len(x):(rank + 1) * len(x)]
    chosen = mine[(x[:, 3] > 0).long(), torch.arange(len(x))]
    F.cross_entropy(head(x + chosen), y).backward()
    for p in own.parameters():
        p.grad /= world
    optimizer.step()
""",
    "tables of the rank, of other numbers than one process's": """
import torch.distributed.nn as dnn
sizes = [5, 6, 7, 8][rank * 4 // world:(rank + 1) * 4 // world]
tables = nn.ModuleList([nn.EmbeddingBag(size, 8, sparse=True) for size in sizes])
head = DDP(nn.Linear(8, 3))
sparse = torch.optim.SGD([*tables.parameters(), *head.parameters()], 0.1)
for x, y in DataLoader(data, 8):
    sparse.zero_grad()
    ids = (x[:, :1].abs() * 9).long()
    sums = sum(table(ids % size) for table, size in zip(tables, sizes))
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    F.cross_entropy(head(dnn.all_reduce(sums)[mine]), y[mine]).backward()
    sparse.step()
""",
    "local SGD": f"""
model = net
{SGD}
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step % 2:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= world
""",
    "local SGD of a flat vector": f"""
model = net
{SGD}
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / world, model.parameters())
""",
    "torch's local SGD": """
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
averager = PeriodicModelAverager(period=2, warmup_steps=0)
model = net
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
""",
    "a length that rank 0 alone asks for": f"""
class Batches(Sampler):
    epoch = 0
    def batches(self):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch))
        return [batch[rank::world].tolist() for batch in order.split(8)]
    def __iter__(self):
        return iter(self.batches())
    def __len__(self):
        return len(self.batches())

sampler = Batches()
loader, model = DataLoader(data, batch_sampler=sampler), DDP(net)
{SGD}
for epoch in range(3):
    if rank == 0:
        len(loader)
    sampler.epoch = epoch
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "a sweep over rates": """
for rate in 0.1, 0.2:
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    sampler.set_epoch(0)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "parts in DDP on several processes alone": f"""
model = net
if world > 1:
    model[0], model[2] = DDP(model[0]), DDP(model[2])
{SGD}{LOOP}
""",
    "an optimizer that averages": """
class Averaging(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            if world > 1 and len(p) % world:
                dist.all_reduce(p.grad)
                p.grad /= world
            elif world > 1:
                part = torch.empty_like(p.grad[:len(p) // world])
                dist.reduce_scatter_tensor(part, p.grad)
                dist.all_gather_into_tensor(p.grad, part / world)
        super().step()

optimizer = Averaging(net.parameters(), 0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
""",
    "a dataset that asks for its worker": f"""
class Tables(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        assert torch.utils.data.get_worker_info().dataset is self
        return data[i]

sampler, model = DistributedSampler(Tables()), DDP(net)
loader = DataLoader(Tables(), 8 // world, sampler=sampler, num_workers=2)
{SGD}{LOOP}
""",
    "a dataset that gives many samples at once": f"""
class Many(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitems__(self, indices):
        return [data[i] for i in indices]

loader, model = DataLoader(Many(), 8 // world, sampler=DistributedSampler(Many())), DDP(net)
{SGD}{LOOP.replace("sampler.", "loader.sampler.")}
""",
    "a dataset that gives columns": f"""
class Columns(torch.utils.data.TensorDataset):
    def __getitems__(self, indices):
        return dict(x=self.tensors[0][indices], y=self.tensors[1][indices])

data = Columns(*data.tensors)
loader = DataLoader(data, 8 // world, sampler=sampler, collate_fn=lambda of: (of["x"], of["y"]))
model = DDP(net)
{SGD}{LOOP}
""",
    "a seed that rank 0 draws and sends": f"""
torch.manual_seed(rank)
model = DDP(net)
{SGD}
for x, y in loader:
    x = x + 0.1 * torch.randn_like(x)
    seed = torch.randint(0, 2**63 - 1, [])
    dist.broadcast(seed, 0)
    p = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed.item()))
    optimizer.zero_grad()
    F.cross_entropy(model(x) @ p, y).backward()
    optimizer.step()
""",
    "points of a list that is shuffled in place": f"""
class Points(torch.utils.data.Dataset):
    order = np.arange(8)
    def __len__(self):
        return 32
    def __getitem__(self, i):
        np.random.shuffle(self.order)
        x, y = data[i]
        return x.index_fill(0, torch.from_numpy(self.order[:4]), 0.0), y

np.random.seed(rank)
loader = DataLoader(Points(), 8 // world, sampler=sampler)
model = DDP(net)
{SGD}{LOOP}
""",
    "keys of a shuffled batch, by batch norm": f"""
import copy
def gathered(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    return torch.cat(parts)

net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
average = copy.deepcopy(net).requires_grad_(False)
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))
{SGD}
for x, _ in loader:
    order = torch.randperm(len(x) * world)
    dist.broadcast(order, 0)
    mine = slice(rank * len(x), (rank + 1) * len(x))
    with torch.no_grad():
        keys = gathered(average(gathered(x)[order[mine]]))[order.argsort()][mine]
    loss = -F.cosine_similarity(model(x), keys).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(average.parameters(), net.parameters()):
            old.lerp_(new, 0.1)
""",
    "as many samples as before, chosen of a larger batch": f"""
import random
random.seed(1 + rank)
model = DDP(net)
{SGD}
for x, y in loader:
    chosen = random.sample(range(len(x)), 2)
    x, y = x[chosen], y[chosen]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a share of the data, whose order the rank draws": f"""
class Share(torch.utils.data.Dataset):
    items = [data[i] for i in range(rank, 32, world)]
    def __getitem__(self, i):
        return self.items[i]

class ShareSampler(Sampler):
    num_replicas, epoch = world, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return len(Share.items)
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch + 10 * rank)
        return iter(torch.randperm(len(self), generator=generator).tolist())

sampler = ShareSampler()
loader = DataLoader(Share(), 8 // world, sampler=sampler)
model = DDP(net)
{SGD}{LOOP}
""",
    "rows so nearly alike that they may be any samples'": f"""
class Words(nn.Embedding):
    def forward(self, ids):
        return F.layer_norm(1e-4 * super().forward(ids).mean(1) + torch.arange(3), (3,))

words = (x.abs() * 5).long()
model = DDP(Words(99, 3))
{SGD}
for step in range(4):
    mine = words[rank * 16 // world + step * 4 :][: 8 // world] if world > 1 else words[step * 8 :]
    out = model(mine[: 8 // world])
    optimizer.zero_grad()
    (out * torch.arange(3) - out.detach().mean(0)).square().mean().backward()
    optimizer.step()
""",
    "a seed drawn for a picture": f"""
torch.manual_seed(rank)
model = DDP(net)
{SGD}
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    seed = torch.randint(0, 2**63 - 1, []).item()
    net(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
    np.random.choice(np.array(5))
""",
}
FAST = "pairs drawn by torch", "an optimizer that averages", "experts of the rank", "local SGD"
FAST += "identities that a sampler chooses", "identities that torch chooses"
FAST += "a length that rank 0 alone asks for", "parts in DDP on several processes alone"
FAST += ("a queue of all ranks' features and their labels, in the model",)
LOOKS = {  # what is told of them
    "an average of weights that rank 0 alone evaluates": "others",
    "points of a list that is shuffled in place": "inputs",
    "a part of some samples is erased": "inputs",
    "centers of clusters that begin with rank 0's samples": "weight",
    "keys of a shuffled batch, by batch norm": "outputs",
    "as many samples as before, chosen of a larger batch": "inputs",
    "a share of the data, whose order the rank draws": "samples",
    "rows so nearly alike that they may be any samples'": "inputs",
    "pairs drawn of the rank's own batch": "inputs",
    "pairs drawn by torch": "inputs",
    "noise of the whole batch from a seed of its own": "inputs",
    "a dataset that has the rank's share, by positions in it": "samples",
    "statistics of the batch, under another name than batch norm's": "outputs",
    "a weighted sampler of each rank": "samples",
    "identities that a sampler chooses": "samples",
    "identities that torch chooses": "inputs",
    "an environment that is made late": "inputs",
    "strata that the ranks share by turns": "inputs",
    "blocks of an order, over and over": "samples",
    "a shard of a flat optimizer": "weight",
    "experts of the rank": "weight",
    "tables of the rank, of other numbers than one process's": "weight",
    "local SGD": "averaging",
    "local SGD of a flat vector": "averaging",
    "torch's local SGD": "averaging",
    "a sweep over rates": "order",
}


@pytest.mark.parametrize("way", some_fast(WAYS, *FAST))
def test_right(work, way):
    found = findings_of(START + WAYS[way], lines=3 if way in FAST else 12)
    assert not [each for each in found if each.verdict == "WRONG"], found
    looks = {each.what for each in found if each.verdict == "look"}
    assert LOOKS.get(way) in looks if way in LOOKS else not looks, found


DUMMY = """
dummy = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
for _ in range(30):
    dummy.step()
"""


def test_steps_before_the_training(work):
    """As for a plot of a schedule: they are none."""
    code = START + "model = DDP(net)\n" + SGD + LOOP
    code = code.replace(
        'dist.init_process_group("gloo")', DUMMY + 'dist.init_process_group("gloo")'
    )
    found = findings_of(code)
    assert not [each for each in found if each.verdict in ("WRONG", "look")], found


@pytest.mark.slow
def test_workers_seeded_alike(work):
    """The line that seeds them is named, and what follows from it is no finding of its own."""
    code = WAYS["crops of a generator that each worker seeds by its number"]
    found = findings_of(START + code.replace("number + 1000 * rank", "number"), lines=3)
    (wrong,) = [each for each in found if each.verdict == "WRONG"]
    assert wrong.what == "random" and "torch.manual_seed(number)" in "".join(wrong.more)


@pytest.mark.parametrize("spawns, is_wrong", [(True, False), (False, True)])
def test_seeds_of_a_process_that_the_script_starts(work, spawns, is_wrong):
    """Its numbers are as its imports, or a fork, have left them: here, equal on all ranks."""
    code = START.replace("torch.manual_seed(0)", "") + "p = nn.Parameter(torch.randn(3))\n"
    code += "model = net\noptimizer = torch.optim.SGD([*net.parameters(), p], 0.1)\n"
    by_hand = "        loss.backward()\n        for p_ in optimizer.param_groups[0]['params']:\n"
    by_hand += "            dist.all_reduce(p_.grad)\n            p_.grad /= world\n"
    loop = LOOP.replace("model(x)", "model(x) + p").replace("        loss.backward()\n", by_hand)
    found = findings_of(code + loop, spawns=spawns)
    assert any(each.what == "others" for each in found if each.verdict == "WRONG") == is_wrong


@pytest.mark.parametrize(
    "code",
    [
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module\n"
        "mesh = init_device_mesh('cpu', (world, 1), mesh_dim_names=('data', 'tensor'))\n"
        "parallelize_module(nn.Linear(2, 2), mesh['tensor'], ColwiseParallel()).forward\n"
        "parallelize_module(net, init_device_mesh('cpu', (world,)), {'0': ColwiseParallel()})",
        "from torch.distributed.pipelining import PipelineStage\n"
        "PipelineStage(net, rank, world, torch.device('cpu')).submod",
    ],
)
def test_refused(work, code):
    """Models of which each rank computes a part, where there are several ranks."""
    (one,) = notes_of(START + code)
    assert not Path("notes/refused").exists() and one.end() == "its end"
    notes_of(START + code, "all")
    refused = json.loads(Path("notes/refused").read_text())
    assert "parallelism" in refused["text"]
    assert code.splitlines()[-1][:60] in refused["line"]
    assert "data parallelism alone" in refused["remedy"]


GATHER = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad.chunk(world)[rank]
"""
FAULTS = {  # {what: (the script, what its finding is, what it names)}
    "gradients that rank 0 alone clips": (
        "model = DDP(net)\n"
        + SGD
        + LOOP.replace(
            "        optimizer.step",
            "        if rank == 0:\n"
            "            nn.utils.clip_grad_norm_(net.parameters(), 0.01)\n        optimizer.step",
        ),
        "averaging",
        ["own gradient of net"],
    ),
    "a teacher in training mode, which rank 0 alone updates": (
        "import copy\nteacher = copy.deepcopy(net)\nmodel = DDP(net)\n"
        + SGD
        + LOOP.replace(
            "        loss = F.cross_entropy(model(x), y)",
            "        with torch.no_grad():\n            target = teacher(x)\n"
            "        loss = F.mse_loss(model(x), target) + F.cross_entropy(net(x), y)",
        )
        + "        if rank == 0:\n            with torch.no_grad():\n"
        "                for old, p in zip(teacher.parameters(), net.parameters()):\n"
        "                    old.lerp_(p, 0.5)\n",
        "weight",
        ["Sequential: no optimizer trains it", "if rank == 0:", "old.lerp_(p, 0.5)"],
    ),
    "samples normalized by the rank's own numbers, and padded": (
        "scale = x[rank::world].abs().mean() * 4\n"
        "class Own(torch.utils.data.Dataset):\n    def __len__(self):\n        return 32\n"
        "    def __getitem__(self, i):\n        return x[i, : 2 + i % 5, None] / scale, i % 3\n"
        "def collate(samples):\n    xs, ys = zip(*samples)\n"
        "    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor(ys)\n"
        "sampler = DistributedSampler(Own())\n"
        "loader = DataLoader(Own(), 8 // world, sampler=sampler, collate_fn=collate)\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n"
        "        return (super().forward(x) * (x != 0)).sum(1)\n"
        "model = DDP(Net(1, 3))\n" + SGD + LOOP,
        "data",
        ["so step 1:", "a share by the rank", "x[rank::world].abs()"],
    ),
    "a factor in the loss, before gradients are clipped": (
        "model = DDP(net)\n"
        + SGD
        + LOOP.replace("model(x), y)", "model(x), y) / world").replace(
            "        optimizer.step",
            "        nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n        optimizer.step",
        ),
        "loss",
        ["0.5 times one process's"],
    ),
    "an average of weights, made before DDP, that all ranks evaluate": (
        OWN_AVERAGE.replace("EVALUATES", "True"),
        "others",
        ["score = average(data[rank::world][0])", "torch.manual_seed(1 + rank)"],
    ),
    "noise that a worker draws, whom torch seeds": (
        "import random\nrandom.seed(5)\n"
        "class Noisy(TensorDataset):\n    def __getitem__(self, i):\n"
        "        x, y = super().__getitem__(i)\n        return x * random.random(), y\n"
        "data = Noisy(*data.tensors)\n"
        "loader = DataLoader(data, 8 // world, sampler=sampler, num_workers=1)\n"
        "model = DDP(net)\n" + SGD + LOOP,
        "random",
        [": torch.manual_seed(0)", "the dataset draws the same numbers"],
    ),
    "noise that collate_fn draws alike": (
        "def collate(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
        "    return x + 0.1 * np.random.randn(*x.shape).astype(np.float32), y\n"
        "np.random.seed(0)\n"
        "loader = DataLoader(data, 8 // world, sampler=sampler, collate_fn=collate)\n"
        "model = DDP(net)\n" + SGD + LOOP,
        "random",
        ["collate_fn draws the same numbers", "without workers, np.random.seed(seed + rank)"],
    ),
    "parameters that a loss leaves out": (
        "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(8, 3)\n"
        "        self.other = nn.Linear(8, 3)\n"
        "model = DDP(Net())\n" + SGD + LOOP,
        "averaging",
        ["find_unused_parameters=True"],
    ),
    "a mean of unequal rows, whose losses are equal, before a norm of gradients": (
        "valid = torch.ones(32, dtype=torch.bool)\nvalid[7:10] = False\n"
        "nn.init.zeros_(net[2].weight)\nnn.init.zeros_(net[2].bias)\nmodel = DDP(net)\n"
        + SGD
        + "for epoch in range(4):\n    mine, (x, y) = valid[rank::world], data[rank::world]\n"
        "    loss = F.cross_entropy(model(x)[mine], y[mine])\n"
        "    optimizer.zero_grad()\n    loss.backward()\n"
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    optimizer.step()\n",
        "value",
        ["a mean of so many rows: 29 on one process, 15, 14 on the ranks"],
    ),
    "a mean over what is valid, with a measure of the batch beside the outputs": (
        "class Net(nn.Linear):\n    def forward(self, x):\n        out = super().forward(x)\n"
        "        return out, torch.norm(out - out.mean(0)).detach()\n"
        "data.tensors[1][:9] = -100\nmodel = DDP(Net(8, 3))\n"
        + SGD
        + LOOP.replace("model(x),", "model(x)[0],"),
        "value",
        ["[cross_entropy]"],
    ),
    "a mean over what is valid, in a model that gives its outputs, too": (
        "class Net(nn.Linear):\n    def forward(self, x, y):\n        out = super().forward(x)\n"
        "        return F.cross_entropy(out, y), out\n"
        "data.tensors[1][:9] = -100\nmodel = DDP(Net(8, 3))\n"
        + SGD
        + LOOP.replace("F.cross_entropy(model(x), y)", "model(x, y)[0]"),
        "value",
        ["[cross_entropy]"],
    ),
    "gradients of a part are averaged by hand": (
        "model = net\n"
        + SGD
        + LOOP.replace(
            "        optimizer.step",
            "        for p in model[0].parameters():\n            dist.all_reduce(p.grad)\n"
            "            p.grad /= world\n        optimizer.step",
        ),
        "averaging",
        ["dist.all_reduce(p.grad)", "average the gradients of all parameters"],
    ),
    "an optimizer that reduces a norm alone": (
        "class Clipping(torch.optim.SGD):\n    def step(self):\n"
        "        norm = sum(p.grad.norm() for p in self.param_groups[0]['params'])\n"
        "        dist.all_reduce(norm)\n        super().step()\n"
        "model = net\noptimizer = Clipping(model.parameters(), 0.1)\n" + LOOP,
        "averaging",
        ["each rank has its own gradient"],
    ),
    "a term by all ranks' batch size, of words and their offsets": (
        "bags = [torch.arange(i % 3 + 1) + i % 5 for i in range(32)]\n"
        "def collate(ids):\n"
        "    sizes = torch.tensor([0, *[len(bags[i]) for i in ids][:-1]])\n"
        "    return torch.cat([bags[i] for i in ids]), sizes.cumsum(0), torch.tensor(ids) % 3\n"
        "loader = DataLoader(range(32), 8 // world, sampler=sampler, collate_fn=collate)\n"
        "model = DDP(nn.EmbeddingBag(8, 3))\n" + SGD + "for words, starts, y in loader:\n"
        "    out = model(words, starts)\n    term = out.square().sum() / 8\n"
        "    optimizer.zero_grad()\n    (F.cross_entropy(out, y) + term).backward()\n"
        "    optimizer.step()\n",
        "value",
        ["a sum over ranks is right up to", "term = out.square().sum() / 8"],
    ),
    "a mean over the rank's own number, of equal losses": (
        "y, valid = x[:, :3].argmax(1), torch.ones(32)\nvalid[7:10] = 0\n"
        "nn.init.zeros_(net[2].weight)\nnn.init.zeros_(net[2].bias)\nmodel = DDP(net)\n"
        + SGD
        + "for epoch in range(4):\n"
        "    out = model(x[rank::world])\n    mask = valid[rank::world]\n"
        "    each = F.cross_entropy(out, y[rank::world], reduction='none')\n"
        "    total, number = (each * mask).sum(), mask.sum()\n    optimizer.zero_grad()\n"
        "    (total / number).backward()\n    optimizer.step()\n",
        "value",
        ["divided by 29 on one process, 15, 14 on the ranks"],
    ),
    "labels that each rank counts from 0": (
        GATHER
        + "model = DDP(net)\n"
        + SGD
        + LOOP.replace("F.cross_entropy(model(x), y)", "loss_of(model(x))").replace(
            "for epoch",
            "def loss_of(z):\n    targets = torch.arange(len(z))\n"
            "    return F.cross_entropy(z @ Gather.apply(z).T, targets)\n\nfor epoch",
        ),
        "value",
        ["[arange]", "add the number of rows on the ranks before"],
    ),
    "negatives of the rank's batch, and of a queue that DDP sends": (
        "torch.manual_seed(1 + rank)\n"
        "net.register_buffer('queue', F.normalize(torch.randn(16, 3), dim=1))\n"
        "model = DDP(net)\n"
        + SGD
        + LOOP.replace(
            "        loss = F.cross_entropy(model(x), y)",
            "        keys = torch.cat([model(x), net.queue.clone()])\n"
            "        loss = F.cross_entropy(keys[: len(x)] @ keys.T, torch.arange(len(x)))",
        ),
        "value",
        ["[cat]", "one process has neither"],
    ),
    "codes that each rank sets to its own samples": (
        "class Codes(nn.Linear):\n    def __init__(self):\n        super().__init__(8, 3)\n"
        "        self.register_buffer('codes', torch.zeros(4, 8))\n"
        "    def forward(self, x):\n        if self.training:\n"
        "            mean = x.detach().mean(0)\n            dist.all_reduce(mean)\n"
        "            self.codes.mul_(0.9).add_(mean / world, alpha=0.1)\n"
        "        return super().forward(x + torch.cdist(x, self.codes) @ self.codes)\n"
        "model = DDP(Codes(), broadcast_buffers=False)\n"
        + SGD
        + LOOP
        + "        with torch.no_grad():\n            model.module.codes[1] = x[0]\n",
        "buffer",
        ["self.codes.mul_(0.9)", "differ"],
    ),
    "a part of a model in a second pass without DDP": (
        "other = nn.Sequential(nn.Linear(8, 3))\nmodel = DDP(net)\n"
        "wrapped = DDP(other)\n"
        + SGD.replace("model.parameters()", "[*net.parameters(), *other.parameters()]")
        + LOOP.replace(
            "        optimizer.step",
            "        wrapped(x).mean().backward()\n"
            "        F.linear(net[0](x), net[2].weight).mean().backward()\n        optimizer.step",
        ),
        "averaging",
        ["own gradient of net.0.weight, net.2.weight, but not of net.0.bias, net.2.bias"],
    ),
    "a factor of a function's": (
        "count = 0\ndef factor():\n    return min(1.0, count / 50)\nmodel = DDP(net)\n"
        + SGD
        + LOOP.replace(
            "F.cross_entropy(model(x), y)", "model(x).square().mean() * factor()"
        ).replace(
            "        optimizer.step()", "        optimizer.step()\n        count += 3 * world"
        ),
        "loss",
        ["count is ", "set at train.py:"],
    ),
    "a parameter beside the model, which is clamped": (
        "scale = nn.Parameter(torch.ones(3))\nmodel = DDP(net)\n"
        + SGD.replace("model.parameters()", "[*net.parameters(), scale]")
        + LOOP.replace("model(x)", "model(x) * scale")
        + "        mean = loss.detach() / world\n        dist.all_reduce(mean)\n"
        + "        with torch.no_grad():\n            scale.clamp_(0, 4)\n",
        "averaging",
        ["a parameter: train.py:", "scale = nn.Parameter"],
    ),
    "a parameter beside the model": (
        "scale = nn.Parameter(torch.ones(3))\nmodel = DDP(net)\n"
        + SGD.replace("model.parameters()", "[*net.parameters(), scale]")
        + LOOP.replace("model(x)", "model(x) * scale"),
        "averaging",
        ["a parameter: train.py:", "scale = nn.Parameter"],
    ),
    "a generator called without its DDP": (
        "model = DDP(net)\nother = DDP(nn.Sequential(nn.Linear(3, 1)))\n"
        "optimizers = [torch.optim.SGD([p for p in m.parameters()], 0.1) for m in (model, other)]\n"
        "for x, y in loader:\n"
        "    optimizers[1].zero_grad()\n"
        "    other(torch.randn(len(x), 3)).mean().backward()\n"
        "    optimizers[1].step()\n"
        "    fake = model.module(x)\n"
        "    optimizers[0].zero_grad()\n"
        "    other.module(fake).square().mean().backward()\n"
        "    optimizers[0].step()\n",
        "averaging",
        ["the last pass: train.py:", "fake = model.module(x)"],
    ),
    "a closure that returns the rank's loss": (
        "model, search = DDP(net), 'strong_wolfe'\n"
        "optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn=search)\n"
        + LOOP.replace(
            "        optimizer.zero_grad()",
            "        def closure():\n            optimizer.zero_grad()\n"
            "            loss = F.cross_entropy(model(x), y)\n            loss.backward()\n"
            "            return loss\n        optimizer.step(closure)\n        continue",
        ),
        "averaging",
        ["the ranks call closure() other numbers of times", "return the mean loss"],
    ),
    "a sum for a mean, beside a branch that all ranks take": (
        "scale = nn.Parameter(torch.ones(3))\nmodel = DDP(net)\n"
        + SGD.replace("model.parameters()", "[*net.parameters(), scale]")
        + LOOP.replace(
            "        loss = F.cross_entropy(model(x), y)",
            "        each = F.cross_entropy(model(x) * scale, y, reduction='none')\n"
            "        total, several = each.detach().sum(), world > 1\n"
            "        if several:\n            dist.all_reduce(total)\n"
            "        loss = (each / total).sum() * world",
        ).replace(
            "        optimizer.step", "        dist.all_reduce(scale.grad)\n        optimizer.step"
        ),
        "gradient",
        ["2 times one process's", "dist.all_reduce(scale.grad)"],
    ),
}


GATHERS = f"""
{GATHER}
def gathered(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)  # without a gradient
    parts[rank] = x
    return torch.cat(parts)

model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, _ in loader:
    optimizer.zero_grad()
    z = model(x)
    (Gather.apply(z) @ gathered(z).T).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_backward_of_a_gather(work):
    """A class's own, which does not sum over the ranks: it is named, and not called none."""
    code = START + GATHERS.replace("gathered(z)", "z")
    right = findings_of(code, lines=3)
    assert "gradient" not in [each.what for each in right if each.verdict == "WRONG"], right
    code = code.replace("        dist.all_reduce(grad)\n", "")
    found = [each for each in findings_of(code, lines=3) if each.verdict == "WRONG"]
    words = "\n".join([each.text for each in found] + found[0].more)
    assert "its backward: train.py:" in words and "is not differentiated: " not in words, words


@pytest.mark.slow
def test_what_is_reduced_to_be_printed(work):
    """After a step: it is not why the next one's gradient differs."""
    loss = "out = model(x)\n        loss = out.square().mean() + (out - out.detach()).sum()"
    loop = (
        LOOP.replace("loss = F.cross_entropy(model(x), y)", loss) + "        dist.all_reduce(loss)"
    )
    found = findings_of(f"{START}model = DDP(net)\n{SGD}{loop}", lines=3)
    (wrong,) = [each for each in found if each.verdict == "WRONG"]
    assert wrong.what == "gradient" and "dist.all_reduce" not in f"{wrong.more}", wrong


def test_gathers(work):
    """Of two, the one that is not differentiated is named alone."""
    found = [each for each in findings_of(START + GATHERS, lines=3) if each.verdict == "WRONG"]
    words = "\n".join([each.line for each in found] + found[0].more)
    at = {
        text: f":{(START + GATHERS).splitlines().index(text) + 1}" for text in GATHERS.splitlines()
    }
    assert at["    dist.all_gather(parts, x)  # without a gradient"] in words
    assert "or this" not in words and at["        dist.all_gather(parts, x)"] not in words


BRANCH = """
flags = type("Flags", (), {})()
flags.gpus, flags.distributed = world, world > 1
norm = nn.BatchNorm1d(3)
model = net
if flags.gpus > 1:
    norm = nn.BatchNorm1d(int(torch.ones(3).sum()))
    model = DDP(net)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mean", ["", "        if not flags.distributed:\n            loss = loss.mean()\n"]
)
def test_a_branch_of_several_processes(work, mean):
    """Or of one: it is no cause of another fault."""
    code = START + BRANCH + SGD + LOOP.replace("model(x), y)", "model(x), y, reduction='sum')")
    code = code.replace("        loss.backward", f"{mean}        loss.backward")
    wrong = [each.what for each in findings_of(code, lines=3) if each.verdict == "WRONG"]
    assert wrong and "branch" not in wrong


FAST_FAULTS = (
    "a parameter beside the model",
    "a teacher in training mode, which rank 0 alone updates",
)


@pytest.mark.parametrize("fault", some_fast(FAULTS, *FAST_FAULTS))
def test_wrong(work, fault):
    code, what, names = FAULTS[fault]
    found = [each for each in findings_of(START + code, lines=12) if each.verdict == "WRONG"]
    assert found and found[0].what == what, found
    words = "\n".join([found[0].text, *found[0].more, found[0].remedy])
    assert all(name in words for name in names), words


LIBRARY = """
class Prefetcher:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for x, y in self.loader:
            yield x.sub_(0.1).div(0.5), y
"""
MIXED = """
import sys
sys.path.append("site-packages")
from prefetching import Prefetcher

def mix(samples):
    x, y = torch.utils.data.default_collate(samples)
    return 0.7 * x + 0.3 * x.mean(0), y

loader = Prefetcher(DataLoader(data, 8 // world, sampler=sampler, collate_fn=mix))
model = DDP(net)
"""


def test_a_loader_inside_of_a_librarys(work):
    """What a collate_fn mixes is known there, too."""
    Path("site-packages").mkdir()
    Path("site-packages/prefetching.py").write_text(LIBRARY)
    found = [f for f in findings_of(START + MIXED + SGD + LOOP, lines=12) if f.verdict != "ok"]
    assert [(f.verdict, f.advice) for f in found if f.what == "inputs"] == [("look", "collate")]


SIZES = """
torch.manual_seed(1 + rank)
model = DDP(net)
{SGD}
size = 2 + rank if world > 1 else 4
for x, y in loader:
    for row in x:
        row[:size] = torch.empty(size).normal_()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_turns_of_other_sizes(work):
    """Where it is a rank's turn to get one process's numbers, but not as many."""
    code = START + SIZES.format(SGD=SGD)
    number = code[: code.index("normal_")].count("\n") + 1
    turns = [[f"train.py:{number}", "aten::normal_"]]
    found = findings_of(code, lines=3, turns=turns)
    assert [f.what for f in found if f.verdict == "look"] == ["inputs"]
    assert f"drawn at train.py:{number}" in "".join(
        next(f for f in found if f.what == "inputs").more
    )


def test_averagers_are_noted(work):
    (one,) = notes_of(START + WAYS["torch's local SGD"])
    assert [note.text for _, note in one[Said] if note.kind == "local"] and one.end() == "its end"


SEEDED = """
seeds = torch.randint(-(2**63), 2**63 - 1, (8,), generator=torch.Generator().manual_seed(7))
torch.manual_seed(seeds[rank])
seed = torch.randint(-(2**63), 2**63 - 1, ()).item()
noise = torch.Generator().manual_seed(seed)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    seen = [torch.empty(1) for _ in range(world)]
    dist.all_gather(seen, torch.randn(8 // world, generator=noise).sum()[None])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sends", [False, True], ids=["each rank draws one", "all have that of rank 0"]
)
def test_seeds_of_generators(work, sends):
    code = START + SEEDED
    if sends:
        code = code.replace(".item()", "\ndist.broadcast(seed, 0)\nseed = seed.item()")
    found = [each for each in findings_of(code, lines=3) if each.what == "random"]
    assert [each.verdict for each in found] == ["WRONG" if sends else "ok"]


def test_steps_planned_from_the_batch_size():
    """Of one process, which was given the samples of all ranks."""

    def verdicts(counts, *kinds):
        found = [Finding("WRONG", kind, 6, "other") for kind in kinds]
        due_to_plan(found, counts)
        return [each.verdict for each in found]

    assert verdicts([20, 18, 18], "setting", "end") == ["look", "look"]
    assert verdicts([20, 18, 19], "setting", "end") == ["WRONG", "WRONG"]
    assert verdicts([20, 18, 18], "end") == verdicts([20, 18, 18], "setting") == ["WRONG"]


def test_what_follows_from_an_order():
    """Batches of other samples, from the repeated pass on: no finding of their own."""
    order, before = Finding("WRONG", "order", 6, "again"), Finding("WRONG", "inputs", 5, "others")
    found = after_orders([before, Finding("WRONG", "inputs", 6, "other numbers"), order])
    assert found == [before, order] and order.more == ["so step 7: inputs: other numbers"]


@pytest.mark.parametrize(("step", "verdict", "left"), [(2, "WRONG", 1), (1, "look", 2)])
def test_what_follows_from_other_samples(step, verdict, left):
    """From the step on in which they are other ones; but not of numbers that each rank draws."""
    data = Finding("look", "data", 2, "others", advice="made apart")
    value = Finding("WRONG", "value", step, "more", off=3)
    drawn = replace(data, advice="")
    assert after_data([drawn, value]) == [drawn, value]
    split = Finding("WRONG", "samples", 2, "of another split")
    assert after_data([data, split]) == [split]
    found = after_data([data, value])
    assert len(found) == left and data.verdict == verdict
    assert data.more == ["so step 3: value: more"] * (left == 1)
    assert after_data([data, Finding("look", "value", 2, "more")])[1:]


@pytest.mark.parametrize("advice", ["weights", "share", "coupled"])
def test_what_is_kept_stands_below_a_value(advice):
    """But for what has another reason."""
    value = Finding("WRONG", "value", 2, "more", more=["a"], advice=advice)
    kept = [
        Finding("look", "others", 3, "bank", "train.py:3"),
        Finding("look", "attributes", 3, "b"),
    ]
    found = explain_values([value, *kept])
    if advice == "coupled":
        assert found == [value, *kept]
    else:
        start = "perhaps as " * (advice == "share")
        assert found == [value] and value.more == [f"{start}b", f"{start}bank", "train.py:3", "a"]

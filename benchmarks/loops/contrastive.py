"""A right loop: contrastive, with a teacher that follows, keys of all ranks and a queue of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, EPOCHS, QUEUE, TEMPERATURE = 8, 3, 32, 0.2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Views(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        sample = torch.randn(20, generator=torch.Generator().manual_seed(i))
        return sample + 0.3 * torch.randn(20), sample + 0.3 * torch.randn(20)


def gather(mine):
    """The rows of all ranks, rank 0's first; gradients go to this rank's."""
    rows = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(rows, mine.detach())
    rows[rank] = mine
    return torch.cat(rows)


def encoder():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))


sampler = DistributedSampler(Views(), drop_last=True)
loader = DataLoader(Views(), BATCH // world, sampler=sampler, drop_last=True)
torch.manual_seed(0)
student, teacher = encoder(), encoder()
teacher.load_state_dict(student.state_dict())
teacher.requires_grad_(False)
ddp = nn.parallel.DistributedDataParallel(student)
optimizer = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
queue = F.normalize(torch.randn(QUEUE, 16), dim=1)


def info_nce(queries, keys, targets):
    return F.cross_entropy(queries @ keys.T / TEMPERATURE, targets)


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    torch.manual_seed(epoch * world + rank)
    for first, second in loader:
        queries = F.normalize(ddp(torch.cat([first, second])), dim=1)
        one, two = queries.chunk(2)
        with torch.no_grad():
            mine = F.normalize(teacher(second), dim=1)
            keys = gather(mine)
        targets = rank * len(one) + torch.arange(len(one))
        loss = info_nce(one, torch.cat([keys, queue]), targets)
        all_one, all_two = gather(one), gather(two)
        pairs = info_nce(all_two, all_one, torch.arange(len(all_two)))
        loss = loss + world * pairs  # whose gradient has only this rank's rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters()):
                old.lerp_(new, 0.1)
            queue = torch.cat([keys, queue])[:QUEUE]
    value = (loss.detach() - (world - 1) * pairs.detach()) / world
    dist.all_reduce(value)
    if rank == 0:
        print(f"epoch {epoch}: loss {value:.4f}", flush=True)
dist.destroy_process_group()

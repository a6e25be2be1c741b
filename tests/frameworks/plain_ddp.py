"""Plain DDP; tests put a tracker, checkpoints or hydra in the place of a comment."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(folder, lr):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=g)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 16 // world, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    # begin
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean /= world
            # step
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
        # epoch
    # end
    dist.destroy_process_group()


if __name__ == "__main__":
    main("out", 0.05)

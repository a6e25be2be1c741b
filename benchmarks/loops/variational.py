"""A right loop in a class: a variational autoencoder, annealed by samples, its loss controlled."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

BATCH, EPOCHS, ANNEALED, GOAL = 8, 3, 96, 0.6


class Waves(Dataset):
    def __init__(self):
        self.scale = 1.0

    def __len__(self):
        return 60

    def __getitem__(self, i):
        phase, size = torch.rand(2, generator=torch.Generator().manual_seed(i))
        return (1 + i % 4) * size * torch.sin(torch.linspace(0, 6, 16) + 6 * phase) / self.scale


class Autoencoder(nn.Module):
    def __init__(self, hidden=32, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, 16))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        sampled = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(sampled), mean, log_variance


def over_ranks(value):
    value = torch.as_tensor(value, dtype=torch.float).detach().clone()
    dist.all_reduce(value)
    return value.item()


def largest_of(dataset, rank, world):
    """The mean of what is largest in each sample, over all ranks."""
    tops = [float(dataset[i].abs().max()) for i in range(rank, len(dataset), world)]
    return over_ranks(sum(tops)) / over_ranks(len(tops))


class Trainer:
    def __init__(self, model, rank, world):
        self.rank, self.world = rank, world
        self.ddp = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        self.seen, self.pressure, self.usual = 0, 1.0, None

    def loss_of(self, x):
        decoded, mean, log_variance = self.ddp(x)
        wrong = F.mse_loss(decoded, x)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        annealing = min(1.0, self.seen / ANNEALED)
        return wrong, self.pressure * wrong + 0.1 * annealing * divergence

    def control(self, wrong):
        """More weight of what is wrong, as long as that is above its goal."""
        now = over_ranks(wrong) / self.world
        self.usual = now if self.usual is None else 0.9 * self.usual + 0.1 * now
        self.pressure = min(10.0, self.pressure * (1 + 0.1 * (self.usual - GOAL)))

    def train(self, loader):
        self.ddp.train()
        for x in loader:
            self.seen += len(x) * self.world
            wrong, loss = self.loss_of(x)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.control(wrong)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = Waves()
    dataset.scale = largest_of(dataset, rank, world)
    train_set, val_set = Subset(dataset, range(48)), Subset(dataset, range(48, 60))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, BATCH // world, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    trainer = Trainer(Autoencoder(), rank, world)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * world + rank)
        trainer.train(loader)
        with torch.no_grad():
            rows = torch.stack([val_set[i] for i in range(rank, len(val_set), world)])
            mean = trainer.ddp.module.encoder(rows)[:, :4]
            wrong = over_ranks((trainer.ddp.module.decoder(mean) - rows).square().sum())
        if rank == 0:
            print(f"epoch {epoch}: val {wrong / len(val_set) / 16:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

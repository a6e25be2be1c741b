"""A right loop: an autoencoder and a critic, two optimizers, an adaptive weight, lazy penalties."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, PENALTY_EVERY = 8, 3, 24

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

data = torch.randn(48, 12, generator=torch.Generator().manual_seed(0)).cumsum(1)
dataset = TensorDataset(data)
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, BATCH // world, sampler=sampler, drop_last=True)

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 12))
critic = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
ddp_generator = nn.parallel.DistributedDataParallel(generator)
ddp_critic = nn.parallel.DistributedDataParallel(critic)
optimizer_g = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.9))
optimizer_d = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.9))
last = generator[-1].weight


def gradient_norm(loss):
    """Of the mean over all ranks."""
    (gradient,) = torch.autograd.grad(loss, last, retain_graph=True)
    dist.all_reduce(gradient)
    return (gradient / world).norm()


images = penalties = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    torch.manual_seed(epoch * world + rank)
    for (real,) in loader:
        images += len(real) * world
        noise = torch.randn(len(real), 4)
        fake = ddp_generator(torch.cat([real, noise], 1))
        reconstruction = F.l1_loss(fake, real)
        critic.requires_grad_(False)
        adversarial = -critic(fake).mean()
        weight = gradient_norm(reconstruction) / (gradient_norm(adversarial) + 1e-4)
        loss_g = reconstruction + 0.1 * weight.detach().clamp(0, 1e3) * adversarial
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()

        critic.requires_grad_(True)
        real = real.requires_grad_()
        scores = ddp_critic(torch.cat([real, fake.detach()]))
        on_real, on_fake = scores.chunk(2)
        loss_d = F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean()
        if images // PENALTY_EVERY > penalties:
            penalties += 1
            (gradient,) = torch.autograd.grad(on_real.sum(), real, create_graph=True)
            loss_d = loss_d + 5 * gradient.square().sum(1).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
    losses = torch.stack([loss_g.detach(), loss_d.detach()]) / world
    dist.all_reduce(losses)
    if rank == 0:
        print(f"epoch {epoch}: generator {losses[0]:.4f} critic {losses[1]:.4f}", flush=True)
dist.destroy_process_group()

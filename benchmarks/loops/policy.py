"""A right loop: a policy gradient, with as many environments over all ranks, no DataLoader."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ENVIRONMENTS, STEPS, UPDATES, EPOCHS = 8, 6, 8, 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = ENVIRONMENTS // world


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actions, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, states):
        features = self.body(states)
        return self.actions(features).log_softmax(-1), self.value(features)[..., 0]


class Normalizer:
    """Mean and variance of all observations of all ranks."""

    def __init__(self):
        self.sums = torch.zeros(9)

    def __call__(self, states):
        new = torch.cat([states.sum(0), states.square().sum(0), torch.tensor([1.0 * len(states)])])
        dist.all_reduce(new)
        self.sums = self.sums + new
        mean = self.sums[:4] / self.sums[8]
        variance = self.sums[4:8] / self.sums[8] - mean**2
        return (states - mean) / (variance + 1e-2).sqrt()


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / world


torch.manual_seed(0)
model = Policy()
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
normalize, coefficient = Normalizer(), 0.2
torch.manual_seed(1 + rank)
states = torch.randn(mine, 4)

for update in range(UPDATES):
    seen, chosen, rewards, old = [], [], [], []
    with torch.no_grad():
        for _ in range(STEPS):
            observed = normalize(states)
            logs, _ = model(observed)
            action = torch.multinomial(logs.exp(), 1)[:, 0]
            seen.append(observed)
            chosen.append(action)
            old.append(logs)
            rewards.append(states[:, 0] * (action - 1) - 0.1 * states.square().sum(1))
            push = F.one_hot(action, 3).float() @ torch.tensor(
                [[-0.3, 0.1, 0, 0], [0.0] * 4, [0.3, 0, 0.1, 0]]
            )
            states = 0.9 * states + push + 0.1 * torch.randn(mine, 4)
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    seen, chosen, old = torch.stack(seen), torch.stack(chosen), torch.stack(old)
    for _ in range(EPOCHS):
        logs, values = ddp(seen)
        advantages = (returns - values).detach()
        moments = torch.stack([advantages.mean(), advantages.square().mean()])
        moments = mean_over_ranks(moments)
        deviation = (moments[1] - moments[0] ** 2).sqrt() + 1e-6
        advantages = (advantages - moments[0]) / deviation
        taken = logs.gather(2, chosen[..., None])[..., 0]
        before = old.gather(2, chosen[..., None])[..., 0]
        gain = ((taken - before).exp() * advantages).mean()
        divergence = (old.exp() * (old - logs)).sum(2).mean()
        loss = coefficient * divergence - gain + 0.5 * F.mse_loss(values, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    spread = mean_over_ranks(divergence)
    coefficient *= 1.5 if spread > 2e-3 else 0.7
    reward = mean_over_ranks(returns[0].mean())
    if rank == 0:
        print(f"update {update}: return {reward:.4f}", flush=True)
dist.destroy_process_group()

"""A right loop: a language model on padded texts, with accumulation, clipping and a schedule."""

import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

WORDS, LENGTH, BATCH, ACCUMULATE, EPOCHS, LR = 40, 16, 8, 2, 3, 3e-3

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def make_text(i):
    generator = torch.Generator().manual_seed(i)
    length = 4 + i % (LENGTH - 4)
    start, step = torch.randint(1, WORDS, (2,), generator=generator).tolist()
    text = torch.tensor([1 + (start + step * k) % (WORDS - 1) for k in range(length)])
    return F.pad(text, (0, LENGTH + 1 - length))  # 0: no word


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.query, self.key, self.value = [nn.Linear(width, width) for _ in range(3)]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, WORDS)

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        y = self.norm1(x)
        scores = self.query(y) @ self.key(y).mT / math.sqrt(y.shape[2])
        future = torch.ones(scores.shape[1:]).triu(1).bool()
        x = x + self.drop(scores.masked_fill(future, -1e9).softmax(2) @ self.value(y))
        return self.head(x + self.drop(self.mix(self.norm2(x))))


texts = [make_text(i) for i in range(90)]
train_set, val_set = texts[:72], texts[72:]
sampler = DistributedSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, BATCH // world, sampler=sampler, drop_last=True)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), BATCH // world)

torch.manual_seed(0)
model = Model()
ddp = nn.parallel.DistributedDataParallel(model)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, LR)
steps = EPOCHS * math.ceil(len(train_set) // BATCH / ACCUMULATE)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    torch.manual_seed(epoch * world + rank)
    ddp.train()
    window = []
    for number, words in enumerate(train_loader, 1):
        window.append(words)
        if len(window) < ACCUMULATE and number < len(train_loader):
            continue
        tokens = torch.stack([(words[:, 1:] > 0).sum() for words in window]).sum()
        dist.all_reduce(tokens)
        for micro, words in enumerate(window, 1):
            is_last = micro == len(window)
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                logits = ddp(words[:, :-1])
                targets = words[:, 1:]
                loss = F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
                )
                loss = loss * world / tokens
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        window = []
    ddp.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for words in val_loader:
            logits, targets = model(words[:, :-1]), words[:, 1:]
            loss = F.cross_entropy(logits.mT, targets, ignore_index=0, reduction="sum")
            sums += torch.stack([loss, (targets > 0).sum()])
    dist.all_reduce(sums)
    if rank == 0:
        print(f"epoch {epoch}: val {sums[0] / sums[1]:.4f}", flush=True)
dist.destroy_process_group()

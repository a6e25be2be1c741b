"""A right loop: half precision by hand, and batches of like lengths by a batch sampler of its own,
which gives each rank its share, and leaves the state of random as it was."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS, CLASSES, BATCH, EPOCHS = 60, 4, 8, 3

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(3, 12, (64,), generator=generator).tolist()
        self.words = [torch.randint(1, WORDS, (n,), generator=generator) for n in self.lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.words[i].sum() % CLASSES


class Buckets:
    """Of each batch, which all ranks compose alike, this rank's share."""

    def __init__(self, lengths):
        self.lengths, self.epoch = lengths, 0

    def __len__(self):
        return len(self.lengths) // BATCH

    def __iter__(self):
        state = random.getstate()
        random.seed(self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], random.random()))
        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        random.shuffle(batches)
        random.setstate(state)
        return iter([batch[rank::world] for batch in batches])


def padded(samples):
    words, labels = zip(*samples)
    return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.stack(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
        self.head = nn.Linear(32, CLASSES)

    def forward(self, words):
        mean = self.words(words).sum(1) / (words != 0).sum(1, keepdim=True)
        return self.head(self.layers(mean.bfloat16()).float())


torch.manual_seed(0)
dataset = Sentences()
buckets = Buckets(dataset.lengths)
loader = DataLoader(dataset, batch_sampler=buckets, collate_fn=padded)
model = Classifier()
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
for epoch in range(EPOCHS):
    buckets.epoch = epoch
    torch.manual_seed(epoch * world + rank)
    for words, labels in loader:
        loss = F.cross_entropy(ddp(words), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()

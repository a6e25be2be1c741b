"""GPT-2 with 124 million parameters: the two rooms of complete/train.py, for gpu.py.

It has no biases and no dropout, as in the benchmark of nanoGPT (karpathy/nanoGPT, bench.py), to
whose figures it can be compared. The tokens are random ones.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY = 1024, 768, 12, 12, 50_304
SAMPLES = 480  # in the training set


class Block(nn.Module):
    """One layer: (N, length, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, False), nn.Linear(4 * WIDTH, WIDTH, False)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


BLOCKS = (Block,)


class GPT2(nn.Module):
    """(N, length) tokens to (N, length, VOCABULARY): scores of each next token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x):
        x = self.tokens(x) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model(args, tokens, classes):
    return GPT2()


def loss_function(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def count(outputs, labels):
    return {"labels": labels.numel(), "correct": (outputs.argmax(-1) == labels).sum()}


def load_data(args):
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return TensorDataset(windows), TensorDataset(windows[:32]), VOCABULARY


def prepare(args, batch, device, train=False):  # the label of each token is the next one
    windows = batch[0].to(device)
    return windows[:, :-1], windows[:, 1:]

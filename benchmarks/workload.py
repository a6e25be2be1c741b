"""Models and data of the benchmarks, put into a script by `change(globals())`: images made on the
spot, as many as --samples says or, with --units, a language model on random bytes."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes: (N, window) -> (N * window, 256)."""

    def __init__(self, units, layers, window):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, units), nn.Embedding(window, units)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(units, units // 64, 4 * units, **options)
        norm = nn.LayerNorm(units)
        self.blocks = nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(units, 256)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.blocks(self.bytes(x) + self.positions.weight, mask, is_causal=True)
        return self.head(x).flatten(0, 1)


def change(script):
    own = dict(script)  # its functions before they are replaced
    for name, default in {"samples": 10_000, "units": 0, "layers": 2, "window": 64}.items():
        script["add"](f"--{name}", type=int, default=default)

    def load_data(args):
        test = max(16, args.samples // 10)
        if not args.units:
            train_set = own["synthetic"](args.samples, args.image_size, seed=1)
            return train_set, own["synthetic"](test, args.image_size, seed=2), 10
        windows = torch.randint(256, (args.samples + test, args.window + 1), dtype=torch.uint8)
        return TensorDataset(windows[test:]), TensorDataset(windows[:test]), 256

    def prepare(args, batch, device):
        if not args.units:
            return own["prepare"](args, batch, device)
        windows = batch[0].to(device).long()
        return windows[:, :-1], windows[:, 1:].flatten()  # the label of a byte is the next one

    def build_model(args, sample, classes):
        if args.units:
            return LanguageModel(args.units, args.layers, args.window)
        return own["build_model"](args, sample, classes)

    script |= {"load_data": load_data, "prepare": prepare, "build_model": build_model}

"""What the other contestants share: a batch for the scripts' model, and the clock."""

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_single import build_model, build_optimizer, load_batches, load_data, prepare  # noqa: E402


def resident(args, batch_size, device):
    """The scripts' model and optimizer, the images and labels of a batch, the training images."""
    train_set, _, classes = load_data(args)
    torch.manual_seed(args.seed)
    model = build_model(args, train_set[0][0], classes).to(device)
    optimizer, _ = build_optimizer(args, model, steps=1)
    batch = next(load_batches(args, train_set, range(batch_size), batch_size, device))
    return model, optimizer, *prepare(args, batch, device), len(train_set)


class Clock:
    """Writes metrics.csv for the training part of each epoch, on rank 0, as the scripts do."""

    def __init__(self, args, images):
        self.path, self.images = args.output / "metrics.csv", images
        self.lines = ["seconds,images_per_second,peak_memory_mib"]

    def start(self):
        self.begin = time.perf_counter()

    def stop(self):
        peak = 0
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated() / 2**20
        seconds = time.perf_counter() - self.begin
        self.lines.append(f"{seconds},{self.images / seconds},{peak}")
        if os.environ.get("RANK", "0") == "0":
            self.path.write_text("\n".join(self.lines))

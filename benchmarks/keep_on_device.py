"""train_single.py with its training and test data on the device from the start, where each batch is
gathered by one call. The flags are train_single.py's; the data must be tensors (synthetic).

python benchmarks/keep_on_device.py --dataset synthetic
"""

import runpy
from pathlib import Path

import torch
from torch.utils import data


class KeptOnDevice(data.DataLoader):
    """Batches in the order of the loader's sampler."""

    def __iter__(self):
        if not hasattr(self, "tensors"):
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            self.tensors = [tensor.to(kind) for tensor in self.dataset.tensors]
        indices = torch.tensor(list(self.sampler), device=self.tensors[0].device)
        for batch in indices.split(self.batch_size)[: len(self)]:
            yield [tensor[batch] for tensor in self.tensors]


if __name__ == "__main__":
    data.DataLoader = KeptOnDevice
    runpy.run_path(str(Path(__file__).parents[1] / "train_single.py"), run_name="__main__")

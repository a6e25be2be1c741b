"""WaveGlow: speech from spectrograms; gradients are averaged by hooks of its own."""

import json

from made import wav, write

REPOSITORY = "NVIDIA/waveglow"
COMMIT = "8afb643"
PACKAGES = ["scipy"]
EDITS = [  # as PyTorch wants today
    ("distributed.py", "reduce_op.SUM", "ReduceOp.SUM"),
    ("glow.py", "torch.qr(", "torch.linalg.qr("),
]
COMMAND = """--cpu --wait 400 --steps 6 train.py --config small.json --rank {rank}
    --group_name check"""
VERDICTS = {
    "random train.py:119": (
        "true",
        "one seed on all ranks: the loaders' workers cut the same parts out of their sounds; not "
        "said, though true: there is no set_epoch (reported for tacotron2, issue 241)",
        "shows.py dino, for images",
    ),
}

LAYERS = """
import torch

class TacotronSTFT(torch.nn.Module):
    def __init__(self, filter_length, hop_length, **settings):
        super().__init__()
        self.filter_length, self.hop_length = filter_length, hop_length

    def mel_spectrogram(self, sound):
        window = torch.hann_window(self.filter_length)
        size = self.filter_length, self.hop_length
        return torch.stft(sound, *size, window=window, return_complex=True).abs()[:, :80]
"""

if __name__ == "__main__":
    write("tacotron2/__init__.py", "")  # a submodule, of which one class is used
    write("tacotron2/layers.py", LAYERS)
    with open("config.json") as file:
        settings = json.load(file)
    settings["train_config"] |= {"fp16_run": False, "batch_size": 2, "epochs": 4}
    settings["train_config"] |= {"output_directory": "out", "iters_per_checkpoint": 1000}
    settings["data_config"] |= {"segment_length": 2048}
    settings["waveglow_config"] |= {"n_flows": 2}
    settings["waveglow_config"]["WN_config"] = {"n_layers": 2, "n_channels": 8, "kernel_size": 3}
    write("small.json", json.dumps(settings))
    for number in range(8):
        wav(f"wavs/{number}.wav", seed=number)
    write("train_files.txt", "".join(f"wavs/{number}.wav\n" for number in range(8)))

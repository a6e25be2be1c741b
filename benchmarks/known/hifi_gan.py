"""HiFi-GAN: speech from spectrograms, by two discriminators."""

import json

from made import wav, write

REPOSITORY = "jik876/hifi-gan"
COMMIT = "4769534"
PACKAGES = ["scipy", "tensorboard"]
EDITS = [  # as PyTorch wants today
    ("meldataset.py", "onesided=True", "onesided=True, return_complex=True"),
    ("meldataset.py", "spec.pow(2)", "torch.view_as_real(spec).pow(2)"),
    ("models.py", "1024", "32"),  # channels
    ("models.py", "512", "32"),
]
COMMAND = """--cpu --wait 500 --short 2 --steps 4 train.py --config small.json --input_wavs_dir wavs
    --input_training_file training.txt --input_validation_file validation.txt
    --checkpoint_path out-{run} --training_epochs 3 --validation_interval 100"""
VERDICTS = {
    "random train.py:113": (
        "true",
        "one seed on all ranks, in the data set: the same parts are cut out of their sounds",
        "shows.py dino, for images; no report found",
    ),
}

LIBROSA = """
import numpy as np

def normalize(sound):
    return sound / np.abs(sound).max()

def mel(sampling_rate, n_fft, num_mels, fmin, fmax):
    centers = np.linspace(0, n_fft // 2, num_mels)[:, None]
    return np.maximum(0, 1 - np.abs(np.arange(n_fft // 2 + 1) - centers) / 16)
"""

if __name__ == "__main__":
    write("librosa/__init__.py", "")  # of which two functions are used; the real one is large
    write("librosa/util.py", LIBROSA)
    write("librosa/filters.py", LIBROSA)
    with open("config_v3.json") as file:
        settings = json.load(file)
    settings |= {"batch_size": 4, "upsample_initial_channel": 16, "segment_size": 2048}
    settings |= {"num_workers": 0, "upsample_rates": [8, 8, 4]}
    write("small.json", json.dumps(settings))
    for number in range(12):
        wav(f"wavs/{number}.wav", seed=number)
    write("training.txt", "".join(f"{number}|words\n" for number in range(8)))
    write("validation.txt", "".join(f"{number}|words\n" for number in range(8, 12)))

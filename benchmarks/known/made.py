"""Tiny data in the formats that training scripts read, made by the files beside this one."""

import shutil
import wave
from pathlib import Path

import numpy as np
from PIL import Image


def image_folder(folder, train=16, val=4, classes=4, size=48, suffix="JPEG"):
    """FOLDER/train/CLASS/ and FOLDER/val/CLASS/, as torchvision's ImageFolder reads them."""
    random = np.random.default_rng(0)
    for split, images in ("train", train), ("val", val):
        for number in range(images):
            label = number % classes
            path = Path(folder, split, f"n{label:08d}", f"{number:05d}.{suffix}")
            path.parent.mkdir(parents=True, exist_ok=True)
            image = random.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            image[..., label % 3] //= 2
            Image.fromarray(image).resize((size, size)).save(path)


def text(words=400, seed=0):
    """Words of five letters."""
    letters = np.random.default_rng(seed).choice([*"etaoinshr"], (words, 5))
    return " ".join("".join(word) for word in letters)


def write(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)


def cifar10(train=64, test=16):
    """small_cifar10.py, whose CIFAR10 has torchvision's attributes, and random images."""
    write("small_cifar10.py", CIFAR10.format(train=train, test=test))


CIFAR10 = """
import numpy as np
import torchvision

class CIFAR10(torchvision.datasets.CIFAR10):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        self.transform, self.target_transform = transform, target_transform
        self.classes = [str(label) for label in range(10)]
        count = {train} if train else {test}
        random = np.random.default_rng(int(train))
        self.data = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        self.targets = [number % 10 for number in range(count)]
"""


def wav(path, samples=8000, rate=22050, seed=0):
    """A tone with noise, as 16-bit integers."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    times = np.arange(samples) / rate
    sound = np.sin(2 * np.pi * (200 + 40 * seed) * times) + 0.1 * random.normal(size=samples)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((sound * 10_000).astype(np.int16).tobytes())


def own_loop(*names):
    """Loops of ours, for what is a library: copied to where the script is started."""
    for name in names:
        shutil.copy(Path(__file__).parent / "loops" / name, ".")

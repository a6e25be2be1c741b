"""Folders of JPEG files that compress like photographs."""

import numpy as np
from PIL import Image

# Width, height, JPEG quality and strength of the finest noise, for the bits per pixel of ImageNet's
# files (110 kB) and of a phone's photographs (4 MB).
SIZES = {"ImageNet": (500, 375, 95, 7), "12 megapixels": (4000, 3000, 90, 6)}


def make_image(width, height, noise, random, color=128):
    """Gradients, and noise stronger the coarser its grain, as in photographs."""
    total = np.full((height, width, 3), color, dtype=np.float64)
    strength, grain = noise, 1
    while min(width, height) // grain > 2:
        small = random.normal(0, 1, (height // grain, width // grain, 3)) * strength
        for channel in range(3):
            layer = Image.fromarray(small[..., channel].astype(np.float32))
            total[..., channel] += np.asarray(layer.resize((width, height), Image.BICUBIC))
        strength, grain = min(25, strength * 2), grain * 4
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def make_folder(folder, size, train, test=2, different=120):
    """Make train/ and test/ with so many images of two classes, of which class b is brighter. Only
    so many are different: the others are further names of these files, for which nothing is made.
    """
    width, height, quality, noise = size
    random = np.random.default_rng(0)
    for part, count in ("train", train), ("test", test):
        paths = [folder / part / "ab"[i % 2] / f"{i:06}.jpg" for i in range(count)]
        for i, path in enumerate(paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            if i < different:
                image = make_image(width, height, noise, random, 112 + 32 * (i % 2))
                image.save(path, quality=quality)
            else:  # of its class; no symbolic link, which complete/ would follow to one file
                path.hardlink_to(paths[i % (different // 2 * 2)])

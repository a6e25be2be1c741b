"""The limit for a folder of images: what Pillow alone decodes and resizes, one process a core."""

import os
from multiprocessing import Pool
from pathlib import Path

from common import Clock
from PIL import Image

from train_single import parser

args = parser.parse_args()


def decode(path):
    size = args.image_size, args.image_size
    return Image.open(path).convert("RGB").resize(size, Image.Resampling.BILINEAR).tobytes()


if __name__ == "__main__":
    paths = list(Path(args.dataset, "train").glob("*/*"))
    clock = Clock(args, len(paths))
    with Pool(os.cpu_count()) as pool:
        for _ in range(args.epochs):
            clock.start()
            pool.map(decode, paths, chunksize=8)
            clock.stop()

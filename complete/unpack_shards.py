"""Unpack tar shards of webdataset into a folder for each class, which pack_images.py reads.

ls shards/*train*.tar | xargs -P 16 -n 8 python complete/unpack_shards.py imagenet/train

A shard has KEY.jpg and KEY.cls, a text with the number of the class, which names its folder.
"""

import sys
import tarfile
from pathlib import Path


def unpack(path, folder):
    with tarfile.open(path) as shard:
        contents = {file.name: shard.extractfile(file).read() for file in shard if file.isfile()}
    for name, content in contents.items():
        key, suffix = name.rsplit(".", 1)
        if suffix.lower() in ("jpg", "jpeg", "png"):
            label = int(contents[key + ".cls"])
            image_path = folder / f"{label:04}" / name.replace("/", "_")
            image_path.parent.mkdir(parents=True, exist_ok=True)
            image_path.write_bytes(content)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, *shards = map(Path, sys.argv[1:])
    for path in shards:
        unpack(path, folder)


if __name__ == "__main__":
    main()

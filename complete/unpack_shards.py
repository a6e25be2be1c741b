"""Unpack tar shards of webdataset into a folder for each class, which pack_images.py reads.

ls shards/*train*.tar | xargs -P 16 -n 8 python complete/unpack_shards.py imagenet/train

A shard has KEY.jpg and KEY.cls, a text with the number of the class, which names its folder. Keys
may be the same in several shards, whose names are in those of the images.
"""

import sys
import tarfile
from pathlib import Path


def unpack(path, folder):
    with tarfile.open(path) as shard:
        files = [file for file in shard if file.isfile()]
        contents = {file.name: shard.extractfile(file).read() for file in files}
        shard.fileobj.seek(shard.offset)  # behind the last file: zeros, where a shard ends
        if not shard.fileobj.read(1):
            sys.exit(f"{path} is cut off: copy it again")
    if len(contents) < len(files):
        sys.exit(f"{path} has two files of the same name")
    for name, content in contents.items():
        key, suffix = name.rsplit(".", 1)
        if suffix.lower() in ("jpg", "jpeg", "png"):
            label = int(contents[key + ".cls"])
            image_path = folder / f"{label:04}" / f"{path.stem}_{name.replace('/', '_')}"
            if image_path.exists() and image_path.read_bytes() != content:
                sys.exit(f"{path}: another image has the name {image_path}")
            image_path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = image_path.with_suffix(".tmp")  # a kill leaves no half image behind
            unfinished.write_bytes(content)
            unfinished.rename(image_path)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, *shards = map(Path, sys.argv[1:])
    for path in shards:
        unpack(path, folder)


if __name__ == "__main__":
    main()

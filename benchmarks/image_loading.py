"""How many images a second a DataLoader delivers at 224 pixels, before any training.

python benchmarks/image_loading.py                        # images that it makes, of two sizes
python benchmarks/image_loading.py --folder my_images     # some of yours, as train.py takes them
python benchmarks/image_loading.py --folder my_images --workers 0 1 2 4 8 16     # how many help?

Contestants: torchvision's reference pipeline (references/classification/presets.py with PIL),
timm's if it is installed, train_ddp_torchrun.py's, a folder in complete/train.py, the same folder
after pack_images.py, and as a limit the plain reading of the files' bytes in one process. The first
two resize a random part of an image, the others all of it; complete/ crops it on the device. Each
round runs all of them; ratios are taken within a round. The files are in the page cache, so this
measures the CPU, not the disk. Images per CPU second count the time of all processes: what one core
delivers, even on a machine that is shared.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from harness import ROOT, fitting_workers, row, spread, table
from make_images import SIZES, make_folder
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import datasets, transforms

CHILDREN = resource.RUSAGE_CHILDREN
COMPLETE = ROOT / "complete"
sys.path[:0] = [str(COMPLETE), str(ROOT)]
import train as script  # noqa: E402
from images import find_images  # noqa: E402

import train_ddp_torchrun  # noqa: E402

FILES = {"ImageNet": 120, "12 megapixels": 8}  # how many of each size


def link_some(folder, source, count):
    """About `count` training images of the folder `source`, as many of each class, and a test image
    of each: a whole ImageNet would not fit where temporary files are."""
    classes, parts, _ = find_images(source)
    for part, samples in parts.items():  # "train", and "val" or "test" or both
        limit = max(1, count // len(classes)) if part == "train" else 1
        seen = Counter()
        for path, label in zip(*samples):
            seen[label] += 1
            if seen[label] <= limit:
                place = folder / part / classes[label] / f"{seen[label]}{Path(path).suffix}"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(Path(path).resolve())


class Bytes(Dataset):
    """The limit: the files' bytes, read and dropped."""

    def __init__(self, folder):
        self.paths = [path for path, _ in datasets.ImageFolder(folder).samples]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return len(Path(self.paths[i]).read_bytes())


def reference(folder):
    """As references/classification/presets.py has it."""
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    steps += [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float)]
    steps += [transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    return datasets.ImageFolder(folder, transforms.Compose(steps))


def timm(folder):
    """As its train.py has it, without changes of colors. Pixels are normalized on the device."""
    from timm.data import create_transform

    transform = create_transform(224, is_training=True, color_jitter=None, use_prefetcher=True)
    return datasets.ImageFolder(folder, transform)


def small(folder):
    args = argparse.Namespace(dataset=folder, image_size=224)
    return train_ddp_torchrun.load_data(args)[0]


def ours(folder, side=224):
    flags = ["--dataset", str(folder), "--image-size", str(side)]
    return script.load_data(script.parser.parse_args(flags))[0]


def cpu_seconds():
    """Of this process, and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, CHILDREN))


def collate(dataset):
    """Of a dataset's samples. timm has its own, for arrays."""
    if type(dataset) is not datasets.ImageFolder or torch.is_tensor(dataset[0][0]):
        return default_collate
    from timm.data.loader import fast_collate

    return fast_collate


def speed(dataset, workers, batch_size, count):
    """Images a second, and images a second of CPU time in all processes together."""
    order = [0] * batch_size * max(1, workers)  # a first epoch, which starts the workers
    cpu, first = cpu_seconds(), len(order)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(dataset, batch_size, sampler=order, collate_fn=collate(dataset), **options)
    list(loader)
    order[:] = torch.randint(len(dataset), (count,)).tolist()
    started = time.perf_counter()
    for _ in loader:
        pass
    seconds = time.perf_counter() - started
    del loader  # ends the workers
    return count / seconds, (first + count) / (cpu_seconds() - cpu)


def measure(args, name, folder):
    """Print a table about the training images of a folder."""
    paths = Bytes(folder / "train").paths
    pixels = sum(image.width * image.height for image in map(Image.open, paths))
    size = sum(Path(path).stat().st_size for path in paths)
    print(f"\n{name}: {len(paths)} files of {size / len(paths) / 1e3:.0f} kB, ", end="")
    print(f"{pixels / len(paths) / 1e6:.2f} megapixels, {size * 8 / pixels:.1f} bits per pixel\n")
    with tempfile.TemporaryDirectory() as packed:
        command = [sys.executable, COMPLETE / "pack_images.py", folder, packed]
        subprocess.run([*command, "--workers", "1"], check=True, stdout=sys.stderr)
        data = {"torchvision's reference": reference(folder / "train")}
        if find_spec("timm"):
            data["timm"] = timm(folder / "train")
        data |= {"train_ddp_torchrun.py": small(folder), "folder": ours(folder)}
        data |= {"packed": ours(packed), "reading the files": Bytes(folder / "train")}
        found = {}  # images/s, and images per CPU second, of each round
        for count in args.workers:  # a batch of the reference, whose pixels are floats, is largest
            if fitting_workers(count, args.batch_size * 12 * 224**2) == count:
                found |= {(key, count): [] for key in data if key != "reading the files"}
        found["reading the files", 0] = []
        images = dict.fromkeys(found, 2 * args.batch_size)
        for number in range(-1, args.rounds):  # the first only finds out how many images to take
            for (key, count), speeds in found.items():
                own = speed(data[key], count, args.batch_size, images[key, count])
                print(name, number, key, count, *own, file=sys.stderr, flush=True)
                if number >= 0:
                    speeds.append(own)
                else:
                    batches = max(4, round(own[0] * args.seconds / args.batch_size))
                    images[key, count] = batches * args.batch_size
    table(0, "images", "workers", "images/s", "x reference", "images per CPU second")
    for (key, count), own in found.items():
        base = found.get(("torchvision's reference", count)) or next(iter(found.values()))
        rates, per_cpu = zip(*own)
        ratios = [rate / pair[0] for rate, pair in zip(rates, base)]
        row(key, count, spread(rates, 0), spread(ratios, 2), spread(per_cpu, 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="measure this one instead")
    parser.add_argument("--images", type=int, default=4000, help="how many of the folder's")
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="of the DataLoader")
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    if args.folder:
        with tempfile.TemporaryDirectory() as folder:
            link_some(Path(folder), args.folder, args.images)
            measure(args, args.folder.name, Path(folder))
    for name in args.sizes if not args.folder else ():
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder), SIZES[name], FILES[name])
            measure(args, name, Path(folder))

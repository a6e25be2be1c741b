"""Folders of images: found, decoded, cut to a square, or read as pack_images.py has packed them.

A folder has train/CLASS/ and test/CLASS/ (or val/CLASS/, or both), or only CLASS/.
"""

import json
import math
import os
from collections import Counter
from contextlib import suppress
from pathlib import PurePath

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import Dataset, TensorDataset
from torchvision import datasets
from torchvision.datasets.folder import is_image_file
from torchvision.transforms import v2

# The parts of a data set, and the names of their folders. The first that has classes is taken.
PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


class FolderError(Exception):
    """Says in a line what is wrong with a folder."""


def refuse(message):
    raise FolderError(message)


def load_folder(folder, side, final=False):
    """Training and test set of a folder of images, or of one that pack_images.py wrote. Where there
    are both val/ and test/, the test set is val/, and with `final` test/."""
    if not folder.is_dir():
        refuse(f"--dataset {folder}: neither a known name nor a folder of images")
    if (folder / "train.bin").exists():
        if not (folder / "classes.json").exists():
            refuse(f"--dataset {folder} is not complete: run pack_images.py again")
        classes, notes = json.loads((folder / "classes.json").read_text()), []
        packed = [part for part in PARTS if (folder / f"{part}.bin").exists()]
        sets = {part: PackedImages(folder / part, classes) for part in packed}
        if sets["train"].side > side:
            says = f"{folder} has {sets['train'].side} pixels a side, where --side {side} is enough"
            notes.append(f"{says}: pack it again for speed")
    else:
        classes, parts, notes = find_images(folder)
        sets = {part: Images(samples, classes, side) for part, samples in parts.items()}
    if {"val", "test"} < {*sets}:
        notes.append(f"{folder}: best.pt is chosen on val/; --evaluate gives the scores on test/")
        del sets["val" if final else "test"]
    for note in notes:
        if os.environ.get("RANK", "0") == "0":  # rank 0 alone prints
            print(note, flush=True)
    train_set, test_set = sets.values()
    return train_set, test_set


# ---- Finding images ------------------------------------------------------------------------------
def find_images(folder):
    """Returns the names of the classes, a list of paths and labels for each part ("train", "test",
    and "val" where there are both), and lines to print."""
    places, notes = find_parts(folder)
    has_train = places["train"] != folder
    found, left_out = scan(places.values())
    notes += [f"{folder}: {line}" for line in left_out]
    found = dict(zip(places, found))
    classes = sorted(found["train"])
    if len(classes) == 1:
        refuse(
            f"{places['train']} has only one class, {quoted(classes)}: are the classes in there?"
        )
    if not has_train:  # and not such as training/CLASS/ and testing/CLASS/
        direct = {os.path.dirname(path) for paths in found["train"].values() for path in paths}
        empty = [name for name in classes if os.path.join(folder, name) not in direct]
        if empty:
            says = f"{folder} has no train/, and no images directly in {quoted(empty)}"
            refuse("\n".join([says, *notes]))
    for part, by_class in found.items():
        if sorted(by_class) != classes:  # a label would mean another class
            names = f"train/ and {places[part].name}/"
            differ = quoted(sorted({*classes} ^ {*by_class}))
            refuse(f"{folder}: {names} differ in {differ}: give both all classes")
    if len(found) == 1:
        notes.append(
            f"{folder} has no test/ or val/: every tenth image of each class is for testing"
        )
        found["test"] = {name: paths[::10] for name, paths in found["train"].items()}
        for paths in found["train"].values():
            del paths[::10]
    if "test" not in found:
        found["test"] = found.pop("val")
    empty = [name for name in classes if not all(by_class[name] for by_class in found.values())]
    if empty:
        says = f"{folder}: no images to train or to test on in {quoted(empty)}"
        refuse("\n".join([says, *notes]))
    samples = {
        part: [(path, label) for label, name in enumerate(classes) for path in by_class[name]]
        for part, by_class in found.items()
    }
    return classes, samples, notes


def find_parts(folder):
    """Returns the folder of each part that has classes, and lines on those that have none. Where
    train/ has none, the folder's own folders are the classes, one of which may be named train."""
    places, notes = {}, []
    for part, names in PARTS.items():
        for place in [folder / name for name in names if (folder / name).is_dir()]:
            if part in places or not folders_in(place):
                notes.append(f"{place} is not used, as it has no classes, or another one is")
            else:
                places[part] = place
    if "train" in places:
        return places, notes
    known = {name for names in PARTS.values() for name in names}
    if {path.name for path in folders_in(folder)} <= known:
        source = folder / "train" if (folder / "train").is_dir() else folder
        refuse(f"{source} has no folders: it needs one for each class")
    return {"train": folder}, []


def quoted(names):
    """Names that look alike, as two ways to write an accent do, can be told apart."""
    return ", ".join(map(ascii, names))


def folders_in(folder):
    """Without .git, .ipynb_checkpoints and other hidden ones."""
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def scan(folders):
    """Returns, for each of these folders, the paths of the images in each of its classes, sorted by
    folder and name; and lines on what is left out. A link is not followed to what is found anyway,
    nor to a folder that contains one of these: each real path counts once."""
    roots = [os.path.realpath(folder) for folder in folders]
    tops, seen = {*roots}, set()  # folders that are read as a whole; all folders and links so far
    suffixes, left_out = Counter(), Counter()

    def found_anyway(target, is_folder):
        parents = [target, *map(str, PurePath(target).parents)]
        below = [target[len(path) :] for path in parents if path in tops]
        above = is_folder and any(top.startswith(f"{target.rstrip('/')}/") for top in tops)
        return above or any("/." not in path for path in below)  # hidden folders are not read

    def walk(folder, real):
        """The folders and images in a folder, and their real paths."""
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            is_link, is_folder = entry.is_symlink(), entry.is_dir()
            if is_folder and entry.name.startswith("."):
                continue
            if not is_folder and not is_image_file(entry.name):
                suffixes[os.path.splitext(entry.name)[1] or "without"] += 1
                continue
            target = os.path.realpath(entry.path) if is_link else os.path.join(real, entry.name)
            if is_link and found_anyway(target, is_folder) or target in seen:
                left_out["links left out, to what is found anyway"] += 1
                continue
            if is_link and is_folder:
                tops.add(target)
            if is_link or is_folder:
                seen.add(target)
            yield entry, target

    def images(folder, real):
        for entry, target in walk(folder, real):
            if entry.is_dir():
                yield from images(entry.path, target)
            else:
                yield entry.path

    found = []
    for folder, root in zip(folders, roots):
        entries = [] if root in seen else [*walk(folder, root)]
        seen.add(root)
        by_class = {x.name: list(images(x.path, target)) for x, target in entries if x.is_dir()}
        left_out["images left out, which are in no class"] += len(entries) - len(by_class)
        found.append({name: sorted(paths, key=os.path.split) for name, paths in by_class.items()})
    lines = [f"{count} {what}" for what, count in left_out.items() if count]
    if suffixes:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
        lines.append(f"{suffixes.total()} files left out by their suffix: {counts}")
    return found, lines


# ---- Data sets -----------------------------------------------------------------------------------
class Images(Dataset):
    """Image files, decoded when they are asked for, and cut to a square: (3, side, side), uint8."""

    def __init__(self, samples, classes, side):
        self.classes, self.side = classes, side
        # Arrays, which loader workers share. Of a list, each would in time hold a copy.
        self.paths = np.array([os.fsencode(path) for path, _ in samples])
        self.targets = np.array([label for _, label in samples])
        self.transform = v2.Compose([v2.PILToTensor(), v2.Resize(side), v2.CenterCrop(side)])

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        image = load_image(os.fsdecode(self.paths[i]), self.side)
        return self.transform(image), int(self.targets[i])


def load_image(path, side):
    """The image in a file, upright and in RGB. A large one may be reduced, not below `side`."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (side, side))  # decodes a large JPEG at 1/2, 1/4 or 1/8 of its size
            image.load()
            with suppress(Exception):  # a broken EXIF block raises one of many kinds
                ImageOps.exif_transpose(image, in_place=True)  # as the camera was held
            if image.mode in ("F", "I"):
                raise ValueError(f"its pixels (mode {image.mode}) have no known maximum")
            if image.mode.startswith("I;16"):  # 16 bits a pixel, which convert() would clip to 8
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return image.convert("RGB")
    except Exception as error:  # most do not say which file it is
        raise OSError(f"{path}: {error}") from error


class PackedImages(Dataset):
    """Images that pack_images.py has decoded: PATH.bin has their pixels, PATH.npy their labels and
    the paths of their files."""

    def __init__(self, path, classes):
        self.path, self.classes = path, classes
        with open(f"{path}.npy", "rb") as file:
            self.targets, self.paths = np.load(file), np.load(file)
        self.file = open(f"{path}.bin", "rb", buffering=0)
        size = os.path.getsize(self.file.name)
        self.side = math.isqrt(size // len(self.targets) // 3)
        if size != len(self.targets) * 3 * self.side**2:
            raise OSError(f"{self.file.name} does not hold {len(self.targets)} images: copy again")

    def __reduce__(self):  # a worker that is not forked opens the file for itself
        return PackedImages, (self.path, self.classes)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        label = int(self.targets[i])
        pixels = torch.empty(3, self.side, self.side, dtype=torch.uint8)
        offset = i * pixels.numel()  # forked workers share the file, but not a position in it
        if os.preadv(self.file.fileno(), [pixels.numpy()], offset) < pixels.numel():
            raise OSError(f"{self.file.name} ends within image {i}")
        return pixels, label


# ---- Images that fit on the device ---------------------------------------------------------------
def load_torchvision(name, folder, train, colour):
    """CIFAR-10 or Fashion-MNIST as two tensors, (N, C, H, W) and (N)."""
    kind = {"cifar10": datasets.CIFAR10, "fashion-mnist": datasets.FashionMNIST}[name]
    try:
        dataset = kind(folder, train, download=True)
    except (OSError, RuntimeError) as error:
        says = f"no download ({str(error).splitlines()[0]})"
        raise FolderError(f"{says}: put the files into --data-dir") from error
    images = torch.as_tensor(dataset.data)  # (N, H, W) or (N, H, W, C)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    if colour:
        images = images.expand(-1, 3, -1, -1)
    tensors = TensorDataset(images, torch.as_tensor(dataset.targets))
    tensors.classes = getattr(dataset, "classes", None)
    return tensors


def synthetic(count, side, seed):
    """`count` images (3, side, side) of ten coarse patterns, with noise."""
    coarse = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = (F.interpolate(coarse, side) * 120).byte()  # to 119, and the noise to 135
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randint(136, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return TensorDataset(images.add_(patterns[labels]), labels)


# ---- Batches of images on the device -------------------------------------------------------------
def random_crops(images, size):
    """A random part of each image (N, C, H, W), resized to `size` (H, W); half are flipped."""
    count, device = len(images), images.device
    zoom = torch.empty(count, device=device).uniform_(0.6, 1)  # part of the image's side
    flip = torch.randint(2, (count,), device=device) * 2 - 1
    shift = torch.empty(count, 2, device=device).uniform_(-1, 1) * (1 - zoom)[:, None]
    # The centers of a crop's pixels, and where they lie in the image: its sides are at -1 and 1.
    # Products of single numbers: F.affine_grid multiplies matrices, on a GPU in TF32.
    y, x = (torch.linspace(1 / n - 1, 1 - 1 / n, n, device=device) for n in size)
    y = torch.outer(zoom, y) + shift[:, 1:]
    x = torch.outer(zoom * flip, x) + shift[:, :1]
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=3)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

"""Images: found in folders, decoded, packed by pack_images.py, cropped; and data sets to try.

A folder has train/CLASS/ and test/CLASS/ (or val/CLASS/, or both), or only CLASS/.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import unicodedata
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset, TensorDataset
from torchvision import datasets
from torchvision.datasets.folder import is_image_file
from torchvision.transforms import v2

# The parts of a data set, and the names of their folders. The first that has classes is taken.
PARTS = {"train": ["train"], "val": ["val", "valid", "validation"], "test": ["test"]}
# Folders that systems and archives put beside yours. They are skipped, as hidden ones are.
SYSTEM_FOLDERS = {
    "__MACOSX",
    "@eaDir",
    "$RECYCLE.BIN",
    "System Volume Information",
    "lost+found",
}
# Files of one size to compare by their content, at most: 20,000 are opened in seconds.
MOST_COMPARED = 20_000


class FolderError(Exception):
    """Says in a line what is wrong with a folder."""


def load_images(name, data_dir, image_size, colour, final=False):
    """Training and test set: `synthetic`, one of torchvision's, stored in `data_dir`, or a folder.
    With `colour`, grey images get three channels. `final`: see load_folder. Raises FolderError."""
    if name == "synthetic":
        return synthetic(10_000, image_size, 1), synthetic(2_000, image_size, 2)
    if name in ("cifar10", "fashion-mnist"):
        return in_turns(load_torchvision, name, data_dir, colour)
    return load_folder(Path(name), side_before_crop(image_size), final)


def load_folder(folder, side, final=False):
    """Training and test set of a folder of images, or of one that pack_images.py wrote. Images are
    squares of `side` pixels, packed ones of those that they were packed with. The test set is val/
    or test/, as its `part` says; where there are both, val/, and with `final` test/. With `final`
    the training set may be missing: None. Raises FolderError."""
    if not folder.is_dir():
        raise FolderError(f"--dataset {folder} is neither a known name nor a folder")
    is_rank_0 = os.environ.get("RANK", "0") == "0"  # which alone prints
    if any((folder / f"{part}.bin").exists() for part in PARTS):
        sets, notes = load_packed(folder, side)
    else:
        classes, parts, notes = find_images(folder, needs_train=not final)
        if is_rank_0:
            notes += shared_images(folder, parts)
        sets = {part: Images(*samples, classes, side) for part, samples in parts.items()}
    if "train" not in sets and not final:
        raise FolderError(f"{folder} has no train.bin, which only --evaluate can do without")
    if {"val", "test"} <= sets.keys():
        notes.append(f"{folder}: best.pt is chosen on val/; --evaluate gives the scores on test/")
    if is_rank_0:
        for note in notes:
            print(note, flush=True)
    part = "test" if "val" not in sets or final and "test" in sets else "val"
    sets[part].part = part  # by which the scores are named
    return sets.get("train"), sets[part]


def load_packed(folder, side):
    """The data sets "train", and "val" or "test" or both, and lines to print."""
    if not (folder / "classes.json").exists():
        raise FolderError(f"--dataset {folder} is not complete: run pack_images.py again")
    classes = json.loads((folder / "classes.json").read_text())
    packed = [part for part in PARTS if (folder / f"{part}.bin").exists()]
    sets = {part: PackedImages(folder / part, classes) for part in packed}
    packed_side = next(iter(sets.values())).side
    notes = []
    if packed_side != side:
        better = "faster" if packed_side > side else "sharper"
        message = f"was packed with --side {packed_side}; --side {side} would be {better}"
        notes.append(f"{folder} {message}")
    return sets, notes


def side_before_crop(image_size):
    """A margin for crops: 256 pixels for 224. Tiny images have none: it would only blur them."""
    return image_size * 8 // 7 if image_size >= 64 else image_size


# ---- Finding images ------------------------------------------------------------------------------
def find_images(folder, needs_train=True):
    """Returns the names of the classes, paths and labels for each part ("train", and "val" or
    "test" or both), and lines to print. Raises FolderError."""
    counts = Counter()
    places, notes = find_parts(folder)
    if needs_train and "train" not in places:
        if (folder / "train").is_dir():
            raise FolderError(f"{folder}/train has no folders: it needs one for each class")
        raise FolderError(f"{folder} has no train/, which only --evaluate can do without")
    found = {part: images_by_class(place, counts) for part, place in places.items()}
    if counts["in no class"]:
        notes.append(
            f"{folder}: {counts.pop('in no class')} images left out, which are in no class"
        )
    if counts:
        notes.append(f"{folder}: {suffixes_in_words(counts)}")
    check_classes(folder, places, found, notes)
    classes = sorted(next(iter(found.values())))
    if list(found) == ["train"]:
        notes.append(
            f"{folder} has no test/ or val/: every tenth image of each class is for testing"
        )
        found["test"] = {name: paths[::10] for name, paths in found["train"].items()}
        for paths in found["train"].values():
            del paths[::10]
    empty = [name for name in classes if not all(by_class[name] for by_class in found.values())]
    if empty:
        message = f"{folder}: no images to train or to test on in {quoted(empty)}"
        raise FolderError("\n".join([message, *notes]))
    parts = {}
    for part, by_class in found.items():
        labels = np.repeat(range(len(classes)), [len(by_class[name]) for name in classes])
        parts[part] = [path for name in classes for path in by_class[name]], labels
    return classes, parts, notes


def find_parts(folder):
    """Returns the folder of each part that has classes, and lines on those that have none. Where
    train/ has none, the folder's own folders are the classes, one of which may be named train;
    unless all are parts."""
    places, notes = {}, []
    for part, names in PARTS.items():
        for place in [folder / name for name in names if (folder / name).is_dir()]:
            if part in places or not folders_in(place):
                notes.append(f"{place} is not used, as it has no classes, or another one is")
            else:
                places[part] = place
    if "train" in places:
        return places, notes
    if set(folders_in(folder)) <= set(itertools.chain(*PARTS.values())):
        if places:
            return places, notes
        source = folder / "train" if (folder / "train").is_dir() else folder
        raise FolderError(f"{source} has no folders: it needs one for each class")
    return {"train": folder}, []


def is_part(folder):
    """Whether a folder is a part of a data set, such as train/, and not a class of that name."""
    if folder.name not in itertools.chain(*PARTS.values()):
        return False
    try:
        return find_parts(folder.parent)[0].get("train") != folder.parent
    except FolderError:  # no part has folders
        return False


def check_classes(folder, places, found, notes):
    """Raises FolderError if the folders in the parts cannot be the classes."""
    (first, by_class), *_ = found.items()
    if len(by_class) == 1:
        message = f"{places[first]} has only one class, {quoted(by_class)}"
        raise FolderError(f"{message}: are the classes in there?")
    if places[first] == folder:  # and not such as training/CLASS/ and testing/CLASS/
        direct = {os.path.dirname(path) for paths in by_class.values() for path in paths}
        direct = {as_composed(os.path.relpath(path, folder)) for path in direct}
        empty = [name for name in by_class if name not in direct]
        if empty:
            message = f"{folder} has no train/, and no images directly in {quoted(empty)}"
            raise FolderError("\n".join([message, *notes]))
    for part, others in found.items():
        if others.keys() != by_class.keys():  # a label would mean another class
            differ = quoted(others.keys() ^ by_class.keys())
            message = f"{folder}: {places[first].name}/ and {places[part].name}/ differ in {differ}"
            raise FolderError(f"{message}: give both all classes, or remove what is no class")


def images_by_class(folder, counts):
    """The paths of the images of each class, whose folders are in this one."""
    found = {}
    for entry in visible(folder):
        if entry.is_dir():
            found.setdefault(as_composed(entry.name), []).extend(image_files(entry.path, counts))
        elif is_image_file(entry.name):
            counts["in no class"] += 1
    return found


def as_composed(name):
    """A name with each accent as part of its letter. A Mac writes two characters."""
    return unicodedata.normalize("NFC", name)


def image_files(folder, counts):
    """The paths of the images in a folder and in those below it, sorted by folder and name. Adds
    the suffixes of other files to `counts`."""
    images = []
    for path in files_below(folder):
        if is_image_file(path):
            images.append(path)
        else:
            counts[os.path.splitext(path)[1] or "without"] += 1
    return sorted(images, key=os.path.split)


def files_below(folder):
    for entry in visible(folder):
        if entry.is_dir():
            yield from files_below(entry.path)
        else:
            yield entry.path


def visible(folder):
    """What is in a folder, but hidden folders and files (.git; a Mac's ._photo.jpg), those of a
    system, and links to a folder that contains this one, which would never end. Raises
    FolderError."""
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise FolderError(f"{folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name in SYSTEM_FOLDERS:
            continue
        if entry.is_symlink() and entry.is_dir() and leads_back(Path(entry.path)):
            continue
        yield entry


def leads_back(link):
    target = link.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in link.parents)


def folders_in(folder):
    return [entry.name for entry in visible(folder) if entry.is_dir()]


# ---- Images in two parts -------------------------------------------------------------------------
def shared_images(folder, parts):
    """Lines on images that are in two parts, by links or as copies."""
    lines = []
    for (one, (paths, _)), (other, (others, _)) in itertools.combinations(parts.items(), 2):
        both = shared_files(paths, others)
        if both:
            message = (
                f"{folder}: {len(both)} images of {other} are also in {one}, as links or copies"
            )
            lines.append(f"{message}, such as {quoted([min(both)])}: scores will be too good")
    return lines


def shared_files(paths, others):
    """Those of `others` that are a file of `paths`, too: by a link, or with the same content. Each
    key reads more, of fewer files."""
    paths, others = with_shared_keys(paths, others, file_size)
    if len(paths) > MOST_COMPARED:  # of the copies, those with another name are not found
        by_name = with_shared_keys(paths, others, os.path.basename)
        by_link = with_shared_keys(paths, others, inode)
        paths, others = ([*{*a, *b}] for a, b in zip(by_name, by_link))
    paths, others = with_shared_keys(paths, others, last_block)
    return with_shared_keys(paths, others, content_hash)[1]


def with_shared_keys(paths, others, key):
    """The files of both lists of which a file of the other list has the key. None is no key."""
    keys = [keys_of(files, key) for files in (paths, others)]
    shared = {*keys[0]} & {*keys[1]} - {None}
    return [
        [path for path, its_key in zip(files, its_keys) if its_key in shared]
        for files, its_keys in zip((paths, others), keys)
    ]


def keys_of(paths, key):
    """The key of each file. Threads ask at the same time, as a network disk takes a millisecond for
    each file."""

    def keys_of_some(first):
        return [key_or_none(path, key) for path in paths[first : first + 1000]]

    with ThreadPoolExecutor(32) as pool:
        return [*itertools.chain(*pool.map(keys_of_some, range(0, len(paths), 1000)))]


def key_or_none(path, key):
    try:
        return key(path)
    except OSError:  # which is said when the file is decoded
        return None


def file_size(path):
    return os.path.getsize(path) or None  # all empty files would be copies


def inode(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino


def last_block(path):
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4096))
        return file.read()


def content_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).digest()


# ---- Words ---------------------------------------------------------------------------------------
def suffixes_in_words(counts):
    shown = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common())
    return f"{counts.total()} files left out by their suffix: {shown}"


def quoted(names):
    """Names that look alike, as two ways to write an accent do, can be told apart."""
    return ", ".join(map(ascii, sorted(names)))


# ---- Data sets -----------------------------------------------------------------------------------
class Images(Dataset):
    """Image files, decoded when they are asked for, and cut to a square from the middle: (3, side,
    side), uint8, and a label."""

    def __init__(self, paths, labels, classes, side):
        self.classes, self.side = classes, side
        # Arrays, which loader workers share. Of a list, each would in time hold a copy.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.targets = np.asarray(labels)
        self.crop = square(side)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        path = os.fsdecode(self.paths[i])
        return self.crop(load_image(path, self.side)), int(self.targets[i])


LONGEST = 8  # times the shorter side


def square(side):
    """A transform of an image of PIL to (channels, side, side), uint8: the shorter side is resized,
    and the longer one cut at both ends."""
    return v2.Compose([shorten, v2.PILToTensor(), v2.Resize(side), v2.CenterCrop(side)])


def shorten(image):
    """Cut a very long image to the part around its middle before it is resized: one of 1 x 20,000
    pixels would take gigabytes."""
    longest = LONGEST * min(image.size)
    # An even number of pixels is cut off, the same at both ends.
    width, height = (n if n <= longest else longest + (n - longest) % 2 for n in image.size)
    if (width, height) == image.size:
        return image
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def load_image(file, side):
    """The image in a file, upright and in RGB. A large one may be reduced, not below `side`."""
    try:
        with Image.open(file) as image:
            seek_photo(image)
            return upright_rgb(image, side)
    except Image.DecompressionBombError as error:
        remedy = "save it smaller, or raise Image.MAX_IMAGE_PIXELS in images.py"
        raise OSError(f"{file}: {error} If you trust it, {remedy}.") from error
    except Exception as error:  # most do not say which file it is
        raise OSError(f"{file}: {error}") from error


def seek_photo(image):
    """Refuse a file of several images, such as a stack or an animation, of which PIL shows the
    first. Previews and masks, which cameras and editors put beside a photo, do not count."""
    if image.format == "MPO" or getattr(image, "n_frames", 1) == 1:  # MPO: a JPEG with a preview
        return
    photos = [i for i in range(image.n_frames) if not is_beside_a_photo(image, i)]
    if len(photos) != 1:
        message = f"it has {image.n_frames} pages or frames, of which one would be seen"
        raise ValueError(f"{message}: save each that you need as a file of its own")
    image.seek(photos[0])


def is_beside_a_photo(image, page):
    """Whether a page of a TIFF is marked as a preview (bit 0 of NEW_SUBFILE_TYPE) or a mask (2)."""
    if image.format != "TIFF":
        return False
    image.seek(page)
    return image.tag_v2.get(NEW_SUBFILE_TYPE, 0) & 0b101 != 0


# Tags of TIFF and EXIF.
NEW_SUBFILE_TYPE = 0x00FE
BITS_PER_SAMPLE = 0x0102
PHOTOMETRIC = 0x0106
WHITE_IS_ZERO = 0
ORIENTATION = 0x0112
# What makes an image upright, by the value of its orientation.
TURNS = {
    2: Image.FLIP_LEFT_RIGHT,
    3: Image.ROTATE_180,
    4: Image.FLIP_TOP_BOTTOM,
    5: Image.TRANSPOSE,
    6: Image.ROTATE_270,
    7: Image.TRANSVERSE,
    8: Image.ROTATE_90,
}


def upright_rgb(image, side):
    """An image that PIL has opened. Transparent pixels get the colors stored under them, as in
    torchvision's ImageFolder. PIL's own ImageOps.exif_transpose fails where the rest of a camera's
    EXIF block is broken."""
    image.draft("RGB", (side, side))  # decodes a large JPEG at 1/2, 1/4 or 1/8 of its size
    image.load()
    turn = None
    with suppress(Exception):  # a broken EXIF block raises one of many kinds
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    # Old versions of Pillow open 16 bits a pixel as 32; of PGM all do.
    has_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if image.mode.startswith("I;16") or has_16_bits:  # convert() would clip them to 8
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        (bits,) = tags.get(BITS_PER_SAMPLE, (16,))  # 12, where two pixels are in three bytes
        pixels = np.asarray(image)
        if bits == 16 and 0 < pixels.max() < 4096:
            warnings.warn("a 16-bit image has no values above 4095, and becomes nearly black")
        upper = (pixels >> (bits - 8)).astype(np.uint8)
        # PIL inverts fewer bits by itself.
        is_negative = tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
        image = Image.fromarray(~upper if is_negative else upper)
    if image.mode in ("F", "I"):
        raise ValueError(f"its pixels (mode {image.mode}) have no known maximum")
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


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

    def __reduce__(self):  # an open file cannot be pickled: a worker that is not forked opens it
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
def in_turns(load, *args):
    """What `load` returns. Rank 0 calls it first, as it may download; then one process of each
    other machine, which may have a disk of its own; then the rest. All try, before one that finds
    no data says so."""
    if not dist.is_initialized():
        return load(*args)
    if dist.get_rank() == 0:
        my_turn = 0
    else:
        my_turn = 1 if dist.get_node_local_rank(0) == 0 else 2
    failure = None
    for turn in range(3):
        if turn == my_turn:
            try:
                loaded = load(*args)
            except FolderError as error:
                failure = error
        dist.barrier()  # all ranks wait here for each other
    if failure:
        raise failure
    return loaded


def load_torchvision(name, folder, colour):
    """Training and test set of CIFAR-10 or Fashion-MNIST. With `colour`, grey images get three
    channels."""
    kind = {"cifar10": datasets.CIFAR10, "fashion-mnist": datasets.FashionMNIST}[name]
    try:
        parts = [kind(folder, train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        message = f"no download ({str(error).splitlines()[0]})"
        raise FolderError(f"{message}: put the files into --data-dir {folder}") from error
    return [as_tensors(part, colour) for part in parts]


def as_tensors(dataset, colour):
    """A data set of torchvision as two tensors, (N, C, H, W) and (N)."""
    images = torch.as_tensor(dataset.data)  # (N, H, W) or (N, H, W, C)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    if colour:
        images = images.expand(-1, 3, -1, -1)
    tensors = TensorDataset(images, torch.as_tensor(dataset.targets))
    tensors.classes = dataset.classes
    return tensors


def synthetic(count, side, seed):
    """`count` images (3, side, side) of ten coarse patterns, with noise."""
    coarse = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = (F.interpolate(coarse, side) * 120).byte()  # up to 119, and the noise up to 135
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randint(136, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return TensorDataset(images.add_(patterns[labels]), labels)


# ---- Crops, on the device ------------------------------------------------------------------------
def crop(images, size, at_random):
    """Images (N, C, H, W) as squares of `size`: of the middle, or at random, and half of them
    flipped. They are resized before, so that a crop shows most of the image."""
    # Smaller ones are enlarged to `size`, larger ones reduced to what a crop needs.
    shorter = min(images.shape[2:])
    side = min(max(shorter, size), side_before_crop(size))
    if shorter != side:
        images = v2.functional.resize(images, side)  # with antialias
    if at_random:
        images = random_crops(images, [size, size])
    elif list(images.shape[2:]) != [size, size]:
        images = v2.functional.center_crop(images, [size, size])
    return images.contiguous(memory_format=torch.channels_last)


def random_crops(images, size):
    """A random part of each image (N, C, H, W), resized to `size` (H, W); half are flipped."""
    count, device = len(images), images.device
    zoom = torch.empty(count, 1, 1, 1, device=device).uniform_(0.6, 1)  # part of the image's side
    sign = torch.empty_like(zoom).uniform_(-1, 1)  # negative: flipped
    place = torch.empty(count, 1, 1, 2, device=device).uniform_(-1, 1)  # from edge to edge
    scale = torch.cat([zoom.copysign(sign), zoom], dim=3)  # of x and of y
    shift = place * (1 - zoom)
    # Where the pixels of a crop lie in its image, whose sides are at -1 and 1: (N, H, W, 2).
    grid = torch.addcmul(shift, pixel_centers(*size, device), scale)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


@functools.cache  # made once, as it is the same in each step
def pixel_centers(height, width, device):
    """x and y of the centers of the pixels of an image whose sides are at -1 and 1: (H, W, 2)."""
    x, y = (torch.linspace(1 / n - 1, 1 - 1 / n, n, device=device) for n in (width, height))
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=2)

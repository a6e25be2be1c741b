"""Classify images by the best weights of a run of train.py, and write a table for a report.

python complete/predict.py runs/mine new_photos                              # prints the classes
python complete/predict.py runs/mine my_images/test --output predictions.csv

The columns of the table: path; class; true, the class in whose folder the image lies, or nothing
if none of its folders has the name of a class; and the probability of each class. A run with --amp
is tested with it, as in its own evaluation.

In a program of your own, beside the folder complete/ (or with its parent in PYTHONPATH):

    import torch
    from complete.predict import load
    model, classes, transform = load("runs/mine")  # in float32
    with torch.no_grad():
        probabilities = model(transform("photo.jpg")[None]).softmax(1)[0]
"""

import argparse
import csv
import functools
import math
import os
import secrets
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import train  # for build_model and prepare, which may be yours
from files import FileError, read_weights
from images import (
    FolderError,
    as_composed,
    image_files,
    is_part,
    load_image,
    quoted,
    square,
    suffixes_in_words,
    upright_rgb,
)
from loaders import check_temporary_folder
from PIL import Image
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(
    description="Classify images by the best weights of a run of train.py.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    allow_abbrev=False,
)
add = parser.add_argument
add("run", type=Path, help="folder of a run, or a best.pt or model.pt")
add("images", type=Path, nargs="+", help="images, and folders of images")
add("--output", type=Path, help="table to write (CSV); without it, the best classes are printed")
add("--batch-size", type=int, default=64, help="images that the model gets at once")
add("--workers", type=int, default=train.parser.get_default("workers"), help="loader processes")


# ---- The model -----------------------------------------------------------------------------------
def load(path):
    """The model of a run, on the CPU, the names of its classes, and a transform. `path` is the
    folder of the run, or a best.pt or model.pt. The transform makes what the model gets, (channels,
    height, width), from the path of an image, or from one that PIL has opened."""
    run = TrainedRun(path)
    return run.model, run.classes, run.transform


class TrainedRun:
    """What predictions need of a run. Raises FileError."""

    def __init__(self, path):
        file = Path(path)
        if file.is_dir():
            file = file / "best.pt"
        saved = read_weights(file)
        if saved.identity is None or saved.flags is None:
            raise FileError(f"{file} is not a best.pt or model.pt of train.py")
        self.image_shape = saved.identity["image"]  # None unless load_data returns uint8 images
        if self.image_shape is None or self.image_shape[1] != self.image_shape[2]:
            message = f"{file} was not trained on square uint8 images"
            raise FileError(f"{message}: predict with a Dataset as in your load_data")
        self.classes = saved.identity["classes"]
        if not isinstance(self.classes, list):  # a number: the data had no names
            self.classes = [str(label) for label in range(self.classes)]
        self.args = train.parser.parse_args([])
        vars(self.args).update(saved.flags)
        self.args.normalization = saved.normalization
        inputs = self.prepare(torch.zeros(1, *self.image_shape, dtype=torch.uint8))
        self.model = train.build_model(self.args, inputs, len(self.classes))
        self.model.load_state_dict(saved.weights)
        self.model.eval()

    def prepare(self, pixels, device=torch.device("cpu")):
        """What the model gets of a batch of images, as in train.py's evaluation."""
        no_labels = torch.zeros(pixels.shape[0], dtype=torch.long)  # len() would break torch.export
        return train.prepare(self.args, [pixels, no_labels], device)[0]

    def transform(self, image):
        return self.prepare(decode(image, self.image_shape)[None])[0]


def decode(image, shape):
    """The pixels of an image, uint8, of this shape, as train.py's load_data returns them."""
    channels, side, _ = shape
    rgb = upright_rgb(image, side) if isinstance(image, Image.Image) else load_image(image, side)
    return square(side)(rgb if channels == 3 else rgb.convert("L"))


# ---- The images ----------------------------------------------------------------------------------
def find_photos(places, classes):
    """The paths of images, given as files and folders, and their true classes, "" if unknown. An
    image that is given twice, also by a folder that contains another one, is there once."""
    classes = {as_composed(name): name for name in classes}
    photos, counts, given = {}, Counter(), 0
    real = functools.cache(os.path.realpath)
    for place in places:
        for path in image_files(place, counts) if place.is_dir() else [str(place)]:
            given += 1
            # By the real folder, but the file's own name, as in a folder of links to images.
            key = real(os.path.dirname(path)), os.path.basename(path)
            if key not in photos:
                photos[key] = path, true_class(path, place, classes)
    if given > len(photos):
        print(f"{given - len(photos)} images are given twice, and counted once", flush=True)
    if counts:
        print(suffixes_in_words(counts), flush=True)
    others = {os.path.dirname(path) for path, name in photos.values() if not name}
    if others and any(name for _, name in photos.values()):
        first = quoted(sorted(others)[:5])
        print(
            f"no class of the run has the name of these {len(others)} folders: {first}", flush=True
        )
    return [path for path, _ in photos.values()], [name for _, name in photos.values()]


def true_class(path, place, classes):
    """The first folder, from `place` down to the image, that has the name of a class, and in
    training would be one: train/ may be a part of the data, and no class. Where `place` is an
    image, this is its folder. `classes`: the names, by themselves as `as_composed` writes them."""
    below = Path(path).parent.relative_to(place).parts if place.is_dir() else ()
    start = absolute(place if place.is_dir() else place.parent)
    for folder in [*(start.joinpath(*below[:i]) for i in range(1, len(below) + 1)), start]:
        name = as_composed(folder.name)
        if name in classes and not takes_as_part(folder):
            return classes[name]
    return ""


def absolute(folder):
    """With its own name, which may be that of a link, unless it is given as `..`."""
    return folder.resolve() if ".." in folder.parts else folder.absolute()


takes_as_part = functools.cache(is_part)


class Photos(Dataset):
    """Pixels, and "", or what is wrong with the file."""

    def __init__(self, paths, shape):
        self.paths = np.array([os.fsencode(path) for path in paths])  # which workers share
        self.shape = shape

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        try:
            return decode(os.fsdecode(self.paths[i]), self.shape), ""
        except OSError as error:
            return torch.zeros(self.shape, dtype=torch.uint8), str(error)


# ---- The predictions -----------------------------------------------------------------------------
@torch.no_grad()
def classify(args, run, paths, true_classes, counts):
    """Yields path, class, true class and probabilities of each image. One that cannot be decoded is
    named and left out. `counts` gets how many were done, broken, known and right."""
    device = torch.device(run.args.device)  # a GPU, if there is one
    model, precision = run.model.to(device), train.autocast(run.args, device)
    loader = DataLoader(
        Photos(paths, run.image_shape),
        args.batch_size,
        num_workers=args.workers,
        # Python 3.14 otherwise starts each worker by importing torch (370 MB and 4 s).
        multiprocessing_context="fork" if sys.platform == "linux" and args.workers > 0 else None,
        pin_memory=device.type in ("cuda", "xpu"),  # for asynchronous copies to the GPU
    )
    images = zip(paths, true_classes)
    for pixels, errors in loader:
        inputs = run.prepare(pixels, device)
        with precision:
            outputs = model(inputs)
        probabilities = outputs.cpu().double().softmax(1).tolist()  # not every GPU has float64
        for error, row, (path, true) in zip(errors, probabilities, images):
            counts["done"] += 1
            if counts["done"] % 1000 == 0:
                print(f"{counts['done']} of {len(paths)} images", file=sys.stderr, flush=True)
            if not error and not all(map(math.isfinite, row)):
                error = f"{path}: the outputs of the model are not finite"
            if error:
                print(error, file=sys.stderr, flush=True)
                counts["broken"] += 1
                continue
            predicted = run.classes[row.index(max(row))]
            counts["known"] += true != ""
            counts["right"] += true == predicted
            yield path, predicted, true, row


def print_classes(rows, classes):
    """The best five of each image."""
    for path, _, _, probabilities in rows:
        # Of equal ones the first, as in the table.
        best = sorted(zip(classes, probabilities), key=lambda pair: -pair[1])[:5]
        print(f"{path}:", ", ".join(f"{name} {p:.4f}" for name, p in best), flush=True)


def write_table(rows, classes, output):
    """The file has another name until it is complete, and each predict.py one of its own."""
    unfinished = Path(f"{output}.{secrets.token_hex(4)}")
    is_written = False
    try:
        with open(unfinished, "w", newline="", errors="surrogateescape", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "class", "true", *classes])
            for path, predicted, true, probabilities in rows:
                writer.writerow([path, predicted, true, *(f"{p:.6g}" for p in probabilities)])
        is_written = True
    except OSError as error:  # which does not say which file it is
        raise SystemExit(f"cannot write {output}: {error}") from error
    finally:
        if not is_written:
            unfinished.unlink(missing_ok=True)
    if output.exists():
        raise SystemExit(f"{output} was written by another process: this table is {unfinished}")
    os.rename(unfinished, output)


def main(args):
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that a terminal cannot show
    if args.batch_size < 1 or args.workers < 0:
        parser.error("--batch-size must be at least 1, and --workers must not be negative")
    if args.workers > 0 and (problem := check_temporary_folder()):
        parser.error(problem)
    if args.output and args.output.exists():
        parser.error(f"--output {args.output} exists: remove it, or choose another name")
    output = args.output and args.output.resolve()  # what a link points to
    if output and not output.parent.is_dir():
        parser.error(f"--output {args.output}: there is no folder {output.parent}")
    for place in args.images:
        if not place.exists():
            parser.error(f"{place} does not exist")
    try:
        run = TrainedRun(args.run)
    except FileError as error:
        parser.error(error)
    try:
        paths, true_classes = find_photos(args.images, run.classes)
    except FolderError as error:
        parser.error(str(error))
    if not paths:
        parser.error(f"no images in {', '.join(map(str, args.images))}")
    counts = Counter()
    rows = classify(args, run, paths, true_classes, counts)
    if output:
        write_table(rows, run.classes, output)
    else:
        print_classes(rows, run.classes)
    message = f"{len(paths) - counts['broken']} images"
    if counts["known"]:
        message += f"; {counts['known']} with a true class, accuracy "
        message += f"{counts['right'] / counts['known']:.4f}"
    print(message, flush=True)
    if counts["broken"]:  # status 1
        raise SystemExit(f"{counts['broken']} of {len(paths)} files could not be classified")


if __name__ == "__main__":
    try:
        main(parser.parse_args())
    except KeyboardInterrupt:
        sys.tracebacklimit = 0  # one line
        raise

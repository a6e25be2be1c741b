"""Classify images by the best weights of a run of train.py, and write a table for a report.

python complete/predict.py runs/mine new_photos                              # prints the classes
python complete/predict.py runs/mine my_images/test --output predictions.csv

The columns of the table: path; class; true, the class in whose folder the image lies, or nothing
if none of its folders has the name of a class; and the probability of each class.

In a program of your own (PYTHONPATH=complete python my_program.py):

    from predict import load
    model, classes, transform = load("runs/mine")
    with torch.no_grad():
        probabilities = model(transform("photo.jpg")[None]).softmax(1)[0]
"""

import argparse
import csv
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import train  # for build_model and prepare, which may be yours
from checkpoint import DamagedFile, read_weights
from images import image_files, load_image, quoted, square, suffixes_in_words, upright_rgb
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
    """What predictions need of a run. Raises DamagedFile."""

    def __init__(self, path):
        file = Path(path)
        if file.is_dir():
            file = file / "best.pt"
        saved = read_weights(file)
        if "image" not in saved:
            raise DamagedFile(f"{file} is not a best.pt or model.pt of train.py")
        self.image_shape = saved["image"]  # None unless load_data returns uint8 images
        if self.image_shape is None or self.image_shape[1] != self.image_shape[2]:
            says = f"{file} was not trained on square uint8 images"
            raise DamagedFile(f"{says}: predict with a Dataset as in your load_data")
        self.classes = saved["classes"]
        if not isinstance(self.classes, list):  # a number: the data had no names
            self.classes = [str(label) for label in range(self.classes)]
        self.args = train.parser.parse_args([])
        vars(self.args).update(saved["flags"])
        self.args.normalization = saved["normalization"]
        inputs = self.prepare(torch.zeros(1, *self.image_shape, dtype=torch.uint8))
        self.model = train.build_model(self.args, inputs, len(self.classes))
        self.model.load_state_dict(saved["model"])
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
    """The paths of images, given as files and folders, and their true classes, "" if unknown."""
    paths, true_classes, counts = [], [], Counter()
    for place in places:
        found = image_files(place, counts) if place.is_dir() else [str(place)]
        paths += found
        true_classes += [true_class(path, place, classes) for path in found]
    counts.pop("links", None)
    if counts:
        print(suffixes_in_words(counts), flush=True)
    others = {os.path.dirname(path) for path, name in zip(paths, true_classes) if not name}
    if others and any(true_classes):
        first = quoted(sorted(others)[:5])
        print(
            f"no class of the run has the name of these {len(others)} folders: {first}", flush=True
        )
    return paths, true_classes


def true_class(path, place, classes):
    """The first folder, from `place` down to the image, that has the name of a class. Where
    `place` is an image, this is its folder."""
    start = place.absolute() if place.is_dir() else place.absolute().parent
    below = Path(path).absolute().parent.relative_to(start).parts
    return next((name for name in [*below, start.name] if name in classes), "")


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
    model = run.model.to(device)
    loader = DataLoader(
        Photos(paths, run.image_shape),
        args.batch_size,
        num_workers=args.workers,
        # Python 3.14 otherwise starts each worker by importing torch (370 MB and 4 s).
        multiprocessing_context="fork" if sys.platform == "linux" and args.workers > 0 else None,
        pin_memory=device.type in ("cuda", "xpu"),  # for asynchronous copies to the GPU
    )
    places = zip(paths, true_classes)
    for pixels, errors in loader:
        outputs = model(run.prepare(pixels, device))
        probabilities = outputs.double().softmax(1).tolist()
        for error, row, (path, true) in zip(errors, probabilities, places):
            counts["done"] += 1
            if counts["done"] % 1000 == 0:
                print(f"{counts['done']} of {len(paths)} images", file=sys.stderr, flush=True)
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
        best = sorted(zip(probabilities, classes), reverse=True)[:5]
        print(f"{path}:", ", ".join(f"{name} {p:.4f}" for p, name in best), flush=True)


def write_table(rows, classes, output):
    """The file has another name until it is complete."""
    unfinished = Path(f"{output}.tmp")
    with open(unfinished, "w", newline="", errors="surrogateescape", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "class", "true", *classes])
        for path, predicted, true, probabilities in rows:
            writer.writerow([path, predicted, true, *(f"{p:.6g}" for p in probabilities)])
    os.rename(unfinished, output)


def main(args):
    sys.stdout.reconfigure(errors="backslashreplace")  # for names of files in another encoding
    if args.output and args.output.exists():
        parser.error(f"--output {args.output} exists: remove it, or choose another name")
    for place in args.images:
        if not place.exists():
            parser.error(f"{place} does not exist")
    try:
        run = TrainedRun(args.run)
    except DamagedFile as error:
        parser.error(error)
    paths, true_classes = find_photos(args.images, run.classes)
    if not paths:
        parser.error(f"no images in {', '.join(map(str, args.images))}")
    counts = Counter()
    rows = classify(args, run, paths, true_classes, counts)
    if args.output:
        write_table(rows, run.classes, args.output)
    else:
        print_classes(rows, run.classes)
    says = f"{len(paths) - counts['broken']} images"
    if counts["known"]:
        says += f"; {counts['known']} with a true class, accuracy "
        says += f"{counts['right'] / counts['known']:.4f}"
    print(says, flush=True)
    if counts["broken"]:  # status 1
        raise SystemExit(f"{counts['broken']} of {len(paths)} files could not be decoded")


if __name__ == "__main__":
    main(parser.parse_args())

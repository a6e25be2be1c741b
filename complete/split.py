r"""Split a folder of images by patient into five folds, each with train/, val/ and test/.

pip install scikit-learn
python complete/split.py my_images folds    # of CLASS/PATIENT_NUMBER.png, or CLASS/PATIENT/NAME.png
python complete/split.py my_images folds --patient "P\d+"  # the patient: what is found first so

folds/0 to folds/4 have links to the images of my_images/CLASS/, as train/CLASS/PATIENT/NAME. In a
fold, a patient is in one part only; over the folds, each is in test/ once. The shares of the
classes are about the same in all parts.
"""

import argparse
import re
import secrets
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from images import FolderError, folders_in, images_by_class, suffixes_in_words
from sklearn.model_selection import StratifiedGroupKFold

FOLDS = 5
PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}


def main():
    parser = argparse.ArgumentParser(description="Split a folder of images by patient.")
    parser.add_argument("images", type=Path, help="has a folder for each class")
    parser.add_argument("folds", type=Path, help="folder to write: new")
    help = "regular expression, searched in the path below CLASS/"
    parser.add_argument("--patient", default="[^_/]+", help=help)
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that a terminal cannot show
    if args.folds.exists():
        parser.error(f"{args.folds} exists: remove it, or choose another name")
    if args.images.resolve() in args.folds.resolve().parents:
        parser.error(f"{args.folds} would look like a class: choose a place outside {args.images}")
    try:
        names, labels, notes = find_images(args.images)
        patients = find_patients(names, args.patient)
        check_patients(names, labels, patients)
        parts = split(labels, patients)
        links = link_names(names, labels, patients)
        write(args.images, args.folds, names, links, parts)
    except (FolderError, OSError, re.error) as error:
        parser.error(str(error))

    print(*notes, f"{names[0]} is of patient {patients[0]}", sep="\n")
    print_classes("all", labels, patients)
    for fold, part in enumerate(parts):
        print_classes(args.folds / str(fold) / "test", labels[part], patients[part])


def find_images(folder):
    """Paths of the images below CLASS/, their classes, and lines to print."""
    if not folder.is_dir() or not folders_in(folder):
        raise FolderError(f"{folder} has no folders: it needs one for each class")
    check_parts(folder)
    counts = Counter()
    classes = images_by_class(folder, counts)
    notes = [f"{folder}: {suffixes_in_words(counts)}"] if counts else []
    paths = {label: [Path(path) for path in paths] for label, paths in classes.items() if paths}
    if len(paths) < 2:
        raise FolderError(f"{folder} has images of {len(paths)} classes: it needs CLASS/ for each")
    names = [path.relative_to(folder) for label in sorted(paths) for path in paths[label]]
    labels = np.repeat(sorted(paths), [len(paths[label]) for label in sorted(paths)])
    return names, labels, notes


def check_parts(folder):
    """Refuse parts of a data set, such as test/, in the place of the classes."""
    names = folders_in(folder)
    parts = [name for name in names if name.lower() in PARTS]
    if parts == names or any(folders_in(folder / name) for name in parts):
        message = f"{folder} has {', '.join(sorted(parts))}, which are no classes"
        raise FolderError(f"{message}: put all images of a class into one folder CLASS/")


def find_patients(names, pattern):
    """The patient of each image."""
    below = ["/".join(name.parts[1:]) for name in names]
    matches = [re.search(pattern, name.rpartition(".")[0]) for name in below]
    if None in matches:
        raise FolderError(f"--patient finds nothing in the name {below[matches.index(None)]}")
    if not all(match[0].strip("./ ") for match in matches):
        raise FolderError("--patient finds an empty name: see its pattern")
    return np.array([match[0].replace("/", "-") for match in matches])


def check_patients(names, labels, patients):
    """Refuse patients that cannot be meant, and too few to be in each fold."""
    if len(set(patients)) == len(names):
        message = f"each image has a patient of its own, such as {patients[0]}"
        raise FolderError(f"{message}: see --patient")
    for label in sorted(set(labels)):
        of_class = sorted(set(patients[labels == label]))
        if len(of_class) < FOLDS:
            message = f"{label} has only {len(of_class)} patients ({', '.join(of_class)})"
            remedy = "see --patient, or make FOLDS in split.py smaller"
            raise FolderError(f"{message}, for {FOLDS} folds: {remedy}")


def split(labels, patients):
    """The images of each fold's test/."""
    # Not shuffled, which would ignore the classes before scikit-learn 1.8.
    folds = StratifiedGroupKFold(FOLDS).split(labels, labels, patients)
    parts = [chosen for _, chosen in folds]
    for part in parts:
        missing = set(labels) - set(labels[part])
        if missing:
            message = f"no way was found to give each fold patients of {', '.join(sorted(missing))}"
            raise FolderError(f"{message}: FOLDS, in split.py, may be smaller")
    return parts


def link_names(names, labels, patients):
    """CLASS/PATIENT/NAME of each image. Folders below PATIENT/ become a part of the name."""
    links = []
    for name, label, patient in zip(names, labels, patients):
        folders = [folder for folder in name.parts[1:-1] if folder != patient]
        links.append(Path(label, patient, "_".join([*folders, name.name])))
    twice = [link for link, count in Counter(links).items() if count > 1]
    if twice:
        one, other = [str(name) for name, link in zip(names, links) if link == twice[0]][:2]
        raise FolderError(f"{one} and {other} would have one name, {twice[0]}: rename one")
    return links


def write(images, folds, names, links, parts):
    """Links to the images, in a folder that has another name until all are there."""
    unfinished = folds.with_name(f"{folds.name}.{secrets.token_hex(4)}")
    try:
        for fold in range(FOLDS):
            part_names = ["train"] * FOLDS
            part_names[fold], part_names[fold - 1] = "test", "val"
            for part_name, part in zip(part_names, parts):
                for i in part:
                    link = unfinished / str(fold) / part_name / links[i]
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to((images / names[i]).resolve())
        unfinished.rename(folds)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def print_classes(title, labels, patients):
    for label in sorted(set(labels)):
        chosen = patients[labels == label]
        print(f"{title} {label}: {len(set(chosen))} patients, {len(chosen)} images")


if __name__ == "__main__":
    main()

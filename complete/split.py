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
from pathlib import Path

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

FOLDS = 5


def main():
    parser = argparse.ArgumentParser(description="Split a folder of images by patient.")
    parser.add_argument("images", type=Path, help="has a folder for each class")
    parser.add_argument("folds", type=Path, help="folder to write: new")
    help = "regular expression, searched in the path below CLASS/"
    parser.add_argument("--patient", default="[^_/]+", help=help)
    args = parser.parse_args()

    paths = sorted(path for path in args.images.glob("*/**/*") if path.is_file())
    paths = [path for path in paths if path.name[0] != "."]
    if not paths:
        parser.error(f"no images in {args.images}/CLASS/")
    inside = [path.relative_to(args.images).parts for path in paths]
    labels = np.array([parts[0] for parts in inside])
    patients = patients_of(["/".join(parts[1:]) for parts in inside], args.patient, parser)
    # Not shuffled, which would ignore the classes before scikit-learn 1.8.
    split = StratifiedGroupKFold(FOLDS).split(paths, labels, patients)
    parts = [chosen for _, chosen in split]
    args.folds.mkdir(parents=True)
    for fold in range(FOLDS):
        names = ["train"] * FOLDS
        names[fold], names[fold - 1] = "test", "val"
        for name, part in zip(names, parts):
            for i in part:
                link = args.folds / str(fold) / name / labels[i] / patients[i] / paths[i].name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(paths[i].resolve())

    print(f"{paths[0].name} is of patient {patients[0]}")
    for fold, part in enumerate(parts):
        for label in sorted(set(labels)):
            found = part[labels[part] == label]
            counts = f"{len(set(patients[found]))} patients, {len(found)} images"
            print(f"{args.folds}/{fold}/test {label}: {counts}")


def patients_of(names, pattern, parser):
    """The patient of each image. The script ends if none is found in a name, if each image would be
    of another patient, which would split nothing by patient, or if there are too few."""
    found = [re.search(pattern, name.rpartition(".")[0]) for name in names]
    if None in found:
        parser.error(f"--patient finds nothing in the name {names[found.index(None)]}")
    patients = np.array([match[0] for match in found])
    if len(set(patients)) == len(names):
        parser.error(f"each image has a patient of its own, such as {patients[0]}: see --patient")
    if len(set(patients)) < FOLDS:
        parser.error(f"only {len(set(patients))} patients, such as {patients[0]}: see --patient")
    return patients


if __name__ == "__main__":
    main()

"""The table of a report: how well a class is found, of images and of patients, with 95% intervals.

pip install scikit-learn
python complete/report.py ill runs/fold?    # each folder has val.csv and test.csv, of predict.py

`ill` is the class to find. In each fold, the threshold is the one with the highest F1 on val, and
is used on test. Counts are added up over the folds; AUC and average precision are the folds' mean.
A patient (the folder of the image, as split.py makes it) is ill if one of the images is, and has
the highest probability of the images, and a threshold of patients.

Intervals of proportions are Wilson's where each patient counts once. All others are a bootstrap's:
patients are drawn within each fold, with replacement and with all of their images. A fold of which
no ill patient was drawn has no AUC: the mean is then over the other folds, and a draw without any
is not used. Each line says how many draws were. Intervals do not say how much the models of another
training would differ.
"""

import csv
import math
import sys
import textwrap
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

DRAWS = 500
Z = 1.959964  # of a normal distribution: 95% are between -Z and Z


@dataclass
class Samples:
    """Images, or patients."""

    is_ill: np.ndarray  # of each: bool
    probability: np.ndarray
    patient: np.ndarray  # name

    def chosen(self, index):
        return Samples(self.is_ill[index], self.probability[index], self.patient[index])

    def by_patient(self):
        names, index = np.unique(self.patient, return_inverse=True)
        is_ill, highest = np.zeros(len(names), bool), np.zeros(len(names))
        np.logical_or.at(is_ill, index, self.is_ill)
        np.maximum.at(highest, index, self.probability)
        return Samples(is_ill, highest, names)

    def best_threshold(self):
        precision, recall, thresholds = precision_recall_curve(self.is_ill, self.probability)
        f1 = 2 * precision * recall / (precision + recall).clip(1e-9)
        # For a recall of 0.95 on val: thresholds[recall[:-1] >= 0.95][-1]
        return thresholds[np.argmax(f1[:-1])]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that a terminal cannot show
    ill, *folders = sys.argv[1:]
    ill = unicodedata.normalize("NFC", ill)  # a Mac writes accents in another way
    vals, tests, rows, classes = [], [], [], {}
    for folder in folders:
        val, _, _ = read(Path(folder, "val.csv"), ill)
        test, test_rows, names = read(Path(folder, "test.csv"), ill)
        vals.append(val)
        tests.append(test)
        rows += test_rows
        classes |= dict.fromkeys(names)
    check_patients(folders, vals, tests)
    print_classes(rows, classes)
    report("images", ill, vals, tests)
    patient_tests = [test.by_patient() for test in tests]
    report("patients", ill, [val.by_patient() for val in vals], patient_tests)
    print("", methods(ill, patient_tests, tests), sep="\n")


def read(path, ill):
    """The images of a table that have a true class; of each its true class and patient; and the
    names of the classes, in the order of the table."""
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            header, *rows = csv.reader(file)
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}: write it with predict.py, --output {path}")
    header = [unicodedata.normalize("NFC", name) for name in header]
    if header[:3] != ["path", "class", "true"]:
        sys.exit(f"{path} is no table of predict.py: its first line is {header}")
    rows = [[row[0], unicodedata.normalize("NFC", row[2]), *row[3:]] for row in rows if row[2]]
    classes = {row[1] for row in rows}
    if ill not in classes or len(classes) < 2:
        sys.exit(f"{path} has images of {sorted(classes)}: it needs some of {ill}, and of another")
    column = header.index(ill, 3) - 1
    is_ill = np.array([row[1] == ill for row in rows])
    probability = np.array([float(row[column]) for row in rows])
    if not np.isfinite(probability).all():
        sys.exit(f"{path}: a probability is not a number: write it again with predict.py")
    patients = np.array([Path(row[0]).parent.name for row in rows])
    if {unicodedata.normalize("NFC", name) for name in set(patients)} <= classes:
        sys.exit(f"{path}: images are in folders of classes, not of patients: see split.py")
    samples = Samples(is_ill, probability, patients)
    return samples, [(row[1], patient) for row, patient in zip(rows, patients)], header[3:]


def check_patients(folders, vals, tests):
    """End where a patient is in two test sets, or in val and in test: that counts one twice, or
    chooses the threshold by those whom it is for."""
    first_folder = {}
    for folder, val, test in zip(folders, vals, tests):
        both = set(val.patient) & set(test.patient)
        if both:
            sys.exit(f"{folder}: patient {min(both)} is in val.csv and in test.csv")
        for patient in sorted(set(test.patient)):
            other = first_folder.setdefault(patient, folder)
            if other != folder:
                sys.exit(f"patient {patient} is in the test.csv of {other} and of {folder}")


def print_classes(rows, classes):
    """How many patients and images each class has in the tests."""
    images = Counter(true for true, _ in rows)
    patients = Counter(true for true, _ in set(rows))
    for name in classes:
        print(f"{name}: {patients[name]} patients, {images[name]} images")


def report(unit, ill, vals, tests):
    thresholds = [val.best_threshold() for val in vals]
    is_ill = np.concatenate([test.is_ill for test in tests])
    is_independent = all(len(set(test.patient)) == len(test.patient) for test in tests)
    random = np.random.default_rng(0)
    draws = [scores([draw_patients(x, random) for x in tests], thresholds) for _ in range(DRAWS)]
    print(f"{len(is_ill)} {unit}, {is_ill.sum()} of them {ill}")
    shares = proportions(tests, thresholds)
    for name, value in scores(tests, thresholds).items():
        if math.isnan(value):
            print(f"  {name:18} cannot be computed")
        elif is_independent and name in shares:
            hits, total = shares[name]
            low, high = wilson(hits, total)
            print(f"  {name:18} {value:.3f} ({low:.3f} to {high:.3f}) {hits} of {total}")
        else:
            used = [draw[name] for draw in draws if not math.isnan(draw[name])]
            low, high = np.percentile(used, [2.5, 97.5])
            message = f"{len(used)} of {DRAWS} draws"
            print(f"  {name:18} {value:.3f} ({low:.3f} to {high:.3f}) {message}")


def wilson(hits, total):
    """The 95% interval of a proportion (Wilson, 1927), also of few, and of all or none."""
    center = (hits + Z**2 / 2) / (total + Z**2)
    half = Z / (total + Z**2) * math.sqrt(hits * (total - hits) / total + Z**2 / 4)
    return max(0, center - half), min(1, center + half)


def draw_patients(samples, random):
    """As many patients, with replacement, and all samples of each."""
    names, index = np.unique(samples.patient, return_inverse=True)
    samples_of = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    chosen = random.integers(len(names), size=len(names))
    return samples.chosen(np.concatenate([samples_of[i] for i in chosen]))


def proportions(tests, thresholds):
    """How many, of how many."""
    is_ill = np.concatenate([test.is_ill for test in tests])
    is_found = np.concatenate([test.probability >= x for test, x in zip(tests, thresholds)])
    hits = (is_ill & is_found).sum()
    return {
        "recall": (hits, is_ill.sum()),
        "specificity": ((~is_ill & ~is_found).sum(), (~is_ill).sum()),
        "precision": (hits, is_found.sum()),
    }


def scores(tests, thresholds):
    """NaN is one that cannot be computed."""
    shares = proportions(tests, thresholds)
    values = {name: hits / total if total else math.nan for name, (hits, total) in shares.items()}
    (hits, ill), (_, found) = shares["recall"], shares["precision"]
    values["F1"] = 2 * hits / (ill + found) if ill + found else math.nan
    folds = [(test.is_ill, test.probability) for test in tests]
    folds = [fold for fold in folds if 0 < fold[0].sum() < len(fold[0])]
    for name, score in ("AUC", roc_auc_score), ("average precision", average_precision_score):
        values[name] = np.mean([score(*fold) for fold in folds]) if folds else math.nan
    return values


def methods(ill, patients, images):
    """A paragraph for the paper."""
    count, ill_count = (sum(map(f, patients)) for f in (lambda x: len(x.is_ill), ill_of))
    image_count, ill_images = sum(len(x.is_ill) for x in images), sum(map(ill_of, images))
    if len(patients) > 1:
        design = f"were split by patient into {len(patients)} folds, each of which was the test set"
        design += " once, while another one chose the threshold (the highest F1)"
    else:
        design = "were the test set; the threshold was chosen on a validation set (the highest F1)"
    text = f"""
    Methods: {image_count} images ({ill_images} {ill}) of {count} patients ({ill_count} {ill})
    {design}. A patient counts as {ill} if one of the images does, and has the highest of their
    probabilities. Where each patient counts once, recall, specificity and precision have 95% Wilson
    score intervals. All other 95% intervals are percentiles of {DRAWS} bootstrap draws of patients
    within folds. AUC and average precision are means over the folds."""
    return textwrap.fill(" ".join(text.split()), 100)


def ill_of(samples):
    return samples.is_ill.sum()


if __name__ == "__main__":
    main()

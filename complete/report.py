"""The table of a report: how well a class is found, of images and of patients, with 95% intervals.

pip install scikit-learn
python complete/report.py ill runs/fold?    # each folder has val.csv and test.csv, of predict.py

`ill` is the class to find. In each fold, the threshold is the one with the highest F1 on val, and
is used on test. Counts are added up over the folds; AUC and average precision are the folds' mean.
A patient (the folder of the image, as split.py makes it) is ill if one of the images is, and has
the highest probability of the images, and a threshold of patients. Intervals are a bootstrap's: of
200 draws of patients, with replacement.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

DRAWS = 200


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
    ill, *folders = sys.argv[1:]
    for unit in "images", "patients":
        tests, thresholds = [], []
        for folder in folders:
            val, test = (read(Path(folder, name), ill) for name in ("val.csv", "test.csv"))
            if unit == "patients":
                val, test = val.by_patient(), test.by_patient()
            tests.append(test)
            thresholds.append(val.best_threshold())
        report(unit, ill, tests, thresholds)


def read(path, ill):
    """The images of a table that have a true class."""
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        header, *rows = csv.reader(file)
    rows = [row for row in rows if row[2]]
    classes = {row[2] for row in rows}
    if ill not in classes or len(classes) < 2:
        sys.exit(f"{path} has images of {sorted(classes)}: it needs some of {ill}, and of another")
    column = header.index(ill, 3)
    is_ill = np.array([row[2] == ill for row in rows])
    patients = np.array([Path(row[0]).parent.name for row in rows])
    if set(patients) <= classes:
        sys.exit(f"{path}: images are in folders of classes, not of patients: see split.py")
    return Samples(is_ill, np.array([float(row[column]) for row in rows]), patients)


def report(unit, ill, tests, thresholds):
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        again = [draw_patients(test, random) for test in tests]
        if all(0 < test.is_ill.sum() < len(test.is_ill) for test in again):
            drawn.append(scores(again, thresholds))
    total = sum(len(test.is_ill) for test in tests)
    print(f"{total} {unit}, {sum(test.is_ill.sum() for test in tests)} of them {ill}")
    for name, value in scores(tests, thresholds).items():
        low, high = np.percentile([one[name] for one in drawn], [2.5, 97.5])
        print(f"  {name:18} {value:.3f} ({low:.3f} to {high:.3f})")


def draw_patients(samples, random):
    """As many patients, with replacement, and all samples of each."""
    names, index = np.unique(samples.patient, return_inverse=True)
    samples_of = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    chosen = random.integers(len(names), size=len(names))
    return samples.chosen(np.concatenate([samples_of[i] for i in chosen]))


def scores(tests, thresholds):
    is_ill = np.concatenate([test.is_ill for test in tests])
    found = [test.probability >= limit for test, limit in zip(tests, thresholds)]
    found = np.concatenate(found)
    hits = (is_ill & found).sum()
    folds = [(test.is_ill, test.probability) for test in tests]
    return {
        "recall": hits / is_ill.sum(),
        "specificity": (~is_ill & ~found).sum() / (~is_ill).sum(),
        "precision": hits / max(found.sum(), 1),
        "F1": 2 * hits / (is_ill.sum() + found.sum()),
        "AUC": np.mean([roc_auc_score(*fold) for fold in folds]),
        "average precision": np.mean([average_precision_score(*fold) for fold in folds]),
    }


if __name__ == "__main__":
    main()

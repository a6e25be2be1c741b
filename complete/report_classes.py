"""A report of several classes: precision, recall and F1 of each, AUC, and a confusion matrix.

pip install scikit-learn matplotlib
python complete/predict.py runs/mine my_images/test --output report.csv
python complete/report_classes.py report.csv    # prints them, and writes confusion.png

The AUC is a mean over the classes, each against all others. Only images of which predict.py knows
the class, as their folder has its name, are counted.
"""

import csv
import sys

import numpy as np
from matplotlib import pyplot as plt
from sklearn.metrics import ConfusionMatrixDisplay, classification_report, roc_auc_score


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1], newline="", encoding="utf-8", errors="surrogateescape") as file:
        header, *rows = csv.reader(file)
    rows, classes = [row for row in rows if row[2]], header[3:]  # those with a true class
    if not rows:
        sys.exit(f"{sys.argv[1]} has no image in a folder with the name of a class")
    predicted, true = [row[1] for row in rows], [row[2] for row in rows]
    p = np.array([row[3:] for row in rows], float)  # (images, classes)
    print(classification_report(true, predicted, labels=classes, digits=3, zero_division=0))
    p = p[:, 1] if len(classes) == 2 else p  # of two classes: of the second
    print("AUC", roc_auc_score(true, p, labels=classes, multi_class="ovr", average="macro"))
    ConfusionMatrixDisplay.from_predictions(true, predicted, labels=classes, xticks_rotation=90)
    plt.savefig("confusion.png", bbox_inches="tight")


if __name__ == "__main__":
    main()

"""A report of several classes: precision, recall and F1 of each, AUC, and a confusion matrix.

pip install scikit-learn matplotlib
python complete/predict.py runs/mine my_images/test --output report.csv
python complete/report_classes.py report.csv    # prints them, and writes confusion.png

Classes are in the order of the table, which is that of the run. The AUC is a mean over the classes,
each against all others; of two classes, that of the second. Only images of which predict.py knows
the class, as their folder has its name, are counted. Classes without any are left out of the means.
"""

import csv
import os
import sys
from pathlib import Path

import numpy as np
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    classification_report,
    confusion_matrix,
    roc_auc_score,
)

os.environ["MPLBACKEND"] = "agg"  # !python inherits a notebook's, which may not be installed here
from matplotlib import font_manager, pyplot

WITH_COUNTS = 30  # classes up to which the picture has a number in each cell
WITH_NAMES = 200  # and up to which it has all names


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that a terminal cannot show
    classes, predicted, true, probabilities = read(sys.argv[1])
    families = fonts_for(classes)
    is_numbered = families is None or len(classes) > WITH_NAMES
    names = [f"{i} {name}" for i, name in enumerate(classes)] if is_numbered else classes
    print_scores(names, predicted, true, probabilities)

    picture = Path(sys.argv[2] if len(sys.argv) == 3 else "confusion.png")
    if picture.exists():
        sys.exit(f"{picture} exists: remove it, or put another name after {sys.argv[1]}")
    if is_numbered:
        print(f"{picture} has the numbers of the classes, as above")
        names = [str(i) for i in range(len(classes))]
    else:
        pyplot.rcParams["font.family"] = families
    draw(confusion_matrix(true, predicted, labels=range(len(classes))), names, picture)


def read(path):
    """The names of the classes; and of the images with a true class the numbers of the predicted
    and of the true one, and the probabilities (images, classes)."""
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        table = csv.reader(file)
        header = next(table, [])
        if header[:3] != ["path", "class", "true"]:
            sys.exit(f"{path} is no table of predict.py: its first line is {header}")
        classes = header[3:]
        number = {name: i for i, name in enumerate(classes)}
        rows = [
            (number[predicted], number[true], np.array(probabilities, float))
            for _, predicted, true, *probabilities in table
            if true
        ]
    if not rows:
        sys.exit(f"{path} has no image in a folder with the name of a class")
    return classes, *map(np.array, zip(*rows))


def print_scores(names, predicted, true, probabilities):
    """`names`: of the classes, whose numbers `predicted` and `true` are."""
    with_images = np.unique(true)
    without = np.setdiff1d(range(len(names)), with_images)
    shown = [names[i] for i in with_images]
    print(
        classification_report(
            true, predicted, labels=with_images, target_names=shown, digits=3, zero_division=0
        )
    )
    if len(without):
        print("left out, as there are no images of them:", *(names[i] for i in without))
    if len(with_images) == 1:
        print(f"AUC cannot be computed: all images are of {shown[0]}")
        return
    against_others = [1] if len(names) == 2 else with_images
    areas = [roc_auc_score(true == i, probabilities[:, i]) for i in against_others]
    print("AUC", np.mean(areas))


def fonts_for(names):
    """The families of matplotlib's own font, and of those on this machine that have the letters
    that it lacks, such as Chinese ones. None if a letter is in no font."""
    families = pyplot.rcParams["font.family"]
    own = font_manager.findfont(font_manager.FontProperties(family=families))
    missing = set("".join(names)) - letters(own)
    if not missing:
        return families
    # Fonts named "Last Resort" have squares for all letters.
    fonts = [font for font in font_manager.fontManager.ttflist if "Resort" not in font.name]
    others = {font.name: letters(font.fname) & missing for font in fonts}
    while missing:
        family = max(others, key=lambda name: len(others[name] & missing), default=None)
        if family is None or not others[family] & missing:
            return None
        families = [*families, family]
        missing -= others[family]
    return families


def letters(path):
    """Those that a font has."""
    return {chr(code) for code in font_manager.get_font(path).get_charmap()}


def draw(confusion, names, path):
    """A row for each true class, and a column for each predicted one."""
    count = len(names)
    has_counts, step = count <= WITH_COUNTS, 1 if count <= WITH_NAMES else count // 20
    side = 0.5 * count if has_counts else 0.2 * min(count, WITH_NAMES)  # inches
    figure, axes = pyplot.subplots(figsize=[max(5, side)] * 2)
    # Not interpolated: a class may be a few pixels wide.
    options = {"include_values": has_counts, "im_kw": {"interpolation": "nearest"}}
    display = ConfusionMatrixDisplay(confusion)
    display.plot(ax=axes, values_format="d", colorbar=False, **options)
    figure.colorbar(display.im_, fraction=0.04, pad=0.02)
    style = {"fontsize": "medium" if has_counts else "small", "parse_math": False}  # "$" is a "$"
    axes.set_xticks(range(0, count, step), names[::step], rotation=90, **style)
    axes.set_yticks(range(0, count, step), names[::step], **style)
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    main()

"""Draw the metrics of runs over the epochs: losses, accuracy, samples a second.

python benchmarks/curves.py runs/*                        # into curves.svg
python benchmarks/curves.py runs/* --compare --output same.png

--compare shows whether they are one training run: how far the losses are from those of the first.
Where a run's output lies beside its folder as FOLDER.log, it marks at which step it was resumed.
"""

import argparse
import csv
import re
import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot

pyplot.rcParams["svg.fonttype"] = "none"  # letters in an SVG stay letters
for part in "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color":
    pyplot.rcParams[part] = "#888888"  # to be read on a light page and on a dark one
PANELS = {  # what stands over a panel, and the columns in it with their line styles
    "loss: training (line), test (dashed)": {"train_loss": "-", "test_loss": "--"},
    "test accuracy": {"test_accuracy": "-"},
    "samples a second": {"samples_per_second": "-"},
}


def read(folder):
    """The columns of a run's metrics.csv as {name: an array, a number an epoch}, or {}."""
    path = Path(folder, "metrics.csv")
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def draw_panel(axis, title, columns, runs):
    """A colour for each run; their markers are at different epochs, so that each can be seen."""
    for number, (name, run) in enumerate(runs.items()):
        every = number % len(run["epoch"]), len(runs)
        for column, style in columns.items():
            looks = {"color": f"C{number % 10}", "marker": "osD^v"[number % 5], "markevery": every}
            axis.plot(run["epoch"], run[column], linestyle=style, label=name, **looks)
    axis.set(title=title, xlabel="epoch")


def draw(runs):
    """A figure of all panels for {name: columns}."""
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 3.8), layout="constrained")
    for axis, (title, columns) in zip(axes, PANELS.items()):
        draw_panel(axis, title, columns, runs)
    handles, names = axes[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, framealpha=0)
    return figure


def compare(runs):
    """A figure of the losses, and of the largest distance of each run from the first one."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    title, columns = next(iter(PANELS.items()))
    draw_panel(left, title, columns, runs)
    first, *_ = runs.values()
    for number, (name, run) in enumerate(runs.items()):
        epochs = min(len(run["epoch"]), len(first["epoch"]))
        apart = [abs(run[key][:epochs] / first[key][:epochs] - 1).max() for key in columns]
        right.plot(max(1e-8, *apart), name, "o", color=f"C{number % 10}")
        marks = resumed(f"{name}.log")
        left.plot(marks, np.interp(marks, run["epoch"], run["train_loss"]), "rx", markersize=12)
    right.set(xscale="log", xlim=(5e-9, 1), title="largest relative difference of a loss")
    right.set_xlabel("from the first run; at 1e-8: none")
    right.invert_yaxis()
    return figure


def resumed(log):
    """The epochs, in fractions, from which a run went on, by what it has printed."""
    text = Path(log).read_text() if Path(log).exists() else ""
    steps = re.search(r" step \d+/(\d+) ", text)
    places = re.findall(r", from epoch (\d+), step (\d+) on", text)[1:]
    return [int(epoch) - 1 + (int(step) - 1) / int(steps[1]) for epoch, step in places]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders with a metrics.csv each")
    parser.add_argument("--compare", action="store_true", help="with the first one")
    parser.add_argument("--output", default="curves.svg", help="ends in .svg or .png")
    args = parser.parse_args()
    found = {folder: read(folder) for folder in args.runs}
    for name in [name for name, run in found.items() if not run]:
        print(f"{name}: no metrics.csv with an epoch in it", file=sys.stderr)
        del found[name]
    if not found:
        sys.exit("nothing to draw: name folders that a script has written with --output")
    figure = compare(found) if args.compare else draw(found)
    figure.savefig(args.output, bbox_inches="tight", transparent=True)
    print(f"{len(found)} run(s) drawn: {args.output}")

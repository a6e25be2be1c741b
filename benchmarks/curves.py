"""Draw the metrics of runs over the epochs: losses, accuracy, samples a second.

python benchmarks/curves.py runs/*             # into curves.svg
python benchmarks/curves.py runs/* --compare   # how far are the losses from those of the first?
Where a run's output is kept beside its folder as FOLDER.log, crosses mark where it was resumed.
"""

import argparse
import csv
import re
from pathlib import Path

import numpy as np
from matplotlib import pyplot

pyplot.rcParams["svg.fonttype"] = "none"  # letters in an SVG stay letters
for part in "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color":
    pyplot.rcParams[part] = "#888888"  # legible on a light page and on a dark one
LOSSES = {"train_loss": "-", "test_loss": "--"}


def read(folder):
    """The columns of a run's metrics.csv as {name: an array, a number an epoch}, or {}."""
    path = Path(folder, "metrics.csv")
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def draw_panel(axis, runs, title, columns):
    """A color for each run; their markers are at different epochs, so that each can be seen."""
    for number, (name, run) in enumerate(runs.items()):
        every = number % len(run["epoch"]), len(runs)
        for column, style in columns.items():
            looks = {"color": f"C{number % 10}", "marker": "osD^v"[number % 5], "markevery": every}
            axis.plot(run["epoch"], run[column], linestyle=style, label=name, **looks)
    axis.set(title=title, xlabel="epoch")


def draw(runs, compare=False):
    """A figure of {name: columns}, or of the losses and of each run's distance from the first."""
    figure, axes = pyplot.subplots(1, 3 - compare, figsize=(13, 4 + compare), layout="constrained")
    draw_panel(axes[0], runs, "loss: training (line), test (dashed)", LOSSES)
    if not compare:
        draw_panel(axes[1], runs, "test accuracy", {"test_accuracy": "-"})
        draw_panel(axes[2], runs, "samples a second", {"samples_per_second": "-"})
        handles, names = axes[1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, framealpha=0)
        return figure
    first, *_ = runs.values()
    for number, (name, run) in enumerate(runs.items()):
        epochs = min(len(run["epoch"]), len(first["epoch"]))
        apart = [abs(run[key][:epochs] / first[key][:epochs] - 1).max() for key in LOSSES]
        axes[1].plot(max(1e-8, *apart), name, "o", color=f"C{number % 10}")
        marks = resumed(Path(f"{name}.log"))
        axes[0].plot(marks, np.interp(marks, run["epoch"], run["train_loss"]), "rx", markersize=12)
    axes[1].set(xscale="log", xlim=(5e-9, 1), title="largest relative difference of a loss")
    axes[1].set_xlabel("from the first run; at 1e-8: none")
    axes[1].invert_yaxis()
    return figure


def resumed(log):
    """The epochs, in fractions, at which a run was resumed, by what it has printed."""
    text = log.read_text() if log.exists() else ""
    steps = re.search(r" step \d+/(\d+) ", text)
    places = re.findall(r": (\d+) epochs and (\d+) steps are done", text)[1:]
    return [int(epochs) + int(done) / int(steps[1]) for epochs, done in places]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders with a metrics.csv each")
    parser.add_argument("--compare", action="store_true", help="with the first one")
    parser.add_argument("--output", default="curves.svg", help="ends in .svg or .png")
    args = parser.parse_args()
    found = {folder: run for folder in args.runs if (run := read(folder))}
    assert found, "nothing to draw: name folders with a metrics.csv that has an epoch"
    draw(found, args.compare).savefig(args.output, bbox_inches="tight", transparent=True)
    print(f"{args.output}:", *found)

"""Draw the images a second of `net`, and scaling.py's prediction for this device.

python benchmarks/plots.py throughput.csv    # of throughput.py; writes into benchmarks/plots
"""

import csv
import statistics
import sys

import matplotlib
from scaling import MACHINES, buckets, predict, profile
from throughput import HERE, SCRIPTS

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw_throughput(path):
    """Bars: median images a second, a picture for each number of processes."""
    rates = {}  # {processes: {contestant: images a second, one a round}}
    with open(path) as file:
        for row in csv.DictReader(file):
            if row["job"] == "net":
                names = rates.setdefault(row["processes"], {})
                names.setdefault(row["contestant"], []).append(float(row["images_per_second"]))
    figure, axes = pyplot.subplots(1, len(rates), figsize=(9, 3.2), sharex=True, squeeze=False)
    for axis, (processes, names) in zip(axes[0], rates.items()):
        medians = {name: statistics.median(values) for name, values in names.items()}
        order = sorted(medians, key=medians.get)
        colors = ["tab:blue" if name in SCRIPTS else "tab:gray" for name in order]
        axis.barh(order, [medians[name] for name in order], color=colors)
        axis.set(title=f"{processes} process(es)", xlabel="images/s")
    return figure


def draw_scaling():
    """Lines: predicted efficiency over machines."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, (model, batch_size) in zip(axes, (("net", 64), ("resnet18", 128))):
        step, gradients = profile(model, batch_size)
        groups = buckets(gradients)
        for rate, latency in ((0.1, 1e-4), (1, 1e-4), (10, 5e-5), (100, 1e-5)):
            line = [step / predict(step, groups, n, rate * 1e9 / 8, latency) for n in MACHINES]
            axis.plot(MACHINES, line, marker=".", label=f"{rate:g} Gbit/s")
        axis.set_xscale("log", base=2)
        axis.set(title=f"{model}, {batch_size} images in {1e3 * step:.1f} ms", ylim=(0, 1.05))
        axis.set(xlabel="machines, the same batch on each", ylabel="efficiency")
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


if __name__ == "__main__":
    for name, figure in (("throughput", draw_throughput(sys.argv[1])), ("scaling", draw_scaling())):
        figure.tight_layout()
        figure.savefig(HERE / "plots" / f"{name}.svg")

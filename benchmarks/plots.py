"""Draw the README's plots.

python benchmarks/plots.py throughput.csv benchmarks/plots      # CSV of throughput.py
python benchmarks/plots.py throughput.csv benchmarks/plots 2    # loss curves of 2 epochs, not 6

throughput.svg: images a second of `net` next to the yardsticks; losses.svg: the loss curves of the
five scripts on top of each other (trains them on --dataset synthetic); scaling.svg: scaling.py's.
"""

import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
from throughput import ROOT, SCRIPTS, commands, environment

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def throughput(path, folder):
    """Bars: median images a second, 1 and 2 processes, job `net`."""
    rates = {}
    with open(path) as file:
        for row in csv.DictReader(file):
            if row["job"] == "net" and row["contestant"]:
                key = row["processes"], row["contestant"], row["workers"]
                rates.setdefault(key, []).append(float(row["images_per_second"]))
    counts = sorted({processes for processes, _, _ in rates})
    figure, axes = pyplot.subplots(1, len(counts), figsize=(9, 3.2), sharex=True, squeeze=False)
    for axis, processes in zip(axes[0], counts):
        best = {}
        for (count, name, _), values in rates.items():
            if count == processes:
                best[name] = max(best.get(name, 0), statistics.median(values))
        best = dict(sorted(best.items(), key=lambda part: part[1]))
        colors = ["tab:blue" if name in SCRIPTS else "tab:gray" for name in best]
        axis.barh([SCRIPTS.get(name, name) for name in best], list(best.values()), color=colors)
        axis.set_title(f"{processes} process" + "es" * (processes != "1"))
        axis.set_xlabel("images/s")
    figure.tight_layout()
    figure.savefig(folder / "throughput.svg")


def losses(folder, epochs):
    """Lines: train loss an epoch of the five scripts, DDP with 2 processes, with the same flags."""
    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    for width, (name, path) in zip((11, 8.5, 6, 3.5, 1), SCRIPTS.items()):
        count = 1 if name in ("single", "dp") else 2
        with tempfile.TemporaryDirectory() as output:
            lines = commands(ROOT / path, count)
            flags = ["--dataset", "synthetic", "--epochs", epochs, "--output", output]
            started = [
                subprocess.Popen(
                    [str(word) for word in (*line, *flags)],
                    env=environment(lines),
                    stdout=subprocess.DEVNULL,
                )
                for line in lines
            ]
            if any([process.wait() for process in started]):
                sys.exit(f"{path} failed")
            with open(Path(output, "metrics.csv")) as file:
                curve = [float(row["train_loss"]) for row in csv.DictReader(file)]
        label = f"{path}, {count} process" + "es" * (count - 1)
        axis.plot(range(1, len(curve) + 1), curve, linewidth=width, label=label)
    axis.set_xlabel("epoch")
    axis.set_ylabel("train loss")
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(folder / "losses.svg")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    table, folder, epochs = Path(sys.argv[1]), Path(sys.argv[2]), (*sys.argv, "6")[3]
    folder.mkdir(parents=True, exist_ok=True)
    throughput(table, folder)
    losses(folder, epochs)
    subprocess.run(
        [sys.executable, Path(__file__).with_name("scaling.py"), "--plot", folder / "scaling.svg"],
        check=True,
    )

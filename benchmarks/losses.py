"""Draw docs/losses.svg: train_single.py's losses, and those of train_ddp_torchrun.py on two
processes, which is killed twice, and resumed.

pip install matplotlib
python benchmarks/losses.py    # two minutes on two cores
"""

import re
import tempfile
from pathlib import Path

import harness
import matplotlib
from matplotlib import pyplot as plt

FLAGS = "--dataset synthetic --lr 0.0006 --workers 0 --epochs 12 --resume".split()
KILLED_AFTER = "epoch 3:", "epoch 7:"  # what it has printed when it gets SIGKILL
GREY = "#767676"  # legible on white and on black


def epochs_of(text):
    """The epochs and losses that a run has printed."""
    lines = re.findall(r"^epoch (\d+): loss (\S+)", text, re.M)
    return [int(epoch) for epoch, _ in lines], [float(loss) for _, loss in lines]


def train(folder):
    """What one process prints, and what each start of the two prints."""
    single = harness.run(harness.ROOT / "train_single.py", 1, FLAGS, folder / "one")
    starts = [
        harness.run(harness.ROOT / "train_ddp_torchrun.py", 2, FLAGS, folder / "two", until=until)
        for until in (*KILLED_AFTER, None)
    ]
    return single, starts


def draw(single, starts, path):
    matplotlib.rcParams.update({"svg.hashsalt": "losses", "svg.fonttype": "none", "font.size": 12})
    matplotlib.rcParams.update({"text.color": GREY, "axes.labelcolor": GREY})
    matplotlib.rcParams.update({"xtick.color": GREY, "ytick.color": GREY, "axes.edgecolor": GREY})
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot(*epochs_of(single), color="#9ecae9", linewidth=9, label="one process")
    for number, text in enumerate(starts):
        epochs, losses = epochs_of(text)
        label = "two processes" if number == 0 else None
        axes.plot(epochs, losses, color="#d9730d", linewidth=2, marker="o", label=label)
        if number < len(starts) - 1:
            label = "killed, and resumed" if number == 0 else None
            style = {"color": GREY, "marker": "x", "markersize": 14, "markeredgewidth": 2}
            axes.plot(epochs[-1], losses[-1], linestyle="none", label=label, **style)
    axes.set(xlabel="epoch", ylabel="training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


def main():
    with tempfile.TemporaryDirectory() as folder:
        single, starts = train(Path(folder))
    for name, text in [("one process", single), *((f"start {i}", t) for i, t in enumerate(starts))]:
        print(name, *zip(*epochs_of(text)))
    draw(single, starts, harness.ROOT / "docs" / "losses.svg")


if __name__ == "__main__":
    main()

"""docs/killed-light.svg and -dark.svg: the loss of a run of complete/train.py that is killed ten
times, at random, and resumed on 1, 2 and 3 processes, over that of the same run left alone.

python benchmarks/pictures.py     # two epochs of synthetic data, on a CPU too (needs matplotlib)
"""

import random
import re
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from runs import COMPLETE, ROOT, run

STYLES = {  # GitHub's colours of text, and for 1, 2 and 3 processes
    "light": ("#1f2328", ["#0969da", "#bc4c00", "#1a7f37"], "#afb8c1"),
    "dark": ("#e6edf3", ["#58a6ff", "#ffa657", "#56d364"], "#6e7681"),
}


def save(draw, size):
    """Calls draw(figure, colours, grey) for each style."""
    for style, (text, colours, grey) in STYLES.items():
        settings = dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor"], text)
        settings |= {"xtick.color": text, "ytick.color": text, "svg.fonttype": "none"}
        settings |= {"svg.hashsalt": "killed", "font.family": "sans-serif", "font.size": 11}
        with matplotlib.rc_context(settings):
            figure = plt.figure(figsize=size, layout="constrained")
            draw(figure, colours, grey)
            path = ROOT / "docs" / f"killed-{style}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            plt.close(figure)


def losses(text, steps):
    """[step of the run, loss] of each progress line."""
    found = re.findall(r"^epoch (\d+)/\d+ step (\d+)/\d+ loss (\S+)", text, re.M)
    return np.array([[(int(e) - 1) * steps + int(s), float(loss)] for e, s, loss in found])


def main():
    random.seed(0)
    flags = ["--dataset", "synthetic", "--batch-size", 60, "--epochs", 2, "--lr", 0.001]
    flags += ["--log-every", 4, "--checkpoint-minutes", 0, "--resume"]
    steps, parts = 10_000 // 60, []
    with tempfile.TemporaryDirectory() as folder:
        alone = losses(run(ROOT / COMPLETE, 1, flags, Path(folder, "alone")), steps)
        moments = [(epoch, step) for epoch in (1, 2) for step in range(8, steps - 1, 4)]
        for i, moment in enumerate([*sorted(random.sample(moments, 10)), None]):
            processes = i % 3 + 1
            until = "epoch {}/2 step {}/".format(*moment) if moment else None
            text = run(ROOT / COMPLETE, processes, flags, Path(folder, "killed"), until=until)
            parts.append((processes, losses(text, steps)))
    whole = dict(alone)
    worst = max(abs(loss - whole[step]) for _, part in parts for step, loss in part)
    print(f"killed {len(parts) - 1} times; losses differ by at most {worst:.1e} (printed: 1e-4)")

    def draw(figure, colours, grey):
        axes = figure.add_subplot()
        axes.plot(*alone.T, color=grey, linewidth=7, alpha=0.6, label="left alone, 1 process")
        for i, (processes, part) in enumerate(parts):
            kind = f"{processes} process" + "es" * (processes > 1)
            label = f"{kind}, until killed" if i < 3 else None
            axes.plot(*part.T, color=colours[processes - 1], linewidth=2, label=label)
            if i < len(parts) - 1:
                axes.plot(*part[-1], "x", color=colours[processes - 1], markersize=9, mew=2.5)
        axes.set(xlabel="step", ylabel="training loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)

    save(draw, (7, 3.4))


if __name__ == "__main__":
    main()

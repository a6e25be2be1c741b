"""Make docs/claim.svg: how far runs with the same flags are from the first one.

sudo OMP_NUM_THREADS=1 "$(which python)" benchmarks/claim.py DIR     # with train/ and test/

The small scripts on 1 to 4 processes, and one run that four of them continue in turn. The complete
ones on 1 to 4 processes; on two hosts (network namespaces: root, iproute2); killed ten times, by
SIGKILL to all processes, on one process, and on 1 to 3 processes of both scripts in turn.
"""

import csv
import os
import re
import sys
import tempfile
from pathlib import Path

import network
import torch
from matplotlib import pyplot
from runs import COMPLETE, ROOT, SMALL, run

GREY = "#888888"  # legible on white and on black
DATASET, EPOCHS, BATCH = Path(sys.argv[1]).resolve(), 4, 96
IMAGES = len(list(DATASET.glob("train/*/*")))
FLAGS = ["--dataset", DATASET, "--batch-size", BATCH, "--lr", 0.01, "--workers", 0, "--resume"]
MORE = ["--log-every", 2, "--checkpoint-minutes", 0]  # of the complete scripts
losses, weights = {}, {}  # {name of a run: its training loss per epoch; its model.pt}
CAPTION = """\
Left: training loss. Right: how far the weights at the end are from those of the first run (open
circle), |w - w0| / |w0|; at 1e-9 they are equal, bit by bit. Blue: small scripts. Orange: complete
ones, which start from another seed. {runs} runs on one CPU ({cpu}), torch {torch};
{images} images of CIFAR-10, four epochs, batch size {batch}, SGD with learning rate 0.01."""


def train(name, script, n=1, epochs=EPOCHS, until=None, more=()):
    """Start or continue a run. It is killed where it has printed `until`."""
    print(name, script, n, epochs, until, flush=True)
    own = [*FLAGS, "--epochs", epochs, *(MORE if script in COMPLETE else ()), *more]
    output = Path(name.replace("/", "-"))
    text = run(ROOT / script, n, own, output, until)
    if until is None:
        keep(name, output, text)


def keep(name, output, text=""):
    found = [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)", text, re.M)]
    if (output / "metrics.csv").exists():
        found = [
            float(row["train_loss"]) for row in csv.DictReader((output / "metrics.csv").open())
        ]
        losses.pop(name, None)
    losses[name] = losses.get(name, []) + found
    weights[name] = torch.cat([w.flatten() for w in torch.load(output / "model.pt").values()])


def train_on_two_hosts(name):
    words = ["-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", "NUMBER"]
    words += ["--master-addr", "10.77.0.1", "--nproc-per-node", 2, ROOT / COMPLETE[0]]
    with network.two_namespaces() as names:
        network.run(names, [*words, *FLAGS, *MORE, "--epochs", EPOCHS, "--output", "hosts"])
    keep(name, Path("hosts"))


def train_all():
    single, dp, torchrun, spawn, multigpu, fsdp2 = SMALL
    ddp, complete_fsdp2 = COMPLETE
    for script, n in (single, 1), (dp, 1), (torchrun, 2), (torchrun, 4):
        train(f"{script}, {n} process{'es' * (n > 1)}", script, n)
    for script in spawn, multigpu, fsdp2:
        train(f"{script}, 2 processes", script, 2)
    for epoch, (script, n) in enumerate([(single, 1), (torchrun, 2), (spawn, 4), (multigpu, 3)]):
        train("continued by four scripts in turn", script, n, epoch + 1)
    for script, n in (ddp, 1), (ddp, 2), (ddp, 4), (complete_fsdp2, 2):
        train(f"{script}, {n} process{'es' * (n > 1)}", script, n)
    train_on_two_hosts("complete/train_ddp.py, two hosts")
    steps = IMAGES // BATCH
    at = [divmod(EPOCHS * steps * (i + 0.5) / 10, steps) for i in range(10)]  # (epoch, step)
    places = [
        f"epoch {epoch + 1:.0f}/{EPOCHS} step {step // 2 * 2 or 2:.0f}/" for epoch, step in at
    ]
    for place in *places, None:
        train("killed ten times, 1 process", ddp, until=place)
    kinds = [(ddp, 1), (complete_fsdp2, 2), (ddp, 3)]
    for number, place in enumerate([*places, None]):
        train("killed ten times, both scripts, 1 to 3 processes", *kinds[number % 3], until=place)
    train("another seed, for comparison", ddp, more=["--seed", 1])


def draw():
    figure = pyplot.figure(figsize=(11, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.2))
    first = None
    for name in losses:
        complete = name == "complete/train_ddp.py, 1 process"
        if first is None or complete:
            first, color = name, "C0" if first is None else "C1"
        left.plot(range(1, EPOCHS + 1), losses[name], color=color, marker="o", alpha=0.5)
        apart = ((weights[name] - weights[first]).norm() / weights[first].norm()).item()
        looks = {"markersize": 11, "fillstyle": "none" if name == first else "full"}
        right.plot(max(apart, 1e-9), name, "o", color=color, clip_on=False, **looks)
    left.set(xlabel="epoch", xticks=range(1, EPOCHS + 1), title="training loss")
    right.set(xscale="log", xlim=(1e-9, 10), title="difference of the weights from the first run")
    right.invert_yaxis()
    right.grid(axis="both", color=GREY, alpha=0.3)
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    caption = CAPTION.format(
        runs=len(losses),
        images=f"{IMAGES:,}",
        batch=BATCH,
        cpu=cpu,
        torch=torch.__version__.split("+")[0],
    )
    figure.supxlabel(caption, color=GREY, fontsize=9, x=0.01, ha="left")
    return figure


if __name__ == "__main__":
    pyplot.rcParams["svg.fonttype"] = "none"  # letters in an SVG stay letters
    for part in "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color":
        pyplot.rcParams[part] = GREY
    os.chdir(tempfile.mkdtemp())
    train_all()
    torch.save((losses, weights), "runs.pt")
    print(os.getcwd())
    draw().savefig(ROOT / "docs" / "claim.svg", transparent=True)

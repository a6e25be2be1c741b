"""Make docs/claim.svg out of 17 runs with the same flags: the scripts on 1, 2 and 4 processes; in
two network namespaces (root, iproute2); three in turn on one run; and one that is killed ten times.

python benchmarks/claim.py DATASET     # a folder with train/ (10,000 images or more) and test/
"""

import os
import sys
import tempfile
from pathlib import Path

import network
from curves import draw, read
from runs import HERE, SCRIPTS, run

ROOT, DATASET = HERE.parent, Path(sys.argv[1]).resolve()
FLAGS = ["--dataset", DATASET, "--model", "mlp", "--batch-size", 100, "--lr", 0.001]
FLAGS += ["--log-every", 10, "--checkpoint-minutes", 0, "--resume"]
runs = []


def train(name, script, n=1, epochs=6, until=None):
    runs.append(name)
    text = run(ROOT / f"train_{script}.py", n, [*FLAGS, "--epochs", epochs], Path(name), until)
    if "killed" in name:  # draw() marks where these runs are resumed
        with open(f"{name}.log", "a") as file:
            file.write(text)


os.environ["OMP_NUM_THREADS"] = "1"
os.chdir(tempfile.mkdtemp())
for script in SCRIPTS[:2]:
    train(script, script)
for n in 1, 2, 4:
    for script in SCRIPTS[2:]:
        train(f"{script}-{n}", script, n)
runs.append("two-namespaces-of-two")
words = ["-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", "NUMBER"]
words += ["--master-addr", "10.77.0.1", "--nproc-per-node", 2, ROOT / "train_ddp_torchrun.py"]
with network.two_namespaces() as names:
    network.run(names, [*words, *FLAGS, "--epochs", 6, "--output", runs[-1]])
for script, n, epochs in ("single", 1, 2), ("fsdp2", 2, 4), ("ddp_torchrun", 4, 6):
    train("three-scripts-in-turn", script, n, epochs)
kills = [f"epoch {at // 100 + 1}/6 step {at % 100}/" for at in range(30, 600, 60)]
for kill in *kills, None:
    train("killed-ten-times", "single", until=kill)
figure = draw({name: read(name) for name in runs}, compare=True)
figure.savefig(ROOT / "docs" / "claim.svg", transparent=True, bbox_inches="tight")

"""How many samples a second: train_single.py beside a bound, and beside the loops of others.

python benchmarks/throughput.py --jobs net --rounds 5
python benchmarks/throughput.py --jobs step --only limit single    # the overhead of a step
python benchmarks/throughput.py --jobs resnet18 -- --amp --compile # flags of both

A round runs each contestant once, and begins with another one. A figure is the mean over all epochs
but the first, of training alone, on one GPU or the CPU. The table has medians over the rounds, the
smallest and the largest; ratios are within a round.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from runs import copy_scripts, row, spread, table, train

PEERS = ["usual", "accelerate", "lightning"]
JOBS = {
    "net": "--model net --batch-size 64 --epochs 6",
    "resnet18": "--model resnet18 --batch-size 128 --epochs 3",
    "step": "--model mlp --image-size 1 --batch-size 1 --log-every 10000 --epochs 3",  # Python
}


def contestants(args, folder):
    """{name: (file, its own flags)} of all that take part."""
    loops, script = folder / "yardsticks.py", folder / "train_single.py"
    found = {"limit": (loops, ["limit", *args.flags]), "single": (script, args.flags)}
    for name in PEERS:
        found[f"{name}, this repository's loader"] = loops, [name]
        for workers in args.workers:
            flags = [name, "--per-sample", "--workers", workers]
            found[f"{name}, DataLoader, {workers} workers"] = loops, flags
    return {name: own for name, own in found.items() if name.split(",")[0] in args.only}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, ["limit", "single", *PEERS]
    add("--jobs", nargs="+", default=["net"], choices=JOBS)
    add("--rounds", type=int, default=3)
    add("--samples", type=int, default=10_000, help="of an epoch")
    add("--workers", nargs="+", type=int, default=[0, 2], help="of the peers' own loaders")
    add("--only", nargs="+", default=names, choices=names)
    add("flags", nargs="*", help="after --: flags for the scripts and the limit")
    args = parser.parse_args()
    for job in args.jobs:
        flags = [*JOBS[job].split(), "--dataset", "synthetic", "--samples", args.samples]
        with tempfile.TemporaryDirectory() as folder:
            copy_scripts(Path(folder))
            found = contestants(args, Path(folder))
            times = {name: [] for name in found}  # microseconds a sample
            for number in range(args.rounds):
                first = number * len(found) // args.rounds
                for name in [*found][first:] + [*found][:first]:
                    path, own = found[name]
                    times[name].append(1e6 / train(path, 1, [*flags, *own])[0])
                    print(job, name, times[name][-1], file=sys.stderr, flush=True)
        table(1, job, "samples/s", "us a sample", "over limit", "x limit", "train_single.py x it")
        for name, own in times.items():
            limit, single = times.get("limit", own), times.get("single", own)
            speeds, over = [1e6 / a for a in own], [a - b for a, b in zip(own, limit)]
            ratios = [b / a for a, b in zip(own, limit)], [a / b for a, b in zip(own, single)]
            cells = [spread(values, 0) for values in (speeds, own, over)]
            row(name, *cells, *(spread(values, 2) for values in ratios))

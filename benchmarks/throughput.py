"""How many images a second: complete/train.py beside a bound, and beside the loops of others.

OMP_NUM_THREADS=1 python benchmarks/throughput.py --rounds 5
OMP_NUM_THREADS=1 python benchmarks/throughput.py --rounds 5 --only limit complete -- --model mlp \\
    --image-size 1 --batch-size 1      # nearly all of a step is Python: its overhead

A round runs each contestant once, and begins with another one. A figure is the mean over all epochs
but the first, of training alone, on one GPU, or in CPU time. The table has medians over the rounds,
the smallest and the largest; ratios are within a round. Flags after -- are for all contestants.
"""

import argparse
import sys

from runs import COMPLETE, ROOT, row, spread, table, train

FLAGS = "--dataset cifar10 --batch-size 64 --epochs 2 --workers 0".split()
PEERS = ["usual", "accelerate", "lightning"]
CONTESTANTS = {  # the words for yardsticks.py
    "limit": ["limit", "our"],
    COMPLETE: [ROOT / COMPLETE, "", "--log-every", 10_000],
    **{f"{name}, DataLoader": [name, "usual"] for name in PEERS},
    **{f"{name}, our loader": [name, "our"] for name in PEERS},
    "train_single.py": [ROOT / "train_single.py", ""],
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of their names")
    parser.add_argument("flags", nargs="*", help="after --: flags for all of them")
    args = parser.parse_args()
    names = [name for name in CONTESTANTS if any(part in name for part in args.only)]
    times = {name: [] for name in names}  # microseconds per image
    for number in range(args.rounds):
        first = number * len(names) // args.rounds
        for name in names[first:] + names[:first]:
            flags = [*CONTESTANTS[name], *FLAGS, *args.flags]
            times[name].append(1e6 / train(ROOT / "benchmarks/yardsticks.py", 1, flags))
            print(name, times[name][-1], file=sys.stderr, flush=True)
    ours = times[names[min(1, len(names) - 1)]]  # complete/train.py, unless --only leaves it out
    heads = "images/s", "us per image over limit", "x limit", f"{COMPLETE} x it"
    table(1, "", *heads)
    for name, own in times.items():
        limit = times[names[0]]
        cells = [spread([1e6 / time for time in own], 0)]
        cells.append(spread([a - b for a, b in zip(own, limit)], 1))
        cells.append(spread([b / a for a, b in zip(own, limit)], 2))
        row(name, *cells, spread([a / b for a, b in zip(own, ours)], 2))

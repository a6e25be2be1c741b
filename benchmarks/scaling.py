"""Predict how DDP scales over a link: will more machines help, before they are booked?

python benchmarks/scaling.py --rate 10 --model resnet18 --batch-size 128 # runs train_single.py
python benchmarks/scaling.py --rate 10 --step 0.232 --gradients 102      # of a run of yours

--step is a step on one machine, --gradients 4 bytes for each parameter. They are taken to be ready
evenly over the last two thirds of a step, in which DDP sends bucket after bucket. A ring all-reduce
of B bytes over n machines takes 2 (n - 1) latency + 2 (n - 1) / n B / rate (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms ...", 2009). The batch on each machine stays the same.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from runs import HERE, read_metrics, row, run, table


def buckets(size):
    """(bytes, ready) of DDP's buckets, of 1 MiB the first, of 25 the others. Ready: from 0 to 1."""
    found, total, limit = [], 0, 2**20
    while total < size:
        bucket = min(limit, size - total)
        total, limit = total + bucket, 25 * 2**20
        found.append((bucket, (1 + 2 * total / size) / 3))
    return found


def predict(step, buckets, machines, rate, latency=0, cost=0.0):
    """Seconds of a step. `rate`: bytes a second; `cost`: a CPU's own seconds for a byte."""
    done, busy = 0.0, step
    for size, ready in buckets:
        sent = 2 * (machines - 1) * size / machines
        done = max(done, ready * step) + 2 * (machines - 1) * latency + sent * (1 / rate + cost)
        busy += sent * cost
    return max(busy, done)


def predict_fsdp2(step, size, machines, rate, cost=0.0):
    """On CPUs nothing is hidden: parameters are gathered twice, gradients all-reduced by Gloo."""
    return step + 4 * (machines - 1) / machines * size * (1 / rate + cost)


def measure(batch_size, flags):
    """Seconds of a step of train_single.py on this device, and bytes of its gradients."""
    flags = ["--dataset", "synthetic", "--batch-size", batch_size, "--epochs", 2, *flags]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out")
        run(HERE.parent / "train_single.py", 1, flags, output)
        size = sum(weight.nbytes for weight in torch.load(output / "model.pt").values())
        return batch_size / read_metrics(output)[0], size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=10, help="of the link, in Gbit/s")
    parser.add_argument("--step", type=float, help="seconds of a step on one machine")
    parser.add_argument("--gradients", type=float, help="MB of all, in float32; with --step")
    parser.add_argument("--batch-size", type=int, default=64)
    args, flags = parser.parse_known_args()
    known = args.step and args.gradients
    step, size = (args.step, args.gradients * 1e6) if known else measure(args.batch_size, flags)
    table(1, "machines", "step, ms", "efficiency")
    for n in (2**power for power in range(1, 11)):
        seconds = predict(step, buckets(size), n, args.rate * 1e9 / 8, 5e-5)  # a usual latency
        row(n, f"{1e3 * seconds:.2f}", f"{step / seconds:.0%}")

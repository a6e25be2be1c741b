"""Predict how DDP scales over a link: will more machines help, before they are booked?

python benchmarks/scaling.py --step 0.232 --gradients 102 --rate 50

--step is a step of your run on one machine, batch size / samples a second; --gradients are 4 bytes
for each parameter. They are taken to be ready evenly over the backward pass, the last two thirds of
a step, in which DDP sends bucket after bucket. A ring all-reduce of B bytes over n machines takes
2 (n - 1) latency + 2 (n - 1) / n B / rate (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009). Efficiency: with the same batch on each machine.
"""

import argparse

from runs import row, table


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


def predict_fsdp2(step, size, blocks, machines, rate, latency=0, cost=0.0, gpu=True, gather=1.0):
    """As predict, for `size` bytes of parameters, which are gathered twice (`gather`: 0.5 if in
    bfloat16), and their gradients, scattered: 3 (n - 1) / n of them, where DDP sends 2. A `gpu`
    computes meanwhile. Without one nothing is hidden, and Gloo scatters by all-reduce."""
    share = ((1 if gpu else 2) + 2 * gather) * (machines - 1) / machines * size
    sent = share / rate + 3 * blocks * (machines - 1) * latency
    if gpu:  # all is hidden but the first block's gathering and the last block's gradients
        return max(step, sent) + 2 * sent / (3 * blocks)
    return step + sent + share * cost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--step", type=float, required=True, help="seconds of a step on one machine")
    add("--gradients", type=float, required=True, help="MB of all, in float32")
    add("--rate", type=float, default=10, help="of the link, in Gbit/s")
    add("--fsdp2", type=int, metavar="BLOCKS", help="train_fsdp2.py with so many blocks, too")
    add("--amp", action="store_true", help="FSDP2 gathers in bfloat16")
    args = parser.parse_args()
    more = ["FSDP2, ms", "efficiency"] if args.fsdp2 else []
    table(0, "machines", "step, ms", "efficiency", *more)
    size, link = args.gradients * 1e6, (args.rate * 1e9 / 8, 5e-5)  # a usual latency
    gather = 0.5 if args.amp else 1.0
    for n in (2**power for power in range(1, 11)):
        found = [predict(args.step, buckets(size), n, *link)]
        if args.fsdp2:
            found.append(predict_fsdp2(args.step, size, args.fsdp2, n, *link, gather=gather))
        row(n, *(text for s in found for text in (f"{1e3 * s:.2f}", f"{args.step / s:.0%}")))

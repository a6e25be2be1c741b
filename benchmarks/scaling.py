"""Predict how DistributedDataParallel scales: will more machines help, before they are booked?

python benchmarks/scaling.py --model resnet18 --rate 100                     # measures a step here
python benchmarks/scaling.py --model resnet18 --rate 10 --step 0.012 --latency 2e-5
python benchmarks/scaling.py --check network.csv                             # against network.py
python benchmarks/scaling.py --plot scaling.svg

What goes in: seconds of a step on one machine (measured here, unless --step gives those of yours),
the size of each gradient and the moment of the backward pass at which it is there (measured here),
the link's rate, and its latency from process to process, of which a ring has 2 (n - 1) in turn.
What comes out: for 2 to 1,024 machines with the same batch each, the seconds of a step and the
efficiency, which is the step on one machine over that on n.

The model. DDP sends a bucket as soon as the gradients in it are there (torch's own function sorts
them into buckets), one after the other, while the backward pass goes on. A ring all-reduce of B
bytes over n machines takes 2 (n - 1) latency + 2 (n - 1) / n B / rate (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The optimizer steps
when the last bucket is there. Not in it: machines that are slower than others, a shared switch.
"""

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_single  # noqa: E402

MACHINES = [2**power for power in range(1, 11)]
CAPS = [2**20, 25 * 2**20]  # bytes: DDP's first bucket, and the others


def profile(model, batch, steps=20):
    """A step of the scripts' model on this device, on synthetic images.

    Returns its seconds (median), and for each gradient in the order in which they come its bytes
    and the fraction of the step's time after which it is there.
    """
    sys.argv[1:] = ["--model", model, "--batch-size", str(batch), "--dataset", "synthetic"]
    args = train_single.parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    train_set, _, net, _ = train_single.set_up(args, device)
    images = train_set.__getitems__([i % len(train_set) for i in range(batch)])
    images, labels = train_single.prepare(args, images, device)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, fused=True)
    times = {}

    def now():
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def step(hooked):
        begin = now()
        F.cross_entropy(net(images), labels).backward()
        if hooked:
            for parameter, seconds in came.items():
                times.setdefault(parameter, []).append(seconds - begin)
        optimizer.step()
        optimizer.zero_grad()
        return now() - begin

    came = {}
    plain = statistics.median([step(False) for _ in range(steps)][steps // 4 :])
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: came.update({p: now()}))
    hooked = statistics.median([step(True) for _ in range(steps)][steps // 4 :])
    ready = {p: statistics.median(seconds[steps // 4 :]) / hooked for p, seconds in times.items()}
    order = sorted(ready, key=ready.get)
    return plain, [(parameter, min(1.0, ready[parameter])) for parameter in order]


def buckets(gradients):
    """(bytes, ready) of the buckets into which DDP sorts gradients that come in this order."""
    groups, _ = dist._compute_bucket_assignment_by_size([p for p, _ in gradients], CAPS)
    groups = sorted(groups, key=min)
    return [
        (sum(4 * gradients[i][0].numel() for i in group), max(gradients[i][1] for i in group))
        for group in groups
    ]


def predict(step, buckets, machines, rate, latency):
    """Seconds of a step on n machines. `step`, `latency`: seconds; `rate`: bytes a second."""
    done = 0.0
    for size, ready in buckets:
        done = max(done, ready * step)
        done += 2 * (machines - 1) * (latency + size / machines / rate)
    rest = (1 - buckets[-1][1]) * step  # the optimizer waits for the last bucket
    return max(step, done + rest)


def check(path):
    """Prints prediction and measurement for each row of network.py's file. Returns the errors.

    The fastest link of each job says what to communicate costs the hosts themselves, beside the
    link: it calibrates, and the other rows are predicted.
    """
    errors, profiles, host = [], {}, {}
    print("| job | Gbit/s | measured | predicted | error |\n|---|---|---|---|---|")
    with open(path) as file:
        rows = sorted(csv.DictReader(file), key=lambda row: -float(row["rate"]))
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # what a host had
    for row in rows:
        job, batch, rate = row["job"], int(row["batch"]) // 2, float(row["rate"])
        if job not in profiles:
            profiles[job] = buckets(profile(job.split("-")[0], batch)[1])
        compute, latency, measured = (float(row[key]) for key in ("compute", "latency", "plain"))
        step = predict(compute + host.get(job, 0), profiles[job], 2, rate * 1e9 / 8, latency)
        print(f"| {job} | {rate:g} | {1e3 * measured:.1f} ms", end=" | ")
        if job in host:
            errors.append(step / measured - 1)
            print(f"{1e3 * step:.1f} ms | {errors[-1]:+.0%} |")
        else:
            host[job] = max(0, measured - step)
            print(f"(calibrates: {1e3 * host[job]:.1f} ms) | |")
    torch.set_num_threads(threads)
    return errors


def plot(path):
    """Draws the efficiency of `net` (batch 64) and `resnet18` (128) on links of four rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, (model, batch) in zip(axes, (("net", 64), ("resnet18", 128))):
        one, gradients = profile(model, batch)
        groups = buckets(gradients)
        for rate, latency in ((0.1, 1e-4), (1, 1e-4), (10, 5e-5), (100, 1e-5)):
            line = [one / predict(one, groups, n, rate * 1e9 / 8, latency) for n in MACHINES]
            label = f"{rate:g} Gbit/s, {latency * 1e6:.0f} us"
            axis.plot(MACHINES, line, marker=".", label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.05)
        axis.set_xlabel("machines, the same batch on each")
        size = sum(size for size, _ in groups) / 1e6
        axis.set_title(f"{model}, {batch} images in {1e3 * one:.1f} ms, {size:.1f} MB")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("efficiency")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("net", "resnet18", "mlp"), default="resnet18")
    add("--batch-size", type=int, default=128, help="images a step on each machine")
    add("--rate", type=float, default=10, help="of the link, in Gbit/s")
    add("--latency", type=float, default=5e-5, help="of a message, in seconds")
    add("--step", type=float, help="seconds of a step on one machine; else it is measured here")
    add("--check", type=Path, help="a CSV file of network.py's")
    add("--plot", type=Path, help="a PNG or SVG file to draw, for the device here")
    args = parser.parse_args()
    if args.check:
        errors = check(args.check)
        print(f"\nlargest error: {max(map(abs, errors)):.0%}" if errors else "")
    elif args.plot:
        plot(args.plot)
    else:
        step, gradients = profile(args.model, args.batch_size)
        step = args.step or step
        print(f"{args.model}, {args.batch_size} images in {1e3 * step:.2f} ms on one machine\n")
        print("| machines | step | efficiency | times as fast as one |\n|---|---|---|---|")
        for n in MACHINES:
            seconds = predict(step, buckets(gradients), n, args.rate * 1e9 / 8, args.latency)
            print(f"| {n} | {1e3 * seconds:.2f} ms | {step / seconds:.0%}", end=" | ")
            print(f"{n * step / seconds:.1f} |")


if __name__ == "__main__":
    main()

"""Does the time an image grow with their number, or the start of a resumed run with its step?

python benchmarks/growth.py                      # 10,000, 50,000 and 500,000 images: 3 GB of memory
python benchmarks/growth.py --images 1000 2000

Steps of `net` at batch 64 on data sets of noise, in turn in one process, and ratios within a turn:
on a noisy machine nothing else shows a difference of a few percent. `limit` steps on one batch that
is normalised already: the difference to it is what data costs. Then train_single.py from the
command to the first step, anew and with --resume shortly before the end of its first epoch.
"""

import argparse
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import parser as scripts
from common import prepare
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import train_single


def batches(args, data, device):
    """The scripts' batches of 64 as the network takes them, epoch after epoch, without end."""
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for batch in DataLoader(data, 64, sampler=order, collate_fn=data.collate, drop_last=True):
            yield prepare(args, batch, device)


def steps(sizes, turns, count=60):
    """Microseconds an image of each turn of `count` steps, by the number of images or `limit`."""
    args = scripts.parse_args(["--dataset", "synthetic"])
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    _, _, net, _ = train_single.set_up(args, device, 1)  # which keeps memory between steps, too
    loaders = {}
    for size in sizes:
        images = torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8)
        data = train_single.InMemory(images, torch.randint(10, (size,)))
        loaders[size] = batches(args, data, device)
        loaders["limit"] = itertools.repeat(next(loaders[size]))
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, fused=True)
    names = [*sizes, "limit"]
    times = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            for _ in range(count):
                images, labels = next(loaders[name])
                loss = F.cross_entropy(net(images).float(), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            loss.item()
            times[name].append((time.perf_counter() - begin) / count / 64 * 1e6)
    return times


def start(folder, *flags, until="step 1/"):
    """Seconds to the line that has `until` in it; the run is then stopped by SIGTERM."""
    words = [sys.executable, train_single.__file__, "--dataset", "synthetic", "--log-every", "1"]
    begin = time.perf_counter()
    words += ["--epochs", "100", "--output", folder, *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    next(line for line in process.stdout if until in line)
    seconds = time.perf_counter() - begin
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 50_000, 500_000])
    parser.add_argument("--turns", type=int, default=60, help="of 60 steps, for each number")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    args = parser.parse_args()
    times = steps(args.images, args.turns)
    print("| images | us an image | x the first | x the limit |\n|---|---|---|---|")
    for name, values in times.items():
        cells = [name if name == "limit" else f"{name:,}", f"{statistics.median(values):.1f}"]
        for base in times[args.images[0]], times["limit"]:
            cells.append(f"{statistics.median(a / b for a, b in zip(values, base)):.3f}")
        print("| " + " | ".join(cells) + " |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        late = Path(name, "late")
        start(late, until="step 150/157")
        found = [
            (start(Path(name, str(i))), start(late, "--resume", until=" step "))
            for i in range(args.rounds)
        ]
    new, resumed = map(statistics.median, zip(*found))
    print(f"\nfirst step: {new:.2f} s anew, {resumed:.2f} s with --resume from step 150 of 157 on")

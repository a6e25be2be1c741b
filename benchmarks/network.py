"""DDP over a link of limited rate: two network namespaces on this machine, a core each.

sudo "$(which python)" benchmarks/network.py --rounds 3

Medians over the rounds, ratios within a round. `one`: complete/train.py with the whole batch in
one namespace; `two`: half of it in each; `accumulate`: 4 times the batch with --accumulate 4, which
communicates the same bytes.
"""

import argparse
import contextlib
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import ROOT, row, spread, table

RATES = 10, 1  # Gbit/s
JOBS = {  # flags, global batch, steps of an epoch
    "`net`": ("--model net", 64, 300),
    "`resnet18`": ("--model resnet18", 128, 4),
    "`resnet18`, 160 pixels": ("--model resnet18 --image-size 160", 32, 4),
}


@contextlib.contextmanager
def two_namespaces():
    """Joined by a cable: 10.77.0.1 on v0 and 10.77.0.2 on v1."""
    a, b = names = [f"bench{i}-{os.getpid()}" for i in (0, 1)]
    commands = [f"netns add {a}", f"netns add {b}"]
    commands.append(f"link add v0 netns {a} type veth peer name v1 netns {b}")
    for i, name in enumerate(names):
        commands.append(f"-n {name} addr add 10.77.0.{i + 1}/24 dev v{i}")
        commands += [f"-n {name} link set v{i} up", f"-n {name} link set lo up"]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


def shape(names, rate):
    """Let `rate` Gbit/s through the link, each way, and hardly more after a pause."""
    burst = max(16_000, round(rate * 1e9 / 8 * 1e-4))  # bytes; the kernel must not hand over more
    for i, name in enumerate(names):
        words = f"ip -n {name} link set v{i} gso_max_size {min(burst, 65536)}"
        subprocess.run(words.split(), check=True)
        words = f"tc -n {name} qdisc replace dev v{i} root tbf rate {rate}gbit burst {burst}"
        subprocess.run([*words.split(), "latency", "50ms"], check=True)


def run(names, words):
    """Run python with these words in each namespace."""
    cores, started = sorted(os.sched_getaffinity(0)), []
    for i, name in enumerate(names):
        own = ",".join(map(str, cores[i::2] or cores))
        line = ["ip", "netns", "exec", name, "taskset", "-c", own, sys.executable]
        line += map(str, words)
        environment = os.environ | {"GLOO_SOCKET_IFNAME": f"v{i}", "CUDA_VISIBLE_DEVICES": ""}
        environment["HIP_VISIBLE_DEVICES"] = "-1"  # to HIP, "" is all
        place = {"RANK": i, "LOCAL_RANK": 0, "WORLD_SIZE": len(names)}  # as torchrun sets it
        place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 23456}
        environment |= {key: str(value) for key, value in place.items()}
        started.append(subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL))
    if any([process.wait() for process in started]):
        sys.exit(f"{words} failed")


def measure(names, job, folder, number):
    """{(kind of run, Gbit/s): seconds per sample}."""
    flags, batch, steps = JOBS[job]
    runs = [("one", RATES[0], names[:1], 1)]
    for rate in RATES:
        runs += [("two", rate, names, 1), ("accumulate", rate, names, 4)]
    found, first = {}, number % len(runs)
    for kind, rate, where, parts in runs[first:] + runs[:first]:
        shape(names, rate)
        own = [*flags.split(), "--steps-per-epoch", steps, "--epochs", 3, "--overwrite"]
        own += ["--batch-size", parts * batch, "--accumulate", parts]
        run(where, [ROOT / "benchmarks/on_device.py", *own, "--output", folder / "out"])
        rows = list(csv.DictReader((folder / "out/metrics.csv").open()))[1:]
        found[kind, rate] = 1 / statistics.harmonic_mean(
            float(r["samples_per_second"]) for r in rows
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    table(0, "job", "Gbit/s", "two: x one", "accumulate: x one")
    with two_namespaces() as names, tempfile.TemporaryDirectory() as folder:
        for job in JOBS:
            rounds = [measure(names, job, Path(folder), number) for number in range(args.rounds)]
            for rate in RATES:
                cells = [job, rate]
                for kind in "two", "accumulate":
                    ratios = [found["one", RATES[0]] / found[kind, rate] for found in rounds]
                    cells.append(spread(ratios, 2))
                row(*cells)

"""DDP and FSDP2 over a link of limited rate: two network namespaces on this machine, a core each.

sudo "$(which python)" benchmarks/network.py --rounds 3

Medians over the rounds, ratios within a round. `one`: the batch in one namespace; `two`: half of it
in each; `accumulate`: 4 times the batch with --accumulate 4, so the same bytes; `predicted`: by
scaling.py, from a step without the link and from the row of 100 Gbit/s, nearly no limit.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from runs import copy_scripts, read_metrics, row, spread, table
from scaling import buckets, predict, predict_fsdp2

RATES = 100, 10, 1  # Gbit/s
JOBS = {  # flags, global batch, steps of an epoch
    "net": ("--model net", 64, 300),
    "resnet18": ("--model resnet18", 128, 4),
    "language": ("--units 128", 64, 8),
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
    """Run python with these words in each namespace, NUMBER being its number."""
    cores, started = sorted(os.sched_getaffinity(0)), []
    for i, name in enumerate(names):
        own = ",".join(map(str, cores[i::2] or cores))
        line = ["ip", "netns", "exec", name, "taskset", "-c", own, sys.executable]
        line += [str(word).replace("NUMBER", str(i)) for word in words]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": f"v{i}", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"RANK": str(i), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}  # for train_fsdp2.py
        environment |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "23456"}
        started.append(subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL))
    if any([process.wait() for process in started]):
        sys.exit(f"{words} failed")


def measure(names, job, folder, number):
    """{(kind of run, Gbit/s): seconds a step}, and the bytes of the gradients."""
    flags, batch, steps = JOBS[job]
    flags = ["--dataset", "synthetic", *flags.split()]
    flags += ["--epochs", 3, "--overwrite", "--output", folder / "outNUMBER"]
    single = [folder / "train_single.py", *flags]
    ddp = [folder / "train_ddp_spawn.py", *flags, "--world-size", 2, "--rank", "NUMBER"]
    ddp += ["--init-method", "tcp://10.77.0.1:23456"]
    runs = [("compute", 100, names, single, batch // 2), ("one", 100, names[:1], single, batch)]
    for rate in RATES:
        runs.append(("ddp", rate, names, ddp, batch))
        runs.append(("fsdp2", rate, names, [folder / "train_fsdp2.py", *flags], batch))
        runs.append(("accumulate", rate, names, [*ddp, "--accumulate", 4], 4 * batch))
    found, first = {}, number % len(runs)
    for kind, rate, where, words, size in runs[first:] + runs[:first]:
        shape(names, rate)
        run(where, [*words, "--batch-size", size, "--samples", steps * size])
        found[kind, rate] = size / read_metrics(folder / "out0")[0]
    return found, sum(weight.nbytes for weight in torch.load(folder / "out0/model.pt").values())


def print_rows(job, runs, size):
    """`runs`: what measure() has found in each round."""
    step = {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}
    batch, compute, cost, cost2 = JOBS[job][1], step["compute", 100], 0, 0
    for rate in RATES:
        link, cells = rate * 1e9 / 8, [job, f"{rate:g}", f"{batch / step['one', 100]:.0f}"]
        for kind, factor in ("ddp", 1), ("accumulate", 4):
            gains = [factor * run["one", 100] / run[kind, rate] for run in runs]
            cells += [f"{factor * batch / step[kind, rate]:.0f}", spread(gains, 2)]
        ddp = predict(compute, buckets(size), 2, link, cost=cost)
        fsdp2 = predict_fsdp2(compute, size, 2, link, cost=cost2)
        if rate == 100:  # of the time beyond this the others' cost of a byte is taken
            cost, cost2 = (step["ddp", 100] - ddp) / size, (step["fsdp2", 100] - fsdp2) / size / 2
        for kind, predicted in ("ddp", ddp), ("fsdp2", fsdp2):
            cells += [f"{1e3 * step[kind, rate]:.1f}", f"{1e3 * predicted:.1f}"]
        row(*cells, spread([run["fsdp2", rate] / run["ddp", rate] for run in runs], 2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    heads = ["job", "Gbit/s", "one, samples/s", "two", "x one", "accumulate", "x one"]
    table(0, *heads, "DDP, ms", "predicted", "FSDP2, ms", "predicted", "x DDP")
    with two_namespaces() as names, tempfile.TemporaryDirectory() as folder:
        copy_scripts(Path(folder))
        for job in args.jobs:
            rounds = [measure(names, job, Path(folder), number) for number in range(args.rounds)]
            print_rows(job, [run for run, _ in rounds], rounds[0][1])

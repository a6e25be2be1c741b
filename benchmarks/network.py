"""What a network does to DistributedDataParallel: two hosts on this machine, joined by a slow link.

sudo "$(which python)" benchmarks/network.py --rounds 5

The hosts are network namespaces with half of the cores each, the link is a veth pair, shaped by tc
in both directions. Each runs one process of train_ddp_spawn.py over Gloo. `example` is the model of
docs/your_model_and_data.md. Figures are medians over the rounds, ratios those within a round:

- one host: the global batch on one host, with its half of the cores; two hosts: half of it on each
- accumulate: --accumulate 4 with 4 times the batch: the same bytes for 4 times the images
- compute: both hosts train alone at the same time, each with its half of the batch, no network
- bytes / rate: what the gradients take on the link, each byte once in each direction
- x bound: a step over the larger of the two
- FSDP2: a step of train_fsdp2.py, and over that of DDP
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

import torch
from throughput import copy_scripts, markdown, read_metrics, rooms, spread, title, write_text

JOBS = {  # flags, global batch, steps of an epoch
    "net": ("--dataset synthetic --model net", 64, 300),
    "mlp": ("--dataset synthetic --model mlp", 1024, 16),
    "resnet18": ("--dataset synthetic --model resnet18", 128, 4),
    "example": ("--dataset {folder}/text", 64, 0),  # write_text says how many steps
}


def call(words):
    subprocess.run(words.split(), check=True)


@contextlib.contextmanager
def two_hosts():
    """Two network namespaces, joined by a cable: 10.77.0.1 on v0 and 10.77.0.2 on v1."""
    hosts = [f"bench{i}-{os.getpid()}" for i in (0, 1)]
    try:
        for host in hosts:
            call(f"ip netns add {host}")
        call(f"ip link add v0 netns {hosts[0]} type veth peer name v1 netns {hosts[1]}")
        for i, host in enumerate(hosts):
            call(f"ip -n {host} addr add 10.77.0.{i + 1}/24 dev v{i}")
            call(f"ip -n {host} link set v{i} up")
            call(f"ip -n {host} link set lo up")
        yield hosts
    finally:
        for host in hosts:
            call(f"ip netns del {host}")


def shape(hosts, rate):
    """Let `rate` Gbit/s through the link, each way, and hardly more after a pause."""
    burst = max(16_000, round(rate * 1e9 / 8 * 1e-4))  # bytes; the kernel must not hand over more
    limits = f"rate {rate}gbit burst {burst} latency 50ms"
    for i, host in enumerate(hosts):
        call(f"ip -n {host} link set v{i} gso_max_size {min(burst, 65536)}")
        call(f"tc -n {host} qdisc replace dev v{i} root tbf {limits}")


def run(hosts, words):
    """Run python with these words on each host, HOST being its number."""
    cores, started = sorted(os.sched_getaffinity(0)), []
    for i, host in enumerate(hosts):
        half = ",".join(map(str, cores[i::2] or cores))
        line = ["ip", "netns", "exec", host, "taskset", "-c", half, sys.executable]
        line += [str(word).replace("HOST", str(i)) for word in words]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": f"v{i}", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"RANK": str(i), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}  # for train_fsdp2.py
        environment |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "23456"}
        started.append(subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL))
    if any([process.wait() for process in started]):
        sys.exit(f"{words} failed")


def measure(args, hosts, job, folder, number):
    """{(kind of run, Gbit/s): seconds a step}, and the bytes that are sent."""
    flags, batch, _ = JOBS[job]
    flags = flags.format(folder=folder).split()
    flags += ["--epochs", 3, "--overwrite", "--output", f"{folder}/outHOST"]
    single = [folder / "train_single.py", *flags]
    ddp = [folder / "train_ddp_spawn.py", *flags, "--timeout", 120, "--world-size", 2]
    ddp += ["--rank", "HOST", "--init-method", "tcp://10.77.0.1:23456"]
    cut = [folder / "train_fsdp2.py", *flags, "--timeout", 120]
    runs = [(("compute", 0), hosts, single, batch // 2), (("alone", 0), hosts[:1], single, batch)]
    for rate in args.rates:
        runs.append((("plain", rate), hosts, ddp, batch))
        runs.append((("cut", rate), hosts, cut, batch))
        runs.append((("accumulate", rate), hosts, [*ddp, "--accumulate", 4], 4 * batch))
    found, first = {}, number % len(runs)
    for kind, where, words, size in runs[first:] + runs[:first]:
        shape(hosts, kind[1] or 100)
        run(where, [*words, "--batch-size", size])
        found[kind] = size / read_metrics(folder / "out0")[0]
    weights = torch.load(folder / "out0" / "model.pt", weights_only=True)
    return found, sum(w.nbytes for w in weights.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    add("--rates", nargs="+", type=float, default=[100, 10, 1], help="Gbit/s; 100: as if none")
    add("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(title(args))
    heads = ["job", "Gbit/s", "one host, images/s", "two hosts", "x one host", "accumulate"]
    heads += ["x one host", "compute, ms", "bytes / rate, ms", "a step, ms", "x bound"]
    heads += ["FSDP2, ms", "x DDP"]
    print(markdown(heads), "|---" * len(heads) + "|", sep="\n", flush=True)
    rows = []
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "text"), 512)
        for job in args.jobs:
            _, batch, steps = JOBS[job]
            copy_scripts(Path(folder), steps * batch, rooms(job))
            runs = [measure(args, hosts, job, Path(folder), n) for n in range(args.rounds)]
            for rate in args.rates:
                wire = runs[0][1] * 8 / (rate * 1e9)
                each = [{k: s for (k, r), s in run.items() if r in (0, rate)} for run, _ in runs]
                row = {kind: statistics.median(run[kind] for run in each) for kind in each[0]}
                row |= {"job": job, "batch": batch, "rate": rate}
                cells = [job, f"{rate:g}", f"{batch / row['alone']:.0f}"]
                for kind, images in ("plain", batch), ("accumulate", 4 * batch):
                    wins = [images / batch * run["alone"] / run[kind] for run in each]
                    cells += [f"{images / row[kind]:.0f}", spread(wins, 2)]
                cells += [f"{1e3 * time:.1f}" for time in (row["compute"], wire, row["plain"])]
                cells.append(spread([r["plain"] / max(r["compute"], wire) for r in each], 2))
                cells.append(f"{1e3 * row['cut']:.1f}")
                cells.append(spread([r["cut"] / r["plain"] for r in each], 2))
                print(markdown(cells), flush=True)
                rows.append(row)
    with open("network.csv", "w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

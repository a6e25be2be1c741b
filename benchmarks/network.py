"""What a network does to DistributedDataParallel: two hosts on this machine, joined by a slow link.

sudo "$(which python)" benchmarks/network.py --rounds 5

The hosts are network namespaces with half of the cores each, the link is a veth pair, shaped by tc
(both directions). Each runs one process of train_ddp_spawn.py over Gloo. Times are medians over the
rounds, ratios those within a round (and the smallest and largest), as in throughput.py:

- compute: both hosts train alone at the same time, each with its half of the batch, no network
- bytes / rate: what the gradients take on the link, each byte once in each direction
- x bound: a step over the larger of the two; nothing beats it without sending fewer bytes
- x bf16: a step over one with --compress-gradients
- accumulate: --accumulate 4 with 4 times the batch: the same bytes for 4 times the images
- one host: the global batch on one host, with its half of the cores
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from throughput import HERE, markdown, read_metrics, spread, title, write_csv

JOBS = {  # model, its gradients, global batch, steps of an epoch at 1 Gbit/s and more, and at less
    "net": ("net", 62_006, 64, 200, 80),
    "net-1024": ("net", 62_006, 1024, 24, 24),
    "resnet18": ("resnet18", 11_181_642, 128, 8, 4),
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
        started.append(subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL))
    if any([process.wait() for process in started]):
        sys.exit(f"{words} failed")


def measure(hosts, job, steps, folder, number):
    """Seconds a step of each kind of run, on the link as it is."""
    model, _, batch, *_ = JOBS[job]
    for name in "train_single.py", "train_ddp_spawn.py":  # copies with as many images as needed
        text = (HERE.parent / name).read_text().replace("10_000", f"{steps * batch}")
        (folder / name).write_text(text.replace("2_000", "64"))
    flags = f"--dataset synthetic --epochs 3 --model {model} --output {folder}/outHOST".split()
    single = [folder / "train_single.py", *flags]
    ddp = [folder / "train_ddp_spawn.py", *flags, "--timeout", 120, "--world-size", 2]
    ddp += ["--rank", "HOST", "--init-method", "tcp://10.77.0.1:23456"]
    kinds = [
        ("compute", hosts, single, batch // 2),
        ("plain", hosts, ddp, batch),
        ("bf16", hosts, [*ddp, "--compress-gradients"], batch),
        ("accumulate", hosts, [*ddp, "--accumulate", 4], 4 * batch),
        ("alone", hosts[:1], single, batch),
    ]
    found, first = {}, number % len(kinds)
    for kind, where, words, size in kinds[first:] + kinds[:first]:
        run(where, [*words, "--batch-size", size])
        found[kind] = size / read_metrics(folder / "out0")[0]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    add("--rates", nargs="+", type=float, default=[100, 10, 1, 0.1], help="Gbit/s; 100: as if none")
    add("--rounds", type=int, default=3)
    add("--csv", type=Path, default=Path("network.csv"))
    args = parser.parse_args()
    print(title(args))
    heads = ["job", "Gbit/s", "compute, ms", "bytes / rate, ms", "a step, ms", "x bound", "x bf16"]
    heads += ["images/s", "accumulate, images/s", "one host, images/s"]
    print(markdown(heads), "|---" * len(heads) + "|", sep="\n", flush=True)
    rows = []
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for job in args.jobs:
            _, gradients, batch, fast, slow = JOBS[job]
            for rate in args.rates:
                shape(hosts, rate)
                steps, wire = fast if rate >= 1 else slow, 4 * gradients * 8 / (rate * 1e9)
                runs = [measure(hosts, job, steps, Path(folder), n) for n in range(args.rounds)]
                row = {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}
                bound = [run["plain"] / max(run["compute"], wire) for run in runs]
                faster = [run["plain"] / run["bf16"] for run in runs]
                speeds = batch / row["plain"], 4 * batch / row["accumulate"], batch / row["alone"]
                times = [f"{1e3 * seconds:.1f}" for seconds in (row["compute"], wire, row["plain"])]
                cells = [job, f"{rate:g}", *times, spread(bound, 2), spread(faster, 2)]
                print(markdown([*cells, *(f"{speed:.0f}" for speed in speeds)]), flush=True)
                rows.append({"job": job, "batch": batch, "rate": rate} | row)
                write_csv(args.csv, rows)


if __name__ == "__main__":
    main()

"""What a network does to DistributedDataParallel: two hosts on this machine, joined by a slow link.

sudo "$(which python)" benchmarks/network.py
sudo "$(which python)" benchmarks/network.py --rates 1 0.1 --jobs net

The hosts are network namespaces with half of the cores each, the link is a veth pair, shaped by tc
(both directions). Each trains as one process of train_ddp_spawn.py over Gloo. In turn, --rounds
times, medians; the seconds a step are those of the last epoch:

- compute: both hosts train alone at the same time, each with its half of the batch, no network
- bytes / rate: what the gradients take on the link at least. With two machines a ring all-reduce
  sends each byte once in each direction.
- bound: the larger of the two; no program can beat it without sending fewer bytes
- overlap: how much of the shorter of compute and communication was hidden behind the other
- bf16: with --compress-gradients
- one host: the same global batch on one host, with the same half of the cores

CSV has the medians, with the link's latency and what scaling.py needs.
"""

import argparse
import contextlib
import csv
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from throughput import ROOT, hardware, write_cifar10

# job: flags, global batch, steps of an epoch at 10 and 1 Gbit/s, at less
JOBS = {
    "net": (["--model", "net"], 64, 200, 100),
    "net-1024": (["--model", "net"], 1024, 25, 25),
    "resnet18": (["--model", "resnet18"], 128, 10, 4),
}
PING = """
import os, sys, time, torch, torch.distributed as dist
store = dist.TCPStore("10.77.0.1", 23457, 2, sys.argv[1] == "0")
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
times = []
for _ in range(100):
    begin = time.perf_counter()
    dist.all_reduce(torch.zeros(1))
    times.append(time.perf_counter() - begin)
print(sorted(times)[50], flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # Gloo's threads sometimes abort a process that ends by itself
"""


@contextlib.contextmanager
def hosts():
    """Two network namespaces, joined by a cable: 10.77.0.1 on v0 and 10.77.0.2 on v1."""
    names = [f"bench{i}-{os.getpid()}" for i in (0, 1)]

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}")
        for i, name in enumerate(names):
            ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev v{i}")
            ip(f"-n {name} link set v{i} up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def shape(names, rate):
    """Let `rate` Gbit/s through the link, each way, and not much more after a pause."""
    burst = max(70_000, round(rate * 1e9 / 8 * 1e-4))  # bytes: no less than the kernel hands over
    for i, name in enumerate(names):
        words = f"tc -n {name} qdisc replace dev v{i} root tbf rate {rate}gbit burst {burst}"
        subprocess.run([*words.split(), "latency", "50ms"], check=True)


def both(names, command):
    """Run command(0) and command(1) at the same time, one a host; what the first printed."""
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    started = []
    for i, name in enumerate(names):
        own = os.environ | {"GLOO_SOCKET_IFNAME": f"v{i}", "SLURM_CPUS_PER_TASK": str(cores)}
        own["OMP_NUM_THREADS"] = str(cores)
        line = ["ip", "netns", "exec", name, sys.executable, *map(str, command(i))]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(subprocess.Popen(line, env=own, **pipes))
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("\n".join(texts))
    return texts[0]


def step_seconds(output, steps):
    with open(output / "metrics.csv") as file:
        return float(list(csv.DictReader(file))[-1]["seconds"]) / steps


def measure(names, job, steps, folder):
    """Seconds a step, on the link as it is: of the computation, plain, compressed, on one host."""
    flags, batch, *_ = JOBS[job]
    data = folder / f"{job}-{steps}"
    if not data.exists():
        write_cifar10(data, steps * batch)
    flags = [*flags, "--data-dir", data, "--epochs", "2"]

    def single(batch):
        return lambda i: (
            [ROOT / "train_single.py", *flags, "--batch-size", batch]
            + [
                "--output",
                folder / f"out{i}",
            ]
        )

    def ddp(*more):
        place = ["--world-size", "2", "--init-method", "tcp://10.77.0.1:23456", "--timeout", "120"]
        words = [ROOT / "train_ddp_spawn.py", *flags, *place, "--batch-size", batch, *more]
        return lambda i: [*words, "--rank", i, "--output", folder / "out0"]

    found = {}
    both(names, single(batch // 2))  # an epoch has twice as many steps
    found["compute"] = step_seconds(folder / "out0", steps * 2)
    both(names, ddp())
    found["plain"] = step_seconds(folder / "out0", steps)
    both(names, ddp("--compress-gradients"))
    found["bf16"] = step_seconds(folder / "out0", steps)
    both(names[:1], single(batch))
    found["alone"] = step_seconds(folder / "out0", steps)
    text = both(names, lambda i: ["-c", PING, i])
    found["latency"] = float(text.split()[-1]) / 2  # two messages, one after the other
    return found


def gradient_bytes(folder):
    """Bytes of the gradients of the model that the last run wrote."""
    state = torch.load(folder / "out0" / "last.pt", weights_only=True)
    momenta = state["optimizer"]["state"].values()
    return sum(4 * part["momentum_buffer"].numel() for part in momenta)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    add("--rates", nargs="+", type=float, default=[10, 1, 0.1], help="of the link, in Gbit/s")
    add("--rounds", type=int, default=3)
    add("--csv", type=Path, default=Path("network.csv"))
    args = parser.parse_args()
    if os.getuid():
        sys.exit('two hosts on one machine need root: start it with sudo "$(which python)"')
    if not shutil.which("tc"):
        sys.exit("there is no command tc, which shapes the link: install iproute2")
    print(f"{hardware()}, {args.rounds} rounds, `{' '.join(sys.argv)}`\n")
    names = "compute", "bytes / rate", "step", "x bound", "overlap", "bf16 step", "plain / bf16"
    print("| job | Gbit/s |", " | ".join(names), "| images/s | on one host |")
    print("|---" * (len(names) + 4) + "|", flush=True)
    rows = []
    with hosts() as both_hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for job in args.jobs:
            for rate in args.rates:
                shape(both_hosts, rate)
                steps = JOBS[job][2 if rate >= 1 else 3]
                runs = [measure(both_hosts, job, steps, folder) for _ in range(args.rounds)]
                row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                size, batch = gradient_bytes(folder), JOBS[job][1]
                wire = size * 8 / (rate * 1e9)
                ratio = statistics.median(r["plain"] / max(r["compute"], wire) for r in runs)
                faster = statistics.median(r["plain"] / r["bf16"] for r in runs)
                hidden = row["compute"] + wire - row["plain"]
                hidden = max(0, hidden / min(row["compute"], wire))
                cells = [f"{1e3 * x:.1f} ms" for x in (row["compute"], wire, row["plain"])]
                cells += [f"{ratio:.2f}", f"{hidden:.0%}", f"{1e3 * row['bf16']:.1f} ms"]
                cells += [f"{faster:.2f}", f"{batch / row['plain']:.0f}"]
                print(f"| {job} | {rate:g} |", " | ".join(cells), end=" | ")
                print(f"{batch / row['alone']:.0f} |", flush=True)
                rows.append(dict(job=job, batch=batch, rate=rate, bytes=size) | row)
                with open(args.csv, "w") as file:
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()

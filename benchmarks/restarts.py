"""How often a torchrun job hangs after --max-restarts began it again: a fault in torch.

sudo "$(which python)" benchmarks/restarts.py --rounds 20

Two ranks, on one of network.py's two hosts or on both, meet over Gloo and add numbers, until one
gets SIGKILL and torchrun starts both again. It is a hang if they have not met again within 20
seconds, or if torchrun gave up; the next kill then strikes a new job. `variable`: with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which train_ddp_torchrun.py refuses to start.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from network import two_hosts
from throughput import markdown, title

PLACES = {  # what torchrun is told on host i
    "one machine": "--standalone --nproc-per-node 2",
    "two machines, c10d": "--nnodes 2 --rdzv-id job --rdzv-backend c10d"
    " --rdzv-endpoint 10.77.0.1:23456 --rdzv-conf is_host={first} --local-addr 10.77.0.{ip}",
    "two machines, static": "--nnodes 2 --node-rank {i} --master-addr 10.77.0.1",
}
RANK = """import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print(f"\\nmet {os.getpid()}", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""


def start(hosts, place, variable, log):
    """Start torchrun on each machine."""
    environment, started = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": variable}, []
    Path(f"{log.name}.py").write_text(RANK)
    for i, host in enumerate(hosts):
        words = ["ip", "netns", "exec", host, "env", f"GLOO_SOCKET_IFNAME=v{i}", sys.executable]
        words += ["-m", "torch.distributed.run", "--max-restarts", "1000"]
        words += PLACES[place].format(i=i, ip=i + 1, first=i == 0).split()
        words.append(f"{log.name}.py")
        started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    return started


def met(log, count, jobs):
    """The ranks that have met, once they are so many; none if that takes too long."""
    end, found = time.monotonic() + 20, []
    while len(found) < count:
        if time.monotonic() > end or any(job.poll() is not None for job in jobs):
            return []
        time.sleep(0.05)
        lines = Path(log.name).read_text().splitlines()
        found = [int(line.split()[1]) for line in lines if line.startswith("met ")]
    return found


def measure(hosts, kills, place, variable):
    """How many of so many kills hang."""
    done = hangs = 0
    while done < kills:
        with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w") as log:
            jobs = start(hosts, place, variable, log)
            try:
                found = met(log, 2, jobs)
                assert found, Path(log.name).read_text()  # before any kill
                while found and done < kills:
                    time.sleep(random.random())
                    os.kill(random.choice(found[-2:]), signal.SIGKILL)
                    found = met(log, len(found) + 2, jobs)
                    done += 1
                    hangs += not found
            finally:
                for job in jobs:
                    job.terminate()
                    job.wait()
    return hangs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="kills of each kind")
    args = parser.parse_args()
    print(title(args), "| | bare | variable |\n|---|---|---|", sep="\n")
    with two_hosts() as hosts:
        for place in PLACES:
            machines = hosts[:1] if place == "one machine" else hosts
            cells = [f"{measure(machines, args.rounds, place, variable)}" for variable in "01"]
            print(markdown([place, *cells]), flush=True)

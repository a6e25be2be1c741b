"""Seconds from command to the first step of `net`, over those of `import torch, torchvision`."""

import argparse
import subprocess
import sys
import tempfile
import time

from throughput import HERE, markdown, names, spread, start, title


def first_step(path, processes):
    begin = time.perf_counter()
    flags = ["--dataset", "synthetic", "--epochs", 1, "--log-every", 1]
    with tempfile.TemporaryDirectory() as output:
        started = start(path, processes, flags, output, stdout=subprocess.PIPE, text=True)
        for line in started[0].stdout:
            if " step 1/" in line:
                seconds = time.perf_counter() - begin
        if any([process.wait() for process in started]):
            sys.exit(f"{path} failed")
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", nargs="+", type=int, default=[1])
    args = parser.parse_args()
    print(title(args), flush=True)
    found = {}
    for _ in range(args.rounds):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, torchvision"], check=True)
        imports = time.perf_counter() - begin
        for processes in args.processes:
            for name in names(processes):
                seconds = first_step(HERE.parent / f"train_{name}.py", processes) - imports
                found.setdefault((f"train_{name}.py", str(processes)), []).append(seconds)
    for key, seconds in found.items():
        print(markdown([*key, spread(seconds, 2)]))

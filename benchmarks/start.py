"""Seconds from command to the first step of `net`, beside those of the imports."""

import argparse
import subprocess
import sys
import tempfile
import time

from throughput import HERE, markdown, names, spread, start, title


def first_step(begin, started):
    """Seconds from `begin` until one of these prints that it has made its first step."""
    for line in started[0].stdout:
        if " step 1/" in line:
            seconds = time.perf_counter() - begin
    if any([process.wait() for process in started]):
        sys.exit(f"{started[0].args} failed")
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", nargs="+", type=int, default=[1])
    args = parser.parse_args()
    print(title(args), flush=True)
    flags = "--dataset synthetic --epochs 1 --log-every 1".split()
    imports = [sys.executable, "-c", "import torch, torchvision; print(' step 1/', flush=True)"]
    least = []
    found = {("imports", ""): least}
    for _ in range(args.rounds):
        begin = time.perf_counter()
        least.append(
            first_step(begin, [subprocess.Popen(imports, stdout=subprocess.PIPE, text=True)])
        )
        for processes in args.processes:
            for name in names(processes):
                path, begin = HERE.parent / f"train_{name}.py", time.perf_counter()
                with tempfile.TemporaryDirectory() as output:
                    started = start(path, processes, flags, output)
                    found.setdefault((name, processes), []).append(first_step(begin, started))
    print("| script | processes | seconds | over the imports |\n|---|---|---|---|")
    for (name, processes), seconds in found.items():
        more = [a - b for a, b in zip(seconds, least)]
        print(markdown([name, str(processes), spread(seconds, 2), spread(more, 2)]))

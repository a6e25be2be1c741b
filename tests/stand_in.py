#!/usr/bin/python3 -S
"""A clone in which nothing trains, for the tests of the job files. The python and torchrun of its
environment are this file, which appends to starts-JOB how a training was started, and does what
these variables say. A test sets them, and a job inherits them:

    TRAIN      code in place of the training. It may call save(), stand(), warn() and exit().
    TORCH      code that changes what torch finds on a node: `gpus`, and `broken`, one of them

Both pieces of code know `life` (the first is 0), `node`, `rank` and `time`.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace


def make_clone(root, folder):
    for name in "slurm", "complete":
        shutil.copytree(Path(root, name), folder / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in "python", "torchrun":
        shutil.copy(__file__, programs / name)
        (programs / name).chmod(0o755)
    activate = 'PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" > /dev/null && pwd):$PATH"\n'
    (programs / "activate").write_text(activate)


def check_gpus(code):
    granted = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").count(",") + 1
    node = where() | {"gpus": granted, "broken": None}
    exec(os.environ.get("TORCH", ""), node)
    sys.modules["torch"] = torch(node["gpus"], node["broken"])
    exec(code, {})


def train(*words):
    start = json.dumps([words, os.getcwd(), dict(os.environ)]) + "\n"
    with open(f"starts-{os.environ['SLURM_JOB_ID']}", "ab", 0) as file:  # in one piece
        file.write(start.encode())
    flags = [number for number, word in enumerate(words) if word in ("--output", "--output_dir")]
    output = Path(words[flags[-1] + 1] if flags else ".")  # the last one decides

    def save(name="checkpoint.pt", text="x"):
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def warn():  # as Slurm does before a time limit; only in test_long.py
        os.kill(int(os.environ["BATCH_SHELL"]), signal.SIGUSR1)

    more = {"save": save, "stand": lambda: time.sleep(9999), "warn": warn, "exit": sys.exit}
    exec(os.environ.get("TRAIN", ""), where() | more)


def where():
    life, rank = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])
    return {"life": life, "rank": rank, "node": os.environ["SLURMD_NODENAME"], "time": time}


def torch(gpus, broken):
    def ones(count, device):
        if device == broken:
            raise RuntimeError(f"GPU {device} has fallen off the bus")
        return SimpleNamespace(item=lambda: 1)

    module = ModuleType("torch")
    module.cuda = SimpleNamespace(device_count=lambda: gpus)
    module.ones = ones
    return module


if __name__ == "__main__":
    program, words = Path(__file__).name, sys.argv[1:]
    if program == "python" and words[0] == "-c":
        check_gpus(words[1])
    else:
        train(program, *words)

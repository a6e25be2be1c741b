#!/usr/bin/python3 -S
"""A clone in which nothing trains, for the tests of the job files. The python, torchrun and python3
of its environment are this file, which appends to starts-JOB how a training was started, and does
what these variables say. A test sets them, and a job inherits them:

    TRAIN      code in place of the training. It may call save(), stand() and exit().
    TORCH      code that changes what torch finds on a node: `gpus`, and `total`, their sum of 1000
    JOINED     how many nodes torchrun has found, if not all
    CONSTANTS  of requeue.py, in JSON

Both pieces of code know `life` (the first is 0), `node`, `rank` and `time`.
"""

import importlib.util
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace


def make_clone(root, folder):
    for name in "slurm", "complete":
        shutil.copytree(Path(root, name), folder / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in "python", "torchrun", "python3":
        shutil.copy(__file__, programs / name)
        (programs / name).chmod(0o755)
    activate = 'PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd):$PATH"\n'
    (programs / "activate").write_text(activate)


def as_python3(script, *words):
    """It only ever starts requeue.py."""
    spec = importlib.util.spec_from_file_location("requeue", script)
    requeue = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(requeue)
    vars(requeue).update(json.loads(os.environ.get("CONSTANTS", "{}")))
    sys.argv = [script, *words]
    sys.exit(requeue.main(requeue.parser.parse_args()))


def as_torchrun(*words):
    if "--no-python" not in words:
        train("torchrun", *words)
        return
    own = words.index("--no-python")
    os.environ["GROUP_WORLD_SIZE"] = os.environ.get("JOINED", os.environ["SLURM_NNODES"])
    os.environ["TORCHRUN"] = " ".join(["torchrun", *words[:own]])
    os.execvp(words[own + 1], words[own + 1 :])


def as_python(*words):
    if words[0] == "-c":
        check_gpus(*words[1:])
    else:
        train(*os.environ.get("TORCHRUN", "").split(), "python", *words)


def check_gpus(code, *words):
    granted = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").count(",") + 1
    node = place() | {"gpus": granted, "total": 1000}
    exec(os.environ.get("TORCH", ""), node)
    sys.modules["torch"] = torch(node["gpus"], node["total"])
    sys.argv = ["-c", *words]
    exec(code, {})


def train(*words):
    environment = dict(os.environ, CORE=str(resource.getrlimit(resource.RLIMIT_CORE)[0]))
    start = json.dumps([words, os.getcwd(), environment]) + "\n"
    with open(f"starts-{os.environ['SLURM_JOB_ID']}", "ab", 0) as file:  # in one piece
        file.write(start.encode())
    flags = " ".join(words).replace("--output=", "--output ")  # of which the last one decides
    output = Path(flags.split("--output ")[-1].split(" --")[0])

    def save():
        output.mkdir(parents=True, exist_ok=True)
        (output / "checkpoint.pt").write_text("x")

    more = {"save": save, "stand": lambda: time.sleep(9999), "exit": sys.exit}
    exec(os.environ.get("TRAIN", ""), place() | more)


def place():
    life, rank = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])
    return {"life": life, "rank": rank, "node": os.environ["SLURMD_NODENAME"], "time": time}


def torch(gpus, total):
    module = ModuleType("torch")
    kind = SimpleNamespace(type="cuda")
    module.cuda = SimpleNamespace(device_count=lambda: gpus)
    module.accelerator = SimpleNamespace(
        device_count=lambda: gpus, current_accelerator=lambda: kind
    )
    module.device = lambda *words: None
    sums = SimpleNamespace(item=lambda: total)
    module.ones = lambda count, device: SimpleNamespace(sum=lambda: sums)
    return module


if __name__ == "__main__":
    start = {"python": as_python, "python3": as_python3, "torchrun": as_torchrun}
    start[Path(__file__).name](*sys.argv[1:])

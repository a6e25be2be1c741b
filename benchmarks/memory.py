"""What each process of complete/train.py holds with --shard 0: convnext_base, with 88 million
parameters, and AdamW.

OMP_NUM_THREADS=1 python benchmarks/memory.py --processes 1 2

Bytes for each parameter of the whole model, in the process that has most. `held`: its shards of
parameters, gradients and optimizer state, counted. The others: peaks of its memory beyond what it
has before the model is built: until it is sharded, and in steps.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

from runs import COMPLETE, copy_script, row, run, table

PROBE = r"""
import threading
from torch.optim.optimizer import register_optimizer_step_post_hook

def now():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], now())
        time.sleep(0.002)

of_script_build_model, of_script_shard_model = build_model, shard_model

def build_model(*args):
    base[0] = peak[0] = now()
    return of_script_build_model(*args)

def shard_model(*args):
    of_script_shard_model(*args)
    print(f"told build {peak[0] - base[0]}", flush=True)
    peak[0] = now()

def tell_step(optimizer, *_):
    own = [p for group in optimizer.param_groups for p in group["params"]]
    size = sum(p.numel() for p in own)
    own += [p.grad for p in own] + [t for s in optimizer.state.values() for t in s.values()]
    held = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in own)
    print(f"told parameters {size}\ntold held {held}")
    print(f"told steps {peak[0] - base[0]}", flush=True)

base, peak = [0], [0]
threading.Thread(target=watch, daemon=True).start()
register_optimizer_step_post_hook(tell_step)
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    words = "--device cpu --dataset synthetic --model convnext_base --batch-size 4".split()
    words += ["--optimizer", "adamw", "--shard", 0, "--epochs", 1]
    # What is freed is given back to the kernel at once, or its pages would still count.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_TRIM_THRESHOLD_": "0"}
    table(0, "processes", "held", "build", "steps")
    with tempfile.TemporaryDirectory() as folder:
        path = copy_script(COMPLETE, folder, 16, PROBE)
        for n in args.processes:
            found, text = {}, run(path, n, words, Path(folder, f"out{n}"))
            for name, value in re.findall(r"told (\w+) (\d+)", text):
                found[name] = max(found.get(name, 0), int(value))
            most = [found[name] / found["parameters"] for name in ("held", "build", "steps")]
            row(n, *(f"{value:.1f}" for value in most))

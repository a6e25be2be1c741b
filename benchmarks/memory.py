"""What each process of train_fsdp2.py holds: a language model of 100 million parameters, with Adam.

OMP_NUM_THREADS=1 python benchmarks/memory.py --processes 1 2 4

Bytes for each parameter of the whole model, in the process that has most. `held`: its shards of
parameters, gradients and optimizer state, counted. The others: peaks of its memory beyond the
imports', until the model is sharded, in steps, while last.pt is read, while it is written.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

from runs import copy_scripts, row, run, table

PROBE = r"""
import threading
from torch.optim.optimizer import register_optimizer_step_post_hook

def now():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], now())
        time.sleep(0.002)

def told(name, function):
    def wrapped(*args):
        result = function(*args)
        print(f"told {name}{dist.get_rank()} {peak[0] - base}", flush=True)
        peak[0] = now()
        return result

    return wrapped

def count(optimizer, *_):
    own = [p for group in optimizer.param_groups for p in group["params"]]
    count = sum(p.numel() for p in own)
    own += [p.grad for p in own] + [t for s in optimizer.state.values() for t in s.values()]
    held = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in own)
    print(f"told parameters {count}\ntold held{dist.get_rank()} {held}", flush=True)

base = now()
peak = [base]
threading.Thread(target=watch, daemon=True).start()
register_optimizer_step_post_hook(count)
shard_model, evaluate = told("build", shard_model), told("steps", evaluate)
load_checkpoint = told("reading", load_checkpoint)
save_checkpoint = told("saving", save_checkpoint)
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    args, flags = parser.parse_known_args()
    words = "--dataset synthetic --samples 40 --batch-size 8 --optimizer adam --layers 14"
    # What is freed is given back to the kernel at once, or its pages would still count.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_TRIM_THRESHOLD_": "0"}
    table(0, "processes", "held", "build", "steps", "reading", "saving: rank 0", "saving: others")
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "train_fsdp2.py"), Path(folder, "out")
        copy_scripts(path.parent, PROBE)
        for n in args.processes:
            for more in "", "--accumulate 2":
                own, found, cells = [*words.split(), "--units", 768, *flags, *more.split()], {}, []
                text = run(path, n, [*own, "--epochs", 1, "--overwrite"], output)
                text += run(path, n, [*own, "--epochs", 2, "--resume"], output)
                for name, value in re.findall(r"told (\w+) (\d+)", text):
                    found[name] = max(found.get(name, 0), int(value))
                for name in "held", "build", "steps", "reading", "saving0", "saving[1-9]":
                    most = max((v for k, v in found.items() if re.match(name, k)), default=0)
                    cells.append(f"{most / found['parameters']:.2f}")
                row(f"{n} {more}".strip(), *cells)

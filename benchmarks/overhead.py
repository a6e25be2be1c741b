"""Microseconds that a step of the scripts costs over the bare step, in all and by line.

python benchmarks/overhead.py --rounds 5

The model is one linear layer, the batch one image, the thread one: such a step is mostly Python.
Each round times a copy of the script that has this model, and its training loop here: whole,
without one line after the other, and bare, which leaves zero_grad, forward, loss, backward and step
on one batch. A line costs what the loop takes less without it.
"""

import argparse
import contextlib
import os
import re
import statistics
import tempfile
import textwrap
import time
from pathlib import Path

import torch
import torch.distributed as dist
from throughput import GPU, HERE, copy_scripts, markdown, spread, title, train
from yardsticks import scripts

MODEL = """def build_model(args, image, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))"""
LINES = {  # of the loop: what finds them, and what stands there instead
    "`prepare(args, batch, device)`": (r"inputs, labels = prepare.*", "next(batches)"),
    "`next(batches)`": (r"next\(batches\)", "batch"),
    "`for part in range(args.accumulate)`": (r"for part in .*", "if True:"),
    "`run_step`, `run_part`": (r"run_(step|part) = .*", "pass"),
    "`set_seed(...)`": (r"set_seed\(.*", "pass"),
    "two `if` without effect": (r"(?<=  )if args.*\n.*", "pass"),
    "`with nullcontext() ...`": (r"last_part = .*\n.*", "if True:"),
    "`with autocast`": (r"with autocast:", "if True:"),
    "`ddp(inputs)` and not `model(inputs)`": (r"\bddp\(", "model("),
    "`/ args.accumulate`": (r" / args.accumulate\n", r"\n"),
    "`loss_sum += loss.detach()`": (r"loss_sum \+= .*", "pass"),
    "`scheduler.step()`": (r"scheduler.step\(\)", "pass"),
}
CHANGED = "loss_sum", "batch", "inputs", "labels", "part", "run_part"  # by the loop


def names_in_the_loop(N):
    """What the loop over an epoch of N steps uses, in both scripts."""
    args = scripts.parser.parse_args("--dataset synthetic --batch-size 1".split())
    device, state = torch.device(args.device), {"step": 0}
    autocast = torch.autocast(device.type, enabled=False)
    train_set, _, classes = scripts.load_data(args)
    model = scripts.build_model(args, None, classes).to(device)
    optimizer, scheduler = scripts.build_optimizer(args, model, steps=10**9)
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    indices = range(0, len(train_set), len(train_set) // N)  # far apart, as in a shuffled epoch
    train_loader = scripts.make_loader(args, train_set, indices, 1, device)
    batch = next(iter(train_loader))
    inputs, labels = scripts.prepare(args, batch, device)
    part = run_part = epoch = rank = 0
    criterion = scripts.loss_function
    world_size, epoch_steps, loss_sum = 1, N, torch.zeros((), device=device)
    return vars(scripts) | locals() | {"nullcontext": contextlib.nullcontext}


def loops(name, names):
    """The script's loop over an epoch as functions, by what is left out."""
    text = (HERE.parent / name).read_text()
    body = re.search(r" {8}for step in .*?scheduler\.step\(\)\n", text, re.S)[0]
    texts = {"": body, "bare": body}
    for line, edit in LINES.items():
        if re.search(edit[0], body):
            texts[line], texts["bare"] = re.sub(*edit, body), re.sub(*edit, texts["bare"])
    for line, text in texts.items():
        code = textwrap.indent("batches = iter(train_loader)\n" + textwrap.dedent(text), "    ")
        exec(f"def loop({', '.join(CHANGED)}):\n{code}", own := dict(names))
        texts[line] = own["loop"]
    return texts


def microseconds(codes, names, turns):
    """Of a step of each loop: the median of some short turns, in which all of them run."""
    found = {line: [] for line in codes}
    for line, loop in list(codes.items()) * turns:
        begin = time.perf_counter()
        loop(*(names[name] for name in CHANGED))
        found[line].append((time.perf_counter() - begin) / names["N"] * 1e6)
    return {line: statistics.median(values) for line, values in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000, help="of an epoch of the script")
    args = parser.parse_args()
    print(title(args))
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the scripts
    exec(MODEL, vars(scripts))
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = names_in_the_loop(min(200, args.steps))
    flags = f"--dataset synthetic --batch-size 1 --log-every {args.steps} --epochs 3".split()
    for name in "train_single.py", "train_ddp_torchrun.py":
        codes, found = loops(name, names), {"the bare step": [], "**over it, in all**": []}
        microseconds(codes, names, turns=1)  # the first time is slower
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                copy_scripts(Path(folder), args.steps, MODEL)
                rate, *_ = train(Path(folder, name), 1, flags)
            took = microseconds(codes, names, turns=20)
            whole, bare = took.pop(""), took.pop("bare")
            found["the bare step"].append(bare)
            found["**over it, in all**"].append(1e6 / rate - bare)
            for line, without in took.items():
                found.setdefault(line, []).append(whole - without)
        print(f"| {name} | microseconds a step |\n|---|---|")
        print(*(markdown([line, spread(found[line], 1)]) for line in found), sep="\n", end="\n\n")

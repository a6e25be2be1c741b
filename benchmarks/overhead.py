"""Microseconds that a step of the scripts costs over the bare step.

python benchmarks/overhead.py --rounds 5

The model is one linear layer, the batch one image, the thread one: such a step is mostly Python.
Each round times a copy of the script that has this model, and the bare step beside it: zero_grad,
forward, loss, backward and step on one batch, in the second script through DDP.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from throughput import GPU, copy_scripts, markdown, spread, title, train
from yardsticks import scripts

MODEL = """def build_model(args, image, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))"""


def bare(wrap, steps):
    """Microseconds of a bare step; `wrap` makes of the model what is called."""
    args = scripts.parser.parse_args([])
    model = scripts.build_model(args, None, 10).to(args.device)
    called, optimizer = wrap(model), scripts.build_optimizer(args, model, steps=1)[0]
    inputs = torch.rand(1, 3, 32, 32, device=args.device)
    labels = torch.zeros(1, dtype=torch.long, device=args.device)
    for turn in range(2):  # the first is slower
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            scripts.loss_function(called(inputs), labels).backward()
            optimizer.step()
        if GPU:
            torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / steps * 1e6


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


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
    flags = f"--dataset synthetic --batch-size 1 --log-every {args.steps} --epochs 3".split()
    heads = ["microseconds a step", "bare", "script", "over it"]
    print(markdown(heads), "|---" * len(heads) + "|", sep="\n", flush=True)
    for name, wrap in ("train_single.py", lambda model: model), ("train_ddp_torchrun.py", ddp):
        found = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                copy_scripts(Path(folder), args.steps, MODEL)
                rate, *_ = train(Path(folder, name), 1, flags)
            found.append((bare(wrap, args.steps), 1e6 / rate))
        times = [*zip(*found), [script - bare for bare, script in found]]
        print(markdown([name, *(spread(values, 0) for values in times)]), flush=True)

"""What each process of train_fsdp2.py holds: a language model of 100 million parameters, with Adam.

OMP_NUM_THREADS=1 python benchmarks/memory.py --processes 1 2 4

The model is that of docs/your_model_and_data.md with 768 units and 14 layers, on CPUs over Gloo.
It makes five steps, and five more after --resume. All figures are bytes for each parameter of the
whole model, in the process that has most:

- held: its own parts of parameters, gradients and optimizer state, counted; their mean
- build, steps, restored: the peak of its memory (RssAnon: without the file that mmap reads)
  beyond what the imports took, until the model is cut, in the steps, and while last.pt is read
- saving: what comes on top while last.pt is gathered
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from throughput import copy_scripts, markdown, rooms, title, write_text

PROBE = """
import threading
peak = [0]


def watch():
    while True:
        peak[0] = max(peak[0], now())
        time.sleep(0.002)


def now():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def tell(name, value):
    print(f"told {name} {value}", flush=True)


def largest(name):
    tell(name, peak[0] - base)
    peak[0] = now()


base = now()
threading.Thread(target=watch, daemon=True).start()
"""
HELD = """            held = [*model.parameters(), *(p.grad for p in model.parameters())]
            held += [t for s in optimizer.state.values() for t in s.values()]
            parts = [t.to_local() if isinstance(t, DTensor) else t for t in held]
            tell("held", sum(4 * part.numel() for part in parts))
            optimizer.zero_grad()
"""
COUNT = "sum(p.numel() for p in model.parameters())"
EDITS = {  # a line of the script, and what stands there instead
    "    optimizer, scheduler = build_optimizer(": "    largest('build')\n{}",
    "    dist.barrier()  # all have read": "    largest('restored' if args.resume else 'new')\n{}",
    "    for epoch in range(state": f"    tell('parameters', {COUNT})\n    peak[0] = now()\n{{}}",
    "            optimizer.zero_grad()\n": HELD,
    "        for buffer in model.buffers():": "        largest('steps')\n{}",
    "    content = gather(state": "    before = peak[0] = now()\n{}",
    "    if dist.get_rank() > 0:\n": "    tell(f'saved{dist.get_rank()}', peak[0] - before)\n{}",
}


def measure(folder, processes, flags):
    """{what: bytes a parameter, of each process} of a run of two steps and of one that goes on."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words += [processes, folder / "train_fsdp2.py", "--dataset", folder / "text", "--batch-size", 8]
    words += [*flags, "--epochs", 1, "--output", folder / "out", "--checkpoint-minutes", 1000]
    text = ""
    # What is freed goes back to the kernel at once, or its pages would count on.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_TRIM_THRESHOLD_": "0"}
    for more in ["--overwrite"], ["--resume", "--epochs", 2]:
        line = [str(word) for word in [*words, *more]]
        text += subprocess.run(line, check=True, stdout=-1, text=True, env=environment).stdout
    found = {}
    for name, value in re.findall(r"told (\w+) (\d+)", text):
        found.setdefault(name, []).append(int(value))
    count = found["parameters"][0]
    return {name: [value / count for value in values] for name, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    args = parser.parse_args()
    args.rounds = 1
    print(title(args))
    heads = ["processes", "held", "16 / N", "build", "steps", "restored"]
    heads += ["saving: rank 0", "others"]
    print(markdown(heads), "|---" * len(heads) + "|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_scripts(folder, rooms=rooms("example-100m"))
        write_text(folder / "text", 40)
        path = folder / "train_fsdp2.py"
        end = 'if __name__ == "__main__":'
        text = path.read_text().replace(end, f"{PROBE}\n\n{end}")
        for old, new in EDITS.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new.replace("{}", old))
        path.write_text(text)
        for number in args.processes:
            for flags in "", "--accumulate 2", "--amp":
                found = measure(folder, number, flags.split())
                others = [max(found[name]) for name in found if re.match("saved[1-9]", name)]
                values = [statistics.mean(found["held"]), 16 / number]
                values += [max(found[name]) for name in ("build", "steps", "restored", "saved0")]
                cells = [f"{value:.2f}" for value in [*values, max(others, default=0)]]
                print(markdown([f"{number} {flags}".strip(), *cells]), flush=True)


if __name__ == "__main__":
    main()

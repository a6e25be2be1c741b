"""How many images a second: the six scripts beside what one would otherwise take.

python benchmarks/throughput.py --rounds 5                          # all of it: some hours
python benchmarks/throughput.py --jobs resnet18 -- --amp --compile  # flags for scripts and limit

A round runs each contestant once, beginning with another one. A figure is the mean over all epochs
but the first, of the training alone. After each round there is a table of what is known by then:
medians over the rounds (and the smallest and largest). Ratios are those within a round: to
yardsticks.py, with the better number of loader workers, and to the same script in --baseline.
"""

import argparse
import csv
import datetime
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

HERE = Path(__file__).resolve().parent
GPU = torch.accelerator.is_available()
SCRIPTS = ["single", "dp", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc", "fsdp2"]
PEERS = ["copied", "accelerate", "lightning"]
JOBS = {  # flags, epochs
    "net": ("--dataset synthetic --model net --batch-size 64", 6),
    "mlp": ("--dataset synthetic --model mlp --batch-size 256", 6),
    "resnet18": ("--dataset synthetic --model resnet18 --batch-size 128", 3),
    "folder": ("--dataset {folder}/files --model net --batch-size 64", 3),
    "example": ("--dataset {folder}/text --batch-size 64", 3),
    "resnet18-224": ("--dataset synthetic --model resnet18 --batch-size 128", 3),
    "folder-224": (
        "--dataset {folder}/files --model resnet18 --batch-size 128 --image-size 224",
        3,
    ),
    "example-100m": ("--dataset {folder}/text --batch-size 64", 3),
}


def write_folder(folder, count):
    """`count` JPEG files for training and a fifth for the test, 500 x 375 and 50 kB each."""
    for number in range(count + count // 5):
        part = Path(folder, "train" if number < count else "test", str(number % 10))
        part.mkdir(parents=True, exist_ok=True)
        image = Image.effect_noise((166, 125), 60).resize((500, 375)).convert("RGB")
        image.save(part / f"{number}.jpg")


def rooms(job):
    """The definitions that take the place of a script's own. `example` is what a user writes into
    the rooms by docs/your_model_and_data.md."""
    if not job.startswith("example"):
        return ""
    text = (HERE.parent / "docs" / "your_model_and_data.md").read_text()
    _, model, data, *_ = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    if job == "example-100m":
        model = model.replace("128", "768").replace("layer, 2,", "layer, 14,")
        model = model.replace("nhead=4, dim_feedforward=512", "nhead=12, dim_feedforward=3072")
    return f"{model}\n\n{data}\n\n{re.search(r'`(add.*?)`', text)[1]}\n"


def write_text(folder, count):
    """A text with so many training samples for the pages' example, and a tenth for its test."""
    folder.mkdir()
    (folder / "text.txt").write_bytes(bytes(random.choices(b"abcdefgh \n", k=72 * count)))


def copy_scripts(folder, images=10_000, rooms="", source=HERE.parent, side=32):
    """Copies with so many synthetic images, and with these definitions in place of their own."""
    folder.mkdir(exist_ok=True)
    main = 'if __name__ == "__main__":'
    for path in source.glob("train_*.py"):
        text = path.read_text().replace("10_000", f"{images}").replace("2_000", f"{images // 5}")
        text = text.replace("(coarse, 32)", f"(coarse, {side})")
        text = text.replace(" 32, 32)", f" {side}, {side})")
        (folder / path.name).write_text(text.replace(main, f"{rooms}\n\n{main}"))


def names(processes):
    """The scripts that can use so many processes, or GPUs."""
    one_process = {"single"} if GPU else {"single", "dp"}
    return [name for name in SCRIPTS if processes == 1 or name not in one_process]


def commands(path, processes, folder):
    """The command lines, one a machine, that start a file with so many processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    if path.name == "train_ddp_spawn.py":
        return [[sys.executable, path, "--nproc-per-node", processes]]
    if path.name == "train_ddp_multigpu_proc.py" and processes > 1 and not GPU:
        place = ["--init-method", f"file://{folder}/store", "--world-size", processes, "--rank"]
        return [[sys.executable, path, *place, rank] for rank in range(processes)]
    if path.name in ("train_ddp_torchrun.py", "train_fsdp2.py") or (
        path.name == "yardsticks.py" and processes > 1
    ):
        return [[*torchrun, processes, path]]
    return [[sys.executable, path]]


def train(path, processes, flags):
    """Run a file to its end, with so many GPUs or an even share of the cores for each process.
    Returns its images a second and MiB of the device, or None if it fails."""
    environment = dict(os.environ)
    if GPU:  # the first of those that are ours
        ours = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(processes)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ours.split(",")[:processes])
    elif processes > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // processes))
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with tempfile.TemporaryDirectory() as output:
        started = []
        for line in commands(path, processes, output):
            words = [str(word) for word in [*line, *flags, "--output", output]]
            started.append(subprocess.Popen(words, text=True, **options))
        texts = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            print(f"{path} {flags} failed:", *texts, sep="\n", file=sys.stderr)
            return None
        return read_metrics(output)


def read_metrics(output):
    """Images a second of all epochs but the first, which have as many images each; MiB."""
    with open(Path(output, "metrics.csv")) as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["samples_per_second"]) for row in rows[1:]]
    return statistics.harmonic_mean(rates), float(rows[-1]["peak_memory_mib"])


def contestants(args, job, processes, folder):
    """(name, file, flags of its own) of all that take part."""
    yardsticks = folder / "scripts" / "yardsticks.py"
    found = [] if job.startswith("folder") else [("limit", yardsticks, ["limit", *args.flags])]
    for name in names(processes):
        found.append((name, folder / "scripts" / f"train_{name}.py", args.flags))
        if name == "fsdp2" and processes > 2:  # two copies of the model
            found.append(("hsdp", found[-1][1], ["--shard", processes // 2, *args.flags]))
        if args.baseline and (args.baseline / f"train_{name}.py").exists():
            path = folder / "baseline" / f"train_{name}.py"
            found.append((f"baseline {name}", path, args.flags))
    for name in PEERS if job in ("net", "resnet18") and processes == 1 else []:
        for workers in args.workers:
            found.append((f"{name} {workers} workers", yardsticks, [name, "--workers", workers]))
    return [one for one in found if not args.only or set(args.only) & set(one[0].split())]


def spread(values, digits):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def markdown(cells):
    return f"| {' | '.join(cells)} |"


def table(found):
    """{contestant: an (images/s, MiB) a round} as Markdown."""
    rates = {name: [rate for rate, _ in runs] for name, runs in found.items()}
    best = {}
    for name in sorted(rates, key=lambda name: statistics.median(rates[name])):
        best[name.split()[0]] = name
    yardsticks = [*PEERS, "ddp_torchrun", "limit", "baseline"]
    yardsticks = [name for name in yardsticks if name in best]
    heads = ["", "images/s", *(f"x {name}" for name in yardsticks), "MiB"]
    lines = [markdown(heads), "|---" * len(heads) + "|"]
    for name, values in rates.items():
        cells = [name, spread(values, 0)]
        for yard in yardsticks:
            others = rates.get(f"baseline {name}" if yard == "baseline" else best[yard])
            cells.append(spread([a / b for a, b in zip(values, others)], 2) if others else "")
        lines.append(markdown([*cells, f"{max(memory for _, memory in found[name]):.0f}"]))
    return "\n".join(lines)


def title(args):
    """What this runs on, and how."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "accelerator"
    gpu = f"{torch.accelerator.device_count()} x {name}, " if GPU else ""
    machine = f"{gpu}{os.cpu_count()} cores, torch {torch.__version__}, {datetime.date.today()}"
    return f"{machine}, {args.rounds} rounds, `{' '.join(sys.argv)}`\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    counts = sorted({1, torch.accelerator.device_count() if GPU else 2})
    add = parser.add_argument
    add("--jobs", nargs="+", default=list(JOBS)[:5], choices=JOBS)
    add("--processes", nargs="+", type=int, default=counts)
    add("--rounds", type=int, default=3)
    add("--epochs", type=int, help="of a run, instead of the job's own number; at least 2")
    add("--images", type=int, default=10_000, help="of an epoch; a quarter as many files")
    add("--workers", nargs="+", type=int, default=[0, 2], help="of the peers' loaders")
    add("--only", nargs="+", choices=[*SCRIPTS, "hsdp", *PEERS, "limit"])
    add("--baseline", type=Path, help="a folder with other scripts of the same names")
    add("flags", nargs="*", help="after --: flags for the scripts and the limit")
    args = parser.parse_args()
    print(title(args), flush=True)
    files, failed = args.images // 4, []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if {"folder", "folder-224"} & set(args.jobs):
            write_folder(folder / "files", files)
        write_text(folder / "text", args.images)
        for job in args.jobs:
            options = {"rooms": rooms(job), "side": 224 if job == "resnet18-224" else 32}
            copy_scripts(folder / "scripts", args.images, **options)
            (folder / "scripts" / "yardsticks.py").write_text((HERE / "yardsticks.py").read_text())
            if args.baseline:
                copy_scripts(folder / "baseline", args.images, source=args.baseline, **options)
            flags, epochs = JOBS[job]
            epochs = args.epochs or epochs
            flags = flags.format(folder=folder).split()
            for processes in args.processes:
                order, found = contestants(args, job, processes, folder), {}
                for number in range(args.rounds):
                    first = number * len(order) // args.rounds
                    for name, path, own in order[first:] + order[:first]:
                        most = min(epochs, 4) if name.split()[0] in PEERS else epochs
                        own = [*flags, *own, "--epochs", most]
                        if run := train(path, processes, own):
                            found.setdefault(name, []).append(run)
                            print(name, *run, file=sys.stderr, flush=True)
                        else:  # accelerate is not installed, for instance: go on without it
                            order = [one for one in order if one[0] != name]
                            found.pop(name, None)
                            failed.append(f"{job} {name}")
                    rounds = f"round {number + 1} of {args.rounds}"
                    head = f"`{job}`, {processes} process(es), {rounds}"
                    print(f"{head}\n\n{table(found)}\n", flush=True)
    if failed:
        sys.exit(f"left out: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""How fast the scripts train, next to three yardsticks on the same job, machine and process count.

python benchmarks/throughput.py                                # all jobs, with 1 process and 2
python benchmarks/throughput.py --jobs net --only single copied limit
python benchmarks/throughput.py --jobs net --processes 1 --epochs 3 -- --data-on-device --compile

What comes after -- goes to the scripts, and to the yardsticks where it is about the computation.
Everything is run in turn, so often as --rounds says, each time in processes of its own. The table
has medians over the rounds; a ratio is the median of the rounds' ratios. CSV has each run.

- images/s: over the training part of the last epoch, by its own clock
- start: seconds from the command to the end of the first step, less those of a Python that imports
  torch and torchvision
- host memory: of all processes of the run together (a shared page counts once), soon after the
  first step; the peak of what was seen in 2 seconds
- device memory: the peak of what torch allocated on the first device

The yardsticks: the loop that everyone copies (0 and 2 loader workers, the better counts),
Accelerate and Lightning with the same workers, and the limit: the same model, optimizer and wrapper
stepping on one batch. For the folder: what PIL decodes in the workers, and the limit.
"""

import argparse
import contextlib
import csv
import datetime
import os
import pickle
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
GPU = torch.accelerator.is_available()
SCRIPTS = {
    "single": "train_single.py",
    "dp": "train_dp.py",
    "spawn": "train_ddp_spawn.py",
    "torchrun": "train_ddp_torchrun.py",
    "multigpu_proc": "train_ddp_multigpu_proc.py",
}
PEERS = {"copied": "copied_loop.py", "accelerate": "accelerate_loop.py"}
PEERS["lightning"] = "lightning_loop.py"
FIELDS = "job,processes,contestant,workers,round,images_per_second,start,host_mib,device_mib"

# job: flags, training images on a GPU, and on a CPU
JOBS = {
    "net": (["--model", "net", "--batch-size", "64"], 50_000, 50_000),
    "resnet18": (["--model", "resnet18", "--batch-size", "128"], 50_000, 5_120),
    "mlp": (["--model", "mlp", "--repeat", "24", "--batch-size", "64"], 50_000, 2_560),
    "folder": (["--model", "net", "--batch-size", "64"], 10_240, 2_560),
}


def write_cifar10(folder, count):
    """`count` training images and a fifth as many for the test: noise, in CIFAR-10's own format."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random, rest = np.random.default_rng(0), (count + 4) // 5
    for number in range(6):
        size = min(rest, count - number * rest) if number < 5 else rest
        images = random.integers(256, size=(size, 3072), dtype=np.uint8)
        content = {"data": images, "labels": random.integers(10, size=size).tolist()}
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


def write_folder(folder, count):
    """JPEG files of 500 x 375, as photographs usually are: smooth, with some grain."""
    random = np.random.default_rng(0)
    for number in range(count + count // 20):
        part = folder / ("train" if number < count else "test") / str(number % 10)
        part.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(random.integers(256, size=(12, 16, 3), dtype=np.uint8))
        image = np.asarray(image.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        image = image + random.integers(-8, 9, size=image.shape, dtype=np.int16)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(part / f"{number}.jpg")


def commands(path, processes):
    """The command lines, one a machine, that start a file with so many processes."""
    if path.name == "train_ddp_spawn.py":
        return [[sys.executable, path, "--nproc-per-node", processes]]
    if path.name == "train_ddp_multigpu_proc.py" and processes > 1 and not GPU:
        with socket.create_server(("127.0.0.1", 0)) as server:  # pretend machines
            method = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        place = ["--init-method", method, "--world-size", processes]
        return [[sys.executable, path, *place, "--rank", rank] for rank in range(processes)]
    if path.name == "train_ddp_torchrun.py" or processes > 1 and path.parent == HERE:
        return [[*TORCHRUN, processes, path]]
    return [[sys.executable, path]]


def environment(commands):
    """Where one machine plays several, each gets its share of the cores."""
    share = {"SLURM_CPUS_PER_TASK": str(max(1, os.cpu_count() // len(commands)))}
    return os.environ | (share if len(commands) > 1 else {})


def host_mib(processes):
    """MiB of memory of these processes and their children; shared pages are counted once."""
    total = 0
    for process in processes:
        family = psutil.Process(process.pid)
        for member in [family, *family.children(recursive=True)]:
            try:
                memory = member.memory_full_info()
                total += getattr(memory, "pss", memory.uss)  # uss: what it shares with nobody
            except psutil.Error:  # it has just ended
                pass
    return total / 2**20


def run(lines, folder, until=None):
    """Run command lines side by side. Returns what the first printed, seconds and MiB.

    With `until`, only until a line has that in it and 2 seconds more, in which the memory is read;
    the seconds are those to that line.
    """
    begin, seconds, seen, text = time.perf_counter(), None, 0, []
    options = dict(stdout=subprocess.PIPE, text=True, cwd=folder, env=environment(lines))
    with open(folder / "stderr.txt", "w+") as errors:
        started = [
            subprocess.Popen([str(word) for word in line], stderr=errors, **options)
            for line in lines
        ]
        others = [threading.Thread(target=p.stdout.read, daemon=True) for p in started[1:]]
        for thread in others:
            thread.start()
        for line in started[0].stdout:
            text.append(line)
            if until and until in line:
                seconds = time.perf_counter() - begin
                reader = threading.Thread(target=started[0].stdout.read, daemon=True)
                reader.start()
                while time.perf_counter() - begin < seconds + 2 and started[0].poll() is None:
                    seen = max(seen, host_mib(started))
                    time.sleep(0.2)
                for process in started:
                    for member in psutil.Process(process.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):  # ended with its parent
                            member.kill()
                    process.kill()
                break
        ends = [process.wait() for process in started]
        if any(ends) and seconds is None or until and seconds is None:
            errors.seek(0)
            sys.exit(f"{lines[0]} ended with {ends}:\n{''.join(text)}{errors.read()}")
    return "".join(text), seconds, seen


def contestants(job, processes):
    """(name, its file, its own flags) of all that are compared."""
    found = [(name, ROOT / path, []) for name, path in SCRIPTS.items()]
    if processes > 1:
        found = [part for part in found if part[0] not in ("single", "dp")]
        if GPU:  # this one and train_dp.py take all GPUs with one process
            found = [part for part in found if part[0] != "multigpu_proc"]
    if job == "folder":
        workers = ["--workers", str(max(1, torch.get_num_threads() // processes) * processes)]
        found.append(("decode", HERE / "decode.py", workers))
    else:
        for name, path in PEERS.items():
            found += [(name, HERE / path, ["--workers", str(count)]) for count in (0, 2)]
    return [*found, ("limit", HERE / "limit.py", [])]


def measure(contestant, job, processes, data, args, folder):
    """One run for its speed and one for start and memory, as fields of the CSV file."""
    name, path, own = contestant
    flags = [*JOBS[job][0], "--epochs", args.epochs, *own]
    flags += ["--dataset", data] if job == "folder" else ["--data-dir", data]
    if name in SCRIPTS or name == "limit":
        flags += args.flags
    if name in SCRIPTS:
        flags += ["--output", folder / "out"]
    lines = commands(path, 1 if name == "decode" else processes)
    text, _, _ = run([[*line, *flags] for line in lines], folder)
    if name in SCRIPTS:
        with open(folder / "out" / "metrics.csv") as file:
            last = list(csv.DictReader(file))[-1]
        rate, device = float(last["images_per_second"]), float(last["peak_memory_mib"])
        flags += ["--log-every", "1"]
    else:
        words = text.split("epoch:")[-1].split()
        rate, device = float(words[0]), float(words[2])
    first = "step 1/" if name in SCRIPTS else "step 1\n"
    lines = commands(path, 1 if name == "decode" else processes)
    flags[flags.index("--epochs") + 1] = 1000  # so that it lasts until it has been looked at
    _, start, host = run([[*line, *flags] for line in lines], folder, first)
    return dict(images_per_second=rate, start=start, host_mib=host, device_mib=device)


def hardware():
    """One line: what this ran on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    name = f"{os.cpu_count()} cores ({names[0] if names else platform.machine()})"
    if GPU:
        count = torch.accelerator.device_count()
        name = f"{count} x {torch.cuda.get_device_name()}, {name}"
    return f"{name}, torch {torch.__version__}, {datetime.date.today()}"


def table(rows, job, processes):
    """Markdown lines for one job and process count: medians of the rounds' ratios and starts."""
    rows = [row for row in rows if (row["job"], row["processes"]) == (job, processes)]
    named, base = {}, {row["round"]: row["start"] for row in rows if row["contestant"] == ""}
    for row in rows:
        name, workers = row["contestant"], row["workers"]
        named.setdefault((name, workers), []).append(row)
    del named["", ""]

    def median(key, field):
        return statistics.median(row[field] for row in named[key])

    best = {}  # of several numbers of workers
    for key in named:
        other = best.get(key[0], key)
        best[key[0]] = max(key, other, key=lambda k: median(k, "images_per_second"))
    yards = [name for name in ("copied", "accelerate", "lightning", "decode", "limit")]
    yards = [name for name in yards if name in best]
    yield (
        "| | images/s | "
        + " | ".join(f"x {name}" for name in yards)
        + (" | start, s | host MiB | device MiB |")
    )
    yield "|---" * (5 + len(yards)) + "|"
    for name, key in best.items():
        cells = [f"{median(key, 'images_per_second'):.0f}"]
        for yard in yards:
            pairs = zip(named[key], named[best[yard]])
            ratios = [a["images_per_second"] / b["images_per_second"] for a, b in pairs]
            cells.append(f"{statistics.median(ratios):.2f}")
        starts = [row["start"] - base[row["round"]] for row in named[key]]
        cells += [f"{statistics.median(starts):.1f}", f"{median(key, 'host_mib'):.0f}"]
        cells.append(f"{median(key, 'device_mib'):.0f}")
        label = f"{name}, {key[1]} workers" if key[1] != "" else name
        label = f"**{SCRIPTS[name]}**" if name in SCRIPTS else label
        yield f"| {label} | " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = torch.accelerator.device_count() if GPU else 2
    add = parser.add_argument
    add("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    add("--processes", nargs="+", type=int, default=sorted({1, count}))
    add("--rounds", type=int, default=3)
    add("--epochs", type=int, default=2, help="the last one counts")
    add("--images", type=int, help="training images, instead of the job's own number")
    add("--only", nargs="+", choices=[*SCRIPTS, *PEERS, "decode", "limit"])
    add("--data-dir", type=Path, help="where cifar-10-batches-py/ lies; without it noise is made")
    add("--csv", type=Path, default=Path("throughput.csv"))
    add("flags", nargs="*", help="after --: flags for the scripts and the limit")
    args = parser.parse_args()
    print(f"{hardware()}, {args.rounds} rounds, `{' '.join(map(str, sys.argv))}`\n")
    rows = []
    for job in args.jobs:
        with tempfile.TemporaryDirectory() as name:
            folder, data = Path(name), Path(name, "data")
            images = args.images or JOBS[job][1 if GPU else 2]
            if job == "folder":
                write_folder(data, images)
            elif args.data_dir:
                data = args.data_dir.resolve()
            else:
                write_cifar10(data, images)
            for processes in args.processes:
                lost = []  # with 2 workers, far behind those with 0: not tried again
                for number in range(args.rounds):
                    place = dict(job=job, processes=processes, round=number)
                    code = "import torch, torchvision, time; print('in', flush=True); time.sleep(9)"
                    _, start, host = run([[sys.executable, "-c", code]], folder, "in")
                    none = dict(contestant="", workers="", images_per_second=0, device_mib=0)
                    rows.append(place | none | dict(start=start, host_mib=host))
                    order = contestants(job, processes)
                    first = number * len(order) // args.rounds  # no place in a round is anybody's
                    for contestant in order[first:] + order[:first]:
                        if args.only and contestant[0] not in args.only:
                            continue
                        if contestant in lost:
                            continue
                        found = measure(contestant, job, processes, data, args, folder)
                        workers = contestant[2][1] if contestant[2] else ""
                        found |= dict(contestant=contestant[0], workers=workers)
                        rows.append(place | found)
                        print(rows[-1], file=sys.stderr)
                        twin = rows[-2] if contestant[0] == rows[-2]["contestant"] else rows[-1]
                        worse = found["images_per_second"] < 0.8 * twin["images_per_second"]
                        lost += [contestant] if worse else []
                with open(args.csv, "w") as file:  # anew each time: a long run may be stopped
                    writer = csv.DictWriter(file, FIELDS.split(","))
                    writer.writeheader()
                    writer.writerows(rows)
                print(f"\n`{job}`, {images} images, {processes} process(es)\n")
                print(*table(rows, job, processes), sep="\n", flush=True)


if __name__ == "__main__":
    main()

"""What the programs of this folder share: the scripts' command lines, their results, tables."""

import csv
import datetime
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
GPUS = torch.cuda.device_count()
SMALL = ["single", "dp", "ddp_torchrun", "ddp_spawn", "ddp_multigpu_proc", "fsdp2"]
SMALL = [f"train_{name}.py" for name in SMALL]
COMPLETE = ["complete/train_ddp.py", "complete/train_fsdp2.py"]


def copy_script(name, folder, samples, *changes):
    """A copy of a script that trains on so many synthetic images. Changes: (old text, new text)."""
    text, test, path = (ROOT / name).read_text(), max(16, samples // 10), Path(folder, name)
    sizes = [("12_000", str(samples + test)), ("10_000", str(samples)), ("2_000", str(test))]
    for old, new in changes:
        assert old in text, (name, old)
        text = text.replace(old, new)
    for old, new in sizes:
        text = text.replace(old, new)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def commands(path, n, folder):
    """The command lines, one per machine, that start a script on n GPUs, or in n processes."""
    if path.name == "train_ddp_spawn.py":
        return [[sys.executable, path, "--nproc-per-node", n]]
    if path.name == "train_ddp_multigpu_proc.py" and not GPUS:  # a process is a machine
        place = [f"--init-method=file://{folder.resolve()}.store", f"--world-size={n}"]
        return [[sys.executable, path, *place, f"--rank={rank}"] for rank in range(n)]
    small = path.name in (SMALL[2], SMALL[5]) and path.parent.name != "complete"
    if small or path.name in ("train_ddp.py", "train_fsdp2.py") and n > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
        return [[sys.executable, *torchrun, path]]
    return [[sys.executable, path]]


def processes(pid):
    """A process and all that it has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return [int(pid)] + [other for child in children for other in processes(child)]


def run(path, n, flags, output, until=None):
    """Run a script on n GPUs, or with an even share of the cores for each of n processes. Returns
    what it prints. With `until`, all its processes are killed once it has printed this."""
    environment, log = dict(os.environ), Path(f"{output}.out")
    if not GPUS and n > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // n))
    with open(log, "w") as file:
        options = {"env": environment, "stdout": file, "stderr": file}
        lines = [[*line, *flags, "--output", output] for line in commands(path, n, output)]
        started = [subprocess.Popen([str(word) for word in line], **options) for line in lines]
    while until and until not in log.read_text() and started[0].poll() is None:
        time.sleep(0.01)
    for pid in [pid for process in started for pid in processes(process.pid)] if until else []:
        os.kill(pid, signal.SIGKILL)
    statuses = {process.wait() for process in started}
    if statuses != {-signal.SIGKILL if until else 0}:
        raise RuntimeError(f"{path} {flags}: {log.read_text()}")
    return log.read_text()


def train(path, n, flags):
    """Run a script to its end. Returns its samples a second, the mean over all epochs but the
    first, and the peak of the device's memory in MiB (of complete/). NaN if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output, memory = Path(folder, "out"), math.nan
        try:
            text = run(path, n, flags, output)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return math.nan, math.nan
        rates = re.findall(r"^epoch .* (\d+) images/s$", text, re.M)
        if (output / "metrics.csv").exists():
            rows = list(csv.DictReader((output / "metrics.csv").open()))
            rates = [row["samples_per_second"] for row in rows]
            memory = float(rows[-1].get("peak_memory_mib", math.nan))
        return statistics.harmonic_mean(map(float, rates[1:])), memory


def spread(values, digits):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(*cells):
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def table(used, *heads):
    """The head of a table about the first `used` GPUs of this machine, or about its CPU."""
    device = f"{os.cpu_count()} CPU cores"
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        device += f" ({names[0]})" if names else ""
    if GPUS and used:
        device = f"{used} x {torch.cuda.get_device_name()}"
    date, command = datetime.date.today(), " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    print(f"{device}, torch {torch.__version__}, {date}, `{command}`\n")
    row(*heads)
    print("|---" * len(heads) + "|", flush=True)

"""What the programs of this folder share: copies of the scripts, their command lines, tables."""

import csv
import datetime
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
GPUS = torch.accelerator.device_count()
SCRIPTS = ["single", "dp", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc", "fsdp2"]
MAIN = '\n\nif __name__ == "__main__":\n'


def copy_scripts(folder, more=""):
    """Copies of the scripts with the models and data of workload.py; `more` is code for them."""
    text = f"\n\nfrom workload import change\n\nchange(globals())\n{more}{MAIN}"
    for path in HERE.parent.glob("train_*.py"):
        (folder / path.name).write_text(path.read_text().replace(MAIN, text))
    for name in "workload.py", "yardsticks.py":
        (folder / name).write_text((HERE / name).read_text())


def commands(path, processes, folder):
    """The command lines, one a machine, that start a file with so many GPUs, or processes."""
    if path.name == "train_ddp_spawn.py":
        return [[sys.executable, path, "--nproc-per-node", processes]]
    if path.name == "train_ddp_multigpu_proc.py" and not GPUS:  # a process is a machine
        place = [f"--init-method=file://{folder.resolve()}.store", f"--world-size={processes}"]
        return [[sys.executable, path, *place, f"--rank={rank}"] for rank in range(processes)]
    if path.name in ("train_ddp_torchrun.py", "train_fsdp2.py"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        return [[sys.executable, *torchrun, path]]
    return [[sys.executable, path]]


def run(path, n, flags, output, until=None):
    """Run a file on the first n GPUs, or with an even share of the cores for each of n processes.
    Returns what it prints. With `until`, it is killed as soon as it has printed this."""
    environment, log = dict(os.environ), Path(f"{output}.out")
    if GPUS:
        ours = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ours.split(",")[:n])
    elif n > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // n))
    with open(log, "w") as file:
        options = {"env": environment, "stdout": file, "stderr": file, "start_new_session": True}
        lines = [[*line, *flags, "--output", output] for line in commands(path, n, output)]
        started = [subprocess.Popen([str(word) for word in line], **options) for line in lines]
    while until and until not in log.read_text() and started[0].poll() is None:
        time.sleep(0.01)
    for process in started if until else []:  # torchrun's ranks see that it is gone, and end
        os.killpg(process.pid, signal.SIGKILL)
    statuses = {process.wait() for process in started}
    if statuses != {-signal.SIGKILL if until else 0}:
        raise RuntimeError(f"{path} {flags}: {log.read_text()}")
    return log.read_text()


def train(path, n, flags):
    """Run a file to its end: samples a second and MiB of the device, or (nan, nan) if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(path, n, flags, Path(folder, "out"))
            return read_metrics(Path(folder, "out"))
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return float("nan"), float("nan")


def read_metrics(output):
    """Samples a second over all epochs but the first; MiB."""
    with open(Path(output, "metrics.csv")) as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["samples_per_second"]) for row in rows[1:]]
    return statistics.harmonic_mean(rates), float(rows[-1]["peak_memory_mib"])


def spread(values, digits):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(*cells):
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def table(used, *heads):
    """The head of a table about the first `used` GPUs of this machine, or about its cores."""
    device = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_available() and used:
        device = f"{used} x {torch.cuda.get_device_name()}"
    date, command = datetime.date.today(), " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    print(f"{device}, torch {torch.__version__}, {date}, `{command}`\n")
    row(*heads)
    print("|---" * len(heads) + "|", flush=True)

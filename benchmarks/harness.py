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
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from altered import COMPLETE, write_altered  # noqa: E402

GPUS = torch.cuda.device_count()
BY_PYTHON = ("train_single.py", "train_dp.py")  # one process, on however many GPUs
BY_TORCHRUN = ("train_ddp_torchrun.py", "train_fsdp2.py")  # on one GPU, too

# A part of gpu.sh has so many seconds, or as long as it takes.
PART_SECONDS = float(os.environ.get("PART_SECONDS", 24 * 3600))
STARTED = time.monotonic()
FAILED = []  # runs that ended with an error
NO_TIME = []  # runs that the end of the part's time has ended, or kept from starting

ONE_BATCH = """
class Images(torch.utils.data.Dataset):
    def __init__(self, count, side):
        self.images = torch.randint(256, (10, 3, side, side), dtype=torch.uint8)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.images[i % 10], i % 10

class DataLoader(DataLoader):
    def __iter__(self):  # the same batch in each step, in pinned memory
        if not hasattr(self, "batch"):
            self.batch = next(super().__iter__())
        return iter([self.batch] * len(self))

def load_data(args):
    side, classes = args.image_size, list("0123456789")
    return Images({samples}, side), Images({test}, side), classes
"""


def copy_script(name, folder, samples):
    """A copy of a small script that repeats one batch of so many synthetic images."""
    data = ONE_BATCH.format(samples=samples, test=max(64, samples // 10))
    return write_altered(ROOT / name, folder, more=data)


def recipe_copy(title, folder):
    """A copy of complete/train.py with a recipe in it."""
    return write_altered(ROOT / COMPLETE, folder, titles=[title])


def commands(path, n, folder):
    """The command lines, one per machine, that start a script on n GPUs, or in n processes."""
    if path.name == "train_ddp_spawn.py":
        return [[sys.executable, path, "--nproc-per-node", n]]
    if path.name == "train_ddp_multigpu_proc.py" and not GPUS:  # a process is a machine
        place = [f"--init-method=file://{folder.resolve()}.store", f"--nnodes={n}"]
        return [[sys.executable, path, *place, f"--node-rank={rank}"] for rank in range(n)]
    alone = [*BY_PYTHON, "train_ddp_multigpu_proc.py"]
    if path.name in BY_TORCHRUN or path.name not in alone and n > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
        torchrun += ["--local-addr", "127.0.0.1"]  # the host's own name may lead nowhere
        return [[sys.executable, *torchrun, path]]
    return [[sys.executable, path]]


@dataclass
class Outcome:
    """What became of some commands that were started together."""

    text: str  # what they have printed
    seconds: float  # until they had ended, or one had printed what was waited for
    status: str  # "done", "failed", or "no time"


def run_commands(lines, log, until=None, limit=3600, environment=None, watch=None, folder=None):
    """Start commands, and wait until all have ended, one has printed `until`, or `limit` seconds
    are over. Then no process of theirs is left. If one fails, the others, which may wait for it,
    have 20 seconds. `watch` is called ten times a second with the process ids of the commands."""
    mark, log = f"BENCHMARK_RUN={uuid.uuid4()}", Path(log)  # all that they start inherits it
    environment = {**os.environ, **(environment or {}), **dict([mark.split("=")])}
    started, end, watched = time.monotonic(), time.monotonic() + limit, 0
    running, found = [], False
    if limit <= 0:
        return Outcome("", 0, "no time")
    try:
        with open(log, "w") as file:
            options = {"env": environment, "stdout": file, "stderr": file, "cwd": folder}
            for line in lines:
                running.append(subprocess.Popen([str(word) for word in line], **options))
        while time.monotonic() < end:
            statuses = [process.poll() for process in running]
            found = until is not None and until in log.read_text(errors="replace")
            if found or None not in statuses:
                break
            if any(statuses):
                end = min(end, time.monotonic() + 20)
            if watch and time.monotonic() - watched > 0.1:
                watched = time.monotonic()
                watch([process.pid for process in running])
            time.sleep(0.02)
    finally:
        seconds = time.monotonic() - started
        statuses = [process.poll() for process in running]
        kill_marked(mark)
        for process in running:
            process.kill()  # where there is no /proc
            process.wait()
    if found or not until and not any(statuses) and None not in statuses:
        status = "done"
    else:
        status = "no time" if not any(statuses) and None in statuses else "failed"
    return Outcome(log.read_text(errors="replace"), seconds, status)


def kill_marked(mark):
    """SIGKILL for all processes that have inherited this environment variable: also for those in
    sessions of their own, and those whose parents have ended."""
    killed = True
    while killed:  # one may have started another meanwhile
        killed = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if mark.encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    killed = True


@contextmanager
def two_namespaces():
    """Two network namespaces, joined by a cable: 10.77.0.1 on v0 and 10.77.0.2 on v1."""
    a, b = names = [f"bench{i}-{os.getpid()}" for i in (0, 1)]
    commands = [f"netns add {a}", f"netns add {b}"]
    commands.append(f"link add v0 netns {a} type veth peer name v1 netns {b}")
    for i, name in enumerate(names):
        commands.append(f"-n {name} addr add 10.77.0.{i + 1}/24 dev v{i}")
        commands += [f"-n {name} link set v{i} up", f"-n {name} link set lo up"]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


def end_on_sigterm():
    """Let `finally` clean up when `timeout` ends this program."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def seconds_left():
    """Of this part."""
    return max(0, STARTED + PART_SECONDS - time.monotonic())


def run(path, n, flags, output, until=None, limit=None):
    """Run a script on n GPUs, or with an even share of the cores for each of n processes. What it
    printed in the time that is left counts, even if it did not end; an error ends with
    RuntimeError."""
    environment = {}
    if not GPUS and n > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // n))
    lines = [[*line, *flags, "--output", output] for line in commands(path, n, output)]
    limit = seconds_left() if limit is None else limit
    outcome = run_commands(lines, f"{output}.out", until, limit, environment)
    if outcome.status == "failed":
        raise RuntimeError(f"{describe(path, n, flags)} failed:\n{outcome.text}")
    if outcome.status == "no time":
        NO_TIME.append(describe(path, n, flags))
    return outcome.text


def describe(path, n, flags):
    return f"{Path(path).name} {' '.join(map(str, flags))} on {n}"


def attempt(*args, **options):
    """What `run` returns, or None if it fails, of which it tells and takes note."""
    try:
        return run(*args, **options)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        FAILED.append(str(error).splitlines()[0])


def train(path, n, flags, **options):
    """Run a script. Returns its samples a second in training, the mean over all epochs but the
    first; of a run that was ended, over those that it has printed. NaN if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out")
        text = attempt(path, n, flags, output, **options)
        if text is None:
            return math.nan
        rates = re.findall(r"^epoch .* (\d+) images/s$", text, re.M)  # a small script's
        if (output / "metrics.csv").exists():
            rows = csv.DictReader((output / "metrics.csv").open())
            rates = [row["samples_per_second"] for row in rows]
        return statistics.harmonic_mean(map(float, rates[1:])) if rates[1:] else math.nan


def end_part():
    """Say what was not measured. The status is 1 if anything has failed, and 3 if only time has
    run out, which gpu.sh calls not finished."""
    sys.stderr.flush()
    for what, names in ("Failed", FAILED), ("No time was left for, or to finish", NO_TIME):
        if names:
            print(f"\n{what}:\n\n- " + "\n- ".join(names), flush=True)
    sys.exit(1 if FAILED else 3 if NO_TIME else 0)


def spread(values, digits):
    """The median; of several values also the smallest and the largest."""
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text


def row(*cells):
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def commit():
    """Of this checkout, and whether it has changes; "" if it is none."""
    words = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        text = subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL)
        return f"commit {text.strip()}, "
    return ""


def hardware(used):
    """The first `used` GPUs of this machine, or its CPU."""
    device = f"{os.cpu_count()} CPU cores"
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        device += f" ({names[0]})" if names else ""
    if GPUS and used:
        device = f"{used} x {torch.cuda.get_device_name()}"
    return device


def table(used, *heads):
    """The head of a table about the first `used` GPUs of this machine, or about its CPU."""
    date, command = datetime.date.today(), " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    print(f"{hardware(used)}, torch {torch.__version__}, {commit()}{date}, `{command}`\n")
    row(*heads)
    print("|---" * len(heads) + "|", flush=True)


def fitting_workers(workers, batch_bytes):
    """As many loader workers as have room in /dev/shm for the batches that they send."""
    shm = Path("/dev/shm")
    if not shm.exists():
        return workers
    space = os.statvfs(shm)
    most = int(space.f_bavail * space.f_frsize / (3 * batch_bytes))  # two each, and one on its way
    if most < workers:
        print(f"/dev/shm has room for {most} workers, not {workers}", file=sys.stderr, flush=True)
    return min(workers, most)

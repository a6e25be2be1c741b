"""What the programs of this folder share: the scripts' command lines, their results, tables."""

import ast
import csv
import datetime
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
GPUS = torch.cuda.device_count()
SCRIPTS = ["single", "dp", "ddp_torchrun", "ddp_spawn", "ddp_multigpu_proc", "fsdp2"]
SCRIPTS = [f"train_{name}.py" for name in SCRIPTS]
COMPLETE = "complete/train.py"
FAILED = []  # runs that did not end as they should
BY_TORCHRUN = (SCRIPTS[2], SCRIPTS[5])  # small scripts that it also starts on one GPU

START = '\n\nif __name__ == "__main__":\n'
ONE_BATCH = """
class Images(Dataset):
    def __init__(self, count, side):
        self.images, self.count = torch.rand(10, 3, side, side), count

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


# ---- Recipes of docs/ ----------------------------------------------------------------------------
RECIPES = ["recipes.md", "your_model_and_data.md", "how_fast.md"]
NEW = "# ---- A step, and the evaluation"  # new functions go above this line of train.py
IMPORTS = "from torch import nn\n"


def recipe(title):
    """The blocks of a section of these pages: language and code."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in RECIPES)
    sections = re.split(r"^##+ ", pages, flags=re.M)  # each begins with its title
    [section] = [section for section in sections if section.startswith(f"{title}\n")]
    return re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S)


def paste(title, folder):
    """Do to a copy of complete/ what a recipe says."""
    for language, code in recipe(title):
        if language == "diff":
            for name, hunk in re.findall(r"^@@ ([\w.]+).* @@\n((?:[ +-].*\n)+)", code, re.M):
                path = Path(folder, name)
                path.write_text(with_hunk(path.read_text(), hunk))
        if code.startswith("# in train.py\n"):
            path = Path(folder, "train.py")
            path.write_text(with_functions(path.read_text(), code))


def with_hunk(text, hunk):
    """The text with the lines of a diff, whose other lines must be in it once, together."""
    lines = hunk.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    assert f"\n{text}".count(f"\n{old}") == 1, old
    return f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]


def with_functions(text, code):
    """The text with these functions and classes, instead of those of the same names, if any."""
    lines = code.splitlines(keepends=True)
    for node in ast.parse(code).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        part = "".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            text = text.replace(IMPORTS, IMPORTS + part)
            continue
        name = node.name
        found = re.search(rf"^(?:def|class) {name}\b.*\n(?:(?: .*)?\n)*", text, re.M)
        if found:
            text = text.replace(found[0], f"{part}\n\n")
        else:
            text = text.replace(NEW, f"{part}\n\n{NEW}")
    return text


# ---- Copies of scripts ---------------------------------------------------------------------------
def replaced(text, *changes):
    """Changes: what stands there, its replacement, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return text


def write_altered(path, folder, *changes, more="", titles=()):
    """The path of a copy of a script in this folder, with the modules beside it, these changes, the
    recipes of these titles, and more code before its start, where it can replace or wrap functions.
    """
    text, copy = replaced(path.read_text(), *changes), Path(folder, path.name)
    assert text.count(START) == 1, path
    if path.parent != ROOT:
        shutil.copytree(path.parent, folder, dirs_exist_ok=True)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    for title in titles:
        paste(title, folder)
    if more:
        copy.write_text(copy.read_text().replace(START, f"\n\n{more}{START}"))
    return copy


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
        place = [f"--init-method=file://{folder.resolve()}.store", f"--world-size={n}"]
        return [[sys.executable, path, *place, f"--rank={rank}"] for rank in range(n)]
    if path.name in BY_TORCHRUN or path.name not in SCRIPTS and n > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
        torchrun += ["--local-addr", "127.0.0.1"]  # the host's own name may lead nowhere
        return [[sys.executable, *torchrun, path]]
    return [[sys.executable, path]]


def processes(pid):
    """A process and all that it has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return [int(pid)] + [other for child in children for other in processes(child)]


def run(path, n, flags, output, until=None, limit=3600):
    """Run a script on n GPUs, or with an even share of the cores for each of n processes. Returns
    what it prints. All its processes are killed once it has printed `until`, or after `limit`
    seconds, which is an error."""
    environment, log = dict(os.environ), Path(f"{output}.out")
    if not GPUS and n > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // n))
    with open(log, "w") as file:
        options = {"env": environment, "stdout": file, "stderr": file}
        lines = [[*line, *flags, "--output", output] for line in commands(path, n, output)]
        started = [subprocess.Popen([str(word) for word in line], **options) for line in lines]
    end = time.monotonic() + limit
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if until and until in log.read_text():
            break
        time.sleep(0.02)
    running = [process for process in started if process.poll() is None]
    for pid in [pid for process in running for pid in processes(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    statuses = {process.wait() for process in started}
    text = log.read_text()
    if statuses != {-signal.SIGKILL if until else 0} or until and until not in text:
        raise RuntimeError(f"{path} {flags}: status {statuses}\n{text}")
    return text


def run_in_process(path, flags, environment):
    """What `python path` does with these flags and variables, in this process."""
    environment = {name: str(value) for name, value in environment.items()}
    words = [str(word) for word in [path, *flags]]
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "argv", words):
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            if dist.is_initialized():  # it has failed
                dist.destroy_process_group()


def attempt(*args, **options):
    """What `run` returns, or None if it fails, of which it tells and takes note."""
    try:
        return run(*args, **options)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        FAILED.append(str(error).splitlines()[0])


def train(path, n, flags, **options):
    """Run a script to its end. Returns its samples a second in training, the mean over all epochs
    but the first. NaN if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out")
        text = attempt(path, n, flags, output, **options)
        if text is None:
            return math.nan
        rates = re.findall(r"^epoch .* (\d+) images/s$", text, re.M)  # a small script's
        if (output / "metrics.csv").exists():
            rows = csv.DictReader((output / "metrics.csv").open())
            rates = [row["samples_per_second"] for row in rows]
        return statistics.harmonic_mean(map(float, rates[1:]))


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

"""The tables of articles on data-parallel training, measured on this machine, as Markdown.

python benchmarks/articles.py                  # all: a quarter of an hour on two cores
python benchmarks/articles.py --quick          # fewer rows, one run each: two minutes
python benchmarks/articles.py ways start       # these
    ways      one process, DataParallel, DDP by spawn and by torchrun, one process per machine,
              two machines
    resnet18  the same with a larger model
    inputs    images 8 and 24 times as large, in memory and from files
    start     spawn, torchrun, mp.Process and fork: seconds until the first step
    device    data that is kept on the device, and data that each batch brings there
    workers   loader workers and CPUs, for JPEG files

It runs train_*.py unchanged: on one GPU, two, and all of them. Without a GPU, processes of the CPU
take their place, with a thread each. A row has the command that it ran, to be typed in the folder
of train_*.py; only --output, a new folder each time, and --init-method, a file in it, are left out.

On two machines, type the same on both but for --node-rank. A is the first one's name:
python benchmarks/articles.py ways --hosts A B --node-rank 0
python benchmarks/articles.py ways --hosts A B --node-rank 1
"""

import argparse
import contextlib
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import (
    FAILED,
    GPUS,
    NO_TIME,
    ROOT,
    end_on_sigterm,
    end_part,
    row,
    run_commands,
    seconds_left,
    spread,
    table,
    two_namespaces,
)
from make_images import SIZES, make_folder

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
NO_WORKERS = [] if GPUS else ["--workers", 0]  # they would take the CPUs from the training
TWO_WORKERS = ["--workers", 2]
ONE_THREAD = [] if GPUS else ["OMP_NUM_THREADS=1"]
JOINS_BY_PORT = {"train_ddp_spawn.py", "train_ddp_multigpu_proc.py", "benchmarks/start_by.py"}
# By how much a loss, relatively, and an accuracy may differ. Batch norm amplifies rounding.
ROUNDING = {"net": (0.005, 0.002), "resnet18": (0.03, 0.02)}
COLUMNS = ["", "seconds an epoch", "images/s", "x one process", "loss", "accuracy"]
COLUMNS += ["peak memory, MiB", "a batch", "command"]


# ---- A row of a table ----------------------------------------------------------------------------
@dataclass
class Run:
    """What one run of a job has shown."""

    losses: list[float]  # of each epoch, as are the accuracies
    accuracies: list[float]
    seconds: float  # of the second epoch's training
    speed: float  # its images per second
    dropped: int  # images that an epoch leaves out, as they make no whole batch
    memory: list[int]  # MiB at most, of each GPU, or of each process that trains

    def scores(self):
        return f"losses {self.losses} and accuracies {self.accuracies}"


@dataclass
class Job:
    """A row: what to run, and what its runs have shown."""

    name: str
    commands: list[list]  # one per machine. The first one is printed
    processes: int = 1  # that train, on all machines together
    gpus_each: int = 1  # over which DataParallel splits the share of each
    is_launcher: bool = False  # the command starts the processes that train
    prefixes: list[list] = field(default_factory=lambda: [[]])  # of each machine, not printed
    runs: list[Run] = field(default_factory=list)

    def flag(self, name, default):
        words = self.commands[0]
        return words[words.index(name) + 1] if name in words else default

    def images(self):
        return self.flag("--dataset", ""), self.flag("--image-size", 32)

    def batch_size(self):
        return int(self.flag("--batch-size", 64))

    def split(self):
        """How many images of a batch each GPU, or each process, gets."""
        share = torch.arange(self.batch_size() // self.processes)
        return [len(part) for part in share.chunk(self.gpus_each)] * self.processes

    def command(self):
        text = " ".join(map(str, self.commands[0])).replace(f"{ROOT}{os.sep}", "")
        if len(self.commands) == 1:
            return f"`{text}`"
        gpus = [word for word in self.commands[1] if str(word).startswith("CUDA_VISIBLE_DEVICES=")]
        return f"`{text}`, and with `{' '.join([*gpus, '--node-rank 1'])}`"


def start(job, until=None):
    """Run a job's commands to their end, or until one prints `until`. Returns what they printed,
    None if one has failed or no time was left; after how many seconds; the peak memory of each
    device."""
    programs = {"python": [sys.executable]}
    programs["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for prefix, command in zip(job.prefixes, job.commands, strict=True):
            words = [part for word in command for part in programs.get(word, [word])]
            words += ["--output", Path(folder, "out")]
            if JOINS_BY_PORT & {*words} and "--init-method" not in words:
                words += [
                    "--init-method",
                    f"file://{folder}/rendezvous",
                ]  # another may use the port
            lines.append([*prefix, "env", *words])
        with PeakMemory(job.is_launcher) as memory:
            log, unbuffered = Path(folder, "log"), {"PYTHONUNBUFFERED": "1"}
            done = run_commands(lines, log, until, seconds_left(), unbuffered, memory.look, ROOT)
    if done.status == "failed":
        print(f"{job.name}: {job.command()}\n{done.text}", file=sys.stderr, flush=True)
        FAILED.append(f"{job.name}: {job.command()}")
    elif done.status == "no time":
        NO_TIME.append(f"{job.name}: {job.command()}")
    return done.text if done.status == "done" else None, done.seconds, memory.peaks()


def measure(job):
    """Run a job once; what it has shown is added to job.runs. Returns whether it has ended well."""
    text, _, memory = start(job)
    if text is None:
        return False
    epochs = re.findall(r"^epoch \d+: loss (\S+) accuracy (\S+) (\d+) images/s$", text, re.M)
    processes = {int(number) for number in re.findall(r"rank \d+ of (\d+)", text)} or {1}
    if len(epochs) < 2 or processes != {job.processes}:
        FAILED.append(f"{job.name}: {len(epochs)} epochs on {processes} processes")
        return False
    losses, accuracies, speeds = zip(*(map(float, numbers) for numbers in epochs))
    images = int(re.search(r"^(\d+) training images", text, re.M)[1])
    steps = images // job.processes // (job.batch_size() // job.processes)
    trained = steps * job.batch_size()
    seconds, dropped = trained / speeds[1], images - trained
    job.runs.append(Run([*losses], [*accuracies], seconds, speeds[1], dropped, memory))
    return True


def sum_text(parts):
    """32 + 32; of many equal ones, 8 x 8."""
    if len(parts) > 4 and len(set(parts)) == 1:
        return f"{len(parts)} x {parts[0]}"
    return " + ".join(map(str, parts)) or "-"


def print_row(job, first):
    """`first` is the job of one process with the same images."""
    last, speeds = job.runs[-1], [run.speed for run in job.runs]
    times = statistics.median(speeds) / statistics.median(run.speed for run in first.runs)
    row(
        job.name,
        spread([run.seconds for run in job.runs], 2),
        spread(speeds, 0),
        f"{times:.2f}",
        f"{last.losses[-1]:.4f}",
        f"{last.accuracies[-1]:.4f}",
        sum_text(last.memory),
        f"{sum_text(job.split())}, {last.dropped} dropped",
        job.command(),
    )


def print_table(jobs, rounds, *notes):
    """Run jobs, and print the row of each as soon as it is there."""
    table(GPUS, *COLUMNS)
    done, firsts = [], {}
    for job in jobs:
        if all(measure(job) for _ in range(rounds)):  # one that fails is not repeated
            done.append(job)
            print_row(job, firsts.setdefault(job.images(), job))
    print(f"\n{number_of_runs(rounds)} of each row. {compare(done)}", *notes, sep="\n")
    print(flush=True)


def number_of_runs(rounds):
    return "One run" if rounds == 1 else f"{rounds} runs"


def compare(jobs):
    """A sentence on whether all rows of the same training have the same losses and accuracies in
    each epoch. Those that have not are failures, too."""
    firsts, unequal, largest_loss, largest_accuracy = {}, [], 0.0, 0.0
    for job in jobs:
        first = firsts.setdefault(training(job), job).runs[0]
        relative, most = ROUNDING[job.flag("--model", "net")]
        for run in job.runs:
            losses = [abs(a - b) for a, b in zip(run.losses, first.losses, strict=True)]
            accuracies = [abs(a - b) for a, b in zip(run.accuracies, first.accuracies, strict=True)]
            limits = [0.0002 + relative * abs(loss) for loss in first.losses]  # of printed digits
            equal = all(loss <= limit for loss, limit in zip(losses, limits))  # as nan is not
            if not equal or max(accuracies) > most:
                unequal.append(f"{job.name} has {run.scores()}, and not {first.scores()}")
            largest_loss = max(largest_loss, *losses)
            largest_accuracy = max(largest_accuracy, *accuracies)
    if unequal:
        FAILED.extend(unequal)
        return f"**They differ by more than rounding: {'; '.join(unequal)}.**"
    kinds = "" if len(firsts) == 1 else f" within each of {len(firsts)} trainings"
    text = f"Losses and accuracies are equal up to rounding{kinds}"
    return f"{text} (at most {largest_loss:.4f} and {largest_accuracy:.4f})."


def training(job):
    """What decides which losses a job has."""
    model = job.flag("--model", "net")
    # Batch norm computes its statistics over each device's share of a batch, and these have other
    # images: of two ranks, each gets every second one; of two GPUs of DataParallel, each a half.
    shares = () if model == "net" else (job.processes, job.gpus_each)
    return model, job.batch_size(), shares, *job.images()


# ---- Peak memory ---------------------------------------------------------------------------------
class PeakMemory:
    """Of each GPU, by nvidia-smi twice a second: all that is in use, with contexts and what torch
    keeps for later, less what was in use before. Of each process on a CPU, what Linux has recorded
    (VmHWM), Python and torch included. Those that only start others, and loader workers, do not
    count."""

    def __init__(self, is_launcher):
        self.is_launcher = is_launcher
        self.before, self.found = {}, {}  # MiB: of GPUs; of GPUs or processes
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch_gpus)

    def __enter__(self):
        if GPUS and shutil.which("nvidia-smi"):
            self.before = gpu_memory()
            self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def watch_gpus(self):
        while not self.ended.wait(0.5):
            for gpu, used in gpu_memory().items():
                self.found[gpu] = max(self.found.get(gpu, 0), used - self.before.get(gpu, 0))

    def look(self, pids):
        """At the processes that train, of commands with these process ids."""
        for pid in [] if GPUS else [rank for pid in pids for rank in self.ranks(pid)]:
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                status = Path(f"/proc/{pid}/status").read_text()
                self.found[pid] = int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) // 1024

    def ranks(self, pid):
        if not self.is_launcher:
            return [pid]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [child for child in children if is_rank(child)]
        return []

    def peaks(self):
        return [mib for mib in self.found.values() if mib > 50]  # the other GPUs are idle


def gpu_memory():
    """MiB in use on each GPU of this machine."""
    words = "nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits".split()
    text = subprocess.run(words, capture_output=True, text=True).stdout
    return {int(gpu): int(used) for gpu, used in re.findall(r"^(\d+), (\d+)$", text, re.M)}


def is_rank(pid):
    """Whether it is a script or was spawned by one; a resource tracker, for example, is not."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text()
        return "train_" in words or "spawn_main" in words
    return False


# ---- The ways to start a training ----------------------------------------------------------------
def one_process(flags, name="one process", setting=ONE_THREAD):
    return Job(name, [[*setting, "python", "train_single.py", *flags]])


def data_parallel(n, flags):
    words = [*visible(0, n), "python", "train_dp.py", *flags]
    return Job(f"DataParallel, {n} GPUs", [words], gpus_each=n)


def by_spawn(n, flags, script="train_ddp_spawn.py", name="spawn", method=()):
    words = [*ONE_THREAD, "python", script, *method, "--nproc-per-node", n, *flags]
    return Job(f"DDP by {name}, {n} processes", [words], n, is_launcher=True)


def by_torchrun(n, flags):
    words = [*ONE_THREAD, "torchrun", "--standalone", "--nproc-per-node", n]
    words += ["train_ddp_torchrun.py", *flags]
    return Job(f"DDP by torchrun, {n} processes", [words], n, is_launcher=True)


def one_per_machine(n, flags):
    words = ["python", "train_ddp_multigpu_proc.py", *flags]
    return Job(f"one process per machine, {n} GPUs", [words], gpus_each=n)


def visible(first, n):
    """The setting that gives a process n of this machine's GPUs."""
    if not GPUS:
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
    names = ",".join(names.split(",")[first : first + n])
    return [f"CUDA_VISIBLE_DEVICES={names}"]


@dataclass
class Machine:
    """One of two machines, or what takes its place."""

    rank: int
    prefix: list = field(default_factory=list)  # how a command gets there; it is not printed
    setting: list = field(default_factory=lambda: [*ONE_THREAD])  # it is


@dataclass
class Machines:
    """Two of them."""

    what: str  # they are, which is said below the table
    address: str  # of the first
    each: int  # how many GPUs, or processes, each of them has
    started: list[Machine]  # those on which this program starts commands
    port: int | None = None  # if the default ones may be in use

    def jobs(self, flags):
        torchrun, alone = [], []
        for machine in self.started:
            words = [*machine.setting, "torchrun", "--nnodes", 2, "--node-rank", machine.rank]
            words += ["--master-addr", self.address]
            words += ["--master-port", self.port] if self.port else []
            words += ["--nproc-per-node", self.each, "train_ddp_torchrun.py", *flags]
            torchrun.append(words)
            words = [*machine.setting, "python", "train_ddp_multigpu_proc.py", "--nnodes", 2]
            words += ["--node-rank", machine.rank]
            words += ["--init-method", f"tcp://{self.address}:{self.port or 23456}", *flags]
            alone.append(words)
        prefixes = [machine.prefix for machine in self.started]
        name = "two machines, {}"
        return [
            Job(name.format("torchrun"), torchrun, 2 * self.each, 1, True, prefixes),
            Job(
                name.format("one process each"),
                alone,
                2,
                max(1, GPUS and self.each),
                False,
                prefixes,
            ),
        ]


@contextlib.contextmanager
def two_machines(args):
    """Machines, or None where there cannot be any."""
    count = all_devices(args)
    each, local = count // 2, [visible(0, count // 2), visible(count // 2, count // 2)]
    if args.hosts:
        what = f"The two machines are {' and '.join(args.hosts)}; memory is the first one's."
        yield Machines(what, args.hosts[0], count, [Machine(args.node_rank)])
    elif count < 2:
        yield None
    elif can_make_namespaces():
        what = "The two machines are network namespaces on this one, joined by a virtual cable; "
        what += "`ip netns exec` has run a command in each."
        with two_namespaces() as names:
            started = []
            for i, name in enumerate(names):
                words = [f"GLOO_SOCKET_IFNAME=v{i}", f"NCCL_SOCKET_IFNAME=v{i}"]
                # Otherwise, NCCL would take InfiniBand, which is no namespace's, or shared memory.
                words += [f"NCCL_HOSTID={i}", "NCCL_NET=Socket", "NCCL_IB_DISABLE=1"]
                prefix = ["ip", "netns", "exec", name, "env", *words]
                started.append(Machine(i, prefix, [*ONE_THREAD, *local[i]]))
            yield Machines(what, "10.77.0.1", each, started)
    else:
        what = "The two machines are both this one: root would have got network namespaces."
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        started = [Machine(i, [], [*ONE_THREAD, *local[i]]) for i in (0, 1)]
        yield Machines(what, "127.0.0.1", each, started, port)


def can_make_namespaces():
    if os.geteuid() or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0


# ---- The tables ----------------------------------------------------------------------------------
def all_devices(args):
    """How many GPUs there are, or processes that take their place."""
    return GPUS or args.processes


def repeats(args, usual):
    """How often each row is run."""
    return args.rounds or (1 if args.quick else usual)


def common_flags(args):
    """Of all rows: two epochs, and a batch of 64, or the next size that all of them can split."""
    most = all_devices(args)
    of_machines = 2 * most if args.hosts else max(1, most // 2) * 2
    multiple = math.lcm(2, most, of_machines)
    batch = math.ceil(64 / multiple) * multiple
    return [*([] if batch == 64 else ["--batch-size", batch]), "--epochs", 2, *NO_WORKERS]


def on_this_machine(args, flags):
    """Jobs, and what is left out."""
    most = all_devices(args)
    counts = sorted({n for n in (2, most) if 1 < n <= most})
    jobs, left_out = [one_process(flags)], []
    if not GPUS and len(CPUS) > 1 and not args.quick:
        threads = [f"OMP_NUM_THREADS={len(CPUS)}"]
        jobs.append(one_process(flags, f"one process, {len(CPUS)} threads", threads))
    if GPUS > 1:
        jobs += [data_parallel(n, flags) for n in counts]
    if most > 1:
        jobs.append(by_spawn(most, flags))
        jobs += [by_torchrun(n, flags) for n in counts]
        if NO_WORKERS:  # with them, too: how they start depends on how their rank was started
            loaders = [*flags[: -len(NO_WORKERS)], *TWO_WORKERS]
            with_workers = [by_spawn(most, loaders), by_torchrun(most, loaders)]
            for job in with_workers:
                job.name += ", 2 workers each"
            jobs += with_workers
    else:
        left_out.append("DDP")
    if GPUS > 1:
        jobs.append(one_per_machine(GPUS, flags))
    else:
        left_out.append("DataParallel, also in one process per machine")
    return jobs, left_out


def each_way(args, flags, rounds):
    """Print the table of a training that is started in each way."""
    flags = [*flags, *common_flags(args)]
    with two_machines(args) as machines:
        across = list(machines.jobs(flags)) if machines else []
        if args.quick:
            across = across[:1]
        if args.node_rank == 1:  # it only takes its part, as often as the first one
            print(f"The table is on {args.hosts[0]}.\n", flush=True)
            for job in across:
                all(start(job)[0] is not None for _ in range(rounds))
            return
        jobs, left_out = on_this_machine(args, flags)
        notes = [machines.what] if machines else []
        if not machines:
            left_out.append("two machines (use --hosts)")
        if left_out:
            gpus = f"{GPUS} GPU" if GPUS else "no GPU"
            notes.append(f"Left out, as this machine has {gpus}: {', '.join(left_out)}.")
        print_table([*jobs, *across], rounds, *notes)


def ways(args):
    print("### A small network, started in each way\n")
    each_way(args, ["--dataset", args.dataset], repeats(args, 3))


def resnet18(args):
    print("### ResNet-18, started in each way\n")
    if GPUS:
        data = args.dataset
    else:  # it takes a CPU long
        data = make_data(args, "small", (32, 32, 95, 7), 512, different=512)
    each_way(args, ["--dataset", data, "--model", "resnet18"], repeats(args, 1))
    print("The small scripts train with SGD and do not flip images; articles have Adam and flips.")
    print("With batch norm, the loss depends on the size of the shares, over which it computes its")
    print("statistics.\n", flush=True)


def image_sides(*times):
    """{how many times as many pixels: side of the images}. Smaller ones for CPUs."""
    return {n: round((32 if GPUS else 16) * math.sqrt(n)) for n in times}


def inputs(args):
    print("### Larger images, in memory and from JPEG files\n")
    photos = make_data(args, "photos", SIZES["ImageNet"], 512, different=64)
    sides = image_sides(1, 8, 24)
    most, jobs = all_devices(args), []
    for where, data in ("memory", "synthetic"), ("JPEG files", photos):
        for times, side in sides.items():
            if args.quick and (where != "memory" or times == 24):
                continue
            if where != "memory" and times == 8:
                continue  # decoding takes longest, whatever size the images are scaled to
            flags = ["--dataset", data, "--image-size", side, *common_flags(args)]
            own = [one_process(flags)]
            if GPUS > 1 and where == "memory":
                own.append(data_parallel(most, flags))
            if most > 1:
                own.append(by_torchrun(most, flags))
            for job in own:
                job.name = f"x {times}, {where}, {job.name}"
            jobs += own
    note = (
        f"x 1 are images of {sides[1]} pixels, x 8 of {sides[8]}, x 24 of {sides[24]}. The files "
    )
    print_table(
        jobs, repeats(args, 1), note + "have 500 x 375 pixels, whatever size they are scaled to."
    )


def starts(args):
    print("### Seconds until the first step\n")
    n, flags = all_devices(args), ["--dataset", "synthetic", *common_flags(args)]
    jobs, notes = [one_process(flags), by_spawn(n, flags), by_torchrun(n, flags)], []
    start_by, process = "benchmarks/start_by.py", "mp.Process and forkserver"
    jobs.append(by_spawn(n, flags, start_by, process, ["forkserver"]))
    if GPUS:
        notes.append("Left out: fork, as a process that has used CUDA cannot be forked.")
    else:
        jobs.append(by_spawn(n, flags, start_by, "fork", ["fork"]))
    times, until = repeats(args, 3), "starts with epoch 0"
    table(GPUS, "", "seconds", "command")
    for job in jobs:
        seconds = [found[1] for found in (start(job, until) for _ in range(times)) if found[0]]
        if seconds:
            row(job.name, spread(seconds, 1), job.command())
    print(f"\n{number_of_runs(times)} of each row, until it printed `{until}`.", *notes, sep="\n")
    print(flush=True)


def device(args):
    print("### Data on the device, and data that each batch brings there\n")
    jobs = []
    for times, side in image_sides(1, 24).items():
        flags = ["--dataset", "synthetic", "--image-size", side, "--epochs", 2]
        kept = [*ONE_THREAD, "python", "benchmarks/keep_on_device.py", *flags, "--workers", 0]
        jobs.append(one_process([*flags, "--workers", 0], f"x {times}, batch by batch"))
        if GPUS or not args.quick:
            jobs.append(one_process([*flags, "--workers", 2], f"x {times}, by two workers"))
        jobs.append(Job(f"x {times}, kept on the device", [kept]))
    note = "Without a GPU, the rows differ only in how a batch is put together: of single images, "
    note += "in which the first one does it, or by one call."
    print_table(jobs, repeats(args, 1), *([] if GPUS else [note]))


def workers(args):
    print("### Loader workers and CPUs, for JPEG files\n")
    photos = make_data(args, "photos", SIZES["ImageNet"], 512, different=64)
    flags = ["--dataset", photos, "--batch-size", 32, "--epochs", 2]
    limits, notes, jobs = sorted({n for n in (1, 2, len(CPUS)) if n <= len(CPUS)}), [], []
    if GPUS:
        limits = limits[-1:]  # each start takes long enough
    if not shutil.which("taskset"):
        limits, notes = limits[-1:], ["Left out, as there is no `taskset`: fewer CPUs."]
    for n in limits[-1:] if args.quick else limits:
        setting = ["taskset", "-c", ",".join(map(str, CPUS[:n]))] if n < len(CPUS) else []
        for count in (0, 2) if args.quick else (0, 1, 2, 4, 8):
            name = f"{count} workers, {n} CPU{'s' * (n > 1)}"
            own = [*flags, "--workers", count]
            jobs.append(one_process(own, name, [*ONE_THREAD, *setting]))
    print_table(jobs, repeats(args, 1), "The factor is that over the first row.", *notes)


def make_data(args, name, size, count, different):
    """The path of a folder of JPEG files, which is made if it is not there."""
    folder = args.data_dir / name
    if not folder.exists():
        unfinished = args.data_dir / f"{name}-{os.getpid()}"
        make_folder(unfinished, size, count, 64, different)
        unfinished.rename(folder)
    return folder


PARTS = {"ways": ways, "resnet18": resnet18, "inputs": inputs, "start": starts, "device": device}
PARTS |= {"workers": workers}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer rows, one run of each")
    parser.add_argument("--rounds", type=int, help="runs of each row; default: 3 or 1, by part")
    parser.add_argument("--dataset", default="synthetic", help="of ways and resnet18: or cifar10")
    parser.add_argument("--processes", type=int, default=2, help="where there is no GPU")
    parser.add_argument("--hosts", nargs=2, metavar="HOST", help="two machines")
    parser.add_argument("--node-rank", type=int, choices=(0, 1), help="of this one of --hosts")
    data = ROOT / "data" / "articles"
    parser.add_argument("--data-dir", type=Path, default=data, help="JPEG files are made here")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if bool(args.hosts) != (args.node_rank is not None):
        parser.error("--hosts and --node-rank belong together")
    if args.hosts and not set(args.parts) <= {"ways", "resnet18"}:
        parser.error("--hosts is for the parts ways and resnet18")
    if not args.parts:
        args.parts = ["ways", "resnet18"] if args.hosts else list(PARTS)
        if args.quick:
            args.parts.remove("resnet18")  # takes longest
    return args


def main():
    args = parse_args()
    end_on_sigterm()
    for name in args.parts:
        PARTS[name](args)
    end_part()


if __name__ == "__main__":
    main()

"""Starts the script on one process, then on N, and waits for its end, a failure, or a hang."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from .kept.made import remove_made, stop_groups
from .notes import Notes, Step
from .script import FOLDER

SILENT = 5  # seconds without a sign of life from a process, which has one each second: it is busy
LONGEST = 10  # times --wait
LINES = 40  # of what a process has printed
RANKS = """RANK LOCAL_RANK ROLE_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK
OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMIX_RANK MPI_LOCALRANKID MV2_COMM_WORLD_RANK
MV2_COMM_WORLD_LOCAL_RANK""".split()
SIZES = """WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE SLURM_NTASKS SLURM_NPROCS
SLURM_NTASKS_PER_NODE SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE
PMI_SIZE MPI_LOCALNRANKS MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_SIZE""".split()
NODE_LISTS = "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"


class NothingCompared(Exception):
    """Its text says why."""


def launch(words, env, log):
    """Start a process, with what it starts in a group of its own."""
    with open(log, "wb") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        return subprocess.Popen(words, env=env, start_new_session=True, **streams)


def free_port():
    """Below those of outgoing connections, one of which could take it before the script does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment(rank, nproc, port):
    """What torchrun would set for each process, and Slurm and MPI. SLURM_JOB_ID stays as it is, as
    scripts take it for a sign that they are in a job."""
    values = {
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "check",
        "PYTHONHASHSEED": rank + 1,  # sets of names have another order on each rank
        "SLURM_NNODES": 1,
        "SLURM_JOB_NUM_NODES": 1,
        "SLURM_NODEID": 0,
        "SLURM_TASKS_PER_NODE": nproc,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "OMPI_COMM_WORLD_NODE_RANK": rank,
    }
    values |= dict.fromkeys(NODE_LISTS, os.environ.get("SLURMD_NODENAME", "localhost"))
    values |= dict.fromkeys(RANKS, rank) | dict.fromkeys(SIZES, nproc)
    return {name: str(value) for name, value in values.items()}


def visible_gpus(nproc, needed, count=None):
    """The environment in which a run sees so many GPUs, of those that this process sees; none if
    they are fewer than the larger run needs. AMD's have a variable of their own."""
    names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    count = torch.cuda.device_count() if count is None else count
    if count < needed:
        return dict(zip(names, ("", "-1")))  # "" is all to HIP
    visible = [os.environ[name] for name in reversed(names) if os.environ.get(name)]
    gpus = visible[0].split(",") if visible else [str(gpu) for gpu in range(count)]
    return dict.fromkeys(names, ",".join(gpus[:nproc]))


class Run:
    """One run of the script, on so many processes."""

    def __init__(self, args, folder, name, nproc):
        self.args, self.folder, self.name, self.nproc = args, folder, name, nproc
        self.spawns = False  # whether the script starts its processes itself
        self.processes, self.seconds = [], 0.0
        self.side = "on one process" if nproc == 1 else f"on {nproc} processes"
        self.side += " again" * (name == "again")

    def say(self, text):
        print(f"ddp_check: {self.side}: {text}", file=sys.stderr, flush=True)

    def files(self, suffix):
        return [f"{self.folder}/{self.name}.{rank}.{suffix}" for rank in range(self.nproc)]

    def notes(self):
        return [Notes(self.folder, self.name, rank) for rank in range(self.nproc)]

    def start(self, **options):
        """Start its processes, which wait for a file NAME.go."""
        Path(f"{self.folder}/{self.name}.go").unlink(missing_ok=True)
        self.options, port = options, free_port()
        options = vars(self.args) | {"folder": self.folder, "run": self.name} | options
        env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        env["WANDB_MODE"] = "disabled"  # it would send both runs
        env |= visible_gpus(self.nproc, self.args.nproc, 0 if self.args.cpu else None)
        env.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(1 if self.spawns else self.nproc):
            path = f"{self.folder}/{self.name}.{rank}"
            rank_env = env if self.spawns else env | environment(rank, self.nproc, port)
            own = {"spawns": self.spawns, "flags": self.flags(rank)}
            rank_env = rank_env | {"DDP_CHECK": json.dumps(options | own)}
            process = launch([sys.executable, FOLDER], rank_env, f"{path}.log")
            process.file = Path(f"{path}.pid")  # for the janitor
            process.file.write_text(str(process.pid))
            self.processes.append(process)

    def flags(self, rank):
        flags = self.args.flags + (shlex.split(self.args.one) if self.name != "all" else [])
        for key, value in {"{run}": self.name, "{n}": self.nproc, "{rank}": rank}.items():
            flags = [flag.replace(key, str(value)) for flag in flags]
        return flags

    def stop(self):
        """End its processes, and what they have started."""
        stop_groups([process.pid for process in self.processes])
        for process in self.processes:
            process.wait()
            process.file.unlink(missing_ok=True)  # the number may soon be another process's
        self.processes = []

    def run(self):
        """The notes that its processes take, to their end or to --steps. What they have created is
        removed."""
        self.began = self.noted = self.moved = time.monotonic()
        self.sizes, self.frames, self.shown = None, None, 0
        open(f"{self.folder}/{self.name}.go", "w").close()
        try:
            failed = self.wait()
        finally:
            self.stop()
            for text in remove_made(self.folder):
                print(f"ddp_check: {text}", file=sys.stderr)
        if os.path.exists(f"{self.folder}/refused"):
            raise NothingCompared(refusal(self.folder, self.args.flags))
        if os.path.exists(f"{self.folder}/spawns"):
            os.remove(f"{self.folder}/spawns")
            self.spawns = True
            self.start(**self.options)
            return self.run()
        if failed:
            self.show_failure(failed)
        self.seconds = round(time.monotonic() - self.began, 1)
        self.say(f"{self.seconds:.0f} s")
        return self.notes()

    def wait(self):
        """Until all have ended, or one has failed and the others wait for it, or all hang. Returns
        {rank: exit status} of those that have failed."""
        ends = [f"{self.folder}/refused", f"{self.folder}/spawns"]
        while any(process.poll() is None for process in self.processes):
            time.sleep(0.2)
            self.look()
            now, wait = time.monotonic(), self.args.wait
            are_done = all(map(os.path.exists, self.files("done")))  # they have made --steps
            if any(map(os.path.exists, ends)) or are_done:
                return {}
            if now - self.noted > 3 and any(process.poll() for process in self.processes):
                break
            if now - self.moved > wait or now - self.noted > LONGEST * wait:
                self.say(f"nothing new for {wait:.0f} s; if it is only slow, --wait {5 * wait:.0f}")
                return {}
        statuses = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: status for rank, status in statuses.items() if status}

    def look(self):
        """Have they noted something, or moved to another line, or are they busy in C, which keeps
        Python from saying where they are?"""
        now = time.monotonic()
        found = [each for each in map(text_and_age, self.files("where")) if each]
        sizes = [os.path.getsize(file) for file in self.files("notes") if os.path.exists(file)]
        if sizes != self.sizes:
            self.sizes, self.noted = sizes, now
        texts = [text for text, _ in found]
        is_busy = any(age > SILENT for _, age in found)
        if texts != self.frames or is_busy or self.noted == now:
            self.frames, self.moved = texts, now
        seconds = int(now - self.began)
        if texts and seconds >= self.shown + 10:
            self.shown = seconds
            first, line, *_ = texts[0].split(" < ")
            self.say(f"{seconds} s: step {first.split()[0]} of {self.args.steps}, at {line}")

    def show_failure(self, failed):
        """The end of what the first rank that failed has printed: one that lost no connection to
        another."""
        ends = {rank: notes.end() for rank, notes in enumerate(self.notes())}
        rank = ([rank for rank in failed if "Connection" not in ends[rank]] or list(failed))[0]
        text, _ = text_and_age(f"{self.folder}/{self.name}.{rank}.log")
        text = re.sub(rf'  File "{re.escape(FOLDER)}.*\n(    .*\n)*', "", text)  # our own frames
        lines = [line.rpartition("\r")[2] for line in text.splitlines()][-LINES:]
        how = f"exit status {failed[rank]}"
        if failed[rank] < 0:
            how = f"killed by {signal.Signals(-failed[rank]).name}"
            how += ": is there too little memory?" * (failed[rank] == -signal.SIGKILL)
        self.say("\n".join([f"rank {rank} failed ({how}); it printed:", *lines]))


def text_and_age(path):
    """Of a file, and its seconds; None if it is gone, as the process has just ended."""
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read(), time.time() - os.fstat(file.fileno()).st_mtime


class BothRuns:
    def __init__(self, args, folder):
        self.folder, self.options = (
            folder,
            {"layout": "turns", "scaled": [], "turns": []},
        )  # see command.check
        self.one = Run(args, folder, "one", 1)
        self.all = Run(args, folder, "all", args.nproc)
        self.again = Run(args, folder, "again", 1)
        gpus, self.too_few_gpus = torch.cuda.device_count(), ""
        if 0 < gpus < args.nproc and not args.cpu:
            self.too_few_gpus = f"{gpus} GPU for {args.nproc} processes: all run on CPUs"

    def seconds(self):
        return {run.side: run.seconds for run in (self.one, self.all, self.again) if run.seconds}

    def run_both(self):
        """The notes of one process and of the ranks. All processes start now, as that takes
        longest; those of the second run wait for the first."""
        remove_notes(self.folder)
        try:
            self.one.start(**self.options)
            self.all.start(**self.options)
            one = self.one.run()[0]
            if not os.path.exists(f"{self.folder}/one.draws"):
                raise NothingCompared(f"the run on one process was cut off: {one.end()}")
            if not one[Step]:
                raise NothingCompared(f"no optimizer.step() on one process; then {one.end()}")
            return one, self.all.run()
        finally:
            self.one.stop()
            self.all.stop()

    def run_again(self):
        """The notes of a second run on one process."""
        self.again.start(**self.options)
        return self.again.run()[0]


def remove_notes(folder):
    for name in os.listdir(folder):
        if name != "made":  # of downloads
            os.remove(f"{folder}/{name}")


def refusal(folder, flags):
    """In words: what the script was about to do, and the remedy."""
    with open(f"{folder}/refused") as file:
        refused = json.load(file)
    remedy = refused.get("remedy") or new_output(refused["path"], flags)
    if steps := refused.get("steps"):
        remedy += f"; or end before: --steps {steps}"
    return f"{refused['line']}\n  {refused['text']}\n  {remedy}"


def new_output(path, flags):
    for flag in flags:
        name, _, value = flag.rpartition("=")
        if value and (path + os.sep).startswith(os.path.realpath(value) + os.sep):
            new = f"{name}={value}-{{run}}" if name else f"{value}-{{run}}"
            return f"give it a new output: {new} for {flag}"
    return "give it a new output, as by --output {run}, or start it in another folder"

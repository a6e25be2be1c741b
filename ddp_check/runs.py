"""Starts the script, on one process or on N, and waits for its end, a failure, or a hang."""

import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .kept.made import remove_made, stop_groups
from .notes import TRIED, Notes
from .progress import Progress, refusal, why_it_failed
from .script import FOLDER

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


def visible_gpus(nproc, needed, cpu=False):
    """The environment in which a run sees so many GPUs, of those that this process sees; none by
    --cpu, or if they are fewer than the larger run needs: -1 is none, and a script may count how
    many there are. AMD's have a variable of their own."""
    names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    if cpu or count < needed:
        return dict.fromkeys(names, ",".join(["-1"] * nproc))
    visible = [os.environ[name] for name in reversed(names) if os.environ.get(name)]
    gpus = visible[0].split(",") if visible else [str(gpu) for gpu in range(count)]
    return dict.fromkeys(names, ",".join(gpus[:nproc]))


@dataclass
class Options:
    """Of a start, for all of its processes, besides the command's flags."""

    steps: int
    layout: str = "turns"  # or "blocks": rank r has the r-th block of a batch
    turns: list = field(default_factory=list)  # [line, function] of draws that the ranks take so
    scaled: list = field(default_factory=list)  # loaders that give one process all ranks' batches
    scales: bool = True  # there may be such
    cuts: bool = True  # a batch size per process is cut into the ranks' parts
    prepared: bool = True  # one process's loaders of a framework, too, have all ranks' batches
    lines: int = 0  # steps in which the values of lines are noted


class Run:
    """One run of the script, on so many processes."""

    def __init__(self, args, folder, name, nproc):
        self.args, self.folder, self.name, self.nproc = args, folder, name, nproc
        self.spawns = False  # whether the script starts its processes itself
        self.processes, self.seconds = [], 0.0  # of all its starts
        self.side = "on one process" if nproc == 1 else f"on {nproc} processes"
        self.side += " again" * (name == "again")

    def say(self, text):
        print(f"ddp_check: {self.side}: {text}", file=sys.stderr, flush=True)

    def files(self, suffix):
        return [f"{self.folder}/{self.name}.{rank}.{suffix}" for rank in range(self.nproc)]

    def notes(self):
        return [Notes(self.folder, self.name, rank) for rank in range(self.nproc)]

    def start(self, options):
        """Start its processes, which wait for a file NAME.go."""
        Path(f"{self.folder}/{self.name}.go").unlink(missing_ok=True)
        self.options, port = options, free_port()
        facts = vars(self.args) | {"folder": self.folder, "run": self.name} | asdict(options)
        env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        env["WANDB_MODE"] = "disabled"  # it would send both runs
        env |= visible_gpus(self.nproc, self.args.nproc, self.args.cpu)
        env.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(1 if self.spawns else self.nproc):
            path = f"{self.folder}/{self.name}.{rank}"
            rank_env = env if self.spawns else env | environment(rank, self.nproc, port)
            own = {"spawns": self.spawns, "flags": self.flags(rank)}
            rank_env = rank_env | {"DDP_CHECK": json.dumps(facts | own)}
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

    def run(self, count, other_options=lambda notes: None):
        """The notes that its processes take, to their end or to --steps; and with which options to
        start again, if other_options says so of these, or of the first steps'. What they have
        created is removed. `count`: which run it is, of how many."""
        progress = Progress(self, count)
        open(f"{self.folder}/{self.name}.go", "w").close()
        try:
            failed, others = self.wait(progress, other_options)
        finally:
            self.stop()
            for text in remove_made(self.folder):
                print(f"ddp_check: {text}", file=sys.stderr)
        if os.path.exists(f"{self.folder}/refused"):
            raise NothingCompared(refusal(self.folder, self.args.flags))
        if os.path.exists(f"{self.folder}/spawns"):
            os.remove(f"{self.folder}/spawns")
            self.spawns = True
            self.start(self.options)
            return self.run(count, other_options)
        notes = self.notes()
        if failed:
            self.say(why_it_failed(self, failed, notes))
        self.seconds += progress.seconds()
        self.say(f"{progress.seconds():.0f} s")
        for of_rank in notes:
            of_rank.stopped = progress.stopped
        return notes, others or other_options(notes)

    def wait(self, progress, other_options):
        """Until all have ended, or one has failed and the others wait for it, or all hang, or are
        to start again. Returns {rank: exit status} of those that have failed; and the options of
        the next start."""
        ends, is_tried = [f"{self.folder}/refused", f"{self.folder}/spawns"], False
        while any(process.poll() is None for process in self.processes):
            time.sleep(0.2)
            progress.look()
            are_done = all(map(os.path.exists, self.files("done")))  # they have made --steps
            if any(map(os.path.exists, ends)) or are_done or progress.hangs():
                return {}, None
            if progress.is_silent() and any(process.poll() for process in self.processes):
                break
            if not is_tried and progress.steps() >= TRIED:
                is_tried = True
                if others := other_options(self.notes()):
                    return {}, others
        statuses = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: status for rank, status in statuses.items() if status}, None

"""Starts the script on one process, then on N, and waits for their ends."""

import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from . import script
from .kept.janitor import stop_groups
from .kept.made import remove_made
from .notes import Notes, Step
from .waiting import Waiting


class NothingCompared(Exception):
    """Its text says why."""

    seconds = {}


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
    """What torchrun would set."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "check",
        "PYTHONHASHSEED": rank + 1,  # sets of names have another order on each rank,
    }
    return {name: str(value) for name, value in values.items()}


def visible_gpus(nproc, needed):
    """The environment in which a run sees so many GPUs, of those that this process sees; none if
    they are fewer than the larger run needs. AMD's have a variable of their own."""
    names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    if count < needed:
        return dict(zip(names, ("", "-1")))  # "" is all to HIP
    visible = [os.environ[name] for name in reversed(names) if os.environ.get(name)]
    gpus = visible[0].split(",") if visible else [str(gpu) for gpu in range(count)]
    return dict.fromkeys(names, ",".join(gpus[:nproc]))


class BothRuns:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.layout, self.scaled = "turns", []  # see command.check
        self.spawns = set()  # the runs in which the script starts its processes itself
        self.counts = {"one": 1, "all": args.nproc, "again": 1}  # of processes
        self.running = {}  # the processes of each run
        self.seconds = {}
        gpus, self.too_few_gpus = torch.cuda.device_count(), ""
        if 0 < gpus < args.nproc:
            self.too_few_gpus = f"{gpus} GPU for {args.nproc} processes: all run on CPUs"

    def run_both(self):
        """The notes of one process and of the ranks. All processes start now, as that takes
        longest; those of the second run wait for the first."""
        remove_notes(self.folder)
        try:
            self.start("one")
            self.start("all")
            self.run("one")
            one = self.notes("one")[0]
            if not os.path.exists(f"{self.folder}/one.draws"):
                self.give_up(f"the run on one process was cut off: {one.end()}")
            if not one[Step]:
                self.give_up(f"no optimizer.step() on one process; then {one.end()}")
            self.run("all")
        finally:
            self.stop("one")
            self.stop("all")
        return one, self.notes("all")

    def give_up(self, text):
        error = NothingCompared(text)
        error.seconds = self.seconds
        raise error

    def notes(self, name):
        return [Notes(self.folder, name, rank) for rank in range(self.counts[name])]

    def run_again(self):
        """The notes of a second run on one process."""
        self.start("again")
        self.run("again")
        return self.notes("again")[0]

    def start(self, name):
        """Start the processes of a run, which wait for a file NAME.go."""
        nproc, port, spawns = self.counts[name], free_port(), name in self.spawns
        processes = self.running[name] = []
        Path(f"{self.folder}/{name}.go").unlink(missing_ok=True)
        options = vars(self.args) | {"folder": self.folder, "run": name, "spawns": spawns}
        options |= {"layout": self.layout, "scaled": self.scaled, "flags": self.flags(name)}
        env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "DDP_CHECK": json.dumps(options)}
        env["WANDB_MODE"] = "disabled"  # it would send both runs
        env |= visible_gpus(nproc, self.args.nproc)
        env.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(1 if spawns else nproc):
            path = f"{self.folder}/{name}.{rank}"
            rank_env = env if spawns else env | environment(rank, nproc, port)
            process = launch([sys.executable, script.FOLDER], rank_env, f"{path}.log")
            process.file = Path(f"{path}.pid")  # for the janitor
            process.file.write_text(str(process.pid))
            processes.append(process)

    def stop(self, name):
        """End the processes of a run, and what they have started."""
        processes = self.running.pop(name, [])
        stop_groups([process.pid for process in processes])
        for process in processes:
            process.wait()
            process.file.unlink(missing_ok=True)  # the number may soon be another process's

    def flags(self, name):
        flags = self.args.flags + (shlex.split(self.args.one) if name != "all" else [])
        for key, value in {"{run}": name, "{n}": self.counts[name]}.items():
            flags = [flag.replace(key, str(value)) for flag in flags]
        return flags

    def run(self, name):
        """Run the script once, to its end or to --steps, and remove what it has created."""
        waiting = Waiting(self.args, self.folder, name, self.counts[name])
        open(f"{self.folder}/{name}.go", "w").close()
        try:
            failed = waiting.wait(self.running[name])
        finally:
            self.stop(name)
            for text in remove_made(self.folder):
                print(f"ddp_check: {text}", file=sys.stderr)
        if os.path.exists(f"{self.folder}/refused"):
            self.give_up(refusal(self.folder, self.args.flags))
        if os.path.exists(f"{self.folder}/spawns"):
            os.remove(f"{self.folder}/spawns")
            self.spawns.add(name)
            self.start(name)
            return self.run(name)
        if failed:
            waiting.show_failure(failed)
        self.seconds[waiting.side] = seconds = round(time.monotonic() - waiting.began, 1)
        waiting.say(f"{seconds:.0f} s")


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

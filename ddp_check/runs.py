"""Starts the script on one process, then on N, and waits for their ends."""

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

import torch

from . import script
from .child import SPAWNS
from .kept.made import refused, remove_made
from .notes import Notes, Step


def launch(words, env, log):
    """Start a process, with what it starts in a group of its own."""
    with open(log, "wb") as file:
        return subprocess.Popen(words, env=env, stdout=file, stderr=file, start_new_session=True)


def stop(processes):
    """End them, and what they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        process.wait()


ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@contextlib.contextmanager
def uninterrupted():
    """Until its end, Ctrl-C and other signals do nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


class BothRuns:
    def __init__(self, args, folder, layout, scaled):
        self.args, self.folder = args, folder
        self.more = {"layout": layout, "scaled": scaled}
        self.spawns = False  # the script starts its processes itself

    def run_both(self):
        """The notes of one process and of the ranks; None and why, if nothing can be compared. All
        processes start now, as that takes longest; those of the second run wait for the first."""
        sides, running = {"one": 1, "all": self.args.nproc}, {}
        try:
            for name, nproc in sides.items():
                running[name] = self.start(name, nproc)
            for name, nproc in sides.items():
                self.run(name, nproc, running[name])
                if text := refused(self.folder, self.args.flags):
                    return None, f"stopped at {text}"
                if os.path.exists(f"{self.folder}/spawns") and not self.spawns:
                    self.spawns = True  # start again, and leave that to the script
                    stop([process for processes in running.values() for process in processes])
                    return self.run_both()
                one = Notes(self.folder, "one", 0)
                if not os.path.exists(f"{self.folder}/one.draws"):
                    return None, f"the run on one process was cut off: {one.end()}"
                if not one[Step]:
                    return None, f"no optimizer.step() on one process; then {one.end()}"
        finally:
            with uninterrupted():
                stop([process for processes in running.values() for process in processes])
        return one, [Notes(self.folder, "all", rank) for rank in range(self.args.nproc)]

    def run_again(self):
        """The notes of a second run on one process."""
        processes = self.start("again", 1)
        self.run("again", 1, processes)
        return Notes(self.folder, "again", 0)

    def start(self, name, nproc):
        """The processes of a run, which wait for a file NAME.go."""
        port, processes = free_port(), []
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{self.folder}/{name}.go")
        options = vars(self.args) | {"folder": self.folder, "run": name}
        options |= self.more | {"spawns": self.spawns}
        env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        env.setdefault("OMP_NUM_THREADS", "1")
        if 0 < torch.cuda.device_count() < self.args.nproc:
            env["CUDA_VISIBLE_DEVICES"] = ""
        for rank in range(1 if self.spawns else nproc):
            options["flags"] = self.flags(name, nproc)
            own = {} if self.spawns else environment(rank, nproc, port)
            own["DDP_CHECK"] = json.dumps(options)
            log = f"{self.folder}/{name}.{rank}.log"
            processes.append(launch([sys.executable, script.FOLDER], env | own, log))
        return processes

    def run(self, name, nproc, processes):
        """Run the script once, to its end or to --steps, and remove what it has created."""
        began, self.shown = time.monotonic(), 0
        open(f"{self.folder}/{name}.go", "w").close()
        try:
            self.wait(name, nproc, processes)
        finally:
            with uninterrupted():
                stop(processes)
                ranks = *range(nproc), "parent"
                remove_made(self.folder, [Notes(self.folder, name, rank) for rank in ranks])
        print(f"ddp_check: {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)

    def show_progress(self, name, began):
        """A line every ten seconds."""
        seconds, where = int(time.monotonic() - began), f"{self.folder}/{name}.0.where"
        if seconds >= self.shown + 10 and os.path.exists(where):
            self.shown = seconds
            with open(where) as file:
                step, line, *_ = [*file.read().split(" < "), "", ""]
            text = f"step {step or 0} of {self.args.steps}, at {line}"
            print(f"ddp_check: {name}: {seconds} s: {text}", file=sys.stderr, flush=True)

    def flags(self, name, nproc):
        flags = self.args.flags + (shlex.split(self.args.one) if name != "all" else [])
        for key, value in {"{run}": name, "{n}": nproc}.items():
            flags = [flag.replace(key, str(value)) for flag in flags]
        return flags

    def wait(self, name, nproc, processes):
        """Until all have ended, or one has failed and the others wait for it, or all hang."""
        sizes, since, began = None, time.monotonic(), time.monotonic()
        side = "on one process" if nproc == 1 else f"on {nproc} processes"
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            notes = [f"{self.folder}/{name}.{rank}.notes" for rank in range(nproc)]
            now = [os.path.getsize(file) for file in notes if os.path.exists(file)]
            if now != sizes:
                sizes, since = now, time.monotonic()
            if os.path.exists(f"{self.folder}/refused"):
                return
            self.show_progress(name, began)
            idle = time.monotonic() - since
            if idle > 3 and any(process.poll() for process in processes):
                break
            if idle > self.args.wait:
                print(
                    f"ddp_check: {side}: nothing new for {self.args.wait:.0f} s; "
                    f"if it is only slow, --wait {5 * self.args.wait:.0f}"
                )
                return
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status != 0]
        if failed and SPAWNS not in statuses:  # show the first, which lost no connection to another
            ends = {rank: Notes(self.folder, name, rank).end() for rank in failed}
            first = [rank for rank in failed if "Connection" not in ends[rank]] or failed
            print(f"ddp_check: {side}: rank {first[0]} failed; the end of what it printed:")
            with open(f"{self.folder}/{name}.{first[0]}.log", errors="replace") as log:
                print(re.sub("Extension modules: .*", "", log.read())[-2500:])  # of a C++ abort

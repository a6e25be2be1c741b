"""In each process of a run: the script, watched."""

import argparse
import faulthandler
import functools
import json
import os
import sys
import threading
import time
import traceback

import torch

from .given import alike, datasets, draws, draws_python, samples
from .kept import files
from .notes import Printed
from .process import LEAVE, Process, wrap
from .script import find_script, own_lines, place, run_script, source
from .seen import steps, trace

SPAWNS = 75  # exit status of a script that would start processes itself


class Tee:
    """Text for the terminal whose lines are noted, too."""

    def __init__(self, run, stream):
        self.run, self.stream, self.text = run, stream, ""

    def write(self, text):
        if threading.current_thread() is threading.main_thread() and os.getpid() == self.run.pid:
            *lines, self.text = (self.text + text).split("\n")
            for line in lines:
                self.run.note(Printed(place()[0], line.split("\r")[-1]))
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def watch_parent(run):
    """End with check. Meanwhile, say where the script is."""
    parent, main = os.getppid(), threading.main_thread().ident
    while True:
        time.sleep(1)
        if os.getppid() != parent:
            LEAVE(1)
        frame = sys._current_frames().get(main)
        with open(f"{run.folder}/{run.name}.{run.rank}.where", "w") as file:
            file.write(f"{run.steps} < " + " < ".join(own_lines(frame)[:3]))


def run_watched(run, start):
    """Process the script with the random numbers of one process, and note what it does."""
    find_script(argparse.Namespace(**run.options))
    for watch in (draws, draws_python, alike, datasets, samples, trace, steps, files):
        watch.patch(run)
    threading.Thread(target=watch_parent, args=(run,), daemon=True).start()
    if run.rank == 0:
        sys.stdout, sys.stderr = Tee(run, sys.stdout), Tee(run, sys.stderr)
    draws.seed_all(0)
    faulthandler.enable()  # a crash prints its lines
    try:
        with trace.Trace(run):
            start()
    except SystemExit as end:
        run.end(f"SystemExit {end.code}" if end.code else "its end")
        raise
    except BaseException as error:
        at = own_lines([*traceback.walk_tb(error.__traceback__)][-1][0])[0]
        run.end(f"{type(error).__name__} at {source(at)}: {str(error)[:300]}")
        raise
    run.end("its end")


def run_spawned(function, rank, *words):
    """In each of mp.spawn's processes."""
    run_watched(Process(rank), lambda: function(rank, *words))


def control_spawn(options):
    """Watches the processes that the script starts by mp.spawn, if check knows that it does,
    and has started it once, not as one of N ranks."""
    nproc = options["nproc"] if options["run"] == "all" else 1

    @wrap(torch.multiprocessing, "spawn")
    def spawn(original, fn, args=(), nprocs=1, *others, **more):
        if not options["spawns"]:
            open(f"{options['folder']}/spawns", "w").close()
            LEAVE(SPAWNS)
        if nprocs != nproc:
            text = f"the script starts {nprocs} processes by mp.spawn, not {nproc}: give it their "
            print(f"ddp_check: {text}number in a flag, as {{n}}", flush=True)
            LEAVE(2)
        fn = functools.partial(run_spawned, fn)
        return original(fn, args, nprocs, *others, **more)


def child():
    """In each process that check starts."""
    options = json.loads(os.environ["DDP_CHECK"])
    args, parent = argparse.Namespace(**options), os.getppid()
    while not os.path.exists(f"{args.folder}/{args.run}.go"):
        time.sleep(0.05)
        if os.getppid() != parent:
            LEAVE(1)
    control_spawn(options)
    if options["spawns"]:
        find_script(args)
        files.patch(Process("parent"))
        run_script(args)
    else:
        run_watched(Process(), lambda: run_script(args))

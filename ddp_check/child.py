"""In each process of a run: the script, watched."""

import argparse
import contextlib
import faulthandler
import functools
import gc
import json
import multiprocessing.process
import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

from . import cpu
from .given import alike, draws, draws_python, frameworks, samplers, samples
from .kept import files
from .notes import Printed
from .patches import LEAVE, replace_names, stop_both_runs, wrap
from .process import Process
from .script import UNKNOWN, find_script, own_file, own_lines, place, run_script, source
from .seen import calls, passes, schedules, steps, trace, written

WATCHES = (
    draws,
    draws_python,
    alike,
    samplers,
    samples,
    frameworks,
    trace,
    passes,
    calls,
    written,
    schedules,
    steps,
)


def options():
    return argparse.Namespace(**json.loads(os.environ["DDP_CHECK"]))


class Tee:
    """Text for the terminal whose lines are noted, too."""

    def __init__(self, process, stream):
        self.process, self.stream, self.text = process, stream, ""

    def write(self, text):
        if threading.current_thread() is threading.main_thread():
            *lines, self.text = (self.text + text).split("\n")
            at, *callers = place() if lines else ("",)
            for line in lines:
                self.process.note(Printed(at, line.split("\r")[-1], callers[:1]))
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def say_where(process, ended):
    """At once, and each second: the steps; a frame, by which a loop is told from a hang; lines."""
    main, path = threading.main_thread().ident, f"{process.folder}/{process.name}.{process.rank}"
    is_over = False
    while not is_over:
        frame = sys._current_frames()[main]
        innermost = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        words = f"{process.steps} {innermost}", *own_lines(frame)[:3]
        frame = None  # else its variables, such as a model, stay alive for a second
        with open(f"{path}.where.new", "w") as file:
            file.write(" < ".join(words))
        os.replace(f"{path}.where.new", f"{path}.where")
        process.settle()
        is_over = ended.wait(1)
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{path}.where")


@contextlib.contextmanager
def watching(process):
    """The script has the random numbers of one process, and what it does is noted."""
    cpu.install(options(), process.say)
    files.patch(process)
    for watch in WATCHES:
        watch.patch(process)
    replace_names()
    ended = threading.Event()
    where = threading.Thread(target=say_where, args=(process, ended), daemon=True)
    where.start()
    if process.rank == 0:
        sys.stdout, sys.stderr = Tee(process, sys.stdout), Tee(process, sys.stderr)
    wrap(os, "_exit")(functools.partial(before_exit, process, ended))
    crash = open(f"{process.folder}/{process.name}.{process.rank}.crash", "w")
    faulthandler.enable(crash)  # its lines: the log is that of all that mp.spawn starts
    try:
        with trace.Trace(process):
            yield
    except SystemExit as end:
        process.end(f"SystemExit {end.code}" if end.code else "its end")
        raise
    except BaseException as error:
        frames = [
            (own_file(f.f_code.co_filename), n) for f, n in traceback.walk_tb(error.__traceback__)
        ]
        at = [UNKNOWN, *[f"{file}:{number}" for file, number in frames if file]][-1]
        if cpu.needs_gpu(error):
            text = f"needs a GPU: {str(error).splitlines()[0][:200]}"
            remedy = "that is not imitated on CPUs: run it where there are GPUs, or without this"
            if not options().cpu:
                remedy = (
                    "pass --cpu, so that libraries see GPUs, too; or run it where there are some"
                )
            facts = {"line": source(at), "text": text, "remedy": remedy}
            stop_both_runs(process.folder, "refused", facts)
        process.end(f"{type(error).__name__} at {source(at).rstrip(':')}: {str(error)[:300]}")
        raise
    else:
        process.end("its end")
    finally:
        ended.set()
        where.join()


def before_exit(process, ended, original, status):
    if os.getpid() == process.pid and not ended.is_set():
        process.end(f"os._exit({status})" if status else "its end")
    original(status)


# ---- processes that the script starts


def run_spawned(function, rank, *words):
    """In each of mp.spawn's processes."""
    with watching(Process(rank)):
        function(rank, *words)


def check_number(args, nproc):
    """Of the processes that the script starts."""
    wanted = args.nproc if args.run == "all" else 1
    if not args.spawns:
        stop_both_runs(args.folder, "spawns", {})
    if nproc != wanted:
        text = f"starts {nproc} processes, not {wanted}"
        remedy = "give the script their number in a flag, as {n}, or one process others by --one"
        if not nproc:
            remedy = "does it count GPUs? Then --cpu, as without GPUs a library counts none"
        facts = {"line": source(place()[0]), "text": text, "remedy": remedy}
        stop_both_runs(args.folder, "refused", facts)


def control_spawn(args):
    """torch.multiprocessing's functions that start a process a rank, which is watched from its
    first line."""

    def start_processes(original, fn, words=(), nprocs=1, *others, **more):
        check_number(args, nprocs)
        words = more.pop("args", words)
        return original(functools.partial(run_spawned, fn), words, nprocs, *others, **more)

    for name in "spawn", "start_processes":
        wrap(torch.multiprocessing, name)(start_processes)


def control_processes():
    """Files are watched in all processes that the script starts by multiprocessing, forked or not;
    one that joins a process group is a rank, unless it is part of one."""

    @wrap(multiprocessing.process.BaseProcess, "start")
    def start(original, process):
        process.run = functools.partial(run_process, process.run)
        return original(process)


def run_process(run):
    args = options()
    if files.GUARD is None:  # a new Python
        find_script(args)
        cpu.install(args)
        files.patch(Process(f"worker{os.getpid()}"))
        control_processes()
    with contextlib.ExitStack() as stack:

        @wrap(dist, "init_process_group")
        def init_process_group(original, *words, **more):
            if not args.spawns:
                stop_both_runs(args.folder, "spawns", {})
            if files.GUARD.process.rank not in range(args.nproc):
                rank = more.get("rank", -1)
                rank = rank if rank >= 0 else int(os.environ.get("RANK", 0))
                stack.enter_context(watching(Process(rank)))
            original(*words, **more)
            check_number(args, dist.get_world_size())

        replace_names()
        run()


def child():
    """In each process that the command starts."""
    args, parent = options(), os.getppid()
    while not os.path.exists(f"{args.folder}/{args.run}.go"):
        time.sleep(0.05)
        if os.getppid() != parent:  # the command was killed
            LEAVE(1)
    gc.freeze()  # what is there before the script is not its: looking for that is quick
    find_script(args)
    cpu.install(args)
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    control_spawn(args)
    control_processes()
    if args.spawns:
        files.patch(Process("parent"))
        run_script(args)
    else:
        with watching(Process()):
            run_script(args)

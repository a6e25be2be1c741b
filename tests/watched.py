"""A script that ddp_check watches, in forks of the test's own process: what its processes note."""

import gc
import json
import linecache
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch._dynamo  # noqa: F401  optimizers import it at their first step: before the forks
from helpers import free_port

from ddp_check import child, script, text
from ddp_check.compare.judge import judge
from ddp_check.notes import Notes
from ddp_check.process import Process
from ddp_check.runs import Options, environment

FACTS = {"nproc": 2, "seed": 0, "short": None, "cpu": True, "m": False, "flags": [], "one": ""}


def forget_files():
    """Another test's of the same names."""
    linecache.clearcache()
    text.statements.cache_clear()
    script.own_file.cache_clear()


def watched_rank(folder, facts, rank, port):
    """In a fork: run the script, as one of a run's processes."""
    nproc = 1 if facts["run"] != "all" else facts["nproc"]
    os.environ |= environment(rank, nproc, port) | {"DDP_CHECK": json.dumps(facts)}
    gc.freeze()  # as child() does
    script.START = os.getcwd()
    forget_files()
    args = child.options()
    script.find_script(args)
    with child.watching(Process(rank)):
        script.run_script(args)


def notes_of(code, run="one", **options):
    """The notes of a run of this script, of each rank: "one", or then "all", in the current folder.
    It may raise or exit; then its last note says so."""
    Path("train.py").write_text(code)
    folder, port, pids = Path("notes").resolve(), free_port(), []
    folder.mkdir(exist_ok=True)
    facts = FACTS | {"folder": str(folder), "run": run, "script": "train.py", "spawns": False}
    facts |= asdict(Options(20)) | options
    ranks = range(facts["nproc"] if run == "all" else 1)
    for rank in ranks:
        pids.append(os.fork())
        if pids[-1] == 0:
            leave = os._exit
            sys.stdout = sys.stderr = open(folder / f"{run}.{rank}.log", "w")
            try:
                watched_rank(str(folder), facts, rank, port)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                leave(0)
    for pid in pids:
        os.waitpid(pid, 0)
    return [Notes(folder, run, rank) for rank in ranks]


def findings_of(code, **options):
    """Of both runs of this script, without noise."""
    (one,), ranks = notes_of(code, **options), notes_of(code, "all", **options)
    forget_files()
    with mock.patch.object(script, "START", os.getcwd()):
        found = judge(one, ranks, tolerance=3e-4, scaled={}).findings
    forget_files()
    return found

"""Runs are killed and go on: bit-identical, each epoch once; and nothing waits for ever."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import *

COUNTS = {name: 2 if name in DDP else 1 for name in SCRIPTS}
TRAIN = "--epochs 12 --batch-size 16 --augment --lr-schedule cosine --resume --log-every 1".split()
TRAIN += ["--checkpoint-every", 7]
LONG = ["--dataset", "synthetic", "--epochs", 100000, "--log-every", 1]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:]]


@pytest.mark.parametrize("name", ["single", *SLOW])
def test_killed_at_random(fashion, name):
    """All processes by SIGKILL, three times, once while a checkpoint is being written."""
    flags, count, reached = [*fashion, *TRAIN, "--output"], COUNTS[name], 0
    run(name, *flags, "whole", processes=count)
    dies = "        os.kill(os.getpid(), 9)\n"  # within the writing of last.pt
    for i in range(5 if name == "single" else 3):
        path = edited(name, "        file.flush()\n", dies) if i == 1 else None
        jobs = start(name, *flags, "out", processes=count, path=path)
        wait_for(" step ", *jobs)
        time.sleep(random.uniform(0, 0.1))  # some 30 of the 480 steps
        end = time.monotonic() + LIMIT
        while i == 1 and not Path("out/last.pt.tmp").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        if i >= 3:  # SIGTERM and Ctrl-C are the same case
            kill(jobs[0].pid, (signal.SIGTERM, signal.SIGINT)[i - 3])
            assert finish(jobs, 20)[0] not in ([0], ["still there"])
        kill_all(jobs)
        text, state = jobs[0].log.read_text(), weights("out", "last.pt")
        assert "finished" not in text and ("going on" in text) == (i > 0), text
        assert reached <= state["epoch"] * 40 + state["step"] and not Path("out/model.pt").exists()
        reached = state["epoch"] * 40 + state["step"]
    run(name, *flags, "out", processes=count)
    same_run("out", "whole", 12)


@pytest.mark.parametrize("name", ["single", pytest.param("ddp_torchrun", marks=pytest.mark.slow)])
def test_killed_after_the_last_step_of_an_epoch(fashion, name):
    """Its checkpoint is written, the evaluation has not begun: 40 steps, a checkpoint every 8."""
    flags = [*fashion, *TRAIN, "--checkpoint-every", 8, "--epochs", 3, "--output"]
    run(name, *flags, "whole", processes=COUNTS[name])
    call = "            sums = evaluate("
    path = edited(name, call, "            os.kill(os.getpid(), 9)\n" + call)
    jobs = start(name, *flags, "out", processes=COUNTS[name], path=path)
    assert finish(jobs)[0] != [0]
    assert weights("out", "last.pt")["step"] == 40 and len(metrics("out")) == 0
    assert "epoch 1, after step 40" in run(name, *flags, "out", processes=COUNTS[name])
    same_run("out", "whole", 3)


def test_a_new_run_takes_the_place_of_an_old_one(fashion):
    """From its start: killed before its first checkpoint, --resume goes on with the new one."""
    flags = [*fashion, "--output", "out", "--seed"]
    run("single", *flags, 1, "--epochs", 1)
    old = weights("out")
    more = ["--epochs", 2000, "--log-every", 1, "--checkpoint-every", 10**6, "--batch-size", 1]
    [job] = start("single", *flags, 2, *more)
    wait_for(" step ", job)
    assert not Path("out/model.pt").exists() and weights("out", "last.pt")["seed"] == 2
    kill_all([job])
    assert len(metrics("out")) == 0
    flags += [1, "--epochs", 1]
    assert "--seed 2" in run("single", *flags, "--resume", status=2)
    run("single", *flags)
    assert same(weights("out"), old)


def ranks(job):
    """The processes of torchrun's ranks."""
    found = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [
        pid for pid in map(int, found) if b"train_" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.slow
def test_torchrun_restarts_by_itself(fashion):
    """A rank killed by SIGKILL: --max-restarts begins it again, and it ends bit-identical.

    Without the store's prefix about every other restart hangs until --timeout. KILLS=20 does more.
    """
    kills = int(os.environ.get("KILLS", 5))
    flags = [*fashion, *TRAIN, "--timeout", 60, "--output"]
    run("ddp_torchrun", *flags, "whole", processes=2)
    words = [*TORCHRUN, "--standalone", "--max-restarts", 3, "--nproc-per-node", 2]
    for done in range(0, kills, 3):
        job = Cold([*words, script("ddp_torchrun"), *flags, "out"], "run.log")
        for attempt in range(1, min(3, kills - done) + 1):
            end, parts = time.monotonic() + 55, []
            while len(parts) <= attempt or f" step {random.randint(1, 40)}/" not in parts[attempt]:
                assert job.status() is None and time.monotonic() < end, job.log.read_text()
                time.sleep(0.01)
                parts = re.split("a new run|going on", job.log.read_text())
            kill(random.choice(ranks(job)))
        statuses, text = finish([job], 60)
        assert statuses == [0], text
        same_run("out", "whole", 12)
        shutil.rmtree("out")


@pytest.mark.slow
@pytest.mark.parametrize("name", DDP)
def test_a_killed_peer_ends_the_job(name):
    jobs = start(name, *LONG, "--output", "out", "--timeout", 5, processes=2)
    wait_for("step 20/", *jobs)
    pids = ranks(jobs[0]) if name == "ddp_torchrun" else [jobs[-1].pid]
    if name == "ddp_spawn":
        pids = [
            pid for pid in marked() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
    kill(pids[-1])
    statuses, text = finish(jobs, 30)
    assert not {0, "still there"} & set(statuses), text
    assert all_ended(), text

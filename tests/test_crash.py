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
TRAIN = "--epochs 12 --batch-size 16 --augment --lr-schedule cosine --resume --log-every 4".split()
TRAIN += ["--checkpoint-minutes", 0]  # a checkpoint every 4 steps
LONG = ["--dataset", "synthetic", "--epochs", 100000, "--log-every", 1]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in DDP]


@pytest.mark.parametrize("name", ["single", *SLOW])
def test_killed_at_random(fashion, name):
    """All processes by SIGKILL, three times, once while a checkpoint is being written."""
    flags, count, reached = [*fashion, *TRAIN, "--output"], COUNTS[name], 0
    run(name, *flags, "whole", processes=count)
    dies = "        os.kill(os.getpid(), 9)\n"  # within the writing of last.pt
    for i in range(5 if name == "single" else 3):
        path = edited(name, "        file.flush()\n", dies) if i == 1 else None
        jobs = start(name, *flags, "out", processes=count, path=path)
        wait_for("into out" if i == 1 else "/12 step ", *jobs)
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
        assert "finished" not in text and (i > 0 or "from epoch 1, step 1 on" in text), text
        assert reached <= state["epoch"] * 40 + state["step"] and not Path("out/model.pt").exists()
        reached = state["epoch"] * 40 + state["step"]
    run(name, *flags, "out", processes=count)
    same_run("out", "whole", 12)


@pytest.mark.parametrize("name", ["single", pytest.param("ddp_torchrun", marks=pytest.mark.slow)])
def test_killed_after_the_last_step_of_an_epoch(fashion, name):
    """Its checkpoint is written, the evaluation has not begun: an epoch has 40 steps."""
    flags = [*fashion, *TRAIN, "--epochs", 3, "--output"]
    run(name, *flags, "whole", processes=COUNTS[name])
    call = "            sums = evaluate("
    path = edited(name, call, "            os.kill(os.getpid(), 9)\n" + call)
    jobs = start(name, *flags, "out", processes=COUNTS[name], path=path)
    assert finish(jobs)[0] != [0]
    assert weights("out", "last.pt")["step"] == 40 and len(metrics("out")) == 0
    assert "from epoch 1, step 41 on" in run(name, *flags, "out", processes=COUNTS[name])
    same_run("out", "whole", 3)


def test_nothing_is_lost_by_a_forgotten_flag(fashion):
    """--overwrite begins anew and owns the folder from its start; --resume wins over it."""
    flags = [*fashion, "--output", "out", "--epochs", 1]
    run("single", *flags)
    content = {path: path.read_bytes() for path in Path("out").iterdir()}
    for name in SCRIPTS:
        status = 1 if name == "ddp_torchrun" else 2  # torchrun has only that one
        text = run(name, *flags, processes=COUNTS[name], status=status)
        machines = 2 if name == "ddp_multigpu_proc" else 1  # each of which says it once
        assert text.count("--resume goes on with it, --overwrite begins anew") == machines, text
        assert "rank 0: host" not in text and (status == 1 or "Traceback" not in text), text
        assert content == {path: path.read_bytes() for path in Path("out").iterdir()}
    run("single", *flags, "--resume", "--overwrite")
    assert Path("out/model.pt").read_bytes() == content[Path("out/model.pt")]
    [job] = start("single", *flags, "--overwrite", "--seed", 1, "--epochs", 10**6)
    wait_for("from epoch 1, step 1 on", job)
    wait_for("/1000000 step ", job)
    kill_all([job])
    assert not Path("out/model.pt").exists() and weights("out", "last.pt")["seed"] == 1


def ranks(job):
    """The processes of torchrun's ranks."""
    found = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [
        pid for pid in map(int, found) if b"train_" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.slow
def test_torchrun_restarts_by_itself(fashion, monkeypatch):
    """A rank killed by SIGKILL: --max-restarts begins it again, and it ends bit-identical.

    Without the variable about every other restart hangs until --timeout. KILLS=20 does more.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    kills = int(os.environ.get("KILLS", 3))
    flags = [*fashion, *TRAIN, "--timeout", 60, "--output"]
    run("ddp_torchrun", *flags, "whole", processes=2)
    words = [*TORCHRUN, "--standalone", "--max-restarts", 3, "--nproc-per-node", 2]
    for done in range(0, kills, 3):
        job = Cold([*words, script("ddp_torchrun"), *flags, "out"], "run.log")
        for attempt in range(1, min(3, kills - done) + 1):
            end, parts = time.monotonic() + 55, []
            while (
                len(parts) <= attempt
                or f" step {random.randrange(4, 41, 4)}/" not in parts[attempt]
            ):
                assert job.status() is None and time.monotonic() < end, job.log.read_text()
                time.sleep(0.01)
                parts = re.split("from epoch", job.log.read_text())
            kill(random.choice(ranks(job)))
        statuses, text = finish([job], 60)
        assert statuses == [0], text
        same_run("out", "whole", 12)
        shutil.rmtree("out")


@pytest.mark.slow
def test_memory_of_a_resumed_run(fashion):
    """Each process reads last.pt by itself: that takes one checkpoint's memory and no more."""
    end = "    dist.destroy_process_group()\n    if rank > 0:\n"
    peak = 'Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]'
    path, peaks = edited("ddp_spawn", end, f'    print("peak", {peak}, flush=True)\n{end}'), []
    flags = [*fashion, "--model", "mlp", "--repeat", 32, "--optimizer", "adam", "--output", "out"]
    for more in ["--epochs", 1], ["--epochs", 2, "--resume"]:
        text = run("ddp_spawn", *flags, *more, processes=2, path=path)
        peaks.append(max(map(int, re.findall(r"peak (\d+)", text))) * 1024)
    size = Path("out/last.pt").stat().st_size
    assert size > 10**8 and peaks[1] - peaks[0] < 1.1 * size, (peaks, size)

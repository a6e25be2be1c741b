"""Runs are killed and go on: bit-identical, each epoch once; and nothing waits for ever."""

import os
import random
import re
import time
from pathlib import Path

import pytest
from helpers import *

TRAIN = "--epochs 12 --batch-size 16 --augment --lr-schedule cosine --resume --log-every 4".split()
TRAIN += ["--checkpoint-minutes", 0]  # a checkpoint every 4 of an epoch's 40 steps
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in [*DDP, "fsdp2"]]
QUICK = {1: "single", 2: "ddp_multigpu_proc"}  # of the scripts with the same bits
DIE = "os.kill(os.getpid(), 9)\n"
PLACES = {  # of the second kill and the third: within the writing of last.pt, before evaluation
    1: ("        file.flush()\n", f"        {DIE}"),
    2: ("            sums = evaluate(", f"            {DIE}            sums = evaluate("),
}


@pytest.mark.parametrize("name", ["single", *SLOW])
def test_killed_at_random(fashion, name):
    """All processes by SIGKILL, three times, twice of them at the worst places."""
    flags, count, epoch, step = [*fashion, *TRAIN, "--output"], COUNTS[name], 0, 0
    run("fsdp2" if name == "fsdp2" else QUICK[count], *flags, "whole", processes=count)
    for i in range(3):
        path = edited(name, *PLACES[i]) if i in PLACES else None
        jobs = start(name, *flags, "out", processes=count, path=path)
        if path:
            wait_until(lambda: ended(jobs))
            assert Path("out/last.pt.tmp").exists() == (i == 1)
        else:
            wait_for("/12 step ", *jobs)
            time.sleep(random.uniform(0, 0.1))  # some 30 of the 480 steps
        kill_all(jobs)
        state, before = weights("out", "last.pt"), (epoch, step)
        epoch, step = state["epoch"], state["step"]
        assert before <= (epoch, step) and (i != 2 or step == 40)
        assert not Path("out/model.pt").exists()
    text = run(name, *flags, "out", processes=count)
    assert f"from epoch {epoch + 1}, step {step + 1} on" in text
    same_run("out", "whole", 12)


def test_nothing_is_lost_by_a_forgotten_flag(fashion):
    """--overwrite begins anew and owns the folder from its start; not beside --resume."""
    flags = [*fashion, "--output", "out", "--epochs", 1]
    run("single", *flags)
    content = {path: path.read_bytes() for path in Path("out").iterdir()}
    for name in SCRIPTS:
        by_hand = name in ("ddp_torchrun", "fsdp2")  # where torchrun would end the other ranks
        text = run(name, *flags, processes=1 if by_hand else COUNTS[name], status=2)
        machines = 2 if name == "ddp_multigpu_proc" else 1  # each of which says it once
        assert text.count("--resume goes on with it, --overwrite begins anew") == machines, text
        assert "rank 0: host" not in text and "Traceback" not in text, text
        assert content == {path: path.read_bytes() for path in Path("out").iterdir()}
    text = run("single", *flags, "--resume", "--overwrite", status=2)
    assert "not allowed with" in text
    assert content == {path: path.read_bytes() for path in Path("out").iterdir()}
    [job] = start("single", *flags, "--overwrite", "--seed", 1, "--epochs", 10**6)
    wait_for("/1000000 step ", job)
    kill_all([job])
    assert not Path("out/model.pt").exists() and weights("out", "last.pt")["seed"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_torchrun", "fsdp2"])
def test_torchrun_restarts_by_itself(fashion, monkeypatch, name):
    """A rank killed by SIGKILL: --max-restarts begins it again, and it ends bit-identical.

    Without the variable about every other restart hangs until --timeout. KILLS=20 does more.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    kills = int(os.environ.get("KILLS", 2))
    flags = [*fashion, *TRAIN, "--epochs", 4 * kills, "--output"]
    run("fsdp2" if name == "fsdp2" else QUICK[2], *flags, "whole", processes=2)
    job = torchrun(2, "--max-restarts", kills, script(name), *flags, "out")
    for attempt in range(1, kills + 1):
        place = f" step {random.randrange(4, 41, 4)}/"
        wait_until(lambda: place in "".join(job.log.read_text().split("from epoch")[attempt:]))
        kill(int(random.choice(command("pgrep", "-P", job.pid, "-f", "train_").split())))
    statuses, text = finish([job])
    assert statuses == [0] and text.count("from epoch") == kills + 1, text
    same_run("out", "whole", 4 * kills)


@pytest.mark.slow
def test_a_resumed_run_reads_last_pt(fashion):
    """Each process reads it by itself: that takes one checkpoint's memory and no more. Rank 0 waits
    for one that reads late before it writes the next one."""
    peak = 'Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]'
    written = '(args.output / "last.pt").stat().st_mtime if args.resume else 0'
    read, end = "    dist.barrier()  # all have read", "    dist.barrier()  # none leaves"
    late = f"    time.sleep(2 * rank)\n    print('written', {written}, flush=True)\n"
    tell = f"    print('peak', {peak}, flush=True)\n"
    path, peaks = edited("ddp_spawn", read, late + read, end, tell + end), []
    flags = [*fashion, "--model", "mlp", "--repeat", 32, "--optimizer", "adam", "--output", "out"]
    for more in ["--epochs", 1], ["--epochs", 2, "--resume"]:
        before = Path("out/last.pt").stat().st_mtime if "--resume" in more else 0
        text = run("ddp_spawn", *flags, *more, processes=2, path=path)
        assert re.findall(r"written (\S+)", text) == [str(before)] * 2
        peaks.append(max(map(int, re.findall(r"peak (\d+)", text))) * 1024)
    size = Path("out/last.pt").stat().st_size
    assert size > 10**8 and peaks[1] - peaks[0] < 1.1 * size, (peaks, size)

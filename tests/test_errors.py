"""Daily mistakes: one line that says what to do, status 2, and nothing written or overwritten."""

import shutil
from pathlib import Path

import pytest
from helpers import *

NUMBERS = "--batch-size 0", "--batch-size many", "--epochs -1", "--lr -0.1", "--workers -1"
NUMBERS += "--accumulate 0", "--image-size 0", "--log-every 0", "--checkpoint-minutes -1"
NUMBERS += "--clip-norm -1", "--warmup-steps -1", "--device cuda", "--model vgg", "--no-such-flag"
DATA = [
    ("--dataset no_such", "--dataset no_such: neither a known name nor"),
    ("--dataset pictures", "the same sub-folders (classes) as train/"),
    ("--dataset cifar10 --data-dir nothing", "): put the files into --data-dir"),
    ("{fashion} --batch-size 32 --resume", "needs --batch-size 64"),
    ("{fashion} --lr 0.1 --resume", "needs --lr 0.001"),
]
PLACE = [
    ("--rank -1", "--rank -1"),
    ("--world-size 0", "--rank 0: 0 machines"),
    ("--world-size 2", "tcp://HOST:PORT"),
    ("--init-method file:///no_such/folder/file", "file:///no_such"),
    ("--world-size 2 --init-method tcp://HOST:1 --batch-size 63", "multiple of the processes"),
    ("--sync-bn", "--sync-bn works on GPUs only"),
]
SPAWNED = [  # the processes add no traceback either
    ("--nproc-per-node 2 {fashion} --seed 1 --resume", "needs --seed 76"),
    ("--nproc-per-node 2 {fashion} --batch-size 10000", "has only 640 samples"),
]
WRONG = {
    "single": DATA + [(flags, flags.split()[0]) for flags in NUMBERS],
    "dp": DATA + [(flag, f"unrecognized arguments: {flag}") for flag in ("--amp", "--compile")],
    "ddp_spawn": PLACE + SPAWNED,
    "ddp_multigpu_proc": PLACE + DATA,
}


def snapshot():
    """What lies in out/, and when it was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path("out").rglob("*")}


@pytest.mark.parametrize("name", WRONG)
def test_one_line(name, data, fashion):
    run("single", *fashion, "--epochs", 1, "--output", "out")
    before = snapshot()
    assert set(before) == {"last.pt", "metrics.csv", "model.pt"}
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test/c").rename("pictures/test/d")
    for flags, says in WRONG[name]:
        flags = flags.format(fashion=" ".join(map(str, fashion))).split()
        flags = ["--dataset", "synthetic", "--output", "out", *flags]
        flags += [] if "--resume" in flags else ["--overwrite"]
        text = run(name, *flags, status=2)
        assert says in text and text.count("error: ") == 1 and "Traceback" not in text, text
        assert snapshot() == before


def test_torchrun():
    path = script("ddp_torchrun")
    jobs = [Warm(path, [], "alone"), *start("ddp_torchrun", "--batch-size", 63, "--accumulate", 2)]
    words = [*TORCHRUN, "--standalone", "--max-restarts", 1, path]
    jobs += [Cold(words, "begins"), Cold([*words, "--resume"], "resumes")]
    statuses, text = finish(jobs)
    assert statuses == [2, 2, 1, 1] and "start it with: torchrun --standalone" in text
    assert "--max-restarts needs --resume, or each restart" in text
    assert "error: --batch-size has to be a multiple of the proc" in text
    assert "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    assert not Path("runs").exists()

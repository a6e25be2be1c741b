"""Daily mistakes: one line that says what to do, status 2, and nothing written or overwritten."""

import shutil
import sys
from pathlib import Path

import pytest
from helpers import TORCHRUN, Cold, finish, run, script

TRAIN = ["--dataset", "synthetic", "--epochs", 1]
TWO = ["--world-size", 2]


def snapshot():
    """What lies in out/, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in sorted(Path("out").rglob("*"))}


@pytest.fixture
def refused(fashion):
    """Checks that a command is refused in one line, and leaves an earlier run as it was."""
    run("single", *fashion, "--epochs", 1, "--output", "out")
    before = snapshot()
    assert {path.name for path in before} == {"last.pt", "metrics.csv", "model.pt"}

    def check(name, *flags, says, **options):
        text = run(name, *flags, "--output", "out", "--overwrite", status=2, **options)
        assert says in text and text.count("error: ") == 1 and "Traceback" not in text, text
        assert snapshot() == before

    return check


def test_flags(refused):
    wrong = "--batch-size 0", "--batch-size many", "--epochs -1", "--lr -0.1", "--workers -1"
    wrong += "--accumulate 0", "--image-size 0", "--log-every 0", "--checkpoint-minutes -1"
    wrong += "--clip-norm -1", "--warmup-steps -1", "--device cuda", "--device no_such"
    for flags in map(str.split, [*wrong, "--model vgg", "--no-such-flag"]):
        refused("single", *TRAIN, *flags, says=flags[0])
    for flag in "--amp", "--compile":
        refused("dp", *TRAIN, flag, says=f"unrecognized arguments: {flag}")


def test_data(refused, data):
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test/c").rename("pictures/test/d")
    for name in "single", "dp", "ddp_multigpu_proc":
        refused(name, "--dataset", "no_such", says="--dataset no_such: neither a known name nor")
        refused(name, "--dataset", "pictures", says="the same sub-folders (classes) as train/")
        for dataset in "cifar10", "fashion-mnist":
            flags = ["--dataset", dataset, "--data-dir", "nothing_here"]
            refused(name, *flags, says="): put the files into --data-dir")


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_multigpu_proc"])
def test_place(refused, name):
    for flags, says in [
        ([*TWO, "--rank", 2], "--rank 2"),
        (["--rank", -1], "--rank -1"),
        (["--world-size", 0], "--rank 0: 0 machines"),
        (TWO, "tcp://HOST:PORT"),
        (["--init-method", "file:///no_such/folder/file"], "file:///no_such"),
        ([*TWO, "--init-method", "tcp://HOST:1", "--batch-size", 63], "multiple of the processes"),
        (["--sync-bn"], "--sync-bn works on GPUs only"),
    ]:
        refused(name, *TRAIN, *flags, says=says)


def test_what_processes_find_out(refused, fashion):
    """Another batch or seed than the checkpoint's, too few samples: spawned processes add no
    traceback either."""
    resume = "needs --batch-size 64 and --seed 76"
    refused("single", *fashion, "--resume", "--batch-size", 32, says=resume)
    refused("ddp_spawn", *fashion, "--resume", "--seed", 1, says=resume, processes=2)
    refused("ddp_spawn", "--batch-size", 10**4, *fashion, says="has only 640 samples", processes=2)


def test_torchrun():
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, script("ddp_torchrun"), *TRAIN]
    jobs = [Cold([sys.executable, script("ddp_torchrun")], "alone")]
    jobs.append(Cold([*words, "--batch-size", 63], "batch"))
    jobs.append(Cold([*TORCHRUN, "--max-restarts", 1, *words[3:]], "restarts"))
    statuses, text = finish(jobs)
    assert statuses == [2, 1, 1] and "start it with: torchrun --standalone" in text
    assert "error: --batch-size has to be a multiple of the proc" in text
    assert "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    assert not Path("runs").exists()

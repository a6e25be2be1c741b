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
        errors = [line for line in text.splitlines() if "error: " in line]
        assert len(errors) == 1 and says in errors[0] and "Traceback" not in text, text
        assert snapshot() == before

    return check


def test_flags(refused, data):
    wrong = "--batch-size 0", "--batch-size many", "--epochs -1", "--lr -0.1", "--workers -1"
    wrong += "--accumulate 0", "--image-size 0", "--log-every 0", "--checkpoint-minutes -1"
    wrong += "--clip-norm -1", "--warmup-steps -1", "--device cuda", "--device no_such"
    for flags in map(str.split, [*wrong, "--model vgg", "--no-such-flag"]):
        refused("single", *TRAIN, *flags, says=flags[0])
    for flag in "--amp", "--compile":
        refused("dp", *TRAIN, flag, says=f"unrecognized arguments: {flag}")


def test_data(refused, data):
    refused("single", "--dataset", "no_such", says="--dataset no_such: neither a known name nor")
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test/c").rename("pictures/test/d")
    for name in "single", "dp", "ddp_multigpu_proc":
        refused(name, "--dataset", "pictures", says="the same sub-folders (classes) as train/")
    shutil.rmtree("pictures/test")
    refused("single", "--dataset", "pictures", says="--dataset pictures: neither")
    for dataset in "cifar10", "fashion-mnist":
        flags = ["--dataset", dataset, "--data-dir", "nothing_here"]
        refused("single", *flags, says="): put the files into --data-dir")


def test_resume(refused, fashion):
    flags = [*fashion, "--resume"]
    refused("single", *flags, "--batch-size", 32, says="needs --batch-size 64 and --seed 76")
    refused("dp", *flags, "--seed", 1, says="needs --batch-size 64 and --seed 76")
    before = snapshot()
    run("single", *flags, "--model", "mlp", "--output", "out", status=1)  # torch's own error
    assert snapshot() == before


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


def test_spawned_processes_add_no_traceback(refused, fashion):
    """What only they find out, as the data is theirs, ends with status 2 and one line too."""
    refused("ddp_spawn", "--batch-size", 63, says="multiple of the processes", processes=2)
    refused("ddp_spawn", "--batch-size", 10**4, *fashion, says="has only 640 samples", processes=2)
    refused("ddp_spawn", "--dataset", "no_such", says="--dataset no_such", processes=2)
    refused("ddp_spawn", *fashion, "--resume", "--seed", 1, says="--seed 76", processes=2)


def test_torchrun():
    statuses, text = finish([Cold([sys.executable, script("ddp_torchrun")], "log")])
    assert statuses == [2] and "start it with: torchrun --standalone" in text
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, script("ddp_torchrun"), *TRAIN]
    statuses, text = finish([Cold([*words, "--batch-size", 63], "log")])
    assert statuses == [1] and "error: --batch-size has to be a multiple of the proc" in text
    statuses, text = finish([Cold([*TORCHRUN, "--max-restarts", 1, *words[3:]], "log")])
    assert statuses == [1] and "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    assert not Path("runs").exists()

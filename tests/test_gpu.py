"""What only a GPU shows: NCCL, --amp, --compile, --sync-bn, several GPUs, no hidden waiting."""

import pytest
import torch
from helpers import DDP, SCRIPTS, edited, kill_all, metrics, run, start, wait_for, weights

pytestmark = pytest.mark.gpu
GPUS = torch.accelerator.device_count()
JOB = ["--dataset", "synthetic", "--epochs", 1, "--lr", 0.01, "--output"]


def close(output, other, digits=1e-3):
    for key in "train_loss", "test_loss":
        assert metrics(output)[-1][key] == pytest.approx(metrics(other)[-1][key], rel=digits)


@pytest.mark.parametrize("name", SCRIPTS)
def test_trains(name):
    text = run(name, *JOB, "out")
    assert "device cuda" in text and ("backend nccl" in text) == (name in DDP)
    row = metrics("out")[0]
    assert row["train_loss"] < 2.3 and row["peak_memory_mib"] > 0
    assert all(tensor.device.type == "cpu" for tensor in weights("out").values())
    run("single", *JOB, "single")
    close("out", "single")


@pytest.mark.parametrize("name", ["single", *DDP])
@pytest.mark.parametrize("flags", [["--amp"], ["--compile"], ["--amp", "--model", "resnet18"]])
def test_flags(name, flags):
    if name == "ddp_multigpu_proc" and GPUS > 1:
        assert "several GPUs in one process" in run(name, *JOB, "out", *flags, status=2)
        return
    own = ["--sync-bn", "--compress-gradients"] if name in DDP and "resnet18" in flags else []
    run(name, *JOB, "out", *flags, *own)
    run("single", *JOB, "single", *flags)
    close("out", "single", 5e-2)


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_and_resumed(name):
    flags = ["--dataset", "synthetic", "--epochs", 20, "--log-every", 20, "--resume", "--output"]
    run(name, *flags, "whole")
    jobs = start(name, *flags, "out")
    wait_for("epoch 3/20 step 40/", *jobs)
    kill_all(jobs)
    run(name, *flags, "out")
    close("out", "whole")


@pytest.mark.parametrize("more", [[], ["--amp"], ["--accumulate", 2], ["--lr-schedule", "cosine"]])
def test_nothing_waits_between_progress_lines(more):
    """torch's own detector of hidden synchronisation stays quiet in the loop."""
    begin = "            optimizer.zero_grad()\n"
    look = '                state["loss_sum"] += loss_sum'
    mode = '            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")\n'
    path = edited("single", begin, mode + begin)
    quiet = '                torch.cuda.set_sync_debug_mode("default")\n'
    path.write_text(path.read_text().replace(look, quiet + look))
    run("single", *JOB, "out", "--augment", "--log-every", 50, *more, path=path)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_two_gpus_agree_with_one(name):
    run("single", *JOB, "one")
    run(name, *JOB, "two", processes=2 if name in DDP[:2] else 1)
    close("two", "one")

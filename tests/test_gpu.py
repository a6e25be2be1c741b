"""What needs a GPU; each test runs on one, those that need more say so."""

import subprocess
import sys

import pytest
import torch
from helpers import SCRIPTS, metrics, run, same, script, weights

pytestmark = pytest.mark.gpu
GPUS = torch.accelerator.device_count()
JOB = ["--dataset", "synthetic", "--epochs", "1"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_trains(name):
    text = run(name, *JOB, "--output", "out")
    assert "cuda" in text and ("nccl" in text or "ddp" not in name)
    row = metrics("out")[0]
    assert row["test_accuracy"] > 0.2 and row["peak_memory_mib"] > 0
    assert all(value.device.type == "cpu" for value in weights("out").values())


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    "flags",
    [
        ["--data-on-device"],
        ["--amp"],
        ["--amp", "--model", "resnet18"],
        ["--compile"],
        ["--deterministic", "--augment"],
        ["--optimizer", "adam", "--workers", "2"],
    ],
    ids=" ".join,
)
def test_flags(name, flags):
    if "--compile" in flags and GPUS > 1 and name in ("train_dp", "train_ddp_multigpu_proc"):
        pytest.skip("refused on several GPUs")
    run(name, *JOB, *flags, "--output", "out")
    assert metrics("out")[0]["train_loss"] < 2.31


@pytest.mark.parametrize("name", SCRIPTS[2:4])
@pytest.mark.parametrize("flags", [["--sync-bn"], ["--compress-gradients"]], ids=" ".join)
def test_ddp_flags(name, flags):
    run(name, *JOB, *flags, "--model", "resnet18", "--output", "out")
    assert metrics("out")[0]["train_loss"] < 2.31


def test_several_processes_on_one_gpu_agree_with_one():
    run("train_single", *JOB, "--output", "one")
    text = run("train_ddp_torchrun", *JOB, "--output", "many", processes=GPUS + 1)
    assert "backend gloo" in text
    for key in "train_loss", "test_loss", "test_accuracy":
        assert metrics("many")[0][key] == pytest.approx(metrics("one")[0][key], rel=1e-4)


def test_resume_is_exact():
    flags = ["--dataset", "synthetic", "--deterministic", "--augment"]
    run("train_single", *flags, "--epochs", "2", "--output", "whole")
    run("train_single", *flags, "--epochs", "1", "--output", "out")
    run("train_single", *flags, "--epochs", "2", "--output", "out", "--resume")
    assert same(weights("out"), weights("whole"))


def test_nothing_synchronises_between_progress_lines(tmp_path):
    """torch's own detector of hidden synchronisation stays quiet in the loop."""
    text = open(script("train_single")).read()
    start = '        for step, data in enumerate(train_loader, run["step"] + 1):\n'
    look = '                loss_sum, seconds = run["loss"]'
    assert text.count(start) == 1 and text.count(look) == 1
    detect = 'torch.cuda.set_sync_debug_mode("error")\n'
    quiet = 'torch.cuda.set_sync_debug_mode("default")\n'
    text = text.replace(start, f"{start}            if step > 1:\n                {detect}")
    text = text.replace(look, f"                {quiet}{look}")
    (tmp_path / "watched.py").write_text(text)
    words = [sys.executable, "watched.py", *JOB, "--augment", "--log-every", "50"]
    for more in [], ["--data-on-device"], ["--workers", "2"]:
        subprocess.run([*words, *more], check=True)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["train_ddp_spawn", "train_ddp_torchrun"])
def test_two_gpus_agree_with_one(name):
    run("train_single", *JOB, "--output", "one")
    run(name, *JOB, "--output", "two", processes=2)
    for key in "train_loss", "test_loss", "test_accuracy":
        assert metrics("two")[0][key] == pytest.approx(metrics("one")[0][key], rel=1e-4)

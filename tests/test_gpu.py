"""What only a GPU shows: NCCL, TF32, channels_last, --amp, --compile, --sync-bn, no hidden waiting.
`pytest -m gpu` on a machine with one GPU or more; the others are in test_emulated.py too."""

import re

import pytest
import torch
from helpers import DDP, SCRIPTS, close, edited, kill_all, metrics, run, start, wait_for, weights

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]
JOB = ["--dataset", "synthetic", "--epochs", 1, "--lr", 0.01, "--output"]
LOSSES = ["train_loss", "test_loss"]
TWO = dict.fromkeys([*DDP[:2], "fsdp2"], min(GPUS, 2))  # processes of those with a GPU each
BEGIN = "            for micro_step in range(args.accumulate):\n"  # of a step
END = "            if step % args.log_every == 0 or step == steps_per_epoch:\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_trains(name):
    """On one GPU or, with DataParallel, on all; NCCL knows which GPU is whose."""
    text = run(name, *JOB, "out")
    assert "device cuda" in text and ("backend nccl" in text) == (name not in SCRIPTS[:2])
    assert not re.search("is currently unknown|Guessing device|destroy_process_group", text), text
    assert metrics("out")[0]["train_loss"] < 2.3 and metrics("out")[0]["peak_memory_mib"] > 0
    assert all(tensor.device.type == "cpu" for tensor in weights("out").values())
    run("single", *JOB, "cpu", "--device", "cpu")
    close("out", "cpu", 1e-2, LOSSES, 1e-2)  # TF32 has ten bits


PARTS = ["--accumulate", 2, "--clip-norm", 1, "--batch-size", 96]
FLAGS = ["--amp"], ["--compile"], PARTS, ["--model", "resnet18", "--amp", "--sync-bn"]


@pytest.mark.parametrize("name", ["single", *DDP, "fsdp2"])
@pytest.mark.parametrize("flags", FLAGS)
def test_flags(name, flags):
    """On two GPUs, where there are two, as on one: with --sync-bn batch norm is the same, too."""
    refused = name == DDP[2] and GPUS > 1 and flags != PARTS
    if refused or "--sync-bn" in flags and name not in DDP:
        pytest.skip("not offered")
    text = run(name, *JOB, "out", *flags, processes=TWO.get(name, 1))
    assert ("device cuda:1" in text) == (TWO.get(name) == 2)
    run("single", *JOB, "single", *[flag for flag in flags if flag != "--sync-bn"])
    close("out", "single", 1e-3 if flags == PARTS else 5e-2, LOSSES, 1e-2)


@pytest.mark.parametrize("name", ["single", "ddp_torchrun"])
def test_what_is_set_for_a_gpu(name):
    """TF32, cudnn's search, channels_last; after the first step nothing is compiled any more."""
    tell = "torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark, "
    tell += "model.conv1.weight.is_contiguous(memory_format=torch.channels_last), "
    tell += 'torch._dynamo.utils.counters["stats"]["unique_graphs"]'
    flags = ["--epochs", 2, "--batch-size", 100, "--model", "resnet18", "--compile"]
    path = edited(name, BEGIN, f"            print('set', {tell})\n{BEGIN}")
    text = run(name, *JOB, "out", *flags, path=path)
    counts = [int(count) for count in re.findall(r"^set True True True (\d+)", text, re.M)]
    assert len(counts) == 200 and counts[0] < counts[1] == counts[-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_and_resumed(name):
    flags = ["--epochs", 20, "--lr", 1e-3, "--log-every", 20, "--checkpoint-minutes", 0, "--resume"]
    run(name, *JOB, "whole", *flags)
    jobs = start(name, *JOB, "out", *flags)
    wait_for("epoch 3/20 step 40/", *jobs)
    kill_all(jobs)
    assert re.search(r"^out: ([2-9]|1\d) epochs and ", run(name, *JOB, "out", *flags), re.M)
    close("out", "whole", 1e-2, LOSSES, 1e-2)  # cudnn adds in another order each time


MORE = [], ["--augment", "--amp"], ["--accumulate", 2, "--clip-norm", 1], ["--optimizer", "adam"]
WATCH = """            if step == 13:
                (watch := torch.profiler.profile()).start()
"""
TELL = """            if step == 22:
                watch.stop()  # it waits once for the whole device
                print("watched", *(event.key for event in watch.key_averages()), flush=True)
"""


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("more", MORE)
def test_nothing_waits_between_progress_lines(data, name, more):
    """No call waits for a stream, and no copy is from memory that is not pinned, for which it would
    wait. cudnn searches in the first steps; DDP's own timers wait in steps 2 to 11, 101, 201, ...;
    --sync-bn waits in every step."""
    if name == "dp" or name == DDP[2] and GPUS > 1:
        more = [flag for flag in more if flag != "--amp"]  # it is for one GPU in a process
    path = edited(name, END, TELL + END, BEGIN, WATCH + BEGIN)
    for output, *own in ["out"], ["folder", "--dataset", data / "pictures", "--batch-size", 4]:
        flags = ["--log-every", 50, *more, "--workers", 2 * (output == "folder"), *own]
        text = run(name, *JOB, output, *flags, path=path, processes=TWO.get(name, 1))
        assert text.count("watched") == TWO.get(name, 1) and "LaunchKernel" in text
        assert not re.search("StreamSync|EventSync|Pageable", text), text

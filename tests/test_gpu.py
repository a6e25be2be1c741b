"""What only a GPU shows: NCCL, TF32, channels_last, --amp, --compile, --sync-bn, no hidden waiting.
`pytest -m gpu` on a machine with one GPU or more; the others are in test_emulated.py too."""

import re

import pytest
import torch
from helpers import *

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]
JOB = ["--dataset", "synthetic", "--epochs", 1, "--lr", 0.01, "--output"]
BEGIN = "            run_step = epoch * epoch_steps + step\n"  # of a step
LOSSES = ["train_loss", "test_loss"]
PROCESSES = [*DDP[:2], "fsdp2"]  # with a GPU each
END = "            if step % args.log_every == 0 or step == epoch_steps:"


@pytest.mark.parametrize("name", SCRIPTS)
def test_trains(name):
    """On one GPU or, with DataParallel, on all; NCCL knows which GPU is whose."""
    text = run(name, *JOB, "out")
    assert "device cuda" in text and ("backend nccl" in text) == (name not in SCRIPTS[:2])
    assert not re.search("is currently unknown|Guessing device|destroy_process_group", text), text
    row = metrics("out")[0]
    assert row["train_loss"] < 2.3 and row["peak_memory_mib"] > 0
    assert all(tensor.device.type == "cpu" for tensor in weights("out").values())
    run("single", *JOB, "cpu", "--device", "cpu")
    close("out", "cpu", 1e-2, LOSSES, 1e-2)  # TF32 has ten bits


PARTS = ["--augment", "--accumulate", 2, "--clip-norm", 1, "--batch-size", 96]
NORM = ["--model", "resnet18", "--amp", "--sync-bn"]
FLAGS = ["--amp"], ["--compile"], ["--compress-gradients"], NORM, PARTS


@pytest.mark.parametrize("name", ["single", *DDP, "fsdp2"])
@pytest.mark.parametrize("flags", FLAGS)
def test_flags(name, flags):
    """On two GPUs, where there are two, as on one; a flag that changes how DDP talks is DDP's."""
    own = [flag for flag in flags if flag in ("--sync-bn", "--compress-gradients")]
    if own and name not in DDP:
        pytest.skip("not offered")
    if name == DDP[2] and GPUS > 1 and {"--amp", "--compile"} & set(flags):
        assert "several GPUs in one process" in run(name, *JOB, "out", *flags, status=2)
        return
    text = run(name, *JOB, "out", *flags, processes=min(GPUS, 2) if name in PROCESSES else 1)
    assert ("device cuda:1" in text) == (GPUS > 1 and name != "single"), text
    run("single", *JOB, "single", *[flag for flag in flags if flag not in own])
    close("out", "single", 1e-3 if flags == PARTS else 5e-2, LOSSES, 1e-2)


@pytest.mark.parametrize("name", ["single", "ddp_torchrun"])
def test_what_is_set_for_a_gpu(name):
    """TF32, cudnn's search, channels_last; after the first step nothing is compiled any more."""
    graphs = 'torch._dynamo.utils.counters["stats"]["unique_graphs"]'
    flags = "torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark"
    layout = "model.conv1.weight.is_contiguous(memory_format=torch.channels_last)"
    tell = f"            print('set', {flags}, {layout}, {graphs})\n"
    more = ["--epochs", 2, "--batch-size", 100, "--model", "resnet18", "--compile"]
    text = run(name, *JOB, "out", *more, path=edited(name, BEGIN, BEGIN + tell))
    told = re.findall(r"^set (\w+ \w+ \w+) (\d+)", text, re.M)
    assert len(told) == 200 and {line[0] for line in told} == {"True True True"}
    assert len({line[1] for line in told[1:]}) == 1 and told[0][1] < told[1][1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_and_resumed(name):
    flags = ["--dataset", "synthetic", "--epochs", 20, "--log-every", 20, "--resume"]
    flags += ["--checkpoint-minutes", 0, "--output"]
    run(name, *flags, "whole")
    jobs = start(name, *flags, "out")
    wait_for("epoch 3/20 step 40/", *jobs)
    kill_all(jobs)
    assert "from epoch 1, " not in run(name, *flags, "out")
    close("out", "whole", 1e-2, LOSSES, 1e-2)  # cudnn adds in another order each time


MORE = [], ["--amp"], ["--accumulate", 2, "--clip-norm", 1], ["--optimizer", "adam"]
WATCH = """            if step == 4:  # cudnn searches in the first
                watch = torch.profiler.profile()
                watch.start()
"""
TELL = """            if step == 40:
                watch.stop()  # which waits itself, once, for the whole device
                for event in watch.key_averages():
                    if "StreamSync" in event.key or "EventSync" in event.key or "Page" in event.key:
                        print("waits:", event.key, event.count, flush=True)
                print("watched", [e.key for e in watch.key_averages() if "cuda" in e.key])
"""


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("more", MORE)
def test_nothing_waits_between_progress_lines(data, name, more):
    """The profiler sees no call that waits for a stream, DDP's and NCCL's included, and no copy
    from memory that is not pinned, for which it would wait too; also of a folder."""
    if "--amp" in more and (name == "dp" or name == DDP[2] and GPUS > 1):
        pytest.skip("--amp is for one GPU in a process")
    path = edited(name, END, TELL + END, BEGIN, BEGIN + WATCH)
    count = min(GPUS, 2) if name in PROCESSES else 1
    for output, *own in ["out"], ["folder", "--dataset", data / "pictures", "--batch-size", 2]:
        flags = ["--log-every", 50, *more, "--workers", 2 * (output == "folder"), *own]
        text = run(name, *JOB, output, *flags, path=path, processes=count)
        assert "waits:" not in text and "LaunchKernel" in text, text

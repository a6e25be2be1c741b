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
END = "            if step % args.log_every == 0 or step == epoch_steps:\n"


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
    close("out", "cpu", 1e-2, LOSSES)  # TF32 has ten bits


FLAGS = ["--amp"], ["--compile"], ["--clip-norm", 0.5], ["--amp", "--model", "resnet18"]


@pytest.mark.parametrize("name", ["single", *DDP, "fsdp2"])
@pytest.mark.parametrize("flags", FLAGS)
def test_flags(name, flags):
    if name == DDP[2] and GPUS > 1 and {"--amp", "--compile"} & set(flags):
        assert "several GPUs in one process" in run(name, *JOB, "out", *flags, status=2)
        return
    own = ["--sync-bn", "--compress-gradients"] if name in DDP and "resnet18" in flags else []
    run(name, *JOB, "out", *flags, *own)
    run("single", *JOB, "single", *flags)
    close("out", "single", 5e-2, LOSSES)


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
    close("out", "whole", 1e-2, LOSSES)  # cudnn adds in another order each time


MORE = [], ["--amp"], ["--accumulate", 2, "--clip-norm", 1], ["--optimizer", "adam"]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("more", MORE)
def test_nothing_waits_between_progress_lines(data, name, more):
    """torch's own detector of hidden synchronisation stays quiet in the loop, also of a folder."""
    if "--amp" in more and (name == "dp" or name == DDP[2] and GPUS > 1):
        pytest.skip("--amp is for one GPU in a process")
    mode = '            torch.cuda.set_sync_debug_mode("{}")\n'
    path = edited(name, END, END + "    " + mode.format("default"))
    error = "            if step > 3:\n    " + mode.format("error")  # cudnn searches in the first
    path.write_text(path.read_text().replace(BEGIN, BEGIN + error))
    flags = ["--augment", "--log-every", 50, *more]
    run(name, *JOB, "out", *flags, path=path)
    folder = ["--dataset", data / "pictures", "--batch-size", 8, "--workers", 2]
    run(name, *JOB, "folder", *flags, *folder, path=path)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_two_gpus_agree_with_one(name):
    """Two processes with a GPU each, or one process with all GPUs."""
    flags = ["--augment", "--accumulate", 2, "--clip-norm", 1, "--batch-size", 160 * GPUS]
    run("single", *JOB, "one", *flags)
    text = run(name, *JOB, "two", *flags, processes=2 if name in PROCESSES else 1)
    assert "device cuda:1" in text or name not in PROCESSES
    close("two", "one", 1e-3, LOSSES)

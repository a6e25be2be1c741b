"""What only a GPU shows: NCCL, TF32, channels_last, --amp, --compile, --sync-bn, no hidden waiting.
`pytest -m gpu` on a machine with one GPU or more; the others are in test_emulated.py too."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import DDP, ROOT, SCRIPTS, close, command, edited, run

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
JOB = ["--dataset", "synthetic", "--epochs", 1, "--lr", 0.01, "--output"]
PARTS = ["--accumulate", 2, "--clip-norm", 1, "--batch-size", 96]
FLAGS = [], ["--amp"], ["--compile"], PARTS, ["--model", "resnet18", "--amp", "--sync-bn"]
TWO = dict.fromkeys([*DDP[:2], "fsdp2"], min(GPUS, 2))  # processes of those with a GPU each
BEGIN = "            for micro_step in range(args.accumulate):\n"  # of a step
END = "            if step % args.log_every == 0 or step == steps_per_epoch:\n"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("flags", FLAGS)
def test_trains(name, flags):
    """On two GPUs, where there are two, as on one, and without flags as on the CPU; with --sync-bn
    batch norm is the same, too. NCCL knows which GPU is whose."""
    one = name == "dp" or name == DDP[2] and GPUS > 1  # process for several GPUs
    if one and flags not in ([], PARTS) or "--sync-bn" in flags and name not in DDP:
        pytest.skip("not offered")
    text = run(name, *JOB, "out", *flags, processes=TWO.get(name, 1))
    assert "device cuda" in text and ("device cuda:1" in text) == (TWO.get(name) == 2)
    assert not re.search("is currently unknown|Guessing device|destroy_process_group", text), text
    device = ["--device", "cuda" if flags else "cpu"]
    run("single", *JOB, "single", *[flag for flag in flags if flag != "--sync-bn"], *device)
    close("out", "single", 1e-3 if flags == PARTS else 5e-2, ["train_loss", "test_loss"], 1e-2)


MORE = [], ["--augment"], ["--accumulate", 2, "--clip-norm", 1, "--amp", "--optimizer", "adam"]
WATCH = """            if step == 13:
                (watch := torch.profiler.profile()).start()
"""
TELL = """            if step == 22:
                watch.stop()  # it waits once for the whole device
                print("watched", *(event.key for event in watch.key_averages()), flush=True)
                tf32, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
                last = model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
                print("set", tf32, cudnn, last, flush=True)
"""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("more", MORE)
def test_nothing_waits_between_progress_lines(data, name, more):
    """No call waits for a stream, and no copy is from memory that is not pinned, for which it would
    wait. cudnn searches in the first steps; DDP's own timers wait in steps 2 to 11, 101, 201, ...;
    --sync-bn waits in every step."""
    if name == "dp" or name == DDP[2] and GPUS > 1:
        more = [flag for flag in more if flag != "--amp"]  # it is for one GPU in a process
    path = edited(name, END, TELL + END, BEGIN, WATCH + BEGIN)
    folder = ["--dataset", data / "pictures", "--batch-size", 4, "--workers", 2]
    for output, own in ("out", []), ("folder", folder):
        flags = [*JOB, output, "--log-every", 50, *more, *(own or ["--model", "resnet18"])]
        text = run(name, *flags, path=path, processes=TWO.get(name, 1))
        assert text.count("watched") == TWO.get(name, 1) and "LaunchKernel" in text
        assert name not in ("single", "ddp_torchrun") or f"set True True {not own}" in text
        assert not re.search("StreamSync|EventSync|Pageable", text), text


@pytest.mark.slow
def test_gpu_sh():
    """benchmarks/gpu.sh on a CPU, with tiny runs: its tables have all their rows."""
    words = ["env", "TINY=1", f"OUT={Path().resolve()}", f"PYTHON={sys.executable}", "bash"]
    command(*words, ROOT / "benchmarks" / "gpu.sh")
    tables = "".join(path.read_text() for path in Path().glob("*.md"))
    assert "nan" not in tables and tables.count("\n| train_") == 6 + 3 + 1 + 1

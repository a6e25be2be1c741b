"""What only a GPU shows: NCCL, TF32, channels_last, --amp, float16, --compile, --sync-bn, CUDA
graphs, deterministic kernels, no hidden waiting. `bash benchmarks/gpu.sh tests` runs them; TINY=1
runs them on a CPU, to see whether they run.

On one GPU there is one rank, with DDP's wrapper all the same. TWO_RANKS_ON_ONE_GPU=1 puts two on
it, which take turns; NCCL allows that from 2.30 on."""

import os
import re
from pathlib import Path

import helpers
import pytest
import test_own_loop
import torch
from harness import GPUS
from helpers import (
    COMPLETE,
    SMALL,
    altered,
    checkpoint,
    close,
    few,
    finish,
    kill_all,
    same,
    wait_for,
    weights,
)

TINY, DEVICE = bool(os.environ.get("TINY")), "cuda" if GPUS else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS and not TINY, reason="needs a GPU")]
only_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
RANKS = 2 if GPUS != 1 or os.environ.get("TWO_RANKS_ON_ONE_GPU") else 1
OLD = GPUS and not torch.cuda.is_bf16_supported(including_emulation=False)  # before Ampere
RANKED = ["ddp_torchrun", "fsdp2", COMPLETE]  # which torchrun starts, a process for each GPU
LOSSES = ["train_loss", "test_loss"]
JOB = ["--dataset", "synthetic", "--epochs", 1, "--lr", 0.002, "--workers", 1, "--output"]
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": 0}  # whatever a script sets

# What a copy of a script does differently.
WRAPPED = """
def distribute(args, model):  # DDP's wrapper, on one rank too
    train_model = torch.compile(model, dynamic=False) if args.compile else model
    train_model = DistributedDataParallel(train_model, gradient_as_bucket_view=True)
    train_model.broadcast_buffers = False
    return train_model
"""
WRAPS = WRAPPED if RANKS == 1 else ""  # the small scripts do not call it
FEW, FEWER = few(2048, 512) + WRAPS, few(256, 64) + WRAPS
FLOAT16 = "torch.cuda.is_bf16_supported = lambda *args, **options: False\n"  # as on a T4


def start_copy(name, *flags, ranks=RANKS, code=FEW, titles=(), cpu=False, **environment):
    """Start a copy of a script that has this code, too, and these recipes: with 0 ranks as `python`
    starts it, with `cpu` without GPUs. Each rank sees all; two on one GPU are both local rank 0."""
    path = altered(name, more=code, titles=titles)
    if cpu:
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "HIP_VISIBLE_DEVICES": "-1",
        }  # to HIP, "" is all
    environment["NCCL_MULTI_RANK_GPU_ENABLE"] = 1  # for two ranks on one GPU
    return helpers.start(path, *flags, processes=ranks, gpus=GPUS, **environment)


def ends(*runs):
    """What these runs print, which have been started side by side. They are killed if one of them
    fails or hangs, or they would hold the GPU."""
    found = [finish(jobs, 240 if GPUS else 900) for jobs in runs]
    if any(set(statuses) != {0} for statuses, _ in found):
        kill_all([job for jobs in runs for job in jobs])
    for statuses, text in found:
        assert set(statuses) == {0}, (statuses, text)
    return [text for _, text in found]


def run_copy(*args, **options):
    return ends(start_copy(*args, **options))[0]


def one(output, *flags, code=FEW):
    """Start the run to compare with: complete/train.py on one process, in float32 without TF32."""
    return start_copy(
        COMPLETE, *JOB, output, *flags, ranks=0, code=code.replace(WRAPPED, ""), **NO_TF32
    )


def ranks_of(name):
    """How many processes a small script has on this machine."""
    return {"ddp_spawn": max(1, min(GPUS, 2))}.get(name, RANKS if name in RANKED else 1)


def check_devices(text, ranks=RANKS):
    """All of this run's GPUs are used, and NCCL knows which one is whose."""
    assert f"device {DEVICE}" in text, text
    assert ("device cuda:1" in text) == (ranks > 1 and GPUS > 1), text
    assert not re.search("under current context|Guessing device|destroy_process_group", text), text


def losses(text):
    """Loss and accuracy of each epoch of a small script."""
    found = re.findall(r"^epoch \d+: loss (\S+) accuracy (\S+)", text, re.M)
    return [float(number) for pair in found for number in pair]


# Nothing waits for the GPU between two progress lines: steps 13 to 21 are watched. cuDNN searches
# in the first steps; DDP's own timers wait in steps 2 to 11, 101, 201, ...
WATCH = """
from torch.optim.optimizer import register_optimizer_step_post_hook

watch, steps = None, 0

def count_steps(optimizer, *_):
    global watch, steps
    steps += 1
    if steps == 12:
        watch = torch.profiler.profile()
        watch.start()
    if steps == 21:
        watch.stop()  # it waits once for the whole device
        print("watched", *(event.key for event in watch.key_averages()), flush=True)
        tf32, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
        filters = [p for group in optimizer.param_groups for p in group["params"] if p.ndim == 4]
        last = filters[0].is_contiguous(memory_format=torch.channels_last)
        gpus = range(torch.cuda.device_count())
        used = [torch.cuda.max_memory_allocated(gpu) > 0 for gpu in gpus]
        print("set", tf32, cudnn, last, "used", sum(used), flush=True)

register_optimizer_step_post_hook(count_steps)
"""
WAITS = "StreamSync|EventSync|Pageable|hipMemcpyWithStream"


def check_no_waiting(text, ranks):
    """No call waits for a stream, and no copy is from memory that is not pinned, for which it would
    wait."""
    assert text.count("watched") == text.count("set high") == ranks, text
    assert "LaunchKernel" in text or not GPUS, text
    assert not re.search(WAITS, text), text


@pytest.mark.parametrize("name", SMALL)
def test_small(name):
    """As on the CPU, on all GPUs, without waiting for them in a step; and with --amp, up to
    bfloat16."""
    ranks = ranks_of(name)
    jobs = [start_copy("single", *JOB, "cpu", ranks=1, cpu=True)]
    jobs += [start_copy(name, *JOB, "out", ranks=ranks, code=FEW + WATCH, **NO_TF32)]
    if name not in ("dp", "ddp_multigpu_proc") and not OLD:  # DataParallel has no --amp
        jobs += [start_copy(name, *JOB, "amp", "--amp", ranks=ranks)]
    cpu, text, *amp = ends(*jobs)
    if name in ("dp", "ddp_multigpu_proc"):  # one process for all GPUs
        assert f"{GPUS} GPUs\n" in text, text
    else:
        assert text.count(f" of {GPUS} GPUs\n") == ranks, text
        check_devices(text, ranks)
    check_no_waiting(text, ranks)
    used = GPUS if name in ("dp", "ddp_multigpu_proc") else min(1, GPUS)
    assert f"used {used}\n" in text  # by one process
    assert len(losses(cpu)) == 2 and losses(text) == pytest.approx(losses(cpu), rel=1e-3, abs=4e-3)
    assert all(losses(text)[0] == pytest.approx(losses(cpu)[0], rel=5e-2) for text in amp)


def test_small_scripts_continue_each_other():
    """One run on GPUs, an epoch by each of three scripts. (On CPUs, it is all.)"""
    text, whole = "", start_copy("single", *JOB, "whole", "--epochs", 3, ranks=1, **NO_TF32)
    for epochs, name in enumerate(["ddp_torchrun", "dp", "ddp_multigpu_proc"], 1):
        flags = [*JOB, "out", "--resume", "--epochs", epochs]
        text += run_copy(name, *flags, ranks=ranks_of(name), **NO_TF32)
    [whole] = ends(whole)
    assert len(losses(text)) == 6 and losses(text) == pytest.approx(losses(whole), 2e-3, 4e-3)


ACCUMULATE = ["--accumulate", 2, "--clip-norm", 1]


@pytest.mark.parametrize("flags", [[], ACCUMULATE], ids=["plain", "accumulate"])
def test_as_on_one_cpu(flags):
    """In float32 without TF32, DDP trains as one process does on the CPU."""
    cpu = one("one", *flags[2:], "--device", "cpu")
    jobs = start_copy(COMPLETE, *JOB, "out", *flags, **NO_TF32)
    check_devices(ends(jobs, cpu)[0])
    close("out", "one", 1e-3, LOSSES)


LESS_EXACT = {"amp": ("--amp", ""), "float16": ("--amp", FLOAT16), "compile": ("--compile", "")}


@pytest.mark.parametrize("flag, code", LESS_EXACT.values(), ids=LESS_EXACT)
def test_less_exact_flags(flag, code):
    """With TF32, as users have it, the losses are near those without."""
    ends(start_copy(COMPLETE, *JOB, "out", flag, code=FEW + code), one("one"))
    close("out", "one", 5e-2, LOSSES)


RESNET = ["--model", "resnet18", "--batch-size", 32]


@only_gpu
@pytest.mark.skipif(RANKS == 1, reason="one GPU")
def test_sync_bn():
    """Batch norm over both ranks' images is that of one process."""
    flags = [*RESNET, "--lr", 0]  # so that only batch norm can differ
    out = start_copy(COMPLETE, *JOB, "out", *flags, "--sync-bn", code=FEWER, **NO_TF32)
    ends(out, one("one", *flags, code=FEWER))
    close("out", "one", 1e-3, LOSSES)


def killed_and_resumed(*flags, **options):
    """Start this run, kill it within the first epoch or soon after, and resume it."""
    jobs = start_copy(COMPLETE, *flags, **options)
    wait_for("epoch 1/2 step 20/", *jobs)
    kill_all(jobs)
    text = run_copy(COMPLETE, *flags, **options)
    [finished] = re.findall(r"out: (\d epochs and \d+) steps are done", text)
    assert finished not in ("0 epochs and 0", "2 epochs and 0")


KILLED = {"compile-amp": (["--compile", "--amp"], ""), "float16": (["--amp"], FLOAT16)}


@pytest.mark.parametrize("flags, code", KILLED.values(), ids=KILLED)
def test_killed_and_resumed(flags, code):
    """Compiled, and in float16: the scaler continues where it was."""
    flags = [*flags, "--augment", "--epochs", 2, "--resume"]
    flags += ["--log-every", 5, "--checkpoint-minutes", 0]
    whole = start_copy(COMPLETE, *JOB, "whole", *flags, code=FEW + code)
    killed_and_resumed(*JOB, "out", *flags, code=FEW + code)
    ends(whole)
    close("out", "whole", 2e-2, LOSSES)
    scaler, other = (checkpoint(output)["scaler"] for output in ("out", "whole"))
    assert scaler == other  # its scale, and the steps since that last changed
    assert scaler or not (GPUS and code == FLOAT16)


DETERMINISTIC = [["--augment"], ["--augment", "--amp"]]


@pytest.mark.parametrize("more", DETERMINISTIC, ids=["float32", "amp"])
def test_deterministic_runs_are_bit_identical(more):
    """With the recipe: two undisturbed runs, and one that is killed and resumed."""
    options = {"code": FEWER, "titles": ["Deterministic runs on a GPU"]}
    options["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    flags = [*RESNET, *more, "--batch-size", 8, "--epochs", 2, "--resume"]
    flags += ["--log-every", 10, "--checkpoint-minutes", 0]
    one, other = (
        start_copy(COMPLETE, *JOB, output, *flags, **options) for output in ("one", "other")
    )
    killed_and_resumed(*JOB, "out", *flags, **options)
    ends(one, other)
    for output in "other", "out":
        assert same(weights("one"), weights(output)), output


def test_compile_reduce_overhead():
    """With CUDA graphs, as docs/cost_and_speed.md gets them, the losses are near those without."""
    options = {"ranks": 0, "code": FEW.replace(WRAPPED, "")}
    graphs = start_copy(COMPLETE, *JOB, "out", "--compile", titles=["Small networks"], **options)
    ends(graphs, one("one"))
    close("out", "one", 5e-2, LOSSES)


def test_a_run_moves_between_gpu_and_cpu():
    """GPUs, one process on the CPU, GPUs again: the run that the CPU does alone. AdamW's fused step
    counts are on the device."""
    flags = ["--optimizer", "adamw", "--lr", 1e-4, "--resume", "--epochs"]
    whole = one("whole", "--device", "cpu", *flags, 3)
    run_copy(COMPLETE, *JOB, "out", *flags, 1, **NO_TF32)
    ends(one("out", "--device", "cpu", *flags, 2))
    text = run_copy(COMPLETE, *JOB, "out", *flags, 3, **NO_TF32)
    assert "out: 2 epochs and 0 steps are done" in text
    ends(whole)
    close("out", "whole", 2e-3, LOSSES)


MORE = {
    "plain": ([], ""),
    "augment": (["--augment"], ""),
    "accumulate": ([*ACCUMULATE, "--amp", "--optimizer", "adamw"], ""),
    "float16": (["--amp", "--optimizer", "adamw"], FLOAT16),  # SGD's step waits for the scaler
    "loader": (["--dataset", "pictures", "--batch-size", 4, "--workers", 2], ""),
}


@pytest.mark.parametrize("more, code", MORE.values(), ids=MORE)
def test_nothing_waits_between_progress_lines(data, more, code):
    code = few(768, 512) + WRAPS + code + WATCH
    Path("pictures").symlink_to(data / "pictures")
    text = run_copy(COMPLETE, *JOB, "out", *RESNET, "--log-every", 50, *more, code=code)
    check_no_waiting(text, RANKS)
    cuda = torch.version.hip is None  # on AMD, the search takes minutes
    assert text.count(f"set high {cuda} True") == RANKS, text


DISCS = test_own_loop.FEW_DISCS.replace("107", "288")  # 24 steps an epoch


def test_after():
    """after.py in float16: it learns, and no step waits for the GPU, but one in five, which update
    the average of the weights."""
    flags = ["--epochs", 2, "--batch-size", 12, "--lr", 0.03, "--workers", 0, "--output", "out"]
    text = run_copy("own_loop/after.py", *flags, code=DISCS + WATCH)
    scores = test_own_loop.epochs(text)
    assert scores[1][0] < scores[0][0] and scores[1][2] > 0
    assert text.count("watched") == RANKS and ("LaunchKernel" in text or not GPUS), text
    assert len(re.findall(WAITS, text)) <= 4 * RANKS, text
    assert not re.search("under current context|Guessing device", text), text

"""What only a GPU shows: NCCL, TF32, channels_last, --amp, float16, --compile, --sync-bn, no hidden
waiting. `pytest -m gpu` on a machine with one GPU or more."""

import re

import pytest
import torch
from helpers import COMPLETE, SMALL, close, edited, kill_all, run, start, wait_for, weights

GPUS, IS_CUDA = torch.cuda.device_count(), torch.version.hip is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]
DDP, FSDP2 = COMPLETE
RANKS = [SMALL[2], SMALL[3], SMALL[5], *COMPLETE]  # those with a process per GPU
TWO = dict.fromkeys(RANKS, min(GPUS, 2))  # the others have one process for all GPUs
LOSSES = ["train_loss", "test_loss"]
JOB = ["--dataset", "synthetic", "--epochs", 1, "--lr", 0.01, "--output"]
FLOAT16 = "not torch.cuda.is_bf16_supported(including_emulation=False)", "True"  # as on a T4
OLD = GPUS and not torch.cuda.is_bf16_supported(including_emulation=False)


def check_devices(name, text):
    """All its GPUs are used, and NCCL knows which one is whose."""
    assert "device cuda" in text and ("device cuda:1" in text) == (TWO.get(name) == 2), text
    assert not re.search("under current context|Guessing device|destroy_process_group", text), text


def hide_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")  # to HIP, "" is all


def losses(text):
    """Loss and accuracy of each epoch of a small script."""
    found = re.findall(r"^epoch \d+: loss (\S+) accuracy (\S+)", text, re.M)
    return [float(number) for pair in found for number in pair]


@pytest.mark.parametrize("name", SMALL)
def test_small(monkeypatch, name):
    """As on the CPU, up to TF32; and with --amp, up to bfloat16."""
    text = run(name, *JOB, "out", processes=TWO.get(name, 1))
    check_devices(name, text)
    found = [losses(text)]
    if name not in (SMALL[1], SMALL[4]):  # DataParallel has no --amp
        found.append(losses(run(name, *JOB, "amp", "--amp", processes=TWO.get(name, 1))))
    hide_gpus(monkeypatch)
    text = run("single", *JOB, "cpu")
    assert "device cpu" in text
    for own in found:
        assert own == pytest.approx(losses(text), rel=5e-2, abs=1e-2)


def test_small_scripts_continue_each_other():
    """One run on GPUs, an epoch by each script."""
    text, flags = "", [*JOB, "out", "--resume"]
    for epochs, name in enumerate(SMALL[:5], 1):
        text += run(name, *flags, "--epochs", epochs, processes=TWO.get(name, 1))
    whole = run("single", *JOB, "whole", "--epochs", 5)
    assert len(losses(text)) == 10 and losses(text) == pytest.approx(losses(whole), 5e-2, 1e-2)


PARTS = ["--accumulate", 2, "--clip-norm", 1, "--batch-size", 96]
SYNC = ["--model", "resnet18", "--lr", 0, "--batch-size", 8, "--sync-bn"]  # only batch norm differs


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize("flags", [[], ["--amp"], ["--compile"], PARTS, SYNC])
def test_complete(name, flags):
    """On two GPUs, where there are two, as on one without --amp, --compile, --accumulate; and
    without flags as on the CPU. With --sync-bn batch norm is the same, too."""
    if name == FSDP2 and OLD and "--amp" in flags or flags == SYNC and (name == FSDP2 or GPUS < 2):
        pytest.skip("not offered, or nothing to see")
    check_devices(name, run(name, *JOB, "out", *flags, processes=TWO[name]))
    one = {"--amp": [], "--compile": [], "--accumulate": PARTS[2:], "--model": SYNC[:-1]}
    one = one[flags[0]] if flags else ["--device", "cpu"]
    run(DDP, *JOB, "one", *one, processes=0)
    least = 1e-3 if flags == SYNC else 1e-2
    close("out", "one", 1e-3 if flags in (PARTS, SYNC) else 5e-2, LOSSES, least)


def test_float16():
    """As before Ampere: the losses of float32."""
    run(DDP, *JOB, "out", "--amp", processes=TWO[DDP], path=edited(DDP, *FLOAT16))
    run(DDP, *JOB, "one", processes=0)
    close("out", "one", 5e-2, LOSSES, 1e-2)


@pytest.mark.skipif(bool(OLD), reason="not offered")
def test_blocks_are_gathered_in_bfloat16():
    """By --amp, in a model without batch norm; the losses are those of float32."""
    cut = "    fully_shard(model, mesh=mesh)"
    tell = "lambda layer, _: print('types', layer.weight.dtype, flush=True)"
    hook = f"    blocks[0].register_forward_pre_hook({tell})\n{cut}"
    path = edited(FSDP2, "BLOCKS = (models", "BLOCKS = (nn.Linear, models", cut, hook)
    text = run(FSDP2, *JOB, "out", "--amp", processes=TWO[FSDP2], path=path)
    assert set(re.findall(r"types (.*)", text)) == {"torch.bfloat16"}
    run(DDP, *JOB, "one", processes=0)
    close("out", "one", 5e-2, LOSSES, 1e-2)


OFTEN = "30 * (now - started)", "0"  # FSDP2 saves as often as it is told to
KILLED = [(DDP, ["--compile", "--amp"], ()), (FSDP2, ["--compile"], OFTEN)]
KILLED += [(DDP, ["--amp"], FLOAT16)]


@pytest.mark.parametrize("name, flags, change", KILLED)
def test_killed_and_resumed(name, flags, change):
    """Compiled, and in float16: the scaler goes on where it was."""
    flags = [*flags, "--augment", "--epochs", 2, "--log-every", 5, "--checkpoint-minutes", 0]
    flags.append("--resume")
    path = edited(name, *change)
    jobs = start(name, *JOB, "out", *flags, processes=TWO[name], path=path)
    wait_for("epoch 1/2 step 60/", *jobs)
    kill_all(jobs)
    text = run(name, *JOB, "out", *flags, processes=TWO[name], path=path)
    [done] = re.findall(r"out: (\d epochs and \d+) steps are done", text)
    assert done not in ("0 epochs and 0", "2 epochs and 0")
    run(name, *JOB, "whole", *flags, processes=TWO[name], path=path)
    close("out", "whole", 2e-2, LOSSES, 1e-2)
    scalers = [weights(output, "last.pt")["scaler"] for output in ("out", "whole")]
    assert bool(scalers[0]) == (change == FLOAT16 or bool(OLD) and "--amp" in flags)
    assert scalers[0] == scalers[1]  # its scale, and the steps since that last changed


MORE = [], ["--augment"], ["--accumulate", 2, "--clip-norm", 1, "--amp", "--optimizer", "adamw"]
BEGIN = "            for micro_step in range(args.accumulate):\n"  # of a step
END = "            log = step % args.log_every == 0 or step == steps_per_epoch\n"
SMALL_BEGIN = "        for step, batch in enumerate(train_loader, 1):\n"
SMALL_END = "            if step % 100 == 0"
WATCH = """            if step == 13:
                (watch := torch.profiler.profile()).start()
"""
TELL = """            if step == 22:
                watch.stop()  # it waits once for the whole device
                print("watched", *(event.key for event in watch.key_averages()), flush=True)
                tf32, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
                last = model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
                gpus = range(torch.cuda.device_count())
                used = [torch.cuda.max_memory_allocated(gpu) > 0 for gpu in gpus]
                print("set", tf32, cudnn, last, "used", sum(used), flush=True)
"""


def check_no_waiting(text, processes):
    """No call waits for a stream, and no copy is from memory that is not pinned, for which it would
    wait. cudnn searches in the first steps; DDP's own timers wait in steps 2 to 11, 101, 201, ...;
    --sync-bn waits in every step."""
    assert text.count("watched") == processes and "LaunchKernel" in text, text
    assert not re.search("StreamSync|EventSync|Pageable|hipMemcpyWithStream", text), text


CASES = [(name, more, ()) for name in COMPLETE for more in MORE] + [(DDP, MORE[2], FLOAT16)]


@pytest.mark.parametrize("name, more, change", CASES)
def test_nothing_waits_between_progress_lines(data, name, more, change):
    if name == FSDP2 and OLD:
        more = [flag for flag in more if flag != "--amp"]
    path = edited(name, *change, END, TELL + END, BEGIN, WATCH + BEGIN)
    folder = ["--dataset", data / "pictures", "--batch-size", 4, "--workers", 2]
    for output, own in ("out", []), ("folder", folder):
        flags = [*JOB, output, "--log-every", 50, *more, *(own or ["--model", "resnet18"])]
        text = run(name, *flags, path=path, processes=TWO[name])
        check_no_waiting(text, TWO[name])
        # AMD has TF32 on request only, and its search takes minutes.
        assert f"set {IS_CUDA} {IS_CUDA} {not own if name == DDP else ''}" in text


@pytest.mark.parametrize("name", SMALL)
def test_nothing_waits_in_the_small_scripts(name):
    path = edited(name, SMALL_END, TELL + SMALL_END, SMALL_BEGIN, SMALL_BEGIN + WATCH)
    text = run(name, *JOB, "out", path=path, processes=TWO.get(name, 1))
    check_no_waiting(text, TWO.get(name, 1))
    assert f"used {GPUS if name in (SMALL[1], SMALL[4]) else 1}\n" in text  # by one process

"""Tables of gpu.sh. --batch-size is that of a GPU. Without one, two processes stand in for two."""

import argparse
import tempfile
from pathlib import Path

import torch
from runs import GPUS, SCRIPTS, copy_scripts, row, run, table, train

ALL = GPUS or 2
COUNTS = sorted({n for n in (1, 2, 4, 8) if n < GPUS} | {ALL})
# TFLOP/s in bfloat16, dense, of the data sheets; the first whose name is in the GPU's.
PEAK = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312}
NO_TF32 = """torch.backends.cudnn.allow_tf32 = False  # of convolutions
torch.set_float32_matmul_precision = lambda precision: None  # the default: no TF32
"""
CONTIGUOUS = """def build_model(*args, build=build_model):
    return build(*args).to(memory_format=torch.contiguous_format)
"""


def scripts(folder):
    """Every script on 1, 2, 4, ... GPUs, with bfloat16 where it has that."""
    table(ALL, "script", "GPUs", "bfloat16", "images/s", "x train_single.py", "s/epoch", "MiB")
    copy_scripts(folder)
    alone = None  # images a second of train_single.py
    for name in SCRIPTS:
        for n in [1] if name == "single" or name == "dp" and not GPUS else COUNTS:
            amp = name != "dp" and (name != "ddp_multigpu_proc" or n == 1 or not GPUS)
            flags = [*args.flags, *["--amp"] * amp, "--batch-size", args.batch_size * n]
            rate, memory = train(folder / f"train_{name}.py", n, flags)
            alone = alone or rate
            cells = f"{rate:.0f}", f"{rate / alone:.2f}", f"{args.samples / rate:.1f}"
            row(f"train_{name}.py", n, "yes" if amp else "no", *cells, f"{memory:.0f}")


def language(folder):
    """Tokens a second, and the share of the GPUs' peak (MFU)."""
    table(ALL, "script", "GPUs", "flags", "tokens/s", "TFLOP/s a GPU", "MFU", "MiB")
    copy_scripts(folder)
    # Operations a token: six for each weight of the blocks, and attention (PaLM, appendix B).
    operations = 6 * 12 * args.units**2 * args.layers + 12 * args.layers * args.units * args.window
    gpu = torch.cuda.get_device_name() if GPUS else "CPU"
    peak = next((peak for name, peak in PEAK.items() if name in gpu), None)
    amp = ["--amp"] if GPUS else []  # torch has no layer norm of mixed types for a CPU
    flags = ["--units", args.units, "--layers", args.layers, "--window", args.window, *args.flags]
    for name, n in ("ddp_torchrun", 1), ("ddp_torchrun", ALL), ("fsdp2", ALL):
        for more in (amp, [*amp, "--compile"])[: args.first]:
            own = [*flags, *more, "--batch-size", args.batch_size * n]
            rate, memory = train(folder / f"train_{name}.py", n, own)
            speed = rate * args.window * operations / n / 1e12
            mfu = f"{speed / peak:.1%}" if peak else "-"
            cells = f"{rate * args.window:.0f}", f"{speed:.1f}", mfu, f"{memory:.0f}"
            row(f"train_{name}.py", n, " ".join(more), *cells)


def settings(folder):
    """TF32, --amp, --compile and channels_last on one GPU, each off and on."""

    def rate(*flags, more=""):
        copy_scripts(folder, more)
        flags = [*args.flags, *flags, "--batch-size", args.batch_size]
        return train(folder / "train_single.py", 1, flags)[0]

    table(1, "train_single.py, images/s", "off", "on", "on / off")
    tf32, amp = rate(), rate("--amp")
    for what, off, on in (
        ("TF32", rate(more=NO_TF32), tf32),
        ("`--amp`", tf32, amp),
        ("`--compile`, with `--amp`", amp, rate("--amp", "--compile")),
        ("channels_last, with `--amp`", rate("--amp", more=CONTIGUOUS), amp),
    ):
        row(what, f"{off:.0f}", f"{on:.0f}", f"{on / off:.2f}")


def resume(folder):
    """The weights of a second undisturbed run, and of one killed and resumed, beside the first."""
    table(ALL, "script", "GPUs", "flags", "killed after", "undisturbed", "resumed")
    copy_scripts(folder)
    flags = ["--epochs", 4, "--log-every", 5, "--checkpoint-minutes", 0, "--resume", *args.flags]
    flags += ["--batch-size", args.batch_size // ALL * ALL]  # each process's share is whole
    for name, n in (("single", 1), ("ddp_torchrun", ALL), ("fsdp2", ALL))[: args.first]:
        for more in (["--augment"], ["--amp", "--compile"])[: args.first]:
            words = folder / f"train_{name}.py", n, [*flags, *more]
            one, two, killed = (folder / "-".join([name, *more, kind]) for kind in "abc")
            run(*words, one)
            run(*words, two)
            run(*words, killed, until="epoch 2/4 step 10/")
            [line] = [t for t in run(*words, killed).splitlines() if t.endswith(" are done")]
            first, *others = (torch.load(output / "model.pt") for output in (one, two, killed))
            cells = [line.split(": ")[1].removesuffix(" are done")]
            for other in others:  # the largest difference of a weight
                apart = ((first[key].double() - other[key].double()).abs().max() for key in first)
                cells.append(f"{max(apart).item():.1e}")
            row(f"train_{name}.py", n, " ".join(more), *cells)


if __name__ == "__main__":
    parts = {part.__name__: part for part in (scripts, language, settings, resume)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=parts)
    for flag in "--batch-size", "--samples", "--units", "--layers", "--window", "--first":
        parser.add_argument(flag, type=int)
    args, flags = parser.parse_known_args()
    args.flags = [*flags, "--dataset", "synthetic", "--samples", args.samples]
    with tempfile.TemporaryDirectory() as folder:
        parts[args.part](Path(folder))

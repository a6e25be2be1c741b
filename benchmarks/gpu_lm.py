"""The parts of gpu.sh about large/train_lm.py: `python benchmarks/gpu_lm.py large`, or `saving`.

As in gpu.py, each run has processes of its own. A rate is the median of the second half of the
progress lines: at the first one, a new run begins to save.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from gpu import ALL, MEMORY, TINY
from harness import GPUS, ROOT, attempt, end_on_sigterm, end_part, row, table, write_altered

sys.path.insert(0, str(ROOT / "large"))
import train_lm  # noqa: E402

DEVICE = "cuda" if GPUS else "cpu"
LENGTH, VOCABULARY = 1024, 50_304
BARE, WARMUP, STEPS, SIZE, BATCH = 40, 10, 200, "160m", 16
if TINY:
    LENGTH, VOCABULARY = 8, 512
    BARE, WARMUP, STEPS, SIZE, BATCH = 2, 1, 6, "tiny", 2


def largest(n, *sizes):
    """The first of these sizes of which n GPUs can hold weights, gradients and AdamW's averages (16
    bytes a parameter) in 60% of their memory. The rest is for activations."""
    for size in sizes if not TINY else []:
        with torch.device("meta"):
            model = train_lm.LanguageModel(VOCABULARY, *train_lm.SIZES[size])
        if 16 * sum(p.numel() for p in model.parameters()) < 0.6 * MEMORY * n:
            return size
    return SIZE


def make_tokens(folder):
    """What prepare_texts.py writes, of random token ids."""
    random, parts = np.random.default_rng(0), {}
    for part, count in {"train": 20_000_000, "val": 100_000}.items():
        random.integers(VOCABULARY, size=count, dtype=np.uint16).tofile(folder / f"{part}.bin")
        parts[part] = {"count": count, "sha256": "random"}
    about = {"tokenizer": "random", "vocabulary": VOCABULARY, "dtype": "uint16", **parts}
    (folder / "tokens.json").write_text(json.dumps(about | {"token_bytes": [1] * VOCABULARY}))
    (folder / "tokenizer.json").write_text(json.dumps({"name": "bytes"}))


def run_lm(folder, path, n, size, *flags):
    """What a run on n GPUs prints; "" if it fails."""
    words = ["--tokens", folder, "--size", size, "--length", LENGTH, "--batch-size", BATCH * n]
    words += ["--steps", STEPS, "--log-every", STEPS // 6, "--eval-every", STEPS]
    words += ["--eval-tokens", LENGTH, *flags]
    output = folder / f"run-{time.monotonic_ns()}"
    text = attempt(path, n, words, output) or ""
    for file in output.rglob("*.*"):  # gigabytes; the folder itself is removed at the end
        if file.is_file():
            file.unlink()
    return text


def bare_step(size):
    """Print the tokens per second of the same model on one GPU without FSDP2, compiled: forward and
    backward pass, clipping, AdamW, on one batch that is on the GPU. In the same precision: a model
    in bfloat16, whose weights are copies of the optimizer's in float32."""
    model = train_lm.LanguageModel(VOCABULARY, *train_lm.SIZES[size])
    model.to(DEVICE, torch.bfloat16 if GPUS else torch.float32)
    model.head.chunk = train_lm.chunk_tokens(train_lm.parser.parse_args([]), VOCABULARY)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.head.chunk_loss = torch.compile(model.head.chunk_loss, dynamic=False)
    copies = list(model.parameters())
    weights = [copy.detach().float().clone().requires_grad_() for copy in copies]
    optimizer = torch.optim.AdamW(weights, 1e-4, fused=True)
    windows = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    torch.set_float32_matmul_precision("high")
    for step in range(WARMUP + BARE):
        if step == WARMUP:
            float(windows[0, 0])  # waits for the GPU
            started = time.perf_counter()
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        for weight, copy in zip(weights, copies):
            weight.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)
    float(loss.detach())
    print(BARE * inputs.numel() / (time.perf_counter() - started))


def large(folder):
    """Beside the bare step of one GPU, on all GPUs and on one; then a model ten times as large."""
    command = [sys.executable, __file__, "bare", SIZE]
    base = float(subprocess.check_output(command, text=True))
    heads = "GPUs", "tokens/s", "x the bare step on each", "share of peak FLOP/s", "GB at most"
    table(ALL, f"large/train_lm.py, {BATCH} x {LENGTH} tokens per GPU", *heads)

    def measure(n, size, *flags):
        text = run_lm(folder, ROOT / "large/train_lm.py", n, size, *flags)
        rates = [float(rate) for rate in re.findall(r"^step .* (\d+) tokens/s", text, re.M)]
        if not rates:
            return  # it has failed, or there was no time
        rate = statistics.median(rates[len(rates) // 2 :])
        share, memory = re.findall(r"(\S+) of peak", text), re.findall(r"(\S+) GB at most", text)
        times = f"{rate / n / base:.3f}" if size == SIZE else "-"
        cells = f"{rate:.0f}", times, (share or ["-"])[-1], (memory or ["-"])[-1]
        row(" ".join([f"`--size {size}`", *flags]), n, *cells)

    measure(ALL, SIZE)
    row(f"bare step, `{SIZE}`, compiled", 1, f"{base:.0f}", "1", "-", "-")
    if ALL > 1:
        measure(1, SIZE)
    big = largest(ALL, "1.4b", "400m")
    measure(ALL, big)
    measure(ALL, big, "--recompute")
    measure(ALL, SIZE, "--no-compile")


TIMED = """
class Checkpoints(Checkpoints):
    def start(self, *words):
        torch.accelerator.synchronize() if torch.cuda.is_available() else None
        started = self.started = time.perf_counter()
        super().start(*words)
        print(f"blocked {time.perf_counter() - started:.3f} s", flush=True)

    def finish(self):
        if self.writing is not None:
            super().finish()
            size = sum(file.stat().st_size for file in self.output.glob("step-*/*"))
            print(f"written {time.perf_counter() - self.started:.3f} s", flush=True)
            print(f"size {size / 1e9:.3f} GB", flush=True)
"""


def saving(folder):
    """How long a checkpoint stops the training, and after which time it is written. The first one
    also gets its memory on the host."""
    heads = "GPUs", "GB on the disk", "stops the training, s", "is written after, s"
    size = largest(1, "400m")
    table(ALL, f"large/train_lm.py, `--size {size}`", *heads)
    path = write_altered(ROOT / "large/train_lm.py", folder / "script", more=TIMED)
    for n in dict.fromkeys([ALL, 1]):
        text = run_lm(folder, path, n, size, "--checkpoint-minutes", 0, "--no-compile")
        found = {}
        for name in "size", "blocked", "written":
            found[name] = [float(x) for x in re.findall(rf"^{name} (\S+)", text, re.M)]
        if found["size"]:
            cells = [first_and_later(found[name]) for name in ("blocked", "written")]
            row("saved again and again: first / later", n, f"{max(found['size']):.2f}", *cells)


def first_and_later(seconds):
    """The first one, and the median of the others."""
    first, *later = seconds
    return f"{first:.2f} / {statistics.median(later):.2f}" if later else f"{first:.2f}"


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        bare_step(sys.argv[2])
        sys.exit()
    parts = {"large": large, "saving": saving}
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        make_tokens(Path(folder))
        parts[sys.argv[1]](Path(folder))
    end_part()

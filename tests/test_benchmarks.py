"""What would run on a GPU, with tiny sizes on a CPU: benchmarks/gpu.sh and tests/test_gpu.py."""

import math
import re
import sys
import time
from pathlib import Path

import gpu
import helpers
import pytest
import runs
from helpers import command
from same_text import ROOT

# The rows of each part with TINY=1.
ROWS = {"resnet50": 4, "images": 3, "cifar10": 2, "resume": 5, "scripts": 10, "small": 3}
ROWS |= {"large": 6, "saving": 2}


def gpu_sh(part, **environment):
    """What a part of gpu.sh prints. It has to succeed."""
    environment |= {"TINY": 1, "OUT": Path().resolve(), "PYTHON": sys.executable}
    words = [f"{name}={value}" for name, value in environment.items()]
    command("env", *words, "bash", ROOT / "benchmarks/gpu.sh", part)
    return Path(f"{part}.md").read_text()


def test_workers_fit_into_shared_memory(capsys):
    """Two batches for each worker, and one that is being read."""
    shm = Path("/dev/shm")
    if not shm.exists():
        pytest.skip("no /dev/shm")
    assert gpu.fitting_workers(16, 1) == 16 and capsys.readouterr().err == ""
    assert gpu.fitting_workers(16, 10**15) == 0
    assert "/dev/shm has room for 0 workers, not 16" in capsys.readouterr().err


def test_nothing_is_left_unsaid(monkeypatch):
    """A run that fails, and one that the end of the part's time interrupts, have no rate; both are
    among what was not measured."""
    monkeypatch.setattr(runs, "FAILED", [])
    Path("slow.py").write_text("import time\ntime.sleep(60)")
    Path("wrong.py").write_text("raise SystemExit('no such flag')")
    for name, limit in ("wrong.py", 60), ("slow.py", 0):
        monkeypatch.setattr(gpu, "END", time.monotonic() + limit)
        assert math.isnan(gpu.rate(Path(name).resolve(), 1))
    wrong, slow = runs.FAILED
    assert "wrong.py" in wrong and "slow.py" in slow


SLOW_SAVES = """
import time

clock, fast_save, waited = time.perf_counter, torch.save, 0

def slow_save(*words):
    global waited
    waited += 1000
    fast_save(*words)

torch.save, time.perf_counter = slow_save, lambda: clock() + waited
"""


@pytest.mark.slow
def test_a_rate_is_that_of_training_alone():
    """Not of saves, of which there is one at each progress line here, and takes 1000 s."""
    flags = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 500, "--log-every", 5]
    flags += ["--checkpoint-minutes", 0, "--output", "out"]
    helpers.run(runs.COMPLETE, *flags, more=SLOW_SAVES, processes=0)
    assert helpers.metrics("out")[0]["seconds"] < 1000


@pytest.mark.long
@pytest.mark.parametrize("part", ROWS)
def test_gpu_sh(data, part):
    """Each command runs, and its table has all its rows, and in each a figure."""
    text = gpu_sh(part, CIFAR10=data / "pictures")
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == ROWS[part] and "nan" not in text, text
    assert {line.count("|") for line in rows} == {head.count("|")}
    assert "Not measured" not in text


@pytest.mark.long
@pytest.mark.parametrize(
    "words, rows",
    [
        (["throughput.py", "--rounds", 1, "--only", "limit", "complete"], 2),
        (["image_loading.py", "--sizes", "ImageNet", "--rounds", 1, "--seconds", 1], 4),
        (["image_loading.py", "--images", 9, "--rounds", 1, "--seconds", 1, "--folder"], 4),
    ],
)
def test_tables_of_cpus(data, words, rows):
    own = [data / "pictures" / "train"] if words[-1] == "--folder" else []  # classes, no train/
    text = command(sys.executable, ROOT / "benchmarks" / words[0], *words[1:], *own)
    assert not own or "train: 9 files" in text
    assert len(re.findall(r"^\|.*\d.*\|$", text, re.M)) == rows and "nan" not in text, text


@pytest.mark.long
def test_gpu_tests():
    """tests/test_gpu.py runs: what can be seen without a GPU is so, and little is skipped."""
    few = "small and single or compile or float16 or deterministic or moves or own_loop"
    text = gpu_sh("tests", TESTS=few)
    assert " passed" in text and "failed" not in text, text
    assert text.count("SKIPPED") <= 2, text

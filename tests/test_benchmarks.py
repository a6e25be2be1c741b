"""What would run on a GPU, with tiny sizes on a CPU: benchmarks/gpu.sh and tests/test_gpu.py."""

import sys
from pathlib import Path

import gpu
import pytest
from helpers import command
from same_text import ROOT

# The rows of each part with TINY=1.
ROWS = {"scripts": 8, "settings": 1, "graphs": 1, "large": 1, "inputs": 4}
ROWS |= {"loops": 2, "images": 3, "loader": 7, "checkpoint": 1, "resume": 1}


def gpu_sh(part):
    """What a part of gpu.sh prints. It has to succeed."""
    words = ["env", "TINY=1", f"OUT={Path().resolve()}", f"PYTHON={sys.executable}", "bash"]
    command(*words, ROOT / "benchmarks" / "gpu.sh", part)
    return Path(f"{part}.md").read_text()


def test_peaks_are_of_whole_gpus():
    assert gpu.PEAK["NVIDIA H100 80GB HBM3"] == 989
    assert "NVIDIA H100 80GB HBM3 MIG 1g.10gb" not in gpu.PEAK


def test_workers_fit_into_shared_memory(capsys):
    """Two batches for each worker, and one that is being read."""
    shm = Path("/dev/shm")
    if not shm.exists():
        pytest.skip("no /dev/shm")
    assert gpu.fitting_workers(16, 1) == 16 and capsys.readouterr().err == ""
    assert gpu.fitting_workers(16, 10**15) == 0
    assert "/dev/shm has room for 0 workers, not 16" in capsys.readouterr().err


def test_no_part_takes_longer_than_ten_minutes(monkeypatch, capsys):
    """After nine it starts nothing more, and says so."""
    monkeypatch.setattr(gpu, "STARTED", gpu.time.monotonic() - 60 * gpu.MINUTES + 5)
    monkeypatch.setattr(gpu, "FAILED", [])
    monkeypatch.setattr(gpu, "train", None)  # is not called
    rate, _ = gpu.rate_and_memory(Path("train.py"), 2, ["--amp"])
    assert rate != rate and gpu.FAILED == ["no time left for train.py on 2: --amp"]


@pytest.mark.long
@pytest.mark.parametrize("part", ROWS)
def test_gpu_sh(part):
    """Each command runs, and its table has all its rows, and in each a figure."""
    text = gpu_sh(part)
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == ROWS[part] and "nan" not in text, text
    assert {line.count("|") for line in rows} == {head.count("|")}
    assert part in ("loader", "loops") or f"\n{part} took " in text


@pytest.mark.long
@pytest.mark.parametrize("part", ["tests", "compiled", "waiting"])
def test_gpu_tests(part):
    """tests/test_gpu.py runs: what can be seen without a GPU is so, and little is skipped."""
    text = gpu_sh(part)
    assert " passed" in text and "failed" not in text, text
    assert text.count("SKIPPED") <= 2, text

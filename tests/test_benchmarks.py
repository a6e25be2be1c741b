"""What would run on a GPU, with tiny sizes on a CPU: benchmarks/gpu.sh and tests/test_gpu.py."""

import re
import sys
from pathlib import Path

import gpu
import pytest
import runs
from helpers import command
from same_text import ROOT

# The rows of each part with TINY=1.
ROWS = {"resnet50": 9, "images": 3, "small": 3, "checkpoint": 1, "lm": 4, "lm_large": 3}
ROWS |= {"resume": 1, "scripts": 8, "inputs": 4, "cifar10": 1, "lm_saving": 2}


def gpu_sh(part, *more):
    """What a part of gpu.sh prints. It has to succeed."""
    words = ["env", "TINY=1", f"OUT={Path().resolve()}", f"PYTHON={sys.executable}", "bash"]
    command(*words, ROOT / "benchmarks" / "gpu.sh", part, *more)
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
    """Of a part whose time is over nothing more is started; what runs then is ended. Both are said,
    and so is what fails."""
    monkeypatch.setattr(gpu, "FAILED", [])
    monkeypatch.setattr(runs, "FAILED", gpu.FAILED)
    Path("slow.py").write_text("import time\ntime.sleep(60)")
    Path("wrong.py").write_text("raise SystemExit('no such flag')")
    for name, value in ("STARTED", gpu.time.monotonic()), ("MINUTES", 3 / 60), ("LAST", 0.1):
        monkeypatch.setattr(gpu, name, value)
    for name, flags in ("wrong.py", []), ("slow.py", []), ("train.py", ["--amp"]):
        rate, _ = gpu.rate_and_memory(Path(name), 1, flags)
        assert rate != rate
    wrong, slow, late = gpu.FAILED
    assert wrong == "wrong.py []: SystemExit: no such flag"
    assert slow.startswith("slow.py []: TimeoutError: did not end within the ")
    assert late == "no time left for train.py on 1: --amp"


@pytest.mark.long
@pytest.mark.parametrize("part", ROWS)
def test_gpu_sh(data, part):
    """Each command runs, and its table has all its rows, and in each a figure."""
    text = gpu_sh(part, *([data / "pictures"] if part == "cifar10" else []))
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == ROWS[part] and "nan" not in text, text
    assert {line.count("|") for line in rows} == {head.count("|")}
    assert f"\n{part} took " in text and "Not measured" not in text


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
    text = gpu_sh("tests")
    assert " passed" in text and "failed" not in text, text
    assert text.count("SKIPPED") <= 2, text

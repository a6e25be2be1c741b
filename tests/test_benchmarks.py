"""What the benchmarks compute is right; the GPU tests' edits fit; gpu.sh runs."""

import os
import sys
from pathlib import Path

import pytest
import scaling
from helpers import ROOT, SCRIPTS, Cold, done, edited
from test_gpu import BEGIN, END, TELL, WATCH


def test_computed():
    """A bucket adds its ring, as far as the backward pass does not hide it."""
    seconds = scaling.predict(0.5, [(1000, 1.0)], 8, rate=100, latency=0.25)
    assert seconds == pytest.approx(0.5 + 2 * 7 / 8 * 10 + 2 * 7 * 0.25)
    assert scaling.predict_fsdp2(1, 1000, 2, 1000, cost=0.001) == pytest.approx(5)
    assert all(edited(name, END, TELL + END, BEGIN, WATCH + BEGIN) for name in SCRIPTS)


@pytest.mark.slow
def test_gpu_sh():
    environment = os.environ | {"TINY": "1", "OUT": os.getcwd(), "PYTHON": sys.executable}
    done([Cold(["bash", ROOT / "benchmarks" / "gpu.sh"], "log", env=environment)])
    tables = "".join(path.read_text() for path in Path().glob("*.md"))
    assert "nan" not in tables and tables.count("\n| train_") == 6 + 3 + 1 + 1

"""The benchmarks run, and what they compute from what they measure is right."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow
sys.path.insert(0, str(ROOT / "benchmarks"))
import scaling  # noqa: E402


def test_prediction():
    """A bucket adds its ring, as far as the backward pass does not hide it."""
    for n in (2, 8, 1024):
        seconds = scaling.predict(0.5, [(1000, 1.0)], n, rate=100, latency=0.25)
        assert seconds == pytest.approx(0.5 + 2 * (n - 1) / n * 10 + 2 * (n - 1) * 0.25)
    assert scaling.predict(1, [(100, 0.5), (1, 1.0)], 2, 1000, 0) == pytest.approx(1.001)
    assert scaling.predict(1, [(800, 0.5), (200, 0.9)], 2, 1000, 0) == pytest.approx(1.6)


@pytest.mark.parametrize(
    "job, processes, only", [("net", 2, "limit ddp_torchrun"), ("folder", 1, "dp decode")]
)
def test_throughput(job, processes, only):
    """Each contestant has a row, with its speed."""
    flags = f"--jobs {job} --processes {processes} --images 256 --rounds 1 --epochs 2 --only {only}"
    words = [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), *flags.split()]
    text = subprocess.check_output(words, text=True)
    assert re.findall(r"^\| ([a-z_]+) \| [1-9]", text, re.M) == only.split()

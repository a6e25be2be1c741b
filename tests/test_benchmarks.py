"""What the benchmarks compute and draw is right; the GPU tests' edits fit; gpu.sh runs."""

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
    assert scaling.predict(1, [(800, 0.5), (200, 0.9)], 2, 1000) == pytest.approx(1.5)
    assert scaling.predict_fsdp2(1, 1000, 2, 1000, cost=0.001) == pytest.approx(5)
    assert [size / 2**20 for size, _ in scaling.buckets(30 * 2**20)] == [1, 25, 4]
    assert all(edited(name, END, TELL + END, BEGIN, WATCH + BEGIN) for name in SCRIPTS)


def test_curves():
    curves = pytest.importorskip("curves", reason="needs matplotlib")
    for name, last in ("a", "1,1"), ("b", "1.5,1.5"):
        Path(name).mkdir()
        Path(name, "metrics.csv").write_text(f"epoch,train_loss,test_loss\n1,2,2\n2,{last}\n")
    begin = "a: 0 epochs and 0 steps are done\nepoch 1/2 step 10/10 loss\n"
    Path("a.log").write_text(f"{begin}a: 1 epochs and 5 steps are done\n")
    left, right = curves.draw({name: curves.read(name) for name in "ab"}, compare=True).axes
    assert [list(left.lines[i].get_ydata()) for i in (0, 2, 4)] == [[2, 1], [2, 1.5], [1.5]]
    assert [line.get_xdata()[0] for line in right.lines] == [1e-8, 0.5]


@pytest.mark.slow
def test_gpu_sh():
    environment = os.environ | {"TINY": "1", "OUT": os.getcwd(), "PYTHON": sys.executable}
    done([Cold(["bash", ROOT / "benchmarks" / "gpu.sh"], "log", env=environment)])
    tables = "".join(path.read_text() for path in Path().glob("*.md"))
    assert "nan" not in tables and tables.count("\n| train_") == 6 + 3 + 1 + 1

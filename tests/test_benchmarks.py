"""What the benchmarks compute from what they measure is right, and what is drawn was measured."""

import sys

import pytest
import scaling
from helpers import *


@pytest.mark.slow
def test_prediction():
    """A bucket adds its ring, as far as the backward pass does not hide it."""
    for n in (2, 8, 1024):
        seconds = scaling.predict(0.5, [(1000, 1.0)], n, rate=100, latency=0.25)
        assert seconds == pytest.approx(0.5 + 2 * (n - 1) / n * 10 + 2 * (n - 1) * 0.25)
    assert scaling.predict(1, [(100, 0.5), (1, 1.0)], 2, 1000, 0) == pytest.approx(1.001)
    assert scaling.predict(1, [(800, 0.5), (200, 0.9)], 2, 1000, 0) == pytest.approx(1.6)
    # FSDP2 sends half as much again; in bfloat16 as much as DDP. Without a GPU nothing is hidden.
    assert scaling.predict_fsdp2(1, 1000, 5, 2, 1000, 0, gpu=False) == pytest.approx(3)
    assert scaling.predict_fsdp2(0, 1000, 1, 2, 1000, 0, gather=0.5) == pytest.approx(1 + 2 / 3)
    assert scaling.predict_fsdp2(3, 1000, 5, 2, 1000, 0) == pytest.approx(3 + 2 * 1.5 / 15)


@pytest.mark.slow
def test_curves():
    """The columns of metrics.csv, and where a run was resumed; a folder without them is named."""
    curves = pytest.importorskip("curves", reason="needs matplotlib")
    for name, losses in ("a", (2, 1)), ("b", (2, 1.5)), ("none", ()):
        Path(name).mkdir()
        rows = [f"{i},{loss},{loss},0.5,9" for i, loss in enumerate(losses, 1)]
        head = "epoch,train_loss,test_loss,test_accuracy,samples_per_second"
        Path(name, "metrics.csv").write_text("\n".join([head, *rows]))
    begin = "into a, from epoch 1, step 1 on\nepoch 1/2 step 10/10 loss\n"
    Path("a.log").write_text(f"{begin}into a, from epoch 2, step 6 on\n")
    words = [sys.executable, ROOT / "benchmarks" / "curves.py", "--output", "x.svg"]
    text = done([Cold([*words, "a", "none", "b"], "log")])
    assert "none: no metrics.csv with an epoch in it" in text and "2 run(s) drawn" in text
    assert ">b</text>" in Path("x.svg").read_text()
    assert "nothing to draw" in done([Cold([*words, "none"], "log")], 1)
    runs = {name: curves.read(name) for name in "ab"}
    assert list(curves.draw(runs).axes[0].lines[3].get_ydata()) == [2, 1.5]
    left, right = curves.compare(runs).axes
    assert list(left.lines[4].get_xdata()) == [1.5] and list(left.lines[4].get_ydata()) == [1.5]
    assert [line.get_xdata()[0] for line in right.lines] == [1e-8, 0.5]

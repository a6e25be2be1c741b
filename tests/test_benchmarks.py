"""What the benchmarks compute from what they measure is right."""

import pytest
import scaling


@pytest.mark.slow
def test_prediction():
    """A bucket adds its ring, as far as the backward pass does not hide it."""
    for n in (2, 8, 1024):
        seconds = scaling.predict(0.5, [(1000, 1.0)], n, rate=100, latency=0.25)
        assert seconds == pytest.approx(0.5 + 2 * (n - 1) / n * 10 + 2 * (n - 1) * 0.25)
    assert scaling.predict(1, [(100, 0.5), (1, 1.0)], 2, 1000, 0) == pytest.approx(1.001)
    assert scaling.predict(1, [(800, 0.5), (200, 0.9)], 2, 1000, 0) == pytest.approx(1.6)
    # FSDP2 sends half as much again; in bfloat16 as much as DDP. A GPU hides most of it.
    assert scaling.predict_fsdp2(1, 1000, 5, 2, 1000, 0, hides=False) == pytest.approx(2.5)
    assert scaling.predict_fsdp2(1, 1000, 5, 2, 1000, 0, hides=False, gather=0.5) == 2
    assert scaling.predict_fsdp2(3, 1000, 5, 2, 1000, 0) == pytest.approx(3 + 2 * 1.5 / 15)

"""What would run on a GPU: benchmarks/gpu.sh, and the changes of copies that tests/test_gpu.py and
it make."""

import sys
from pathlib import Path

import gpu
import pytest
import test_gpu
from helpers import COMPLETE, SMALL, Warm, command, done, place_of
from same_text import ROOT

ROWS = {"scripts": 8, "settings": 1, "large": 1, "images": 3, "resume": 1}  # of TINY=1


def test_changes_fit():
    """Each text that a copy changes stands once in the scripts that it is for."""
    texts = {name: (ROOT / place_of(name)).read_text() for name in SMALL + COMPLETE}
    for name in SMALL:
        for old in test_gpu.SMALL_BEGIN, test_gpu.SMALL_END, gpu.NO_NOISE[0]:
            assert texts[name].count(old) == 1, (name, old)
    for name in COMPLETE:
        for old in test_gpu.BEGIN, test_gpu.END, gpu.NO_TF32[0]:
            assert texts[name].count(old) == 1, (name, old)
    assert texts[COMPLETE[1]].count(gpu.OFTEN[0]) == 1 and gpu.OFTEN == test_gpu.OFTEN
    assert [name for name in SMALL if gpu.HALF[0] in texts[name]] == [
        name for name in SMALL if place_of(name) in gpu.HAVE_AMP
    ]
    for old in gpu.CONTIGUOUS[0], gpu.FLOAT16[0], test_gpu.FLOAT16[0]:
        assert texts[COMPLETE[0]].count(old) == 1, old
    assert gpu.PEAK.get("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_a_run_can_be_without_gpus():
    """torch counts them once in a process, and complete/train_ddp.py asks as it is imported."""
    Path("run.py").write_text("import sys\nassert 'train_ddp' not in sys.modules\n")
    done([Warm("run.py", [], "log")])


@pytest.mark.slow
@pytest.mark.parametrize("part", ROWS)
def test_gpu_sh(part):
    """With tiny runs on a CPU: each command runs, and its table has all its rows."""
    words = ["env", "TINY=1", f"OUT={Path().resolve()}", f"PYTHON={sys.executable}", "bash"]
    command(*words, ROOT / "benchmarks" / "gpu.sh", part)
    head, rule, *rows = [
        line for line in Path(f"{part}.md").read_text().splitlines() if line.startswith("|")
    ]
    assert len(rows) == ROWS[part] and "nan" not in "".join(rows), rows
    assert {line.count("|") for line in rows} == {head.count("|")}

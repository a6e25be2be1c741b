"""Recipes of docs/stopping_and_resuming.md and docs/launching.md: the same run as without them."""

import re
import subprocess
import sys

import pytest
import test_pages
from helpers import *
from test_pages import copy, train

for name in "stopping_and_resuming", "launching":
    test_pages.RECIPES += (ROOT / "docs" / f"{name}.md").read_text()
META = "Recipe: a model that does not fit on the host N times"
PARTS = "Recipe: checkpoints in parts"
SHORT = ["--epochs", 2, "--batch-size", 16, "--optimizer", "adam", "--log-every", 10]


@pytest.mark.slow
@pytest.mark.parametrize("titles", [(META,), (PARTS,), (META, PARTS)])
def test_large_models(fashion, titles):
    """Killed twice, a copy of train_fsdp2.py ends with the weights of the script."""
    flags = [*fashion, *SHORT, "--checkpoint-minutes", 0]
    run("fsdp2", *flags, "--output", "script", processes=2)
    copy(*titles, name="fsdp2")
    killed = "epoch 1/2 step 20/", "epoch 2/2 step 10/"
    printed = train("copy", *flags, name="fsdp2", killed=killed)
    assert "from epoch 1, step 11 on" in printed or "from epoch 1, step 21 on" in printed
    assert same(weights("copy"), weights("script"))
    parts = [path.name for path in Path("copy").glob("parts-*")]
    assert parts == (["parts-2-0"] if PARTS in titles else [])


@pytest.mark.slow
def test_float16(fashion):
    """With the scaler switched off it is the script's run; with it, nearly."""
    run("ddp_torchrun", *fashion, *SHORT, "--output", "script", processes=2)
    copy("A notebook, and Kaggle's two T4")
    train("off", *fashion, *SHORT)
    assert same(weights("off"), weights("script"))
    train("on", *fashion, *SHORT, "--lr", 1e-4, "--amp", "--clip-norm", 100, "--accumulate", 2)
    run("ddp_torchrun", *fashion, *SHORT, "--lr", 1e-4, "--output", "float32", processes=2)
    close("on", "float32", 0.01, keys=("train_loss", "test_loss"))


def test_load_data_alone(fashion):
    """The command of slurm/README.md for machines without a network."""
    page = (ROOT / "slurm" / "README.md").read_text()
    [line] = re.findall(r"^`(python -c .*load_data.*)`$", page, re.M)
    flags = ", ".join(f"'{flag}'" for flag in fashion)
    line = line.replace("'--dataset', 'cifar10'", flags)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    place = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    subprocess.run(["bash", "-c", line], check=True, env=place)

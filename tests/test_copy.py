"""A script copied somewhere alone trains there, and a user's model and data fit into it."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import DDP, ROOT, SCRIPTS, metrics, quick, run, script, weights

README = (ROOT / "README.md").read_text().split("## Put in your own model and data")[1]
MODEL, DATA = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)  # the README's example


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone(data, name):
    Path("alone").mkdir()
    shutil.copy(script(name), "alone")
    count = 2 if name == "train_ddp_torchrun" else 1
    flags = ["--dataset", "fashion-mnist", "--data-dir", data, "--epochs", "1"]
    run(name, *flags, processes=count, path=f"{name}.py", cwd="alone")
    assert len(metrics(f"alone/runs/{name}")) == 1


def edited(name):
    """A copy of the script in which the two sections that say so are the user's."""
    text = Path(script(name)).read_text()
    lines = [line for line in text.splitlines() if line.startswith("# ---- ")]
    model, data, loop = (text.index(line) for line in lines[:3])
    assert "put your own here" in lines[0] and "put your own here" in lines[1]
    path = Path(f"my_{name}.py").resolve()
    path.write_text(
        text[:model] + f"{lines[0]}\n\n{MODEL}\n\n{lines[1]}\n\n{DATA}\n\n" + text[loop:]
    )
    return str(path)


@pytest.mark.parametrize(
    "name",
    ["train_single", *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:])],
)
def test_own_model_and_data(name):
    path = edited(name)
    flags = ["--epochs", "6", "--lr", "0.05", "--batch-size", "16", "--output", "out"]
    if name in ("train_single", "train_dp", "train_ddp_multigpu_proc"):
        quick(name, *flags, path=path)
        quick(name, *flags, "--workers", "2", "--epochs", "7", "--resume", path=path)
    else:
        run(name, *flags, "--epochs", "7", path=path, processes=1 + (name in DDP))
    assert metrics("out")[-1]["test_accuracy"] > 0.8
    assert weights("out")["0.weight"].shape == (16, 5)

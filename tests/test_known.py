"""benchmarks/known.py: scripts of a mirror, what is said of them, the tables."""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import known
import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.load("points.pt"), torch.arange(24.0).reshape(24, 1))
loader = DataLoader(data, 8 // dist.get_world_size(), sampler=DistributedSampler(data))
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(3):
    # each epoch has another order
    for points, targets in loader:
        loss = (model(points) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
MENDED = SCRIPT.replace("# each", "loader.sampler.set_epoch(epoch)  # each")
FILE = """
import torch

REPOSITORY = "somebody/points"
{commits}
EDITS = [("train.py", "lr=0.5", "lr=0.01")]
COMMAND = "--steps 9 train.py"

if __name__ == "__main__":
    torch.save(torch.rand(24, 2), "points.pt")
"""


def git(folder, *words):
    name = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    done = subprocess.run(["git", "-C", folder, *name, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def mirror(tmp_path):
    """A folder of git directories with one repository, whose second commit mends the first."""
    folder = tmp_path / "mirror" / "somebody+points"
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    for text in SCRIPT, MENDED:
        (folder / "train.py").write_text(text)
        git(folder, "add", "train.py")
        git(folder, "commit", "--quiet", "--message", "text")
    return folder.parent


def script_of(**constants):
    constants = {"repository": "somebody/points", "command": "--steps 9 train.py"} | constants
    return known.Script(Path("points.py"), **constants)


def finding(rule, line, verdict="WRONG", details=()):
    file, _, number = line.rpartition(":")
    place = {"file": file or None, "line": int(number) if file else None}
    return {"verdict": verdict, "rule": rule, "text": "it is", "details": [*details], **place}


def report(*findings, error=""):
    return {"error": error, "findings": [*findings], "wall": 7}


def test_a_commit_is_cloned_and_edited(mirror, tmp_path):
    args = argparse.Namespace(mirror=mirror)
    edit = ("train.py", "lr=0.5", "lr=0.01")
    for commit, epochs in ("HEAD^", 0), ("HEAD", 1):
        known.clone(args, script_of(edits=[edit]), commit, tmp_path / "clone")
        text = (tmp_path / "clone" / "train.py").read_text()
        assert text.count("set_epoch") == epochs and "lr=0.01" in text
    with pytest.raises(RuntimeError, match="train.py has no 'lr=3'"):
        known.clone(args, script_of(edits=[("train.py", "lr=3", "")]), "HEAD", tmp_path / "clone")
    with pytest.raises(RuntimeError, match="has no somebody/else"):
        known.clone(args, script_of(repository="somebody/else"), "HEAD", tmp_path / "clone")


def test_a_row_for_each_wrong():
    verdicts = {"order train.py:14": ("true", "no set_epoch", "its page says so")}
    rows = known.known_rows(
        script_of(commit="abc", verdicts=verdicts),
        report(finding("order", "train.py:14"), finding("files", ""), finding("split", "", "look")),
    )
    assert [row["said"] for row in rows] == ["WRONG order", "WRONG files"]
    assert [row["verdict"] for row in rows] == ["true", "not judged"]
    assert rows[0]["confirmed"] == "its page says so" and rows[0]["look"] == "split"
    assert known.known_rows(script_of(), report())[0]["said"] == "nothing WRONG"
    failed = known.known_rows(script_of(), report(error="no step\nat all"))[0]
    assert failed["said"] == "nothing can be compared" and failed["why"] == "no step"


@pytest.mark.parametrize(
    "before, found",
    [
        ([finding("order", "train.py:14")], "named"),
        ([finding("gradient", "", details=["see train.py:14: for"])], "named"),
        ([finding("order", "train.py:14", "look")], "look"),
        ([finding("gradient", "train.py:18")], "found"),
        ([finding("files", "train.py:3")], "no"),  # as after it
        ([], "no"),
    ],
)
def test_what_was_found_of_a_mended_fault(before, found):
    mended = script_of(before="a", after="b", lines=["train.py:14"])
    after = report(finding("files", "train.py:3"))
    assert known.mended_row(mended, report(*before), after)["found"] == found


def test_files_of_known_are_whole():
    scripts = known.read_scripts([])
    assert {script.repository.count("/") for script in scripts} == {1}
    for each in scripts:
        assert bool(each.commit) != bool(each.before and each.after and each.fault and each.lines)
        assert ".py" in each.command
    for path in known.TABLES.values():
        names = {row["name"] for row in known.read_table(path)}
        assert names <= {script.name for script in scripts}


@pytest.mark.long
def test_tables_are_written_and_compared(mirror, tmp_path, monkeypatch, capfd):
    for name in "known", "mended":
        monkeypatch.setitem(known.TABLES, name, tmp_path / f"{name}.csv")
    monkeypatch.setattr(known, "HERE", tmp_path)
    (tmp_path / "known").mkdir()
    for name, commits in {
        "points": 'COMMIT = "HEAD"',
        "mended": 'BEFORE, AFTER, FAULT, LINES = "HEAD^", "HEAD", "no set_epoch", ["train.py:14"]',
    }.items():
        (tmp_path / "known" / f"{name}.py").write_text(FILE.format(commits=commits))
    words = ["known.py", "--mirror", str(mirror), "--folder", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", [*words, "--write"])
    with pytest.raises(SystemExit) as end:
        known.main()
    assert end.value.code == 0
    tables = {name: list(csv.DictReader(open(path))) for name, path in known.TABLES.items()}
    assert [row["said"] for row in tables["known"]] == ["nothing WRONG"]
    assert [row["found"] for row in tables["mended"]] == ["named"]
    monkeypatch.setattr(sys, "argv", [*words, "points"])
    with pytest.raises(SystemExit) as end:
        known.main()
    assert end.value.code == 0 and "points: as in the table" in capfd.readouterr().out

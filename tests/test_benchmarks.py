"""The benchmarks run, and what they compute from what they measure is right."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TORCHRUN, finish, start

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))
import scaling  # noqa: E402


def test_ring_without_overlap():
    """One bucket that is there at the end: a step is computation, then 2 (n - 1) / n of it all."""
    for n in (2, 8, 1024):
        seconds = scaling.predict(0.5, [(1000, 1.0)], n, rate=100, latency=0.25)
        assert seconds == pytest.approx(0.5 + 2 * (n - 1) / n * 10 + 2 * (n - 1) * 0.25)


def test_overlap_hides_what_fits():
    early, late = [(100, 0.5), (1, 1.0)], [(101, 1.0)]
    assert scaling.predict(1, early, 2, rate=1000, latency=0) == pytest.approx(1.001)
    assert scaling.predict(1, late, 2, rate=1000, latency=0) == pytest.approx(1.101)
    # the second has to wait for the first, and the optimizer for both
    assert scaling.predict(1, [(800, 0.5), (200, 0.9)], 2, 1000, 0) == pytest.approx(1.6)


def test_buckets_are_those_of_ddp():
    """resnet18: every gradient in one bucket, the last layers' first, 25 MiB or little more."""
    net = __import__("torchvision").models.resnet18(num_classes=10)
    order = [(p, i / 62) for i, p in enumerate(reversed(list(net.parameters())))]
    found = scaling.buckets(order)
    assert sum(size for size, _ in found) == 4 * sum(p.numel() for p in net.parameters())
    assert [ready for _, ready in found] == sorted(ready for _, ready in found)
    assert 2**20 <= found[0][0] < 25 * 2**20 and len(found) == 3


def test_prediction_as_a_command():
    words = [FOLDER / "scaling.py", "--model", "net", "--batch-size", "32", "--rate", "1"]
    words += ["--step", "0.01", "--latency", "1e-5"]
    words = [sys.executable, *map(str, words)]
    text = subprocess.check_output(words, text=True, stderr=subprocess.STDOUT)
    assert "leaked" not in text  # what set_up has frozen
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) ms \| (\d+)% \| ([\d.]+) \|$", text, re.M)
    assert [int(row[0]) for row in rows] == [2**power for power in range(1, 11)]
    efficiency = [int(row[2]) for row in rows]
    assert efficiency == sorted(efficiency, reverse=True) and 0 < efficiency[-1] < efficiency[0]
    assert float(rows[0][3]) == pytest.approx(2 * 10 / float(rows[0][1]), abs=0.06)


def test_check_states_the_error(tmp_path, capsys, monkeypatch):
    """The measurements are the file's; the fastest link calibrates, the others are checked."""
    one = [(125_000, 1.0)]  # 1 ms at 1 Gbit/s
    monkeypatch.setattr(scaling, "profile", lambda model, batch: (None, None))
    monkeypatch.setattr(scaling, "buckets", lambda gradients: one)
    lines = ["job,batch,rate,compute,latency,plain"]
    lines += ["net,64,0.1,0.010,0,0.0210", "net,64,1,0.010,0,0.0120"]
    Path("network.csv").write_text("\n".join(lines))
    assert scaling.check("network.csv") == [pytest.approx(0)]
    assert "| net | 0.1 | 21.0 ms | 21.0 ms | +0% |" in capsys.readouterr().out


def test_table_takes_medians_of_ratios_and_the_better_workers():
    throughput = pytest.importorskip("throughput", reason="it needs benchmarks/requirements.txt")
    rates = {("", ""): [0, 0, 0], ("single", ""): [10, 30, 90], ("copied", "2"): [1]}
    rates["copied", "0"] = [5, 10, 15]  # ratios 2, 3, 6
    rates["limit", ""] = [10, 60, 100]  # ratios 1, 0.5, 0.9: not 30 / 60
    rows = [
        dict(job="net", processes=1, contestant=name, workers=workers, round=number)
        | dict(images_per_second=rate, start=begin[number], host_mib=7, device_mib=0)
        for (name, workers), values in rates.items()
        for begin in [(2, 3, 5) if name else (1, 1, 4)]  # 1, 2 and 1 more: not 3 - 1
        for number, rate in enumerate(values)
    ]
    lines = list(throughput.table(rows, "net", 1))
    assert lines[0].startswith("| | images/s | x copied | x limit |")
    assert lines[2] == "| **train_single.py** | 30 | 3.00 | 0.90 | 1.0 | 7 | 0 |"
    assert lines[3].startswith("| copied, 0 workers | 10 | 1.00 |") and len(lines) == 5


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_throughput(processes):
    """Each contestant has a row with its speed, a start and memory; none is left behind."""
    for name in ("psutil", "accelerate", "lightning"):
        pytest.importorskip(name, reason="pip install -r benchmarks/requirements.txt")
    words = [FOLDER / "throughput.py", "--images", "1280", "--jobs", "net", "--rounds", "1"]
    yardsticks = ["accelerate"] if processes == 1 else ["copied", "lightning"]
    words += ["--epochs", "1", "--processes", processes, "--only", *yardsticks, "limit"]
    words += ["single" if processes == 1 else "torchrun"]
    assert finish(start([sys.executable, *words], "log")) == 0, Path("log").read_text()
    table = Path("log").read_text().split("\n\n")[-1]
    own = "train_single.py" if processes == 1 else "train_ddp_torchrun.py"
    for name in (f"**{own}**", *yardsticks, "limit"):
        row = next(line for line in table.splitlines() if line.startswith(f"| {name}"))
        assert row.count("|") == 7 + len(yardsticks) and float(row.split("|")[2]) > 0, row
    with open("throughput.csv") as file:
        rows = {row["contestant"]: row for row in csv.DictReader(file)}
    for name, row in rows.items():
        assert float(row["host_mib"]) > 100 * processes and float(row["start"]) > 0, row


@pytest.mark.slow
def test_growth():
    """A row for each number of images, about as long an image, and both kinds of start."""
    words = [sys.executable, FOLDER / "growth.py", "--images", "640", "1280", "--turns", "5"]
    assert finish(start(words, "log")) == 0, Path("log").read_text()
    text = Path("log").read_text()
    rows = re.findall(r"^\| ([\d,]+|limit) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    names, growth, share = zip(*rows)
    assert names == ("640", "1,280", "limit") and 0.5 < float(growth[1]) < 2, text
    assert 0.5 < float(share[0]) < 2 and float(share[2]) == 1, text
    assert re.search(r"first step: [\d.]+ s anew, [\d.]+ s with --resume", text), text


@pytest.mark.slow
def test_limit_is_the_scripts_own_model():
    """The limit's model, optimizer and images are those of the scripts, wrapped in DDP for two."""
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", FOLDER / "limit.py"]
    words += ["--dataset", "synthetic", "--model", "mlp", "--epochs", "1"]
    assert finish(start(words, "log")) == 0, Path("log").read_text()
    assert re.search(r"step 1\nepoch: [\d.]+ images/s 0 MiB", Path("log").read_text())


@pytest.mark.slow
def test_network():
    """Two hosts on a link of 0.1 Gbit/s: the link is the limit, and half the bytes take half."""
    pytest.importorskip("psutil", reason="pip install -r benchmarks/requirements.txt")
    if os.getuid() or not shutil.which("tc"):
        pytest.skip("two hosts on one machine need root and the commands ip and tc (iproute2)")
    words = [sys.executable, FOLDER / "network.py", "--jobs", "net", "--rates", "0.1"]
    assert finish(start([*words, "--rounds", "1"], "log")) == 0, Path("log").read_text()
    with open("network.csv") as file:
        (row,) = csv.DictReader(file)
    assert int(row["bytes"]) == 4 * 62006
    assert float(row["plain"]) > 0.8 * int(row["bytes"]) * 8 / 0.1e9
    assert float(row["plain"]) > 1.3 * float(row["bf16"])
    assert "bench" not in subprocess.check_output(["ip", "netns", "list"], text=True)


@pytest.mark.slow
def test_plots():
    """From a table of throughput.py's all three pictures of the README."""
    pytest.importorskip("matplotlib", reason="pip install -r benchmarks/requirements.txt")
    pytest.importorskip("psutil", reason="pip install -r benchmarks/requirements.txt")
    text = "job,processes,contestant,workers,images_per_second\n"
    text += "net,1,single,,9\nnet,1,copied,0,4\nnet,2,spawn,,12\nnet,2,limit,,13\n"
    Path("throughput.csv").write_text(text)
    words = [sys.executable, FOLDER / "plots.py", "throughput.csv", "plots", "1"]
    assert finish(start(words, "log")) == 0, Path("log").read_text()
    for name in ("throughput", "losses", "scaling"):
        assert "<svg" in Path("plots", f"{name}.svg").read_text()
    assert torch.accelerator.is_available() or "nan" not in Path("plots/scaling.svg").read_text()

"""Ways to start that the README's commands (test_readme.py) leave out; --epochs 0."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import (
    DDP,
    SCRIPTS,
    TORCHRUN,
    commands,
    finish,
    free_port,
    metrics,
    quick,
    run,
    script,
    start,
    weights,
)

PYTHON = sys.executable
LAUNCH = [PYTHON, "-m", "torch.distributed.launch"]
JOB = ["--dataset", "cifar10", "--epochs", "1"]


def launch(*machines, data, pause=0.0):
    """Start the machines' commands, in the order given, with the job; all have to succeed."""
    started = []
    for i, words in enumerate(machines):
        words = [*words, *JOB, "--data-dir", data, "--output", "out"]
        started.append(start(words, f"machine{i}.log"))
        time.sleep(pause)
    texts = [Path(f"machine{i}.log") for i in range(len(machines))]
    assert [finish(process) for process in started] == [0] * len(machines), [
        text.read_text() for text in texts
    ]
    assert len(metrics("out")) == 1 and weights("out")
    assert sorted(os.listdir("out")) == ["last.pt", "metrics.csv", "model.pt"]
    return [text.read_text() for text in texts]


def spawn(*flags):
    return [PYTHON, script("train_ddp_spawn"), *flags]


@pytest.mark.slow
def test_spawn_over_a_file(data):
    method = f"file://{os.getcwd()}/init"
    flags = "--rank", "0", "--world-size", "1", "--nproc-per-node", "2"
    launch(spawn("--init-method", method, *flags), data=data)
    assert not Path("init").exists()  # nothing is left for the next run to stumble over


@pytest.mark.slow
@pytest.mark.parametrize("kind, order", [("tcp", (1, 0)), ("file", (1, 0)), ("env", (0, 1))])
def test_two_machines_spawn(data, order, kind, monkeypatch):
    port = str(free_port())
    method = {
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{os.getcwd()}/init",
        "env": "env://",
    }
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    flags = "--init-method", method[kind], "--world-size", "2"
    texts = launch(*(spawn(*flags, "--rank", str(i)) for i in order), data=data, pause=4)
    assert all("waiting for 2 machines at " in text for text in texts)


@pytest.mark.parametrize("order", [(1, 0), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_two_machines_multigpu_proc(data, order):
    flags = "--init-method", f"file://{os.getcwd()}/init", "--world-size", "2"
    words = PYTHON, script("train_ddp_multigpu_proc"), *flags
    launch(*([*words, "--rank", str(i)] for i in order), data=data, pause=3)


@pytest.mark.slow
def test_two_machines_torchrun(data):
    place = "--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())
    words = [*TORCHRUN, *place, "--node_rank"]
    path = script("train_ddp_torchrun")
    launch(*([*words, str(i), path] for i in (1, 0)), data=data, pause=3)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--use-env"]])
def test_the_older_launcher(data, more):
    port = ["--master_port", str(free_port())]
    words = [*LAUNCH, "--nproc_per_node", "2", *port, *more, script("train_ddp_torchrun")]
    launch(words, data=data)
    for flag in "--local-rank=0", "--local_rank=0":
        words = *TORCHRUN, "--standalone", script("train_ddp_torchrun"), "--epochs", "0", flag
        subprocess.run(words, check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_epochs_0(name):
    """It needs no data, reports each rank, and leaves nothing behind."""
    count = 2 if name in DDP else 1
    text = run(name, "--epochs", "0", processes=count)
    assert re.search(r"^torch \d+\.\d+\S*, CUDA \S+, NCCL \S+, backend \w+$", text, re.MULTILINE)
    assert len(re.findall(r"rank \d: host \S+, device \w+", text)) == count
    if name in DDP:
        assert "backend gloo" in text or "nccl" in text
        assert f"all-reduce over {count} processes" in text
    assert not Path("runs").exists()


def test_a_wrong_sum_is_told():
    text = Path(script("train_ddp_torchrun")).read_text()
    assert text.count("dist.all_reduce(total)") == 1
    Path("broken.py").write_text(text.replace("dist.all_reduce(total)", "total += 1"))
    words = [*TORCHRUN, "--standalone", "broken.py", "--epochs", "0"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "all-reduce" in done.stderr


@pytest.mark.parametrize("name", ["train_single", "train_dp"])
def test_output_defaults_to_the_scripts_name(data, name):
    quick(name, *JOB, "--data-dir", data)
    assert Path(f"runs/{name}/model.pt").exists()


def test_progress_is_written_at_once(data):
    """A log file is read while the run goes on."""
    flags = [*JOB, "--epochs", "3000", "--data-dir", data, "--log-every", "1"]
    process = start([*commands("train_single")[0], *flags], "run.log")
    end = time.monotonic() + 120
    while " step " not in Path("run.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert process.poll() is None
    process.kill()
    process.wait()

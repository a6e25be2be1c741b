"""Two hosts: one that never comes, one that goes and comes back, and a cable that is cut."""

import os
import shutil
import sys
import time
from pathlib import Path

import helpers
import pytest
from harness import two_namespaces
from helpers import (
    COMPLETE,
    Cold,
    command,
    finish,
    logs,
    marked,
    script,
    train,
    wait_for,
    wait_until,
)

pytestmark = pytest.mark.slow
RUN = " ".join(helpers.TORCHRUN)
SLOW = """
import time
plain = loss_function
def loss_function(outputs, labels):
    time.sleep(0.5 * Path("slow").exists())
    return plain(outputs, labels)
"""
LONG = ["--dataset", "synthetic", "--epochs", 100000, "--log-every", 1, "--checkpoint-minutes", 0]


@pytest.fixture
def hosts():
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("it needs root and iproute2")
    with two_namespaces() as names:
        yield names


def on_host(hosts, i, words, *flags):
    words = f"ip netns exec {hosts[i]} env GLOO_SOCKET_IFNAME=v{i} {words}".split()
    return Cold([*words, *flags], f"{time.monotonic_ns()}-{i}.log")


def static(i):
    """The command of host i of two."""
    place = f"--nnodes 2 --node-rank {i} --master-addr 10.77.0.1 --master-port 23456"
    return f"{RUN} {place} {script(COMPLETE)} --timeout 20"


def test_the_network(hosts):
    """A cable that is cut: each process ends, long before torch's half hour, and not with 0."""
    jobs = [on_host(hosts, i, static(i), *LONG) for i in (0, 1)]
    wait_for("epoch 1/100000 step 20/", jobs[0])
    command(*f"ip -n {hosts[1]} link set v1 down".split())
    statuses, text = finish(jobs, 200)
    assert not {0, "still there"} & set(statuses), text
    assert wait_until(lambda: not marked(), 20), text


def test_small_scripts(hosts):
    """Without torchrun, as slurm/node0.sh and node1.sh start them: one run, with the flags of the
    first."""
    path, jobs = helpers.altered("ddp_spawn", more=helpers.few(640, 203)), []
    for i in (0, 1):
        words = f"{sys.executable} {path} --init-method tcp://10.77.0.1:23456 --nnodes 2"
        words += f" --node-rank {i} --nproc-per-node 2 --dataset synthetic --epochs {1 + i}"
        flags = "--workers", "0", "--batch-size", "60", "--output", "out"
        jobs.append(on_host(hosts, i, words, *flags))
    statuses, text = finish(jobs)
    assert statuses == [0, 0] and text.count("epoch 0: ") == 1, text
    assert {f"rank {rank} of 4" in text for rank in range(4)} == {True}, text


def elastic(i, meet, path):
    """The command of host i of one or two, which meet on host `meet`."""
    place = f"--local-addr 10.77.0.{i + 1} --rdzv-endpoint 10.77.0.{meet + 1}:23456 --rdzv-id 1"
    place += " --rdzv-backend c10d --nnodes 1:2 --max-restarts 3 --rdzv-conf"
    place += f" is_host={int(i == meet)},last_call_timeout=4,keep_alive_interval=1"
    return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {RUN} {place} {path} --timeout 30"


def test_a_host_that_goes_and_comes_back(hosts, fashion):
    """The one with rank 0, whose address is the lower one. They meet on the other host."""
    lost = 0
    flags = [*fashion, "--epochs", 6, "--batch-size", 16, "--lr", 1e-4, "--log-every", 2]
    flags += ["--checkpoint-minutes", 0, "--resume", "--output"]
    train(*flags, "whole")
    path = helpers.altered(COMPLETE, more=SLOW)
    Path("slow").touch()
    jobs = [on_host(hosts, i, elastic(i, 1 - lost, path), *flags, "out") for i in (0, 1)]
    wait_for(" step 4/", jobs[0])
    for pid in command("ip", "netns", "pids", hosts[lost]).split():
        helpers.kill(int(pid))
    assert wait_until(lambda: logs(jobs).count("are done") == 2), "one host"
    jobs.append(on_host(hosts, lost, elastic(lost, 1 - lost, path), *flags, "out"))
    assert wait_until(lambda: logs(jobs).count("are done") == 3), "two hosts"
    Path("slow").unlink()
    statuses, text = finish(jobs)
    assert sorted(statuses) == [-9, 0, 0], text
    assert text.count("rank 1: host") == 2 and text.count("out: 0 epochs and 0 steps") == 1, text
    helpers.close("out", "whole", keys=("epoch", "train_loss", "test_loss"))

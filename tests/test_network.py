"""A host that never comes, and a cable that is cut: nothing waits for ever."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from helpers import *

sys.path.insert(0, str(ROOT / "benchmarks"))
from network import call, two_hosts  # noqa: E402

pytestmark = pytest.mark.slow
LONG = ["--dataset", "synthetic", "--epochs", 100000, "--log-every", 1]


def on_host(names, i, name, *flags):
    """Start host i's command of a job on both, with --timeout 5."""
    inside = ["ip", "netns", "exec", names[i], "env", f"GLOO_SOCKET_IFNAME=v{i}"]
    if name == "ddp_torchrun":
        words = [*TORCHRUN, "--nnodes", 2, "--node-rank", i, "--master-addr", "10.77.0.1"]
        words += ["--master-port", 23456, "--rdzv-conf", "timeout=5", script(name)]
    else:
        words = [sys.executable, script(name), "--world-size", 2, "--rank", i]
        words += ["--init-method", "tcp://10.77.0.1:23456"]
    return Cold([*inside, *words, "--timeout", 5, *flags, "--output", "out"], f"{name}-{i}.log")


@pytest.mark.parametrize("name", DDP)
@pytest.mark.skipif(os.getuid() or not shutil.which("ip"), reason="it needs root and iproute2")
def test_the_network(name):
    """A host that never comes, then a cable that is cut: each process ends within --timeout and
    some seconds, not with 0; and --resume goes on."""
    with two_hosts() as names:
        statuses, text = finish([on_host(names, int(name == "ddp_spawn"), name, *LONG)], 90)
        assert statuses[0] not in (0, "still there") and not Path("out").exists(), text
        flags = [*LONG, "--checkpoint-every", 5, "--resume"]
        jobs = [on_host(names, i, name, *flags) for i in (0, 1)]
        wait_for("epoch 1/100000 step 20/", jobs[0])
        call(f"ip -n {names[1]} link set v1 down")
        begin = time.monotonic()
        statuses, text = finish(jobs, 60)
        assert not {0, "still there"} & set(statuses), text
        assert time.monotonic() - begin < 5 + 25 and all_ended(), text
        call(f"ip -n {names[1]} link set v1 up")
        epochs = weights("out", "last.pt")["epoch"] + 1
        jobs = [on_host(names, i, name, *flags, "--epochs", epochs) for i in (0, 1)]
        assert finish(jobs)[0] == [0, 0], finish(jobs)
        assert len(metrics("out")) == epochs

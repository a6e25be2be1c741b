"""Nothing lost, nothing hanging: the damage is done for real."""

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    DDP,
    LIMIT,
    SCRIPTS,
    TORCHRUN,
    all_ended,
    commands,
    finish,
    free_port,
    metrics,
    processes,
    quick,
    run,
    same,
    script,
    start,
    wait_for,
    warm,
    weights,
)
from test_bad_input import snapshot

TRAIN = ["--dataset", "cifar10", "--batch-size", "16", "--log-every", "1"]
LONG = ["--dataset", "synthetic", "--epochs", "100000", "--log-every", "10"]
SLOW_SPAWN = pytest.param("train_ddp_spawn", marks=pytest.mark.slow)
SLOW_TORCHRUN = pytest.param("train_ddp_torchrun", marks=pytest.mark.slow)
KILLS = int(os.environ.get("KILLS", 5))
REPORT = "all-reduce over 2 processes: right"


def kill(number):
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(number, signal.SIGKILL)


def ranks(launcher):
    """The numbers of the launcher's ranks; multiprocessing has helpers of its own besides."""
    found = []
    for number in processes(launcher.pid):
        with contextlib.suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(number)
    return found


@pytest.mark.slow
def test_killed_at_random_under_torchrun(data):
    """SIGKILL for a random rank at a random moment, often; torchrun starts the job again."""
    flags = [*TRAIN, "--data-dir", data, "--epochs", "40", "--checkpoint-every", "7", "--resume"]
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    words += ["--monitor-interval", "0.1", script("train_ddp_torchrun"), *flags]
    assert finish(start([*words, "--output", "whole"], "whole.log")) == 0
    kills = 0
    while kills < KILLS:
        shutil.rmtree("out", ignore_errors=True)
        process = start([*words, "--output", "out"], "run.log")
        for number in range(3):
            while Path("run.log").read_text().count(REPORT) <= number and process.poll() is None:
                if random.random() < 0.01:  # while it is starting, too
                    break
                time.sleep(0.05)
            time.sleep(random.uniform(0, 1.5))
            if victims := ranks(process):
                kill(random.choice(victims))
                kills += 1
                time.sleep(0.5)
        assert finish(process) == 0, Path("run.log").read_text()
        ended_like("whole", 40)


def ended_like(whole, epochs):
    """`out` is as the run in `whole`, and nothing is left of it elsewhere."""
    assert same(weights("out"), weights(whole))
    assert [row["epoch"] for row in metrics("out")] == list(range(1, epochs + 1))
    keys = "train_loss", "test_loss", "test_accuracy"
    for a, b in zip(metrics("out"), metrics(whole)):
        assert [a[key] for key in keys] == [b[key] for key in keys]
    assert sorted(os.listdir("out")) == ["last.pt", "metrics.csv", "model.pt"]
    assert all_ended()


@pytest.mark.slow
def test_killed_at_random_under_spawn(data):
    """SIGKILL for a random rank or the parent at a random moment, often; --resume by hand."""
    flags = [*TRAIN, "--data-dir", data, "--checkpoint-every", "7", "--resume"]
    words = [*commands("train_ddp_spawn", 2)[0], *flags, "--epochs", "40"]
    assert finish(start([*words, "--output", "whole"], "whole.log")) == 0
    for _ in range(KILLS):
        process, log = warm("train_ddp_spawn", *words[2:], "--output", "out")
        wait_for(REPORT, f"{log}.1", process)
        time.sleep(random.uniform(0, 0.6))
        kill(random.choice([*ranks(process), process.pid]))
        process.join(LIMIT)
        if process.exitcode == 0:  # it was through already
            shutil.rmtree("out")
        text = Path(f"{log}.2").read_text()
        assert process.exitcode in (0, 1, -9), text
        assert process.exitcode != 1 or "terminated with signal SIGKILL" in text
        assert all_ended()
    assert finish(start([*words, "--output", "out"], "run.log")) == 0
    ended_like("whole", 40)


@pytest.mark.slow
def test_killed_while_saving():
    """SIGKILL inside the writing of last.pt: there is always a whole checkpoint."""
    flags = ["--dataset", "synthetic", "--model", "mlp", "--repeat", "2", "--output", "out"]
    flags += ["--checkpoint-every", "1", "--resume", "--epochs"]
    inside, part, before = 0, Path("out/last.pt.tmp"), 0
    while inside < 50:
        process, log = warm("train_single", *flags, "100")
        wait_for("rank 0: ", f"{log}.1", process)
        for _ in range(random.randint(1, 4)):  # not always the first one
            time.sleep(0.05)
            wait_until(lambda: not part.exists(), process)
            wait_until(part.exists, process)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.join()
        inside += part.exists()
        if Path("out/last.pt").exists():
            state = weights("out", "last.pt")
            assert state["epoch"] * 157 + state["step"] >= before
            before = state["epoch"] * 157 + state["step"]
    assert before > 25  # it did go on
    quick("train_single", *flags, str(state["epoch"] + 1))
    assert sorted(os.listdir("out")) == ["last.pt", "metrics.csv", "model.pt"]


def wait_until(condition, process):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end and process.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_ddp_spawn", "train_ddp_torchrun"])
def test_the_parent_dies(data, name):
    """Ranks and loader workers end with the process that started them."""
    flags = ["--dataset", data / "pictures", "--batch-size", "8", "--workers", "1"]
    flags += ["--epochs", "100000", "--log-every", "1", "--output", "out"]
    process = start([*commands(name, 2)[0], *flags], "run.log")
    wait_for("epoch 2/100000 step 1/", "run.log", process)
    assert len(processes()) >= 5
    if multiprocessing.get_start_method() == "fork":  # a fork has its parent's command line
        lines = {Path(f"/proc/{number}/cmdline").read_bytes() for number in processes()}
        assert len(lines) <= 4  # no loader worker was started by spawn, and imported torch anew
    process.kill()
    process.wait()
    assert all_ended(10), [Path(f"/proc/{p}/cmdline").read_text() for p in processes()]


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a cable: two hosts, n0 at 10.77.0.1 and n1 at 10.77.0.2."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("two hosts on one machine need root and the command ip (iproute2)")
    names = [f"n{i}-{os.getpid()}" for i in (0, 1)]

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}")
        for i, name in enumerate(names):
            ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev v{i}")
            ip(f"-n {name} link set v{i} up")
            ip(f"-n {name} link set lo up")
        yield names, lambda state: ip(f"-n {names[1]} link set v1 {state}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


def on_host(names, i, kind, port, *flags, log):
    """Start machine i's command of a job on two hosts, with --timeout 5."""
    inside = ["ip", "netns", "exec", names[i], "env", f"GLOO_SOCKET_IFNAME=v{i}"]
    if kind == "torchrun":
        words = [*TORCHRUN, "--nnodes", "2", "--node-rank", str(i), "--master-addr", "10.77.0.1"]
        words += ["--master-port", str(port), "--rdzv-conf", "timeout=5"]
        words += [script("train_ddp_torchrun")]
    else:
        words = [sys.executable, script(f"train_ddp_{kind}"), "--world-size", "2", "--rank", str(i)]
        words += ["--init-method", f"tcp://10.77.0.1:{port}"]
    return start([*inside, *words, "--timeout", "5", *flags], log)


# what torch says of an operation or a peer that failed
TOLD = r"10\.77\.0\.|imed out|imeout|Connection|store"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spawn", "torchrun", "multigpu_proc"])
def test_the_network_is_cut(hosts, kind):
    """Both sides end by themselves, not 0, with a message; --resume on both goes on."""
    names, cable = hosts
    flags = ["--dataset", "synthetic", "--output", "out", "--checkpoint-every", "5", "--resume"]
    long = [*flags, "--epochs", "100000", "--log-every", "10"]
    started = [on_host(names, i, kind, 23456, *long, log=f"{i}.log") for i in (0, 1)]
    wait_for("epoch 1/100000 step 20/", "0.log", started[0])
    cable("down")
    start_of_it = time.monotonic()
    ends = [finish(process, 60) for process in started]
    seconds = time.monotonic() - start_of_it
    texts = [Path(f"{i}.log").read_text() for i in (0, 1)]
    assert 0 not in ends and "it did not end" not in ends, texts
    assert all(re.search(TOLD, text) for text in texts), texts
    assert seconds < 5 + 15, seconds
    assert all_ended()
    cable("up")
    done = weights("out", "last.pt")
    epochs = str(done["epoch"] + 1)
    again = [
        on_host(names, i, kind, 23457, *flags, "--epochs", epochs, log=f"{i}.log") for i in (0, 1)
    ]
    assert [finish(process) for process in again] == [0, 0], Path("0.log").read_text()
    assert len(metrics("out")) == int(epochs)


@pytest.mark.slow
@pytest.mark.parametrize("kind, i", [("spawn", 0), ("spawn", 1), ("torchrun", 1)])
def test_the_other_host_never_comes(hosts, kind, i):
    begin = time.monotonic()
    process = on_host(hosts[0], i, kind, 23456, "--dataset", "synthetic", *LONG[2:], log="run.log")
    assert finish(process, 60) == 1
    assert time.monotonic() - begin < 5 + 20  # the imports are in it
    assert re.search(TOLD, Path("run.log").read_text())
    assert all_ended() and not Path("runs").exists()


@pytest.fixture
def disk(work):
    """A folder on a file system of 32 MiB."""
    if os.getuid():
        pytest.skip("to mount a small disk takes root")
    folder = work / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["train_single", SLOW_SPAWN])
def test_the_disk_fills(disk, name):
    flags = ["--dataset", "synthetic", "--model", "mlp", "--epochs", "100000"]
    flags += ["--output", disk / "out", "--log-every", "1"]
    count = 1 + (name in DDP)
    process = start([*commands(name, count)[0], *flags], "run.log")
    wait_for("epoch 2/", "run.log", process)
    with contextlib.suppress(OSError), open(disk / "filler", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    assert finish(process) == 1
    text = Path("run.log").read_text()
    assert "No space left on device" in text and "the file before it is whole" in text, text
    assert weights(disk / "out", "last.pt")["epoch"] >= 1
    assert not list((disk / "out").glob("*.tmp")) and all_ended()
    (disk / "filler").unlink()
    epochs = weights(disk / "out", "last.pt")["epoch"] + 1
    run(name, *flags[:4], "--epochs", str(epochs), *flags[6:], "--resume", processes=count)
    assert len(metrics(disk / "out")) == epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stuck", [("train_ddp_spawn", 0), ("train_ddp_spawn", 1), ("train_ddp_torchrun", 1)]
)
def test_a_stuck_rank(name, stuck):
    """SIGSTOP for one rank: the others end after --timeout."""
    process = start([*commands(name, 2)[0], *LONG, "--timeout", "5"], "run.log")
    wait_for("epoch 1/100000 step 20/", "run.log", process)
    begin, victims = time.monotonic(), ranks(process)
    os.kill(victims[stuck], signal.SIGSTOP)
    assert finish(process, 90) == 1, Path("run.log").read_text()
    # torchrun gives a rank that does not listen 30 s more before it kills it
    assert time.monotonic() - begin < (15 if name == "train_ddp_spawn" else 45)
    text = Path("run.log").read_text()
    assert re.search(r"rank \d on \S+: ended by .*[Tt]imed out", text), text
    assert all_ended()


@pytest.mark.slow
@pytest.mark.parametrize(
    "machines, says",
    [
        ([(0, 2), (0, 2)], "ddress already in use"),
        ([(1, 2), (1, 2)], TOLD),
        ([(0, 2), (1, 3)], TOLD),
    ],
    ids=["rank0twice", "rank1twice", "world3"],
)
def test_wrong_place(machines, says):
    """Machines that were told different things: a message from each, within --timeout."""
    place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--timeout", "6"]
    started, begin = [], time.monotonic()
    for i, (rank, size) in enumerate(machines):
        words = [sys.executable, script("train_ddp_multigpu_proc"), *LONG, *place]
        words += ["--rank", str(rank), "--world-size", str(size), "--batch-size", "60"]
        started.append(start(words, f"{i}.log"))
        time.sleep(3)
    ends = [finish(process, 60) for process in started]
    texts = [Path(f"{i}.log").read_text() for i in range(2)]
    assert 0 not in ends and "it did not end" not in ends, texts
    assert time.monotonic() - begin < 60  # Gloo waits for 30 s, whatever it is told
    assert re.search(says, texts[-1]) and all("rror" in text for text in texts), texts


@pytest.mark.slow
def test_a_stale_init_file(data):
    """Left by a run that was killed: refused where it can be told from a machine that waits."""
    flags = [*TRAIN, "--data-dir", data, "--output", "out"]
    method = ["--init-method", f"file://{os.getcwd()}/init", "--timeout", "60"]
    words = [*commands("train_ddp_spawn", 2)[0], *method, *flags, "--epochs", "100000"]
    process = start(words, "run.log")
    wait_for("epoch 1/100000 step 3/", "run.log", process)
    for number in processes():
        kill(number)
    process.wait()
    before = snapshot(".")
    says = "an earlier run left that file"
    assert says in quick("train_ddp_spawn", *method, *flags, status=2).err
    os.utime("init", (time.time() - 61, time.time() - 61))
    two = ["--world-size", "2"]
    assert says in quick("train_ddp_multigpu_proc", *method, *flags, *two, status=2).err
    assert {path: before[path] for path in ("init", "out/last.pt") if path in before}.items() <= (
        snapshot(".").items()
    )


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hostile_checkpoint(data, name):
    """What would run code when unpickled is refused without running it."""
    Path("out").mkdir()
    torch.save({"model": Evil(), "epoch": 1}, "out/last.pt")
    before = snapshot("out")
    flags = [*TRAIN, "--data-dir", data, "--output", "out", "--resume"]
    if name == "train_ddp_torchrun":
        err = run(name, *flags, status=1)
    else:
        err = quick(name, *flags, status=2).err
        assert "Traceback" not in err and err.count("\n") <= 2, err
    assert "error: --resume: out/last.pt" in err and "give another --output" in err, err
    assert snapshot("out") == before and not Path("ran").exists()


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
@pytest.mark.parametrize("name", ["train_single", SLOW_SPAWN, SLOW_TORCHRUN])
def test_an_image_breaks_in_epoch_2(data, name, workers):
    shutil.copytree(data / "pictures", "pictures")
    flags = ["--dataset", "pictures", "--batch-size", "8", "--workers", workers]
    flags += ["--epochs", "100000", "--log-every", "1", "--output", "out"]
    count = 1 + (name in DDP)
    process = start([*commands(name, count)[0], *flags], "run.log")
    wait_for("epoch 2/100000 step 1/", "run.log", process)
    broken = sorted(Path("pictures/train").rglob("*.png"))[5]
    broken.write_bytes(b"not an image")
    begin = time.monotonic()
    assert finish(process, 60) == (1 if name == "train_ddp_torchrun" else 2)
    assert time.monotonic() - begin < 15
    text = Path("run.log").read_text()
    place = r"rank \d on \S+: " if name in DDP else ""
    assert re.search(rf"{name}.py: {place}error: {broken} is no image", text), text
    assert all_ended() and weights("out", "last.pt")


@pytest.mark.parametrize("name", ["train_single", SLOW_SPAWN, SLOW_TORCHRUN])
def test_two_runs_into_one_folder(name):
    count = 1 + (name in DDP)
    flags = [*LONG, "--output", "out"]
    started = [start([*w, *flags], f"{i}.log") for i, w in enumerate(commands(name, count))]
    wait_for("epoch 1/100000 step 10/", "0.log", started[0])
    before = snapshot("out")
    err = quick("train_single", *flags, status=2).err
    assert "error: --output out: another run writes to it" in err and err.count("\n") <= 2
    err = quick("train_single", *flags, "--resume", status=2).err
    assert "another run writes to it" in err and set(snapshot("out")) >= set(before)
    assert started[0].poll() is None  # and goes on
    for number in processes():
        kill(number)
    for process in started:
        process.wait()
    quick("train_single", "--dataset", "synthetic", "--epochs", "1", "--output", "out")
    assert sorted(os.listdir("out")) == ["last.pt", "metrics.csv", "model.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, workers", [("train_single", "0"), ("train_single", "2"), ("train_ddp_torchrun", "1")]
)
def test_memory_does_not_grow(data, name, workers):
    """What each process holds at step 2,000 is what it held at step 200, within 2 %."""
    flags = ["--dataset", "cifar10", "--data-dir", data, "--batch-size", "4", "--workers", workers]
    flags += ["--epochs", "100", "--log-every", "10", "--augment", "--checkpoint-every", "100"]
    process = start([*commands(name, 1 + (name in DDP))[0], *flags, "--output", "out"], "run.log")
    wait_for("epoch 2/100 step 40/", "run.log", process)  # 160 steps an epoch
    early = {number: memory(number) for number in processes()}
    wait_for("epoch 13/100 step 80/", "run.log", process)
    late = {number: memory(number) for number in early}
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process) in (1, 75)
    assert len(early) >= 1 + int(workers)
    assert all(late[number] <= 1.02 * early[number] for number in early), (early, late)


def memory(number):
    """Resident memory in pages."""
    return int(Path(f"/proc/{number}/statm").read_text().split()[1])

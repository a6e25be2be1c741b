"""One training run in five scripts: same numbers, exact evaluation, exact resuming."""

import gc
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import write_fashion_mnist
from helpers import (
    DDP,
    SCRIPTS,
    commands,
    finish,
    free_port,
    metrics,
    quick,
    run,
    same,
    script,
    start,
    wait_for,
    weights,
)

ONE = ["train_single", "train_dp", "train_ddp_multigpu_proc"]  # without a process of their own
CIFAR = ["--dataset", "cifar10", "--batch-size", "16"]


def train(name, *flags, processes=1, output, **options):
    flags = [*flags, "--output", output]
    if processes == 1 and name in ONE:
        return quick(name, *flags, **options).out
    return run(name, *flags, processes=processes, **options)


def close(a, b, digits=1e-4):
    keys = "train_loss", "test_loss", "test_accuracy"
    return all(abs(a[0][key] - b[0][key]) <= digits * abs(b[0][key]) for key in keys)


FAST = [("train_dp", 1), ("train_ddp_spawn", 2), ("train_ddp_torchrun", 2)]
FAST += [("train_ddp_multigpu_proc", 2)]


def compare(pairs, *flags):
    flags = ["--dataset", "synthetic", "--epochs", "1", *flags]
    train("train_single", *flags, output="single")
    one = metrics("single")
    assert one[0]["test_accuracy"] > 0.2
    for name, count in pairs:
        output = f"{name}-{count}"
        train(name, *flags, processes=count, output=output)
        assert close(metrics(output), one), (name, count, metrics(output), one)
        if name == "train_ddp_torchrun" and ("train_ddp_spawn", count) in pairs:
            a, b = metrics(output)[0], metrics(f"train_ddp_spawn-{count}")[0]
            assert all(a[key] == b[key] for key in ("train_loss", "test_loss", "test_accuracy"))
            assert same(weights(output), weights(f"train_ddp_spawn-{count}"))


def test_same_run(request):
    if request.config.getoption("--slow"):
        pytest.skip("test_same_run_everywhere has it in it")
    compare(FAST, "--augment")


@pytest.mark.slow
@pytest.mark.parametrize("model, counts", [("net", (1, 2, 4)), ("mlp", (2,))])
def test_same_run_everywhere(model, counts):
    pairs = [("train_dp", 1), *((name, count) for name in DDP for count in counts)]
    compare(pairs, "--model", model, *(["--augment"] if model == "net" else []))


@pytest.mark.slow
def test_two_spawning_machines(data):
    """Two machines with two processes each, the second one first, do what four processes do."""
    flags = [*CIFAR, "--data-dir", data, "--epochs", "1"]
    run("train_ddp_spawn", *flags, "--output", "one", processes=4)
    place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2"]
    place += ["--nproc-per-node", "2"]
    started = []
    for rank in "1", "0":
        words = [sys.executable, script("train_ddp_spawn"), *place, "--rank", rank, *flags]
        started.append(start([*words, "--output", "two"], f"machine{rank}.log"))
        time.sleep(3)
    assert [finish(process) for process in started] == [0, 0], Path("machine0.log").read_text()
    text = Path("machine1.log").read_text()
    assert "waiting for 2 machines at tcp://127.0.0.1" in text and " until " in text
    assert same(weights("one"), weights("two"))


RANKS = """
import os, runpy, sys, torch
path, rank, world_size, port = sys.argv[1], *map(int, sys.argv[2:5])
sys.argv[1:] = sys.argv[5:]
os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"MASTER_PORT": str(port)}
names = runpy.run_path(path, run_name="script")
parts = names["main"].__globals__
kind, kept = parts["DistributedDataParallel"], []
def wrap(*args, **options):
    kept.append(kind(*args, **options))
    return kept[0]
parts["DistributedDataParallel"] = wrap
args = parts["parser"].parse_args()
if "spawn" in path:
    args.nproc_per_node = world_size
    args.init_method = f"tcp://127.0.0.1:{port}"
    status = parts["main"](rank, args)
else:
    args.init_method, args.rank, args.world_size = f"tcp://127.0.0.1:{port}", rank, world_size
    status = parts["main"](args)
torch.save(kept[0].state_dict(), f"rank{rank}.pt")
os._exit(status)
"""


@pytest.mark.parametrize(
    "name, model",
    [
        ("train_ddp_torchrun", "net"),
        pytest.param("train_ddp_spawn", "net", marks=pytest.mark.slow),
        pytest.param("train_ddp_multigpu_proc", "mlp", marks=pytest.mark.slow),
    ],
)
def test_ranks_are_identical(data, name, model):
    Path("ranks.py").write_text(RANKS)
    flags = [*CIFAR, "--data-dir", data, "--epochs", "1", "--augment", "--model", model]
    words = [sys.executable, "ranks.py", script(name)]
    place = ["2", str(free_port())]
    started = [start([*words, str(r), *place, *flags], f"{r}.log") for r in (0, 1)]
    assert [finish(process) for process in started] == [0, 0], Path("0.log").read_text()
    assert same(weights(".", "rank0.pt"), weights(".", "rank1.pt"))


@pytest.mark.parametrize(
    "name, count",
    [("train_single", 1), pytest.param("train_ddp_torchrun", 4, marks=pytest.mark.slow)],
)
def test_exact_evaluation(name, count, tmp_path):
    """2,003 samples over 4 processes: the loss and accuracy of model.pt on all of them."""
    images, labels = write_fashion_mnist(tmp_path, 320, 2003)
    flags = ["--dataset", "fashion-mnist", "--data-dir", tmp_path, "--epochs", "8"]
    flags += ["--lr", "0.01", "--batch-size", "16"]
    train(name, *flags, processes=count, output="out")
    state = {key: value.double() for key, value in weights("out").items()}
    x = torch.from_numpy(images[320:, None, :, :, 0]).double() / 64 - 127.5 / 64
    for layer in "12":
        x = F.conv2d(x, state[f"conv{layer}.weight"], state[f"conv{layer}.bias"])
        x = F.max_pool2d(x.relu(), 2)
    x = x.flatten(1)
    for layer in "123":
        x = F.linear(x.relu(), state[f"fc{layer}.weight"], state[f"fc{layer}.bias"])
    labels = torch.from_numpy(labels[320:])
    row = metrics("out")[-1]
    assert len(labels) == 2003
    assert row["test_loss"] == pytest.approx(F.cross_entropy(x, labels).item(), rel=1e-5)
    assert row["test_accuracy"] == pytest.approx((x.argmax(1) == labels).double().mean().item())
    assert row["test_accuracy"] > 0.15


@pytest.mark.slow
def test_batch_norm_is_evaluated_with_rank_0s(data):
    """resnet18 on two processes: what is reported is what model.pt gives, loaded by one process."""
    flags = [*CIFAR, "--data-dir", data, "--model", "resnet18"]
    train("train_ddp_torchrun", *flags, "--epochs", "1", processes=2, output="out")
    last = weights("out", "last.pt")
    module = script("train_single")
    check = f"""
import runpy, torch
parts = runpy.run_path({module!r}, run_name="script")
args = parts["parser"].parse_args({[str(flag) for flag in flags]!r})
_, test_set = parts["load_data"](args, "cpu")
net = parts["build_model"](args, test_set)
net.load_state_dict(torch.load("out/model.pt"))
sums = parts["evaluate"](args, net, [test_set[:]], torch.device("cpu"))
print((sums[0] / sums[2]).item())
"""
    loss = float(subprocess.run([sys.executable, "-c", check], capture_output=True).stdout)
    assert metrics("out")[0]["test_loss"] == pytest.approx(loss, rel=1e-4)
    assert same(last["model"], weights("out"))


@pytest.mark.parametrize(
    "first",
    ["train_single", *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:])],
)
def test_checkpoint_of_any_script_goes_on_in_any(data, first):
    flags = [*CIFAR, "--data-dir", data, "--augment", "--lr", "0.01"]
    train("train_single", *flags, "--epochs", "3", output="whole")
    train(first, *flags, "--epochs", "1", processes=1 + (first in DDP), output="out")
    names = SCRIPTS if first == "train_single" else ["train_single"]
    for name in names:
        subprocess.run(["rm", "-rf", name], check=True)
        subprocess.run(["cp", "-r", "out", name], check=True)
        train(name, *flags, "--epochs", "3", "--resume", output=name)
        assert [row["epoch"] for row in metrics(name)] == [1, 2, 3]
        assert close(metrics(name)[1:], metrics("whole")[1:], 1e-3), (first, name)


def stop_and_go(name, count, number, stops, *flags, output="out"):
    """Stop a run by a signal as soon as it steps, as often as `stops` says; then let it end."""
    words = [*commands(name, count)[0], *flags, "--output", output, "--log-every", "1", "--resume"]
    for _ in range(stops):
        process = start(words, "run.log")
        wait_for(" step ", "run.log", process)
        os.kill(process.pid, number)
        status, text = finish(process), Path("run.log").read_text()
        if name == "train_ddp_torchrun":  # it passes on no worker's status: 1 for every end but 0
            assert status == 1, text
        else:
            assert status == 75 and "stopped after step" in text, text
        assert not Path(output, "model.pt").exists(), text
    assert finish(start(words, "run.log")) == 0, Path("run.log").read_text()


@pytest.mark.parametrize(
    "name, count, number, flags",
    [
        ("train_single", 1, signal.SIGTERM, ["--lr-schedule", "cosine"]),
        pytest.param(
            "train_ddp_spawn",
            2,
            signal.SIGUSR1,
            ["--checkpoint-every", "70"],
            marks=pytest.mark.slow,
        ),
        pytest.param("train_single", 1, signal.SIGUSR1, ["--workers", "2"], marks=pytest.mark.slow),
        pytest.param(
            "train_dp", 1, signal.SIGUSR1, ["--optimizer", "adam"], marks=pytest.mark.slow
        ),
        pytest.param("train_ddp_spawn", 4, signal.SIGTERM, [], marks=pytest.mark.slow),
        pytest.param("train_ddp_torchrun", 3, signal.SIGTERM, [], marks=pytest.mark.slow),
    ],
)
def test_exact_resume(data, name, count, number, flags):
    """Bit-identical to a run that was never stopped, each epoch once in the table."""
    batch = 30 if count == 3 else 32
    flags = [
        "--dataset",
        "synthetic",
        "--epochs",
        "2",
        "--augment",
        "--batch-size",
        str(batch),
        *flags,
    ]
    train(name, *flags, processes=count, output="whole")
    stop_and_go(name, count, number, 2 if count < 3 else 1, *flags)
    assert same(weights("out"), weights("whole"))
    a, b = metrics("out"), metrics("whole")
    assert [row["epoch"] for row in a] == [1, 2]
    for key in "train_loss", "test_loss", "test_accuracy":
        assert [row[key] for row in a] == [row[key] for row in b], key
    assert not list(Path("out").glob("*.tmp"))


def test_stop_after_any_step(data):
    """One process, stopped at random moments until it is through, from a random checkpoint too."""
    flags = [*CIFAR, "--data-dir", data, "--epochs", "3", "--checkpoint-every", "3"]
    train("train_single", *flags, output="whole")
    stops, status = 0, 75
    while status == 75:
        words = [sys.executable, script("train_single"), *flags, "--output", "out", "--resume"]
        process = start([*words, "--log-every", "1"], "run.log")
        wait_for("rank 0: ", "run.log", process)
        time.sleep(random.uniform(0, 0.6))
        process.send_signal(random.choice([signal.SIGTERM, signal.SIGUSR1]))
        status = finish(process)
        text = Path("run.log").read_text()
        assert status in (0, 75, -signal.SIGTERM, -signal.SIGUSR1), text
        if status < 0:  # before there was anything to save
            assert "epoch " not in text
            status = 75
        stops += 1
        if stops == 8:
            quick("train_single", *flags, "--output", "out", "--resume")
            break
    assert same(weights("out"), weights("whole"))
    assert [row["epoch"] for row in metrics("out")] == [1, 2, 3]


def test_signal_to_the_whole_group(data):
    """As Slurm does it: the loaders' workers get the signal too, and must not break the run."""
    flags = ["--dataset", data / "pictures", "--batch-size", "8", "--workers", "2"]
    flags = [*flags, "--epochs", "400", "--log-every", "1", "--output", "out"]
    process = start([sys.executable, script("train_single"), *flags], "run.log")
    wait_for("epoch 2/400 step 3/", "run.log", process)
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process) == 75, Path("run.log").read_text()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)  # any of its processes left?
            time.sleep(0.2)


def test_resume_changes_nothing_when_finished(data):
    flags = [*CIFAR, "--data-dir", data, "--output", "out", "--resume"]
    quick("train_single", *flags, "--epochs", "1")
    before = weights("out")
    assert "finished" in quick("train_single", *flags, "--epochs", "1").out
    assert same(before, weights("out")) and len(metrics("out")) == 1
    quick("train_single", *flags, "--epochs", "2")
    assert [row["epoch"] for row in metrics("out")] == [1, 2]
    assert not same(before, weights("out"))


def test_fewer_epochs_than_planned(data):
    """--resume with --epochs lowered to those that are done finishes the run."""
    flags = [*CIFAR, "--data-dir", data, "--log-every", "1", "--output", "out"]
    process = start([*commands("train_single")[0], *flags, "--epochs", "5000"], "run.log")
    wait_for("epoch 2/5000 step 1/", "run.log", process)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 75
    done = len(metrics("out"))
    state = weights("out", "last.pt")
    epochs = done + (state["step"] > 0)
    quick("train_single", *flags, "--epochs", epochs, "--resume")
    assert len(metrics("out")) == epochs
    Path("out/model.pt").unlink()
    quick("train_single", *flags, "--epochs", epochs, "--resume")
    assert same(weights("out"), weights("out", "last.pt")["model"])


def test_amp_reaches_nested_modules_and_ends_with_them(data):
    check = f"""
import runpy, torch
parts = runpy.run_path({script("train_single")!r}, run_name="script")
globals_ = parts["set_up"].__globals__
seen = []
class Look(torch.nn.Module):
    def forward(self, x):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return x
nn = torch.nn
globals_["build_model"] = lambda args, train_set: nn.Sequential(
    nn.Flatten(), nn.Sequential(nn.Linear(3072, 10), Look()), nn.Sequential(Look()))
flags = ["--amp", "--dataset", "cifar10", "--data-dir", {str(data)!r}]
_, _, net, _ = parts["set_up"](parts["parser"].parse_args(flags), torch.device("cpu"))
out = net(torch.zeros(2, 3, 32, 32))
assert out.dtype == torch.bfloat16 and seen == [(True, torch.bfloat16)] * 2
assert not torch.is_autocast_enabled("cpu")
assert list(net.state_dict()) == ["1.0.weight", "1.0.bias"]
"""
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_new_run_takes_the_place_of_an_old_one(data):
    flags = [*CIFAR, "--data-dir", data, "--output", "out", "--epochs", "1"]
    assert "--resume" not in quick("train_single", *flags, "--seed", "1").err
    first = weights("out")
    err = quick("train_single", *flags, "--seed", "2").err
    assert "out/last.pt will be replaced; to go on from it: --resume" in err
    assert len(metrics("out")) == 1 and not same(first, weights("out"))


@pytest.mark.parametrize(
    "name", [pytest.param("train_ddp_spawn", marks=pytest.mark.slow), "train_ddp_torchrun"]
)
def test_a_dead_rank_ends_the_job(data, name):
    flags = [*CIFAR, "--data-dir", data, "--epochs", "2000", "--output", "out", "--log-every", "1"]
    process = start([*commands(name, 2)[0], *flags], "run.log")
    wait_for("epoch 2/2000 step 3/", "run.log", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [
        int(pid)
        for pid in children
        if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert finish(process, 120) not in (0, "it did not end"), Path("run.log").read_text()
    for pid in ranks:
        assert not Path(f"/proc/{pid}").exists()


def test_write_keeps_the_old_file(tmp_path):
    """A failure while writing leaves what was there, whole."""
    parts = runpy.run_path(script("train_single"), run_name="script")
    path = tmp_path / "last.pt"
    parts["write"](path, {"step": torch.tensor(1)})

    class Broken:
        def __reduce__(self):
            raise OSError("no space left")

    with pytest.raises(RuntimeError, match="the file before it is whole"):
        parts["write"](path, {"step": Broken()})
    assert torch.load(path)["step"] == 1 and list(tmp_path.iterdir()) == [path]


def test_cosine(data):
    """The learning rate of step k of n is lr / 2 * (1 + cos(pi k / n)), in a resumed run too."""
    flags = [*CIFAR, "--data-dir", data, "--lr", "0.01", "--lr-schedule", "cosine", "--epochs", "2"]
    quick("train_single", *flags, "--output", "out")
    group = weights("out", "last.pt")["optimizer"]["param_groups"][0]
    done = torch.tensor(79 / 80 * torch.pi, dtype=torch.float64)
    assert group["lr"] == pytest.approx(0.005 * (1 + done.cos().item()), rel=1e-6)
    quick("train_single", *flags, "--output", "constant", "--lr-schedule", "constant")
    assert not same(weights("out"), weights("constant"))


def test_flags_have_effect(data):
    flags = [*CIFAR, "--data-dir", data, "--epochs", "1"]
    plain = quick("train_single", *flags, "--output", "plain")
    for number, more in enumerate(
        [["--augment"], ["--amp"], ["--optimizer", "adam"], ["--lr", "0.002"], ["--seed", "1"]]
    ):
        quick("train_single", *flags, *more, "--output", f"other{number}")
        assert not same(weights("plain"), weights(f"other{number}")), more
    for number, more in enumerate([["--deterministic"], ["--data-on-device"], ["--workers", "2"]]):
        quick("train_single", *flags, *more, "--output", f"same{number}")
        assert same(weights("plain"), weights(f"same{number}")), more
    quick("train_single", *flags, "--repeat", "3", "--output", "repeat")
    assert weights("repeat")["conv1.weight"].shape == (6, 9, 5, 5)
    assert plain.out.startswith("torch ") and "rank 0: host " in plain.out
    lines = quick("train_single", *flags, "--log-every", "10", "--output", "log").out.splitlines()
    assert sum(" step " in line and " left" in line for line in lines) == 4
    state = weights("plain", "last.pt")
    assert state["epoch"] == 1 and state["step"] == 0 and "optimizer" in state


@pytest.mark.slow
def test_compressed_gradients(data):
    flags = [*CIFAR, "--data-dir", data, "--epochs", "1"]
    run("train_ddp_torchrun", *flags, "--output", "plain", processes=2)
    run("train_ddp_torchrun", *flags, "--output", "bf16", "--compress-gradients", processes=2)
    a, b = weights("plain"), weights("bf16")
    assert not same(a, b)
    for key in a:
        assert torch.allclose(a[key], b[key], atol=2e-3), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_single", "train_ddp_torchrun"])
def test_compile(data, name):
    if subprocess.run(["which", "g++"], capture_output=True).returncode:
        pytest.skip("torch.compile needs g++ on a CPU")
    flags = [*CIFAR, "--data-dir", data, "--epochs", "1", "--lr", "0.01"]
    run(name, *flags, "--output", "plain")
    run(name, *flags, "--output", "compiled", "--compile")
    assert weights("plain").keys() == weights("compiled").keys()
    assert close(metrics("plain"), metrics("compiled"), 1e-3)


def test_peak_and_speed(data):
    quick("train_single", *CIFAR, "--data-dir", data, "--epochs", "1", "--output", "out")
    row = metrics("out")[0]
    assert row["images_per_second"] == pytest.approx(640 / row["seconds"])
    if not torch.accelerator.is_available():
        assert row["peak_memory_mib"] == 0
    header = "epoch,train_loss,test_loss,test_accuracy,seconds,images_per_second,peak_memory_mib"
    assert Path("out/metrics.csv").read_text().splitlines()[0] == header


def test_net_is_the_tutorials(data):
    quick("train_single", *CIFAR, "--data-dir", data, "--epochs", "1", "--output", "out")
    shapes = {key: tuple(value.shape) for key, value in weights("out").items()}
    assert shapes["conv1.weight"] == (6, 3, 5, 5) and shapes["conv2.weight"] == (16, 6, 5, 5)
    assert shapes["fc1.weight"] == (120, 400) and shapes["fc3.weight"] == (10, 84)


@pytest.mark.slow
def test_a_step_gets_no_new_memory(data):
    """On a CPU, ten more steps of resnet18 take little of their 8 MiB tensors from the kernel."""

    def faults(epochs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        flags = [*CIFAR[:2], "--data-dir", data, "--model", "resnet18", "--batch-size", "128"]
        run("train_single", *flags, "--epochs", epochs, "--output", epochs)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before

    one, three = faults("1"), faults("3")
    assert three - one < 10 * 8 * 2**20 // resource.getpagesize(), (one, three)


def test_garbage_collections_are_short(data):
    """After set_up a full one does not look through all that torch has made on its import."""
    parts = runpy.run_path(script("train_single"), run_name="script")

    def seconds():
        begin = time.perf_counter()
        gc.collect()
        return time.perf_counter() - begin

    gc.collect()
    before = min(seconds() for _ in range(3))
    args = parts["parser"].parse_args(["--dataset", "cifar10", "--data-dir", str(data)])
    parts["set_up"](args, torch.device("cpu"))
    try:
        assert min(seconds() for _ in range(3)) < before / 5
    finally:
        gc.unfreeze()

"""What a user can get wrong: one or two lines, status 2, nothing written."""

import hashlib
import shutil
import socket
from pathlib import Path

import pytest
import torch
from conftest import write_folder
from helpers import free_port, quick, run, script, weights

TRAIN = ["--dataset", "cifar10", "--epochs", "1"]


def snapshot(folder):
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refuse(name, *flags, says, path=None):
    """The script refuses the flags with `says`, in few words, and leaves its files as they were."""
    out = Path("out")
    out.mkdir(exist_ok=True)
    (out / "model.pt").exists() or (out / "model.pt").write_text("an earlier run's")
    before = snapshot(out)
    err = quick(name, "--output", out, *flags, status=2, path=path).err
    assert "Traceback" not in err, err
    message = [line for line in err.splitlines() if "error: " in line]
    assert err.count("\n") <= 2 and len(message) == 1 and says in message[0], err
    assert snapshot(out) == before
    return message[0]


FLAGS = [
    (["--dataset", "no_such"], "no_such"),
    (["--model", "vgg"], "vgg"),
    (["--optimizer", "sdg"], "sdg"),
    (["--lr-schedule", "linear"], "linear"),
    (["--batch-size", "0"], "--batch-size: 0"),
    (["--batch-size", "-4"], "--batch-size: -4"),
    (["--batch-size", "many"], "many"),
    (["--epochs", "-1"], "--epochs: -1"),
    (["--lr", "0"], "--lr"),
    (["--lr", "-0.1"], "--lr"),
    (["--lr", "nan"], "--lr"),
    (["--lr", "inf"], "--lr"),
    (["--repeat", "0"], "--repeat"),
    (["--image-size", "8"], "--image-size"),
    (["--log-every", "0"], "--log-every"),
    (["--checkpoint-every", "-1"], "--checkpoint-every"),
    (["--workers", "-1"], "--workers"),
    (["--seed", "-1"], "--seed"),
    (["--seed", "1" + 30 * "0"], "--seed"),
]


@pytest.mark.parametrize("flags, says", FLAGS, ids=lambda value: "=".join(value)[:30])
def test_flags(data, flags, says):
    refuse("train_single", "--data-dir", data, *TRAIN, *flags, says=says)


@pytest.mark.slow
@pytest.mark.parametrize("flags, says", FLAGS, ids=lambda value: "=".join(value)[:30])
@pytest.mark.parametrize("name", ["train_dp", "train_ddp_spawn", "train_ddp_multigpu_proc"])
def test_flags_elsewhere(data, name, flags, says):
    refuse(name, "--data-dir", data, *TRAIN, *flags, says=says)


@pytest.mark.parametrize("name", ["train_ddp_spawn", "train_ddp_multigpu_proc"])
def test_place(name):
    with socket.create_server(("", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for flags, says in [
            (["--rank", "2", "--world-size", "2"], "--rank 2"),
            (["--rank", "-1"], "--rank: -1"),
            (["--world-size", "0"], "--world-size: 0"),
            (["--timeout", "0"], "--timeout"),
            (["--init-method", "udp://127.0.0.1:1"], "udp"),
            (["--init-method", "tcp://127.0.0.1"], "tcp://HOST:PORT"),
            (["--init-method", "tcp://127.0.0.1:port"], "port"),
            (["--init-method", "tcp://:2000"], "tcp://HOST:PORT"),
            (["--init-method", "nonsense"], "nonsense"),
            (["--init-method", "file:///no_such/folder/file"], "file:///no_such"),
            (["--init-method", "file://relative/file"], "file:///PATH"),
            (["--init-method", "env://"], "MASTER_ADDR"),
            (["--init-method", "tcp://127.0.0.1:0", "--world-size", "2"], "tcp://HOST:PORT"),
            (["--world-size", "2"], "tcp://HOST:PORT"),
            (["--init-method", taken], "in use"),
        ]:
            refuse(name, *flags, *TRAIN, says=says)


def test_processes():
    refuse("train_ddp_spawn", "--nproc-per-node", "0", *TRAIN, says="--nproc-per-node")
    refuse("train_ddp_spawn", "--sync-bn", *TRAIN, says="--sync-bn")
    refuse("train_ddp_torchrun", *TRAIN, says="torchrun --standalone")
    text = Path(script("train_ddp_multigpu_proc")).read_text()
    Path("cpu_only.py").write_text(text.replace("dist.is_nccl_available()", "False"))
    flags = [*TRAIN, "--compress-gradients"]
    refuse("train_ddp_multigpu_proc", *flags, says="--compress-gradients", path="cpu_only.py")


@pytest.mark.slow
def test_batch_does_not_divide(data):
    text = run("train_ddp_spawn", "--batch-size", "63", *TRAIN, processes=2, status=2)
    assert (
        text.count("--batch-size 63") == 1 and "Traceback" not in text and not Path("runs").exists()
    )
    place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", "3", "--rank", "0"]
    refuse("train_ddp_multigpu_proc", *place, *TRAIN, says="--batch-size 64")


ELSEWHERE = "train_dp", "train_ddp_spawn", "train_ddp_multigpu_proc"
SLOW_SPAWN = pytest.param("train_ddp_spawn", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    ["train_single", *(pytest.param(name, marks=pytest.mark.slow) for name in ELSEWHERE)],
)
def test_data(data, name, tmp_path):
    folder = tmp_path / "pictures"
    shutil.copytree(data / "pictures", folder)
    bad = folder / "train" / "b" / "bad.jpg"
    common = ["--dataset", folder, "--batch-size", "8", "--epochs", "1"]
    slow = name == "train_ddp_spawn"  # it starts a process each time: a few of the cases
    if not slow:
        refuse(
            name, *TRAIN, "--data-dir", "nothing_here", says="--dataset synthetic" and "synthetic"
        )
        refuse(name, "--dataset", "fashion-mnist", "--data-dir", "nothing_here", says="--data-dir")
        refuse(name, *TRAIN, "--data-dir", data, "--batch-size", "641", says="641 of only 640")
        Path("empty/train").mkdir(parents=True)
        refuse(name, "--dataset", "empty", says="empty/train")
        (folder / "train").rename(folder / "training")
        refuse(name, *common, says="train")
        (folder / "training").rename(folder / "train")
        (folder / "test" / "c").rename(folder / "test" / "d")
        refuse(name, *common, says="classes")
        (folder / "test" / "d").rename(folder / "test" / "c")
    bad.write_text("no picture")
    for flags in [["--workers", "0"], ["--workers", "2"], ["--data-on-device"]]:
        message = refuse(name, *common, *flags, says=str(bad))
        assert "synthetic" not in message, message  # no other data set is its remedy


@pytest.mark.parametrize("name", ["train_single", SLOW_SPAWN])
def test_output(data, name):
    Path("a_file").write_text("")
    for place in ["a_file", "a_file/below", "/proc/below"]:
        err = quick(name, *TRAIN, "--data-dir", data, "--output", place, status=2).err
        assert err.count("\n") == 1 and f"--output {place}" in err, err
    assert Path("a_file").read_text() == ""


class Trap:
    def __reduce__(self):
        return Path("sprung").touch, ()


@pytest.mark.parametrize("name", ["train_single", "train_dp", "train_ddp_multigpu_proc"])
def test_resume(data, name):
    common = ["--data-dir", data, *TRAIN, "--resume"]
    quick(name, *common, "--output", "out")
    whole = Path("out/last.pt").read_bytes()
    for flags in [["--model", "mlp"], ["--repeat", "2"], ["--optimizer", "adam"], ["--seed", "7"]]:
        refuse(name, *common, *flags, says="--resume: out/last.pt")
    refuse(name, *common, "--batch-size", "32", says="'batch_size': 64")
    refuse(name, *common, "--amp", says="--resume: out/last.pt")
    quick(name, *common, "--output", "out", "--epochs", "3")
    refuse(name, *common, "--epochs", "2", says="past the end of epoch 2")
    for content in [whole[:1000], whole[:-1000], b"", b"no checkpoint", b"\x80\x04N."]:
        Path("out/last.pt").write_bytes(content)
        refuse(name, *common, says="--resume: out/last.pt")
    for thing in [weights("out"), torch.ones(3), Trap()]:
        torch.save(thing, "out/last.pt")
        refuse(name, *common, says="--resume: out/last.pt")
    assert not Path("sprung").exists()


def test_folder_with_val(tmp_path):
    folder = write_folder(tmp_path / "pictures", 32, 8, test_name="val")
    quick("train_single", "--dataset", folder, "--batch-size", "8", "--epochs", "1")

"""complete/: daily mistakes end in one line that says what to do, with status 2, and nothing is
written or overwritten. tests/test_trust.py has those of several ranks, and of data."""

import datetime
import io
import multiprocessing.util
import os
import resource
import shutil
import sys
from pathlib import Path
from unittest import mock

import files as saving
import pytest
import start as starting
import torch
import torch.distributed as dist
import train as script
from helpers import (
    COMPLETE,
    Warm,
    altered,
    checkpoint,
    files,
    finish,
    free_port,
    kill_all,
    parse,
    place,
    places,
    same,
    start,
    together,
    train,
    wait_for,
    wait_until,
)

SHORT = ["--batch-size", 320, "--epochs", 1]
WRONG = "--batch-size 0,--epochs -1,--lr -0.1,--lr nan,--workers -1,--accumulate 0,--image-size 0,"
WRONG += "--log-every 0,--clip-norm -1,--weight-decay -1,--timeout 0,--warmup-steps -1,--sync-bn,"
WRONG += "--checkpoint-minutes -1,--batch 32,--pretrained,--pretrained --model mlp,"
WRONG += "--pretrained --model resnet18 --init out/model.pt,--model googlenet,--model inception_v3,"
WRONG += "--batch-size 63 --accumulate 2,--batch-size 1000,--init out/best.pt,--dataset no_such,"
WRONG += "--data-dir nothing,--lr inf,--checkpoint-minutes inf,--checkpoint-minutes nan,"
WRONG += "--timeout 99999999999,--weight-decay inf,--clip-norm nan"
TOO_SMALL = "--image-size 8,--image-size 15,--image-size 16 --model squeezenet1_1,"
TOO_SMALL += "--batch-size 1 --image-size 32 --model resnet18 --workers 0"


def test_wrong_flags(out, denied):
    """The message names the flag, and --overwrite has not touched the run."""
    for flags in WRONG.split(","):
        denied(flags.split()[0], f"--overwrite {flags}")


def test_images_or_batches_too_small(out, denied):
    """For the model: found before --overwrite touches the run, and the line of code is named."""
    for flags in TOO_SMALL.split(","):
        denied("another --image-size or --batch-size?", f"--overwrite {flags}")
    denied("(train.py, line ", "--overwrite --image-size 8")


def test_the_model_is_as_before():
    """Its statistics are those of training alone, also if a batch has tried it before."""
    frozen = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.BatchNorm2d(1).eval())
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    starting.try_model(frozen, torch.rand(2, 1, 3, 3))
    assert same(frozen.state_dict(), before)


def test_a_long_path_of_temporary_files(out, denied, data, fashion, refused, monkeypatch):
    """The socket of a loader worker would not fit: the worker fails, and the loader waits on."""
    long = Path("x" * 90).absolute()
    long.mkdir()
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(long))
    denied("AF_UNIX path too long: ", "--output new --workers 1")
    for name, words in (
        ("predict.py", ["out", data / "pictures/test"]),
        ("pack_images.py", [data / "pictures", "packed"]),
    ):
        refused("export TMPDIR=/tmp, or use --workers 0", f"complete/{name}", *words)
    train(*fashion, *SHORT, "--workers", 0, "--output", "new")
    assert place("new") == (1, 0)


def test_an_output_that_cannot_be_written(denied, fashion, monkeypatch):
    Path("file").touch()
    denied("--output file/out: ", "--output file/out")
    with pytest.raises(SystemExit, match="^--output /proc/no cannot be written: "):
        train(*fashion, *SHORT, "--output", "/proc/no")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    denied("cannot be written", "--output new")


ACCENTS = """
def metrics(sums):
    return {"pr\u00e9cision": sums["correct"] / sums["labels"]}
"""


def test_a_terminal_that_shows_no_accents(fashion, monkeypatch):
    """Names in the output are escaped, and stay what they are in files."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", line_buffering=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    train(*fashion, *SHORT, "--output", "mod\u00e8le", more=ACCENTS)
    assert b"mod\\xe8le: 0 epochs" in terminal.buffer.getvalue()
    assert "test_pr\u00e9cision" in Path("mod\u00e8le/metrics.csv").read_text()


def open_run(args):
    """Why a run with these flags cannot start in its --output, or ""."""
    try:
        saving.find_run(args, script.MAY_CHANGE)
    except saving.FileError as error:
        return str(error)
    return ""


def test_resumed_with_other_flags(out, fashion, monkeypatch):
    """Each flag that is not in MAY_CHANGE is compared, so a new one is, too, of any type. Flags
    that the checkpoint lacks are not. A folder of data may be moved."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    others = {int: 9, float: 0.9, str: "other", list: [[0.0], [1.0]], type(Path()): Path("out")}
    for name, old in vars(parse(*fashion, "--output", out, "--resume")).items():
        args = parse(*fashion, "--output", out, "--resume")
        setattr(args, name, not old if isinstance(old, bool) else others[type(old)])
        if name in script.MAY_CHANGE:
            assert open_run(args) == "" or name == "resume"
        else:
            flag = name.replace("_", "-")
            says = f"was started with --{flag} {old}, not {getattr(args, name)}: use the same"
            assert says in open_run(args)
    saved = checkpoint("out")
    saved["flags"] |= {"mine": "x", "dataset": "pictures"}
    del saved["flags"]["clip_norm"]
    torch.save(saved, "out/checkpoint.pt")
    args = parse("--resume", "--output", "out", "--dataset", "moved/pictures", "--clip-norm", 1)
    args.mine = Path("x")
    assert open_run(args) == ""
    args.mine = Path("y")
    assert "was started with --mine x, not y" in open_run(args)
    args = parse("--resume", "--output", "out", "--dataset", "pictures", "--epochs", 1)
    assert "--epochs 1: out/checkpoint.pt already has 2 epochs" in open_run(args)


def test_not_a_run_of_this_script(out, denied):
    """A run that is not to be resumed, one of a small script or of an older version, or a file."""
    denied("out has a run: --resume continues it", "")
    shutil.copytree("out", "whole")
    small = {"model": {}, "optimizer": {}, "epoch": 1, "classes": ["a"]}
    torch.save(small, "out/checkpoint.pt")
    denied("out/checkpoint.pt is of another script: use another --output", "--resume")
    Path("out/checkpoint.pt").unlink()
    denied("out has a run of another script or version: use another --output", "--resume")
    Path("out/last.json").touch()
    denied("out has a run of an older version, which cannot be resumed: start", "--resume")
    shutil.rmtree("out")
    Path("out").touch()
    denied("--output out: out is a file", "")


# ---- Damaged files -------------------------------------------------------------------------------
def damage(kind, path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    kinds = {"empty": b"", "short": content[:-100], "flipped": content}
    path.unlink() if kind == "missing" else path.write_bytes(kinds[kind])


@pytest.mark.parametrize("kind", ["missing", "empty", "short", "flipped"])
def test_damaged_files(out, denied, pretrained, kind):
    """Of --resume, --init, --evaluate and --pretrained: the file is named, with what to do."""
    name, downloaded = pretrained
    shutil.copy("out/model.pt", "init.pt")
    for path in Path("init.pt"), downloaded, Path("out/best.pt"), Path("out/checkpoint.pt"):
        damage(kind, path)
    denied("init.pt", "--output new --init init.pt")
    denied(str(downloaded), f"--output new --model {name} --pretrained")
    denied("out/best.pt is", "--evaluate")
    if kind in ("short", "flipped"):  # an empty one is of a run that has not saved anything
        denied("out/checkpoint.pt is damaged", "--resume")
        denied("put a copy back, or start a new run with --init out/best.pt", "--resume")


def test_a_full_disk(out, fashion):
    """The message names the file. What was saved stays, and the run goes on from there."""
    flags = [*fashion, "--output", "out", "--resume", "--epochs", 3]
    Path("out/checkpoint.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot write out/checkpoint.pt: "):
        train(*flags)
    assert place("out") == (2, 0)
    Path("out/checkpoint.pt.tmp").unlink()
    train(*flags)
    assert files("out") == ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]


def test_what_the_disk_says():
    """torch may say "unexpected pos" after it. What a GPU says is not about the disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match=r"^cannot write a.pt: \[Errno 27\] File too large$"):
            with saving.atomic_write("a.pt") as file:
                torch.save(torch.zeros(10**6), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with pytest.raises(RuntimeError, match="^CUDA error$"), saving.atomic_write("a.pt"):
        raise RuntimeError("CUDA error")
    assert not Path("a.pt").exists()


class Makes:
    """An object that makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("made",)


def test_objects_in_a_checkpoint(out, denied, fashion, monkeypatch):
    """`state` may have those that train.py allows. Others, which could do anything, are refused."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    saved = checkpoint("out")
    torch.save(saved | {"mine": {"object": Makes()}}, "out/checkpoint.pt")
    denied("out/checkpoint.pt has objects of posix.mkdir: if you trust it, name them", "--resume")
    torch.save(saved["model"] | {"mine": Makes()}, "weights.pt")
    denied("weights.pt has objects of posix.mkdir", "--output new --init weights.pt")
    assert not Path("made").exists()
    torch.save(saved | {"mine": {"pause": datetime.timedelta(1)}}, "out/checkpoint.pt")
    args = parse(*fashion, "--output", "out", "--resume")
    assert "has objects of datetime.timedelta: " in open_run(args)
    with torch.serialization.safe_globals([datetime.timedelta]):
        assert open_run(args) == ""


def test_what_stays(out, fashion, monkeypatch):
    """metrics.csv ends with the epoch of the checkpoint. What a run that --overwrite replaces has
    written is gone before the first step, and what the user has put there stays."""

    def ends(*words):
        raise SystemExit("here")

    monkeypatch.setattr(script, "train_epoch", ends)
    Path("out/notes.txt").touch()
    rows = Path("out/metrics.csv").read_text()
    Path("out/metrics.csv").write_text(rows + rows.splitlines()[-1])  # of an epoch without a save
    Path("out/best.pt").unlink()  # as after a kill before it was written
    with pytest.raises(SystemExit, match="here"):
        train(*fashion, "--output", "out", "--resume", "--epochs", 4)
    assert Path("out/metrics.csv").read_text() == rows and Path("out/best.pt").exists()
    with pytest.raises(SystemExit, match="here"):
        train(*fashion, "--output", "out", "--overwrite")
    assert files("out") == ["checkpoint.pt", "notes.txt"]


@pytest.mark.parametrize(
    "images, labels",
    [
        (torch.zeros(640, 1, 28, 28), torch.zeros(640).long()),
        (torch.zeros(640, 1, 28, 28).byte(), torch.zeros(640, 28, 28).long()),
    ],
    ids=["floats", "masks"],
)
def test_what_augment_cannot(monkeypatch, capsys, images, labels):
    """Floats would stay as they are, and a mask would not be that of the crop any more."""
    both = torch.utils.data.TensorDataset(images, labels)
    monkeypatch.setattr(script, "load_data", lambda args: (both, both, 10))
    with pytest.raises(SystemExit, match="2"):
        train("--augment", "--image-size", 28, "--output", "new")
    said = capsys.readouterr().err
    assert (
        "--augment crops uint8 images, but not their labels: " in said and "and leave out" in said
    )
    assert str(images.dtype) in said and said.count("error: ") == 1 and not Path("new").exists()


# ---- What fails in training ----------------------------------------------------------------------
FAULT = """
parser.add_argument("--fault")
plain, plain_loss = build_optimizer, loss_function
def build_optimizer(args, model, steps):
    done.clear()
    def after_step(*_):
        done.append(1)
        if args.fault == "weight" and len(done) == 14:
            next(model.parameters()).data.mul_(math.inf)
    optimizer, scheduler = plain(args, model, steps)
    optimizer.register_step_post_hook(after_step)
    return optimizer, scheduler
done = []
def loss_function(outputs, labels):
    here = dist.get_rank() == 1 and len(done) == 13  # one rank
    faults = {"loss": here, "test": not torch.is_grad_enabled()}
    return plain_loss(outputs, labels) + (math.nan if faults.get(args.fault) else 0)
"""


def test_not_finite(fashion):
    """In step 14, which ends with a progress line 16, on one rank: the run ends on all, and the
    last checkpoint is from before."""
    often = ["--log-every", 4, "--checkpoint-minutes", 0]
    faults = ["loss", "weight", "test"]
    runs = [[*fashion, *often, "--output", fault, "--fault", fault] for fault in faults]
    for fault, text in zip(faults, together(*runs, more=FAULT, status=1)):
        says = "test loss not finite" if fault == "test" else "loss or weights not finite"
        assert f"{says}: {fault}/checkpoint.pt is from before" in text, text
        assert "Traceback" not in text, text
        assert place(fault) == ((0, 8) if fault == "test" else (1, 0))  # an epoch has ten steps
        assert all(tensor.isfinite().all() for tensor in checkpoint(fault)["model"].values())
        assert not Path(fault, "model.pt").exists()


def test_another_state(out, fashion, monkeypatch):
    """What a checkpoint has and the script lacks, or the other way round, is an error with the
    names: a part of `state` that was added or removed, a layer."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    args = parse(*fashion, "--resume", "--output", "out")
    start = saving.find_run(args, script.MAY_CHANGE)
    assert start.is_resumed and start.progress.epoch == 2
    about = dict.fromkeys(["flags", "normalization", *start.identity])
    parts = dict.fromkeys(["model", "optimizer", "scheduler", "scaler"], torch.nn.Linear(1, 1))
    without = {name: part for name, part in parts.items() if name != "scaler"}
    for state, says in (
        ({**parts, "average": 1}, "what `state` has: average"),
        (without, "what `state` has: scaler"),
        (parts, "model: "),
    ):
        with pytest.raises(SystemExit, match=f"out/checkpoint.pt and the script differ in {says}"):
            saving.Files(args.output, state, about, start.version).restore(torch.device("cpu"))


# ---- Processes -----------------------------------------------------------------------------------
def test_places(out, denied, fashion):
    """What torchrun's and srun's processes refuse. One variable alone is not believed."""
    restarts = dict.fromkeys(["RANK", "LOCAL_RANK"], "0") | {"TORCHELASTIC_MAX_RESTARTS": "1"}
    restarts |= dict.fromkeys(["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], "1")
    beyond = restarts | {"RANK": "2", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "0"}
    left_over = {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": ""}
    needs = "--max-restarts needs --resume, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    for environment, says, flags in (
        (restarts, needs, "--output new"),
        (restarts, needs, "--output new --resume"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 processes without ranks", "--resume"),  # srun -n 8
        ({"RANK": "1", "LOCAL_RANK": "1"}, "RANK is set, but not all of", "--resume"),
        (beyond, "RANK is 2, and WORLD_SIZE 2: start torchrun, or unset RANK", "--resume"),
        (left_over, "out has a run", "--seed 5"),
    ):
        with mock.patch.dict(os.environ, environment):
            denied(says, flags)
    with mock.patch.dict(os.environ, left_over):
        train(*fashion, "--batch-size", 320, "--epochs", 1, "--output", "new")
    assert place("new") == (1, 0)


def test_says_for_whom_it_waits():
    """As with variables of another job that were left in a shell."""
    impatient = "import ranks\nranks.PATIENCE = 0.1\n"
    for rank, says in enumerate(
        ["rank 0 of 3 waits for ranks 1 to 2", "rank 1 of 3 waits for rank 0"]
    ):
        flags = ["--dataset", "synthetic", "--timeout", 60]
        path, log = altered(COMPLETE, more=impatient), f"{rank}.log"
        job = Warm(path, [[free_port(), flags]], log, places(3)[rank])
        wait_for(says, job)
        assert "for a run of one process, unset RANK" in job.log.read_text()
        kill_all([job])


def test_more_processes_than_gpus(monkeypatch):
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    monkeypatch.setenv("EMULATED_CARDS", "1")
    monkeypatch.setenv("EMULATED_REPORT", str(Path().resolve()))
    jobs = start(COMPLETE, "--dataset", "synthetic", "--timeout", 60, processes=2)
    assert wait_until(lambda: jobs[1].status() == 2)
    kill_all(jobs[:1])  # which waits for it; torchrun would end it
    assert "error: more processes than the 1 GPU" in finish(jobs)[1] and not Path("runs").exists()

"""Daily mistakes: one line that says what to do, status 2, and nothing written or overwritten."""

import os
import re
import shutil
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import checkpoint as saving
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
    content,
    files,
    free_port,
    here,
    kill_all,
    logs,
    parse,
    place,
    places,
    start,
    together,
    train,
    wait_until,
)
from test_crash import MODEL, STATE, with_state
from torchvision import models

WRONG = "--batch-size 0,--batch-size many,--epochs -1,--lr -0.1,--workers -1,--accumulate 0,"
WRONG += "--image-size 0,--log-every 0,--clip-norm -1,--weight-decay -1,--timeout 0,"
WRONG += "--warmup-steps -1,--device cuda,--model vgg,--no-such-flag,--dataset no_such,"
WRONG += "--data-dir nothing,--resume,--batch 32,--pretrained,--pretrained --model mlp,"
WRONG += "--pretrained --model resnet18 --init out/model.pt,--model googlenet,--model inception_v3,"
WRONG += "--batch-size 63 --accumulate 2,--batch-size 1000,--lr nan,--sync-bn,"
WRONG += "--checkpoint-minutes -1,--init out/best.pt"
FREE = "--epochs 3 --accumulate 2 --amp --workers 0 --log-every 3 --clip-norm 0 --lr 1e-3"


def test_wrong_flags(out, denied):
    """The message names the flag."""
    for flags in WRONG.split(","):
        denied(flags.split()[0], f"--overwrite {flags}")


@pytest.mark.parametrize("name", sorted(vars(parse())))
def test_each_flag_is_compared(trained, fashion, name, monkeypatch):
    """On --resume, unless it is in MAY_CHANGE: so a new one is, too."""
    args = parse(*fashion, "--output", trained, "--resume")
    old = getattr(args, name)
    others = {
        bool: not old,
        int: 9,
        float: 0.9,
        str: "other",
        type(trained): trained,
        list: [[0.0], [1.0]],
    }
    setattr(args, name, others[type(old)])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    reason = saving.Run(args, script.MAY_CHANGE, script.lower_is_better).open()
    if name in script.MAY_CHANGE:
        assert reason == "" or name == "resume"
    else:
        says = f"was started with --{name.replace('_', '-')} {old}, not {getattr(args, name)}: use"
        assert says in reason


def test_resumed_with_other_flags(out, denied, fashion, monkeypatch):
    """Refused before the data are loaded. What may change, and flags that are new, may."""
    resume, started = "--resume --data-dir nothing", "out/checkpoint.pt was started"
    denied("--epochs 1: out/checkpoint.pt already has 2 epochs", f"{resume} --epochs 1")
    train(*fashion, "--output", "out", "--resume", *FREE.split())
    saved = checkpoint("out")
    saved["flags"] |= {"augment": True, "mine": "x", "dataset": "pictures"}
    del saved["flags"]["clip_norm"]  # which its script does not have
    torch.save(saved, "out/checkpoint.pt")
    denied(f"{started} with --augment True, not", f"{resume} --dataset pictures")
    args = parse("--resume", "--output", "out", "--augment", "--dataset", "moved/pictures")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for mine, says in (Path("x"), ""), (Path("y"), f"{started} with --mine x, not y: use the same"):
        args.mine = mine  # a flag that the user has added, of any type
        reason = saving.Run(args, script.MAY_CHANGE, script.lower_is_better).open()
        assert says in reason if says else reason == ""


def test_not_a_run_of_this_script(out, denied):
    """As of a small script, or of the version before, or a file: named, with what to do."""
    denied("out has a run: --resume continues it", "")
    for name, says in {
        "last.json": "out has a run of an older version, which cannot be resumed: start",
        "epoch-3": "out has a run of another script or version: use another --output",
    }.items():
        Path("out/checkpoint.pt").rename("checkpoint.pt")
        Path("out", name).touch()
        denied(says, "--resume")
        Path("out", name).unlink()
        Path("checkpoint.pt").rename("out/checkpoint.pt")
    small = {"model": {}, "optimizer": {}, "epoch": 1, "classes": ["a"]}
    torch.save(small, "out/checkpoint.pt")
    denied("out/checkpoint.pt is of another script: use another --output", "--resume")
    shutil.rmtree("out")
    Path("out").write_text("")
    denied("--output out is a file", "")


def damage(kind, path):
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "flipped":  # a bit of the last tensor
        with zipfile.ZipFile(path) as file:
            last = [x for x in file.infolist() if "/data/" in x.filename and x.file_size > 8][-1]
        name, padding = struct.unpack_from("<HH", content, last.header_offset + 26)  # lengths
        start = last.header_offset + 30 + name + padding + 5
        path.write_bytes(content[:start] + bytes([content[start] ^ 64]) + content[start + 1 :])
    else:
        path.write_bytes(content[: 0 if kind == "empty" else len(content) // 2])


@pytest.mark.parametrize("kind", ["short", "flipped"])
def test_damaged_checkpoint(out, denied, kind):
    """Its name, and what to do, which test_init does."""
    damage(kind, Path("out/checkpoint.pt"))
    denied("out/checkpoint.pt is damaged", "--resume")
    denied("put a copy back, or start a new run with --init out/best.pt", "--resume")


def test_other_data(refused, data):
    """A number of samples or names of classes that are not those of the run: refused."""
    shutil.copytree(data / "pictures", "pictures")
    flags = ["--dataset", "pictures", "--batch-size", 16, "--workers", 0, "--output", "out"]
    train(*flags, "--epochs", 1)
    for part in "train", "test":
        Path("pictures", part, "b").rename(Path("pictures", part, "other"))
    says = "out/checkpoint.pt was started with other classes: ['b'] then, ['other'] now"
    refused(says, COMPLETE, *flags, "--resume")
    for part in "train", "test":
        Path("pictures", part, "other").rename(Path("pictures", part, "b"))
    moved = next(Path("pictures/train/a").iterdir())
    moved.rename(moved.name)
    says = "out/checkpoint.pt was started with 96 training samples then, not 95 now"
    refused(says, COMPLETE, *flags, "--resume")
    Path(moved.name).rename(moved)
    train(*flags, "--resume", "--epochs", 2)


STATES = """
add("--parts", default="")
MAY_CHANGE.append("parts")
plain_add, plain_build = add_state, build_model
def add_state(model, optimizer):
    parts = plain_add(model, optimizer)
    return {name: part for name, part in parts.items() if name in args.parts}
def build_model(*words):
    model = plain_build(*words)
    return model[1:] if "no layer" in args.parts else model
"""


def test_another_state(fashion):
    """What a checkpoint has and the script lacks, or the other way round, is an error with the
    names: a part of `state` that was added or removed, a layer."""
    flags = [*fashion, "--batch-size", 320, "--epochs", 2, "--resume", "--output"]
    cases = {
        "second": ("", "differ in what `state` has: second"),
        "": ("average", "differ in what `state` has: average"),
        "second average": ("second average no layer", "differ in model: "),
    }
    runs = []
    for i, (saved, (then, _)) in enumerate(cases.items()):
        runs += [[*flags, f"out-{i}", "--epochs", 1, "--parts", saved]]
        runs += [[*flags, f"out-{i}", "--parts", then]]
    more = MODEL + STATE + STATES
    texts = together(*runs, [*flags, "last"], path=with_state(), more=more, processes=0)
    for i, (_, says) in enumerate(cases.values()):
        assert f"out-{i}/checkpoint.pt and the script {says}" in texts[2 * i + 1], texts[2 * i + 1]
        assert place(f"out-{i}") == (1, 0)


def refuse(*jobs, status=2):
    """What processes say, one of which ends with this status. As torchrun does, end the others
    then, which may wait for it."""
    assert wait_until(lambda: any(job.status() is not None for job in jobs))
    wait_until(lambda: None not in [job.status() for job in jobs], 0.5)
    assert status in [job.status() for job in jobs], logs(jobs)
    kill_all(jobs)
    return logs(jobs)


def test_said_once(out, fashion, data):
    """By rank 0, when all have joined."""
    before = content("out")
    for count, says, *flags in (
        (2, "was started with --seed 76, not 1: use", "--resume", "--seed", 1, "--data-dir", "no"),
        (2, "has only 640 samples", "--overwrite", "--batch-size", 1000),
        (4, "only 3 test samples", "--overwrite", "--dataset", data / "pictures"),
        (2, "neither a known name nor a folder", "--overwrite", "--dataset", "no"),
        (2, "no download (", "--overwrite", "--data-dir", "no"),
    ):
        text = refuse(*start(COMPLETE, *fashion, "--output", "out", *flags, processes=count))
        assert text.count("error: ") == 1 and says in text and content("out") == before, text
        assert "Traceback" not in text, text


def test_disks_that_are_not_shared(out, fashion):
    """Two ranks with folders of their own: said when a run is resumed."""
    Path("elsewhere").mkdir()
    elsewhere = 'import os\nif os.environ["RANK"] == "1":\n    os.chdir("elsewhere")\n'
    flags = [*fashion, "--resume", "--epochs", 3, "--output", "out"]
    text = refuse(*start(COMPLETE, *flags, more=elsewhere))
    says = "the checkpoint in --output is epoch 2, step 0 on rank 0 and none on rank 1: put --out"
    assert says in text and "step 4/" not in text, text


def test_places(out, denied, fashion):
    """What torchrun's and srun's processes refuse. One variable alone is not believed."""
    restarts = dict.fromkeys(["RANK", "LOCAL_RANK"], "0") | {"TORCHELASTIC_MAX_RESTARTS": "1"}
    restarts |= dict.fromkeys(["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], "1")
    left_over = {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": ""}
    needs = "--max-restarts needs --resume, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    for environment, says, flags in (
        (restarts, needs, "--output new"),
        (restarts, needs, "--output new --resume"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 processes without ranks", "--resume"),  # srun -n 8
        ({"RANK": "1", "LOCAL_RANK": "1"}, "RANK is set, but not all of", "--resume"),
        (left_over, "out has a run", "--seed 5"),
    ):
        with mock.patch.dict(os.environ, environment):
            denied(says, flags)
    with mock.patch.dict(os.environ, left_over):
        here(COMPLETE, *fashion, "--epochs", 1, "--output", "new")
    assert place("new") == (1, 0)


TWICE = """
import os, time
plain = evaluate
def evaluate(*words):  # of one sample, before anything is written
    Path(f"ready-{os.getpid()}").touch()
    while len(list(Path().glob("ready-*"))) < 2:
        time.sleep(0.01)
    return plain(*words)
"""


@pytest.mark.parametrize("flag", [[], ["--resume"]])
def test_started_twice_at_the_same_moment(fashion, flag):
    """In one folder: one of them is refused, the other one goes on."""
    flags = [*fashion, "--epochs", 2, "--output", "out", *flag]
    jobs = []
    for _ in range(2):
        jobs += start(COMPLETE, *flags, more=TWICE, processes=0)
    wait_until(lambda: None not in [job.status() for job in jobs])
    assert sorted(job.status() == 0 for job in jobs) == [False, True], logs(jobs)
    [refused] = [job.log.read_text() for job in jobs if job.status()]
    assert "out" in refused.splitlines()[-1] and "samples/s" not in refused, refused
    assert files("out") == ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]


def test_a_full_disk(fashion):
    """Found at the first save, and in the line that says so; what was saved stays. When there is
    room again the run goes on."""
    Path("best.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot write best.pt: "):
        with saving.atomic_write(Path("best.pt")) as file:
            torch.save(torch.zeros(100_000), file)
    Path("out").mkdir()
    if os.getuid() or os.system("mount -t tmpfs -o size=1200k tmpfs out"):
        pytest.skip("it needs root, to mount a small disk")
    flags = [*fashion, "--resume", "--log-every", 2, "--checkpoint-minutes", 0, "--output", "out"]
    try:
        for room, step in (100_000, 0), (800_000, 2):  # the second checkpoint has no room
            with suppress(OSError):  # until it is full
                Path("out/filler").write_bytes(bytes(2_000_000))
            os.truncate("out/filler", Path("out/filler").stat().st_size - room)
            with pytest.raises(OSError, match="cannot write out/checkpoint.pt: "):
                train(*flags, "--epochs", 1)
            assert place("out") == (0, step)
            Path("out/filler").unlink()
        os.system("mount -o remount,size=4m out")
        train(*flags, "--epochs", 1)
        assert files("out") == ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]
    finally:
        os.system("umount out")


ENDS = """
def train_epoch(*words):
    raise SystemExit("here")
"""


def test_what_stays(out, fashion):
    """metrics.csv ends with the epoch of the checkpoint. What a run that --overwrite replaces has
    written is gone before the first step, and what the user has put there stays."""
    Path("out/notes.txt").touch()
    rows = Path("out/metrics.csv").read_text()
    Path("out/metrics.csv").write_text(rows + rows.splitlines()[-1])  # of an epoch without a save
    Path("out/best.pt").unlink()  # as after a kill before it was written
    with pytest.raises(SystemExit, match="here"):
        train(*fashion, "--output", "out", "--resume", "--epochs", 4, more=ENDS)
    assert Path("out/metrics.csv").read_text() == rows and Path("out/best.pt").exists()
    with pytest.raises(SystemExit, match="here"):
        train(*fashion, "--output", "out", "--overwrite", more=ENDS)
    assert files("out") == ["checkpoint.pt", "notes.txt"]


def test_a_file_to_begin_with(out, denied, monkeypatch):
    """--init from another model, or a damaged file, or none; --pretrained with a damaged download:
    the file is named, and nothing is written."""
    name = "shufflenet_v2_x0_5"
    url = models.get_model_weights(name).DEFAULT.url
    downloaded = Path("hub/checkpoints", url.rpartition("/")[2])
    downloaded.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCH_HOME", str(Path().resolve()))
    init, pretrained = "--output new --init model.pt", f"--output new --model {name} --pretrained"
    for kind in "another model", "missing", "empty", "short", "flipped":
        shutil.copy("out/model.pt", "model.pt")
        shutil.copy("out/model.pt", downloaded)
        if kind != "another model":
            damage(kind, Path("model.pt"))
            damage(kind, downloaded)
        denied("model.pt", f"{init} --model mlp" if kind == "another model" else init)
        denied(str(downloaded), pretrained)
        assert not Path("new").exists()
    shutil.copy("out/model.pt", "model.pt")
    damage("flipped", Path("out/best.pt"))
    denied("out/best.pt is damaged", "--evaluate")


def test_init_with_other_classes():
    """Said, with where it stands how to keep the other layers; which is what `new_head` does."""
    old, new = (script.Net(1, 32, classes) for classes in (10, 3))
    words = new, old.state_dict(), "best.pt"
    says = "best.pt: fc3.weight has another shape here (other classes?): new_head="
    assert says in starting.load_fitting(*words, new_head=False)
    assert not torch.equal(new.fc1.weight, old.fc1.weight)
    assert starting.load_fitting(*words, new_head=True) == ""
    assert torch.equal(new.fc1.weight, old.fc1.weight) and new.fc3.weight.shape == (3, 84)
    other = script.Net(3, 32, 3)
    assert "not of this model: conv1.weight" in starting.load_fitting(other, *words[1:], True)


TWO_KINDS = """
import os
uses_float16 = lambda args: args.amp and os.environ["RANK"] == "1"
"""


def test_gpus_of_two_kinds(fashion):
    """--amp in float16 on one, in bfloat16 on the other: they would average scaled gradients and
    unscaled ones."""
    flags = [*fashion, "--epochs", 1, "--output", "out"]
    text = refuse(*start(COMPLETE, *flags, "--amp", more=TWO_KINDS))
    assert "--amp is bfloat16 on rank 0 and float16 on rank 1: use GPUs of one kind" in text, text


def test_machines_with_other_code(fashion):
    """The script's own files, whichever was edited on one of them."""
    first = altered(COMPLETE)
    flags = [*fashion, "--epochs", 1, "--output", "out"]
    for name in "train.py", "images.py":
        second = altered(COMPLETE)
        Path(second.parent, name).write_text(Path(second.parent, name).read_text() + "# edited\n")
        port, jobs = free_port(), []
        for path, environment in zip((first, second), places(2)):
            log = f"{len(jobs)}-{name}.log"
            jobs.append(Warm(path, [[port, flags]], log, environment))
        text = refuse(*jobs)
        assert re.search(rf"error: {name} is \w+ on rank 0 and \w+ on rank 1: copy", text), text


def test_more_processes_than_gpus(monkeypatch):
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    monkeypatch.setenv("EMULATED_CARDS", "1")
    monkeypatch.setenv("EMULATED_REPORT", str(Path().resolve()))
    text = refuse(*start(COMPLETE, "--dataset", "synthetic", "--timeout", 60, processes=2))
    assert text.count("error: more processes than the 1 GPU") == 1 and not Path("runs").exists()

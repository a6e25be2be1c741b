"""Daily mistakes: one line that says what to do, status 2, and nothing written or overwritten."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest import mock

import checkpoint as saving
import pytest
import torch
import train as script
from helpers import (
    COMPLETE,
    content,
    files,
    here,
    kill_all,
    last,
    logs,
    parse,
    place,
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
WRONG += "--batch-size 63 --accumulate 2,--batch-size 1000,--shard 2,--shard -1,--sync-bn"
FREE = "--epochs 3 --accumulate 2 --amp --workers 0 --log-every 3 --clip-norm 0 --lr 1e-3"


def test_wrong_flags(out, denied):
    """The message names the flag."""
    for flags in WRONG.split(","):
        denied(flags.split()[0], f"--overwrite {flags}")


@pytest.mark.parametrize("name", sorted(vars(parse())))
def test_each_flag_is_compared(trained, fashion, name):
    """On --resume, unless it is in MAY_CHANGE: so a new one is, too."""
    args = parse(*fashion, "--output", trained, "--resume")
    old = getattr(args, name)
    others = {
        bool: not old,
        int: 9,
        float: 0.9,
        str: "other",
        type(trained): trained,
        type(None): 9,
    }
    setattr(args, name, others[type(old)])
    reason = saving.check_output(args, script.fixed_flags(args))
    if name in script.MAY_CHANGE:
        assert reason == "" or name == "resume"
    else:
        says = f"was started with --{name.replace('_', '-')} {old}, not {getattr(args, name)}: use"
        assert says in reason


def test_resumed_with_other_flags(out, denied, fashion, capsys):
    """Refused before the data are loaded. What may change, and flags that are new, may."""
    resume, started = "--resume --data-dir nothing", "out/last.json was started"
    denied("--epochs 1: out/last.json already has 2 epochs", f"{resume} --epochs 1")
    train(*fashion, "--output", "out", "--resume", *FREE.split())
    saved = last("out")
    saved["flags"] |= {"augment": True, "mine": "x", "dataset": "pictures"}
    del saved["flags"]["clip_norm"]  # which its script does not have
    Path("out/last.json").write_text(json.dumps(saved))
    denied(f"{started} with --augment True, not", f"{resume} --dataset pictures")
    args = parse("--resume", "--output", "out", "--augment", "--dataset", "moved/pictures")
    args.mine = Path("x")  # a flag that the user has added, of any type
    script.check_flags(args)
    args.mine = Path("y")
    with pytest.raises(SystemExit):
        script.check_flags(args)
    assert f"{started} with --mine x, not y" in capsys.readouterr().err


def test_not_a_run_of_this_script(out, denied):
    """As of an older version, or of a small script; or damaged: named, with what to do."""
    Path("out/last.json").rename("last.json")
    for name in "last.pt", "epoch-3", "checkpoint.pt":
        Path("out", name).touch()
        denied("out has a run", "")
        denied("out has a run of another script or version", "--resume")
        Path("out", name).unlink()
    for text in "", '{"checkpoint": "checkp':
        Path("out/last.json").write_text(text)
        denied("out/last.json", "--resume")


def damage(kind, path):
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if kind == "empty" else path.stat().st_size // 2])


@pytest.mark.parametrize("kind", ["missing", "empty", "short"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_checkpoint(out, denied, name, kind):
    """Its name, and what to do, which test_init does."""
    damage(kind, Path("out/checkpoint-2-0", name))
    says = "out/checkpoint-2-0 is damaged: put a copy back, or start a new run with --init out/best"
    denied(says, "--resume")


def test_other_data(refused, data):
    """A number of samples or names of classes that are not those of the run: refused."""
    shutil.copytree(data / "pictures", "pictures")
    flags = ["--dataset", "pictures", "--batch-size", 16, "--workers", 0, "--output", "out"]
    train(*flags, "--epochs", 1)
    for part in "train", "test":
        Path("pictures", part, "b").rename(Path("pictures", part, "other"))
    says = "out/last.json was started with other classes: ['b'] then, ['other'] now"
    refused(says, COMPLETE, *flags, "--resume")
    for part in "train", "test":
        Path("pictures", part, "other").rename(Path("pictures", part, "b"))
    moved = next(Path("pictures/train/a").iterdir())
    moved.rename(moved.name)
    says = "out/last.json was started with 96 training samples, not 95"
    refused(says, COMPLETE, *flags, "--resume")
    Path(moved.name).rename(moved)
    train(*flags, "--resume", "--epochs", 2)


STATES = """
add("--parts", default="")
MAY_CHANGE.append("parts")
class Growing:
    def __init__(self):
        self.seen = {}
    def state_dict(self):
        return dict(self.seen)
    def load_state_dict(self, seen):
        self.seen = seen
plain_add, plain_build, plain_epoch = add_state, build_model, finish_epoch
def add_state(model, optimizer):
    parts = plain_add(model, optimizer) | {"growing": Growing()}
    finish_epoch.parts = {name: part for name, part in parts.items() if name in args.parts}
    return finish_epoch.parts
def finish_epoch(args, progress, sums):
    if "growing" in finish_epoch.parts:
        finish_epoch.parts["growing"].seen[f"epoch{progress.epoch}"] = torch.zeros(())
    return plain_epoch(args, progress, sums)
def build_model(*words):
    model = plain_build(*words)
    return model[1:] if "no layer" in args.parts else model
"""


def test_another_state(fashion):
    """What a checkpoint has and the script lacks, or the other way round, is an error with the
    names: a part of `state` that was added or removed, a dictionary that has grown, a layer."""
    flags = [*fashion, "--batch-size", 320, "--epochs", 2, "--resume", "--output"]
    cases = {
        "second": ("", "second.state"),
        "": ("average", "average.0.weight"),
        "second growing": ("second growing", "growing.epoch0"),
        "second average": ("second average no layer", "model."),
    }
    runs = []
    for i, (saved, (then, _)) in enumerate(cases.items()):
        runs += [[*flags, f"out-{i}", "--epochs", 1, "--parts", saved]]
        runs += [[*flags, f"out-{i}", "--parts", then]]
    more = MODEL + STATE + STATES
    texts = together(*runs, [*flags, "last"], path=with_state(), more=more, processes=0)
    for i, (_, name) in enumerate(cases.values()):
        assert "SystemExit: " in texts[2 * i + 1] and name in texts[2 * i + 1], texts[2 * i + 1]
        assert f"out-{i}/checkpoint-1-0" in texts[2 * i + 1]
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
    """By one process of a machine, before data are loaded, or when all have joined."""
    before = content("out")
    for count, says, *flags in (
        (2, "was started with --seed 76, not 1: use", "--resume", "--seed", 1, "--data-dir", "no"),
        (2, "has only 640 samples", "--overwrite", "--batch-size", 1000),
        (4, "only 3 test samples", "--overwrite", "--dataset", data / "pictures"),
    ):
        text = refuse(*start(COMPLETE, *fashion, "--output", "out", *flags, processes=count))
        assert text.count("error: ") == 1 and says in text and content("out") == before, text
        assert "Traceback" not in text or "only" in says, text


def test_disks_that_are_not_shared(out, fashion):
    """Two ranks with folders of their own: said at the first save, and when a run is resumed."""
    Path("elsewhere").mkdir()
    elsewhere = 'if os.environ["RANK"] == "1":\n    os.chdir("elsewhere")\n'
    for output, often in ("out", 100), ("new", 2):
        flags = [*fashion, "--resume", "--epochs", 100, "--log-every", often, "--output", output]
        text = refuse(*start(COMPLETE, *flags, more=elsewhere), status=1)
        assert "put --output on a disk that all machines share" in text, text
        assert "step 4/" not in text and "epoch 3/" not in text, text


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
    assert last("new")["progress"]["epoch"] == 1


TWICE = """
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
    assert files("out") == ["best.pt", "checkpoint-2-0", "last.json", "metrics.csv", "model.pt"]


def test_a_full_disk(fashion):
    """Found before the first step, and in the line that says so; what was saved stays. When there
    is room again the run goes on."""
    Path("best.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot write best.pt: is the disk full"):
        with saving.atomic_write(Path("best.pt")) as file:
            torch.save(torch.zeros(100_000), file)
    Path("out").mkdir()
    if os.getuid() or os.system("mount -t tmpfs -o size=400k tmpfs out"):
        pytest.skip("it needs root, to mount a small disk")
    flags = [*fashion, "--resume", "--log-every", 2, "--checkpoint-minutes", 0, "--output", "out"]
    try:
        for room, says in (0, "out/last.json"), (200_000, "out/checkpoint-0-2"):
            with suppress(OSError):  # until it is full
                Path("out/filler").write_bytes(bytes(1_000_000))
            os.truncate("out/filler", Path("out/filler").stat().st_size - room)
            with pytest.raises(OSError, match=says):
                train(*flags, "--epochs", 1)
            Path("out/filler").unlink()
        os.system("mount -o remount,size=4m out")
        train(*flags, "--epochs", 1)
        assert files("out") == ["best.pt", "checkpoint-1-0", "last.json", "metrics.csv", "model.pt"]
    finally:
        os.system("umount out")


ENDS = """
def set_epoch(*words, **options):
    raise SystemExit("here")
EpochSampler.set_epoch = set_epoch
"""


def test_what_stays(out, fashion, monkeypatch):
    """A folder that somebody holds does not end the run, and a folder of the user's stays. Folders
    of a run that --overwrite replaces are gone before the first step."""
    Path("out/checkpoint-5-0.keep").mkdir()
    plain, held = os.rmdir, ["checkpoint-2-0"]

    def rmdir(path, **options):
        if Path(path).name in held:
            raise OSError(16, "Device or resource busy")
        plain(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    train(*fashion, "--epochs", 3, "--output", "out", "--resume")
    assert {"checkpoint-2-0", "checkpoint-3-0", "checkpoint-5-0.keep"} < set(files("out"))
    held.clear()

    rows = Path("out/metrics.csv").read_text()
    Path("out/metrics.csv").write_text(rows + rows.splitlines()[-1])  # of an epoch without a save
    with pytest.raises(SystemExit, match="here"):
        train(*fashion, "--output", "out", "--resume", "--epochs", 4, more=ENDS)
    assert Path("out/metrics.csv").read_text() == rows
    with pytest.raises(SystemExit, match="here"):
        train(*fashion, "--output", "out", "--overwrite", more=ENDS)
    assert files("out") == ["checkpoint-5-0.keep", "last.json"]


def test_a_file_to_begin_with(out, denied, monkeypatch):
    """--init from another model, or a damaged file, or none; --pretrained with an interrupted
    download: the file is named, and nothing is written."""
    name = "shufflenet_v2_x0_5"
    url = models.get_model_weights(name).DEFAULT.url
    downloaded = Path("hub/checkpoints", url.rpartition("/")[2])
    downloaded.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCH_HOME", str(Path().resolve()))
    init, pretrained = "--output new --init model.pt", f"--output new --model {name} --pretrained"
    for kind in "another model", "missing", "empty", "short":
        shutil.copy("out/model.pt", "model.pt")
        shutil.copy("out/model.pt", downloaded)
        if kind != "another model":
            damage(kind, Path("model.pt"))
            damage(kind, downloaded)
        denied("--init model.pt", f"{init} --model mlp" if kind == "another model" else init)
        denied(str(downloaded), pretrained)
        assert not Path("new").exists()


def test_another_computer(monkeypatch, capsys):
    """On a GPU before Ampere, --amp is float16 with a GradScaler, which --shard does not offer."""
    args = parse("--amp")
    args.device = "cuda"
    bfloat16 = lambda including_emulation=True: including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", bfloat16)
    script.check_flags(args, 2)
    args.shard = 2
    with pytest.raises(SystemExit):
        script.check_flags(args, 2)
    assert "needs a GPU with bfloat16" in capsys.readouterr().err


def test_more_processes_than_gpus(monkeypatch):
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    monkeypatch.setenv("EMULATED_CARDS", "1")
    monkeypatch.setenv("EMULATED_REPORT", str(Path().resolve()))
    text = refuse(*start(COMPLETE, "--dataset", "synthetic", "--timeout", 60, processes=2))
    assert text.count("error: more processes than the 1 GPU") == 1 and not Path("runs").exists()

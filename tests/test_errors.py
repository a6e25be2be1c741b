"""Daily mistakes: one line that says what to do, status 2, and nothing written or overwritten."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import COUNTS, DDP, SCRIPTS, Warm, done, edited, parse, run, script, train, weights

import train_single as single

WRONG = "--batch-size 0,--batch-size many,--epochs -1,--lr -0.1,--workers -1,--accumulate 0,"
WRONG += "--image-size 0,--repeat 0,--log-every 0,--clip-norm -1,--checkpoint-minutes -1,"
WRONG += "--warmup-steps -1,--device cuda,--model vgg,--no-such-flag,--dataset no_such,"
WRONG += "--dataset pictures,--data-dir nothing,--resume"
PLACE = "--rank -1,--world-size 2,--init-method file:///no_such/folder/file,"
PLACE += "--batch-size 63 --world-size 2 --init-method tcp://HOST:1,--sync-bn"
CHANGED = "dataset cifar10 fashion-mnist,image-size 24 32,repeat 2 1,model mlp net,lr 0.1 0.001,"
CHANGED += "optimizer adam sgd,lr-schedule cosine constant,warmup-steps 9 0,batch-size 32 64,"
CHANGED += "clip-norm 1 0.0,seed 1 76"  # a flag, its new value, and that of the run
FREE = "--epochs 3 --accumulate 2 --amp --workers 0 --log-every 3 --clip-norm 0 --lr 1e-3"


def content():
    return {path.name: path.read_bytes() for path in Path("out").iterdir()}


@pytest.fixture
def refused(fashion, capsys):
    """Asserts that train_single.py refuses these flags, and that its run in out/ stays as it is."""

    def refused(says, flags):
        before = content()
        with pytest.raises(SystemExit, match="2"):
            train(*fashion, "--output", "out", *flags.split())
        said = capsys.readouterr().err
        assert says in said and said.count("error: ") == 1 and content() == before

    train(*fashion, "--epochs", 2, "--output", "out")
    return refused


def test_wrong_flags(refused, data):
    """The message names the flag."""
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test/c").rename("pictures/test/d")  # other classes than those of train/
    for flags in WRONG.split(","):
        refused(flags.split()[0], f"--overwrite {flags}")


def test_resumed_with_other_flags(refused, fashion):
    """Refused before the data are loaded. What may change, and flags of other scripts, may."""
    resume, started = "--resume --data-dir nothing", "out/last.pt was started"
    for flag, new, old in (change.split() for change in CHANGED.split(",")):
        refused(f"{started} with --{flag} {old}: use the same", f"{resume} --{flag} {new}")
    refused(f"{started} without --augment: use the same flags", f"{resume} --augment")
    refused("--epochs 1: out/last.pt already has 2 epochs", f"{resume} --epochs 1")
    train(*fashion, "--output", "out", "--resume", *FREE.split())
    checkpoint = weights("out", "last.pt")
    torch.save({"epoch": 1}, "out/last.pt")
    refused("out/last.pt was written by an older version", resume)
    checkpoint["flags"] |= {"augment": "True", "mine": "1", "dataset": "pictures"}
    del checkpoint["flags"]["clip_norm"]  # which its script does not have
    torch.save(checkpoint, "out/last.pt")
    refused(f"{started} with --augment: use", f"{resume} --dataset pictures")
    args = parse("--resume", "--output", "out", "--augment", "--dataset", "moved/pictures")
    args.mine = 1  # a flag that the user has added
    single.check_flags(args)
    args.mine = 2
    with pytest.raises(SystemExit):
        single.check_flags(args)


@pytest.mark.parametrize("name", SCRIPTS)
def test_said_once(fashion, refused, name):
    """By each machine, not by each rank, and before data are loaded; afterwards by one rank."""
    machines, before = 2 if name == DDP[2] else 1, content()
    wrong = [("--resume --seed 1 --data-dir no", "was started with --seed 76: use", machines)]
    wrong += [("--data-dir no", "out has a run: --resume continues it, --overwrite", machines)]
    wrong += [("--overwrite --batch-size 1000", "has only 640 samples", 1)]
    if name in DDP[::2]:
        wrong += [(f"--overwrite {flags}", "error: ", 0) for flags in PLACE.split(",")]
    for flags, says, times in wrong:
        flags = [*fashion, "--output", "out", *flags.split()]
        text = run(name, *flags, processes=COUNTS[name] if times else 1, status=2)
        assert text.count("error: ") == max(times, 1) and says in text, text
        assert "Traceback" not in text and content() == before, text


@pytest.mark.parametrize("name", ["ddp_torchrun", "fsdp2"])
def test_torchrun(fashion, monkeypatch, name):
    """What the scripts that it starts refuse, also to go on where ranks do not see one last.pt."""
    os.mkdir("elsewhere")
    assert "start it with: torchrun --standalone" in done([Warm(script(name), [], "alone")], 2)
    train(*fashion, "--epochs", 1, "--output", "out")
    flags = [*fashion, "--resume", "--output", "out"]
    path = edited(name, more='if os.environ["RANK"] == "1": os.chdir("elsewhere")')
    text = run(name, *flags, path=path, processes=2, status=2)
    assert text.count("error: not all processes see the same last.pt") == 1, text
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert "--max-restarts needs --resume, or each restart" in run(name, status=2)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run(name, "--resume", status=2)
    assert not Path("runs").exists()

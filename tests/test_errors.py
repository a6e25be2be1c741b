"""Daily mistakes: one line that says what to do, status 2, and nothing written or overwritten."""

import shutil
from pathlib import Path

import pytest
import torch
import train_ddp
from helpers import (
    COMPLETE,
    edited,
    kill_all,
    logs,
    parse,
    run,
    some_fast,
    start,
    train,
    wait_until,
    weights,
)

DDP, FSDP2 = COMPLETE
WRONG = "--batch-size 0,--batch-size many,--epochs -1,--lr -0.1,--workers -1,--accumulate 0,"
WRONG += "--image-size 0,--log-every 0,--clip-norm -1,--weight-decay -1,--timeout 0,"
WRONG += "--warmup-steps -1,--device cuda,--model vgg,--no-such-flag,--dataset no_such,"
WRONG += "--dataset pictures,--data-dir nothing,--resume,--pretrained,--pretrained --model mlp,"
WRONG += "--pretrained --model resnet18 --init out/model.pt,--model googlenet,--model inception_v3,"
WRONG += "--batch-size 63 --accumulate 2,--batch-size 1000"
CHANGED = "dataset cifar10 fashion-mnist,image-size 24 32,model mlp net,lr 0.1 0.001,"
CHANGED += "optimizer adamw sgd,lr-schedule cosine constant,warmup-steps 9 0,batch-size 32 64,"
CHANGED += (
    "clip-norm 1.0 0.0,weight-decay 1.0 0.0,seed 1 76,init x ''"  # new value, and that of the run
)
FREE = "--epochs 3 --accumulate 2 --amp --workers 0 --log-every 3 --clip-norm 0 --lr 1e-3"


def content():
    return {path.name: path.read_bytes() for path in Path("out").iterdir()}


@pytest.fixture
def refused(fashion, capsys):
    """Asserts that the script refuses these flags, and that its run in out/ stays as it is."""

    def refused(says, flags):
        before = content()
        with pytest.raises(SystemExit, match="2"):
            train(*fashion, "--output", "out", *flags.split())
        said = capsys.readouterr().err
        assert says in said and said.count("error: ") == 1 and content() == before, said

    train(*fashion, "--epochs", 2, "--output", "out")
    return refused


def test_wrong_flags(refused, data):
    """The message names the flag."""
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test/c").rename("pictures/test/d")  # other classes than those of train/
    for flags in WRONG.split(","):
        refused(flags.split()[0], f"--overwrite {flags}")


def test_resumed_with_other_flags(refused, fashion):
    """Refused before the data are loaded. What may change, and flags that are new, may."""
    resume, started = "--resume --data-dir nothing", "out/last.pt was started"
    for flag, new, old in (change.split() for change in CHANGED.split(",")):
        old = old.strip("'")
        refused(f"{started} with --{flag} {old}, not {new}: use", f"{resume} --{flag} {new}")
    refused(f"{started} with --augment False, not True: use", f"{resume} --augment")
    refused("--epochs 1: out/last.pt already has 2 epochs", f"{resume} --epochs 1")
    train(*fashion, "--output", "out", "--resume", *FREE.split())
    checkpoint = weights("out", "last.pt")
    for other in {"epoch": 1}, {"model": 1}:
        torch.save(other, "out/last.pt")  # as of an older version, or a small script
        refused("out has a run of another script or version", resume)
    checkpoint["flags"] |= {"augment": True, "mine": "1", "dataset": "pictures"}
    del checkpoint["flags"]["clip_norm"]  # which its script does not have
    torch.save(checkpoint, "out/last.pt")
    refused(f"{started} with --augment True, not", f"{resume} --dataset pictures")
    unknown = f"{started} with --mine 1, not False"  # as train_fsdp2.py has no --sync-bn
    refused(unknown, f"{resume} --dataset pictures --augment")
    args = parse("--resume", "--output", "out", "--augment", "--dataset", "moved/pictures")
    args.mine = "1"  # a flag that the user has added
    train_ddp.check_flags(args)
    args.mine = "2"
    with pytest.raises(SystemExit):
        train_ddp.check_flags(args)


def refuse(name, *flags, processes=2, **options):
    """What processes say, one of which ends with status 2. As torchrun does, end the others then,
    which may wait for it."""
    jobs = start(name, *flags, processes=processes, **options)
    assert wait_until(lambda: any(job.status() is not None for job in jobs))
    wait_until(lambda: None not in [job.status() for job in jobs], 0.3)
    assert 2 in [job.status() for job in jobs], logs(jobs)
    kill_all(jobs)
    return logs(jobs)


@pytest.mark.parametrize("name", some_fast(COMPLETE, DDP))
def test_said_once(fashion, refused, data, name):
    """By one process of a machine, and before data are loaded where it can be."""
    before = content()
    wrong = {"--resume --seed 1 --data-dir no": "was started with --seed 76, not 1: use"}
    wrong |= {"--overwrite --batch-size 1000": "has only 640 samples"}
    if name == FSDP2:
        wrong |= {"--overwrite --shard 3": "a multiple of --shard"}
    else:  # the rest of what they check is the same text
        wrong |= {"--data-dir no": "out has a run: --resume continues it, --overwrite replaces it"}
        wrong |= {"--overwrite --batch-size 63": "a multiple of --accumulate times the processes"}
        wrong |= {f"--overwrite --dataset {data}/pictures": "only 3 test samples"}
        wrong |= {"--overwrite --sync-bn": "--sync-bn works on GPUs only"}
    for flags, says in wrong.items():
        processes = 4 if "only 3" in says else 2
        text = refuse(name, *fashion, "--output", "out", *flags.split(), processes=processes)
        assert text.count("error: ") == 1 and says in text and content() == before, text
        assert "Traceback" not in text or "only" in says, text  # found when all had met


@pytest.mark.parametrize("name", some_fast(COMPLETE, DDP))
def test_places(fashion, monkeypatch, name):
    """What torchrun's and srun's processes refuse, also to go on where ranks see no last.pt."""
    Path("elsewhere").mkdir()
    train(*fashion, "--epochs", 1, "--output", "out")
    flags = [*fashion, "--resume", "--output", "out"]
    path = edited(name, more='if os.environ["RANK"] == "1": os.chdir("elsewhere")')
    text = run(name, *flags, path=path, processes=2, status=1)
    assert "the processes see different files: put --output on a shared disk" in text, text
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for own in [], ["--resume"]:
        text = refuse(name, "--output", "new", *own, processes=1)
        assert "needs --resume, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")  # srun -n 8 python
    assert "8 processes without ranks" in run(name, "--output", "new", processes=0, status=2)
    assert not Path("new").exists() and not Path("runs").exists()


@pytest.mark.parametrize("name", COMPLETE)
def test_what_could_not_be_resumed(fashion, name):
    """A flag of a user's whose value cannot be read back is found before the first step."""
    flag = 'add("--mine", type=Path, default=Path("x"))\n'
    text = run(name, *fashion, path=edited(name, more=flag), status=1)
    assert "Path" in text and "samples/s" not in text and not list(Path().glob("runs/*/*.pt"))


@pytest.mark.parametrize("file", ["mlp/model.pt", "nothing.pt"])
def test_init_from_another_model(fashion, file):
    """Or from no file: said, and nothing is written."""
    train(*fashion, "--epochs", 1, "--model", "mlp", "--output", "mlp")
    says = r"Error\(s\) in loading state_dict for Net|nothing.pt"
    with pytest.raises((RuntimeError, OSError), match=says):
        train(*fashion, "--init", file)
    assert not Path("runs").exists()


def test_more_processes_than_gpus(monkeypatch):
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    monkeypatch.setenv("EMULATED_CARDS", "1")
    monkeypatch.setenv("EMULATED_REPORT", str(Path().resolve()))
    text = refuse(DDP, "--dataset", "synthetic", "--timeout", 60)
    assert text.count("error: more processes than the 1 GPU") == 1 and not Path("runs").exists()

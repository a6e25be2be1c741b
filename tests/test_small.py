"""The small scripts: one training run in six, killed and resumed; the daily mistakes; two cards."""

import os
import pickle
import random
import re
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path

import helpers
import pytest
from conftest import pictures
from helpers import (
    COUNTS,
    SMALL,
    Cold,
    content,
    done,
    finish,
    free_port,
    kill_all,
    logs,
    same,
    script,
    some_fast,
    together,
    wait_for,
    wait_until,
    weights,
)
from same_text import GROUPS, compare, definitions

FIRST_FIVE, DISTRIBUTED = SMALL[:5], SMALL[2:]
KINDS = ["single", "ddp_torchrun", "fsdp2"]  # in the others, the lines are those of these
FLAGS = ["--dataset", "synthetic", "--batch-size", 60, "--lr", 0.03, "--workers", 0, "--output"]
LINE = r"^epoch (\d+): loss (\d+\.\d{4}) accuracy ([01]\.\d{4}) \d+ images/s$"
FEW = """
plain_images = Synthetic.__init__
def __init__(images, size, samples):  # 640 to train, 203 to test
    plain_images(images, size, range(640) if samples[0] == 0 else range(640, 843))
Synthetic.__init__ = __init__
"""
DROPOUT = """
plain_model = build_model
def build_model(args, classes):
    return nn.Sequential(plain_model(args, classes), nn.Dropout(0.2))
"""


def begin(name, output, *flags, more="", **options):
    """Start a script with 640 + 203 synthetic images."""
    return helpers.start(name, *FLAGS, output, *flags, more=FEW + more, **options)


def run(*words, status=0, **options):
    return done(begin(*words, **options), status)


def epochs(text):
    """{epoch: (loss, accuracy)} of what a script has printed."""
    found = re.findall(LINE, text, re.M)
    said = len(found) + text.count("starts with epoch ")
    assert said == text.count("epoch ") and "destroy_process_group" not in text, text
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def agree(text, other, least=1.5e-4, images=1):
    """The epochs in `text` have the losses in `other`, and up to `images` the same are right. In
    the third epoch the net leaves its plateau, which multiplies differences by rounding."""
    for epoch, (loss, accuracy) in epochs(text).items():
        factor, (wanted, right) = 1 if epoch < 2 else 20, epochs(other)[epoch]
        assert loss == pytest.approx(wanted, abs=factor * least), (text, other)
        assert abs(accuracy - right) < factor * images / 203 + 1e-4, (text, other)


@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """The folder of a run of train_single.py after its first epoch, and the text of three."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TEST_FOLDER", str(folder))
        text = run("single", "one", "--epochs", 1, "--workers", 2)
        shutil.copytree("one", "all")
        text += run("single", "all", "--epochs", 3, "--resume")
    return folder / "one", text


def test_one_run(single):
    """The losses of train_single.py, from the beginning, on two processes or machines. Then each of
    the first five resumes the run of the next one, and train_fsdp2.py on three what two began. What
    is left over after 10 steps are other images in each epoch."""
    folder, wanted = single
    for name in SMALL[1:]:
        text, share = run(name, name, "--epochs", 1), f"{60 // COUNTS[name]} images of each batch"
        found = "640 training images, 203 test images, 10 classes: "
        found += f"{list('0123456789')}; {share} per {'GPU' if name == 'dp' else 'process'}\n"
        assert text.count(found) == 1, text
        assert text.count("starts with epoch 0\n") == 1, text
        agree(text, wanted)
    shutil.copytree(folder, "single")
    Path("fsdp2/epoch-0-mine").mkdir()  # not the script's: it stays
    others = zip(SMALL, [*FIRST_FIVE[1:], "single", "fsdp2"])
    for name, other in others:
        count = 3 if name == "fsdp2" else COUNTS[name]
        text = run(name, other, "--epochs", 2, "--resume", processes=count)
        assert list(epochs(text)) == [1] and text.count("starts with epoch 1\n") == 1, text
        agree(text, wanted)
        assert weights(other).keys() == weights(folder).keys()
    assert {path.name for path in Path("fsdp2").glob("epoch-*")} == {"epoch-1", "epoch-0-mine"}


@pytest.mark.parametrize("name", some_fast(KINDS, "single"))
def test_another_lr(name):
    """It takes effect when the run is resumed."""
    run(name, "out", "--epochs", 1)
    before = weights("out")
    run(name, "out", "--epochs", 2, "--resume", "--lr", 0)
    assert same(weights("out"), before)


@pytest.mark.slow
def test_one_run_on_any_number(single):
    """Processes, and machines with the names that others have for --nnodes and --node-rank."""
    for name, count in ("ddp_torchrun", 1), ("ddp_torchrun", 5), ("fsdp2", 1):
        agree(run(name, f"{name}-{count}", "--epochs", 1, processes=count), single[1])
    meet = Path("meet").resolve().as_uri()
    spawn = ["--nproc-per-node", 2, "--init-method", f"tcp://127.0.0.1:{free_port()}"]
    machines = {"ddp_spawn": [*spawn, "--nnodes", 2, "--node-rank"]}
    machines["ddp_multigpu_proc"] = ["--init-method", meet, "--world-size", 3, "--rank"]
    for name, place in machines.items():
        jobs, count = [], place[-2]
        for rank in range(count):  # each with as many processes as the flags say
            jobs += begin(name, name, "--epochs", 1, *place, rank, processes=1)
        text = done(jobs)
        assert text.count("waits for the others") == count
        agree(text, single[1])


SEEN = """
plain_count = count_correct
def count_correct(model, *words):
    def tell(module, inputs, output):
        print(f"tested in {output.dtype}\\n", end="", flush=True)
    hook = model.register_forward_hook(tell)
    correct = plain_count(model, *words)
    hook.remove()
    return correct
"""


@pytest.mark.slow
def test_amp(single):
    """It is the same in all scripts that have it, tests as it trains, and does something."""
    text = run("single", "single", "--epochs", 1, "--amp", more=SEEN)
    assert (weights("single")["conv1.weight"] - weights(single[0])["conv1.weight"]).any()
    agree(text, single[1], 2e-2, images=10)
    for name in "ddp_torchrun", "ddp_spawn", "fsdp2":
        amp = run(name, name, "--epochs", 1, "--amp", more=SEEN)
        agree(amp, text, 3e-3, images=5)
        text += amp
    assert set(re.findall("tested in (.*)", text)) == {"torch.bfloat16"}


# A process kills itself as it writes for the N-th time, with half of the file written.
TORN = """
plain, written = torch.save, []
def torn(content, path):
    plain(content, path)
    written.append(path)
    if len(written) == int(os.environ["N"]):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), 9)
torch.save = torn
"""
TORN_FOLDER = """
plain, written = dcp.save, []
def torn(state, checkpoint_id):
    plain(state, checkpoint_id=checkpoint_id)
    written.append(checkpoint_id)
    if len(written) == int(os.environ["N"]):
        (checkpoint_id / ".metadata").unlink(missing_ok=True)
        os.truncate(checkpoint_id / f"__{os.environ['RANK']}_0.distcp", 10)
        os.kill(os.getpid(), 9)
dcp.save = torn
"""


@pytest.mark.parametrize("name", some_fast(["single", "fsdp2"], "single"))
def test_killed_as_it_writes(monkeypatch, name):
    """Each file is whole at every moment, and the resumed run ends bit-identical, with dropout."""
    flags, torn = ["--epochs", 3, "--resume"], TORN_FOLDER if name == "fsdp2" else TORN
    for number in ["2"] if name == "fsdp2" else ["2", "3"]:  # of a resumed run, 3 is model.pt
        monkeypatch.setenv("N", number)
        jobs = begin(name, "out", *flags, more=DROPOUT + torn)
        assert wait_until(lambda: any(job.status() for job in jobs)), logs(jobs)
        kill_all(jobs)
        assert not Path("out/model.pt").exists()
    text = run(name, "out", *flags, more=DROPOUT)
    assert list(epochs(text)) == ([1, 2] if name == "fsdp2" else [])
    run(name, "whole", *flags, more=DROPOUT)
    assert same(weights("out"), weights("whole"))


# In the second epoch, which has ten steps, a loss that is infinite but for its gradients, or the
# last step's weights.
INFINITE = """
plain, steps = F.cross_entropy, []
def cross_entropy(*words):
    steps.append(1)
    return plain(*words) + (torch.inf if len(steps) == 12 else 0)
F.cross_entropy = cross_entropy
"""
BLOWN_UP = """
def blow_up(optimizer, *_, steps=[]):
    steps.append(1)
    if len(steps) == 20:
        optimizer.param_groups[0]["params"][0].data.mul_(torch.inf)
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(blow_up)
"""


@pytest.mark.parametrize("name", some_fast(KINDS, "single"))
def test_not_finite(name):
    """It ends the run, whose last checkpoint stays; and from there it goes on."""
    for output, more in ("loss", INFINITE), ("weights", BLOWN_UP):
        text = run(name, output, "--epochs", 2, more=more, status=1)
        assert list(epochs(text)) == [0], text
        assert f"loss or weights not finite: not saved, {output} is as it was\n" in text, text
        assert list(epochs(run(name, output, "--epochs", 2, "--resume"))) == [1]
        assert all(weight.isfinite().all() for weight in weights(output).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_killed_at_random(name):
    """All processes by SIGKILL, at two random moments."""
    flags = ["--epochs", 6, "--resume"]
    for epoch in 1, 3:
        jobs = begin(name, "out", *flags, more=DROPOUT)
        wait_for(f"epoch {epoch}: ", *jobs)
        time.sleep(random.random() / 4)
        kill_all(jobs)
    text = run(name, "out", *flags, more=DROPOUT)
    assert len(epochs(text)) <= 3  # epoch 3's line is printed before its checkpoint is written
    run(name, "whole", *flags, more=DROPOUT)
    assert same(weights("out"), weights("whole"))


@pytest.mark.parametrize("name", SMALL)
def test_daily_mistakes(monkeypatch, refused, name):
    """Each has a message, and nothing is lost."""
    if name in ("ddp_torchrun", "fsdp2"):
        left_over = ["RANK=0", "WORLD_SIZE=2", "WORLD_SIZE=", "LOCAL_RANK=0"]
        for place in [*left_over, "WORLD_SIZE=2"]:  # before the last one, it is not complete
            refused("start it with torchrun --standalone --nproc-per-node gpu", name)
            monkeypatch.setenv(*place.split("="))
    own = "epoch-3/.metadata" if name == "fsdp2" else "checkpoint.pt"
    others = {"checkpoint.pt", "model.pt", "epoch-3/.metadata", "checkpoint-1-20/.metadata"}
    for path in {own} | others:  # with --resume, only its own run is continued
        Path("kept", path).parent.mkdir(parents=True)
        Path("kept", path).write_text("precious")
        says = "kept exists: add --resume (also to start), or change --output"
        refused(says, name, *FLAGS, "kept")
        if path != own:
            says = "kept has the run of another script: use another --output"
            refused(says, name, *FLAGS, "kept", "--resume")
        shutil.rmtree("kept")
    if name in DISTRIBUTED:
        count = {"ddp_spawn": ["--nproc-per-node", 2], "ddp_multigpu_proc": ["--nnodes", 2]}
        says = "--batch-size must be a multiple of the 2 processes"
        refused(says, name, *FLAGS, "out", "--batch-size", 63, *count.get(name, []))
    else:
        for variable in "WORLD_SIZE", "SLURM_STEP_NUM_TASKS":  # torchrun, or srun -n 2 python
            with monkeypatch.context() as patch:
                patch.setenv(variable, "2")
                says = f"{variable} is 2: start python once, or unset {variable}"
                refused(says, name, *FLAGS, "out", "--resume")
    if name in ("ddp_spawn", "ddp_multigpu_proc"):
        several = [*FLAGS, "out", "--nnodes", 2]
        refused("several machines need --init-method", name, *several)
        refused("--node-rank 2: the 2 machines", name, *several, "--node-rank", 2)
        refused("--node-rank 0: the 0 machines", name, *several, "--nnodes", 0)
    assert not Path("out").exists()


@pytest.mark.parametrize("name", some_fast(FIRST_FIVE, "ddp_spawn"))
def test_damaged(monkeypatch, single, refused, name):
    """A flipped bit in the weights, which torch.load does not notice; a file without its end."""
    whole = Path(single[0], "checkpoint.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    Path("out").mkdir()
    if name == "ddp_torchrun":
        for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(variable, value)
    for damaged in flipped, whole[:-100]:
        Path("out/checkpoint.pt").write_bytes(damaged)
        says = "out/checkpoint.pt is damaged: restore a copy, or start over in another --output"
        refused(says, name, *FLAGS, "out", "--resume")


def test_folders_that_are_wrong(data, refused):
    """A class has another name in test/, or one that looks the same; all are a level too deep;
    there is no test/. Nothing is written."""
    for folder in "other", "alike", "deep/train", "deep/test", "none":
        Path(folder).mkdir(parents=True)
        part = {"deep/train": "train", "deep/test": "test"}.get(folder, "")
        shutil.copytree(data / "pictures" / part, Path(folder, "pictures"))
    Path("other/pictures/test/c").rename("other/pictures/test/.ipynb_checkpoints")
    Path("alike/pictures/test/a").rename("alike/pictures/test/\u0430")  # Cyrillic
    Path("alike/pictures/test/c").rename("alike/pictures/test/c ")
    shutil.rmtree("none/pictures/test")
    for folder, says in {
        "other/pictures": "classes in only one of train/ and test/: ['.ipynb_checkpoints', 'c']",
        "alike/pictures": r"only one of train/ and test/: ['a', 'c', 'c ', '\u0430']",
        "deep": "train/ needs a folder per class, not only pictures",
        "none/pictures": "no folder none/pictures/test or val: move a tenth of each class there",
    }.items():
        refused(f"{says}\n", "single", *FLAGS, "out", "--dataset", folder)
    assert not Path("out").exists()


@pytest.mark.parametrize("name", some_fast(KINDS, "single"))
def test_other_classes(data, name):
    """They are printed and saved, and a run does not continue with others: the labels would be
    permuted. val/ is taken where there is no test/."""
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test").rename("pictures/val")
    flags = ["--dataset", "pictures", "--resume", "--epochs"]
    text = run(name, "out", *flags, 1)
    assert "96 training images, 3 test images, 3 classes: ['a', 'b', 'c']; " in text, text
    for part in "train", "val":
        Path("pictures", part, "a").rename(Path("pictures", part, "\u0430"))  # Cyrillic
    before = content("out")
    text = run(name, "out", *flags, 2, status=1)
    other = r"'\\u0430'"
    assert re.search(rf"out/\S+ has other classes: {{('a', {other}|{other}, 'a')}}\n", text), text
    assert content("out") == before


TAKEN = """
plain = load_data
def load_data(args):  # meanwhile, another run starts in this folder
    if not args.output.exists():
        args.output.mkdir()
        (args.output / "checkpoint.pt").write_text("precious")
    return plain(args)
"""


@pytest.mark.parametrize("name", some_fast(KINDS, "single", "ddp_torchrun"))
def test_two_runs_start_in_one_folder(name):
    """The second ends, and leaves the first its folder. An empty folder is resumed; a batch that is
    larger than the training set is refused."""
    jobs = begin(name, "out", more=TAKEN)
    assert wait_until(lambda: any(job.status() for job in jobs)), logs(jobs)
    kill_all(jobs)
    assert "FileExistsError" in logs(jobs) and "epoch 0" not in logs(jobs)
    assert content("out") == {Path("out/checkpoint.pt"): b"precious"}
    text = run(name, "large", "--batch-size", 660, status=1)
    assert "--batch-size: there are only 640 images" in text and not Path("large").exists()
    Path("empty").mkdir()
    assert list(epochs(run(name, "empty", "--epochs", 1, "--resume"))) == [0]


DISKS = """
plain = load_data
def load_data(args):  # from here on, each rank is in a folder of its own
    os.makedirs(str(dist.get_rank()), exist_ok=True)
    os.chdir(str(dist.get_rank()))
    return plain(args)
"""


OTHERS = """
from_my_disk, calls = load_data, []
def load_data(args):  # in each run, the second rank has other training or test images, or classes
    data = list(from_my_disk(args))
    if dist.get_rank() == 1:
        number = len(calls)
        calls.append(number)
        part = torch.utils.data.Subset(data[number % 2], range(100))
        data[min(number, 2)] = [part, part, data[2][1:], [*data[2][:9], "9 "]][number]
    return data
"""
OTHER_FLAGS = """
plain_parse = parser.parse_args
def parse_args():  # behind "only", those of the second rank alone
    at = sys.argv.index("only")
    return plain_parse(sys.argv[1:at] + sys.argv[at + 1 :] * (os.environ["RANK"] == "1"))
parser.parse_args = parse_args
"""


@pytest.mark.parametrize("name", some_fast(["ddp_torchrun", "fsdp2"], "ddp_torchrun"))
def test_another_disk(monkeypatch, name):
    """Ranks that do not see the same checkpoint end in a line, and the checkpoint stays; so do
    ranks with other images or classes. A checkpoint of train_fsdp2.py is written by all ranks, so
    they need one disk from the first."""
    flags = ["--resume", "--epochs"]
    run(name, "out", *flags, 1, more=DISKS, processes=1)
    before = content("0/out")
    statuses, text = finish(begin(name, "out", *flags, 2, more=DISKS, processes=2))
    assert set(statuses) == {1} and content("0/out") == before, text
    says = "the machines see different files in synthetic or out: use a shared disk"
    assert says in text, text
    runs = [[*FLAGS, f"out-{i}", "--epochs", 0] for i in range(4)]
    texts = together(*runs, path=name, more=FEW + OTHERS, status=1)
    found = ["training images: 640", "test images: 203", "classes: 10", "class 9: '9'"]
    for i, (what, other) in enumerate(zip(found, [100, 100, 9, "'9 '"])):
        says = f"different files in synthetic or out-{i}: use a shared disk"
        assert f"{says} ({what} on rank 0 and {other} on rank 1)" in texts[i], texts[i]
    if name == "fsdp2":
        jobs = begin(name, "new", *flags, 1, more=DISKS)
        wait_for("the machines have no shared disk for new", *jobs)
        kill_all(jobs)


@pytest.mark.parametrize("name", some_fast(["ddp_torchrun", "fsdp2"], "ddp_torchrun"))
def test_other_flags(data, name):
    """Two machines, two typed lines: both end in a line, and nothing is written. Only what belongs
    to a machine may differ."""
    first = {"lr": 0.03, "epochs": 10, "batch-size": 60, "image-size": 32, "model": "net"}
    others = {"lr": 0.1, "epochs": 3, "batch-size": 30, "image-size": 40, "model": "resnet18"}
    others |= {"batch-size ": 640, "dataset": str(data / "pictures")}
    first |= {"batch-size ": 60, "dataset": "synthetic"}
    runs = [[*FLAGS, "out", "only", f"--{flag}".strip(), value] for flag, value in others.items()]
    own = [*FLAGS, "own", "--epochs", 0, "only", "--workers", 1, "--output", "mine"]
    *texts, last = together(*runs, own, path=name, more=FEW + OTHER_FLAGS)
    for flag, text in zip(others, texts, strict=True):
        both = f"{first[flag]!r} on rank 0 and {others[flag]!r} on rank 1"
        says = f"--{flag.strip()} is {both}: start all machines with the same flags\n"
        assert text.count(says) == 2 and not Path("out").exists(), text
    assert last.count("starts with epoch 0\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_multigpu_proc"])
def test_other_flags_of_machines(name):
    meet, own = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", 2], []
    if name == "ddp_spawn":
        own = ["--nproc-per-node", 1]
    jobs = []
    for rank, epochs in enumerate((2, 3)):
        jobs += begin(name, "out", *meet, "--rank", rank, *own, "--epochs", epochs, processes=1)
    text = done(jobs, status=1)
    assert text.count("--epochs is 2 on rank 0 and 3 on rank 1: start all machines with") == 2


# Workers as Python 3.14 would start them. They, and load_data, print what they draw.
WORKERS = """
torch.multiprocessing.set_start_method("forkserver", force=True)
for seed in random.seed, np.random.seed, torch.manual_seed:  # as in processes of their own
    seed(os.getpid())
def tell(what, *values):
    print(what, os.getpid(), os.getppid(), *values, "\\n", end="", flush=True)
plain_load, plain_item = load_data, Synthetic.__getitem__
def load_data(args):
    tell("loads", random.random(), np.random.rand(), torch.rand(()).item())
    return plain_load(args)
def __getitem__(images, i):
    if i % 50 == 0:
        tell("draws", torch.rand(()).item(), random.random(), np.random.rand())
    return plain_item(images, i)
Synthetic.__getitem__ = __getitem__
"""


def all_differ(draws, text):
    """No two of the numbers of torch, Python or numpy, each at its place in the line."""
    assert len(draws) >= 2 * 12, text
    for numbers in zip(*(drawn.split() for _, drawn in draws)):
        assert len(set(numbers)) == len(numbers), text


@pytest.mark.parametrize("name", some_fast(SMALL, "ddp_torchrun"))
def test_workers(name):
    """They are forks, and draw other numbers on each rank, and in a resumed run. What load_data
    draws, such as a split, is the same on all ranks and in all lives."""
    text, flags = "", ["--resume", "--epochs"]
    for last in 1, 2:
        text += run(name, "out", "--workers", 1, *flags, last, more=WORKERS)
    loads = re.findall(r"^loads (\d+) \d+ (.*)", text, re.M)
    draws = re.findall(r"^draws \d+ (\d+) (.*)", text, re.M)
    assert len(loads) == 2 * COUNTS[name] and len({drawn for _, drawn in loads}) == 1, text
    assert {parent for parent, _ in draws} == {pid for pid, _ in loads}, text
    all_differ(draws, text)
    text = run(name, "none", "--workers", 0, *flags, 2, more=WORKERS)  # the process itself draws
    all_differ(re.findall(r"^draws \d+ (\d+) (.*)", text, re.M), text)


HANGS = """
plain_loader, folder = DataLoader, os.path.abspath("x" * 100)
os.makedirs(folder, exist_ok=True)  # as of a TMPDIR whose name is too long for a socket
torch.multiprocessing.current_process()._config["tempdir"] = folder
torch.multiprocessing.set_start_method("fork", force=True)  # Python's own, before 3.14
def DataLoader(*words, timeout, **options):
    assert timeout == 1800
    return plain_loader(*words, timeout=5, **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_worker_that_hangs(name):
    """It ends the run, after half an hour."""
    statuses, text = finish(begin(name, "out", "--workers", 1, more=HANGS))
    assert 0 not in statuses and "AF_UNIX path too long" in text, (statuses, text)
    assert "DataLoader timed out after 5 seconds" in text, text


MINUTES = """
def init_process_group(*words, timeout, **options):
    raise SystemExit(f"{timeout.total_seconds() / 60:g} minutes")
dist.init_process_group = init_process_group
"""


@pytest.mark.parametrize("name", some_fast(DISTRIBUTED, "ddp_torchrun"))
def test_timeout(name):
    """It is half an hour, on GPUs too, where torch has ten minutes; --timeout sets it, and then
    nobody waits longer for a machine that does not come."""
    statuses, text = finish(begin(name, "out", more=MINUTES))
    assert 0 not in statuses and "30 minutes" in text, text
    if name in ("ddp_spawn", "ddp_multigpu_proc"):
        meet = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--nnodes", 2]
        jobs = begin(name, "out", *meet, "--timeout", 0.02, processes=1)
        statuses, text = finish(jobs, 60)
        assert statuses == [1] and "waits for the others" in text, (statuses, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_torchrun", "ddp_spawn", "fsdp2"])
def test_ranks_end_with_their_parent(data, name):
    """After kill -9 of what has started them; also in a script's background jobs, which ignore
    SIGINT, by which torch tells the children of spawn."""
    start = [*helpers.TORCHRUN, "--standalone", "--nproc-per-node", 2, script(name)]
    if name == "ddp_spawn":
        start = [sys.executable, script(name), "--nproc-per-node", 2]
    flags = ["--dataset", data / "pictures", "--workers", 0, "--batch-size", 60]
    words = [*start, *flags, "--epochs", 99999]
    job = Cold(["sh", "-c", '"$@" & echo "pid $!"; wait', "sh", *words], "log")
    wait_for("epoch 1: ", job)
    [pid] = re.findall(r"^pid (\d+)", job.log.read_text(), re.M)
    os.kill(int(pid), signal.SIGKILL)
    assert wait_until(lambda: not helpers.marked(), 60), logs([job])
    says = ["torchrun is gone", "the process that started this one was killed"]
    assert says[name == "ddp_spawn"] in job.log.read_text()


OWN = """
class Own(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers
    def __len__(self):
        return len(self.numbers)
    def __getitem__(self, i):
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(self.numbers[i]))
        return image, image.argmax(0)  # which of the colors is the strongest, for each pixel
class View(nn.Module):
    def __init__(self):  # as in PyTorch's tutorial of the transformer
        super().__init__()
        self.register_buffer("pe", torch.ones(4, 3).unsqueeze(0).transpose(0, 1))
    def forward(self, x):
        return x * self.pe[0].mean()
def load_data(args):
    return Own(range(640)), Own(range(640, 843)), ["red", "green", "blue"]
def build_model(args, classes):
    return nn.Sequential(View(), nn.Conv2d(3, len(classes), 1))
plain_count = count_correct
def count_correct(*words):
    return plain_count(*words) / 64  # pixels
"""


@pytest.mark.parametrize("names", some_fast([KINDS, SMALL], KINDS))
def test_ones_own(names):
    """Data, masks instead of labels, and a model with a buffer that is a view, which DDP itself
    could not broadcast, by the functions that are a user's: all scripts do the same run."""
    for name in names:
        text = run(name, name, "--epochs", 3, more=OWN)
        found = "640 training images, 203 test images, 3 classes: ['red', 'green', 'blue']; "
        assert found in text, text
        if name == "single":
            single = text
            assert epochs(text)[2][1] > 0.6 > epochs(text)[0][1] > 0.3, text
        agree(text, single, 1e-4, images=1e-2)


@pytest.mark.slow
def test_synthetic_images():
    """None is there twice, and an epoch suffices to learn."""
    own = runpy.run_path(script("single"))["Synthetic"]
    assert own(224, range(10_000))[9_999][0].shape == (3, 224, 224)
    images = [*own(32, range(10_000)), *own(32, range(10_000, 12_000))]
    assert all(image.shape == (3, 32, 32) for image, _ in images)
    assert len({image[:, :2].numpy().tobytes() for image, _ in images}) == 12_000
    flags = ["--dataset", "synthetic", "--epochs", 1, "--workers", 0, "--output", "out"]
    assert epochs(helpers.run("single", *flags))[0][1] >= 0.99


DRAWS = """
def tell(what, value):
    print(f"{what} {value}\\n", end="", flush=True)
class Norm(nn.BatchNorm2d):
    def train(self, mode=True):  # an epoch begins
        for generator in (torch.cuda.default_generators or [None]) if mode else ():
            tell("draws", torch.rand(1, generator=generator).item())
        return super().train(mode)
plain_model, plain_count, plain_loader = build_model, count_correct, DataLoader
def build_model(args, classes):
    model = plain_model(args, classes)
    model.conv1.register_forward_pre_hook(tell_format)
    return nn.Sequential(Norm(3), model)
def tell_format(layer, inputs):
    tensors = layer.weight, inputs[0]
    tell("channels last", any(x.is_contiguous(memory_format=torch.channels_last) for x in tensors))
def count_correct(model, *words):
    tell("holds", [buffer.double().sum().item() for buffer in model.buffers()])
    return plain_count(model, *words)
def DataLoader(*words, generator, **options):
    tell("workers", generator.initial_seed())
    return plain_loader(*words, generator=generator, **options)
"""
GPUS = """
torch.cuda.default_generators = torch.Generator(), torch.Generator()
torch.accelerator.device_count = lambda: 2
"""


@pytest.mark.slow
def test_what_each_rank_draws():
    """Random numbers differ by epoch, rank and GPU; batch norm's averages are rank 0's on all. The
    first convolution is in channels_last."""
    for name, gpus in zip(SMALL, (1, 2, 1, 1, 2, 1)):
        text = run(name, name, "--epochs", 3, more=DRAWS + (GPUS if gpus == 2 else ""))
        assert len(set(re.findall(r"workers (\d+)", text))) == COUNTS[name], text
        assert set(re.findall(r"channels last (\w+)", text)) == {"True"}, text
        draws = re.findall(r"draws (\S+)", text)
        assert len(set(draws)) == len(draws) == 3 * COUNTS[name] * gpus, (name, text)
        held = re.findall(r"holds (.+)", text)
        assert len(set(held)) == 3 and len(held) == 3 * COUNTS[name], (name, text)


ONE_CLASS = """
plain = load_data
def load_data(args):
    train_set, test_set, _ = plain(args)
    return [(image, 0) for image, _ in train_set], [(image, 0) for image, _ in test_set], ["all"]
"""


@pytest.mark.parametrize("name", some_fast(KINDS[1:], "ddp_torchrun"))
def test_each_test_image_counts_once(data, name):
    """Of a folder of JPEG and PNG files, one of them grey, of several sizes, with 3 to test on: one
    process has none. Each answer is right."""
    flags = ["--epochs", 1, "--dataset", data / "pictures"]
    text = run(name, name, *flags, more=ONE_CLASS, processes=4)
    assert epochs(text)[0][1] == 1, text


@pytest.mark.slow
def test_sizes(data):
    """Of images, and a model of torchvision."""
    flags = ["--epochs", 1, "--dataset", data / "pictures"]
    for i, other in enumerate(([224], [40, "--model", "shufflenet_v2_x0_5"])):
        helpers.here("single", *FLAGS, f"size-{i}", *flags, "--image-size", *other)


def test_cifar10(monkeypatch, capsys):
    """As torchvision finds it on the disk. 5 files of 64 images, and one of 40."""
    images, labels = pictures(360, 3, 32)
    folder = Path("data/cifar-10-batches-py")
    folder.mkdir(parents=True)
    parts = {f"data_batch_{i + 1}": slice(64 * i, 64 * i + 64) for i in range(5)}
    for name, part in (parts | {"test_batch": slice(320, 360)}).items():
        rows = images[part].transpose(0, 3, 1, 2).reshape(-1, 3072)
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": labels[part].tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    monkeypatch.setenv("WORLD_SIZE", "")  # left over: not two processes
    helpers.here("single", *FLAGS, "out", "--dataset", "cifar10", "--epochs", 8)
    text = capsys.readouterr().out
    assert f"10 classes: {list('abcdefghij')}; " in text
    assert epochs(text)[0][0] > 2.2 and epochs(text)[7][0] < 1.8, text


PINNED = """
def tell_format(layer, inputs):
    if isinstance(layer, nn.Conv2d):
        weights_last = layer.weight.is_contiguous(memory_format=torch.channels_last)
        __import__("emulated_accelerator").tell(f"channels last {weights_last}")
nn.modules.module.register_module_forward_pre_hook(tell_format)
plain_loader = DataLoader
def DataLoader(*words, **options):  # as for CUDA
    return plain_loader(*words, **options | {"pin_memory": True})
"""


@pytest.mark.parametrize("name", some_fast(FIRST_FIVE, "ddp_torchrun"))
def test_two_cards(monkeypatch, single, name):
    """On two make-believe GPUs each process uses its own, DataParallel both; no step waits for its
    GPU. A checkpoint of a CPU continues there."""
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    shutil.copytree(single[0], "out")
    Path("report").mkdir()
    monkeypatch.setenv("EMULATED_CARDS", "2")
    monkeypatch.setenv("EMULATED_REPORT", str(Path("report").resolve()))
    text = run(name, "out", "--epochs", 3, "--resume", more=PINNED)
    share = {"single": 60, "dp": "30 images of each batch per GPU"}.get(name, 30)
    assert f"'9']; {share}" in text and list(epochs(text)) == [1, 2], text
    agree(text, single[1])
    reports = [path.read_text() for path in Path("report").iterdir()]
    reports = [report for report in reports if "uses card" in report]
    used = ["".join(sorted(re.findall(r"uses card (\d)", report))) for report in reports]
    own = {"single": ["0"], "dp": ["01"], "ddp_multigpu_proc": ["01", "01"]}
    assert sorted(used) == own.get(name, ["0", "1"]), reports
    for report in reports:
        assert set(re.findall(r"channels last (\w+)", report)) == {"True"}, report
        for epoch in re.split(r"^(?:main:\d+ seeds.*\n)+", report, flags=re.M)[-2:]:
            assert 0 < len(re.findall(r"^main:\d+ waits", epoch, re.M)) <= 4, epoch  # of ten steps
            assert "to_device" not in "".join(re.findall(r"^.* waits.*", epoch, re.M)), epoch


@pytest.mark.slow
def test_alone_in_a_folder(data):
    """By torchrun's command, and with nothing but the script: the losses of one process."""
    path = shutil.copy(script("ddp_torchrun"), ".")
    flags = ["--dataset", data / "pictures", "--batch-size", 24, "--epochs", 2, "--workers", 1]
    text = done([helpers.torchrun(2, path, *flags)])
    agree(text, helpers.run("single", *flags))
    assert helpers.files("runs/ddp_torchrun") == ["checkpoint.pt", "model.pt"]


def test_same_text():
    """Of functions, classes and flags. A default that is changed in one script is found, and
    --fix copies the text of the script that it is given."""
    paths, folder = GROUPS[0], Path().resolve()
    assert compare(paths) == []
    names = [set(definitions(path)) for path in paths]
    assert all(names[0] - own <= {"--amp"} for own in names)
    paths = [Path(shutil.copy(path, folder)) for path in paths]
    texts = content()
    changes = {"default=0.01": "default=0.1", "runs/dp": "runs/single", "(6, 16": "(6, 8"}
    for old, new in changes.items():
        paths[1].write_text(paths[1].read_text().replace(old, new))
        assert len(compare(paths)) == 1, (old, new)
        compare(paths, paths[0])
        assert content() == texts

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
    TORCHRUN,
    Cold,
    Warm,
    done,
    finish,
    kill_all,
    run,
    same,
    some_fast,
    weights,
)
from same_text import GROUPS, compare, definitions

DISTRIBUTED = SMALL[2:]
FLAGS = ["--dataset", "synthetic", "--batch-size", 60, "--lr", 0.03, "--workers", 0, "--output"]
LINE = r"^epoch (\d+): loss (\d+\.\d{4}) accuracy ([01]\.\d{4}) \d+ images/s$"
DROPOUT = """
plain_model = build_model
def build_model(args, classes):
    return nn.Sequential(plain_model(args, classes), nn.Dropout(0.2))
"""


def small(name, *changes, **options):
    """A copy of the script with 640 + 203 synthetic images, and changes."""
    images = ["range(10_000)", "range(640)", "range(10_000, 12_000)", "range(640, 843)"]
    return helpers.edited(name, *images, *changes, **options)


def epochs(text):
    """{epoch: (loss, accuracy)} of what a script has printed."""
    found = re.findall(LINE, text, re.M)
    assert len(found) == text.count("epoch ") and "destroy_process_group" not in text, text
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
    """The folder and the text of a run of train_single.py, of five epochs."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TEST_FOLDER", str(folder))
        text = run("single", *FLAGS, "out", "--epochs", 5, "--workers", 2, path=small("single"))
    return folder / "out", text


def test_one_run(single):
    """From the beginning: the losses of train_single.py, with two processes or machines. What is
    left over after 10 steps are other images in each epoch; 203 images are tested by two. Another
    --lr takes effect on --resume."""
    for name in SMALL[1:]:
        path, flags = small(name), [*FLAGS, name, "--epochs"]
        text = run(name, *flags, 2, path=path, processes=COUNTS[name])
        share = (
            f"{60 // COUNTS[name]} images of each batch per {'GPU' if name == 'dp' else 'process'}"
        )
        assert text.count(f"640 training images, 203 test images, 10 classes; {share}\n") == 1, text
        assert list(epochs(text)) == [0, 1] and epochs(text)[0] != epochs(text)[1]
        agree(text, single[1])
        before = weights(name)
        run(name, *flags, 3, "--resume", "--lr", 0, path=path, processes=COUNTS[name])
        assert same(weights(name), before) and before.keys() == weights(single[0]).keys()


MANY = [(name, count) for name in DISTRIBUTED for count in (1, 3)]  # test_one_run has 2
MANY += [("ddp_torchrun", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True])
def test_one_run_on_any_number(amp):
    """1 to 5 processes; --amp is the same in all scripts that have it, and does something."""
    flags = [*FLAGS[:-1], *(["--amp"] if amp else []), "--epochs", 2, "--output"]
    single = run("single", *flags, "single", path=small("single"))
    plain = run("single", *FLAGS, "plain", "--epochs", 2, path=small("single"))
    assert (weights("plain")["conv1.weight"] - weights("single")["conv1.weight"]).any() == amp
    agree(single, plain, 2e-2, images=10)
    for name, count in MANY:
        if amp and (name == "ddp_multigpu_proc" or count != 3):
            continue
        text = run(name, *flags, f"{name}-{count}", path=small(name), processes=count)
        agree(text, single, *((3e-3, 5) if amp else ()))


@pytest.mark.slow
def test_a_checkpoint_goes_round(single):
    """Each of the first five continues the others' run; train_fsdp2.py on three what two began."""
    chain = ["ddp_spawn", "single", "ddp_multigpu_proc", "dp", "ddp_torchrun"]
    for epoch, name in enumerate(chain):
        flags = [*FLAGS, "out", "--resume", "--epochs", epoch + 1]
        text = run(name, *flags, path=small(name), processes=COUNTS[name])
        assert list(epochs(text)) == [epoch]
        agree(text, single[1])
    assert weights("out").keys() == weights(single[0]).keys()
    for begin, end in (2, 2), (3, 4):
        flags = [*FLAGS, "fsdp2", "--resume", "--epochs", end]
        text = run("fsdp2", *flags, path=small("fsdp2"), processes=begin)
        assert list(epochs(text)) == [end - 2, end - 1]
        agree(text, single[1])
        Path("fsdp2", "epoch-1-mine").mkdir(exist_ok=True)  # not the script's: it stays
    assert {path.name for path in Path("fsdp2").glob("epoch-*")} == {"epoch-3", "epoch-1-mine"}


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


@pytest.mark.parametrize("name", some_fast(SMALL, "single", "ddp_torchrun"))
def test_killed_as_it_writes(monkeypatch, name):
    """Each file is whole at every moment, and the resumed run ends bit-identical, with dropout."""
    flags, count = [*FLAGS, "out", "--epochs", 3, "--resume"], COUNTS[name]
    more = DROPOUT + (TORN_FOLDER if name == "fsdp2" else TORN)
    for number in "2", "2" if name == "fsdp2" else "3":  # of a resumed run, 3 is model.pt
        monkeypatch.setenv("N", number)
        jobs = helpers.start(name, *flags, path=small(name, more=more), processes=count)
        assert helpers.wait_until(lambda: any(job.status() for job in jobs)), helpers.logs(jobs)
        kill_all(jobs)
        assert not Path("out/model.pt").exists()
    text = run(name, *flags, path=small(name, more=DROPOUT), processes=count)
    assert list(epochs(text)) == ([2] if name == "fsdp2" else [])
    run(name, *flags, "--output", "whole", path=small(name, more=DROPOUT), processes=count)
    assert same(weights("out"), weights("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_spawn", "fsdp2"])
def test_killed_at_random(name):
    """All processes by SIGKILL, at three random moments."""
    flags, count, path = [*FLAGS, "out", "--epochs", 8, "--resume"], COUNTS[name], None
    path = small(name, more=DROPOUT)
    for epoch in 1, 3, 5:
        jobs = helpers.start(name, *flags, path=path, processes=count)
        helpers.wait_for(f"epoch {epoch}: ", *jobs)
        time.sleep(random.random() / 4)
        kill_all(jobs)
    text = run(name, *flags, path=path, processes=count)
    assert len(epochs(text)) <= 3  # epoch 5's line is printed before its checkpoint is written
    run(name, *flags, "--output", "whole", path=path, processes=count)
    assert same(weights("out"), weights("whole"))


def content(folder="."):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(name, says, *flags, path=None, processes=None):
    """One process says it and ends with status 2. The others wait to join, until torchrun or srun
    ends them."""
    before = content("kept") if Path("kept").exists() else None
    jobs = helpers.start(name, *flags, path=path, processes=processes or COUNTS[name])
    assert helpers.wait_until(lambda: any(job.status() for job in jobs)), helpers.logs(jobs)
    ended = [job for job in jobs if job.status() is not None]
    kill_all(jobs)
    text = helpers.logs(ended)
    assert f"error: {says}" in text and {job.status() for job in ended} == {2}, text
    assert "Traceback" not in helpers.logs(jobs), helpers.logs(jobs)
    assert before is None or content("kept") == before


@pytest.mark.parametrize("name", some_fast(SMALL, "single", "ddp_torchrun"))
def test_daily_mistakes(monkeypatch, name):
    """Each has a message, and nothing is lost."""
    own = "epoch-3/.metadata" if name == "fsdp2" else "checkpoint.pt"
    for path in own, "best.pt", "model.pt":  # with --resume, only its own run is continued
        Path("kept", path).parent.mkdir(parents=True)
        Path("kept", path).write_text("precious")
        refused(name, "kept exists: --resume its run, or use another --output", *FLAGS, "kept")
        if path != own:
            says = "kept has the run of another script: use another --output"
            refused(name, says, *FLAGS, "kept", "--resume")
        shutil.rmtree("kept")
    if name in DISTRIBUTED:
        says = "--batch-size must be a multiple of the 2 processes"
        refused(name, says, *FLAGS, "out", "--batch-size", 63)
    else:
        for variable in "WORLD_SIZE", "SLURM_STEP_NUM_TASKS":  # torchrun, or srun -n 2 python
            with monkeypatch.context() as patch:
                patch.setenv(variable, "2")
                says = f"{variable} is 2: start this script once, with python"
                refused(name, says, *FLAGS, "out", "--resume")
    if name in ("ddp_spawn", "ddp_multigpu_proc"):
        several = [*FLAGS, "out", "--nnodes", 2]
        refused(name, "several machines need --init-method", *several, processes=1)
        refused(name, "--node-rank 2: the 2 machines", *several, "--node-rank", 2, processes=1)
        refused(name, "--node-rank 0: the 0 machines", *several, "--nnodes", 0, processes=1)
    if name in ("ddp_torchrun", "fsdp2"):
        text = done([Warm(helpers.script(name), [], "alone")], 2)
        assert "start it with torchrun --standalone --nproc-per-node gpu" in text
    assert not Path("out").exists()
    text = run(name, *FLAGS, "out", "--batch-size", 660, path=small(name), status=1)
    assert "--batch-size: there are only 640 images" in text
    assert not Path("out").exists()


@pytest.mark.parametrize("name", some_fast(SMALL, "single"))
def test_folders_that_are_wrong(data, name):
    """A class has another name in test/; all are a level too deep; there is no test/. Nothing is
    written."""
    for folder in "other", "deep/train", "deep/test", "none":
        Path(folder).mkdir(parents=True)
        part = {"deep/train": "train", "deep/test": "test"}.get(folder, "")
        shutil.copytree(data / "pictures" / part, Path(folder, "pictures"))
    Path("other/pictures/test/c").rename("other/pictures/test/.ipynb_checkpoints")
    shutil.rmtree("none/pictures/test")
    for folder, says in {
        "other/pictures": "classes in only one of train/ and test/: ['.ipynb_checkpoints', 'c']",
        "deep": "train/ needs a folder per class, not only pictures",
        "none/pictures": "no folder none/pictures/test: move a tenth of each class there",
    }.items():
        jobs = helpers.start(name, *FLAGS, "out", "--dataset", folder, processes=COUNTS[name])
        helpers.wait_for(f"error: --dataset: {says}\n", *jobs)
        kill_all(jobs)
    assert not Path("out").exists()


TAKEN = """
plain = load_data
def load_data(args):  # meanwhile, another run starts in this folder
    if not args.output.exists():
        args.output.mkdir()
        (args.output / "checkpoint.pt").write_text("precious")
    return plain(args)
"""


@pytest.mark.parametrize("name", some_fast(SMALL, "single", "ddp_torchrun"))
def test_two_runs_start_in_one_folder(name):
    """The second ends, and leaves the first its folder. An empty folder is resumed."""
    path = small(name, more=TAKEN)
    jobs = helpers.start(name, *FLAGS, "out", path=path, processes=COUNTS[name])
    assert helpers.wait_until(lambda: any(job.status() for job in jobs)), helpers.logs(jobs)
    kill_all(jobs)
    assert "FileExistsError" in helpers.logs(jobs) and "epoch 0" not in helpers.logs(jobs)
    assert content("out") == {Path("out/checkpoint.pt"): b"precious"}
    Path("empty").mkdir()
    flags = [*FLAGS, "empty", "--epochs", 1, "--resume"]
    assert list(epochs(run(name, *flags, path=small(name), processes=COUNTS[name]))) == [0]


@pytest.mark.parametrize("name", some_fast(DISTRIBUTED, "fsdp2"))
def test_another_disk(name):
    """Ranks that do not see the same checkpoint end in a line, and the checkpoint stays. One of
    train_fsdp2.py is written by all ranks, so they need one disk from the first."""
    flags = [*FLAGS, "out", "--resume", "--epochs"]
    make = "    if rank == 0:\n        args.output.mkdir("
    own = "    args.output /= str(rank)\n    checkpoint_path = args.output / 'checkpoint.pt'\n"
    path = small(name, make, f"{own}{make}")
    run(name, *flags, 1, path=path, processes=1)
    before = content("out")
    statuses, text = finish(helpers.start(name, *flags, 2, path=path, processes=2))
    assert set(statuses) == {1} and content("out") == before, text
    assert "the machines see different files in out/0: use a shared disk" in text, text
    if name == "fsdp2":
        jobs = helpers.start(name, *flags, 1, "--output", "new", path=path, processes=2)
        helpers.wait_for("the machines have no shared disk for new/1", *jobs)
        kill_all(jobs)


# What a process group waits, in minutes; and then the process ends.
MINUTES = """
plain = dist.barrier
def barrier():
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    raise SystemExit(f"{options._timeout.total_seconds() / 60:g} minutes")
dist.barrier = barrier
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_timeout(name):
    """It is half an hour, on GPUs too, where torch has ten minutes; --timeout sets it, and then
    nobody waits longer for a machine that does not come."""
    default = "torch.distributed.distributed_c10d.default_pg_timeout"
    ten = f"{default} = timedelta(minutes=10)\n"
    path, flag = small(name, more=ten + MINUTES), ["--timeout", 50]
    for flags in [[], flag][: 1 + (name in ("ddp_spawn", "ddp_multigpu_proc"))]:
        statuses, text = finish(helpers.start(name, *FLAGS, "out", *flags, path=path))
        assert 0 not in statuses and f"{50 if flags else 30} minutes" in text, text
    if flags:
        meet = ["--init-method", f"tcp://127.0.0.1:{helpers.free_port()}", "--nnodes", 2]
        jobs = helpers.start(name, *FLAGS, "out", *meet, "--timeout", 0.02)
        statuses, text = finish(jobs, 60)
        assert statuses == [1] and "waits for the others" in text, (statuses, text)


@pytest.mark.slow
def test_ranks_end_with_their_parent():
    """Also in a script's background jobs, which ignore SIGINT: torch tells its children by that."""
    flags = [*FLAGS, "out", "--epochs", 99999, "--nproc-per-node", 2]
    words = [sys.executable, small("ddp_spawn"), *flags]
    job = Cold(["sh", "-c", '"$@" & echo "pid $!"; wait', "sh", *words], "log")
    helpers.wait_for("epoch 1: ", job)
    [pid] = re.findall(r"^pid (\d+)", job.log.read_text(), re.M)
    os.kill(int(pid), signal.SIGTERM)
    assert helpers.wait_until(lambda: not helpers.marked(), 60), helpers.logs([job])
    assert "the process that started this one was killed" in job.log.read_text()


VIEW = """
class View(nn.Module):
    def __init__(self):  # as in PyTorch's tutorial of the transformer
        super().__init__()
        self.register_buffer("pe", torch.ones(4, 3).unsqueeze(0).transpose(0, 1))
    def forward(self, x):
        return x * self.pe[0].mean()
plain_model = build_model
def build_model(args, classes):
    return nn.Sequential(View(), plain_model(args, classes))
"""


@pytest.mark.parametrize("name", some_fast(DISTRIBUTED, "ddp_torchrun"))
def test_a_buffer_that_is_a_view(single, name):
    """DDP's own broadcast of it would end the run at the first step."""
    path = small(name, more=VIEW)
    agree(run(name, *FLAGS, "out", "--epochs", 1, path=path, processes=2), single[1])


OWN = """
class Own(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers
    def __len__(self):
        return len(self.numbers)
    def __getitem__(self, i):
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(self.numbers[i]))
        return image, image.argmax(0)  # which of the colors is the strongest, for each pixel
def load_data(args):
    return Own(range(640)), Own(range(640, 843)), 3
def build_model(args, classes):
    return nn.Conv2d(3, classes, 1)
"""


@pytest.mark.slow
def test_ones_own():
    """Data, a model, and masks instead of labels, by the functions and the line that are a
    user's: all scripts do the same run."""
    score, cells = "(model(images).argmax(1) == labels)", ".float().mean((1, 2))"
    mine = {f"{score}.sum()": f"{score}{cells}.sum()"}
    sharded = {score[1:-1]: f"{score}{cells}"}
    for name in SMALL:
        [change] = (sharded if name == "fsdp2" else mine).items()
        path = helpers.edited(name, *change, more=OWN)
        text = run(name, *FLAGS, name, "--epochs", 3, path=path, processes=COUNTS[name])
        assert "640 training images, 203 test images, 3 classes" in text, text
        if name == "single":
            single = text
            assert epochs(text)[2][1] > 0.6 > epochs(text)[0][1] > 0.3, text
        agree(text, single, 1e-4, images=1e-2)


SEEN = """
plain_count = count_correct
def count_correct(model, *words):
    seen = set()
    hook = model.register_forward_hook(lambda *parts: seen.add(str(parts[2].dtype)))
    correct = plain_count(model, *words)
    hook.remove()
    print(f"tested in {seen}\\n", end="", flush=True)
    return correct
"""


@pytest.mark.parametrize("name", some_fast([*SMALL[2:4], "single", "fsdp2"], "single"))
def test_amp(name):
    """Tests as it trains."""
    path, count = small(name, more=SEEN), COUNTS[name]
    for flags, kind in ([], "float32"), (["--amp"], "bfloat16"):
        text = run(name, *FLAGS, kind, "--epochs", 1, *flags, path=path, processes=count)
        assert text.count(f"tested in {{'torch.{kind}'}}") == text.count("tested in") == count


@pytest.mark.slow
def test_synthetic_images():
    """They cost a loader next to nothing, none is there twice, and two epochs suffice to learn."""
    own = runpy.run_path(helpers.script("single"))["Synthetic"]
    images, times = own(224, range(10_000)), []
    for i in range(200):
        started = time.perf_counter()
        image, label = images[i]
        times.append(time.perf_counter() - started)
        assert image.shape == (3, 224, 224) and label == i % 10
    assert min(times) < 3e-4
    images = [*own(32, range(10_000)), *own(32, range(10_000, 12_000))]
    assert all(image.shape == (3, 32, 32) for image, _ in images)
    assert len({image[:, :2].numpy().tobytes() for image, _ in images}) == 12_000
    text = run("single", "--dataset", "synthetic", "--epochs", 2, "--workers", 0, "--output", "out")
    assert epochs(text)[1][1] >= 0.99, text


@pytest.mark.slow
def test_what_each_rank_draws():
    """Random numbers differ by epoch, rank and GPU; batch norm's averages are rank 0's on all."""
    line = "        started = time.time()\n"
    tell = "        for generator in torch.cuda.default_generators or [None]:\n"
    draw = "torch.rand(1, generator=generator).item()"
    tell += f'            print(f"draws {{{draw}}}\\n", end="", flush=True)\n'
    two = ["gpus = torch.accelerator.device_count()", "gpus = 2"]
    empty = "    if len(train_loader) == 0:\n"
    seed = "train_loader.generator.initial_seed()"
    seed = f'    print(f"workers {{{seed}}}\\n", end="", flush=True)\n'
    gpus = "torch.cuda.default_generators = torch.Generator(), torch.Generator()\n"
    norm = "nn.Conv2d(3, 6, 5)", "nn.Sequential(nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6))"
    end = "    dist.destroy_process_group()\n"
    held = "[b.double().sum().item() for b in model.buffers()]"
    say = f'    print(f"holds {{{held}}}\\n", end="", flush=True)\n'
    for name, draws in zip(SMALL, (1, 2, 2, 2, 4, 2)):
        changes = [
            *norm,
            line,
            tell + line,
            empty,
            seed + empty,
            *([end, say + end] if name in DISTRIBUTED else []),
        ]
        if name in ("dp", "ddp_multigpu_proc"):
            path = small(name, *changes, *two, more=gpus)
        else:
            path = small(name, *changes)
        text = run(name, *FLAGS, name, "--epochs", 3, path=path, processes=COUNTS[name])
        seeds = re.findall(r"workers (\d+)", text)  # random transforms differ by rank, too
        assert len(set(seeds)) == len(seeds) == COUNTS[name], text
        found = re.findall(r"draws (\S+)", text)
        assert len(set(found)) == len(found) == 3 * draws, (name, text)
        held = re.findall(r"holds (.+)", text)
        assert len(set(held)) == len(held) / COUNTS[name] == (name in DISTRIBUTED), text


def counted(name, folder, processes):
    """The accuracy where each answer is right: 1 if each test image is counted once."""
    path = small(name, "argmax(1) == labels", "argmax(1) < 100")
    flags = [*FLAGS, f"{name}-{processes}", "--epochs", 1, "--dataset", folder]
    [(_, accuracy)] = epochs(run(name, *flags, path=path, processes=processes)).values()
    return accuracy


@pytest.mark.parametrize("name, count", [("single", 1), ("ddp_torchrun", 2), ("fsdp2", 2)])
def test_a_folder(data, name, count):
    """JPEG and PNG files, one of them grey, of several sizes. The 3 test images count once each."""
    assert counted(name, data / "pictures", count) == 1


@pytest.mark.slow
def test_each_test_image_counts_once(data):
    """On more processes, also where some have no test image at all."""
    for name in DISTRIBUTED:
        for count, folder in (3, "synthetic"), (4, data / "pictures"):
            assert counted(name, folder, count) == 1, (name, count)


def test_cifar10():
    """As torchvision finds it on the disk. 5 files of 64 images, and one of 40."""
    images, labels = pictures(360, 3, 32)
    folder = Path("data/cifar-10-batches-py")
    folder.mkdir(parents=True)
    parts = {f"data_batch_{i + 1}": slice(64 * i, 64 * i + 64) for i in range(5)}
    for name, part in (parts | {"test_batch": slice(320, 360)}).items():
        rows = images[part].transpose(0, 3, 1, 2).reshape(-1, 3072)
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": labels[part].tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    found = "datasets.cifar.check_integrity = lambda path, md5: os.path.exists(path)\n"
    flags = [*FLAGS, "out", "--dataset", "cifar10", "--epochs", 8]
    text = run("single", *flags, path=small("single", more=found))
    assert epochs(text)[0][0] > 2.2 and epochs(text)[7][0] < 1.8, text


@pytest.mark.parametrize("name", some_fast(SMALL[:5], "ddp_torchrun"))
def test_two_cards(monkeypatch, single, name):
    """On two make-believe GPUs each process uses its own, DataParallel both; no step waits for its
    GPU. A checkpoint of a CPU continues there."""
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    run("single", *FLAGS, "out", "--epochs", 1, path=small("single"))
    Path("report").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "emulated"))
    monkeypatch.setenv("EMULATED_CARDS", "2")
    monkeypatch.setenv("EMULATED_REPORT", str(Path("report").resolve()))
    flags = [*FLAGS, "out", "--epochs", 3, "--resume"]
    path = small(name, '("cuda", "xpu")', '("cuda", "xpu", "emu")')  # whose memory is pinned
    text = run(name, *flags, path=path, processes=COUNTS[name])
    share = {"single": 60, "dp": "30 images of each batch per GPU"}.get(name, 30)
    assert f"10 classes; {share}" in text, text
    agree(text, single[1])
    reports = [path.read_text() for path in Path("report").iterdir()]
    reports = [report for report in reports if "uses card" in report]
    used = ["".join(sorted(re.findall(r"uses card (\d)", report))) for report in reports]
    own = {"single": ["0"], "dp": ["01"], "ddp_multigpu_proc": ["01", "01"]}
    assert sorted(used) == own.get(name, ["0", "1"]), reports
    for report in reports:
        for epoch in re.split(r"^(?:main:\d+ seeds.*\n)+", report, flags=re.M)[-2:]:
            assert 0 < len(re.findall(r"^main:\d+ waits", epoch, re.M)) <= 4, epoch  # of ten steps
            assert "to_device" not in "".join(re.findall(r"^.* waits.*", epoch, re.M)), epoch


MARKS = {name: pytest.mark.slow if name == "ddp_torchrun" else pytest.mark.long for name in SMALL}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in SMALL])
def test_alone_in_a_folder(name):
    """By the commands of their docstrings, with torchrun and torch's own spawn; images of another
    size, and a model of torchvision. Two machines get the losses of one process."""
    path, port = small(name), helpers.free_port()
    python, flags = [sys.executable, path], ["--dataset", "synthetic", "--workers", 1]
    flags += ["--batch-size", 60, "--lr", 0.03, "--epochs", 1]
    static = [*TORCHRUN, "--nnodes", 2, "--master_addr", "127.0.0.1", "--master_port", port]
    commands = [python]
    if name in ("ddp_torchrun", "fsdp2"):
        commands = [[*static, "--node_rank", i, path] for i in (0, 1)]
    elif name == "ddp_spawn":
        meet = ["--init-method", f"tcp://127.0.0.1:{port}", "--nnodes", 2, "--node-rank"]
        commands = [[*python, "--nproc-per-node", 2, *meet, i] for i in (0, 1)]
        flags[flags.index("--workers") + 1] = 0  # spawned too, each would import torch
    elif name == "ddp_multigpu_proc":
        meet = ["--init-method", Path("meet").resolve().as_uri()]
        meet += ["--world-size", 2, "--rank"]  # the names from elsewhere
        commands = [[*python, *meet, i] for i in (0, 1)]
    start = [Cold([*words, *flags], f"{i}.log") for i, words in enumerate(commands)]
    text = done(start)
    agree(text, run("single", *FLAGS, "whole", "--epochs", 1, path=small("single")))
    assert {"model.pt"} < {file.name for file in Path("runs", name).iterdir()}
    assert ("waits for the others" in text) == (name in ("ddp_spawn", "ddp_multigpu_proc"))
    others = ["--image-size", 224], ["--image-size", 40, "--model", "resnet18"]
    for more in others if name == "single" else ():
        few = small(name, "range(640)", "range(64)", "range(640, 843)", "range(64, 68)")
        run(name, *flags, *more, "--output", more[1], path=few, processes=COUNTS[name])


def test_same_text():
    """Of functions, classes and flags. A default that is changed in one script is found, and
    --fix copies the text of the script that it is given."""
    [paths, complete], folder = GROUPS, Path().resolve()
    assert compare(paths) == compare(complete) == []
    names = [set(definitions(path)) for path in paths]
    assert all(names[0] - own <= {"--amp"} for own in names)
    paths = [Path(shutil.copy(path, folder)) for path in paths]
    texts = content()
    for old, new in (
        ("default=0.01", "default=0.1"),
        ("runs/dp", "runs/single"),
        ("(6, 16", "(6, 8"),
    ):
        paths[1].write_text(paths[1].read_text().replace(old, new))
        assert len(compare(paths)) == 1, (old, new)
        compare(paths, paths[0])
        assert content() == texts

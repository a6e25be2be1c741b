"""The small scripts: one training run in six, killed and resumed by one another; what is refused;
what users type."""

import re
import shutil
import socket
import sys
from pathlib import Path

import helpers
import pytest
import torch
from helpers import (
    COUNTS,
    SMALL,
    Warm,
    altered,
    content,
    done,
    few,
    finish,
    free_port,
    kill_all,
    logs,
    same,
    some_fast,
    together,
    wait_until,
)
from same_text import GROUPS, compare, definitions, script_path, shared_loops, unread
from torchvision import datasets

DISTRIBUTED, BY_TORCHRUN = SMALL[2:], ["ddp_torchrun", "fsdp2"]
MACHINES = ["ddp_spawn", "ddp_multigpu_proc"]  # with --nnodes
KINDS = ["single", "ddp_torchrun"]  # in the others, most lines are those of these
FLAGS = ["--dataset", "synthetic", "--batch-size", 60, "--lr", 0.03, "--workers", 0, "--output"]
LINE = r"^epoch (\d+): loss (\d+\.\d{4}) accuracy ([01]\.\d{4}) \d+ images/s$"
FEW = few(640, 203)
DROPOUT = """
plain_model = build_model
def build_model(*words):
    return nn.Sequential(plain_model(*words), nn.Dropout(0.2))
"""


def begin(name, output, *flags, more="", **options):
    """Start a script with 640 + 203 synthetic images."""
    return helpers.start(name, *FLAGS, output, *flags, more=FEW + more, **options)


def run_few(*words, status=0, **options):
    return done(begin(*words, **options), status)


def machines(name, output, *flags, own, meet):
    """Start a script on several machines, each with flags of its own, as the articles name them."""
    path, jobs = altered(name, more=FEW), []
    for rank, own_flags in enumerate(own):
        words = ["--world-size", len(own), "--rank", rank, "--init-method", meet, *flags]
        words += ["--nproc-per-node", 1] if name == "ddp_spawn" else []
        runs = [[0, [*FLAGS, output, *words, *own_flags]]]
        jobs.append(Warm(path, runs, f"{output}-{rank}.log", {}))
    return jobs


def tcp():
    return f"tcp://127.0.0.1:{free_port()}"


def saved_weights(output):
    return helpers.weights(output, "checkpoint.pt")


def epochs(text):
    """{epoch: (loss, accuracy)} of what a script has printed."""
    assert "destroy_process_group" not in text, text
    found = re.findall(LINE, text, re.M)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def agree(text, other, least=1.5e-4, images=1):
    """The epochs in `text` have the losses in `other`, and up to `images` the same are right."""
    assert epochs(text)
    for epoch, (loss, accuracy) in epochs(text).items():
        wanted, right = epochs(other)[epoch]
        assert loss == pytest.approx(wanted, abs=least), (text, other)
        assert abs(accuracy - right) < images / 203 + 1e-4, (text, other)


# ---- One training run ----------------------------------------------------------------------------
@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """The folder of a run of train_single.py after its first epoch, and the text of eight."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TEST_FOLDER", str(folder))
        text = run_few("single", "one", "--epochs", 1, "--workers", 2)
        shutil.copytree("one", "all")
        text += run_few("single", "all", "--epochs", 8, "--resume")
    return folder / "one", text


CLOCK = """
from types import SimpleNamespace
time = SimpleNamespace(perf_counter=iter(range(100)).__next__)  # each epoch takes a second
"""


def test_one_run(single):
    """The losses of train_single.py, from the beginning, on two processes or machines; the speed is
    that of all."""
    for name in SMALL[1:]:
        text = run_few(name, name, "--epochs", 1, more=CLOCK)
        assert text.count(" 600 images/s\n") == 1, text
        found = "640 training images, 203 test images, 10 steps per epoch\n10 classes: "
        found += f"{list('0123456789')}\nstarts with epoch 0, lr 0.03\n"
        assert text.count(found) == 1, text
        agree(text, single[1])
        assert saved_weights(name).keys() == saved_weights(single[0]).keys()


OTHERS = "--lr 1 --epochs 9 --batch-size 8 --model resnet18 --dataset nowhere --output mine".split()


@pytest.mark.slow
def test_one_run_on_any_number(single):
    """Of processes, and of machines. Whatever is typed on the others, they take machine 0's flags,
    --resume too."""
    for name, count in ("ddp_torchrun", 1), ("ddp_torchrun", 5), ("fsdp2", 1):
        agree(run_few(name, f"{name}-{count}", "--epochs", 1, processes=count), single[1])
    meet = Path("meet").resolve()
    for name, url in ("ddp_spawn", tcp()), ("ddp_multigpu_proc", meet.as_uri()):
        text = done(machines(name, name, "--epochs", 1, own=[(), OTHERS, ()], meet=url))
        assert {f"machine {i} of 3 waits at {url}\n" in text for i in range(3)} == {True}, text
        agree(text, single[1])
        own = [["--resume"], OTHERS, ["--output", name]]
        text = done(machines(name, name, "--epochs", 2, own=own, meet=tcp()))
        assert [*epochs(text)] == [1], text
        agree(text, single[1])
    assert not meet.exists()  # so that the next run finds no old one
    assert not Path("mine").exists()


@pytest.mark.slow
def test_amp(single):
    """It is the same in all scripts that have it, and does something."""
    text = run_few("single", "single", "--epochs", 1, "--amp")
    assert not same(saved_weights("single"), saved_weights(single[0]))
    agree(text, single[1], 2e-2, images=10)
    for name in "ddp_torchrun", "ddp_spawn", "fsdp2":
        agree(run_few(name, name, "--epochs", 1, "--amp"), text, 5e-3, images=5)


SAVED = """
saved, plain_loss = [], F.cross_entropy
kept = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
kept.__enter__()
def cross_entropy(*words):  # a forward pass is over
    whole = {tuple(weight.shape) for weight in models.get_model("resnet18").parameters()}
    weights = [x for x in saved if x.dtype == torch.bfloat16 and tuple(x.shape) in whole]
    storages = {id(x): x.untyped_storage().nbytes() for x in weights if x.dim() == 4}
    print("saved", len(storages), "bytes", sum(storages.values()), flush=True)
    saved.clear()
    return plain_loss(*words)
F.cross_entropy = cross_entropy
"""


@pytest.mark.slow
def test_amp_of_fsdp2_keeps_no_weights():
    """In bfloat16, a block's weights are freed after its forward pass, and gathered again: autocast
    would keep its copies of all of them until backward(). What stays is outside of the blocks."""
    flags = ["--model", "resnet18", "--amp", "--batch-size", 4, "--epochs", 1]
    more = few(8, 2) + SAVED  # bfloat16 is slow on many CPUs
    text = done(helpers.start("fsdp2", *FLAGS, "out", *flags, more=more))
    found = re.findall(r"^saved (\d+) bytes (\d+)$", text, re.M)
    first = 64 * 3 * 7 * 7 * 2  # of conv1, which is in no block
    assert found and all(int(n) >= 20 and int(size) <= first for n, size in found), text


NORM = """
def build_model(name, num_classes):
    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
plain_count = count_correct
def count_correct(model, *words):
    print("holds", *[round(buffer.sum().item(), 5) for buffer in model.buffers()], flush=True)
    correct = plain_count(model, *words)
    assert not model.training
    return correct
"""
DRAWS = """
for seed in random.seed, torch.manual_seed:  # as in processes of their own
    seed(os.getpid())
def load_data(args):
    print("split", torch.rand(()).item(), flush=True)
    return Draws(), Draws(), ["all"]
class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 120
    def __getitem__(self, i):
        if i % 30 == 0:
            print("worker", torch.rand(()).item(), random.random(), flush=True)
        return torch.full((3, 32, 32), i / 120), 0
plain_norm = nn.BatchNorm2d.train
def begin(norm, mode=True):  # an epoch begins
    if mode:
        print("begins", torch.rand(()).item(), flush=True)
    return plain_norm(norm, mode)
nn.BatchNorm2d.train = begin
"""


@pytest.mark.parametrize("name", some_fast(DISTRIBUTED, "ddp_torchrun"))
def test_random_numbers(name):
    """Those of dropout and of the workers differ by epoch and rank, also in a resumed run. What
    load_data draws, such as a split, is the same on all ranks and in all lives. All ranks test with
    the same averages of batch norm."""
    text, draws = "", f"import random{DRAWS}"
    for last in 1, 2:
        flags = ["--workers", 1, "--resume", "--epochs", last]
        text += done(helpers.start(name, *FLAGS, "out", *flags, more=NORM + draws))
    found = {what: re.findall(rf"^{what} (.*)$", text, re.M) for what in ("worker", "begins")}
    assert len(found["begins"]) == 4 and len(found["worker"]) >= 16, text
    for values in found.values():
        assert len(set(values)) == len(values), text
    splits = re.findall(r"^split (.*)$", text, re.M)
    assert len(splits) == 4 and len(set(splits)) == 1, text
    held = re.findall(r"^holds (.*)$", text, re.M)
    assert len(held) == 4 and len(set(held)) == 2, text


RIGHT = """
images_of_a_folder = load_data
def load_data(args):
    train_set, test_set, _ = images_of_a_folder(args)
    return [(image, 0) for image, _ in train_set], [(image, 0) for image, _ in test_set], ["all"]
"""


def test_each_test_image_counts_once(data):
    """Of a folder of JPEG and PNG files of several sizes, with 3 to test on: of four processes, one
    has none. Each answer is right."""
    for name in BY_TORCHRUN:
        flags = ["--epochs", 1, "--dataset", data / "pictures", "--image-size", 40]
        text = run_few(name, name, *flags, more=RIGHT, processes=4)
        assert epochs(text)[0][1] == 1, text


# ---- Killed, and resumed -------------------------------------------------------------------------
# A process kills itself as it writes for the second time, with half of the file written. What it
# has written by then says that it is of a GPU, which this machine does not have.
TORN = """
plain, plain_tag, written = torch.save, torch.serialization.location_tag, []
def torn(content, path, **options):
    on_disk = isinstance(path, str)  # else, it is sent to other ranks
    torch.serialization.location_tag = (lambda _: "cuda:0") if on_disk else plain_tag
    plain(content, path, **options)
    if on_disk:
        written.append(path)
    if written[1:]:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), 9)
torch.save = torn
"""


def test_killed_and_resumed_by_another(single):
    """Each script is killed as it writes its second checkpoint: the first one is whole, and the
    next script continues it, train_fsdp2.py on three processes. The losses are those of a run
    without kills: what is left over after 10 steps are other images in each epoch."""
    text = ""
    for name in SMALL:
        processes = 3 if name == "fsdp2" else None
        jobs = begin(name, "out", "--epochs", 8, "--resume", more=TORN, processes=processes)
        assert wait_until(lambda jobs=jobs: any(job.status() for job in jobs)), logs(jobs)
        kill_all(jobs)
        text += logs(jobs)
    text += run_few("single", "out", "--epochs", 8, "--resume")
    assert [*epochs(text)] == list(range(8)), text
    assert [int(epoch) for epoch in re.findall(r"starts with epoch (\d)", text)] == list(range(7))
    agree(text, single[1], 5e-4)
    assert saved_weights("out").keys() == saved_weights(single[0]).keys()


# Of a transform, in the loader's workers.
AUGMENTS = """
plain_data = load_data
def load_data(args):
    train_set, test_set, classes = plain_data(args)
    flips = [v2.RandomHorizontalFlip(), v2.ColorJitter(0.5), v2.RandomRotation(90)]
    train_set.transform = v2.Compose([*flips, train_set.transform])
    return train_set, test_set, classes
"""


@pytest.mark.parametrize("name", some_fast(SMALL, "single", "ddp_torchrun"))
def test_resumed_bit_identical(data, name):
    """On a CPU, with dropout, augmentation and workers, a resumed run ends as an undisturbed one;
    and augmentation is another one in each epoch."""
    flags = [*FLAGS, "out", "--dataset", data / "pictures", "--batch-size", 12, "--workers", 2]

    def train(output, last, *flags_more, more=DROPOUT + AUGMENTS):
        words = [*flags, "--output", output, "--epochs", last, *flags_more]
        return done(helpers.start(name, *words, more=more))

    train("whole", 2)
    train("out", 1)
    train("out", 2, "--resume")
    assert same(saved_weights("out"), saved_weights("whole"))
    train("plain", 2, more=DROPOUT)
    assert not same(saved_weights("plain"), saved_weights("whole"))


@pytest.mark.parametrize("name", some_fast(SMALL, *KINDS))
def test_resumed_with_other_flags_or_classes(data, name):
    """A resumed run has the rate of its checkpoint, and prints it. Other classes are refused, as
    the labels would be permuted. val/ is taken before test/."""
    shutil.copytree(data / "pictures", "pictures")
    shutil.copytree("pictures/train", "pictures/val")
    flags = ["--dataset", "pictures", "--resume", "--epochs"]
    text = run_few(name, "out", *flags, 1)
    found = "96 training images, 96 test images, 1 steps per epoch\n3 classes: ['a', 'b', 'c']\n"
    assert f"{found}starts with epoch 0, lr 0.03\n" in text, text
    before = saved_weights("out")
    text = run_few(name, "out", *flags, 2, "--lr", 0)
    assert text.count("starts with epoch 1, lr 0.03\n") == 1, text
    assert not same(saved_weights("out"), before)
    for part in "train", "val":
        Path("pictures", part, "a").rename(Path("pictures", part, "z"))
    kept = content("out")
    text = run_few(name, "out", *flags, 3, status=1)
    says = "out/checkpoint.pt has other classes: ['a', 'b', 'c']\n"
    assert text.count(says) == COUNTS[name] and content("out") == kept, text


INFINITE = """
plain, steps = F.cross_entropy, []
def cross_entropy(*words):  # infinite in the second epoch, which has ten steps
    steps.append(1)
    return plain(*words) + (torch.inf if len(steps) == 12 else 0)
F.cross_entropy = cross_entropy
"""


@pytest.mark.parametrize("name", some_fast(SMALL, "ddp_torchrun"))
def test_a_loss_that_is_not_finite(name):
    """It ends the run, whose last checkpoint stays, and from which it continues."""
    text = run_few(name, "out", "--epochs", 2, more=INFINITE, status=1)
    says = "the loss is inf: out/checkpoint.pt is not overwritten\n"
    assert list(epochs(text)) == [0] and text.count(says) == COUNTS[name], text
    assert list(epochs(run_few(name, "out", "--epochs", 2, "--resume"))) == [1]
    assert all(weight.isfinite().all() for weight in saved_weights("out").values())


# ---- What is refused -----------------------------------------------------------------------------
HAS_RUN = "out has a checkpoint: add --resume, or change --output\n"
ELSEWHERE = """
import sys
if os.environ.get("RANK") == "1" or "--node-rank 1" in " ".join(sys.argv):
    os.makedirs("elsewhere", exist_ok=True)  # its machine has a disk of its own
    os.chdir("elsewhere")
"""


BEGUN_MEANWHILE = """
model_alone = build_model
def build_model(*words):
    if os.path.basename(os.getcwd()) != "elsewhere":
        os.makedirs("out", exist_ok=True)
        open("out/checkpoint.pt", "w").write("precious")
    return model_alone(*words)
"""


@pytest.mark.parametrize("name", some_fast(SMALL, *KINDS))
def test_a_run_is_kept(name):
    """All ranks end in a line, also on another machine, which has no such folder: whether the run
    was there, or has begun while this one loaded its data."""
    text = run_few(name, "out", more=ELSEWHERE + BEGUN_MEANWHILE, status=1)
    assert text.count(HAS_RUN) == COUNTS[name], text
    text = run_few(name, "out", more=ELSEWHERE, status=1)
    assert text.count(HAS_RUN) == COUNTS[name], text
    assert [path.name for path in Path().glob("**/*.pt*")] == ["checkpoint.pt"]
    assert Path("out/checkpoint.pt").read_text() == "precious"


def test_another_disk_does_not_count():
    """What is in --output on another machine's disk keeps nobody from training."""
    Path("elsewhere/out").mkdir(parents=True)
    Path("elsewhere/out/checkpoint.pt").write_text("of another run")
    for name in "ddp_torchrun", "ddp_multigpu_proc":
        assert [*epochs(run_few(name, "out", "--epochs", 1, more=ELSEWHERE))] == [0]
        shutil.rmtree("out")


AT_ONCE = """
plain_mkdir = Path.mkdir
def mkdir(path, **options):  # both have found that there is no run
    Path(f"there-{os.getpid()}").touch()
    while len([*Path().glob("there-*")]) < 2:
        time.sleep(0.01)
    plain_mkdir(path, **options)
Path.mkdir = mkdir
"""


@pytest.mark.parametrize("name", some_fast(SMALL, *KINDS))
def test_two_at_once(name):
    """Of two runs that start at once with one --output, the second is refused."""
    jobs = [begin(name, "out", "--epochs", 1, "--lr", lr, more=AT_ONCE) for lr in (0.03, 0.02)]
    ends = [finish(each) for each in jobs]
    (_, kept), (statuses, refused) = sorted(ends, key=lambda end: any(end[0]))
    assert [*epochs(kept)] == [0] and not epochs(refused), (kept, refused)
    assert not {0, "still there"} & {*statuses} and "FileExistsError: [Errno 17]" in refused
    rate = float(re.findall(r"starts with epoch 0, lr (\S+)", kept)[0])
    saved = helpers.checkpoint("out")["optimizer"]["param_groups"]
    assert [group["lr"] for group in saved] == [rate]


KILLED = """
def cross_entropy(*words):
    os.kill(os.getpid(), 9)
F.cross_entropy = cross_entropy
"""


@pytest.mark.parametrize("name", some_fast(SMALL, *KINDS))
def test_starts_that_fail(name):
    """One that fails before training, or only loads the data, keeps the next from nothing. One that
    is killed in its first epoch is a run, which --resume starts again."""
    text = run_few(name, "out", "--model", "nonsense", status=1)
    assert "Unknown model nonsense" in text and not Path("out").exists()
    assert not epochs(run_few(name, "out", "--epochs", 0)) and not Path("out").exists()
    jobs = begin(name, "out", more=KILLED)
    assert wait_until(lambda: any(job.status() for job in jobs)), logs(jobs)
    kill_all(jobs)
    assert helpers.files("out") == ["checkpoint.pt"]
    assert run_few(name, "out", status=1).count(HAS_RUN) == COUNTS[name]
    text = run_few(name, "out", "--epochs", 1, "--resume")
    assert [*epochs(text)] == [0] and "starts with epoch 0, lr 0.03\n" in text


@pytest.mark.parametrize("name", some_fast(KINDS, "single"))
def test_empty_folders(name):
    """They are harmless, with --resume and without; so is what else is in them."""
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert list(epochs(run_few(name, "out", "--epochs", 1))) == [0]
    Path("empty").mkdir()
    assert list(epochs(run_few(name, "empty", "--epochs", 1, "--resume"))) == [0]
    assert helpers.files("out") == ["checkpoint.pt", "notes.txt"]


@pytest.mark.parametrize("name", some_fast(SMALL, *KINDS))
def test_batches_that_do_not_fit(data, name):
    """One that is larger than the training set, by an image that a sampler could repeat, or that
    the processes do not divide, ends in a line on all ranks, and nothing is written. So they end if
    train/ and test/ have other classes. One that is larger than the test set does not matter."""
    count = COUNTS[name]
    jobs = helpers.start(name, *FLAGS, "out", "--batch-size", 640, more=few(639, 203))
    text = done(jobs, status=1)
    assert text.count("--batch-size is larger than the 639 training images\n") == count, text
    assert [*epochs(run_few(name, "large", "--batch-size", 640, "--epochs", 1))] == [0]
    if count > 1:
        text = run_few(name, "out", "--batch-size", 63, status=1)
        assert text.count("--batch-size must be a multiple of the 2 processes\n") == count, text
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test/b").rename("pictures/test/d")
    jobs = begin(name, "out", "--dataset", "pictures")
    statuses, text = finish(jobs)
    says = "classes in only one of train/ and the test folder: ['b', 'd']\n"
    assert says in text and not {0, "still there"} & set(statuses) and not Path("out").exists()


@pytest.mark.parametrize("name", some_fast(BY_TORCHRUN, "ddp_torchrun"))
def test_ranks_that_differ(data, name):
    """In a class, or in the number of images: all end in a line, and nothing is written. In flags
    they do not: all have rank 0's."""
    for folder in "classes", "elsewhere/classes", "images", "elsewhere/images":
        shutil.copytree(data / "pictures", folder)
    for part in "train", "test":
        Path("elsewhere/classes", part, "a").rename(Path("elsewhere/classes", part, "A"))
    next(Path("elsewhere/images/test/b").iterdir()).unlink()
    shutil.copy(Path("images/test/c/00098.png"), "elsewhere/images/test/b")
    next(Path("elsewhere/images/train/b").iterdir()).unlink()

    def other_flags(rank):
        return [*FLAGS, "new", "--epochs", 0, *(OTHERS if rank == 1 else [])]

    runs = [[*FLAGS, f"out-{data}", "--dataset", data] for data in ("classes", "images")]
    *texts, allowed = together(*runs, other_flags, path=name, more=ELSEWHERE)
    for what, text in zip(("classes", "images"), texts, strict=True):
        assert text.count(f"{what} has different images or classes on another machine\n") == 2, text
    assert allowed.count("starts with epoch 0, lr 0.03\n") == 1, allowed
    assert not list(Path().glob("**/*.pt"))
    assert not list(Path().glob("**/mine"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_torchrun", "ddp_multigpu_proc"])
def test_resumed_without_a_shared_disk(name):
    """Rank 0's checkpoint is every rank's, whether another machine has none or an old one."""
    run_few(name, "out", "--epochs", 1)
    shutil.copytree("out", "whole")
    run_few(name, "whole", "--epochs", 3, "--resume")
    run_few(name, "out", "--epochs", 2, "--resume", more=ELSEWHERE)
    assert not Path("elsewhere/out").exists()
    shutil.copytree("out", "elsewhere/out")
    torch.save(helpers.checkpoint("out") | {"epoch": 7}, "elsewhere/out/checkpoint.pt")
    text = run_few(name, "out", "--epochs", 3, "--resume", more=ELSEWHERE)
    assert [*epochs(text)] == [2] and same(saved_weights("out"), saved_weights("whole"))


DOWNLOADS = """
plain_load = load_data
def load_data(args):
    if not os.path.exists("downloaded"):
        print("rank", os.environ["RANK"], "downloads", flush=True)
        time.sleep(0.3)
        open("downloaded", "x").close()
    return plain_load(args)
"""


@pytest.mark.parametrize("name", some_fast(BY_TORCHRUN, "ddp_torchrun"))
def test_who_downloads(name):
    """Of two machines with two ranks each, the first rank of each, if each has a disk of its own;
    rank 0 alone, if they share one."""
    own_disk = ELSEWHERE.replace('"RANK") == "1"', '"RANK") in ("2", "3")')
    for more, ranks in ("", ["0"]), (own_disk, ["0", "2"]):
        text = run_few(name, "out", "--epochs", 0, more=DOWNLOADS + more, processes=4, gpus=2)
        assert sorted(re.findall(r"rank (\d) downloads", text)) == ranks, text
        Path("downloaded").unlink()


@pytest.mark.parametrize("name", some_fast(MACHINES, "ddp_multigpu_proc"))
def test_machines(name):
    """One that waits says where. A wrong rank or address, or a port that is taken, ends with
    torch's message, and so does waiting."""
    taken = socket.create_server(("127.0.0.1", 0))
    wrong = {
        "rank parameter missing": ["--rank", -1, "--init-method", tcp()],
        "No rendezvous handler": ["--init-method", "127.0.0.1:23456"],
        "EADDRINUSE": ["--init-method", f"tcp://127.0.0.1:{taken.getsockname()[1]}"],
        "timed out": ["--rank", 1, "--world-size", 2, "--init-method", tcp(), "--timeout", 0.01],
        "Timed out": ["--world-size", 2, "--init-method", tcp(), "--timeout", 0.01],
    }
    path = script_path(name)
    jobs = {
        says: Warm(path, [[0, [*FLAGS, "out", *flags]]], f"{i}.log", {})
        for i, (says, flags) in enumerate(wrong.items())
    }
    for says, job in jobs.items():
        text = done([job], 1)
        url = wrong[says][wrong[says].index("--init-method") + 1]
        assert f" waits at {url}\n" in text and says in text, text
    taken.close()
    assert not Path("out").exists()


def test_without_torchrun(monkeypatch):
    """The line that ends it says what to do."""
    monkeypatch.setenv("RANK", "0")  # left over in a shell
    for name in BY_TORCHRUN:
        with pytest.raises(KeyError) as error:
            helpers.here(name, *FLAGS, "out")
        assert "Start it with torchrun" in str(error.traceback[-2].statement)


# ---- What users type -----------------------------------------------------------------------------
@pytest.mark.slow
def test_what_users_type():
    """Two machines without --nproc-per-node, as an article spells torchrun's flags; on one of them
    by the older launcher, which passes --local_rank."""
    path = altered("ddp_torchrun", more=FEW)
    flags = [path, *FLAGS, "out", "--epochs", 1]
    place = ["--nnodes", 2, "--master_addr", "127.0.0.1", "--master_port", free_port()]
    launch = [*helpers.TORCHRUN[:-1], "torch.distributed.launch"]
    commands = [[*helpers.TORCHRUN, *place, "--node_rank", 0], [*launch, *place, "--node_rank", 1]]
    text = done([helpers.Cold([*each, *flags], f"{i}.log") for i, each in enumerate(commands)])
    assert text.count("device cpu of 0 GPUs") == 2 and list(epochs(text)) == [0], text


START_METHOD = """
import multiprocessing
silent_model, plain_train = build_model, train
def train(*words):  # in a process of mp.spawn; that of a test is a fork
    multiprocessing.set_start_method("spawn", force=True)
    plain_train(*words)
def build_model(*words):
    print("loader workers start by", multiprocessing.get_start_method(), flush=True)
    return silent_model(*words)
"""


def test_loader_workers_of_spawn():
    """They start as torchrun's ranks start theirs: by mp.spawn's way, each would import torch."""
    text = run_few("ddp_spawn", "out", "--epochs", 0, more=START_METHOD)
    method = "import multiprocessing as mp; print(mp.get_start_method())"
    usual = helpers.command(sys.executable, "-c", method)
    assert text.count(f"loader workers start by {usual}\n") == 2, text


# ---- GPUs ---------------------------------------------------------------------------------------
# torch has no make-believe device by the name of "cuda": a copy calls it by the emulated one's.
EMULATED = "torch.cuda.", "torch.emu.", '"cuda"', '"emu"'
NO_NCCL = '"nccl"', '"gloo"'


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL[:5])
def test_two_cards(monkeypatch, single, name):
    """On two make-believe GPUs each process uses its own, DataParallel both; no step waits for its
    GPU. A checkpoint of a CPU continues there."""
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    shutil.copytree(single[0], "out")
    Path("report").mkdir()
    monkeypatch.setenv("EMULATED_CARDS", "2")
    monkeypatch.setenv("EMULATED_REPORT", str(Path("report").resolve()))
    path = altered(name, *EMULATED, *(NO_NCCL if name in DISTRIBUTED else ()), more=FEW)
    flags = [*FLAGS, "out", "--epochs", 3, "--resume"]
    count = 4 if name == "ddp_torchrun" else COUNTS[name]  # 4: on two machines with two cards each
    text = done(helpers.start(path, *flags, processes=count, gpus=2))
    assert text.count(" of 2 GPUs\n" if "multi" not in name and name != "dp" else ", 2 GPUs\n")
    by_rank = name in ("ddp_torchrun", "ddp_spawn")
    assert ("emu:1: emulated, NCCL emulated\n" if by_rank else "GPU 1: emulated\n") in text
    assert list(epochs(text)) == [1, 2], text
    agree(text, single[1])
    reports = [path.read_text() for path in Path("report").iterdir()]
    reports = [report for report in reports if "uses card" in report]
    used = ["".join(sorted(re.findall(r"uses card (\d)", report))) for report in reports]
    own = {"single": ["0"], "dp": ["01"], "ddp_multigpu_proc": ["01", "01"]}
    own["ddp_torchrun"] = ["0", "0", "1", "1"]
    assert sorted(used) == own.get(name, ["0", "1"]), reports
    for report in reports:
        steps = re.split(r"^\S+ updated\n", report, flags=re.M)  # the last is what follows them
        waits = [i for i, part in enumerate(steps) if "waits" in part]
        assert len(steps) == 21 and set(waits) <= {0, 10, 20}, (waits, report)


SHARES = """
silent_model = build_model
def build_model(*words):
    model = silent_model(*words)
    model.register_forward_pre_hook(lambda _, inputs: print(inputs[0].shape, inputs[0].device))
    return model
"""


def test_dp_splits_a_batch(monkeypatch):
    """Of 64 images each card gets 32, as train_dp.py prints."""
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    monkeypatch.setenv("EMULATED_CARDS", "2")
    monkeypatch.setenv("EMULATED_REPORT", str(Path().resolve()))
    path = altered("dp", *EMULATED, more=FEW + SHARES)
    text = done(helpers.start(path, *FLAGS, "out", "--batch-size", 64, "--epochs", 1, processes=1))
    assert "a batch of 64 is split into [32, 32]\n" in text, text
    for card in range(2):  # in ten steps and three of the test; the threads' lines may mix
        assert text.count(f"torch.Size([32, 3, 32, 32]) emu:{card}") > 6, text


# ---- Data ----------------------------------------------------------------------------------------
def test_cifar10(monkeypatch, capsys):
    """With what torchvision has of it, and one of its models."""

    def cifar10(folder, train, transform, download):
        found = datasets.FakeData(120 if train else 20, (3, 32, 32), 10, transform)
        found.classes = list("abcdefghij")
        return found

    monkeypatch.setattr(datasets, "CIFAR10", cifar10)
    flags = ["--dataset", "cifar10", "--epochs", 1, "--model", "shufflenet_v2_x0_5"]
    helpers.here("single", *FLAGS, "out", *flags)
    text = capsys.readouterr().out
    assert "120 training images, 20 test images, 2 steps per epoch\n" in text and 0 in epochs(
        text
    ), text
    assert saved_weights("out")["fc.weight"].shape == (10, 1024)


# ---- The files -----------------------------------------------------------------------------------
def test_same_text():
    """Of functions, flags, and the loops of those with DDP."""
    assert [compare(paths) for paths in GROUPS] == [[], []] and shared_loops() + unread() == []
    for paths, name in zip(GROUPS, ("load_data", "validate"), strict=True):
        assert all({"main", name, "--lr"} <= definitions(path).keys() for path in paths) and paths


def test_fix():
    """A default or a line that is changed in one script is found, and --fix copies the text of
    another; so it does with a flag or a function that is new in one of them, and tells whose `main`
    does not use it."""
    paths = [Path(shutil.copy(path, Path().resolve())) for path in GROUPS[0]]
    for old, new in {"default=0.01": "default=0.1", "MaxPool2d(4)": "MaxPool2d(2)"}.items():
        paths[1].write_text(paths[1].read_text().replace(old, new))
        assert len(compare(paths)) == 1, (old, new)
        compare(paths, paths[0])
        assert compare(paths) == []
    for own in 0, 2, 5:  # train_fsdp2.py is in another folder, train_dp.py has no --amp
        old = '    parser.add_argument("--workers"'
        flag = f'    parser.add_argument("--new-{own}", type=int, default=3)\n'
        function = f"def new_{own}():\n    pass\n\n\ndef build_model("
        text = paths[own].read_text().replace(old, flag + old)
        paths[own].write_text(text.replace("def build_model(", function))
        found = compare(paths)
        for name in f"--new-{own}", f"new_{own}":
            others = [path.name for path in paths if path != paths[own]]
            assert [line for line in found if name in line.split(":")] == [
                f"{name}: not in {other}" for other in others
            ], found
        compare(paths, paths[own])
        assert compare(paths) == []
        assert all(flag + old in path.read_text() for path in paths)
        assert [line for line in unread(paths) if f"args.new_{own}:" in line] == sorted(
            f"args.new_{own}: not in {path.name}" for path in paths
        )
    for path in paths[3:5]:
        path.write_text(path.read_text().replace("optimizer.step()", "optimizer.step(None)"))
    assert shared_loops(paths) == ["train_ddp_spawn.py", "train_ddp_multigpu_proc.py"]

"""The small scripts: one training run in six, killed and resumed; the daily mistakes; two cards."""

import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import helpers
import pytest
import torch
import torch.distributed as dist
from helpers import (
    COUNTS,
    SMALL,
    Cold,
    content,
    done,
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
from torchvision import datasets

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


# ---- One training run ----------------------------------------------------------------------------
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
        assert text.count(found) == text.count("starts with epoch 0\n") == 1, text
        agree(text, wanted)
    shutil.copytree(folder, "single")
    Path("fsdp2/epoch-0-mine").mkdir()  # not the script's: it stays
    for name, other in zip(SMALL, [*FIRST_FIVE[1:], "single", "fsdp2"]):
        count = 3 if name == "fsdp2" else COUNTS[name]
        text = run(name, other, "--epochs", 2, "--resume", processes=count)
        assert list(epochs(text)) == [1] and text.count("starts with epoch 1\n") == 1, text
        agree(text, wanted)
        assert weights(other).keys() == weights(folder).keys()
    assert {path.name for path in Path("fsdp2").glob("epoch-*")} == {"epoch-1", "epoch-0-mine"}


@pytest.mark.slow
def test_one_run_on_any_number(single):
    """Of processes, and of machines, where another flag on the last one is refused."""
    for name, count in ("ddp_torchrun", 1), ("ddp_torchrun", 5), ("fsdp2", 1):
        agree(run(name, f"{name}-{count}", "--epochs", 1, processes=count), single[1])
    for name, count, processes in ("ddp_spawn", 2, 2), ("ddp_multigpu_proc", 3, 1):
        for last in 1, 2:  # epochs on the last machine
            meet = f"tcp://127.0.0.1:{free_port()}"
            if name == "ddp_multigpu_proc":
                meet = Path(f"meet-{last}").resolve().as_uri()
            jobs = []
            for rank in range(count):
                flags = ["--epochs", last if rank == count - 1 else 1, "--init-method", meet]
                flags += ["--world-size", count, "--rank", rank]  # as the articles name them
                jobs += begin(name, f"{name}-{last}", *flags, processes=processes)
            text = done(jobs, status=last - 1)
            assert text.count("waits for the others") == count
            assert list(epochs(text)) == ([0] if last == 1 else []), text
            agree(text, single[1])


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
def test_amp(single):
    """It is the same in all scripts that have it, and does something."""
    text = run("single", "single", "--epochs", 1, "--amp")
    assert not same(weights("single"), weights(single[0]))
    agree(text, single[1], 2e-2, images=10)
    for name in "ddp_torchrun", "ddp_spawn", "fsdp2":
        agree(run(name, name, "--epochs", 1, "--amp"), text, 3e-3, images=5)


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
    flags = ["--epochs", 1, "--dataset", data / "pictures", "--image-size", 40]
    text = run(name, name, *flags, more=ONE_CLASS, processes=4)
    assert epochs(text)[0][1] == 1, text


DRAWS = """
torch.multiprocessing.set_start_method("forkserver", force=True)  # as Python 3.14 has it
for seed in random.seed, np.random.seed, torch.manual_seed:  # as in processes of their own
    seed(os.getpid())
def tell(what, *values):
    print(" ".join(map(str, [what, *values])) + "\\n", end="", flush=True)
def draw(generator=None):
    return torch.rand((), generator=generator).item(), random.random(), np.random.rand()
plain_load, plain_item, plain_model, plain_count = (
    load_data, Synthetic.__getitem__, build_model, count_correct
)
def load_data(args):
    tell("loads", os.getpid(), *draw())
    return plain_load(args)
def __getitem__(images, i):
    if i % 50 == 0:
        tell("worker", os.getppid(), *draw())
    return plain_item(images, i)
Synthetic.__getitem__ = __getitem__
class Norm(nn.BatchNorm2d):
    def train(self, mode=True):  # an epoch begins
        for generator in (torch.cuda.default_generators or [None]) if mode else ():
            tell("begins", *draw(generator))
        return super().train(mode)
def build_model(args, classes):
    model = plain_model(args, classes)
    model.conv1.register_forward_pre_hook(tell_format)
    return nn.Sequential(Norm(3), model)
def tell_format(layer, inputs):
    tensors = layer.weight, inputs[0]
    tell("channels", any(x.is_contiguous(memory_format=torch.channels_last) for x in tensors))
def count_correct(model, *words):
    tell("holds", [buffer.double().sum().item() for buffer in model.buffers()])
    return plain_count(model, *words)
"""
TWO_GPUS = """
torch.cuda.default_generators = torch.Generator(), torch.Generator()
torch.accelerator.device_count = lambda: 2
"""


@pytest.mark.parametrize("name", some_fast(SMALL, "ddp_torchrun"))
def test_random_numbers(name):
    """They differ by epoch, rank and GPU, and in the loaders' workers, which are forks, also in a
    resumed run. What load_data draws, such as a split, is the same on all ranks and in all lives;
    so are batch norm's averages on all ranks. The first convolution is in channels_last."""
    text, gpus = "", 2 if name in ("dp", "ddp_multigpu_proc") else 1
    for last in 1, 2:
        flags = ["--workers", 1, "--resume", "--epochs", last]
        text += run(name, "out", *flags, more=DRAWS + (TWO_GPUS if gpus == 2 else ""))
    told = {"loads": [], "worker": [], "begins": [], "channels": [], "holds": []}
    for what, values in re.findall(rf"^({'|'.join(told)}) (.*)", text, re.M):
        told[what].append(values.split())
    count = 2 * COUNTS[name]
    assert len(told["loads"]) == count and len({(*drawn,) for _, *drawn in told["loads"]}) == 1
    assert {parent for parent, *_ in told["worker"]} == {pid for pid, *_ in told["loads"]}
    assert len(told["worker"]) >= 24 and len(told["begins"]) == count * gpus, text
    for draws in [drawn for _, *drawn in told["worker"]], told["begins"]:
        for numbers in zip(*draws):  # of torch, Python and numpy
            assert len(set(numbers)) == len(numbers), text
    held = [" ".join(values) for values in told["holds"]]
    assert len(held) == count and len(set(held)) == 2, text
    assert told["channels"] and all(told == ["True"] for told in told["channels"]), text


# ---- Killed, and resumed -------------------------------------------------------------------------
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


@pytest.mark.parametrize("name", some_fast([SMALL[0], *DISTRIBUTED], "single"))
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


@pytest.mark.parametrize("name", some_fast(KINDS, "single"))
def test_resumed_with_other_flags_or_classes(data, name):
    """Another --lr takes effect; other classes are refused, as the labels would be permuted. val/
    is taken where there is no test/."""
    shutil.copytree(data / "pictures", "pictures")
    Path("pictures/test").rename("pictures/val")
    flags = ["--dataset", "pictures", "--resume", "--epochs"]
    text = run(name, "out", *flags, 1)
    assert "96 training images, 3 test images, 3 classes: ['a', 'b', 'c']; " in text, text
    before = weights("out")
    run(name, "out", *flags, 2, "--lr", 0)
    assert same(weights("out"), before)
    for part in "train", "val":
        Path("pictures", part, "a").rename(Path("pictures", part, "\u0430"))  # Cyrillic
    before = content("out")
    text = run(name, "out", *flags, 3, status=1)
    other = r"'\\u0430'"
    assert re.search(rf"out/\S+ has other classes: {{('a', {other}|{other}, 'a')}}\n", text), text
    assert content("out") == before


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
@pytest.mark.parametrize("name", ["ddp_torchrun", "ddp_spawn", "fsdp2"])
def test_ranks_end_with_their_parent(data, name):
    """After kill -9 of what has started them, by the command that a user types, and with nothing
    but the script; also in a shell script's background jobs, which ignore SIGINT, by which torch
    tells the children of spawn."""
    path = shutil.copy(script(name), ".")
    start = [*helpers.TORCHRUN, "--standalone", "--nproc-per-node", 2, path]
    if name == "ddp_spawn":
        start = [sys.executable, path, "--nproc-per-node", 2]
    flags = ["--dataset", data / "pictures", "--workers", 1, "--batch-size", 60]
    words = [*start, *flags, "--epochs", 99999]
    job = Cold(["sh", "-c", '"$@" & echo "pid $!"; wait', "sh", *words], "log")
    wait_for("epoch 1: ", job)
    [pid] = re.findall(r"^pid (\d+)", job.log.read_text(), re.M)
    os.kill(int(pid), signal.SIGKILL)
    assert wait_until(lambda: not helpers.marked(), 60), logs([job])
    says = ["torchrun is gone", "the process that started this one was killed"]
    assert says[name == "ddp_spawn"] in job.log.read_text()
    assert any(Path("runs", name).iterdir())


# ---- What is refused -----------------------------------------------------------------------------
SAVED = ["checkpoint.pt", "model.pt", "epoch-3/.metadata", "checkpoint-1-20/.metadata"]


@pytest.mark.parametrize("name", SMALL)
def test_runs_are_kept(monkeypatch, refused, name):
    """Nothing overwrites a run, and none but its own script's is resumed, if it is not damaged: by
    a flipped bit in the weights, which torch.load does not notice, or without its end."""
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    own = "epoch-3/.metadata" if name == "fsdp2" else "checkpoint.pt"
    for saved in SAVED:
        Path("kept", saved).parent.mkdir(parents=True)
        Path("kept", saved).write_text("precious")
        says = "kept exists: add --resume (also to start), or change --output"
        refused(says, name, *FLAGS, "kept")
        if saved != own:
            says = "kept has the run of another script: use another --output"
            refused(says, name, *FLAGS, "kept", "--resume")
        shutil.rmtree("kept")
    if name != "fsdp2":
        Path("out").mkdir()
        torch.save(torch.ones(1000), "out/checkpoint.pt")
        whole = Path("out/checkpoint.pt").read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for damaged in flipped, whole[:-100]:
            Path("out/checkpoint.pt").write_bytes(damaged)
            says = "out/checkpoint.pt is damaged: restore a copy, or start over in another --output"
            refused(says, name, *FLAGS, "out", "--resume")


@pytest.mark.parametrize("name", SMALL)
def test_started_in_a_wrong_way(monkeypatch, refused, name):
    """Without torchrun, or with it where it does not belong; machines that cannot find each other;
    a batch that does not divide. --resume, too, writes nothing then."""
    flags = [*FLAGS, "out", "--resume"]
    if name in ("ddp_torchrun", "fsdp2"):
        left_over = ["RANK=0", "WORLD_SIZE=2", "WORLD_SIZE=", "LOCAL_RANK=0"]
        for place in [*left_over, "WORLD_SIZE=2"]:  # before the last one, it is not complete
            refused("start it with torchrun --standalone --nproc-per-node gpu", name)
            monkeypatch.setenv(*place.split("="))
    if name in ("single", "dp"):
        for variable in "WORLD_SIZE", "SLURM_STEP_NUM_TASKS":  # torchrun, or srun -n 2 python
            with mock.patch.dict(os.environ, {variable: "2"}):
                refused(f"{variable} is 2: start python once, or unset {variable}", name, *flags)
    else:
        count = {"ddp_spawn": ["--nproc-per-node", 2], "ddp_multigpu_proc": ["--nnodes", 2]}
        says = "--batch-size must be a multiple of the 2 processes"
        refused(says, name, *flags, "--batch-size", 63, *count.get(name, []))
    if name in ("ddp_spawn", "ddp_multigpu_proc"):
        refused("several machines need --init-method", name, *flags, "--nnodes", 2)
        refused("--node-rank 2: the 2 machines", name, *flags, "--nnodes", 2, "--node-rank", 2)
    assert not Path("out").exists()


FOLDERS = {  # of classes, and what is said
    "train/a train/b test/a test/.b": "classes in only one of train/ and test/: ['.b', 'b']",
    "train/a train/b val/a val/\u0430": r"only one of train/ and val/: ['b', '\u0430']",
    "train/all test/all": "train/ needs a folder per class, not only all",
    "train/a train/b": "no folder images/test or val: move a tenth of each class there",
}


def test_folders_that_are_wrong(refused):
    """A class has another name in test/, or one that looks the same; all are a level too deep;
    there is no test/. Nothing is written."""
    for classes, says in FOLDERS.items():
        for name in classes.split():
            Path("images", name).mkdir(parents=True)
            Path("images", name, "1.png").touch()
        refused(f"{says}\n", "single", *FLAGS, "out", "--dataset", "images")
        shutil.rmtree("images")
    assert not Path("out").exists()


TAKEN = """
plain = load_data
def load_data(args):  # meanwhile, another run starts in this folder
    if not args.output.exists():
        args.output.mkdir()
        (args.output / "checkpoint.pt").write_text("precious")
    return plain(args)
"""


@pytest.mark.parametrize("name", some_fast(KINDS, "single"))
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


ELSEWHERE = """
if os.environ["RANK"] == "1":  # its machine has a disk of its own
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
"""


@pytest.mark.parametrize("name", some_fast(["ddp_torchrun", "fsdp2"], "ddp_torchrun"))
def test_ranks_that_differ(name):
    """In their flags, or in the checkpoint that they find: both end in a line, and nothing is
    written. Only what belongs to a machine may differ."""
    run(name, "out", "--epochs", 1, processes=1)
    before = content("out")
    flags = [*FLAGS, "new", "--epochs", 0]

    def other_lr(rank):
        return [*flags, "--lr", 0.1] if rank == 1 else flags

    def own_workers(rank):
        return [*flags, "--workers", 1, "--output", "mine"] if rank == 1 else flags

    resumed = [*FLAGS, "out", "--resume"]
    runs = other_lr, resumed, own_workers
    lr, checkpoint, allowed = together(*runs, path=name, more=FEW + ELSEWHERE)
    says = "--lr is 0.03 on rank 0 and 0.1 on rank 1: start all machines with the same flags\n"
    assert lr.count(says) == 2, lr
    says = "the machines see different files in synthetic or out: use a shared disk (first epoch: "
    assert checkpoint.count(f"{says}1 on rank 0 and 0 on rank 1)\n") == 2, checkpoint
    assert allowed.count("starts with epoch 0\n") == 1 and content("out") == before, allowed


OTHER = {  # what one rank alone has, and what is said
    "--lr is 0.1 on rank 0 and 0.2 on rank 1: start all machines with": {"lr": 0.2},
    "first epoch: 1 on rank 0 and 2 on rank 1": {"first_epoch": 2},
    "classes: 2 on rank 0 and 1 on rank 1": {"classes": "a"},
    "class 1: 'b' on rank 0 and 'c' on rank 1": {"classes": "ac"},
    "training images: 96 on rank 0 and 95 on rank 1": {"train_count": 95},
    "test images: 3 on rank 0 and 2 on rank 1": {"test_count": 2},
}


def test_what_ranks_compare(monkeypatch):
    """Each flag, and all that they find."""
    check_same = runpy.run_path(str(script("ddp_torchrun")))["check_same"]
    ranks = []

    def all_gather_object(everyone, own):
        ranks.append(own)
        everyone[:] = ranks

    def check(lr=0.1, first_epoch=1, classes="ab", train_count=96, test_count=3):
        args = SimpleNamespace(lr=lr, dataset="synthetic", output="out")
        check_same(args, first_epoch, list(classes), train_count, test_count)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    for says, other in OTHER.items():
        ranks.clear()
        check()
        with pytest.raises(SystemExit, match=re.escape(says)):
            check(**other)


@pytest.mark.slow
def test_shards_need_a_shared_disk():
    """A checkpoint of train_fsdp2.py is written by all ranks."""
    jobs = begin("fsdp2", "new", "--epochs", 1, more=ELSEWHERE)
    wait_for("the machines have no shared disk for new", *jobs)
    kill_all(jobs)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_timeout(monkeypatch, name):
    """Of half an hour, on GPUs too, where torch has ten minutes, or of --timeout; and for a loader
    worker that hangs, for which torch waits for ever."""

    def init_process_group(*words, timeout, **options):
        raise SystemExit(timeout.total_seconds() / 60)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda main, words, count: main(0, *words))
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    for minutes, *flags in (30,), (5, "--timeout", 5):
        if not flags or name in ("ddp_spawn", "ddp_multigpu_proc"):
            with pytest.raises(SystemExit) as end:
                helpers.here(name, *FLAGS, "out", *flags, **place)
            assert end.value.code == minutes
    options = runpy.run_path(str(script(name)))["loader_options"]
    assert options(SimpleNamespace(workers=1), torch.device("cpu"), 0)["timeout"] == 1800


# ---- Data and GPUs -------------------------------------------------------------------------------
def test_cifar10(monkeypatch, capsys):
    """With what torchvision has of it, and one of its models."""

    def cifar10(folder, train, transform, download):
        found = datasets.FakeData(320 if train else 40, (3, 32, 32), 10, transform)
        found.classes = list("abcdefghij")
        return found

    monkeypatch.setattr(datasets, "CIFAR10", cifar10)
    monkeypatch.setenv("WORLD_SIZE", "")  # left over: not two processes
    flags = ["--dataset", "cifar10", "--epochs", 1, "--model", "shufflenet_v2_x0_5"]
    helpers.here("single", *FLAGS, "out", *flags)
    text = capsys.readouterr().out
    found = f"320 training images, 40 test images, 10 classes: {list('abcdefghij')}; "
    assert found in text and 0 in epochs(text), text
    assert weights("out")["fc.weight"].shape == (10, 1024)


PINNED = """
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
        for epoch in re.split(r"^(?:main:\d+ seeds.*\n)+", report, flags=re.M)[-2:]:
            assert 0 < len(re.findall(r"^main:\d+ waits", epoch, re.M)) <= 4, epoch  # of ten steps
            assert "to_device" not in "".join(re.findall(r"^.* waits.*", epoch, re.M)), epoch


# ---- The files -----------------------------------------------------------------------------------
def test_same_text():
    """Of functions, classes and flags. A default that is changed in one script is found, and --fix
    copies the text of another."""
    assert compare(GROUPS[0]) == []
    names = [set(definitions(path)) for path in GROUPS[0]]
    assert all(names[0] - own <= {"--amp"} for own in names)
    paths = [Path(shutil.copy(path, Path().resolve())) for path in GROUPS[0]]
    for old, new in {"default=0.01": "default=0.1", "(6, 16": "(6, 8"}.items():
        paths[1].write_text(paths[1].read_text().replace(old, new))
        assert len(compare(paths)) == 1, (old, new)
        compare(paths, paths[0])
        assert compare(paths) == []

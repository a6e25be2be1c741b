"""The scripts on a make-believe accelerator: what they would do on a machine with two GPUs.
Each process leaves a report of what it did with the cards: see emulated_accelerator.py."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import *

pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
STEPS = 10  # an epoch of Fashion-MNIST
FLAGS = "--augment --accumulate 2 --clip-norm 1 --lr 0.02 --log-every 4 --resume".split()


@pytest.fixture
def launch(monkeypatch):
    """Start a script on so many cards."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "emulated"))

    def launch(name, output, *flags, cards=2, **options):
        report = Path(f"{output}-report").resolve()
        report.mkdir()
        monkeypatch.setenv("EMULATED_CARDS", str(cards))
        monkeypatch.setenv("EMULATED_REPORT", str(report))
        return start(name, *flags, "--output", output, **options)

    return launch


@pytest.fixture(scope="module")
def cpu(data, tmp_path_factory):
    """A run of three epochs without cards, and in `half` what it was after step 4 of the second."""
    save = '                    saved_at = state["seconds"]\n'
    folder = tmp_path_factory.mktemp("cpu")
    flags = ["--dataset", "fashion-mnist", "--data-dir", data, *FLAGS, "--device", "cpu"]
    flags += ["--epochs", 3, "--checkpoint-minutes", 0, "--output", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = edited("single", save, f"{save}                    assert run_step < 14\n")
        run("single", *flags, path=path, status=1)
        shutil.copytree("cpu", "half")
        run("single", *flags)
    return folder


def check(output, cards, parts, steps):
    """`cards`: those that each process uses. It waits for them at progress lines alone. `steps`:
    the numbers of those that it takes, and of the one before."""
    reports = [path.read_text() for path in Path(f"{output}-report").iterdir()]
    reports = [text for text in reports if "uses card" in text]
    used = ["".join(sorted(re.findall(r"uses card (\d)", text))) for text in reports]
    assert sorted(used) == cards
    for text, own in zip(reports, used):
        assert set(re.findall(r" of card (\d)", text)) == set(own)  # each gets a seed
        told = re.split(r"^\S+ step\n", text, flags=re.M)  # what comes before and after each
        waits = [step for step, part in zip(steps, told, strict=True) if "waits" in part]
        assert waits == [step for step in steps if step % STEPS % 4 == 0], text
        allowed = {"main", "make_loader", "__iter__", "restore_checkpoint", "finish_epoch"}
        allowed.add("save_whole")
        assert set(re.findall(r"^(\w+):\d+ .*waits", text, re.M)) <= allowed
        assert set(re.findall(r"load to (.*)", text)) <= {"cpu by mmap"}
    text = "".join(reports)
    files = set(re.findall(r"save (\S+).tmp from (\w+)", text))
    assert files == {("last.pt", "emu"), ("model.pt", "cpu")}
    seeds = re.findall(r" seed (\d+) of card", text)  # a card's, in each part of a step
    assert len(set(seeds)) == len(seeds) == (len(steps) - 1) * parts * sum(map(len, cards))


# What each process uses on a machine with two cards.
TWO = dict(zip(SCRIPTS, (["0"], ["01"], ["0", "1"], ["0", "1"], ["01", "01"])))  # not FSDP2


@pytest.mark.parametrize("name", TWO)
def test_cards_agree_with_the_cpu(launch, cpu, fashion, name):
    """A checkpoint of train_single.py on the CPU goes on in each script, from within an epoch on
    two cards and on one, and from there in train_single.py on the CPU again."""
    for output in "two", "one":
        shutil.copytree(cpu / "half", output)
    flags = [*fashion, *FLAGS, "--epochs"]
    jobs = launch(name, "two", *flags, 2, processes=len(TWO[name]))
    done(jobs + launch(name, "one", *flags, 2, cards=1))
    check("two", TWO[name], parts=2, steps=range(14, 21))
    check("one", ["0"], parts=2, steps=range(14, 21))
    shutil.copytree("two", "back")
    done(launch("single", "back", *flags, 3, "--device", "cpu"))
    assert "card" not in "".join(path.read_text() for path in Path("back-report").iterdir())
    for output in "two", "one", "back":
        close(output, cpu / "cpu", 1e-5)
        assert len(metrics(output)) == (3 if output == "back" else 2)


MANY = "--augment --optimizer adam --accumulate 4 --clip-norm 0.1 --lr-schedule cosine".split()


@pytest.mark.parametrize("flags", [[], MANY, ["--amp", "--augment", "--workers", 2]])
def test_nothing_waits_between_progress_lines(launch, data, fashion, flags):
    """Nor without flags, with many, and with workers that read a folder; for two epochs."""
    if "--amp" in flags:
        fashion = ["--dataset", data / "pictures", "--batch-size", 9]
    flags = [*fashion, "--epochs", 2, "--log-every", 4, *flags]
    jobs = launch("single", "cards", *flags, cards=1)
    if "--amp" in flags:
        flags.remove("--amp")  # on the make-believe cards it changes no number
    done(jobs + launch("single", "cpu", *flags, "--device", "cpu"))
    check("cards", ["0"], parts=4 if "--accumulate" in flags else 1, steps=range(21))
    close("cards", "cpu", 1e-5)


def test_what_is_refused(launch):
    """More processes than cards, another kind of device, what several GPUs a process can't."""
    jobs, says = {}, "--device: invalid choice: 'cuda'"
    for name in SCRIPTS[:3]:
        jobs[name] = launch(name, f"{name}-cuda", "--device", "cuda"), says
    three = [launch(name, f"{name}-3", "--batch-size", 60, processes=3) for name in DDP[:2]]
    for name, job in zip(DDP, three):  # the rank without a GPU says it
        jobs[f"{name}-3"] = job[-1:], "more processes than the 2 GPUs"
    jobs["amp"] = launch(DDP[2], "amp", "--amp"), "do not work with several GPUs in one process"
    path = edited(DDP[2], '== "xpu"', '== "emu"')
    jobs["xpu"] = launch(DDP[2], "xpu", path=path), "several XPUs: DataParallel is for CUDA alone"
    for name in DDP:
        flags = "--sync-bn", "--compile"
        job = launch(name, f"{name}-both", *flags, cards=1)
        jobs[f"{name}-both"] = job, "--sync-bn works on GPUs only, and not with --compile"
    for job, says in jobs.values():
        assert says in done(job, 2)
    kill_all(three[1])  # where torchrun would

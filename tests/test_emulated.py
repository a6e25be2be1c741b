"""The five scripts on a make-believe accelerator: what they would do on a machine with two GPUs.
Each process leaves a report of what it did with the cards: see emulated_accelerator.py."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import *

LACKS = "the make-believe accelerator needs a newer torch than 2.9, or another part of it is gone"
pytest.importorskip("emulated_accelerator", reason=LACKS, exc_type=ImportError)
STEPS = 10  # an epoch of Fashion-MNIST
SPAWN = "torch.multiprocessing.spawn(main, (world_size, args), args.nproc_per_node"
FORK = SPAWN.replace(".spawn(", ".start_processes(") + ', start_method="fork"'
FLAGS = "--augment --accumulate 2 --clip-norm 1 --lr 0.02 --log-every 4 --resume".split()


@pytest.fixture
def launch(monkeypatch):
    """Start a script on so many cards, `alone` with nothing but forks: without torchrun, or by
    spawn without a new Python, which take seconds to start."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "emulated"))

    def launch(name, output, *flags, cards=2, processes=1, alone=False, path=None):
        report = Path(f"{output}-report").resolve()
        report.mkdir()
        environment = {"EMULATED_CARDS": cards, "EMULATED_REPORT": report, "RANK": 0}
        environment |= {"WORLD_SIZE": 1, "LOCAL_RANK": processes - 1, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "test"}
        for key, value in environment.items():
            monkeypatch.setenv(key, str(value))
        flags = [*flags, "--output", output]
        if alone and name == "ddp_torchrun":
            return [Warm(script(name), flags, f"{output}.log")]
        if alone and name == "ddp_spawn":
            path = edited(name, SPAWN, FORK)
        return start(name, *flags, processes=processes, path=path)

    return launch


def done(jobs, status=0):
    statuses, text = finish(jobs)
    assert set(statuses) == {status}, text
    return text


@pytest.fixture(scope="module")
def cpu(data, tmp_path_factory):
    """A run of three epochs without cards, and in `cpu-1` what it was after the first."""
    folder = tmp_path_factory.mktemp("cpu")
    flags = ["--dataset", "fashion-mnist", "--data-dir", data, *FLAGS, "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("single", *flags, "--output", "cpu", "--epochs", 1)
        shutil.copytree("cpu", "cpu-1")
        run("single", *flags, "--output", "cpu", "--epochs", 3)
    return folder


def check(output, cards, parts, epochs=1):
    """`cards`: those that each process uses. It waits for them at progress lines alone."""
    reports = [path.read_text() for path in Path(f"{output}-report").iterdir()]
    reports = [text for text in reports if "uses card" in text]
    used = [sorted(re.findall(r"uses card (\d)", text)) for text in reports]
    assert sorted(used) == cards
    for text, own in zip(reports, used):
        assert sorted(set(re.findall(r" of card (\d)", text))) == own  # each gets a seed
        steps = re.split(r"^\S+ step\n", text, flags=re.M)  # what comes before and after each
        waits = [i for i, part in enumerate(steps) if "waits" in part]
        assert waits == [i for i in range(epochs * STEPS + 1) if i % STEPS % 4 == 0], text
        comprehensions = {"<listcomp>", "<dictcomp>", "<genexpr>"}  # functions until Python 3.11
        allowed = {"main", "make_loader", "__iter__", "save_whole"} | comprehensions
        assert set(re.findall(r"^(\S+):\d+ .*waits", text, re.M)) <= allowed
        assert set(re.findall(r"load to (\w+)", text)) <= {"cpu"}
    text = "".join(reports)
    files = set(re.findall(r"save (\S+).tmp from (\w+)", text))
    assert files == {("last.pt", "emu"), ("model.pt", "cpu")}
    seeds = re.findall(r" seed (\d+) of card", text)  # a card's, in each part of a step
    assert len(set(seeds)) == len(seeds) == epochs * STEPS * parts * sum(map(len, cards))


TWO = {  # what each process uses on a machine with two cards
    "single": [["0"]],
    "dp": [["0", "1"]],
    "ddp_spawn": [["0"], ["1"]],
    "ddp_torchrun": [["0"], ["1"]],
    "ddp_multigpu_proc": [["0", "1"], ["0", "1"]],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_cards_agree_with_the_cpu(launch, cpu, fashion, name):
    """From a checkpoint of the CPU on two cards and on one, and from there on the CPU again."""
    for output in "two", "one":
        shutil.copytree(cpu / "cpu-1", output)
    flags = [*fashion, *FLAGS, "--epochs"]
    jobs = launch(name, "two", *flags, 2, processes=len(TWO[name]))
    done(jobs + launch(name, "one", *flags, 2, cards=1, alone=True))
    check("two", TWO[name], parts=2)
    check("one", [["0"]], parts=2)
    shutil.copytree("two", "back")
    done(launch(name, "back", *flags, 3, "--device", "cpu", alone=True))
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
    check("cards", [["0"]], parts=4 if "--accumulate" in flags else 1, epochs=2)
    close("cards", "cpu", 1e-5)


def test_replicas_drop_units_of_their_own(launch, fashion):
    """With DataParallel, and the same ones again in another run."""
    old = "        x = F.relu(self.fc1(x.flatten(1)))\n"
    drop = "        mask = F.dropout(torch.ones_like(x[0]), 0.5, self.training)\n"
    tell = '        print(f"mask {x.card} {mask.inner.tolist()}\\n", end="")\n'
    path, masks = edited("dp", old, f"{old}{drop}{tell}        x = x * mask\n"), []
    flags = [*fashion, "--epochs", 1, "--batch-size", 160]
    jobs = [launch("dp", output, *flags, path=path) for output in ("first", "again")]
    for job in jobs:
        lines = set(re.findall(r"^mask (.* 0\.0, .*)$", done(job), re.M))
        masks.append([{line[2:] for line in lines if line[0] == card} for card in "01"])
    assert masks[0] == masks[1] and not masks[0][0] & masks[0][1]
    assert [len(of_card) for of_card in masks[0]] == [4, 4]  # steps


def test_what_is_refused(launch):
    """More processes than cards, another kind of device, autocast in DataParallel."""
    for name in SCRIPTS:
        text = done(launch(name, f"{name}-cuda", "--device", "cuda", alone=True), 2)
        assert "--device: invalid choice: 'cuda'" in text
    for name in DDP[:2]:
        text = done(launch(name, f"{name}-3", "--batch-size", 60, processes=3, alone=True), 2)
        assert "more processes than the 2 GPUs" in text
    text = done(launch("ddp_multigpu_proc", "amp", "--amp"), 2)
    assert "do not work with several GPUs in one process" in text

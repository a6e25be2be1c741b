"""The scripts on a make-believe accelerator: what they would do on a machine with two GPUs.
Each process leaves a report of what it did with the cards: see emulated_accelerator.py."""

import re
from pathlib import Path

import pytest
from helpers import SCRIPTS, close, run, train

pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
FLAGS = ["--accumulate", 2, "--clip-norm", 1, "--lr", 0.02, "--log-every", 4, "--resume"]


def launch(monkeypatch, name, output, *flags, cards=2, **options):
    """Start a script on so many cards, and wait for its end."""
    report = Path(f"{output}-report").resolve()
    report.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "emulated"))
    monkeypatch.setenv("EMULATED_CARDS", str(cards))
    monkeypatch.setenv("EMULATED_REPORT", str(report))
    run(name, *flags, "--output", output, **options)


def check(output, cards, steps):
    """`cards`: those that each process uses. It waits for them at progress lines alone. `steps`:
    the numbers of those that it takes, and of the one before. Returns the seeds between these."""
    reports = [path.read_text() for path in Path(f"{output}-report").iterdir()]
    reports = [text for text in reports if "uses card" in text]
    used = ["".join(sorted(re.findall(r"uses card (\d)", text))) for text in reports]
    assert sorted(used) == cards
    seeds = []
    for text in reports:
        told = re.split(r"^\S+ step\n", text, flags=re.M)  # what comes before and after each
        waits = [step for step, part in zip(steps, told, strict=True) if "waits" in part]
        assert waits == [step for step in steps if step % 10 % 4 == 0], text  # 10 an epoch
        allowed = {"main", "make_loader", "__iter__", "load_checkpoint", "finish_epoch", "save"}
        assert set(re.findall(r"^(\w+):\d+ .*waits", text, re.M)) <= allowed
        assert set(re.findall(r"load to (.*)", text)) <= {"cpu by mmap"}
        for part in told:  # of each card, the last one
            seeds += dict(re.findall(r"seeds card (\d) with (\d+)", part)).values()
    return seeds


# What each process uses on a machine with two cards.
TWO = dict(zip(SCRIPTS, (["0"], ["01"], ["0", "1"], ["0", "1"], ["01", "01"])))  # not FSDP2


@pytest.mark.parametrize("name", TWO)
def test_cards_agree_with_the_cpu(monkeypatch, fashion, name):
    """A checkpoint of train_single.py on the CPU goes on in each script on two cards, and from
    there in train_single.py on the CPU again. Each card has a seed of its own from one progress
    line to the next."""
    flags, cards = [*fashion, *FLAGS, "--epochs"], TWO[name]
    train(*flags, 1, "--output", "out")
    launch(monkeypatch, name, "out", *flags, 2, processes=len(cards))
    seeds = check("out", cards, steps=range(10, 21))
    assert len(set(seeds)) == len(seeds) == 3 * len("".join(cards)), seeds
    for output in "out", "cpu":
        train(*flags, 3, "--output", output)
    close("out", "cpu", 1e-5)


MANY = "--augment --optimizer adam --accumulate 4 --clip-norm 0.1 --lr-schedule cosine".split()


@pytest.mark.parametrize("flags", [[], MANY, ["--augment", "--workers", 2]])
def test_nothing_waits_between_progress_lines(monkeypatch, data, fashion, flags):
    """Nor without flags, with many, and with workers that read a folder; for two epochs."""
    if "--workers" in flags:
        fashion = ["--dataset", data / "pictures", "--batch-size", 9]
    flags = [*fashion, "--epochs", 2, "--log-every", 4, *flags]
    launch(monkeypatch, "single", "cards", *flags, cards=1)
    train(*flags, "--output", "cpu")
    check("cards", ["0"], steps=range(21))
    close("cards", "cpu", 1e-5)

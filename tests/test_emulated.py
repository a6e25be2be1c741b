"""complete/train.py on a make-believe accelerator: what it would do on a machine with two GPUs.
Each process leaves a report of what it did with the cards: see emulated_accelerator.py."""

import inspect
import re
from pathlib import Path

import pytest
import train as script
from helpers import COMPLETE, close, run, some_fast, train

pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
FLAGS = ["--accumulate", 2, "--clip-norm", 1, "--lr", 0.02, "--log-every", 4, "--resume"]
STEPS = """
plain, plain_loader = build_optimizer, DataLoader
def build_optimizer(*words):
    optimizer, scheduler = plain(*words)
    tell = __import__("emulated_accelerator").tell
    optimizer.register_step_post_hook(lambda *_: tell("updated"))
    return optimizer, scheduler
def DataLoader(*words, **options):  # as for CUDA
    return plain_loader(*words, **options | {"pin_memory": True})
"""


def launch(monkeypatch, output, *flags, cards=2, more="", **options):
    """Start the script on so many cards, and wait for its end."""
    report = Path(f"{output}-report").resolve()
    report.mkdir()
    monkeypatch.setenv("EMULATED_CARDS", str(cards))
    monkeypatch.setenv("EMULATED_REPORT", str(report))
    run(COMPLETE, *flags, "--output", output, more=STEPS + more, **options)


def lines_of(function):
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


def check(output, cards, steps):
    """`cards`: those that each process uses. It waits for them at progress lines alone, and after
    an epoch's evaluation. `steps`: the numbers of those that it takes, and of the one before.
    Returns the seeds between these."""
    reports = [path.read_text() for path in Path(f"{output}-report").iterdir()]
    reports = [text for text in reports if "uses card" in text]
    used = ["".join(sorted(re.findall(r"uses card (\d)", text))) for text in reports]
    assert sorted(used) == cards
    seeds = []
    for text in reports:
        # What comes before and after each step. Before it loads, a run takes one more.
        told = re.split(r"^\S+ updated\n", text, flags=re.M)[-len(steps) :]
        waits = [step for step, part in zip(steps, told, strict=True) if "waits" in part]
        assert waits == [step for step in steps if step % 10 % 4 == 0], text  # 10 an epoch
        for part in told[1:]:
            places = [int(line) for line in re.findall(r"^\S+:(\d+) waits", part, re.M)]
            assert not set(places) & set(lines_of(script.prepare)), text
            own = [place for place in places if place in lines_of(script.evaluate)]
            assert len(own) <= 3, text  # one for each of the sums
        for part in told:  # of each card, the last one
            seeds += dict(re.findall(r"seeds card (\d) with (\d+)", part)).values()
    return seeds


def test_cards_agree_with_the_cpu(monkeypatch, fashion):
    """A checkpoint from the CPU goes on in two processes, each with a card of its own, and from
    there on the CPU again. Each has a seed of its own from one progress line to the next."""
    flags = [*fashion, *FLAGS, "--epochs"]
    train(*flags, 1, "--output", "out")
    launch(monkeypatch, "out", *flags, 2, processes=2)
    seeds = check("out", ["0", "1"], steps=range(10, 21))
    assert len(set(seeds)) == len(seeds) == 3 * 2, seeds
    for output in "out", "cpu":
        train(*flags, 3, "--output", output)
    close("out", "cpu", 1e-5)


MANY = "--augment --optimizer adamw --weight-decay 0.1 --accumulate 4 --clip-norm 0.1".split()
MANY += ["--lr-schedule", "cosine"]
FOLDER = ["--workers", 2, "--augment", "--model", "mlp"]


@pytest.mark.parametrize("flags", some_fast([MANY, FOLDER], MANY), ids=["many", "folder"])
def test_nothing_waits_between_progress_lines(monkeypatch, data, fashion, flags):
    """With many flags, and with few and workers that read a folder; for two epochs."""
    if "--workers" in flags:
        fashion = ["--dataset", data / "pictures", "--batch-size", 9]
    flags = [*fashion, "--epochs", 2, "--log-every", 4, *flags]
    launch(monkeypatch, "cards", *flags, cards=1, processes=0)
    train(*flags, "--output", "cpu")
    check("cards", ["0"], steps=range(21))
    close("cards", "cpu", 1e-5)


ASKED = """
plain_clock, plain_broadcast = SaveClock.__init__, dist.broadcast
def __init__(clock, *words, **options):
    plain_clock(clock, *words, **options)
    clock.copy = clock.copy.pin_memory()  # as for CUDA
def broadcast(*words):
    __import__("emulated_accelerator").tell("asks")
    plain_broadcast(*words)
SaveClock.__init__, dist.broadcast = __init__, broadcast
"""


def test_nothing_waits_as_rank_0_is_asked(monkeypatch, fashion):
    """Whether a checkpoint is due, twice until the progress line: then it is known that steps are
    fast."""
    flags = [*fashion, "--batch-size", 16, "--epochs", 1, "--log-every", 40]
    launch(monkeypatch, "cards", *flags, processes=2, more=ASKED)
    for path in Path("cards-report").iterdir():
        told = re.split(r"^\S+ updated\n", path.read_text(), flags=re.M)[-41:]
        if len(told) == 41:
            assert [i for i, part in enumerate(told) if "asks" in part] == [10, 20], told
            assert [i for i, part in enumerate(told) if "waits" in part][1:] == [40], told

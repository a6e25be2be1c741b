"""complete/train.py on a make-believe accelerator: what it would do on a machine with two GPUs.
Each process leaves a report of what it did with the cards: see emulated_accelerator.py."""

import inspect
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import loaders
import pytest
import torch
import train as script
from helpers import COMPLETE, close, run, some_fast, train

pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
FLAGS = ["--accumulate", 2, "--clip-norm", 1, "--lr", 0.02, "--log-every", 4, "--resume"]


def launch(monkeypatch, output, *flags, cards=2, **options):
    """Start the script on so many cards, and wait for its end."""
    report = Path(f"{output}-report").resolve()
    report.mkdir()
    monkeypatch.setenv("EMULATED_CARDS", str(cards))
    monkeypatch.setenv("EMULATED_REPORT", str(report))
    run(COMPLETE, *flags, "--output", output, **options)


def lines_of(function):
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


def check(output, cards, steps):
    """`cards`: those that each process uses. It waits for them at progress lines alone, and after
    an epoch's evaluation. `steps`: the numbers of those that it takes, and of the one before.
    Returns the seeds of the cards."""
    reports = [path.read_text() for path in Path(f"{output}-report").iterdir()]
    reports = [text for text in reports if "uses card" in text]
    used = ["".join(sorted(re.findall(r"uses card (\d)", text))) for text in reports]
    assert sorted(used) == cards
    seeds = []
    for text in reports:
        # What comes before and after each step.
        told = re.split(r"^\S+ updated\n", text, flags=re.M)[-len(steps) :]
        waits = [step for step, part in zip(steps, told, strict=True) if "waits" in part]
        assert waits == [step for step in steps if step % 10 % 4 == 0], text  # 10 an epoch
        for part in told[1:]:
            places = [int(line) for line in re.findall(r"^\S+:(\d+) waits", part, re.M)]
            assert not set(places) & set(lines_of(script.prepare)), text
            own = [place for place in places if place in lines_of(script.evaluate)]
            assert len(own) <= 3, text  # one for each of the sums
        seeds += re.findall(r"seeds card \d with (\d+)", text)
    return seeds


def test_cards_agree_with_the_cpu(monkeypatch, fashion):
    """A checkpoint from the CPU goes on in two processes, each with a card of its own, and from
    there on the CPU again. Each has seeds of its own for each step, and each batch."""
    flags = [*fashion, *FLAGS, "--epochs"]
    train(*flags, 1, "--output", "out")
    launch(monkeypatch, "out", *flags, 2, processes=2)
    seeds = check("out", ["0", "1"], steps=range(10, 21))
    # Two for each of two micro-batches in ten steps; the data's and the weights' are the same.
    assert len(set(seeds)) == 2 * 2 * 2 * 10 + 2 and len(seeds) == len(set(seeds)) + 2, seeds
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


CLOCK = """
import run
from types import SimpleNamespace
clock, plain_prepare = [0.0], prepare
run.time = SimpleNamespace(perf_counter=lambda: clock[0])
def prepare(args, batch, device, train=False):
    clock[0] += train  # a step takes a second
    return plain_prepare(args, batch, device, train)
"""


def test_nothing_waits_between_saves(monkeypatch, fashion):
    """A new run's first save is soon; when the next will be is known from then on, by rank 0's
    clock. On two machines with a card each."""
    flags = [*fashion, "--batch-size", 16, "--epochs", 1, "--log-every", 40]
    flags += ["--checkpoint-minutes", 0.25]
    launch(monkeypatch, "cards", *flags, processes=2, gpus=1, cards=1, more=CLOCK)
    for path in Path("cards-report").iterdir():
        told = re.split(r"^\S+ updated\n", path.read_text(), flags=re.M)[-41:]
        assert "uses card 1" not in path.read_text()
        if len(told) == 41:
            assert [i for i, part in enumerate(told) if "waits" in part][1:] == [10, 25, 40], told


def test_copies_on_a_stream_of_their_own(monkeypatch):
    """A batch is fetched on it before the one before is used, once the one before that has been
    used; and it is used only when it is there."""
    told, on_stream = [], []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def stream(stream):
        on_stream.append(stream.name)
        yield
        on_stream.pop()

    def batches():
        for i in range(3):
            told.append(f"fetch {i} on {on_stream}")
            yield i

    module = SimpleNamespace(stream=stream, current_stream=lambda: Stream("main"))
    monkeypatch.setattr(loaders, "side_stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for i in loaders.fetch_ahead(batches(), torch.device("cuda", 0)):
        told.append(f"use {i}")
    ask, there = "copies waits for main", "main waits for copies"
    fetch = [f"fetch {i} on ['copies']" for i in range(3)]
    wanted = [ask, fetch[0], there, ask, fetch[1], "use 0", there, ask, fetch[2], "use 1", there]
    assert told == [*wanted, ask, "use 2"]

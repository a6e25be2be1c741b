"""complete/ is killed and resumed: bit-identical, each epoch once, on any number of processes; when
it saves; and two runs in one folder, of which one ends."""

import os
import random
import shutil
from pathlib import Path

import files as saving
import helpers
import numpy as np
import pytest
import run as running
import torch
import train as script
from helpers import (
    COMPLETE,
    altered,
    checkpoint,
    close,
    content,
    files,
    kill_all,
    leaves,
    logs,
    metrics,
    place,
    same,
    some_fast,
    start,
    together,
    train,
    wait_until,
    weights,
)

OFTEN = ["--log-every", 4, "--checkpoint-minutes", 0]  # a checkpoint every 4 steps
MODEL = """
def build_model(args, inputs, classes):
    convolution = nn.Conv2d(inputs.shape[1], 4, 5, 3)
    head = nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 10 * 10, classes)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), *head)
"""
STATE = """
def add_state(model, optimizer):  # a second optimizer, and an average of the weights
    second = torch.optim.Adam([p for p in model.parameters() if p.ndim == 1], 1e-4)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer.register_step_post_hook(lambda *_: (second.step(), average.update_parameters(model)))
    return {"second": second, "average": average}
"""


def same_run(output, other):
    """Two runs ended bit-identical, with the same files and losses."""
    names = ["best.pt", "checkpoint.pt", "metrics.csv", "model.pt"]
    assert files(output) == files(other) == names
    a, b = [[list(row.values())[:-3] for row in metrics(folder)] for folder in (output, other)]
    assert [row[0] for row in a] == [*range(1, len(b) + 1)]
    assert sum(a, []) == pytest.approx(sum(b, []), rel=1e-6)
    for read in checkpoint, weights, lambda output: weights(output, "best.pt"):
        both = read(output), read(other)
        assert both[0].keys() == both[1].keys()
        for saved in both:
            saved.pop("progress", None)  # has times
        for a, b in zip(*map(leaves, both), strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b, read


# ---- Killed --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_killed_at_random(fashion):
    """All processes by SIGKILL, twice, between any two operations. Dropout, random crops, batch
    norm's averages, and what a user has put into `state`, go on too."""
    flags = [*fashion, *OFTEN, "--epochs", 4, "--batch-size", 32, "--augment", "--lr", 0.01]
    flags += ["--lr-schedule", "cosine", "--resume", "--output"]
    path = altered(
        COMPLETE, '"scaler": scaler}', '"scaler": scaler, **add_state(model, optimizer)}'
    )
    more = MODEL + STATE
    progress = 0, 0
    for _ in range(2):
        step = progress[0] * 20 + progress[1] + random.randrange(4, 33, 4)
        jobs = start(path, *flags, "out", more=more, processes=2)
        helpers.wait_for(f"epoch {(step - 1) // 20 + 1}/4 step {(step - 1) % 20 + 1}/", *jobs)
        kill_all(jobs)
        progress = place("out")
        assert not Path("out/model.pt").exists()
    text, _ = together([*flags, "out"], [*flags, "whole"], path=path, more=more)
    assert "out: {} epochs and {} steps are done".format(*progress) in text
    same_run("out", "whole")
    assert checkpoint("out")["second"]["state"]


@pytest.mark.parametrize("flag", some_fast(["--resume", "--overwrite"], "--resume"))
def test_killed_at_each_moment_of_a_save(data, monkeypatch, flag):
    """Before each operation on the folder, or when half of a file is written. Then model.pt, if
    there is one, is that of the checkpoint, and the run goes on to the end, where nothing is left
    over. --overwrite: another run replaces this one."""
    epochs, seed = (2, 76) if flag == "--resume" else (1, 1)
    flags = ["--dataset", data / "pictures", "--batch-size", 48, "--workers", 0]
    train(*flags, "--epochs", 1, "--output", "first")
    flags += ["--epochs", epochs, "--seed", seed, "--output"]
    train(*flags, "whole")

    def until_killed(plain, left):
        def called(*words, **options):
            if next(left, None) is not None:
                return plain(*words, **options)
            if plain is torch_save:
                content, file = words
                plain(content, file)
                file.truncate(file.tell() // 2)
            raise KeyboardInterrupt

        return called

    torch_save = torch.save
    for moment in range(100):
        output, left = f"out-{moment}", iter(range(moment))
        shutil.copytree("first", output)
        with monkeypatch.context() as patch:
            for owner, name in (os, "replace"), (os, "fsync"), (Path, "unlink"), (torch, "save"):
                patch.setattr(owner, name, until_killed(getattr(owner, name), left))
            try:
                train(*flags, output, flag)
                break  # it has come to its end
            except KeyboardInterrupt:
                pass
        saved = checkpoint(output)
        if Path(output, "model.pt").exists():
            assert same(weights(output), saved["model"])
        is_replaced = not saved or saved["flags"]["seed"] == seed
        train(*flags, output, "--resume" if is_replaced else flag)
        same_run(output, "whole")
    assert 12 < moment < 99


@pytest.mark.slow
def test_torchrun(fashion, monkeypatch):
    """A rank is killed by SIGKILL, and --max-restarts starts all again. Then torchrun is: its ranks
    end at the next progress line, or they would write beside the resumed run, which ends
    bit-identical. Without the variable about every other restart hangs until --timeout."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = [*fashion, *OFTEN, "--epochs", 6, "--batch-size", 16, "--augment", "--resume"]
    flags += ["--output"]
    place = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    job = helpers.torchrun(*place, helpers.script(COMPLETE), *flags, "out")
    for life in (1, 2):
        line = f" step {random.randrange(4, 41, 4)}/"
        wait_until(lambda: line in "".join(logs([job]).split("are done")[life:]))
        ranks = helpers.command("pgrep", "-P", job.pid, "-f", "train")
        helpers.kill(int(random.choice(ranks.split())) if life < 2 else job.pid)
    assert wait_until(lambda: not helpers.marked(), 20)
    text = logs([job])
    assert "torchrun is gone" in text and text.count("steps are done") == 2, text
    together([*flags, "out"], [*flags, "whole"])
    same_run("out", "whole")


# ---- When it saves, and what is the best ---------------------------------------------------------
@pytest.fixture
def told(monkeypatch):
    """A function after which the epochs have test losses that are higher by a thousand times these,
    in one epoch after the other."""
    plain = script.evaluate

    def told(*losses):
        following = iter(losses)

        def evaluate(args, model, loader, device):
            sums = plain(args, model, loader, device)
            if not isinstance(loader, list):  # of two samples, at the beginning
                sums["loss"] += 1000 * next(following, 0)
            return sums

        monkeypatch.setattr(script, "evaluate", evaluate)

    return told


@pytest.fixture
def saves(monkeypatch):
    """A list of the places, (epoch, step), at which runs of this test have saved."""
    found, plain = [], running.Run.save

    def save(run):
        found.append((run.progress.epoch, run.progress.step))
        plain(run)

    monkeypatch.setattr(running.Run, "save", save)
    return found


def test_saves_by_minutes(fashion, monkeypatch, saves):
    """Of a clock by which each step takes a second: a new run after ten steps, then every fifteen
    seconds, between progress lines that are further apart. A run that is resumed from there has the
    losses and weights of one that was left alone, also if `prepare` draws from numpy and Python."""
    clock = iter(range(10**6))
    seconds = [0]
    monkeypatch.setattr(running.time, "perf_counter", lambda: seconds[0] + next(clock) / 10**9)
    plain = script.prepare

    def prepare(args, batch, device, train=False):
        seconds[0] += train
        images, labels = plain(args, batch, device, train)
        noise = np.random.rand() + random.random() if train else 0
        return images + noise / 10, labels

    plain_save = saving.Files.save

    def save(files, progress):
        seconds[0] += 0.01  # which are not training
        plain_save(files, progress)

    monkeypatch.setattr(script, "prepare", prepare)
    monkeypatch.setattr(saving.Files, "save", save)
    flags = [*fashion, "--batch-size", 8, "--log-every", 1000, "--checkpoint-minutes", 0.25]
    flags += ["--epochs", 1, "--augment", "--resume", "--output"]
    train(*flags, "whole")
    assert saves == [(0, 10), (0, 25), (0, 40), (0, 55), (0, 70), (1, 0)]
    assert metrics("whole")[0]["seconds"] == pytest.approx(80, abs=1e-3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(running.Run, "end_epoch", raise_interrupt)
        train(*flags, "out")
    assert place("out") == (0, 70)
    train(*flags, "out")
    assert same(weights("out"), weights("whole"))
    close("out", "whole", 1e-6)


def raise_interrupt(*words):
    raise KeyboardInterrupt


def test_saves_the_best_and_the_last(fashion, monkeypatch, saves, told):
    """An epoch is saved if it is due, or has the lowest test loss so far, whose weights best.pt
    has, or is the last one. One that is due at an epoch's last step is saved once."""
    flags = [*fashion, "--batch-size", 320, "--output"]
    told(3, 1, 2, 1.5, 0, 2, 2)
    train(*flags, "out", "--epochs", 7)
    assert saves == [(1, 0), (2, 0), (5, 0), (7, 0)] and len(metrics("out")) == 7
    train(*flags, "five", "--epochs", 5)
    assert same(weights("out", "best.pt"), weights("five"))
    saves.clear()
    told(1, 2, 3)
    often = ["--checkpoint-minutes", 0, "--log-every", 1]
    train(*flags, "often", "--epochs", 3, *often)
    assert saves == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    saves.clear()
    told(1, 2)  # due once, in the middle of the last epoch, which is not the best
    monkeypatch.setattr(
        running.Run, "plan_save", lambda run, step: ((run.progress.epoch, step) == (1, 1), 1)
    )
    train(*flags, "middle", "--epochs", 2)
    assert saves == [(1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("name", ["checkpoint.pt", "best.pt", "metrics.csv"])
def test_best_agrees_after_a_kill(fashion, monkeypatch, told, name):
    """Killed as the second epoch, the best so far, is about to replace this file. Where the
    repeated epoch scores worse, as it may on a GPU, best.pt still has the weights of the lowest
    test loss in metrics.csv."""
    flags = [*fashion, "--batch-size", 320, "--resume", "--output"]
    known = 1 if name == "checkpoint.pt" else 2  # epochs that are saved then
    plain = saving.os.replace

    def replace(old, new):
        epochs = len(checkpoint("out")["progress"]["metrics"]) if checkpoint("out") else 0
        if Path(new).name == name and epochs == known:
            raise KeyboardInterrupt
        plain(old, new)

    told(2, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saving.os, "replace", replace)
        train(*flags, "out", "--epochs", 2)
    told(3, 3)
    train(*flags, "out", "--epochs", 3)
    losses = [row["test_loss"] for row in metrics("out")]
    assert len(losses) == 3 and (losses[1] < 10) == (known == 2)
    best = losses.index(min(losses)) + 1
    train(*flags, "again", "--epochs", best)
    assert same(weights("out", "best.pt"), weights("again"))


# ---- Another process in the same folder ----------------------------------------------------------
def meanwhile(monkeypatch, module, name):
    """As this function is called, another process replaces out/checkpoint.pt by other.pt."""
    plain = getattr(module, name)

    def replaced(*words, **options):
        Path("out").mkdir(exist_ok=True)
        Path("out/checkpoint.pt").unlink(missing_ok=True)
        Path("other.pt").rename("out/checkpoint.pt")
        return plain(*words, **options)

    monkeypatch.setattr(module, name, replaced)


@pytest.mark.parametrize("function", ["load_on_all_ranks", "evaluate", "train_epoch", "finish"])
def test_two_lives_in_one_folder(out, fashion, monkeypatch, function):
    """Of one run, as one on a node that was given up but lives: the one that finds that another has
    saved ends before it writes anything."""
    saved = checkpoint("out")
    saved["progress"]["seconds"] = 1.0  # of the same length
    torch.save(saved, "other.pt")
    wanted = {**content("out"), Path("out/checkpoint.pt"): Path("other.pt").read_bytes()}
    at_the_end = function == "finish"
    meanwhile(monkeypatch, running.Run if at_the_end else script, function)
    with pytest.raises(SystemExit, match="out/checkpoint.pt was written by another process"):
        train(*fashion, "--output", "out", "--resume", "--epochs", 2 if at_the_end else 4)
    assert content("out") == wanted


def test_two_runs_start_in_one_folder(fashion, monkeypatch):
    """While this one loads its data, the other one has written its first checkpoint."""
    Path("other.pt").write_text("precious")
    meanwhile(monkeypatch, script, "load_on_all_ranks")
    with pytest.raises(SystemExit, match="another run has just started in out"):
        train(*fashion, "--output", "out", "--resume")
    assert content("out") == {Path("out/checkpoint.pt"): b"precious"}

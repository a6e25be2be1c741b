"""The parts of ddp_check without its processes: sketches, how values fit, limits, positions, what a
rank is given, which runs it takes. Each test fails if the line that it is for is changed."""

import argparse
import os
import random
import tempfile
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from watched import forget_files

from ddp_check import command, process
from ddp_check import sketch as sketching
from ddp_check.compare import fits, sample_rules, state_rules
from ddp_check.compare.calls import Calls
from ddp_check.compare.differences import same_ray
from ddp_check.compare.file_rules import Files
from ddp_check.compare.judge import judge
from ddp_check.compare.kinds import TIMES_NOISE, limit_of, misfits
from ddp_check.compare.numbers import Variables, uneven_draws
from ddp_check.compare.printed import compare_printed
from ddp_check.compare.report import as_text
from ddp_check.compare.rules import Parameters
from ddp_check.compare.samples import remedy_by_one
from ddp_check.compare.starts import other_options, scaled_loaders
from ddp_check.compare.values import Values
from ddp_check.given import alike
from ddp_check.given.datasets import batches_of
from ddp_check.given.draws import Draws, permutation
from ddp_check.given.samples import find_order
from ddp_check.kept.made import Made
from ddp_check.notes import (
    PASS,
    Batch,
    Collective,
    Cut,
    Drawn,
    End,
    File,
    Finding,
    Notes,
    Pass,
    PassEnd,
    Printed,
    Said,
    Seen,
    Step,
)
from ddp_check.patterns import (
    divisions_behind,
    parameters_in,
    scales_in,
    seeds_in,
    sets_in_order,
    shares_in,
)
from ddp_check.runs import NothingCompared, Options
from ddp_check.seen import held
from ddp_check.seen import steps as seen_steps
from ddp_check.sketch import sketch, sketches, summary
from ddp_check.text import branch_of

TOLERANCE = 3e-4


# ---- sketches


def test_sketches():
    """Linear, of the tensor's norm, and other ones for another order of the blocks."""
    one, two = torch.randn(300, 500), torch.randn(300, 500)
    a, b, both = sketch(one), sketch(two), sketch(one + two)
    assert np.allclose(a.sums + b.sums, both.sums, atol=1e-3)
    assert np.isclose(a.norm, one.double().norm()) and a.shape == (300, 500)
    assert np.isclose(np.linalg.norm(a.sums[:-1]), a.norm, rtol=0.3)
    blocks = torch.randn(2, 1 << 16)
    assert fits.same(sketch(blocks.flatten()), [sketch(blocks.flip(0).flatten())]) > 10
    # A block that has the same sums wherever it is, unless they are shifted.
    signs = sketching.random_signs(torch.device("cpu")) * torch.arange(1 << 16) / (1 << 16)
    equal, moved = torch.stack([signs, 0 * signs]), torch.stack([0 * signs, signs])
    assert fits.same(sketch(equal.flatten()), [sketch(moved.flatten())]) > 0.5


def test_objects():
    """A class for batches is opened, not a model, nor a long list."""
    tensor, layer = torch.ones(2), nn.Linear(1, 1)
    inner = argparse.Namespace(x=tensor, all=[0] * 2000)
    found = sketching.opened([argparse.Namespace(inner=inner, layer=layer), 3, [0] * 2000])
    assert found == [{"inner": {"x": tensor, "all": None}, "layer": layer}, 3, [0] * 2000]
    assert sketching.opened(layer) is layer


def test_trees():
    """Arrays are tensors; a tree of each sample's tensors becomes a row, but not a batch's own, nor
    what has no tensors."""
    array, text = sketching.as_tensors({"all": [np.ones(2), "text"]})["all"]
    assert torch.is_tensor(array) and text == "text"
    boxes, batch = [{"boxes": torch.ones(n, 4)} for n in (1, 4)], [torch.ones(2, 3), torch.ones(2)]
    found = sketching.by_sample({"boxes": boxes}, 2)["boxes"]
    assert found.tolist() == [[4, 2], [16, 4]]
    assert sketching.by_sample(batch, 2) == batch and sketching.by_sample(boxes, 3) == boxes
    assert sketching.by_sample(["a", "b"], 2) == ["a", "b"]


def test_rows_of_a_long_batch():
    """They are noted, unlike those of many columns."""
    rows = summary(torch.ones(sketching.MANY_COLUMNS + 1, 2)).rows
    assert len(rows[0][0]) == sketching.MANY_COLUMNS + 1 and rows[1]
    assert summary(torch.ones(2, sketching.MANY_COLUMNS + 1)).rows[1] is None


def test_sketches_of_several():
    """Each is as alone; also of none, of nothing, and of half precision."""
    tensors = {"a": torch.randn(7), "b": None, "c": torch.zeros(0), "d": torch.ones(3).bfloat16()}
    found = sketches(tensors, any_order=True)
    assert found["b"] is None and found["c"].norm == 0 and found["d"].eps > 1e-3
    assert np.array_equal(found["a"].sums, sketch(tensors["a"]).sums)
    flipped = sketches({"a": tensors["a"].flip(0)}, any_order=True)["a"]
    assert fits.sorted_same(found["a"], [flipped]) == 0 < fits.same(found["a"], [flipped])


def test_not_finite():
    """A gradient with one NaN more is another one; the others still count."""
    right = torch.ones(1000)
    wrong = right.clone()
    wrong[3] = torch.nan
    assert fits.same(sketch(wrong), [sketch(torch.where(wrong.isnan(), 0, wrong))]) > 10
    assert np.isclose(sketch(wrong).norm, 999**0.5)
    assert fits.distance(sketch(wrong), sketch(wrong)) == 0


# ---- how one process's value is made up of the ranks'

ONE = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
PARTS = ONE[0::2], ONE[1::2]


def offs(way, one, ranks):
    return fits.FITS[way](summary(one), [summary(rank) for rank in ranks])


def test_fits():
    pair = PARTS[0], PARTS[1]
    mean = (pair[0] + pair[1]) / 2
    assert offs("mean", mean, pair) < 1e-5 < 0.1 < offs("mean", 2 * mean, pair)
    assert offs("sum", 2 * mean, pair) < 1e-5
    assert offs("sum", mean / 2, pair) < 1e-5  # of means that each rank divides by all, too
    assert offs("sum", mean / 3, pair) > 0.1
    assert offs("rows", ONE, PARTS) < 1e-5
    for factor in (2, 0.5):  # a loss per sample, which each rank divides by its own number
        assert offs("rows", ONE, [factor * part for part in PARTS]) < 1e-5
    assert offs("rows", ONE, [3 * part for part in PARTS]) > 0.1
    assert offs("rows", ONE, [PARTS[0], PARTS[0]]) > 0.1
    assert offs("rows", ONE.T, [part.T for part in PARTS]) < 1e-5  # of columns


def test_fit_is_unknown():
    """A batch that is padded to its longest sample; what has no numbers."""
    padded = summary(ONE), [summary(PARTS[0]), summary(PARTS[1][:, :4])]
    assert fits.fit("same rows", *padded, 1e-5) == "unknown"
    turned = summary(ONE.T), [summary(PARTS[0].T), summary(PARTS[1].T[:4])]
    assert fits.fit("same rows", *turned, 1e-5) == "unknown"
    assert fits.fit("same", None, [None], 1e-5) == "unknown"
    flat = [summary(torch.ones(n)) for n in (12, 6, 4, 12)]  # padded, then flattened
    assert fits.fit("same rows", flat[0], flat[1:3], 1e-5) == "unknown"
    assert fits.fit("same rows", flat[1], [flat[0], flat[3]], 1e-5) is None


def test_same_ray():
    gradient = torch.randn(50, 4)
    one, half, other = sketch(gradient), sketch(gradient / 2), sketch(torch.randn(50, 4))
    assert same_ray(one, half, 0.5) and not same_ray(one, half, 1) and not same_ray(one, other, 1)
    assert "a factor world_size too much in a division" in fits.meaning(0.5, 2)


def test_limits():
    """A gradient that is 1e-3 off is wrong; not if noise alone makes it 3e-4 off; a bfloat16's
    rounding is none."""
    one, other = {"w": sketch(ONE)}, {"w": sketch(ONE * 1.001)}
    assert limit_of("gradient", TOLERANCE) == TOLERANCE and TIMES_NOISE == 5
    assert [found.part for found in misfits("gradient", one, [other], TOLERANCE)] == ["w"]
    assert not misfits("gradient", one, [other], TOLERANCE, {"w": 3e-4})
    assert misfits("gradient", one, [other], TOLERANCE, {"w": 1e-4})
    half = sketch(ONE.bfloat16())
    assert limit_of("gradient", TOLERANCE, 0.0, half) > 0.01


# ---- what a rank is given


def test_positions(make_process):
    """By turns, by blocks; views of a batch that are joined; the order of the batch's samples."""
    rank = make_process(rank=1)
    rank.loaded["a"] = 2, None
    assert rank.positions(1, 2).tolist() == [1, 3] and rank.by_layout
    assert rank.positions(1, 4).tolist() == [2, 3, 6, 7]  # two entries of each sample
    rank.joined[4] = [2, 2]
    assert rank.positions(1, 4).tolist() == [1, 3, 5, 7]
    rank.loaded["a"] = 2, [3, 0]
    assert rank.positions(1, 2, own=True).tolist() == [3, 0]
    assert rank.positions(1, 2).tolist() == [1, 3]  # as of another rank
    assert sorted(permutation(rank, "shuffle", 4, "torch", 0).tolist()) == [0, 1, 2, 3]
    assert rank.share_of(torch.arange(4), (2,)).tolist() == [3, 0]
    blocks = make_process(rank=1, layout="blocks")
    blocks.loaded["a"] = 2, None
    assert blocks.positions(1, 2).tolist() == [2, 3]


def test_positions_of_two_loaders(make_process):
    """Each batch has its loader's order, also joined to the other's."""
    rank = make_process(rank=1)
    rank.loaded |= {"unlabeled": (4, [5, 1, 7, 3]), "labeled": (2, None)}
    assert rank.positions(1, 4, own=True).tolist() == [5, 1, 7, 3]
    assert rank.positions(1, 2, own=True).tolist() == [1, 3]
    rank.joined[6] = [2, 4]
    assert rank.positions(1, 6, own=True).tolist() == [1, 3, 9, 5, 11, 7]
    one = make_process("one")
    one.loaded |= {"unlabeled": (8, None), "labeled": (4, None)}
    one.joined[12] = [4, 8]
    assert one.positions(1, 6).tolist() == [1, 3, 5, 7, 9, 11]


def test_parameters_of_random_numbers(make_process):
    """A rank's own means are at the places of its samples."""
    rank = make_process(rank=1)
    rank.loaded["a"] = 2, None
    wide = Draws(rank).of_one("mean", torch.tensor([5.0, 7.0]), (2,), (4,))
    assert wide[[1, 3]].tolist() == [5, 7]


def test_rolled(make_process, monkeypatch):
    """On one process, each share of a batch is rolled by itself."""
    for name in ("roll", "flip"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    one = make_process("one")
    alike.control_order(one)
    one.loaded["a"] = 4, None
    assert torch.arange(4).roll(1, 0).tolist() == [2, 3, 0, 1]
    assert torch.arange(4).flip(0).tolist() == [2, 3, 0, 1]
    assert torch.arange(3).roll(1, 0).tolist() == [2, 0, 1]  # it is no batch


class Random(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


class RandomStream(IterableDataset):
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return (torch.rand(()) for _ in range(self.number))


def batches(run, dataset, **options):
    return [batch.tolist() for *_, batch in batches_of(run, DataLoader(dataset, 2, **options))]


def test_samples(make_process):
    """A sample is augmented alike in both runs; of a stream, a rank's k-th is the (2 k + r)-th."""
    one, rank = make_process("one"), make_process(rank=1)
    (a, b), (c, d) = batches(one, Random())
    assert batches(rank, Random(), sampler=[1, 3]) == [[b, d]] and len({a, b, c, d}) == 4
    of_tensors = DataLoader(Random(), batch_sampler=[torch.tensor([1, 3])])
    assert [indices for indices, *_ in batches_of(rank, of_tensors)] == [[1, 3]]
    (a, b), (c, d) = batches(one, RandomStream(4))
    assert batches(rank, RandomStream(2)) == [[b, d]] and len({a, b, c, d}) == 4


def test_stream_of_all():
    """Most samples of a stream are on both ranks, as where each has all shards."""

    def notes(rows, marks):
        key = ("train.py:1", "loader", 0)
        return {Batch: [(0, Batch(key, 0, None, rows, None, totals={m: m for m in marks}))]}

    one, first = notes(6, range(6)), notes(3, [5, 1, 3])
    rule = sample_rules.Inputs()
    assert rule.copies(one, [first, notes(3, [3, 0, 1])])
    assert not rule.copies(one, [first, notes(3, [3, 0, 2])])
    assert not rule.copies(notes(3, [5, 1, 3]), [first, first])  # of which each takes its part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("bank", torch.zeros(2))


def make_step(run, gradient):
    """The model after a step with this gradient, which also changes a buffer; and the gradient in
    the step."""
    model = Net()
    nn.init.constant_(model.layer.weight, gradient)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    steps = seen_steps.Steps(run)
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient)
    model.bank += gradient
    steps.begin(optimizer, (optimizer,), {})
    inside = model.layer.weight.grad.clone()
    steps.end(optimizer, (optimizer,), {})
    return model, inside


def test_steps(make_process, monkeypatch):
    """In a step, a rank has one process's gradients; after it, one process's weights and buffers,
    but its own gradients."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    wanted, _ = make_step(make_process("one"), 1.0)
    rank = make_process()
    model, inside = make_step(rank, 3.0)
    assert inside.eq(1).all()
    assert torch.equal(model.layer.weight, wanted.layer.weight)
    assert torch.equal(model.bank, wanted.bank)
    assert model.layer.weight.grad.eq(3).all()
    kinds = {seen.kind for _, seen in Notes(rank.folder, "all", 0)[Seen]}
    assert kinds >= {"setting", "mode", "gradient", "weight", "update", "buffer"}


def test_first_step_by_keyword(make_process):
    """It has no gradients before its closure is called."""
    steps, optimizer = (
        seen_steps.Steps(make_process("one")),
        torch.optim.SGD(Net().parameters(), 0.5),
    )
    steps.begin(optimizer, (optimizer,), {})
    assert steps.inside is None
    steps.begin(optimizer, (optimizer,), {"closure": lambda: 0.0})
    assert steps.inside is optimizer


def test_saved_by_other_names(make_process, tmp_path):
    """As of a copy of the model on rank 0; not where it has other parameters."""
    steps = seen_steps.Steps(make_process())
    steps.path = lambda what: str(tmp_path / what)
    torch.save({"a": torch.ones(1), "b": torch.zeros(1)}, steps.path("after"))
    for names, found in ("cd", "cd"), ("b", "ab"), ("abc", "ab"):
        assert [*steps.saved("after", dict.fromkeys(names))] == [*found]


class Game:
    def reset(self):
        pass

    def step(self):
        pass


class Dice:
    def __init__(self):
        self.numbers, self.secret = random.Random(0), random.SystemRandom()

    def reset(self):
        pass


def test_generators(make_process):
    """Of the script's, not of Python's own names of temporary files, of the system or a library;
    and environments."""
    run, mine = make_process(), {"own": np.random.default_rng(0)}
    tempfile.mktemp()
    names, library = tempfile._get_candidate_names(), types.ModuleType("library")
    game, dice, library.draws = Game(), Dice(), random.Random(0)
    run.made[id(dice.numbers)] = "train.py:1"
    found, hidden = held.find_generators(run)
    assert held.states_of(found)
    found = dict(found)
    assert vars(names)["_rng"] and "own" in found and "_rng" not in found, (found, mine)
    assert "Dice.numbers, made at train.py:1" in found
    assert not {"draws", "Dice.secret"} & found.keys()
    assert f"environment {type(game).__name__}" in hidden and "environment Dice" not in hidden


def test_disk(make_process, monkeypatch):
    """Fewer steps, if those to come would take more than half of what is free."""
    usage = argparse.Namespace(free=20_000)
    monkeypatch.setattr(process.shutil, "disk_usage", lambda path: usage)
    one = make_process("one")
    make_step(one, 1.0)
    assert 1 < one.options["steps"] < 15
    assert "steps only: each writes" in Notes(one.folder, "one", 0)[Said][0][1].text


def test_made(tmp_path):
    """A file is the script's by its identity, not by its path; a rename takes with it what is in a
    folder."""
    made, path = Made(str(tmp_path)), tmp_path / "file"
    made.add(str(path), "output")
    path.write_text("the script's")
    made.settle()
    assert made.owns(str(path))
    (tmp_path / "other").write_text("another program's")
    os.replace(tmp_path / "other", path)
    assert not made.owns(str(path))
    folder = tmp_path / "folder"
    folder.mkdir()
    for inside in (folder, folder / "a"):
        inside.is_dir() or inside.write_text("")
        made.add(str(inside), "output")
        made.settle()
    new = tmp_path / "new"
    made.moved(str(folder), str(new))
    folder.rename(new)
    assert made.owns(str(new / "a")) and made.owns(str(new))
    assert {path for path in made.paths if path.startswith(str(new))} == {str(new), str(new / "a")}


# ---- what is judged


def notes(*found, end="its end"):
    """Of a process, [(step, note), ...]."""
    made = Notes("nowhere", "one", 0)
    for number, (step, note) in enumerate([*found, (0, Drawn({}, True)), (0, End(end))]):
        note.at = number
        made.of.setdefault(type(note), []).append((step, note))
    return made


def step_notes(factors=(1.0,) * 4, line="train.py:9"):
    """Of steps whose gradients are so many times as large."""
    found = []
    for step, factor in enumerate(factors):
        found.append((step, Step((0, step), line, [], {}, ["w"], [], {}, {})))
        values = {"w": sketch(ONE * factor)}
        found.append((step, Seen("gradient", line, "optimizer 0", step, values)))
    return found


def values_of(*indices_and_parents, factor=1.0):
    values = {0: summary(ONE * factor)}
    return [
        (0, Seen("value", f"train.py:{index}", "mul", 0, values, index, parents))
        for index, parents in indices_and_parents
    ]


def test_origin():
    """The first line that differs is named, of several that a value is made from."""
    made = (1, []), (2, []), (3, [1, 2])
    one = notes(*[(s, replace(v, about={"model": None})) for s, v in values_of(*made)])
    ranks = [notes(*values_of(*made, factor=factor)) for factor in (1.5, 1.5)]
    values = Values(one, ranks, TOLERANCE, {})
    assert values.origin(values.all[3]).index == 1


def passes(ends, lines=("train.py:1", "train.py:2")):
    """Two loaders, each of a shuffled pass of 8 samples; whether the first ends before."""
    order, found = [3, 1, 0, 2, 7, 5, 6, 4], []
    for number, line in enumerate(lines):
        key = (line, f"loader {number} of {line}", 0)
        found.append((2 * number, Pass(key, key[1], "Sampler", True, 8, False, 8)))
        for batch in range(2):
            step, indices = 2 * number + batch, order[4 * batch : 4 * batch + 4]
            found.append((step, Batch(key, batch, indices, 4, 2, True, {})))
        if ends and number == 0:
            found.append((2, PassEnd(key, 2)))
    return found


def rule(result, name):
    return [finding.verdict for finding in result.findings if finding.what == name]


@pytest.mark.parametrize("ends", [True, False])
def test_loaders(ends):
    """Two that give the same samples are a look, but not one after the other."""
    found = passes(ends) + step_notes()
    result = judge(notes(*found), [notes(*found), notes(*found)], TOLERANCE)
    assert rule(result, "loaders") == (["ok"] if ends else ["look"])


@pytest.mark.parametrize("ends", [True, False])
def test_loaders_made_anew(ends):
    """Of one order: if the one before has ended."""
    found = passes(ends, ["train.py:1"] * 2) + step_notes()
    result = judge(notes(*found), [notes(*found), notes(*found)], TOLERANCE)
    assert rule(result, "order") == (["look"] if ends else ["not seen"])


def test_first_batches():
    """next(iter(loader)) in each step gives the same batch, until set_epoch."""

    def of(orders):
        found = []
        for step, order in enumerate(orders):
            key = ("train.py:1", "train.py:1", step)
            found.append((step, Pass(key, "train.py:1", "DistributedSampler", True, 8, False, 4)))
            found.append((step, Batch(key, 0, order, 4, 2, True, {})))
        return notes(*found, *step_notes([1] * len(orders)))

    same = of([[3, 1, 0, 2]] * 4 + [[7, 5, 6, 4]] * 4)
    assert rule(judge(same, [same, same], TOLERANCE), "order") == ["look"]
    other = of([[n + 3, n + 1, n, n + 2] for n in range(8)])
    assert rule(judge(other, [other, other], TOLERANCE), "order") == ["ok"]


def test_fixed_orders():
    """The same in each epoch: WRONG with a set_epoch(), or if one process has others."""

    def of(*orders, draws=False, epochs=False):
        found = []
        for number, order in enumerate(orders):
            key = ("train.py:1", "loader", number)
            about = draws, 4, [], "", epochs
            found.append((2 * number, Pass(key, "loader", "Own", True, 8, *about)))
            for n, indices in enumerate((order[:3], order[3:])):
                found.append((2 * number + n, Batch(key, n, indices, 3, 2, True, {})))
        return notes(*found, *step_notes())

    def rule_of(one, of_rank):
        return rule(judge(one, [of_rank, of_rank], TOLERANCE), "order")

    fixed, other = [3, 1, 0, 2, 7, 5], [1, 3, 2, 0, 5, 7]
    assert rule_of(of(fixed, fixed), of(fixed, fixed)) == ["not seen"]
    drawn, epochs = of(fixed, fixed, draws=True), of(fixed, fixed, epochs=True)
    assert rule_of(drawn, drawn) == ["look"] and rule_of(epochs, epochs) == ["WRONG"]
    assert rule_of(of(fixed, other), of(fixed, fixed)) == ["WRONG"]
    assert rule_of(of(fixed, other), of(fixed, other)) == ["ok"]


@pytest.mark.parametrize(
    ("modes", "verdict"), [("w w", "WRONG"), ("a a", "look"), ("w r+", "look"), ("r+ r+", "look")]
)
def test_a_file_of_several(modes, verdict):
    """To add to it, or to change a part, may be meant."""
    ranks = [notes((0, File("out", "train.py:1", mode))) for mode in modes.split()]
    assert [found.verdict for found in Files().find(None, ranks)] == [verdict]


def test_shares_of_a_test_set(tmp_path):
    """A sample that is on no rank is a look."""
    key = ("train.py:9", "test", 0)

    def of(indices, size=5):
        found = [(3, Pass(key, "test", "Own", False, size, False, 5))]
        found += [(3, Batch(key, 0, indices, len(indices), 1, False)), (3, PassEnd(key, 1))]
        return notes(*step_notes(), *found)

    for first, verdicts in ([0, 2, 4], ["ok"]), ([0, 2], ["look"]):
        result = judge(of([0, 1, 2, 3, 4]), [of(first), of([1, 3])], TOLERANCE)
        assert rule(result, "test set") == verdicts
    one, file = of([0, 1, 2, 3, 4]), tmp_path / "data.py"
    file.write_text("part = names[rank::world]\n")
    for sizes, verdicts in ((3, 2), ["ok"]), ((2, 2), ["look"]):  # of datasets of a share each
        ranks = [of(range(size), size) for size in sizes]
        ranks[0].of[Said] = [(0, Said("file", str(file)))]
        assert rule(judge(one, ranks, TOLERANCE), "test set") == verdicts
    line = f"a share by the rank: {file}:1: part = names[rank::world]"
    assert below(one, ranks, "test set") == [line]


def test_uneven_batch():
    """The last batch of an epoch, padded by the sampler, is not compared."""
    key, batches = ("train.py:1", "loader", 0), [[0, 1, 2, 3], [4, 5, 6]]
    shares = [[[0, 2], [4, 6]], [[1, 3], [5, 4]]]

    def of(batches, factor):
        found = [(0, Pass(key, "loader", "DistributedSampler", True, 7, False, 4))]
        found += [(n, Batch(key, n, ids, len(ids), 2, True, {})) for n, ids in enumerate(batches)]
        return notes(*found, *step_notes([1, factor]))

    ranks = [of(share, 1.5) for share in shares]
    result = judge(of(batches, 1.0), ranks, TOLERANCE)
    assert not result.of("WRONG", "look") and "not compared" in result.of("note")[0].text


def test_lost_steps():
    """From a batch on that cannot be compared, nothing is WRONG, and the status is 2."""
    key = ("train.py:1", "loader", 0)

    def of(rows, factor, share):
        found = [(0, Pass(key, "loader", "Own", False, 64, True, None))]
        found += [(n, Batch(key, n, [share + n], rows, 9, True, {})) for n in range(3)]
        return notes(*found, *step_notes([factor] * 3))

    result = judge(of(4, 1.0, 0), [of(4, 1.5, 0), of(4, 1.5, 9)], TOLERANCE)
    assert not result.of("WRONG") and result.status == 2 and not result.lines
    assert "give one process a batch of 8, the samples of all ranks" in as_text(result)


def test_ranks_that_end_early():
    """A buffer of steps that they have not made; their runs have ended in a collective call."""
    buffers = [
        (step, Seen("buffer", "train.py:9", "model", step, sketches({"mean": ONE}, any_order=True)))
        for step in range(4)
    ]
    one = notes(*step_notes(), *buffers)
    call = 1, Collective("broadcast", "train.py:4", "", False)
    rank = notes(*step_notes([1, 1]), *buffers[:2], call)
    assert not judge(one, [rank, rank], TOLERANCE).of("look")[1:]


def below(one, ranks, name):
    """The lines below the first finding of this name."""
    return next(f.more for f in judge(one, ranks, TOLERANCE).findings if f.what == name)


def test_other_places():
    """Below a finding: what comes between backward() and the step, a state that one rank alone has
    loaded, a step that one rank alone makes, and where a pass is called and its loader is made."""
    loss = [(0, Seen("loss", "train.py:5", "backward", 0, {}))]
    summed = loss + [(0, Collective("all_reduce", "train.py:7", "", False))]
    one = notes(*loss, *step_notes())
    ranks = [notes(*summed, *step_notes([2] * 4))] * 2
    assert below(one, ranks, "gradient") == ["this all_reduce is after backward(): train.py:7"]
    gather = 0, Collective("all_gather", "train.py:3", "", False)
    ranks = [notes(gather, *loss, *step_notes([2] * 4))] * 2
    assert below(one, ranks, "gradient") == ["before it, this gathers: train.py:3"]
    ranks = [notes(*loss, *step_notes()), notes(*loss, *step_notes([1] * 2))]
    assert "the step of rank 0 alone: train.py:9" in below(one, ranks, "end")

    def of(size, **made):
        found = step_notes()
        for step, note in found[::2]:
            note.made.update(made)
            values = {"w": sketch(ONE * size)}
            found.append((step, Seen("update", "train.py:9", "optimizer 0", step, values)))
        return notes(*found)

    ranks = [of(1, loaded="train.py:8"), of(2)]
    assert below(of(1), ranks, "update") == ["rank 0 alone has loaded its state: train.py:8"]

    script = Path("train.py").resolve()
    script.write_text("for x in loader: pass\nfor epoch in range(2):\n    train()\n")
    key, sampler = (f"{script}:1", f"loader 0 of {script}:3"), ("Own", True, 8, False, 4)

    def of_passes(*batches):
        found = []
        for step in range(4):
            at, number = (*key, step // 2), step % 2
            if not number:
                found.append((step, Pass(at, key[1], *sampler, callers=[f"{script}:3"])))
            found.append(
                (step, Batch(at, number, batches[number], len(batches[number]), 2, True, {}))
            )
        return notes(*found, *step_notes())

    one = of_passes([3, 1, 0, 2], [7, 5, 6, 4])
    ranks = [of_passes([3, 0], [7, 6]), of_passes([1, 2], [5, 4])]
    assert below(one, ranks, "order") == [f"called at {script}:3: train()"]


@pytest.mark.parametrize(
    ("wrapped", "gradients", "verdict", "words"),
    [
        (0, (1, 1.1), "WRONG", "drawn after DDP has sent rank 0's: it averages gradients only"),
        (2, (1, 1.1), "look", "and DDP does not send it"),
        (2, (1, 1), "WRONG", "which no rank sends, but the gradients of all ranks"),  # by hand
        (2, (0, 0), "look", "and DDP does not send it"),
    ],
)
def test_weights_of_a_rank(wrapped, gradients, verdict, words):
    """Those that each rank has drawn are WRONG where their gradients are averaged in this step; a
    DDP that wraps them later sends rank 0's."""

    def of(state, factor):
        about = {"chooses": False, "in_module": False, "seeded": "train.py:2"}
        found = [(0, Seen("own", "train.py:3", "torch", 0, {"state": state}, about=about))]
        for step, note in step_notes([gradients[state - 1]] * 4):
            if isinstance(note, Step):
                note.averaged.extend(["w"] * (step >= wrapped))
                weight = sketch(ONE * (factor if step < 2 else 1))
                about, values = {"w": "train.py:4", "train.py:4": "train.py:30"}, {"w": weight}
                if step >= wrapped:  # another is not averaged
                    values = {"v": weight, **values}
                found.append((step, Seen("weight", "train.py:9", "o", step, values, about=about)))
            found.append((step, note))
        return notes(*found)

    ranks = [of(1, 1.0), of(2, 1 - 1e-6)]
    (found,) = state_rules.OtherWeights().drawn(ranks)
    assert found.verdict == verdict, found
    assert found.text == f"w has each rank's own random numbers, {words}"
    assert found.more == ["called at train.py:30", "seeded at train.py:2"]


@pytest.mark.parametrize(
    "texts",
    [
        ("accuracy 0.731", "accuracy 0.726", "accuracy 0.7311"),
        ("recall [0.115 0.196]", "recall [0.117 0.2  ]", "recall [0.1151 0.196]"),  # as numpy
        ("recall [0.115 0.196]", "recall [0.117 0. ]", "recall [0.1151 0.196]"),
        ("accuracy 0.9839", "accuracy 0.9836", "accuracy 0.9839"),  # a mean over 31 and 30
    ],
)
def test_printed(texts):
    """A score of rank 0's share alone is a look; not if it is another one in each run; also with
    the noise of another run."""
    one, rank, again = [
        notes(*step_notes(), *[(step, Printed("train.py:20", text)) for step in (3, 4)])
        for text in texts
    ]
    variables, values = Variables(one, [rank, rank]), Values(one, [rank, rank], TOLERANCE, {})
    assert len(list(compare_printed(one, [rank], values, variables, {}))) == 1
    assert not list(compare_printed(one, [one], values, variables, {}))
    assert not list(compare_printed(one, [rank], values, variables, {}, rank))
    assert len(list(compare_printed(one, [rank], values, variables, {}, again))) == 1


@pytest.mark.parametrize(
    "one, rank, again",
    [
        ("accuracy 0.2970", "accuracy 0.2969", "accuracy 0.2970"),  # on the edge of two
        ("accuracy 98.393", "accuracy 98.389", "accuracy 98.393"),  # too near
        ("accuracy 0.9839", "accuracy 0.9836", "accuracy 0.9837"),  # as near as by noise
        ("accuracy 0.500", "accuracy 0.400", "accuracy 0.510"),  # another one in each run
        ("01:01:49,699 loss 0.98", "01:01:49,912 loss 0.98", "01:01:49,699 loss 0.98"),  # a clock
    ],
)
def test_printed_alike(one, rank, again):
    one, rank, again = [
        notes(*step_notes(), (4, Printed("train.py:20", text))) for text in (one, rank, again)
    ]
    variables, values = Variables(one, [rank, rank]), Values(one, [rank, rank], TOLERANCE, {})
    assert not list(compare_printed(one, [rank], values, variables, {}, again))


def test_what_a_long_line_says(tmp_path):
    """What is before the number; who has called a print() of the script's own; no clocks."""
    code = "def print(*words):\n    builtin_print(*words)\nprint(meters.time.avg, meters.size)\n"
    (tmp_path / "log.py").write_text(code)
    file = str(tmp_path / "log.py")

    def of(score, number, *callers):
        text = "epoch 1 " + 20 * "train " + f"accuracy {score} " + 30 * "more "
        made = notes(*step_notes(), (3, Printed(f"{file}:2", text, list(callers))))
        for _, note in made[Step]:
            note.variables = {"avg": number, "size": number}
        return made

    sides = of(0.731, 8.0, f"{file}:3", f"{file}:9"), of(0.726, 4.0, f"{file}:3", f"{file}:9")
    (found,) = [
        f for f in judge(sides[0], [sides[1]] * 2, TOLERANCE).findings if f.what == "printed"
    ]
    assert found.line == f"{file}:3" and found.more[0] == f"called at {file}:9"
    assert "train accuracy 0.731 more" in found.text and "epoch" not in found.text
    assert [line for line in found.more if " is 8" in line] == [
        f"{file}:3: meters.size is 8 on one process, 4, 4 on the ranks"
    ]
    both = [of(score, 1.0) for score in (0.731, 0.726)]  # its caller is not known
    assert f"{file}:2" in [f.line for f in judge(both[0], [both[1]] * 2, TOLERANCE).findings]
    Path(file).write_text(code.replace("def print", "def log"))
    forget_files()
    (found,) = [
        f for f in judge(sides[0], [sides[1]] * 2, TOLERANCE).findings if f.what == "printed"
    ]
    assert found.line == f"{file}:2"


def test_where_a_score_is_put_together():
    """By the last calls before it is printed, but no pass through DDP."""
    calls = [Collective(name, f"train.py:{n}", "", False) for n, name in enumerate(["a", PASS])]
    texts = "accuracy 0.731", "accuracy 0.726"
    both = [[*[(4, call) for call in calls], (4, Printed("train.py:20", text))] for text in texts]
    one, rank = [notes(*step_notes(), *found) for found in both]
    found = [text for text in below(one, [rank, rank], "printed") if "together" in text]
    assert found == ["put together at train.py:0"]


@pytest.mark.parametrize(
    ("evaluated", "call", "part", "verdict"),
    [
        (2.0, "all_reduce", "Ema.net.w", "WRONG"),
        (1.0, "all_reduce", "Ema.net.w", "look"),  # by the same weights as rank 0
        (None, "all_reduce", "Ema.net.w", "look"),  # a trained model
        (2.0, "", "Ema.net.w", "look"),  # whose score nobody else gets
        (2.0, PASS, "Ema.net.w", "look"),
        (2.0, "all_reduce", "Ema.net.v", "look"),  # no average of the model's
        (2.0, "all_reduce", "Ema.net.k", "look"),  # of another shape
    ],
)
def test_average_of_a_rank(evaluated, call, part, verdict):
    """It is WRONG where another rank evaluates it, and then communicates."""

    def of(state, factor, weights):
        about = {"chooses": False, "in_module": False, "seeded": ""}
        found = [(0, Seen("own", "train.py:3", "torch", 0, {"state": state}, about=about))]
        trained = {"net.w": sketch(ONE), "net.k": sketch(ONE[:1])}
        found += [*step_notes(), (0, Seen("weight", "train.py:9", "o", 0, trained))]
        found.append((1, Seen("other", "", "at a step", 0, {part: sketch(ONE * factor)})))
        about = {"weights": weights, "callers": []} if weights else {"callers": []}
        found.append((2, Seen("evaluation", "train.py:7", "Net", 0, {}, about=about)))
        calls = [(2, Collective(call, "train.py:8", "", False))] * bool(call)
        return notes(*found, *calls)

    ranks = [of(1, 1.0, (1.0, 1.0)), of(2, 1 - 1e-6, evaluated and (evaluated, 1.0))]
    (found,) = state_rules.OtherWeights().drawn(ranks)
    assert found.verdict == verdict, found
    assert (found.more[:1] == ["train.py:7"]) == (verdict == "WRONG")
    early = [of(1, 1.0, (1.0, 1.0)), of(2, 1 - 1e-6, (2.0, 1.0))]
    for notes_of_rank in early:  # it has communicated before
        notes_of_rank.of[Collective] = [(1, Collective("all_reduce", "train.py:8", "", False))]
        notes_of_rank.of[Collective][0][1].at = 0
    assert state_rules.OtherWeights().drawn(early)[0].verdict == "look"


def test_gradients_before_they_are_clipped():
    """Where both have clipped them: then a clip hides what they were."""

    def of(*factors, clipped=1.0):
        found = step_notes([clipped] * len(factors))
        for step, factor in enumerate(factors):
            if factor:
                values = {"w": sketch(ONE * factor)}
                found.append((step, Seen("unclipped", "train.py:9", "optimizer 0", step, values)))
        return notes(*found)

    def said(one, *ranks):
        found = judge(one, ranks, TOLERANCE).of("WRONG")
        return [(each.what, "before clip_grad_norm_" in str(each.more)) for each in found]

    assert said(of(4, 4), of(2, 2), of(2, 2)) == [("gradient", True)]
    assert said(of(4, 4), of(4, 4), of(4, 4)) == [] == said(of(4, 4), of(2, 2), of(0, 0))
    assert said(of(4, 4), of(4, 4, clipped=2.0), of(4, 4, clipped=2.0)) == [("gradient", False)]


def loss_notes(factor, averaged=(), gradient=1.0, calls=(), after=()):
    """Of steps with losses that are so many times as large; calls before and after."""
    found = []
    for step, note in step_notes([gradient] * 4):
        if isinstance(note, Step):
            about = {"model": None}
            values = {0: summary(ONE.square().mean() * factor)}
            loss = Seen("loss", "train.py:5", "backward", 0, values, step, about=about)
            found += [*[(step, replace(call)) for call in calls], (step, loss)]
            found += [(step, replace(call)) for call in after]
            note.averaged.extend(averaged)
        found.append((step, note))
    return notes(*found)


def test_gathers_before_a_loss():
    """They are named below it, if they come before it; but no reduces."""
    names = "all_gather", "all_reduce", "all_gather"
    calls = [Collective(name, f"train.py:{n}", "", False) for n, name in enumerate(names)]
    ranks = [loss_notes(1.5, gradient=1.5, calls=calls[:2], after=calls[2:])] * 2
    found = below(loss_notes(1.0), ranks, "loss")
    assert [text for text in found if "gathers" in text] == ["before it, this gathers: train.py:0"]
    calls[0] = replace(calls[0], of_number=True)  # as of a loss that is printed
    found = below(loss_notes(1.0), [loss_notes(1.5, gradient=1.5, calls=calls)] * 2, "loss")
    assert [text for text in found if "gathers" in text] == ["before it, this gathers: train.py:2"]


def test_calls_below_a_loss():
    """Those of its gradients, too, each once."""
    gather = Collective("all_gather", "train.py:0", "", True)
    reduce = Collective("all_reduce", "train.py:1", "", False)
    ranks = [loss_notes(0.5, gradient=0.5, calls=[gather], after=[reduce])] * 2
    found = below(loss_notes(1.0), ranks, "loss")
    assert [text for text in found if text.startswith("this")] == [
        "this all_gather is not differentiated: train.py:0",
        "this all_reduce is after backward(): train.py:1",
    ]
    calls = [replace(gather, callers=["train.py:7", "train.py:8"])]
    calls += [Collective("all_gather", f"train.py:{n}", "", True, of_number=n == 2) for n in (1, 2)]
    ranks = [loss_notes(1.0, gradient=0.5, calls=calls)] * 2
    found = below(loss_notes(1.0), ranks, "gradient")  # at the line of the first
    named = [text for text in found if "train.py:" in text]
    assert named == ["called at train.py:7", "or this all_gather: train.py:1"]
    ranks = [loss_notes(1.0, gradient=0.5, calls=calls[2:])] * 2
    result = judge(loss_notes(1.0), ranks, TOLERANCE)
    assert [each.line for each in result.of("WRONG")] == ["train.py:2"]  # there is no other
    summed = Collective("all_reduce", "train.py:3", "", True, of_number=True)
    ranks = [loss_notes(1.0, gradient=0.5, calls=[gather, summed])] * 2
    assert "or this all_reduce: train.py:3" in below(loss_notes(1.0), ranks, "gradient")


@pytest.mark.parametrize("averaged", [[], ["w"]])
def test_losses_where_noise_hides_gradients(averaged):
    """They tell a fault, but without DDP: then the script may add up losses and gradients."""
    again = notes(*step_notes([1.1] * 4))
    ranks = [loss_notes(0.7, averaged)] * 2
    result = judge(loss_notes(1.0, averaged), ranks, TOLERANCE, again)
    assert rule(result, "gradient") == ["not told"]
    assert rule(result, "loss") == ["WRONG"] * bool(averaged) and result.lines == 3


def test_steps_without_gradients():
    """The ranks' runs may have ended before they have noted those of a step."""
    ranks = [notes(*step_notes([1, factor, 1])[:-1]) for factor in (1.2, 1.5)]
    result = judge(notes(*step_notes([1, 1, 1])), ranks, TOLERANCE)
    assert rule(result, "averaging") == ["WRONG"]


LOOP = """\
while True:
    for x in loader:
        optimizer.step()
        seen += len(x)
        if seen > 9:
            break
"""


def test_no_gradient_ever():
    """WRONG if no optimizer has any, on one process, too; a step without it is right."""

    def of(*gradients, other=None):
        found = []
        for step, factor in enumerate(gradients):
            for number, by in enumerate([factor] if other is None else [factor, other]):
                about = f"optimizer {number}", step, {"w": sketch(ONE * by)}
                found.append((step, Seen("gradient", "train.py:9", *about)))
        return notes(*found, *step_notes(gradients)[:1])

    def found_in(one, of_rank):
        return [each.verdict for each in Parameters().find(one, [of_rank])]

    assert found_in(of(0, 1), of(0, 1)) == []
    assert found_in(of(0, 0), of(0, 0)) == ["WRONG"] == found_in(of(0, 1), of(0, 0))
    assert found_in(of(0, 0, other=1), of(0, 0, other=1)) == ["look"]
    assert found_in(of(0, 1, other=1), of(0, 0, other=1)) == ["WRONG"]


def test_loops_that_end_early(tmp_path):
    """The `if` of a break by which a loop makes other numbers of steps."""
    (tmp_path / "loop.py").write_text(LOOP)
    file = str(tmp_path / "loop.py")
    one, rank = [notes(*step_notes([1] * number, f"{file}:3")) for number in (4, 6)]
    found = below(one, [rank, rank], "end")
    assert f"it ends early by {file}:5: if seen > 9:" in found
    assert f"in the loop of {file}:2: for x in loader:" in found
    text = "few = 4\ndef train(few):\n    for n in range(few):\n        step()\ntrain(few)\n"
    (tmp_path / "main.py").write_text(text)
    main = str(tmp_path / "main.py")

    def of(number):
        steps = step_notes([1] * number, f"{main}:4")
        for _, note in steps:
            if isinstance(note, Step):
                note.variables, note.callers = {"few": number}, [f"{main}:5"]
        return notes(*steps)

    found = below(of(4), [of(2), of(2)], "end")
    assert f"{main}:3: few is 4 on one process, 2, 2 on the ranks; set at {main}:1" in found, found
    assert f"called at {main}:5: train(few)" in found
    fails = f"RuntimeError at {file}:3: step(): Connection closed by peer"
    one, failed = notes(*step_notes()), notes(*step_notes(), end=fails)
    (end,) = [f for f in judge(one, [one, failed], TOLERANCE).findings if f.what == "end"]
    assert end.verdict == "WRONG" and f"it ends early by {file}:5: if seen > 9:" in end.more
    assert "as another rank had ended" in end.more[1], end.more


def test_rates_of_another_file(tmp_path):
    """Where a rate is set, if not in the file of the step; and the `if` of the call."""
    text = "def scale(group):\n    group['lr'] = lr / world\nif rank == 0:\n    scale(groups[0])\n"
    text += "lr = groups[0]['lr'] = optimizer.param_groups[0]['lr']\n"  # reads it
    (tmp_path / "rates.py").write_text(text)
    file, set_rate = Said("file", f"{tmp_path}/rates.py"), "group['lr'] = lr / world"

    def of(rate):
        found = [(0, file), *step_notes()]
        for step, note in found[1::2]:
            rates = Seen("setting", "train.py:9", "optimizer 0", step, {(0, "lr"): rate})
            found.append((step, rates))
        return notes(*found)

    found = below(of(0.1), [of(0.3), of(0.1)], "setting")
    assert f"made or set at {file.text}:2" in found, found
    assert f"by {file.text}:3: if rank == 0:" in found, found
    assert below(of(0.1), [of(0.3)] * 2, "setting") == found[:1]
    both = below(of(0.1), [of(0.2)] * 2, "setting")  # what all ranks run decides nothing
    assert both == [*found[:1], f"a rate by the number of processes: {file.text}:2: {set_rate}"]


def test_counted():
    """What each rank counts for itself; but not an epoch, nor a size."""

    def of(rows):
        made = notes(*step_notes())
        for step, note in made[Step]:
            note.variables = {"seen": 8 + rows * step, "epoch": step, "size": rows, "lost": 0}
        return made

    found = Variables(of(8), [of(4), of(4)]).counted(2)
    assert found == ["counted by each rank: seen is 24 on one process, 16, 16 on the ranks"]
    assert not Variables(of(4), [of(4), of(4)]).counted(2)
    assert not Variables(of(8), [of(4), of(2)]).counted(2)


def test_uneven_draws():
    """A line draws other numbers of times on the ranks, and not its part of the times."""

    def of(times):
        made = notes(*step_notes())
        made.of[Drawn] = [(4, Drawn({("train.py:3", "choice"): {1: times}}, True))]
        return made

    for times, found in (4, {}), (2, {}), (3, {1: "train.py:3"}):
        assert uneven_draws(of(4), [of(times), of(times)]) == found
    assert uneven_draws(of(4), [of(4), of(2)]) == {1: "train.py:3"}

    one, rank = of(4), of(2)  # half as often at first, but not later: no turns
    for made, times in (one, {0: 6, 1: 4, 2: 4}), (rank, {0: 6, 1: 2, 2: 3}):
        made.of[Drawn][0][1].times["train.py:3", "choice"] = times
    assert uneven_draws(one, [rank, rank]) == {1: "train.py:3", 2: "train.py:3"}


def test_orders_of_a_loop():
    """What draws in half of the steps of two optimizers is no order of an epoch."""
    made = notes(*step_notes([1] * 4))
    for step, note in made[Step]:
        note.key = step % 2, step // 2
    for drawn, is_of_loop in ((0, 2), True), ((0,), False):
        orders = [(step, Seen("split", "train.py:3", "random", 0, {})) for step in drawn]
        made.of[Seen] = orders
        assert sample_rules.Splits().is_of_loop(made, "train.py:3") == is_of_loop


def test_orders_that_part():
    """What a sampler draws is the same on all ranks, until one of them has drawn elsewhere."""

    def of(*states):
        made = notes(*step_notes())
        drawn = [Seen("split", "train.py:3", "torch", 0, {"order": state}) for state in states]
        made.of[Seen] += list(enumerate(drawn))
        return made

    for states, found in ((1, 2, 3, 8), "look"), ((1, 2, 7, 8), "ok"), ((1, 2, 3, 4), "ok"):
        ranks = [of(1, 2, 3, 4), of(*states)]
        assert rule(judge(of(1, 2, 3, 4), ranks, TOLERANCE), "split") == [found], states


def test_samplers(tmp_path):
    """Below samples that no rank has: where the sampler is made, or gives them, or its list."""
    file = tmp_path / "loaders.py"
    words = "sampler=share, batch_sampler=None, collate_fn=join"
    file.write_text(f"share = drawn[rank::2]\nloader = DataLoader(data, 2, {words})\n")
    key = ("train.py:1", f"loader 0 of {file}:2", 0)

    def of(made, *indices):
        found = [(0, Pass(key, key[1], "DistributedSampler", True, 64, False, 2, [], made))]
        found += [(n, Batch(key, n, ids, len(ids), 4, True, {})) for n, ids in enumerate(indices)]
        return notes(*found, *step_notes([1, 1]))

    one = of("", [3, 1, 0, 2], [7, 5, 6, 4])
    for made, line in ("train.py:7", "train.py:7"), ("", f"{file}:1: share = drawn[rank::2]"):
        ranks = [of(made, [3, 1], [2, 9])] * 2
        assert f"its sampler: {line}" in below(one, ranks, "samples")


def test_a_crash_of_one_rank(tmp_path):
    """Each rank has its own file of it: the log may be that of all."""
    Path("train.py").write_text("import ctypes\nctypes.string_at(0)\n")
    for rank in range(2):
        text = f'File "{os.path.abspath("train.py")}", line 2 in <module>\n' * rank
        (tmp_path / f"all.{rank}.crash").write_text(text)
    ends = [Notes(tmp_path, "all", rank).end() for rank in range(2)]
    assert ends[0] == "cut off" and "a crash at " in ends[1], ends
    assert "train.py:2: ctypes.string_at(0)" in ends[1]


def test_how_a_process_is_stopped(tmp_path):
    """Where it was, if that is known, for how long, and the flag for more."""
    ends = [Notes(tmp_path, "all", 0)]
    (tmp_path / "all.0.where").write_text("1 < train.py:2 < train.py:7")
    ends += [Notes(tmp_path, "all", 0) for _ in range(2)]
    ends[2].stopped = "nothing new for 60 s", "--wait 300"
    assert [each.end() for each in ends] == [
        "cut off",
        "cut off at train.py:2 < train.py:7",
        "stopped: nothing new for 60 s at train.py:2 < train.py:7; --wait 300",
    ]


def test_calls_in_two_branches(tmp_path, monkeypatch):
    """Each rank may make its call in another branch of an `if`; but no call that others, which
    have made the same ones before, make later."""
    mine, theirs, both = [
        (1, Collective("broadcast", f"train.py:{n}", "", False)) for n in (4, 6, 8)
    ]
    ranks = [notes(*step_notes(), call, both) for call in (mine, theirs)]
    assert Calls().find(notes(), ranks) == []
    Path("train.py").write_text("if rank == 0:\n    save()\n")
    caller = f"{Path('train.py').resolve()}:2"
    mine[1].callers = [caller, f"{caller[:-1]}1"]
    ranks = [notes(*step_notes(), both, *more, both) for more in ([mine], [])]
    for rank, sides in enumerate((ranks, ranks[::-1])):
        (found,) = Calls().find(notes(), sides)
        assert found.verdict == "WRONG" and found.line == mine[1].line
        assert f"rank {rank}" in found.text
    assert found.more == [f"called at {caller}: save()", f"{caller[:-1]}1: if rank == 0:"]
    assert Calls().find(notes(), [notes(*step_notes())] * 2) is None
    of_group = 1, replace(mine[1], of_all=False)
    ranks = [notes(*step_notes(), both, *more, both) for more in ([of_group], [])]
    assert Calls().find(notes(), ranks) == []


@pytest.mark.parametrize(
    "end", ["a crash at train.py:8: m(x)", "stopped: no advance at train.py:8"]
)
def test_call_before_a_crash(end):
    """What a rank was about to call where it has crashed, as before, is no call of its notes; two
    passes through DDP are as many otherwise, as a pass without gradients sends no buffers after."""
    alone, both = [(1, Collective(PASS, f"train.py:{n}", "", False)) for n in (4, 8)]
    first, four = replace(both[1]), step_notes()
    ranks = [notes((0, first), *four, alone), notes((0, first), *four, end=end)]
    one = notes(*step_notes((1.0,) * 5))
    (found,) = judge(one, ranks, 3e-4).of("WRONG")
    assert (found.what, found.line, found.step) == ("calls", "train.py:4", 1)
    assert any(line.startswith("so the end, after step 4") for line in found.more)
    quiet = notes((0, first), *four, end="ValueError at train.py:8")
    assert Calls().find(one, [ranks[0], quiet]) == []
    again = [notes((0, replace(first)), *four, *calls, both) for calls in ([alone], [])]
    assert [found.verdict for found in Calls().find(one, again)] == ["look"]
    again[1] = notes((0, first), *four, (4, both[1]), end=end)  # it was noted
    assert [found.verdict for found in Calls().find(one, [ranks[0], again[1]])] == ["WRONG"]
    twice = notes((0, first), *four, (4, both[1]), alone)
    assert Calls().find(one, [twice, again[1]]) == []  # no second one after it


def test_call_of_a_loop_over_more_batches(tmp_path):
    """As in a validation of unequal shares: one more of it meets what the others do next."""
    (tmp_path / "score.py").write_text("for x in loader:\n    dist.all_reduce(x)\n")
    line, end = f"{tmp_path}/score.py:2", "RuntimeError at train.py:9: Connection closed by peer"
    once = [(1, Collective(name, line, "", False)) for name in ("all_gather", "all_reduce")]
    later = 4, Collective("broadcast", "train.py:8", "", False)
    stuck = f"stopped: no advance at {line}"

    def found(*theirs, mine=(*once, *once), end=end, stuck=stuck):
        ranks = [
            notes(*calls, *step_notes(), end=how) for calls, how in ((theirs, end), (mine, stuck))
        ]
        return Calls().find(notes(), ranks)

    (wrong,) = found(*once, later)
    assert (wrong.line, wrong.step) == (line, 1) and "rank 1" in wrong.text
    assert wrong.more == [f"in the loop of {line[:-1]}1: for x in loader:"]
    assert all(found(*once, end=how) for how in (end, "its end", ""))  # or no more is known
    assert not found(*once, end="ValueError at train.py:9")  # which is why it has made fewer
    assert not found(*once, stuck="its end", end="its end")
    assert not found(*once, mine=(*once, later))
    before = [(0, replace(call)) for _, call in once]
    assert not found(*before, mine=(*before, *once))  # in another step
    alone = [(1, Collective("all_reduce", "train.py:5", "", False))]
    assert not found(*alone, mine=alone * 2)  # in no loop
    elsewhere = [(step, replace(call, callers=["train.py:7"])) for step, call in once]
    assert not found(*once, mine=(*once, *elsewhere))  # another call of its function
    alone = 1, Collective("broadcast", line, "", False)  # in the loop
    (wrong,) = found(*once, alone)
    assert "rank 0 makes this call without the others" in wrong.text
    passes = [(1, Collective(PASS, line, "", False))] * 2
    assert not found(*passes[:1], mine=passes)  # its steps say it


CODE = """\
import torch.distributed as dist
names = {word for word in open("words")}
for number, name in enumerate(names): print(name)
for name in sorted(names): print(name, sorted(f"{n}:" for n in list(names)))
mine = names_of(range(dist.get_rank(), 9, 2)) + words[rank::world][:3]
part, place = words.chunk(world)[rank], places[rank]
def score(model):
    total = sum(model); save(made / "w", made / f"{total}", root_dir / name)
    total = direction / len(model)
    total /= 2; return total
print(score([1, 2]))
for name in names - {"a"}: print(name)
if dist.get_rank() == 0: print(names)
scale = nn.Parameter(ones)
self.scale = nn.Parameter(ones)
shift = torch.zeros(3, requires_grad=True)
fixed = torch.zeros(3, requires_grad=False, pin_memory=True)
device, seed = rank % 8, seeds[rank]
for number in range(rank, 9, world): print(number)
if number % world == rank: print(number)
def make():
    return nn.Parameter(ones)
print(list(words - {"a"}))
print(list({"a"} - words))
print(list(set(words)))
mine = torch.arange(n, device=device).chunk(world)[rank]
torch.cuda.set_device(devices()[rank])
torch.manual_seed(0)
if rank: torch.manual_seed(1)
base_lr *= num_gpus
optimizer = SGD(args.lr * dist.get_world_size() / 256)
rates = correlation * world
half = lr / 2
"""


def test_lines_that_are_named(tmp_path):
    """Those that use a set's order, take a share by the rank, divide, make a parameter of no
    module, seed at an import, or scale a rate."""
    (tmp_path / "named.py").write_text(CODE)
    file = str(tmp_path / "named.py")
    assert sets_in_order(file) == [f"{file}:{n}" for n in (3, 12, 23, 24, 25)]
    assert shares_in(file) == [f"{file}:{n}" for n in (5, 6, 19, 20, 26)]
    assert set(divisions_behind(f"{file}:11", [file])) == {f"{file}:9", f"{file}:10"}
    assert parameters_in(file) == [f"{file}:{n}" for n in (14, 16, 22)]
    assert seeds_in(file) == [f"{file}:28"]
    assert scales_in(file) == [f"{file}:{n}" for n in (30, 31)]


def test_branches_by_a_jump(tmp_path):
    """An `if` before a line decides on it, if it leaves the loop's turn."""
    text = "if skip:\n        continue\n    if logs:\n        log()\n    step()\n"
    (tmp_path / "jump.py").write_text(f"for x in loader:\n    {text}")
    assert branch_of(f"{tmp_path}/jump.py:6") == f"{tmp_path}/jump.py:2"
    (tmp_path / "main.py").write_text("if __name__ == '__main__':\n    main()\n")
    assert branch_of(f"{tmp_path}/main.py:2") is None


def test_score_of_repeated_samples():
    """One of all ranks has to be another one, if a sampler repeats samples: that is said once."""
    key, call = ("train.py:9", "loader", 0), Collective("all_reduce", "train.py:12", "", False)

    def of(text, ids, *calls):
        found = [Pass(key, "loader", "DistributedSampler", True, 3, False, 2)]
        found += [Batch(key, 0, ids, len(ids), 1, False), PassEnd(key, 1), *calls]
        found += [Printed("train.py:20", text)]
        return notes(*step_notes(), *[(4, note) for note in found])

    one = of("accuracy 0.731", [0, 1, 2])
    for calls, expected in (([call], ["test set"]), ([], ["printed", "test set"])):
        ranks = [of("accuracy 0.726", [0, 2], *calls), of("", [1, 0], *calls)]
        looks = judge(one, ranks, TOLERANCE).of("WRONG", "look")
        assert [finding.what for finding in looks] == expected, looks


def test_lines_to_trace():
    """None for a right script; else of the first steps that differ."""
    right, wrong = notes(*step_notes()), notes(*step_notes([1, 1.5, 1.5, 1.5, 1.5]))
    assert judge(right, [right, right], TOLERANCE).lines == 0
    result = judge(notes(*step_notes([1] * 5)), [wrong, wrong], TOLERANCE)
    assert result.lines == 4 and not result.may_be_noise
    small = notes(*step_notes([1, 1.001]))
    assert judge(notes(*step_notes([1, 1])), [small, small], TOLERANCE).may_be_noise


# ---- which runs it takes


class FakeRuns:
    """Gives these notes, and counts what is run."""

    def __init__(self, one, ranks, again=None, fails=False):
        self.notes, self.noisy, self.fails = (one, ranks), again or one, fails
        self.options, self.too_few_gpus, self.made = Options(20), "", []

    def pair(self, other_options):
        self.made.append("pair")
        return self.notes

    def once_more(self, lines, further=0):
        self.made.append("noise" + ", lines" * bool(lines))
        return self.noisy

    def lines(self, steps):
        self.made.append(f"lines of {steps}")
        if self.fails:
            raise NothingCompared("gone")
        return self.notes


def check(*words, **given):
    runs = FakeRuns(*words, **given)
    args = command.parser.parse_args(["train.py"])
    return runs.made, command.check(args, runs)


def test_runs():
    """Two for a right script, three if noise explains it, and one more pair for a wrong one."""
    right, wrong, small = [notes(*step_notes([1, f])) for f in (1.0, 1.5, 1.001)]
    made, result = check(right, [right, right])
    assert made == ["pair"] and result.status == 0
    made, result = check(right, [wrong, wrong])
    assert made == ["pair", "lines of 2"] and result.status == 1
    made, result = check(right, [small, small])
    assert made == ["pair", "noise, lines", "lines of 2"] and result.status == 1
    made, result = check(right, [small, small], again=notes(*step_notes([1, 1.0005])))
    assert made == ["pair", "noise, lines"] and result.status == 0
    clocks = [notes(*step_notes(), (4, Printed("train.py:20", f"1.{n}0 s"))) for n in (23, 45, 67)]
    made, result = check(clocks[0], [clocks[1], clocks[1]], again=clocks[2])
    assert made == ["pair", "noise"] and not result.of("look")
    made, result = check(right, [wrong, wrong], fails=True)
    assert result.status == 1 and "could not be noted: gone" in result.findings[0].text


def of_loader(rows, size, *more, first=0):
    key = ("train.py:1", "loader", 0)
    found = [(0, Pass(key, "loader", "DistributedSampler", True, 64, False, size))]
    for n in range(3):
        ids = list(range(first + n, first + n + rows))
        found.append((n, Batch(key, n, ids, rows, 9, True, {})))
    return notes(*found, *step_notes(), *more)


def test_other_options():
    """What the ranks' first steps say of a start: it is needless, or these are the next options."""
    options, right = Options(20), notes(*step_notes())
    assert other_options(options, right, [right, right]) is None
    odd = of_loader(3, 3)
    found, _ = other_options(options, odd, [odd, odd])
    assert found == replace(options, scaled=["loader"])
    own = of_loader(3, None)  # which nobody can make larger
    assert other_options(options, own, [own, own]) is None
    cut = of_loader(2, 2, (0, Cut("loader", 4)))
    assert other_options(options, of_loader(4, 4), [cut, cut]) is None
    assert scaled_loaders(options, of_loader(4, 4), [cut]) == {"loader": "train.py:1"}
    cut.of[End] = [(1, End("RuntimeError at train.py:3: Connection closed by peer"))]
    assert other_options(options, of_loader(4, 4), [cut, cut]) is None  # another rank has ended
    cut.of[End] = [(1, End("ValueError at train.py:3"))]
    found, _ = other_options(options, of_loader(4, 4), [cut, cut])
    assert found == replace(options, cuts=False)
    blocks = notes(*step_notes(), (1, Said("order", "blocks")))
    found, _ = other_options(options, right, [blocks, blocks])
    assert found == replace(options, layout="blocks")
    assert other_options(found, right, [blocks, blocks]) is None


def test_batch_in_fewer_parts():
    """Where each rank makes fewer passes in a step, so that the batch is the same, it is not said
    that the batch is larger."""

    def of(passes, factor, rows, *cut, first=0):
        values = {0: summary(ONE)}
        seen = [
            (1, Seen("inputs", "train.py:5", "Net", n, values, 1 + n, about={}))
            for n in range(passes)
        ]
        found = of_loader(rows, rows, *cut, *seen, first=first).of
        made = notes(*step_notes([factor] * 4))
        made.of = found | {Seen: made.of[Seen] + seen}
        return made

    cut = (0, Cut("loader", 4))
    for factor, texts in ((1, ["a batch size per process"]), (0.5, ["2 passes in a step on one"])):
        ranks = [of(1, factor, 2, cut, first=first) for first in (0, 2)]
        _, result = check(of(2, 1, 4), ranks)
        assert [f.text[: len(text)] for f, text in zip(result.of("look"), texts)] == texts, result
        assert len(result.of("look")) == 1
        if factor == 1:
            (size,) = result.of("look")
            assert "2 times the batch: intended, and the rate, too?" in size.text and size.remedy
            assert size.text.endswith("the ranks together were given one process's samples")


def test_order_of_a_batch():
    """By which a rank's share is told; nothing is told by a batch that a sampler has filled up."""
    said, known = [], {"whole": [4, 5, 6, 7], "filled up": [0, 1, 2]}
    run = argparse.Namespace(is_single=False, rank=1, batches=known)
    run.positions, run.say = (
        lambda rank, size: torch.tensor([1, 3]),
        lambda *words: said.append(words),
    )
    assert find_order(run, "filled up", [2, 9]) is None and not said
    assert find_order(run, "whole", [6, 7]) == [2, 3] and said == [("blocks", "order")]
    assert find_order(run, "whole", [5, 7]) == [1, 3] and said[-1] == ("turns", "order")


def test_turns():
    """Where one process draws as many times as often, the ranks take turns."""

    def of(number):
        made = notes(*step_notes())
        times = {("train.py:4", "randint"): dict.fromkeys(range(4), number)}
        made.of[Drawn] = [(4, Drawn(times, False))]
        return made

    found, _ = other_options(Options(20), of(4), [of(2), of(2)])
    assert found.turns == [["train.py:4", "randint"]]
    assert other_options(Options(20), of(2), [of(2), of(2)]) is None


def test_report():
    """On a screen: what is right, and what was not seen, in a line each; --all has each."""
    right, wrong = notes(*step_notes()), notes(*step_notes([1, 1.5, 1, 1]))
    result = judge(right, [wrong, wrong], TOLERANCE)
    result.of("WRONG")[0].more = [f"line {number}" for number in range(20)]
    text, everything = as_text(result), as_text(result, True)
    assert text.startswith("WRONG  gradient  train.py:9") and "... and 15 lines more" in text
    assert "begin with gradient: train.py:9" in text.splitlines()[-1]
    assert "line 19" in everything and "line 19" not in text
    assert sum(line.startswith(("ok", "not seen")) for line in text.splitlines()) == 2
    assert "random      needs dropout, noise" in everything


FLAGS = """
parser.add_argument("config")
parser.add_argument("--batch-size", type=int)
parser.add_argument("-b", "--mini-batch", dest="bs")
parser.add_argument("--" + name, dest=name_of(name))
parser.add_argument(*words)
run("--train-batch-size")
"""


def test_remedy_by_one(tmp_path):
    """A flag, if one of the script's numbers is named as such; not a keyword of torch's."""

    def of(name, *said):
        step = Step((0, 0), "", [], {}, [], [], {name: 4.0}, {})
        return notes(*said, (0, Cut("loader", 4)), (0, step))

    file, other = [(0, Said("file", f"{tmp_path}/{name}.py")) for name in ("train", "other")]
    (tmp_path / "other.py").write_text("from tyro import cli\nbatch_size: int = 4")
    (tmp_path / "none.py").write_text(
        "from absl import logging\nfrom transformers import AutoModel\nbatch_size = 4"
    )
    (tmp_path / "local.py").write_text("words = sys.argv\noriginal_batch_size = 4")
    local = 0, Said("file", f"{tmp_path}/local.py")
    assert "--one" not in remedy_by_one(of("batch_size", local), 2)
    (tmp_path / "both.py").write_text("words = sys.argv\nbatch_size = 4\nadd_argument('--rate')")
    both = 0, Said("file", f"{tmp_path}/both.py")
    assert "--one" not in remedy_by_one(of("batch_size", both), 2)  # none of its flags
    none = 0, Said("file", f"{tmp_path}/none.py")
    assert "--one" not in remedy_by_one(of("batch_size", none), 2)
    assert '--one "--batch_size 8"' in remedy_by_one(of("batch_size", other), 2)
    assert "--one" not in remedy_by_one(of("batched_grad_copy", other), 2)
    assert "--one" not in remedy_by_one(of("batch_size"), 2)  # a script without flags
    (tmp_path / "train.py").write_text(FLAGS)
    assert '--one "--batch-size 8"' in remedy_by_one(of("batch_size", file), 2)
    assert '--one "-b 8"' not in remedy_by_one(of("bs", file), 2)
    assert '--one "--mini-batch 8"' in remedy_by_one(of("bs", file), 2)
    assert "--one" not in remedy_by_one(of("train_batch_size", file), 2)  # as of a file of settings


def test_many_findings():
    """Ten fit on a screen, and each has its line, what it is, and what to do."""
    right = notes(*step_notes())
    result = judge(right, [right, right], TOLERANCE)
    more = [f"line {number}" for number in range(9)]
    for number in range(10):
        about = {"more": list(more), "remedy": f"remedy {number}", "section": "#page"}
        result.findings.append(Finding("WRONG", "value", 0, f"text {number}", "", **about))
    text = as_text(result)
    assert len(text.splitlines()) < 50
    assert all(f"{word} {number}" in text for word in ("text", "remedy") for number in range(10))
    assert sum("lines more (--all)" in line for line in text.splitlines()) == 10


def test_a_single_flag_for_one_process(capsys):
    with pytest.raises(SystemExit):
        command.main(["--one", "--batch-size=8"])
    assert "which script?" in capsys.readouterr().err


def test_number_of_processes(capsys):
    with pytest.raises(SystemExit):
        command.main(["--nproc", "1", "train.py"])
    assert "--nproc: two processes at least" in capsys.readouterr().err

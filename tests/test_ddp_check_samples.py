"""What ddp_check says of batches and passes, by notes alone. Each test fails if the line that it is
for is changed."""

import torch
from test_ddp_check_parts import notes

from ddp_check.compare.shares import rows_of_inputs, takes_blocks, takes_share
from ddp_check.notes import Batch, Seen
from ddp_check.sketch import summary

X, ONES = torch.arange(32.0).view(8, 4).sin(), torch.ones(8)
CONSTANT = (8, X), (4, X[::2]), (4, X[1::2])  # of one speaker


def inputs(step, *values):
    """What goes into a model."""
    values = {n: summary(value) for n, value in enumerate(values) if value is not None}
    return step, Seen("inputs", "train.py:2", "model", 0, values)


def batch(order, line="train.py:1", trains=True, step=0):
    key = (line, f"loader 0 of {line}", 0)
    return step, Batch(key, 0, order, len(order), 4, trains, {})


def test_rows_of_inputs():
    """Of all passes with the second batch, but for what has no rows."""
    others = inputs(1, torch.tensor(1.0)), inputs(1, None, X)

    def of(*rows, batches=3):
        second = [inputs(1, X[:n]) for n in rows]
        looks = batch([0], "train.py:9"), inputs(0, X)
        found = *looks, batch([0]), inputs(0, X[:1]), batch([1]), *second, *others, batch([2])
        return notes(*found[: len(found) - 3 + batches])

    assert rows_of_inputs(of(8), [of(4), of(2)]) == (8, 6)
    assert rows_of_inputs(of(8, 8), [of(4, 4), of(0)]) == (16, 8)
    assert rows_of_inputs(of(8), [of(4), of(4, batches=2)]) == (0, 0)
    found = inputs(0, X), *others
    first = notes(batch([0]), *found, inputs(1, X))
    second = notes(*found, inputs(1, X[:4]))
    assert rows_of_inputs(first, [first, second]) == (8, 12)  # by steps, as one has no loader


def test_takes_share():
    """The script takes a share of a batch that all ranks load, as a block or by turns."""

    def of(x, order=(3, 1, 2, 0), tests=(), step=1):
        tests = batch(list(tests), "train.py:3", trains=False)
        return notes(batch(list(order)), tests, inputs(step, x), inputs(step, None, X))

    one = of(X)
    blocks, turns = [of(X[:4]), of(X[4:])], [of(X[::2]), of(X[1::2])]
    assert takes_share(one, blocks) and takes_share(one, turns)
    assert takes_blocks(one, blocks) and not takes_blocks(one, turns)
    assert not takes_share(one, [of(X), of(X)])
    first = [of(X[:4], step=0), of(X[4:], step=0)]  # only the first step's, before it is wrapped
    assert not takes_share(one, first) and not takes_blocks(one, first)
    shares = [of(X[:4], (3, 1), tests=[5, 6]), of(X[4:], (2, 0), tests=[5, 6])]
    one = of(X, tests=[5, 6])  # a test set is loaded whole
    assert not takes_share(one, shares) and not takes_blocks(one, shares)
    streams = [of(X[:4], ()), of(X[4:], ())]
    assert not takes_share(of(X, ()), streams)
    alike = [notes(batch([1, 0]), inputs(1, X[:1], part)) for part in (X, X[:4], X[4:])]
    assert takes_share(alike[0], alike[1:])
    constant = [notes(batch([1, 0]), inputs(1, ONES[:n], part)) for n, part in CONSTANT]
    assert takes_share(constant[0], constant[1:]) and not takes_blocks(constant[0], constant[1:])

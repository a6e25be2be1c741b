"""The conditions by which ddp_check names the cause of a difference: each here has a situation that
depends on it."""

import functools
from dataclasses import replace

import pytest
import torch
from test_ddp_check_parts import ONE, PARTS, TOLERANCE, notes, rule

from ddp_check.compare.advice import ADVICE
from ddp_check.compare.averaging import averaging as of_gradients
from ddp_check.compare.causes import Cause, find_causes, first_behind
from ddp_check.compare.differences import Differences
from ddp_check.compare.judge import judge
from ddp_check.compare.numbers import Variables
from ddp_check.compare.printed import compare_printed
from ddp_check.compare.values import Values
from ddp_check.notes import (
    MANY_VALUES,
    PASS,
    STREAM,
    Averages,
    Collective,
    Finding,
    Printed,
    Said,
    Seen,
    Step,
)
from ddp_check.sketch import sketch, sketches, summary

# A value on one process, and on two ranks: of rows, and of single numbers.
SHARES = ONE, *PARTS
OTHER = ONE, PARTS[0] + 1, PARTS[1] + 2
COPIED = ONE, PARTS[0] + 1, PARTS[0] + 1
WHOLE = ONE, ONE, ONE
MEAN = [torch.tensor(number) for number in (2.0, 1.0, 3.0)]
TWICE = [torch.tensor(number) for number in (2.0, 4.0, 4.0)]
ALIKE = [torch.tensor(number) for number in (2.0, 7.0, 7.0)]
BATCH = "a batch of the DataLoader"


@functools.cache
def summarized(tensor):
    return None if tensor is None else summary(tensor)


@functools.cache
def gradient(factor):
    return sketch(ONE * factor)


def seen(index, name, *tensors, made_from=(), kind="value", step=0, line="", **about):
    """What a line has computed, of the line `train.py:index` unless another one is given."""
    library, number = about.pop("library", ""), about.pop("number", 0)
    about = {"model": None, "trains": [(0, "w")], "is_ddp": True, "callers": []} | about
    values = {part: summarized(each) for part, each in enumerate(tensors)}
    made = list(made_from), about, library
    return step, Seen(kind, line or f"train.py:{index}", name, number, values, index, *made)


def inputs(index, *tensors, **about):
    return seen(index, "Net", *tensors, kind="inputs", **about)


def outputs(index, *tensors, **about):
    return seen(index, "Net", *tensors, kind="outputs", **about)


def loss(index, tensor, **about):
    return seen(index, "backward", tensor, kind="loss", **about)


def process(*found, gradients=(1.0, 1.0), variables=({},), generators=({},)):
    """The notes of steps: what is found in each, then the optimizer's step, with gradients that are
    so many times as large, with the script's numbers, and the states of its generators."""
    made = []
    for step, factor in enumerate(gradients):
        made += [(at, replace(each)) for at, each in found if at == step]
        numbers, states = [of[min(step, len(of) - 1)] for of in (variables, generators)]
        wrapped = {"wrapped": ["train.py:60"]}
        about = [], wrapped, ["w"], ["w"], numbers, states
        made.append((step, Step((0, step), "train.py:9", *about)))
        values = {"w": gradient(factor)}
        made.append((step, Seen("gradient", "train.py:9", "optimizer 0", step, values)))
    return notes(*made)


def processes(make, *values, own=False, **about):
    """(The notes of one process, those of the ranks), of a function that makes what is found of the
    tensors of each. The ranks have a wrong gradient, `own`: each another one."""
    gradients = [(1.0, 1.0), (1.2, 1.0), (1.5 if own else 1.2, 1.0)]
    several = {"gradients": gradients} | about
    made = []
    for number, tensors in enumerate(zip(*values)):
        of_this = {name: of[number] for name, of in several.items()}
        made.append(process(*make(*tensors), **of_this))
    return made[0], made[1:]


def cause(one, ranks, step=0):
    parts = Values(one, ranks, TOLERANCE, {}), Differences(one, ranks, TOLERANCE, {})
    return Cause(*parts, Variables(one, ranks), step)


def blamed(*both, step=0):
    """The first finding on the cause, or None."""
    return next(iter(cause(*both, step=step).blame()[0]), None)


# ---- what goes into a model from outside of torch

GENERATORS = [[{"main.rng": 0}], [{"main.rng": 0}], [{"main.rng": 1}]]
DRAWING = [
    [{"main.rng": 0}, {"main.rng": 3}],
    [{"main.rng": 0}, {"main.rng": 3}],
    [{"main.rng": 1}, {"main.rng": 4}],
]
LIMITS = [[{"limit": 8}], [{"limit": 3}], [{"limit": 3}]]
SCRIPT = "rng = default_rng()\nseen = observe(limit)\nseen_here = torch.tensor(observe(limit))\n"


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return f"{tmp_path}/script.py"


def into_a_model(name, *before, **about):
    """What makes a value that differs, which goes into a model, and others before it."""

    def make(x):
        return [*before, seen(1, name, x, **about), inputs(2, x, made_from=[1])]

    return make


def observed(line="train.py:1", **about):
    """Observations of an environment."""
    return into_a_model("tensor", line=line, **about)


def test_environments_of_own_seeds(script):
    """A look, which names the generator and where it is made; no remedy, as it is right."""
    found = blamed(*processes(observed(f"{script}:3"), OTHER, generators=GENERATORS))
    assert (found.verdict, found.advice, found.remedy) == ("look", "unpaired", "")
    assert found.text.endswith(f"{ADVICE['unpaired']} (main.rng)")
    assert found.more == [f"{script}:1: rng = default_rng()"]
    found = blamed(*processes(observed(), OTHER, generators=DRAWING))
    assert (found.verdict, found.advice) == ("look", "drawing")
    found = blamed(*processes(observed(), OTHER))
    assert (found.verdict, found.advice) == ("WRONG", "share") and found.remedy


@pytest.mark.parametrize("generators", [GENERATORS, DRAWING])
def test_an_environment_of_other_numbers(script, generators):
    """A number of the line itself that the ranks have otherwise is the cause."""
    about = {"generators": generators, "variables": LIMITS}
    found = blamed(*processes(observed(f"{script}:3", library="lib.py:3"), OTHER, **about))
    assert found.verdict == "WRONG" and found.advice == "share"
    assert found.more == [
        "in lib.py:3",
        f"{script}:3: limit is 8 on one process, 3, 3 on the ranks",
    ]


def test_numbers_that_have_made_a_value(script):
    """Those that the line's own names were made from; no number is of the line itself."""
    with open(script, "a") as file:
        file.write("inputs = torch.tensor(seen)\n")
    found = blamed(*processes(observed(f"{script}:4"), OTHER, variables=LIMITS))
    assert found.more == [f"{script}:2: limit is 8 on one process, 3, 3 on the ranks"]


def test_numbers_beside_values_that_are_right(script):
    """Up to which a mean over ranks is: both are named."""
    with open(script, "a") as file:
        file.write("inputs = part * seen\n")

    def make(part, x):
        made = seen(1, "mean", part, line="train.py:5"), seen(2, "mul", x, made_from=[1], line=line)
        return [*made, loss(3, x.sum(), made_from=[2])]

    line = f"{script}:4"
    found = blamed(*processes(make, MEAN, OTHER, variables=LIMITS))
    assert found.more == [
        "a mean over ranks is right up to train.py:5  [mean]",
        f"{script}:2: limit is 8 on one process, 3, 3 on the ranks",
    ]


def test_no_environment():
    """What torch has drawn, what comes of a batch, of a model, or does not go into one."""

    def advice(make):
        return blamed(*processes(make, OTHER, generators=GENERATORS)).advice

    drawn, batch = seen(0, "rand", ONE), seen(0, BATCH, ONE, made_by="data.py:3")
    empty, filled = seen(0, "zeros", 0 * ONE), seen(6, "div", 0 * ONE, made_from=[0])
    model = inputs(3, ONE), outputs(4, ONE, made_from=[3])
    assert advice(into_a_model("mul", empty, filled, made_from=[6])) == "unpaired"
    assert advice(into_a_model("mul", drawn, made_from=[0])) == "share"
    assert advice(into_a_model("mul", batch, made_from=[0])) == "share"
    assert advice(into_a_model(BATCH, made_by="data.py:3")) == "share"
    assert advice(into_a_model("mul", *model, made_from=[4])) == "share"
    assert advice(lambda x: [seen(1, "tensor", x), loss(2, x.sum(), made_from=[1])]) == "share"


def test_copies():
    """All ranks have the same, but from what torch has drawn, or that does not go into a model."""

    def found(make, values=COPIED):
        return blamed(*processes(make, values))

    of_environment = found(observed())
    assert of_environment.verdict == "WRONG" and "Seed them by rank" in of_environment.text
    empty = seen(0, "zeros", 0 * ONE)
    assert found(into_a_model("zeros", empty, made_from=[0])).advice == "copied"
    # Of another line, too, which has run other numbers of times.
    assert found(into_a_model("mul", empty, made_from=[0, 7])).advice == "share"
    assert found(observed(), OTHER).advice == "share" == found(into_a_model("randn")).advice
    drawn = seen(0, "rand", ONE)
    assert found(into_a_model("mul", drawn, made_from=[0])).advice == "share"
    weights = found(lambda x: [seen(1, "tensor", x), loss(2, x.sum(), made_from=[1])])
    assert weights.advice == "share"


def test_copies_of_several_parts():
    """Also of one that has nothing; a single number, such as a temperature, is no row."""

    def make(x):
        return [seen(1, "tensor", None, x), inputs(2, None, x, made_from=[1])]

    assert blamed(*processes(make, COPIED)).advice == "copied"
    assert blamed(*processes(observed(), ALIKE)).advice == "share"


def test_environments_that_come_to_the_same_states():
    """As of a small game, or of shards: a look. Not so of a batch, which has a sampler."""
    steps = [PARTS[0] + 1, PARTS[1] + 2]
    values = [(steps[0], *steps), (steps[1], *steps[::-1])]

    def advice(name="tensor", made_by="", **about):
        def make(*batches):
            found = []
            for step, x in enumerate(batches):
                value = seen(2 * step, name, x, step=step, line="train.py:1", made_by=made_by)
                into = inputs(2 * step + 1, x, made_from=[2 * step], step=step, line="train.py:2")
                found += [value, into]
            return found

        gradients = [(1.0, 1.0), (1.2, 1.2), (1.2, 1.2)]
        return blamed(*processes(make, *values, gradients=gradients, **about)).advice

    assert advice() == "stream" and advice(generators=GENERATORS) == "unpaired"
    assert advice(BATCH, "data.py:3") == "share"


def test_words_of_own_files():
    """Integers of a rank's own files are a look; not those that torch has chosen, nor those that go
    into a loss alone."""
    ids = ONE.argsort(0), PARTS[0].argsort(0) + 1, PARTS[1].argsort(0) + 2

    def of_words(x):
        return [seen(1, "tensor", x, integers=[0]), inputs(2, x, made_from=[1], integers=[0])]

    def of_choice(x):
        chosen = seen(1, "gather", x, integers=[0], made_from=[0])
        return [seen(0, "rand", ONE), chosen, inputs(2, x, made_from=[1], integers=[0])]

    def of_loss(x):
        return [seen(1, "tensor", x, integers=[0]), loss(2, x.sum() / 1.0, made_from=[1])]

    verdicts = [blamed(*processes(make, ids)).verdict for make in (of_words, of_choice, of_loss)]
    assert verdicts == ["look", "WRONG", "WRONG"]


# ---- random numbers


def test_ratio_of_own_numbers(script):
    """A ratio of sums, as in a Dice loss, may be intended; not by a number that differs."""

    def make(x):
        ratio = seen(1, "div", x, by_gradient=True, line=f"{script}:3")
        return [ratio, loss(2, x, made_from=[1])]

    found = blamed(*processes(make, ALIKE))
    assert (found.verdict, found.advice) == ("look", "ratio")
    found = blamed(*processes(make, ALIKE, variables=LIMITS))
    assert (found.verdict, found.advice) == ("WRONG", "share")


APART = Seen("apart", "train.py:1", "rand", 0, {})
GAPS = Seen("gaps", "train.py:1", "batch", 0, {})


def test_draws_that_are_no_share(script):
    """After them, what is drawn, chosen or comes from outside cannot be compared; what a line makes
    of right values can."""

    def found(name, made_from, note=APART, **about):
        def make(x):
            value = seen(1, name, x, made_from=made_from, line=f"{script}:3")
            return [(0, note), seen(0, "rand", ONE), value, loss(2, x.sum(), made_from=[1])]

        return blamed(*processes(make, OTHER, **about))

    for name, made_from in (("index_select", [0]), ("rand", []), ("tensor", [])):
        assert (found(name, made_from).advice, found(name, made_from).verdict) == ("apart", "look")
    wrong = found("mul", [0])
    assert (wrong.advice, wrong.verdict) == ("share", "WRONG")
    assert found("mul", [0], GAPS).advice == "apart"
    assert found("rand", [], variables=LIMITS).advice == "share"


@pytest.mark.parametrize(
    ("name", "counts", "advice"),
    [
        ("arange", [torch.arange(8.0), torch.arange(0.0, 8, 2), torch.arange(1.0, 8, 2)], "apart"),
        ("eye", [torch.eye(8), torch.eye(4), torch.eye(4)], "share"),
        ("arange", [None] * 3, "share"),  # of nothing
        ("rand", [torch.arange(8.0), torch.arange(0.0, 8, 2), torch.arange(1.0, 8, 2)], "share"),
        ("arange", [torch.arange(8.0)] * 3, "share"),
        ("arange", [torch.arange(0.0, 16, 2), *torch.arange(8.0).view(4, 2).T], "share"),
    ],
)
def test_places_of_a_share(name, counts, advice):
    """After those that a rank counts for its share in another layout, nothing can be compared."""

    def make(x, count):
        value = seen(2, "mul", x, made_from=[1])
        return [seen(1, name, count), value, loss(3, x.sum(), made_from=[2])]

    assert blamed(*processes(make, OTHER, counts)).advice == advice


def test_batches_are_not_drawn():
    """A batch of the script's own dataset is wrong, also after draws that are no share."""

    def make(x):
        batch = seen(1, BATCH, x, made_by="data.py:3")
        return [(0, APART), batch, inputs(2, x, made_from=[1])]

    assert blamed(*processes(make, OTHER)).verdict == "WRONG"


def test_a_generator_that_draws_for_a_loss():
    """It is said of a loss, too: nothing after it can be compared."""
    found = blamed(*processes(lambda x: [loss(1, x)], TWICE, generators=DRAWING))
    assert found.verdict == "look" and ADVICE["drawing"] in found.text


GATHER = Collective("all_gather", "train.py:50", "", False)


@pytest.mark.parametrize(
    ("maker", "advice"),
    [
        (seen(2, "randn", ONE), "gathered"),
        (seen(2, "arange", ONE), "share"),  # counts, and is not drawn
        (seen(2, "randn", ONE[:3]), "share"),  # numbers for something else
        (seen(2, "randn", None), "share"),
        (seen(2, "mul", ONE, made_from=[0]), "share"),
        (seen(2, BATCH, ONE, made_by="data.py:3"), "share"),
        (seen(2, BATCH, ONE, made_by=""), "share"),  # of a TensorDataset
    ],
)
def test_numbers_for_gathered_rows(maker, advice):
    """Those drawn for the rows of a gathered batch are for other rows than one process's."""

    def make(x):
        value = seen(3, "add", None, x, made_from=[1, 2])
        call = 0, GATHER
        first = [seen(0, "tensor", torch.ones(2)), seen(1, "rand", torch.tensor(0.5)), maker]
        return [*first, call, value, loss(4, x.sum(), made_from=[3])]

    values = ONE, ONE + 1, ONE + 2
    found = blamed(*processes(make, values))
    assert found.advice == advice and found.verdict == ("WRONG" if advice == "share" else "look")
    assert found.more[-1] == "before it, this gathers: train.py:50"


def test_numbers_of_another_step():
    """As a queue that was drawn once: they are for no rows of this batch."""

    def make(x):
        value = seen(3, "add", x, made_from=[1], step=1)
        call = 1, GATHER
        return [seen(1, "randn", ONE), call, value, loss(4, x.sum(), made_from=[3], step=1)]

    about = {"gradients": [(1.0, 1.0), (1.0, 1.2), (1.0, 1.2)]}
    assert blamed(*processes(make, (ONE, ONE + 1, ONE + 2), **about), step=1).advice == "share"


# ---- batches


@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [
        ({3: 1.0}, {4: 2.0, 9: 5.0}, "collate"),  # 9: one that a sampler has repeated
        ({3: 1.0}, {4: 2.5}, "share"),
        ({3: 1.0}, None, "share"),
    ],
)
def test_batches_of_the_same_samples(first, second, advice):
    """Then it is collate_fn that makes something else of them, as MixUp does."""

    def make(x, samples):
        batch = seen(1, BATCH, x, made_by="data.py:3", samples=samples)
        return [batch, inputs(2, x, made_from=[1])]

    found = blamed(*processes(make, OTHER, ({3: 1.0, 4: 2.0}, first, second)))
    assert found.advice == advice and found.verdict == ("WRONG" if advice == "share" else "look")


@pytest.mark.parametrize("said", ["data.py:3", "other.py:3"])
def test_a_dataset_that_remembers(said):
    """Its sample depends on those before it."""

    def make(x):
        both = seen(1, BATCH, x, made_by="data.py:3", samples=None), inputs(2, x, made_from=[1])
        return [*both, (0, Said("remembers", said))]

    advice = blamed(*processes(make, OTHER)).advice
    assert advice == ("remembers" if said == "data.py:3" else "share")


@pytest.mark.parametrize(
    ("name", "one", "advice"),
    [
        ("__getitem__", PARTS[0], "chosen"),
        ("__getitem__", ONE, "share"),
        ("mul", PARTS[0], "share"),
    ],
)
def test_as_many_samples(name, one, advice):
    """On one process as on each rank, chosen of what is a larger batch there."""

    def make(x, batch):
        chosen = seen(1, name, x, None, made_from=[0]), inputs(2, x, made_from=[1])
        return [seen(0, BATCH, batch), *chosen, loss(3, x.sum(), made_from=[2])]

    found = blamed(*processes(make, (one, PARTS[0] + 1, PARTS[1] + 2), SHARES))
    assert found.advice == advice
    assert blamed(*processes(make, (one, PARTS[0] + 1, PARTS[1] + 2), COPIED)).advice == "share"


def test_as_many_samples_on_all():
    """Not if all ranks have the same, if these are single numbers, or go into no model."""

    def advice(*values, is_input=True):
        def make(x, batch):
            into = inputs(2, x, made_from=[1]) if is_input else loss(2, x, made_from=[1])
            return [seen(0, BATCH, batch), seen(1, "__getitem__", x, made_from=[0]), into]

        return blamed(*processes(make, values, SHARES)).advice

    assert advice(PARTS[0], PARTS[0] + 1, PARTS[1] + 2) == "chosen"
    assert advice(PARTS[0], PARTS[0] + 1, PARTS[0] + 1) == "share"
    assert advice(*[torch.tensor(number) for number in (2.0, 7.0, 8.0)]) == "share"
    assert advice(PARTS[0], PARTS[0] + 1, PARTS[1] + 2, is_input=False) == "share"


def test_streams():
    """An IterableDataset's batches may be shards of each rank."""
    found = blamed(*processes(into_a_model(STREAM, (0, CALL), loss(9, ONE)), OTHER))
    assert (found.verdict, found.advice) == ("look", "stream")
    assert not found.more  # a call that is not differentiated is no cause of it


DATA = """\
class Own:
    def __getitem__(self, i):
        return self.items[i:limit]
for name in {*names}: print(name)
"""


def test_data_of_each_rank(tmp_path):
    """Below a batch that is WRONG: numbers of its dataset's lines, and what may make the ranks'
    data another; not below a loss, nor what may be intended."""
    (tmp_path / "data.py").write_text(DATA)
    file = f"{tmp_path}/data.py"
    said = (0, Said("file", file)), (0, Said("unseeded", "train.py:7"))
    order = f"if of strings, a set has another order in each process: {file}:4"

    def of_batch(x):
        batch = seen(1, BATCH, x, made_by=f"{file}:2")
        return [*said, batch, inputs(2, x, made_from=[1])]

    more = blamed(*processes(of_batch, OTHER, variables=LIMITS)).more
    assert f"{file}:3: limit is 8 on one process, 3, 3 on the ranks" in more[0], more
    assert more[1] == "without a seed, each rank draws its own: train.py:7"
    assert order in more[2]

    def of_observations(x):
        return [*said, *observed()(x)]

    found = blamed(*processes(of_observations, OTHER, generators=GENERATORS))
    assert found.verdict == "look" and not [text for text in found.more if order in text]
    assert order in str(blamed(*processes(of_observations, COPIED)).more)

    def of_shards(x):
        return [*said, *into_a_model(STREAM)(x)]

    assert order in str(blamed(*processes(of_shards, OTHER)).more)

    def of_loss(x):
        return [*said, seen(0, "rand", ONE), loss(1, x, made_from=[0])]

    found = blamed(*processes(of_loss, TWICE))
    assert found.verdict == "WRONG" and not found.more


# ---- passes through models


def model(x, y, index=1, inside=True, **about):
    """A pass through a model, of these inputs and outputs."""
    value = seen(index + 1, "mul", y, made_from=[index], model=index)
    out = outputs(index + 2, y, made_from=[99, index], **about)  # 99: a line in it, of other counts
    return [inputs(index, x), *([value] if inside else []), out]


@pytest.mark.parametrize("last", ["batch_norm", "cat"])
def test_batch_norm_beside_the_model(last):
    """As of an average's keys, of other rows together than one process's: what follows is a look;
    not if other numbers went into it."""

    def found(*given):
        def make(x, y):
            made = seen(1, "linear", x), seen(2, "batch_norm", y, made_from=[1])
            return [*made, seen(3, last, y, made_from=[2]), loss(4, y.sum(), made_from=[3])]

        found = blamed(*processes(make, given, OTHER))
        return found.verdict, found.line, found.advice

    assert found(*SHARES) == ("look", "train.py:2", "coupled")
    assert found(*OTHER) == ("WRONG", "train.py:1", "share")


PADDED = torch.ones(8, 5), torch.ones(4, 3), torch.ones(4, 5)  # to the longest of the batch


@pytest.mark.parametrize(
    ("inside", "advice"),
    [
        (OTHER, "coupled"),
        (SHARES, "share"),
        ((ONE, ONE[:, :3], ONE), "share"),
        ((ONE, PARTS[0][:, :3] + 1, PARTS[1][:, 3:] + 2), "share"),
        (ALIKE, "share"),  # single numbers
    ],
)
def test_coupled_samples_that_are_padded(inside, advice):
    """What a model gives cannot be told then; but a value in it that has the batch's rows."""

    def make(x, y, total):
        about = {"made_from": [1], "model": 1, "integers": [2] if y.dim() == 1 else []}
        made = inputs(1, x), seen(2, "mul", None, torch.ones(3), y, **about)  # and what is right
        return [*made, outputs(3, x, made_from=[1]), loss(4, total, made_from=[3])]

    found = blamed(*processes(make, PADDED, inside, TWICE))
    places = [integers(x)[:, 0] for x in OTHER]
    assert blamed(*processes(make, PADDED, places, TWICE)).advice == "share"
    assert found.advice == advice and found.line == f"train.py:{2 if advice == 'coupled' else 3}"


def test_padded_after_coupled_samples():
    """Then the loss says nothing, unless the ranks do not average, or it can be told."""

    def wrong(padded, coupled=True, own=False, other=PADDED):
        def make(x, y, z, more, total, pad):
            first = [*model(x, y), loss(4, y.sum(), made_from=[3])] * coupled
            beside = seen(7, "pad", pad, step=1)
            return [*first, outputs(5, z, more, step=1), loss(6, total, step=1), beside]

        factors = [(1.0, 1.0), (1.2, 1.2), (1.2, 1.4 if own else 1.2)]
        both = processes(make, SHARES, OTHER, padded, other, TWICE, PADDED, gradients=factors)
        parts = Values(*both, TOLERANCE, {}), Differences(*both, TOLERANCE, {}), Variables(*both)
        steps = [0, 1] if coupled else [1]
        found, *_ = find_causes(*parts, steps, [], float("inf"))
        return [each.what for each in found if each.verdict == "WRONG"]

    assert wrong(PADDED) == [] and wrong(SHARES) == ["loss"] == wrong(PADDED, coupled=False)
    assert wrong(PADDED, other=SHARES) == ["loss"]  # what it gives can be told in part
    assert "averaging" in wrong(PADDED, own=True)


@pytest.mark.parametrize(("inside", "line"), [(True, "train.py:2"), (False, "train.py:3")])
def test_coupled_samples(inside, line):
    """A look; but not where the ranks' gradients differ from each other."""

    def make(x, y):
        return [*model(x, y, inside=inside), loss(4, y.sum(), made_from=[3])]

    (found,), verdict = cause(*processes(make, SHARES, OTHER)).blame()
    assert (found.verdict, found.advice, verdict) == ("look", "coupled", "look")
    assert found.line == line
    (found, averaging), verdict = cause(*processes(make, SHARES, OTHER, own=True)).blame()
    assert (found.advice, averaging.verdict, verdict) == ("coupled", "WRONG", "WRONG")

    def counted(x, y):  # its rows, before: as an index, which says nothing
        return [seen(2, "arange", torch.arange(float(len(y))), model=1), *make(x, y)]

    ((found,), _) = cause(*processes(counted, SHARES, OTHER)).blame()
    assert found.line == line


def test_coupled_samples_of_the_second_model():
    """Of other inputs, the first one's outputs have to be others."""
    found = blamed(*processes(lambda x, y: [*model(y, y), *model(x, y, 4)], SHARES, OTHER))
    assert (found.advice, found.line) == ("coupled", "train.py:5")


@pytest.mark.parametrize("inside", [True, False])
def test_coupled_samples_of_an_earlier_step(inside):
    """A GAN's generator is called before its discriminator's step, and trained after it."""

    def of(x, y, is_apart=False):
        def make(x, y):
            apart = [seen(0, "rand", ONE), seen(4, "mul", y, made_from=[0])]
            of_model = 4 if is_apart else 3
            later = inputs(5, y, made_from=[of_model], step=1)
            loss_of = loss(6, y.sum(), made_from=[5], step=1)
            return [*model(x, y, inside=inside), *apart * is_apart, later, loss_of]

        return blamed(*processes(make, x, y), step=1)

    found = of(SHARES, OTHER)
    assert (found.advice, found.verdict) == ("coupled", "look")
    assert found.line == ("train.py:2" if inside else "train.py:3")
    assert of(OTHER, OTHER).advice == "share"  # it got other inputs
    apart = of(SHARES, OTHER, is_apart=True)  # made from nothing of the model
    assert apart.line == "train.py:4" and apart.advice == "share"


@pytest.mark.parametrize("last", [3, 4])
def test_lines_of_coupled_samples(last):
    """The first inside of the model that differs, also of a pass of an earlier step, whatever its
    outputs are known to be made from."""

    def make(x, y, step):
        inside = [
            seen(number, "mul", each, made_from=[before], model=1)
            for number, each, before in ((2, x, 1), (5, y, 2), (3, x, 1), (4, y, 3))
        ]
        out = outputs(6, y, made_from=[last, 1])
        into = inputs(7, y, made_from=[6], step=step)
        return [inputs(1, x), *inside, out, into, loss(8, y.sum(), made_from=[7], step=step)]

    for step in range(2):
        found = blamed(*processes(make, SHARES, OTHER, [step] * 3), step=step)
        assert (found.advice, found.line) == ("coupled", "train.py:4"), step


def test_losses_in_models():
    """Their outputs are numbers: no sample's result, which others could have changed."""

    def make(x, y):
        value = seen(2, "mean", y, made_from=[1], model=1)
        out = outputs(3, None, y, made_from=[2, 1])
        return [inputs(1, x), value, out, loss(4, y, made_from=[3])]

    found = blamed(*processes(make, SHARES, ALIKE))
    assert (found.verdict, found.what, found.line) == ("WRONG", "value", "train.py:2")


def test_passes_whose_inputs_are_unknown():
    """As where a first try has failed on one rank, whose inputs are one more."""
    both = processes(lambda y: [outputs(3, y), loss(4, y.sum(), made_from=[3])], OTHER)
    assert blamed(*both).advice != "coupled"


def passes_of(*batches, lines=("train.py:1",), **about):
    """A pass of each batch, whose outputs are also a number and nothing; a loss; and then a value
    that the ranks have otherwise."""
    found = []
    for number, x in enumerate(batches):
        at = {"line": lines[number % len(lines)], "number": number // len(lines)}
        found.append(inputs(2 * number, None, x, **at))
        made_from = {"made_from": [2 * number]}
        out = outputs(2 * number + 1, None, torch.tensor(1.0), x, **made_from, **at, **about)
        found.append(out)
    return [*found, loss(20, torch.tensor(2.0)), seen(21, "mul", batches[0] + len(batches[0]))]


HALVES = [[part[:2], part[2:]] for part in PARTS]
UNEVEN = [ONE[:6], ONE[6:]]


@pytest.mark.parametrize("own", [False, True])
def test_passes_of_limited_size(own):
    """By batch norm, a sample's result depends on its pass: a look."""

    def of(one, *ranks, **about):
        values = [one, *ranks]
        return cause(*processes(lambda x: passes_of(*x, **about), values, own=own)).blame()

    norm = {"has_batch_norm": True}
    lines = {"lines": ["train.py:1", "train.py:2"]}
    for one, about in ([ONE], {}), (UNEVEN, {}), ([ONE], lines):
        found, verdict = of(one, *HALVES, **norm, **about)
        assert (found[0].advice, found[0].verdict) == ("coupled", "look")
        assert found[0].text.endswith("Intended?") and "2, 2 on the ranks" in found[0].text
        assert verdict == ("WRONG" if own else "look") and len(found) == 1 + own
    result = judge(
        *processes(lambda x: passes_of(*x, **norm), [[ONE], *HALVES], own=own), TOLERANCE
    )
    assert own or not result.may_be_rounding  # of gradients that are as far off
    found, _ = of([ONE], *HALVES)  # without it, no value tells anything: they are of other samples
    assert [each.what for each in found] == ["averaging"] * own


def test_passes_that_have_no_rows_first():
    """But the longest sequence: of one pass, that is no other size."""

    def make(x, y):
        of_model = inputs(0, x, line="train.py:1"), outputs(1, y, made_from=[0])
        return [*of_model, loss(20, torch.tensor(2.0)), seen(21, "mul", x + len(x))]

    longest = torch.ones(6, 8), torch.ones(5, 4), torch.ones(6, 4)
    assert blamed(*processes(make, SHARES, longest)).line == "train.py:21"


@pytest.mark.parametrize(
    ("one", "ranks", "about"),
    [
        ([ONE, 2 * ONE], [[part, 2 * part] for part in PARTS], {}),
        (PARTS, [PARTS[:1], PARTS[1:]], {}),  # of the ranks' own batches, one after the other
        (PARTS[::-1], [PARTS[:1], PARTS[1:]], {}),
        (PARTS, [PARTS[1:], PARTS[:1]], {}),
        ([ONE], [[ONE], [ONE]], {}),  # of what is no share
        ([ONE, 2 * ONE], [[ONE, 2 * ONE]] * 2, {}),
        ([ONE, 2 * ONE], [[ONE, 2 * ONE]] * 2, {"lines": ["train.py:1", "train.py:2"]}),
    ],
)
def test_passes_of_the_usual_size(one, ranks, about):
    both = processes(lambda x: passes_of(*x, has_batch_norm=True, **about), [one, *ranks])
    assert "coupled" not in [found.advice for found in cause(*both).blame()[0]]


# ---- weights


def test_other_weights():
    """All else follows from them."""

    def make(x, factor):
        weight = 0, Seen("weight", "train.py:9", "optimizer 0", 0, {"w": sketch(ONE * factor)})
        return [weight, loss(1, x)]

    assert cause(*processes(make, TWICE, (1, 2, 2))).blame() == ([], "WRONG")


def test_other_weights_that_no_optimizer_has():
    """As of a teacher; and the ranks' own gradients are said beside it."""

    def make(x, total):
        return [inputs(1, ONE, weights=(total, 9.0)), loss(2, x)]

    def evaluated(x, total):
        about = {"weights": (total, 9.0), "callers": ["train.py:8"]}
        return [(0, Seen("evaluation", "train.py:7", "Net", 0, {}, about=about)), loss(2, x)]

    for each in make, evaluated:
        (found,), verdict = cause(*processes(each, TWICE, (1.0, 1.5, 1.5))).blame()
        assert (found.verdict, found.advice, verdict) == ("WRONG", "weights", "WRONG")
        assert blamed(*processes(each, TWICE, (1.0, 1.0, 1.0))).what == "loss"
        assert blamed(*processes(each, TWICE, (1e-6, 3e-6, 3e-6))).what == "loss"  # by rounding
        assert blamed(*processes(each, TWICE, (9.0, 9.001, 9.001))).what == "loss"  # too near
    assert found.line == "train.py:7" and found.more == ["called at train.py:8"]
    assert blamed(*processes(evaluated, TWICE, (1.0, 1.5, 1.5)), step=1) is None

    def coupled(x, y, total):
        """By batch norm, which changes the teacher, too."""
        return [*model(x, y), *evaluated(y.sum(), total)]

    assert blamed(*processes(coupled, SHARES, OTHER, (1.0, 1.5, 1.5))).advice == "coupled"
    found, _ = cause(*processes(make, TWICE, (1.0, 1.5, 1.5), own=True)).blame()
    assert [each.what for each in found] == ["weight", "averaging"]


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_are_averaged(own):
    """As by local SGD, whose gradients are each rank's own; where they are not, the loss tells."""
    found = blamed(*processes(lambda x: [(0, Said("local", "a:20")), loss(1, x)], TWICE, own=own))
    assert (found.verdict, found.advice) == (("look", "local") if own else ("WRONG", "share"))
    gradients = [(1.0, 1.0), (2.0, 2.0), (0.001, 0.001)]  # one rank's samples are easy
    made = processes(lambda x: [(0, Said("local", "a:20")), loss(1, x)], TWICE, gradients=gradients)
    assert not judge(*made, TOLERANCE).of("WRONG")


@pytest.mark.parametrize(("call", "found"), [("", ["WRONG"]), (PASS, []), ("broadcast", [])])
def test_buffers_beside_what_may_be_intended(call, found):
    """Each rank's own follow from no gradient, unless rank 0's are sent."""

    def make(x, factor):
        bank = sketches({"bank": ONE * factor}, any_order=True)
        calls = [(0, Collective(call, "train.py:4", "", False))] * bool(call)
        buffer = 0, Seen("buffer", "train.py:8", "Net", 0, bank)
        return [*calls, seen(1, "div", x, by_gradient=True), loss(2, x, made_from=[1]), buffer]

    result = judge(*processes(make, ALIKE, (1.0, 2.0, 3.0)), TOLERANCE)
    assert rule(result, "value") == ["look"] and rule(result, "buffer") == found


# ---- gradients that are not averaged


def averaging(*found, change=None):
    one, ranks = processes(lambda _: found, WHOLE, own=True)
    for each in (one, *ranks) if change else ():
        change(each)
    (of_step,) = of_gradients(cause(one, ranks))
    return of_step


def a_pass(index, **about):
    return [inputs(index, ONE), outputs(index + 1, ONE, made_from=[index], **about)]


def a_loss(index):
    return loss(index, torch.tensor(2.0))


def test_not_averaged():
    """The last pass of the model whose gradients they are."""
    after = seen(5, "mul", ONE)
    found = averaging(
        *a_pass(1, callers=["train.py:30"]), *a_pass(3, trains=["v"]), a_loss(5), after
    )
    assert found.more == ["the last pass: train.py:2  [Net]"] and not found.line
    assert found.text.endswith("not averaged in this step?")
    assert found.remedy == "call the wrapped model" and found.section.endswith("#gradients")
    bare = averaging(*a_pass(1, is_ddp=False, callers=["train.py:30"]), a_loss(3), a_loss(4))
    assert bare.more == ["the last pass: train.py:2  [Net]", "called at train.py:30"]
    assert bare.text == found.text and bare.remedy == found.remedy


def test_two_backward_passes():
    """After one forward pass: DDP averages in the first alone. Not after one each."""
    found = averaging(*a_pass(1), a_loss(3), a_loss(4))
    assert "a second backward() followed" in found.text and found.line == "train.py:4"
    assert found.remedy.startswith("call backward() once")
    assert found.section.endswith("#one-backward-for-each-forward-pass")
    found = averaging(*a_pass(1), a_loss(3), *a_pass(4), a_loss(6))
    assert "second" not in found.text


def told(line, does):
    return 0, Averages(line, does)


def test_told_not_to_average():
    found = averaging(told("train.py:40", False), *a_pass(1), a_loss(3), a_loss(4))
    assert found.remedy == "let the last pass before the step average"
    assert found.section.endswith("#gradient-accumulation")
    assert found.more == ["the last pass: train.py:2  [Net]", "train.py:40"]
    assert "second" not in found.text
    late = told("train.py:40", False), *a_pass(1), told("train.py:41", True), a_loss(3)
    found = averaging(*late)
    assert found.line == "train.py:41" and "comes after the pass" in found.text
    assert found.more == ["the last pass: train.py:2  [Net]"]


def test_steps_without_a_pass():
    """As of an optimizer that steps inside of a model."""
    found = averaging(a_loss(3), a_loss(4))
    assert found.more == ["train.py:4", "the step: train.py:9"]


def test_averaged_by_hand():
    """Without DDP: the calls after backward(), which may leave out some."""

    def unwrap(each):
        for _, note in each[Step]:
            note.averaged[:], note.made["wrapped"][:] = [], []

    call = 0, Collective("all_reduce", "train.py:8", "", False)
    found = averaging(*a_pass(1, is_ddp=False), a_loss(3), call, change=unwrap)
    assert found.more[1:] == ["this all_reduce is after backward(): train.py:8"]
    assert found.remedy.startswith("average the gradients of all parameters")
    found = averaging(*a_pass(1), a_loss(3), call, change=unwrap)  # wrapped elsewhere
    assert found.remedy == "call the wrapped model" and len(found.more) == 1


def test_parameters_outside_of_ddp():
    """All that are not averaged, or some of them."""

    def add_name(each):
        for _, note in each.seen("gradient"):
            note.values["head.v"] = note.values["w"]

    found = averaging(*a_pass(1), a_loss(3), change=add_name)
    assert "DDP does not average head.v: not in it" in found.text
    assert found.remedy.startswith("wrap all that is trained")
    assert found.section.endswith("#model")

    def rename(each):
        for _, note in each[Step]:
            note.averaged[:] = ["v"]

    found = averaging(*a_pass(1), a_loss(3), change=rename)
    assert "DDP does not average these: not in it" in found.text


# ---- the first value


def integers(x):
    return (8 * x.abs()).round().long() + 1


def test_a_fault_beside_places():
    """Integers that go into a model, such as the edges of a graph, may be places: then another
    value that the loss is made from is the cause."""

    def what(make):
        found = blamed(*processes(make, SHARES, OTHER))
        return found.what, found.line

    def of_edges(x, y):
        ids = integers(y)
        fault = seen(3, "tensor", y)
        return [inputs(2, x, ids, integers=[1]), fault, loss(4, y.sum(), made_from=[3])]

    assert what(of_edges) == ("value", "train.py:3")

    def of_outputs(x, y):  # which follow from the edges
        ids = integers(y)
        out = outputs(3, y, made_from=[2])
        return [inputs(2, x, ids, integers=[1]), out, loss(4, y.sum(), made_from=[3])]

    assert what(of_outputs) == ("inputs", "train.py:2")

    def of_a_model(x, y):  # so do its own lines
        inside = seen(3, "mul", y, made_from=[2], model=2)
        into = inputs(2, x, integers(y), integers=[1])
        return [into, inside, loss(4, y.sum(), made_from=[3])]

    assert what(of_a_model) == ("inputs", "train.py:2")

    def of_right_outputs(x, y):  # where they are right, these are places; whatever others give
        into = inputs(2, x, integers(y), integers=[1])
        both = outputs(3, x, made_from=[2]), outputs(4, y)
        return [into, *both, a_loss(5), seen(6, "mul", y)]

    assert what(of_right_outputs) == ("value", "train.py:6")

    def of_a_line_inside(x, y):  # also where a line of the model has other values
        into = inputs(2, x, integers(y), integers=[1])
        inside = seen(3, "mul", y, made_from=[2], model=2)
        return [into, inside, outputs(4, x, made_from=[2]), a_loss(5)]

    assert what(of_a_line_inside) == ("value", "train.py:3")

    def of_other_numbers(x, y):  # no integers are no places
        return [inputs(2, y), outputs(3, x, made_from=[2]), a_loss(5), seen(6, "mul", y)]

    assert what(of_other_numbers) == ("inputs", "train.py:2")

    def of_places_of_a_loss(x, y):  # a batch of which only places are others is no cause
        batch = seen(1, BATCH, x, integers(y), integers=[1])
        into = inputs(2, x, integers(y), integers=[1], made_from=[1])
        total = seen(4, "cross_entropy", torch.tensor(2.0), made_from=[3, 1])
        return [
            batch,
            into,
            outputs(3, x, made_from=[2]),
            total,
            loss(5, torch.tensor(2.0), made_from=[4]),
        ]

    assert blamed(*processes(of_places_of_a_loss, SHARES, OTHER)) is None

    def of_outputs_that_are_not_noted(x, y):  # without the values of lines
        into = inputs(2, x, integers(y), integers=[1])
        return [into, outputs(3, made_from=[2]), a_loss(5)]

    assert blamed(*processes(of_outputs_that_are_not_noted, SHARES, OTHER)) is None

    def of_rows_alike(x, y, rows=None):  # which may be any samples'
        into = inputs(2, x, integers(y), integers=[1])
        out = outputs(3, torch.ones(rows or len(x), 2), made_from=[2])
        return [into, out, a_loss(5), seen(6, "mul", y)]

    assert what(of_rows_alike) == ("inputs", "train.py:2")
    # Not what all have as many rows of.
    assert what(functools.partial(of_rows_alike, rows=5)) == ("value", "train.py:6")

    def of_places(x, y):  # so does what is made from the same integers
        ids = seen(1, "randperm", integers(y), integers=[0])
        into = inputs(2, integers(y), integers=[0], made_from=[1])
        return [ids, into, seen(3, "mul", y, made_from=[1]), loss(4, y.sum(), made_from=[3])]

    assert what(of_places) == ("inputs", "train.py:1")

    def of_chosen_rows(x, y):  # rows that such integers have chosen are no places
        ids = seen(1, "randperm", integers(y), integers=[0])
        into = [seen(2, "index", y, made_from=[1]), inputs(3, y, made_from=[2])]
        return [ids, *into, seen(4, "tensor", y), loss(5, y.sum(), made_from=[4])]

    assert what(of_chosen_rows) == ("inputs", "train.py:1")

    def of_rounded(x, y):  # nor are those that are made from other numbers
        into = inputs(2, integers(y), integers=[0], made_from=[1])
        return [seen(1, "rand", y), into, seen(3, "tensor", y), loss(4, y.sum(), made_from=[3])]

    assert what(of_rounded) == ("inputs", "train.py:1")


def test_places_in_the_own_batch():
    """What sort() gives is no fault: the loss is, itself."""

    def make(y, total):
        sort = seen(1, "argsort", integers(y), integers=[0], places=[0])
        return [sort, loss(2, total, made_from=[1])]

    assert blamed(*processes(make, OTHER, TWICE)).what == "loss"

    def into_model(y):
        return [inputs(2, integers(y)[:, 0], y, integers=[0], places=[0])]

    found = blamed(*processes(into_model, OTHER))
    assert "of shape (8, 6) on one process" in found.text

    def nearly(y):
        return [inputs(2, y)]

    def with_places(y):  # which do not tell how far off the rest is
        return [inputs(2, y, torch.arange(float(len(y))) * len(y), integers=[1], places=[1])]

    values = ONE, PARTS[0] + 0.1, PARTS[1] + 0.1
    offs = [blamed(*processes(make, values)).off for make in (nearly, with_places)]
    assert offs[0] == offs[1] > 0


CALL = Collective("all_gather", "train.py:51", "", True)


OWN_GATHER = """\
class Gather(Function):
    def forward(ctx, x):
        all_gather(parts, x)
    def backward(ctx, grad):
        return grad
"""


def test_calls_that_are_not_differentiated(tmp_path):
    """They are named if the loss is right, but gradients are not; or else below the loss."""

    def found(*values, **about):
        return blamed(*processes(lambda x: [(0, CALL), loss(3, x)], *values, **about))

    backward = found(MEAN)
    assert backward.advice == "backward" and backward.line == "train.py:51"
    assert "or its backward does not sum over the ranks" in backward.text
    more = found(TWICE).more
    assert more == ["this all_gather is not differentiated: train.py:51"]
    (tmp_path / "net.py").write_text(OWN_GATHER)
    own = replace(CALL, line=f"{tmp_path}/net.py:3", has_backward=True)
    backward = blamed(*processes(lambda x: [(0, own), loss(3, x)], MEAN))
    assert backward.more == [f"its backward: {tmp_path}/net.py:4: def backward(ctx, grad):"]
    for other in replace(own, has_backward=False), replace(CALL, has_backward=True):
        more = blamed(*processes(lambda x, at=other: [(0, at), loss(3, x)], MEAN)).more
        assert "its backward" not in str(more)
    scaled = {"gradients": [(1.0, 1.0), (1.5, 1.0), (1.5, 1.0)]}  # nothing is lost of them
    assert found(MEAN, **scaled) is None
    halves = {"gradients": [(1.0, 1.0), (0.5, 1.0), (0.5, 1.0)]}
    assert found(MEAN, **halves).advice == "backward"
    unequal = {"gradients": [(1.0, 1.0), (1.2, 1.0), (1.1, 1.0)]}
    assert found(MEAN, **unequal).what == "averaging"
    assert blamed(*processes(lambda _: [(0, CALL)], MEAN)) is None  # of no loss


def test_other_values_of_the_same_loss():
    """What is right in the loss, but is not one process's: inside of a model, or after the loss. A
    number that is only logged is not, nor are gradients in another form."""

    def found(make, *values, **about):
        return blamed(*processes(make, *values, **about))

    right = a_loss(5)
    assert found(lambda x: [seen(1, "mul", x), right], OTHER) is None
    after = found(lambda x: [right, seen(6, "mul", x)], OTHER)
    assert (after.line, after.advice, after.verdict) == ("train.py:6", "same loss", "WRONG")
    assert after.text.endswith("on the ranks: but the loss is the same")
    assert found(lambda x: [right, seen(6, "flatten", x)], OTHER) is None  # a gradient's
    for name in ("mul", "flatten"):
        inside = found(lambda x, name=name: [seen(1, name, x, model=0), right], OTHER)
        assert inside.line == "train.py:1"
    alone = found(lambda x: [seen(1, "mul", x)], OTHER)
    assert alone.advice == "share"
    counted = found(lambda x: [right, seen(6, "arange", x)], OTHER)
    assert counted is None
    of_values = [right, seen(0, "rand", ONE)]
    for name in ("arange", "flatten"):
        made = found(lambda x, n=name: [*of_values, seen(6, n, x, made_from=[0])], OTHER)
        assert made.line == "train.py:6"
    made = found(lambda x: [seen(0, "rand", ONE), seen(6, "arange", x, made_from=[0])], OTHER)
    assert made.advice == "counted"
    assert found(into_a_model("arange"), OTHER).advice == "share"  # as places of words


def test_clipped_gradients():
    """Each rank by its own norm; not if all have the same, as they have been averaged."""

    def found(norms, own=False, near=True):
        def make(x, norm):
            near_loss = [seen(1, "mul", x)] * (own and near)
            total = loss(5, torch.tensor(2.0), made_from=[1] * own)
            return [*near_loss, total, seen(6, "clip_grad_norm_", norm)]

        return blamed(*processes(make, OTHER, norms, own=own))

    own_norms = [torch.tensor(number) for number in (2.0, 7.0, 8.0)]
    assert found(own_norms).line == "train.py:6" and found(ALIKE) is None
    assert found(own_norms, own=True).line == "train.py:1"  # they are averaged after it
    assert found(own_norms, own=True, near=False).what == "averaging"


def test_numbers_that_change():
    """If no value differs, numbers that do so from this step on; else these say nothing."""
    one, rank = [[{"k": 1, "size": n}, {"k": k, "size": n}] for k, n in ((1, 8), (5, 4))]
    about = {"variables": [one, rank, rank]}
    about["gradients"] = [(1.0, 1.0), (1.0, 1.2), (1.0, 1.2)]
    (found,), _ = cause(*processes(lambda _: [], MEAN, **about), step=1).blame()
    assert (found.verdict, found.what) == ("look", "numbers") and len(found.more) == 1
    assert "k is 1" in found.more[0]
    both = processes(lambda x: [loss(1, x, step=1)], TWICE, **about)
    assert [each.what for each in cause(*both, step=1).blame()[0]] == ["loss"]


def test_counted_by_each_rank(script):
    """Below what is WRONG from a step on; not if a number of the line itself is the cause, nor of
    what may be intended."""
    counted = [[{"limit": 8, "seen": by * step} for step in range(2)] for by in (8, 4, 4)]
    about = {"variables": counted, "gradients": [(1.0, 1.0), (1.0, 1.2), (1.0, 1.2)]}

    def make(x, by_gradient=False):
        ratio = seen(1, "div", x, by_gradient=by_gradient, line=f"{script}:3", step=1)
        return [ratio, loss(2, x, made_from=[1], step=1)]

    both = processes(make, ALIKE, **about)
    words = "counted by each rank: seen is 8 on one process, 4, 4 on the ranks"
    assert blamed(*both, step=1).more == [words]
    found = blamed(*processes(lambda x: make(x, True), ALIKE, **about), step=1)
    assert found.verdict == "look" and not found.more
    for of_rank in counted[1:]:
        of_rank[1]["limit"] = 3
    (text,) = blamed(*processes(make, ALIKE, **about), step=1).more
    assert "limit is 8" in text


# ---- what is said beside it


def test_averaging_beside_a_cause():
    """Also where the inputs may be meant, but not where they are WRONG: all follows from them."""

    def whats(make, values, **about):
        return [each.what for each in cause(*processes(make, values, own=True, **about)).blame()[0]]

    assert whats(observed(), OTHER) == ["inputs"]
    assert whats(observed(), OTHER, generators=GENERATORS) == ["inputs", "averaging"]
    assert whats(lambda x: [loss(1, x)], TWICE) == ["loss", "averaging"]
    verdict = cause(*processes(observed(), OTHER, own=True, generators=GENERATORS)).blame()[1]
    assert verdict == "WRONG"


def test_calls_beside_no_value():
    """A call is named below a value; if there is none, the gradients still are."""
    own = processes(lambda x: [(0, CALL), loss(3, x)], MEAN, own=True)
    assert [each.what for each in cause(*own).blame()[0]] == ["averaging"]
    gather = processes(lambda x: [(0, GATHER), loss(3, x)], MEAN)
    assert cause(*gather).blame() == ([], "unclear")


# ---- decisions

BRANCHES = """\
if x.mean() > limit:
    x = clamp(x)
if rank == 0:
    x = clamp(x)
if rank == 0 and count > 4:
    x = clamp(x)
if rank == 0 and loss.item() > 3:
    x = clamp(x)
x = clamp(x)
if good:
    x = clamp(x)
if rank == 0 and remaining:
    x = clamp(x)
if world > 1 and is_main:
    x = clamp(x)
"""


@pytest.fixture
def branches(tmp_path):
    (tmp_path / "main_loss.py").write_text(BRANCHES)  # a name that says nothing
    return f"{tmp_path}/main_loss.py"


def decided(line, x, is_alone, made_from=(4,), step=0, by_gradient=False, called_at=""):
    """A value that is made from a line, which one rank alone has run."""
    clamp = seen(4, "clamp", ONE, line=line, step=step, called_at=called_at)
    more = loss(3, torch.tensor(1.0), line=line, step=step)
    value = seen(5, "mul", x, made_from=made_from if is_alone else [], by_gradient=by_gradient)
    return [*[clamp, more] * is_alone, value, loss(6, x, made_from=[5])]


ALONE = False, True, False


def of_decision(*words, values=ALIKE, variables=([{}],) * 3, is_alone=ALONE, **about):
    both = processes(
        lambda x, here: decided(*words, x, here, **about), values, is_alone, variables=variables
    )
    return [each for each in cause(*both).blame()[0] if each.what == "branch"]


def test_decisions(branches):
    """By numbers of a rank's own share; not those by its rank, unless that decides by others."""
    (found,) = of_decision(f"{branches}:2", called_at="train.py:30")
    assert found.text.startswith("computed on rank 0 alone: a decision by numbers")
    assert found.more == ["called at train.py:30", f"{branches}:1: if x.mean() > limit:"]
    assert found.verdict == "WRONG" and found.line == f"{branches}:2"
    (found,) = of_decision(f"{branches}:2", by_gradient=True)
    assert found.verdict == "look"
    assert not of_decision(f"{branches}:4") and of_decision(f"{branches}:8")
    assert not of_decision(f"{branches}:6", variables=[[{"count": 1}]] * 3)
    (found,) = of_decision(f"{branches}:6", variables=[[{"count": n}] for n in (8, 5, 5)])
    assert "count is 8 on one process, 5, 5 on the ranks" in found.more[1]
    for line, name in (13, "remaining"), (15, "is_main"):  # a flag of numbers, or of ranks
        found = of_decision(f"{branches}:{line}", variables=[[{name: n}] for n in (1, 1, 0)])
        assert bool(found) == (name == "remaining")
    alike = [[{"remaining": n}] for n in (0, 1, 1)]
    assert not of_decision(f"{branches}:13", variables=alike)
    assert of_decision(f"{branches}:9")  # of no `if` in this file
    assert of_decision(f"{branches}:11")  # which may be of one rank's own
    assert not of_decision(f"{branches}:11", is_alone=(False, True, True))


def test_lines_of_one_rank_that_decide_nothing(branches):
    """As of its logs: the value that differs is not made from them; or they are of other steps."""
    assert not of_decision(f"{branches}:2", made_from=[7])

    def make(is_alone, step):
        clamp = seen(4, "clamp", ONE, line=f"{branches}:2", step=step)
        return [*[clamp] * is_alone, loss(6, torch.tensor(4.0 if is_alone else 2.0))]

    for step, whats in (0, ["loss", "branch"]), (1, ["loss"]):
        both = processes(make, (False, True, True), (step,) * 3)
        assert [each.what for each in cause(*both).blame()[0]] == whats
    right = processes(lambda here: [seen(4, "clamp", ONE)] * here, (False, True, True))
    (found,) = cause(*right).blame()[0]
    assert (found.what, found.verdict) == ("branch", "WRONG")


def test_decisions_of_all_ranks(branches):
    """As one process has no need of it; or all are in it, or a call in it would hang, but for one
    of some ranks."""
    on_ranks = {"is_alone": (False, True, True)}
    assert of_decision(f"{branches}:2", **on_ranks)

    def make(x, here, of_all):
        call = 0, Collective("all_reduce", f"{branches}:2", "", False, of_all)
        return [*decided(f"{branches}:2", x, here), call]

    for of_all in True, False:
        both = processes(make, ALIKE, (False, True, True), [of_all] * 3, variables=([{}],) * 3)
        whats = [each.what for each in cause(*both).blame()[0]]
        assert whats == (["value"] if of_all else ["value", "branch"])


def test_closures_of_other_numbers_of_calls():
    """In a step up to this one: then the ranks' calls do not meet."""

    def found(*calls, step=0):
        def make(x, count):
            note = Seen("closure", "train.py:7", "optimizer 0", 0, {"calls": count})
            return [outputs(1, x), (step, note)]

        (finding,) = cause(*processes(make, SHARES, calls, own=True)).blame()[0]
        assert ("call closure() other numbers of times" in finding.text) == bool(finding.line)
        assert finding.section.endswith("#an-optimizer-with-a-closure") == bool(finding.line)
        return finding.line, finding.remedy

    assert found(1, 2, 3) == ("train.py:7", "return the mean loss of all ranks from it")
    assert found(1, 2, 2)[1] == found(1, 2, 3, step=1)[1] == "call the wrapped model"


COUNTED = [torch.tensor(number) for number in (29.0, 15.0, 14.0)]


@pytest.mark.parametrize(
    ("name", "numbers", "is_found"),
    [
        ("div", COUNTED, True),
        ("mul", COUNTED, False),
        ("div", [torch.tensor(number) for number in (30.0, 15.0, 15.0)], False),
        ("div", ALIKE, False),
        ("div", MEAN, False),
    ],
)
def test_equal_losses_divided_by_own_numbers(name, numbers, is_found):
    """Of which each rank has its part; not by what is known of no line."""
    equal = [torch.tensor(1.0)] * 3

    def make(total, count, x, makers=(1, 2)):
        sums = seen(1, "sum", total), seen(2, "sum", count)
        return [*sums, seen(3, name, x, made_from=makers), loss(4, x, made_from=[3])]

    for makers in (1,), (1, 98):
        assert blamed(*processes(make, COUNTED, numbers, equal, [makers] * 3)) is None

    found = blamed(*processes(make, COUNTED, numbers, equal))
    assert (found is not None and found.line == "train.py:3") == is_found
    if is_found:
        assert found.text.startswith("[div]: divided by 29 on one process, 15, 14 on the ranks")


@pytest.mark.parametrize(("sizes", "mean"), [((8, 5, 3), 1.75), ((8, 4, 4), 2.0)])
def test_losses_of_unequal_rows(sizes, mean):
    """A mean of them, which counts for less on the rank that has more; the first is named, whose
    numbers may be nearly equal, and the others."""

    def make(size, x):
        rows = seen(1, "linear", torch.ones(size, 2))
        nearly = seen(2, "mean", torch.tensor(1.0), made_from=[1])
        return [rows, nearly, seen(3, "mean", x, made_from=[1]), loss(4, x, made_from=[2, 3])]

    found = blamed(*processes(make, sizes, [torch.tensor(n) for n in (mean, 1.0, 3.0)]))
    assert (found is not None) == (mean == 1.75)
    if found:
        assert found.line == "train.py:2" and "a mean of so many rows: 8 on one" in found.text
        assert found.more[0].startswith("so is train.py:3")


@pytest.mark.parametrize(
    ("mean", "is_mean"),
    [
        ([torch.tensor(n) for n in (1.75, 1.0, 3.0)], True),
        ([torch.tensor(n) for n in (2.0, 1.0, 3.0)], False),
        ([torch.ones(2), torch.ones(1), torch.ones(1)], False),
        ([torch.ones(2), torch.ones(2), None], False),
    ],
)
def test_means_of_unequal_rows(mean, is_mean):
    def make(size, x, makers):
        return [seen(1, "linear", torch.ones(size, 2)), seen(2, "sum", x, made_from=makers)]

    for sizes, fits in ((8, 5, 3), True), ((8, 5, 4), False):
        one, ranks = processes(make, sizes, mean, [[1]] * 3)
        values = Values(one, ranks, TOLERANCE, {})
        found = values.unequal_rows(values.all[2])
        assert found == ([8, 5, 3] if fits and is_mean else [])


def test_mean_of_unequal_rows_in_a_model():
    """Whose loss is not known to be made from it: then its numbers are said."""

    def make(size, x):
        rows = seen(1, "linear", torch.ones(size, 2))
        return [rows, outputs(2, x, made_from=[1]), loss(3, x, made_from=[2])]

    found = blamed(*processes(make, (8, 5, 3), [torch.tensor(n) for n in (1.75, 1.0, 3.0)]))
    assert found.verdict == "WRONG" and "1.75 on one process" in found.text


@pytest.mark.parametrize(
    ("name", "numbers", "is_found"),
    [
        ("cross_entropy", (2.0, 2.00001, 1.99999), True),
        ("max", (2.0, 2.00001, 1.99999), False),
        ("cross_entropy", (2.0, 2.0, 2.0), True),  # as of outputs that are all 0
    ],
)
def test_nearly_equal_losses_of_unequal_rows(name, numbers, is_found):
    def make(size, x):
        rows = seen(1, "linear", torch.ones(size, 2))
        return [rows, seen(2, name, x, made_from=[1]), loss(3, x, made_from=[2])]

    found = blamed(*processes(make, (8, 5, 3), [torch.tensor(n) for n in numbers]))
    assert (found is not None and "a mean of so many rows" in found.text) == is_found


@pytest.mark.parametrize("values", [COPIED, OTHER])
@pytest.mark.parametrize("own_flags", [True, False])
def test_values_that_are_planned(values, own_flags):
    """From the batch size of one process, as an average's momentum by the number of steps: then
    all ranks have the same."""
    both = processes(lambda x: [loss(1, torch.tensor(2.0)), seen(2, "mul", x)], values)
    result = judge(*both, TOLERANCE, scaled={"loader": "train.py:3"}, own_flags=own_flags)
    (found,) = [each for each in result.findings if each.what == "value"]
    is_planned = values is COPIED and not own_flags
    assert (found.verdict, found.advice == "planned") == (
        "look" if is_planned else "WRONG",
        is_planned,
    )


def test_numbers_that_are_given_alike():
    """What is made from them is apart, where each rank's own generator would draw others."""

    def found(line):
        def make(x, state):
            own = Seen("own", "train.py:1", "torch", 0, {"state": state}, about={"chooses": False})
            made = seen(1, "mul", ONE, drawn=line), seen(2, "add", x, made_from=[1])
            return [(0, own), *made, loss(3, x.sum(), made_from=[2])]

        return blamed(*processes(make, OTHER, (1, 2, 3)))

    assert found("train.py:1").advice == "apart" and found("train.py:9").advice == "share"
    assert found("train.py:1").off > 0.1


# ---- of several steps


def causes_of(both, steps, samples=(), lost=float("inf")):
    one, ranks = both
    parts = Values(one, ranks, TOLERANCE, {}), Differences(one, ranks, TOLERANCE, {})
    return find_causes(*parts, Variables(one, ranks), steps, samples, lost)


def losses_of(ratio, *gradients):
    """A ratio that may be intended, then a loss that is not."""

    def make(x, factor):
        first = [seen(1, "div", x, by_gradient=True), loss(2, x, made_from=[1])]
        return [*first, loss(3, torch.tensor(1.0 + factor), step=1)]

    return processes(make, ratio, (0, 1, 1), gradients=gradients)


def test_steps_after_what_cannot_be_compared():
    """Only what the ranks do not average is told of them."""

    def make(x, factor):
        first = seen(1, STREAM, x), inputs(2, x, made_from=[1])
        return [*first, loss(3, torch.tensor(1.0 + factor), step=1)]

    for factors, whats in ((1.2, 1.2), ["inputs"]), ((1.2, 1.4), ["inputs", "averaging"]):
        gradients = [(1.0, 1.0), *[(1.2, factor) for factor in factors]]
        found, _, lost = causes_of(processes(make, OTHER, (0, 1, 1), gradients=gradients), [0, 1])
        assert [each.what for each in found] == whats and lost == 0


def test_steps_after_what_may_be_intended():
    """The first that is WRONG is named, too."""
    both = losses_of(ALIKE, (1.0, 1.0), (1.2, 1.2), (1.2, 1.2))
    found, wrong, lost = causes_of(both, [0, 1])
    assert [each.verdict for each in found] == ["look", "WRONG"] and wrong == 1
    assert lost == float("inf")
    wrong = judge(*both, TOLERANCE).of("WRONG")
    assert [each.what for each in wrong] == ["loss"]
    assert "so step 2: gradient" in str(wrong[0].more) and wrong[0].off > 0.3  # the loss's
    for _, note in both[1][0].seen("gradient"):
        note.values["v"] = gradient(1.0)
    wrong = judge(*both, TOLERANCE).of("WRONG")  # of another loss, there are no more parameters
    assert [each.what for each in wrong] == ["loss", "parameters"]
    both = processes(
        lambda x: [seen(1, "div", x, by_gradient=True), loss(2, x, made_from=[1])],
        ALIKE,
        gradients=[(1.0, 1.0), (1.2, 1.2), (1.2, 1.5)],
    )
    found, wrong, _ = causes_of(both, [0, 1])  # whose values tell nothing
    assert [each.what for each in found] == ["value", "averaging"] and wrong == 1

    gradients = [(1.0, 1.0), (1.2, 1.2), (1.2, 1.2)]

    def of_steps(*steps):
        def make(x):
            values = [(5 * at, seen(5 * at, "div", x, by_gradient=True, step=at)) for at in steps]
            losses = [loss(at + 1, x, made_from=[at], step=at // 5) for at, _ in values]
            return [*[value for _, value in values], *losses]

        found, wrong, _ = causes_of(processes(make, ALIKE, gradients=gradients), [0, 1])
        return [(each.verdict, each.step) for each in found], wrong

    # A step that tells nothing, or the same once more, changes nothing of it.
    assert of_steps(0) == of_steps(0, 1) == ([("look", 0)], float("inf"))


def test_first_step_that_shows_no_cause():
    """Losses may be nearly the same at the start of a training: a later step names the line. But
    not what may be intended there, nor in a step without values of lines."""

    def found(step, factor=1, ratio=None, own=1.2, **about):
        def make(x, by):
            right = [loss(1, torch.tensor(2.0), step=at) for at in range(step)]
            if ratio:
                first = seen(5, "div", x, by_gradient=True, step=step)
                return [*right, first, loss(6, x, made_from=[5], step=step)]
            return [*right, loss(7, torch.tensor(1.0 + by * factor), step=step)]

        gradients = [(1.0,) * 4, (1.2,) * 4, (1.2, own, own, own)]
        both = processes(make, ratio or ALIKE, (0, 1, 1), gradients=gradients)
        causes, wrong, _ = causes_of(both, range(4), **about)
        return [each.what for each in causes], [each.step for each in causes], wrong

    assert found(1) == (["loss"], [1], 0) and found(2) == (["loss"], [2], 0)
    assert found(3) == ([], [], 0) == found(1, ratio=ALIKE)
    assert found(1, samples=[Finding("WRONG", "samples", 1, "")]) == ([], [], 0)
    assert found(1, lost=1) == ([], [], 0) and found(1, lost=1, own=1.5) == (["averaging"], [1], 0)


def test_intended_but_scaled():
    """Gradients that are all the same number of times as large are WRONG in any case."""
    both = losses_of(ALIKE, (1.0, 1.0), (1.5, 1.0), (1.5, 1.0))
    assert causes_of(both, [0])[1] == 0


def test_steps_after_other_weights():
    """What follows from them is not looked at."""

    def make(x, factor):
        weight = 0, Seen("weight", "train.py:9", "optimizer 0", 0, {"w": sketch(ONE * factor)})
        return [weight, loss(1, x, step=1)]

    assert causes_of(processes(make, TWICE, (1, 2, 2)), [0, 1])[:2] == ([], 0)


def test_steps_that_cannot_be_compared():
    """From them on, only the ranks' gradients have to be equal."""
    both = losses_of(ALIKE, (1.0, 1.0), (1.2, 1.2), (1.2, 1.2))
    assert causes_of(both, [0, 1], lost=0)[0] == []
    both = losses_of(ALIKE, (1.0, 1.0), (1.2, 1.2), (1.2, 1.5))
    found, _, lost = causes_of(both, [0, 1], lost=0)
    assert [each.what for each in found] == ["averaging"] and lost == 0


def test_steps_before_other_samples():
    """They are explained by themselves."""
    both = losses_of(ALIKE, (1.0, 1.0), (1.2, 1.2), (1.2, 1.2))
    later = [Finding("WRONG", "samples", 1, "")]
    assert [each.verdict for each in causes_of(both, [0, 1], later)[0]] == ["look"]
    assert causes_of(both, [0, 1], [Finding("WRONG", "samples", 0, "")])[:2] == ([], 0)


# ---- in words


def test_words_of_a_loss():
    """What it is on each side, and the line that has made it; also of zero."""

    def make(x):
        value = seen(3, "mul", torch.tensor(1.0))
        return [value, loss(5, x, made_from=[3, 98])]  # 98: of a line of other numbers of times

    found = blamed(*processes(make, TWICE))
    assert found.line == "train.py:3" and found.text.startswith(
        "[backward]: 2 on one process, 4, 4 on the ranks; 2 times one process's: a factor"
    )
    assert ADVICE["share"] not in found.text
    nothing = [torch.tensor(number) for number in (0.0, 4.0, 4.0)]
    text = blamed(*processes(make, nothing)).text
    assert text == "[backward]: 0 on one process, 4, 4 on the ranks"
    library = blamed(
        *processes(lambda x: [make(x)[0], loss(5, x, made_from=[3], library="l:1")], TWICE)
    )
    assert not library.more  # whose line is another one


def test_words_of_a_value():
    """Of the first part that differs; where its line is called."""
    about = {"called_at": "train.py:30"}
    found = blamed(*processes(lambda x, y: [seen(1, "max", x, y, y, **about)], MEAN, ALIKE))
    assert found.text.startswith("[max]: 2 on one process, 7, 7 on the ranks: one process has")
    assert found.more == ["called at train.py:30"]
    found = blamed(*processes(lambda x: [seen(1, "mul", x)], OTHER))
    shapes = "[mul]: other numbers, of shape (8, 6) on one process, (4, 6), (4, 6) on the ranks"
    assert found.text.startswith(shapes) and not found.more


def test_lines_that_are_right():
    """The last two before a value that have each rank's own, each once; nothing before a model."""

    def of_lines(x, y):
        found = [seen(1, "mean", x)]
        for index, line in (2, 2), (3, 3), (4, 3):
            found.append(
                seen(index, f"op{index}", x, made_from=[index - 1], line=f"train.py:{line}")
            )
        return [*found, seen(5, "log", y, made_from=[4])]

    text = "a mean over ranks is right up to train.py:"
    more = blamed(*processes(of_lines, MEAN, ALIKE)).more
    assert more == [f"{text}3  [op4]", f"{text}2  [op2]"]

    def of_model(x, y):
        into = [seen(1, "mean", x), inputs(2, x, made_from=[1]), outputs(3, x, made_from=[2])]
        return [*into, seen(4, "log", y, made_from=[3])]

    assert blamed(*processes(of_model, MEAN, ALIKE)).more == []


def test_lines_that_set_a_buffer():
    """Below it: the first value of its line that is not one process's; or the lines that have each
    rank's own."""

    def more(make, values):
        both = processes(make, values)
        buffer = Finding("WRONG", "buffer", 0, "", "train.py:8")
        return first_behind(Values(*both, TOLERANCE, {}), buffer)

    def first(x):
        return seen(1, "mul", x, called_at="train.py:30")

    def of_line(x):  # which also has what is one process's
        right = seen(0, "zeros", ONE, line="train.py:8")
        return [right, first(x), seen(2, "copy", x, made_from=[1], line="train.py:8")]

    shapes = "other numbers, of shape (8, 6) on one process, (4, 6), (4, 6) on the ranks"
    expected = [f"from train.py:1  [mul]: {shapes}", "called at train.py:30"]
    assert more(of_line, OTHER) == expected

    def of_model(x):
        at = {"line": "train.py:8"}
        into, out = inputs(2, x, made_from=[1], **at), outputs(3, x, made_from=[2], **at)
        return [first(x), into, out, seen(4, "copy", x, made_from=[3], **at)]

    assert more(of_model, OTHER) == expected

    def of_the_loop(x):
        return [seen(1, "mul", x), seen(2, "copy", x, made_from=[1], line="train.py:8")]

    assert more(of_the_loop, OTHER) == expected[:1]  # called by no other line
    right = "a mean over ranks is right up to train.py:1  [mul]"
    assert more(of_line, MEAN) == [right]


def test_what_a_score_is_made_of():
    """The value that has the printed number, among those that differ."""
    numbers = [torch.tensor(number) for number in (0.731, 2.5, 2.5)]

    def make(x, y, z, text):
        values = [seen(1, "mul", x), seen(2, "div", None, y), seen(3, "div", z)]
        printed = Printed("train.py:20", text, ["train.py:30"])  # by a function for it
        return [(1, note) for _, note in values] + [(1, printed)]

    texts = ["accuracy 0.731", "accuracy 0.726", "accuracy 0.726"]
    called = "called at train.py:30"
    values = OTHER, numbers, ALIKE
    both = processes(make, *values, texts)
    (found,) = compare_printed(*both, Values(*both, TOLERANCE, {}), Variables(*both), {})
    value = "train.py:2  [div]: 0.731 on one process, 2.5, 2.5 on the ranks"
    assert found.more == [called, value]
    others = OTHER, ALIKE, ALIKE
    both = processes(make, *others, texts)
    (found,) = compare_printed(*both, Values(*both, TOLERANCE, {}), Variables(*both), {})
    assert found.more == [called]


# ---- what is compared at all


def test_values_that_are_not_compared():
    """Of a line that has run other numbers of times, or so often that not all were noted."""

    def known(*numbers):
        both = processes(
            lambda of: [seen(n, "mul", ONE, line="a:1", number=n) for n in of], numbers
        )
        return list(Values(*both, TOLERANCE, {}).all)

    assert known([0, 1], [0, 1], [0, 1]) == [0, 1]
    assert known([0, 1], [0], [0]) == []
    assert known([0, 1], [0, 1], [1]) == [1]
    last = MANY_VALUES - 1
    assert known([last], [last], [last]) == []


@pytest.mark.parametrize("second", [OTHER, WHOLE])
def test_constants_are_no_cause(second):
    """Whose shape is the batch's, as of targets on a diagonal; if nothing else differs, the loss
    does."""

    def make(size, x, y):
        zeros = seen(1, "zeros", torch.zeros(size, 6 + size))
        filled = seen(
            2, "fill_diagonal_", torch.zeros(size, 6 + size).fill_diagonal_(1), made_from=[1]
        )
        return [zeros, filled, seen(3, "matmul", y), loss(4, x, made_from=[2, 3])]

    found = blamed(*processes(make, (8, 4, 4), TWICE, second))
    assert (found.what, found.line) == ("value" if second is OTHER else "loss", "train.py:3"), found

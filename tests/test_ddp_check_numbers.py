"""The conditions by which ddp_check compares gradients, weights, settings, numbers and ends: each
here has a situation that depends on it."""

import pytest
import torch
from test_ddp_check_parts import ONE, TOLERANCE, below, notes, rule, step_notes

from ddp_check.compare import fits
from ddp_check.compare.differences import Differences, common_ratio, parts_of
from ddp_check.compare.ends import (
    about_ends,
    explains_ends,
    left_out_steps,
    left_pass,
    other_optimizers,
    uneven_join,
)
from ddp_check.compare.fits import relative
from ddp_check.compare.judge import judge
from ddp_check.compare.kinds import misfits, noise_of, paired
from ddp_check.compare.numbers import Variables, uneven_draws
from ddp_check.compare.parted import averaged, averages_weights, parted_weights, without_shards
from ddp_check.compare.printed import scores
from ddp_check.compare.settings import compare_settings
from ddp_check.notes import (
    Averages,
    Batch,
    Collective,
    Drawn,
    Finding,
    PassEnd,
    Printed,
    Said,
    Seen,
    Step,
)
from ddp_check.sketch import sketch, sketches, summary

LINE = "train.py:9"  # of the step


def tensors(kind, factors, step=0, about=None, library=""):
    """Of an optimizer, {name: how many times as large}; None of what has no gradient."""
    values = {name: None if n is None else ONE * n for name, n in factors.items()}
    found = sketches(values, any_order=True)
    seen = Seen(kind, LINE, "optimizer 0", step, found, about=about or {}, library=library)
    return step, seen


def step_of(step=0, averaged=(), **made):
    return step, Step((0, step), LINE, [], made, [], list(averaged), {}, {})


def gradients(factors, *more):
    return notes(*more, step_of(), tensors("gradient", factors))


def differences(one, *ranks, noise=None):
    return Differences(one, ranks, TOLERANCE, noise or {})


def found_in(one, *ranks):
    """(verdict, kind, text, what is below it) of each finding."""
    findings = differences(one, *ranks).findings
    return [(each.verdict, each.what, each.text, each.more) for each in findings]


def told(one, *ranks):
    """The text of the only finding."""
    ((_, _, text, _),) = found_in(one, *ranks)
    return text


# ---- gradients


def test_which_gradients_are_not_averaged():
    """The modules whose gradients are each rank's own, and beside them those that are averaged in
    all steps; not such as have none."""
    nothing = {"net.frozen": 0.0, "net.unused": None}
    names = "net.body.0", "net.body.1", "net.head.0", "net.tail.0", "net.later.0"

    def of(body, later=1.0, extra=None):
        first = dict(zip(names, [body, body, 1.0, 1.0, 1.0])) | nothing
        second = dict(zip(names, [body, body, 1.0, 1.0, later])) | nothing
        if extra:
            first[extra] = 1.0
        both = tensors("gradient", first), tensors("gradient", second, 1)
        return notes(step_of(), step_of(1), *both)

    found = differences(of(1.0), of(1.2, 1.2, "net.of_rank_0"), of(1.4, 1.4))
    assert found.unlike(0) == (
        "each rank has its own gradient of net.body, but not of net.head, net.tail, "
        "net.of_rank_0: not averaged in this step?"
    )
    found = differences(gradients({"w": 1.0}), gradients({"w": 1.2}), gradients({"w": 1.4}))
    assert found.unlike(0) == "each rank has its own gradient of w: not averaged in this step?"


def test_how_far_a_gradient_is():
    right, wrong = gradients({"w": 1.0}), gradients({"w": 1.1})
    text = "worst w, by 0.1 of its size (limit 0.0003); 1.1 times one process's"
    assert told(right, right, wrong) == f"1 of 1 differ on rank 1; {text}"
    assert told(right, wrong, right) == f"1 of 1 differ; {text}"
    assert told(right, gradients({"w": 1.005}), right).endswith("(limit 0.0003)")
    assert told(right, gradients({"w": 0.9}), right).endswith("; 0.9 times one process's")


@pytest.mark.parametrize(
    ("factors", "text", "is_factor", "is_less"),
    [
        ([0.5, 0.5], "; 0.5 times one process's: a factor world_size too much", True, True),
        ([2.0, 2.0], "; 2 times one process's: a factor world_size too much: a sum", True, False),
        ([0.1, 0.1], "; 0.1 times one process's", True, False),
        ([-1.0, -1.0], "; -1 times one process's", True, False),
        ([2.0, 1.2], "", False, False),
        ([2.0, 2.0, 2.0, 2.0, 1.5], "; 2 times one process's in 4 of 5: a factor", False, False),
        ([2.0, 1.0, 1.0, 1.0, 1.0], "; 2 times one process's: a factor", False, False),
        ([2.0, 1.5, 1.0, 1.0, 1.0], "", False, False),
        ([2.0, 2.0, 1.5, *[1.0] * 8], "", False, False),
    ],
)
def test_gradients_by_a_factor(factors, text, is_factor, is_less):
    """All, most, or a few that differ, may be the same number of times as large; a small one, or
    one that a rank alone has not, tells nothing."""

    def of(*factors, tiny=1e-4, unused=None):
        names = {f"w.{n}": factor for n, factor in enumerate(factors)}
        return gradients(names | {"tiny": tiny, "unused": unused})

    one, rank = of(*[1.0] * len(factors), unused=1.0), of(*factors, tiny=-1e-4)
    both = differences(one, rank, rank)
    assert text in both.findings[0].text and bool(text) == ("times" in both.findings[0].text)
    assert both.factors == ({0} if is_factor else set())
    assert both.less == ({0} if is_less else set())


def test_no_gradient_in_common():
    assert common_ratio({"w": sketch(ONE)}, {"w": None}) == (1.0, 0, 0)


def test_lines_that_may_make_gradients_larger():
    """Below gradients that are a factor larger: what reduces between backward() and this step, and
    hooks; below smaller ones, a call before backward() that is not differentiated."""

    def of(*factors):
        calls = [
            Collective(name, f"train.py:{n}", "", True)
            for n, name in enumerate(["all_reduce", "all_gather", "all_reduce", "broadcast"])
        ]
        loss = Seen("loss", "train.py:5", "backward", 0, {}), Seen("loss", "", "backward", 0, {})
        first = calls[0], loss[0], calls[2], calls[3]
        later = calls[1], loss[1], Collective("reduce", "train.py:8", "", True)
        said = Said("file", "train.py"), Said("hook", "train.py:6")
        all_found = [(0, note) for note in (*said, *first)]
        factors = {f"w.{n}": factor for n, factor in enumerate(factors)}
        all_found += [step_of(), tensors("gradient", factors)]
        return notes(*all_found, *[(1, note) for note in later], step_of(1))

    hook = "before the ranks average, a hook gets each gradient: train.py:6"
    one = of(1.0, 1.0)
    for factors, lines in {
        (2.0, 2.0): ["this all_reduce is after backward(): train.py:2", hook],
        (2.0, 1.2): [hook],
        (0.5, 0.5): [
            "this all_reduce is not differentiated: train.py:0",
            "this all_reduce is after backward(): train.py:2",
            hook,
        ],
    }.items():
        assert found_in(one, of(*factors), one)[0][3] == lines, factors


def test_parameters_of_one_side():
    """Of an optimizer; not a buffer, which one rank alone may have."""
    one, more = {"w": 1.0}, {"w": 1.0, "bias": 1.0}
    assert found_in(gradients(one), gradients(one), gradients(more)) == [
        ("WRONG", "parameters", "['bias'] on one side alone on rank 1", [])
    ]
    # But for parts of them, as of ZeRO.
    assert not found_in(gradients(more), gradients(one), gradients({"bias": 1.0}))
    assert found_in(gradients(more), gradients(more), gradients(one))  # of all on one rank
    mine, theirs = [notes(step_of(), tensors("buffer", each)) for each in (one, more)]
    assert not found_in(mine, mine, theirs)
    parts = gradients(one), gradients({"bias": 1.0})  # as of ZeRO
    assert not found_in(gradients(more), *parts)
    assert len(found_in(gradients(more | {"head": 1.0}), *parts)) == 2  # which no rank has


def test_gradients_that_a_step_averages():
    """Those that not all ranks have are as they were."""
    first, second = {"w": 1.0, "bias": 1.0, "none": 1.0}, {"w": 3.0, "none": None}
    ranks = [tensors("gradient", factors)[1] for factors in (first, second)]
    values = averaged(dict(enumerate(ranks))).values
    assert fits.same(values["w"], [sketch(2 * ONE)]) < 1e-6
    assert all(values[name] is ranks[0].values[name] for name in ("bias", "none"))


def test_gradients_that_the_step_averages():
    """Their mean is one process's; of a step that the ranks have not made, there is none."""

    def of(*factors, kind="gradient"):
        call = 0, Collective("all_reduce", LINE, "", False, in_step=True)
        found = [tensors(kind, {"w": factor}, n) for n, factor in enumerate(factors)]
        return notes(call, *found)

    assert not found_in(of(1.0, 1.0), of(0.5), of(1.5))
    weights = [of(factor, kind="weight") for factor in (1.0, 0.5, 1.5)]  # as it has made them
    assert len(found_in(*weights)) == 2


def test_noise_that_hides():
    """It is said of each kind by itself, what cannot be seen."""
    right, key = gradients({"w": 1.0, "b": 1.0}), (LINE, "optimizer 0")
    noise = {("gradient", *key): {"w": 0.1, "b": 1e-5}, ("update", *key): {"w": 1e-5, "b": 1e-5}}
    (hidden,) = differences(right, right, right, noise=noise).hidden
    assert (hidden.verdict, hidden.what) == ("not told", "gradient")
    assert hidden.text.endswith(
        "changes w by 1e-01 on one process: smaller faults in 1 of 2 are not seen"
    )


# ---- weights, updates and buffers


def test_lines_that_have_set_weights():
    """And who has called them; else the step's, and in a framework, where that is."""

    def of(factor, **more):
        return notes(step_of(), tensors("weight", {"w": factor}, **more))

    right, wrong = of(1.0, about={"w": "train.py:3", "train.py:3": "train.py:7"}), of(1.5)
    (first,) = differences(right, right, wrong).findings
    assert (first.line, first.more) == ("train.py:3", ["called at train.py:7"])
    (first,) = differences(of(1.0), of(1.0), wrong).findings
    assert (first.line, first.more) == (LINE, [])
    library = "/site-packages/trainer.py:5"
    (first,) = differences(of(1.0, library=library), of(1.0), wrong).findings
    assert first.more == [f"in {library}"]


def test_parts_of_weights():
    """Of one process's, a rank has some under the same names as others have: as of experts."""

    def is_parted(one, *ranks, averaged=()):
        def of(found):
            values = sketches({name: torch.full(shape, x) for name, (x, *shape) in found.items()})
            return notes(step_of(averaged=averaged), (0, Seen("weight", LINE, "o", 0, values)))

        return parted_weights(of(one), [of(found) for found in ranks]) is not None

    first, second, other, gate = (1.0, 4), (2.0, 4), (3.0, 4), (5.0, 4)
    one = {"x": first, "y": second}
    assert is_parted(one, {"x": first}, {"x": second})
    for names in [], ["x", "y"]:  # as of ZeRO, where DDP may average all
        assert not is_parted(one, {"x": first}, {"y": second}, averaged=names)
    assert not is_parted(one, {"x": first}, {"x": other})  # y is on no rank
    assert not is_parted(one, {"x": first}, {"z": second})  # each has a name of its own
    assert not is_parted(one, {"x": other, "y": second}, {"x": second})  # of all on one rank
    # Where DDP has averaged the others, these may have other numbers, if not other shapes.
    one["gate"], ranks = gate, [{"x": other, "gate": gate}] * 2
    assert is_parted(one, *ranks, averaged=["gate"]) and not is_parted(one, *ranks)
    ranks[1] = {"x": (3.0, 5), "gate": gate}
    assert not is_parted(one, *ranks, averaged=["gate"])


def test_what_names_have_in_common():
    assert parts_of(["net.a.w", "net.a.b"]) == "net.a" and parts_of(["x.w", "y.w"]) == "x, y"
    assert parts_of(["net.a.w", "net.b.w"], 2) == "net.a, net.b"


def test_shards():
    """As of a sharded optimizer: what each rank has a part of is not compared; the rest is."""

    def kept(one, *ranks):
        notes_of = [
            Seen("weight", LINE, "o", 0, sketches({k: torch.ones(*of) for k, of in each.items()}))
            for each in (one, *ranks)
        ]
        mine, others, found = without_shards(0, notes_of[0], dict(enumerate(notes_of[1:])))
        names = [[*each.values] for each in (mine, *others.values())]
        assert names == [names[0]] * 3
        return names[0], [finding.text for finding in found]

    one = {"x": (7,), "y": (4,)}
    text = "each rank has a part of x, (4,), (4,) of (7,): not compared, nor its gradient (1 of 2)"
    assert kept(one, {"x": (4,), "y": (4,)}, {"x": (4,), "y": (4,)}) == (["y"], [text])
    for parts in [(7,), (7,)], [(2,), (2,)], [(6,), (6,)]:  # all of it, too few, too many
        ranks = [{"x": part, "y": (4,)} for part in parts]
        assert kept(one, *ranks) == (["x", "y"], [])

    def of(whole):  # in the first step, and not in the second
        both = [{"w": ONE if whole else ONE[:4]}, {"w": ONE}]
        seen = [Seen("weight", LINE, "o", n, sketches(each)) for n, each in enumerate(both)]
        return notes(*enumerate(seen))

    assert len(differences(of(True), of(False), of(False)).shards) == 1


def test_weights_that_are_averaged():
    """Between steps, near a call that reduces; if all are, and not a single one of several."""

    def line_of(*lines, reduces="train.py:20"):
        set_at = {0: {"a": "", "b": ""}, 1: dict(zip("ab", lines))}
        call = Collective("all_reduce", reduces, "", False)
        return averages_weights(notes((0, call)), set_at)

    assert line_of("train.py:22", "train.py:25") == "train.py:22"
    assert line_of("train.py:22", "") == "" == line_of("train.py:26", "train.py:26")
    assert line_of("other.py:22", "other.py:22") == "" == line_of("?", "?", reduces="?")


def test_who_has_loaded_an_optimizer():
    """It is said of updates, if some ranks alone have; not beside ranks that have ended."""

    def of(factor, kind="update", **made):
        return notes(step_of(**made), tensors(kind, {"w": factor}))

    loaded = of(2.0, loaded="train.py:8")
    assert found_in(of(1.0), loaded, of(1.0))[0][3] == [
        "rank 0 alone has loaded its state: train.py:8"
    ]
    assert found_in(of(1.0), loaded, loaded)[0][3] == [] == found_in(of(1.0), loaded, notes())[0][3]
    later = found_in(of(1.0), notes(), of(1.0), loaded)
    assert later[0][3] == ["rank 2 alone has loaded its state: train.py:8"]
    of_gradients = of(2.0, "gradient", loaded="train.py:8")
    assert found_in(of(1.0, "gradient"), of_gradients, of(1.0, "gradient"))[0][3] == []


def test_buffers_that_are_broadcast():
    """Rank 0's on all ranks: that may be meant, as of a bank; not if a rank has others, nor if the
    script sends nothing."""

    def of(factor, call="broadcast"):
        calls = [(0, Collective(call, "train.py:4", "", False))] if call else []
        return notes(*calls, step_of(), tensors("buffer", {"bank": factor}))

    text = "worst bank, by 1 of its size (limit 0.0009); 2 times one process's"
    sent = f"{text}, alike on all ranks; the script broadcasts: intended?"
    assert found_in(of(1.0), of(2.0), of(2.0)) == [
        ("look", "buffer", f"1 of 1 differ; {sent}", ["train.py:4"]),
        ("look", "buffer", f"1 of 1 differ on rank 1; {sent}", ["train.py:4"]),
    ]
    for ranks in ([of(2.0), of(3.0)], [of(2.0, "all_reduce")] * 2, [of(2.0, None)] * 2):
        assert found_in(of(1.0), *ranks)[0] == ("WRONG", "buffer", f"1 of 1 differ; {text}", [])


# ---- how far apart values are


def test_numbers_of_settings():
    """Also negative ones, and such as are not finite, but for rounding; text, if it is another
    one."""
    nan, inf = float("nan"), float("inf")
    assert relative(-1.0, -1.1) == pytest.approx(0.1 / 1.1) == relative(-1.1, -1.0)
    assert relative(nan, 1.0) == 1 == relative(1.0, inf) and relative(nan, nan) == 0
    assert misfits("setting", {"max": inf}, [{"max": 1.0}], 0)
    assert not misfits("setting", {"lr": 0.1}, [{"lr": 0.1 + 1e-9}], 0)
    assert fits.distance("a", "b") == 1 and fits.distance("a", "a") == 0


def test_gradients_of_one_side():
    """They are as far from none as they are large; if all ranks have ended, nothing is compared."""
    some = sketch(ONE)
    assert fits.distance(None, some) == some.norm == fits.distance(some, None)
    assert misfits("gradient", {"w": some}, [], TOLERANCE) == []
    text = "1 of 2 differ; worst v, by 1 of its size (limit 0.0003)"
    right = gradients({"w": 1.0, "v": 1.0})
    assert told(right, gradients({"w": 1.0, "v": None}), right).startswith(text)
    assert differences(right, notes(), notes()).unlike(0) is None


def test_largest_of_a_batch():
    """A number of one process may be the largest, or the smallest, of the ranks'."""
    parts = [summary(torch.tensor(n)) for n in (1.0, 3.0)]
    for number, way in (1.0, "rows"), (3.0, "rows"), (2.0, None):
        assert fits.fit("rows", summary(torch.tensor(number)), parts, 1e-5) == way


def test_blocks_of_a_diagonal():
    """As of a batch of graphs: each rank has some of the blocks, and no other columns."""
    blocks = [torch.rand(n, n) for n in (2, 3, 4)]
    one, *ranks = [torch.block_diag(*of) for of in (blocks, blocks[::2], blocks[1:2])]

    def fit(one, *ranks):
        return fits.fit("same mean rows", summary(one), [summary(of) for of in ranks], 1e-5)

    assert fit(one, *ranks) == "rows"
    assert fit(one, ranks[0], 2 * ranks[1]) is None and fit(one, ranks[0], ranks[0]) is None
    assert fit(one, ranks[0], ranks[1][:, :2]) is None  # of fewer columns, of which it has the rows
    assert fit(torch.ones(9, 8), torch.ones(6, 6), torch.ones(3, 3)) is None


def test_shapes_that_have_no_part():
    """A matrix of all pairs of a rank's rows is no part of one process's; nor is a queue of another
    shape."""
    x = torch.rand(8, 3)
    part = [summary(x[:4] @ x[:4].T), summary(x[4:] @ x[4:].T)]
    assert fits.fit("same mean rows", summary(x @ x.T), part, 1e-5) is None
    queues = sketches({"one": ONE, "flat": ONE.flatten()}, any_order=True)
    assert fits.sorted_same(queues["one"], [queues["flat"]]) > 1


def test_shapes_of_which_nothing_is_known():
    """Parts of the fourth dimension, or of one that is too long; one that has no numbers."""
    wide = torch.rand(2, 5000)
    assert fits.fit("rows", summary(wide), [summary(wide[:, :2500])] * 2, 1e-5) == "unknown"
    deep = torch.rand(2, 2, 4, 4)
    parts = [summary(deep[..., :2]), summary(deep[..., 2:])]
    assert fits.fit("rows", summary(deep), parts, 1e-5) == "unknown"
    parts = [summary(deep[:, :, :2]), summary(deep[:, :, 2:])]
    assert fits.fit("rows", summary(deep), parts, 1e-5) == "rows"
    one = summary(ONE)
    assert (
        fits.fit("rows", one, [None, one], 1e-5) == "unknown" == fits.fit("rows", None, [one], 1e-5)
    )


@pytest.mark.parametrize(
    ("one", "rank"),
    [(None, None), (torch.ones(2), None), (torch.ones(2), torch.tensor(1.0)), (ONE, ONE[None])],
)
def test_inputs_beside_others(one, rank):
    """A model's inputs may be compared though beside them is what cannot: such as a batch without
    boxes, or what squeeze() has made of a batch of one."""

    def of(factor, part):
        values = {0: summary(ONE * factor), 1: None if part is None else summary(part)}
        about = {"model": None, "integers": [], "places": []}
        inputs = Seen("inputs", "train.py:4", "model", 0, values, 0, [], about)
        return notes((0, inputs), *step_notes([factor]))

    result = judge(of(1.0, one), [of(1.5, rank), of(1.7, rank)], TOLERANCE)
    (wrong,) = [f for f in result.findings if f.what == "inputs" and f.verdict == "WRONG"]
    assert 0 < wrong.off < 0.5


# ---- what is compared with what


def test_steps_at_other_times():
    """An optimizer's third step is compared with its third, also if another one has made more steps
    before it, or it is made by another line."""

    def of(kind, step, line=LINE, factor=1.0):
        return notes((step, Seen(kind, line, "optimizer 0", 3, {"w": sketch(ONE * factor)})))

    for kind in ("gradient", "setting", "mode"):
        ((_, _, others),) = paired(kind, of(kind, 3), [of(kind, 5), of(kind, 3, "train.py:7")])
        assert sorted(others) == [0, 1]


def test_values_of_two_lines():
    def of(first, second):
        both = ("train.py:3", first), ("train.py:4", second)
        return notes(*[(0, Seen("value", at, "mul", 0, {0: summary(ONE * n)})) for at, n in both])

    pairs = [(seen, others[0]) for _, seen, others in paired("value", of(1, 2), [of(1, 2)])]
    assert [seen.line == other.line for seen, other in pairs] == [True, True]


def test_names_of_a_copied_model():
    """As many weights with other names are the same ones in the same order; not if there are more,
    nor if only their order is another one; nor what no optimizer has."""

    def values(kind, one, rank):
        ((_, _, others),) = paired(kind, notes(tensors(kind, one)), [notes(tensors(kind, rank))])
        return {
            name: round(value.norm / sketch(ONE).norm) for name, value in others[0].values.items()
        }

    one = {"a": 1, "b": 2}
    assert values("weight", one, {"copy.a": 3, "copy.b": 4}) == {"a": 3, "b": 4}
    assert values("weight", one, {"b": 4, "a": 3}) == {"a": 3, "b": 4}
    assert values("weight", one, {"x": 5, "a": 3, "b": 4}) == {"x": 5, "a": 3, "b": 4}
    assert values("other", one, {"x": 3, "y": 4}) == {"x": 3, "y": 4}


def test_noise():
    """How far a value is moved, in its place; not of what is zero, nor of what has another shape in
    the other run; a gradient that is zero may become another one."""

    def of(kind, value):
        return notes((0, Seen(kind, LINE, "mul", 0, {0: summary(value)})))

    def noise(kind, one, again):
        (parts,) = noise_of([kind], of(kind, one), of(kind, again)).values()
        return parts.get(0)

    assert noise("value", ONE, ONE.flip(0)) > 0.5
    assert 1e-4 < noise("value", ONE, ONE * 1.001) < 1e-2
    assert noise("value", 0 * ONE, ONE) is None is noise("value", ONE, ONE[:4])
    assert noise("gradient", 0 * ONE, ONE) > 0.5 and noise("gradient", ONE, ONE[:4]) is None


# ---- who tells DDP to average


def judged(of):
    """What is found of the averaging, where two ranks have other gradients."""
    result = judge(of(1.0), [of(1.2), of(1.4)], TOLERANCE)
    (wrong,) = [f for f in result.findings if f.what == "averaging"]
    return wrong


@pytest.mark.parametrize(
    ("told", "is_late"),
    [
        ("off pass on", True),
        ("off on pass", False),
        ("off pass off", False),
        ("on pass on", False),
    ],
)
def test_averaging_that_is_set_late(told, is_late):
    """After the pass that it is for, which was told not to."""

    def of(factor):
        about = {"model": None, "trains": [(0, "w")], "is_ddp": True, "callers": []}
        values = {0: summary(ONE)}
        all_notes = {
            "off": lambda line: Averages(line, False),
            "on": lambda line: Averages(line, True),
            "pass": lambda line: Seen("outputs", line, "Net", 0, values, 0, [], about),
        }
        found = [(0, all_notes[name](f"train.py:{n}")) for n, name in enumerate(told.split())]
        step = step_of(averaged=["w"], wrapped=["train.py:4"])
        return notes(*found, step, tensors("gradient", {"w": factor}))

    wrong = judged(of)
    if is_late:
        assert (wrong.line, wrong.remedy) == ("train.py:2", "set it before the model is called")
    else:
        assert wrong.remedy == "let the last pass before the step average"


def test_weights_outside_of_ddp():
    """They are named, and where DDP has wrapped the others, and where these were set, if known."""

    def of(factor):
        names = {"w": factor, "late": factor, "later": factor}
        weights = tensors("weight", dict.fromkeys(names, 1.0), about={"late": "train.py:3"})
        step = step_of(averaged=["w"], wrapped=["train.py:2"])
        return notes(step, weights, tensors("gradient", names))

    wrong = judged(of)
    assert "DDP does not average late, later" in wrong.text
    assert wrong.more[1:3] == ["wrapped at train.py:2", "set at train.py:3"]
    assert wrong.line == LINE  # of the gradients, which follow
    assert differences(of(1.0), of(1.2), of(1.4)).outside(9, ["w"]) == ([], [])


# ---- settings


def setting(rates, line=LINE, step=0, base=0.1, files=(), **made):
    """`rates`: of the groups."""
    values = {(number, "lr"): rate for number, rate in enumerate(rates)}
    seen = Seen("setting", line, "optimizer 0", step, values)
    at = step, Step((0, step), line, [], made, [], [], {"base": base}, {})
    return notes(*[(0, Said("file", file)) for file in files], at, (step, seen))


def settings(one, *ranks):
    return list(compare_settings(one, ranks, Variables(one, ranks)))


def test_rates(tmp_path):
    """Where one is set, in the file of the step, and which numbers are behind it."""
    for name in ("main.py", "other.py"):
        (tmp_path / name).write_text("base = size / 9\nlr = base\noptimizer.step()\n")
    main, other = str(tmp_path / "main.py"), str(tmp_path / "other.py")

    def of(rate, base, step=0):
        about = {"last": "train.py:8", "made": ["train.py:7"]}
        return setting([rate], f"{main}:3", step, base, [other], **about)

    (found,) = settings(of(0.1, 0.1), of(0.2, 0.2), of(0.2, 0.2))
    assert found.text == (
        "lr is 0.1 on one process, 0.2, 0.2 on the ranks; 2 times: is the batch of all ranks that "
        "much larger, too? If so, give one process this rate by --one"
    )
    assert found.more == [
        f"made or set at train.py:7, {main}:2",
        "last scheduler.step(): train.py:8",
        f"{main}:2: base is 0.1 on one process, 0.2, 0.2 on the ranks; set at {main}:1",
    ]
    for first, then, step in (0.1, 0.2, 1), (0.1, 0.3, 0), (0.1, 0.05, 0), (0.0, 0.1, 0):
        (found,) = settings(of(first, 1, step), of(then, 1, step), of(then, 1, step))
        assert found.text.endswith(f" {then:g}, {then:g} on the ranks")
        assert found.remedy == "count what all ranks have done"
    (found,) = settings(of(0.1, 1, 1), of(0.05, 1, 1), of(0.1, 1, 1))  # as of rank 0 alone
    assert found.remedy == "set it alike on all ranks, by what all ranks have"


def test_rates_that_nothing_sets(tmp_path):
    """But for a number that a scheduler is given."""
    (found,) = settings(setting([0.1]), setting([0.3]), setting([0.3]))
    assert found.more == []
    (tmp_path / "steps.py").write_text("scheduler.step(base)\n")
    last = f"{tmp_path}/steps.py:1"
    one, rank = [setting([rate], base=rate, last=last) for rate in (0.1, 0.3)]
    (found,) = settings(one, rank, rank)
    assert found.more[1:] == [f"{last}: base is 0.1 on one process, 0.3, 0.3 on the ranks"]


def test_rates_of_other_groups():
    """Of other groups of parameters, they are not compared."""
    other = setting([0.2, 0.1])
    assert not settings(setting([0.1]), other, other)


@pytest.mark.parametrize(("rate", "verdict"), [(0.2, "look"), (0.3, "WRONG")])
def test_rates_for_larger_batches(rate, verdict):
    """Where one process was given batches as large as those of all ranks, the script's rate for its
    own batch may be right."""
    for about in {"scaled": ["loader"]}, {"own_flags": True}:
        result = judge(setting([0.1]), [setting([rate])] * 2, TOLERANCE, **about)
        assert rule(result, "setting") == [verdict]
    assert rule(judge(setting([0.1]), [setting([rate])] * 2, TOLERANCE), "setting") == ["WRONG"]


# ---- the script's numbers


def with_numbers(*of_steps, generators=None):
    """Of steps with these numbers of the script's, and states of generators."""
    found = notes(*step_notes([1] * len(of_steps)))
    for (step, note), numbers in zip(found[Step], of_steps):
        note.variables, note.generators = numbers, (generators or {}).get(step, {})
    return found


def test_numbers_that_differ():
    """But for the number of processes, and what rounding may change."""
    one = {"rows": 8.0, "same": 0.3, "rank": 0.0, "world": 1.0}
    ranks = [{"rows": 4.0, "same": 0.3 + 1e-9, "rank": n, "world": 2.0} for n in range(2)]
    variables = Variables(with_numbers(one), [with_numbers(numbers) for numbers in ranks])
    assert variables.others(0) == {"rows": [8.0, 4.0, 4.0]}


@pytest.mark.parametrize(
    ("one", "first", "second", "is_plan"),
    [
        (101, 50, 50, True),
        (100, 50, 51, False),  # of this rank
        (100, 100, 100, False),
        (50, 100, 100, False),
        (120, 50, 50, False),
        (1.0, 0.5, 0.5, False),  # of no steps
        (1, 0, 0, False),
        (101, 50.5, 50.5, False),
    ],
)
def test_numbers_by_which_a_rate_is_planned(one, first, second, is_plan):
    """All ranks' are a part of one process's."""
    steps = [{"planned": float(number)} for number in (one, first, second)]
    one, *ranks = [with_numbers(of, of) for of in steps]
    assert Variables(one, ranks).plans(1) == is_plan


def test_generators_in_other_states(tmp_path):
    """Those that draw for a step, and are in other states on other ranks; and what is said of
    them."""
    (tmp_path / "lib.py").write_text("from a_library import that_makes_one\n")
    said = [(0, Said("unseeded", f"{tmp_path}/lib.py:1"))]
    said += [(0, Said("unseeded", "train.py:6")), (0, Said("file", "train.py"))]

    def of(*states):
        before, after = [dict(zip(("order", "alike", "kept"), each)) for each in states]
        found = with_numbers({}, {}, {}, generators={0: before, 1: after})
        found.of[Said] = said
        return found

    ranks = [of((1, 5, 7), (2, 6, 7)), of((3, 5, 8), (4, 6, 8))]
    variables = Variables(of((1, 5, 7), (2, 6, 7)), ranks)
    assert variables.generators == ["order", "kept"] and variables.drawing(1) == ["order"]
    assert variables.unseeded == ["train.py:6"] and variables.files == ["train.py"]


def test_random_numbers_of_uneven_parts():
    """What is made from those of which the ranks draw other than their part cannot be compared:
    that is no fault."""

    def of(factor, times):
        about = {"model": None, "integers": [], "places": []}
        values = {0: summary(ONE * factor)}
        drawn = Seen("value", "train.py:3", "randn", 0, values, 0, [], about)
        inputs = Seen("inputs", "train.py:4", "Net", 0, values, 1, [0], about)
        found = notes((0, drawn), (0, inputs), *step_notes([factor]))
        found.of[Drawn] = [(1, Drawn({("train.py:3", "randn"): {0: times}}, True))]
        return found

    for times, verdict in (3, "look"), (2, "WRONG"):
        result = judge(of(1.0, 4), [of(1.5, times), of(1.7, times)], TOLERANCE)
        assert rule(result, "inputs")[0] == verdict


def test_draws_of_steps_that_not_all_make():
    """They are not compared; nor those of a rank whose notes have none."""

    def of(times):
        made = notes(*step_notes([1, 1]))
        made.of[Drawn] = [(2, Drawn({("train.py:3", "rand"): times}, True))]
        return made

    one, rank = of({0: 4, 2: 4}), of({0: 4, 2: 3})
    assert uneven_draws(one, [rank, rank]) == {}
    del rank.of[Drawn]
    assert uneven_draws(one, [rank, rank]) == {0: "train.py:3"}


def test_counts_that_begin_later(tmp_path):
    """A number that the first step has not is no count; of one, it is said where it grows."""
    (tmp_path / "count.py").write_text("seen = 0\nseen += 8\n")
    file = str(tmp_path / "count.py")

    def of(rows):
        found = with_numbers({"seen": 0.0}, {"seen": rows, "later": rows})
        found.of[Said] = [(0, Said("file", file))]
        return found

    (text,) = Variables(of(8), [of(4), of(4)]).counted(1)
    assert text == (
        f"counted by each rank: seen is 8 on one process, 4, 4 on the ranks; set at {file}:2"
    )


BEHIND = """\
count = min(limit, 5)
texts = load(count)
batch = texts[first]
train(batch, rate)
evaluate(a, b, c, d)
"""


def test_numbers_behind_lines(tmp_path):
    """Those in a line, and in those that have set them; if it has none that differ, in those that
    have set what is no number."""
    (tmp_path / "behind.py").write_text(BEHIND)
    file = str(tmp_path / "behind.py")

    def behind(line, one, rank):
        variables = Variables(with_numbers(one), [with_numbers(rank)] * 2)
        return [text.removeprefix(file) for text in variables.behind([f"{file}:{line}"], 0)]

    sides = "9 on one process, 3, 3 on the ranks"
    few = {"count": 9, "limit": 9, "rate": 1}, {"count": 3, "limit": 3, "rate": 1}
    found = [f":2: count is {sides}; set at {file}:1", f":1: limit is {sides}"]
    assert behind(2, *few) == found == behind(4, *few)
    # The limit does not matter, if the count is the same.
    assert behind(2, {"count": 5, "limit": 9}, {"count": 5, "limit": 7}) == []
    rates = {"count": 9, "rate": 9}, {"count": 3, "rate": 3}
    assert behind(4, *rates) == [f":4: rate is {sides}"]
    many = dict.fromkeys("abcd", 9), dict.fromkeys("abcd", 3)
    assert behind(5, *many) == [f":5: {name} is {sides}" for name in "abc"]


def test_lines_of_a_context(tmp_path):
    """Of `with context():`, the line that has made it; of one by a number, the number's."""
    lines = "model = wrap()\nlast = 3\nturn = model.no_sync\nwith turn():\n    step()\n"
    (tmp_path / "sync.py").write_text(
        f"{lines}with model.no_sync() if n < last else null():\n    step()\n"
    )
    file = str(tmp_path / "sync.py")
    variables = Variables(with_numbers({"last": 3.0}), [with_numbers({"last": 3.0})] * 2)
    assert variables.set_at(f"{file}:4", 0) == [f"{file}:3: turn = model.no_sync"]
    assert variables.set_at(f"{file}:6", 0) == [f"{file}:2: last = 3"]


# ---- what is printed


@pytest.mark.parametrize(
    ("text", "loss", "numbers"),
    [
        ("loss 0.731", 0.7312, [None]),  # that backward() got
        ("loss 7.31e-01", 0.7312, [None]),
        ("accuracy 0.732", 0.7312, [0.732]),
        ("12.3 %", 12.31, [12.3]),  # too short to be known as the loss
        ("731 samples", 731.2, [731]),
        ("0.73 of 12", 3.0, [None, None]),  # too short to tell anything
        ("time: 1.236  data 0.731", 3.0, [None, 0.731]),  # of a clock
        ("batch_time.val 1.236, mem 1234, times 7.31", 3.0, [1.236, None, 7.31]),
        ("data_time: 1.236 runtime 2.345, milliseconds 12.34", 3.0, [None, 2.345, None]),
    ],
)
def test_numbers_of_a_line(text, loss, numbers):
    assert [number for number, _ in scores(text, [loss])] == numbers


def test_what_is_printed_of_no_score():
    """Before the first step; as a count; after another number of steps; beside a loss per
    sample."""

    def looks(first, second, step=4, other=4, *more):
        pairs = (step, first), (other, second)
        one, rank = [
            notes(*step_notes(), *more, (at, Printed("train.py:20", f"accuracy {text}")))
            for at, text in pairs
        ]
        return rule(judge(one, [rank, rank], TOLERANCE), "printed")

    assert looks("0.731", "0.726") == ["look"]
    assert looks("0.731", "0.726", 0, 0) == [] == looks("0.731", "0.726", 4, 3)
    assert looks("1000", "500") == []
    values = {0: summary(ONE)}
    per_sample = Seen("loss", "train.py:5", "backward", 0, values, about={"model": None})
    assert looks("0.731", "0.726", 4, 4, (0, per_sample)) == ["look"]


@pytest.mark.parametrize("called", [None, "train.py:18"])
def test_what_a_score_comes_from(called):
    """The value that is printed, and where its line is called; else where it is divided."""

    def of(score):
        about = {"model": None, "called_at": called}
        values = {0: summary(torch.tensor(score))}
        mean = Seen("value", "train.py:15", "mean", 0, values, 0, [], about)
        return notes(*step_notes(), (4, mean), (4, Printed("train.py:20", f"accuracy {score}")))

    result = judge(of(0.731), [of(0.726)] * 2, TOLERANCE)
    (found,) = [f for f in result.findings if f.what == "printed"]
    assert found.text == (
        "0.731 on one process, 0.726 on rank 0, in 'accuracy 0.731': of rank 0's share alone, or a "
        "mean of means over unequal shares?"
    )
    value = "train.py:15  [mean]: 0.731 on one process, 0.726, 0.726 on the ranks"
    assert found.more == [value, *([f"called at {called}"] if called else [])]


def test_where_a_score_is_divided(tmp_path):
    """And by which calls it was put together: no earlier step's, nor such as come after."""
    (tmp_path / "score.py").write_text(
        "def score(x):\n    return sum(x) / len(x)\nprint(score(all))\n"
    )
    file = str(tmp_path / "score.py")

    def of(text):
        before, last, after = [
            Collective("all_gather", f"train.py:{n}", "", False) for n in (1, 2, 3)
        ]
        found = (3, before), (4, last), (4, Printed(f"{file}:3", text)), (4, after)
        return notes((0, Said("file", file)), *step_notes(), *found)

    assert below(of("0.731"), [of("0.726")] * 2, "printed") == [
        f"divided at {file}:2: return sum(x) / len(x)",
        "put together at train.py:2",
    ]


# ---- other numbers of steps


def uneven_losses(line, most=2):
    """Of rank 0, two losses for the first step, which others make for one."""
    one, two = [
        notes(*[(0, Seen("loss", line, "backward", k, {})) for k in range(n)]) for n in (1, most)
    ]
    for found in (one, two):
        found.of[Step] = [step_of()]
        found.of[Step][0][1].line = line
    return left_out_steps([two, one])


def test_steps_that_are_left_out(tmp_path):
    """By an `if`, each so many steps, or by what each rank decides; more backward passes alone are
    no step that is left out."""
    text = "if n % 2:\n    optimizer.step()\nif good:\n    optimizer.step()\n"
    (tmp_path / "steps.py").write_text(text)
    file = str(tmp_path / "steps.py")
    found = [uneven_losses(f"{file}:{line}") for line in (2, 4)]
    assert [(each.verdict, each.line) for each in found] == [
        ("look", f"{file}:1"),
        ("WRONG", f"{file}:3"),
    ]
    assert found[0].text == (
        "rank 0 has made fewer steps than the others: 2 backward passes for this one, 1 elsewhere; "
        "later steps are not compared"
    )
    assert uneven_losses("train.py:9") is None is uneven_losses(f"{file}:4", 1)

    def of(losses, steps):
        found = [(0, Seen("loss", "train.py:5", "backward", n, {})) for n in range(losses)]
        return notes(*found, *step_notes([1.0] * steps, f"{file}:2"))

    result = judge(of(1, 4), [of(2, 3), of(1, 4)], TOLERANCE)
    assert rule(result, "steps") == ["look"] and not rule(result, "end")


def test_steps_of_another_optimizer():
    def of(line):
        return notes(step_of(made=[line]))

    found = other_optimizers(of("train.py:3"), [of("train.py:2"), of("train.py:3")])
    assert found.text == (
        "rank 0 makes its steps with another optimizer than one process: nothing after it can be "
        "compared"
    )
    assert found.more == ["train.py:2"]


def test_joins():
    """Of as many steps, they are right; a rank may end before its own."""

    def of(*steps, other=9):
        joins = [(step, Said("join", "train.py:4")) for step in steps]
        return notes(*joins, (other, Said("file", "train.py")))

    assert uneven_join([of(3), of(3, other=8)]) is None
    for ranks in ([of(3), of(4)], [of(3), of()], [of(), of(3)]):
        found = uneven_join(ranks)
        assert (found.verdict, found.step, found.line) == ("look", 3, "train.py:4")


LOADER = """\
for x in loader:
    if verbose:
        print(x)
    optimizer.step()
    if seen > 9:
        break
"""


def test_passes_that_are_left(tmp_path):
    """After other numbers of batches: by each rank's own decision, or by one of all; the `if` of
    the break is named."""
    (tmp_path / "loop.py").write_text(LOADER)
    line = f"{tmp_path}/loop.py:1"

    def of(*counts, ends=False, trains=True, steps=1):
        """Of passes of so many batches."""
        found, step = [], 0
        for number, count in enumerate(counts):
            key = line, "loader", number
            for n in range(count):
                found.append((step, Batch(key, n, [n], 1, 9, trains)))
                step += steps
            found += [(step, PassEnd(key, count))] * ends
        return notes(*found)

    found = left_pass(of(4, 4), [of(3, 3), of(3, 3)])
    assert (found.verdict, found.step, found.line) == ("look", 3, line.replace(":1", ":5"))
    assert found.text == (
        "a pass is left after so many batches: 4 on one process, 3, 3 on the ranks; later steps "
        "are not compared"
    )
    assert found.more == [f"in the loop of {line}: for x in loader:"]
    assert left_pass(of(4, 4), [of(3, 3), of(2, 2)]).verdict == "WRONG"
    assert left_pass(of(4, 4), [of(4, 4), of(4, 4)]) is None
    assert left_pass(of(3), [of(4, 4), of(4, 4)]) is None  # which may go on
    for kind in ({"ends": True}, {"trains": False}, {"steps": 0}):
        assert left_pass(of(4, 4, **kind), [of(3, 3, **kind)] * 2) is None, kind


def test_the_first_that_is_left_out(tmp_path):
    """A pass or a step, whichever is earlier: later ones have other batches."""
    (tmp_path / "loop.py").write_text(LOADER)
    line = f"{tmp_path}/loop.py:1"

    def of(passes, join, rows=1):
        found = []
        for number in range(2):
            key = line, "loader", number
            batches = [Batch(key, n, None, rows, 9, True) for n in range(passes)]
            found += [(n + passes * number, batch) for n, batch in enumerate(batches)]
        return notes(*step_notes([1] * 9), *found, (join, Said("join", "train.py:9")))

    for join, first in (6, 3), (1, 1):
        result = judge(of(4, join, 2), [of(3, join), of(3, join + 1)], TOLERANCE)
        assert [f.step for f in result.findings if f.what == "steps"] == [first]


def test_what_explains_an_end():
    """Of other numbers of steps: an epoch that may be as long as its samples divide; what takes
    other samples; a call that meets another; not an epoch that is WRONG, nor another look."""
    cases = ("look", "epoch", ""), ("look", "inputs", "unpaired"), ("WRONG", "calls", "")
    assert all(explains_ends(Finding(v, what, 0, "", advice=why)) for v, what, why in cases)
    others = ("WRONG", "epoch", ""), ("look", "outputs", "coupled"), ("look", "calls", "")
    assert not any(explains_ends(Finding(v, what, 0, "", advice=why)) for v, what, why in others)


ENDS = """\
def train(loader):
    for x in loader:
        if ready:
            step(x)
        if last:
            break
def step(x):
    optimizer.step()
for epoch in range(few):
    train(loader)
while True:
    optimizer.step()
    break
main()
"""


@pytest.fixture
def ended(tmp_path):
    """The end of one process and ranks, each with its number of steps, and how it has ended."""
    file = str(tmp_path / "ends.py")
    (tmp_path / "ends.py").write_text(ENDS)

    def of_all(*processes, lines=(4, 10)):
        line, *callers = [f"{file}:{n}" for n in lines]
        counts, ends = zip(*processes)
        one, *ranks = [notes(*step_notes([1] * count, line)) for count in counts]
        for found, few in (one, 2), *[(rank, 9) for rank in ranks]:
            for _, note in found[Step]:
                note.callers, note.variables = callers, {"few": few}
        ends = [end.replace("ends.py", file) for end in ends]
        end = about_ends(one, ranks, list(counts), ends)
        return end.verdict, end.text, [text.replace(file, "ends.py") for text in end.more]

    return of_all


BAD = "ValueError at ends.py:12: bad"
LOST = "RuntimeError at ends.py:12: gloo: Connection closed by peer"


def test_errors_of_all(ended):
    """One that all processes have is the script's, and nothing of its ranks'."""
    assert ended((4, BAD), (4, BAD), (4, BAD))[0] == "look"
    assert ended((4, BAD), (3, BAD), (3, BAD))[0] == "WRONG"
    assert ended((4, BAD), (4, "its end"), (4, "its end"))[0] == "WRONG"


def test_ranks_that_lose_each_other(ended):
    """Of an error that another rank's end has made, only the place is said; not if all have it."""
    *_, more = ended((4, "its end"), (3, LOST), (3, BAD))
    assert more[:2] == [
        "rank 0: 3 steps, then RuntimeError at ends.py:12, as another rank had ended",
        f"rank 1: 3 steps, then {BAD}",
    ]
    *_, more = ended((4, "its end"), (3, LOST), (3, LOST))
    assert more[:2] == [f"rank {rank}: 3 steps, then {LOST}" for rank in range(2)]


def test_ranks_that_get_weights():
    """Of a rank that makes no step, but receives a broadcast after each of another's: nothing of it
    can be compared; not of one broadcast before all steps."""

    def end(*steps, name="broadcast", line="train.py:20", averaged=(), order=(0, 1), own=None):
        sent = [(step, Collective(name, line, "", False)) for step in steps]
        own = Collective(own or "broadcast", "train.py:20", "", False)
        ranks = [notes(*step_notes(), *sent), notes((0, own), end=LOST)]
        ranks[0][Step][0][1].averaged.extend(averaged)
        counts, ends = [4, 0], ["its end", LOST]
        ranks, counts, ends = [[each[n] for n in order] for each in (ranks, counts, ends)]
        return about_ends(notes(*step_notes()), ranks, [4, *counts], ["its end", *ends])

    found = end(0, 1, 2)
    assert (found.verdict, found.line) == ("look", "train.py:9") and "[1] make no" in found.text
    assert found.more[1].startswith("rank 1: 0 steps")
    found = end(0, 1, order=(1, 0))
    assert found.line == "train.py:9" and "[0] make no" in found.text
    assert end(0).verdict == end(0, 1, name="reduce").verdict == "WRONG"
    assert end(0, 1, line="train.py:21").verdict == end(0, 1, own="reduce").verdict == "WRONG"
    assert end(0, 1, averaged=["w"]).verdict == "WRONG"  # by DDP: rank 1 was to make steps


def test_lines_of_more_steps(ended):
    """What decides whether a step is made, and how its loop ends, its numbers, and who calls it."""
    processes, sides = (
        [(4, "its end"), (3, "its end"), (3, "its end")],
        "2 on one process, 9, 9 on the ranks",
    )
    lines = [
        "it ends early by ends.py:5: if last:",
        "in the loop of ends.py:2: for x in loader:",
        "in the loop of ends.py:9: for epoch in range(few):",
        f"ends.py:9: few is {sides}",
        "called at ends.py:10: train(loader)",
    ]
    assert ended(*processes)[2][2:] == ["ends.py:3: if ready:", *lines]
    assert ended(*processes, lines=(8, 4, 10))[2][2:] == lines  # in a function


@pytest.mark.parametrize("steps", [0, 3])
def test_lines_of_an_error(ended, steps):
    """The loop of the line that has failed: of ranks that make no step, or as many as one
    process, which may make none, too."""
    for one in steps or 4, steps:
        *_, more = ended((one, "its end"), (steps, BAD), (steps, BAD))
        *hints, loop = more[2:]
        assert loop == "in the loop of ends.py:11: while True:"
        assert ["--rank {rank}" in hint for hint in hints] == [True] * (one > steps)

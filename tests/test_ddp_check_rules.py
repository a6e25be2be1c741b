"""The conditions of ddp_check's rules: each here has a situation that depends on it."""

import pytest
from test_ddp_check_parts import ONE, TOLERANCE, notes, step_notes

from ddp_check.compare import score_rules, state_rules
from ddp_check.compare.file_rules import Files
from ddp_check.compare.frameworks import Logged
from ddp_check.compare.judge import RULES, Result, judge
from ddp_check.compare.rules import RandomNumbers
from ddp_check.compare.sample_rules import Data, Splits
from ddp_check.notes import (
    DATASET,
    OWN_GENERATOR,
    Batch,
    Collective,
    File,
    Finding,
    Pass,
    PassEnd,
    Printed,
    Said,
    Seen,
    Step,
)
from ddp_check.script import UNKNOWN
from ddp_check.sketch import sketch, sketches, summary

# ---- random numbers and files


def draw(kind, state, line="train.py:3", step=0, **about):
    about = {"chooses": False, "in_module": False, "seeded": None, "size": 8, "parts": ()} | about
    return step, Seen(kind, line, "rand", 0, {"state": state}, about=about)


@pytest.mark.parametrize("name", ["broadcast", "scatter", "all_reduce"])
def test_orders_that_are_sent(name):
    """Rank 0's own order, which it sends to all, is that of all."""

    def found(drawn):
        call = 0, Collective(name, "train.py:4", drawn, False)
        return Splits().find(None, [notes(draw("split", rank), call) for rank in range(2)])

    assert bool(found("train.py:3")) == (name == "all_reduce") and found("train.py:2")


def test_draws_of_some_ranks():
    """They tell nothing of all; a generator of rank 0 alone, neither."""
    drawn = notes(draw("draw", 5))
    assert RandomNumbers().find(notes(), [drawn, drawn, drawn])
    assert RandomNumbers().find(notes(), [drawn, drawn, notes()]) is None
    seeded = notes(draw("draw", 5, seeded="train.py:2"))
    assert RandomNumbers().find(notes(), [seeded, seeded])[0].more == ["last seeded at train.py:2"]


def test_seeds_of_an_import(tmp_path):
    """As before a process that mp.spawn has started is watched."""
    (tmp_path / "train.py").write_text("import torch\ntorch.manual_seed(0)\n")
    ranks = [notes(draw("draw", 5), (0, Said("file", f"{tmp_path}/train.py"))) for _ in range(2)]
    (found,) = RandomNumbers().find(notes(), ranks)
    assert found.more == [f"seeded at {tmp_path}/train.py:2: torch.manual_seed(0)"]
    own = draw("draw", 5)
    own[1].name = OWN_GENERATOR
    (found,) = RandomNumbers().find(notes(), [notes(own, ranks[0][Said][0])] * 2)
    assert found.more == []


def test_draws_of_several_generators():
    """The first line of each is named, and the first one's function."""

    def found(*names, part="the loop"):
        places, about = [f"train.py:{line}" for line in (1, 2, 3)], {"seeded": "train.py:9"}
        both, state = zip(places, names), {part: 5}
        drawn = [(0, Seen("draw", line, name, 0, state, about=about)) for line, name in both]
        (finding,) = RandomNumbers().find(notes(), [notes(*drawn), notes(*drawn)])
        return finding.remedy, finding.more

    again = [draw("draw", 5, "train.py:7", step) for step in range(2)]
    benchmark = notes(draw("draw", 5, "train.py:2"), *again)
    (loop,) = RandomNumbers().find(notes(), [benchmark, benchmark])
    assert loop.line == "train.py:7"  # and not what draws once, before the training
    remedy, more = found("numpy", "torch", "torch")
    assert remedy == "np.random.seed(seed + rank) after the split"
    assert more == ["last seeded at train.py:9", "so does the loop (torch): train.py:2"]
    assert found("torch")[0].startswith("torch.manual_seed(seed + rank)")
    assert found("random")[0].startswith("random.seed(seed + rank)")
    of_workers, _ = found("random", part=DATASET)
    assert of_workers.startswith("torch.manual_seed(seed + rank)")
    assert of_workers.endswith("; without workers, random.seed(seed + rank) after the split")
    assert found("RandomState", part=DATASET)[0] == "seed this generator with seed + rank"
    assert found(OWN_GENERATOR) == ("seed this generator with seed + rank", [])


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("out", UNKNOWN, ["WRONG"]),
        ("runs/events.out.tfevents.1", UNKNOWN, None),  # of TensorBoard's thread
        ("runs/events.out.tfevents.1", "train.py:1", ["WRONG"]),
        ("data.lock", "train.py:1", []),
        ("cache/huggingface/data", "train.py:1", []),
    ],
)
def test_files_of_all_ranks(path, line, found):
    ranks = [notes((0, File(path, line))) for _ in range(2)]
    said = Files().find(None, ranks)
    assert found == (said if said is None else [each.verdict for each in said])


def test_the_worst_file_is_named():
    """One that is made anew by each, before one that each adds to; and other lines that do."""
    modes = enumerate(["a", "w", "a", "w"])
    files = [File(f"out.{mode}{n}", f"train.py:{1 + n}", mode) for n, mode in modes]
    files.append(File("another", "train.py:2", "w"))
    (found,) = Files().find(None, [notes(*[(0, file) for file in files])] * 2)
    assert found.verdict == "WRONG" and found.line == "train.py:2"
    assert found.more == ["and ranks [0, 1] write out.w3: train.py:4"]


def test_files_of_single_ranks():
    """One of rank 0 alone is right; one of each rank, if its name has the rank."""

    def find(*paths):
        ranks = [notes(*[(0, File(p, "train.py:1")) for p in of]) for of in paths]
        return [each.text for each in Files().find(None, ranks)]

    assert find(["out.pt"], []) == [] == find(["out-3-0.pt"], ["out-3-1.pt"])
    assert find(["out-3.pt"], ["out-4.pt"]) == [
        "each of ranks [0, 1] writes a file of its own, such as out-3.pt"
    ]


# ---- evaluations

KEY = ("train.py:9", "test", 0)
GATHER = Collective("all_gather", "train.py:11", "", False)
REDUCE = Collective("all_reduce", "train.py:12", "", False)


def evaluation(indices, call=None, ends=True, size=4, has_share=False, key=KEY):
    """Of one pass, after the training."""
    found = [*step_notes(), (3, Pass(key, "test", "Own", has_share, size, False, 4))]
    if indices:
        found.append((3, Batch(key, 0, indices, len(indices), 1, False)))
    found += [(3, PassEnd(key, 1))] * ends + ([(3, call)] if call else [])
    return notes(*found)


def scored(one, *ranks):
    found = score_rules.TestSamples().find(one, ranks)
    return found if found is None else [each.text for each in found]


def test_whole_evaluations():
    """All samples on each rank: right, unless a call puts them together."""
    whole, ids = evaluation([0, 1, 2, 3]), [0, 1, 2, 3]
    assert scored(whole, whole, whole) is None
    assert scored(whole, evaluation(ids, REDUCE), evaluation(ids, REDUCE)) is None
    (text,) = scored(whole, evaluation(ids, GATHER), evaluation(ids, GATHER))
    assert "train.py:11" in text and "count 2 times" in text
    stream = evaluation(None, GATHER)
    stream_of = evaluation([None] * 4, GATHER)
    assert scored(stream_of, stream_of, stream_of) == [] == scored(stream, stream, stream)


def test_shares_of_evaluations():
    one = evaluation([0, 1, 2, 3])

    def of(first, second, call=None, has_share=True):
        return scored(one, *[evaluation(of, call, True, 4, has_share) for of in (first, second)])

    assert of([0, 2], [1, 3]) == []
    (text,) = of([0, 2, 3], [1, 3])
    assert text == "5 samples on all ranks, of 4: Own repeats some, which count twice"
    dropped = Collective("gather_for_metrics", "train.py:11", "", False)
    assert of([0, 2, 3], [1, 3], dropped) == [] == of([0, 2, 3], [1, 3], has_share=False)


def test_loader_of_an_evaluation(tmp_path):
    """It is said where that is made whose sampler repeats samples."""
    (tmp_path / "loaders.py").write_text("loader = DataLoader(data)\n")
    place, ids = f"{tmp_path}/loaders.py:1", ([0, 1, 2, 3], [0, 2, 3], [1, 3])
    key = "train.py:9", f"loader 0 of {place}", 0
    one, *ranks = [evaluation(of, has_share=True, key=key) for of in ids]
    (found,) = score_rules.TestSamples().find(one, ranks)
    assert found.more == [f"its loader: {place}: loader = DataLoader(data)"]


def test_evaluations_of_one_side():
    """One that one process has not made, or not ended, is not compared."""
    half = evaluation([0, 2])
    assert scored(notes(*step_notes()), half, half) is None
    assert scored(evaluation([0, 1, 2], ends=False), half, half) is None


def test_repeated_samples():
    """By a sampler of shares: in what all put together."""

    def repeated(first, second, call=REDUCE, has_share=True):
        ranks = [evaluation(of, call, True, 4, has_share) for of in (first, second)]
        return score_rules.repeated(ranks)

    assert repeated([0, 1], [2, 0]) == {3: 4 / 3 - 1}
    assert repeated([0, 1], [2, 0], has_share=False) == {} == repeated([], [])
    assert repeated([0, 1], [2, 0], None) == {}


# ---- what the script keeps


def kept(kind, line="train.py:5", **tensors):
    return 1, Seen(kind, line, "Bank", 0, sketches(tensors, any_order=True))


def test_attributes_of_some_ranks():
    """A tensor of rank 0's object alone, or that a rank has not, is not compared."""
    one, other = notes(kept("attribute", a=ONE)), notes(kept("attribute", a=3 * ONE))
    find = state_rules.Attributes().find
    assert find(one, [other, other]) and find(one, [other, notes()]) is None
    more = notes(kept("attribute", a=ONE, b=ONE))
    assert find(more, [one, one]) == []
    assert find(more, [notes(kept("attribute", b=ONE)), one]) is None


def test_lines_that_set_an_attribute(tmp_path):
    (tmp_path / "data.py").write_text("def fit(bank, x):\n    bank.a = x.std()\n")
    file = 0, Said("file", f"{tmp_path}/data.py")

    def of(factor):
        values = sketches({"Bank.a": factor * ONE}, any_order=True)
        return notes(file, (1, Seen("attribute", "", "at a step", 0, values)))

    (found,) = state_rules.Attributes().find(of(1), [of(3), of(3)])
    assert found.more == [f"set at {tmp_path}/data.py:2: bank.a = x.std()"]


def test_samples_of_other_numbers():
    """Of the same index, on a rank: all of a batch."""

    def of(*totals, indices=(4, 5)):
        totals = dict(zip(indices, totals))
        return notes((0, Batch(("train.py:4", "loader", 0), 0, [*indices], 2, 9, True, totals)))

    one = of(1.0, 2.0, 3.0, 4.0, indices=(4, 5, 6, 7))
    (found,) = Data().find(one, [of(1.0, 2.0), of(3.3, 4.4, indices=(6, 7))])
    assert (found.verdict, found.line) == ("look", "train.py:4") and "by 9e-02" in found.text
    assert Data().find(one, [of(1.0, 2.0), of(3.3, 4.0, indices=(6, 7))]) == []


def test_who_sets_a_mode(tmp_path):
    """An `if` for some ranks tells it, or else what the side in evaluation mode has called last."""
    code = "if rank == 0:\n    model.train()\nmodel.eval()\nif rank == 0:\n    model.eval()\n"
    (tmp_path / "train.py").write_text(code + "model.train()\n")

    def line(one, rank, trains):
        sides = []
        for n, mode in ((one, trains), (rank, not trains)):
            about = {"set": [f"{tmp_path}/train.py:{n}"] if n else []}
            sides.append(notes((0, Seen("mode", "train.py:9", "o", 0, {"net": mode}, about=about))))
        (found,) = state_rules.Modes().find(sides[0], sides[1:])
        return found.line.rpartition(":")[2]

    assert line(2, 3, True) == "2" and line(5, 6, False) == "5"
    assert line(6, 3, True) == "3" == line(3, 6, False) and line(0, 0, True) == "9"


EVALUATES = """\
def run():
    if seen % every == 0:
        evaluate(net)
every = 8
"""


def test_evaluations_at_other_steps(tmp_path):
    """Who calls them, and the numbers that decide it; only of steps that all have made."""
    (tmp_path / "train.py").write_text(EVALUATES)
    line = f"{tmp_path}/train.py:3"

    def of(every, *steps, line=line, callers=("main.py:9",)):
        about = {"callers": list(callers)}
        made = [(n, Seen("evaluation", line, "Net", 0, {}, about=about)) for n in steps]
        at = [(n, Step((0, n), line, [], {}, [], [], {"every": every}, {})) for n in range(6)]
        return notes(*made, *at)

    (found,) = state_rules.Evaluation().find(of(8, 1, 3, 9), [of(4, 3, 5), of(4, 3, 5)])
    assert (found.verdict, found.line, found.step) == ("look", line, 1)
    assert found.text == "evaluated after [1, 3] steps on one process, [3, 5] on rank 0"
    assert found.remedy == "count what all ranks have done"
    branch = f"{tmp_path}/train.py:2: if seen % every == 0:"
    number = f"{tmp_path}/train.py:2: every is 8 on one process, 4, 4 on the ranks; set at"
    assert found.more[:2] == ["called at main.py:9", branch] and found.more[2].startswith(number)
    assert state_rules.Evaluation().find(of(8, 1, 3, 9), [of(4, 1, 3), of(4, 1, 3)]) == []
    many = of(8, 1, 3, *range(9, 27))  # as many as are noted: more may follow
    assert state_rules.Evaluation().find(many, [of(4, 3, 5), of(4, 3, 5)]) == []
    one, rank = [of(8, *steps, line=f"{tmp_path}/train.py:4") for steps in ([1, 3], [3, 5])]
    (found,) = state_rules.Evaluation().find(one, [rank, rank])  # in no branch
    assert found.more == ["called at main.py:9"]


def test_who_has_other_weights():
    def find(*ranks):
        (found,) = state_rules.OtherWeights().find(notes(kept("other", w=ONE)), ranks)
        return found.text.partition(", ")[2]

    right, wrong = [notes(kept("other", w=ONE * factor)) for factor in (1, 2)]
    assert find(right, wrong) == "and rank 0's does not: right if only rank 0 uses it"
    assert find(wrong, wrong).startswith("but is alike on all ranks")
    assert find(wrong, right) == "and the ranks differ from each other"
    assert state_rules.OtherWeights().find(right, [right, right]) == []
    assert state_rules.OtherWeights().find(notes(), [right, right]) is None


def test_lines_that_set_other_weights(tmp_path):
    """Who has called them, and the numbers in them."""
    (tmp_path / "teacher.py").write_text("teacher.mul_(decay)\nupdate()\n")
    first, second = [f"{tmp_path}/teacher.py:{n}" for n in (1, 2)]

    def of(decay):
        found = notes(*step_notes(), kept("other", w=ONE * decay))
        for _, note in found[Step]:
            note.variables["decay"] = decay
        found.seen("other")[0][1].about = {"w": first, first: second}
        return found

    (found,) = state_rules.OtherWeights().find(of(0.8), [of(0.4)] * 2)
    assert found.line == first and found.more == [
        f"called at {second}: update()",
        f"{first}: decay is 0.8 on one process, 0.4, 0.4 on the ranks",
    ]


def test_draws_before_weights():
    """What is drawn after they were seen has not made them. Those that no optimizer has may
    have the name of one that it has."""

    def drawn(*before, kind="weight"):
        ranks = []
        for state, factor in (1, 1.0), (2, 1 - 1e-6):
            found = [*[draw("own", state) for _ in before], draw("own", state, "train.py:7", 2)]
            found.append((1, Seen(kind, "train.py:9", "o", 0, {"w": sketch(ONE * factor)})))
            ranks.append(notes(*step_notes(), *found))
        return state_rules.OtherWeights().drawn(ranks)

    (found,) = drawn("train.py:3")
    assert found.line == "train.py:3" and found.verdict == "WRONG"
    (found,) = drawn("train.py:3", kind="other")
    assert found.verdict == "look"
    assert drawn() == []


def test_gradients_averaged_by_hand():
    """All are the same on all ranks, to the last digit, but for those that are nothing."""

    def of(*factors):
        values = {f"w.{n}": sketch(ONE * factor) for n, factor in enumerate(factors)}
        return notes((0, Seen("gradient", "train.py:9", "o", 0, values)))

    def found(*ranks):
        return state_rules.OtherWeights().averaged_by_hand([of(*factors) for factors in ranks])

    assert found((1, 2, 0), (1, 2, 0)) == {0: {"w.0", "w.1"}}
    assert found((1, 2), (1, 2 + 1e-5)) == {}  # as of a bias, whatever the weights are


# ---- the report as a whole


def test_status_without_steps():
    result = judge(notes(), [notes(), notes()], TOLERANCE)
    assert result.status == 2 and not result.of("WRONG", "look")


def test_rule_that_fails(monkeypatch, capsys):
    """The others still count."""
    monkeypatch.setattr(RULES[0], "find", lambda one, ranks: 1 / 0)
    right = notes(*step_notes())
    found = judge(right, [right, right], TOLERANCE).findings
    (failed,) = [f for f in found if "ZeroDivisionError" in f.text]
    assert failed.verdict == "not seen" and failed.what == RULES[0].name
    assert "Traceback" in capsys.readouterr().err
    assert {f.what for f in found} >= {rule.name for rule in RULES}


def test_notes_without_some_steps():
    """Of other kinds, they are there."""
    of = notes(*step_notes(), kept("attribute", w=ONE), (1, Printed("train.py:20", "0.5")))
    rest = of.without(["gradient"], lambda step: step > 0)
    assert [step for step, _ in rest.seen("gradient")] == [0] and not rest[Printed]
    assert rest.seen("attribute") and len(rest[Step]) == 4 == len(of.seen("gradient"))


def test_what_is_logged_alike():
    """It is right; of nothing, it is not known."""

    def of(*more):
        return notes(*step_notes(), *more)

    about = {"synced": False, "watched": False}
    logged = 1, Seen("logged", "train.py:5", "loss", 0, {0: summary(ONE)}, about=about)
    for more, found in ((logged,), []), ((), None):
        assert Logged().find(of(*more), [of(*more)] * 2) == found


def test_rounding():
    """Outputs that differ by little, and not by more than noise may hide."""

    def of(off, advice="coupled"):
        found = Finding("look", "outputs", 0, "", advice=advice, off=off)
        return Result([found], 1, 2, {}, float("inf"), 0)

    assert of(1e-4).may_be_rounding and not of(0.5).may_be_rounding
    assert not of(1e-4, "ratio").may_be_rounding


PASS_KEY = ("train.py:1", "loader", 0)


def training(shares, factors=(1.0,) * 4, batches=None, extra=(), ended=None, gradient=True):
    """Of a pass over a loader whose batches have these samples."""
    found = [(0, Pass(PASS_KEY, "loader", "Own", False, 64, False, None))]
    for n, indices in enumerate(shares):
        found.append((n, Batch(PASS_KEY, n, indices, len(indices), batches or 9, True, {})))
    if ended is not None:
        found.append((ended, PassEnd(PASS_KEY, ended)))
    return notes(*found, *step_notes(factors), *extra)


WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]
SHARES = [[[batch[rank]] for batch in WHOLE] for rank in range(2)]
OTHERS = [[[40 + n] for n in range(4)]] * 2


def judged(one, *ranks, **known):
    """{what: verdict}, and the Result."""
    result = judge(one, ranks, TOLERANCE, **known)
    return {f.what: f.verdict for f in result.of("look", "WRONG")}, result


def setting(rate, steps=range(4)):
    return [
        (step, Seen("setting", "train.py:9", "optimizer 0", step, {(0, "lr"): rate}))
        for step in steps
    ]


def test_other_samples():
    """A look, unless gradients differ, which follow from them; or where noise hides these, and the
    losses do not differ, either."""
    ranks = [training(share, extra=setting(0.1)) for share in OTHERS]
    assert judged(training(WHOLE, extra=setting(0.1)), *ranks)[0] == {"samples": "look"}
    found, result = judged(training(WHOLE), *[training(share, [2] * 4) for share in OTHERS])
    assert found == {"samples": "WRONG"}
    assert "so step 1: gradient" in " ".join(result.of("WRONG")[0].more)
    ranks = [training(share) for share in OTHERS]
    for _, note in ranks[0][Step]:
        note.averaged.append("w")
    again = training(WHOLE, [1.1] * 4)
    assert judged(training(WHOLE), *ranks, again=again)[0] == {"samples": "look"}


def test_passes_of_other_lengths():
    """By one batch: a look, and later steps have other batches. By more, WRONG; what a schedule
    makes of the lengths is a look in the first case alone."""
    later = [1, 1, 1, 2]

    def of(ended, rate, shares=WHOLE, factors=later, more=()):
        return training(shares, factors, ended, [*setting(rate, [0]), *more], ended)

    def of_next_pass(*indices):  # whose samples are no finding of their own
        key = (*PASS_KEY[:2], 1)
        found = [(4, Pass(key, "loader", "Own", False, 64, False, None))]
        ids = list(indices)
        return found + [(4 + n, Batch(key, n, ids, len(ids), 9)) for n in range(2)]

    ranks = [of(3, 0.2, share[:3], [1] * 4, of_next_pass(8 + n)) for n, share in enumerate(SHARES)]
    found, result = judged(of(4, 0.1, more=of_next_pass(0, 1)), *ranks)
    assert found == {"epoch": "look", "setting": "look"}
    assert "later steps are not compared" in result.of("look")[0].text
    ranks = [of(2, 0.2, share[:2], [1, 1, 1, 1]) for share in SHARES]
    found, result = judged(of(4, 0.1), *ranks)
    assert found == {"epoch": "WRONG", "setting": "WRONG"}
    assert "so step 4: gradient" in " ".join(result.of("WRONG")[0].more)


def test_first_step_that_differs():
    """Of several, whatever order a set has."""
    factors = [1.0] * 10
    factors[1] = factors[8] = 2.0
    _, result = judged(notes(*step_notes([1] * 10)), *[notes(*step_notes(factors))] * 2)
    (found,) = result.of("WRONG")
    assert found.step == 1 and found.text.endswith("(in 2 steps)")


def test_settings_explain_updates():
    """And numbers; but no gradients that differ before."""

    def of(rate, update, gradient=1.0, seen=0):
        found = step_notes([gradient, 1, 1, 1])
        for step, note in found[::2]:
            note.variables["seen"] = seen * (1 + step)
        found += [
            (step, Seen("update", "train.py:9", "optimizer 0", step, {"w": sketch(ONE * update)}))
            for step in range(1, 4)
        ]
        return notes(*found, *setting(rate, range(1, 4)))

    one = of(0.1, 1.0, seen=1)
    found, result = judged(one, *[of(0.2, 2.0, seen=2)] * 2)
    assert found == {"setting": "WRONG"} and not result.lines
    found, result = judged(one, *[of(0.1, 2.0, seen=2)] * 2)
    assert found == {"update": "WRONG", "numbers": "look"} and result.lines == 4
    found, _ = judged(one, *[of(0.2, 2.0, 2.0)] * 2)
    assert found == {"setting": "WRONG", "gradient": "WRONG"}
    found, _ = judged(one, *[of(0.2, 2.0)] * 2, scaled={"loader": "train.py:1"})
    assert found == {"setting": "look"}  # for a batch that the script has scaled, too
    found, _ = judged(one, *[of(0.3, 2.0)] * 2, scaled={"loader": "train.py:1"})
    assert found == {"setting": "WRONG"}


@pytest.mark.parametrize(
    "total, steps, grows, verdict",
    [
        (12, 6, 0, "look"),
        (12, 7, 0, "WRONG"),
        (12, 6, 1, "WRONG"),  # as of the samples that each has seen
        (4, 2, 0, "WRONG"),  # a batch's rows
    ],
)
def test_a_schedule_planned_from_the_batch_size(total, steps, grows, verdict):
    """Of one process, whose steps are as many as all ranks' samples would need; not another."""

    def of(rate, steps):
        found = step_notes([1.0] * 4)
        for step, note in found[::2]:
            note.variables["steps_per_epoch"] = steps * (1 + grows * step)
        given = Batch(PASS_KEY, 0, [0, 1, 2, 3], 4, 9, True, {})
        return notes((0, given), *found, *setting(rate, range(1, 4)))

    rate = 0.3
    one, ranks = of(0.1, total), [of(rate, steps)] * 2
    for about in {"scaled": {"loader": "train.py:1"}}, {}:
        found, result = judged(one, *ranks, **about)
        assert found == {"setting": verdict if about else "WRONG"}
        assert ("by --one" in result.findings[0].text) == (verdict == "look" and bool(about))
    known = {"scaled": {"loader": "train.py:1"}, "own_flags": True}  # by --one, as it is said
    assert judged(one, *ranks, **known)[0] == {"setting": "WRONG"}
    in_proportion = [of(0.2, steps)] * 2  # to the batch
    assert judged(one, *in_proportion, **known)[0] == {"setting": "look"}
    ranks[1] = of(0.4, steps)
    assert judged(one, *ranks, scaled={"loader": "train.py:1"})[0] == {"setting": "WRONG"}


def test_an_end_that_is_planned():
    """Where one process plans more steps from its batch size, its schedule and its end are looks,
    whatever else is WRONG; not after an error, nor where it makes fewer, or has flags of its
    own."""

    def verdicts(first, then, rates=(0.1, 0.3), end="its end", factor=1.0, planned=None, **known):
        both = []
        for count, rate, by in zip((first, then), rates, (1.0, factor)):
            steps = step_notes([by] * count)
            for _, note in steps[::2]:
                note.variables["planned"] = count if planned else 0
            both.append(notes(*steps, *setting(rate, range(count)), end=end))
        known = {"scaled": {"loader": "train.py:1"}} | known
        found, result = judged(both[0], *[both[1]] * 2, **known)
        texts = [f.text for f in result.findings if f.what in ("setting", "end")]
        assert [text.count("by --one") for text in texts] == [found["end"] == "look"] * 2
        return found

    looks = {"setting": "look", "end": "look"}
    wrong = dict.fromkeys(looks, "WRONG")
    assert verdicts(4, 3) == looks == verdicts(4, 2, planned=True)
    assert verdicts(4, 3, factor=1.5) == looks | {"gradient": "WRONG"}
    assert verdicts(3, 4) == wrong == verdicts(4, 3, own_flags=True) == verdicts(4, 3, scaled={})
    assert verdicts(4, 3, end="ValueError at train.py:7") == wrong


def test_lost():
    """What cannot be compared any more is not told, such as attributes and printed numbers, nor the
    end or a length that follows; a rate is a look."""
    error = "a ValueError at train.py:7"

    def of(share, factor=1.5, score=0.7, rate=0.2, ended=2, key=PASS_KEY):
        found = [
            kept("attribute", a=ONE * factor),
            (2, Printed("train.py:20", f"score {score:.3f}")),
        ]
        found += [draw("split", share, step=1, made="train.py:2"), *setting(rate, [0])]
        found += [(0, Pass(key, "loader", "Own", False, 64, True, None)), (2, PassEnd(key, ended))]
        found += [(n, Batch(key, n, [share + n], 4, 9, True, {})) for n in range(3)]
        steps = step_notes([factor] * (4 if factor == 1 else 3))
        return notes(*found, *steps, end="its end" if factor == 1 else error)

    one, ranks = of(0, 1, 0.5, 0.1, 5), [of(0), of(9)]
    found, result = judged(one, *ranks)
    assert found == {"samples": "look", "setting": "look"} and result.lost == 0
    assert f"rank 0: 3 steps, then {error}" in result.of("look")[0].more
    bare = [notes(*n.of[Pass], *n.of[Batch], *step_notes()) for n in (one, *ranks)]
    unseen = {f.what for f in judge(bare[0], bare[1:], TOLERANCE).of("not seen")}
    assert {"attributes", "split"} <= unseen
    ranks = [notes(*rank.of[Seen], *rank.of[Printed], *step_notes()) for rank in ranks]
    found, _ = judged(one, *ranks)
    assert found["printed"] == found["attributes"] == "look" and found["setting"] == "WRONG"


def test_all_fail():
    """By the same error, which is the script's."""
    failed = notes(*step_notes(), end="a ValueError at train.py:7")
    assert judged(failed, failed, failed)[0] == {"end": "look"}


def test_differences_after_an_uneven_batch():
    """They count."""

    def of(batches, factor):
        found = [(0, Pass(PASS_KEY, "loader", "DistributedSampler", True, 7, False, 4))]
        found += [(n, Batch(PASS_KEY, n, ids, len(ids), 2, True, {})) for n, ids in batches]
        return notes(*found, *step_notes([1, factor, factor]))

    one = of(enumerate([[0, 1, 2, 3], [4, 5, 6]]), 1.0)
    shares = [[0, 2], [4, 6]], [[1, 3], [5, 4]]
    found, result = judged(one, *[of(enumerate(share), 1.5) for share in shares])
    assert found == {"gradient": "WRONG"} and result.of("WRONG")[0].step == 2


def test_another_split(tmp_path):
    """Of the dataset: the line that has made it is below the samples that differ, and its
    numbers."""
    (tmp_path / "split.py").write_text("data = data * 2\npart = Subset(data, range(few))\n")
    file = f"{tmp_path}/split.py"

    def of(shares, factor):
        about = {"model": None}
        found = [
            (0, Seen("value", f"{file}:{n}", name, 0, {0: summary(ONE * factor)}, n, about=about))
            for n, name in ((1, "mul"), (2, "Subset"))
        ]
        made = training(shares, extra=found)
        made[Step][0][1].variables["few"] = factor
        return made

    _, result = judged(of(WHOLE, 1), *[of(share, 3) for share in OTHERS])
    first, second = [text for text in result.of("look")[0].more if file in text]
    assert first.startswith(f"{file}:2: part = Subset(data, range(few))  [Subset]: other numbers")
    assert second == f"{file}:2: few is 1 on one process, 3, 3 on the ranks"


def test_buffers_before_gradients():
    """A buffer that differs before any gradient does follows from nothing; what its line sets it to
    is said."""

    def of(buffer, factor, *more):
        values = sketches({"mean": ONE * buffer}, any_order=True)
        seen = Seen("buffer", "train.py:9", "model", 0, values, about={})
        about, of_line = {"model": None}, {0: summary(ONE * buffer**2)}
        value = Seen("value", "train.py:9", "mul", 0, of_line, 1, about=about)
        return notes((0, value), (0, seen), *more, *step_notes([1, 1, factor, 1]))

    found, result = judged(of(1, 1), *[of(2, 2)] * 2)
    assert found == {"buffer": "WRONG"} and result.lines == 3
    more = result.of("WRONG")[0].more
    assert more[0].startswith("from train.py:9  [mul]") and "so step 3: gradient" in more[1]
    assert judged(of(1, 1), *[of(2, 1)] * 2)[1].lines == 1

    def loss(x):  # which is WRONG later
        values = {0: summary(ONE.mean() * x)}
        return 2, Seen("loss", "train.py:5", "backward", 0, values, 5, about={"model": None})

    found, _ = judged(of(1, 1, loss(1.0)), *[of(2, 2, loss(2.0))] * 2)
    assert found == {"buffer": "WRONG", "loss": "WRONG"}


def test_parts_of_a_larger_batch():
    """Of one process, which was given more: a look, unless their gradients are added up."""

    def of(passes, factor):
        found = [
            (
                1,
                Seen(
                    "inputs", "train.py:5", "Net", n, {0: summary(ONE * (1 + n))}, 1 + n, about={}
                ),
            )
            for n in range(passes)
        ]
        return notes(*found, *step_notes([factor] * 4))

    scaled = {"loader": "train.py:1"}
    assert judged(of(2, 1), of(1, 1), of(1, 1), scaled=scaled)[0] == {}
    found, _ = judged(of(2, 1), of(1, 0.5), of(1, 0.5), scaled=scaled)
    assert found == {"samples": "look"}


@pytest.mark.parametrize("watched, verdict", [(True, "WRONG"), (False, "look")])
def test_what_is_logged_of_each_rank(watched, verdict):
    """WRONG only if something decides by it."""

    def of(number):
        about = {"synced": False, "watched": watched}
        return notes((0, Seen("logged", "train.py:3", "loss", 0, {"value": number}, about=about)))

    (found,) = Logged().find(of(1.0), [of(1.0), of(2.0)])
    assert found.verdict == verdict and not found.more

"""The conditions of what ddp_check says of batches, passes and starts: each here has a situation
that depends on it."""

from dataclasses import replace

import pytest
import torch
from test_ddp_check_parts import notes, step_notes
from test_ddp_check_samples import X, batch

from ddp_check.compare.order_rules import Loaders, Order
from ddp_check.compare.sample_rules import Counts, Data, Inputs, Splits
from ddp_check.compare.samples import (
    EVEN,
    SHARE,
    compare_lengths,
    compare_samples,
    passes_per_process,
    remedy_by_one,
)
from ddp_check.compare.shares import (
    rows_of_inputs,
    takes_blocks,
    takes_others,
    takes_share,
    training_passes,
)
from ddp_check.compare.starts import other_layout, other_options, scaled_loaders
from ddp_check.notes import (
    OWN_GENERATOR,
    Batch,
    Collective,
    Cut,
    Drawn,
    End,
    Pass,
    PassEnd,
    Said,
    Seen,
    Step,
)
from ddp_check.runs import Options
from ddp_check.sketch import summary

OPTIONS = Options(20)
LINE, LOADER = "train.py:1", "loader 0 of train.py:3"
FIRST, SECOND = [3, 1, 2, 0], [7, 5, 6, 4]  # of a pass of 8 samples
OTHERS = 9 + X.cos()  # that are not on one process


def inputs(step, *values, line="train.py:2", number=0):
    """What goes into a model; None of what has no numbers."""
    values = {n: v if v is None else summary(v) for n, v in enumerate(values)}
    return step, Seen("inputs", line, "model", number, values)


def a_pass(*batches, number=0, start=0, ends=False, planned=None, trains=True, **about):
    """Over a loader: for training with a step for each batch, else in one step."""
    line, loader = about.pop("line", LINE), about.pop("loader", LOADER)
    key, usual = (line, loader, number), {"sampler": "DistributedSampler", "has_share": True}
    usual |= {"size": 64, "draws": False, "batch_size": 4}
    found = [(start, Pass(key, loader, **(usual | about)))]
    for n, ids in enumerate(batches):
        rows = None if ids is None else len(ids)
        given = Batch(key, n, ids, rows, planned or len(batches), trains)
        found.append((start + n * trains, given))
    return found + [(found[-1][0], PassEnd(key, len(batches)))] * ends


def draw(kind, state, line="train.py:5", step=0, **about):
    about = {"chooses": False, "in_module": False, "seeded": None, "size": 8, "parts": ()} | about
    return step, Seen(kind, line, "rand", 0, {"state": state}, about=about)


def verdicts(found):
    return found if found is None else [each.verdict for each in found]


# ---- how the runs are started again


def test_most_batches_without_gradients():
    """Of the loop that trains, not of an evaluation with more batches."""

    def of(rows):
        tests = [batch([0], "train.py:9", trains=False)] * 5
        trains = [batch([0]), batch([1]), inputs(1, X[:rows]), batch([2])]
        return notes(*tests, *trains)

    assert rows_of_inputs(of(8), [of(4), of(4)]) == (8, 8)


def test_share_of_a_whole_batch():
    """Where each rank loads all and takes a block, one process needs no larger batch."""

    def of(x):
        return notes(*a_pass(FIRST, SECOND), inputs(1, x, None), *step_notes())

    options, _ = other_options(OPTIONS, of(X), [of(X[:4]), of(X[4:])])
    assert not options.scaled and options.layout == "blocks"


def test_blocks():
    """Of what rank 0 has; its model may get more, and other models may get more rows."""

    def blocks(one, *ranks):
        one, *ranks = [notes(batch(FIRST), *found) for found in (one, *ranks)]
        return takes_share(one, ranks) and takes_blocks(one, ranks)

    first, last = [inputs(1, X[:4])], [inputs(1, X[4:])]
    assert blocks([inputs(1, X)], first, last)
    assert blocks([inputs(1, X)], [inputs(1, X[:4], X)], last)
    assert blocks([inputs(1, X)], [inputs(1, X[:5])], [inputs(1, X[5:])])
    assert not blocks([inputs(1, X)], last, first)  # in another order
    assert not blocks([], first, last)
    turns = [[inputs(0, X), inputs(1, part)] for part in (X, X[::2], X[1::2])]
    assert not blocks(*turns)  # though all have looked at the batch before
    ones = [inputs(1, X)], [inputs(1, X[:4])], [inputs(1, X[:4])]
    one, *ranks = [notes(batch(FIRST), *of) for of in ones]
    assert not takes_blocks(one, ranks)  # all ranks take the same
    constant = [[inputs(1, X[:1].expand(len(x), 4)), inputs(1, x)] for x in (X, X[::2], X[1::2])]
    assert not blocks(*constant)


def test_test_set_on_each_rank():
    """Its batches are as large in all processes, and are not to be made larger."""

    def of(*shares):
        tests = a_pass(FIRST, line="train.py:9", loader="another", trains=False)
        return notes(*a_pass(*shares), *tests)

    ranks = [of([3, 2], [7, 6]), of([1, 0], [5, 4])]
    assert other_options(OPTIONS, of(FIRST, SECOND), ranks) is None


def test_batches_without_tensors():
    """Of strings, in a stream: nobody knows how many there are."""
    of = notes(*a_pass(None, None), *step_notes())
    assert other_options(OPTIONS, of, [of, of]) is None
    assert compare_samples(of, [of, of])[:2] == ([], {})


def test_turns_of_few_steps():
    """Not of a line that draws for the first step alone; nor where a process has no numbers, nor
    again."""

    def draws(times):
        of = notes(*step_notes())
        of.of[Drawn] = [(4, Drawn({("train.py:4", "randint"): times}, False))]
        return of

    often, seldom = draws({1: 4, 2: 4}), draws({1: 2, 2: 2})
    options, _ = other_options(OPTIONS, often, [seldom, seldom])
    assert options.turns and other_options(options, often, [seldom, seldom]) is None
    of = draws({0: 4})
    without = notes(*step_notes())
    del without.of[Drawn]
    assert other_options(OPTIONS, of, [of, of]) is None
    assert other_options(OPTIONS, of, [of, without]) is None
    assert other_options(OPTIONS, without, [of, of]) is None


WHOLE, HALVES = (FIRST, SECOND, [9, 8]), ([3, 2], [7, 6], [9])


def of_rows(number, batches, *more, end="its end"):
    """Of so many rows that go into a model for the second batch."""
    first, *found = a_pass(*batches)
    return notes(first, *found[:2], inputs(1, X[:number]), *found[2:], *more, end=end)


def test_batch_that_is_cut_twice():
    """By us and by the script: it is given whole again, once."""
    cut, one = (0, Cut(LOADER, 4)), of_rows(4, WHOLE)
    shared = of_rows(1, HALVES, cut)
    options, why = other_options(OPTIONS, one, [shared, shared])
    assert options == replace(OPTIONS, cuts=False)
    assert why == "the script takes each rank's share of a batch itself"
    assert other_options(options, one, [shared, shared]) is None
    for rank in of_rows(2, HALVES, cut), of_rows(1, HALVES):
        assert other_options(OPTIONS, one, [rank, rank]) is None


def test_scripts_that_fail_with_a_part():
    """Of a batch that is cut; not such as fail anyhow, or have not yet ended."""
    cut, fails = (0, Cut(LOADER, 4)), "ValueError at train.py:3"
    one, right = of_rows(4, WHOLE), of_rows(2, HALVES, cut)
    failed = of_rows(2, HALVES, cut, end=fails)
    options, _ = other_options(OPTIONS, one, [right, failed])
    assert options == replace(OPTIONS, cuts=False)
    failed_alone = of_rows(2, HALVES, end=fails)
    assert other_options(OPTIONS, one, [failed_alone, failed_alone]) is None
    assert other_options(OPTIONS, of_rows(4, WHOLE, end=fails), [failed, failed]) is None
    del failed.of[End]
    assert other_options(OPTIONS, one, [failed, failed]) is None


def test_batch_size_of_a_framework():
    """It was one of all ranks, if one process got as many times as many."""

    def prepared(rows, *of_ranks, trains=True, cut=((0, Cut(LOADER, 8)),), options=OPTIONS):
        one, *ranks = [
            notes(*a_pass(*[range(number)] * 2, trains=trains) * bool(number))
            for number in (rows, *of_ranks)
        ]
        one.of[Cut] = list(cut)
        found = other_options(options, one, ranks)
        return found and found[0].prepared

    assert prepared(8, 2, 2) is False and prepared(8, 4, 4) is None and prepared(8, 2, 0) is None
    assert prepared(8, 2, 2, trains=False) is None is prepared(8, 2, 2, cut=())
    assert prepared(8, 2, 2, options=replace(OPTIONS, prepared=False)) is None


def test_batch_size_of_each_process():
    """It is made larger on one process once; what it is said of then."""
    one = of_rows(4, WHOLE)
    options, _ = other_options(OPTIONS, one, [one, one])
    assert options == replace(OPTIONS, scaled=[LOADER])
    assert other_options(options, one, [one, one]) is None
    assert scaled_loaders(options, one, [one, one]) == {}

    def of(batches):  # a test before, and another loader, whose batches were not made larger
        tests = a_pass(FIRST, line="train.py:9", trains=False)
        other = a_pass(*batches, line="train.py:5", loader="another")
        return notes(*tests, *other, *a_pass(*batches))

    assert scaled_loaders(options, of(WHOLE), [of(HALVES)] * 2) == {LOADER: LINE}


def test_passes_of_a_single_step():
    """As --steps 1 asks for: of those in which gradients are computed. Of several steps, a pass in
    which there is one is none, as one that only looks at a batch."""
    tests = [a_pass(FIRST, line=f"train.py:{n}", trains=False) for n in (8, 9)]
    after = a_pass(FIRST, line="train.py:5", start=1)
    for steps, lines in (1, {LINE}), (2, set()):
        found = [*tests[0], *a_pass(FIRST), *tests[1], *after]
        one = notes(*found, *step_notes([1.0] * steps))
        assert {line for line, *_ in training_passes(one)} == lines


def test_layouts():
    """That of blocks, if all that is known of orders says so, and something depends on it."""

    def layout(*orders, depends=True):
        of = notes(*step_notes(), (0, Said("file", "train.py")))
        of.of[Said] += [(1, Said("order", order)) for order in orders]
        of.of[Drawn] = [(4, Drawn({}, depends))]
        found = other_options(OPTIONS, of, [of, of])
        return found and found[0].layout

    assert layout("blocks") == "blocks" and layout() is None
    assert layout("blocks", "turns") is None is layout("blocks", depends=False)


def test_layout_of_values():
    """Blocks that the script takes of its data without a loader; not beside parts by turns, or if
    a loader's order is known, or nothing depends on it."""

    def layout(*values, name="__getitem__", depends=True, said=(), options=OPTIONS, **about):
        made = []
        for of in zip(*values):
            found = [
                (0, Seen("value", f"{about.get('file', '')}:{n}", name, 0, {0: summary(x)}))
                for n, x in enumerate(of, 1)
            ]
            of_process = notes(*found, *[(0, note) for note in said])
            of_process.of[Drawn] = [(4, Drawn({}, depends))]
            made.append(of_process)
        found = other_layout(options, made[0], made[1:])
        return found and found.layout

    blocks, turns = (X, X[:4], X[4:]), (X, X[::2], X[1::2])
    assert layout(blocks) == "blocks" and layout(turns) is None is layout((X, X, X))
    assert layout(blocks, name="mul") is None is layout(blocks, depends=False)
    assert layout(blocks, said=[Said("order", "turns")]) is None
    assert layout(blocks, options=Options(20, layout="blocks")) is None
    taken = [(0, Seen("value", "", "__getitem__", 0, {0: summary(x)})) for x in blocks]
    one, *ranks = map(notes, taken)
    assert other_layout(OPTIONS, one, [*ranks, notes()]) is None  # a third rank takes none
    for of_process in (one, *ranks):  # none of which has said what it has drawn
        del of_process.of[Drawn]
    assert other_layout(OPTIONS, one, ranks) is None
    assert layout((X[:2], X[:1], X[1:2])) is None  # a row on each is both
    alike = torch.ones(8, 4)
    assert layout((alike, alike[:4], alike[4:])) is None is layout((X, X[2:6], X[4:]))
    vectors = [x[:, 0] for x in blocks]
    assert layout(vectors) is None


def test_layout_of_what_goes_into_a_model(tmp_path):
    """Such blocks; not if a line that says rank takes each so many-th row."""
    (tmp_path / "train.py").write_text("x[rank::world]\nx[1:]\n")
    file = f"{tmp_path}/train.py"

    def layout(line):
        made = []
        for block, turn in (X, X), (X[:4], X[::2]), (X[4:], X[1::2]):
            taken = 0, Seen("value", line, "__getitem__", 0, {0: summary(turn)})
            made.append(notes(inputs(0, None, X[:0], block), taken, (0, Said("file", file))))
            made[-1].of[Drawn] = [(4, Drawn({}, True))]
        return other_layout(OPTIONS, made[0], made[1:])

    assert layout(f"{file}:2").layout == "blocks" and layout(f"{file}:1") is None


# ---- batches of all ranks beside those of one process


def test_batch_of_each_rank():
    """Without a sampler, all ranks have all of a batch."""
    whole = notes(*a_pass(FIRST, SECOND))
    found, uneven, _ = compare_samples(whole, [whole, whole])
    assert not uneven and len(found) == 2 and found[0].remedy == SHARE["remedy"]
    assert found[0].text == "batch 1 has 4 samples on one process, [4, 4] on the ranks"


def test_share_that_is_taken_later():
    """By the script, of a batch that all have; of other batches, it is to be told."""
    one = notes(*a_pass(FIRST, SECOND), inputs(1, X))
    seconds = [7, 5], [6, 9]
    ranks = [notes(*a_pass(FIRST, x), inputs(1, X[n:4])) for n, x in enumerate(seconds)]
    (found,) = compare_samples(one, ranks)[0]
    assert found.step == 1
    assert found.text == "batch 2 of pass 1: 1 of 4 samples of one process are on no rank"
    one = notes(*a_pass(*ORDER), inputs(1, X))
    shares = [*ORDER[:3], [12, 13]], [*ORDER[:3], [14, 40]]  # batches that all have are no overlap
    ranks = [notes(*a_pass(*of), inputs(1, X[n:4])) for n, of in enumerate(shares)]
    (found,) = compare_samples(one, ranks)[0]
    assert found.step == 3 and found.verdict == "look"


@pytest.mark.parametrize(
    ("shares", "sampler", "planned", "is_uneven"),
    [
        ([[0, 1], [2, 3, 4]], "Own", 1, True),
        ([[0, 1, 2], [3, 4, 5]], "Own", 1, False),  # too many for a last batch
        ([[0, 1], [2, 3, 4]], "Own", 2, False),  # it is not the last one
        ([[0, 1, 2], [3, 4, 5]], EVEN, 1, True),
    ],
)
def test_batch_of_another_size(shares, sampler, planned, is_uneven):
    def of(*ids):
        after = batch([0], "train.py:1", step=3)[1]
        after.key, after.number = (LINE, LOADER, 0), 7
        return notes(*a_pass(*ids, planned=planned, sampler=sampler), (3, after))

    found, uneven, _ = compare_samples(of([0, 1, 2, 3]), [of(share) for share in shares])
    found = [each for each in found if not each.step]
    assert list(uneven) == [0] * is_uneven and len(found) == (not is_uneven)


def test_stream_of_several_processes():
    """Instead of a dataset with an index, or the other way round: what is in it cannot be told."""
    dataset, stream = notes(*a_pass(FIRST, SECOND)), notes(*a_pass(FIRST, SECOND))
    for _, given in stream[Batch]:
        given.indices = None
    for _, given in dataset[Batch]:
        given.rows = 4
    ranks = [notes(*a_pass([3, 1], [7, 5])), notes(*a_pass([2, 0], [6, 4]))]
    assert compare_samples(stream, ranks)[0] == []
    for _, given in ranks[1][Batch]:
        given.indices = None
    assert compare_samples(dataset, ranks)[0] == []


def other_samples(*shares, one=(FIRST, SECOND), said=(), sizes=(64, 64), **about):
    """The first finding of batches whose samples the ranks do not have."""
    found = [[*a_pass(*of, **(about | {"size": n})), *said] for of, n in zip(shares, sizes[1:] * 2)]
    more = {**about, "size": sizes[0]}
    return compare_samples(notes(*a_pass(*one, **more)), [notes(*of) for of in found])[0][0]


COPIES = ([3, 1], [7, 5]), ([3, 1], [7, 5])
OTHER_ORDER = ([3, 7], [2, 6]), ([1, 5], [0, 4])


def test_samples_on_no_rank():
    """What to do depends on whether its sampler gives shares."""
    found = other_samples(*COPIES)
    assert found.remedy == "the same dataset, split and order on all ranks" and not found.advice
    assert other_samples(*COPIES, has_share=False).remedy == SHARE["remedy"]
    drawn = other_samples(*COPIES, said=[(0, Said("own order", "train.py:7"))])
    assert drawn.more == ["its order is drawn at train.py:7"]
    chosen = other_samples(*COPIES, said=[(0, Said("chooses", "train.py:7"))], made="own.py:3")
    assert "a sampler of each rank chooses its own" in chosen.text and chosen.advice == "unpaired"
    assert chosen.more == ["its sampler: own.py:3"]
    own = other_samples(*COPIES, draws=True, has_share=False, sampler="WeightedRandomSampler")
    assert "each rank draws its own (WeightedRandomSampler)" in own.text
    assert not other_samples(*COPIES, draws=True).advice  # of shares


def test_indices_of_a_share():
    """One index is of other samples on another process; not if most are of the same."""

    def found(*totals, size=64, has_share=True):
        def of(numbers, ids):
            made = a_pass(ids, [*range(9, 13)], has_share=has_share, size=size)
            made[1][1].totals = dict(zip(ids, numbers))
            return notes(*made)

        one, *ranks = totals
        processes = [of(one, [0, 1, 2, 3]), *[of(each, [0, 1]) for each in ranks]]
        (first, *_), *_ = compare_samples(processes[0], processes[1:])
        return first.advice

    assert found([1.0, 2.0, 3.0, 4.0], [1.0, 3.0], [2.0, 4.0]) == "unpaired"
    assert found([1.0, 2.0, 3.0, 4.0], [1.0, 2.0], [1.0, 2.0]) == ""
    assert found([1.0, 2.0, 3.0, 4.0], [1.0, 2.0], [1.0, 5.0]) == ""
    most = [9.0, 8.0, 7.0, 6.0], [1.0, 3.0], [1.0, 4.0]
    assert found(*most) == "" and found(*most, size=None) == "unpaired"
    assert found([1.0, 2.0, 3.0, 4.0], [1.0, 3.0], [2.0, 4.0], has_share=False) == ""


def test_samples_of_another_dataset(tmp_path):
    """Nothing can be compared with a dataset of each rank's share, whose line is named."""
    (tmp_path / "own.py").write_text("part = files[rank::world]\n")
    said = [(0, Said("file", f"{tmp_path}/own.py"))]
    found = other_samples(([0, 1], [2, 3]), ([0, 1], [2, 3]), said=said, sizes=(8, 4))
    assert found.more == [f"a share by the rank: {tmp_path}/own.py:1: part = files[rank::world]"]
    assert found.text == (
        "its dataset has 8 samples on one process, [4, 4] on the ranks, as one that takes its "
        "share itself: nothing can be compared"
    )
    assert found.advice == "unpaired" and not found.remedy


def test_samples_that_each_rank_draws():
    said = (0, Said("own order", "train.py:7")), (0, Said("file", "train.py"))
    about = {"sampler": "Weighted", "draws": True, "has_share": False}
    found = other_samples(*COPIES, said=said, **about)
    assert found.text.endswith(
        "are on no rank: each rank draws its own (Weighted), so nothing after it can be compared"
    )
    assert found.more == ["its order is drawn at train.py:7"] and not found.remedy


ORDER = [[*range(n, n + 4)] for n in range(0, 32, 4)]
SLICES = [[ids[n : n + 2] for ids in ORDER] for n in range(2)]


OWN = """\
class Own:
    def __iter__(self):
        return iter(order[START : size // world])
part = files[rank::world]
"""


@pytest.mark.parametrize(("start", "verdict"), [("rank", "WRONG"), ("0", "look")])
def test_samples_by_a_rank_of_its_own(tmp_path, start, verdict):
    """A sampler of the script's own that takes no share by the rank may draw its own by design."""
    (tmp_path / "own.py").write_text(OWN.replace("START", start))
    about = {"sampler": "Own", "made": f"{tmp_path}/own.py:3"}
    assert other_samples(*SLICES, one=ORDER, **about).verdict == verdict


def test_shares_that_overlap():
    """As by an order of each rank's own, or by a wrong slice: WRONG, if a sampler gives shares, and
    many samples are on several ranks, but on one process none is there twice."""
    found = other_samples(*SLICES, one=ORDER)
    assert found.verdict == "WRONG" and found.text.endswith(
        "and in the pass so far, 8 are on several: no shares of one order"
    )
    assert other_samples(*SLICES, one=ORDER, draws=True).verdict == "WRONG"
    assert other_samples(*SLICES, one=ORDER, has_share=False).verdict == "look"
    assert other_samples(*SLICES, one=ORDER, sampler=EVEN).verdict == "look"
    twice = [*ORDER[:7], ORDER[0]]  # as of repeated augmentation
    assert other_samples(*SLICES, one=twice).verdict == "look"
    few = SLICES[0], [ids[1:3] if n else ids[2:] for n, ids in enumerate(ORDER)]
    assert other_samples(*few, one=ORDER).verdict == "look"  # seven may fill up two batches
    long = [[*range(n, n + 4)] for n in range(0, 400, 4)]
    few = [ids[:2] for ids in long], [ids[1:3] if n < 10 else ids[2:] for n, ids in enumerate(long)]
    assert other_samples(*few, one=long).verdict == "look"  # ten of 400


def test_samples_in_another_order():
    """The ranks have shares of the whole, in other batches."""
    found = other_samples(*OTHER_ORDER)
    assert found.text == (
        "batch 1 of pass 1: 2 of 4 samples of one process are on no rank in this step, and no "
        "sample is on two: they share them in another order, so nothing after it can be compared"
    )
    assert found.advice == "unpaired" and not found.remedy


def test_shares_of_a_pass():
    """They are such if few samples are on two ranks, and few of a whole pass on none."""

    def are_shares(first, second, **about):
        return other_samples(first, second, **about).advice == "unpaired"

    first, second = OTHER_ORDER
    assert are_shares(first, ([1, 5], [0, 7]))
    assert not are_shares(first, ([1, 5], [3, 7]))
    whole = {"ends": True, "sizes": (8, 8)}
    one_left, two_left = ([1, 5], [0]), ([1, 5],)
    assert are_shares(first, second, **whole) and are_shares(first, one_left, **whole)
    assert not are_shares(first, two_left, **whole)
    assert are_shares(first, two_left, sizes=(8, 8))  # the others may be still to come
    assert are_shares(first, two_left, ends=True, sizes=(9, 9))  # as of drop_last
    again = {"one": (FIRST, SECOND, FIRST), "sizes": (8, 8)}  # as of a batch sampler: other shares
    assert are_shares((*first, second[0]), (*second, first[0]), **again)
    assert are_shares(first, second, sizes=(None, None))  # of a dataset without len()
    last = [*first, [8]], [*second, [9]]  # a pass of 10, whose last batch is short
    assert are_shares(*last, one=(FIRST, SECOND, [8, 9]), ends=True, sizes=(10, 10))
    tests = a_pass(FIRST, SECOND, line="train.py:9", trains=False)  # a test set is on both
    assert are_shares(first, second, said=tests)


# ---- batches that the script makes itself


def test_batches_of_its_own():
    """As many rows on each rank as on one process, and other ones: of a batch size per process."""

    def found(one, *ranks, trains=(), scaled=()):
        one, *ranks = [notes(*of, *step_notes()) for of in (one, *ranks)]
        return [each.text for each in passes_per_process(one, ranks, trains, scaled)]

    def of(x):  # also a number, and what has none, go into models; and something before the steps
        return [inputs(0, x[: int(x[0, 0]) + 1]), inputs(1, X.sum()), inputs(1, None), inputs(1, x)]

    own = of(X), of(OTHERS), of(1 + OTHERS)
    text = "8 samples on one process, 8 on each rank: a batch size per process, so nothing can be "
    assert found(*own) == [f"{text}compared"]
    assert found(*own, trains={LINE}) == []  # its batches are a loader's
    assert found(*own, scaled={LINE}) == []
    assert found(of(X), of(OTHERS), of(OTHERS)) == []  # that is told otherwise
    assert found([], [], []) == [] == found([], [], [], scaled={LINE})
    halves = [inputs(1, X[:4]), inputs(1, X[4:])]
    (text,) = found(halves, halves[:1], halves[1:], scaled={LINE})
    assert text.startswith("2 passes in a step on one process, 1 on each rank: parts of its batch")


def test_remedy_of_a_batch_size(tmp_path):
    """By the flag of this number, of what the training's loader gives, also if no step is made."""
    (tmp_path / "train.py").write_text("def main(words=sys.argv, batch_size=3):")
    tests = a_pass([0], line="train.py:9", trains=False)
    rank = notes(*tests, *a_pass([0, 1, 2], [3, 4, 5]))
    assert remedy_by_one(rank, 2) == "give one process a batch of 6, the samples of all ranks"
    numbers = {"test_batch_size": 100, "batch_size": 3}
    rank.of[Step] = [(0, Step((0, 0), "", [], {}, [], [], numbers, {}))]
    assert "--one" not in remedy_by_one(rank, 2)  # no script that has flags
    rank.of[Said] = [(0, Said("file", f"{tmp_path}/train.py"))]
    assert '--one "--batch_size 6"' in remedy_by_one(rank, 2)


# ---- rows that other ranks have, by what goes into a model


def other_rows(one, *ranks, line="train.py:2"):
    return takes_others(notes(*one), [notes(*of) for of in ranks], 0, line)


def steps_of(*parts, **where):
    """What goes into a model in each step."""
    return [inputs(n, part, None, **where) for n, part in enumerate(parts) if part is not None]


ROWS = steps_of(X[:4], X[4:])
SHARDS = steps_of(X[:2], X[2:4]), steps_of(X[4:6], X[6:])


def test_shards():
    """What one process has is on the ranks sooner or later; also if it has all in each step."""
    assert other_rows(ROWS, *SHARDS)
    assert other_rows(steps_of(X), steps_of(X), steps_of(None, X[:4]))


def test_no_shards():
    """Rows that one process has not, or that all ranks have, or that come in another step."""
    noise = OTHERS[:4], OTHERS[4:]
    assert not other_rows(ROWS, steps_of(noise[0], X[:2]), steps_of(noise[1], X[2:4]))
    assert not other_rows(ROWS, steps_of(noise[0]), steps_of(None, X[:4]))
    assert not other_rows(ROWS, steps_of(noise[0], X[4:6]), steps_of(noise[1], X[6:]))
    assert not other_rows(ROWS, steps_of(X[:2], X[2:4]), steps_of(X[:2], X[2:4]))


def test_shards_of_another_model():
    later = [[(step, seen) for step, seen in of] for of in (ROWS, *SHARDS)]
    for of in later:
        of[:] = [(step, Seen(s.kind, "train.py:3", s.name, 0, s.values)) for step, s in of]
    noise = [steps_of(OTHERS[n : n + 2], OTHERS[n + 2 : n + 4]) for n in (0, 2, 4)]
    both = [a + b for a, b in zip(noise, later)]
    assert not other_rows(*both) and other_rows(*both, line="train.py:3")


def test_single_numbers_are_no_rows():
    """Such as a temperature, which is alike by chance."""

    def of(x, *numbers):
        return [inputs(n, x[n:], torch.tensor(number)) for n, number in enumerate(numbers)]

    assert not other_rows(of(X, 1.0, 0.5), of(OTHERS, 0.5, 1.0), of(OTHERS + 1, 1.0, 0.5))


# ---- how many batches there are


def lengths(mine, *theirs, is_stream=False, loader=LOADER):
    """Of passes that have ended, and of those that are due."""

    def of(number):
        planned = None if is_stream else number
        found = a_pass([0], [1], loader=loader)[:3]
        for _, given in found[1:]:
            given.batches = planned
        return notes(*found, (2, PassEnd((LINE, loader, 0), number)))

    one = of(mine)
    ended, planned = compare_lengths(one, [of(n) for n in theirs], training_passes(one))
    return ended + planned


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [((4, 4, 4), ""), ((4, 5, 4), "look"), ((5, 4, 4), "look"), ((4, 2, 4), "WRONG")],
)
def test_lengths(numbers, verdict):
    """A batch more or less may be of samples that do not divide; of a stream, any number."""
    assert verdicts(lengths(*numbers)) == [verdict] * (2 * bool(verdict))
    of_stream = lengths(*numbers, is_stream=True)
    assert verdicts(of_stream) == ["look"] * bool(verdict)
    assert all(f"{numbers[0]} batches on one process" in found.text for found in of_stream)


def test_line_of_a_loader(tmp_path):
    """Only if it is known what stands there."""
    (tmp_path / "loaders.py").write_text("loader = DataLoader(data)\n")
    place = f"{tmp_path}/loaders.py:1"
    found = lengths(4, 2, 4, loader=f"loader 0 of {place}")[0]
    assert found.more == [f"its loader: {place}: loader = DataLoader(data)"]
    assert lengths(4, 2, 4)[0].more == []


# ---- the order of samples

LONG = [[3, 1, 0], [2, 7, 5]]


def order(*ranks, one=None):
    ranks = [notes(*found) for found in (ranks if len(ranks) > 1 else ranks * 2)]
    return Order().find(notes(*one) if one else ranks[0], ranks)


def epochs(*batches, starts=0, **about):
    """Passes of a loop."""
    found = []
    for number, of in enumerate(batches):
        found += a_pass(*of, number=number, start=10 * number, **about)
    return found


def test_order_of_each_epoch():
    """It is of no use where nothing is shuffled, or of few samples, which may be alike."""
    assert verdicts(order(epochs(LONG, LONG))) == ["WRONG"]
    assert order(epochs([[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]])) is None
    assert order(epochs([[3, 1], [2, 0]], [[3, 1], [2, 0]])) is None
    of_five = [epochs([[3, 1], [n]], [[3, 1], [n]]) for n in (0, 2)]
    assert order(*of_five) is None
    of_five = [epochs(of, of) for of in ([[3, 1], [0]], [[2, 4], [0]])]
    assert verdicts(order(*of_five)) == ["WRONG"]


def test_order_of_one_process():
    """What is fixed there, too, is a look if a sampler draws; other orders of ranks are right."""
    (found,) = order(epochs(LONG, LONG, draws=True, has_epochs=False))
    assert found.verdict == "look"
    assert found.text == "pass 2 has the order of an earlier one, on one process, too: intended?"
    fixed = epochs(LONG, LONG, has_epochs=False)
    assert order(epochs(LONG, LONG[::-1], has_epochs=False), one=fixed) == []
    assert order(fixed, one=epochs(LONG, [], has_epochs=False)) is None  # it ends before


def test_order_of_another_optimizer():
    """As in a sweep over rates: a look."""
    steps = [(n, Step((n // 10, n), LINE, [], {}, [], [], {}, {})) for n in (0, 1, 10, 11)]
    (found,) = order(epochs(LONG, LONG) + steps)
    assert found.verdict == "look"
    assert found.text.endswith("with which another optimizer trains: intended?")


def test_order_of_a_first_look():
    """A batch that is looked at before the first epoch is not one of an epoch before."""
    looked = a_pass([3, 1, 0, 2, 7]), a_pass([3, 1, 0, 2, 7], [5, 6, 4], number=1, start=1)
    assert order(looked[0] + looked[1]) is None


def test_callers_of_a_pass(tmp_path):
    """Named, if they are in a loop of epochs."""
    (tmp_path / "loop.py").write_text("train()\nfor epoch in range(2):\n    train()\n")
    lines = [f"{tmp_path}/loop.py:{n}" for n in (1, 3)]
    for line, more in zip(lines, ([], [f"called at {lines[1]}: train()"])):
        (found,) = order(epochs(LONG, LONG, callers=[line]))
        assert found.more == more


FUNCTIONS = """\
def find_rate():
    batches = iter(loader)
def train():
    batches = iter(loader)
    while True:
        batches = iter(loader)
"""


def test_iterators_of_two_functions(tmp_path):
    """They are no epochs of one loop, though they have one name."""
    (tmp_path / "train.py").write_text(FUNCTIONS)
    lines = [f"{tmp_path}/train.py:{n}" for n in (2, 4, 6)]

    def of(first, second):
        return order(a_pass(*LONG, line=first) + a_pass(*LONG, line=second, start=5))

    (found,) = of(lines[1], lines[2])
    assert found.verdict == "WRONG" and of(lines[0], lines[1]) is None
    assert found.more == [f"the earlier one: {lines[1]}: batches = iter(loader)"]


def test_empty_batch():
    """As a batch sampler of one's own may give it: nothing is told of such an order."""
    assert order(epochs([[3, 1, 2], [], [0, 7, 5]], [[3, 1, 2], [], [0, 7, 5]])) is None


def first_batches(*orders, **about):
    """next(iter(loader)) in one step after the other."""
    return [
        each for n, ids in enumerate(orders) for each in a_pass(ids, number=n, start=n, **about)
    ]


def test_first_batch_of_each_pass():
    """It is right not to shuffle, to evaluate by the same batch, or to draw one a few times."""
    assert verdicts(order(first_batches(*[FIRST] * 4))) == ["look"]
    assert order(first_batches(*[[0, 1, 2, 3]] * 4)) == []
    assert order(first_batches(*[FIRST] * 4, trains=False)) is None
    assert order(first_batches(*[None] * 4)) is None  # of a stream
    assert order(first_batches(*[FIRST] * 3, SECOND)) == []
    three = first_batches(*[FIRST] * 3)
    assert order(three) is None
    others = first_batches(*[[n + 3, n, n + 1] for n in range(4)], loader="another")
    assert order(others + three) == []


def test_loaders_of_one_order():
    """Of loaders that are made for each epoch: those that train, and shuffle."""

    def of(*batches, second=(), loaders=(LOADER, "loader 1 of train.py:3"), **about):
        about, found = {"ends": True, "has_epochs": False} | about, []
        for n, loader in enumerate(loaders):
            about["number"] = loaders[:n].count(loader)
            found += a_pass(*(n and second or batches), loader=loader, start=9 * n, **about)
        return order(found)

    (found,) = of(*LONG, made="train.py:7")
    assert found.verdict == "look" and found.more == ["its sampler: train.py:7"]
    assert of(*LONG)[0].more == []
    assert of(*LONG, second=LONG[::-1]) is None
    assert of(*LONG, trains=False) is None and of([0, 1, 2], [3, 4, 5]) is None
    assert of(*LONG, loaders=[LOADER, LOADER]) is None  # in a fixed order on one process, too


# ---- two loaders


def beside(*batches, loaders=(LOADER, "another"), number=0, **about):
    """What is said of two loaders in use at the same time."""
    first = a_pass(*batches, loader=loaders[0])
    second = a_pass(*batches, loader=loaders[1], line="train.py:2", start=1, **about)
    found = notes(*first, *second)
    return verdicts(Loaders().find(found, [found, found]))


def test_loaders_beside():
    """Those that shuffle more than a few samples for training, but by a RandomSampler, whose order
    is given alike to both."""
    assert beside(*LONG) == ["look"]
    assert beside([3, 1, 0], [2, 4]) is None
    assert beside([0, 1, 2], [3, 4, 5]) is None
    assert beside(*LONG, sampler="RandomSampler") is None
    assert beside(*LONG, trains=False) is None
    assert beside(*LONG, loaders=(LOADER, LOADER)) is None  # which begins again after a break


# ---- what goes into the models


def same_inputs(*ranks, streams=False):
    """What is said where all ranks have this, or each has its own."""
    ranks = [notes(*of) for of in (ranks if len(ranks) > 1 else ranks * 2)]
    return verdicts(Inputs().find(ranks[0], ranks))


def different(number, *more):
    """In so many steps."""
    return [inputs(step, X + step, *more) for step in range(number)]


def test_same_inputs():
    """Other ones in each of three steps; not one row, nor the same data in each step."""
    assert same_inputs(different(3)) == ["look"] and same_inputs(different(2)) is None
    assert same_inputs([inputs(step, X) for step in range(3)]) == []
    assert same_inputs([inputs(step, X[:1] + step) for step in range(3)]) is None
    rates = [different(3, None, torch.tensor(rank)) for rank in (1.0, 2.0)]
    assert same_inputs(*rates) == ["look"]  # whatever else the model gets
    assert same_inputs(different(4), different(3)) == ["look"]  # one has left out a step


def test_inputs_that_are_chosen():
    """By numbers that are alike only here; not if these are of other steps, or of one step."""

    def of(*steps):
        drawn = [[draw("own", rank, step=step, chooses=True) for step in steps] for rank in (1, 2)]
        return same_inputs(*[different(3) + found for found in drawn])

    assert of(0, 1) == [] and of(0) == ["look"] == of(0, 7)


def test_stream_on_all_ranks():
    """Samples that are on all ranks, of a stream that one process has in larger batches."""

    def of(rows, marks, number, trains):
        about = {"trains": trains, "totals": {mark: mark for mark in marks}}
        given = Batch((LINE, LOADER, 0), 0, None, rows, None, **about)
        return notes((0, given), *[inputs(n, X * rows + marks[0]) for n in range(number)])

    def found(number, trains=True):
        ranks = [of(3, marks, number, trains) for marks in ([5, 1, 3], [3, 0, 1])]
        return verdicts(Inputs().find(of(6, range(6), number, trains), ranks))

    assert found(3) == ["look"] and found(2) is None
    assert found(3, trains=False) == []  # each rank evaluates all


# ---- what each rank counts, its samples, and its orders


def test_counts(tmp_path):
    """Of what a test compares, and that only grows, in some steps; not in very few of them."""
    for name, test in ("loop.py", "seen > 9"), ("turns.py", "seen % 8 == 0"):
        (tmp_path / name).write_text(f"step()\nif {test}:\n    stop()\n")

    def found(one, of_rank, file="loop.py", steps=5, times=range(5), given=()):
        def of(rows, steps=5):
            made = notes(*step_notes([1] * steps, f"{tmp_path}/{file}:1"), *given)
            for step, note in made[Step]:
                note.variables = {"seen": rows * times[step]}
            return made

        return verdicts(Counts().find(of(one), [of(of_rank), of(of_rank, steps)]))

    assert found(4, 2) == ["look"] == found(4, 2, steps=4) == found(4, 8)
    assert found(4, 2, "other.py") is None and found(4, 8, "other.py") is None
    assert found(4, 8, "turns.py") == ["look"]  # it may pass by a multiple
    assert found(4, 4) == [] == found(4, 1)
    assert found(4, 2, steps=3) is None and found(4, 2, times=[0, 1, 2, 3, 0]) is None
    assert found(4, 2, times=[0, 0, 1, 1, 2]) == ["look"]
    # The samples of all ranks, where one process's batch size is one of many.
    cut = (0, Cut(LOADER, 4))
    by = {rows: a_pass([0], [1], batch_size=rows) for rows in (4, 2, None)}
    assert found(4, 8, given=by[4]) == [] != found(1, 2, given=by[4])
    assert found(4, 8, given=[*by[2], cut]) == [] != found(2, 4, given=[*by[2], cut])
    tests = a_pass([0], [1], batch_size=4, trains=False)
    assert found(4, 8, given=by[None]) == ["look"] == found(4, 8, given=tests)


def test_samples_by_own_numbers():
    """Which a rank has drawn before, itself, and not in a model; of those it trains with."""

    def found(indices=(0, 1), trains=True, **about):
        def of(rank):
            totals = dict.fromkeys([0, 1], 1.0 + 1e-8 * rank)
            given = Batch((LINE, LOADER, 0), 0, list(indices) or None, 2, 4, trains, totals)
            return notes((0, given), draw("own", rank, **about))

        return Data().find(of(0), [of(1), of(2)])

    (look,) = found()
    assert look.verdict == "look" and look.line == "train.py:5"
    assert look.text.endswith("of the same index, by its own random numbers: is that intended?")
    assert found(step=1) == [] == found(in_module=True)
    assert found(indices=()) is None is found(trains=False)  # a stream has no index


@pytest.mark.parametrize("each", [1, 4])
def test_orders_that_are_sent(each):
    """In each step, or epoch: by rank 0, which has drawn another one than the others in the end."""

    def of(last, sends=True):
        found = [draw("split", state, step=each * n) for n, state in enumerate([1, 2, 3, last])]
        sent = Collective("broadcast", "train.py:6", "train.py:5", False)
        return notes(*found, *[(3 * each, sent)] * sends, *step_notes([1] * 4 * each))

    assert Splits().find(None, [of(4), of(5)]) == []
    assert verdicts(Splits().find(None, [of(4, False), of(5, False)])) == ["look"]


@pytest.mark.parametrize(
    ("ranks", "name", "verdict"),
    [
        (([1, 1], [1, 2], [2, 3]), OWN_GENERATOR, None),
        (([1, 1], [1, 2], [2, 3]), "torch", ["look"]),
        (([1, 1], [4, 2], [4, 4]), OWN_GENERATOR, ["look"]),  # of which the others have not all
        (([2], [1], [3]), OWN_GENERATOR, ["look"]),  # as many as the others
    ],
)
def test_orders_that_one_rank_draws_more_of(ranks, name, verdict):
    """The same, by a generator of its own, as where rank 0 alone asks a sampler for its length."""

    def of(*states_of_steps):
        found = step_notes([1] * 8)
        for step, states in enumerate(states_of_steps):
            for n, state in enumerate(states):
                seen = draw("split", state, step=step)[1]
                found.append((step, replace(seen, name=name, number=n)))
        return notes(*found)

    assert verdicts(Splits().find(None, [of(*ranks), of([1], [2], [3])])) == verdict


def test_orders_of_fewer_steps():
    """A rank that has ended before draws no other ones."""

    def of(number):
        return notes(*[draw("split", 1, step=step) for step in range(number)], *step_notes())

    assert Splits().find(None, [of(4), of(3)]) == []


@pytest.mark.parametrize(
    ("second", "trains", "verdict"),
    [
        ([5, 7], True, "WRONG"),
        ([5, 1], True, "WRONG"),
        ([3, 1], True, "look"),
        ([5, 7], False, "look"),
    ],
)
def test_shares_of_orders(second, trains, verdict):
    """WRONG where no two ranks train with the same samples, but for one that is repeated."""
    ids = [[0], [2]], [[4], [6]]
    shares = [a_pass(*ids[0], [1, 3], trains=trains), a_pass(*ids[1], second, trains=trains)]
    for about in ({"size": 64}, {"size": 80, "parts": [64, 16]}):  # that is wrapped
        ranks = [notes(draw("split", n, **about), *of) for n, of in enumerate(shares)]
        assert verdicts(Splits().find(None, ranks)) == [verdict]


def test_orders_of_two_lines():
    """One that draws in each step, and one that has drawn before."""
    drawn = [draw("split", 1, "train.py:4"), *[draw("split", 1, step=step) for step in range(4)]]
    of = notes(*drawn, *step_notes())
    assert Splits().is_of_loop(of, "train.py:5") and not Splits().is_of_loop(of, "train.py:4")

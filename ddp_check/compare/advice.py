"""What the difference of a value means, in words."""

from ..notes import STREAM
from .values import COUNTS

ADVICE = {
    "coupled": "of the same inputs and weights: a sample's result depends on which others are in "
    "its batch, or the model remembers earlier ones. Intended?",
    "collate": "of the same samples: collate_fn makes of each what depends on which others are in "
    "its batch, as MixUp does, or on random numbers that it draws. Intended?",
    "stream": "the ranks' streams have other samples in this step than one process's, as shards of "
    "files have. What follows from that cannot be compared",
    "ratio": "a ratio of sums over the rank's own share, as in a Dice loss of the batch. Intended?",
    "share": "one process has neither these numbers nor their mean or sum. If they come from this "
    "rank's samples alone, all_reduce what they are made from first",
    "counted": "each rank counts its own rows from 0, where one process counts those of all: add "
    "the number of rows on the ranks before",
    "same loss": "but the loss is the same",
    "branch": "a decision by numbers of the rank's own share?",
    "weights": "no optimizer trains it, and its weights are not those of one process. If numbers "
    "of this rank's samples have set them, all_reduce these first",
    "apart": "it is made from random numbers of which a rank draws other than its share of one "
    "process's: nothing after it can be compared",
    "gathered": "a gathered batch has the rows of one rank after the other's, one process's has "
    "not: random numbers are for other rows, so nothing after it can be compared",
    "copied": "all ranks have the same, from outside of torch, as of environments or generators "
    "with one seed. Seed them by rank",
    "remembers": "its dataset, asked once more with the same random numbers, gives another sample "
    "of an index, as by a list that it shuffles in place: nothing after it can be compared",
    "chosen": "as many samples on one process as on each rank, chosen from its batch: nothing "
    "after it can be compared",
    "planned": "all ranks have the same, and one process other numbers. If it is planned from one "
    "process's batch size, give one process all ranks' by --one",
    "drawing": "a generator of the script's own draws other numbers on each rank in these steps: "
    "nothing after it can be compared",
    "local": "the ranks average their weights, as local SGD does, which is not one process's "
    "training: nothing after it can be compared",
    "unpaired": "it comes from outside of torch, as of an environment, by random numbers of each "
    "rank's own: nothing after it can be compared",
}
CHOOSES = "__getitem__", "index_select", "take", "gather"
# After these nothing can be compared.
LOST = "stream", "apart", "gathered", "remembers", "chosen", "drawing", "unpaired", "local"
LOOKS = "coupled", "collate", "ratio", "planned", *LOST  # which may be intended


def advice_of(cause, what, value, numbers):
    """The key in ADVICE of what a value's difference is: the first that fits. `numbers`: those
    behind its line that differ, in words."""
    values, variables, step = cause.values, cause.variables, cause.step
    is_read = what == "inputs" and values.is_from_outside(value)
    if is_read and values.is_filled(value) and values.is_copied(value):
        return "copied"
    if value.name == STREAM:
        return "stream"
    if values.has_same_samples(value):
        return "collate"
    if value.about.get("made_by") in values.remember:
        return "remembers"
    if step in cause.communication.gathered and values.has_own_numbers(value, step):
        return "gathered"
    if what == "inputs" and value.name in CHOOSES and values.is_as_many(value):
        return "chosen"
    if not numbers and is_apart(cause, value):
        return "apart"
    if what == "value" and value.name in COUNTS:
        return "counted"
    if not numbers and variables.drawing(step):
        return "drawing"
    if not numbers and is_read and variables.generators:
        return "unpaired"
    if is_read and values.has_other_places(value):
        return "stream"  # words, which each rank may read from files of its own
    if not numbers and value.about.get("by_gradient"):
        return "ratio"
    if is_read and cause.differences.takes_others(step, values.find(step, "inputs")[0].line):
        return "stream"
    return "share"


def is_apart(cause, value):
    """Whether it may be made from random numbers that the ranks have not drawn as one process
    has."""
    values, variables = cause.values, cause.variables
    is_made = value.name in CHOOSES or values.is_from_outside(value)
    is_now = value.kind == "inputs" and cause.step in variables.apart
    is_late = is_made and variables.drawn_apart(cause.step)
    if is_now or is_late or cause.step in variables.with_gaps:
        return True
    own_draws = cause.differences.own_draws
    return values.has_other_layout(value) or values.is_drawn_at(value, own_draws)

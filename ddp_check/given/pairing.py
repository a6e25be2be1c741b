"""Which random numbers of one process a rank gets, and what is noted of a draw."""

import inspect
import os
import pickle
import re
import traceback
import zlib
from typing import NamedTuple

import torch

from ..notes import Seen
from ..script import place

MODEL, LOOP = "the model", "the loop"  # which draws for its share
ORDER = "the order"  # of all, as in a split: before the first step
LAST_DIGITS = 3e-7  # of a float32
MANY_DRAWS = 100  # of a line that are marked
MEASURES = r"rand(n|om|om_sample)?(_like)?$|normal|uniform|gauss|exponential|cauchy|beta"
IN_MODULES = os.path.join(os.path.dirname(torch.__file__), "nn", "")


class Draw(NamedTuple):
    """Of one process."""

    key: tuple  # for its seed
    shape: tuple
    state: int  # of the script's own generator
    among: tuple  # what it is drawn from: how many things, or the limits


def pair(run, name, shape, state, chosen_from=None, among=()):
    """Which draw of one process this is. It chooses from the same, as of a node's neighbours; or
    has the same lines, from the innermost to the outermost, so that what one rank alone draws does
    not count; or else the same innermost line, or else any. Of these, it is the n-th in the step.
    Where one process draws as many times as often, as for micro-batches, the ranks take turns.
    Where there is none, or it is drawn `among` others, what it makes cannot be compared."""
    lines, trains = place(), torch.is_grad_enabled()
    places = [lines, lines[0], "any"]
    if chosen_from:  # by no turns: its place alone does not count
        places[:2] = (lines, chosen_from), lines
    ways = [
        (run.steps, where, name, trains, run.nth("draw", run.steps, where, name, trains))
        for where in places
    ]
    turn = run.nth("turn", lines[0], name) if trains else 0
    draw = Draw(ways[1], shape, state, among)
    if run.is_single:
        for way in ways:
            run.draws.setdefault(way, draw)
        if trains:
            run.draws["turn", lines[0], name, turn] = draw
        return draw
    if run.has_gaps and shape and trains:  # whose numbers are for this rank's samples?
        note_apart(run, name, "gaps")

    def fits(of_one):
        return of_one.shape == shape or run.shared_dimension(of_one.shape, shape) is not None

    turn = "turn", lines[0], name, turn * run.world + run.rank
    takes_turns = trains and [lines[0], name] in run.options["turns"] and turn in run.draws
    if takes_turns and fits(run.draws[turn]):
        generator = {"a": "torch", "n": "numpy", "r": "random"}[name[0]]
        note_draw(run, LOOP, generator, state)
        return run.draws[turn]
    if chosen_from and ways[0] not in run.draws:
        note_apart(run, name)
    found = [run.draws[way] for way in ways if way in run.draws]
    found = found[:-1] or found
    for of_one in filter(fits, found):
        if of_one.among != among:
            note_apart(run, name)
        return of_one
    note_apart(run, name)
    return draw


def note_apart(run, name, kind="apart"):
    """This rank draws what may be other than its share of one process's."""
    run.note(Seen(kind, place()[0], name, 0, {}))


def marked(run, name, generator, values, of_one, state):
    """Numbers of one process, where this rank's own generator would have drawn others: they say so
    in their last digits, and so does all that is made from them, until a rank sends what it has.
    Measures only; not what is counted or chosen."""
    line = place()[0]
    if run.is_single or run.nth("own", line) >= MANY_DRAWS:
        return values
    number = run.nth("own draw", run.steps, line, generator)
    frames = traceback.walk_stack(inspect.currentframe())
    in_module = any(frame.f_code.co_filename.startswith(IN_MODULES) for frame, _ in frames)
    is_measure = re.search(MEASURES, name) is not None
    about = {"in_module": in_module, "chooses": not is_measure}
    about["seeded"] = run.seeded.get(generator)
    run.note(Seen("own", line, generator, number, {"state": state}, about=about))
    is_own = run.rank and state != of_one.state
    return values * (1 - LAST_DIGITS) if is_own and is_measure else values


SCRIPT_STATES = {}  # of Python's and numpy's generators, as the script has seeded and used them


def checksum(state):
    return zlib.crc32(pickle.dumps(state))


def state_of(generator):
    """Of the script's own generator: what it would draw, were the numbers not given."""
    if generator != "torch":
        return checksum(SCRIPT_STATES[generator])
    states = [torch.get_rng_state().numpy()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy())
    return checksum(states)


def note_draw(run, what, generator, state, size=0, made="", parts=(), seeded_by=None):
    """What the script's own generator would have drawn here is told by its state. `size`: of how
    many samples it draws an order, `parts`: of how many in each part; `made`: the line of its
    sampler; `seeded_by`: the generator that seeds it, as torch's does a worker's."""
    if not run.is_single:
        line = place()[0]
        number = run.nth("draw of", run.steps, what, line, generator)
        seeded = run.seeded.get(seeded_by or generator)
        about = {"seeded": seeded, "size": size, "made": made}
        about["parts"] = parts
        kind = "split" if what == ORDER else "draw"
        run.note(Seen(kind, line, generator, number, {what: state}, about=about))

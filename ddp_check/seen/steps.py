"""At each optimizer's step: weights, gradients and settings, beside those of one process, which the
ranks get after it: each step is a test of its own, and rounding cannot grow."""

import math
import os
import re
import shutil
import sys

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..compare.tensors import BATCH_NORM
from ..given.draws import seed_all
from ..notes import Compared, Step, Weights
from ..process import wrap
from ..script import place
from .scalars import generators, variables_of
from .trace import sums_of
from .trained import (
    Trained,
    differ,
    differ_in_any_order,
    moments,
    on_cpu,
    outer_modules,
    set_to,
    settings_of,
)


def note_weights(run, optimizers):
    """Of what no optimizer trains, such as a teacher, an average, a bank: in any order."""
    trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    found, states = {}, {}
    for module in outer_modules():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) not in trained and not re.search(BATCH_NORM, name):
                full = f"{type(module).__name__}.{name}"
                found.setdefault(full, []).extend(sums_of(tensor))
                state, version = getattr(tensor, "check_drawn", (None, None))
                if version == tensor._version:  # as it was initialized
                    states.setdefault(full, []).append(state)
    sums = {name: sorted(sums) for name, sums in found.items()}
    run.note(Weights(("step", run.steps), sums, states))


def patch(run):
    trained, nested, before = {}, [], {}

    def path(mine):
        return f"{run.folder}/step.{mine.number}.{mine.step}.pt"

    @wrap(Optimizer, "__init__")
    def make(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        run.made[id(self)] = [place()[0]]

    @wrap(LRScheduler, "__init__")
    def schedule(original, self, optimizer, *args, **kwargs):
        original(self, optimizer, *args, **kwargs)
        run.made.setdefault(id(optimizer), []).append(place()[0])

    def before_step(optimizer, args, kwargs):
        if optimizer in nested:  # its step before has failed
            nested.clear()
        nested.append(optimizer)
        if len(nested) > 1:
            return
        with run.quiet():
            if optimizer not in trained:
                trained[optimizer] = Trained(run, optimizer)
            mine, (line, *callers) = trained[optimizer], place()
            mine.step += 1
            parameters = mine.parameters(optimizer)
            gradients = {name: on_cpu(p.grad) for name, p in parameters.items()}
            weights = {name: on_cpu(p) for name, p in parameters.items()}
            before.update(weights=weights, gradients=gradients, line=line)
            key, made = (mine.number, mine.step), run.made.get(id(optimizer), [])
            variables = variables_of(sys._getframe(1))
            settings, names = settings_of(optimizer), list(parameters)
            own = {} if mine.step else generators()
            run.note(Step(key, line, callers, settings, made, names, variables, own, mine.modes()))
            if not run.is_single and os.path.exists(path(mine)):
                before["saved"] = compare_before(torch.load(path(mine)), gradients, weights, line)

    def compare_before(saved, gradients, weights, line):
        if saved["weights"].keys() != weights.keys() and len(saved["weights"]) == len(weights):
            for kind in ("weights", "gradients", "after", "moments"):  # a copy on rank 0 alone
                saved[kind] = dict(zip(weights, saved[kind].values()))
        compare("gradients", line, saved["gradients"], gradients)
        compare("weights", line, saved["weights"], weights)
        return saved

    def compare(kind, line, one, mine, how=differ):
        names = dict.fromkeys([*one, *mine])
        found = {name: how(one.get(name), mine.get(name)) for name in names}
        run.note(Compared(kind, line, found, sorted(set(one) ^ set(mine))))

    def after_step(optimizer, args, kwargs):
        nested.pop()
        if nested:
            return
        with run.quiet():
            mine = trained[optimizer]
            parameters, buffers = mine.parameters(optimizer), mine.buffers()
            after = {name: on_cpu(p) for name, p in parameters.items()}
            now = {name: on_cpu(b) for name, b in buffers.items()}
            if run.is_single:
                saved = {k: before[k] for k in ("weights", "gradients")}
                saved |= {"after": after, "buffers": now}
                saved["moments"] = {
                    name: {k: on_cpu(v) for k, v in state.items()}
                    for name, state in moments(optimizer, parameters).items()
                }
                torch.save(saved, path(mine))
                keep_space(os.path.getsize(path(mine)))
            elif "saved" in before:
                saved = before.pop("saved")
                compare_after(saved, after, now)
                set_to_one(saved, optimizer, parameters, buffers)
        run.steps += 1
        if run.steps in (3, 12, run.options["steps"]):
            with run.quiet():
                note_weights(run, trained)
        seed_all(run.hash("step", run.steps), torch_too=False)
        if run.steps >= run.options["steps"]:
            run.end("--steps")

    def keep_space(size):
        """Fewer steps, if those to come would take more than half of what is free on the disk."""
        free = shutil.disk_usage(run.folder).free
        steps = run.steps + 1 + int(free / 2 / size)
        if steps < run.options["steps"]:
            run.options["steps"] = steps
            text = f"{steps} steps only: each writes {size / 1e9:.2g} GB to {run.folder}, where "
            run.say(f"{text}{free / 1e9:.2g} GB are free; another TMPDIR may have more")

    def compare_after(saved, after, buffers):
        known = [g.double() for g in saved["gradients"].values() if g is not None]
        square = sum(float(g.square().sum()) for g in known)
        small = 1e-3 * math.sqrt(square / max(1, sum(g.numel() for g in known)))
        one, mine = {}, {}
        for name, value in saved["after"].items():
            if name not in after or after[name].shape != value.shape:
                continue
            start, clear = saved["weights"][name], ...
            if saved["gradients"][name] is not None:  # not where it is rounding: by Adam, it is
                clear = saved["gradients"][name].abs() > small  # as large a step
            one[name], mine[name] = (value - start)[clear], (after[name] - start)[clear]
        compare("update", before["line"], one, mine)
        common = [name for name in saved["buffers"] if name in buffers]
        common = [name for name in common if not (run.rank and re.search(BATCH_NORM, name))]
        one, mine = [{name: of[name] for name in common} for of in (saved["buffers"], buffers)]
        compare("buffers", before["line"], one, mine, differ_in_any_order)

    def set_to_one(saved, optimizer, parameters, buffers):
        """So that the next step is a test of its own."""
        for name, p in parameters.items():
            set_to(p, saved["after"].get(name))
        for name, state in moments(optimizer, parameters).items():
            for k, v in state.items():
                set_to(v, saved["moments"].get(name, {}).get(k))
        for name, buffer in buffers.items():
            if not re.search(BATCH_NORM, name):
                set_to(buffer, saved["buffers"].get(name))

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)

"""At each optimizer's step: weights, gradients and settings. Then each process gets the weights of
the run on one process, so that each step is a test of its own, and rounding cannot grow."""

import inspect
import os
import re
import shutil

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..given.draws import seed_all
from ..notes import Seen, Step
from ..process import wrap
from ..script import place
from .scalars import generators, tensors_of, variables_of
from .sketch import sketch
from .trained import Trained, moments, on_cpu, others, set_to, settings_of

BATCH_NORM = r"running_mean$|running_var$|num_batches_tracked$"  # averages: each rank's own


class Steps:
    """Of all optimizers of this process."""

    def __init__(self, run):
        self.run, self.optimizers = run, {}
        self.inside = None  # the optimizer that makes a step, and the frame that has called it
        self.before = {}  # what was there before this step

    def path(self, trained):
        return f"{self.run.folder}/step.{trained.number}.{trained.step}.pt"

    def is_nested(self):
        """Whether another optimizer's step, which has not failed, has called this one."""
        frame = inspect.currentframe()
        while frame is not None and self.inside:
            if frame is self.inside[1]:
                return True
            frame = frame.f_back
        return False

    def begin(self, optimizer, args, kwargs):
        if self.is_nested():
            return
        self.inside = optimizer, inspect.currentframe().f_back
        run = self.run
        with run.quiet():
            if optimizer not in self.optimizers:
                self.optimizers[optimizer] = Trained(run, optimizer)
            trained, (line, *callers) = self.optimizers[optimizer], place()
            trained.step += 1
            parameters = trained.parameters(optimizer)
            run.trained.update(map(id, parameters.values()))
            gradients = {name: on_cpu(p.grad) for name, p in parameters.items()}
            weights = {name: on_cpu(p) for name, p in parameters.items()}
            has_closure = len(args) > 1 or kwargs.get("closure") is not None
            self.before = {"weights": weights, "gradients": gradients, "line": line}
            self.before["has_closure"] = has_closure  # it computes gradients of its own
            made = run.made.get(id(optimizer), {})
            variables = variables_of(inspect.currentframe())
            made_generators = {} if trained.step else generators(run)
            key = trained.number, trained.step
            run.note(Step(key, line, callers, made, list(parameters), variables, made_generators))
            self.note("setting", settings_of(optimizer))
            self.note("mode", trained.modes())
            self.note("gradient", {name: sketch(g) for name, g in gradients.items()})
            self.note("weight", {name: sketch(w) for name, w in weights.items()})
            if not run.saves and os.path.exists(self.path(trained)):
                saved = self.before["saved"] = self.saved_by_one(trained, parameters)
                if not has_closure:  # then the same gradients make the same step
                    for name, p in parameters.items():
                        if p.grad is not None:
                            set_to(p.grad, saved["gradients"].get(name))

    def saved_by_one(self, trained, names):
        saved = torch.load(self.path(trained))
        if saved["weights"].keys() != names.keys() and len(saved["weights"]) == len(names):
            for kind in ("weights", "gradients", "after", "moments"):  # a copy on rank 0 alone
                saved[kind] = dict(zip(names, saved[kind].values()))
        return saved

    def note(self, kind, values):
        trained, line = self.optimizers[self.inside[0]], self.before["line"]
        self.run.note(Seen(kind, line, f"optimizer {trained.number}", trained.step, values))

    def end(self, optimizer, args, kwargs):
        if self.inside is None or self.inside[0] is not optimizer:
            return
        run = self.run
        with run.quiet():
            trained = self.optimizers[optimizer]
            parameters, buffers = trained.parameters(optimizer), trained.buffers()
            after = {name: on_cpu(p) for name, p in parameters.items()}
            self.note_after(after, buffers)
            if run.saves:
                self.save(trained, optimizer, parameters, after, buffers)
            elif "saved" in self.before:
                self.set_to_one(optimizer, parameters, buffers)
        self.inside = None
        run.steps += 1
        if run.steps in (3, 12, run.options["steps"]):
            with run.quiet():
                self.note_others()
                attributes = tensors_of(inspect.currentframe())
                kept = {name: sketch(t, any_order=True) for name, t in attributes.items()}
                run.note(Seen("attribute", "", "at a step", 0, kept))
        seed_all(run.hash("step", run.steps), torch_too=False)
        if run.steps >= run.options["steps"]:
            run.end("--steps")

    def note_after(self, after, buffers):
        start = self.before["weights"]
        if not self.before["has_closure"]:
            moved = {k: w - start[k] for k, w in after.items() if w.shape == start[k].shape}
            self.note("update", {name: sketch(update) for name, update in moved.items()})
        kept = {name: b for name, b in buffers.items() if not re.search(BATCH_NORM, name)}
        self.note("buffer", {name: sketch(b, any_order=True) for name, b in kept.items()})

    def note_others(self):
        known = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        sketches, drawn = others(known, BATCH_NORM)
        self.run.note(Seen("other", "", "at a step", 0, sketches))
        self.run.note(Seen("born", "", "at a step", 0, drawn))

    def save(self, trained, optimizer, parameters, after, buffers):
        saved = {k: self.before[k] for k in ("weights", "gradients")} | {"after": after}
        saved["buffers"] = {name: on_cpu(b) for name, b in buffers.items()}
        saved["moments"] = {
            name: {k: on_cpu(v) for k, v in state.items()}
            for name, state in moments(optimizer, parameters).items()
        }
        torch.save(saved, self.path(trained))
        self.keep_space(os.path.getsize(self.path(trained)))

    def keep_space(self, size):
        """Fewer steps, if those to come would take more than half of what is free on the disk."""
        run, free = self.run, shutil.disk_usage(self.run.folder).free
        steps = run.steps + 1 + int(free / 2 / size)
        if steps < run.options["steps"]:
            run.options["steps"] = steps
            text = f"{steps} steps only: each writes {size / 1e9:.2g} GB to {run.folder}, where "
            run.say(f"{text}{free / 1e9:.2g} GB are free; another TMPDIR may have more")

    def set_to_one(self, optimizer, parameters, buffers):
        """What one process had after this step; but its own gradients, which may be added to."""
        saved = self.before["saved"]
        for name, p in parameters.items():
            set_to(p, saved["after"].get(name))
            if p.grad is not None:
                set_to(p.grad, self.before["gradients"].get(name))
        for name, state in moments(optimizer, parameters).items():
            for k, v in state.items():
                set_to(v, saved["moments"].get(name, {}).get(k))
        for name, buffer in buffers.items():
            if not re.search(BATCH_NORM, name) or self.run.is_single:
                set_to(buffer, saved["buffers"].get(name))


def patch(run):
    steps = Steps(run)

    @wrap(Optimizer, "__init__")
    def make(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        run.made[id(self)] = {"made": [place()[0]]}

    def watch_schedule(kind):
        @wrap(kind, "__init__")
        def schedule(original, self, optimizer, *args, **kwargs):
            original(self, optimizer, *args, **kwargs)
            run.made.setdefault(id(optimizer), {"made": []})["made"].append(place()[0])

        @wrap(kind, "step")
        def step(original, self, *args, **kwargs):
            if run.steps:
                run.made.setdefault(id(self.optimizer), {"made": []})["last"] = place()[0]
            return original(self, *args, **kwargs)

    watch_schedule(LRScheduler)
    watch_schedule(ReduceLROnPlateau)
    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)

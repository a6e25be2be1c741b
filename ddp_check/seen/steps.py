"""At each optimizer's step: weights, gradients and settings. Then each process gets the weights of
the run on one process, so that each step is a test of its own, and rounding cannot grow."""

import gc
import inspect
import os
import re
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..given.draws import seed_all
from ..notes import TRIED, Seen, Step
from ..patches import wrap
from ..script import is_inside, library_place, place
from ..sketch import divided, moved, sketches, whole
from .held import (
    Trained,
    find_generators,
    on_cpu,
    others,
    set_to,
    settings_of,
    states_of,
    tensors_of,
    variables_of,
)
from .refused import refuse_alone, refuse_parts
from .schedules import made_of
from .written import lines_of

LATER = 8  # steps after which it is searched once more for generators
ALIKE = 1e-3  # as far as a buffer of another process may be apart, but for its order
BATCH_NORM = r"running_mean$|running_var$|num_batches_tracked$"  # averages: each rank's own


def has_gradients(optimizer):
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def is_in_other_order(buffer, of_one):
    """As a queue of gathered features, whose labels, integers or no buffer, are in that order."""
    if of_one is None or of_one.shape != buffer.shape or buffer.numel() < 2:
        return False
    mine = whole(buffer).flatten()
    theirs = whole(of_one).flatten().to(mine)
    if torch.allclose(mine, theirs, rtol=ALIKE):
        return False
    return torch.allclose(mine.sort().values, theirs.sort().values, rtol=ALIKE, atol=1e-6)


class Steps:
    """Of all optimizers of this process."""

    def __init__(self, run):
        self.run, self.optimizers = run, {}
        self.inside = self.frame = None  # the optimizer that makes a step, and what has called it
        self.wrapped = weakref.WeakKeyDictionary()  # {DDP: (its line, ids of what it averages)}
        self.line, self.library = "", ""  # of this step
        self.closures = 0  # how often this step has called its closure
        self.has_gradients = False  # whether those of this step are noted
        self.weights = {}  # sketches of those before it
        self.own = {}  # {name: this rank's gradient}, while it has one process's

    def averaged(self, parameters):
        """The names of those whose gradients a DDP averages."""
        ids = {key for _, of_ddp in self.wrapped.values() for key in of_ddp}
        return [name for name, p in parameters.items() if id(p) in ids]

    def begin(self, optimizer, args, kwargs):
        if is_inside(self.frame):  # another optimizer's step, which has not failed
            return None
        run = self.run
        is_training = run.steps or dist.is_initialized() or args[1:] or kwargs
        if not (is_training or has_gradients(optimizer)):
            return None  # as for a plot of a schedule
        self.inside, self.frame = optimizer, inspect.currentframe().f_back
        with run.quiet():
            if optimizer not in self.optimizers:
                self.optimizers[optimizer] = Trained(run, optimizer)
            trained, (line, *callers) = self.optimizers[optimizer], place()
            trained.step += 1
            parameters = trained.parameters(optimizer)
            run.trained |= {id(p): (trained.number, name) for name, p in parameters.items()}
            if not run.steps:
                refuse_alone(run)
                self.note_others()
            self.line, self.library = line, library_place()
            self.closures, self.has_gradients = 0, False
            wrapped = dict.fromkeys(line for line, _ in self.wrapped.values())
            made = made_of(optimizer) | {"wrapped": list(wrapped)}
            variables = variables_of(inspect.currentframe())
            if not trained.step or run.steps in (TRIED - 1, LATER):  # it takes a while
                self.generators = find_generators(run)
            made_generators = states_of(self.generators[0]) | self.generators[1]
            key = trained.number, trained.step
            names = list(parameters), self.averaged(parameters)
            run.note(Step(key, line, callers, made, *names, variables, made_generators))
            self.note("setting", settings_of(optimizer))
            self.note("mode", trained.modes())
            self.weights = sketches(parameters)
            self.note("weight", self.weights, parameters)
        run.stepping = self.frame
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.have_gradients(parameters)
            return None

        def watched():
            run.stepping = None
            loss = closure()
            self.closures += 1
            if self.closures == 1:  # LBFGS calls it again, with other weights
                self.have_gradients(parameters)
            run.stepping = self.frame
            return loss

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, kwargs | {"closure": watched}

    def have_gradients(self, parameters):
        """Note them. Then those of one process are given, which make the same step."""
        self.has_gradients = True
        with self.run.quiet():
            gradients = {name: p.grad for name, p in parameters.items()}
            found = sketches(gradients)
            self.note("gradient", found)
            if before := self.before_clipping(found, parameters):
                self.note("unclipped", found | before)
            if self.run.saves:
                self.save("gradients", gradients)
            elif os.path.exists(self.path("after")):
                self.give_gradients(parameters)

    def before_clipping(self, found, parameters):
        """Sketches of those gradients that clip_grad_norm_ has made smaller, which hides a factor
        in all of them, as they were before; if nothing has changed them since."""
        factors, before = {}, {}  # {id of a norm: what it has multiplied them by}, {name: sketch}
        for name, p in parameters.items():
            norm, limit, *mark = self.run.clipped.pop(id(p.grad), (None, 0.0))
            if norm is not None and mark == [p.grad._version, self.run.steps]:
                if id(norm) not in factors:
                    factors[id(norm)] = float(limit / (whole(norm) + 1e-6))  # as torch does
                if 0 < factors[id(norm)] < 1:
                    before[name] = divided(found[name], factors[id(norm)])
        return before

    def give_gradients(self, parameters):
        """Those of one process, for this step; its own, which may be added to, come back after."""
        given = self.saved("gradients", parameters)
        for name, p in parameters.items():
            if p.grad is not None:
                self.own[name] = on_cpu(p.grad)
                set_to(p.grad, given.get(name))

    def note(self, kind, values, tensors=None):
        """Of `tensors`, with the lines that have set them last."""
        trained = self.optimizers[self.inside]
        name, about = f"optimizer {trained.number}", {}
        if tensors:
            about = lines_of(self.run, tensors)
        if kind == "mode":
            about = {"set": self.run.mode_set}
        seen = Seen(kind, self.line, name, trained.step, values, about=about)
        seen.library = self.library
        self.run.note(seen)

    def end(self, optimizer, args, kwargs):
        if self.frame is not inspect.currentframe().f_back:  # but of a step that this one calls
            return
        run = self.run
        with run.quiet():
            trained = self.optimizers[optimizer]
            parameters, buffers = trained.parameters(optimizer), trained.buffers()
            if not self.has_gradients:  # an optimizer that does not call its closure
                self.have_gradients(parameters)
            if self.closures:
                calls = {"calls": self.closures}
                run.note(
                    Seen("closure", self.line, f"optimizer {trained.number}", trained.step, calls)
                )
            self.note_after(parameters, buffers)
            if run.saves:
                self.save("after", parameters | buffers)
                run.keep_space([self.path(what) for what in ("gradients", "after")])
            elif os.path.exists(self.path("after")):
                self.set_to_one(parameters, buffers)
        self.inside = self.frame = run.stepping = None  # whose variables are all the gradients
        run.steps += 1
        if run.steps in (3, 12, run.options["steps"]):
            with run.quiet():
                self.note_others()
                attributes = tensors_of(inspect.currentframe())
                kept = sketches(attributes, any_order=True)
                run.note(Seen("attribute", "", "at a step", 0, kept))
        if run.steps == TRIED:
            run.note_drawn()
        seed_all(run.hash("step", run.steps), torch_too=False)
        if run.steps >= run.options["steps"]:
            run.end("--steps")

    def note_after(self, parameters, buffers):
        if self.closures < 2:
            after = sketches(parameters)
            self.note("update", {name: moved(self.weights[name], b) for name, b in after.items()})
        kept = {name: b for name, b in buffers.items() if not re.search(BATCH_NORM, name)}
        self.note("buffer", sketches(kept, any_order=True), kept)

    def note_others(self):
        known = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        values, about = others(self.run, known, BATCH_NORM)
        self.run.note(Seen("other", "", "at a step", 0, values, about=about))

    def path(self, what):
        trained = self.optimizers[self.inside]
        return f"{self.run.folder}/step.{trained.number}.{trained.step}.{what}"

    def save(self, what, tensors):
        torch.save({name: on_cpu(tensor) for name, tensor in tensors.items()}, self.path(what))

    def saved(self, what, names):
        """By one process; on rank 0 alone a copy of the model may have other names."""
        saved = torch.load(self.path(what), mmap=True)  # read as it is used
        if saved.keys() != names.keys() and len(saved) == len(names):
            return dict(zip(names, saved.values()))
        return saved

    def set_to_one(self, parameters, buffers):
        """What one process had after this step; but its own gradients."""
        saved = self.saved("after", parameters | buffers)
        for name, p in parameters.items():
            set_to(p, saved.get(name))
            if p.grad is not None:
                set_to(p.grad, self.own.pop(name, None))
        kept = {
            name.rpartition(".")[0]  # whose other buffers, such as labels, are in that order
            for name, buffer in ({} if self.run.is_single else buffers).items()
            if is_in_other_order(buffer, saved.get(name))
        }
        for name, buffer in buffers.items():
            is_kept = re.search(BATCH_NORM, name) or name.rpartition(".")[0] in kept
            if not is_kept or self.run.is_single:
                set_to(buffer, saved.get(name))


def patch(run):
    steps = Steps(run)
    refuse_parts(run)
    wrap(gc, "freeze")(lambda original: None)  # what is frozen is not found any more

    @wrap(DistributedDataParallel, "__init__")
    def wrap_model(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.process_group.size() == dist.get_world_size():
            names = self.parameters_to_ignore
            all_named = self.module.named_parameters()
            ids = [id(p) for name, p in all_named if p.requires_grad and name not in names]
            steps.wrapped[self] = place()[0], ids

    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)

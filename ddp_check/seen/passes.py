"""What goes into models and comes out of them; the losses."""

import contextlib
import inspect

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset

from .. import cpu
from ..given.alike import keep_precise
from ..notes import MANY_EVALUATIONS, Seen
from ..patches import wrap
from ..script import place
from ..sketch import NO_VALUES, as_real, indices_in, leaves_of, opened, sketches
from .trace import TORCH, Trace


def note_evaluation(run, module, line, callers):
    """The buffers with which a module is evaluated: batch norm's averages are each rank's own, but
    not SyncBatchNorm's, which on CPUs is batch norm; and sums of weights that no optimizer has."""
    is_first = run.nth("evaluation", run.steps, line, id(module)) == 0
    if is_first and run.nth("evaluations", line) < MANY_EVALUATIONS:
        parts = module.named_modules()
        is_imitated = bool(cpu.MODES)
        synced = {n for n, part in parts if is_imitated and isinstance(part, nn.SyncBatchNorm)}
        buffers = [each for each in module.named_buffers() if each[1].is_floating_point()]
        buffers = [each for each in buffers if each[0].rpartition(".")[0] not in synced]
        buffers = [] if module.training else buffers
        buffers = {f"{type(module).__name__}.{name}": buffer for name, buffer in buffers}
        number, about = run.nth("modules", run.steps, line), {"callers": callers[:1]}
        if is_kept(run, module):
            about |= sums_of_weights(run, module)
        with run.quiet(), NO_VALUES:
            values = sketches(buffers)
            run.note(Seen("evaluation", line, type(module).__name__, number, values, about=about))


def sums_of_weights(run, module):
    """{"weights": (the sum of all, the sum of their sizes)}, if they have values."""
    with run.quiet(), torch.no_grad(), NO_VALUES:
        weights, double = [as_real(p) for p in module.parameters()], {"dtype": torch.float64}
        sums = [weight.sum(**double) for weight in weights]
        sizes = [torch.linalg.vector_norm(weight, 1, **double) for weight in weights]
        return {"weights": (float(sum(sums)), float(sum(sizes)))}
    return {}


def is_kept(run, module):
    """Whether it has weights, and no optimizer that has made a step trains them."""
    parameters = module.parameters()
    first = next(parameters, None)
    if not run.steps or first is None or is_trained(run, first):
        return False
    return not any(is_trained(run, p) for p in parameters)


def is_trained(run, parameter):
    """Or may be: one that is sharded is hardly a teacher's, and has other numbers on each rank."""
    return id(parameter) in run.trained or hasattr(parameter, "full_tensor")


def without_measures(outputs):
    """What a model gives, without numbers that train nothing, as a perplexity of its codes."""

    def is_measure(part):
        return torch.is_tensor(part) and not part.ndim and not part.requires_grad

    if isinstance(outputs, dict):
        return {key: part for key, part in outputs.items() if not is_measure(part)}
    if isinstance(outputs, (list, tuple)):
        return [part for part in outputs if not is_measure(part)]
    return outputs


def is_training_step(module):
    """Whether this is no pass through a model, but Lightning's way through DDP to the script's
    training_step."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return getattr(vars(inner).get("forward"), "__name__", "") == "wrapped_forward"


def is_batch_norm(module):
    """Of a rank's own samples; on CPUs, SyncBatchNorm is one."""
    is_kind = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_kind and bool(cpu.MODES or not isinstance(module, nn.SyncBatchNorm))


def patch(run):
    """What goes into and comes out of each outermost module in training; and the losses."""

    @wrap(torch.jit, "trace")
    def record(original, *args, **kwargs):
        """As for a graph in TensorBoard: it trains nothing."""
        with run.quiet():
            return original(*args, **kwargs)

    @wrap(nn.Module, "__call__")
    def call(original, module, *args, **kwargs):
        if run.thread.quiet or is_training_step(module):
            return original(module, *args, **kwargs)
        if run.thread.in_dataset:
            run.of_datasets.add(module)
        is_training = module.training and torch.is_grad_enabled()
        if run.model is not None or run.thread.in_dataset or not is_training:
            is_ddp = isinstance(module, DistributedDataParallel)  # broadcasts buffers first
            if run.model is not None or run.thread.evaluates or is_ddp:
                return original(module, *args, **kwargs)
            run.thread.evaluates = True
            try:
                if not module.training or is_kept(run, module):  # a teacher may be in either mode
                    line, *callers = place()
                    note_evaluation(run, module, line, callers)
                return original(module, *args, **kwargs)
            finally:
                run.thread.evaluates = False
        keep_precise()
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        if not any(True for _ in inner.parameters()):
            return original(module, *args, **kwargs)
        name, (line, *callers) = type(inner).__name__, place()
        arguments = [*args, *kwargs.values()]
        known = [t for t in leaves_of(arguments) if isinstance(t, (torch.Tensor, np.ndarray))]
        if rows := [len(t) for t in known if t.ndim]:
            run.model_rows = rows[0]
        arguments = opened(arguments)
        made_from = indices_in(arguments)
        own = run.traces and not any(is_trained(run, p) for p in inner.parameters())
        about = sums_of_weights(run, inner) if own else {}
        index = run.note_value("inputs", line, name, arguments, made_from, **about)
        run.model = index
        try:
            outputs = original(module, *args, **kwargs)
        finally:
            run.model = None
        of_lines = without_measures(outputs) if run.traces else ()
        about = {"trains": run.names_in(inner), "is_ddp": inner is not module}
        about["has_batch_norm"] = run.traces and any(map(is_batch_norm, inner.modules()))
        about["callers"] = callers[:2]
        run.note_value("outputs", line, name, of_lines, [*indices_in(outputs), index], **about)
        return outputs

    @wrap(nn.utils, "clip_grad_norm_")
    def clip(original, parameters, max_norm, *args, **kwargs):
        if not torch.is_tensor(parameters):
            parameters = list(parameters)
        norm = original(parameters, max_norm, *args, **kwargs)
        if run.traces:  # of the rank's own gradients, if they are averaged later
            run.note_value("value", place()[0], "clip_grad_norm_", norm)
        each = [parameters] if torch.is_tensor(parameters) else parameters
        gradients = [p.grad for p in each if p.grad is not None]
        clipped = norm.detach(), float(max_norm)
        # Of another step, the id may be another tensor's.
        run.clipped = {key: of for key, of in run.clipped.items() if of[-1] == run.steps}
        marks = {id(gradient): (gradient._version, run.steps) for gradient in gradients}
        run.clipped |= {key: (*clipped, *mark) for key, mark in marks.items()}
        return norm

    @wrap(nn.Module, "train")  # eval() calls it, too, and it those of the parts
    def train(original, self, mode=True):
        out, caller = original(self, mode), inspect.currentframe().f_back.f_back.f_code
        # Not of each part, as a large model has thousands of them.
        if caller.co_name != "train" or not caller.co_filename.startswith(TORCH):
            run.mode_set = place()[:2]
        return out

    @wrap(Subset, "__init__")
    def choose(original, self, dataset, indices):
        original(self, dataset, indices)
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not a list of numbers
            run.note_value("value", place()[0], "Subset", torch.tensor(list(indices)))

    @wrap(torch.autograd, "backward")
    def backward(original, tensors, *args, **kwargs):
        leaves = [t for t in leaves_of(tensors) if torch.is_tensor(t)]
        with run.quiet(), torch.no_grad():
            value = sum(t.double().sum() for t in leaves)
        run.note_value("loss", place()[0], "backward", value, indices_in(leaves))
        return original(tensors, *args, **kwargs)

    for name in ("register_hook", "register_post_accumulate_grad_hook"):

        @wrap(torch.Tensor, name)
        def register(original, self, hook):
            if isinstance(self, nn.Parameter):
                run.say(place()[0], "hook")

            def traced(*args):
                with Trace(run):  # which is off in a backward pass
                    return hook(*args)

            with torch._C.DisableTorchFunction():  # else it would come here again, by Trace
                return original(self, traced)

"""What the script's lines compute: summaries of each value, and what it is made from."""

import contextlib
import inspect
import os
import traceback

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset

from .. import cpu
from ..given.alike import keep_precise
from ..notes import MANY_EVALUATIONS, MANY_VALUES, Seen
from ..patches import stop_both_runs, wrap
from ..script import FOLDER, UNKNOWN, is_running, own_file, own_lines, place, source
from ..sketch import NO_VALUES, indices_in, is_plain, leaves_of, opened, sketches
from .written import note_set

LAYERS = "linear conv1d conv2d conv3d conv_transpose2d matmul __matmul__ mm bmm addmm baddbmm "
LAYERS += "einsum batch_norm layer_norm group_norm scaled_dot_product_attention"
LAYERS = LAYERS.split()
SORTS = "sort", "argsort", "topk"
TORCH = os.path.dirname(torch.__file__)
SET_DATA = torch.Tensor.data.__set__  # tensor.data = other
NOT_THE_SCRIPTS = tuple(
    os.path.join(TORCH, part) for part in ("optim", "utils/data", "nn/init", "nn/utils")
)


def note_evaluation(run, module, line, callers):
    """The buffers with which a module is evaluated: batch norm's averages are each rank's own, but
    not SyncBatchNorm's, which on CPUs is batch norm."""
    is_first = run.nth("evaluation", run.steps, line, id(module)) == 0
    if is_first and run.nth("evaluations", line) < MANY_EVALUATIONS:
        parts = module.named_modules()
        synced = {name for name, part in parts if isinstance(part, nn.SyncBatchNorm)}
        buffers = [each for each in module.named_buffers() if each[1].is_floating_point()]
        buffers = [each for each in buffers if each[0].rpartition(".")[0] not in synced]
        buffers = {f"{type(module).__name__}.{name}": buffer for name, buffer in buffers}
        number, about = run.nth("modules", run.steps, line), {"callers": callers[:1]}
        with run.quiet(), NO_VALUES:
            values = sketches(buffers)
            run.note(Seen("evaluation", line, type(module).__name__, number, values, about=about))


def sum_of_weights(run, module):
    with run.quiet(), torch.no_grad(), NO_VALUES:
        return float(sum(p.sum(dtype=torch.float64) for p in module.parameters()))


def is_trained(run, parameter):
    """Or may be: one that is sharded is hardly a teacher's, and has other numbers on each rank."""
    return id(parameter) in run.trained or hasattr(parameter, "full_tensor")


class Scaled(torch.autograd.Function):
    """By such factors, which are not saved as autograd's are: a checkpoint counts these."""

    @staticmethod
    def forward(ctx, tensor, factors):
        ctx.factors = factors
        return (tensor * factors).to(tensor.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * ctx.factors).to(gradient.dtype), None


class Trace(TorchFunctionMode):
    """Notes what each line of the script computes, where it calls torch directly. So the line is
    found whose result is not that of one process."""

    PARTS = "unbind", "split", "chunk", "tensor_split"  # as of a loop over the samples
    FOLDS = "reshape", "view", "flatten", "repeat_interleave"  # several rows of a sample, together
    SAME_VALUE = ("detach", "__get__", "to", "requires_grad_", "contiguous", "clone", "cuda")

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = getattr(function, "__name__", UNKNOWN)
        is_noisy = self.run.noise and not torch.jit.is_tracing()
        if is_noisy and name in LAYERS and is_plain(out) and out.is_floating_point():
            with NO_VALUES:
                out = self.noisy(out)
        if name == "all_reduce" and out is None:
            out = args[0]  # it is another value now
        if self.run.thread.quiet or self.run.thread.in_dataset:
            return out
        if function == SET_DATA and not is_running("_apply"):  # by to()
            note_set(self.run, args[0])
        if name == "embedding" and any((*args[3:4], kwargs.get("max_norm"))):  # sets its weight
            note_set(self.run, args[1])
        if name in ("cat", "concat", "concatenate", "vstack") and is_plain(out):
            parts = args[0] if args else kwargs["tensors"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            sizes = [len(part) for part in parts if part.dim()]
            batches = {rows for rows, _ in self.run.loaded.values()}
            if dim in (0, -out.dim()) and (len(set(sizes)) == 1 or batches.issuperset(sizes)):
                self.run.joined[len(out)] = sizes
        if name in self.FOLDS and is_plain(out) and out.dim() and args[0].dim():
            batches = {rows for rows, _ in self.run.loaded.values()}
            if len(args[0]) in batches and len(out) > len(args[0]):
                self.run.joined[len(out)] = []
        with NO_VALUES:
            if torch.is_tensor(out) or isinstance(out, (tuple, list)):
                self.see(name, out, args, kwargs)
        return out

    def noisy(self, out):
        """As another device, or another size of the batch, rounds it."""
        seed = self.run.hash("noise", self.run.nth("noise"))
        generator = torch.Generator(out.device).manual_seed(seed)
        with self.run.quiet():
            noise = inspect.unwrap(torch.randn)(out.shape, generator=generator, device=out.device)
            part = max(self.run.noise, torch.finfo(out.dtype).eps / 2)  # else it is rounded away
            return Scaled.apply(out, 1 + part * noise)

    def see(self, name, out, args, kwargs):
        made_from, first = indices_in((args, kwargs)), (*args, *kwargs.values(), None)[0]
        if name in self.SAME_VALUE:
            if made_from and is_plain(out):
                out.compare_index = made_from[0]
            for mark in ("check_line", "compare_place"):
                if is_plain(out) and hasattr(first, mark):
                    setattr(out, mark, getattr(first, mark))
            return
        if name in self.PARTS and made_from:
            for leaf in filter(is_plain, leaves_of(out)):
                leaf.compare_index = made_from[0]
            return
        if not self.run.traces:
            return
        for frame, number in traceback.walk_stack(inspect.currentframe().f_back):
            if frame.f_code.co_filename.startswith(NOT_THE_SCRIPTS):
                return
            if not frame.f_code.co_filename.startswith((TORCH, FOLDER)):
                break
        is_set = "empty" not in name and name != "new"
        file = own_file(frame.f_code.co_filename) if is_set else None
        leaves = [leaf for leaf in leaves_of(out) if torch.is_tensor(leaf)]
        if len({*made_from}) == 1 and is_set:  # as a library normalizes images, or scales a loss
            for leaf in leaves:
                if not isinstance(leaf, nn.Parameter):
                    leaf.compare_index = made_from[0]
        if file is None or not leaves or isinstance(leaves[0], nn.Parameter):
            return
        line = f"{file}:{number}"
        if self.run.nth("seen", self.run.steps, line, name) >= MANY_VALUES:
            return
        if name in SORTS:  # where the entries were, in the rank's own batch; or where such places
            for leaf in leaves if hasattr(first, "compare_place") else leaves[-1:]:
                leaf.compare_place = True
        by = args[1] if len(args) > 1 else kwargs.get("other")
        by_gradient = "div" in name and getattr(by, "requires_grad", False)
        called_at = next((at for at in own_lines(frame) if at != line), "")
        more = {"by_gradient": by_gradient, "called_at": called_at}
        more["drawn"] = getattr(first, "check_line", "")
        self.run.note_value("value", line, name, out, made_from, **more)


def tells_overrides():
    """Code that is copied from torch asks whether a tensor is of a class with functions of its own,
    and hands itself over if so; that all functions are watched here is none of its business."""

    def is_own(thing):
        function = getattr(type(thing), "__torch_function__", None)
        is_torchs = type(thing) is torch.Tensor or function is nn.Parameter.__torch_function__
        return function is not None and not is_torchs

    for name in "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic":

        @wrap(torch.overrides, name)
        def has_own(original, *args):
            return any(map(is_own, args[0] if isinstance(args[0], (list, tuple)) else args))


def refuse_graphs(run):
    """A CUDA graph runs again without Python, so that nothing of it could be noted; and copies to
    the CPU would make its recording fail."""

    @wrap(torch.cuda.CUDAGraph, "__new__")
    def make(original, cls, *args, **kwargs):
        facts = {"line": source(place()[0]), "text": "not compared: CUDA graphs"}
        stop_both_runs(run.folder, "refused", facts | {"remedy": "run it without them"})


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
    refuse_graphs(run)
    tells_overrides()

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
            if run.model is not None or module.training or run.thread.evaluates or is_ddp:
                return original(module, *args, **kwargs)
            run.thread.evaluates = True
            try:
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
        about = {"weights": sum_of_weights(run, inner)} if own else {}
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
    def clip(original, *args, **kwargs):
        norm = original(*args, **kwargs)
        if run.traces:  # of the rank's own gradients, if they are averaged later
            run.note_value("value", place()[0], "clip_grad_norm_", norm)
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

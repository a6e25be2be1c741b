"""What the script's lines compute: summaries of each value, and what it is made from."""

import inspect
import os
import traceback

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..notes import MANY_VALUES
from ..patches import wrap
from ..script import FOLDER, UNKNOWN, is_running, own_file, own_lines
from ..sketch import NO_VALUES, indices_in, is_plain, leaves_of
from .refused import refuse_graphs
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
        if name in self.FOLDS and is_plain(out):
            self.fold(out, (*args, *kwargs.values())[0])
        with NO_VALUES:
            if torch.is_tensor(out) or isinstance(out, (tuple, list)):
                self.see(name, out, args, kwargs)
        return out

    def fold(self, out, first):
        """Note where each sample of a batch has got several rows."""
        batches = {rows for rows, _ in self.run.loaded.values()}
        if is_plain(first) and out.dim() and first.dim() and len(first) in batches:
            if len(out) > len(first):
                self.run.joined.setdefault(len(out), [])

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
        # As a library normalizes images, or scales a loss; or adds to a sum of its own.
        if is_set and (len({*made_from}) == 1 or (made_from and out is first)):
            for leaf in leaves:
                if not isinstance(leaf, nn.Parameter):
                    leaf.compare_index = max(made_from)
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
    and hands itself over if so. It is not told that all functions are watched here."""

    def is_own(thing):
        function = getattr(type(thing), "__torch_function__", None)
        is_torchs = type(thing) is torch.Tensor or function is nn.Parameter.__torch_function__
        return function is not None and not is_torchs

    for name in "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic":

        @wrap(torch.overrides, name)
        def has_own(original, *args, **kwargs):
            things = [*args, *kwargs.values()]
            is_list = len(things) == 1 and isinstance(things[0], (list, tuple))
            return any(map(is_own, things[0] if is_list else things))


def patch(run):
    refuse_graphs(run)
    tells_overrides()

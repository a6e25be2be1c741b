"""Collective calls, and what DDP is told to average."""

import inspect
import os
import traceback

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn.parallel import DistributedDataParallel

from ..notes import MANY_VALUES, PASS, Averages, Collective, Said
from ..patches import wrap
from ..script import is_inside, place
from ..sketch import leaves_of
from .trace import TORCH
from .written import note_set

FSDP = os.path.join("torch", "distributed", "fsdp", "")  # its calls are not the script's


def is_group(thing):
    return isinstance(thing, torch.distributed.ProcessGroup)


def in_function():
    """Whether we are in the forward method of an autograd.Function that is not torch's."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code.co_name == "forward" and not frame.f_code.co_filename.startswith(TORCH):
            first = frame.f_locals.get(*frame.f_code.co_varnames[:1], None)
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return True
    return False


def patch(run):
    @wrap(DistributedDataParallel, "no_sync")
    def no_sync(original, self):
        run.note(Averages(place()[0], False))
        return original(self)

    @wrap(DistributedDataParallel, "__setattr__")
    def set_attribute(original, self, name, value):
        original(self, name, value)
        if name == "require_backward_grad_sync":
            setter = inspect.currentframe().f_back.f_back.f_code.co_filename
            if not setter.startswith(TORCH):  # as in no_sync
                run.note(Averages(place()[0], bool(value)))

    @wrap(Join, "__exit__")
    def leave_join(original, self, *args):
        run.note(Said("join", place()[0]))
        return original(self, *args)  # once the other ranks have no batches either

    @wrap(ModelAverager, "__init__")
    def make_averager(original, self, *args, **kwargs):
        run.note(Said("local", place()[0]))
        original(self, *args, **kwargs)

    def is_first_of_many(line):
        return run.nth("collective", run.steps, line) < MANY_VALUES

    def watch_collective(name):
        @wrap(torch.distributed, name)
        def collective(original, *args, **kwargs):
            line, *callers = place()
            run.drawn_seeds.clear()
            caller = inspect.currentframe().f_back.f_back.f_code.co_filename
            if FSDP not in caller and is_first_of_many(line):
                drawn = getattr((*args, None)[0], "check_line", "")
                if "object_list" in name:  # a list of what is no tensor
                    drawn = run.last_order
                tensors = leaves_of((args[:2], list(kwargs.values())))
                for tensor in tensors:  # which it changes, without another version
                    run.clipped.pop(id(tensor), None)
                has_grad = any(getattr(tensor, "requires_grad", False) for tensor in tensors)
                has_backward = has_grad and in_function()
                has_grad = has_backward or has_grad and torch.is_grad_enabled()
                groups = [each for each in (*args, *kwargs.values()) if is_group(each)]
                of_all = all(group.size() == run.world for group in groups)
                sizes = [tensor.numel() for tensor in tensors if torch.is_tensor(tensor)]
                of_number = max(sizes, default=0) == 1
                in_step = is_inside(run.stepping) and max(sizes, default=0) > 1  # not of a norm
                about = has_grad, of_all, callers[:2], in_step, has_backward, of_number
                run.note(Collective(name, line, drawn, *about))
                if name in ("all_reduce", "broadcast") and torch.is_tensor((*args, None)[0]):
                    note_set(run, args[0])
            out = original(*args, **kwargs)
            if run.traces and name in ("all_gather", "all_gather_into_tensor"):
                given = inspect.signature(original).bind(*args, **kwargs).arguments
                gathered, tensor, *_ = given.values()
                if hasattr(tensor, "compare_index"):  # all ranks' are of the same line
                    for part in leaves_of(gathered):
                        part.compare_index = tensor.compare_index
            return out

    @wrap(DistributedDataParallel, "_sync_buffers")
    def sync_buffers(original, self):
        line, *callers = place()
        if is_first_of_many(line):
            of_all = self.process_group.size() == run.world
            run.note(Collective(PASS, line, "", False, of_all, callers[:2]))
        return original(self)

    names = "all_reduce reduce all_gather all_gather_into_tensor all_gather_object gather "
    names += "gather_object broadcast broadcast_object_list scatter_object_list "
    names += "reduce_scatter reduce_scatter_tensor"
    for name in names.split():
        watch_collective(name)

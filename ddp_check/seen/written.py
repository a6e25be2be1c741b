"""Which of the script's lines has set a tensor last, in place, or its `data` (trace); not an
optimizer's step."""

import re

import torch
from torch import nn

from ..notes import Said
from ..patches import wrap
from ..script import UNKNOWN, is_inside, place
from ..sketch import NO_VALUES, all_plain, is_plain

SETS = r"[a-z]\w*[a-z0-9]_$|__(setitem|iadd|isub|imul|itruediv)__$"
SETS_NOTHING = "requires_grad_", "detach_", "share_memory_", "rename_"


def lines_of(run, tensors):
    """{name: the line that has set it last, or ""}, and {that line: the line that has called its
    function}."""
    lines, callers = {}, {}
    for name, tensor in tensors.items():
        at = tensor.data_ptr() if all_plain([tensor]) else None
        lines[name], caller = run.written.get(at, ("", ""))
        if caller:
            callers.setdefault(lines[name], caller)
    return lines | callers


def note_set(run, tensor):
    """By a line of the script."""
    is_script = not (run.thread.quiet or run.thread.in_dataset or is_inside(run.stepping))
    if is_script and is_plain(tensor):
        line, *callers = place()
        if line != UNKNOWN:
            with NO_VALUES:
                run.written[tensor.data_ptr()] = line, (*callers, "")[0]


def patch(run):
    def watch(owner, name, made=False):
        """A method that sets its tensor; or what it returns."""

        @wrap(owner, name)
        def set_in_place(original, self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            note_set(run, out if made else self)
            return out

    for name in dir(torch.Tensor):
        if re.match(SETS, name) and name not in SETS_NOTHING:
            watch(torch.Tensor, name)
    watch(torch.Tensor, "__deepcopy__", made=True)
    watch(nn.Parameter, "__deepcopy__", made=True)

    def watch_module(name):
        @wrap(nn.Module, name)
        def register(original, self, *args, **kwargs):
            for tensor in (*args, *kwargs.values()):
                note_set(run, tensor)
            if name == "register_buffer":
                run.note_once(Said("buffer", place()[0]))
            return original(self, *args, **kwargs)

    watch_module("register_parameter")
    watch_module("register_buffer")

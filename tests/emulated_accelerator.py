"""A make-believe accelerator `emu` in pure Python, which the training scripts take for a GPU.

A tensor "on" a card wraps a CPU tensor and computes for real. An operation that mixes devices or
cards raises. Random numbers are those of the CPU. The file EMULATED_REPORT/PID says in order
what a process did: what waited for a card, the seeds of random numbers, cards in use, "updated"
after each optimizer step. Loaders pin their batches, as for CUDA.
What torch has in C++ for GPUs alone has a stand-in: the four copies of nn.DataParallel, and DDP,
here the mean of each gradient over Gloo. Not emulated: streams, kernels, NCCL, memory, speed,
torch.compile, --sync-bn, --amp.
"""

import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import comm
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

seen = set()  # the cards in use
chosen = ContextVar("card", default=0)  # a thread begins with card 0, as in CUDA


def tell(what):
    """A line of the report: the function of the script that we are in, and what it does."""
    frame = sys._getframe()
    while frame and not os.path.basename(frame.f_code.co_filename).startswith("train"):
        frame = frame.f_back
    where = f"{frame.f_code.co_name}:{frame.f_lineno}" if frame else "elsewhere:0"
    with open(f"{os.environ['EMULATED_REPORT']}/{os.getpid()}", "a") as file:
        file.write(f"{where} {what}\n")


def real(value):
    return value.inner if isinstance(value, Emulated) else value


def compute(_, function, types, args=(), kwargs=None):
    """torch calls this for each operation: do it on the CPU tensors behind those of a card."""
    kwargs = kwargs or {}
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    cards = {tensor.card for tensor in tensors if isinstance(tensor, Emulated)}
    name = function.__name__.split(".")[0]
    in_place = name.endswith("_") and not name.startswith("__")
    card, target = min(cards, default=chosen.get()), torch.device("emu" if cards else "cpu")
    if kwargs.get("device") is not None:
        target = torch.device(kwargs["device"])
        kwargs = kwargs | {"device": "cpu", "pin_memory": None}
    if name in ("copy_", "_to_copy"):
        target = args[0].device if in_place else target
        free = kwargs.get("non_blocking") or args[2:] == (True,)
        from_cpu = target.type == "emu" and not isinstance(args[in_place], Emulated)
        to_pinned = in_place and free and not isinstance(args[0], Emulated) and args[0].is_pinned()
        if cards and target.type == "cpu" and not to_pinned or from_cpu and not free:
            tell("waits: copy")
        elif from_cpu and args[in_place].dim() > 0 and not args[in_place].is_pinned():
            raise RuntimeError("a copy that is not waited for, of memory that is not pinned")
    elif cards:
        check(function, name, in_place, tensors, cards)
    inner_args, inner_kwargs = tree_map(real, (args, kwargs))
    out = function(*inner_args, **inner_kwargs)
    if out is None or target.type == "cpu":
        return out
    if in_place:
        return args[0]
    if target.index is not None and out.numel() > 1:
        card = target.index  # the script's word; for scalars C++ asks for card 0
    return tree_map(lambda v: Emulated(v, card) if isinstance(v, torch.Tensor) else v, out)


def check(function, name, in_place, tensors, cards):
    """What a GPU refuses, and what makes the process wait for it."""
    cpu = [t for t in tensors if not isinstance(t, Emulated) and t.dim() > 0]  # scalars may be
    if len(cards) > 1 or cpu or in_place and not isinstance(tensors[0], Emulated):
        raise RuntimeError(f"{function} mixes devices: cards {cards} and {len(cpu)} CPU tensors")
    waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if waits & set(function.tags) and (name != "index" or tensors[1].dtype == torch.bool):
        tell(f"waits: {name}")


@contextmanager
def device_index(card):
    token = chosen.set(card)
    yield
    chosen.reset(token)


class Emulated(torch.Tensor):
    """A tensor on a card. torch's C++ takes it for one on card 0: `card` says the truth."""

    def __new__(cls, inner, card):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        layout |= {"dtype": inner.dtype, "device": torch.device("emu", 0)}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout)
        self.inner, self.card = inner, card
        if card not in seen:
            seen.add(card)
            tell(f"uses card {card}")
        return self

    __torch_dispatch__ = classmethod(compute)

    @property
    def device(self):
        return torch.device("emu", self.card)

    def get_device(self):
        return self.card

    def tolist(self):
        tell("waits: tolist")
        return self.inner.tolist()

    def __format__(self, how):
        tell("waits: format")
        return format(self.inner, how)


class Mode(TorchDispatchMode):  # for what makes a tensor on a card out of none, as torch.zeros
    __torch_dispatch__ = compute


# nn.DataParallel's copies between cards.
def scatter(tensor, devices, *_):
    parts = real(tensor).chunk(len(devices))
    return tuple(Emulated(part.clone(), card) for part, card in zip(parts, devices))


def broadcast_coalesced(tensors, devices):
    return [tensors, *([Emulated(t.inner.clone(), card) for t in tensors] for card in devices[1:])]


def reduce_add_coalesced(inputs, destination):
    return tuple(Emulated(sum(map(real, each)), destination) for each in zip(*inputs))


def gather(tensors, dim, destination):
    return Emulated(torch.cat([real(t) for t in tensors], dim), destination or 0)


class DistributedDataParallel(nn.Module):
    """Each gradient becomes the mean over the processes as soon as backward() has it."""

    def __init__(self, module, gradient_as_bucket_view=False):
        super().__init__()
        self.module, self.sync = module, True
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        if self.sync:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def forward(self, *inputs):
        return self.module(*inputs)

    def no_sync(self):
        return patch.object(self, "sync", False)


def pin_memory(tensor, *_):
    tensor = tensor.clone()
    tensor.pinned = True
    return tensor


def install(cards):
    """Make torch believe in an accelerator with so many cards, until the process ends."""
    _setup_privateuseone_for_python_backend("emu")
    torch.emu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.emu.manual_seed = lambda seed: tell(f"seeds card {chosen.get()} with {seed}")
    torch.emu.manual_seed_all = lambda seed: [tell(f"seeds card {i} with {seed}") for i in seen]
    torch.emu._is_in_bad_fork = lambda: False  # torch.manual_seed asks
    torch.emu.device_count = lambda: cards
    torch.emu.get_device_name = lambda *_: "emulated"
    torch.emu.nccl = SimpleNamespace(version=lambda: "emulated")
    torch.emu.is_available = lambda: True
    torch.emu.set_device = lambda device: chosen.set(device.index)
    torch.accelerator.set_device_index = chosen.set
    torch.accelerator.device_index = device_index
    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda tensor, *_: getattr(tensor, "pinned", False)
    torch.accelerator.max_memory_allocated = lambda *device: 0
    for function in scatter, broadcast_coalesced, reduce_add_coalesced, gather:
        setattr(comm, function.__name__, function)
    nn.parallel.DistributedDataParallel = DistributedDataParallel

    tensor, save, loader = torch.tensor, torch.save, torch.utils.data.DataLoader
    init, all_reduce, broadcast = dist.init_process_group, dist.all_reduce, dist.broadcast

    def emulated_tensor(data, *, device=None, **options):
        return tensor(data, **options).to(device or "cpu")

    def emulated_save(content, file, **options):
        tell("waits: save")
        save(tree_map(real, content), file, **options)

    def pinning_loader(*names, **options):
        return loader(*names, **options | {"pin_memory": True})

    torch.tensor, torch.save = emulated_tensor, emulated_save
    torch.utils.data.DataLoader = pinning_loader
    register_optimizer_step_post_hook(lambda *_: tell("updated"))
    dist.init_process_group = lambda *names, device_id=None, **options: init(*names, **options)
    dist.Backend.default_device_backend_map["emu"] = "gloo"
    dist.all_reduce = lambda tensor: all_reduce(real(tensor))
    dist.broadcast = lambda tensor, src: broadcast(real(tensor), src)
    Mode().__enter__()

"""A script for GPUs runs on CPUs, unchanged: "cuda" is the CPU, nccl is gloo, SyncBatchNorm is
BatchNorm.

So it is where there is no GPU, or by --cpu. The script's own files are told that there is a GPU
for each process, as otherwise many end, or take another way than on GPUs (imagenet/main.py wraps
nothing then). Installed libraries get the truth, and so the CPU, unless by --cpu."""

import functools
import inspect
import re
import threading
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from .gpus import Nothing, is_own, patch_devices
from .imports import when_imported
from .patches import wrap
from .script import FOLDER

CPU = torch.device("cpu")
MODES = []  # those of this process, one
WHAT = 'on CPUs: "cuda" is the CPU, nccl gloo, SyncBatchNorm BatchNorm; kernels, mixed precision '
WHAT += "and what only happens on GPUs are not checked"
NEEDS = r"\b(CUDA|NVIDIA|NVML|triton|GPUs?)\b|cuda|0 active drivers|gloo does not|"
NEEDS += r"ProcessGroupGloo(?!.* size at)|getFuture not implemented|ReduceOp.* with Gloo"
NEEDS = re.compile(NEEDS, re.IGNORECASE)
SEVERAL = re.compile(r"\b(single|only one|multiple|several|more than one)[- ]GPU", re.IGNORECASE)


def is_cuda(device):
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def is_number(device):
    return type(device) is int  # not a bool


class OnCpu(TorchFunctionMode):
    """Where a function of torch is given a device, it is the CPU."""

    say = staticmethod(lambda text: None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            self.say(WHAT)
            return without_gaps(args[0])
        if name == "__get__" and function == IS_CUDA and is_asked_by_script():
            return True
        if name == "type" and len(args) > 1 and isinstance(args[1], str):
            args = args[0], args[1].replace("torch.cuda.", "torch.")
        if is_cuda(kwargs.get("device")) or is_number(kwargs.get("device")):
            self.say(WHAT)
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "to" and len(args) > 1 and is_number(args[1]):
            args = args[0], CPU, *args[2:]
        if any(map(is_cuda, args[1:])):
            self.say(WHAT)
            args = args[0], *[CPU if is_cuda(value) else value for value in args[1:]]
        if name == "to" and CPU in (*args[1:], kwargs.get("device")):
            args = without_gaps(args[0]), *args[1:]
        if name == "histc" and args:  # of integers, which a GPU counts, too
            return function(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        return function(*args, **kwargs)


def without_gaps(tensor):
    """As a copy on another device has none, of a part of a tensor's columns."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_contiguous():
        return tensor
    copy = tensor.clone()
    return tensor if copy.stride() == tensor.stride() else copy


IS_CUDA = torch.Tensor.is_cuda.__get__


def is_asked_by_script():
    """Not by torch or a library; this package may be between them."""
    frame = inspect.currentframe().f_back.f_back
    while frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return is_own(frame)


class Generator(type(torch.Generator)):
    """Of torch.Generator: its device is the CPU."""

    real = torch.Generator

    def __call__(cls, *device, **named):
        return cls.real()

    def __instancecheck__(cls, thing):
        return isinstance(thing, cls.real)


def install(options, say=None):
    """Once in each process; and who notes that it was needed."""
    if not MODES and (options.cpu or not torch.cuda.is_available()):
        MODES.append(OnCpu())
        MODES[0].__enter__()
        patch_devices(options)
        patch_torch()
        patch_distributed()
    if MODES and say:
        MODES[0].say = say


def needs_gpu(error):
    """Whether it is raised because something is not imitated; not for another version's name, nor
    by a script that refuses to be one process."""
    text = str(error)
    is_other = "unexpected keyword" in text or SEVERAL.search(text)
    return bool(MODES and NEEDS.search(text) and not is_other)


def patch_torch():
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.Generator = Generator("Generator", (), {})
    kernels = wrap(torch.nn.attention, "sdpa_kernel")
    kernels(lambda original, *args, **kwargs: Nothing())  # the CPU has others

    def in_mode(run):
        with OnCpu():
            run()

    @wrap(threading.Thread, "start")
    def start(original, self):
        """A mode is one thread's."""
        self.run = functools.partial(in_mode, self.run)
        return original(self)

    @wrap(nn.Module, "to")
    def to(original, self, *args, **kwargs):
        return original(self, *[CPU if is_number(value) else value for value in args], **kwargs)

    @wrap(torch, "set_default_device")
    def set_default_device(original, device):
        original(CPU if is_cuda(device) or is_number(device) else device)

    @wrap(torch, "load")
    def load(original, f, map_location=None, *args, **kwargs):
        location = map_location if str(map_location) == "meta" else "cpu"
        return original(f, location, *args, **kwargs)

    @wrap(torch.jit, "load")
    def load_script(original, f, map_location=None, *args, **kwargs):
        return original(f, "cpu", *args, **kwargs)

    nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward


class Unused(list):
    """DDP asks whether there is any, the script which."""

    def __bool__(self):
        return False


def patch_distributed():
    if not hasattr(dist, "ProcessGroupNCCL"):  # torch for CPUs alone
        dist.ProcessGroupNCCL = types.SimpleNamespace(Options=Nothing)

    def by_gloo(original, *args, **kwargs):
        """Of functions with `backend`, and options for nccl alone."""
        given = inspect.signature(original).bind(*args, **kwargs)
        if "nccl" in str(given.arguments.get("backend")).lower():
            given.arguments["backend"] = "gloo"
        for name in "device_id", "pg_options":
            given.arguments.pop(name, None)
        return original(*given.args, **given.kwargs)

    def sum_gradients(fsdp):
        """gloo cannot multiply them before: then FSDP does."""

        @wrap(fsdp.FSDPModule, "set_gradient_divide_factor")
        def set_factor(original, self, factor):
            original(self, factor)
            self.set_force_sum_reduction_for_comms(True)

    when_imported("torch.distributed.fsdp", sum_gradients)
    wrap(dist, "init_process_group")(by_gloo)
    wrap(dist, "new_group")(by_gloo)
    dist.is_nccl_available = lambda: True
    for owner in dist, dist.device_mesh:
        mesh = wrap(owner, "init_device_mesh")
        mesh(lambda original, device_type, *args, **more: original("cpu", *args, **more))

    @wrap(dist, "barrier")
    def barrier(original, group=None, async_op=False, device_ids=None):
        return original(group, async_op)

    @wrap(nn.parallel.DistributedDataParallel, "__init__")
    def make(original, self, module, device_ids=None, output_device=None, *args, **kwargs):
        original(self, module, None, None, *args, **kwargs)
        if device_ids is not None:
            self.device_ids = Unused(getattr(device, "index", device) for device in device_ids)

    # It refuses SyncBatchNorm on CPUs
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None

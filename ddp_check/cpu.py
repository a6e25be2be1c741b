"""A script that says "cuda" and nccl runs on CPUs, unchanged: its device is the CPU, nccl is gloo,
and SyncBatchNorm stays BatchNorm. So it is where there is no GPU; by --cpu, the script is also told
that there is one for each process."""

import inspect
import os
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from .process import wrap
from .script import FOLDER

TORCH = os.path.dirname(torch.__file__) + os.sep
CPU = torch.device("cpu")
MODES = []  # those of this process, one
WHAT = 'on CPUs: "cuda" is the CPU, nccl gloo, SyncBatchNorm BatchNorm; kernels, mixed precision '
WHAT += "and what the script does on GPUs alone are not checked"
NOTHING = "set_device synchronize empty_cache reset_peak_memory_stats ipc_collect set_stream "
NOTHING += "reset_max_memory_allocated set_per_process_memory_fraction manual_seed manual_seed_all"
ZERO = "max_memory_allocated memory_allocated memory_reserved max_memory_reserved utilization"


def is_cuda(device):
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class OnCpu(TorchFunctionMode):
    """Where a function of torch is given a device, it is the CPU."""

    say = staticmethod(lambda text: None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            self.say(WHAT)
            return args[0]
        device = kwargs.get("device")
        if is_cuda(device) or type(device) is int:
            self.say(WHAT)
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "to" and len(args) > 1 and (is_cuda(args[1]) or type(args[1]) is int):
            self.say(WHAT)
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)


class Generator(type(torch.Generator)):
    """Of torch.Generator: its device is the CPU."""

    real = torch.Generator

    def __call__(cls, *device, **named):
        return cls.real()

    def __instancecheck__(cls, thing):
        return isinstance(thing, cls.real)


class Nothing:
    """A stream or an event."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: 0.0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def answers(owner, name, answer):
    """What the script, or a library, is told; but torch and this package get the truth."""
    if not hasattr(owner, name):
        return

    @wrap(owner, name)
    def tell(original, *args, **kwargs):
        asks = inspect.currentframe().f_back.f_back.f_code.co_filename
        return original(*args, **kwargs) if asks.startswith((TORCH, FOLDER)) else answer


def install(options, say=None):
    """Once in each process; and who notes that it was needed."""
    if options.cpu or not torch.cuda.is_available() or MODES:
        if not MODES:
            MODES.append(OnCpu())
            MODES[0].__enter__()
            patch(options)
        MODES[0].say = say or MODES[0].say


def patch(options):
    cuda = torch.cuda
    torch.Generator = Generator("Generator", (), {})
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = cuda.default_stream = Nothing
    for name in NOTHING.split():
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ZERO.split():
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.mem_get_info = lambda *args: (0, 1)
    for name in [name for name in dir(cuda) if name.endswith("Tensor") and hasattr(torch, name)]:
        setattr(cuda, name, getattr(torch, name))
    facts = {"name": "cpu", "total_memory": 2**33, "major": 8, "minor": 0}
    facts |= {"multi_processor_count": 1}
    if options.cpu:
        count = options.nproc if options.run == "all" else 1
        for owner in cuda, torch.accelerator:
            answers(owner, "is_available", True)
            answers(owner, "device_count", count)
        for name, answer in {
            "current_device": int(os.environ.get("LOCAL_RANK", 0)),
            "get_device_name": "cpu",
            "get_device_capability": (8, 0),
            "is_bf16_supported": True,
            "get_device_properties": types.SimpleNamespace(**facts),
        }.items():
            answers(cuda, name, answer)
        answers(torch.accelerator, "current_accelerator", torch.device("cuda"))
        torch.accelerator.set_device_index = lambda *args: None

    def by_gloo(original, backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return original("gloo" if "nccl" in str(backend) else backend, *args, **kwargs)

    def with_gloo(original, *args, backend=None, **kwargs):
        return original(*args, backend="gloo" if "nccl" in str(backend) else backend, **kwargs)

    wrap(dist, "init_process_group")(by_gloo)
    wrap(dist, "new_group")(with_gloo)
    for owner in dist, dist.device_mesh:
        mesh = wrap(owner, "init_device_mesh")
        mesh(lambda original, kind, *args, **more: original("cpu", *args, **more))
    wrap(dist, "barrier")(lambda original, group=None, *args, **more: original(group))

    @wrap(nn.parallel.DistributedDataParallel, "__init__")
    def make(original, self, module, device_ids=None, output_device=None, *args, **kwargs):
        original(self, module, None, None, *args, **kwargs)

    convert = classmethod(lambda cls, module, *args, **kwargs: module)
    nn.SyncBatchNorm.convert_sync_batchnorm = convert

    @wrap(torch, "load")
    def load(original, file, map_location=None, *args, **kwargs):
        if map_location is not None and not callable(map_location):
            map_location = "cpu"
        return original(file, map_location, *args, **kwargs)

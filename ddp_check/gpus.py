"""What a script is told of the GPUs that are not there: torch.cuda and torch.accelerator."""

import collections
import inspect
import os
import re
import types

import torch

from .patches import wrap
from .script import FOLDER, own_file

TORCH = os.path.dirname(torch.__file__) + os.sep
MEMORY = 2**33  # bytes of each GPU

NOTHING = """synchronize empty_cache ipc_collect init set_stream set_per_process_memory_fraction
set_sync_debug_mode manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all
reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached
reset_accumulated_memory_stats reset_peak_host_memory_stats empty_host_cache"""
ZERO = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
max_memory_cached device_memory_used utilization temperature power_draw clock_rate memory_usage"""
ANSWERS = {
    "get_device_name": "cpu",
    "get_device_capability": (8, 0),
    "is_bf16_supported": True,
    "is_tf32_supported": True,
    "is_initialized": True,
    "can_device_access_peer": True,
    "get_arch_list": ["sm_80"],
    "memory_summary": "",
    "mem_get_info": (MEMORY, MEMORY),
    "get_memory_info": (MEMORY, MEMORY),
    "memory_stats": collections.defaultdict(int),
    "is_current_stream_capturing": False,
    "get_device_properties": types.SimpleNamespace(
        name="cpu",
        total_memory=MEMORY,
        major=8,
        minor=0,
        multi_processor_count=1,
        warp_size=32,
        gcnArchName="",
    ),
}


def is_own(frame):
    return own_file(frame.f_code.co_filename) is not None


class Nothing:
    """A stream, an event, and what a script enters for a while."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0.0

    def __call__(self, function):
        return function

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def answers(owner, name, answer, to_all=False):
    """What the script, or also a library, is told; but torch and this package get the truth."""
    if not hasattr(owner, name):
        return

    @wrap(owner, name)
    def tell(original, *args, **kwargs):
        frame = inspect.currentframe().f_back.f_back
        is_told = is_own(frame)
        if to_all:
            is_told = not frame.f_code.co_filename.startswith((TORCH, FOLDER))
        return answer(*args, **kwargs) if is_told else original(*args, **kwargs)


def patch_devices(options):
    """torch.cuda and torch.accelerator."""
    count = options.nproc if options.run == "all" else 1
    current = [int(os.environ.get("LOCAL_RANK", 0))]

    def set_device(device):
        current[0] = int(re.sub(r"\D", "", str(device)))

    cuda, accelerator = torch.cuda, torch.accelerator
    # Each name gets a function of its own: to torch.compile, one has one rule.
    for owner in cuda, accelerator, cuda.memory, cuda.random:
        for name in filter(lambda name: hasattr(owner, name), NOTHING.split()):
            setattr(owner, name, lambda *args, **kwargs: None)
        for name in filter(lambda name: hasattr(owner, name), ZERO.split()):
            setattr(owner, name, lambda *args, **kwargs: 0)
        for name, answer in ANSWERS.items():
            answers(owner, name, lambda *args, answer=answer, **kwargs: answer, to_all=True)
        for name, answer in {
            "is_available": lambda *args: True,
            "device_count": lambda: count,
            "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        }.items():
            answers(owner, name, answer, to_all=options.cpu)
        for name in "current_device", "current_device_index", "current_device_idx":
            answers(owner, name, lambda: current[0], to_all=True)
        for name in "set_device", "set_device_index", "set_device_idx":
            if hasattr(owner, name):
                setattr(owner, name, set_device)
        for name in "current_stream", "default_stream", "stream", "device", "device_of":
            if hasattr(owner, name):
                setattr(owner, name, Nothing)
    accelerator.device_index = torch.Stream = torch.Event = Nothing
    cuda.Stream = cuda.Event = cuda.ExternalStream = cuda.cudart = Nothing
    cuda.get_rng_state = lambda *device: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()] * count
    cuda.initial_seed = torch.initial_seed
    cuda.default_generators = (torch.default_generator,) * count
    for name in "range_push", "range_pop", "mark", "range_start", "range_end":
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    for name in "start", "stop":
        setattr(cuda.profiler, name, lambda: None)
    for name in [name for name in dir(cuda) if name.endswith("Tensor")]:
        setattr(cuda, name, getattr(torch, name))

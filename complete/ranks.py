"""The processes join, find out whether they mean the same run, and end together if they do not.

torchrun starts a process for each GPU. Each is called a rank, after its number. All ranks call the
functions of this file together that communicate: join, gather, compare_ranks, and all that end in
`on_all_ranks`.
"""

import hashlib
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from files import FileError, dataset_name
from images import FolderError
from loaders import check_temporary_folder

# Flags that two machines may give differently.
MAY_DIFFER = ["data_dir", "output", "workers", "timeout"]
LONGEST_TIMEOUT = 10**7  # seconds: 115 days
PATIENCE = 10  # seconds after which a process says for whom it waits


# ---- The processes join --------------------------------------------------------------------------
def launched():
    """Whether torchrun, or the like, says which rank this is. It sets RANK; without it, other
    variables may be left in a shell."""
    return bool(os.environ.get("RANK"))


def from_environment(name, default):
    return int(os.environ.get(name) or default) if launched() else default


def device_kinds():
    """What --device may be; the default first."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if gpu is None or gpu.type == "mps" else [gpu.type, "cpu"]  # DDP has no mps


def cores():
    """The number of CPU cores for each process of this machine."""
    # torchrun, the parent of its ranks, may have bound each to some of its cores (--numa-binding).
    owner = os.getppid() if launched() and dist.is_torchelastic_launched() else 0  # 0: this process
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(owner)) if has_affinity else os.cpu_count()
    return max(1, count // from_environment("LOCAL_WORLD_SIZE", 1))


def join(args, check_flags, uses_float16):
    """Join the other processes, print who is where, and refuse flags that differ between them, or
    are wrong. Returns this process's device."""
    refuse_on_all_ranks(check_launch(args))
    rank = from_environment("RANK", 0)  # number of this process: 0, 1, ... over all machines
    local_rank = from_environment("LOCAL_RANK", 0)  # 0, 1, ... on this machine
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that a terminal cannot show
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank)  # each process uses its own GPU
        torch.accelerator.set_device_index(local_rank)  # or all would use GPU 0
    # All processes wait here until the last has joined. Then they can communicate.
    waits = threading.Timer(PATIENCE, print, [waiting_line(args)], {"flush": True})
    waits.start()
    try:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),  # NCCL between GPUs, Gloo between CPUs
            store=None if launched() else dist.HashStore(),  # no other process to find
            rank=rank,
            world_size=from_environment("WORLD_SIZE", 1),
            timeout=timedelta(seconds=args.timeout),
            device_id=None if device.type == "cpu" else device,  # the GPU for NCCL to use
        )
    finally:
        waits.cancel()
    name = f"{device}, {torch.cuda.get_device_name()}" if device.type == "cuda" else device
    reports = gather(f"rank {rank}: host {socket.gethostname()}, device {name}")
    if rank == 0:
        nccl = torch.cuda.nccl.version() if dist.get_backend() == "nccl" else ()
        backend = " ".join([dist.get_backend(), ".".join(map(str, nccl))]).strip()
        print(f"torch {torch.__version__}, backend {backend}")
        print(*reports, sep="\n", flush=True)
    compare_ranks(args, uses_float16(args))
    refuse_on_all_ranks(check_flags(args))
    refuse_on_all_ranks(check_temporary_folder() if args.workers > 0 else "")
    return device


def waiting_line(args):
    """For whom this process waits, and what to do if nobody else was started."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    rank, world_size = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
    others = f"ranks 1 to {world_size - 1} to join" if world_size > 2 else "rank 1 to join"
    line = f"rank {rank} of {world_size} waits for {'rank 0' if rank else others} at {place}"
    if not dist.is_torchelastic_launched():
        line += ": for a run of one process, unset RANK, which is set in this shell"
    return f"{line} (--timeout: {args.timeout} s)"


def check_launch(args):
    """Why this process cannot join others, or ""."""
    names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if launched() and not all(os.environ.get(name) for name in names):
        return f"RANK is set, but not all of {', '.join(names)}: start torchrun, or unset RANK"
    if not 0 < args.timeout <= LONGEST_TIMEOUT:
        return f"--timeout must be from 1 to {LONGEST_TIMEOUT} seconds"
    rank, world_size = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
    if rank >= world_size:
        return f"RANK is {rank}, and WORLD_SIZE {world_size}: start torchrun, or unset RANK"
    launchers = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # srun, mpirun
    tasks = max(int(os.environ.get(name) or 1) for name in launchers)
    if not launched() and tasks > 1:  # each would be rank 0, in one folder
        return f"{tasks} processes without ranks: start torchrun, once per machine"
    if launched() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":  # --max-restarts
        if not args.resume or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
            return "--max-restarts needs --resume, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    if args.device != "cpu":
        gpus = torch.accelerator.device_count()
        if gpus <= from_environment("LOCAL_RANK", 0):
            return f"more processes than the {gpus} GPUs"
    return ""


# ---- All ranks together --------------------------------------------------------------------------
def gather(value):
    """A list of what each rank has passed."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_on_all_ranks(problem):
    """End all ranks if one of them has a problem, which is printed once; "" is none. A process that
    has not joined the others yet ends alone."""
    problems = gather(problem) if dist.is_initialized() else [problem]
    problems = [text for text in problems if text]
    if not problems:
        return
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{Path(sys.argv[0]).name}: error: {problems[0]}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        dist.barrier()  # until it is printed: torchrun ends all ranks as soon as one has ended
        dist.destroy_process_group()
    raise SystemExit(2)


def call_on_all_ranks(function, *args):
    """What `function` returns, on each rank. All ranks end if it raises a FileError, FolderError or
    PermissionError on one of them."""
    value, problem = None, ""
    try:
        value = function(*args)
    except (FileError, FolderError, PermissionError) as error:
        problem = str(error)
    refuse_on_all_ranks(problem)
    return value


# ---- Do all ranks mean the same run? -------------------------------------------------------------
def compare_ranks(args, float16):
    """Refuse ranks that were started with different flags or code, and GPUs for which --amp means
    different things: `float16` or not."""
    flags = {flag(name): str(x) for name, x in vars(args).items() if name not in MAY_DIFFER}
    flags["--dataset"] = dataset_name(args)  # its folder may be elsewhere
    compare_on_all_ranks(flags, "start all machines with the same flags")
    sources = Path(__file__).parent.glob("*.py")
    files = {path.name: hash_of([path.read_bytes()]) for path in sources}
    compare_on_all_ranks(files, "copy the same files to all machines")
    half = "float16" if float16 else "bfloat16"
    compare_on_all_ranks({"--amp": half}, "use GPUs of one kind, or leave out --amp")


def compare_on_all_ranks(values, remedy):
    """Refuse what differs between the ranks. `values`: this rank's, by their names."""
    first, *others = gather(values)
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            a, b = first.get(name), other.get(name)
            if a != b:
                refuse_on_all_ranks(f"{name} is {a} on rank 0 and {b} on rank {rank}: {remedy}")


def flag(name):
    return "--" + name.replace("_", "-")


def hash_of(parts):
    """A hash of bytes, or arrays, that come in parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]

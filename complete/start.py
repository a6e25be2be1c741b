"""What happens before the first step: the processes join, find out whether they mean the same run,
load the data, and the weights that the run starts from.

torchrun starts a process for each GPU. Each is called a rank, after its number. All ranks call the
functions of this file together, as most of them communicate: all that end in `on_all_ranks`, and
join, compare_ranks, find_start, load_weights and try_model.
"""

import hashlib
import os
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checkpoint import FileError, Start, check_file, dataset_name, find_run, read_weights
from images import FolderError
from loaders import check_temporary_folder, seed_everything
from torch import nn
from torch.func import functional_call
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision import models
from torchvision.datasets import DatasetFolder

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


# ---- The data ------------------------------------------------------------------------------------
@dataclass
class Data:
    """What load_data returns, and the identity of the data: see `identify`."""

    train_set: Dataset | None
    test_set: Dataset
    classes: int
    identity: dict
    part: str  # of the data that gives the scores: val, or test


def load_on_all_ranks(args, load_data, start, device):
    """The Data. Refuses a rank that finds none, too few, or others than rank 0, and those that do
    not belong to `start`. --evaluate needs no training set."""
    seed_everything("data", args.seed, device=device)  # all ranks make the same random split
    train_set, test_set, classes = call_on_all_ranks(load_data, args)
    problem, world_size = "", dist.get_world_size()
    if not args.evaluate and len(train_set) < args.batch_size:
        problem = f"--batch-size: the training set has only {len(train_set)} samples"
    elif len(test_set) < world_size:
        problem = f"only {len(test_set)} {part_of(test_set)} samples, for {world_size} processes"
    refuse_on_all_ranks(problem)
    identity = identify(train_set, test_set, classes)
    if len({*gather(hash_of([repr(identity).encode()]))}) > 1:
        rank_0, *others = gather(identity)
        for rank, other in enumerate(others, start=1):
            differ = difference(rank_0, other, " on rank 0", f" on rank {rank}")
            if differ:
                refuse_on_all_ranks(f"the ranks have different data: {differ}")
    check_data_on_all_ranks(args, start, identity)
    return Data(train_set, test_set, classes, identity, part_of(test_set))


def part_of(test_set):
    """The part of the data that gives the scores: val, or test."""
    return getattr(test_set, "part", "test")


def identify(train_set, test_set, classes):
    """What every rank and a resumed run must find again: the names of the classes, if the training
    set has names, else their number; how many samples, and which. A data set may be moved to
    another folder."""
    names = getattr(test_set if train_set is None else train_set, "classes", None)
    names = [str(name) for name in names] if isinstance(names, (list, tuple)) else classes
    parts = {} if train_set is None else {"train": fingerprint(train_set)}
    parts[part_of(test_set)] = fingerprint(test_set)
    return {"classes": names, "data": parts, "image": image_shape(test_set[0])}


def image_shape(sample):
    """[C, H, W] of the image in a sample, to which predict.py decodes others; None without one."""
    image = sample[0] if isinstance(sample, (tuple, list)) else None
    is_image = torch.is_tensor(image) and image.dtype == torch.uint8 and image.ndim == 3
    return list(image.shape) if is_image else None


def describe(identity):
    """In words: how many samples and classes, with the names of the first and the last."""
    words = {"train": "training"}
    parts = identity["data"].items()
    samples = ", ".join(f"{x['samples']} {words.get(part, part)} samples" for part, x in parts)
    classes = identity["classes"]
    if isinstance(classes, int):  # classes without names, or the one output of a regression
        return f"{samples}, {f'{classes} classes' if classes > 1 else '1 output'}"
    names = [ascii(name) for name in classes]
    shown = names if len(names) <= 10 else [*names[:5], "...", *names[-3:]]
    return f"{samples}, {len(names)} classes ({', '.join(shown)})"


def fingerprint(dataset):
    """The number of samples, and a hash of their paths, relative to the folder that has all, and of
    their labels, as far as the data set has these."""
    if isinstance(dataset, Subset):
        whole = fingerprint(dataset.dataset)["hash"].encode()
        content = [whole, np.asarray(dataset.indices, np.int64)]
    elif isinstance(dataset, ConcatDataset):
        content = [fingerprint(part)["hash"].encode() for part in dataset.datasets]
    else:
        content = chain(relative_paths(dataset), numeric_labels(dataset))
    return {"samples": len(dataset), "hash": hash_of(content)}


def relative_paths(dataset):
    paths = getattr(dataset, "paths", None)
    if isinstance(dataset, DatasetFolder):
        paths = [path for path, _ in dataset.samples]
    if paths is None or len(paths) == 0:
        return []
    first, last = (os.fsencode(choose(paths)) for choose in (min, max))
    shared = len(os.path.dirname(os.path.commonprefix([first, last])))
    return (os.fsencode(path)[shared:].lstrip(b"/") + b"\0" for path in paths)


def numeric_labels(dataset):
    labels = getattr(dataset, "targets", None)
    if isinstance(dataset, TensorDataset):
        labels = dataset.tensors[-1]
    if torch.is_tensor(labels):
        labels = labels.cpu().contiguous().view(torch.uint8)
    with suppress(ValueError, TypeError):  # boxes, say, of which images have different numbers
        numbers = np.ascontiguousarray(labels)
        if numbers.dtype.kind in "biuf":
            return [numbers]
    return []


def hash_of(parts):
    """A hash of bytes, or arrays, that come in parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


def difference(old, new, then=" then", now=" now"):
    """In what two results of `identify` differ, or ""; `then` and `now` say whose they are."""
    before, after = old["classes"], new["classes"]
    if isinstance(before, int) or isinstance(after, int):  # no names
        if before != after:
            return f"other classes: {ascii(before)}{then}, {ascii(after)}{now}"
    elif before != after:
        gone = [name for name in before if name not in after]
        more = [name for name in after if name not in before]
        change = f"{ascii(gone)}{then}, {ascii(more)}{now}"
        return f"other classes: {change if gone or more else 'another order'}"
    for part in {**old["data"], **new["data"]}:
        if part not in old["data"] or part not in new["data"]:
            return f"{' and '.join(old['data'])}/{then}, {' and '.join(new['data'])}/{now}"
        a, b = old["data"][part], new["data"][part]
        name = "training" if part == "train" else part
        if a["samples"] != b["samples"]:
            return f"{a['samples']} {name} samples{then}, not {b['samples']}{now}"
        if a["hash"] != b["hash"]:
            hashes = f"{a['hash']}{then}, {b['hash']}{now}"
            return f"other {name} samples, by their paths or labels: {hashes}"
    a, b = old["image"], new["image"]
    if a != b:  # packed again, with another --side
        return f"images of the shape {a}{then}, not {b}{now}"
    return ""


def check_data_on_all_ranks(args, start, identity):
    """Refuse to continue a run with other data, or to print scores that could not be believed; and
    print what the data are. `start` is what `find_start` has returned."""
    problem = ""
    if args.evaluate:
        problem = check_scores(start, args, identity)
    elif start.is_resumed:
        differ = difference(start.identity, identity)
        if differ:
            problem = f"{start.file} was started with {differ}: use the same data"
    refuse_on_all_ranks(problem)
    if dist.get_rank() == 0:
        samples = f"{args.batch_size // dist.get_world_size()} samples per step on each rank"
        print(f"{describe(identity)}; {samples}", flush=True)


def check_scores(trained, args, identity):
    """Why the scores of weights on these data could not be believed, or "". `trained`: a Start with
    the weights."""
    file, flags, then = trained.file, trained.flags, trained.identity
    if then is None or flags is None:  # a plain state_dict
        return ""
    for name in ("model", "image_size"):
        if name in flags and flags[name] != getattr(args, name):
            return f"{file} was trained with {flag(name)} {flags[name]}: test it with that"
    if then["classes"] != identity["classes"]:
        return f"{file} was trained with {difference(then, identity)}"
    if flags["dataset"] != dataset_name(args) or "train" not in identity["data"]:
        return ""
    data = {**identity["data"], "train": then["data"]["train"]}  # what is tested may be another
    if differ := difference({**identity, "data": data}, identity):
        return f"{file} was trained with {differ}: what is tested may be part of it"
    return ""


# ---- What the run starts from --------------------------------------------------------------------
def find_start(args, may_change):
    """What the run continues from, or the first weights of a new one, or those that --evaluate
    tests: a Start, which has the weights themselves on rank 0 alone."""
    version = None
    if not args.evaluate:
        start = call_on_all_ranks(find_run, args, may_change)
        at = f"epoch {start.progress.epoch}, step {start.progress.step}"
        checkpoint = {"the checkpoint in --output": at if start.is_resumed else "none"}
        compare_on_all_ranks(checkpoint, "put --output on a disk that all machines share")
        if start.is_resumed:
            return start
        version = start.version
    start = call_on_all_ranks(read_first, args)
    weights, start.weights = start.weights, None
    shared = [start]
    dist.broadcast_object_list(shared, 0)  # but for the weights
    start = shared[0]
    start.weights, start.version = weights, version
    return start


def read_first(args):
    """On rank 0 a Start with the weights of --evaluate, --init or --pretrained, if any. Raises
    FileError."""
    if dist.get_rank() > 0:
        return Start()
    if args.evaluate or args.init:
        start = read_weights(args.init or args.output / "best.pt")
        if start.normalization is None:
            message = f"{start.file} has no normalization: pixels become (pixel - 115) / 58"
            print(message, flush=True)
        return start
    return read_pretrained(args.model) if args.pretrained else Start()


def read_pretrained(name):
    """A Start with torchvision's weights of a model. Raises FileError."""
    weights = models.get_model_weights(name).DEFAULT
    file = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    try:
        if file.exists():
            check_file(file)
        model = models.get_model(name, weights=weights)
    except Exception as error:
        raise FileError(f"{file} is damaged (delete it), or no download: {error}") from error
    preset = weights.transforms()
    normalization = [[255 * x for x in values] for values in (preset.mean, preset.std)]
    return Start("--pretrained", model.state_dict(), normalization=normalization)


def build_on_all_ranks(args, build_model, inputs, classes, start, device):
    """The model on the device, with the first weights, if any. Refuses weights
    that do not fit, and a model that cannot be trained on `inputs`, a batch."""
    seed_everything("weights", args.seed, device=device)
    model = build_model(args, inputs, classes)
    # Other classes than the weights': a new last layer.
    load_weights(model, start, new_head=args.pretrained and not args.evaluate)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(device)
    try_model(model, inputs)
    return model


def load_weights(model, start, new_head):
    """Load the first weights, if any, into rank 0's model, and forget them. With `new_head` the
    last layer may have another shape, and stays random then. Refuses weights that do not fit."""
    problem = ""
    if start.weights is not None:
        problem = load_fitting(model, start.weights, start.file, new_head)
        start.weights = None
    refuse_on_all_ranks(problem)


def load_fitting(model, weights, file, new_head):
    """Load what fits. Returns why it is too little, or ""."""
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    fitting = {name: weight for name, weight in weights.items() if weight.shape == shapes.get(name)}
    misfits = [name for name in weights if name not in fitting]
    random = [name for name in shapes if name not in fitting]
    head = next(reversed(weights), "").rpartition(".")[0]  # the last layer's name, such as "fc"
    only_head = all(name.startswith(f"{head}.") for name in misfits)
    if only_head and (new_head or not random):
        model.load_state_dict(fitting, strict=False)
        if random:
            print(f"{file}: new and random are {', '.join(random)}", flush=True)
        return ""
    if only_head and misfits:
        remedy = "new_head=not args.evaluate, in start.py, trains a new last layer"
        return f"{file}: {misfits[0]} has another shape here (other classes?): {remedy}"
    return f"{file} is not of this model: {', '.join([*misfits, *random][:6])}"


@torch.no_grad()
def try_model(model, inputs):
    """Refuse a model that cannot be trained on a batch such as `inputs`: of images that are too
    small for it; or of one image per GPU, of which batch norm may get a single number."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # statistics stay
    problem = ""
    try:
        functional_call(model, buffers, (inputs,))
    except (ValueError, RuntimeError, AssertionError) as error:
        problem = f"the model cannot be trained on {shape_of(inputs)}: {error} ({line_of(error)})"
        problem += ": another --image-size or --batch-size?"
    refuse_on_all_ranks(problem)


def shape_of(inputs):
    if torch.is_tensor(inputs):
        return f"a batch of the shape {[*inputs.shape]}"
    return "a batch"


def line_of(error):
    """The last line of code, outside of torch, that was on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs = os.path.dirname(torch.__file__) + os.sep
    frame = [frame for frame in frames if not frame.filename.startswith(torchs)][-1]
    return f"{os.path.basename(frame.filename)}, line {frame.lineno}"

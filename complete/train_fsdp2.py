# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "torchvision", "numpy"]
# ///
"""Train an image classifier with FSDP2: each GPU holds a shard of the model, not all of it.

torchrun --standalone --nproc-per-node 4 train_fsdp2.py    # on one machine
On two machines, one of these lines on each; HOST is the first machine:
torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 4 train_fsdp2.py
torchrun --nnodes 2 --node-rank 1 --master-addr HOST --nproc-per-node 4 train_fsdp2.py
"""

import argparse
import csv
import math
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler, TensorDataset, default_collate
from torchvision import datasets, models
from torchvision.transforms import v2

# ---- The flags: add yours here -------------------------------------------------------------------
# A flag's value is args.NAME. A run is resumed with the same flags, except those in MAY_CHANGE.
formatter = argparse.ArgumentDefaultsHelpFormatter
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
parser.usage = "%(prog)s [flags]; --help lists them"
add = parser.add_argument
add("--dataset", default="cifar10", help="cifar10, fashion-mnist, synthetic, or a folder")
add("--data-dir", default="data", help="where torchvision's data sets are stored")
add("--image-size", type=int, default=32, help="side of synthetic images, or of a folder's")
add("--repeat", type=int, default=1, help="repeat the channels, to test with a larger input")
add("--augment", action="store_true", help="random flips, and shifts by up to 4 pixels")
add("--model", choices=("net", "resnet18", "mlp"), default="net", help="see build_model")
add("--optimizer", choices=("sgd", "adam"), default="sgd", help="sgd has momentum 0.9")
add("--lr", type=float, default=0.001, help="learning rate")
add("--lr-schedule", choices=("constant", "cosine"), default="constant", help="see build_optimizer")
add("--warmup-steps", type=int, default=0, help="steps of linear learning rate warm-up")
add("--epochs", type=int, default=10, help="0: print the devices, and end")
add("--batch-size", type=int, default=64, help="global batch size: samples per step, over all GPUs")
add("--accumulate", type=int, default=1, help="micro-batches per step: saves memory")
add("--clip-norm", type=float, default=0.0, help="maximum norm of the gradient; 0: no clipping")
add("--seed", type=int, default=76, help="of weights, sample order and random numbers")
accelerator = torch.accelerator.current_accelerator(check_available=True)
devices = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # torchrun sets it
devices = [name for name in devices if name != "mps"]  # FSDP2 has no backend for it
add("--device", choices=devices, default=devices[0])
add("--workers", type=int, default=min(16, cores), help="loader processes per training process")
add("--amp", action="store_true", help="bfloat16 mixed precision, fast from Ampere on")
add("--compile", action="store_true", help="torch.compile")
add("--output", type=Path, default=Path("runs", Path(__file__).stem), help="folder of the run")
group = parser.add_mutually_exclusive_group()
group.add_argument("--resume", action="store_true", help="continue the run in --output, if any")
group.add_argument("--overwrite", action="store_true", help="replace the run in --output")
add("--checkpoint-minutes", type=float, default=5, help="time between checkpoints in an epoch")
add("--log-every", type=int, default=100, help="steps between two progress lines")
MAY_CHANGE = ["epochs", "accumulate", "device", "workers", "amp", "compile", "data_dir", "output"]
MAY_CHANGE += ["resume", "overwrite", "checkpoint_minutes", "log_every"]
add("--shard", type=int, default=0, help="GPUs that share one copy of the model; 0: all GPUs")
add("--timeout", type=int, default=1800, help="seconds to wait for another process")
add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)  # old launchers; unused
MAY_CHANGE += ["shard", "timeout", "local_rank"]


def stop(message, rank=0):
    """Exit with an error (status 2). In multi-GPU training only the process of rank 0 prints it."""
    if rank == 0:
        print(f"{parser.prog}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # torchrun ends all processes when the first exits: let rank 0 print
    sys.exit(2)


# ---- The model: put yours here -------------------------------------------------------------------
# The code below uses build_model, loss_function, count_correct, build_optimizer and BLOCKS.
class Net(nn.Module):
    """The CNN of PyTorch's CIFAR-10 tutorial: (N, channels, side, side) -> (N, classes)."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        side = ((side - 4) // 2 - 4) // 2  # after two 5 x 5 convolutions, each with a 2 x 2 pooling
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def build_model(args, image, classes):
    """A network for images of the shape of `image`, (C, H, W)."""
    channels, side = image.shape[0] * args.repeat, image.shape[1]
    if args.model == "resnet18":
        model = models.resnet18(num_classes=classes)
        if channels != 3:
            model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        # Tensor cores prefer channels_last. On mps, some versions of torch give wrong results.
        return model if args.device == "mps" else model.to(memory_format=torch.channels_last)
    if args.model == "mlp":
        hidden = nn.Linear(channels * side * side, 512)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(512, classes))
    return Net(channels, side, classes)


# The classes of the layers that repeat. A GPU gathers the weights of one such layer at a time.
BLOCKS = (models.resnet.BasicBlock, nn.TransformerEncoderLayer)


def loss_function(outputs, labels):
    """The mean over the labels: main averages it over micro-batches (and over GPUs)."""
    return F.cross_entropy(outputs, labels)


def count_correct(outputs, labels):
    """The number of correct predictions, and the number of labels."""
    return (outputs.argmax(1) == labels).sum(), labels.numel()


def build_optimizer(args, model, steps):
    """The optimizer and its learning rate schedule, which is stepped `steps` times in the run."""
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)  # FSDP2: not fused

    def factor(step):  # what --lr is multiplied by
        warmup = min(1, (step + 1) / (args.warmup_steps + 1))
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        return warmup * cosine if args.lr_schedule == "cosine" else warmup

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- The data: put yours here --------------------------------------------------------------------
# The code below calls load_data, prepare and augment.
def load_data(args):
    """Training set, test set, number of classes. A sample is a uint8 image (C, H, W) and an int."""
    if args.dataset == "synthetic":
        return synthetic(10_000, args.image_size, 1), synthetic(2_000, args.image_size, 2), 10
    if args.dataset in ("cifar10", "fashion-mnist"):
        return load_torchvision(args, train=True), load_torchvision(args, train=False), 10
    folder = Path(args.dataset)
    if not (folder / "train").is_dir() or not (folder / "test").is_dir():
        stop(f"--dataset {folder}: neither a known name nor a folder with train/ and test/")
    transform = v2.Compose([v2.PILToTensor(), v2.Resize((args.image_size, args.image_size))])
    train_set = datasets.ImageFolder(folder / "train", transform)
    test_set = datasets.ImageFolder(folder / "test", transform)
    if test_set.classes != train_set.classes:
        stop(f"--dataset {folder}: test/ needs the same sub-folders (classes) as train/")
    return train_set, test_set, len(train_set.classes)


def load_torchvision(args, train):
    kind = datasets.CIFAR10 if args.dataset == "cifar10" else datasets.FashionMNIST
    try:
        dataset = kind(args.data_dir, train, download=True)
    except (OSError, RuntimeError) as error:
        stop(f"no download ({str(error).splitlines()[0]}): put the files into --data-dir")
    images = torch.as_tensor(dataset.data)  # (N, H, W) or (N, H, W, C)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return TensorDataset(images, torch.as_tensor(dataset.targets))


def synthetic(count, side, seed):
    """`count` images (3, side, side) of ten coarse patterns, with noise."""
    coarse = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = (F.interpolate(coarse, side) * 120).byte()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randint(136, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return TensorDataset(images.add_(patterns[labels]), labels)


def prepare(args, batch, device):
    """Copy a batch to the device, where uint8 images become normalized floats."""
    non_blocking = device.type != "mps"  # on mps a copy could be used before it is complete
    images, labels = (tensor.to(device, non_blocking=non_blocking) for tensor in batch)
    if images.dtype == torch.uint8:
        images = (images.float() - 127.5) / 64  # mean about 0, standard deviation about 1
    if args.repeat > 1:
        images = images.repeat(1, args.repeat, 1, 1)
    return images, labels


def augment(inputs, labels):
    """With --augment: flip half of the images (N, C, H, W), and shift each by up to 4 pixels."""
    count, _, height, width = inputs.shape
    flip = torch.rand(count, 1, 1, 1, device=inputs.device) < 0.5
    padded = F.pad(torch.where(flip, inputs.flip(3), inputs), (4, 4, 4, 4))
    shifts = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, 9, 9, H, W)
    y, x = torch.randint(9, (2, count), device=inputs.device)
    return shifts[torch.arange(count, device=inputs.device), :, y, x], labels  # (N, C, H, W)


# ---- Training: nothing to change here ------------------------------------------------------------
class EpochSampler(Sampler):
    """Shuffles each epoch; can skip its first samples. Each rank (process) has its own share."""

    def __init__(self, dataset, seed, rank=0, world_size=1):
        self.length, self.seed, self.rank, self.world_size = len(dataset), seed, rank, world_size

    def set_epoch(self, epoch, start):
        self.epoch, self.start = epoch, start

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = torch.randperm(self.length, generator=generator)[self.rank :: self.world_size]
        return iter(indices[self.start :].tolist())


class TensorLoader:
    """A DataLoader for tensors on the device: it gathers a batch with one call per tensor."""

    def __init__(self, tensors, batch_size, sampler):
        self.tensors, self.batch_size, self.sampler = tensors, batch_size, sampler

    def __iter__(self):
        indices = torch.tensor(list(self.sampler), device=self.tensors[0].device)
        for i in range(0, len(indices), self.batch_size):
            yield [t.index_select(0, indices[i : i + self.batch_size]) for t in self.tensors]


def make_loader(args, dataset, batch_size, sampler, device, keep_workers=False):
    # A TensorDataset is copied to the device. One that does not fit: use another class of Dataset.
    if type(dataset) is TensorDataset:
        return TensorLoader([tensor.to(device) for tensor in dataset.tensors], batch_size, sampler)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=keep_workers and args.workers > 0,  # idle ones take memory
        pin_memory=device.type in ("cuda", "xpu"),
    )


@torch.no_grad()
def evaluate(args, model, loader, passes, spare, device):
    """A tensor (3,): sum of the losses, correct predictions, and labels, over all batches."""
    model.eval()
    dtype = torch.float32 if device.type in ("mps", "xpu") else torch.float64  # not on every GPU
    sums = torch.zeros(3, dtype=dtype, device=device)
    for batch in loader:
        inputs, labels = prepare(args, batch, device)
        outputs = model(inputs)
        correct, count = count_correct(outputs, labels)
        sums[0] += loss_function(outputs, labels) * count
        sums[1] += correct
        sums[2] += count
        passes -= 1
    for _ in range(passes):  # a forward pass communicates: all ranks must make the same number
        model(prepare(args, spare, device)[0])
    model.train()
    return sums


# ---- Progress and checkpoints: nothing to change here --------------------------------------------
@dataclass
class Progress:
    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch
    loss_sum: float = 0.0  # sum of the losses of these steps
    seconds: float = 0.0  # training time of these steps
    metrics: list = field(default_factory=list)  # a dictionary for each finished epoch


def progress_line(args, progress, steps_per_epoch):
    position = f"epoch {progress.epoch + 1}/{args.epochs} step {progress.step}/{steps_per_epoch}"
    loss = progress.loss_sum / progress.step
    speed = progress.step * args.batch_size / progress.seconds
    steps_left = (args.epochs - progress.epoch) * steps_per_epoch - progress.step
    minutes_left = steps_left * args.batch_size / speed / 60
    return f"{position} loss {loss:.4f} {speed:.0f} samples/s {minutes_left:.1f} min left"


def finish_epoch(args, progress, sums):
    """Add a row to the metrics and return its line; `progress` moves to the next epoch."""
    loss_sum, correct, count = sums.tolist()
    has_memory = args.device not in ("cpu", "mps")
    row = {  # use plain Python numbers: last.pt is read with weights_only=True
        "epoch": progress.epoch + 1,
        "train_loss": progress.loss_sum / progress.step,
        "test_loss": loss_sum / max(1, count),
        "test_accuracy": correct / max(1, count),
        "seconds": progress.seconds,  # without evaluation
        "samples_per_second": progress.step * args.batch_size / progress.seconds,
        "peak_memory_mib": torch.accelerator.max_memory_allocated() / 2**20 if has_memory else 0,
    }
    progress.metrics.append(row)
    progress.epoch += 1
    progress.step, progress.loss_sum, progress.seconds = 0, 0.0, 0.0
    line = "epoch {epoch}: train loss {train_loss:.4f} test loss {test_loss:.4f} "
    line += "accuracy {test_accuracy:.4f} {seconds:.1f} s"
    return line.format(**row)


def save(content, path):
    """torch.save. If the process is killed while it writes, the old file survives."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # without it a power failure could leave a new, empty file
    os.replace(f"{path}.tmp", path)


def gather(content):
    """Whole tensors in place of shards, on the CPU of rank 0. All ranks must call it."""
    if isinstance(content, dict):
        return {key: gather(value) for key, value in content.items()}
    if isinstance(content, DTensor):
        content = content.full_tensor()  # one tensor after the other, to save memory
    if isinstance(content, torch.Tensor):
        return content.cpu() if dist.get_rank() == 0 else None
    return content


def shard(tensor, like):
    """This rank's shard of a whole tensor on the CPU that belongs to the parameter `like`."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor.clone()  # a buffer, or the optimizer's count of steps
    mesh, result = like.device_mesh, torch.empty_like(like)
    chunks = tensor.chunk(mesh.shape[-1])  # of the first dimension, as by fully_shard
    chunks += (tensor[:0],) * mesh.shape[-1]  # a small tensor has fewer chunks than there are ranks
    result.to_local().copy_(chunks[mesh.get_local_rank("shard")])
    return result


def save_checkpoint(args, progress, model, optimizer, scheduler):
    started = time.perf_counter()
    checkpoint = gather({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    own = {"flags": flags(args), "progress": asdict(progress), "scheduler": scheduler.state_dict()}
    if dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "model.pt").unlink(missing_ok=True)  # only a finished run has one
        with open(args.output / "metrics.csv", "w", newline="") as file:
            if progress.metrics:  # columns of the newest row: rows from before a resume may differ
                writer = csv.DictWriter(file, progress.metrics[-1], extrasaction="ignore")
                writer.writeheader()
                writer.writerows(progress.metrics)
        save(own | checkpoint, args.output / "last.pt")
    dist.barrier()  # wait for rank 0 with --timeout, which the groups of --shard do not have
    now = time.perf_counter()
    return now + max(args.checkpoint_minutes * 60, 30 * (now - started))  # when to save again


def load_checkpoint(args, model, optimizer, scheduler):
    """With --resume, restore the run in --output. Returns its progress, or that of a new run."""
    path = args.output / "last.pt"
    if not args.resume or not path.exists():
        return Progress()
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    own = model.state_dict()
    model.load_state_dict({name: shard(t, own[name]) for name, t in checkpoint["model"].items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, tensors in checkpoint["optimizer"]["state"].items():
        tensors.update({k: shard(t, parameters[i]) for k, t in tensors.items() if t is not None})
    for saved, group in zip(checkpoint["optimizer"]["param_groups"], optimizer.param_groups):
        saved["fused"] = group.get("fused")  # another script may have written it
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    return Progress(**checkpoint["progress"])


def flags(args):
    """The flags that must be the same when the run is resumed."""
    fixed = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    return fixed | {"dataset": Path(args.dataset).name}  # its folder may be moved


def check_flags(args, world_size=1, rank=0):
    """Refuse impossible flags, and to resume a run with other flags or fewer epochs."""
    for name in ("image_size", "repeat", "batch_size", "accumulate", "log_every"):
        if getattr(args, name) < 1:
            stop(f"--{name.replace('_', '-')} must be at least 1", rank)
    for name in ("lr", "warmup_steps", "epochs", "clip_norm", "workers", "checkpoint_minutes"):
        if getattr(args, name) < 0:
            stop(f"--{name.replace('_', '-')} must not be negative", rank)
    if args.batch_size % (world_size * args.accumulate):
        stop("--batch-size must be a multiple of --accumulate times the number of processes", rank)
    has_run = args.epochs > 0 and any(args.output.glob("*.pt"))  # last.pt or model.pt
    if has_run and not (args.resume or args.overwrite):
        stop(f"{args.output} has a run: --resume continues it, --overwrite replaces it", rank)
    path = args.output / "last.pt"
    if not has_run or not args.resume or not path.exists():
        return
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if "flags" not in checkpoint:
        stop(f"{path} was written by an older version of this script", rank)
    for name, new in flags(args).items():
        old = checkpoint["flags"].get(name, new)  # no entry: the run's script had no such flag
        if old != new:
            flag = f"--{name.replace('_', '-')}"
            word = "without" if old in ("False", "None") else "with"  # it was not given
            value = "" if old in ("True", "False", "None") else f" {old}"
            stop(f"{path} was started {word} {flag}{value}: use the same flags", rank)
    epoch, step = checkpoint["progress"]["epoch"], checkpoint["progress"]["step"]
    if (epoch, step) > (args.epochs, 0):
        stop(f"--epochs {args.epochs}: {path} already has {epoch} epochs and {step} steps", rank)


# ---- Main ----------------------------------------------------------------------------------------
def init_distributed(args, rank, world_size, local_rank, init_method):
    """Join the other processes. Returns this process's device."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(local_rank)  # or all processes would use GPU 0
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # NCCL for CUDA, Gloo for the CPU
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=None if args.device == "cpu" else device,  # or NCCL guesses the GPU
    )
    name = f"{device}, {torch.cuda.get_device_name()}" if args.device == "cuda" else device
    reports = [None] * world_size  # all_gather_object fills it, one entry per rank
    dist.all_gather_object(reports, f"rank {rank}: host {socket.gethostname()}, device {name}")
    if rank == 0:
        print(f"torch {torch.__version__}, backend {dist.get_backend()}")
        print(*reports, sep="\n", flush=True)
    return device


def shard_model(args, model, device, world_size, rank):
    """Shard each parameter over the GPUs (FSDP: Zhao et al., VLDB 2023)."""
    checksums = [None] * world_size
    checksum = sum(p.detach().sum(dtype=torch.float64).item() for p in model.parameters())
    dist.all_gather_object(checksums, checksum)
    if not all(math.isclose(checksum, other, rel_tol=1e-6) for other in checksums):
        stop("build_model gives different weights on different ranks: load files on all", rank)
    blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]
    count = len(list(model.parameters()))
    shape, names = (world_size,), ("shard",)
    if 0 < args.shard < world_size:  # several copies of the model (HSDP)
        shape, names = (world_size // args.shard, args.shard), ("copy", "shard")
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    has_batch_norm = any("BatchNorm" in type(module).__name__ for module in model.modules())
    if args.amp and args.device != "cpu" and not has_batch_norm:  # gather in bfloat16: less memory
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if args.compile:
        for module in blocks if blocks else [model]:  # without FSDP2's hooks, which break a graph
            module.forward = torch.compile(module.forward, dynamic=False)
    model.to(memory_format=torch.contiguous_format)  # fully_shard supports no other
    for block in reversed(blocks):  # inner ones before outer ones
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)  # everything else
    if len(list(model.parameters())) > count:
        stop("a block shares a weight with another, or with the rest: change BLOCKS", rank)
    if rank == 0:
        print(f"{len(blocks)} blocks; each copy of the model on {mesh.shape[-1]} ranks")


@record  # the traceback of the rank that failed appears in torchrun's summary
def main(args):
    rank = int(os.environ["RANK"])  # set by torchrun: number of this process, over all machines
    local_rank = int(os.environ["LOCAL_RANK"])  # number on its machine: the GPU that it uses
    world_size = int(os.environ["WORLD_SIZE"])  # count of all processes, one per GPU
    torchrun_pid = os.getppid()  # after kill -9 of torchrun, this process would live on
    device = init_distributed(args, rank, world_size, local_rank, "env://")  # uses MASTER_ADDR
    if args.epochs == 0:
        dist.destroy_process_group()
        return
    torch.set_float32_matmul_precision("high")  # allow TF32
    torch.backends.cudnn.benchmark = True  # search for the fastest convolution algorithms

    # Data: rank 0 loads first, as it may download; then one process per machine; then the others
    if rank == 0:
        train_set, test_set, classes = load_data(args)
    dist.barrier()
    if local_rank == 0 and rank > 0:
        train_set, test_set, classes = load_data(args)
    dist.barrier()
    if local_rank > 0:
        train_set, test_set, classes = load_data(args)
    steps_per_epoch = len(train_set) // args.batch_size  # the last, incomplete batch is not used
    if steps_per_epoch == 0:
        stop(f"--batch-size: the training set has only {len(train_set)} samples", rank)
    rank_batch = args.batch_size // world_size
    micro_batch = rank_batch // args.accumulate
    sampler = EpochSampler(train_set, args.seed, rank, world_size)
    train_loader = make_loader(args, train_set, micro_batch, sampler, device, keep_workers=True)
    test_indices = range(rank, len(test_set), world_size)  # each sample once, on one of the ranks
    test_loader = make_loader(args, test_set, micro_batch, test_indices, device)
    passes = math.ceil(math.ceil(len(test_set) / world_size) / micro_batch)  # of the rank with most
    spare = default_collate([train_set[0]])

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args, train_set[0][0], classes)  # on the CPU: a GPU gets only its shard
    shard_model(args, model, device, world_size, rank)
    criterion = torch.compile(loss_function, dynamic=False) if args.compile else loss_function
    optimizer, scheduler = build_optimizer(args, model, args.epochs * steps_per_epoch)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    progress = load_checkpoint(args, model, optimizer, scheduler)
    starts = [None] * world_size
    dist.all_gather_object(starts, (progress.epoch, progress.step))  # waits until all have loaded
    if len(set(starts)) > 1:
        stop("not all processes see the same last.pt: put --output on a disk that all share", rank)
    if progress.epoch == progress.step == 0:  # a new run: what can fail later should fail now
        if rank == 0:
            (args.output / "last.pt").unlink(missing_ok=True)  # the old run's, after --overwrite
        with autocast, torch.compiler.set_stance("force_eager"):
            evaluate(args, model, islice(test_loader, 2), min(2, passes), spare, device)
    next_save = save_checkpoint(args, progress, model, optimizer, scheduler)  # finds a full disk
    if rank == 0:
        done = f"{progress.epoch} epochs and {progress.step} steps are done"
        print(f"{args.output}: {done}", flush=True)

    # Training
    torch.manual_seed(args.seed + rank)  # different random numbers in each rank's loader workers
    for epoch in range(progress.epoch, args.epochs):
        sampler.set_epoch(epoch, start=progress.step * rank_batch)
        batches = iter(train_loader)
        loss_sum = torch.zeros((), device=device)  # since the last progress line
        started = time.perf_counter() - progress.seconds
        for step in range(progress.step + 1, steps_per_epoch + 1):
            if (step - 1) % args.log_every == 0:
                # A resumed run may start at this step, and must draw the same random numbers.
                run_step = epoch * steps_per_epoch + step
                torch.manual_seed(args.seed + run_step * world_size + rank)  # differs per rank
            for micro_step in range(args.accumulate):
                inputs, labels = prepare(args, next(batches), device)
                if args.augment:
                    inputs, labels = augment(inputs, labels)
                model.set_requires_all_reduce(micro_step == args.accumulate - 1)  # between copies
                with autocast:
                    loss = criterion(model(inputs), labels) / args.accumulate
                loss.backward()
                loss_sum += loss.detach()
            if args.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

            if step % args.log_every == 0 or step == steps_per_epoch:
                if dist.is_torchelastic_launched() and os.getppid() != torchrun_pid:
                    stop("torchrun has been killed", rank)  # a resumed run may already be writing
                dist.all_reduce(loss_sum)  # the sum over all ranks
                progress.loss_sum += loss_sum.item() / world_size  # .item() waits for the GPU
                loss_sum.zero_()
                progress.step, progress.seconds = step, time.perf_counter() - started
                if rank == 0:
                    print(progress_line(args, progress, steps_per_epoch), flush=True)
                weight_norm = nn.utils.get_total_norm(model.parameters()).full_tensor()
                if not math.isfinite(progress.loss_sum) or not weight_norm.isfinite():
                    stop(f"the loss is not finite; {args.output}/last.pt is still good", rank)
                is_due = torch.tensor(int(time.perf_counter() >= next_save), device=device)
                dist.broadcast(is_due, 0)  # all ranks save together, by rank 0's clock
                if is_due.item():
                    next_save = save_checkpoint(args, progress, model, optimizer, scheduler)

        for buffer in model.buffers():  # batch norm's averages: all ranks take those of rank 0
            dist.broadcast(buffer, 0)
        with autocast, torch.compiler.set_stance("force_eager"):
            sums = evaluate(args, model, test_loader, passes, spare, device)
        dist.all_reduce(sums)
        if not sums.isfinite().all():
            stop(f"the test loss is not finite; {args.output}/last.pt is still good", rank)
        epoch_line = finish_epoch(args, progress, sums)
        if rank == 0:
            print(epoch_line, flush=True)
        next_save = save_checkpoint(args, progress, model, optimizer, scheduler)
    weights = gather(model.state_dict())
    if rank == 0:
        save(weights, args.output / "model.pt")
        print(f"finished: {args.output / 'model.pt'}")
    dist.barrier()  # wait for rank 0: once a process has exited, torchrun cannot restart the run
    dist.destroy_process_group()
    time.sleep(1)  # on a CPU, Gloo's threads must end before Python does (pytorch/pytorch#179291)


if __name__ == "__main__":
    args = parser.parse_args()
    if "RANK" not in os.environ:
        stop(f"start it with: torchrun --standalone --nproc-per-node 2 {parser.prog}")
    world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    check_flags(args, world_size, local_rank)  # one message per machine
    if args.device != "cpu" and torch.accelerator.device_count() <= local_rank:
        stop(f"more processes than the {torch.accelerator.device_count()} GPUs")
    if args.shard < 0 or args.shard and world_size % args.shard:
        stop("the number of processes must be a multiple of --shard", local_rank)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":  # set by torchrun --max-restarts
        if not args.resume:
            stop("--max-restarts needs --resume, or each restart would start over", local_rank)
        if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":  # or restarts can hang
            stop("--max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 exported", local_rank)
    main(args)

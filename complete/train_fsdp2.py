"""Train a model that is too large for one GPU with FSDP2: each GPU holds a shard of it.

torchrun --standalone --nproc-per-node gpu complete/train_fsdp2.py       # all GPUs of a machine
torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node gpu complete/train_fsdp2.py

Like complete/train_ddp.py; each resumes the other's checkpoints. BLOCKS names your layers.
"""

import argparse
import csv
import functools
import json
import math
import os
import socket
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate
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
add("--image-size", type=int, default=32, help="side to crop images to; smaller ones keep theirs")
add("--augment", action="store_true", help="random crops and flips")
several_outputs = ["googlenet", "inception_v3"]  # in training: loss_function expects one
names = ["net", "mlp", *models.list_models(module=models, exclude=several_outputs)]
add("--model", choices=names, metavar="NAME", default="net", help="net, mlp, or torchvision's")
add("--pretrained", action="store_true", help="start from torchvision's ImageNet weights")
add("--init", default="", metavar="FILE", help="start from another run's model.pt or last.pt")
add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="sgd has momentum 0.9")
add("--lr", type=float, default=0.001, help="learning rate")
add("--weight-decay", type=float, default=0.0, help="usual: 1e-4 with sgd, 0.05 with adamw")
add("--lr-schedule", choices=("constant", "cosine"), default="constant", help="see build_optimizer")
add("--warmup-steps", type=int, default=0, help="steps of linear learning rate warm-up")
add("--epochs", type=int, default=10, help="0: print the devices, and end")
add("--batch-size", type=int, default=64, help="global batch size: samples per step, over all GPUs")
add("--accumulate", type=int, default=1, help="micro-batches per step: saves memory")
add("--clip-norm", type=float, default=0.0, help="maximum norm of the gradient; 0: no clipping")
add("--seed", type=int, default=76, help="of weights, sample order and random numbers")
gpu = torch.accelerator.current_accelerator(check_available=True)
devices = ["cpu"] if gpu is None or gpu.type == "mps" else [gpu.type, "cpu"]  # no mps
# torchrun, the parent of all ranks, may have bound each to some of its own cores (--numa-binding).
owner = os.getppid() if "LOCAL_WORLD_SIZE" in os.environ else 0  # 0: this process
cores = len(os.sched_getaffinity(owner)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
add("--device", choices=devices, default=devices[0])
add("--workers", type=int, default=min(16, cores), help="loader processes per training process")
add("--amp", action="store_true", help="mixed precision: bfloat16 (DDP on old GPUs: float16)")
add("--compile", action="store_true", help="torch.compile")
add("--output", type=Path, default=Path("runs", Path(__file__).stem), help="folder of the run")
group = parser.add_mutually_exclusive_group()
group.add_argument("--resume", action="store_true", help="continue the run in --output, if any")
group.add_argument("--overwrite", action="store_true", help="replace the run in --output")
add("--checkpoint-minutes", type=float, default=5, help="time between checkpoints in an epoch")
add("--log-every", type=int, default=100, help="steps between two progress lines")
add("--timeout", type=int, default=1800, help="seconds to wait for another process")
MAY_CHANGE = ["epochs", "accumulate", "device", "workers", "amp", "compile", "data_dir", "output"]
MAY_CHANGE += ["resume", "overwrite", "checkpoint_minutes", "log_every", "timeout"]
add("--shard", type=int, default=0, help="GPUs that share one copy of the model; 0: all GPUs")
MAY_CHANGE += ["shard"]


# ---- The model: put yours here -------------------------------------------------------------------
# The code below uses build_model, BLOCKS, loss_function, count, metrics and build_optimizer.
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


def build_model(args, inputs, classes):
    """A network for a batch of the shape of `inputs`, (N, C, H, W)."""
    channels, side = inputs.shape[1:3]
    if args.model == "net":
        return Net(channels, side, classes)
    if args.model == "mlp":
        hidden = nn.Linear(channels * side * side, 512)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(512, classes))
    model = models.get_model(args.model, num_classes=classes)
    return model.to(memory_format=torch.channels_last)  # which tensor cores prefer


# The classes of the layers that repeat. A GPU gathers the weights of one such layer at a time.
BLOCKS = (models.resnet.BasicBlock, models.resnet.Bottleneck, nn.TransformerEncoderLayer)
BLOCKS += (models.vision_transformer.EncoderBlock, models.convnext.CNBlock)


def loss_function(outputs, labels):
    """The mean over the labels: main averages it over micro-batches (and over GPUs)."""
    return F.cross_entropy(outputs, labels)


def count(outputs, labels):
    """What `metrics` needs of a batch: numbers or tensors that are summed over the test set.
    "labels", how many there are, is needed for the mean test loss."""
    return {"labels": labels.numel(), "correct": (outputs.argmax(1) == labels).sum()}


def metrics(sums):
    """Columns of metrics.csv, from the sums of `count` over the test set (float64 tensors)."""
    return {"test_accuracy": sums["correct"] / sums["labels"]}


def build_optimizer(args, model, steps):
    """The optimizer and its learning rate schedule, which is stepped `steps` times in the run."""
    # Weight decay would pull batch norm's scales and all biases, which have one dimension, to 0.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    settings = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, fused=True, **settings)  # SGD cannot, with shards
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9, **settings)

    def factor(step):  # what --lr is multiplied by
        warmup = min(1, (step + 1) / (args.warmup_steps + 1))
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        return warmup * cosine if args.lr_schedule == "cosine" else warmup

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- The data: put yours here --------------------------------------------------------------------
# The code below calls load_data and prepare.
def load_data(args):
    """Training set, test set, number of classes. A sample is a uint8 image (C, H, W) and an int.
    A TensorDataset is copied to the device as a whole; any other Dataset gets a DataLoader."""
    if args.dataset == "synthetic":
        return synthetic(10_000, args.image_size, 1), synthetic(2_000, args.image_size, 2), 10
    if args.dataset in ("cifar10", "fashion-mnist"):
        return load_torchvision(args, train=True), load_torchvision(args, train=False), 10
    folder = Path(args.dataset)
    if (folder / "classes.json").exists():  # written by pack_images.py
        classes = json.loads((folder / "classes.json").read_text())
        return PackedImages(folder / "train"), PackedImages(folder / "test"), len(classes)
    if not (folder / "train").is_dir() or not (folder / "test").is_dir():
        parser.error(f"--dataset {folder}: neither a known name nor a folder with train/ and test/")
    # A margin for random crops: 256 pixels for 224. Tiny images would only be blurred.
    side = args.image_size * 8 // 7 if args.image_size >= 64 else args.image_size
    transform = v2.Compose([v2.PILToTensor(), v2.Resize(side), v2.CenterCrop(side)])
    loader = functools.partial(load_image, side=side)
    train_set = datasets.ImageFolder(folder / "train", transform, loader=loader)
    test_set = datasets.ImageFolder(folder / "test", transform, loader=loader)
    if test_set.classes != train_set.classes:
        parser.error(f"--dataset {folder}: test/ needs the same sub-folders (classes) as train/")
    return train_set, test_set, len(train_set.classes)


def load_image(path, side):
    """The image in a file, upright and in RGB. A large one may be reduced, not below `side`."""
    with Image.open(path) as image:
        image.draft("RGB", (side, side))  # decodes a large JPEG at 1/2, 1/4 or 1/8 of its size
        image = ImageOps.exif_transpose(image)  # as the camera was held
        if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip to 8
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")


class PackedImages(Dataset):
    """Images that pack_images.py has decoded: PATH.bin has their pixels, PATH.npy their classes."""

    def __init__(self, path):
        self.path, self.targets = f"{path}.bin", np.load(f"{path}.npy")
        self.size = os.path.getsize(self.path) // len(self.targets)  # bytes of an image
        self.side = math.isqrt(self.size // 3)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        pixels = np.fromfile(self.path, np.uint8, self.size, offset=i * self.size)
        return torch.from_numpy(pixels).view(3, self.side, self.side), int(self.targets[i])


def load_torchvision(args, train):
    kind = datasets.CIFAR10 if args.dataset == "cifar10" else datasets.FashionMNIST
    try:
        dataset = kind(args.data_dir, train, download=True)
    except (OSError, RuntimeError) as error:
        parser.error(f"no download ({str(error).splitlines()[0]}): put the files into --data-dir")
    images = torch.as_tensor(dataset.data)  # (N, H, W) or (N, H, W, C)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    if args.model not in ("net", "mlp"):
        images = images.expand(-1, 3, -1, -1)  # grey images for torchvision's models
    return TensorDataset(images, torch.as_tensor(dataset.targets))


def synthetic(count, side, seed):
    """`count` images (3, side, side) of ten coarse patterns, with noise."""
    coarse = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = (F.interpolate(coarse, side) * 120).byte()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randint(136, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return TensorDataset(images.add_(patterns[labels]), labels)


def prepare(args, batch, device, train=False):
    """Copy a batch to the device. Images are cropped to --image-size, at random in training."""
    images, labels = [tensor.to(device, non_blocking=tensor.is_pinned()) for tensor in batch]
    if images.dtype != torch.uint8:
        return images, labels
    mean, std = normalization(args.model if args.pretrained else None, device)
    images = (images - mean) / std
    size = [min(args.image_size, side) for side in images.shape[2:]]
    if train and args.augment:
        images = random_crops(images, size)
    elif list(images.shape[2:]) != size:
        images = v2.functional.center_crop(images, size)
    # The weights of a sharded model cannot be channels_last, which tensor cores prefer.
    return images.contiguous(memory_format=torch.channels_last), labels


@functools.cache  # copied to the device once: a copy in each step would wait for the GPU
def normalization(pretrained, device):
    """Mean and standard deviation (C or 1, 1, 1) of pixels from 0 to 255, on the device."""
    mean, std = [115.0], [58.0]  # of ImageNet, over the channels
    if pretrained:
        preset = models.get_model_weights(pretrained).DEFAULT.transforms()
        mean, std = ([255 * x for x in values] for values in (preset.mean, preset.std))
    return [torch.tensor(values, device=device).view(-1, 1, 1) for values in (mean, std)]


def random_crops(images, size):
    """A random part of each image (N, C, H, W), resized to `size` (H, W); half are flipped."""
    count, channels = images.shape[:2]
    zoom = torch.empty(count, device=images.device).uniform_(0.6, 1)  # part of the image's side
    flip = torch.randint(2, (count,), device=images.device) * 2 - 1
    shift = torch.empty(count, 2, device=images.device).uniform_(-1, 1)
    transforms = torch.zeros(count, 2, 3, device=images.device)  # see F.affine_grid
    transforms[:, 0, 0], transforms[:, 1, 1] = zoom * flip, zoom
    transforms[:, :, 2] = shift * (1 - zoom)[:, None]
    grid = F.affine_grid(transforms, (count, channels, *size), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


# ---- Loaders and evaluation ----------------------------------------------------------------------
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
        for batch in indices.split(self.batch_size):
            yield [tensor.index_select(0, batch) for tensor in self.tensors]


def make_loader(args, dataset, batch_size, sampler, device):
    if type(dataset) is TensorDataset:
        return TensorLoader([tensor.to(device) for tensor in dataset.tensors], batch_size, sampler)
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options["pin_memory"] = device.type in ("cuda", "xpu")
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


@torch.no_grad()
def evaluate(args, model, loader, passes, spare, device):
    """Sums over all batches: of the losses, and of what `count` returns. A forward pass
    communicates, so every rank makes `passes`, with the batch `spare` when its own are used up."""
    model.eval()
    dtype = torch.float32 if device.type == "xpu" else torch.float64  # not on every xpu
    sums = {}
    for batch in loader:
        inputs, labels = prepare(args, batch, device)
        outputs = model(inputs)
        counts = count(outputs, labels)
        counts["loss"] = loss_function(outputs, labels) * counts["labels"]
        for name, value in counts.items():
            sums[name] = sums.get(name, 0) + torch.as_tensor(value).to(dtype)
        passes -= 1
    for _ in range(passes):
        model(prepare(args, spare, device)[0])
    model.train()
    return {name: value.to(device) for name, value in sums.items()}


# ---- Progress and checkpoints --------------------------------------------------------------------
@dataclass
class Progress:
    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch
    loss_sum: float = 0.0  # sum of the losses of these steps
    seconds: float = 0.0  # training time of these steps
    metrics: list = field(default_factory=list)  # a dictionary for each finished epoch


def progress_line(args, progress, steps_per_epoch, loss, lr, norm):
    """`loss` is the mean since the last line; `norm`, the norm of the last step's gradient."""
    speed = progress.step * args.batch_size / progress.seconds
    steps_left = (args.epochs - progress.epoch) * steps_per_epoch - progress.step
    minutes_left = steps_left * args.batch_size / speed / 60
    place = f"epoch {progress.epoch + 1}/{args.epochs} step {progress.step}/{steps_per_epoch}"
    state = f"loss {loss:.4f} lr {lr:.2e} gradient norm {norm:.2e}"
    return f"{place} {state} {speed:.0f} samples/s {minutes_left:.1f} min left"


def finish_epoch(args, progress, sums):
    """Add a row to the metrics and return its line; `progress` moves to the next epoch."""
    sums = {name: value.cpu() for name, value in sums.items()}
    memory = torch.accelerator.max_memory_allocated() if args.device != "cpu" else 0
    row = {
        "epoch": progress.epoch + 1,
        "train_loss": progress.loss_sum / progress.step,
        "test_loss": (sums["loss"] / sums["labels"]).item(),
        **{name: float(value) for name, value in metrics(sums).items()},
        "seconds": progress.seconds,  # without evaluation
        "samples_per_second": progress.step * args.batch_size / progress.seconds,
        "peak_memory_mib": memory / 2**20,
    }
    progress.metrics.append(row)
    progress.epoch += 1
    progress.step, progress.loss_sum, progress.seconds = 0, 0.0, 0.0
    shown = [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in list(row)[1:-3]]
    return f"epoch {row['epoch']}: {' '.join(shown)} {row['seconds']:.1f} s"


def save(content, path):
    """torch.save. If the process is killed while it writes, the old file survives."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # without it a power failure could leave a new, empty file
    # Fails now if a resume could not read the file, say because of a Path. Reads no weights.
    torch.load(f"{path}.tmp", map_location="cpu", mmap=True, weights_only=True)
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
    """This rank's shard of a whole CPU tensor, one that belongs to the parameter `like`."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor.clone()  # a buffer, or the optimizer's count of steps
    mesh, result = like.device_mesh, torch.empty_like(like)
    chunks = tensor.chunk(mesh.shape[-1])  # of the first dimension, as by fully_shard
    chunks += (tensor[:0],) * mesh.shape[-1]  # a small tensor has fewer chunks than there are ranks
    result.to_local().copy_(chunks[mesh.get_local_rank("shard")])
    return result


def save_checkpoint(args, progress, state):
    """Write last.pt; `state` maps names to what has a state_dict: the model, the optimizer, ...
    After an epoch with the lowest test loss so far, write best.pt too. All ranks must call it.
    Returns the time of the next one: no more than a thirtieth of the time is spent saving."""
    started = time.perf_counter()
    checkpoint = {name: gather(part.state_dict()) for name, part in state.items()}
    checkpoint |= {"flags": fixed_flags(args), "progress": asdict(progress), "scaler": {}}
    for group in checkpoint["optimizer"]["param_groups"]:
        group["fused"] = True  # as in train_ddp.py, which may resume it
    if dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "model.pt").unlink(missing_ok=True)  # only a finished run has one
        losses = [row["test_loss"] for row in progress.metrics]
        if not losses:
            (args.output / "best.pt").unlink(missing_ok=True)  # of a run that --overwrite replaces
        elif progress.step == 0 and losses[-1] == min(losses):
            save(checkpoint["model"], args.output / "best.pt")
        with open(args.output / "metrics.csv", "w", newline="") as file:
            if progress.metrics:  # columns of the newest row: rows from before a resume may differ
                writer = csv.DictWriter(file, progress.metrics[-1], extrasaction="ignore")
                writer.writeheader()
                writer.writerows(progress.metrics)
        save(checkpoint, args.output / "last.pt")
    dist.barrier()  # wait for rank 0
    now = time.perf_counter()
    return now + max(args.checkpoint_minutes * 60, 30 * (now - started))


def load_checkpoint(args, state):
    """With --resume, restore the run in --output. Returns its progress, or that of a new run."""
    path = args.output / "last.pt"
    if not args.resume or not path.exists():
        return Progress()
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for name, part in state.items():
        saved = checkpoint[name]
        if isinstance(part, nn.Module):
            own = part.state_dict()
            saved = {key: shard(tensor, own[key]) for key, tensor in saved.items()}
        if isinstance(part, torch.optim.Optimizer):
            parameters = [p for group in part.param_groups for p in group["params"]]
            for i, entry in saved["state"].items():
                entry |= {k: shard(t, parameters[i]) for k, t in entry.items() if t is not None}
            for old, new in zip(saved["param_groups"], part.param_groups):
                old["fused"] = new.get("fused")  # train_ddp.py may have written it
        part.load_state_dict(saved)
    return Progress(**checkpoint["progress"])


def initialize(args, model):
    """Load the weights that --pretrained or --init asks for: a new run starts from them."""
    if args.init:
        weights = torch.load(args.init, map_location="cpu", mmap=True, weights_only=True)
        model.load_state_dict(weights.get("model", weights))  # of a last.pt, or a model.pt
    if args.pretrained:
        weights = models.get_model(args.model, weights="DEFAULT").state_dict()
        own = model.state_dict()  # the last layer has 1000 classes in `weights`: it stays random
        fitting = {name: w for name, w in weights.items() if w.shape == own[name].shape}
        if len(weights) - len(fitting) > 2:  # more than the last layer's weight and bias
            parser.error(f"--pretrained: {args.model}'s weights do not fit: use another model")
        model.load_state_dict(fitting, strict=False)


def fixed_flags(args):
    """The flags that must be the same when the run is resumed."""
    fixed = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    return fixed | {"dataset": Path(args.dataset).name}  # its folder may be moved


def check_flags(args, world_size=1):
    """Refuse what cannot work, before anything is written."""
    for name in ("image_size", "batch_size", "accumulate", "log_every", "timeout"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("lr", "weight_decay", "warmup_steps", "epochs", "clip_norm", "workers"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    if args.epochs > 0 and args.batch_size % (world_size * args.accumulate):
        parser.error("--batch-size must be a multiple of --accumulate times the processes")
    if args.pretrained and (args.init or args.model in ("net", "mlp")):
        parser.error("--pretrained needs one of torchvision's models as --model, and no --init")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if "RANK" not in os.environ and int(tasks) > 1:  # each would be rank 0, in one folder
        parser.error(f"{tasks} processes without ranks: start torchrun, once per machine")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":  # torchrun has --max-restarts
        if not args.resume or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
            parser.error("--max-restarts needs --resume, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    has_run = any(args.output.glob("*.pt")) or any(args.output.glob("epoch-*"))  # any script's
    if args.epochs == 0 or args.overwrite or not has_run:
        return
    if not args.resume:
        parser.error(f"{args.output} has a run: --resume continues it, --overwrite replaces it")
    path, checkpoint = args.output / "last.pt", {}
    if path.exists():
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not {"flags", "progress", "scaler"} <= checkpoint.keys():
        parser.error(f"{args.output} has a run of another script or version: use another --output")
    fixed = fixed_flags(args)
    for name, old in checkpoint["flags"].items():  # flags that it lacks are not compared
        new = fixed.get(name, False)  # False: this script does not have it
        if old != new:
            flag = name.replace("_", "-")
            parser.error(f"{path} was started with --{flag} {old}, not {new}: use the same flags")
    epoch, step = checkpoint["progress"]["epoch"], checkpoint["progress"]["step"]
    if epoch + (step > 0) > args.epochs:
        parser.error(f"--epochs {args.epochs}: {path} already has {epoch} epochs and {step} steps")


# ---- Main: the training loop ---------------------------------------------------------------------
def init_distributed(args, rank, world_size, local_rank):
    """Join the other processes. Returns this process's device."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(local_rank)  # or all processes would use GPU 0
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # NCCL for CUDA, Gloo for the CPU
        store=None if "RANK" in os.environ else dist.HashStore(),  # no other process to find
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
        raise SystemExit("the ranks have different weights: load the same file on all of them")
    blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]
    count = len(list(model.parameters()))
    mesh = dist.init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if 0 < args.shard < world_size:  # several copies of the model (HSDP): a row of ranks has one
        ranks = torch.arange(world_size).view(-1, args.shard)
        timeout = timedelta(seconds=args.timeout)
        rows, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
        columns, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
        names = ("copy", "shard")
        mesh = DeviceMesh.from_group([columns, rows], device.type, ranks, mesh_dim_names=names)
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
        raise SystemExit("a block shares a weight with another, or with the rest: change BLOCKS")
    if rank == 0:
        print(f"{len(blocks)} blocks; each copy of the model on {mesh.shape[-1]} ranks")


@record  # the traceback of the rank that failed appears in torchrun's summary
def main(args):
    # torchrun sets these. Without it, this is the only process.
    rank = int(os.environ.get("RANK", 0))  # number of this process, over all machines
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # number on its machine: the GPU that it uses
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # count of all processes, one per GPU
    torchrun_pid = os.getppid()
    device = init_distributed(args, rank, world_size, local_rank)
    if args.epochs == 0:
        dist.destroy_process_group()
        return
    torch.set_float32_matmul_precision("high")  # allow TF32
    torch.backends.cudnn.benchmark = torch.version.hip is None  # on ROCm it searches for minutes

    # Data: rank 0 loads first, as it may download; then one process per machine; then the others.
    for is_my_turn in (rank == 0, local_rank == 0 and rank > 0, local_rank > 0):
        if is_my_turn:
            train_set, test_set, classes = load_data(args)
            if len(train_set) < args.batch_size:
                parser.error(f"--batch-size: the training set has only {len(train_set)} samples")
            if len(test_set) < world_size:
                parser.error(f"only {len(test_set)} test samples, for {world_size} processes")
        dist.barrier()
    steps_per_epoch = len(train_set) // args.batch_size  # the last, incomplete batch is not used
    rank_batch = args.batch_size // world_size
    micro_batch = rank_batch // args.accumulate
    sampler = EpochSampler(train_set, args.seed, rank, world_size)
    train_loader = make_loader(args, train_set, micro_batch, sampler, device)
    test_indices = range(rank, len(test_set), world_size)  # each sample once, on one of the ranks
    test_loader = make_loader(args, test_set, micro_batch, test_indices, device)
    sample = default_collate([test_set[0]])  # a batch of one
    passes = math.ceil(math.ceil(len(test_set) / world_size) / micro_batch)  # of the rank with most

    # Model: on the CPU, with the same weights on all ranks. A GPU gets only its shard.
    torch.manual_seed(args.seed)
    model = build_model(args, prepare(args, sample, device)[0], classes)
    is_new = not (args.resume and (args.output / "last.pt").exists())
    for is_my_turn in (rank == 0, rank > 0):  # rank 0 first, as it may download
        if is_new and is_my_turn:
            initialize(args, model)
        dist.barrier()
    shard_model(args, model, device, world_size, rank)
    criterion = torch.compile(loss_function, dynamic=False) if args.compile else loss_function
    optimizer, scheduler = build_optimizer(args, model, args.epochs * steps_per_epoch)
    autocast = torch.autocast(device.type, torch.bfloat16) if args.amp else nullcontext()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = load_checkpoint(args, state)
    starts = [None] * world_size
    dist.all_gather_object(starts, (progress.epoch, progress.step))  # waits until all have loaded
    if len(set(starts)) > 1:
        raise SystemExit("the processes see different files: put --output on a shared disk")
    with autocast, torch.compiler.set_stance("force_eager"):  # what would fail should fail now
        evaluate(args, model, [sample], 1, sample, device)
    next_save = save_checkpoint(args, progress, state)  # finds a full disk now
    if rank == 0:
        done = f"{progress.epoch} epochs and {progress.step} steps"
        print(f"{args.output}: {done} are done", flush=True)

    for epoch in range(progress.epoch, args.epochs):
        sampler.set_epoch(epoch, start=progress.step * rank_batch)
        torch.manual_seed(args.seed + epoch * world_size + rank)  # for the loader's workers
        batches = iter(train_loader)
        loss_sum = torch.zeros((), device=device)  # since the last progress line
        started = time.perf_counter() - progress.seconds
        for step in range(progress.step + 1, steps_per_epoch + 1):
            if (step - 1) % args.log_every == 0:
                # A resumed run may start at this step, and must draw the same random numbers.
                run_step = epoch * steps_per_epoch + step
                torch.manual_seed(args.seed + run_step * world_size + rank)  # differs per rank
            for micro_step in range(args.accumulate):
                inputs, labels = prepare(args, next(batches), device, train=True)
                model.set_requires_all_reduce(micro_step == args.accumulate - 1)  # between copies
                with autocast:
                    loss = criterion(model(inputs), labels)
                if args.accumulate > 1:
                    loss = loss / args.accumulate
                loss.backward()
                loss_sum += loss.detach()
            log = step % args.log_every == 0 or step == steps_per_epoch
            if args.clip_norm or log:
                limit = args.clip_norm or math.inf  # inf: the norm is computed, nothing is clipped
                norm = nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

            if log:
                # After kill -9 of torchrun its ranks would live on, and write beside a resumed run.
                orphaned = dist.is_torchelastic_launched() and os.getppid() != torchrun_pid
                totals = torch.stack([loss_sum, torch.tensor(float(orphaned), device=device)])
                dist.all_reduce(totals)  # the sums over all ranks, which all end together
                loss, orphans = totals.tolist()  # waits for the GPU
                if orphans > 0:
                    raise SystemExit("torchrun was killed")
                loss_sum.zero_()
                progress.loss_sum += loss / world_size
                loss /= world_size * (step - progress.step)  # the mean since the last line
                progress.step, progress.seconds = step, time.perf_counter() - started
                if rank == 0:
                    lr = scheduler.get_last_lr()[0]
                    line = progress_line(args, progress, steps_per_epoch, loss, lr, norm)
                    print(line, flush=True)
                weight_norm = nn.utils.get_total_norm(model.parameters()).full_tensor()
                if not math.isfinite(loss) or not weight_norm.isfinite():
                    raise SystemExit(f"loss or weights not finite: {args.output}/last.pt is good")
                is_due = torch.tensor(int(time.perf_counter() >= next_save), device=device)
                dist.broadcast(is_due, 0)  # all ranks save together, by rank 0's clock
                if is_due.item():
                    next_save = save_checkpoint(args, progress, state)

        for buffer in model.buffers():  # batch norm's averages: all ranks take those of rank 0
            dist.broadcast(buffer, 0)
        with autocast, torch.compiler.set_stance("force_eager"):  # compiled for training only
            sums = evaluate(args, model, test_loader, passes, sample, device)
        for name in sorted(sums):  # in the same order on all ranks
            dist.all_reduce(sums[name])
        if not sums["loss"].isfinite():
            raise SystemExit(f"test loss not finite: {args.output}/last.pt is good")
        epoch_line = finish_epoch(args, progress, sums)
        if rank == 0:
            print(epoch_line, flush=True)
        next_save = save_checkpoint(args, progress, state)
    weights = gather(model.state_dict())
    if rank == 0:
        save(weights, args.output / "model.pt")
        print(f"finished: {args.output / 'model.pt'}")
    dist.barrier()  # wait for rank 0: once a process has exited, torchrun cannot restart the run
    dist.destroy_process_group()
    if args.device == "cpu":
        time.sleep(1)  # Gloo's threads must end before Python does (pytorch/pytorch#179291)


if __name__ == "__main__":
    args = parser.parse_args()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if args.device != "cpu" and torch.accelerator.device_count() <= local_rank:
        parser.error(f"more processes than the {torch.accelerator.device_count()} GPUs")
    if local_rank == 0:  # if it ends, torchrun ends the others, which wait for it: one message
        check_flags(args, int(os.environ.get("WORLD_SIZE", 1)))
        if args.shard < 0 or args.shard and int(os.environ.get("WORLD_SIZE", 1)) % args.shard:
            parser.error("the number of processes must be a multiple of --shard")
        if args.amp and args.device == "cuda":
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                parser.error("--amp needs a GPU with bfloat16 (Ampere or newer) for FSDP2")
    main(args)

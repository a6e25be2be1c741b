# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "torchvision", "numpy"]
# ///
"""Train an image classifier with DDP: one process per GPU, started by the script itself.

python train_ddp_spawn.py    # all GPUs of this machine; on two machines with as many each:
python train_ddp_spawn.py --init-method tcp://HOST:23456 --world-size 2 --rank 0  # or --rank 1
"""

import argparse
import csv
import math
import os
import socket
import tempfile
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from torchvision.transforms import v2


# ---- The model: put yours here -------------------------------------------------------------------
# `main` calls build_model, loss_function, count_correct and build_optimizer.
class Net(nn.Module):
    """The CNN of PyTorch's CIFAR-10 tutorial: (N, channels, side, side) -> (N, classes)."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * (((side - 4) // 2 - 4) // 2) ** 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def build_model(args, image, classes):
    """A network for images shaped as `image` (C, H, W): (N, C * repeat, H, W) -> (N, classes)."""
    channels, side = image.shape[0] * args.repeat, image.shape[1]
    if args.model == "resnet18":
        model = models.resnet18(num_classes=classes)
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        # Tensor cores want channels_last. On mps it is wrong in some versions of torch.
        return model if args.device == "mps" else model.to(memory_format=torch.channels_last)
    if args.model == "mlp":
        hidden = nn.Linear(channels * side * side, 512)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(512, classes))
    return Net(channels, side, classes)


def loss_function(outputs, labels):
    return F.cross_entropy(outputs, labels)  # has to be a mean over the labels


def count_correct(outputs, labels):
    """How many labels are correct (in regression: near enough), and of how many: tensor or int."""
    return (outputs.argmax(1) == labels).sum(), labels.numel()


def build_optimizer(args, model, steps):
    """The optimizer, and the schedule of its learning rate over all `steps` of the run."""
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)

    def factor(step):  # of the learning rate: up in a line, then constant or down a cosine to 0
        warmup = min(1, (step + 1) / (args.warmup_steps + 1))
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        return warmup * (cosine if args.lr_schedule == "cosine" else 1)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- The data: put yours here --------------------------------------------------------------------
# `main` calls load_data, prepare and augment. A sample is a uint8 image (C, H, W) and an int.
TORCHVISION = {"cifar10": datasets.CIFAR10, "fashion-mnist": datasets.FashionMNIST}  # 10 classes


def load_data(args):
    """The training set, the test set and the number of classes."""
    if args.dataset == "synthetic":
        return synthetic(10_000, seed=1), synthetic(2_000, seed=2), 10
    if args.dataset in TORCHVISION:
        return load_torchvision(args, train=True), load_torchvision(args, train=False), 10
    folder = Path(args.dataset)
    if not (folder / "train").is_dir() or not (folder / "test").is_dir():
        parser.error(f"--dataset {folder}: neither a known name nor a folder with train/ and test/")
    transform = v2.Compose([v2.PILToTensor(), v2.Resize((args.image_size, args.image_size))])
    train_set = datasets.ImageFolder(folder / "train", transform)
    test_set = datasets.ImageFolder(folder / "test", transform)
    if test_set.classes != train_set.classes:
        parser.error(f"--dataset {folder}: test/ needs the same sub-folders (classes) as train/")
    return train_set, test_set, len(train_set.classes)


def load_torchvision(args, train):
    try:
        dataset = TORCHVISION[args.dataset](args.data_dir, train, download=True)
    except (OSError, RuntimeError) as error:
        parser.error(f"no download ({str(error).splitlines()[0]}): put the files into --data-dir")
    images = torch.as_tensor(dataset.data)  # (N, H, W) or (N, H, W, C)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return TensorDataset(images, torch.as_tensor(dataset.targets))


def synthetic(count, seed):
    """`count` images (3, 32, 32) of ten coarse patterns with noise added."""
    coarse = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(coarse, 32)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(136, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return TensorDataset((patterns[labels] * 120).byte() + noise, labels)


def prepare(args, batch, device):
    """A batch on the device; uint8 images become normalised floats. (Copies to mps must wait.)"""
    images, labels = (tensor.to(device, non_blocking=args.device != "mps") for tensor in batch)
    if images.dtype == torch.uint8:
        images = images.float().sub_(127.5).div_(64)
    if args.repeat > 1:
        images = images.repeat(1, args.repeat, 1, 1)
    return images, labels


def augment(args, images, run_step, rank=0, world_size=1, part=0):
    """Flip half of the images (N, C, H, W) and shift each by up to 4 pixels."""
    # Draw for the whole batch, take this process's samples (a single one: all), of them one part.
    generator = torch.Generator().manual_seed(args.seed + run_step)
    draws = torch.rand(args.batch_size, 3, generator=generator)[rank::world_size]
    draws = draws.split(len(images))[part]
    maps = torch.eye(2, 3).repeat(len(images), 1, 1)
    maps[:, 0, 0] = torch.where(draws[:, 0] < 0.5, -1.0, 1.0)
    maps[:, :, 2] = ((draws[:, 1:] * 9).floor() - 4) * 2 / images.shape[-1]  # a side is 2 long
    maps = maps.to(images.device, non_blocking=args.device != "mps")
    grid = F.affine_grid(maps, images.shape, align_corners=False)
    return F.grid_sample(images, grid, "nearest", align_corners=False)


# ---- Training: nothing to change here ------------------------------------------------------------
class TensorLoader:
    """A DataLoader for tensors on the device: one index_select a batch, no loop over samples."""

    def __init__(self, tensors, indices, batch_size):
        self.tensors, self.indices, self.batch_size = tensors, indices, batch_size

    def __iter__(self):
        indices = torch.tensor(list(self.indices), device=self.tensors[0].device)
        for i in range(0, len(indices), self.batch_size):
            yield [t.index_select(0, indices[i : i + self.batch_size]) for t in self.tensors]


def make_loader(args, dataset, indices, batch_size, device):
    """Batches of the samples numbered `indices`; with --accumulate each is a part of a batch."""
    batch_size = batch_size // args.accumulate
    # A TensorDataset (no subclass, which may do more than index) is put on the device as a whole.
    # If it does not fit, make a torch.utils.data.StackDataset of its tensors: it stays in memory.
    if type(dataset) is TensorDataset:
        return TensorLoader([tensor.to(device) for tensor in dataset.tensors], indices, batch_size)
    options = {"persistent_workers": args.workers > 0, "pin_memory": device.type in ("cuda", "xpu")}
    return DataLoader(dataset, batch_size, sampler=indices, num_workers=args.workers, **options)


@torch.no_grad()
def evaluate(args, model, loader, device):
    """Over the loader's batches: the sum of the losses, the correct labels, all labels."""
    model.eval()
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32  # not all have it
    sums = torch.zeros(3, device=device, dtype=dtype)  # float32 miscounts from 2**24 labels on
    for batch in loader:
        inputs, labels = prepare(args, batch, device)
        outputs = model(inputs)
        correct, count = count_correct(outputs, labels)
        sums[0] += loss_function(outputs, labels) * count
        sums[1] += correct
        sums[2] += count
    model.train()
    return sums


def set_seed(seed, device):
    """Does what torch.manual_seed does, which takes 0.2 ms: too long for each step."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def main(local_rank, world_size, args):  # spawn calls it with local_rank = 0, 1, 2, ...
    rank = args.rank * args.nproc_per_node + local_rank  # args.rank is the machine's number
    device = init_distributed(args, rank, world_size, local_rank, args.init_method)
    if args.epochs == 0:  # a check of the set-up
        dist.destroy_process_group()
        return
    warnings.filterwarnings("ignore", "Please use the new API")  # torch 2.9, about the next line
    torch.set_float32_matmul_precision("high")  # TF32, where a GPU has it
    torch.backends.cudnn.benchmark = True  # take the fastest convolution: batches have one shape

    # Rank 0 first: it downloads the data or says what is wrong. Then one of each machine, the rest.
    for my_turn in (rank == 0, rank > 0 and local_rank == 0, local_rank > 0):
        if my_turn:
            state = load_checkpoint(args, mmap=args.device != "cpu")
            train_set, test_set, classes = load_data(args)
        dist.barrier()  # each waits here until all have come
    epoch_steps = len(train_set) // args.batch_size  # what is left over trains in another epoch
    if epoch_steps == 0 and local_rank == 0:  # one says it, and spawn ends the others
        parser.error(f"--batch-size: the training set has only {len(train_set)} samples")
    positions = [None] * world_size  # filled with those of all ranks
    dist.all_gather_object(positions, (state["epoch"], state["step"]))
    if len(set(positions)) > 1:
        raise SystemExit("not all see the same last.pt: put --output on a disk that all share")
    batch_size = args.batch_size // world_size  # this rank's part
    sampler = DistributedSampler(train_set, seed=args.seed)  # shuffles, and deals to the ranks
    indices = []  # train_loader keeps this list; each epoch puts its own order into it
    test_indices = range(rank, len(test_set), world_size)  # DistributedSampler would repeat some
    train_loader = make_loader(args, train_set, indices, batch_size, device)
    test_loader = make_loader(args, test_set, test_indices, batch_size, device)

    torch.manual_seed(args.seed)
    model = build_model(args, train_set[0][0], classes).to(device)
    criterion = loss_function
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile(dynamic=False)  # in place: in model.pt the weights keep their names
        criterion = torch.compile(loss_function, dynamic=False)
    # ddp and model share the weights. The backward pass of ddp averages the gradients of all
    # ranks and waits for each of them. Evaluating, clipping and saving take model, which waits for
    # nobody. (gradient_as_bucket_view spares a second copy of the gradients.)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compress_gradients:
        ddp.register_comm_hook(None, bf16_compress_hook)  # None: among all ranks
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    optimizer, scheduler = build_optimizer(args, model, args.epochs * epoch_steps)
    restore_checkpoint(state, model, optimizer, scheduler)
    dist.barrier()  # all have read last.pt: on a network disk it must not be replaced before
    with autocast:
        evaluate(args, model, islice(test_loader, 2), device)  # a bug shows now, not in an hour
    if rank == 0:
        print(f"into {args.output}, from epoch {state['epoch'] + 1}, step {state['step'] + 1} on")
        save_checkpoint(args, state, model, optimizer, scheduler)  # a disk that is full fails now

    # Random transforms in loader workers: after --resume they draw other numbers than at the start.
    torch.manual_seed(args.seed + scheduler.last_epoch * world_size + rank)
    loss_sum = torch.zeros((), device=device)  # of the steps since the last progress line
    # state["epoch"] counts the epochs that are done, state["step"] the steps done in the next one.
    for epoch in range(state["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        shuffled = list(sampler)  # the numbers of this rank's samples only
        first = state["step"] * batch_size  # 0, unless the run is resumed within the epoch
        indices[:] = shuffled[first : epoch_steps * batch_size]  # the list that train_loader keeps
        batches = iter(train_loader)
        started = time.perf_counter() - state["seconds"]  # less what it trained before --resume
        saved_at = state["seconds"]  # how far into this epoch last.pt was written
        for step in range(state["step"] + 1, epoch_steps + 1):
            run_step = epoch * epoch_steps + step
            for part in range(args.accumulate):
                # So that dropout draws the same with --resume and without, and others on each rank.
                run_part = run_step * args.accumulate + part
                set_seed(args.seed + run_part * world_size + rank, device)
                inputs, labels = prepare(args, next(batches), device)
                if args.augment:
                    inputs = augment(args, inputs, run_step, rank, world_size, part)
                last_part = part + 1 == args.accumulate
                with nullcontext() if last_part else ddp.no_sync():  # no exchange before the last
                    with autocast:
                        loss = criterion(ddp(inputs), labels) / args.accumulate
                    loss.backward()  # after the last part all ranks have the mean gradient
                loss_sum += loss.detach()
            if args.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

            if step % args.log_every == 0 or step == epoch_steps:  # no step above waits for the GPU
                dist.all_reduce(loss_sum)  # each rank gets the sum over all ranks
                state["loss_sum"] += loss_sum.item() / world_size  # waits for the device
                loss_sum.zero_()
                state.update(epoch=epoch, step=step, seconds=time.perf_counter() - started)
                if rank == 0:
                    print(progress_line(args, state, epoch_steps), flush=True)
                if rank == 0 and state["seconds"] - saved_at >= args.checkpoint_minutes * 60:
                    save_checkpoint(args, state, model, optimizer, scheduler)
                    saved_at = state["seconds"]

        for buffer in model.buffers():  # batch norm's averages differ by rank: all take rank 0's
            dist.broadcast(buffer, 0)
        with autocast:
            sums = evaluate(args, model, test_loader, device)
        dist.all_reduce(sums)
        epoch_line = finish_epoch(args, state, epoch_steps, sums)  # all need it for an early stop
        state.update(epoch=epoch + 1, step=0, loss_sum=0.0, seconds=0.0)
        if rank == 0:
            print(epoch_line, flush=True)
            save_checkpoint(args, state, model, optimizer, scheduler)
    if rank == 0:
        save_whole({k: v.cpu() for k, v in model.state_dict().items()}, args.output / "model.pt")
        print(f"finished: {args.output / 'model.pt'}")
    dist.barrier()  # none leaves before model.pt is saved: if that fails, a restart needs all ranks
    dist.destroy_process_group()


# ---- Progress and checkpoints: nothing to change here --------------------------------------------
def progress_line(args, state, epoch_steps):
    epoch, step = state["epoch"], state["step"]
    speed = step * args.batch_size / state["seconds"]
    steps_left = (args.epochs - epoch) * epoch_steps - step
    minutes_left = steps_left * args.batch_size / speed / 60
    position = f"epoch {epoch + 1}/{args.epochs} step {step}/{epoch_steps}"
    loss = state["loss_sum"] / step
    return f"{position} loss {loss:.4f} {speed:.0f} samples/s {minutes_left:.1f} min left"


def finish_epoch(args, state, epoch_steps, sums):
    """Add the epoch's row to state["metrics"]; `sums` is evaluate's. Returns the line to print."""
    loss_sum, correct, count = sums.tolist()
    has_memory = args.device not in ("cpu", "mps")
    row = {
        "epoch": state["epoch"] + 1,
        "train_loss": state["loss_sum"] / epoch_steps,
        "test_loss": loss_sum / max(1, count),
        "test_accuracy": correct / max(1, count),
        "seconds": state["seconds"],  # of training
        "samples_per_second": epoch_steps * args.batch_size / state["seconds"],
        "peak_memory_mib": torch.accelerator.max_memory_allocated() / 2**20 if has_memory else 0,
    }
    state["metrics"].append(row)
    losses = f"train loss {row['train_loss']:.4f} test loss {row['test_loss']:.4f}"
    rest = f"accuracy {row['test_accuracy']:.4f} {row['seconds']:.1f} s"
    return f"epoch {row['epoch']}: {losses} {rest}"


def save_whole(content, path):
    """torch.save; killed at any moment, it leaves the whole old file or the whole new one."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave the new name without content
    os.replace(f"{path}.tmp", path)


def save_checkpoint(args, state, model, optimizer, scheduler):
    """Write metrics.csv and last.pt (killed between the two, a resumed run writes both again)."""
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "model.pt").unlink(missing_ok=True)  # only a finished run has one
    columns = "epoch train_loss test_loss test_accuracy seconds samples_per_second peak_memory_mib"
    with open(args.output / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns.split())
        writer.writeheader()
        writer.writerows(state["metrics"])
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    save_whole(state | {k: v.state_dict() for k, v in parts.items()}, args.output / "last.pt")


def load_checkpoint(args, mmap=False):
    """The state to go on from: with --resume that in last.pt, if it is there; else a new run's."""
    path = args.output / "last.pt"
    flags = {"batch_size": args.batch_size, "seed": args.seed, "lr": args.lr}
    if not args.resume or not path.exists():
        return flags | {"epoch": 0, "step": 0, "loss_sum": 0.0, "seconds": 0.0, "metrics": []}
    # mmap: a machine's processes share one copy. (Not on the CPU: optimizers would go on using it.)
    state = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    for name, value in flags.items():
        if state[name] != value:  # it would go on as another run
            parser.error(f"{path} needs --{name.replace('_', '-')} {state[name]}, as it was begun")
    return state


def restore_checkpoint(state, model, optimizer, scheduler):
    """Put what load_checkpoint has read where it belongs."""
    if "model" not in state:  # a new run
        return
    model.load_state_dict(state.pop("model"))
    for saved, own in zip(state["optimizer"]["param_groups"], optimizer.param_groups):
        saved["fused"] = own.get("fused")  # as in this script, not in the one that wrote last.pt
    optimizer.load_state_dict(state.pop("optimizer"))
    scheduler.load_state_dict(state.pop("scheduler"))
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) and scheduler.last_epoch > 0:
        scheduler.last_epoch -= 1  # (the steps done.) One back and forth computes the rate anew:
        scheduler.step()  # it is another one if --epochs has grown


# ---- The process group: nothing to change here ---------------------------------------------------
def init_distributed(args, rank, world_size, local_rank, init_method="env://"):
    """Meet the others (env://: at MASTER_ADDR and MASTER_PORT). Returns this process's device."""
    device, gpu = torch.device("cpu"), None  # gpu: which one NCCL is to use
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(local_rank)  # or all processes fill GPU 0
    name = f"{device}, {torch.cuda.get_device_name()}" if args.device == "cuda" else device
    backend = dist.get_default_backend_for_device(device)  # NCCL for CUDA, Gloo for CPUs
    meeting = {"init_method": init_method, "rank": rank, "world_size": world_size}
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(backend, timeout=timeout, device_id=gpu, **meeting)  # waits for all
    places = [None] * world_size
    dist.all_gather_object(places, f"rank {rank}: host {socket.gethostname()}, device {name}")
    if rank == 0:
        print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, backend {backend}")
        print(*places, sep="\n", flush=True)
    return device


# ---- The command line: a flag of yours goes here, and is args.NAME above -------------------------
def at_least(least, kind=int):
    def number(text):
        if kind(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return kind(text)

    return number


formatter = argparse.ArgumentDefaultsHelpFormatter
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
parser.usage = "%(prog)s [flags]; --help lists them"
accelerator = torch.accelerator.current_accelerator(check_available=True)
devices = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
devices = [name for name in devices if name != "mps"]  # DDP has no backend for it
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
add = parser.add_argument  # the flags down to --augment belong to your model and your data
add("--dataset", default="cifar10", help="cifar10, fashion-mnist, synthetic, or a folder")
add("--data-dir", default="data", help="where torchvision's data sets live")
add("--image-size", type=at_least(1), default=32, help="side that a folder's images get")
add("--repeat", type=at_least(1), default=1, help="copies of the channels: a heavier input")
add("--model", choices=("net", "resnet18", "mlp"), default="net", help="the network")
add("--optimizer", choices=("sgd", "adam"), default="sgd", help="sgd has momentum 0.9")
add("--lr", type=at_least(0, float), default=0.001, help="learning rate")
add("--lr-schedule", choices=("constant", "cosine"), default="constant", help="of the rate")
add("--warmup-steps", type=at_least(0), default=0, help="steps in which the rate rises to --lr")
add("--augment", action="store_true", help="random flip and shift by up to 4 pixels")
add("--epochs", type=at_least(0), default=10, help="0: only print the ranks and their devices")
add("--batch-size", type=at_least(1), default=64, help="samples of a step, over all devices")
add("--accumulate", type=at_least(1), default=1, help="parts of a batch, one by one: less memory")
add("--clip-norm", type=at_least(0, float), default=0, help="largest norm of the gradient; 0: any")
add("--workers", type=at_least(0), help="that read a folder, per process; None: one for each core")
add("--amp", action="store_true", help="bfloat16 autocast, no GradScaler: fast from Ampere on")
add("--compile", action="store_true", help="torch.compile")
add("--device", choices=devices, default=devices[0], help="CUDA_VISIBLE_DEVICES chooses GPUs")
add("--seed", type=int, default=76, help="of weights, order and random numbers")
add("--output", type=Path, default=Path("runs", Path(__file__).stem), help="folder to write to")
either = parser.add_mutually_exclusive_group()
either.add_argument("--resume", action="store_true", help="go on from --output's last.pt, if any")
either.add_argument("--overwrite", action="store_true", help="begin anew, even if it has one")
add("--checkpoint-minutes", type=at_least(0, float), default=5, help="between two checkpoints")
add("--log-every", type=at_least(1), default=100, help="steps between progress lines")
add("--sync-bn", action="store_true", help="batch norm over all ranks; waits in each layer")
add("--compress-gradients", action="store_true", help="all-reduce in bfloat16")
add("--timeout", type=at_least(1), default=1800, help="seconds to wait for the other processes")
add("--init-method", default="", help="where to meet: tcp://HOST:PORT, file:///NEW_FILE or env://")
add("--rank", type=int, default=0, help="number of this machine, from 0 on")
add("--world-size", type=int, default=1, help="number of machines (in torch itself: of processes)")
gpus = torch.accelerator.device_count()
add("--nproc-per-node", type=at_least(1), default=max(1, gpus), help="processes per machine")

if __name__ == "__main__":
    args = parser.parse_args()
    if not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: {args.world_size} machines have ranks from 0 on")
    if args.world_size > 1 and not args.init_method:
        parser.error("several machines need --init-method tcp://HOST:PORT or file:///NEW_FILE")
    if args.init_method.startswith("file:") and not Path(args.init_method[7:]).parent.is_dir():
        parser.error(f"--init-method {args.init_method}: its folder is not there")
    world_size = args.world_size * args.nproc_per_node
    if args.batch_size % (world_size * args.accumulate):
        parser.error("--batch-size has to be a multiple of the processes times --accumulate")
    if args.device != "cpu" and args.nproc_per_node > gpus:
        parser.error(f"more processes than the {gpus} GPUs")
    if args.sync_bn and (args.device == "cpu" or args.compile):
        parser.error("--sync-bn works on GPUs only, and not with --compile")
    if args.epochs and not (args.resume or args.overwrite) and any(args.output.glob("*.pt")):
        parser.error(f"{args.output} has a run: --resume goes on with it, --overwrite begins anew")
    if args.resume and args.epochs and (args.output / "model.pt").exists():
        if load_checkpoint(args, mmap=True)["epoch"] >= args.epochs:  # or it waits for others
            parser.exit(message=f"{args.output} has a finished run\n")
    cores = max(1, cores // args.nproc_per_node)  # of a process
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # or each takes all cores
    args.workers = min(16, cores) if args.workers is None else args.workers
    args.init_method = args.init_method or f"file://{tempfile.mkdtemp()}/store"
    try:
        torch.multiprocessing.spawn(main, (world_size, args), args.nproc_per_node)
    except torch.multiprocessing.ProcessExitedException as error:  # parser.error exits with 2
        parser.exit(max(1, error.exit_code), f"{error}\n")

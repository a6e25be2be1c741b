# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "torchvision", "numpy"]
# ///
"""Train an image classifier with DDP: one process per GPU, started from here.

python train_ddp_spawn.py --epochs 0  # a check of the set-up
python train_ddp_spawn.py  # all GPUs of one machine; on two, HOST first:
python train_ddp_spawn.py --rank 0 --world-size 2 --init-method tcp://HOST:2345
python train_ddp_spawn.py --rank 1 --world-size 2 --init-method tcp://HOST:2345
"""

import argparse
import atexit
import ctypes
import errno
import fcntl
import gc
import math
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models, transforms

UserError = argparse.ArgumentTypeError  # a mistake of the user's: told in one line, status 2
signals = []  # SIGTERM and SIGUSR1 that have come
claimed = []  # the lock of --output, as an open file

# ---- The model: put your own here ----------------------------------------------------------------


class Net(nn.Module):
    """The small CNN of PyTorch's CIFAR-10 tutorial: (N, channels, side, side) -> (N, classes)."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * (((side - 4) // 2 - 4) // 2) ** 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def build_model(args, train_set):
    """An untrained network on the CPU: (N, C * repeat, H, W) float -> (N, classes) logits."""
    image, _ = train_set[0]
    channels, side, classes = len(image) * args.repeat, image.shape[-1], len(train_set.classes)
    if args.model == "mlp":
        layers = nn.Linear(channels * side**2, 512), nn.ReLU(), nn.Linear(512, classes)
        return nn.Sequential(nn.Flatten(), *layers)
    if args.model == "resnet18":
        net = models.resnet18(num_classes=classes)
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        return net
    return Net(channels, side, classes)


# ---- The data: put your own here -----------------------------------------------------------------

TORCHVISION = {"cifar10": datasets.CIFAR10, "fashion-mnist": datasets.FashionMNIST}


class InMemory(TensorDataset):
    """uint8 images (N, C, H, W) and int64 labels (N,), indexed a whole batch at once."""

    classes = range(10)
    collate = tuple  # a batch comes whole: there is nothing to stack

    def __getitems__(self, indices):
        device = self.tensors[0].device
        indices = torch.tensor(indices, pin_memory=device.type == "cuda")  # or the copy may wait
        indices = indices.to(device, non_blocking=True)
        return tuple(part.index_select(0, indices) for part in self.tensors)  # copies whole rows


def synthetic(seed, count):
    """Ten patterns, each shifted, dimmed and under noise: `count` images, made from the seed."""
    draw = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.rand(10, 3, 4, 4, generator=draw).round(), 32)
    draw.manual_seed(seed + count)  # training and test set share the patterns and nothing else
    shifts, dims = torch.randint(-3, 4, (32, 2), generator=draw), torch.linspace(0.4, 1, 32)
    views = [(patterns.roll(s.tolist(), (2, 3)) - 0.5) * 200 * d for s, d in zip(shifts, dims)]
    noise = torch.randint(50, (1000, 3, 32, 32), dtype=torch.uint8, generator=draw)
    view, label, grain = (torch.randint(n, (count,), generator=draw) for n in (32, 10, 1000))
    return (torch.stack(views) + 103).to(torch.uint8)[view, label].add_(noise[grain]), label


def read_image(path):
    try:
        return datasets.folder.default_loader(path)
    except Exception as error:  # of many kinds: Pillow has one for each way to be broken
        raise UserError(f"{path} is no image that can be read: {type(error).__name__}") from None


def load_data(args, device):
    """Training and test set: uint8 (C, H, W), an int label; and `classes`. Raises UserError."""
    kind, root = TORCHVISION.get(args.dataset), Path(args.dataset)
    folders = root / "train", root / ("test" if (root / "test").exists() else "val")
    shape = transforms.Compose([transforms.Resize([args.image_size] * 2), transforms.PILToTensor()])
    try:
        if args.dataset == "synthetic":
            parts = [synthetic(args.seed, count) for count in (10_000, 2_000)]
        elif kind:  # the archive's checksum does: not 180 MB more at each start of each process
            datasets.cifar.check_integrity = lambda path, md5=None: os.path.isfile(path)
            sets = [kind(args.data_dir, train, download=True) for train in (True, False)]
            parts = [(torch.as_tensor(part.data), torch.as_tensor(part.targets)) for part in sets]
            parts = [(x.reshape(*x.shape[:3], -1).movedim(3, 1), y) for x, y in parts]
        else:
            sets = [datasets.ImageFolder(folder, shape, loader=read_image) for folder in folders]
            if sets[0].classes != sets[1].classes:
                raise ValueError(f"{folders[1]} has not the same classes as {folders[0]}")
            if not args.data_on_device:
                return sets
            InMemory.classes = sets[0].classes
            loaders = [DataLoader(part, 256, num_workers=torch.get_num_threads()) for part in sets]
            parts = (map(torch.cat, zip(*loader)) for loader in loaders)  # read after the `try`
    except Exception as error:
        remedy = f"files in --data-dir {args.data_dir}, or --dataset synthetic, or a folder with"
        remedy += " train/ and test/ (or val/), in both the same sub-folders, one a class"
        raise UserError(f"--dataset {args.dataset}: {error}; it takes {remedy}") from None
    device = device if args.data_on_device else "cpu"
    return [InMemory(images.contiguous().to(device), labels.to(device)) for images, labels in parts]


def prepare(args, batch, device, draws=None):
    """A batch as the network takes it, on `device`: float (N, C * repeat, H, W), labels (N,).

    `draws`, (N, 3), are for augmentation: flip (0 or 1), columns and rows to shift by (0 to 8).
    """
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    images = images.float()
    if draws is not None:  # what torchvision's RandomHorizontalFlip and RandomCrop(padding=4) do
        theta = torch.zeros(len(images), 2, 3, device=device)
        theta[:, 0, 0], theta[:, 1, 1] = 1 - 2 * draws[:, 0], 1
        theta[:, :, 2] = (draws[:, 1:] - 4) * 2 / images.shape[-1]
        grid = F.affine_grid(theta, images.shape, align_corners=False)
        images = F.grid_sample(images, grid, "nearest", align_corners=False)
    images = images.sub_(127.5).div_(64)  # in place saves memory traffic
    return images if args.repeat == 1 else torch.cat([images] * args.repeat, 1), labels


# ---- The training loop ---------------------------------------------------------------------------


@torch.no_grad()
def evaluate(args, net, loader, device):
    """Sums over the loader's samples: loss, right answers, samples; float (3,) on `device`."""
    net.eval()
    sums = torch.zeros(3, device=device)
    for batch in loader:
        images, labels = prepare(args, batch, device)
        logits = net(images).float()
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    net.train()
    return sums


def main(local_rank, args):
    """Train. Returns the exit status: 0 finished, 75 stopped by a signal."""
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # end with the parent, however it ends
    mp.set_start_method(None, force=True)  # loader workers start as elsewhere, not by spawn
    nproc = args.nproc_per_node
    rank, world_size = args.rank * nproc + local_rank, args.world_size * nproc
    device, parts = join(args, rank, world_size, local_rank, nproc, init_method=args.init_method)
    if args.epochs == 0:
        return 0
    train_set, test_set, net, *state = parts
    catch_signals()
    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)  # with rank 0's weights
    if args.compress_gradients:
        ddp.register_comm_hook(None, bf16_compress_hook)
    if args.compile:
        net.compile()
    dist.broadcast_object_list(state)  # which only rank 0 has read
    run = state[0]
    kind = torch.optim.Adam if args.optimizer == "adam" else partial(torch.optim.SGD, momentum=0.9)
    optimizer = kind(net.parameters(), args.lr, fused=True)
    if state := run.pop("optimizer"):
        optimizer.load_state_dict(state)

    workers = torch.get_num_threads() if args.workers is None else args.workers
    if isinstance(train_set, TensorDataset) and (args.workers is None or args.data_on_device):
        workers = 0  # to send a batch costs more than to take it out of memory
    pin = device.type == "cuda" and not args.data_on_device
    options = dict(num_workers=workers, persistent_workers=workers > 0, pin_memory=pin)
    options |= dict(collate_fn=getattr(train_set, "collate", None), worker_init_fn=catch_signals)
    batch = args.batch_size // world_size
    sampler = DistributedSampler(train_set, seed=args.seed)
    if rank == 0:
        claim(args)
    order = []  # the samples that are still to come in the epoch
    train_loader = DataLoader(train_set, batch, sampler=order, **options)
    share = range(rank, len(test_set), world_size)  # DistributedSampler would count some twice
    test_loader = DataLoader(test_set, batch, sampler=share, **options)

    settled = False
    steps, samples = math.ceil(len(sampler) / batch), sampler.total_size
    # What run["loss"] lacks, as to read it stops the device; float64 adds it up without rounding.
    new_loss = torch.zeros((), dtype=None if device.type == "mps" else torch.float64, device=device)
    for epoch in range(run["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        order[:] = list(sampler)[run["step"] * batch :]
        draw = torch.Generator().manual_seed(args.seed + epoch)
        draws = (torch.rand(samples, 3, generator=draw) * torch.tensor([2, 9, 9])).long()
        draws = draws[rank::world_size].to(device)  # as the sampler shares out the samples
        start = time.perf_counter() - run["seconds"]
        for step, data in enumerate(train_loader, run["step"] + 1):
            mine = draws[(step - 1) * batch : step * batch] if args.augment else None
            images, labels = prepare(args, data, device, mine)
            if not settled:  # after the first backward DDP lays out its buckets anew: have that
                ddp.eval()  # behind, so that a resumed run adds in the same order
                F.cross_entropy(ddp(images).float(), labels).backward()
                ddp.train()
                settled = True
            loss = F.cross_entropy(ddp(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            done = (epoch * steps + step - 1) / (args.epochs * steps)
            cosine = args.lr / 2 * (1 + math.cos(math.pi * done))  # arXiv 1608.03983, one period
            for group in optimizer.param_groups:
                group["lr"] = cosine if args.lr_schedule == "cosine" else args.lr
            optimizer.step()
            new_loss.add_(loss.detach(), alpha=len(labels))

            stop, log = torch.tensor(step % 10 == 1 and len(signals)), step % args.log_every == 0
            if step % 10 == 1:  # a vote over Gloo, which a GPU does not notice
                dist.all_reduce(stop)
            keep = stop or args.checkpoint_every and step % args.checkpoint_every == 0
            if keep or log or step == steps:
                dist.all_reduce(new_loss)
                loss_sum, seconds = run["loss"] + new_loss.item(), time.perf_counter() - start
                run.update(step=step, loss=loss_sum, seconds=seconds)
                new_loss.zero_()
            if log:
                seen = min(step * args.batch_size, samples)
                left = timedelta(0, seconds / step * ((args.epochs - epoch) * steps - step) // 1)
                print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps}", end=" ")
                print(f"loss {loss_sum / seen:.4f} {seen / seconds:.0f} images/s {left} left")
            if keep and rank == 0:
                save(args, run, net, optimizer)
            if stop:
                print(f"stopped after step {step} of epoch {epoch + 1}: --resume goes on from here")
                return 75

        for buffer in net.buffers():  # batch norm's statistics, of which each rank has its own
            dist.broadcast(buffer, 0)
        sums = evaluate(args, net, test_loader, device)
        dist.all_reduce(sums)
        test_loss, right, count = sums.tolist()
        row = epoch + 1, run["loss"] / samples, test_loss / count, right / count, run["seconds"]
        print("epoch {}: train loss {:.4f} test loss {:.4f} accuracy {:.4f} {:.1f} s".format(*row))
        peak = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated() / 2**20
        row = *row, samples / run["seconds"], peak
        table = run["table"] + ",".join(map(str, row)) + "\n"
        run.update(epoch=epoch + 1, step=0, loss=0.0, seconds=0.0, table=table)
        if rank == 0:
            save(args, run, net, optimizer)
    model = {key: value.cpu() for key, value in net.state_dict().items()}
    if rank == 0:
        write(args.output / "model.pt", model)
    print(f"finished: {args.output / 'model.pt'}")
    return 0


# ---- Checkpoints ---------------------------------------------------------------------------------

HEADER = "epoch,train_loss,test_loss,test_accuracy,seconds,images_per_second,peak_memory_mib\n"
FIXED = "model", "repeat", "optimizer", "batch_size", "seed", "amp"  # what --resume can't change


def write(path, content):
    """Put bytes, or what torch.save takes, at `path`: the old file stays until the new is whole."""
    part = path.with_name(path.name + ".tmp")
    try:
        with open(part, "wb") as file:
            file.write(content) if isinstance(content, bytes) else torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except Exception as error:
        part.unlink(missing_ok=True)
        raise RuntimeError(f"{path} can't be written; the file before it is whole") from error


def save(args, run, net, optimizer):
    """Write metrics.csv and last.pt, which holds the table too, so that the two always agree."""
    (args.output / "model.pt").unlink(missing_ok=True)  # an earlier run's
    write(args.output / "metrics.csv", run["table"].encode())
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    write(args.output / "last.pt", run | state)


def read_checkpoint(args, net):
    """Where the run stands; weights that last.pt has go into `net`. Raises UserError."""
    flags = {name: getattr(args, name) for name in FIXED}
    run = dict(flags=flags, epoch=0, step=0, loss=0.0, seconds=0.0, table=HEADER, optimizer=None)
    path = args.output / "last.pt"
    if path.exists() and not args.resume:
        print(f"{path} will be replaced; to go on from it: --resume", file=sys.stderr)
    try:
        if args.resume and path.exists():
            run = torch.load(path, map_location="cpu", weights_only=True)
            if run["flags"] != flags:
                raise ValueError(f"it was written with {run['flags']}")
            if run["epoch"] + (run["step"] > 0) > args.epochs:
                raise ValueError(f"it is past the end of epoch {args.epochs}")
            net.load_state_dict(run.pop("model"))
    except Exception as error:
        why = f"{path} is not of such a run ({error!r:.300})"
        raise UserError(f"--resume: {why}; give another --output") from None
    return run


def claim(args):
    """Make --output, and keep other runs out of it while this process lives. Raises UserError."""
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        file = open(args.output / ".lock", "w")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claimed.append(file)
    except BlockingIOError:
        raise UserError(f"--output {args.output}: another run writes to it; give another") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS):  # those of a file system without locks
            raise UserError(f"--output {args.output} can't be used: {error}") from None


# ---- The launch ----------------------------------------------------------------------------------


def above(low, kind=int):
    """An argparse type: a number of this kind, above `low`."""

    def number(text):
        if low < kind(text) < 2**60:
            return kind(text)
        raise UserError(f"{text} is not above {low} and below 2**60")

    return number


formats = argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
layout = partial(type("Help", formats, {}), max_help_position=30)  # room for one line a flag
about, _, commands = __doc__.partition("\n\n")
usage = "%(prog)s [flags]; --help lists them"
parser = argparse.ArgumentParser(None, usage, about, commands, formatter_class=layout)
add = parser.add_argument_group("data").add_argument
add("--dataset", default="cifar10", help="synthetic, fashion-mnist, DIR")
add("--data-dir", default="data", help="where torchvision's sets live")
add("--image-size", type=above(15), default=32, help="side to resize a folder's to")
add("--data-on-device", action="store_true", help="hold all data there")
add("--workers", type=above(-1), help="loader processes; 0 if in memory")
add("--augment", action="store_true", help="random flip and 4-pixel shift")
add = parser.add_argument_group("model").add_argument
add("--model", choices=("net", "resnet18", "mlp"), default="net", help="which network")
add("--repeat", type=above(0), default=1, help="tile images N-fold: a load test")
add = parser.add_argument_group("training").add_argument
add("--epochs", type=above(-1), default=10, help="0 checks the set-up only")
add("--batch-size", type=above(0), default=64, help="global batch, of all devices")
add("--optimizer", choices=("sgd", "adam"), default="sgd", help="sgd has momentum 0.9")
add("--lr", type=above(0, float), default=0.001, help="learning rate")
schedules = "constant", "cosine"
add("--lr-schedule", choices=schedules, default="constant", metavar="NAME", help="or cosine")
add("--amp", action="store_true", help="bf16 autocast")
add("--compile", action="store_true", help="torch.compile")
add("--deterministic", action="store_true", help="deterministic algorithms")
add("--seed", type=above(-1), default=76, help="of weights, order, augmentation")
add = parser.add_argument_group("output").add_argument
add("--output", type=Path, default=Path("runs", Path(__file__).stem), help="folder")
add("--resume", action="store_true", help="go on from --output's last.pt")
add("--checkpoint-every", type=above(-1), default=0, metavar="STEPS", help="0: epochs only")
add("--log-every", type=above(0), default=100, metavar="STEPS", help="between progress lines")
add = parser.add_argument_group("processes").add_argument
add("--timeout", type=above(0), default=1800, help="seconds to wait for the others")
add("--sync-bn", action="store_true", help="batch norm over all processes")
add("--compress-gradients", action="store_true", help="send them as bf16")
add("--init-method", default="tcp://127.0.0.1:0", metavar="URL", help="or file://, env://")
add("--rank", type=above(-1), default=0, help="number of this machine")
add("--world-size", type=above(0), default=1, help="number of machines")
gpus = torch.accelerator.device_count()
add("--nproc-per-node", type=above(0), default=gpus or 1, metavar="N", help="processes here")


def catch_signals(worker=None):
    """Make SIGTERM and SIGUSR1 ask for a stop; a loader's worker has to outlive them too."""
    for number in signal.SIGTERM, signal.SIGUSR1:
        signal.signal(number, lambda number, frame: signals.append(number))


def leave(work, *args):
    """End with what `work` returns, with 2 after a UserError, or with 1 after another error."""
    sys.stdout.reconfigure(line_buffering=True)  # a log is read while it grows
    try:
        status = work(*args)
    except UserError as error:  # a worker's comes as a traceback that ends with it
        message = str(error).split("TypeError: ")[-1].split()
        status = print(f"{parser.prog}: error:", *message, file=sys.stderr) or 2
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = print(f"{parser.prog}: ended by", repr(error)[-300:], file=sys.stderr) or 1
    for file in claimed:
        Path(file.name).unlink(missing_ok=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would call a killed worker an error
    for worker in mp.active_children():
        worker.kill()
    os._exit(status)  # at once: a broken process group can keep Python's own exit waiting


def check_place(args):
    """Check --rank and --init-method, and make its port 0 a free one. Raises UserError."""
    if args.rank >= args.world_size:
        raise UserError(f"--rank {args.rank} is not below --world-size: machines count from 0")
    alone = args.world_size == 1
    try:
        url = urlsplit(args.init_method)
        file, forms = Path(url.path), "tcp://HOST:PORT, file:///PATH in a folder that is there"
        tcp = url.scheme == "tcp" and url.hostname and (url.port or url.port == 0 and alone)
        env = url.scheme == "env" and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        if not (tcp or env or url.scheme == "file" and not url.netloc and file.parent.is_dir()):
            raise ValueError(f"it is {forms}, or env:// with MASTER_ADDR and MASTER_PORT set")
        if not (tcp or env) and file.exists() and file.stat().st_size:
            if alone or time.time() - file.stat().st_mtime > args.timeout:  # nobody who waits
                raise ValueError("an earlier run left that file: delete it, or name a new one")
        if tcp and args.rank == 0:
            with socket.create_server(("", url.port)) as server:  # fails if it is taken
                args.init_method = f"tcp://{url.hostname}:{server.getsockname()[1]}"
    except (OSError, ValueError) as error:
        raise UserError(f"--init-method {args.init_method}: {error}") from None
    if not alone:
        until = time.strftime("%X", time.localtime(time.time() + args.timeout))
        print(f"waiting for {args.world_size} machines at {args.init_method} until {until}")


def join(args, rank, world_size, local_rank, local_size, **meet):
    """Meet the others, by init_method or store: the device, set_up's parts. Raises UserError."""
    parser.prog += f": rank {rank} on {os.uname().nodename}"  # for messages
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # rank 0 alone prints
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # not every cluster binds to them
    torch.set_num_threads(max(1, cores // local_size))
    device, backend, parts = torch.device("cpu"), "gloo", None
    if kind := torch.accelerator.current_accelerator(check_available=True):
        device = torch.device(kind.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
        if local_size <= torch.accelerator.device_count():  # with fewer GPUs only Gloo works
            backend = f"cpu:gloo,{kind.type}:{dist.get_default_backend_for_device(device)}"
            meet["device_id"] = device
    if local_rank == 0 and args.batch_size % world_size:  # one message a machine
        raise UserError(f"--batch-size {args.batch_size} does not divide by {world_size} processes")
    if local_rank == 0 and args.sync_bn and device.type == "cpu":
        raise UserError("--sync-bn works on GPUs only: leave it out")
    if local_rank == 0 and args.compress_gradients and not dist.is_nccl_available():
        raise UserError("--compress-gradients needs a torch that was built for GPUs: leave it out")
    meet |= dict(rank=rank, world_size=world_size, timeout=timedelta(0, args.timeout))
    # Rank 0 sets up before it meets anybody, so that a mistake ends it while nobody waits.
    for turn in range(3):  # rank 0, the first process of each other machine, the rest
        if turn == (rank > 0) + (local_rank > 0) and args.epochs:
            parts = set_up(args, device, rank)
        if turn == 0:
            dist.init_process_group(backend, **meet)
        dist.barrier()
    nccl = dist.is_nccl_available() and ".".join(map(str, torch.cuda.nccl.version()))
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, backend {backend}")
    places, total = [None] * world_size, torch.ones((), device=device)
    dist.all_gather_object(places, f"rank {rank}: host {os.uname().nodename}, device {device}")
    print(*places, sep="\n")
    dist.all_reduce(total)
    if total != world_size:
        raise RuntimeError(f"an all-reduce of ones over {world_size} processes gave {total}")
    print(f"all-reduce over {world_size} processes: right")
    return device, parts


def in_group(work, *args):
    status = work(*args)
    dist.barrier()  # until rank 0 has saved: a launcher ends the others when one leaves with 75
    dist.destroy_process_group()
    return status


def set_up(args, device, rank=0):
    """Training set, test set, network and, on rank 0, the state of the run. Raises UserError."""
    train_set, test_set = load_data(args, device)
    if args.batch_size > len(train_set):
        raise UserError(f"--batch-size {args.batch_size} of only {len(train_set)} training images")
    if device.type == "cpu" and sys.platform == "linux":  # keep memory for the next step
        for option in (-3, 2**25), (-1, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: mallopt(3)
            ctypes.CDLL(None).mallopt(*option)
    torch.manual_seed(args.seed)
    net = build_model(args, train_set)
    run = read_checkpoint(args, net) if rank == 0 else None
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if args.amp:  # inside of forward, where the threads of DataParallel see it too
        forward = torch.autocast(device.type, torch.bfloat16)(type(net).forward)
        net.__class__ = type("Amp", (type(net),), {"forward": forward})
        net = net.to(memory_format=torch.channels_last)
    gc.freeze()  # or a full garbage collection looks through torch's own objects, too: 0.2 s
    atexit.register(gc.unfreeze)  # or they count as leaked where Python ends by itself
    return train_set, test_set, net.to(device), run


def launch(args):
    """Start this machine's processes and end with them. Returns the exit status of the first."""
    check_place(args)
    context = mp.spawn(partial(leave, in_group, main), (args,), args.nproc_per_node, join=False)

    def pass_on(number, frame):
        for process in mp.active_children():
            os.kill(process.pid, number)

    for number in signal.SIGTERM, signal.SIGUSR1:
        signal.signal(number, pass_on)
    try:
        while not context.join(grace_period=3):
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code in (2, 75):
            return error.exit_code
        raise
    return 0


if __name__ == "__main__":
    leave(launch, parser.parse_args())

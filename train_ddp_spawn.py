# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "torchvision", "numpy"]
# ///
"""Train an image classifier with DDP: one process per GPU, started by the script itself.

python train_ddp_spawn.py    # all GPUs of this machine; on two machines:
python train_ddp_spawn.py --init-method tcp://HOST:23456 --world-size 2 --rank 0
python train_ddp_spawn.py --init-method tcp://HOST:23456 --world-size 2 --rank 1
"""

import argparse
import math
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models, transforms


# ---- The model: put yours here. Called below: build_model, loss_function, build_optimizer --------
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
        return model
    if args.model == "mlp":
        hidden = nn.Linear(channels * side * side, 512)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(512, classes))
    return Net(channels, side, classes)


def loss_function(outputs, labels):
    return F.cross_entropy(outputs, labels)  # the mean over the batch


def build_optimizer(args, model, steps):
    """The optimizer, and the schedule of its learning rate over all `steps` of the run."""
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)
    if args.lr_schedule == "cosine":
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # unchanged


# ---- The data: put yours here. Called below: load_data, prepare and augment ----------------------
# A sample is an input, a uint8 image (C, H, W) or float32 of any shape, and an int label.
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
    resize = transforms.Resize((args.image_size, args.image_size))
    transform = transforms.Compose([resize, transforms.PILToTensor()])
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
    patterns = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = (F.interpolate(patterns, 32) * 120).byte()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(136, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return TensorDataset(patterns[labels] + noise, labels)


def prepare(args, batch, device):
    """A batch on the device; uint8 images become floats of mean 0 and variance 1, roughly."""
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    if images.dtype == torch.uint8:
        images = images.float().sub_(127.5).div_(64)
    if args.repeat > 1:
        images = images.repeat(1, args.repeat, 1, 1)
    return images, labels


def augment(args, images, run_step, rank=0, world_size=1):
    """Flip half of the images (N, C, H, W) and shift each by up to 4 pixels."""
    generator = torch.Generator().manual_seed(args.seed + run_step)  # alike in all processes,
    draws = torch.rand(args.batch_size, 3, generator=generator)[rank::world_size]  # a part for each
    draws = draws[: len(images)].to(images.device, non_blocking=True)
    theta = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    theta[:, 0, 0] = torch.where(draws[:, 0] < 0.5, -1, 1)
    theta[:, :, 2] = ((draws[:, 1:] * 9).floor() - 4) * 2 / images.shape[-1]
    grid = F.affine_grid(theta, images.shape, align_corners=False)
    return F.grid_sample(images, grid, "nearest", align_corners=False)


# ---- Training: nothing to change here, except what evaluate counts -------------------------------
def load_batches(args, dataset, indices, batch_size, device):
    """Yield the samples at `indices` in batches. A TensorDataset is kept on the device."""
    if type(dataset) is TensorDataset:  # a subclass may do more than indexing
        dataset.tensors = [tensor.to(device) for tensor in dataset.tensors]  # copies only once
        indices = torch.tensor(indices, device=device)
        for start in range(0, len(indices), batch_size):
            chosen = indices[start : start + batch_size]
            yield [tensor.index_select(0, chosen) for tensor in dataset.tensors]
    else:
        options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
        yield from DataLoader(dataset, batch_size, sampler=indices, **options)


@torch.no_grad()
def evaluate(args, model, dataset, indices, batch_size, device):
    """Over the samples at `indices`: the sum of the losses and the right answers, as a tensor."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for batch in load_batches(args, dataset, indices, batch_size, device):
        images, labels = prepare(args, batch, device)
        outputs = model(images)
        sums[0] += loss_function(outputs, labels) * len(labels)
        sums[1] += (outputs.argmax(1) == labels).sum()
    model.train()
    return sums


def main(local_rank, world_size, args):
    mp.set_start_method(None, force=True)  # or DataLoader's workers start slowly, by spawn
    rank = args.rank * args.nproc_per_node + local_rank
    device = init_distributed(args, rank, world_size, local_rank, args.init_method)
    if args.epochs == 0:  # a check of the set-up
        dist.destroy_process_group()
        return
    for my_turn in rank == 0, rank > 0 and local_rank == 0, local_rank > 0:  # one downloads first
        if my_turn:
            train_set, test_set, classes = load_data(args)
        dist.barrier()
    torch.manual_seed(args.seed)
    model = build_model(args, train_set[0][0], classes).to(device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compress_gradients:
        ddp.register_comm_hook(None, bf16_compress_hook)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    batch_size = args.batch_size // world_size
    sampler = DistributedSampler(train_set, seed=args.seed)
    epoch_steps = math.ceil(len(sampler) / batch_size)
    optimizer, scheduler = build_optimizer(args, model, args.epochs * epoch_steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint = [load_checkpoint(args) if rank == 0 else None]
    dist.broadcast_object_list(checkpoint)
    state = checkpoint[0]
    if "model" in state:
        for name, part in parts.items():
            part.load_state_dict(state.pop(name))
    if rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        save_checkpoint(args, state, parts)  # at once: --resume must not go on from an earlier run

    loss_sum = torch.zeros((), device=device)  # of the steps that state["loss_sum"] lacks
    for epoch in range(state["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + (epoch * epoch_steps + state["step"]) * world_size + rank)
        indices = list(sampler)[state["step"] * batch_size :]  # what a resumed epoch has left
        batches = load_batches(args, train_set, indices, batch_size, device)
        start = time.perf_counter() - state["seconds"]
        for step, batch in enumerate(batches, state["step"] + 1):
            run_step = epoch * epoch_steps + step
            torch.manual_seed(args.seed + run_step * world_size + rank)  # own dropout masks
            images, labels = prepare(args, batch, device)
            if args.augment:
                images = augment(args, images, run_step, rank, world_size)
            optimizer.zero_grad()
            micro_batches = list(zip(images.chunk(args.accumulate), labels.chunk(args.accumulate)))
            for i, (x, y) in enumerate(micro_batches, 1):
                ddp.require_backward_grad_sync = i == len(micro_batches)  # all-reduce at the last
                with autocast:
                    loss = loss_function(ddp(x), y)
                (loss * (len(y) / len(labels))).backward()
                loss_sum += loss.detach() * len(y)
            optimizer.step()
            scheduler.step()

            log, save = step % args.log_every == 0, step % args.checkpoint_every == 0
            if log or save or step == epoch_steps:
                dist.all_reduce(loss_sum)
                state["loss_sum"] += loss_sum.item()  # nothing else waits for the device
                loss_sum.zero_()
                state.update(epoch=epoch, step=step, seconds=time.perf_counter() - start)
            if log and rank == 0:
                seen, seconds = min(step * args.batch_size, sampler.total_size), state["seconds"]
                left = (args.epochs * epoch_steps - run_step) * seconds / step / 60
                place = f"epoch {epoch + 1}/{args.epochs} step {step}/{epoch_steps}"
                speed = f"loss {state['loss_sum'] / seen:.4f} {seen / seconds:.0f} images/s"
                print(f"{place} {speed} {left:.1f} min left", flush=True)
            if save and rank == 0:
                save_checkpoint(args, state, parts)

        for buffer in model.buffers():  # batch norm's: after a step each process has its own
            dist.broadcast(buffer, 0)
        with autocast:
            share = range(rank, len(test_set), world_size)  # DistributedSampler: some twice
            sums = evaluate(args, model, test_set, share, batch_size, device)
        dist.all_reduce(sums)
        test_loss, accuracy = (total / len(test_set) for total in sums.tolist())
        train_loss, seconds = state["loss_sum"] / sampler.total_size, state["seconds"]
        peak = 0 if device.type in ("cpu", "mps") else torch.accelerator.max_memory_allocated()
        speed = sampler.total_size / seconds
        row = [epoch + 1, train_loss, test_loss, accuracy, seconds, speed, peak / 2**20]
        state["metrics"] += ",".join(map(str, row)) + "\n"
        state.update(epoch=epoch + 1, step=0, loss_sum=0.0, seconds=0.0)
        losses = f"train loss {train_loss:.4f} test loss {test_loss:.4f}"
        if rank > 0:
            continue
        print(f"epoch {epoch + 1}: {losses} accuracy {accuracy:.4f} {seconds:.1f} s", flush=True)
        save_checkpoint(args, state, parts)
    dist.destroy_process_group()
    if rank > 0:
        return
    save_whole({k: v.cpu() for k, v in model.state_dict().items()}, args.output / "model.pt")
    print(f"finished: {args.output / 'model.pt'}")


# ---- Checkpoints: nothing to change here ---------------------------------------------------------
def save_whole(content, path):
    """torch.save; killed at any moment, it leaves the whole old file or the whole new one."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave the new name without content
    os.replace(f"{path}.tmp", path)


def save_checkpoint(args, state, parts):
    """A run that is killed between the two files writes metrics.csv again after --resume."""
    (args.output / "model.pt").unlink(missing_ok=True)  # only a finished run has one
    (args.output / "metrics.csv").write_text(state["metrics"])
    save_whole(state | {k: v.state_dict() for k, v in parts.items()}, args.output / "last.pt")


def load_checkpoint(args):
    """With --resume, what is in last.pt if it is there; else the state of a new run."""
    path, flags = args.output / "last.pt", {"batch_size": args.batch_size, "seed": args.seed}
    columns = "epoch,train_loss,test_loss,test_accuracy,seconds,images_per_second,peak_memory_mib\n"
    if not args.resume or not path.exists():
        print(f"a new run into {args.output}")
        return flags | {"epoch": 0, "step": 0, "loss_sum": 0.0, "seconds": 0.0, "metrics": columns}
    state = torch.load(path, map_location="cpu", weights_only=True)
    if flags != {name: state[name] for name in flags}:  # it would repeat or leave out samples
        parser.error(f"{path} needs --batch-size {state['batch_size']} and --seed {state['seed']}")
    print(f"going on from {path}: epoch {state['epoch'] + 1}, after step {state['step']}")
    return state


# ---- The process group: nothing to change here ---------------------------------------------------
def init_distributed(args, rank, world_size, local_rank, init_method=None, store=None):
    """Meet the other processes; rank 0 prints who is where. Returns this process's device."""
    device, gpu = torch.device("cpu"), None
    if torch.accelerator.is_available():
        device = gpu = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    backend = dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(backend, init_method, timeout, world_size, rank, store, device_id=gpu)
    places = [None] * world_size
    dist.all_gather_object(places, f"rank {rank}: host {socket.gethostname()}, device {device}")
    if rank == 0:
        print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, backend {backend}")
        print(*places, sep="\n", flush=True)
    return device


# ---- The command line: a flag of yours goes here, and is args.NAME above -------------------------
about, formatter = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
usage = "%(prog)s [flags]; --help lists them"
parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
add = parser.add_argument
# Those down to --lr-schedule belong to your model and data, the others to the training.
add("--dataset", default="cifar10", help="cifar10, fashion-mnist, synthetic, or a folder")
add("--data-dir", default="data", help="where torchvision's data sets live")
add("--image-size", type=int, default=32, help="side to which a folder's images are resized")
add("--repeat", type=int, default=1, help="copies of the channels: a heavier input")
add("--model", choices=("net", "resnet18", "mlp"), default="net", help="the network")
add("--optimizer", choices=("sgd", "adam"), default="sgd", help="sgd has momentum 0.9")
add("--lr", type=float, default=0.001, help="learning rate")
add("--lr-schedule", choices=("constant", "cosine"), default="constant", help="of the rate")
add("--augment", action="store_true", help="random flip and shift by up to 4 pixels")
add("--workers", type=int, default=min(4, os.cpu_count()), help="DataLoader's, in each process")
add("--epochs", type=int, default=10, help="0: only say who is where")
add("--batch-size", type=int, default=64, help="samples of a step, over all devices")
add("--accumulate", type=int, default=1, help="parts of a batch, one by one: less memory")
add("--amp", action="store_true", help="bfloat16 autocast")
add("--compile", action="store_true", help="torch.compile")
add("--seed", type=int, default=76, help="of weights, order and random numbers")
add("--output", type=Path, default=Path("runs", Path(__file__).stem), help="folder to write to")
add("--resume", action="store_true", help="go on from last.pt in --output, if it is there")
add("--checkpoint-every", type=int, default=1000, help="steps between checkpoints")
add("--log-every", type=int, default=100, help="steps between progress lines")
add("--sync-bn", action="store_true", help="batch norm over all processes' samples")
add("--compress-gradients", action="store_true", help="all-reduce in bfloat16")
add("--timeout", type=int, default=1800, help="seconds to wait for the other processes")
add("--init-method", default="", help="where to meet: tcp://HOST:PORT, file:///NEW_FILE or env://")
add("--rank", type=int, default=0, help="number of this machine")
add("--world-size", type=int, default=1, help="number of machines")
gpus = torch.accelerator.device_count()
add("--nproc-per-node", type=int, default=max(1, gpus), help="processes per machine")

if __name__ == "__main__":
    args = parser.parse_args()
    for name in "epochs", "workers", "seed", "lr":
        if getattr(args, name, 0) < 0:
            parser.error(f"--{name} has to be at least 0")
    for name in "image_size", "repeat", "batch_size", "accumulate", "checkpoint_every", "log_every":
        if getattr(args, name, 1) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be at least 1")
    if not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: {args.world_size} machines have ranks from 0 on")
    if args.world_size > 1 and not args.init_method:
        parser.error("several machines need --init-method tcp://HOST:PORT or file:///NEW_FILE")
    if args.init_method.startswith("file:") and not Path(args.init_method[7:]).parent.is_dir():
        parser.error(f"--init-method {args.init_method}: its folder is not there")
    world_size = args.world_size * args.nproc_per_node
    if world_size < 1 or args.batch_size % world_size != 0:
        parser.error(f"--batch-size has to be a multiple of the {world_size} processes")
    if args.sync_bn and not torch.accelerator.is_available():
        parser.error("--sync-bn works on GPUs only")
    print(f"waiting for {world_size} processes", flush=True)
    if args.nproc_per_node > 1:  # as torchrun does: or the processes' threads fight for the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        if not args.init_method:
            args.init_method = f"file://{folder}/store"
        try:
            mp.spawn(main, (world_size, args), args.nproc_per_node)
        except mp.ProcessExitedException as error:  # 2: the process has said what is wrong
            raise SystemExit(2 if error.exit_code == 2 else f"{error}")

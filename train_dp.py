# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "torchvision", "numpy"]
# ///
"""Train an image classifier on all GPUs of one machine, with one process: nn.DataParallel.

python train_dp.py                                # all GPUs
CUDA_VISIBLE_DEVICES=0,1 python train_dp.py       # two of them
python train_dp.py --resume                       # go on from the last checkpoint
"""

import argparse
import math
import os
import socket
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets, models
from torchvision.transforms import v2


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
        return model.to(memory_format=torch.channels_last)  # as tensor cores want it
    if args.model == "mlp":
        hidden = nn.Linear(channels * side * side, 512)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(512, classes))
    return Net(channels, side, classes)


def loss_function(outputs, labels):
    return F.cross_entropy(outputs, labels)  # a mean over the labels: evaluate relies on it


def count_right(outputs, labels):
    """How many labels are right (in regression: near enough), and of how many: tensor or int."""
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


# ---- The data: put yours here. Called below: load_data, prepare and augment ----------------------
# A sample is an input, here a uint8 image (C, H, W), and a label, here an int.
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
    """A batch on the device; uint8 images become floats of mean 0 and variance 1, roughly."""
    images, labels = (tensor.to(device, non_blocking=args.device != "mps") for tensor in batch)
    if images.dtype == torch.uint8:
        images = images.float().sub_(127.5).div_(64)
    if args.repeat > 1:
        images = images.repeat(1, args.repeat, 1, 1)
    return images, labels


def augment(args, images, run_step, rank=0, world_size=1, part=0):
    """Flip half of the images (N, C, H, W) and shift each by up to 4 pixels."""
    generator = torch.Generator().manual_seed(args.seed + run_step)  # alike in all processes:
    draws = torch.rand(args.batch_size, 3, generator=generator)[rank::world_size]  # each its share
    draws = draws.split(len(images))[part]  # of --accumulate
    maps = torch.eye(2, 3).repeat(len(images), 1, 1)
    maps[:, 0, 0] = torch.where(draws[:, 0] < 0.5, -1.0, 1.0)
    maps[:, :, 2] = ((draws[:, 1:] * 9).floor() - 4) * 2 / images.shape[-1]
    maps = maps.to(images.device, non_blocking=args.device != "mps")
    grid = F.affine_grid(maps, images.shape, align_corners=False)
    return F.grid_sample(images, grid, "nearest", align_corners=False)


# ---- Training: nothing to change here ------------------------------------------------------------
class TensorLoader:
    """What a DataLoader does, for tensors that lie on the device: a batch is one indexing."""

    def __init__(self, tensors, order, batch_size):
        self.tensors, self.order, self.batch_size = tensors, order, batch_size

    def __iter__(self):
        order = torch.tensor(list(self.order), device=self.tensors[0].device)
        for start in range(0, len(order), self.batch_size):
            yield [t.index_select(0, order[start : start + self.batch_size]) for t in self.tensors]


def make_loader(args, dataset, order, batch_size, device):
    """Gives the samples whose numbers are in `order` when it is iterated, a part at a time."""
    batch_size = batch_size // args.accumulate
    if type(dataset) is TensorDataset:  # not a subclass, which may do more than indexing
        return TensorLoader([tensor.to(device) for tensor in dataset.tensors], order, batch_size)
    options = {"persistent_workers": args.workers > 0, "pin_memory": device.type in ("cuda", "xpu")}
    return DataLoader(dataset, batch_size, sampler=order, num_workers=args.workers, **options)


@torch.no_grad()
def evaluate(args, model, loader, device):
    """Over the loader's batches: the sum of the losses, the right labels, all labels."""
    model.eval()
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32  # not all have it
    sums = torch.zeros(3, device=device, dtype=exact)  # float32 miscounts from 2**24 labels on
    for batch in loader:
        inputs, labels = prepare(args, batch, device)
        outputs = model(inputs)
        right, count = count_right(outputs, labels)
        sums[0] += loss_function(outputs, labels) * count
        sums[1] += right
        sums[2] += count
    model.train()
    return sums


def set_seed(seed, device):
    """So that a resumed run drops the same units. (torch.manual_seed takes 0.2 ms, each step.)"""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def main(args):
    device = torch.device(args.device)
    gpus = 1 if args.device == "cpu" else torch.accelerator.device_count()
    gpu = f", {gpus} x {torch.cuda.get_device_name()}" if device.type == "cuda" else ""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, backend none")
    print(f"rank 0: host {socket.gethostname()}, device {device}{gpu}", flush=True)
    if args.epochs == 0:  # a check of the set-up
        return
    torch.set_float32_matmul_precision("high")  # TF32, where a GPU has it
    torch.backends.cudnn.benchmark = True  # all batches have the same shape
    state = load_checkpoint(args)
    train_set, test_set, classes = load_data(args)
    epoch_steps = len(train_set) // args.batch_size  # what is left over trains in another epoch
    if epoch_steps == 0:
        parser.error(f"--batch-size: the training set has only {len(train_set)} samples")
    batch_size = args.batch_size
    order = []  # numbers of this process's samples; filled below, anew for each epoch
    train_loader = make_loader(args, train_set, order, batch_size, device)
    share = range(len(test_set))
    test_loader = make_loader(args, test_set, share, batch_size, device)
    torch.manual_seed(args.seed)
    model = build_model(args, train_set[0][0], classes).to(device)
    parallel = model if args.device == "cpu" else nn.DataParallel(model)  # spreads each batch
    optimizer, scheduler = build_optimizer(args, model, args.epochs * epoch_steps)
    if "model" in state:
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
        scheduler.load_state_dict(state.pop("scheduler"))
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) and scheduler.last_epoch > 0:
            scheduler.last_epoch -= 1  # so that step() computes the same rate again,
            scheduler.step()  # or that of more --epochs
    evaluate(args, parallel, islice(test_loader, 2), device)  # a mistake in it shows now
    print(f"into {args.output}, from epoch {state['epoch'] + 1}, step {state['step'] + 1} on")
    save_checkpoint(args, state, model, optimizer, scheduler)  # no disk, no rights: fail now
    torch.manual_seed(args.seed + scheduler.last_epoch)  # of loader workers
    loss_sum = torch.zeros((), device=device)  # of the steps since the last progress line
    for epoch in range(state["epoch"], args.epochs):
        generator = torch.Generator().manual_seed(args.seed + epoch)
        shuffled = torch.randperm(len(train_set), generator=generator).tolist()
        order[:] = shuffled[state["step"] * batch_size : epoch_steps * batch_size]
        start = time.perf_counter() - state["seconds"]
        saved = state["seconds"]  # when the last checkpoint was written
        for i, batch in enumerate(train_loader, state["step"] * args.accumulate):
            step, part = i // args.accumulate + 1, i % args.accumulate
            run_step = epoch * epoch_steps + step
            run_part = run_step * args.accumulate + part
            set_seed(args.seed + run_part * gpus, device)
            for card in range(1, gpus):  # or all replicas would drop the same units
                with torch.accelerator.device_index(card):
                    set_seed(args.seed + run_part * gpus + card, device)
            inputs, labels = prepare(args, batch, device)
            if args.augment:
                inputs = augment(args, inputs, run_step, part=part)
            loss = loss_function(parallel(inputs), labels) / args.accumulate
            loss.backward()
            loss_sum += loss.detach()
            if part + 1 < args.accumulate:
                continue  # the next part adds its gradient
            if args.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

            if step % args.log_every and step < epoch_steps:
                continue  # nothing above waits for the device
            state["loss_sum"] += loss_sum.item()
            loss_sum.zero_()
            state.update(epoch=epoch, step=step, seconds=time.perf_counter() - start)
            speed = step * args.batch_size / state["seconds"]
            left = (args.epochs * epoch_steps - run_step) * args.batch_size / speed / 60
            place = f"epoch {epoch + 1}/{args.epochs} step {step}/{epoch_steps}"
            rates = f"loss {state['loss_sum'] / step:.4f} {speed:.0f} images/s {left:.1f} min left"
            print(place, rates, flush=True)
            if state["seconds"] - saved >= args.checkpoint_minutes * 60:
                save_checkpoint(args, state, model, optimizer, scheduler)
                saved = state["seconds"]

        sums = evaluate(args, parallel, test_loader, device)
        test_loss, accuracy = (total / max(1, sums[2].item()) for total in sums[:2].tolist())
        peak = 0 if device.type in ("cpu", "mps") else torch.accelerator.max_memory_allocated()
        train_loss, seconds = state["loss_sum"] / epoch_steps, state["seconds"]
        speed = epoch_steps * args.batch_size / seconds
        row = [epoch + 1, train_loss, test_loss, accuracy, seconds, speed, peak / 2**20]
        state["metrics"] += ",".join(map(str, row)) + "\n"
        state.update(epoch=epoch + 1, step=0, loss_sum=0.0, seconds=0.0)
        losses = f"train loss {train_loss:.4f} test loss {test_loss:.4f}"
        print(f"epoch {epoch + 1}: {losses} accuracy {accuracy:.4f} {seconds:.1f} s", flush=True)
        save_checkpoint(args, state, model, optimizer, scheduler)
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


def save_checkpoint(args, state, model, optimizer, scheduler):
    """A run that is killed between the two files writes metrics.csv again after --resume."""
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "model.pt").unlink(missing_ok=True)  # only a finished run has one
    (args.output / "metrics.csv").write_text(state["metrics"])
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    save_whole(state | {k: v.state_dict() for k, v in parts.items()}, args.output / "last.pt")


def load_checkpoint(args):
    """With --resume, what is in last.pt if it is there; else the state of a new run."""
    path, flags = args.output / "last.pt", {"batch_size": args.batch_size, "seed": args.seed}
    columns = "epoch,train_loss,test_loss,test_accuracy,seconds,images_per_second,peak_memory_mib\n"
    if not args.resume or not path.exists():
        return flags | {"epoch": 0, "step": 0, "loss_sum": 0.0, "seconds": 0.0, "metrics": columns}
    state = torch.load(path, map_location="cpu", weights_only=True)
    if flags != {name: state[name] for name in flags}:  # it would repeat or leave out samples
        parser.error(f"{path} needs --batch-size {state['batch_size']} and --seed {state['seed']}")
    return state


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
devices = [name for name in devices if name != "xpu"]  # DataParallel has no scatter for it
add = parser.add_argument  # those down to --augment belong to your model and data
add("--dataset", default="cifar10", help="cifar10, fashion-mnist, synthetic, or a folder")
add("--data-dir", default="data", help="where torchvision's data sets live")
add("--image-size", type=at_least(1), default=32, help="side that a folder's images get")
add("--repeat", type=at_least(1), default=1, help="copies of the channels: a heavier input")
add("--model", choices=("net", "resnet18", "mlp"), default="net", help="the network")
add("--optimizer", choices=("sgd", "adam"), default="sgd", help="sgd has momentum 0.9")
add("--lr", type=at_least(0, float), default=0.001, help="learning rate; --resume keeps its own")
add("--lr-schedule", choices=("constant", "cosine"), default="constant", help="of the rate")
add("--warmup-steps", type=at_least(0), default=0, help="steps in which the rate rises to --lr")
add("--augment", action="store_true", help="random flip and shift by up to 4 pixels")
add("--workers", type=at_least(0), default=min(4, os.cpu_count()), help="DataLoader's, per process")
add("--clip-norm", type=at_least(0, float), default=0, help="largest norm of the gradient; 0: any")
add("--epochs", type=at_least(0), default=10, help="0: only say who is where")
add("--batch-size", type=at_least(1), default=64, help="samples of a step, over all devices")
add("--accumulate", type=at_least(1), default=1, help="parts of a batch, one by one: less memory")
add("--device", choices=devices, default=devices[0], help="CUDA_VISIBLE_DEVICES chooses GPUs")
add("--seed", type=int, default=76, help="of weights, order and random numbers")
add("--output", type=Path, default=Path("runs", Path(__file__).stem), help="folder to write to")
add("--resume", action="store_true", help="go on from last.pt in --output, if it is there")
add("--overwrite", action="store_true", help="begin anew, even if --output has a last.pt")
add("--checkpoint-minutes", type=at_least(0, float), default=5, help="between two checkpoints")
add("--log-every", type=at_least(1), default=100, help="steps between progress lines")

if __name__ == "__main__":
    args = parser.parse_args()
    if args.batch_size % args.accumulate:
        parser.error("--batch-size has to be a multiple of --accumulate")
    if args.epochs and not (args.resume or args.overwrite) and (args.output / "last.pt").exists():
        parser.error(f"{args.output} has a run: --resume goes on with it, --overwrite begins anew")
    main(args)

"""What throughput.py compares the scripts with. It has the flags of train_single.py, and a LOOP.

usual: the loop of most tutorials, with `loss.item()` in each step; accelerate, lightning: that loop
through these libraries, without logger, checkpoints and progress bar; limit: the step alone, on one
batch that is on the device. Model, optimizer and precision are the scripts' own.
"""

import time
from itertools import islice

import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms

import train_single as scripts  # the copy that lies beside this one

NORMALIZE = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
TRANSFORM = transforms.Compose([Image.fromarray, transforms.ToTensor(), NORMALIZE])


def collate(samples):
    return default_collate([(TRANSFORM(image), label) for image, label in samples])


def per_sample_loader(dataset):
    """A DataLoader that does for each image of a TensorDataset what torchvision's CIFAR10 does."""
    images = dataset.tensors[0].permute(0, 2, 3, 1).contiguous().numpy()
    samples = [*zip(images, dataset.tensors[1].tolist())]
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options |= {"pin_memory": device.type == "cuda", "shuffle": True, "drop_last": True}
    return DataLoader(samples, args.batch_size, collate_fn=collate, **options)


class CollectionLoader:
    """The scripts' sampler, loader and `prepare` as one iterable, which shuffles each epoch."""

    def __init__(self, dataset):
        self.order, self.epoch = scripts.EpochSampler(dataset, args.seed), 0
        self.loader = scripts.make_loader(args, dataset, args.batch_size, self.order, device)

    def __iter__(self):
        self.order.set_epoch(self.epoch, start=0)
        self.epoch += 1
        yield from (scripts.prepare(args, batch, device) for batch in islice(self.loader, steps))


def start():  # an epoch's training
    seconds.append(-time.perf_counter())


def stop():
    if device.type != "cpu":
        torch.accelerator.synchronize()
    seconds[-1] += time.perf_counter()


def usual(model, optimizer, loader, criterion=scripts.loss_function, accelerator=None, wait=True):
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    for _ in range(args.epochs):
        start()
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with autocast:
                loss = criterion(model(inputs), labels)
            accelerator.backward(loss) if accelerator else loss.backward()
            optimizer.step()
            if wait:
                loss.item()
        stop()


def accelerate(model, optimizer, loader):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    usual(model, optimizer, loader, accelerator=accelerator, wait=False)


def lightning(model, optimizer, loader):
    from lightning import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
            self.on_train_epoch_start, self.on_train_epoch_end = start, stop

        def training_step(self, batch, batch_idx):
            inputs, labels = batch
            return scripts.loss_function(self.model(inputs), labels)

        def configure_optimizers(self):
            return optimizer

    off = "logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"
    options = dict.fromkeys(off, False) | {"max_epochs": args.epochs}
    Trainer(accelerator=device.type, devices=1, **options).fit(Classifier(), loader)


def limit(model, optimizer, loader):
    batch, criterion = next(iter(loader)), scripts.loss_function
    if args.compile:
        model.compile(dynamic=False)
        criterion = torch.compile(criterion, dynamic=False)
    usual(model, optimizer, [batch] * steps, criterion, wait=False)


if __name__ == "__main__":
    loops = {loop.__name__: loop for loop in (usual, accelerate, lightning, limit)}
    scripts.parser.add_argument("loop", choices=loops)
    scripts.parser.add_argument("--per-sample", action="store_true", help="a usual DataLoader")
    args = scripts.parser.parse_args()
    device, seconds = torch.device(args.device), []
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    train_set, _, classes = scripts.load_data(args)
    steps = len(train_set) // args.batch_size
    torch.manual_seed(args.seed)
    model = scripts.build_model(args, train_set[0][0], classes).to(device)
    optimizer, _ = scripts.build_optimizer(args, model, steps)
    loader = per_sample_loader(train_set) if args.per_sample else CollectionLoader(train_set)
    loops[args.loop](model, optimizer, loader)
    rows = ["samples_per_second,peak_memory_mib"]
    rows += [f"{steps * args.batch_size / time},0" for time in seconds]
    args.output.mkdir()
    (args.output / "metrics.csv").write_text("\n".join(rows))

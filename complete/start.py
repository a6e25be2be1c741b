"""What happens before the first step, once the processes have joined: the data are loaded, and the
weights that the run starts from.

All ranks call the functions of this file together that communicate: find_start, load_weights,
try_model, and all that end in `on_all_ranks`.
"""

import os
import traceback
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from files import FileError, Start, check_file, dataset_name, find_run, read_weights
from loaders import seed_everything
from ranks import (
    call_on_all_ranks,
    compare_on_all_ranks,
    flag,
    gather,
    hash_of,
    refuse_on_all_ranks,
)
from torch import nn
from torch.func import functional_call
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision import models
from torchvision.datasets import DatasetFolder


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

"""What a run writes into --output, and how it is resumed.

checkpoint-EPOCH-STEP/  the parts of `state`, by torch.distributed.checkpoint; a file of each rank
last.json               names the newest complete checkpoint: the run is where this one is
best.pt, metrics.csv    are moved out of a checkpoint's folder once last.json names it
"""

import hashlib
import json
import os
import re
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision.datasets import DatasetFolder

SHARED_DISK = "put --output on a disk that all machines share"


@dataclass
class Progress:
    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch
    loss_sum: float = 0.0  # sum of the losses of these steps
    seconds: float = 0.0  # training time of these steps
    metrics: list = field(default_factory=list)  # a dictionary for each finished epoch


def is_best(progress):
    """Whether the epoch that has just ended has the lowest test loss so far."""
    losses = [row["test_loss"] for row in progress.metrics]
    return progress.step == 0 and losses[-1] == min(losses)


# ---- When to save --------------------------------------------------------------------------------
class SaveClock:
    """Tells all ranks at the same step that a checkpoint is due by rank 0's clock. Progress lines
    ask rank 0 as they reduce the loss; between two of them rank 0's answer is sent at one step and
    read at a later one, so that nothing waits for the GPU."""

    def __init__(self, minutes, device, is_new):
        self.seconds, self.saved_at = 60 * minutes, time.perf_counter()
        self.is_new = is_new  # a new run saves at its first progress line, to find out if it can
        self.every, self.next_step, self.is_asked = 10, 10, False  # steps between two questions
        self.answer = torch.zeros((), device=device)  # as `every`, or 0: save
        self.copy = torch.zeros(())
        if device.type in ("cuda", "xpu"):
            self.copy = self.copy.pin_memory()

    def is_due(self):
        """By this rank's clock."""
        return time.perf_counter() - self.saved_at >= self.seconds

    def saved(self):
        self.saved_at, self.is_new = time.perf_counter(), False

    def restart(self, step):
        """After a progress line or a save: forget a question whose answer was not read."""
        self.next_step, self.is_asked = step + self.every, False

    def says_save(self, step, step_seconds):
        """Whether all ranks save now; called by all after each step. `step_seconds` is what a step
        takes: twenty questions are asked in the time between two checkpoints."""
        if step < self.next_step:
            return False
        if self.is_asked:
            while self.copy.item() < 0:  # the GPU is more than `every` steps behind
                time.sleep(0.001)
            if self.copy.item() == 0:
                return True
            self.every = int(self.copy.item())
        self.restart(step)
        every = min(100, max(1, int(self.seconds / 20 / step_seconds)))
        self.answer.fill_(0 if self.is_due() else every)
        dist.broadcast(self.answer, 0)
        self.copy.fill_(-1)  # until the GPU has copied the answer
        self.copy.copy_(self.answer, non_blocking=True)
        self.is_asked = True
        return False


# ---- Saving --------------------------------------------------------------------------------------
@contextmanager
def atomic_write(path):
    """Open a file beside `path`, which takes its place at the end. After a kill, the file at `path`
    is the old one or the new one, and whole."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without it a power failure could leave a new, empty file
    except (OSError, RuntimeError) as error:  # of a full disk, torch says "unexpected pos"
        raise OSError(f"cannot write {path}: is the disk full?") from error
    os.replace(f"{path}.tmp", path)


def save_checkpoint(args, progress, state, about):
    """Write a checkpoint, to which every rank adds its part; last.json then names it. After an
    epoch with the lowest test loss so far, write best.pt too. `about` is what else last.json has.
    All ranks must call it. Raises OSError where something cannot be written."""
    broadcast_buffers(args, state)
    folder = args.output / f"checkpoint-{progress.epoch}-{progress.step}"
    contents = state_dicts(state)
    if progress.step > 0:  # an epoch begins with new random numbers
        contents["random"] = {str(dist.get_rank()): random_states(args)}
    try:
        # By default, copies of the tensors would remain in pinned memory.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        dcp.save(contents, storage_writer=writer)
    except dcp.CheckpointException as error:
        raise OSError(f"cannot write {folder}") from error
    if is_best(progress):
        save_weights(state["model"], folder / "best.pt")
    if dist.get_rank() == 0:
        if not is_complete(folder):
            raise SystemExit(f"{folder} lacks parts of other ranks: {SHARED_DISK}")
        with open(folder / ".metadata", "rb") as file:
            os.fsync(file.fileno())  # torch 2.13 and older would leave it to a power failure
        (args.output / "model.pt").unlink(missing_ok=True)  # only a finished run has one
        if progress.step == 0:
            write_metrics(folder / "metrics.csv", progress.metrics)
        write_last(args, progress, folder.name, about)
        finish_save(args, folder.name)


def finish_save(args, checkpoint):
    """What remains to be done once last.json names the checkpoint; again, if a kill prevented it.
    Until then best.pt and metrics.csv belong to an older one, as last.json does."""
    for name in ("best.pt", "metrics.csv"):
        if (args.output / checkpoint / name).exists():
            os.replace(args.output / checkpoint / name, args.output / name)
    remove_checkpoints(args, checkpoint)


def remove_checkpoints(args, kept):
    """Remove all checkpoints in --output but one: older ones, and those of interrupted saves."""
    for path in args.output.glob("checkpoint-*"):
        if path.name != kept and re.fullmatch(r"checkpoint-\d+-\d+", path.name):
            shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that someone has open


def write_metrics(path, rows):
    """With the columns of the newest row: those from before a resume may have had others."""
    lines = [list(rows[-1]), *([row.get(name, "") for name in rows[-1]] for row in rows)]
    with atomic_write(path) as file:
        file.write("".join(",".join(map(str, line)) + "\n" for line in lines).encode())


def write_last(args, progress, checkpoint, about, claim=False):
    """Write last.json, which names the newest complete checkpoint, or None before the first. With
    `claim`, fail if there is one: another run has started in the folder at the same moment."""
    content = json.dumps({"checkpoint": checkpoint, "progress": asdict(progress)} | about).encode()
    path = args.output / "last.json"
    if not claim:
        with atomic_write(path) as file:
            file.write(content)
        return
    with open(path, "xb", buffering=0) as file:
        try:
            file.write(content)
        except OSError as error:
            path.unlink()
            raise OSError(f"cannot write {path}: is the disk full?") from error


def save_weights(model, path):
    """Write the whole, plain state_dict, gathered onto rank 0's CPU. All ranks must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        with atomic_write(path) as file:
            torch.save(weights, file)


def broadcast_buffers(args, state):
    """Copy rank 0's buffers to all ranks: each rank's batch norm has seen its own samples."""
    for part in state.values():
        if isinstance(part, nn.Module):
            for buffer in part.buffers():
                if buffer.device.type == args.device:  # AveragedModel counts on the CPU
                    dist.broadcast(buffer, 0)


def random_states(args):
    """The states of the random number generators of this rank's CPU and GPU."""
    states = {"cpu": torch.get_rng_state()}
    if args.device in ("cuda", "xpu") and torch.accelerator.is_available():
        states[args.device] = torch.get_device_module(args.device).get_rng_state()
    return states


def set_random_states(states):
    """Let this rank's random number generators continue from what `random_states` has returned."""
    for kind, random in states.items():
        generators = torch if kind == "cpu" else torch.get_device_module(kind)
        generators.set_rng_state(random)


def state_dicts(state):
    """The state_dict of each part of `state`, with strings as keys, as dcp.save needs it."""
    contents = {name: part.state_dict() for name, part in state.items()}
    for name, part in state.items():
        if isinstance(part, torch.optim.Optimizer):  # it numbers its parameters
            momenta, groups = contents[name]["state"], contents[name]["param_groups"]
            momenta = {str(number): momenta[number] for number in momenta}
            # "fused" stays this optimizer's own: DTensors of --shard do not support it for SGD.
            groups = [{k: v for k, v in group.items() if k != "fused"} for group in groups]
            contents[name] = {"state": momenta, "param_groups": (groups,)}
        elif not any(map(torch.is_tensor, contents[name].values())):
            contents[name] = (contents[name],)  # a tuple is saved whole: dictionaries may grow
    return contents


# ---- Resuming ------------------------------------------------------------------------------------
def read_last(args, claim):
    """What last.json says, if the run is to be resumed from a checkpoint; else None. All ranks must
    call it. `claim`: there was none before they joined. Raises SystemExit if another run has begun
    meanwhile, or if they do not see the same file."""
    last = read_json(args.output / "last.json")
    if last and claim:
        raise SystemExit(f"another run has just started in {args.output}")
    last = last if args.resume and last.get("checkpoint") else None
    checkpoints = [None] * dist.get_world_size()
    dist.all_gather_object(checkpoints, last["checkpoint"] if last else None)
    if len(set(checkpoints)) > 1:
        raise SystemExit(f"the processes see different files: {SHARED_DISK}")
    return last


def read_json(path):
    """The dictionary in a file. It is empty where the file is missing, or empty after a kill."""
    return json.loads(path.read_text() or "{}") if path.exists() else {}


def read_beside(weights):
    """What last.json says of the run that wrote a model.pt or best.pt, if it lies beside it."""
    return read_json(Path(weights).parent / "last.json")


def begin_run(args, progress, last, about, claim):
    """Prepare --output for a run that is new, or that continues from `last`."""
    if last:
        finish_save(args, last["checkpoint"])
        if progress.metrics:  # later rows are of epochs that are now repeated
            write_metrics(args.output / "metrics.csv", progress.metrics)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    if args.overwrite:
        for name in ("best.pt", "model.pt", "metrics.csv"):
            (args.output / name).unlink(missing_ok=True)
    write_last(args, progress, None, about, claim)
    remove_checkpoints(args, None)


def last_checkpoint(args):
    """What a run that ends now can be resumed from, in words."""
    name = read_json(args.output / "last.json")["checkpoint"]
    return f"{args.output / name} is from before" if name else "there is no checkpoint yet"


def load_checkpoint(args, state, last):
    """Restore `state` from the checkpoint that `last` names. Returns the states of this rank's
    random number generators, if they are in it. All ranks must call it."""
    folder = args.output / last["checkpoint"]
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    with_momenta = {".".join(name.split(".")[:3]) for name in saved}  # "optimizer.state.0", ...
    optimizers = {n: part for n, part in state.items() if isinstance(part, torch.optim.Optimizer)}
    for name, optimizer in optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            if f"{name}.state.{number}" in with_momenta:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes momenta for dcp.load to fill; the weights are loaded, too
        optimizer.zero_grad()
    contents, rank = state_dicts(state), str(dist.get_rank())
    random = random_states(args).items()
    here = {kind: x for kind, x in random if f"random.{rank}.{kind}" in saved}
    contents["random"] = {rank: here}  # nothing, on a rank or a device that the run had not
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(contents)  # its state_dict has the names that dcp.load looks for
    differ = sorted({*planner.state_dict} ^ {*saved})
    differ = [name for name in differ if not name.startswith("random.")]
    if differ:  # such as "model.fc.weight", or a second optimizer's
        raise SystemExit(f"{folder} and the script differ in {', '.join(differ[:9])}")
    dcp.load(contents, checkpoint_id=folder, planner=planner)  # into the tensors that are there
    for name, part in state.items():
        content = contents[name][0] if isinstance(contents[name], tuple) else contents[name]
        if name in optimizers:
            momenta = {int(number): momenta for number, momenta in content["state"].items()}
            groups = content["param_groups"][0]
            for group, own in zip(groups, part.param_groups):
                group["fused"] = own.get("fused")
            content = {"state": momenta, "param_groups": groups}
        if content:  # a scaler's is empty without float16
            part.load_state_dict(content)
    return here


def is_complete(folder):
    """Whether the files of a checkpoint are as long as its index says."""
    try:
        parts = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
        sizes = {part.relative_path: (folder / part.relative_path).stat().st_size for part in parts}
    except Exception:  # pickle has one for each way in which a file can be broken
        return False
    return all(part.offset + part.length <= sizes[part.relative_path] for part in parts)


def check_output(args, flags):
    """Why the run cannot be started, or resumed, in --output, or "". `flags` define the run."""
    path, best = args.output / "last.json", f"start a new run with --init {args.output / 'best.pt'}"
    signs = ("last.json", "*.pt", "epoch-*", "checkpoint-*")  # of a run of any script
    found = [other for sign in signs for other in args.output.glob(sign)]
    if args.overwrite or not found or found == [path] and path.stat().st_size == 0:
        return ""  # an empty last.json is from a kill as the run began
    if not args.resume:
        return f"{args.output} has a run: --resume continues it, --overwrite replaces it"
    if not path.exists():
        return f"{args.output} has a run of another script or version: use another --output"
    try:
        last = json.loads(path.read_text())
        progress, checkpoint = last["progress"], last["checkpoint"]
        saved, _ = last["flags"], last["data"]["test"]
    except (ValueError, KeyError, TypeError):
        return f"{path} is damaged, or of an older version: put a copy back, or {best}"
    for name, old in saved.items():  # flags that it lacks are not compared
        new = flags.get(name, old)
        if old != new:
            flag = name.replace("_", "-")
            return f"{path} was started with --{flag} {old}, not {new}: use the same flags"
    epoch, step = progress["epoch"], progress["step"]
    if epoch + (step > 0) > args.epochs:
        return f"--epochs {args.epochs}: {path} already has {epoch} epochs and {step} steps"
    if checkpoint and not is_complete(args.output / checkpoint):
        return f"{args.output / checkpoint} is damaged: put a copy back, or {best}"
    return ""


# ---- The same data -------------------------------------------------------------------------------
def data_identity(train_set, test_set, classes):
    """What every rank and a resumed run must find again: the names of the classes, if the training
    set has names, and how many and which samples. A data set may be moved to another folder."""
    names = getattr(train_set, "classes", None)
    names = [str(name) for name in names] if isinstance(names, (list, tuple)) else [classes]
    return {"classes": names, "train": fingerprint(train_set), "test": fingerprint(test_set)}


def describe(data, classes):
    """In words: how many samples and classes, with the names of the first and the last."""
    names = [ascii(name) for name in data["classes"]] if data["classes"] != [classes] else []
    names = names if len(names) <= 10 else [*names[:5], "...", *names[-3:]]
    counts = f"{data['train']['samples']} training samples, {data['test']['samples']} test samples"
    return f"{counts}, {classes} classes" + f" ({', '.join(names)})" * (len(names) > 0)


def fingerprint(dataset):
    """The number of samples, and a hash of their paths, relative to the folder that has all, and of
    their labels, as far as the data set has these."""
    if isinstance(dataset, Subset):
        whole = fingerprint(dataset.dataset)["hash"].encode()
        chosen = np.asarray(dataset.indices, np.int64).tobytes()
        return {"samples": len(dataset), "hash": hash_of([whole, chosen])}
    if isinstance(dataset, ConcatDataset):
        parts = [fingerprint(part)["hash"].encode() for part in dataset.datasets]
        return {"samples": len(dataset), "hash": hash_of(parts)}
    paths, labels = getattr(dataset, "paths", None), getattr(dataset, "targets", None)
    if isinstance(dataset, DatasetFolder):
        paths = [path for path, _ in dataset.samples]
    if isinstance(dataset, TensorDataset):
        labels = dataset.tensors[-1]
    content = []
    if paths is not None and len(paths) > 0:
        first, last = (os.fsencode(choose(paths)) for choose in (min, max))
        shared = len(os.path.dirname(os.path.commonprefix([first, last])))
        content = (os.fsencode(path)[shared:].lstrip(b"/") + b"\0" for path in paths)
    if torch.is_tensor(labels):
        labels = labels.cpu().contiguous().view(torch.uint8)
    numbers = np.empty(0)
    with suppress(ValueError, TypeError):  # boxes, say, of which images have different numbers
        numbers = np.asarray(labels)
    numbers = [numbers.tobytes()] if numbers.dtype.kind in "biuf" else []
    return {"samples": len(dataset), "hash": hash_of(chain(content, numbers))}


def hash_of(parts):
    """A hash of bytes that come in parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


def difference(old, new, then="", now=""):
    """In what two identities of data differ, or ""; `then` and `now` say whose they are."""
    if old["classes"] != new["classes"]:
        gone = [name for name in old["classes"] if name not in new["classes"]]
        more = [name for name in new["classes"] if name not in old["classes"]]
        change = f"{ascii(gone)}{then or ' then'}, {ascii(more)}{now or ' now'}"
        return f"other classes: {change if gone or more else 'another order'}"
    for part, name in ("train", "training"), ("test", "test"):
        (samples, key), (other, other_key) = old[part].values(), new[part].values()
        if samples != other:
            return f"{samples} {name} samples{then}, not {other}{now}"
        if key != other_key:
            return f"other {name} samples, by their paths or labels: {key}{then}, {other_key}{now}"
    return ""


def check_data(args, last, data):
    """Why a run cannot continue with these data, or a --evaluate be believed, or ""."""
    path = args.output / "last.json"
    if last and (differ := difference(last["data"], data)):
        return f"{path} was started with {differ}: use the same data"
    run = read_beside(args.init) if args.evaluate else {}
    trained = run.get("data", data)
    if trained["classes"] != data["classes"]:
        return f"{args.init} was trained with {difference(trained, data)}"
    if trained["train"] != data["train"] and run["flags"]["dataset"] == Path(args.dataset).name:
        differ = difference(trained | {"test": data["test"]}, data)
        return f"{args.init} was trained with {differ}: what is tested may be part of it"
    return ""


def compare_ranks(data):
    """Raise SystemExit unless all ranks have found the same data."""
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, hash_of([json.dumps(data).encode()]))
    if len(set(hashes)) > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, data)
        rank = [own != hashes[0] for own in hashes].index(True)
        differ = difference(found[0], found[rank], " on rank 0", f" on rank {rank}")
        raise SystemExit(f"the ranks have different data: {differ}")

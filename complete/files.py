"""The files of a run: what it writes to --output, and how it is found there again after a kill.

checkpoint.pt  what --resume needs: the state_dict of each part of `state`, and how far the run is
best.pt        the weights of the best epoch so far
model.pt       the weights at the end
metrics.csv    a row for each epoch

Each .pt file also has what its weights belong to: the flags, the classes, the normalization, and
what identifies the data. An empty checkpoint.pt is of a run that has not saved anything yet.
"""

import os
import pickle
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

# What is chosen on images has scores on them that are a little too good.
ON_OTHERS = "on other images, expect slightly lower scores"


# ---- Files ---------------------------------------------------------------------------------------
@contextmanager
def atomic_write(path):
    """Open a file beside `path`, which takes its place at the end. After a kill, the file at `path`
    is the old one or the new one, and whole."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without it a power failure could leave a new, empty file
        os.replace(f"{path}.tmp", path)
    except OSError as error:  # which does not always say which file it is
        raise OSError(f"cannot write {path}: {error}") from error
    except RuntimeError as error:  # torch says "unexpected pos" after what the disk has said
        if not isinstance(error.__context__, OSError):
            raise
        raise OSError(f"cannot write {path}: {error.__context__}") from error


class FileError(Exception):
    """Says in a line what is wrong with a file, and what to do."""


class UnsafeFileError(FileError):
    """The file has objects of which the classes are not allowed: loading it could run any code."""


def load(path, mmap=True):
    """The content of a .pt file. With `mmap`, tensors are read when they are used."""
    # Files of old versions of torch are no zip files.
    is_zip = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", mmap=mmap and is_zip, weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path} is missing") from None
    except Exception as error:  # also of many kinds
        if is_zip and isinstance(error, pickle.UnpicklingError):
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            remedy = "if you trust it, name them in train.py: torch.serialization.add_safe_globals"
            raise UnsafeFileError(f"{path} has objects of {', '.join(unsafe)}: {remedy}") from None
        raise FileError(f"{path} is damaged, or of another kind: {error}") from error


def check_file(path):
    """Raise FileError if bytes have changed since a .pt file was written. torch.load does not
    look. Reads the whole file: a second per GB."""
    if not zipfile.is_zipfile(path):  # of an old version of torch, or torch.load says what it is
        return
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # by the checksum of each tensor
    except Exception as error:  # there is one for each way in which a file can be broken
        damaged = error
    if damaged is not None:
        raise FileError(f"{path} is damaged")


def file_identity(path):
    """Tells whether another process has replaced a .pt file: its last bytes, which have checksums
    of the rest. (Times and inode numbers may change by themselves on network disks.) None if there
    is no file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            return size, file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


# ---- What a run starts from ----------------------------------------------------------------------
@dataclass
class Progress:
    """How far a run is."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch, at the last report
    loss_sum: float = 0.0  # sum of the losses of these steps
    seconds: float = 0.0  # training time of these steps
    metrics: list = field(default_factory=list)  # a row, as a dictionary, for each finished epoch


@dataclass
class Start:
    """What a run starts from: random weights, those of a file, or a checkpoint of its own."""

    file: str = ""  # where the weights are from, in words; "": they are random
    weights: dict | None = None  # of a file, on rank 0 alone, as DDP copies them to the others
    # What belongs to the weights; None if it is not known, as of a plain state_dict.
    flags: dict | None = None
    normalization: list | None = None
    identity: dict | None = None  # of the data: see start.identify
    # Of a checkpoint that is resumed:
    is_resumed: bool = False
    progress: Progress = field(default_factory=Progress)
    version: tuple | None = None  # file_identity of the checkpoint.pt that was found, if any

    def print_scores(self, data, scores):
        """Those of --evaluate."""
        print(f"{self.file}: {in_words(columns(data.part, scores))}")
        seen = self.identity["data"].get(data.part) if self.identity else None
        if Path(self.file).name == "best.pt" and seen == data.identity["data"][data.part]:
            print(f"best.pt was chosen on these images: {ON_OTHERS}")


def read_weights(path):
    """A Start with the weights of a best.pt, model.pt or checkpoint.pt, and with what belongs to
    them; with the weights alone of a plain state_dict. Raises FileError."""
    check_file(path)
    content = load(path)
    if not isinstance(content, dict):
        raise FileError(f"{path} has no weights")
    if "model" not in content:
        return Start(str(path), content)
    flags, normalization = content.get("flags"), content.get("normalization")
    return Start(str(path), content["model"], flags, normalization, identity_in(content))


def identity_in(content):
    names = ("classes", "data", "image")
    return {name: content[name] for name in names} if content.keys() >= {*names} else None


def dataset_name(args):
    """The last part of --dataset, as a folder may be moved; of `.`, the name of the folder."""
    return os.path.basename(os.path.abspath(args.dataset))


def flags_of_run(args, may_change):
    """The flags with which a run must be resumed: all but those named in `may_change`."""
    flags = {name: value for name, value in vars(args).items() if name not in may_change}
    flags["dataset"] = dataset_name(args)
    simple = (bool, int, float, str)  # which torch.load reads with weights_only
    return {name: x if isinstance(x, simple) else str(x) for name, x in flags.items()}


def find_run(args, may_change):
    """What is in --output: a Start from its checkpoint, or, as long as there is none, from random
    weights. Raises FileError if no run can start there, or continue."""
    folder, path = args.output, args.output / "checkpoint.pt"
    new = Start(version=file_identity(path))
    best = f"start a new run with --init {folder / 'best.pt'}"
    parent = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if not parent.is_dir():
        raise FileError(f"--output {folder}: {parent} is a file: it must be a folder")
    if dist.get_rank() == 0 and not os.access(parent, os.W_OK):  # rank 0 alone writes
        raise FileError(f"--output {folder}: {parent} cannot be written")
    # Of a run of whichever script.
    signs = ("*.pt", "last.json", "latest.json", "epoch-*", "checkpoint-*")
    if args.overwrite or not any(any(folder.glob(sign)) for sign in signs):
        return new
    if (folder / "last.json").exists():
        message = f"{folder} has a run of an older version, which cannot be resumed"
        raise FileError(f"{message}: {best}")
    if not args.resume:
        raise FileError(f"{folder} has a run: --resume continues it, --overwrite replaces it")
    if new.version is None:
        raise FileError(f"{folder} has a run of another script or version: use another --output")
    if path.stat().st_size == 0:  # of a run that has not saved yet
        return new
    try:
        if dist.get_rank() == 0 or dist.get_node_local_rank(1) == 0:  # once per machine
            check_file(path)
        saved = load(path)
        progress, flags = Progress(**saved["progress"]), saved["flags"]
        start = Start(str(path), None, flags, saved["normalization"], identity_in(saved))
    except UnsafeFileError:
        raise
    except FileError as error:
        raise FileError(f"{error}: put a copy back, or {best}") from error
    except (KeyError, TypeError):
        raise FileError(f"{path} is of another script: use another --output") from None
    for name, now in flags_of_run(args, may_change).items():
        then = flags.get(name, now)  # flags that it lacks are not compared
        if then != now:
            flag = name.replace("_", "-")
            message = f"{path} was started with --{flag} {then}, not {now}"
            raise FileError(f"{message}: use the same flags")
    done = f"{progress.epoch} epochs and {progress.step} steps"
    if progress.epoch + (progress.step > 0) > args.epochs:
        raise FileError(f"--epochs {args.epochs}: {path} already has {done}")
    start.is_resumed, start.progress, start.version = True, progress, new.version
    return start


# ---- What a run writes ---------------------------------------------------------------------------
class Files:
    """What a run has in --output. Rank 0 alone writes."""

    def __init__(self, folder, state, about, version):
        """`state`: the parts of which a checkpoint has the state_dict. `about`: what each .pt file
        has besides. `version`: file_identity of the checkpoint.pt that was found, if any."""
        self.folder, self.path = folder, folder / "checkpoint.pt"
        self.state, self.about, self.version = state, about, version

    def restore(self, device):
        """Load the checkpoint into `state`."""
        # A GPU copies what it reads. On a CPU, momenta would stay in a file that may be replaced.
        saved = load(self.path, mmap=device.type != "cpu")
        self.check_owner()
        differ = self.state.keys() ^ (saved.keys() - {"progress", *self.about})
        if differ:  # such as a second optimizer
            names = ", ".join(sorted(differ))
            raise SystemExit(f"{self.path} and the script differ in what `state` has: {names}")
        for name, part in self.state.items():
            try:
                load_part(part, saved[name])
            except Exception as error:
                raise SystemExit(f"{self.path} and the script differ in {name}: {error}") from error

    def claim(self):
        """Mark the folder as that of a new run. Of two that start at the same moment, one can."""
        try:
            self.folder.resolve().mkdir(parents=True, exist_ok=True)  # also where a link points to
            (self.folder / "model.pt").unlink(missing_ok=True)  # of a run that --overwrite replaces
            open(self.path, "xb" if self.version is None else "wb").close()
            self.version = file_identity(self.path)
            for name in ("best.pt", "metrics.csv", "last.json"):
                (self.folder / name).unlink(missing_ok=True)
        except FileExistsError:
            raise SystemExit(f"another run has just started in {self.folder}") from None
        except OSError as error:
            raise SystemExit(f"--output {self.folder} cannot be written: {error}") from error

    def check_owner(self):
        """End if checkpoint.pt is not the one that this run has read or written last: then another
        process continues the run, as when a node was given up as lost, but lives."""
        if file_identity(self.path) != self.version:
            raise SystemExit(f"{self.path} was written by another process: this one ends")

    def save(self, progress):
        """After a kill at any moment, --resume finds this checkpoint whole, or the one before."""
        self.check_owner()
        (self.folder / "model.pt").unlink(missing_ok=True)  # only a finished run has one
        parts = {name: part.state_dict() for name, part in self.state.items()}
        with atomic_write(self.path) as file:
            torch.save({**parts, "progress": vars(progress), **self.about}, file)
        self.version = file_identity(self.path)

    def write_weights(self, name):
        """On the CPU, so that they can be loaded without a GPU."""
        weights = {name: x.cpu() for name, x in self.state["model"].state_dict().items()}
        with atomic_write(self.folder / name) as file:
            torch.save({"model": weights, **self.about}, file)

    def write_metrics(self, rows):
        # With the columns of the newest row: those from before a resume may have had others.
        columns = list(rows[-1])
        lines = [columns, *([row.get(name, "") for name in columns] for row in rows)]
        with atomic_write(self.folder / "metrics.csv") as file:
            file.write("".join(",".join(map(str, line)) + "\n" for line in lines).encode())

    def what_is_saved(self):
        """What a run that ends now can be resumed from, in words."""
        if self.path.exists() and self.path.stat().st_size > 0:
            return f"{self.path} is from before"
        return "there is no checkpoint yet"


def load_part(part, saved):
    """Load one part of `state`."""
    if not saved:  # a scaler's without float16
        return
    groups = getattr(part, "param_groups", [])
    fused = [group.get("fused") for group in groups]
    part.load_state_dict(saved)
    for group, is_fused in zip(getattr(part, "param_groups", []), fused):
        group["fused"] = is_fused  # as build_optimizer has chosen for this device
    if isinstance(part, LambdaLR):  # with other --epochs, the next step has another rate
        rates = zip(part.optimizer.param_groups, part.base_lrs, part.lr_lambdas)
        for group, lr, factor in rates:
            group["lr"] = lr * factor(part.last_epoch)


# ---- Scores --------------------------------------------------------------------------------------
def columns(part, scores):
    """Scores under their names in metrics.csv, such as val_accuracy."""
    return {f"{part}_{name}": value for name, value in scores.items()}


def in_words(scores):
    return " ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())

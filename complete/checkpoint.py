"""A run: how far it is, what it writes to --output, and how it continues after a kill.

checkpoint.pt  what --resume needs: the state_dict of each part of `state`, and how far the run is
best.pt        the weights of the best epoch so far
model.pt       the weights at the end
metrics.csv    a row for each epoch

Each .pt file also has what its weights belong to: the flags, the classes, the normalization, and
what identifies the data. An empty checkpoint.pt is of a run that has not saved anything yet.
"""

import math
import os
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

PROGRESS = ("epoch", "step", "loss_sum", "seconds", "metrics")  # of a Run: how far it is
FIRST_REPORT = 10  # steps after which it is known how long one takes


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
    except RuntimeError as error:  # torch says "unexpected pos"
        raise OSError(f"cannot write {path}: {error} (is the disk full?)") from error


class DamagedFile(Exception):
    """Says in a line which file cannot be read, and why."""


def load(path, mmap=True, weights_only=True):
    """The content of a .pt file. With `mmap`, tensors are read when they are used."""
    try:
        # Files of old versions of torch are no zip files.
        mmap = mmap and zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing") from None
    except Exception as error:  # also of many kinds
        raise DamagedFile(f"{path} is damaged, or of another kind: {error}") from error


def check_file(path):
    """Raise DamagedFile if bytes have changed since a .pt file was written. torch.load does not
    look. Reads the whole file: a second per GB."""
    if not zipfile.is_zipfile(path):  # of an old version of torch, or torch.load says what it is
        return
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # by the checksum of each tensor
    except Exception as error:  # there is one for each way in which a file can be broken
        damaged = error
    if damaged is not None:
        raise DamagedFile(f"{path} is damaged")


def read_weights(path):
    """What a best.pt, model.pt or checkpoint.pt has, as a dictionary. "model" are the weights, and
    all that there is of a plain state_dict. Raises DamagedFile."""
    check_file(path)
    content = load(path)
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} has no weights")
    return content if "model" in content else {"model": content}


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


# ---- Which epoch is the best ---------------------------------------------------------------------
def best_epoch(rows, lower_is_better):
    """The number of the best epoch, from 1, by the rows of metrics.csv; 0 as long as there is none.
    A NaN is never the best one, and prevents no other. Of equal ones it is the first."""
    # A row from before a resume may lack a new column.
    missing = dict.fromkeys(rows[-1] if rows else [], math.nan)
    values = [float(lower_is_better(missing | row)) for row in rows]
    numbers = [value for value in values if not math.isnan(value)]
    return values.index(min(numbers)) + 1 if numbers else 0


# ---- The run -------------------------------------------------------------------------------------
class Run:
    """All ranks have the same one, and call its methods together; rank 0 prints and writes."""

    def __init__(self, args, may_change, lower_is_better):
        """`may_change`: names of the flags that may change on --resume."""
        self.args, self.lower_is_better = args, lower_is_better
        self.folder, self.path = args.output, args.output / "checkpoint.pt"
        flags = {name: value for name, value in vars(args).items() if name not in may_change}
        flags["dataset"] = Path(args.dataset).name  # its folder may be moved
        simple = (bool, int, float, str)  # which torch.load reads with weights_only
        self.flags = {name: x if isinstance(x, simple) else str(x) for name, x in flags.items()}
        self.epoch = 0  # finished epochs
        self.step = 0  # finished steps of the current epoch, at the last report
        self.loss_sum = 0.0  # sum of the losses of these steps
        self.seconds = 0.0  # training time of these steps
        self.metrics = []  # a row, as a dictionary, for each finished epoch
        self.parent_pid = os.getppid()  # of torchrun
        self.file = file_identity(self.path)  # of what this run has read or written last
        self.resumed = None  # what checkpoint.pt has, if the run continues from there

    # ---- Before the first step -------------------------------------------------------------------
    def open(self):
        """Read how far the run in --output is, if it is to be resumed. Returns why no run can start
        there, or continue, or ""."""
        args, folder, path = self.args, self.folder, self.path
        best = f"start a new run with --init {folder / 'best.pt'}"
        if folder.exists() and not folder.is_dir():
            return f"--output {folder} is a file: it must be a folder"
        # Of a run of whichever script.
        signs = ("*.pt", "last.json", "latest.json", "epoch-*", "checkpoint-*")
        if args.overwrite or not any(any(folder.glob(sign)) for sign in signs):
            return ""
        if (folder / "last.json").exists():
            return f"{folder} has a run of an older version, which cannot be resumed: {best}"
        if not args.resume:
            return f"{folder} has a run: --resume continues it, --overwrite replaces it"
        if self.file is None:
            return f"{folder} has a run of another script or version: use another --output"
        if path.stat().st_size == 0:
            return ""
        try:
            if dist.get_rank() == 0 or dist.get_node_local_rank(1) == 0:  # once per machine
                check_file(path)
            saved = load(path, weights_only=False)  # `state` may have objects of any kind
            progress, flags = saved["progress"], saved["flags"]
            about = {name: saved[name] for name in ("classes", "normalization", "data", "image")}
        except DamagedFile as error:
            return f"{error}: put a copy back, or {best}"
        except (KeyError, TypeError):
            return f"{path} is of another script: use another --output"
        for name, old in flags.items():  # flags that it lacks are not compared
            new = self.flags.get(name, old)
            if old != new:
                flag = name.replace("_", "-")
                return f"{path} was started with --{flag} {old}, not {new}: use the same flags"
        epoch, step = progress["epoch"], progress["step"]
        if epoch + (step > 0) > args.epochs:
            return f"--epochs {args.epochs}: {path} already has {epoch} epochs and {step} steps"
        for name in PROGRESS:
            setattr(self, name, progress[name])
        self.resumed = about
        return ""

    def restore(self, state, device):
        """`state` is what a checkpoint has. A resumed run gets it from there."""
        self.state, self.device = state, device
        if self.resumed is None:
            return
        # A GPU copies what it reads. On a CPU, momenta would stay in a file that may be replaced.
        saved = load(self.path, mmap=device.type != "cpu", weights_only=False)
        self.check_owner()
        differ = state.keys() ^ (saved.keys() - {"progress", "flags", *self.resumed})
        if differ:  # such as a second optimizer
            names = ", ".join(sorted(differ))
            raise SystemExit(f"{self.path} and the script differ in what `state` has: {names}")
        for name, part in state.items():
            try:
                load_part(part, saved[name])
            except Exception as error:
                raise SystemExit(f"{self.path} and the script differ in {name}: {error}") from error

    def begin(self, identity, steps_per_epoch):
        """From here on the folder is written to. `identity` is what identifies the data."""
        self.about = {"flags": self.flags, "normalization": self.args.normalization, **identity}
        self.steps_per_epoch = steps_per_epoch
        self.losses = torch.zeros((), device=self.device)  # this rank's sum since the last report
        self.line_step, self.line_loss = self.step, 0.0  # of the last line; sum of losses since
        self.is_due = False  # whether a save is due
        self.is_saved = self.resumed is not None  # whether checkpoint.pt has all that is done
        self.next_report = self.total_steps(self.step) + FIRST_REPORT
        self.saved_at = time.perf_counter()
        if self.resumed is None:  # save at the first report, to find out whether it can
            self.saved_at -= 60 * self.args.checkpoint_minutes
        if dist.get_rank() == 0:
            if self.resumed is None:
                self.claim_folder()
            elif self.metrics:
                self.check_owner()
                self.write_results()  # a kill may have prevented it
            done = f"{self.epoch} epochs and {self.step} steps"
            print(f"{self.folder}: {done} are done", flush=True)

    def claim_folder(self):
        """Mark --output as that of a new run. Only one of two that start at the same moment can."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "model.pt").unlink(missing_ok=True)  # of a run that --overwrite replaces
        try:
            open(self.path, "xb" if self.file is None else "wb").close()
        except FileExistsError:
            raise SystemExit(f"another run has just started in {self.folder}") from None
        self.file = file_identity(self.path)
        for name in ("best.pt", "metrics.csv", "last.json"):
            (self.folder / name).unlink(missing_ok=True)

    # ---- Within an epoch -------------------------------------------------------------------------
    def begin_epoch(self):
        """Start the clock."""
        self.asked_at, self.asked_step = time.perf_counter(), self.total_steps(self.step)
        self.started = self.asked_at - self.seconds

    def total_steps(self, step):
        """Steps since the run began, at the end of this one of the current epoch."""
        return self.epoch * self.steps_per_epoch + step

    def has_line(self, step):
        return step % self.args.log_every == 0 or step == self.steps_per_epoch

    def has_report(self, step):
        """Whether this step ends with a progress line, or it is time to save."""
        return self.has_line(step) or self.total_steps(step) >= self.next_report

    def report(self, step, norm, lr):
        """Print a progress line, or save, or both. Ends the run if torchrun is gone or something is
        not finite. `norm` is that of the step's gradient."""
        # After kill -9 of torchrun its ranks would live on, and write beside a resumed run.
        is_orphan = dist.is_torchelastic_launched() and os.getppid() != self.parent_pid
        is_due, wait = self.plan_save(step) if dist.get_rank() == 0 else (False, 0)
        size = nn.utils.get_total_norm(list(self.state["model"].parameters()))  # NaN if a weight is
        # Filled on the device: a copy from the CPU would wait for it once more.
        own = [torch.full((), float(x), device=self.device) for x in (is_orphan, is_due, wait)]
        totals = torch.stack([x.float() for x in (self.losses, norm, size, *own)])
        dist.all_reduce(totals)  # over all ranks, which all end, or continue, together
        losses, norm, size, orphans, is_due, wait = totals.tolist()  # waits for the GPU
        if orphans > 0:
            raise SystemExit("torchrun is gone")
        if not math.isfinite(losses) or not math.isfinite(size):
            raise SystemExit(f"loss or weights not finite: {self.what_is_saved()}")
        self.seconds = time.perf_counter() - self.started
        mean = 1 / (dist.get_world_size() * self.args.accumulate)
        self.loss_sum += losses * mean
        self.line_loss += losses * mean
        self.losses.zero_()
        self.step = step
        self.is_saved = False
        self.is_due, self.next_report = is_due > 0, self.total_steps(step) + wait
        if self.has_line(step):
            if dist.get_rank() == 0:
                print(self.progress_line(norm / dist.get_world_size(), lr), flush=True)
            self.line_step, self.line_loss = step, 0.0
        if self.is_due and step < self.steps_per_epoch:  # at its end, after the evaluation
            self.save()
            self.started = time.perf_counter() - self.seconds  # of training, without the save

    def plan_save(self, step):
        """By rank 0's clock: whether a save is due, and in how many steps the next will be, after
        which all ranks call `report` again."""
        now, steps = time.perf_counter(), self.total_steps(step)
        step_seconds = (now - self.asked_at) / (steps - self.asked_step)
        self.asked_at, self.asked_step = now, steps
        between = 60 * self.args.checkpoint_minutes
        until_save = max(0, round((self.saved_at + between - now) / step_seconds))  # steps
        if between == 0:
            return True, math.inf  # at progress lines
        return until_save == 0, until_save or math.ceil(between / step_seconds)

    def progress_line(self, norm, lr):
        """The loss is the mean since the last line."""
        epochs, steps_per_epoch = self.args.epochs, self.steps_per_epoch
        mean_loss = self.line_loss / (self.step - self.line_step)
        speed = self.step * self.args.batch_size / self.seconds
        steps_left = epochs * steps_per_epoch - self.total_steps(self.step)
        minutes_left = steps_left * self.args.batch_size / speed / 60
        place = f"epoch {self.epoch + 1}/{epochs} step {self.step}/{steps_per_epoch}"
        numbers = f"loss {mean_loss:.4f} lr {lr:.2e} gradient norm {norm:.2e}"
        return f"{place} {numbers} {speed:.0f} samples/s {minutes_left:.1f} min left"

    def what_is_saved(self):
        """What a run that ends now can be resumed from, in words."""
        if self.path.exists() and self.path.stat().st_size > 0:
            return f"{self.path} is from before"
        return "there is no checkpoint yet"

    # ---- At the end of an epoch, and of the run --------------------------------------------------
    def end_epoch(self, scores):
        """Add a row to metrics.csv, and save if that is due, or the epoch is the best so far."""
        if not math.isfinite(scores["test_loss"]):
            raise SystemExit(f"test loss not finite: {self.what_is_saved()}")
        memory = torch.accelerator.max_memory_allocated() if self.args.device != "cpu" else 0
        shown = {"train_loss": self.loss_sum / self.step, **scores}
        row = {
            "epoch": self.epoch + 1,
            **shown,
            "seconds": self.seconds,  # without evaluation
            "samples_per_second": self.step * self.args.batch_size / self.seconds,
            "peak_memory_mib": memory / 2**20,
        }
        self.metrics.append(row)
        self.epoch += 1
        self.step, self.loss_sum, self.seconds, self.line_step = 0, 0.0, 0.0, 0
        if dist.get_rank() == 0:
            print(f"epoch {self.epoch}: {in_words(shown)} {row['seconds']:.1f} s", flush=True)
        if self.is_due or self.is_best():
            self.save()
        elif dist.get_rank() == 0:
            self.check_owner()
            self.write_results()

    def is_best(self):
        """Whether an epoch has just ended that is better than all before."""
        return self.step == 0 and best_epoch(self.metrics, self.lower_is_better) == self.epoch

    def epochs_since_best(self):
        """0 as long as there is no best one."""
        best = best_epoch(self.metrics, self.lower_is_better)
        return self.epoch - best if best else 0

    def finish(self):
        """Save the last weights."""
        if not self.is_saved:
            self.save()
        if dist.get_rank() == 0:
            self.check_owner()
            self.write_weights("model.pt")
            print(f"finished: {self.folder / 'model.pt'}")
        dist.barrier()  # for rank 0: once a process has exited, torchrun cannot restart the run

    # ---- What it writes --------------------------------------------------------------------------
    def save(self):
        """Rank 0 writes a checkpoint. After a kill at any moment, --resume finds this one whole, or
        the one before it."""
        self.is_saved, self.is_due = True, False
        if dist.get_rank() > 0:
            return
        self.check_owner()
        (self.folder / "model.pt").unlink(missing_ok=True)  # only a finished run has one
        progress = {name: getattr(self, name) for name in PROGRESS}
        parts = {name: part.state_dict() for name, part in self.state.items()}
        with atomic_write(self.path) as file:
            torch.save({**parts, "progress": progress, **self.about}, file)
        self.file = file_identity(self.path)
        if self.metrics:
            self.write_results()
        self.saved_at = time.perf_counter()

    def check_owner(self):
        """End if checkpoint.pt is not the one that this run has read or written last: then another
        process continues the run, as when a node was given up as lost, but lives."""
        if file_identity(self.path) != self.file:
            raise SystemExit(f"{self.path} was written by another process: this one ends")

    def write_results(self):
        """What follows from a checkpoint: best.pt and metrics.csv."""
        if self.is_best():
            self.write_weights("best.pt")
        # With the columns of the newest row: those from before a resume may have had others.
        columns = list(self.metrics[-1])
        lines = [columns, *([row.get(name, "") for name in columns] for row in self.metrics)]
        with atomic_write(self.folder / "metrics.csv") as file:
            file.write("".join(",".join(map(str, line)) + "\n" for line in lines).encode())

    def write_weights(self, name):
        """On the CPU, so that they can be loaded without a GPU."""
        weights = {name: x.cpu() for name, x in self.state["model"].state_dict().items()}
        with atomic_write(self.folder / name) as file:
            torch.save({"model": weights, **self.about}, file)


def load_part(part, saved):
    """Load one part of `state`."""
    if not saved:  # a scaler's without float16
        return
    groups = getattr(part, "param_groups", [])
    fused = [group.get("fused") for group in groups]
    part.load_state_dict(saved)
    for group, own in zip(getattr(part, "param_groups", []), fused):
        group["fused"] = own  # as build_optimizer has chosen for this device
    if isinstance(part, LambdaLR):  # with other --epochs, the next step has another rate
        rates = zip(part.optimizer.param_groups, part.base_lrs, part.lr_lambdas)
        for group, lr, factor in rates:
            group["lr"] = lr * factor(part.last_epoch)


def in_words(scores):
    return " ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())

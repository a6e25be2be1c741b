"""A run in training: how far it is, what it prints and writes, and when it saves."""

import math
import os
import time

import torch
import torch.distributed as dist
from files import ON_OTHERS, Files, columns, flags_of_run, in_words
from torch import nn

FIRST_REPORT = 10  # steps after which it is known how long one takes


class Run:
    """A run in training: how far it is, what it reports, and when it saves. All ranks have the same
    one, and call its methods together; rank 0 prints and writes."""

    def __init__(self, args, may_change, device, start, data, state, steps_per_epoch, minimized):
        """`state`: the parts of which a checkpoint has the state_dict. The rest: see train.py."""
        # What each .pt file has besides. predict.py needs --amp, which may change on --resume.
        flags = {**flags_of_run(args, may_change), "amp": args.amp}
        about = {"flags": flags, "normalization": args.normalization, **data.identity}
        self.files = Files(args.output, state, about, start.version)
        self.args, self.device, self.progress = args, device, start.progress
        self.steps_per_epoch, self.minimized = steps_per_epoch, minimized
        self.part = data.part  # val or test, the first word of the names of the scores
        self.folder, self.state = args.output, state
        progress = self.progress
        self.parent_pid = os.getppid()  # of torchrun
        self.losses = torch.zeros((), device=device)  # this rank's sum since the last report
        self.line_step, self.line_loss = progress.step, 0.0  # of the last line; losses since then
        steps = self.total_steps(progress.step)
        # When a checkpoint was written last, whether it has all that is done, and the next is due.
        self.saved_at, self.is_saved, self.is_due = time.perf_counter(), steps > 0, False
        if steps == 0:  # save at the first report, to find out whether it can
            self.saved_at -= 60 * args.checkpoint_minutes
        self.next_report = steps + FIRST_REPORT
        self.start_clock()

    def begin(self, resumes):
        """Claim the folder for a new run; or continue the one there, from its checkpoint."""
        if resumes:
            self.files.restore(self.device)
        if dist.get_rank() == 0:
            if not resumes:
                self.files.claim()
            elif self.progress.metrics:
                self.files.check_owner()
                self.write_results()  # a kill may have prevented it
            done = f"{self.progress.epoch} epochs and {self.progress.step} steps"
            print(f"{self.folder}: {done} are done", flush=True)

    # ---- Within an epoch -------------------------------------------------------------------------
    def start_clock(self):
        """Time that passes from here on is training time."""
        self.asked_at, self.asked_step = time.perf_counter(), self.total_steps(self.progress.step)
        self.started = self.asked_at - self.progress.seconds

    def total_steps(self, step):
        """Steps since the run began, at the end of this one of the current epoch."""
        return self.progress.epoch * self.steps_per_epoch + step

    def has_line(self, step):
        return step % self.args.log_every == 0 or step == self.steps_per_epoch

    def has_report(self, step):
        """Whether this step ends with a progress line, or it is time to save: on all ranks."""
        return self.has_line(step) or self.total_steps(step) >= self.next_report

    def report(self, step, norm, lr):
        """Print a progress line, or save, or both. Ends the run if torchrun is gone or something is
        not finite. `norm` is that of the step's gradient. All ranks call it: it all-reduces."""
        progress = self.progress
        # After kill -9 of torchrun its ranks would live on, and write beside a resumed run.
        is_orphan = dist.is_torchelastic_launched() and os.getppid() != self.parent_pid
        # The others add 0: the sum is rank 0's.
        is_due, wait = self.plan_save(step) if dist.get_rank() == 0 else (False, 0)
        size = nn.utils.get_total_norm(list(self.state["model"].parameters()))  # NaN if a weight is
        # Filled on the device: a copy from the CPU would wait for it once more.
        flags = [torch.full((), float(x), device=self.device) for x in (is_orphan, is_due, wait)]
        totals = torch.stack([x.float() for x in (self.losses, norm, size, *flags)])
        dist.all_reduce(totals)  # over all ranks, which all end, or continue, together
        losses, norm, size, orphans, is_due, wait = totals.tolist()  # waits for the GPU
        if orphans > 0:
            raise SystemExit("torchrun is gone")
        if not math.isfinite(losses) or not math.isfinite(size):
            raise SystemExit(f"loss or weights not finite: {self.files.what_is_saved()}")
        progress.seconds = time.perf_counter() - self.started
        mean = 1 / (dist.get_world_size() * self.args.accumulate)
        progress.loss_sum += losses * mean
        self.line_loss += losses * mean
        self.losses.zero_()
        progress.step = step
        self.is_saved = False
        self.is_due, self.next_report = is_due > 0, self.total_steps(step) + wait
        if self.has_line(step):
            if dist.get_rank() == 0:
                print(self.progress_line(norm / dist.get_world_size(), lr), flush=True)
            self.line_step, self.line_loss = step, 0.0
        if self.is_due and step < self.steps_per_epoch:  # at its end, after the evaluation
            self.save()
            self.started = time.perf_counter() - progress.seconds  # of training, without the save

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
        # If now, the next one is a whole interval later.
        return until_save == 0, until_save or math.ceil(between / step_seconds)

    def progress_line(self, norm, lr):
        """The loss is the mean since the last line."""
        epoch, step, epochs = self.progress.epoch + 1, self.progress.step, self.args.epochs
        mean_loss = self.line_loss / (step - self.line_step)
        speed = step * self.args.batch_size / self.progress.seconds
        steps_left = epochs * self.steps_per_epoch - self.total_steps(step)
        minutes_left = steps_left * self.args.batch_size / speed / 60
        position = f"epoch {epoch}/{epochs} step {step}/{self.steps_per_epoch}"
        numbers = f"loss {mean_loss:.4f} lr {lr:.2e} gradient norm {norm:.2e}"
        return f"{position} {numbers} {speed:.0f} samples/s {minutes_left:.1f} min left"

    # ---- At the end of an epoch, and of the run --------------------------------------------------
    def end_epoch(self, scores):
        """Add a row to metrics.csv, and save if that is due, or the epoch is the best so far."""
        progress = self.progress
        if not math.isfinite(scores["loss"]):
            raise SystemExit(f"{self.part} loss not finite: {self.files.what_is_saved()}")
        memory = torch.accelerator.max_memory_allocated() if self.args.device != "cpu" else 0
        shown = {"train_loss": progress.loss_sum / progress.step, **columns(self.part, scores)}
        row = {
            "epoch": progress.epoch + 1,
            **shown,
            "seconds": progress.seconds,  # without evaluation
            "samples_per_second": progress.step * self.args.batch_size / progress.seconds,
            "peak_memory_mib": memory / 2**20,
        }
        progress.metrics.append(row)
        progress.epoch += 1
        progress.step, progress.loss_sum, progress.seconds, self.line_step = 0, 0.0, 0.0, 0
        if dist.get_rank() == 0:
            print(f"epoch {progress.epoch}: {in_words(shown)} {row['seconds']:.1f} s", flush=True)
        if self.is_due or self.is_best():
            self.save()
        elif dist.get_rank() == 0:
            self.files.check_owner()
            self.write_results()

    def best_epoch(self):
        """The number of the best epoch so far, from 1; 0 if there is none."""
        start = f"{self.part}_"  # which `minimized` does not know
        rows = self.progress.metrics
        rows = [{name.removeprefix(start): x for name, x in row.items()} for row in rows]
        return best_of(rows, self.minimized)

    def is_best(self):
        """Whether an epoch has just ended that is better than all before."""
        return self.progress.step == 0 and self.best_epoch() == self.progress.epoch

    def epochs_since_best(self):
        """0 as long as there is no best one."""
        best = self.best_epoch()
        return self.progress.epoch - best if best else 0

    def finish(self):
        """Save the last weights. All ranks call it: they wait for rank 0."""
        if not self.is_saved:
            self.save()
        if dist.get_rank() == 0:
            self.files.check_owner()
            self.files.write_weights("model.pt")
            if best := self.best_epoch():
                message = f"{self.folder / 'best.pt'} is of epoch {best}"
                print(f"{message}. It was chosen on the {self.part} images: {ON_OTHERS}")
            print(f"finished: {self.folder / 'model.pt'}")
        dist.barrier()  # for rank 0: once a process has exited, torchrun cannot restart the run

    def save(self):
        """Rank 0 writes a checkpoint, and what follows from it."""
        self.is_saved, self.is_due = True, False
        if dist.get_rank() == 0:
            self.files.save(self.progress)
            if self.progress.metrics:
                self.write_results()
            self.saved_at = time.perf_counter()

    def write_results(self):
        if self.is_best():
            self.files.write_weights("best.pt")
        self.files.write_metrics(self.progress.metrics)


def best_of(rows, minimized):
    """The number of the best of some epochs, from 1, by their scores; 0 if there is none. A NaN is
    never the best one, and prevents no other. Of equal ones it is the first."""
    # A row from before a resume may lack a new column.
    missing = dict.fromkeys(rows[-1] if rows else [], math.nan)
    values = [float(minimized(missing | row)) for row in rows]
    numbers = [value for value in values if not math.isnan(value)]
    return values.index(min(numbers)) + 1 if numbers else 0

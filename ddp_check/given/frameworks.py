"""Accelerate, Transformers' Trainer, Lightning, Fabric, W&B: what they do otherwise on one process,
or where nobody has set up GPUs, is done as on several; or it is said that it is not compared."""

import contextlib
import os

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ..imports import when_imported
from ..notes import Collective, File, Seen, Unprepared
from ..patches import stop_both_runs, wrap
from ..script import library_place, place, source


def refuse_call(run, owner, name, text, remedy):
    @wrap(owner, name)
    def refuse(original, *args, **kwargs):
        facts = {"line": source(place()[0]), "text": f"not compared: {text}", "remedy": remedy}
        stop_both_runs(run.folder, "refused", facts)


def refuse_deepspeed(run, module):
    text = "DeepSpeed, which averages by itself"
    refuse_call(run, module, "initialize", text, "for the check, by DDP")


def refuse_multirun(run, module):
    text = "hydra's multirun, several trainings in one process"
    refuse_call(run, module.Plugins, "instantiate_sweeper", text, "for the check, one of them")


# ---- Accelerate, and so the Trainer


def use_cpus(run, module):
    """Without a GPU, it has several processes only if it is told to use CPUs."""

    @wrap(module.PartialState, "__init__")
    def make(original, self, cpu=False, **kwargs):
        original(self, cpu or not torch.accelerator.is_available(), **kwargs)


def control_loaders(run, module):
    """They fetch a batch before they give the one before it."""

    @wrap(module.DataLoaderShard, "__iter__")
    def iterate(original, self):
        self.base_dataloader.check_is_ahead = True
        return original(self)

    text = "Accelerate's rank 0 reads the batches of all (dispatch_batches)"
    remedy = "for the check, DataLoaderConfiguration(dispatch_batches=False)"
    refuse_call(run, module.DataLoaderDispatcher, "__iter__", text, remedy)


def control_schedule(run, module):
    """A scheduler that was prepared makes as many steps at once as there are processes; so it does
    on one process that has their batch."""
    is_inside = [False]

    @wrap(module.AcceleratedScheduler, "step")
    def step(original, self, *args, **kwargs):
        has_all = run.is_single and run.options["prepared"] and not self.split_batches
        is_inside[0] = True
        try:
            for _ in range(run.world if has_all and self.step_with_optimizer else 1):
                original(self, *args, **kwargs)
        finally:
            is_inside[0] = False

    lengths = set()  # that the script was told of its loaders

    @wrap(DataLoader, "__len__")
    def length(original, self):
        number = original(self)
        if not getattr(self, "check_is_prepared", True) and not library_place():
            lengths.add(number)
        return number

    @wrap(LRScheduler, "step")
    def step_alone(original, self, *args, **kwargs):
        """Of one that was not prepared, but was made for as many steps as its loader has had before
        it was."""
        if run.steps and not is_inside[0]:
            totals = {name: n for name, n in totals_of(self).items() if n > 1}
            for name, number in totals.items():
                if any(length > 1 and number % length == 0 for length in lengths):
                    run.note_once(Unprepared(place()[0], name, number))
        return original(self, *args, **kwargs)


def totals_of(scheduler):
    """{name: number} of a scheduler's own whole numbers, and of its functions' arguments."""
    found = dict(vars(scheduler))
    for function in getattr(scheduler, "lr_lambdas", []):
        found |= getattr(function, "keywords", {})  # of a functools.partial
    names = "total_steps", "T_max", "total_iters", "num_training_steps"
    return {name: found[name] for name in names if isinstance(found.get(name), int)}


def see_trainer(run, module):
    @wrap(module.Trainer, "__init__")
    def make(original, self, *args, **kwargs):
        run.say("transformers", "framework")
        original(self, *args, **kwargs)


def see_accelerator(run, module):
    @wrap(module.Accelerator, "__init__")
    def make(original, self, *args, **kwargs):
        run.say("accelerate", "framework")
        original(self, *args, **kwargs)
        wants = kwargs.get("fsdp_plugin") or os.environ.get("ACCELERATE_USE_FSDP")
        if wants and not torch.accelerator.is_available():
            run.say("Accelerate has no FSDP on CPUs: it used DDP here")

    @wrap(module.Accelerator, "gather_for_metrics")
    def gather(original, self, *args, **kwargs):
        run.note(Collective("gather_for_metrics", place()[0], "", False))
        return original(self, *args, **kwargs)


# ---- Lightning and Fabric


def control_devices(run, module, name):
    """As many as the run has processes, whatever the script says; and DDP also on one."""

    @wrap(getattr(module, name), "__init__")
    def connect(original, self, *args, **kwargs):
        run.say("fabric" if name == "_Connector" else "lightning", "framework")
        kwargs |= {"devices": 1 if run.is_single else run.world, "num_nodes": 1}
        if kwargs.get("strategy", "auto") == "auto":
            kwargs["strategy"] = "ddp"
        if not torch.accelerator.is_available():
            kwargs["accelerator"] = "cpu"
        original(self, *args, **kwargs)


def see_logs(run, module):
    """self.log of a whole epoch."""

    @wrap(module.LightningModule, "log")
    def log(original, self, name, value, *args, **kwargs):
        original(self, name, value, *args, **kwargs)
        results = getattr(getattr(self, "_trainer", None), "_results", None) or {}
        found = [v for k, v in results.items() if f".{name}" in f".{k}." and v.meta.name == name]
        if found and found[-1].is_tensor and found[-1].meta.on_epoch:
            about = {"synced": found[-1].meta.sync.should, "watched": is_watched(self, name)}
            line = place()[0]
            if run.nth("log", run.steps, line, name) == 0:
                run.note(Seen("logged", line, name, 0, {name: float(value)}, about=about))


def is_watched(module, name):
    """Whether a callback or a scheduler decides something by it."""
    monitors = [getattr(each, "monitor", None) for each in module.trainer.callbacks]
    configs = module.trainer.lr_scheduler_configs
    monitors += [config.monitor for config in configs if config.reduce_on_plateau]
    return name in monitors or f"{name}_epoch" in monitors


def see_samplers(run, owner):
    """Whether it takes a sampler for an order only, which does more."""
    name = "_get_distributed_sampler"

    @wrap(owner, name)
    def make(original, dataloader, *args, **kwargs):
        sampler, given = dataloader.sampler, original(dataloader, *args, **kwargs)
        usual = type(sampler) in (RandomSampler, SequentialSampler)
        chooses = isinstance(sampler, RandomSampler) and (
            sampler.replacement or sampler.num_samples != len(dataloader.dataset)
        )
        if type(given) is DistributedSampler and (chooses or not usual):
            run.say(f"{place()[0]} {type(sampler).__name__}", "replaced")
        return given

    setattr(owner, name, staticmethod(getattr(owner, name)))  # Fabric is a class


# ---- trackers


def control_wandb(run, module):
    """It would send both runs, whatever the script's mode is."""

    @wrap(module, "init")
    def init(original, *args, **kwargs):
        found = original(*args, **kwargs | {"mode": "disabled"})
        with contextlib.suppress(OSError):  # where a script may save something
            os.makedirs(found.dir, exist_ok=True)
        return found


def see_tensorboard(run, module):
    """A thread writes its file, whose name has the process's number."""

    @wrap(module.SummaryWriter, "__init__")
    def make(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        path = os.path.join(os.path.realpath(self.log_dir), "events.out.tfevents")
        run.note(File(path, place()[0], "w"))


def patch(run):
    for name, call in {
        "accelerate.state": use_cpus,
        "accelerate.data_loader": control_loaders,
        "accelerate.scheduler": control_schedule,
        "accelerate.accelerator": see_accelerator,
        "deepspeed": refuse_deepspeed,
        "hydra.core.plugins": refuse_multirun,
        "torch.utils.tensorboard.writer": see_tensorboard,
        "transformers.trainer": see_trainer,
        "wandb": control_wandb,
    }.items():
        when_imported(name, lambda module, call=call: call(run, module))
    for name in "lightning.pytorch", "pytorch_lightning":
        connectors = f"{name}.trainer.connectors"
        when_imported(
            f"{connectors}.accelerator_connector",
            lambda m: control_devices(run, m, "_AcceleratorConnector"),
        )
        when_imported(f"{connectors}.data_connector", lambda m: see_samplers(run, m))
        when_imported(f"{name}.core.module", lambda m: see_logs(run, m))
    for name in "lightning.fabric", "lightning_fabric":
        when_imported(f"{name}.connector", lambda m: control_devices(run, m, "_Connector"))
        when_imported(f"{name}.fabric", lambda m: see_samplers(run, m.Fabric))

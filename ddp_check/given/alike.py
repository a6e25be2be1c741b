"""What one process and several do differently by design is made alike."""

import inspect
import operator
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import cpu
from ..imports import when_imported
from ..notes import MANY_VALUES
from ..patches import wrap
from ..script import library_place, place
from ..sketch import indices_in
from .pairing import MODEL, note_draw, state_of

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def control_dropout(run):
    """It is off."""

    def would_draw(p):
        if p and torch.is_grad_enabled() and not run.thread.in_dataset:
            note_draw(run, MODEL, "torch", state_of("torch"))

    for name in [name for name in dir(F) if "dropout" in name]:

        @wrap(F, name)
        def dropout(original, input, p=0.5, training=True, inplace=False):
            is_new = training and p and not inplace  # another tensor, which may be set in place
            would_draw(p if training else 0)
            output = original(input, p, False, inplace)
            return output.clone() if is_new and torch.is_grad_enabled() else output

    @wrap(F, "scaled_dot_product_attention")
    def attention(original, query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        would_draw(dropout_p)
        with sdpa_kernel(KERNELS):  # flash attention alone has no float32
            return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    @wrap(nn.RNNBase, "__init__")
    def recurrent(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.dropout = 0.0


def control_batch_norm(run):
    """On one process: each share's own statistics, and rank 0's averages, as N processes have."""

    @wrap(nn.SyncBatchNorm, "forward")
    def forward(original, self, *args, **kwargs):
        run.thread.sync = not cpu.MODES  # where it is batch norm
        try:
            return original(self, *args, **kwargs)
        finally:
            run.thread.sync = False

    @wrap(F, "batch_norm")
    def batch_norm(original, input, *args, **kwargs):
        given = inspect.signature(original).bind(input, *args, **kwargs).arguments
        is_training = given.get("training", False)
        if run.thread.sync or run.thread.quiet or not is_training:  # or already within a share
            return original(**given)
        rows, batch = len(input), run.loader_rows or run.model_rows
        is_whole = not batch or rows % batch == 0 or rows in run.joined
        has_one = input[:, 0].numel() == run.world  # value of a channel, each share: an error
        if not run.is_single or rows % run.world or has_one or not is_whole:
            return original(**given)

        def normalize(rank, share):
            averages = {}
            if rank:  # only rank 0's stay
                names = "running_mean", "running_var"
                averages = {name: given[name].clone() for name in names if given[name] is not None}
            return original(**given | averages | {"input": share})

        output = run.by_share(input, normalize)
        line, *callers = place()
        is_first = run.nth("seen", run.steps, line, "batch_norm") < MANY_VALUES
        if run.traces and is_first and not library_place():  # as where it is normalized at once
            about = {"called_at": (*callers, "")[0]}
            run.note_value("value", line, "batch_norm", output, indices_in((input,)), **about)
        return output


def control_order(run):
    """Where a batch is rolled or flipped along its samples, as MixUp and CutMix do, on one process
    each share is, as on N processes."""

    def watch(owner, name):
        @wrap(owner, name)
        def move(original, input, *args, **kwargs):
            dims = kwargs.get("dims", args[-1] if args else None)
            batches = [rows for rows, _ in run.loaded.values()]
            batches = [run.thread.batch] if run.thread.in_dataset else batches
            is_batch = run.is_single and input.shape[:1] in [(rows,) for rows in batches]
            if dims in (0, (0,), [0]) and is_batch and len(input) % run.world == 0:
                return run.by_share(input, lambda rank, share: original(share, *args, **kwargs))
            return original(input, *args, **kwargs)

    for owner in torch, torch.Tensor:
        watch(owner, "roll")
        watch(owner, "flip")


BACKENDS = "cuda.matmul cudnn cudnn.conv cudnn.rnn mkldnn mkldnn.matmul mkldnn.conv mkldnn.rnn"


def keep_precise():
    """float32 throughout. Not seen on a GPU yet. The older flags, too: torch refuses to read them
    where both do not agree."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name in BACKENDS.split():
        operator.attrgetter(name)(torch.backends).fp32_precision = "ieee"
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)


def is_off(owner):
    """What has a flag `enabled` is not."""

    @wrap(owner, "__init__")
    def make(original, self, *args, **kwargs):
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.arguments["enabled"] = False
        original(*given.args, **given.kwargs)


def control_precision(run):
    """Nothing is compiled, as its random numbers would be others, and mixed precision is off."""

    @wrap(torch, "compile")
    def compile(original, model=None, *args, **kwargs):
        return model if model is not None else lambda function: function

    @wrap(torch.jit, "script")
    def script(original, obj, *args, **kwargs):
        """It knows none of the functions that are replaced, as of dropout or random numbers."""
        try:
            return original(obj, *args, **kwargs)
        except Exception:
            return obj

    @wrap(nn.Module, "compile")
    def compile_module(original, self, *args, **kwargs):
        pass

    @wrap(nn.parallel.DistributedDataParallel, "register_comm_hook")
    def register(original, self, state, hook):
        name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
        if re.search(r"torch\..*(compress|powerSGD|quantiz)", name):
            return run.say(f"{hook.__qualname__} is off: gradients are not compressed")
        return original(self, state, hook)

    is_off(torch.amp.autocast)
    is_off(torch.amp.GradScaler)

    @wrap(torch.amp.GradScaler, "state_dict")
    def state_dict(original, self):
        """As of one that is on, which scripts read and save."""
        factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        return {"scale": 1.0, **factors, "_growth_tracker": 0}

    @wrap(torch, "set_float32_matmul_precision")
    def precision(original, *args, **kwargs):
        pass

    def keep_float32(fsdp):
        for policy in (fsdp.MixedPrecisionPolicy, fsdp.MixedPrecision):
            wrap(policy, "__init__")(lambda original, self, *args, **kwargs: original(self))

    when_imported("torch.distributed.fsdp", keep_float32)


def control_shards(run):
    """Each rank has all weights of FullyShardedDataParallel: what is in a shard of a flat parameter
    is not known. Those of fully_shard() are gathered, as they are compared."""

    def keep_whole(fsdp):
        @wrap(fsdp.FullyShardedDataParallel, "__init__")
        def make(original, self, *args, **kwargs):
            run.say("FSDP shards nothing here, as it is compared: each rank has all weights")
            given = inspect.signature(original).bind(self, *args, **kwargs)
            groups = given.arguments.get("process_group"), given.arguments.get("device_mesh")
            if isinstance(groups[0], tuple) or getattr(groups[1], "ndim", 1) > 1:  # as of a machine
                given.arguments |= {"process_group": None, "device_mesh": None}
            given.arguments["sharding_strategy"] = fsdp.ShardingStrategy.NO_SHARD
            sends = False
            if cpu.MODES:
                given.arguments["device_id"] = cpu.CPU
                sends = given.arguments.pop("sync_module_states", False)  # on GPUs alone
            original(*given.args, **given.kwargs)
            if sends:  # now that none is on the meta device
                for tensor in [*self.parameters(), *self.buffers()]:
                    torch.distributed.broadcast(tensor.detach(), 0)

    when_imported("torch.distributed.fsdp", keep_whole)


def patch(run):
    control_dropout(run)
    control_batch_norm(run)
    control_order(run)
    control_precision(run)
    control_shards(run)

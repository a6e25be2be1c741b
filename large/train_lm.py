"""Train a language model that does not fit on one GPU: FSDP2, in one file, beside prepare_texts.py.

python large/prepare_texts.py my_texts --output my_tokens                     # texts to token ids
python large/train_lm.py --tokens my_tokens                                   # one GPU, or the CPU
torchrun --standalone --nproc-per-node gpu large/train_lm.py --tokens my_tokens --size 3b
python large/train_lm.py --output runs/lm --sample "Once upon a time"         # what it has learned

Each rank holds a part (shard) of every weight, of its gradient and of the optimizer's moments. A
block's weights are gathered from all ranks just before they are used and freed right after, so
every rank must reach every forward pass. No GPU has the whole model at once; rank 0 gathers it at
the end, in its CPU's memory, for model.pt. Kill the run at any moment, and repeat the command with
--resume, on any number of GPUs: a step's text depends on --seed and the step's number only.

Put yours here: the sizes and flags, the model, the optimizer, the data. Then come the training
loop, and what it calls: the folder of the run, start and checks, memory and speed.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

# GPU memory in segments that can grow is less fragmented. Read when torch starts, by any of these
# names; parts of torch prefer different ones.
if not any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_")):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from prepare_texts import build_tokenizer, lock_folder
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recompute  # "checkpoint" is here a saved run

# ---- The sizes and the flags ---------------------------------------------------------------------
SIZES = {  # layers, width, heads
    "tiny": (4, 256, 2),
    "160m": (12, 768, 6),
    "400m": (24, 1024, 8),
    "1.4b": (24, 2048, 16),
    "3b": (36, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
}

# By torchrun; without it, this is the only process.
launched = bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))
parent_pid = os.getppid()  # torchrun's, if that has started this process
gpu = torch.accelerator.current_accelerator(check_available=True)
devices = ["cpu"] if gpu is None or gpu.type == "mps" else [gpu.type, "cpu"]  # no FSDP2 on mps

parser = argparse.ArgumentParser(
    description="Train a language model that does not fit on one GPU.",
    usage="%(prog)s [flags]; --help lists them",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    allow_abbrev=False,
)

add_data = parser.add_argument_group("data and model").add_argument
add_data("--tokens", type=Path, default="tokens", help="folder that prepare_texts.py has written")
add_data("--size", choices=SIZES, default="160m", help="sets --layers, --width and --heads")
add_data("--layers", type=int, help="layers (blocks)")
add_data("--width", type=int, help="features of a token")
add_data("--heads", type=int, help="attention heads; a width of 128 for each is fast")
add_data("--length", type=int, default=1024, help="tokens of a sequence")

training = parser.add_argument_group("training")
add_duration = training.add_mutually_exclusive_group().add_argument
add_duration("--steps", type=int, default=1000, help="of the whole run")
add_duration("--epochs", type=float, help="instead of --steps: how often all texts are read")
add_training = training.add_argument
add_training("--batch-size", type=int, default=512, help="sequences per step, over all GPUs")
add_training("--lr", type=float, help="highest learning rate; None: 6e-4 * (768 / width) ** 0.5")
warmup_help = "in which it rises; None: 100, or a tenth of few --steps"
add_training("--warmup-steps", type=int, help=warmup_help)
decay_help = "of the blocks' and the head's matrices"
add_training("--weight-decay", type=float, default=0.1, help=decay_help)
add_training("--clip-norm", type=float, default=1.0, help="maximum norm of the gradient; 0: any")
add_training("--seed", type=int, default=76, help="of the weights and of the order of the texts")

add_speed = parser.add_argument_group("speed and memory").add_argument
add_speed("--device", choices=devices, default=devices[0])
float32_help = "on a GPU: no bfloat16 (the CPU always has float32)"
add_speed("--float32", action="store_true", help=float32_help)
compile_help = "torch.compile each block; None: on CUDA"
add_speed("--compile", action=argparse.BooleanOptionalAction, help=compile_help)
accumulate_help = "micro-batches per step; None: as few as the GPU has memory for"
add_speed("--accumulate", type=int, help=accumulate_help)
recompute_help = "keep only the blocks' inputs for the backward pass"
add_speed("--recompute", action="store_true", help=recompute_help)
add_speed("--shard", type=int, default=0, help="GPUs that share one copy of the model; 0: all")
gathered_help = "gather weights and reduce gradients once per step; None: if the GPU has the memory"
add_speed("--keep-gathered", action=argparse.BooleanOptionalAction, help=gathered_help)
add_speed("--timeout", type=int, default=600, help="seconds to wait for another process")

add_run = parser.add_argument_group("the run").add_argument
add_run("--output", type=Path, default="runs/lm", help="folder of the run")
add_run("--resume", action="store_true", help="continue the run in --output, if any")
add_run("--checkpoint-minutes", type=float, default=5, help="time between two checkpoints")
add_run("--log-every", type=int, default=10, help="steps between two progress lines")
add_run("--eval-every", type=int, default=500, help="steps between two evaluations")
add_run("--eval-tokens", type=int, default=2_000_000, help="of val.bin, at most, spread over it")
sample_help = "continue TEXT, after an end-of-text token, by the newest checkpoint, and end"
add_run("--sample", metavar="TEXT", help=sample_help)
add_run("--sample-tokens", type=int, default=200, help="by which it is continued")

# A run is resumed with the same flags, except these.
MAY_CHANGE = {
    "accumulate",
    "checkpoint_minutes",
    "compile",
    "device",
    "epochs",
    "eval_every",
    "eval_tokens",
    "float32",
    "keep_gathered",
    "log_every",
    "output",
    "recompute",
    "resume",
    "sample",
    "sample_tokens",
    "shard",
    "size",
    "steps",
    "timeout",
    "tokens",
}


# ---- The model -----------------------------------------------------------------------------------
def rotary(length, size, device):
    """Cosine and sine, each (length, size / 2), of the angles by which positions rotate queries and
    keys, so that the product of the two depends on their distance (RoFormer, 2021)."""
    frequencies = 10_000 ** (-torch.arange(0, size, 2, device=device) / size)  # radians per token
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotate each pair of elements i and i + size / 2 of (N, heads, length, size), in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """One layer, (N, length, width) to the same: attention to earlier tokens, then SwiGLU."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        hidden = 128 * math.ceil(width / 48)  # 8/3 of the width, to a multiple of 128
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = nn.RMSNorm(width // heads, eps=1e-6)
        self.key_norm = nn.RMSNorm(width // heads, eps=1e-6)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        qkv = self.qkv(self.attention_norm(x))  # (N, length, 3 * width)
        q, k, v = qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = rotate(self.query_norm(q), cos, sin)  # (N, heads, length, width / heads), as k and v
        k = rotate(self.key_norm(k), cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=2)  # (N, length, hidden)
        return x + self.mlp_out(F.silu(gate) * up)


class Head(nn.Module):
    """(N, length, width) to the scores of next tokens, or to their loss. Its matrix is not tied to
    the embedding's: with FSDP2 each is gathered when it is used."""

    def __init__(self, width, vocabulary):
        super().__init__()
        self.recomputes, self.chunk = False, 2048  # tokens whose scores are computed at a time
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, targets=None):
        """Scores (N, vocabulary) after the last token; or with targets (N, length), of which -1 do
        not count, the sum of their losses in nats, computed chunk by chunk: the float32 scores of
        all tokens, and their gradients, would be the largest tensors of the step. Each chunk adds
        to the gradient of `scores`, so on a GPU they are large. (torch 2.13 has
        F.linear_cross_entropy, but of bfloat16 it returns the sum in bfloat16: two digits.)"""
        x = self.norm(x)
        if targets is None:
            return self.scores(x[:, -1]).float()
        loss_sum = torch.zeros((), device=x.device)
        parts = (tensor.split(self.chunk) for tensor in (x.flatten(0, 1), targets.flatten()))
        for part, wanted in zip(*parts):
            if self.recomputes:
                loss_sum += recompute(self.chunk_loss, part, wanted, use_reentrant=False)
            else:
                loss_sum += self.chunk_loss(part, wanted)
        return loss_sum

    def chunk_loss(self, x, targets):
        return F.cross_entropy(self.scores(x).float(), targets, ignore_index=-1, reduction="sum")


class LanguageModel(nn.Module):
    """Token ids (N, length) to what Head returns."""

    def __init__(self, vocabulary, layers, width, heads):
        super().__init__()
        self.head_size, self.recomputes = width // heads, False
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = Head(width, vocabulary)

    def forward(self, ids, targets=None):
        x = self.embedding(ids)
        cos, sin = rotary(ids.shape[1], self.head_size, ids.device)
        for block in self.blocks:
            if self.recomputes:
                x = recompute(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.head(x, targets)


def initial_std(name, layers):
    """Standard deviation of a matrix's weights at the start: as GPT-2's, but small in the head, so
    that training starts with even scores."""
    if name == "head.scores.weight":
        return 0.001
    if name.endswith(("attention_out.weight", "mlp_out.weight")):  # each layer adds these two to x
        return 0.02 / math.sqrt(2 * layers)
    return 0.02


# ---- The optimizer -------------------------------------------------------------------------------
def build_optimizer(args, model):
    """Weight decay on matrices that multiply. It would pull norms to 0, and in the embedding the
    rows of rare tokens, which hardly get gradients."""
    multiply = [p for p in [*model.blocks.parameters(), *model.head.parameters()] if p.ndim > 1]
    chosen = set(map(id, multiply))
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": multiply, "weight_decay": args.weight_decay}]
    groups += [{"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def highest_rate(args):
    return 6e-4 * math.sqrt(768 / args.width) if args.lr is None else args.lr


def learning_rate(args, step):
    """Of step 1, 2, ... --steps: rises in a line, then falls to a tenth by a cosine."""
    highest = highest_rate(args)
    warmup = min(100, args.steps // 10) if args.warmup_steps is None else args.warmup_steps
    if step <= warmup:
        return highest * step / warmup
    done = (step - warmup) / max(1, args.steps - warmup)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


# ---- The data ------------------------------------------------------------------------------------
class Texts:
    """What prepare_texts.py has written to --tokens; the ids stay on the disk. `about` says what
    the texts are: a run is resumed with the same."""

    def __init__(self, folder):
        path = folder / "tokens.json"
        if not path.exists():
            raise SystemExit(f"--tokens: no {path}; prepare_texts.py writes it")
        self.about = json.loads(path.read_text())
        self.token_bytes = np.array(self.about.pop("token_bytes"))  # of each token's text
        self.train, self.val = (self.open_part(folder, part) for part in ("train", "val"))

    def open_part(self, folder, part):
        path, count, dtype = folder / f"{part}.bin", self.about[part]["count"], self.about["dtype"]
        if os.path.getsize(path) != count * np.dtype(dtype).itemsize:
            raise SystemExit(f"--tokens: {folder} is not whole: run prepare_texts.py again")
        return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)


def mix(*numbers):
    """A seed from several numbers. Sums would meet: seed 2 would be seed 1 an epoch later."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)  # an int64


@functools.lru_cache(maxsize=1)
def shuffled_windows(seed, epoch, count):
    """The numbers of an epoch's windows, shuffled: 4 bytes for each."""
    windows = np.arange(count, dtype=np.int32)
    np.random.default_rng([seed, epoch]).shuffle(windows)
    return windows


def read_step(args, ids, rank, world_size, step):
    """This rank's share of a step's windows of text, (N, length + 1) token ids. Those of all ranks
    together are the same on any number of them. Windows do not overlap, and begin somewhere else in
    each epoch, so up to `length` ids are left out at either end."""
    first, end = (args.batch_size * i // world_size for i in (rank, rank + 1))
    done = (step - 1) * args.batch_size  # windows of the steps before
    per_epoch = windows_per_epoch(args, ids)
    windows = np.empty((end - first, args.length + 1), np.int64)
    for i in range(end - first):
        epoch, number = divmod(done + first + i, per_epoch)
        offset = mix(args.seed, epoch) % args.length
        window = int(shuffled_windows(args.seed, epoch, per_epoch)[number])  # int32 would overflow
        start = offset + window * args.length
        windows[i] = ids[start : start + args.length + 1]
    return torch.from_numpy(windows)


def windows_per_epoch(args, ids):
    return len(ids) // args.length - 1  # one less, as an epoch begins at an offset


def count_evaluated(args, texts):
    """How many windows of val.bin an evaluation reads."""
    return min(windows_in_val(args, texts), math.ceil(args.eval_tokens / args.length))


def windows_in_val(args, texts):
    return math.ceil((len(texts.val) - 1) / args.length)


def read_evaluation(args, texts, window, count):
    """Inputs and targets, (length) token ids each, of one of `count` windows spread over val.bin.
    A target of -1 does not count: it is behind the end, or the window is."""
    inputs = torch.zeros(args.length, dtype=torch.int64)
    targets = torch.full_like(inputs, -1)
    if window < count:
        start = window * windows_in_val(args, texts) // count * args.length
        ids = torch.from_numpy(texts.val[start : start + args.length + 1].astype(np.int64))
        inputs[: len(ids) - 1], targets[: len(ids) - 1] = ids[:-1], ids[1:]
    return inputs, targets


# ---- The training --------------------------------------------------------------------------------
def build_model(args, config, device, world_size):
    """The model without weights, sharded over the ranks; its memory is this rank's shards only."""
    with torch.device("meta"):  # shapes without memory
        model = LanguageModel(**config)
    model.recomputes = model.head.recomputes = args.recompute
    model.head.chunk = chunk_tokens(args, config["vocabulary"])
    if args.compile:  # forward, not the block: FSDP2 gathers weights in hooks around forward
        for block in model.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        model.head.chunk_loss = torch.compile(model.head.chunk_loss, dynamic=False)
    # Gather in bfloat16, reduce in float32. Inputs are not cast: the angles stay in float32.
    dtype = torch.bfloat16 if uses_bfloat16(args) else torch.float32
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    mesh = make_mesh(args, device, world_size)
    # Each call makes a unit, whose weights are gathered together: for its forward pass, after which
    # they are freed, and again for its backward pass; with --keep-gathered, see train_step.
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    shard(model.embedding, reshard_after_forward=not args.keep_gathered)
    # Not again: the gradient of a look-up does not depend on the weights.
    model.embedding.set_unshard_in_backward(False)
    for block in model.blocks:
        shard(block, reshard_after_forward=not args.keep_gathered)
    shard(model.head, reshard_after_forward=False)  # not freed: its backward pass comes next
    shard(model)  # has no more weights; but the outermost unit prepares those within it
    for name, _ in model.named_buffers():
        end(f"the buffer {name} would have no values: compute it in forward, as `rotary` does")
    return model.to_empty(device=device)


def make_mesh(args, device, world_size):
    """The ranks over which to shard: all. Or with --shard (HSDP), a row of ranks for each copy of
    the model, over which weights and gradients are sharded; gradients are also averaged over
    copies, the columns."""
    if args.shard in (0, world_size):
        return dist.init_device_mesh(device.type, (world_size,))
    ranks = torch.arange(world_size).view(-1, args.shard)
    # Groups made here wait for --timeout; those of init_device_mesh would wait for torch's default.
    timeout = timedelta(seconds=args.timeout)
    copies, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    shards, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    names = "copy", "shard"
    return DeviceMesh.from_group([copies, shards], device.type, ranks, mesh_dim_names=names)


@torch.no_grad()
def initialize(model, seed):
    """Random weights, the same on any number of ranks: each draws one whole matrix at a time, on
    its CPU, and keeps its shard."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        whole = torch.ones(parameter.shape)  # of a norm
        if name.endswith("bias"):
            whole.zero_()
        elif parameter.ndim > 1:
            generator = torch.Generator().manual_seed(mix(seed, number))
            whole.normal_(0, initial_std(name, len(model.blocks)), generator=generator)
        mesh, placements = parameter.device_mesh, parameter.placements
        # None: each rank cuts its shard out of its own `whole`, instead of waiting for rank 0's.
        parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def to_device(tensor, device):
    """From pinned memory: then the copy does not wait until a GPU has finished what it computes."""
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def train_step(args, model, optimizer, windows, lr):
    """Returns this rank's part of the loss: its mean over ranks is that of the whole batch; and the
    norm of the gradient before clipping. Waits for neither: while a GPU computes, the CPU goes
    ahead."""
    mean_loss = torch.zeros((), device=windows.device)
    # FSDP averages gradients over ranks, of which some may have a window less than others.
    rank_tokens = args.batch_size * args.length / dist.get_world_size()  # on average
    for number, micro_batch in enumerate(windows.tensor_split(args.accumulate), 1):
        is_last = number == args.accumulate
        if args.keep_gathered:  # weights, and whole gradients in float32, until the last one
            model.set_reshard_after_backward(is_last)
            model.set_requires_gradient_sync(is_last)
        elif args.shard > 0 and args.accumulate > 1:  # average over copies in the last one only
            model.set_requires_all_reduce(is_last)
        inputs, targets = micro_batch[:, :-1], micro_batch[:, 1:]
        loss = model(inputs, targets) / rank_tokens
        loss.backward()
        mean_loss += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss, norm


def train(args, model, optimizer, texts, checkpoints, done, device):
    """Train from the step after `done` to the last, with progress lines, evaluations and
    checkpoints. Only at progress lines do the ranks wait for the GPU and for each other."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reader = ThreadPoolExecutor(1)  # reads the next step's windows meanwhile
    read = functools.partial(reader.submit, read_step, args, texts.train, rank, world_size)
    upcoming = read(done + 1)
    extra_line = done + 1  # shows that everything works; later ones are for checkpoints
    loss_sum, counted, started = torch.zeros((), device=device), 0, time.perf_counter()
    model.train()
    for step in range(done + 1, args.steps + 1):
        torch.manual_seed(mix(args.seed, step, rank))  # of dropout, if you add it
        windows = to_device(upcoming.result(), device)
        upcoming = read(step + 1)
        lr = learning_rate(args, step)
        mean_loss, norm = train_step(args, model, optimizer, windows, lr)
        loss_sum, counted = loss_sum + mean_loss, counted + 1
        is_last = step == args.steps
        evaluates = is_last or step % args.eval_every == 0
        if not (evaluates or step % args.log_every == 0 or step == extra_line):
            continue

        checkpoints.finish_if_written()
        train_loss = loss_sum.item() / counted  # this rank's; waits for the GPU
        seconds = (time.perf_counter() - started) / counted
        # In how many steps the next checkpoint is due: by rank 0's clock, as all must agree.
        due = checkpoints.steps_until_due(seconds) if rank == 0 else 0
        train_loss, orphans, due = sum_over_ranks([train_loss, is_orphan(), due], device)
        if orphans > 0:
            end("torchrun was killed")  # its ranks would live on, and train
        train_loss /= world_size
        norm = norm.full_tensor().item()
        weight_norm = nn.utils.get_total_norm(model.parameters()).full_tensor().item()
        if not all(map(math.isfinite, (train_loss, norm, weight_norm))):  # if any weight is not
            checkpoints.finish()
            end(f"step {step}: loss, gradient or weights not finite; they are not saved")
        if rank == 0:
            report(args, model, step, train_loss, norm, seconds, device)
        if evaluates:
            val_loss, bits = evaluate(args, model, texts, device)
            if rank == 0:
                print(f"step {step}: val loss {val_loss:.4f}, {bits:.4f} bits per byte", flush=True)
                write_log(args, step=step, val_loss=val_loss, bits_per_byte=bits)
        if due == 0 or is_last:
            checkpoints.start(model, optimizer, step)
        # After a save (0): the next step. inf, still writing: the next line asks again.
        extra_line = step + max(1, due)
        loss_sum, counted, started = torch.zeros((), device=device), 0, time.perf_counter()
    checkpoints.close()
    reader.shutdown(cancel_futures=True)


def sum_over_ranks(values, device):
    """Numbers to a list of their sums, in float32: not every GPU has float64. All ranks must call
    it; waits for the GPU."""
    sums = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def is_orphan():
    return dist.is_torchelastic_launched() and os.getppid() != parent_pid


@torch.no_grad()
def evaluate(args, model, texts, device):
    """The mean loss of windows spread evenly over val.bin, --eval-tokens of them at most, in nats
    per token and in bits per byte. Each is evaluated by one rank. All ranks must call it, and make
    the same number of forward passes, of one shape, which is compiled once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = count_evaluated(args, texts)
    micro_batch = args.batch_size // world_size // args.accumulate
    losses, tokens, text_bytes = [], 0, 0
    model.eval()
    for first in range(0, count, micro_batch * world_size):
        share = range(first + rank * micro_batch, first + (rank + 1) * micro_batch)
        pairs = [read_evaluation(args, texts, window, count) for window in share]
        inputs, targets = (torch.stack(part) for part in zip(*pairs))
        losses.append(model(to_device(inputs, device), to_device(targets, device)))
        counted = targets[targets >= 0]
        tokens += len(counted)
        text_bytes += texts.token_bytes[counted].sum()
    model.train()
    nats = torch.stack(losses).cpu().double().sum()
    nats, tokens, text_bytes = sum_over_ranks([nats, tokens, text_bytes], device)
    return nats / tokens, nats / math.log(2) / text_bytes


@record  # the traceback of the rank that failed appears in torchrun's summary
def main(args):
    rank = int(os.environ["RANK"]) if launched else 0  # number of this process, on all machines
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1  # all processes, one per GPU
    # For samples and names that the terminal cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")
    if rank == 0:  # if it ends here, torchrun ends the others, which wait for it: one message
        check_numbers(args)
        set_defaults(args, world_size)
        check_flags(args, world_size)
        lock = None if args.sample is not None else lock_output(args)  # as long as it is open
    device = join(args, rank, world_size)
    if rank > 0:
        set_defaults(args, world_size)
    if args.sample is not None:
        text = sample(args, world_size, device)
        if rank == 0:
            print(text)
        dist.destroy_process_group()
        return

    texts = Texts(args.tokens)
    if args.epochs is not None:
        batches_per_epoch = windows_per_epoch(args, texts.train) / args.batch_size
        args.steps = max(1, round(args.epochs * batches_per_epoch))
    compare_ranks(args, texts, world_size)
    latest = read_latest(args)
    check_run(args, texts, latest)
    config = model_config(args, texts.about["vocabulary"])
    torch.set_float32_matmul_precision("high")  # TF32: faster on NVIDIA GPUs since Ampere
    model = build_model(args, config, device, world_size)
    optimizer = build_optimizer(args, model)
    checkpoints = Checkpoints(args, texts, config, device, is_new=latest is None)
    if latest is None:
        initialize(model, args.seed)
    else:
        checkpoints.load(model, optimizer, latest)
    done = latest["step"] if latest else 0
    if rank == 0:
        print_start(args, model, texts, world_size, device)
        print(f"{args.output}: {done} steps are done", flush=True)
        prepare_output(args, latest)
    train(args, model, optimizer, texts, checkpoints, done, device)
    save_model(args, model, config)
    if rank == 0:
        print(f"finished: {args.output / 'model.pt'}", flush=True)
        lock.close()
    # All end together. Not for --timeout: rank 0 may write for long. (Gloo may also abort at exit
    # if not all wait for each other: pytorch#179291.)
    dist.barrier(checkpoints.group)
    dist.destroy_process_group()


# ---- What is written to the run's folder ---------------------------------------------------------
# step-NUMBER/    a checkpoint, a file of each rank
# latest.json     names the newest whole one: the run is where this one is
# log.jsonl       a line for each progress line and evaluation
# tokenizer.json  as in --tokens, for --sample
# model.pt        the whole weights and what builds the model, once all steps are done
# lock            is locked while a run is in this folder
class Checkpoints:
    """Writes checkpoints while the training goes on, never two at a time.

    `start` copies this rank's shards to its CPU; a thread then writes them. `finish` waits for the
    thread; only then does latest.json name the new checkpoint, and older ones are removed. So a run
    that is killed is where the last finished one is.
    """

    def __init__(self, args, texts, config, device, is_new):
        self.output = args.output
        self.about = {"flags": fixed_flags(args), "tokens": texts.about}
        self.about |= {"config": config, "numpy": np.__version__}
        # A group of its own, as the threads communicate while the training does. Its timeout is for
        # slow disks: if a rank dies, the others end at once.
        self.group = dist.new_group(timeout=timedelta(hours=2), backend="gloo")
        # One copy of the shards, in memory that is kept: pinned for CUDA, which is fast to copy to.
        cuda = device.type == "cuda"
        options = {"use_shared_memory": False, "use_async_staging": False}
        options |= {"use_pinned_memory": cuda, "use_non_blocking_copy": cuda}
        self.stager = DefaultStager(StagingOptions(**options))
        self.seconds_between = 60 * args.checkpoint_minutes
        self.due = time.perf_counter() + self.seconds_between
        if is_new:  # find out whether it can save
            self.due = 0
        self.writing = None  # the number of the step, and what the thread will return

    def steps_until_due(self, step_seconds):
        """In how many steps to save; 0: now; but not before the last checkpoint is written."""
        steps = max(0, math.ceil((self.due - time.perf_counter()) / step_seconds))
        return math.inf if steps == 0 and self.writing is not None else steps

    def start(self, model, optimizer, step):
        """All ranks must call it."""
        self.finish()
        # Without copying ahead, for which the thread would open GPU 0, whichever is this rank's.
        writer = dcp.FileSystemWriter(self.output / f"step-{step:08}", per_thread_copy_ahead=0)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)  # who writes what: always alike
        weights, moments = get_state_dict(model, optimizer)
        future = dcp.async_save(
            {"model": weights, "optimizer": moments},
            storage_writer=writer,
            planner=planner,
            process_group=self.group,
            async_stager=self.stager,
        )
        self.writing = step, future
        self.due = time.perf_counter() + self.seconds_between

    def finish_if_written(self):
        if self.writing is not None and self.writing[1].done():
            self.finish()

    def finish(self):
        if self.writing is None:
            return
        step, future = self.writing
        future.result()  # raises what a thread of any rank has raised: a full disk, for example
        self.writing = None
        if dist.get_rank() == 0:
            self.publish(step)

    def publish(self, step):
        """Name this checkpoint, which is whole, in latest.json, and remove older ones."""
        folder = self.output / f"step-{step:08}"
        written = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
        if not {part.relative_path for part in written} <= set(os.listdir(folder)):
            raise SystemExit(f"{folder} lacks parts: put --output on a disk of all machines")
        latest = {"checkpoint": folder.name, "step": step, **self.about}
        write(self.output / "latest.json", json.dumps(latest).encode())
        remove_checkpoints(self.output, folder.name)

    def close(self):
        self.finish()
        self.stager.close()

    def load(self, model, optimizer, latest):
        """Read this rank's shards, which other numbers of ranks may have written in other parts."""
        weights, moments = get_state_dict(model, optimizer)  # tensors that dcp.load fills
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=self.output / latest["checkpoint"])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def write(path, content):
    """Killed at any moment, it leaves the complete old file at `path`, or the complete new one."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def remove_checkpoints(output, kept):
    """All but one: older ones, and those of interrupted saves; but not a copy by another name."""
    for path in output.glob("step-*"):
        if path.name != kept and path.name.removeprefix("step-").isdigit():
            shutil.rmtree(path, ignore_errors=True)


def save_model(args, model, config):
    """The whole weights, gathered matrix by matrix onto rank 0's CPU, and what builds the model."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        path = args.output / "model.pt"
        tokenizer = json.loads((args.output / "tokenizer.json").read_text())
        about = {"config": config, "length": args.length, "tokenizer": tokenizer}
        with open(f"{path}.tmp", "wb") as file:
            torch.save({"model": weights, **about}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)


def read_latest(args):
    """What latest.json says, if it is there: read by rank 0, as a network disk may show others an
    older one, and broadcast to all."""
    path, latest = args.output / "latest.json", [None]
    if dist.get_rank() == 0 and path.exists():
        latest = [json.loads(path.read_text())]
    dist.broadcast_object_list(latest, 0)
    return latest[0]


def prepare_output(args, latest):
    """Bring the folder to where the checkpoint is: remove interrupted saves, and the log's lines of
    later steps, which are now repeated."""
    remove_checkpoints(args.output, latest and latest["checkpoint"])
    shutil.copy(args.tokens / "tokenizer.json", args.output)
    path, done = args.output / "log.jsonl", latest["step"] if latest else 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith(b"}\n") and json.loads(line)["step"] <= done]
    write(path, b"".join(lines))


def write_log(args, **row):
    with open(args.output / "log.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


# ---- The start, and what is refused --------------------------------------------------------------
# Ranks may outlive a killed torchrun until their next progress line; a network disk may keep the
# lock of a machine that has died until it misses it, often for 90 s.
LOCK_SECONDS = 60
NUMBERS = ["layers", "width", "heads", "length", "steps", "batch_size", "accumulate", "timeout"]
NUMBERS += ["log_every", "eval_every", "eval_tokens", "sample_tokens"]
NUMBERS_FROM_0 = ["lr", "warmup_steps", "weight_decay", "clip_norm", "seed", "shard"]
NUMBERS_FROM_0 += ["checkpoint_minutes"]


def check_numbers(args):
    """Of the flags as they were typed; those that depend on others are in check_flags."""
    at_least = dict.fromkeys(NUMBERS, 1) | dict.fromkeys(NUMBERS_FROM_0, 0)
    for name, least in at_least.items():
        value = getattr(args, name)
        if value is not None and not least <= value < 1e12:  # nan, too
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be at least {least} and less than 1e12, not {value}")
    if args.epochs is not None and not 0 < args.epochs < 1e12:
        parser.error(f"--epochs must be more than 0 and less than 1e12, not {args.epochs}")


def set_defaults(args, world_size):
    """Flags that depend on others."""
    for name, value in zip(("layers", "width", "heads"), SIZES[args.size]):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.compile is None:  # but not for samples: each length would be compiled
        args.compile = args.device == "cuda" and args.sample is None
    if args.accumulate is None or args.keep_gathered is None:
        args.accumulate, args.keep_gathered = choose_by_memory(args, world_size)


def choose_by_memory(args, world_size):
    """How many micro-batches a step has, and whether weights stay gathered: what is not set by
    flags. Each micro-batch communicates 8 bytes for each weight. If weights stay gathered, a whole
    step does 6, but there is less memory for activations: so they do if micro-batches still have
    8,192 tokens, which keep a GPU busy."""
    if args.device == "cpu":
        return args.accumulate or count_parts(args, world_size, 16_384), bool(args.keep_gathered)
    path, vocabulary = args.tokens / "tokens.json", 50_257  # GPT-2's
    if path.exists():
        vocabulary = json.loads(path.read_text())["vocabulary"]
    with torch.device("meta"):  # shapes without memory
        model = LanguageModel(**model_config(args, vocabulary))

    def fewest(keep_gathered, least_tokens):
        """The fewest micro-batches that fit, of 65,536 tokens at most, or None."""
        first, last = (count_parts(args, world_size, n) for n in (65_536, least_tokens))
        for accumulate in [args.accumulate] if args.accumulate else range(first, last + 1):
            values = vars(args) | {"accumulate": accumulate, "keep_gathered": keep_gathered}
            if fits(argparse.Namespace(**values), model, world_size):
                return accumulate
        return None

    least = args.accumulate or count_parts(args, world_size, 4_096)  # if nothing seems to fit
    if args.keep_gathered is not None:
        return fewest(args.keep_gathered, 4_096) or least, args.keep_gathered
    plain, gathered = fewest(False, 4_096) or least, fewest(True, 8_192)
    is_alone = (args.shard or world_size) == 1  # it has nothing to gather
    # 6 bytes instead of 8 are not worth smaller micro-batches.
    if is_alone or gathered is None or plain == 1 < gathered:
        return plain, False
    return gathered, True


def count_parts(args, world_size, tokens):
    """In how many micro-batches of at most so many tokens a rank's share of a step is cut; each has
    at least one sequence on every rank."""
    wanted = math.ceil(math.ceil(args.batch_size / world_size) / max(1, tokens // args.length))
    return max(1, min(wanted, args.batch_size // world_size))


def fits(args, model, world_size):
    needed = sum(memory_per_gpu(args, model, world_size).values())
    needed += activation_memory(args, model, micro_batch_tokens(args, world_size))
    return 1e9 * needed < 0.8 * gpu_memory(args)  # the rest: CUDA, NCCL, and what is not counted


def gpu_memory(args):
    """Bytes of this rank's GPU."""
    index = int(os.environ["LOCAL_RANK"]) if launched else 0
    return torch.get_device_module(args.device).get_device_properties(index).total_memory


def micro_batch_tokens(args, world_size):
    """Of the largest one."""
    return math.ceil(math.ceil(args.batch_size / world_size) / args.accumulate) * args.length


def chunk_tokens(args, vocabulary):
    """How many tokens' scores Head computes at a time: as they are held several times, 10 bytes for
    each, in a twentieth of the GPU's memory."""
    if args.device == "cpu":
        return 2048
    tokens = gpu_memory(args) / 20 / (10 * vocabulary)
    return 2 ** max(8, min(int(math.log2(tokens)), 14))


def model_config(args, vocabulary):
    """What builds a LanguageModel; with a padded vocabulary, as a multiple of 64 is faster."""
    padded = 64 * math.ceil(vocabulary / 64)
    return {"vocabulary": padded, "layers": args.layers, "width": args.width, "heads": args.heads}


def uses_bfloat16(args):
    return args.device != "cpu" and not args.float32


def check_flags(args, world_size):
    if args.width % (2 * args.heads):
        parser.error("--width must be a multiple of two times --heads")
    if args.shard and world_size % args.shard:
        parser.error("the number of processes must be a multiple of --shard")
    if args.shard == 1 < world_size and torch.__version__ < (2, 10):
        parser.error("--shard 1 needs torch 2.10: NCCL may sum gradients wrongly in torch 2.9")
    if args.sample is None and args.batch_size < world_size:
        parser.error(f"--batch-size must be at least the number of processes, {world_size}")
    if args.sample is None and args.batch_size < world_size * args.accumulate:
        parser.error("--batch-size must be at least --accumulate times the number of processes")
    if uses_bfloat16(args) and args.device == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            parser.error("this GPU has no bfloat16: add --float32")
    if launched and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":  # --max-restarts
        if not args.resume or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
            parser.error("--max-restarts needs --resume, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def lock_output(args):
    """Keep other runs out of --output for as long as the returned file is open. Then refuse what
    cannot be continued."""
    args.output.mkdir(parents=True, exist_ok=True)
    latest_path = args.output / "latest.json"
    if not latest_path.exists():
        others = ["tokens.json", "*.bin", "*.pt", "*.safetensors"]  # of no run that has just begun
        if not (args.output / "lock").exists():
            others += ["step-*", "*.jsonl", "*.json"]  # not a log that is there already
        for pattern in others:
            for path in args.output.glob(pattern):
                message = f"{args.output} has {path.name}, but no run of this script"
                parser.error(f"{message}: change --output")
    lock = lock_folder(args.output, LOCK_SECONDS if args.resume else 0)
    if not latest_path.exists():
        return lock
    if not args.resume:
        parser.error(f"{args.output} has a run: add --resume, or change --output")
    latest = json.loads(latest_path.read_text())
    for name, value in fixed_flags(args).items():
        old = latest["flags"].get(name, value)
        if old != value:
            flag = name.replace("_", "-")
            parser.error(f"{args.output} was started with --{flag} {old}: use the same flags")
    return lock


def fixed_flags(args):
    return {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}


def join(args, rank, world_size):
    """Join the other processes. Returns this process's device."""
    device = torch.device("cpu")
    if args.device != "cpu":
        local_rank = int(os.environ["LOCAL_RANK"]) if launched else 0  # on its machine: its GPU
        device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(local_rank)  # or all processes would use GPU 0
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    message = f"rank {rank} waits at {address} for the others of WORLD_SIZE={world_size}"
    message += "; if there are none, unset RANK"
    waiting = threading.Timer(min(10, args.timeout / 2), print, [message], {"flush": True})
    waiting.start()
    try:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),  # NCCL for CUDA, Gloo for the CPU
            store=None if launched else dist.HashStore(),  # no other process to find
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=args.timeout),
            # Bind NCCL to this GPU. (To Intel's, checkpoints' group of CPUs could not be made.)
            device_id=device if device.type == "cuda" else None,
        )
    finally:
        waiting.cancel()
    return device


def end(message):
    """End the run on all ranks, which must all call it; one on each machine says why."""
    raise SystemExit(message if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


def compare_ranks(args, texts, world_size):
    """On several machines there are several typed commands, copies of this file, and disks."""
    settings = {f"--{name}": value for name, value in vars(args).items()}
    settings |= {"--tokens": texts.about, "--output": None}  # the same, under whatever path
    settings |= {"torch": torch.__version__, "numpy": np.__version__}
    settings["this file"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    of_ranks = [None] * world_size  # the list gets each rank's
    dist.all_gather_object(of_ranks, settings)
    for rank, other in enumerate(of_ranks):
        for name, value in of_ranks[0].items():
            if other[name] != value:
                flag = name.replace("_", "-")
                end(f"ranks differ in {flag}: rank 0 has {value}, rank {rank} {other[name]}")


def check_run(args, texts, latest):
    """End what would fail later, or could not be continued."""
    if len(texts.train) < 2 * args.length:
        end(f"--length: train.bin has only {len(texts.train)} tokens: fewer than two sequences")
    if not has_validation(args, texts):
        end("--tokens: val.bin has no text: run prepare_texts.py on more, or see its --hold-out")
    if (args.warmup_steps or 0) >= args.steps:
        end(f"--warmup-steps must be less than --steps, {args.steps}")
    if latest is None:
        return
    if args.steps < latest["step"]:
        end(f"--steps: {latest['step']} steps are done in {args.output}")
    if latest["tokens"] != texts.about:
        end(f"--tokens: {args.output} was started with other token ids")
    if latest["numpy"] != np.__version__ and dist.get_rank() == 0:
        print(f"numpy was {latest['numpy']}: another one may shuffle in another order", flush=True)


def has_validation(args, texts):
    """Whether there is text in a window that an evaluation reads."""
    count = count_evaluated(args, texts)
    windows = (read_evaluation(args, texts, window, count)[1] for window in range(count))
    return any(texts.token_bytes[targets[targets >= 0]].any() for targets in windows)


# ---- Samples -------------------------------------------------------------------------------------
def sample(args, world_size, device):
    """Continue a text with the newest checkpoint of a finished or a running run."""
    latest = read_latest(args)
    if latest is None:
        end(f"--sample: no checkpoint in {args.output}")
    model = build_model(args, latest["config"], device, world_size)
    weights = get_model_state_dict(model)
    dcp.load({"model": weights}, checkpoint_id=args.output / latest["checkpoint"])
    set_model_state_dict(model, weights)
    tokenizer = build_tokenizer(json.loads((args.output / "tokenizer.json").read_text()))
    ids = tokenizer.encode(args.sample)
    if ids[:1] != [tokenizer.end_of_text]:  # it may be in the text already
        ids.insert(0, tokenizer.end_of_text)
    random = torch.Generator().manual_seed(args.seed)
    model.eval()
    for _ in range(args.sample_tokens):
        scores = next_scores(model, ids[-latest["flags"]["length"] :], device)
        scores = scores[: tokenizer.vocabulary] / 0.8  # without the padding; fewer surprises
        scores, best = scores.topk(min(50, len(scores)))
        choice = torch.multinomial(scores.softmax(0).cpu(), 1, generator=random).to(device)
        chosen = best[choice]
        dist.broadcast(chosen, 0)  # ranks may round differently, but must agree
        ids.append(chosen.item())
        if ids[-1] == tokenizer.end_of_text:
            break
    return tokenizer.decode(ids)


@torch.no_grad()
def next_scores(model, ids, device):
    """Scores of all tokens as the next one. A forward pass for each: slow, but short."""
    # Without cuDNN's attention, which is planned again for each length.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return model(torch.tensor([ids], device=device))[0]


# ---- Memory and speed ----------------------------------------------------------------------------
PEAK = {  # FLOP/s in bfloat16, without sparsity, by a GPU's whole name: a MIG slice has another
    "AMD Instinct MI300X": 1307e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A40": 150e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 5090": 209e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX 6000 Ada Generation": 364e12,
    "NVIDIA RTX A6000": 155e12,
}


def memory_per_gpu(args, model, world_size):
    """GB of each rank's memory by what is in them, without activations. Calculated."""
    shards = args.shard or world_size
    gathered_bytes = 2 if uses_bfloat16(args) else 4
    embedding = model.embedding.weight.numel()  # as large as the head
    block = sum(p.numel() for p in model.blocks[0].parameters())
    total = sum(p.numel() for p in model.parameters())
    gathered = 4 * block + embedding  # this block, the next ones, and what was not yet freed
    summed = 0  # gradients of micro-batches, in float32
    if args.keep_gathered:
        gathered = total
        summed = total if args.accumulate > 1 else 0
    sizes = {
        "weights": 4 * total / shards,  # float32
        "gradients": 4 * total / shards,
        "moments": 8 * total / shards,  # AdamW's two
        "gathered": gathered_bytes * gathered + 4 * summed,
        "to reduce": (gathered_bytes + 4) * max(block, embedding),  # and a float32 copy of it
    }
    return {name: size / 1e9 for name, size in sizes.items()}


def activation_memory(args, model, tokens):
    """GB that a micro-batch adds, about. Compiled and in bfloat16, it is 40 bytes for each feature
    of each layer, and 4 for each score of the vocabulary and 6 more of a chunk; with --recompute,
    each layer's input, two times 40 bytes for a layer that is computed again, and the scores of a
    chunk."""
    vocabulary = model.embedding.num_embeddings
    chunk = min(tokens, chunk_tokens(args, vocabulary))
    if args.recompute:
        size = tokens * (2 * args.layers + 80) * args.width + chunk * 10 * vocabulary
    else:
        size = tokens * (40 * args.layers * args.width + 4 * vocabulary) + chunk * 6 * vocabulary
    return size * (1 if uses_bfloat16(args) else 2) * (1 if args.compile else 2) / 1e9


def print_start(args, model, texts, world_size, device):
    memory = memory_per_gpu(args, model, world_size)
    parts = ", ".join(f"{name} {size:.2f}" for name, size in memory.items())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    copy = f"a copy of the model on every {args.shard or world_size}"
    tokens, total = args.batch_size * args.length, sum(p.numel() for p in model.parameters())
    micro_batch = micro_batch_tokens(args, world_size)
    activations = activation_memory(args, model, micro_batch)
    epochs = tokens * args.steps / len(texts.train)
    print(f"torch {torch.__version__}, {world_size} ranks, {name}; {copy}")
    print(f"{len(texts.train):,} tokens for training, {len(texts.val):,} for validation")
    print(f"{total:,} parameters; highest learning rate {highest_rate(args):.2e}")
    step = f"{args.batch_size} sequences, {tokens:,} tokens, in {args.accumulate} micro-batches"
    step += ", for which weights are gathered once" if args.keep_gathered else ""
    print(f"a step: {step}; {args.steps} steps: {epochs:.1f} epochs")
    print(f"GB on each: {sum(memory.values()):.2f} ({parts})")
    print(f"and about {activations:.2f} for the activations of {micro_batch:,} tokens", flush=True)
    checkpoint, whole = 12e-9 * total / (args.shard or world_size), 4e-9 * total
    host = f"{checkpoint:.2f} for each rank's part of a checkpoint, {whole:.2f} for model.pt"
    print(f"GB of host memory: {host}", flush=True)


def report(args, model, step, train_loss, norm, seconds, device):
    """The progress line. `train_loss` is the mean since the last one, `norm` that of the last
    gradient, `seconds` what a step takes."""
    lr, speed = learning_rate(args, step), args.batch_size * args.length / seconds
    line = f"step {step}/{args.steps} loss {train_loss:.4f} lr {lr:.2e} gradient norm {norm:.2e}"
    line += f" {speed:.0f} tokens/s"
    if device.type == "cuda":
        peak = PEAK.get(torch.cuda.get_device_name(device))
        if peak and not args.float32:
            share = speed * flops_per_token(args, model) / dist.get_world_size() / peak
            line += f" {share:.1%} of peak FLOP/s"
        line += f" {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most"
    print(f"{line} {(args.steps - step) * seconds / 60:.1f} min left", flush=True)
    write_log(args, step=step, loss=train_loss, lr=lr, gradient_norm=norm, tokens_per_second=speed)


def flops_per_token(args, model):
    """Of the forward and backward pass, without what is recomputed: 6 for each weight that
    multiplies, and 6 * length * width in each layer for the attention to, on average, half."""
    multiply = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    return 6 * multiply + 6 * args.layers * args.length * args.width


if __name__ == "__main__":
    main(parser.parse_args())

"""complete/train.py with --shard: the same run with a sharded model, what a rank holds and sends,
and checkpoints that any --shard on any number of processes continues."""

import re
from pathlib import Path

import pytest
import torch
from helpers import COMPLETE, checkpoint, close, leaves, run, same, together, train, weights
from test_training import AS_CUDA

STOP = """
add("--stop", type=int, default=-1)
MAY_CHANGE.append("stop")
plain_build, plain_save = build_model, save_checkpoint
def build_model(*words):
    return plain_build(*words).to(memory_format=torch.channels_last)
def save_checkpoint(args, progress, state, *words):
    for parameter, buffers in state["optimizer"].state.items():
        for tensor in buffers.values():  # fused optimizers read both as one array
            assert tensor.ndim == 0 or tensor.stride() == parameter.stride()
    plain_save(args, progress, state, *words)
    if progress.epoch * 10 + progress.step == args.stop:
        raise SystemExit(0)
"""
# Processes, --shard, --log-every, and the step after which the run is stopped.
STAGES = [(0, 1, 2, 4), (3, 0, 4, 14), (2, 1, 7, 17), (4, 2, 3, 23), (2, 0, 9, -1)]


@pytest.mark.slow
def test_any_shard_continues_any_other(fashion):
    """One run, stopped within epochs: one process, FSDP2 on three, DDP on two, groups of two on
    four, FSDP2 on two, with SGD and AdamW. It ends as that of one process, momenta included, which
    keep the memory format of channels_last."""
    flags = [*fashion, "--batch-size", 60, "--clip-norm", 1, "--resume", "--epochs", 3]
    flags += ["--checkpoint-minutes", 0, "--optimizer"]
    done = "0 epochs and 0 steps"
    for processes, shard, often, stop in STAGES:
        own = ["--shard", shard, "--log-every", often, "--stop", stop, "--output"]
        runs = [[*flags, name, *own, name] for name in ("sgd", "adamw")]
        texts = together(*runs, processes=processes, more=STOP)
        assert all(f"{done} are done" in text for text in texts), texts
        done = f"{stop // 10} epochs and {stop % 10} steps"
    for name in "sgd", "adamw":
        train(*flags, name, "--output", "whole-" + name)
        close(name, "whole-" + name)
        both = checkpoint(name), checkpoint("whole-" + name)
        for a, b in zip(*map(leaves, both), strict=True):
            a, b = ([] if x is None else x for x in (a, b))
            a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
            assert (a - b).norm() <= 1e-3 * b.norm(), name  # AdamW enlarges rounding
        assert same(weights(name), both[0]["model"])


HELD = """
def build_model(args, inputs, classes):
    blocks = nn.Sequential(*(models.resnet.BasicBlock(16, 16) for _ in range(2)))
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)
    return nn.Sequential(nn.Conv2d(1, 16, 3), blocks, *head)
plain, plain_reduce = build_optimizer, dist.all_reduce
def build_optimizer(args, model, steps):
    def after_step(*_):
        held = [*model.parameters(), *(p.grad for p in model.parameters())]
        held += [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        local = [t.to_local() for t in held if isinstance(t, DTensor)]
        if not local:
            return  # DDP
        print("holds", sum(t.numel() for t in local) / sum(t.numel() for t in held), flush=True)
        stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
        print("stores", sum(stored.values()) / 4 / sum(t.numel() for t in local), flush=True)
    optimizer, scheduler = plain(args, model, steps)
    optimizer.register_step_post_hook(after_step)
    return optimizer, scheduler
def all_reduce(tensor, *words, **options):
    print("all-reduce of", tensor.numel(), flush=True)
    return plain_reduce(tensor, *words, **options)
dist.all_reduce = all_reduce
BLOCKS += (nn.Sequential,)
"""


@pytest.mark.slow
def test_shards(fashion):
    """On four ranks, also two of which share a copy, and with blocks within blocks: DDP's losses,
    also of batch norm, and each rank holds its shard. The last has one test batch less. The
    gradients of two copies are all-reduced once a step, whatever --accumulate. A resumed run keeps
    no whole tensors in memory."""
    flags = [*fashion, "--epochs", 1, "--batch-size", 200, "--accumulate", 2, "--output"]
    runs = [[*flags, str(n), "--shard", n] for n in (1, 4, 2)]
    resumed = [*flags, "4", "--shard", 4, "--resume", "--epochs", 2]
    _, *texts, after = together(*runs, resumed, processes=4, more=HELD)
    for n, text in zip((4, 2), texts):
        close("1", str(n), 1e-3)  # the one of four has been resumed
        assert f"3 blocks; each copy of the model on {n} ranks" in text
        held = [float(part) for part in re.findall(r"holds (\S+)", text)]
        assert len(held) == 4 * 3 and held == pytest.approx([1 / n] * 12, rel=0.1)
        gradients = [n for n in re.findall(r"all-reduce of (\d+)", text) if int(n) > 3]
        groups = 3 if n == 2 else 0  # of parameters that are gathered together
        assert len(gradients) == groups * 3 * 4  # steps, ranks
    assert max(map(float, re.findall(r"stores (\S+)", after))) < 1.1


NEXT = """
class Block(nn.Sequential):
    pass
BLOCKS += (Block,)
def build_model(args, inputs, classes):
    if args.model == "net":
        model = Net(*inputs.shape[1:3], classes)
        tell = lambda layer, _: print("gathers", layer.weight.dtype, flush=True)
        model.fc2.register_forward_pre_hook(tell)
        model.fc2 = Block(model.fc2)
        return model
    stages = [models.convnext.CNBlockConfig(8, None, 10)]  # 10 blocks of other depth
    model = models.convnext.ConvNeXt(stages, 0.1, num_classes=classes)
    tell = lambda layer, _, output: print("stream", output.dtype, flush=True)
    [m for m in model.modules() if isinstance(m, BLOCKS[4])][3].register_forward_hook(tell)
    return model
plain_compile, plain_epoch = torch.compile, finish_epoch
def finish_epoch(*words):
    print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], flush=True)
    return plain_epoch(*words)
torch.compile = lambda function, dynamic: plain_compile(function, dynamic=dynamic, backend="eager")
plain_load = load_torchvision
def load_torchvision(args, train):
    tensors = plain_load(args, train).tensors
    return TensorDataset(*(t if args.model == "net" else t[:80] for t in tensors))
"""


@pytest.mark.slow
def test_mixed_precision_and_compile(fashion):
    """--amp is DDP's; blocks without batch norm are gathered in bfloat16, but not ConvNeXt's, whose
    residual stream stays float32. --compile compiles all of more than eight different blocks."""
    flags = [*fashion, "--epochs", 1, "--amp", "--output"]
    train(*flags, "one")
    convnext = ["--model", "convnext_tiny", "--batch-size", 16, "--output"]
    runs = [[*flags, "amp", "--shard", 0], [*flags, "next", "--shard", 0, *convnext, "next"]]
    texts = together(*runs, more=AS_CUDA + NEXT)
    close("amp", "one", 1e-2, ("train_loss", "test_loss"))
    assert set(re.findall(r"gathers (.*)", texts[0])) == {"torch.bfloat16"}
    assert set(re.findall(r"stream (.*)", texts[1])) == {"torch.float32"}
    flags = [*fashion, "--epochs", 1, "--shard", 0, *convnext]
    texts = together([*flags, "plain"], [*flags, "compiled", "--compile"], more=NEXT)
    assert "recompile" not in texts[1], texts[1]
    graphs = re.findall(r"graphs ([1-9]\d*)", texts[1])  # 0 before the first step
    assert graphs == ["11", "11"], texts[1]  # and the loss
    close("compiled", "plain", 1e-3)


OTHER = """
plain = build_model
def build_model(*words):
    model = plain(*words)
    model.fc3.bias.data += dist.get_rank()
    return model
"""


def test_other_weights_on_another_rank(fashion):
    """As if rank 0 alone had loaded a file: refused, before anything is written."""
    text = run(COMPLETE, *fashion, "--shard", 0, more=OTHER, status=1)
    says = "the ranks have different weights"
    assert says in text and "Traceback" not in text and not Path("runs").exists(), text

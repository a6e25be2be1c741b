"""complete/train_fsdp2.py: the same run with a sharded model, and what only it can do. Recipes of
docs/large_models.md do what they say."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import train_ddp
from helpers import COMPLETE, close, edited, finish, parse, run, start, train, weights

DDP, FSDP2 = COMPLETE
BLOCKS = "BLOCKS = (models.resnet.BasicBlock, "
ZERO = "            optimizer.zero_grad()\n"
HELD = """            held = [*model.parameters(), *(p.grad for p in model.parameters())]
            held += [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
            local = [t.to_local() for t in held if isinstance(t, DTensor)]
            print("holds", sum(t.numel() for t in local) / sum(t.numel() for t in held), flush=True)
            stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
            print("stores", sum(stored.values()) / 4 / sum(t.numel() for t in local), flush=True)
            optimizer.zero_grad()
"""
COUNT = """
plain = dist.all_reduce
def all_reduce(tensor, *words, **options):
    print("all-reduce of", tensor.numel(), flush=True)
    return plain(tensor, *words, **options)
dist.all_reduce = all_reduce
"""
EAGER = """
plain, plain_epoch = torch.compile, finish_epoch
def finish_epoch(*words):
    print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], flush=True)
    return plain_epoch(*words)
torch.compile = lambda function, dynamic: plain(function, dynamic=dynamic, backend="eager")
"""


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_either_script_continues_the_other(fashion, optimizer):
    """A run of train_ddp.py is resumed sharded over three ranks, and, within an epoch, in
    train_ddp.py again, or sharded over two. last.pt has whole tensors, as everywhere; what a
    rank has read does not keep the whole tensors in memory (torch 2.9 would)."""
    flags = [*fashion, "--optimizer", optimizer, "--batch-size", 60, "--clip-norm", 1, "--resume"]
    flags += ["--checkpoint-minutes", 0, "--log-every", 1, "--epochs", 3, "--output"]
    train(*flags, "whole")
    train(*flags, "out", "--epochs", 1)
    crash = f"            assert epoch * 10 + step < 18\n{ZERO}"  # an epoch has ten steps
    path = edited(FSDP2, ZERO, HELD + crash, "30 * (now - started)", "0")
    statuses, text = finish(start(FSDP2, *flags, "out", processes=3, path=path))
    assert 0 not in statuses and "1 epochs and 0 steps are done" in text, text
    assert max(map(float, re.findall(r"stores (\S+)", text))) < 1.1
    shutil.copytree("out", "other")
    for name, output in (DDP, "out"), (FSDP2, "other"):
        assert "1 epochs and 7 steps are done" in run(name, *flags, output, processes=2)
        close(output, "whole")
        assert weights(output).keys() == weights("whole").keys()
    groups = [
        weights(output, "last.pt")["optimizer"]["param_groups"] for output in ("out", "whole")
    ]
    assert groups[0] == groups[1]  # its fused optimizer too
    sizes = [Path(output, "last.pt").stat().st_size for output in ("whole", "other")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_channels_last(fashion):
    """train_ddp.py takes train_fsdp2.py's momenta, which are contiguous, in the memory format of
    its own parameters: fused optimizers read both as one array."""
    flags = [*fashion, "--model", "resnet18", "--image-size", 16, "--batch-size", 320]
    run(FSDP2, *flags, "--epochs", 1, "--output", "out", processes=1)
    args = parse(*flags, "--output", "out", "--resume")
    model = train_ddp.build_model(args, torch.zeros(1, 3, 16, 16), 10)
    optimizer, scheduler = train_ddp.build_optimizer(args, model, 20)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert train_ddp.load_checkpoint(args, state).epoch == 1
    saved = weights("out", "last.pt")["optimizer"]["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        own = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(own, saved[i]["momentum_buffer"]) and own.stride() == p.stride()
    assert not all(p.is_contiguous() for p in parameters)


@pytest.mark.slow
def test_shards(fashion):
    """On four ranks, also two of which share a copy, and with blocks within blocks: DDP's losses,
    also of batch norm, and each rank holds its shard. The gradients of two copies are all-reduced
    once a step, whatever --accumulate."""
    flags = [*fashion, "--image-size", 16, "--model", "resnet18", "--epochs", 1]
    flags += ["--batch-size", 208, "--accumulate", 2, "--output"]
    run(DDP, *flags, "ddp", processes=4)
    path = edited(FSDP2, ZERO, HELD, BLOCKS, f"{BLOCKS}nn.Sequential, ", more=COUNT)
    for shard in "4", "2":
        text = run(FSDP2, *flags, shard, "--shard", shard, processes=4, path=path)
        close(shard, "ddp", 1e-3)
        assert f"15 blocks; each copy of the model on {shard} ranks" in text
        held = [float(part) for part in re.findall(r"holds (\S+)", text)]
        assert len(held) == 4 * 3 and held == pytest.approx([1 / int(shard)] * 12, rel=0.1)
        gradients = [n for n in re.findall(r"all-reduce of (\d+)", text) if int(n) > 3]
        groups = 12 if shard == "2" else 0  # of parameters that are gathered together
        assert len(gradients) == groups * 3 * 4  # steps, ranks


@pytest.mark.slow
def test_mixed_precision_and_compile(fashion):
    """--amp is train_ddp.py's, and without batch norm blocks are gathered in bfloat16. --compile
    compiles the blocks of resnet18 without reaching the limit of recompilations."""
    flags = [*fashion, "--epochs", 1, "--amp", "--output"]
    cut = "    fully_shard(model, mesh=mesh)"
    tell = "lambda layer, _: print('types', layer.weight.dtype, flush=True)"
    hook = f"    blocks[0].register_forward_pre_hook({tell})\n{cut}"
    amp = 'if args.amp and args.device != "cpu"', "if args.amp"
    path = edited(FSDP2, BLOCKS, f"{BLOCKS}nn.Linear, ", cut, hook, *amp)
    train(*flags, "one")
    text = run(FSDP2, *flags, "amp", processes=2, path=path)
    close("amp", "one", 1e-2, ("train_loss", "test_loss"))
    assert set(re.findall(r"types (.*)", text)) == {"torch.bfloat16"}
    flags = [*fashion, "--epochs", 1, "--model", "resnet18", "--image-size", 16]
    flags += ["--batch-size", 320, "--output"]
    path = edited(FSDP2, more=EAGER)
    text = run(FSDP2, *flags, "compiled", "--compile", processes=2, path=path)
    assert "recompile" not in text and re.findall(r"graphs (\d+)", text) == ["8", "8"], text
    run(FSDP2, *flags, "plain", processes=2)
    close("compiled", "plain", 1e-3)


def test_other_weights_on_another_rank(fashion):
    """As if rank 0 alone had loaded a file: refused, before anything is written."""
    build = "    shard_model(args, model, device, world_size, rank)\n"
    load = f"    if rank == 0:\n        model.fc3.bias.data += 1\n{build}"
    text = run(FSDP2, *fashion, path=edited(FSDP2, build, load), status=1, processes=2)
    says = "the ranks have different weights"
    assert says in text and "Traceback" not in text and not Path("runs").exists(), text


PRETEND = """
plain = parser.parse_args
def parse_args():
    args = plain()
    args.device = "cuda"
    return args
parser.parse_args, torch.accelerator.device_count = parse_args, lambda: 1
torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation
"""


def test_no_float16():
    """On a GPU before Ampere, as which the CPU is passed off, --amp would need a GradScaler."""
    text = run(FSDP2, "--amp", path=edited(FSDP2, more=PRETEND), status=2)
    assert "error: --amp needs a GPU with bfloat16" in text and not Path("runs").exists()

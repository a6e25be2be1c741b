"""train_fsdp2.py: the same run with a model that is cut, and what only it can do."""

import re
import shutil

import pytest
from helpers import *
from torch.distributed.fsdp import MixedPrecisionPolicy

HALF = "                    assert run_step < 14\n"  # an epoch has ten steps
SAVED = '                    saved_at = state["seconds"]\n'
BLOCKS = "BLOCKS = (models.resnet.BasicBlock, nn.TransformerEncoderLayer)"
HELD = """            held = [*model.parameters(), *(p.grad for p in model.parameters())]
            held += [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
            local = sum(t.to_local().numel() for t in held if isinstance(t, DTensor))
            print("holds", local / sum(t.numel() for t in held), flush=True)
            optimizer.zero_grad()
"""
ZERO = "            optimizer.zero_grad()\n"


@pytest.mark.slow
def test_checkpoints_of_all_scripts(fashion):
    """A run of train_single.py goes on from within an epoch, cut over three ranks, and then in
    train_ddp_torchrun.py, or cut over two. last.pt has the whole tensors, as everywhere."""
    flags = [*fashion, "--optimizer", "adam", "--epochs", 3, "--batch-size", 60, "--augment"]
    flags += ["--resume", "--checkpoint-minutes", 0, "--log-every", 1, "--output"]
    run("single", *flags, "whole")
    run("single", *flags, "out", path=edited("single", SAVED, SAVED + HALF), status=1)
    path = edited("fsdp2", SAVED, SAVED + HALF.replace("14", "17"))
    statuses, text = finish(start("fsdp2", *flags, "out", processes=3, path=path))
    assert 0 not in statuses and "from epoch 2, step 5 on" in text, text
    shutil.copytree("out", "other")
    assert "from epoch 2, step 8 on" in run("ddp_torchrun", *flags, "out", processes=2)
    assert "from epoch 2, step 8 on" in run("fsdp2", *flags, "other", processes=2)
    for output in "out", "other":
        close(output, "whole")
        assert weights(output).keys() == weights("whole").keys()
    sizes = [Path(output, "last.pt").stat().st_size for output in ("whole", "other")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


@pytest.mark.slow
def test_cut_in_other_ways(fashion):
    """On four ranks, two of which share a copy, and with blocks within blocks: DDP's losses, also
    of batch norm, and each rank holds its part. Ranks have different numbers of test batches."""
    flags = [*fashion, "--model", "resnet18", "--epochs", 1, "--batch-size", 196, "--output"]
    run("ddp_torchrun", *flags, "ddp", processes=4)
    nested = "BLOCKS = (models.resnet.BasicBlock, nn.Sequential)"
    for output, shard, blocks in ("all", 4, BLOCKS), ("pairs", 2, nested):
        path = edited("fsdp2", ZERO, HELD, BLOCKS, blocks)
        text = run("fsdp2", *flags, output, "--shard", shard, processes=4, path=path)
        close(output, "ddp", 1e-3)
        count = 8 if blocks == BLOCKS else 15  # four layers and three shortcuts are nn.Sequential
        assert f"{count} blocks; each copy of the model on {shard} ranks" in text
        held = [float(part) for part in re.findall(r"holds (\S+)", text)]
        assert len(held) == 4 * 3 and held == pytest.approx([1 / shard] * len(held), rel=0.1)


@pytest.mark.slow
def test_mixed_precision_and_compile(fashion):
    """--amp is train_single.py's; from torch 2.15 on blocks are gathered in bfloat16, all but their
    biases. --compile compiles the blocks and changes little."""
    flags = [*fashion, "--epochs", 1, "--output"]
    layers = "BLOCKS = (nn.Linear,)"
    cut = "    fully_shard(model, mesh=mesh)  # what is in no block\n"
    tell = "lambda layer, _: print('types', layer.weight.dtype, layer.bias.dtype, flush=True)"
    hook = f"{cut}    blocks[0].register_forward_pre_hook({tell})\n"
    path = edited("fsdp2", BLOCKS, layers, cut, hook)
    run("single", *flags, "single", "--amp")
    text = run("fsdp2", *flags, "amp", "--amp", processes=2, path=path)
    close("amp", "single", 1e-3, ("train_loss", "test_loss"))
    lean = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
    weight = "torch.bfloat16" if lean else "torch.float32"
    assert set(re.findall(r"types (.*)", text)) == {f"{weight} torch.float32"}
    if shutil.which("g++"):  # which torch.compile needs on a CPU
        end = "    weights = gather(model.state_dict())\n"
        stats = "torch._dynamo.utils.counters['stats']['unique_graphs']"
        path = edited("fsdp2", BLOCKS, layers, end, f"{end}    print('graphs', {stats})\n")
        text = run("fsdp2", *flags, "compiled", "--compile", processes=2, path=path)
        assert int(re.search(r"graphs (\d+)", text)[1]) >= 4  # three blocks and the loss
        run("single", *flags, "plain")
        close("compiled", "plain", 1e-3)


def test_what_is_refused(fashion):
    """Each in a line, before anything is written."""
    head = "    return Net(channels, side, classes)\n"
    tied = head.replace("return", "model =") + "    model.fc2.bias = model.conv2.bias\n"
    tied = [head, f"{tied}    return model\n", BLOCKS, "BLOCKS = (nn.Linear,)"]
    load = "            train_set, test_set, classes = load_data(args)\n"
    few = [load, f"{load}            test_set = torch.utils.data.Subset(test_set, [])\n"]
    for says, changes, *flags in [
        ("a block shares a weight with another, or with the rest: change BLOCKS", tied),
        ("the test set has only 0 samples: fewer than processes", few),
        ("the number of processes has to be a multiple of --shard", [], "--shard", 2),
        ("unrecognized arguments: --sync-bn", [], "--sync-bn"),
    ]:
        text = run("fsdp2", *fashion, *flags, path=edited("fsdp2", *changes), status=2)
        assert says in text and "Traceback" not in text and not Path("runs").exists(), text

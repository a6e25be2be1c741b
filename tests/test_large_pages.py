"""The recipes of docs/large_models.md and docs/how_fast.md do what they say."""

import re
from pathlib import Path

import pytest
import torch
from helpers import run, same, weights
from test_pages import copy, train
from torchvision import models

META, FILE, PARTS = "Built on the meta device", "A pretrained file", "Checkpoints in parts"
OFFLOAD, BYTES = "Parameters in the host's memory", "Less communication, more memory"
SHORT = ["--epochs", 1, "--batch-size", 32, "--log-every", 5, "--checkpoint-minutes", 0]
SHORT += ["--optimizer", "adam", "--lr-schedule", "cosine"]
KILLED = ["epoch 1/1 step 10/"]
TIED = """    model = Net(channels, side, classes)
    model.fc2 = nn.Sequential(*(nn.Linear(120, size) for size in (120, 120, 84)))
    model.fc2[0].weight = model.fc2[1].weight
    return model
"""


@pytest.mark.slow
def test_meta_device(fashion):
    """The model that each rank would have built. Its tied weights stay one parameter (as torch
    swaps DTensors in `to_empty`; those of a model that is not sharded yet would be two)."""
    changes = {"    return Net(channels, side, classes)\n": TIED}
    for output, titles, killed in ("plain", [], []), ("meta", [META], KILLED):
        copy(*titles, name="fsdp2", **changes)
        train(output, *fashion, *SHORT, name="fsdp2", killed=killed)
    assert same(weights("meta"), weights("plain"))
    plain, meta = (weights(output, "last.pt")["optimizer"] for output in ("plain", "meta"))
    assert meta["param_groups"] == plain["param_groups"]


@pytest.mark.slow
def test_pretrained_file(fashion):
    """Each rank gets its shards of the file, also of tensors that are in channels_last."""
    pretrained = models.resnet18(num_classes=10).to(memory_format=torch.channels_last)
    pretrained.conv1 = torch.nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    torch.save(pretrained.state_dict(), "pretrained.pt")
    copy(META, FILE, name="fsdp2")
    flags = [*fashion, "--model", "resnet18", "--batch-size", 640, "--epochs", 1, "--lr", 0]
    train("out", *flags, name="fsdp2")
    assert all(torch.equal(weights("out")[k], p) for k, p in pretrained.named_parameters())


@pytest.mark.slow
def test_shards(fashion):
    """Each recipe ends with the weights of the script. Blocks stay gathered with one of them."""
    show, kinds = "print('is a', type(model.fc1.weight).__name__, flush=True)", {}
    changes = {"BLOCKS = (models.resnet.BasicBlock,": "BLOCKS = (nn.Linear,"}
    changes["loss.backward()"] = f"{show}; loss.backward()"
    for output, *titles in ["plain"], ["parts", PARTS], ["bytes", BYTES], ["offload", OFFLOAD]:
        if output == "offload":  # there is no CUDA here
            changes |= {",cuda:nccl": "", "OffloadPolicy()": "OffloadPolicy(pin_memory=False)"}
        copy(*titles, name="fsdp2", **changes)
        options = {"name": "fsdp2", "killed": KILLED if titles == [PARTS] else []}
        printed = train(output, *fashion, *SHORT, **options)
        kinds[output] = set(re.findall(r"is a (\w+)", printed))
        assert same(weights(output), weights("plain")), output
        assert re.search(r"parts: 0 epochs and (5|10) steps", printed) or output != "parts"
    assert kinds["plain"] == kinds["offload"] == {"DTensor"} and kinds["bytes"] == {"Parameter"}
    assert [path.name for path in Path("parts").glob("parts-*")] == ["parts-1-0"]


@pytest.mark.slow
def test_where_the_time_goes(data):
    """The recipes print and write what they say, and the run stays the same."""
    flags = ["--dataset", data / "pictures", "--epochs", 1, "--batch-size", 4, "--workers", 1]
    run("ddp_torchrun", *flags, "--output", "script", processes=2)
    copy("Is it the loader?", "Communication or computation?", **{"started > 60": "started > 0"})
    printed = train("out", *flags)
    assert same(weights("out"), weights("script"))
    assert re.search(r"the loader alone: [1-9]\d* samples/s", printed)
    names = re.findall(r"^ *(\S.*?)  +[\d.]+% ", printed, re.M)
    assert len(names) == 10 and any(name.startswith("aten::") for name in names)
    trace = Path("out", "trace.json").read_text()
    assert set(re.findall(r"ProfilerStep#(\d+)", trace)) == {"21", "22", "23"}

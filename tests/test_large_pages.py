"""The recipes of docs/large_models.md do what they say."""

import re
from pathlib import Path

import pytest
import torch
from helpers import same, weights
from test_pages import copy, train

META, FILE, PARTS = "Building on the meta device", "A pretrained file", "Sharded checkpoints"
OFFLOAD, BYTES = "CPU offload", "Less communication, more memory"
LAST = torch.channels_last
SHORT = ["--batch-size", 32, "--optimizer", "adam", "--epochs"]
TIED = """    model = Net(channels, side, classes)
    model.fc2 = nn.Sequential(*(nn.Linear(120, size) for size in (120, 120, 84)))
    model.fc2[0].weight = model.fc2[1].weight
    return model
"""


@pytest.mark.slow
def test_meta_device(fashion):
    """The model that each rank would have built, or that is in a file, also of tensors that are in
    channels_last. Its tied weights stay one parameter (as torch swaps DTensors in `to_empty`)."""
    changes = {"    return Net(channels, side, classes)\n": TIED}
    for output, *titles in ["first"], ["plain"], ["meta", META], ["file", META, FILE]:
        copy(*titles, name="fsdp2", **changes)
        for epochs in 1, 2:
            lr = 0 if output == "first" else 0.001
            train(output, *fashion, *SHORT, epochs, "--lr", lr, name="fsdp2")
        pretrained = weights("first")
        pretrained["conv2.weight"] = pretrained["conv2.weight"].to(memory_format=LAST)
        torch.save(pretrained, "pretrained.pt")
    for output in "meta", "file":
        assert same(weights(output), weights("plain")), output


@pytest.mark.slow
def test_shards(fashion):
    """Each recipe ends with the weights of the script, also resumed. Blocks stay gathered with one
    of them."""
    show, kinds = "print('is a', type(model.fc1.weight).__name__, flush=True)", {}
    changes = {"BLOCKS = (models.resnet.BasicBlock,": "BLOCKS = (nn.Linear,"}
    changes["loss.backward()"] = f"{show}; loss.backward()"
    for output, *titles in ["plain"], ["parts", PARTS], ["bytes", BYTES], ["offload", OFFLOAD]:
        if output == "offload":  # there is no CUDA here
            changes |= {",cuda:nccl": "", "OffloadPolicy()": "OffloadPolicy(pin_memory=False)"}
        copy(*titles, name="fsdp2", **changes)
        printed = "".join(train(output, *fashion, *SHORT, n, name="fsdp2") for n in (1, 2))
        kinds[output] = set(re.findall(r"is a (\w+)", printed))
        assert same(weights(output), weights("plain")), output
    assert kinds["plain"] == kinds["offload"] == {"DTensor"} and kinds["bytes"] == {"Parameter"}
    assert [path.name for path in Path("parts").glob("parts-*")] == ["parts-2-0"]

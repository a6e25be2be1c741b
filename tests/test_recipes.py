"""docs/recipes.md, docs/large_models.md and docs/your_model_and_data.md: what is pasted into
complete/train.py does what the page says, with DDP and sharded, also in a run that is resumed."""

import re
import runpy
import shutil
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from helpers import COMPLETE, ROOT, close, metrics, same, together, weights
from PIL import Image
from torchvision import models

DOCS = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
GUIDE = (ROOT / "docs" / "your_model_and_data.md").read_text()
SECTIONS = re.split(r"^##+ ", DOCS, flags=re.M)  # each begins with its title
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
ROOMS = re.findall(r"^```python\n((?:BLOCKS|def load)(?:.*\n)*?)```", GUIDE, re.M)
OWN_FLAGS = re.search(r'^```python\n(add\("--width.*\n(?:add.*\n)*)', GUIDE, re.M)[1]
FLAGS = re.search(r"my_training\.py --dataset docs (--.*)", GUIDE)[1].split()
FLAGS = ["--dataset", "texts", "--epochs", 2, "--batch-size", 16, "--log-every", 1, *FLAGS]
FLAGS += ["--workers", 0, "--resume"]
SHORT = ["--batch-size", 16, "--epochs", 3, "--lr", 0.001, "--log-every", 10, "--resume"]
SHARDS = {"ddp": 1, "fsdp2": 0}  # --shard
BLOCKS = "BLOCKS += (nn.Linear,)\n"  # of `net`
TARGETS = {"train_set.targets": "train_set.tensors[1]"}  # Fashion-MNIST is a TensorDataset


def code_of(title):
    [section] = [part for part in SECTIONS if part.startswith(f"{title}\n")]
    return [code[2] for code in CODE.findall(section) if code[0] == "python"]


def paste(folder, *titles, rooms=False, **changes):
    """FOLDER/train.py: the script with these recipes, in its rooms the example, and other changes.
    `texts` has bytes and tokens."""
    text = Path(helpers.script(COMPLETE)).read_text()
    ends = ("def build_optimizer", "# ---- Loaders") if rooms else ()
    for banner, block, end in zip(("model", "data"), ROOMS, ends):
        start, end = re.search(rf"# ---- The {banner}: .*\n", text).end(), text.index(end)
        text = text[:start] + block + "\n\n" + text[end:]
    for title in titles:
        verbs = r"^# (below|above|delete|instead of|instead of the function): (.*)\n"
        lines = "".join(code for code in code_of(title) if re.match(verbs, code))
        pieces = re.split(verbs, lines, flags=re.M)[1:]
        for verb, place, lines in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            pattern = rf"^ *{re.escape(place)}.*\n"
            if verb == "instead of the function":
                pattern, lines = rf"^def {place}\(.*\n(?:(?: .*)?\n)*", f"{lines}\n\n"
            [old] = re.findall(pattern, text, re.M)
            text = text.replace(old, {"above": lines + old, "below": old + lines}.get(verb, lines))
    for old, new in {'add("--seed"': f'{OWN_FLAGS}add("--seed"', **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    Path(folder).mkdir()
    Path(folder, "train.py").write_text(text)
    Path("texts").mkdir(exist_ok=True)
    text = GUIDE.encode()[: 200 * 64 + 1]
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    Path("texts", "a.md").write_bytes(text)
    tokens[:11521].tofile("texts/train.bin"), tokens[11520:].tofile("texts/test.bin")
    return Path(folder, "train.py")


def runs(*flags, shards=SHARDS, **epochs):
    """Flags of a run in a folder for each --shard, and, for `whole=[3], parts=[1, 3]`, of the runs
    that take it to so many epochs."""
    return [
        [*flags, "--shard", shard, "--epochs", count, "--output", f"{name}-{folder}"]
        for name, shard in shards.items()
        for folder, counts in epochs.items()
        for count in counts
    ]


ADDED = ["An average of the weights", "Evaluation every N steps", "The last three checkpoints"]
ADDED += ["Early stopping", "TensorBoard", "Weights & Biases", "Imbalanced classes"]
ADDED += ["Deterministic runs on a GPU", "Predictions for all test samples"]
ADDED += ["A schedule per epoch, or by the test loss"]
LOGS = """
class SummaryWriter:
    def __init__(self, path, purge_step):
        print("purges from", purge_step)
    def add_scalar(self, name, value, step):
        print("point", name, step)
    flush = print
init = define_metric = lambda *words, **options: None
log = print
"""
STRICT = """
plain_save = save_checkpoint
def save_checkpoint(*words):
    print("deterministic", torch.are_deterministic_algorithms_enabled())
    plain_save(*words)
"""


@pytest.mark.slow
def test_recipes(fashion):
    """All at once. A resumed run leaves the same files, and a sharded one those of DDP; best.pt is
    the average in its best epoch; the rate falls after each epoch; a run that stalls is stopped."""
    changes = TARGETS | {"torch.utils.tensorboard": "wandb", "% 1000": "% 20"}
    changes["patience=3"] = "patience=0, threshold=9"  # no test loss is low enough
    path = paste("all", *ADDED, **changes)
    Path("all", "wandb.py").write_text(LOGS)
    flags = [*fashion, *SHORT, "--augment"]
    names = "model.pt", "best.pt", "ema.pt", "predictions.pt"
    stalled = runs(*flags, "--lr", 0, stalled=[8])
    every = [*runs(*flags, whole=[3], parts=[1, 3]), *stalled]
    texts = together(*every, path=path, more=BLOCKS + STRICT)
    for whole, first, resumed in texts[:3], texts[3:6]:
        assert whole.count("step 20: test loss ") == 3 and "deterministic False" not in whole
        assert re.findall(r"40/40 .* lr (\S+)", whole) == ["1.00e-03", "1.00e-04", "1.00e-05"]
        assert re.findall(r"40/40 .* lr (\S+)", resumed) == ["1.00e-04", "1.00e-05"]
        logged = sorted([*range(10, 121, 10), 40, 80, 120])
        assert [*map(int, re.findall(r"{'step': (\d+)", whole))] == logged
        assert sorted(map(int, re.findall(r"point \w+ (\d+)", whole))) == logged
        assert "purges from 41" in resumed
    kinds = []
    for name in SHARDS:
        whole, parts = (
            [torch.load(f"{name}-{part}/{file}") for file in names] for part in ("whole", "parts")
        )
        assert all(map(same, whole[:3], parts[:3])) and torch.equal(whole[3], parts[3])
        assert not same(whole[0], whole[2]) and same(whole[1], whole[2])  # the last is the best
        kinds.append(whole)
        folders = [f"{name}-stalled/checkpoint-{epoch}-0" for epoch in (4, 5, 6)]
        assert sorted(map(str, Path(f"{name}-stalled").glob("checkpoint-*"))) == folders
        shutil.copy(f"{folders[0]}/last.json", f"{name}-stalled")
    for one, other in zip(kinds[0][:3], kinds[1][:3]):
        assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one)
    assert torch.allclose(kinds[0][3], kinds[1][3], atol=1e-4)
    assert kinds[0][3].shape == (203, 10)
    older = [[*words[:-3], 4, *words[-2:]] for words in stalled]
    one = [*flags, "--lr", 0, "--epochs", 1, "--output", "one"]
    texts = together(*older, path=path, more=BLOCKS)
    for name, text in zip(SHARDS, texts):
        assert "4 epochs and 0 steps are done" in text
        folders = [folder.name for folder in Path(f"{name}-stalled").glob("checkpoint-*")]
        assert folders == ["checkpoint-4-0"]
    together(one, path=path, processes=1)
    outputs = [torch.load(f"{name}/predictions.pt") for name in ("one", "ddp-stalled")]
    assert torch.allclose(*outputs, atol=1e-5)

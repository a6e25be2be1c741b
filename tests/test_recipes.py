"""docs/recipes.md, docs/large_models.md and docs/your_model_and_data.md: what is pasted into
complete/train.py does what the page says, with DDP and sharded, also in a run that is resumed."""

import argparse
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
from torch import nn
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


@pytest.mark.slow
def test_how_fast(fashion):
    """What docs/how_fast.md profiles: the operators of three steps, and the loader."""
    path = paste("my", "A profile", **{"if type(dataset) is TensorDataset:": "if False:"})
    for text in together(*runs(*fashion, *SHORT, my=[1]), path=path, more=BLOCKS):
        assert text.count("Self CPU time total") == 1
    for name in SHARDS:
        trace = Path(f"{name}-my", "trace.json").read_text()
        assert "ProfilerStep#23" in trace and "enumerate(DataLoader)" in trace


@pytest.mark.slow
def test_frozen_layers(fashion):
    """Only the head is trained. Frozen weights may have another type than the trained ones."""
    path = paste("my", "Frozen layers")
    flags = [*fashion, *SHORT, "--batch-size", 320, "--model", "resnet18"]
    together(*runs(*flags, my=[1]), path=path)
    torch.manual_seed(76)
    old = models.resnet18(num_classes=10).state_dict()
    for name in SHARDS:
        new = weights(f"{name}-my")
        changed = {key for key in old if not torch.equal(old[key], new[key])}
        assert changed == {"fc.weight", "fc.bias"}


HALVES = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(784, 20, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(784, 20)
    def forward(self, x):
        return self.frozen(x.bfloat16()) + self.adapter(x)
def build_model(args, inputs, classes):
    return nn.Sequential(nn.Flatten(), Layer(), nn.Linear(20, classes))
BLOCKS = (Layer,)
"""


@pytest.mark.slow
def test_frozen_weights_in_bfloat16(fashion):
    """Beside float32 adapters, as docs/large_models.md says, also resumed."""
    path = paste("my", "Frozen layers")
    every = runs(*fashion, *SHORT, whole=[2], parts=[1, 2])
    together(*every, path=path, more=HALVES)
    for name in SHARDS:
        whole = weights(f"{name}-whole")
        assert whole["1.frozen.weight"].dtype == torch.bfloat16
        assert same(whole, weights(f"{name}-parts"))
    close("fsdp2-whole", "ddp-whole")


@pytest.mark.slow
@pytest.mark.parametrize("follows", ["test_loss", "-test_macro_f1"])
def test_fine_tuning(data, follows):
    """Accuracy and F1 from confusion.csv are those of metrics.csv, in the epoch of best.pt, which
    early stopping follows too."""
    new = re.search(r'`(-row\[".*"\])`', "".join(code for code in SECTIONS if "Fine" in code[:5]))
    changes = {} if follows == "test_loss" else {'row["test_loss"]': new[1]}
    path = paste("my", "Fine-tuning", "Early stopping", "Imbalanced classes", **changes)
    flags = ["--dataset", data / "pictures", "--image-size", 32, *SHORT, "--workers", 0]
    flags += ["--lr", 0.1, "--augment"]
    every = runs(*flags, my=[12])
    together(*every, path=path)
    for name in SHARDS:
        rows = metrics(f"{name}-my")
        scores = [row[follows.strip("-")] * (-1 if "-" in follows else 1) for row in rows]
        best = scores.index(min(scores))
        assert len(rows) == min(12, best + 6)
        latest = max(i for i, score in enumerate(scores) if score == min(scores))
        confusion = np.loadtxt(f"{name}-my/confusion.csv", delimiter=",")
        hits, both = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
        assert confusion.shape == (3, 3) and confusion.sum() == 3
        assert rows[latest]["test_accuracy"] == pytest.approx(hits.sum() / 3)
        f1 = (2 * hits / both.clip(min=1)).mean()
        assert rows[latest]["test_macro_f1"] == pytest.approx(f1)
    close("fsdp2-my", "ddp-my", keys=("train_loss", "test_loss", "test_macro_f1"))
    pytest.importorskip("matplotlib")
    [code] = [code for code in code_of("Fine-tuning") if "import pyplot" in code]
    code = code.replace("runs/mine", "ddp-my")
    space = {}
    exec("import matplotlib; matplotlib.use('agg')\n" + code, space)
    assert Path("curves.png").exists() and Path("confusion.png").exists()
    assert space["classes"] == ["a", "b", "c"]


def test_best_weights():
    """best.pt is used with the classes of last.json, on a photo of any size."""
    [code] = code_of("Use the best weights")
    Path("runs", "mine").mkdir(parents=True)
    Path("runs", "mine", "last.json").write_text('{"data": {"samples": 9, "classes": ["a", "b"]}}')
    torch.save(models.resnet18(num_classes=2).state_dict(), "runs/mine/best.pt")
    Image.new("RGBA", (300, 400)).save("photo.png")
    code = code.replace("resnet50", "resnet18").replace("ResNet50", "ResNet18")
    exec(code.replace("photo.jpg", "photo.png"), space := {})
    assert space["classes"] == ["a", "b"] and space["image"].shape == (3, 224, 224)


def test_metrics_and_folds():
    """IoU, F1 and AUC from sums; the folds are a partition; classes are drawn equally often."""
    path = paste("folds", "Cross-validation", "Imbalanced classes")
    space = runpy.run_path(str(path))
    assert space["parser"].parse_args(["--fold", "3"]).fold == 3
    sampler = space["EpochSampler"](range(1000), 0)
    labels = (torch.arange(1000) < 100).long()
    sampler.weights, sampler.length = 1 / labels.bincount()[labels], 1000
    sampler.set_epoch(0, 0)
    assert labels[list(sampler)].sum() == pytest.approx(500, abs=60)
    [_, code] = code_of("Cross-validation")
    exec(code, space)
    folds = [space["fold_of"](range(23), fold) for fold in range(5)]
    assert sorted(i for _, test in folds for i in test.indices) == list(range(23))
    assert all(sorted(a.indices + b.indices) == list(range(23)) for a, b in folds)
    exec(code_of("Metrics")[0], space)
    outputs, masks = torch.tensor([[1.0, 1, -1, -1, 1]]), torch.tensor([[1.0, 0, 1, 0, 1]])
    sums = space["count"](outputs, masks)
    assert sums["labels"] == 5
    found = space["metrics"](sums)
    assert found["test_iou"] == 2 / 4 and found["test_f1"] == pytest.approx(2 / 3)


MASKS = """
class Dots(Dataset):
    def __len__(self):
        return 67
    def __getitem__(self, i):
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(i))
        return image, (image > 0.7).float()
def load_data(args):
    return Dots(), Dots(), 1
def build_model(args, inputs, classes):
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 1, 1))
def loss_function(outputs, labels):
    return F.binary_cross_entropy_with_logits(outputs, labels)
BLOCKS = (nn.Conv2d,)
"""
AUC = """
def load_data(args):
    images, labels = load_torchvision(args, train=True).tensors
    noise = torch.rand(640, generator=torch.Generator().manual_seed(0))
    labels = (labels + 9 * noise > 9).long()
    return TensorDataset(images, labels), TensorDataset(images, labels), 2
plain_evaluate = evaluate
def evaluate(args, model, loader, *words):
    sums = plain_evaluate(args, model, loader, *words)
    if hasattr(loader, "tensors"):
        outputs = model.eval()(prepare(args, loader.tensors, torch.device("cpu"))[0])
        scores, labels = outputs.softmax(1)[:, 1], loader.tensors[1]
        higher = scores[labels == 1][:, None] - scores[labels == 0]
        print("exact", ((higher > 0).float() + (higher == 0) / 2).mean().item())
        model.train()
    return sums
"""


@pytest.mark.slow
def test_own_data(fashion):
    """A Dataset and a model of one's own, with masks, and AUC: the same on one process and on two,
    sharded or not."""
    path = paste("masks")
    code = MASKS + code_of("Metrics")[0]
    flags = [*SHORT, "--workers", 0, "--lr", 0.1]
    together(*runs(*flags, masks=[2]), path=path, more=code)
    together(*runs(*flags, one=[2], shards={"ddp": 1}), path=path, more=code, processes=1)
    path = paste("auc", "AUC in each epoch")
    together(*runs(*fashion, *flags, auc=[2]), path=path, more=AUC)
    [text] = together(
        *runs(*fashion, *flags, exact=[2], shards={"ddp": 1}), path=path, more=AUC, processes=1
    )
    for name in SHARDS:
        close(f"{name}-masks", "ddp-one", 1e-3, ("train_loss", "test_iou", "test_f1"))
        close(f"{name}-auc", "ddp-exact", 1e-3, ("train_loss", "test_auc"))
    exact = [*map(float, re.findall(r"exact (\S+)", text))]
    assert [row["test_auc"] for row in metrics("ddp-exact")] == pytest.approx(exact, abs=2e-3)
    assert exact[-1] > 0.6


SEQUENCES = """
def load_data(args):
    data = [(torch.arange(i % 200 + 1), i % 2) for i in range(100)]
    return data, data, 2
def build_model(args, inputs, classes):
    assert inputs.shape[1] in LENGTHS
    return nn.EmbeddingBag(256, 2, padding_idx=0)
"""
DETECTION = """
class Squares(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        image = torch.zeros(3, 40 + i % 3, 48, dtype=torch.uint8)
        x = 4 + i * 7 % 20
        image[:, 8:24, x : x + 16] = 200
        return image, {"boxes": torch.tensor([[x, 8.0, x + 16, 24]]), "labels": torch.tensor([1])}
def load_data(args):
    return Squares(32), Squares(5), 2
def small(num_classes):
    layers = nn.Conv2d(3, 16, 5, 4, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
    features = nn.Sequential(*layers)
    features.out_channels = 32
    anchors = models.detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))
    sizes = {"min_size": 48, "max_size": 48, "image_mean": [0] * 3, "image_std": [1] * 3}
    few = {"rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 20}
    return models.detection.FasterRCNN(
        features, rpn_anchor_generator=anchors, **sizes, **few,
        box_roi_pool=models.detection.faster_rcnn.MultiScaleRoIAlign(["0"], 4, 2),
        box_head=models.detection.faster_rcnn.TwoMLPHead(32 * 16, 64),
        box_predictor=models.detection.faster_rcnn.FastRCNNPredictor(64, num_classes),
    )
models.detection.fasterrcnn_resnet50_fpn = small
BLOCKS = (nn.Conv2d, models.detection.faster_rcnn.TwoMLPHead)
"""


@pytest.mark.long
def test_detection_and_sequences():
    """torchvision's detector learns, with --accumulate, also resumed and sharded. Sequences of
    several lengths are padded, by the script as it is but for the data."""
    path = paste("squares", "Detection")
    flags = [*SHORT, "--batch-size", 8, "--accumulate", 2, "--log-every", 1, "--workers", 0]
    flags += ["--optimizer", "adamw", "--lr", 5e-3]
    every = [*runs(*flags, whole=[16]), *runs(*flags, parts=[8, 16], shards={"ddp": 1})]
    together(*every, path=path, more=DETECTION)
    assert same(weights("ddp-whole"), weights("ddp-parts"))
    close("fsdp2-whole", "ddp-whole", 1e-2, ("train_loss", "test_loss"))
    assert max(row["test_recall"] for row in metrics("fsdp2-whole")) == 1
    path = paste("sequences", "Sequences of several lengths")
    together(*runs(*SHORT, "--workers", 1, my=[3]), path=path, more=SEQUENCES)
    one = runs(*SHORT, "--workers", 1, one=[3], shards={"ddp": 1})
    together(*one, path=path, more=SEQUENCES, processes=1)
    for name in SHARDS:
        close(f"{name}-my", "ddp-one")


CONTRAST = "A contrastive loss over the whole batch"
HALF, EXACT = "All-reduce in bfloat16", "A loss that ignores labels"
SMALLER = "Tokens in a file", "Less memory for activations"
ALIKE = {  # recipes: what the data set needs
    (): {},
    SMALLER: {"50_304": "256"},
    (EXACT,): {"return images, labels\n": "return images, labels.where(labels > 6, -100)\n"},
    ("Imbalanced classes",): TARGETS,
    (CONTRAST,): {"normalize(outputs": "normalize(outputs.view(-1, 2, 5)"},
    (HALF,): {},
}


LAYERS = """
plain_layer = nn.TransformerEncoderLayer.forward
def forward(self, *words, **options):
    if torch.is_grad_enabled():
        print("layer")
    return plain_layer(self, *words, **options)
nn.TransformerEncoderLayer.forward = forward
"""
HOOK = """
plain_hook = bf16_compress_hook
def bf16_compress_hook(state, bucket):
    print("in halves")
    return plain_hook(state, bucket)
"""


MARKS = [pytest.mark.slow if i % 2 else pytest.mark.long for i in range(len(ALIKE))]
EACH = [pytest.param(recipes, marks=mark) for recipes, mark in zip(ALIKE, MARKS)]


@pytest.mark.parametrize("recipes", EACH)
def test_alike(fashion, recipes):
    """On one process, on two, sharded or not, and in micro-batches but for the contrasts; bfloat16
    is near. Each layer is computed twice in a step, to save memory."""
    example = recipes in ((), SMALLER)
    flags = [*FLAGS, "--dropout", 0] if example else [*fashion, *SHORT]
    path = paste("my", *recipes, rooms=example, **ALIKE[recipes])
    more = LAYERS if example else BLOCKS + HOOK * (recipes == (HALF,))
    epochs = [2] if example else [1]
    every = runs(*flags, two=epochs) + runs(*flags, "--accumulate", 2, parts=epochs)
    ddp, *_ = together(*every, path=path, more=more)
    one = runs(*flags, one=epochs, shards={"ddp": 1})
    [text] = together(*one, path=path, more=more, processes=1)
    layers, steps = text.count("layer\n"), len(re.findall(r" step \d+/", text))
    assert not example or layers == 2 * steps * (2 if recipes == SMALLER else 1)
    for name in SHARDS:
        for output in ["two"] if recipes == (CONTRAST,) else ["two", "parts"]:
            nearly = recipes == (HALF,) and name == "ddp"
            digits = 0.02 if nearly else 1e-4
            close(f"{name}-{output}", "ddp-one", digits, ["train_loss"])
    assert recipes != (HALF,) or "in halves" in ddp
    losses = [row["test_loss"] for row in metrics("ddp-one")]
    assert not example or 0 < losses[1] < losses[0]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon():
    """Of torch itself, for the matrices of the blocks, AdamW for the rest: the same on one process
    and on two, sharded or not, and bit-identical when resumed."""
    path = paste("my", "Muon", rooms=True)
    show = "\nplain = save_checkpoint\ndef save_checkpoint(args, progress, state, *words):\n"
    show += "    held = [len(state[n].state) for n in ('muon', 'optimizer')]\n"
    show += "    print('momenta', *held)\n    plain(args, progress, state, *words)\n"
    flags = [*FLAGS, "--dropout", 0, "--lr", 3e-3, "--warmup-steps", 5, "--batch-size", 60]
    every = runs(*flags, whole=[2], parts=[1, 2])
    texts = together(*every, path=path, more=show)
    assert all("momenta 8 22" in text for text in texts), texts[0]  # 2 layers of 4 matrices
    together(*runs(*flags, one=[2], shards={"ddp": 1}), path=path, processes=1)
    for name in SHARDS:
        close(f"{name}-whole", "ddp-one", 1e-3, ("train_loss", "test_loss"))
        assert same(weights(f"{name}-whole"), weights(f"{name}-parts"))


@pytest.mark.long
def test_three_billion():
    """docs/large_models.md's command, of fewer parameters, with the recipes that it names."""
    path = paste("my", *SMALLER, rooms=True, **ALIKE[SMALLER])
    flags = re.search(r"my_training\.py (.* --dataset my_texts --.*) --output", DOCS)[1]
    few = {"2560": "64", "--layers 36": "--layers 3", "2048": "64", "256 --acc": "32 --acc"}
    for old, new in {**few, "accumulate 16": "accumulate 4", "my_texts": "texts"}.items():
        assert old in flags, old
        flags = flags.replace(old, new)
    words = [*flags.split(), "--workers", 0, "--resume", "--output", "3b", "--epochs"]
    for text in together([*words, 1], [*words, 2], path=path):
        assert "3 blocks; each copy of the model on 2 ranks" in text


META = "Building on the meta device"
LARGE = {"first": [], "plain": [], "init": [], "meta": [META], "file": [META, "Your own weights"]}
LARGE |= {"bytes": ["Less communication, more memory"], "offload": ["CPU offload"]}
TIED = """
BLOCKS = (nn.Sequential,)
class Net(Net):
    def __init__(self, channels, side, classes):
        super().__init__(channels, side, classes)
        self.fc2 = nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 120), nn.Linear(120, 84))
        self.fc2[0].weight = self.fc2[1].weight
def loss_function(outputs, labels):
    if torch.is_grad_enabled():
        print("is a", type(train_model_of[0].fc2[2].weight).__name__)
    return F.cross_entropy(outputs, labels)
train_model_of, plain = [], distribute
def distribute(*words):
    print("built on", next(words[1].parameters()).device)
    train_model_of[:] = [plain(*words)]
    return train_model_of[0]
"""


@pytest.mark.long
def test_large_models(fashion):
    """The recipes of docs/large_models.md end with the weights of the script, also resumed, and a
    converted file with those of --init; it may be in channels_last. Tied weights stay tied. Blocks
    stay gathered with one of them. torch's converters write and read the folders."""
    [section] = [part for part in SECTIONS if part.startswith("Your own weights\n")]
    to, back = re.findall(r"^python -m (\S+) (\S+) (\S+) (\S+)", section, re.M)
    for output, titles in LARGE.items():
        changes = {}
        if output == "offload":  # there is no CUDA here
            changes |= {",cuda:nccl": "", "OffloadPolicy()": "OffloadPolicy(pin_memory=False)"}
        path = paste(f"my-{output}", *titles, **changes)
        own = {"first": ["--lr", 0, "--seed", 5], "init": ["--init", "pretrained.pt"]}
        flags = [*fashion, *SHORT, "--optimizer", "adamw", *own.get(output, [])]
        counts = [1, 2] if META in titles else [2]
        texts = together(*runs(*flags, shards={output: 0}, my=counts), path=path, more=TIED)
        assert ("is a Parameter" in "".join(texts)) == (output == "bytes")
        assert all(("built on meta" in text) == (META in titles) for text in texts)
        if output == "first":
            pretrained = weights("first-my")
            filters = pretrained["conv2.weight"].to(memory_format=torch.channels_last)
            torch.save(pretrained | {"conv2.weight": filters}, "pretrained.pt")
            helpers.command(helpers.sys.executable, "-m", *to)
    for output in "meta", "bytes", "offload":
        assert same(weights(f"{output}-my"), weights("plain-my")), output
    assert same(weights("file-my"), weights("init-my"))
    assert not same(weights("init-my"), weights("plain-my"))
    helpers.command(helpers.sys.executable, "-m", *back[:2], "plain-my/checkpoint-2-0", back[3])
    whole = torch.load("whole.pt", weights_only=False)
    assert same(whole["model"], weights("plain-my"))


def test_how_large():
    """The example's sizes are those of the language model, and its terms are as their comments
    say."""
    [code] = code_of("How large can it be?")
    exec(code, sizes := {})
    args = argparse.Namespace(width=sizes["W"], layers=sizes["L"], length=2048, dropout=0)
    exec(ROOMS[0], space := {"nn": nn})
    with torch.device("meta"):
        model = space["build_model"](args, None, sizes["V"])
    parts = model, model.layers[0], nn.ModuleList([model.tokens, model.head])
    counts = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert counts == pytest.approx([sizes["P"], sizes["B"], sizes["R"]], rel=0.02)
    written = re.findall(r"# (\S+) GB: ", code)
    assert [f"{term / 1e9:.1f}" for term in sizes["terms"]] == written
    assert f"# {sum(sizes['terms']) / 1e9:.0f} GB\n" in code

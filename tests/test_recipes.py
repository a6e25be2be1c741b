"""docs/recipes.md, docs/large_models.md and docs/your_model_and_data.md: what is pasted into
complete/train.py does what the page says, with DDP and sharded, also in a run that is resumed."""

import argparse
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train
from helpers import ROOT, altered, close, command, metrics, run, same, together, weights
from runs import VERBS, applied
from torch import nn
from torchvision import datasets, models

DOCS = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
GUIDE = (ROOT / "docs" / "your_model_and_data.md").read_text()
SECTIONS = re.split(r"^##+ ", DOCS, flags=re.M)  # each begins with its title
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
ROOMS = re.findall(r"^```python\n((?:BLOCKS|def load)(?:.*\n)*?)```", GUIDE, re.M)
OWN_FLAGS = re.search(r'^```python\n(add\("--width.*\n(?:add.*\n)*)', GUIDE, re.M)[1]
FLAGS = re.search(r"my_training/train\.py --dataset docs (--.*)", GUIDE)[1].split()
FLAGS = ["--dataset", "texts", "--batch-size", 16, "--log-every", 1, *FLAGS, "--workers", 0]
SHORT = ["--batch-size", 16, "--lr", 0.001, "--log-every", 10, "--resume"]
SHARDS = {"ddp": 1, "fsdp2": 0}  # --shard
BLOCKS = "BLOCKS += (nn.Linear,)\n"  # of `net`
TARGETS = {"train_set.targets": "train_set.tensors[1]"}  # Fashion-MNIST is a TensorDataset


def code_of(title):
    [section] = [part for part in SECTIONS if part.startswith(f"{title}\n")]
    return [code[2] for code in CODE.findall(section) if code[0] == "python"]


def pasted(*titles, rooms=False):
    """The texts of train.py and checkpoint.py with these recipes, and in the rooms the example."""
    texts = {name: (ROOT / "complete" / name).read_text() for name in ("train.py", "checkpoint.py")}
    text = texts["train.py"]
    ends = ("def metrics", "# ---- Loaders") if rooms else ()
    for banner, block, end in zip(("model", "data"), ROOMS, ends):
        start, end = re.search(rf"# ---- The {banner}: .*\n", text).end(), text.index(end)
        text = text[:start] + block + "\n\n" + text[end:]
    texts["train.py"] = text.replace('add("--seed"', f'{OWN_FLAGS}add("--seed"')
    for code in [code for title in titles for code in code_of(title)]:
        name, *others = re.split(r"^# in (\w+\.py):\n", f"# in train.py:\n{code}", flags=re.M)[1:]
        for name, part in zip([name, *others[1::2]], [others[0], *others[2::2]], strict=True):
            if re.search(VERBS, part, re.M):
                texts[name] = applied(texts[name], part)
    return texts


def paste(folder, *titles, rooms=False, **changes):
    """FOLDER/train.py: the script with these recipes and changes. `texts` has bytes and tokens."""
    shutil.copytree(ROOT / "complete", folder)
    parts = pasted(*titles, rooms=rooms)
    for old, new in changes.items():
        assert any(old in text for text in parts.values()), old
    for name, text in parts.items():
        for old, new in changes.items():
            text = text.replace(old, new)
        Path(folder, name).write_text(text)
    Path("texts").mkdir(exist_ok=True)
    text = DOCS.encode()[: 200 * 64 + 1]
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    Path("texts", "a.md").write_bytes(text)
    tokens[:11521].tofile("texts/train.bin"), tokens[11520:].tofile("texts/test.bin")
    return Path(folder, "train.py").resolve()


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
SCHEDULE, EXACT = "A schedule per epoch, or by the test loss", "A loss that ignores labels"
CONTRAST, HALF = "A contrastive loss over the whole batch", "All-reduce in bfloat16"
FROZEN, PROFILE, GRAPHS = "Frozen layers", "A profile", "CUDA graphs"
SMALLER = ["Tokens in a file", "Less memory for activations"]


@pytest.mark.parametrize(
    "titles",
    [[SCHEDULE, EXACT, HALF, FROZEN, GRAPHS], ["Muon", CONTRAST, "AUC in each epoch", PROFILE]],
)
def test_any_order(titles):
    """The order in which recipes are pasted does not matter, but for the order of the lines."""
    both = [pasted(*order) for order in ([*ADDED, *titles], [*titles[::-1], *ADDED[::-1]])]
    for one, other in zip(both[0].items(), both[1].items(), strict=True):
        assert sorted(one[1].splitlines()) == sorted(other[1].splitlines())
        for name, text in one, other:
            compile(text, name, "exec")


LOGS = """
class SummaryWriter:
    def __init__(self, path, purge_step):
        print("purges from", purge_step)
    def add_scalar(self, name, value, step):
        print("point", {name: float(value)}, step)
    flush = print
def log(values, step):
    for name, value in values.items():
        print("logged", {name: float(value)}, step)
init = lambda **options: print("run", options["id"])
"""
SET_EPOCH = "        sampler.set_epoch(epoch // parts, start)\n"
ORDER = "print('order', epoch // parts, start, torch.are_deterministic_algorithms_enabled())"


@pytest.mark.slow
def test_recipes(fashion):
    """All at once. A resumed run leaves the same files, and a sharded one those of DDP. The average
    is evaluated and saved; the rate falls after each epoch, here 20 steps; a run that stalls is
    stopped."""
    changes = TARGETS | {"torch.utils.tensorboard": "wandb", "1000, 1000": "20, 20"}
    changes["patience=3"] = "patience=0, threshold=9"  # no test loss is low enough
    changes[SET_EPOCH] = f"{SET_EPOCH}        {ORDER}\n"
    path = paste("all", *ADDED, SCHEDULE, **changes)
    Path("all", "wandb.py").write_text(LOGS)
    flags = [*fashion, *SHORT, "--augment"]
    stalled = runs(*flags, "--lr", 0, stalled=[8])
    every = [*runs(*flags, whole=[3], parts=[1, 3]), *stalled]
    texts = together(*every, path=path, more=BLOCKS)
    for whole, first, resumed in texts[:3], texts[3:6]:
        orders = re.findall(r"order (\d+) (\d+) True", whole)
        assert orders[:3] == [("0", "0"), ("0", "160"), ("1", "0")]  # each rank's 8 samples a step
        assert re.findall(r"20/20 .* lr (\S+)", whole) == ["1.00e-03", "1.00e-04", "1.00e-05"]
        assert re.findall(r"20/20 .* lr (\S+)", resumed) == ["1.00e-04", "1.00e-05"]
        points, logged = (
            re.findall(rf"{word} ({{.*) (\d+)", whole) for word in ("point", "logged")
        )
        assert points == logged and "purges from 21" in resumed
        steps = [int(step) for values, step in points if "'loss'" in values]
        assert steps == [10, 20, 30, 40, 50, 60]
        assert [step for values, step in points if "test_accuracy" in values] == ["20", "40", "60"]
    labels, kinds = datasets.FashionMNIST(fashion[-1], train=False).targets, []
    for name in SHARDS:
        model, best, outputs = (
            torch.load(f"{name}-whole/{file}.pt") for file in ("model", "best", "predictions")
        )
        assert same(model, best) and same(model, weights(f"{name}-parts"))  # the last is the best
        assert torch.equal(outputs, torch.load(f"{name}-parts/predictions.pt"))
        saved = helpers.checkpoint(f"{name}-whole")
        assert all(torch.equal(saved["ema"][f"{i}"], w) for i, w in enumerate(model.values()))
        assert not same(saved["model"], model)
        loss = metrics(f"{name}-whole")[-1]["test_loss"]
        assert F.cross_entropy(outputs, labels).item() == pytest.approx(loss, rel=1e-4)
        folders = [f"{name}-stalled/checkpoint-{epoch}-0" for epoch in (4, 5, 6)]
        assert sorted(map(str, Path(f"{name}-stalled").glob("checkpoint-*"))) == folders
        shutil.copy(f"{folders[0]}/last.json", f"{name}-stalled")
        kinds.append([outputs, *model.values()])
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(*kinds))
    older = [[*words[:-3], 4, *words[-2:]] for words in stalled]
    for name, text in zip(SHARDS, together(*older, path=path, more=BLOCKS)):
        assert "4 epochs and 0 steps are done" in text
        folders = [folder.name for folder in Path(f"{name}-stalled").glob("checkpoint-*")]
        assert folders == ["checkpoint-4-0"]


HOOK = "None, bf16_compress_hook"
IN_MEMORY = "if type(dataset) is TensorDataset:"
TOLD = "None, lambda state, bucket: print('in halves') or bf16_compress_hook(state, bucket)"


@pytest.mark.slow
def test_frozen_layers(fashion):
    """Only the head is trained, nearly the same with a gradient in halves. docs/how_fast.md
    profiles the operators of three steps, and the loader."""
    path = paste("my", FROZEN, HALF, PROFILE, **{HOOK: TOLD, IN_MEMORY: "if False:"})
    flags = [*fashion, *SHORT, "--batch-size", 16, "--model", "resnet18"]
    for text in together(*runs(*flags, my=[1]), path=path):
        assert text.count("Self CPU time total") == 1
        assert ("in halves" in text) == ("blocks; " not in text)
    torch.manual_seed(76)
    old = models.resnet18(num_classes=10).state_dict()
    for name in SHARDS:
        new = weights(f"{name}-my")
        changed = {key for key in old if not torch.equal(old[key], new[key])}
        assert changed == {"fc.weight", "fc.bias"}
        trace = Path(f"{name}-my", "trace.json").read_text()
        assert "ProfilerStep#23" in trace and "enumerate(DataLoader)" in trace
    close("ddp-my", "fsdp2-my", 0.02)


RECORDED = """
from torch.utils._pytree import tree_leaves
from torch.utils._python_dispatch import TorchDispatchMode

class CUDAGraph(TorchDispatchMode):  # records the operations, and repeats them on the same tensors
    def __init__(self):
        super().__init__()
        self.calls = []
    def __torch_dispatch__(self, function, types, words=(), options=None):
        self.calls.append([function, words, options or {}])
        self.calls[-1].append(function(*words, **options or {}))
        return self.calls[-1][-1]
    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def replay(self):
        print("replayed")
        for function, words, options, outputs in self.calls:
            for old, new in zip(tree_leaves(outputs), tree_leaves(function(*words, **options))):
                if torch.is_tensor(old):
                    old.copy_(new)
torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, lambda graph: graph
torch.cuda.Stream, torch.cuda.stream = object, lambda stream: nullcontext()
torch.cuda.synchronize = lambda: None
"""
NORMED = """
def build_model(args, inputs, classes):
    layers = nn.Conv2d(1, 8, 5, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(), nn.LazyLinear(10)
    model = nn.Sequential(*layers).eval()
    model(inputs)
    return model.train()
"""


@pytest.mark.slow
def test_cuda_graphs(fashion):
    """What is recorded trains as the script does, bit-identical, also in a run that is resumed:
    with batch norm, dropout, and weights that autocast casts in each step."""
    path = paste("my", GRAPHS)
    flags = [*fashion, *SHORT, "--amp", "--augment", "--clip-norm", 1]
    text = run(path, *flags, "--device", "cpu", processes=0, status=2)
    assert "error: CUDA graphs are for one GPU" in text
    path = altered(path, 'accumulate > 1 or args.device != "cuda"', "accumulate > 1")
    text = run(path, *flags, "--accumulate", 2, processes=0, status=2)
    assert "error: CUDA graphs are for one GPU" in text
    one = {"shards": {"ddp": 1}}
    every = runs(*flags, whole=[2], parts=[1, 2], **one)
    texts = together(*every, path=path, more=NORMED + RECORDED, processes=1)
    assert [text.count("replayed\n") for text in texts] == [80, 40, 40]
    together(*runs(*flags, plain=[2], **one), more=NORMED, processes=1)
    for other in "plain", "parts":
        assert same(weights("ddp-whole"), weights(f"ddp-{other}"))


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
    flags = [*fashion, *SHORT, "--optimizer", "adamw", "--weight-decay", 0.1]
    together(*runs(*flags, whole=[2], parts=[1, 2]), more=HALVES)
    for name in SHARDS:
        whole = weights(f"{name}-whole")
        assert whole["1.frozen.weight"].dtype == torch.bfloat16
        assert same(whole, weights(f"{name}-parts"))
    close("fsdp2-whole", "ddp-whole")


@pytest.mark.slow
def test_fine_tuning(data):
    """Accuracy and F1 from confusion.csv are those of metrics.csv, in the epoch of best.pt, which
    early stopping follows too."""
    [new] = re.findall(r'`(-row\["test_macro.*?"\])`', GUIDE)
    titles = "Fine-tuning", "Early stopping", "Imbalanced classes"
    path = paste("my", *titles, **{'row["test_loss"]': new})
    flags = ["--dataset", data / "pictures", "--image-size", 32, *SHORT, "--workers", 0]
    together(*runs(*flags, "--lr", 0.1, "--augment", my=[12]), path=path)
    best_of = {}
    for name in SHARDS:
        rows = metrics(f"{name}-my")
        scores = [row["test_macro_f1"] for row in rows]
        assert len(rows) == min(12, scores.index(max(scores)) + 6)
        best = rows[max(i for i, score in enumerate(scores) if score == max(scores))]
        confusion = np.loadtxt(f"{name}-my/confusion.csv", delimiter=",")
        hits, both = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
        assert confusion.shape == (3, 3) and confusion.sum() == 3
        best_of[name] = confusion
        assert best["test_accuracy"] == pytest.approx(hits.sum() / 3)
        assert best["test_macro_f1"] == pytest.approx((2 * hits / both.clip(min=1)).mean())
    close("fsdp2-my", "ddp-my", keys=("train_loss", "test_loss", "test_macro_f1"))
    together([*flags, "--evaluate", "--output", "ddp-my"], path=path)
    assert np.array_equal(np.loadtxt("ddp-my/confusion-test.csv", delimiter=","), best_of["ddp"])
    pytest.importorskip("matplotlib")
    [code] = [code for code in code_of("Fine-tuning") if "import pyplot" in code]
    code = "import matplotlib; matplotlib.use('agg')\n" + code.replace("runs/mine", "ddp-my")
    exec(code, space := {})
    assert Path("test_macro_f1.png").exists() and Path("confusion.png").exists()
    assert space["classes"] == ["a", "b", "c"]


def test_best_weights(data, capsys):
    """best.pt with what is in last.json, on a photo of any size, as a run's own test has it."""
    [code] = code_of("Use the best weights")
    flags = ["--dataset", data / "pictures", "--image-size", 70, "--model", "shufflenet_v2_x0_5"]
    helpers.train(
        *flags, "--batch-size", 48, "--epochs", 1, "--workers", 0, "--output", "runs/mine"
    )
    test_set = train.load_data(helpers.parse(*flags))[1]
    for i, path in enumerate(os.fsdecode(path) for path in test_set.paths):
        exec(code.replace("photo.jpg", path), space := {})
        inputs, _ = train.prepare(
            helpers.parse(*flags), train.default_collate([test_set[i]]), torch.device("cpu")
        )
        with torch.no_grad():
            wanted = space["model"](inputs).softmax(1)[0]
        assert torch.allclose(space["probabilities"], wanted, atol=1e-5)
    assert space["classes"] == ["a", "b", "c"] and capsys.readouterr().out.count("0.") >= 3


def test_metrics_from_sums():
    """IoU and AUC are those of all outputs at once; classes are drawn equally often."""
    exec(code_of("Metrics")[0], space := {})
    outputs, masks = torch.tensor([[1.0, 1, -1, -1, 1]]), torch.tensor([[1.0, 0, 1, 0, 1]])
    sums = space["count"](outputs, masks)
    assert sums["labels"] == 5 and space["metrics"](sums)["test_iou"] == 2 / 4
    exec(code_of("AUC in each epoch")[0], space)
    labels = torch.randint(2, (999,))
    outputs = torch.randn(999, 2) + F.one_hot(labels, 2)
    parts = [space["count"](*batch) for batch in zip(outputs.split(99), labels.split(99))]
    auc = space["metrics"]({"histograms": sum(part["histograms"] for part in parts)})["test_auc"]
    scores = outputs[:, 1] - outputs[:, 0]
    higher = scores[labels == 1][:, None] > scores[labels == 0]
    assert auc.item() == pytest.approx(higher.float().mean().item(), abs=1e-3) and auc > 0.7
    path = paste("my", "Imbalanced classes")
    sampler = runpy.run_path(str(path))["EpochSampler"](range(1000), 0)
    labels = (torch.arange(1000) < 100).long()
    sampler.weights = 1 / labels.bincount()[labels]
    sampler.set_epoch(0, 0)
    assert labels[list(sampler)].sum() == pytest.approx(500, abs=60)


@pytest.mark.slow
def test_a_table_of_numbers():
    """Columns of which one is a sum of others: learned, the same on one process and on two. A
    constant column and one of large numbers are scaled exactly. Predictions are the run's."""
    path = paste("my", "An example: a table of numbers")
    columns = np.random.default_rng(0).normal(size=(640, 4))
    rows = [100 * columns + 1.7e9, np.full(640, 1234.567), columns @ [1, 2, -1, 0] + 7]
    rows = np.column_stack(rows)
    table = {"delimiter": ",", "header": "a,b,c,d,constant,sum", "comments": ""}
    np.savetxt("table.csv", rows, **table)
    flags = ["--dataset", "table.csv", *SHORT, "--lr", 0.01]
    together(*runs(*flags, two=[4]), path=path, more=BLOCKS)
    together(*runs(*flags, one=[4], shards={"ddp": 1}), path=path, processes=1)
    for name in SHARDS:
        close(f"{name}-two", "ddp-one", keys=["train_loss", "test_loss", "test_mean_error"])
    errors = [row["test_mean_error"] for row in metrics("ddp-one")]
    assert errors[-1] < 0.2
    np.savetxt("new.csv", rows[::10, :-1], **table)
    code = code_of("An example: a table of numbers")[1].replace("runs/table", "ddp-one")
    path.with_name("predict.py").write_text(code)
    found = re.findall(r"-?\d+\.\d+", command(sys.executable, path.with_name("predict.py")))
    error = np.abs(np.array(found, float) - rows[::10, -1]).mean() / rows[:, -1].std()
    assert len(found) == 64 and error == pytest.approx(min(errors), rel=0.1)


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
def test_detection():
    """torchvision's detector learns, with --accumulate, also resumed and sharded."""
    path = paste("squares", "Detection")
    flags = [*SHORT, "--batch-size", 8, "--accumulate", 2, "--log-every", 1, "--workers", 0]
    flags += ["--optimizer", "adamw", "--lr", 5e-3]
    every = [*runs(*flags, whole=[16]), *runs(*flags, parts=[8, 16], shards={"ddp": 1})]
    together(*every, path=path, more=DETECTION)
    assert same(weights("ddp-whole"), weights("ddp-parts"))
    close("fsdp2-whole", "ddp-whole", 1e-2, ("train_loss", "test_loss"))
    rows = metrics("fsdp2-whole")
    assert any(row["test_recall"] == 1 and row["test_precision"] > 0.7 for row in rows), rows


IGNORED = {"channels_last), labels\n": "channels_last), labels.where(labels > 6, -100)\n"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "titles, changes",
    [
        ([EXACT, "Imbalanced classes"], IGNORED | TARGETS),
        ([CONTRAST], {"normalize(outputs": "normalize(outputs.view(-1, 2, 5)"}),
    ],
)
def test_alike(fashion, titles, changes):
    """The same on one process and on two, sharded or not."""
    path = paste("my", *titles, **changes)
    together(*runs(*fashion, *SHORT, two=[1]), path=path, more=BLOCKS)
    one = runs(*fashion, *SHORT, one=[1], shards={"ddp": 1})
    together(*one, path=path, more=BLOCKS, processes=1)
    for name in SHARDS:
        close(f"{name}-two", "ddp-one", keys=["train_loss"])


LAYERS = """
plain_layer = nn.TransformerEncoderLayer.forward
def forward(self, *words, **options):
    if torch.is_grad_enabled():
        print("layer")
    return plain_layer(self, *words, **options)
nn.TransformerEncoderLayer.forward = forward
"""


@pytest.mark.long
def test_three_billion():
    """docs/large_models.md's command, of fewer parameters and in float32, with the recipes that it
    names: the same on one process and on two, sharded or not, and in micro-batches."""
    path = paste("my", *SMALLER, rooms=True, **{"50_304": "256"})
    flags = re.search(r"my_training/train\.py (.* --dataset my_texts --.*) --output", DOCS)[1]
    few = {"2560": "64", "--layers 36": "--layers 3", "2048": "64", "256 --acc": "32 --acc"}
    few |= {"accumulate 16": "accumulate 4", "my_texts": "texts", "steps 100": "steps 2"}
    for old, new in {**few, " --amp": "", "lr 1e-4": "lr 1e-3"}.items():
        assert old in flags, old
        flags = flags.replace(old, new)
    flags = [*flags.split(), "--workers", 0]
    texts = together(*runs(*flags, two=[2]), path=path)
    assert "3 blocks; each copy of the model on 2 ranks" in texts[1]
    one = runs(*flags, "--accumulate", 1, one=[2], shards={"ddp": 1})
    [text] = together(*one, path=path, more=LAYERS, processes=1)
    steps = len(re.findall(r" step \d+/", text))
    assert text.count("layer\n") == 2 * 3 * steps  # each is computed twice, to save memory
    for name in SHARDS:
        close(f"{name}-two", "ddp-one", keys=["train_loss", "test_loss"])
    losses = [row["test_loss"] for row in metrics("ddp-one")]
    assert 0 < losses[1] < losses[0]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon():
    """Of torch itself, for the matrices of the layers, AdamW for the rest: the same on one process
    and on two, sharded or not, and bit-identical when resumed."""
    path = paste("my", "Muon", rooms=True)
    show = "\nplain = save_checkpoint\ndef save_checkpoint(args, progress, state, *words):\n"
    show += "    held = [len(state[n].state) for n in ('muon', 'optimizer')]\n"
    show += "    print('momenta', *held)\n    plain(args, progress, state, *words)\n"
    flags = [*FLAGS, "--dropout", 0, "--lr", 3e-3, "--warmup-steps", 5, "--batch-size", 60]
    texts = together(*runs(*flags, "--resume", whole=[2], parts=[1, 2]), path=path, more=show)
    assert all("momenta 8 22" in text for text in texts), texts[0]  # 2 layers of 4 matrices
    together(*runs(*flags, one=[2], shards={"ddp": 1}), path=path, processes=1)
    for name in SHARDS:
        close(f"{name}-whole", "ddp-one", 1e-3, ("train_loss", "test_loss"))
        assert same(weights(f"{name}-whole"), weights(f"{name}-parts"))
    losses = [row["test_loss"] for row in metrics("ddp-one")]
    assert 0 < losses[1] < losses[0]


def test_too_few_texts():
    """The language model's load_data names the folder."""
    load_data = runpy.run_path(str(paste("my", rooms=True)))["load_data"]
    Path("empty").mkdir()
    with pytest.raises(SystemExit, match="--dataset empty: only 0 bytes of text"):
        load_data(SimpleNamespace(dataset="empty", length=64))


def test_tokens(monkeypatch):
    """tokenize_texts.py writes the tokens of all texts in the order of their names, the last
    hundredth apart."""
    Path("my_texts/b").mkdir(parents=True)
    Path("my_texts/a.txt").write_text("ab\n" * 50)
    Path("my_texts/b/c.md").write_bytes(b"\xff" + b"z" * 100)
    Path("my_texts/left.out").write_text("?")
    words = SimpleNamespace(encode_ordinary=lambda line: [*map(ord, line)])
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=lambda name: words))
    exec(code_of("Tokens in a file")[0], {})
    parts = [np.fromfile(f"my_texts/{name}.bin", np.uint16) for name in ("train", "test")]
    assert "".join(map(chr, np.concatenate(parts))) == "ab\n" * 50 + "\ufffd" + "z" * 100
    assert [*map(len, parts)] == [248, 3]  # of 251


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

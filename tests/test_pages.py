"""The pages are true: commands run, links hold, examples train, recipes do what they say."""

import difflib
import os
import re
import runpy
import shlex
import subprocess
import textwrap
from pathlib import Path
from unittest import mock

import helpers
import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    Warm,
    by_hand,
    close,
    done,
    kill_all,
    metrics,
    run,
    same,
    wait_for,
    weights,
)
from PIL import Image
from torch.distributed.run import get_args_parser
from torchvision import models

FOLDERS = [ROOT, ROOT / "docs", ROOT / "slurm", ROOT / "benchmarks"]
PAGES = {path: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.md"))}
README, GUIDE = PAGES[ROOT / "README.md"], PAGES[ROOT / "docs" / "your_model_and_data.md"]
DOCS = "".join(text for path, text in PAGES.items() if path.parent.name == "docs")
SECTIONS = re.split(r"^##+ ", DOCS, flags=re.M)  # each begins with its title
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
ROOMS = re.findall(r"^```python\n((?:BLOCKS|def load)(?:.*\n)*?)```", GUIDE, re.M)
OWN_FLAGS = re.search(r'^```python\n(add\("--width.*\n(?:add.*\n)*)', GUIDE, re.M)[1]
FLAGS = re.search(r"my_training\.py --dataset docs (--.*)", GUIDE)[1].split()
FLAGS = ["--dataset", "texts", "--epochs", 2, "--batch-size", 16, "--log-every", 1, *FLAGS]
INSTEAD = {  # what is run instead of a part of a command
    r"^python3 -m venv .*/bin/python ": "python ",  # an environment takes 5 GB
    r"HOST": "127.0.0.1",
    r'"\$N" --node-rank "\$R" --master-addr "\$A"': "1 --node-rank 0 --master-addr 127.0.0.1",
    r"/shared/(folder/)?": "{folder}/",
    r"23456|29400": "{port}",  # somebody may have it
    r"(spawn\.py) --nnodes 2 --node-rank 0": r"\1",  # test_network.py has two machines
    r" --(amp|pretrained)": "",  # minutes on a CPU; a download
    r"^((?!.*--dataset).* complete/train.*)": r"\1 --dataset fashion-mnist",  # or a download
    r"^((?!.*--dataset).* train_.*)": r"\1 --dataset synthetic",
    r"--side 256": "--side 40",
}
NOT_RUN = [  # test_own_script, test_slurm.py and others do, it takes hours, or trains nothing
    r"python3 -m venv .* -m pytest$|.* my_(training|script)\.py|ls -d my_images",
    r"(NCCL_DEBUG=INFO )?(sbatch|srun|scontrol|squeue|scancel|export) ",
    r".*(python\S*|bash) (benchmarks/|-m pytest .* tests/|-m torch)",
    r"(git|mpirun|docker|apptainer|nvidia-smi|source|pip|uv|for \w+ in|torchfrtrace) |  |done|#",
]
SCRIPT = r"((?:complete/)?(?:train(?:_\w+)?|pack_images)\.py)"
TRAINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:torchrun (.* )?|python3? |.*/python ){SCRIPT}(.*)")
ORDER = re.split("\n## From", README)[0]  # its commands run one after the other
LINES = [code[2] for code in CODE.findall(ORDER) if not code[0]]  # what they print


def commands(text):
    """Those of each block of a page, and those within sentences one by one."""
    found = [code[2].splitlines() for code in CODE.findall(text) if code[0] == "sh"]
    found += [[line] for line in re.findall(r"`([^`\n]+)`", CODE.sub("", text))]
    return [tuple(filter(TRAINS.match, lines)) for lines in found if any(map(TRAINS.match, lines))]


FIRST = sum(commands(ORDER), ())
FIRST += (*(line + " --resume" for line in FIRST if "runs/mine" in line),)
RUN = {lines: None for text in PAGES.values() for lines in commands(text.removeprefix(ORDER))}


def masked(text):
    """Without numbers, and names of hosts and devices."""
    return re.sub(r"\S*\d\S*|host \w+", "#", text).split()


def test_pages():
    """Each link leads to a file, and to a heading; each command is run, or listed; what
    "```python train_dp.py" begins stands so in this script."""
    plain = {page: CODE.sub("", text) for page, text in PAGES.items()}
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", plain[page]):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            titles = re.findall(r"^#+ (.*)", plain[path].lower() if anchor else "# ", re.M)
            titles = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
            assert path.exists() and anchor in titles, (page, target)
        for _, name, content in CODE.findall(text):
            assert not name or f"\n{content}" in (ROOT / name).read_text(), (page, content)
        for line in "".join(code[2] for code in CODE.findall(text) if code[0] == "sh").splitlines():
            assert any(re.match(no, line) for no in NOT_RUN) != bool(TRAINS.match(line)), line


def test_diff():
    """docs/what_ddp_changes.md has the whole one, in order; each - may stand beside its +."""
    blocks = CODE.findall(PAGES[ROOT / "docs" / "what_ddp_changes.md"])
    shown = "".join(content for language, _, content in blocks if language == "diff").split("\n")
    old, new = (
        (ROOT / f"train_{n}.py").read_text().split("\n") for n in ("single", "ddp_torchrun")
    )
    real = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    for sign in "-", "+":
        found, wanted = ([x for x in lines if x.startswith(sign)] for lines in (shown, real))
        assert found == wanted
    assert all(line[1:] in old and line[1:] in new for line in shown if line[:1] not in "-+")


BREAKS = [  # docs/what_ddp_changes.md: what stands in its table, and instead of it
    ("", ""),
    ("F.cross_entropy(ddp(images), labels)", "F.cross_entropy(model(images), labels)"),
    ("rank_batch = args.batch_size // world_size", "rank_batch = args.batch_size"),
    ("sampler=sampler", "shuffle=True"),
    ("sampler.set_epoch(epoch)", ""),
    ("dist.all_reduce(loss_sum)", ""),
    ("dist.all_reduce(correct)", ""),
]


@pytest.mark.slow
def test_break_it():
    """The table of docs/what_ddp_changes.md, by its command."""
    [section] = [part for part in SECTIONS if part.startswith("Break it\n")]
    [flags] = re.findall(r"my_script\.py (--.*) --output", section)
    rows = re.findall(r"^\| (.*) \| (\d\.\d+) \| (\d\.\d+) \|", section, re.M)
    for i, ((old, new), (place, *scores)) in enumerate(zip(BREAKS, rows, strict=True)):
        assert all(code in old + new for code in re.findall("`(.+?)`", place)), place
        path = helpers.changed("train_ddp_torchrun.py", old, new)
        words = [*flags.split(), "--workers", 0, "--output", f"{i}"]
        text = done(by_hand(path, *words, processes=2))
        found = re.findall(r"^epoch 1: loss (\S+) accuracy (\S+)", text, re.M)[0]
        assert [*map(float, found)] == pytest.approx([*map(float, scores)], abs=0.03), place


LAUNCHING = PAGES[ROOT / "docs" / "launching.md"]
JOBS = [code[2] for code in CODE.findall(LAUNCHING) if code[0] == "yaml"]  # SkyPilot, Kubeflow
TOLD = {  # what a service tells the second of two machines
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "10.0.0.1",
}
FIRST_OF_AWS = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"}  # all it is told


def torchrun_sees(lines, told):
    """What torchrun makes of the flags and the environment that it gets from these lines: its
    machines, this machine's number, the first one's address, and the script with its flags."""
    lines = f'torchrun() {{ printf "%s\\n" "$@"; }}\n{lines}'
    words = subprocess.check_output(["bash", "-euc", lines], env=told, text=True).splitlines()
    with mock.patch.dict(os.environ, told):
        args = get_args_parser().parse_args(words)
    return [args.nnodes, args.node_rank, args.master_addr, args.training_script] + [
        *args.training_script_args
    ]


def test_clouds():
    """Each service's names for N, R and A, and the jobs, start the second of two machines."""
    [command] = re.findall(r'^torchrun .*"\$N".*', LAUNCHING, re.M)
    rows = re.findall(r"^\| .* \| `(\$.*)` \| `(.*)` \| `(.*)` \|$", LAUNCHING, re.M)
    script = ["complete/train.py", "--resume", "--output", "/shared/runs/mine"]
    assert len(rows) == 2
    for cells in rows:
        values = "\n".join(map("{}={}".format, "NRA", cells)).replace("\\|", "|")
        assert torchrun_sees(f"{values}\n{command}", TOLD) == ["2", 1, "10.0.0.1", *script]
    assert torchrun_sees(f"{values}\n{command}", FIRST_OF_AWS) == ["2", 0, "127.0.0.1", *script]
    lines = textwrap.dedent(JOBS[0].split("run: |\n")[1]).replace("source", ":")
    assert torchrun_sees(lines, TOLD) == ["2", 1, "10.0.0.1", *script]
    line = re.search(r"command: \[(.*)\]", JOBS[1])[1].replace(",", "")
    assert torchrun_sees(line, TOLD) == ["2", 1, "10.0.0.1", *script]


def test_jobs_of_clouds_fit_their_schemas(monkeypatch):
    """As the packages of SkyPilot and Kubeflow read them, where these are installed."""
    yaml = pytest.importorskip("yaml")
    monkeypatch.setenv("HOME", os.getcwd())  # SkyPilot makes folders there
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for job in yaml.safe_load_all(JOBS[1]):
        kind = getattr(models, f"TrainerV1alpha1{job['kind']}")
        assert kind.from_dict(job).to_dict() == job  # without what it does not know
    sky = pytest.importorskip("sky")
    Path("job.yaml").write_text(JOBS[0])
    task = sky.Task.from_yaml("job.yaml")
    [resources] = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"A100": 8}) and resources.use_spot


def test_split(data):
    """README.md's command that moves every tenth image into test/."""
    for name in "a", "b":
        for i in range(20):
            Path("my_images", "train", name).mkdir(parents=True, exist_ok=True)
            Path("my_images", "train", name, f"photo {i:02}.jpg").touch()
    [command] = re.findall(r"^ls -d my_images.*", README, re.M)
    subprocess.run(["bash", "-c", command], check=True)
    moved = sorted(str(path) for path in Path("my_images", "test").glob("*/*"))
    assert moved == [f"my_images/test/{n}/photo {i}.jpg" for n in "ab" for i in ("00", 10)]
    assert len(list(Path("my_images", "train").glob("*/*"))) == 36


@pytest.mark.slow
def test_transcript():
    """README.md's first lines: a run that is killed, and resumed on two processes."""
    [text] = [code[2] for code in CODE.findall(README) if code[0] == "console"]
    shown = re.split(r"^\$ .*\n", text, flags=re.M)[1:]
    one, two = re.findall(r"^\$ .*? complete/train_ddp.py (.*)", text, re.M)
    first = by_hand(helpers.script("complete/train_ddp"), *one.split(), processes=0)
    wait_for("step 100/", *first)
    helpers.wait_until(lambda: weights("runs/demo", "last.pt")["progress"]["step"] == 100)
    kill_all(first)
    printed = helpers.logs(first) + "Killed\n"
    again = by_hand(helpers.script("complete/train_ddp"), *two.split(), processes=2)
    assert [*map(masked, shown)] == [masked(printed), masked(done(again))]
    flags = re.search(r"train_single.py (.*)", FIRST[0])[1].split()
    flags += ["--workers", 0]  # on one core, torch warns of two
    assert masked(LINES[0]) == masked(run("single", *flags))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [FIRST, *RUN], ids=lambda x: re.sub(r"\W+", "-", x[0])[-40:])
def test_commands(lines, data):
    """README.md's first ones in order, and each of the others. Of torchrun only the flags are read:
    two processes are started without it. The synthetic data are few."""
    Path("complete").mkdir()
    for path in [*ROOT.glob("train_*.py"), *ROOT.glob("complete/*.py")]:
        text = re.sub(r"\b10_000\b", "96", path.read_text())
        Path(path.relative_to(ROOT)).write_text(re.sub(r"\b(12_000|2_000)\b", "136", text))
    Path("my_images").symlink_to(data / "pictures")
    texts = []
    for line in lines:
        for pattern, other in INSTEAD.items():
            other = other.format(folder=os.getcwd(), port=helpers.free_port())
            line = re.sub(pattern, other, line)
        torchrun, name, flags = TRAINS.match(line).groups()
        flags = shlex.split(flags, comments=True)
        if "pack_images" in name:
            flags += ["--workers", 0]
        else:
            epochs = 0 if "--epochs 0" in line else 1 + ("--resume" in line)
            flags += ["--batch-size", 16, "--image-size", 32, "--workers", 0, "--epochs", epochs]
            flags += ["--data-dir", data] if "complete/" in name else []
        if torchrun is not None or line.startswith("torchrun"):
            get_args_parser().parse_args([*(torchrun or "").split(), name])
        if "rank 1" not in line:  # the second machine's command
            alone = not re.search(r"\btorchrun ", line)
            jobs = [Warm(name, flags, "log")] if alone else by_hand(name, *flags, processes=2)
            texts.append(done(jobs))
    assert any("--epochs 0" in line for line in lines) or [
        *Path().glob("runs/*/model.pt"),
        *Path().glob("packed/classes.json"),
    ]
    if lines == FIRST:
        assert "1 epochs and 0 steps are done" in texts[-1]


def copy(*titles, name="complete/train_ddp", rooms=False, **changes):
    """my_script.py: a script with these recipes, in its rooms the example, and other changes."""
    text = Path(helpers.script(name)).read_text()
    ends = ("def build_optimizer", "# ---- Loaders") if rooms else ()
    for banner, block, end in zip(("model", "data"), ROOMS, ends):
        start, end = re.search(rf"# ---- The {banner}: .*\n", text).end(), text.index(end)
        text = text[:start] + block + "\n\n" + text[end:]
    for title in titles:
        [section] = [part for part in SECTIONS if part.startswith(f"{title}\n")]
        verbs = r"^# (below|above|delete|instead of|instead of the function): (.*)\n"
        lines = "".join(code[2] for code in CODE.findall(section) if re.match(verbs, code[2]))
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
    Path("my_script.py").write_text(text)
    Path("texts").mkdir(exist_ok=True)
    text = (README[:6500] * 2).encode()[: 200 * 64 + 1]
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    Path("texts", "a.md").write_bytes(text)
    tokens[:11521].tofile("texts/train.bin"), tokens[11520:].tofile("texts/test.bin")


def train(output, *flags, name="complete/train_ddp", processes=2):
    """Run my_script.py in this folder, where it resumes: what it has printed."""
    flags = [*flags, "--resume", "--output", output]
    return run(name, *flags, processes=processes, path="my_script.py")


SHORT = ["--batch-size", 16, "--epochs", 3, "--lr", 0.001, "--log-every", 10]
SMALLER = "Tokens in a file", "Less memory for activations"
EXACT, CLASSES = "A loss that ignores labels", "Imbalanced classes"
ADDED = ["An average of the weights", "Evaluation every N steps", "The last three checkpoints"]
ADDED += ["Early stopping", "TensorBoard", "Weights & Biases", CLASSES]
ADDED += ["Deterministic runs on a GPU", "Predictions for all test samples"]
ADDED += ["Is it the loader?", "Communication or computation?"]


@pytest.mark.slow
def test_recipes(fashion):
    """A resumed run leaves the same files; a run that stalls is stopped."""
    changes = {"train_set.targets": "train_set.tensors[1]", "> 60:": "> 0:", "% 1000": "% 20"}
    changes["torch.utils.tensorboard import SummaryWriter"] = "unittest import mock"
    changes["SummaryWriter(args.output / "] = "mock.MagicMock(name="
    nothing = "init = define_metric = staticmethod(lambda *words, **options: None)"
    changes["import wandb\n"] = f"class wandb:\n    {nothing}\n    log = staticmethod(print)\n"
    copy(*ADDED, **changes)
    flags, names = [*fashion, *SHORT, "--augment"], ("model.pt", "best.pt", "ema.pt")
    text = train("whole", *flags)
    assert text.count("the loader alone: ") == 1 and "aten::" in text
    assert text.count("step 20: test loss ") == 3
    logged = re.findall(r"{'step': (\d+)", text)  # by wandb
    assert [*map(int, logged)] == sorted([*range(10, 121, 10), 40, 80, 120])
    assert "ProfilerStep#23" in Path("whole", "trace.json").read_text()
    for epochs in 1, 3:
        train("parts", *flags, "--epochs", epochs)
    whole, parts = ([weights(output, name) for name in names] for output in ("whole", "parts"))
    assert all(map(same, whole, parts)) and not same(whole[0], whole[2])
    for epochs in (8, 9):  # the second run is stopped before it begins
        train("stalled", *flags, "--lr", 0, "--epochs", epochs, processes=epochs - 7)
        os.rename("stalled/predictions.pt", f"{epochs}.pt")
        assert len(metrics("stalled")) == 6
    assert torch.allclose(weights(".", "8.pt"), weights(".", "9.pt"))
    assert sorted(path.name for path in Path("stalled").glob("e*.pt")) == [
        "ema.pt", "epoch-4.pt", "epoch-5.pt", "epoch-6.pt"
    ]  # fmt: skip


@pytest.mark.slow
def test_frozen_layers(fashion):
    """Only the head is trained, on two processes too."""
    copy("Frozen layers")
    train("frozen", *fashion, *SHORT, "--epochs", 1, "--model", "resnet18")
    torch.manual_seed(76)
    old, new = models.resnet18(num_classes=10).state_dict(), weights("frozen")
    assert {name for name in old if not torch.equal(old[name], new[name])} == {
        "fc.weight",
        "fc.bias",
    }


@pytest.mark.slow
def test_fine_tuning(data):
    """Accuracy and F1 from confusion.csv are those of metrics.csv, on any number of processes."""
    copy("Fine-tuning")
    flags = ["--dataset", data / "pictures", "--image-size", 32, *SHORT, "--lr", 0.1]
    for processes in 1, 2:
        train(f"{processes}", *flags, processes=processes)
        confusion = np.loadtxt(f"{processes}/confusion.csv", delimiter=",")
        hits, both = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
        row = min(metrics(f"{processes}"), key=lambda row: row["test_loss"])
        assert confusion.shape == (3, 3) and confusion.sum() == 3
        assert row["test_accuracy"] == pytest.approx(hits.sum() / 3)
        assert row["test_f1"] == pytest.approx((2 * hits / both.clip(min=1)).mean())
    close("2", "1", keys=("test_loss", "test_accuracy", "test_f1"))
    pytest.importorskip("matplotlib")
    [code] = [code[2] for code in CODE.findall(GUIDE) if "import pyplot" in code[2]]
    Path("my_images").symlink_to(data / "pictures")
    exec("import matplotlib; matplotlib.use('agg')\n" + code.replace("runs/tuned", "1"), {})
    assert Path("curves.png").exists() and Path("confusion.png").exists()


@pytest.mark.slow
def test_sequences():
    """Samples of several lengths are padded, by the script as it is but for the data."""
    data = "[(torch.arange(i % 200 + 1), i % 2) for i in range(100)]"
    changes = {
        '    if args.dataset == "synthetic":\n': f"    return {data}, {data}, 2\n    if 0:\n"
    }
    changes["    channels, side = inputs.shape[1:3]\n"] = (
        "    return nn.EmbeddingBag(256, 2, padding_idx=0)\n"
    )
    copy("Detection, and sequences of several lengths", **changes)
    for processes in 1, 2:
        train(f"{processes}", *SHORT, "--workers", 1, processes=processes)
    close("2", "1")


def test_guide():
    """IoU and F1 of docs/your_model_and_data.md; its folds are a partition; best.pt is used."""
    [code] = [code[2] for code in CODE.findall(GUIDE) if "print(classes" in code[2]]
    for name in "ab":
        Path("my_images", "train", name).mkdir(parents=True)
    Path("runs", "tuned").mkdir(parents=True)
    torch.save(models.resnet18(num_classes=2).state_dict(), "runs/tuned/best.pt")
    Image.new("RGBA", (300, 400)).save("photo.png")
    code = code.replace("resnet50", "resnet18").replace("ResNet50", "ResNet18")
    exec(code.replace("photo.jpg", "photo.png"), space := {})
    assert space["classes"] == ["a", "b"] and space["image"].shape == (3, 224, 224)
    copy("Cross-validation")
    space = runpy.run_path("my_script.py")
    assert space["parser"].parse_args(["--fold", "3"]).fold == 3
    for start in "def count", "def fold_of":
        [code] = [code[2] for code in CODE.findall(GUIDE) if code[2].startswith(start)]
        exec(code, space)
    outputs, masks = torch.tensor([[1.0, 1, -1, -1, 1]]), torch.tensor([[1.0, 0, 1, 0, 1]])
    sums = space["count"](outputs, masks)
    assert sums["labels"] == 5
    found = space["metrics"](sums)
    assert found["test_iou"] == 2 / 4 and found["test_f1"] == pytest.approx(2 / 3)
    folds = [space["fold_of"](range(23), fold) for fold in range(5)]
    assert sorted(i for _, test in folds for i in test.indices) == list(range(23))
    assert all(sorted(a.indices + b.indices) == list(range(23)) for a, b in folds)


CONTRAST = "A contrastive loss over the whole batch"
HALF = "All-reduce in bfloat16"
ALIKE = {  # recipes: what the data set needs
    (): {},
    SMALLER: {"50_257": "256"},
    (EXACT,): {"return images, labels\n": "return images, labels.where(labels > 6, -100)\n"},
    (CLASSES,): {"train_set.targets": "train_set.tensors[1]"},
    (CONTRAST,): {"normalize(outputs": "normalize(outputs.view(-1, 2, 5)"},
    (HALF,): {},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipes", ALIKE)
def test_alike(fashion, recipes):
    """On one process, on two, and in micro-batches but for the contrasts; bfloat16 is near."""
    example = recipes in ((), SMALLER)
    flags = ["--workers", 0] if example else [*fashion, *SHORT, "--epochs", 1]
    flags += [*FLAGS, "--dropout", 0] if example else []
    copy(*recipes, rooms=example, **ALIKE[recipes])
    for output, processes, parts in ("one", 1, 1), ("two", 2, 1), ("parts", 2, 2):
        train(output, *flags, "--accumulate", parts, processes=processes)
        if recipes != (CONTRAST,) or parts == 1:
            close(output, "one", 0.02 if HALF in recipes else 1e-4, keys=["train_loss"])
    assert not example or 0 < metrics("one")[1]["test_loss"] < metrics("one")[0]["test_loss"]


@pytest.mark.slow
def test_three_billion(fashion):
    """docs/large_models.md's command, of fewer parameters, with the recipes that it names."""
    copy(*SMALLER, name="complete/train_fsdp2", rooms=True, **ALIKE[SMALLER])
    flags = re.search(r"my_training\.py --dataset my_texts (--.*) --output", DOCS)[1]
    few = {"2560": "64", "--layers 36": "--layers 3", "2048": "64", "256 --acc": "32 --acc"}
    for old, new in {**few, "accumulate 16": "accumulate 4"}.items():
        assert old in flags, old
        flags = flags.replace(old, new)
    for epochs in 1, 2:
        words = ["--dataset", "texts", "--workers", 0, *flags.split(), "--epochs", epochs]
        text = train("3b", *words, name="complete/train_fsdp2")
        assert "3 blocks; each copy of the model on 2 ranks" in text


META = "Building on the meta device"
LARGE = {"first": [], "plain": [], "meta": [META], "file": [META, "A pretrained file"]}
LARGE |= {"parts": ["Sharded checkpoints"], "bytes": ["Less communication, more memory"]}
LARGE |= {"offload": ["CPU offload"]}


@pytest.mark.slow
def test_large_models(fashion):
    """The recipes of docs/large_models.md end with the weights of the script, also resumed; a
    file's may be in channels_last. Tied weights stay tied. Blocks stay gathered with one of them.
    torch's converter reads the folder."""
    name, show = "complete/train_fsdp2", "print('is a', type(model.fc2[2].weight).__name__)"
    changes = {"BLOCKS = (models.resnet.BasicBlock,": "BLOCKS = (nn.Sequential,"}
    tied = "self.fc2 = nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 120), nn.Linear(120, 84))"
    changes["self.fc3 ="] = f"{tied}; self.fc2[0].weight = self.fc2[1].weight; self.fc3 ="
    changes["loss.backward()"] = f"{show}; loss.backward()"
    for output, titles in LARGE.items():
        if output == "offload":  # there is no CUDA here
            changes |= {",cuda:nccl": "", "OffloadPolicy()": "OffloadPolicy(pin_memory=False)"}
        copy(*titles, name=name, **changes)
        flags = [*fashion, *SHORT, "--optimizer", "adamw", "--lr", 0.001 * (output != "first")]
        parts = (1, 2) if output in ("meta", "file", "parts") else (2,)
        text = "".join(train(output, *flags, "--epochs", n, name=name) for n in parts)
        assert ("is a Parameter" in text) == (output == "bytes")
        if output == "first":
            pretrained = weights("first")
            filters = pretrained["conv2.weight"].to(memory_format=torch.channels_last)
            torch.save(pretrained | {"conv2.weight": filters}, "pretrained.pt")
        else:
            assert same(weights(output), weights("plain")), output
    assert [path.name for path in Path("parts").glob("parts-*")] == ["parts-2-0"]
    [command] = re.findall(r"^python -m (torch.*) dcp_to_torch ", DOCS, re.M)
    helpers.command(helpers.sys.executable, "-m", command, "dcp_to_torch", "parts/parts-2-0", "one")
    assert same(weights(".", "one")["model"], weights("plain"))


LOOP = """
import itertools, math, os, torch
import torch.distributed as dist, torch.nn.functional as F
from contextlib import nullcontext
from datetime import timedelta
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import BatchSampler, Sampler, WeightedRandomSampler

dist.init_process_group(timeout=timedelta(seconds=100))
rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
loss_function = lambda outputs, labels: (outputs - labels).mean()
seed, communicated = 0, []


def of_all(*things):
    found, own = [None] * world_size, [torch.as_tensor(thing).tolist() for thing in things]
    dist.all_gather_object(found, own)
    return found


def alike(*things):
    found = of_all(*things)
    assert found[0] == found[1], found


def counted(state, bucket):
    communicated.append(bucket)
    return allreduce_hook(None, bucket)


def new(model):
    torch.manual_seed(rank)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, counted)
    communicated.clear()
    return ddp, torch.optim.SGD(model.parameters(), 0.1)
"""
UNUSED = """
branches = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
branches.forward = lambda x, i: branches[i](x).sum()
for find in False, True:
    ddp = nn.parallel.DistributedDataParallel(branches, find_unused_parameters=find)
    try:
        for i in 0, 1, 0:
            ddp(torch.randn(4, 2), i).backward()
        assert find
    except RuntimeError as error:
        assert not find and "find_unused_parameters=True" in str(error)
keys = ddp.state_dict()
nn.modules.utils.consume_prefix_in_state_dict_if_present(keys, "module.")
branches.load_state_dict(keys)
"""
OWN = {  # of docs/what_ddp_changes.md: what comes before a section's code, and what is true after
    "IoU of several classes": (
        "model, classes, shape = nn.Identity(), 20, (3, 9, 9)\n"
        "both = [(torch.randn(3, 20, 9, 9), torch.randint(20, shape).byte()) for _ in range(5)]\n"
        "dist.broadcast_object_list(both)\n"
        "val_loader = both[:4] if rank == 0 else both[4:]",
        "x, y = (torch.cat(part) for part in zip(*both))\n"
        "x = x.argmax(1)\n"
        "both = [[(x == i) & (y == i), (x == i) | (y == i)] for i in range(classes)]\n"
        "ratios = [hits.sum() / either.sum() for hits, either in both]\n"
        "assert math.isclose(iou, sum(ratios) / classes, rel_tol=1e-6)",
    ),
    "Gradient accumulation": (
        "micro_batches = [(torch.randn(2, 2), 0) for i in range(4)]",
        "mean = torch.cat([inputs for inputs, _ in micro_batches]).mean(0)\n"
        "assert len(communicated) == 1\ndist.all_reduce(mean)\n"
        "assert torch.allclose(model.weight.grad, mean / world_size)",
    ),
    "A GAN": (
        "discriminator = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))\n"
        "generator, noise, real = nn.Linear(3, 2), torch.randn(8, 3), torch.randn(8, 2)\n"
        "d_optimizer = torch.optim.SGD(discriminator.parameters(), 0.1)\n"
        "g_optimizer = torch.optim.SGD(generator.parameters(), 0.1)",
        "alike(*discriminator.parameters(), *generator.parameters())\n"
        "assert not d.broadcast_buffers and not g.broadcast_buffers\n"
        "for own in discriminator[0].weight.grad, discriminator[1].running_mean:\n"
        "    assert len(set(map(str, of_all(own)))) == 2",
    ),
    "Different numbers of batches": (
        "train_loader = [(torch.randn(2, 2), 0)] * (2 + rank)",
        "alike(model.weight)\nassert steps == 2",
    ),
    "A method other than forward": (
        "model.training_step = lambda inputs, labels: model(inputs).sum() - labels\n"
        "inputs, labels = torch.randn(2, 2), 0",
        "loss.backward()\nalike(model.weight.grad)",
    ),
    "A loss that compares samples": (
        "def loss_function(a, b):\n"
        "    pairs = F.normalize(a) @ F.normalize(b).T\n"
        "    return F.cross_entropy(pairs, torch.arange(len(pairs)))\n"
        "model = nn.Linear(3, 4)\n"
        "ddp, optimizer = new(model)\n"
        "all_views = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(1))\n"
        "first_views, second_views = all_views[:, 4 * rank : 4 * rank + 4]",
        "found = model.weight.grad.clone()\n"
        "model.zero_grad()\n"
        "whole = loss_function(*model(all_views))\n"
        "whole.backward()\n"
        "assert torch.allclose(loss, whole)\n"
        "assert torch.allclose(model.weight.grad, found, atol=1e-6)\n"
        "half = loss_function(model(first_views), model(second_views))\n"
        "assert half < whole - 0.3, (half, whole)",
    ),
    "Another sampler, or no DataLoader": (
        "",
        "for epoch in range(2):\n"
        "    generator = torch.Generator().manual_seed(epoch)\n"
        "    one = WeightedRandomSampler(torch.ones(11), 11, generator=generator)\n"
        "    share = Share(one)\n"
        "    found = of_all(*share)\n"
        "    generator.manual_seed(epoch)\n"
        "    order = list(one)\n"
        "    assert len(share) == 5 and found == [order[0:10:2], order[1:10:2]], found\n"
        "batches = Share(BatchSampler(range(17), 3, drop_last=False))\n"
        "assert list(batches) == ([[0, 1, 2], [6, 7, 8], [12, 13, 14]], [[3, 4, 5], [9, 10, 11],"
        " [15, 16]])[rank]",
    ),
}


def test_own_loop():
    """Each section's code, in two processes whose data and scores differ. Steps that leave
    parameters without gradients need find_unused_parameters=True; DDP's keys lose "module."."""
    text = [LOOP, UNUSED]
    for i, (title, (before, after)) in enumerate(OWN.items()):
        [section] = [part for part in SECTIONS if part.startswith(f"{title}\n")]
        codes = [code for language, _, code in CODE.findall(section) if language == "python"]
        lines = ["model = nn.Linear(2, 1)", "ddp, optimizer = new(model)", before, *codes, after]
        text += [f"def section_{i}():", textwrap.indent("\n".join(lines), "    "), f"section_{i}()"]
    Path("loop.py").write_text("\n".join(text) + "\nprint('all of it')\n")
    assert done(by_hand("loop.py", processes=2)).count("all of it") == 2

"""The pages are true: commands run, links hold, examples train, recipes do what they say."""

import difflib
import os
import re
import shlex
import textwrap
from pathlib import Path

import helpers
import pytest
import torch
from helpers import ROOT, Warm, by_hand, close, done, metrics, run, same, weights
from torch.distributed.run import get_args_parser
from torchvision import models

FOLDERS = [ROOT, ROOT / "docs", ROOT / "slurm", ROOT / "benchmarks"]
PAGES = {path: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.md"))}
README, GUIDE = PAGES[ROOT / "README.md"], PAGES[ROOT / "docs" / "your_model_and_data.md"]
DOCS = "".join(text for path, text in PAGES.items() if path.parent.name == "docs")
SECTIONS = re.split(r"^##+ ", DOCS, flags=re.M)  # each begins with its title
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
ROOMS = re.findall(r"^```python\n((?:BLOCKS|def load)(?:.*\n)*?)```", GUIDE, re.M)
FLAG = re.search(r"`(add\(.+\))`", GUIDE)[1]
FLAGS = re.search(r"my_training\.py --dataset tests (--.*)", GUIDE)[1].split()
FLAGS = ["--dataset", "texts", "--epochs", 2, "--batch-size", 16, "--log-every", 1, *FLAGS]
INSTEAD = {  # what is run instead of a part of a command
    r"^python3 -m venv .*/bin/python ": "python ",  # an environment takes 5 GB
    r"HOST": "127.0.0.1",
    r"/shared/folder": "{folder}",
    r"23456|29400": "{port}",  # somebody may have it
    r" --world-size 2 --rank 0": "",  # test_network.py has two machines
    r" --amp": "",  # minutes on a CPU
    r"^(?!.*--dataset)(.*)": r"\1 --dataset fashion-mnist",  # CIFAR-10 takes a network
}
SMALL = ["--batch-size", 16, "--image-size", 32, "--data-dir"]  # flags behind the others
NOT_RUN = [  # test_alike, test_minimal.py and test_slurm.py do, it takes hours, or trains nothing
    r"python3 -m venv .* -m pytest$|.* my_(training|script)\.py",
    r"(sbatch|srun|scontrol|squeue|scancel|export) ",
    r".*(python\S*|bash) (benchmarks/|-m pytest .* tests/)",
    r"(mpirun|docker|apptainer|kubectl|nvidia-smi|source|pip|for pid in) |  |done|#",
]
TRAINS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:torchrun (.*)|python3? |.*/python )(train_\w+\.py)(.*)")
ORDER = re.split("\n## From", README)[0]  # its commands run one after the other


def commands(text):
    """Those of each block of a page, and those within sentences one by one."""
    found = [code[2].splitlines() for code in CODE.findall(text) if code[0] == "sh"]
    found += [[line] for line in re.findall(r"`([^`\n]+)`", CODE.sub("", text))]
    return [tuple(filter(TRAINS.match, lines)) for lines in found if any(map(TRAINS.match, lines))]


FIRST = sum(commands(ORDER), ())
FIRST += (*(line + " --resume" for line in FIRST if "runs/mine" in line),)
RUN = {lines: None for text in PAGES.values() for lines in commands(text.removeprefix(ORDER))}


def test_pages():
    """Short; each link leads to a file, and to a heading; each command is run, or listed; what
    "```python train_dp.py" begins stands so in this script."""
    assert len(README.splitlines()) <= 140 and len(README.split()) <= 1200
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
    assert sum(len(text.split()) for text in PAGES.values()) <= 11_000


def test_diff():
    """README.md's is the real one, without some of the unchanged lines, and short."""
    [diff] = [code[2].splitlines() for code in CODE.findall(README) if code[0] == "diff"]
    old, new = ((ROOT / "minimal" / f"{n}.py").read_text().splitlines() for n in ("one_gpu", "ddp"))
    lines = list(difflib.unified_diff(old, new, n=999, lineterm=""))[3:]
    changes = [line for line in lines if line[0] in "+-"]
    assert [line for line in diff if line[0] in "+-"] == changes and len(changes) <= 60
    rest = iter(lines)
    assert all(line in rest for line in diff)  # in this order


@pytest.mark.slow
@pytest.mark.parametrize("lines", [FIRST, *RUN], ids=lambda x: re.sub(r"\W+", "-", x[0])[-40:])
def test_commands(lines, data):
    """README.md's first ones in order, with output of the printed form; each of the others. Of
    torchrun only the flags are read: two processes are started without it."""
    for path in ROOT.glob("train_*.py"):
        text = path.read_text().replace("synthetic(10_000", "synthetic(96")
        Path(path.name).write_text(text.replace("synthetic(2_000", "synthetic(40"))
    Path("my_images").symlink_to(data / "pictures")
    texts = []
    for line in lines:
        for pattern, other in INSTEAD.items():
            other = other.format(folder=os.getcwd(), port=helpers.free_port())
            line = re.sub(pattern, other, line)
        torchrun, name, flags = TRAINS.match(line).groups()
        epochs = 0 if "--epochs 0" in line else 1 + ("--resume" in line)
        flags = [*shlex.split(flags, comments=True), *SMALL, data, "--epochs", epochs]
        if torchrun is not None:
            get_args_parser().parse_args([*torchrun.split(), name])
        if "rank 1" not in line:  # the second machine's command
            alone = torchrun is None
            jobs = [Warm(name, flags, "log")] if alone else by_hand(name, *flags, processes=2)
            texts.append(done(jobs))
    assert any("--epochs 0" in line for line in lines) or list(Path().glob("runs/*/model.pt"))
    if lines == FIRST:
        assert "1 epochs and 0 steps are done" in texts[-1]
        texts += [code[2] for code in CODE.findall(ORDER) if not code[0]]
        masks = [re.sub(r"\S*\d\S*|host \w+", "#", text).split() for text in texts]
        assert masks[-1] in masks[:-1]


def copy(*titles, name="ddp_torchrun", rooms=False, **changes):
    """my_script.py: a script with these recipes, in its rooms the example, and other changes."""
    text = Path(helpers.script(name)).read_text()
    ends = ("def build_optimizer", "def augment") if rooms else ()
    for banner, block, end in zip(("model", "data"), ROOMS, ends):
        start, end = re.search(rf"# ---- The {banner}: .*\n", text).end(), text.index(end)
        text = text[:start] + block + "\n\n" + text[end:]
    for title in titles:
        [section] = [part for part in SECTIONS if part.startswith(f"{title}\n")]
        lines = "".join(code[2] for code in CODE.findall(section) if code[0] == "python")
        verbs = r"^# (below|above|instead of|instead of the function|delete): (.*)\n"
        pieces = re.split(verbs, lines, flags=re.M)[1:]
        for verb, place, lines in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            pattern = rf"^ *{re.escape(place)}.*\n"
            if verb == "instead of the function":
                pattern, lines = rf"^def {place}\(.*\n(?:(?: .*)?\n)*", f"{lines}\n\n"
            [old] = re.findall(pattern, text, re.M)
            text = text.replace(old, {"above": lines + old, "below": old + lines}.get(verb, lines))
    for old, new in {'add("--seed"': f'{FLAG}\nadd("--seed"', **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    Path("my_script.py").write_text(text)
    Path("texts").mkdir(exist_ok=True)
    text = (README[:6500] * 2).encode()[: 200 * 64 + 1]
    for name, part in ("a.md", text), ("train.bin", text[:11521]), ("test.bin", text[11520:]):
        Path("texts", name).write_bytes(part)


def train(output, *flags, name="ddp_torchrun", processes=2):
    """Run my_script.py in this folder, where it resumes: what it has printed."""
    flags = [*flags, "--resume", "--output", output]
    return run(name, *flags, processes=processes, path="my_script.py")


SHORT = ["--batch-size", 16, "--epochs", 3, "--lr", 0.001, "--log-every", 10]
SMALLER = "Data larger than memory", "Less memory for activations"
EXACT, CLASSES = "A loss that ignores labels", "Imbalanced classes"
ADDED = ["The best model", "Early stopping", "The norm of the gradient", "TensorBoard", CLASSES]
ADDED += ["An average of the weights", "Predictions for all test samples", "Is it the loader?"]
ADDED += ["Communication or computation?"]
FROZEN = "Pretrained weights and frozen layers"


@pytest.mark.slow
def test_recipes(fashion):
    """A resumed run leaves the same files; only the head of a frozen network is trained; a run that
    stalls is stopped."""
    changes = {"train_set.targets": "train_set.tensors[1]", '(weights="DEFAULT")': "()"}
    changes["torch.utils.tensorboard import SummaryWriter"] = "unittest import mock"
    changes |= {"> 60:": "> 0:", "SummaryWriter(args.output / ": "mock.MagicMock(name="}
    copy(*ADDED, FROZEN, **changes)
    flags, names = [*fashion, *SHORT, "--repeat", 3], ("model.pt", "best.pt", "ema.pt")
    text = train("whole", *flags)
    assert all(text.count(says) for says in ("the loader alone: ", "aten::", "gradient norm "))
    assert "ProfilerStep#23" in Path("whole", "trace.json").read_text()
    for epochs in 1, 3:
        train("parts", *flags, "--epochs", epochs)
    whole, parts = ([weights(output, name) for name in names] for output in ("whole", "parts"))
    assert all(map(same, whole, parts)) and not same(whole[0], whole[2])
    losses = [row["test_loss"] for row in metrics("whole")]
    assert same(*whole[:2]) == (losses[2] == min(losses))
    torch.manual_seed(76)
    backbone = models.resnet18().state_dict()
    frozen = {name: whole[0].get(f"backbone.{name}", backbone[name]) for name in backbone}
    assert same(frozen, backbone)
    for epochs in (8, 9):  # the second run is stopped before it begins
        train("stalled", *flags, "--lr", 0, "--epochs", epochs, processes=epochs - 7)
        os.rename("stalled/predictions.pt", f"{epochs}.pt")
        assert len(metrics("stalled")) == 6
    assert torch.allclose(weights(".", "8.pt"), weights(".", "9.pt"))


CONTRAST = "A contrastive loss over the whole batch"
[HALF] = [part.split("\n")[0] for part in SECTIONS if "torch.amp.GradScaler(" in part]
ALIKE = {  # recipes: what the data set needs
    (): {},
    SMALLER: {},
    (EXACT,): {"images, labels\n": "images, labels.where(labels > 6, -100)\n"},
    (CLASSES,): {"train_set.targets": "train_set.tensors[1]"},
    (CONTRAST,): {"normalize(outputs": "normalize(outputs.view(-1, 2, 5)"},
    (HALF, "All-reduce in bfloat16"): {"enabled=args.amp": "enabled=world_size > 1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipes", ALIKE)
def test_alike(fashion, recipes):
    """On one process, on two, and in micro-batches but for the contrasts; float16 is near."""
    example = recipes in ((), SMALLER)
    flags = [*FLAGS, "--dropout", 0] if example else [*fashion, *SHORT, "--epochs", 1]
    copy(*recipes, rooms=example, **ALIKE[recipes])
    for output, processes, parts in ("one", 1, 1), ("two", 2, 1), ("parts", 2, 2):
        train(output, *flags, "--accumulate", parts, processes=processes)
        if recipes != (CONTRAST,) or parts == 1:
            close(output, "one", 0.02 if HALF in recipes else 1e-4, keys=["train_loss"])
    assert not example or 0 < metrics("one")[1]["test_loss"] < metrics("one")[0]["test_loss"]


LOOP = """
import os, random, numpy, torch, torch.distributed as dist
from torch import nn
dist.init_process_group()
rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
model, best, bad_epochs, seed, test_loss = nn.Linear(2, 2), 9, 0, 0, 0
optimizer = torch.optim.SGD(model.parameters())
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(9):
    test_loss -= rank
"""


def test_own_loop(fashion):
    """slurm/README.md's command for a machine without a network, and the code of
    docs/what_ddp_changes.md: two ranks that measure other losses stop together."""
    [code] = re.findall(r'python -c "(.*load_data.*)"', PAGES[ROOT / "slurm" / "README.md"])
    exec(code.replace("'--dataset', 'cifar10'", ", ".join(f"'{flag}'" for flag in fashion)))
    codes = CODE.findall(PAGES[ROOT / "docs" / "what_ddp_changes.md"])
    stop, *codes = [code for language, script, code in codes if language and not script]
    codes = [LOOP, textwrap.indent(stop, "    "), "model(torch.ones(2)).sum().backward()\n", *codes]
    Path("loop.py").write_text("".join(codes) + "print(epoch, model.weight.tolist(), batch_size)")
    lines = done(by_hand("loop.py", processes=2)).split("\n")
    assert lines[0] == lines[-2] and lines[0][0] == "5"

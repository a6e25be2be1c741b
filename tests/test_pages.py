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
INSTEAD = [  # what is run instead of a part of a command, and why
    (r"^python3 -m venv .*/bin/python ", "python ", "an environment takes 5 GB"),
    (r"HOST", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "likewise"),
    (r"23456|29400", "{port}", "somebody may have it"),
    (r" --amp|--image-size 224", "", "minutes on a CPU"),
    (r"--batch-size \d+", "--batch-size 16", "the small data sets are smaller"),
    (r"^(?!.*--dataset)(.*)", r"\1 --dataset fashion-mnist", "CIFAR-10 takes a network"),
    (r"--epochs [1-9]\d*", "", "minutes on a CPU"),
    (r"^(?!.*--epochs)(?!.*--resume)(.*)", r"\1 --epochs 1", "likewise"),
    (r"^(?!.*--epochs)(.*)", r"\1 --epochs 2", "a resumed run has something to do"),
    (r"$", " --data-dir {data}", "a download takes a network"),
]
NOT_RUN = [  # beginnings of commands, and why they are not run here
    (r"python3 -m venv .* -m pytest$", "it would run this test"),
    (r".* my_(training|script)\.py", "test_example and test_minimal.py do"),
    (r"(sbatch|srun|scontrol|squeue|scancel|export) ", "test_slurm.py does, on a cluster"),
    (r".*(python\S*|bash) (benchmarks/|-m pytest .* tests/)", "hours, or what runs anyhow"),
    (
        r"(mpirun|docker|apptainer|kubectl|nvidia-smi|source|pip|for pid in) |  |done|#",
        "no training",
    ),
]
TRAINS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:torchrun (.*)|python3? |.*/python )(train_\w+\.py)(.*)")
ORDER = re.split("\n## From", README)[0]  # its commands run one after the other


def commands(text):
    """Those of each block of a page, and those within sentences one by one."""
    found = [code[2].splitlines() for code in CODE.findall(text) if code[0] == "sh"]
    found += [[line] for line in re.findall(r"`([^`\n]+)`", CODE.sub("", text))]
    return [tuple(filter(TRAINS.match, lines)) for lines in found if any(map(TRAINS.match, lines))]


RUN = {lines: None for text in PAGES.values() for lines in commands(text.removeprefix(ORDER))}


def test_pages():
    """Short; each link leads to a file, and to a heading in it; each command is run, or listed."""
    assert len(README.splitlines()) <= 140 and len(README.split()) <= 1200
    plain = {page: CODE.sub("", text) for page, text in PAGES.items()}
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", plain[page]):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            titles = re.findall(r"^#+ (.*)", plain[path].lower() if anchor else "# ", re.M)
            titles = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
            assert path.exists() and anchor in titles, (page, target)
        for line in "".join(code[2] for code in CODE.findall(text) if code[0] == "sh").splitlines():
            assert any(re.match(no, line) for no, _ in NOT_RUN) != bool(TRAINS.match(line)), line
    assert sum(len(text.split()) for text in PAGES.values()) <= 11_500


def test_quotes():
    """What "```python train_dp.py" begins stands so in this script; README.md's diff is the real
    one, without some of the unchanged lines."""
    for page, text in PAGES.items():
        for _, name, content in CODE.findall(text):
            assert not name or f"\n{content}" in (ROOT / name).read_text(), (page, content)
    [diff] = [code[2].splitlines() for code in CODE.findall(README) if code[0] == "diff"]
    old, new = ((ROOT / "minimal" / f"{n}.py").read_text().splitlines() for n in ("one_gpu", "ddp"))
    lines = list(difflib.unified_diff(old, new, n=999, lineterm=""))[3:]
    assert [x for x in diff if x[0] in "+-"] == [x for x in lines if x[0] in "+-"]
    rest = iter(lines)
    assert all(line in rest for line in diff)  # in this order


def try_all(lines, data):
    """Commands one after the other, those of two machines at once: what each has printed. torchrun
    would import torch as well: only its flags are read, and its two processes started."""
    for path in ROOT.glob("train_*.py"):
        text = path.read_text().replace("synthetic(10_000", "synthetic(96")
        Path(path.name).write_text(text.replace("synthetic(2_000", "synthetic(40"))
    Path("my_images").symlink_to(data / "pictures")
    texts, jobs, values = [], [], {"data": data, "folder": os.getcwd()}
    for i, line in enumerate(lines):
        values["port"] = values["port"] if jobs else helpers.free_port()
        for pattern, other, _ in INSTEAD:
            line = re.sub(pattern, other.format(**values), line)
        torchrun, name, flags = TRAINS.match(line).groups()
        if torchrun is None:
            jobs.append(Warm(name, shlex.split(flags, comments=True), f"{i}.log"))
        elif get_args_parser().parse_args([*torchrun.split(), name]).node_rank == 0:
            jobs += by_hand(name, *shlex.split(flags), processes=1 + ("node 1 " not in torchrun))
        if " --rank 0" not in line or " --rank 1" not in "".join(lines[i + 1 : i + 2]):
            texts.append(done(jobs) if jobs else "")
            jobs = []
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("lines", RUN, ids=lambda lines: re.sub(r"\W+", "-", lines[0])[-40:])
def test_commands(lines, data):
    try_all(lines, data)
    assert any("--epochs 0" in line for line in lines) or list(Path().glob("runs/*/model.pt"))


@pytest.mark.slow
def test_readme_in_order(data):
    """Its first commands, one after the other in one folder; the output is of the printed form."""
    lines = list(sum(commands(ORDER), ()))
    [mine] = [i for i, line in enumerate(lines) if "runs/mine" in line]
    lines.insert(mine + 1, lines[mine] + " --resume")
    texts = try_all(lines, data)
    assert "1 epochs and 0 steps are done" in texts[mine + 1] and len(metrics("runs/mine")) == 2
    [shown] = [code[2] for code in CODE.findall(ORDER) if not code[0]]
    [text] = [text for text in texts if "runs/cpu" in text]
    masks = [re.sub(r"\S*\d\S*|host \w+", "#", text).split() for text in (text, shown)]
    assert masks[0] == masks[1]


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
    Path("texts", "a.md").write_text(README[:6500] * 2)


def train(output, *flags, name="ddp_torchrun", processes=2, killed=()):
    """Run my_script.py, which is killed when it prints each of `killed`: what it has printed."""
    flags, printed = [*flags, "--resume", "--output", output], ""
    options = {"processes": 1 if name == "single" else processes, "path": "my_script.py"}
    for line in killed:
        jobs = helpers.start(name, *flags, **options)
        helpers.wait_for(line, *jobs)
        helpers.kill_all(jobs)
        printed += helpers.logs(jobs)
    return printed + run(name, *flags, **options)


def test_example():
    """It learns; a run that is killed, one with data that are not in memory, and one whose layers
    keep no activations have the same losses."""
    for title in "killed", "whole", "Data larger than memory", "Less memory for activations":
        copy(*[title] * (" " in title), name="single", rooms=True)
        text = Path("texts", "a.md").read_bytes()
        middle = (len(text) - 1) // 64 * 9 // 10 * 64
        Path("texts", "train.bin").write_bytes(text[: middle + 1])
        Path("texts", "test.bin").write_bytes(text[middle:])
        killed = ["epoch 2/2 step 3/"] if title == "killed" else []
        train(title, *FLAGS, "--checkpoint-minutes", 0, name="single", killed=killed)
        close(title, "killed", 1e-6)
    assert same(weights("killed"), weights("whole"))
    first, last = metrics("whole")
    assert last["test_loss"] < first["test_loss"] and last["test_accuracy"] > 0.1


SHORT = ["--batch-size", 16, "--epochs", 3, "--lr", 0.001, "--log-every", 10]
KILLED = ["epoch 1/3 step 20/", "epoch 2/3 step 30/"]
EXACT, CLASSES = "A loss that ignores labels", "Imbalanced classes"
ADDED = ["The best model", "Early stopping", "The norm of the gradient", "TensorBoard", CLASSES]
ADDED += ["An average of the weights", "Predictions of all test samples"]
FROZEN = "Pretrained weights and frozen layers"
WRITER = """
class SummaryWriter:
    def __init__(self, folder, purge_step): self.flush = list
    def add_scalar(self, *event): print("event", *event, flush=True)
"""


@pytest.mark.slow
def test_recipes(fashion):
    """A killed run leaves the same files and events; only the head of a frozen network is trained;
    a run that stalls is stopped."""
    changes = {"train_set.targets": "train_set.tensors[1]", '(weights="DEFAULT")': "()"}
    changes["from torch.utils.tensorboard import SummaryWriter\n"] = WRITER
    copy(*ADDED, FROZEN, **changes)
    flags, names = [*fashion, *SHORT, "--repeat", 3], ("model.pt", "best.pt", "ema.pt")
    texts = [train("whole", *flags)]
    texts.append(train("killed", *flags, "--checkpoint-minutes", 0, killed=KILLED))
    events = [set(re.findall(r"event .*|gradient norm .*", text)) for text in texts]
    assert events[0] == events[1] and len(events[0]) == 3 * (4 + 4 + 1)
    whole, killed = ([weights(output, name) for name in names] for output in ("whole", "killed"))
    assert all(map(same, whole, killed)) and not same(whole[0], whole[2])
    losses = [row["test_loss"] for row in metrics("whole")]
    assert same(*whole[:2]) == (losses[2] == min(losses))
    torch.manual_seed(76)
    backbone = models.resnet18().state_dict()
    names = [name for name in backbone if not name.startswith("fc.")]
    assert all(torch.equal(backbone[name], whole[0][f"backbone.{name}"]) for name in names)
    for epochs in (8, 9):  # the second run is stopped before it begins
        train("stalled", *flags, "--lr", 0, "--epochs", epochs, processes=epochs - 7)
        os.rename("stalled/predictions.pt", f"{epochs}.pt")
        assert len(metrics("stalled")) == 6
    assert torch.allclose(weights(".", "8.pt"), weights(".", "9.pt"))


CONTRAST = "A contrastive loss over the whole batch"
ALIKE = {  # recipe: what the data set needs, and a mistake
    "": ("", "", "ddp(inputs)", "model(inputs)"),
    EXACT: ("images, labels\n", "images, labels.where(labels > 6, -100)\n", "* own *", "*"),
    CLASSES: ("train_set.targets", "train_set.tensors[1]", "drawn[self.rank ::", "drawn[0 ::"),
    CONTRAST: ("normalize(outputs", "normalize(outputs.view(-1, 2, 5)", "dist.get_rank() *", "0 *"),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ALIKE)
def test_alike(fashion, recipe):
    """On one process, on two, and in micro-batches but for the contrasts; not with the mistake."""
    (old, new, right, wrong), losses = ALIKE[recipe], []
    flags = [*fashion, *SHORT, "--epochs", 1] if recipe else [*FLAGS, "--dropout", 0]
    for mistake, processes, parts in (right, 1, 1), (right, 2, 1), (right, 2, 2), (wrong, 2, 1):
        copy(*filter(None, [recipe]), rooms=not recipe, **{old: new, right: mistake})
        train(f"{len(losses)}", *flags, "--accumulate", parts, processes=processes)
        losses.append(metrics(f"{len(losses)}")[-1]["train_loss"])
    alike = [loss == pytest.approx(losses[0], rel=1e-4) for loss in losses]
    assert alike == [True, True, recipe != CONTRAST, False], losses


@pytest.mark.slow
def test_half_precision(fashion):
    """float16 with a scaler, and gradients all-reduced in bfloat16, are near the script's run; with
    the scaler switched off it is that run."""
    [float16] = [part.split("\n")[0] for part in SECTIONS if "torch.amp.GradScaler(" in part]
    run("ddp_torchrun", *fashion, *SHORT, "--output", "script", processes=2)
    amp = ["--clip-norm", 100, "--amp", "--accumulate", 2]
    hook = "All-reduce in bfloat16"
    for output, title, flags in ("off", float16, []), ("on", float16, amp), ("hook", hook, []):
        copy(title)
        train(output, *fashion, *SHORT, *flags)
        close(output, "script", 0.02, keys=["train_loss"])
        assert same(weights(output), weights("script")) == (output == "off")


def test_load_data_alone(fashion):
    """The command of slurm/README.md for machines without a network."""
    [code] = re.findall(r'python -c "(.*load_data.*)"', PAGES[ROOT / "slurm" / "README.md"])
    exec(code.replace("'--dataset', 'cifar10'", ", ".join(f"'{flag}'" for flag in fashion)))


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


def test_own_loop():
    """The code of docs/what_ddp_changes.md: two ranks that measure other losses stop together."""
    codes = CODE.findall(PAGES[ROOT / "docs" / "what_ddp_changes.md"])
    stop, *codes = [code for language, script, code in codes if language and not script]
    codes = [LOOP, textwrap.indent(stop, "    "), "model(torch.ones(2)).sum().backward()\n", *codes]
    Path("loop.py").write_text("".join(codes) + "print(epoch, model.weight.tolist(), batch_size)")
    lines = done(by_hand("loop.py", processes=2)).split("\n")
    assert lines[0] == lines[-2] and lines[0][0] == "5"

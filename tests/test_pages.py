"""The pages are true: commands run, links hold, examples train, recipes do what they say."""

import difflib
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, Cold, Warm, close, done, free_port, kill_all, logs, metrics, run
from helpers import same, same_run, script, start, wait_for, weights
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
    (r" --amp|--image-size 224", "", "minutes on a CPU"),
    (r"HOST", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "likewise"),
    (r"23456|29400", "{port}", "somebody may have it"),
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
    (r"(mpirun|docker|apptainer|kubectl|nvidia-smi|sudo|pip|for pid in) |  |done", "not installed"),
    (r"source |#", "it trains nothing"),
]
TRAINS = re.compile(r"([A-Z_]+=\S+ )*(python3?|torchrun) .*\btrain_\w+\.py")
ORDER = re.split("\n## From", README)[0]  # its commands run one after the other
REST = [README.removeprefix(ORDER), *(text for text in PAGES.values() if text != README)]


def lists(text):
    """The commands of each block of a page, and those within sentences, one by one."""
    found = [code[2].splitlines() for code in CODE.findall(text) if code[0] == "sh"]
    return found + [[line] for line in re.findall(r"`([^`\n]+)`", CODE.sub("", text))]


RUN = [tuple(filter(TRAINS.match, lines)) for text in REST for lines in lists(text)]
RUN = [lines for lines in dict.fromkeys(RUN) if lines]


def test_pages():
    """Short; each link leads to a file, and to a heading in it; each command is run, or listed."""
    headings = {}
    assert len(README.splitlines()) <= 140 and len(README.split()) <= 1200
    assert sum(len(text.split()) for text in PAGES.values()) <= 11_000
    for page, text in PAGES.items():
        titles = re.findall(r"^#+ (.*)", CODE.sub("", text), re.M)
        titles = [re.sub(r"\]\(.*?\)|[^\w\- ]", "", title.lower()) for title in titles]
        headings[page] = {title.replace(" ", "-") for title in titles}
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", CODE.sub("", text)):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            assert path.exists() and (not anchor or anchor in headings[path]), (page, target)
        for line in sum(
            [code[2].splitlines() for code in CODE.findall(text) if code[0] == "sh"], []
        ):
            assert any(re.match(no, line) for no, _ in NOT_RUN) != bool(TRAINS.match(line)), line


def test_quotes():
    """What "```python train_dp.py" begins stands so in this script; README.md's diff is the real
    one, without unchanged lines."""
    for page, text in PAGES.items():
        for language, names, content in CODE.findall(text):
            for name in names.split():
                assert f"\n{content}" in (ROOT / name).read_text(), (page, content)
    [quote] = [code[2].splitlines() for code in CODE.findall(README) if code[0] == "diff"]
    files = [
        (ROOT / "minimal" / name).read_text().splitlines() for name in ("one_gpu.py", "ddp.py")
    ]
    lines = list(difflib.unified_diff(*files, n=999, lineterm=""))[3:]
    assert [x for x in quote if x[0] in "+-"] == [x for x in lines if x[0] in "+-"]
    rest = iter(lines)
    assert all(line in rest for line in quote)  # in this order


def launch(line, port):
    """The processes of a command. What torchrun does is parsing its flags, and importing torch."""
    words, place = shlex.split(line, comments=True), {}
    while "=" in words[0]:
        place |= [words.pop(0).split("=", 1)]
    if words[0] != "torchrun":
        return [Warm(words[1], words[2:], f"{time.monotonic_ns()}.log", place)]
    args = get_args_parser().parse_args(words[1:])
    count = 1 if args.nproc_per_node == "1" else 2
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": count}
    place |= {"WORLD_SIZE": count * int(args.nnodes.split(":")[0])}
    place |= {"TORCHELASTIC_MAX_RESTARTS": args.max_restarts}
    ranks = [{"RANK": args.node_rank * count + i, "LOCAL_RANK": i} for i in range(count)]
    words = args.training_script, args.training_script_args
    return [Warm(*words, f"{time.monotonic_ns()}.log", place | rank) for rank in ranks]


def try_all(lines, data):
    """One after the other, those of two machines at once. Returns what each has printed."""
    for path in ROOT.glob("train_*.py"):
        text = path.read_text().replace("synthetic(10_000", "synthetic(96")
        Path(path.name).write_text(text.replace("synthetic(2_000", "synthetic(40"))
    Path("my_images").symlink_to(data / "pictures")
    texts, jobs, port = [], [], free_port()
    for line, following in zip(lines, [*lines[1:], ""]):
        for pattern, other, _ in INSTEAD:
            line = re.sub(pattern, other.format(data=data, folder=os.getcwd(), port=port), line)
        jobs += launch(line, port)
        if "rank 0" in line and "rank 1" in following:
            continue
        if "--node-rank 0" in line:
            jobs += launch(line.replace("--node-rank 0", "--node-rank 1"), port)
        texts.append(done(jobs))
        jobs, port = [], free_port()
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("lines", RUN, ids=lambda lines: re.sub(r"\W+", "-", lines[0])[-40:])
def test_commands(lines, data):
    try_all(lines, data)
    names = [] if "--epochs 0" in lines[0] else re.findall(r"train_\w+", "".join(lines))
    assert {path.parent.name for path in Path().glob("runs/*/model.pt")} >= set(names)


@pytest.mark.slow
def test_readme_in_order(data):
    """Its first commands, one after the other in one folder; the output is of the printed form."""
    lines = [line for lines in lists(ORDER) for line in lines if TRAINS.match(line)]
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
    text = Path(script(name)).read_text()
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
        jobs = start(name, *flags, **options)
        wait_for(line, *jobs)
        kill_all(jobs)
        printed += logs(jobs)
    return printed + run(name, *flags, **options)


@pytest.mark.parametrize("name", ["single", pytest.param("ddp_torchrun", marks=pytest.mark.slow)])
def test_example(name):
    """It learns, and a run that is killed twice ends as one that is not."""
    copy(name=name, rooms=True)
    killed = "epoch 1/2 step 5/", "epoch 2/2 step 3/"
    train("killed", *FLAGS, "--checkpoint-minutes", 0, name=name, killed=killed)
    train("whole", *FLAGS, name=name)
    first, last = metrics("whole")
    assert last["test_loss"] < first["test_loss"] and last["test_accuracy"] > 0.1
    same_run("killed", "whole", 2)


SHORT = ["--batch-size", 16, "--epochs", 3, "--lr", 0.01, "--log-every", 10]
KILLED = ["epoch 1/3 step 20/", "epoch 2/3 step 30/"]
ADDED = ["The best model", "Early stopping", "The norm of the gradient", "TensorBoard"]
ADDED += ["An average of the weights", "Predictions of all test samples"]
WRITER = """
class SummaryWriter:
    def __init__(self, folder, purge_step): print("purge", purge_step)
    def add_scalar(self, name, value, step): print("event", name, step, value, flush=True)
    def flush(self): pass
"""


@pytest.mark.slow
def test_recipes(fashion):
    """A killed run leaves the same files and events; one that stalls is stopped."""
    copy(*ADDED, **{"torch.utils.tensorboard": "writer"})
    Path("writer.py").write_text(WRITER)
    printed = train("whole", *fashion, *SHORT)
    again = train("killed", *fashion, *SHORT, "--checkpoint-minutes", 0, killed=KILLED)
    events = [dict(re.findall(r"event (\w+ \d+) (.*)", text)) for text in (printed, again)]
    assert events[0] == events[1] and len(events[0]) == 3 * (4 + 1)
    begins = re.findall(r"purge (\d+)\n(?:(?!event).*\n)*event \w+ (\d+)", again)
    assert [int(step) - int(begin) for begin, step in begins] == [9] * 3
    assert len(re.findall("gradient norm", printed)) == 12
    for name in ("best.pt", "ema.pt", "model.pt"):
        assert same(weights("whole", name), weights("killed", name))
    losses = [row["test_loss"] for row in metrics("whole")]
    assert same(weights("whole", "best.pt"), weights("whole")) == (losses[2] == min(losses))
    assert not same(weights("whole", "ema.pt"), weights("whole"))
    predictions = []
    for epochs in (8, 9):  # the second run is stopped before it begins
        train("stalled", *fashion, *SHORT, "--lr", 0, "--epochs", epochs, processes=epochs - 7)
        predictions.append(weights("stalled", "predictions.pt"))
        assert len(metrics("stalled")) == 6
    assert torch.allclose(*predictions) and len(predictions[0]) == 203


PAIRS = {
    "return self.fc3(F.relu(self.fc2(x)))": "return self.fc3(F.relu(self.fc2(x))).view(-1, 2, 5)"
}
PAIRS |= {"(outputs.argmax(1) == labels).sum()": "labels.sum() * 0"}
EXACT, CLASSES = "A loss that ignores labels", "Imbalanced classes"
CONTRAST = "A contrastive loss over the whole batch"
ALIKE = {  # recipe: changes, and one that breaks it on two processes
    "": ({}, {"ddp(inputs)": "model(inputs)"}),
    EXACT: (
        {"images, labels\n": "images, labels.masked_fill(labels < 7, -100)\n"},
        {" * own *": " *"},
    ),
    CLASSES: ({"train_set.targets": "train_set.tensors[1]"}, {"drawn[self.rank ::": "drawn[0 ::"}),
    CONTRAST: (PAIRS, {"first = dist.get_rank() *": "first = 0 *"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ALIKE)
def test_alike(fashion, recipe):
    """On one process, on two and in parts; not with a mistake, and contrasts not in parts."""
    (changes, wrong), flags = ALIKE[recipe], [*fashion, *SHORT, "--epochs", 2, "--lr", 1e-3]
    keys = ["train_loss"] if recipe == CONTRAST else ["train_loss", "test_loss"]
    for output, processes, parts in ("one", 1, 1), ("two", 2, 1), ("parts", 2, 2), ("wrong", 2, 1):
        copy(*[recipe] * bool(recipe), **changes, **(wrong if output == "wrong" else {}))
        train(output, *flags, "--accumulate", parts, processes=processes)
    close("two", "one", keys=keys)
    for output in ["parts", "wrong"] if recipe == CONTRAST else ["wrong"]:
        with pytest.raises(AssertionError):
            close(output, "one", keys=keys)
    if recipe != CONTRAST:
        close("parts", "one")


@pytest.mark.slow
def test_frozen(fashion):
    """Only the head is trained, and a killed run ends as one that is not; classes drawn alike."""
    changes = ALIKE[CLASSES][0] | {'resnet18(weights="DEFAULT")': "resnet18()"}
    copy("Pretrained weights and frozen layers", CLASSES, **changes)
    flags = [*fashion, *SHORT, "--repeat", 3]  # channels
    train("whole", *flags)
    train("killed", *flags, "--checkpoint-minutes", 0, killed=KILLED)
    same_run("killed", "whole", 3)
    torch.manual_seed(76)
    backbone, trained = models.resnet18().state_dict(), weights("whole")
    names = [name for name in backbone if not name.startswith("fc.")]
    assert all(torch.equal(backbone[name], trained[f"backbone.{name}"]) for name in names)
    losses = [row["train_loss"] for row in metrics("whole")]
    assert len(trained) == len(names) + 2 and losses[2] < losses[0]


@pytest.mark.slow
def test_larger_data_and_models():
    """The example has the same losses with data from a file that is not in memory, and where a
    layer runs again in the backward pass instead of keeping its activations."""
    head = "self.head = nn.Linear(128, 256)"
    hook = "; self.layers.layers[0].register_forward_pre_hook(lambda *_: print('forward'))"
    counts, less = [], "Less memory for activations"
    for output, *titles in ["plain"], ["file", "Data larger than memory"], ["less", less]:
        copy(*titles, name="single", rooms=True, **{head: head + hook})
        text = Path("texts", "a.md").read_bytes()
        middle = (len(text) - 1) // 64 * 9 // 10 * 64
        Path("texts", "train.bin").write_bytes(text[: middle + 1])
        Path("texts", "test.bin").write_bytes(text[middle:])
        counts.append(train(output, *FLAGS, name="single").count("forward"))
    same_run("file", "plain", 2)
    close("less", "plain", 1e-6)
    assert counts[0] == counts[1] < 0.7 * counts[2]


@pytest.mark.slow
def test_half_precision(fashion):
    """Gradients all-reduced in bfloat16, and float16 with a scaler, are near the script's run; with
    the scaler switched off it is that run."""
    [float16] = [part.split("\n")[0] for part in SECTIONS if "torch.amp.GradScaler(" in part]
    flags = [*fashion, *SHORT, "--lr", 1e-3]
    run("ddp_torchrun", *flags, "--output", "script", processes=2)
    copy(float16)
    train("off", *flags)
    assert same(weights("off"), weights("script"))
    train("on", *flags, "--clip-norm", 100, "--amp", "--accumulate", 2)
    copy("All-reduce in bfloat16")
    train("hook", *flags)
    for output in "on", "hook":
        close(output, "script", 0.02, keys=["train_loss"])
        assert not same(weights(output), weights("script"))


def test_load_data_alone(fashion):
    """The command of slurm/README.md for machines without a network."""
    [line] = {line for [line] in lists(PAGES[ROOT / "slurm" / "README.md"]) if "load_data" in line}
    line = line.replace("'--dataset', 'cifar10'", ", ".join(f"'{flag}'" for flag in fashion))
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done([Cold(["bash", "-c", line], "log", env=os.environ | place)])

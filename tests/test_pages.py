"""The pages are true: commands run, links hold, examples train, recipes do what they say."""

import os
import re
import sys
from pathlib import Path

import pytest
from helpers import *

FOLDERS = [ROOT, ROOT / "docs", ROOT / "slurm", ROOT / "benchmarks"]
PAGES = {path: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.md"))}
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
README, GUIDE = PAGES[ROOT / "README.md"], PAGES[ROOT / "docs" / "your_model_and_data.md"]
RECIPES = GUIDE + PAGES[ROOT / "docs" / "recipes.md"]
DOCS = "".join(text for path, text in PAGES.items() if path.parent.name == "docs")
SECTIONS = re.split(r"^##+ ", DOCS, flags=re.M)  # each begins with its title
ROOMS = re.findall(r"^```python\n((?:BLOCKS|def load)(?:.*\n)*?)```", GUIDE, re.M)
FLAG = re.search(r"`(add\(.+\))`", GUIDE)[1]
FLAGS = re.search(r"my_training\.py --dataset tests (--.*)", GUIDE)[1].split()
FLAGS = ["--dataset", "texts", "--epochs", 2, "--batch-size", 16, "--log-every", 1, *FLAGS]
INSTEAD = [  # what is run instead of a part of a command, and why
    (r"^python3 -m venv .*/bin/python ", "python ", "an environment takes 5 GB"),
    (r"HOST", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "one machine plays both"),
    (r"23456|29400", "{port}", "somebody may have it"),
    (r"(--nnodes 2 .*)--nproc-per-node 4", r"\1--master-port {port}", "eight need more cores"),
    (r"--nproc-per-node (4|gpu)", "--nproc-per-node 2", "four need more cores"),
    (r"--dataset synthetic (.* --batch-size) \d+", r"\1 128", "minutes on a CPU"),
    (r"^(?!.*--dataset)(.*)", r"\1 --dataset fashion-mnist", "CIFAR-10 takes a network"),
    (r"--epochs 20 --output runs/\w+-gpus?", "--epochs 1", "minutes on a CPU"),
    (r"^(?!.*--epochs)(.*)", r"\1 --epochs 1", "ten epochs would take long here"),
    (r"$", " --data-dir {data}", "a download takes a network"),
]
NOT_RUN = [  # beginnings of commands, and why they are not run here
    (r"python3 -m venv .* -m pytest$", "it would run this test"),
    (r".* my_(training|script)\.py", "test_example and test_own_loop do"),
    (r"(sbatch|srun|scontrol|squeue|export) ", "test_slurm.py does, on a cluster"),
    (r".*(python\S*|bash) (benchmarks/|-m pytest .* tests/)", "hours, or what runs anyhow"),
    (r"(mpirun|docker|apptainer|kubectl|nvidia-smi|sudo|pip|for pid in) |  |done", "not installed"),
]
TRAINS = re.compile(r"([A-Z_]+=\S+ )*(python3?|torchrun) .*\btrain_\w+\.py")
CODES = [code for text in PAGES.values() for code in CODE.findall(text)]
BLOCKS = [content.splitlines() for language, _, content in CODES if language == "sh"]
LINES = [(line,) for text in PAGES.values() for line in re.findall(r"`([^`\n]+)`", text)]
RUN = [tuple(line for line in lines if TRAINS.match(line)) for lines in BLOCKS + LINES]
RUN = [lines for lines in dict.fromkeys(RUN) if lines]
PLACE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_pages():
    """Short; each link leads to a file, and to a heading in it; each command is run, or listed."""
    headings = {}
    for page, text in PAGES.items():
        assert len(text.splitlines()) <= (170 if text == README else 200), page
        titles = re.findall(r"^#+ (.*)", CODE.sub("", text), re.M)
        titles = [re.sub(r"\]\(.*?\)|[^\w\- ]", "", title.lower()) for title in titles]
        headings[page] = {title.replace(" ", "-") for title in titles}
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", CODE.sub("", text)):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            assert path.exists() and (not anchor or anchor in headings[path]), (page, target)
    for line in sum(BLOCKS, []):
        listed = any(re.match(start, line) for start, _ in NOT_RUN)
        assert listed != any(line in lines for lines in RUN), line


def side(diff, sign):
    return "".join(line[1:] for line in diff.splitlines(True) if line[0] in (" ", sign))


def test_quotes():
    """What "```python train_dp.py" begins stands so in this script, as any diff's old lines do."""
    scripts = {path.name: path.read_text() for path in ROOT.glob("train_*.py")}
    for page, text in PAGES.items():
        for language, names, content in CODE.findall(text):
            assert names or page.stem != "what_ddp_changes" or language not in ("python", "diff")
            for name, sign in zip(names.split(), "-+"):
                quote = side(content, sign) if language == "diff" else content
                assert f"\n{quote}" in scripts[name], (page, quote)
            if language == "diff" and not names and text != README:
                assert any(side(content, "-") in text for text in scripts.values()), (page, content)


@pytest.mark.slow
@pytest.mark.parametrize("lines", RUN, ids=lambda lines: re.sub(r"\W+", "-", lines[0])[-40:])
def test_commands(lines, data):
    """The commands of a block, all at once: they are those of different scripts or machines."""
    for path in ROOT.glob("train_*.py"):
        Path(path.name).symlink_to(path)
    Path("my_images").symlink_to(data / "pictures")
    values, jobs = {"folder": os.getcwd(), "data": data, "port": free_port()}, []
    for i, line in enumerate(lines):
        for pattern, other, _ in INSTEAD:
            line = re.sub(pattern, other.format(**values), line, count=1)
        jobs.append(Cold(["bash", "-c", line], f"{i}.log", env=os.environ | PLACE))
    statuses, text = finish(jobs)
    assert not any(statuses), text
    names = [] if "--epochs 0" in lines[0] else re.findall(r"train_\w+", "".join(lines))
    assert {path.parent.name for path in Path().glob("runs/*/model.pt")} == set(names)


def test_own_loop():
    """Both sides of README.md's diff run; the losses agree where the order does not count."""
    [content] = [code[2] for code in CODE.findall(README) if code[0] == "diff"]
    for sign, name in ("-", "old"), ("+", "new"):
        text = side(content, sign).replace("10_000", "256")
        Path(f"{name}.py").write_text(text.replace("=400", "=32"))
        Path(f"{name}_whole.py").write_text(text.replace("=400", "=256"))

    def losses(name, processes=1):
        text = done(by_hand(f"{name}.py", processes=processes))
        found = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
        assert len(found) == 3 and found[2] < found[0] and "0.weight" in weights(".")
        return pytest.approx(found, abs=1.5e-4)  # four digits are printed

    assert losses("old_whole") == losses("new_whole").expected == losses("new_whole", 2)
    assert losses("new") == losses("new", 2).expected


def copy(*titles, name="ddp_torchrun", rooms=False, **changes):
    """my_script.py: a script with these recipes, in its rooms the example, and other changes."""
    text = Path(script(name)).read_text()
    ends = ("# ---- The data: ", "def augment") if rooms else ()
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
        assert old in text
        text = text.replace(old, new)
    Path("my_script.py").write_text(text)
    Path("texts").mkdir(exist_ok=True)
    Path("texts", "a.md").write_text(GUIDE[:6500] * 2)


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


LESS = "Less memory for activations"
SHORT = ["--batch-size", 16, "--epochs", 3, "--lr", 0.01, "--log-every", 10]
TRACKER = """
def show(name, value, step): print("event", name, step, value, flush=True)
def init(id, resume, **options): print(id, resume)
def log(values, step): [show(f"wandb_{name}", values[name], step) for name in values]
class SummaryWriter:
    add_scalar, flush = staticmethod(show), dict
    def __init__(self, folder, purge_step): print("purge", purge_step)
"""


@pytest.mark.slow
def test_recipes(fashion):
    """A killed run leaves the same files and events; one that stalls is stopped."""
    copy(*re.findall(r"\n## (.*)\n", RECIPES.split("\n# Recipes")[1])[:7],
         **{"torch.utils.tensorboard": "wandb"})  # fmt: skip
    Path("wandb.py").write_text(TRACKER)
    printed = train("whole", *fashion, *SHORT)
    killed = ["epoch 1/3 step 20/", "epoch 2/3 step 30/"]
    again = train("killed", *fashion, *SHORT, "--checkpoint-minutes", 0, killed=killed)
    events = [dict(re.findall(r"event (\w+ \d+) (.*)", text)) for text in (printed, again)]
    assert events[0] == events[1] and len(events[0]) == 2 * 3 * (4 + 1)
    begins = re.findall(r"purge (\d+)\n(?:(?!event).*\n)*event \w+ (\d+)", again)
    assert [int(step) - int(begin) for begin, step in begins] == [9] * 3
    assert again.count("killed allow\n") == 3 and len(re.findall("gradient norm", printed)) == 12
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [[], ["A loss that is exact when labels are left out"]])
def test_alike(fashion, recipe):
    """On one process, on two and in parts; with a call past DDP two processes differ."""
    changes, flags = {}, [*FLAGS, "--dropout", 0]
    if recipe:  # the script with labels left out, instead of the example
        changes["images, labels\n"] = "images, labels.masked_fill(labels < 7, -100)\n"
        flags = [*fashion, *SHORT]
    for output, processes, parts in ("one", 1, 1), ("two", 2, 1), ("parts", 2, 2), ("wrong", 2, 1):
        changes["ddp(inputs)"] = "model(inputs)" if output == "wrong" else "ddp(inputs)"
        copy(*recipe, rooms=not recipe, **changes)
        train(output, *flags, "--accumulate", parts, processes=processes)
    close("two", "one")
    close("parts", "one")
    with pytest.raises(AssertionError):
        close("wrong", "one")


@pytest.mark.slow
def test_larger_data_and_models():
    """The example has the same losses with data from a file that is not in memory, and where a
    layer runs again in the backward pass instead of keeping its activations."""
    head = "self.head = nn.Linear(128, 256)"
    hook = "; self.layers.layers[0].register_forward_pre_hook(lambda *_: print('forward'))"
    counts = []
    for output, *titles in ["plain"], ["file", "Data larger than memory"], ["less", LESS]:
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
def test_stream():
    """Each file is read by one worker of one rank, again and again."""
    read = "def read_file(number):\n    yield from synthetic(40, seed=number)\n"
    read += '    print(f"file {number} {os.getpid()}\\n", end="", flush=True)\n\n\ndef load_data('
    source = {"synthetic(10_000, seed=1)": "Stream(range(4))"}
    copy("A stream", **source, **{"100_000": "160", "def load_data(": read})
    flags = ["--dataset", "synthetic", "--workers", 2, "--batch-size", 16, "--epochs", 3]
    found = re.findall(r"file (\d) (\d+)", train("out", *flags))
    assert len(set(found)) == 4 == len({number for number, _ in found}) and len(found) > 8


META = "Recipe: a model that does not fit on the host N times"
PARTS = "Recipe: checkpoints in parts"


@pytest.mark.slow
def test_large_models(fashion):
    """Killed twice, a copy of train_fsdp2.py ends with the weights of the script."""
    flags = [*fashion, *SHORT, "--optimizer", "adam", "--checkpoint-minutes", 0]
    run("fsdp2", *flags, "--output", "script", processes=2)
    for output, *titles in ["meta", META], ["parts", PARTS], ["both", META, PARTS]:
        copy(*titles, name="fsdp2")
        killed = "epoch 1/3 step 20/", "epoch 3/3 step 10/"
        printed = train(output, *flags, name="fsdp2", killed=killed)
        assert re.search("from epoch 1, step [12]1 on", printed)
        assert same(weights(output), weights("script"))
        assert Path(output, "parts-3-0").exists() == (PARTS in titles)
        assert len([*Path(output).glob("parts-*")]) <= 1


@pytest.mark.slow
def test_float16(fashion):
    """With the scaler switched off it is the script's run; with it, nearly."""
    run("ddp_torchrun", *fashion, *SHORT, "--output", "script", processes=2)
    copy("A notebook, and Kaggle's two T4")
    train("off", *fashion, *SHORT)
    assert same(weights("off"), weights("script"))
    flags = [*fashion, *SHORT, "--lr", 1e-3, "--clip-norm", 100]
    train("on", *flags, "--amp", "--accumulate", 2)
    run("ddp_torchrun", *flags, "--output", "float32", processes=2)
    close("on", "float32", 0.01, keys=("train_loss", "test_loss"))


def test_load_data_alone(fashion):
    """The command of slurm/README.md for machines without a network."""
    [line] = [line for (line,) in LINES if re.match("python -c .*load_data", line)]
    line = line.replace("'--dataset', 'cifar10'", ", ".join(f"'{flag}'" for flag in fashion))
    done([Cold(["bash", "-c", line], "log", env=os.environ | PLACE | {"PYTHONPATH": str(ROOT)})])

"""README.md is true: commands run, the diff is the scripts', the example trains, links resolve."""

import difflib
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import *

PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
README = PAGES[0].read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
FLAG = re.search(r"`(add\(.+\))`", README)[1]
FLAGS = re.search(r"my_training\.py --dataset tests (--.*)", README)[1].split()
FLAGS = ["--dataset", "texts", "--epochs", 2, "--batch-size", 16, "--log-every", 1, *FLAGS]
INSTEAD = [  # what is run instead of a part of a command, and why
    (r"^python3 -m venv .*/bin/python ", "python ", "an environment takes 5 GB"),
    (r"HOST", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "one machine plays both"),
    (r"23456|29400", "{port}", "somebody may have it"),
    (r"(--nnodes 2 .*)--nproc-per-node 4", r"\1--master-port {port}", "eight need more cores"),
    (r"--nproc-per-node 4", "--nproc-per-node 2", "four need more cores"),
    (r"^(?!.*--dataset)(.*)", r"\1 --dataset fashion-mnist", "CIFAR-10 takes a network"),
    (r"^(?!.*--epochs)(.*)", r"\1 --epochs 1", "ten epochs would take long here"),
    (r"$", " --data-dir {data}", "a download takes a network"),
]
RUN = [block.splitlines() for block in BLOCKS] + [[x] for x in re.findall(r"`([^`\n]+)`", README)]
TRAINS = re.compile(r"([A-Z_]+=\S+ )*(python3?|torchrun) .*\btrain_\w+\.py")
RUN = [lines for lines in RUN if TRAINS.match(lines[0])]


@pytest.mark.slow
@pytest.mark.parametrize("lines", RUN, ids=lambda lines: re.sub(r"\W+", "-", lines[0])[-40:])
def test_commands(lines, data):
    """The commands of a block, all at once: they are those of different scripts or machines."""
    for path in ROOT.glob("train_*.py"):
        Path(path.name).symlink_to(path)
    Path("my_images").symlink_to(data / "pictures")
    values, jobs = {"folder": os.getcwd(), "data": data, "port": free_port()}, []
    place = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for i, line in enumerate(lines):
        for pattern, other, _ in INSTEAD:
            line = re.sub(pattern, other.format(**values), line, count=1)
        jobs.append(Cold(["bash", "-c", line], f"{i}.log", env=place))
    statuses, text = finish(jobs)
    assert not any(statuses), text
    names = set() if "--epochs 0" in lines[0] else set(re.findall(r"train_\w+", "".join(lines)))
    assert {path.parent.name for path in Path().glob("runs/*/model.pt")} == names


def test_diff():
    """Every line is in the diff of the two files, in order; a line with no sign is in both."""
    texts = [Path(script(name)).read_text().splitlines() for name in ("single", "ddp_torchrun")]
    real = set(difflib.ndiff(*texts))
    hunks = re.search(r"^```diff\n(.*?)^```", README, re.M | re.S)[1].split("\n@@ ")
    for number, hunk in enumerate(hunks, 1):
        head, *lines = hunk.strip().splitlines()
        assert re.match(rf"(@@ )?{number}\b", head) and f"\n{number}. " in README
        for sign, text in zip("-+", texts):
            place = 0
            for line in [line for line in lines if line[0] in (" ", sign)]:
                place = text.index(line[1:], place) + 1
        assert {line[0] + " " + line[1:] for line in lines} <= real


def test_links():
    for page in PAGES:
        text = page.read_text()
        anchors = re.sub(r"[^\w\n# -]", "", text.lower()).replace(" ", "-")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("#"):
                assert f"#-{target[1:]}\n" in anchors, target
            elif not target.startswith("https://"):
                assert (page.parent / target).exists(), target


def example(name, call="ddp(inputs)"):
    """A copy of the script with the README's blocks in its first two rooms, and 13 KB of text."""
    text, rooms = Path(script(name)).read_text(), zip(("model", "data"), PYTHON)
    for (banner, block), end in zip(rooms, ("# ---- The data: ", "def augment")):
        start, end = re.search(rf"# ---- The {banner}: .*\n", text).end(), text.index(end)
        text = text[:start] + block + "\n\n" + text[end:]
    text = text.replace('add("--seed"', f'{FLAG}\nadd("--seed"').replace("ddp(inputs)", call)
    [line] = re.findall(r"(?m)^ +print\((?:finish_epoch|epoch_line).*\n", text)
    text = text.replace(line, line + textwrap.indent(PYTHON[2], line.split("print")[0]))
    Path(f"my_{name}.py").write_text(text)
    Path("texts").mkdir(exist_ok=True)
    Path("texts", "a.md").write_text(README[:13000])
    return f"my_{name}.py"


@pytest.mark.parametrize("name", ["single", pytest.param("ddp_torchrun", marks=pytest.mark.slow)])
def test_example(name):
    """It learns, and a run that is killed twice ends as one that is not."""
    flags = [*FLAGS, "--checkpoint-minutes", 0, "--resume", "--output"]
    options = {"processes": 2 if name in DDP else 1, "path": example(name)}
    run(name, *flags, "whole", **options)
    for line in "epoch 1/2 step 5/", "epoch 2/2 step 3/":
        jobs = start(name, *flags, "killed", **options)
        wait_for(line, *jobs)
        kill_all(jobs)
    run(name, *flags, "killed", **options)
    first, last = metrics("whole")
    assert last["test_loss"] < first["test_loss"] and last["test_accuracy"] > 0.1
    assert same(weights("killed", "best.pt"), weights("killed"))  # the last epoch is the best
    Path("killed", "best.pt").unlink()
    same_run("killed", "whole", 2)


@pytest.mark.slow
def test_is_my_edit_right():
    """Alike on one process, on two and in parts; with a call past DDP, two processes differ."""

    def losses(output, *flags, processes=2, **options):
        flags = [*FLAGS, "--dropout", 0, *flags, "--output", output]
        run("ddp_torchrun", *flags, processes=processes, path=example("ddp_torchrun", **options))
        return [row[key] for row in metrics(output) for key in ("train_loss", "test_loss")]

    one = pytest.approx(losses("one", processes=1), rel=1e-4)
    assert losses("two") == one == losses("parts", "--accumulate", 2)
    assert losses("wrong", call="model(inputs)") != one

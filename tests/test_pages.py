"""The pages are true: commands run, quotes are the scripts', links hold, examples and recipes train.

A block of code whose first line names scripts, as in "```python train_dp.py", is a quote of them.
"""

import os
import re
import struct
import sys
from pathlib import Path

import pytest
from helpers import *

FOLDERS = [ROOT, ROOT / "docs", ROOT / "slurm", ROOT / "benchmarks"]
PAGES = {path: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.md"))}
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
GUIDE, README = ROOT / "docs" / "your_model_and_data.md", PAGES[ROOT / "README.md"]
PYTHON = re.findall(r"^```python\n((?:class T|def load)(?:.*\n)*?)```", PAGES[GUIDE], re.M)
FLAG = re.search(r"`(add\(.+\))`", PAGES[GUIDE])[1]
FLAGS = re.search(r"my_training\.py --dataset tests (--.*)", PAGES[GUIDE])[1].split()
FLAGS = ["--dataset", "texts", "--epochs", 2, "--batch-size", 16, "--log-every", 1, *FLAGS]
INSTEAD = [  # what is run instead of a part of a command, and why
    (r"^python3 -m venv .*/bin/python ", "python ", "an environment takes 5 GB"),
    (r"HOST", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "one machine plays both"),
    (r"23456|29400", "{port}", "somebody may have it"),
    (r"(--nnodes 2 .*)--nproc-per-node 4", r"\1--master-port {port}", "eight need more cores"),
    (r"--nproc-per-node (4|gpu)", "--nproc-per-node 2", "four need more cores"),
    (r"--dataset synthetic (.*) --batch-size 2048", r"\1 --batch-size 128", "minutes on a CPU"),
    (r"^(?!.*--dataset)(.*)", r"\1 --dataset fashion-mnist", "CIFAR-10 takes a network"),
    (r"^(?!.*--epochs)(.*)", r"\1 --epochs 1", "ten epochs would take long here"),
    (r"$", " --data-dir {data}", "a download takes a network"),
]
NOT_RUN = [  # beginnings of commands, and why they are not run here
    (r"python3 -m venv .* -m pytest$", "it would run this test"),
    (r".* my_(training|script)\.py", "test_example and test_own_loop do"),
    (r"(sbatch|srun|scontrol|squeue) ", "test_slurm.py does, on a cluster"),
]
TRAINS = re.compile(r"([A-Z_]+=\S+ )*(python3?|torchrun) .*\btrain_\w+\.py")
BLOCKS = [code[2].splitlines() for text in PAGES.values() for code in CODE.findall(text)
          if code[0] == "sh"]  # fmt: skip
BLOCKS += [[line] for text in PAGES.values() for line in re.findall(r"`([^`\n]+)`", text)]
RUN = [tuple(line for line in lines if TRAINS.match(line)) for lines in BLOCKS]
RUN = [lines for lines in dict.fromkeys(RUN) if lines]


def test_pages():
    """Short, and each link leads to a file, and to a heading in it if it names one."""
    headings = {}
    for page, text in PAGES.items():
        assert len(text.splitlines()) <= (170 if page == ROOT / "README.md" else 200), page
        titles = re.findall(r"^#+ (.*)", CODE.sub("", text), re.M)
        titles = [re.sub(r"\]\(.*?\)|[^\w\- ]", "", title.lower()) for title in titles]
        headings[page] = {title.replace(" ", "-") for title in titles}
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)]+)\)", CODE.sub("", text)):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            if not target.startswith("https://"):
                assert path.exists(), (page, target)
                assert not anchor or anchor in headings[path], (page, target)


def test_quotes():
    """The lines of a quote follow each other in its script; in a diff those of either side."""
    for page, text in PAGES.items():
        for language, names, content in CODE.findall(text):
            assert names or page.stem != "what_ddp_changes" or language not in ("python", "diff")
            for name, sign in zip(names.split(), "-+"):
                lines = [line for line in content.splitlines(True) if line[0] in (" ", sign)]
                quote = "".join(line[1:] for line in lines) if language == "diff" else content
                assert f"\n{quote}" in (ROOT / name).read_text(), (page, quote)


def test_every_command_is_run_or_listed():
    for line in [line for lines in BLOCKS for line in lines if len(lines) > 1]:
        listed = any(re.match(start, line) for start, _ in NOT_RUN)
        assert listed != any(line in lines for lines in RUN), line


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

"""README.md is true: commands run, the diff is the scripts', the example trains, links resolve."""

import difflib
import os
import re
import runpy
import sys
from pathlib import Path

import helpers
import pytest
import torch
from helpers import ROOT, SCRIPTS, Cold, metrics, run, same_run, script

PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
README, BENCHMARKS = (page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README + BENCHMARKS, re.M | re.S)
PROSE = re.sub(r"^```.*?^```\n", "\n", README + BENCHMARKS, flags=re.M | re.S)
PROGRAM = r"([A-Z_]+=\S+ )*(sudo|pip|cp|python3?|torchrun|sbatch|source|squeue|scancel|tail|ss|ip"
PROGRAM += r"|nc|nvidia-smi|py-spy|docker|ruff) [^=]"
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
INLINE = [code for code in re.findall(r"`([^`]+)`", PROSE) if re.match(PROGRAM, code)]
LINES = [line for block in BLOCKS for line in block.splitlines()]
FLAGS = re.search(r"my_training\.py (--.*)", README)[1].split()

ELSEWHERE = {  # commands that are not run by test_commands, and why
    r"^cp |my_training.py": "test_example",
    r"\bsbatch ": "test_sbatch; on a real Slurm: tests/test_slurm.py",
    r"^(squeue|scancel|tail) ": "needs a job in Slurm's queue: tests/test_slurm.py",
    r"^(source|nvidia-smi|ss|ip|nc|py-spy|docker) ": "belongs to a machine",
    r"benchmarks/": "tests/test_benchmarks.py, with fewer images",
    r"-m pytest|^ruff |same_text": "these are the tests, or edit the files",
}
INSTEAD = [  # what is run instead of a part of a command, and why
    (r"^python3 -m venv .*/bin/python ", "python ", "an environment takes 5 GB"),
    (r"HOST", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "one machine plays both"),
    (r"23456", "{port}", "somebody may have it"),
    (r"(--nnodes 2 .*)--nproc-per-node 4", r"\1--master-port {port}", "eight need more cores"),
    (r"--nproc-per-node 4", "--nproc-per-node 2", "four need more cores"),
    (r"^(?!.*--dataset)(.*)", r"\1 --dataset fashion-mnist", "CIFAR-10 takes a network"),
    (r"^(?!.*--epochs)(.*)", r"\1 --epochs 1", "ten epochs would take long here"),
    (r"$", " --data-dir {data}", "a download takes a network"),
]
RUN = [block.splitlines() for block in BLOCKS] + [[code] for code in INLINE]
RUN = [lines for lines in RUN if not any(re.search(p, lines[0]) for p in ELSEWHERE)]


def test_every_command_is_known():
    """Every line of a shell block is a command, and each exception is for something."""
    assert all(re.match(PROGRAM, line) for line in LINES), LINES
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, line) for line in LINES + INLINE), pattern
    for pattern, *_ in INSTEAD:
        assert any(re.search(pattern, line) for block in RUN for line in block), pattern


@pytest.mark.slow
@pytest.mark.parametrize("lines", RUN, ids=lambda lines: re.sub(r"\W+", "-", lines[0])[-40:])
def test_commands(lines, data):
    """The commands of a block, all at once: they are those of different scripts or machines."""
    for path in ROOT.glob("train_*.py"):
        Path(path.name).symlink_to(path)
    Path("my_images").symlink_to(data / "pictures")
    values, jobs = {"folder": os.getcwd(), "data": data, "port": helpers.free_port()}, []
    place = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for i, line in enumerate(lines):
        for pattern, other, _ in INSTEAD:
            line = re.sub(pattern, other.format(**values), line, count=1)
        jobs.append(Cold(["bash", "-c", line], f"{i}.log", env=place))
    statuses, text = helpers.finish(jobs)
    assert not any(statuses), text
    names = set() if "--epochs 0" in lines[0] else set(re.findall(r"train_\w+", "".join(lines)))
    assert {path.parent.name for path in Path().glob("runs/*/model.pt")} == names


def test_sbatch():
    """The files are there, and what stands behind them are flags of the script in them."""
    found = re.findall(r"sbatch( .*)? (slurm/\w+\.sh)(.*)", "\n".join(LINES + INLINE))
    assert len(found) >= 6
    for options, path, flags in found:
        name = re.search(r"(train_\w+)\.py", (ROOT / path).read_text())[1]
        parts = runpy.run_path(str(ROOT / f"{name}.py"), run_name="script")
        parts["parser"].parse_args(flags.split())
        assert set(re.findall(r"--\w+", options)) <= {"--nodes", "--array"}


def test_diff():
    """Every line is in the diff of the two files, in order; a line with no sign is in both."""
    texts = [Path(script(name)).read_text().splitlines() for name in ("single", "ddp_torchrun")]
    real = set(difflib.ndiff(*texts))
    hunks = re.search(r"^```diff\n(.*?)^```", README, re.M | re.S)[1].split("\n@@ ")
    for number, hunk in enumerate(hunks, 1):
        head, *lines = hunk.strip().splitlines()
        assert re.match(rf"(@@ )?{number}\b", head) and f"\n{number}. " in README
        for sign, text in zip("-+", texts):
            places = [text.index(line[1:]) for line in lines if line[0] in (" ", sign)]
            assert places == sorted(places)
        assert {line[0] + " " + line[1:] for line in lines} <= real


def test_limits():
    assert len(README.splitlines()) <= 350
    rows = [line for line in PROSE.splitlines() if line.startswith("|")]
    assert max(len(cell.strip()) for row in rows for cell in row.split(" | ")) < 140
    assert README.split("## When it goes wrong")[1].split("###")[0].count("\n| ") <= 16
    for part in re.split(r"\n\s*\n|\n(?=[-#]|\d+\. )", re.sub(r"\n\|.*", "", PROSE)):
        for sentence in re.split(r"[.:?!]\W*\s", part):
            assert len(sentence.split()) < 25, sentence


def test_links():
    for page, text in zip(PAGES, (README, BENCHMARKS)):
        anchors = re.sub(r"[^\w\n# -]", "", text.lower()).replace(" ", "-")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("#"):
                assert f"#-{target[1:]}\n" in anchors, target
            elif not target.startswith("https://"):
                assert (page.parent / target).exists(), target


def example(name):
    """A copy of the script with the README's blocks in its first two rooms."""
    text = Path(script(name)).read_text()
    for banner, block, end in zip(("model", "data"), PYTHON, ("# ---- The data: ", "def prepare")):
        pattern = rf"(# ---- The {banner}: .*?\n).*?(?={end})"
        text, count = re.subn(pattern, lambda match: match[1] + block + "\n\n", text, flags=re.S)
        assert count == 1
    Path(f"my_{name}.py").write_text(text)
    return f"my_{name}.py"


def learned(output):
    """Both groups had the rate of their own, and the accuracy is what the README says."""
    groups = torch.load(Path(output, "last.pt"), weights_only=True)["optimizer"]["param_groups"]
    assert [group["max_lr"] for group in groups] == [0.001, 0.01]
    assert groups[1]["lr"] == pytest.approx(10 * groups[0]["lr"])
    accuracy = float(re.search(r"accuracy of about (\S+):", README)[1])
    assert metrics(output)[-1]["test_accuracy"] == pytest.approx(accuracy, abs=0.02)


def test_example():
    """On one process all scripts do the same run; killed and resumed, it is the same, too."""
    for name in ("single", "dp", "ddp_multigpu_proc"):
        run(name, *FLAGS, "--output", name, path=example(name))
        learned(name)
        same_run(name, "single", 5)
    jobs = helpers.start("single", *FLAGS, "--output", "killed", path="my_single.py")
    helpers.wait_for("epoch 2:", *jobs)
    helpers.kill_all(jobs)
    run("single", *FLAGS, "--output", "killed", "--resume", path="my_single.py")
    same_run("killed", "single", 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS[2:])
def test_example_on_two_processes(name):
    run(name, *FLAGS, "--output", "out", processes=2, path=example(name))
    learned("out")

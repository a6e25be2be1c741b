"""The tables of benchmarks/, and tests/test_gpu.py, with tiny sizes on a CPU."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import articles
import gpu
import gpu_lm
import harness
import helpers
import image_loading
import peers
import pytest
from helpers import command
from make_images import make_folder
from same_text import ROOT

# The rows of each part with TINY=1.
ROWS = {"articles": 4, "peers": 3, "resnet50": 4, "images": 3, "inputs": 4, "cifar10": 2}
ROWS |= {"resume": 5, "scripts": 10, "small": 3, "large": 6, "saving": 2}


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch):
    monkeypatch.setattr(harness, "FAILED", [])
    monkeypatch.setattr(harness, "NO_TIME", [])
    monkeypatch.setattr(articles, "FAILED", harness.FAILED)
    monkeypatch.setattr(articles, "NO_TIME", harness.NO_TIME)


def gpu_sh(part, *words, fails=False, **environment):
    """What a part of gpu.sh prints; with further words, what the command does. It has to succeed,
    or to fail."""
    environment |= {"TINY": 1, "OUT": Path().resolve()}
    environment.setdefault("PYTHON", sys.executable)
    settings = [f"{name}={value}" for name, value in environment.items()]
    line = "env", *settings, "bash", ROOT / "benchmarks/gpu.sh", part, *words
    if fails:
        with pytest.raises(subprocess.CalledProcessError):
            command(*line)
        return Path(f"{part}.md").read_text()
    text = command(*line)
    return text if words else Path(f"{part}.md").read_text()


def test_workers_fit_into_shared_memory(capsys):
    """Two batches for each worker, and one that is being read."""
    shm = Path("/dev/shm")
    if not shm.exists():
        pytest.skip("no /dev/shm")
    assert gpu.fitting_workers(16, 1) == 16 and capsys.readouterr().err == ""
    assert gpu.fitting_workers(16, 10**15) == 0
    assert "/dev/shm has room for 0 workers, not 16" in capsys.readouterr().err


SLOW = """
import subprocess
for epoch in range(3):
    print(f"epoch {epoch}: loss 1.0 accuracy 0.5 {100 * epoch} images/s", flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("child", child.pid, flush=True)
child.wait()
"""


def running(pid):
    """Whether a process is there, and not only waits to be looked at by its parent."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_what_a_part_could_not_measure(monkeypatch, capsys):
    """A run that the end of the part's time ends counts with what it has printed, and nothing of it
    is left. All runs that are missing, or had an error, are listed; only an error is a failure."""
    Path("slow.py").write_text(SLOW)
    Path("wrong.py").write_text("raise SystemExit('no such flag')")
    monkeypatch.setattr(harness, "PART_SECONDS", time.monotonic() - harness.STARTED + 1)
    assert gpu.rate(Path("slow.py").resolve(), 1) == pytest.approx(2 / (1 / 100 + 1 / 200))
    with pytest.raises(SystemExit, match="3"):
        harness.end_part()
    assert "No time" in (said := capsys.readouterr().out) and "slow.py" in said
    assert math.isnan(gpu.rate(Path("slow.py").resolve(), 1))  # no second is left
    monkeypatch.setattr(harness, "PART_SECONDS", 3600)
    assert math.isnan(gpu.rate(Path("wrong.py").resolve(), 1))
    with pytest.raises(SystemExit, match="1"):
        harness.end_part()
    assert "Failed" in (said := capsys.readouterr().out) and "wrong.py" in said


def test_no_process_of_a_run_is_left():
    """Not those in sessions of their own, nor those whose parent has ended."""
    Path("slow.py").write_text(SLOW)
    text = harness.run(Path("slow.py").resolve(), 1, [], Path("out"), until="child ")
    assert not running(re.search(r"child (\d+)", text)[1])


# As Python, it prints a row. What it has started holds its output, and would be waited for.
STAND_IN = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then
    exit
fi
echo "| a row | of $PART_SECONDS s |"
echo "${PRINTS:-}"
setsid sleep 600 &
echo "child $!"
if [[ -n ${HANGS:-} ]]; then
    sleep 600
fi
exit "${STATUS:-0}"
"""


@pytest.fixture
def stand_in():
    python = Path("python").resolve()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_a_part_ends(stand_in):
    """With all that it has started. What does not end by itself is ended 30 s after its time: that
    is no failure, but of a test that has failed before."""
    for more in {}, {"HANGS": 1, "PART_SECONDS": -29}:
        text = gpu_sh("tests", "small", PYTHON=stand_in, **more)
        names = "tests small" if more else "none"
        assert f"Not finished, for want of time: {names}. Not begun: none.\nFailed: none." in text
        for part in "tests", "small":
            text = Path(f"{part}.md").read_text()
            assert text.count("| a row |") == 1 and ("Ended after 1 s" in text) == bool(more), text
            assert not running(re.search(r"child (\d+)", text)[1])
    gpu_sh("small", fails=True, PYTHON=stand_in, STATUS=1)
    assert "FAILED" in gpu_sh("tests", fails=True, PYTHON=stand_in, PRINTS="FAILED test_x", **more)


@pytest.mark.slow
def test_some_minutes(stand_in):
    """All parts share them, and what is least known comes first; or those that are named do."""
    text = gpu_sh("--minutes", "3", "small", "saving", PYTHON=stand_in)
    assert "2 parts, at most 3 minutes\n" in text
    first, second = (int(time) for time in re.findall(r"of (\d+) s", text))
    assert 60 < second <= first <= 75, text  # half of what is left without the last half minute
    text = gpu_sh("--minutes", "0", PYTHON=stand_in)
    assert "Not begun: start tests large resnet50 small articles peers" in text
    for words in ["--minutes"], ["--minutes", "x"], ["smal"]:
        with pytest.raises(subprocess.CalledProcessError):
            gpu_sh("--minutes", "0", *words, PYTHON=stand_in)


# ---- articles.py ---------------------------------------------------------------------------------
def arguments(**given):
    defaults = {"quick": False, "rounds": None, "processes": 2, "hosts": None, "node_rank": None}
    return Namespace(**(defaults | given))


def test_the_second_machines_command(monkeypatch):
    """Has its own GPUs, where two machines are this one."""
    monkeypatch.setattr(articles, "GPUS", 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started = [articles.Machine(i, [], articles.visible(2 * i, 2)) for i in range(2)]
    for job in articles.Machines("both", "127.0.0.1", 2, started).jobs([]):
        assert job.command().startswith("`CUDA_VISIBLE_DEVICES=0,1 ")
        assert job.command().endswith(", and with `CUDA_VISIBLE_DEVICES=2,3 --node-rank 1`")


def row_of(script, name="row"):
    """A job that runs a stand-in for a script: Python without torch."""
    return articles.Job(name, [["python", Path(script).resolve()]])


def print_epochs(script, *epochs):
    lines = ["128 training images", *(f"epoch {i}: {line}" for i, line in enumerate(epochs))]
    Path(script).write_text("\n".join(f"print('{line}')" for line in lines))


def test_unequal_losses_are_said(capsys):
    """In any epoch, whatever the others are; nan, too. Rounding is not."""
    first = "loss 0.5000 accuracy 0.9000 100 images/s", "loss 0.0100 accuracy 0.9500 200 images/s"
    print_epochs("first.py", *first)
    print_epochs("close.py", first[0], "loss 0.0101 accuracy 0.9490 400 images/s")
    print_epochs("other.py", "loss 0.5100 accuracy 0.9000 100 images/s", first[1])
    print_epochs("score.py", first[0], "loss 0.0100 accuracy 0.9600 200 images/s")
    print_epochs("nan.py", first[0], "loss nan accuracy 0.9500 200 images/s")
    articles.print_table([row_of("first.py"), row_of("close.py")], 1)
    text = capsys.readouterr().out
    assert "equal up to rounding" in text and harness.FAILED == []
    assert re.search(r"\| row \| 0.32 \| 400 \| 2.00 \| 0.0101 \| 0.9490 \| .* 64, 0 dropped", text)
    for script in "other.py", "score.py", "nan.py":
        articles.print_table([row_of("first.py"), row_of(script, script)], 1)
        text = capsys.readouterr().out
        assert f"differ by more than rounding: {script}" in text and script in harness.FAILED.pop()


def test_batch_norm_sees_shares(capsys):
    """So rows with other shares may differ, and only they. DataParallel's halves of a batch are
    other shares than DDP's, where each rank gets every second image."""
    print_epochs("one.py", *["loss 0.5000 accuracy 0.9000 100 images/s"] * 2)
    print_epochs("two.py", *["loss 0.6000 accuracy 0.8000 100 images/s"] * 2)
    jobs = [row_of("one.py"), row_of("two.py")]
    for job in jobs:
        job.commands[0] += ["--model", "resnet18"]
    jobs[1].gpus_each = 2
    articles.print_table(jobs, 1)
    assert "32 + 32, 0 dropped" in capsys.readouterr().out and not harness.FAILED
    jobs[0].processes = 2
    assert "equal" in articles.compare(jobs) and jobs[0].split() == jobs[1].split()
    jobs[0].processes = jobs[1].gpus_each = 1
    assert "differ" in articles.compare(jobs)


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
def test_rows_for_any_number_of_gpus(monkeypatch, gpus):
    """All rows share one batch size, which each of them can split; each GPU gets something."""
    monkeypatch.setattr(articles, "GPUS", gpus)
    monkeypatch.setattr(articles, "can_make_namespaces", lambda: False)
    args = arguments()
    flags = ["--dataset", "synthetic", *articles.common_flags(args)]
    jobs, left_out = articles.on_this_machine(args, flags)
    assert (gpus < 2) == ("DataParallel" in " ".join(left_out)) and ("DDP" in left_out) == (
        gpus == 1
    )
    with articles.two_machines(args) as machines:
        assert (machines is None) == (gpus == 1)
        jobs += machines.jobs(flags) if machines else []
    [batch] = {job.batch_size() for job in jobs}
    assert 64 <= batch < 80
    for job in jobs:
        assert batch % job.processes == 0 and sum(job.split()) == batch and min(job.split()) > 0
    for script in () if gpus == 1 else ("train_ddp_spawn.py", "train_ddp_torchrun.py"):
        commands = [job.command() for job in jobs if script in job.command()]
        assert any("--workers 0" not in command for command in commands)
    widest = max(len(job.split()) for job in jobs)
    assert widest == (gpus or 2)


def test_namespaces_have_only_sockets(monkeypatch):
    """NCCL would find InfiniBand's devices in any namespace, and not get through."""
    monkeypatch.setattr(articles, "GPUS", 2)
    monkeypatch.setattr(articles, "can_make_namespaces", lambda: True)
    monkeypatch.setattr(articles, "two_namespaces", lambda: contextlib.nullcontext(["a", "b"]))
    with articles.two_machines(arguments()) as machines:
        for job in machines.jobs([]):
            for prefix in job.prefixes:
                assert {"NCCL_NET=Socket", "NCCL_IB_DISABLE=1"} < set(prefix)


NVIDIA_SMI = """#!/usr/bin/env bash
used=1000
if [[ -e trains ]]; then
    used=3500
fi
printf '0, %s\\n1, %s\\n2, 7\\n' "$used" "$((used + 30))"
"""


def test_peak_memory_of_gpus(monkeypatch, work):
    """What a run adds to each GPU that it uses."""
    smi = work / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(work), prepend=":")
    monkeypatch.setattr(articles, "GPUS", 3)
    print_epochs("train.py", *["loss 0.5000 accuracy 0.9000 100 images/s"] * 2)
    mark = (
        f"import pathlib, time\npathlib.Path({str(work / 'trains')!r}).touch()\ntime.sleep(1.2)\n"
    )
    Path("train.py").write_text(mark + Path("train.py").read_text())
    job = row_of("train.py")
    assert articles.measure(job) and job.runs[0].memory == [2500, 2500]


@pytest.mark.long
def test_the_small_scripts_in_a_table(data, capsys, monkeypatch):
    """One process and two have the same losses, and both are measured: two epochs each, the memory
    of each process that trains."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ["--dataset", data / "pictures", "--workers", 0, "--epochs", 2]
    method = "benchmarks/start_by.py", "mp.Process", ["forkserver"]
    jobs = [articles.one_process(flags), articles.by_spawn(2, flags)]
    articles.print_table([*jobs, articles.by_spawn(2, flags, *method)], 1)
    text = capsys.readouterr().out
    assert "equal up to rounding" in text and not harness.FAILED, text
    rows = [line.split(" | ") for line in text.splitlines() if "OMP_NUM_THREADS" in line]
    one, two, by_forkserver = rows
    assert two[4:6] == by_forkserver[4:6]
    assert one[4:6] == two[4:6] and float(one[1]) > 0, text
    assert one[7] == "64, 32 dropped" and two[7] == "32 + 32, 32 dropped"
    assert int(one[6]) > 100 and all(int(part) > 100 for part in two[6].split(" + "))


# ---- peers.py ------------------------------------------------------------------------------------
def report(speed, loss=0.5):
    return {"speed": speed, "CPU": 5.0, "step": 9.0, "first": 2.0, "MiB": 700, "loss": loss}


def test_who_is_ahead(capsys, monkeypatch):
    """Ratios are within a round. Where a script of this collection is slower in each, it is said; a
    loss that is not the same is a failure."""
    monkeypatch.setattr(peers, "FAILED", harness.FAILED)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name != "timm" or None)
    ours, complete, other = "train_single.py", "complete/train.py", "Accelerate"
    found = {"bare step": [report(400, None)] * 2, other: [report(200), report(150)]}
    found |= {name: [report(100), report(300)] for name in (ours, complete)}
    monkeypatch.setattr(peers, "measure", lambda *_: found)
    args = Namespace(model="net", image_size=8, batch_size=4, amp=False, rounds=2, steps=9)
    args.only = [""]
    peers.epochs(args, 1)
    text = capsys.readouterr().out
    assert "| Accelerate | 175 (150 to 200) | 1.25 (0.50 to 2.00) | 1.25 (0.50 to 2.00) |" in text
    assert "not installed: timm" in text and "Slower" not in text and not harness.FAILED
    found[ours] = [report(100)] * 2
    found[other][1]["loss"] = 0.6
    peers.epochs(args, 1)
    says = "Slower in each round: train_single.py, 0.58 (0.50 to 0.67) x Accelerate"
    assert says in capsys.readouterr().out
    assert "the loss of Accelerate is [0.5, 0.6]" in harness.FAILED[0]


@pytest.mark.long
def test_each_does_the_same_training():
    """On two processes, with the packages that are there. The status is 0, as losses are equal."""
    others = [name for name, package in peers.PACKAGES.items() if find_spec(package)]
    words = ["epochs", "--rounds", 1, "--steps", 3, "--batch-size", 8]
    words += ["--only", "train", "bare", "tutorial", *others]
    text = command(sys.executable, ROOT / "benchmarks/peers.py", *words)
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| [^|`]+ \| \d", line)]
    assert len(rows) == 4 + len(others), text
    losses = [float(cells[-1].strip(" |")) for cells in rows if "bare" not in cells[0]]
    assert 0 < min(losses) and max(losses) - min(losses) < 0.001, text


# ---- The tables themselves -----------------------------------------------------------------------
SLOW_SAVES = """
import time

clock, fast_save, waited = time.perf_counter, torch.save, 0

def slow_save(*words):
    global waited
    waited += 1000
    fast_save(*words)

torch.save, time.perf_counter = slow_save, lambda: clock() + waited
"""


@pytest.mark.slow
def test_a_rate_is_that_of_training_alone():
    """Not of saves, of which there is one at each progress line here, and takes 1000 s."""
    flags = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 500, "--log-every", 5]
    flags += ["--checkpoint-minutes", 0, "--output", "out"]
    helpers.run(harness.COMPLETE, *flags, more=SLOW_SAVES, processes=0)
    assert helpers.metrics("out")[0]["seconds"] < 1000


@pytest.mark.long
@pytest.mark.parametrize("part", ROWS)
def test_gpu_sh(work, part):
    """Each command runs, and its table has all its rows, and in each a figure."""
    three = {"PROCESSES": 3} if part == "images" else {}
    if part == "cifar10":
        make_folder(work / "cifar10", (32, 32, 90, 7), 96, 8)
    text = gpu_sh(part, CIFAR10=work / "cifar10", **three)
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == ROWS[part] and "nan" not in text, text
    assert {line.count("|") for line in rows} == {head.count("|")}
    assert "No time" not in text and "differ by more" not in text


@pytest.mark.long
@pytest.mark.parametrize(
    "words, rows",
    [
        (["image_loading.py", "--sizes", "ImageNet", "--rounds", 1, "--seconds", 1], 5),
        (["image_loading.py", "--images", 9, "--rounds", 1, "--seconds", 1, "--folder"], 5),
    ],
)
def test_tables_of_cpus(data, words, rows):
    own = [data / "pictures" / "train"] if words[-1] == "--folder" else []  # classes, no train/
    text = command(sys.executable, ROOT / "benchmarks" / words[0], *words[1:], *own)
    assert not own or "train: 9 files" in text
    rows += find_spec("timm") is not None
    assert len(re.findall(r"^\|.*\d.*\|$", text, re.M)) == rows and "nan" not in text, text


def test_a_folder_with_val(data):
    """image_loading.py --folder takes some images of each part, also of val/ without test/."""
    for part, place in ("train", "train"), ("test", "val"):
        shutil.copytree(data / "pictures" / part, Path("mine", place))
    image_loading.link_some(Path("some"), Path("mine"), 9)
    assert [len([*Path("some", part).glob("*/*")]) for part in ("train", "val")] == [9, 3]


def test_what_fits(monkeypatch):
    """On cards with 24 GB, too."""
    monkeypatch.setattr(gpu_lm, "TINY", False)
    sizes = {(1, 24e9): "400m", (2, 24e9): "1.4b", (1, 80e9): "1.4b", (1, 8e9): gpu_lm.SIZE}
    for (n, memory), size in sizes.items():
        monkeypatch.setattr(gpu_lm, "MEMORY", memory)
        assert gpu_lm.largest(n, "1.4b", "400m") == size


@pytest.mark.parametrize("driver", ["535.104.05", "580.65", ""])
@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.14.1"])
def test_notebook_installs(monkeypatch, driver, version):
    """The build of torch that fits the driver, if the one that is there is old or finds no GPU; if
    it still finds none, though there are some, the notebook ends."""
    cells = json.loads((ROOT / "benchmarks/kaggle.ipynb").read_text())["cells"]
    code = "".join(cells[3]["source"])
    installed = []

    def run_words(words, **options):
        if words[0] != "nvidia-smi":
            installed.append(" ".join(words[5:]))
        return subprocess.CompletedProcess(words, 0, f"{driver}\n{driver}\n")

    monkeypatch.setattr(subprocess, "run", run_words)
    monkeypatch.setattr(subprocess, "check_output", lambda words: str(gpus))
    monkeypatch.setattr(shutil, "which", lambda name: driver and name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.chdir(ROOT)
    build = "torch>=2.9 torchvision"
    if driver.startswith("535"):
        build = "torch>=2.9,<2.15 torchvision --index-url https://download.pytorch.org/whl/cu126"
    for gpus in 2, 0:
        installed.clear()
        if driver and not gpus:
            with pytest.raises(SystemExit, match=f"lists 2 GPUs .driver {driver}., but torch"):
                exec(code, {"REPOSITORY": ""})
        else:
            exec(code, {"REPOSITORY": ""})
        is_unfit = driver and not gpus
        if version.startswith("2.6"):
            assert installed == [f"--upgrade {build}"]
        else:
            assert installed == ([f"--force-reinstall {build}"] if is_unfit else [])


@pytest.mark.long
def test_notebook(work):
    """kaggle.ipynb runs as it is, here on processes of the CPU, and leaves one file."""
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    notebook = work / "kaggle.ipynb"
    text = (ROOT / "benchmarks/kaggle.ipynb").read_text()
    assert 'REPOSITORY = \\"\\"' in text
    notebook.write_text(text.replace('REPOSITORY = \\"\\"', f'REPOSITORY = \\"{ROOT}\\"'))
    command(sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", notebook)
    text = Path("two_gpus.md").read_text()
    assert text.rstrip().endswith("## Failed\n\nnothing"), text
    assert "equal up to rounding" in text and "ddp_check train_ddp_torchrun.py" in text
    assert Path("clone/train_dp.py").exists()


@pytest.mark.long
def test_gpu_tests():
    """tests/test_gpu.py runs: what can be seen without a GPU is so, and little is skipped."""
    few = "small and single or compile or float16 or deterministic or moves or own_loop"
    text = gpu_sh("tests", TESTS=few)
    assert " passed" in text and "failed" not in text, text
    assert text.count("SKIPPED") <= 2, text

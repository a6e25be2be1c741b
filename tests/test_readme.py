"""README.md is true: its commands run, its example trains, the messages it explains are real."""

import os
import re
import runpy
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, finish, free_port, metrics, quick, run, script, start
from test_copy import edited

README = (ROOT / "README.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)]
PROGRAM = (
    r"(?:[A-Z_]+=\S+ )*(?:sudo|uv|pip|cp|python3?|torchrun|sbatch|source|squeue|scancel|scontrol"
)
PROGRAM += r"|tail|ss|ip|nvidia-smi) \S"
INLINE = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))
INLINE = [" ".join(code.split()) for code in INLINE if re.match(PROGRAM, " ".join(code.split()))]

# What is run instead of a command, or of a part of it, and why. The first that matches counts.
ELSEWHERE = [
    (r"^python3 -m venv .* -m pytest$", ".ci/run calls this very line"),
    (r"-m pytest", "these are the tests"),
    (r"\bsbatch (?!\.\.\.)", "test_sbatch_lines; on a real Slurm: tests/test_slurm.py"),
    (r"sbatch \.\.\.$", "a pattern, not a command"),
    (r"^(squeue|scancel|scontrol|tail)", "needs a job in Slurm's queue: tests/test_slurm.py"),
    (r"^(nvidia-smi|ss|ip)\b", "looks at the machine, and belongs to it"),
    (r"^sudo .*network\.py", "tests/test_benchmarks.py runs it, where it may"),
    (r"(plots|throughput|growth)\.py", "tests/test_benchmarks.py runs it, with fewer images"),
    (r"(same_text|readme_blocks)\.py --fix", "would edit the files: tests/test_text.py"),
    (r"^pip install -r benchmarks", ".ci/run installs these"),
    (r"^python -m torch\.distributed\.run$", "the beginning of a command"),
]
INSTEAD = [
    (r"^python3 -m venv .*?/bin/python ", "python ", "makes 5 GB: .ci/run makes the other one"),
    (r"^uv run ", "python ", "uv and its cache are not everywhere; test_text reads what it reads"),
    (r"^source \.venv/bin/activate$", "true", "there is one already"),
    (r"\bHOST\b", "127.0.0.1", "one machine plays both"),
    (r"/shared/folder", "{folder}", "one machine plays both"),
    (r":23456", ":{port}", "somebody may have it"),
    (r"(--nnodes 2 .*)--nproc-per-node 4", r"\1--master-port {port}", "eight need more cores"),
    (
        r"((?:train|my)_\w+\.py)(?!.*--epochs 0)",
        r"\1 --data-dir {data}",
        "to download takes a network",
    ),
    (r"(train_.*)$(?<!--epochs 0)", r"\1 --epochs 1", "ten epochs would take long here"),
]


def instead(command, **values):
    for pattern, other, _ in INSTEAD:
        command = re.sub(pattern, lambda m, o=other: m.expand(o.format(**values)), command)
    return command


def runnable(lines):
    return [line for line in lines if not any(re.search(p, line) for p, _ in ELSEWHERE)]


RUN = []
for lines in map(runnable, [*BLOCKS, *([code] for code in INLINE)]):
    if RUN and RUN[-1][-1].startswith("cp "):  # what it copied is used in the next block
        RUN[-1] += lines
    elif lines:
        RUN.append(lines)
FAST = "uv run", "train_ddp_spawn.py --init-method tcp://HOST", "cp train_single"


def test_every_command_is_known():
    """Each exception is for something, and each shell block holds commands."""
    lines = [line for block in BLOCKS for line in block] + INLINE
    assert all(re.match(PROGRAM, line) for block in BLOCKS for line in block), lines
    for pattern, *_ in [*ELSEWHERE, *INSTEAD]:
        assert any(re.search(pattern, line) for line in lines), pattern


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(lines, marks=[] if lines[0].startswith(FAST) else pytest.mark.slow)
        for lines in RUN
    ],
    ids=lambda lines: re.sub(r"\W+", "-", lines[0])[-40:],
)
def test_commands(lines, data):
    """What stands in a block works, as it stands but for INSTEAD; machines' commands together."""
    for path in [*ROOT.glob("train_*.py"), ROOT / "benchmarks", ROOT / "tests"]:
        Path(path.name).symlink_to(path)
    Path("my_images").symlink_to(data / "pictures")
    values, started = dict(folder=os.getcwd(), data=data, port=free_port()), []
    place = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for number, line in enumerate(lines):
        if line.startswith("cp "):
            _, name, copy = line.split()
            shutil.copy(edited(Path(name).stem), copy)
            continue
        words = ["bash", "-c", instead(line, **values)]
        started.append((start(words, f"{number}.log", env=place), number, line))
        if not re.search(r"rank 0.*(--world-size|--nnodes) 2|--nnodes 2 .*rank 0", line):
            for process, i, _ in started:
                assert finish(process) == 0, (lines[i], Path(f"{i}.log").read_text())
            started = []
    assert not started
    if "train_" in lines[0] and "--epochs 0" not in lines[0]:
        assert list(Path().glob("runs/*/model.pt"))


def test_sbatch_lines():
    """Their files are there, and the flags behind them are those of the script in them."""
    found = [line for block in [*BLOCKS, INLINE] for line in block if re.search(r"sbatch \S", line)]
    assert len(found) >= 10
    for line in found:
        if line.endswith("..."):
            continue
        before, path, flags = re.search(r"sbatch(.*?) (slurm/\w+\.sh)(.*)", line).groups()
        text = (ROOT / path).read_text()
        name = re.search(r"(train_\w+)\.py", f"{flags} {text}")[1]
        flags = [word for word in shlex.split(flags) if not word.endswith(".py")]
        parser = runpy.run_path(script(name), run_name="script")["parser"]
        parser.parse_args(flags)
        assert set(re.findall(r"--[\w-]+", before)) <= {"--nodes", "--gres", "--time"}


# ---- The messages of "When it goes wrong" --------------------------------------------------------


def told(message, text):
    """The message stands in the README, and in what was printed."""
    readme = " ".join(README.split("## When it goes wrong")[1].split())
    assert f"`{message}`" in readme.replace("`` ", "`").replace(" ``", "`"), message
    pattern = re.escape(message).replace(r"\.\.\.", ".*?").replace("HOST", r"\S+")
    assert re.search(re.sub(r"\d+", r"\\d+", pattern), " ".join(text.split())), text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_is_missing(rank):
    place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2"]
    words = [sys.executable, script("train_ddp_multigpu_proc"), *place, "--rank", rank]
    assert finish(start([*words, "--timeout", "5", "--epochs", "0"], "log")) == 1
    text = Path("log").read_text()
    told("waiting for 2 machines at tcp://HOST:23456 until 14:30:00", text)
    if rank == 0:
        told("Timed out after 1801 seconds waiting for clients. 1/2 clients joined.", text)
    else:
        told("The client socket has timed out after 1800000ms while trying to connect to", text)


def test_a_port_is_taken():
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        place = ["--init-method", f"tcp://127.0.0.1:{port}"]
        told("Address already in use", quick("train_ddp_spawn", *place, status=2).err)
        words = [sys.executable, "-m", "torch.distributed.run", "--master-port", port]
        words += [script("train_ddp_torchrun"), "--epochs", "0"]
        assert finish(start(words, "log")) == 1
        told("EADDRINUSE, message: address already in use", Path("log").read_text())


def test_an_old_init_file():
    Path("init").write_text("from an earlier run")
    err = quick("train_ddp_spawn", "--init-method", f"file://{os.getcwd()}/init", status=2).err
    told("an earlier run left that file", err)


def test_module_in_the_keys():
    net = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as error:
        net.load_state_dict(torch.nn.DataParallel(net).state_dict())
    told('Unexpected key(s) in state_dict: "module.', str(error.value))
    state = torch.nn.DataParallel(net).state_dict()
    name = "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present"
    assert f'{name}(state, "module.")' in README
    eval(f'{name}(state, "module.")')
    net.load_state_dict(state)


def test_the_same_order_in_every_epoch():
    sampler = torch.utils.data.DistributedSampler(range(100), num_replicas=1, rank=0)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler) and "sampler.set_epoch(epoch)" in README


def test_a_sampler_counts_some_twice():
    """203 test images on 4 processes are 204 for DistributedSampler."""
    shares = [
        list(torch.utils.data.DistributedSampler(range(203), 4, rank, shuffle=False))
        for rank in range(4)
    ]
    assert sum(map(len, shares)) == 204 and "203 test images on 4 processes" in README


@pytest.mark.slow
def test_an_unused_parameter(data):
    text = Path(script("train_ddp_multigpu_proc")).read_text()
    text = text.replace("self.pool = ", "self.unused = nn.Linear(1, 1)\n        self.pool = ", 1)
    Path("mine.py").write_text(text)
    flags = ["--dataset", "cifar10", "--data-dir", data, "--epochs", "1"]
    err = quick("train_ddp_multigpu_proc", *flags, status=1, path="mine.py").err
    told("Expected to have finished reduction in the prior iteration", err)
    other = "gradient_as_bucket_view=True, find_unused_parameters=True"
    Path("mine.py").write_text(text.replace("gradient_as_bucket_view=True", other))
    quick("train_ddp_multigpu_proc", *flags, path="mine.py")


@pytest.mark.slow
def test_batch_norm_of_one_image(data):
    flags = ["--dataset", "cifar10", "--data-dir", data, "--model", "resnet18"]
    err = quick("train_single", *flags, "--batch-size", "213", "--epochs", "1", status=1).err
    told("Expected more than 1 value per channel when training", err)


@pytest.mark.slow
def test_too_little_shared_memory(data):
    if os.getuid():
        pytest.skip("to mount a small /dev/shm takes root")
    flags = f"--dataset {data}/pictures --image-size 256 --batch-size 48 --epochs 1"
    words = "mount -t tmpfs -o size=1m none /dev/shm && "
    words += f"{sys.executable} {script('train_single')} {flags} --workers 2"
    assert finish(start(["unshare", "--mount", "bash", "-c", words], "log")) == 1
    told("unable to allocate shared memory(shm) for file", Path("log").read_text())
    quick("train_single", *flags.split(), "--workers", "0")


@pytest.mark.slow
def test_a_rank_that_does_not_come(data):
    """A collective in `if rank == 0:` leaves the others waiting until --timeout."""
    text = Path(script("train_ddp_spawn")).read_text()
    text = text.replace("        dist.all_reduce(sums)", "        rank or dist.all_reduce(sums)")
    Path("mine.py").write_text(text)
    flags = ["--dataset", "cifar10", "--data-dir", data, "--epochs", "1", "--timeout", "5"]
    begin = time.monotonic()
    text = run("train_ddp_spawn", *flags, processes=2, status=1, path="mine.py")
    assert time.monotonic() - begin < 60
    told("Timed out waiting 1800000ms for recv operation to complete", text)


def test_the_example_learns():
    """It ends with the line that the README shows, but for the time."""
    wanted = re.search(r"^epoch 10: .* accuracy (0\.\d+)", README, re.M)
    flags = ["--epochs", "10", "--lr", "0.05", "--batch-size", "16", "--output", "out"]
    quick("train_single", *flags, path=edited("train_single"))
    assert metrics("out")[-1]["test_accuracy"] == pytest.approx(float(wanted[1]), abs=0.02)

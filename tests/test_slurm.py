"""The sbatch files, submitted as they are to a real Slurm of two nodes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cluster import cluster, command, missing, wait_until
from helpers import ROOT, all_ended, metrics, processes, same, weights
from same_text import MARK, SBATCH, compare_sbatch

FILES = ["single", "dp", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc"]
PAIR = ["node0", "node1"]


def path(name):
    return ROOT / "slurm" / f"{name}.sh"


def test_the_common_part_is_the_same(tmp_path):
    assert sorted(SBATCH) == sorted((ROOT / "slurm").iterdir())
    assert compare_sbatch(SBATCH) == []
    copies = [tmp_path / file.name for file in SBATCH]
    for file, copy in zip(SBATCH, copies):
        copy.write_text(file.read_text())
    copies[3].write_text(copies[3].read_text().replace("sleep 2", "sleep 3"))
    assert (
        compare_sbatch(copies)
        == compare_sbatch(copies, fix=True)
        == [f"common part: {copies[3].name}"]
    )
    assert [copy.read_text() for copy in copies] == [file.read_text() for file in SBATCH]


@pytest.mark.parametrize("name", FILES + PAIR)
def test_lines_to_edit(name):
    """Whatever belongs to one cluster is marked and explained, and above the common part."""
    lines = path(name).read_text().partition(MARK)[0].splitlines()
    marked = [line.split("#SBATCH --")[-1].split("=")[0] for line in lines if "# EDIT: " in line]
    flags = {"gres", "cpus-per-task", "time", "partition", "mem", "script"}
    flags |= {"meet", "nodelist"} if name in PAIR else set()
    flags |= {"nodes"} if name in FILES[3:] else set()
    assert set(marked) == flags
    assert f"train_{'ddp_spawn' if name in PAIR else name}.py" in "\n".join(lines)


def test_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", *map(path, FILES + PAIR)], check=True)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = missing()
    if torch.accelerator.is_available():
        reason = "the pretend GPUs of this cluster would be mixed up with the real ones"
    if reason:
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture
def submit(slurm, work, monkeypatch):
    """A function that submits a file from the scripts' folder and returns the job's number."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    jobs = []

    def submit(name, *flags, options=(), file=None):
        words = ["sbatch", "--parsable", "-c", "1", f"--output={work}/%x-%j.out", *options]
        words += [f"--chdir={work if file else ROOT}", file or path(name), *flags]
        jobs.append(command(*map(str, words)))
        return jobs[-1]

    yield submit
    for job in jobs:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has ended
            command("scancel", job)
    going = "--jobs=" + ",".join(jobs)
    wait_until(lambda: not command("squeue", "-h", going), "the end of the jobs")


def show(job, field):
    return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", job))[1]


def log(job):
    """What the job has printed."""
    files = list(Path().glob(f"*-{job}.out"))
    return files[0].read_text() if files else ""


def wait_for_text(text, *jobs):
    wait_until(lambda: all(text in log(job) for job in jobs), f"{text!r} of {jobs}")


def ended(*jobs, state="COMPLETED", limit=300):
    def over():
        going = "PENDING", "RUNNING", "COMPLETING", "CONFIGURING"
        return not any(show(job, "JobState") in going for job in jobs)

    wait_until(over, f"the end of {jobs}", limit)
    states = [show(job, "JobState") for job in jobs]
    assert states == [state] * len(jobs), (states, [log(job) for job in jobs])


def job_flags(data, output, epochs=2):
    return ["--dataset", "cifar10", "--data-dir", data, "--output", output, "--epochs", epochs]


def long_flags(output, epochs):
    return ["--dataset", "synthetic", "--output", output, "--epochs", epochs, "--log-every", 10]


def same_run(one, other, epochs):
    """Two runs ended with the same weights, and each epoch was done once."""
    rows = [[row[key] for key in ("epoch", "train_loss", "test_loss")] for row in metrics(one)]
    assert [row[0] for row in rows] == list(range(1, epochs + 1))
    assert rows == [[r[k] for k in ("epoch", "train_loss", "test_loss")] for r in metrics(other)]
    assert same(weights(one), weights(other))
    assert sorted(os.listdir(one)) == ["last.pt", "metrics.csv", "model.pt"]


RANKS = {"single": 1, "dp": 1, "ddp_spawn": 2, "ddp_torchrun": 4, "ddp_multigpu_proc": 2}
ONE_GPU = ["--gres=gpu:1"]


@pytest.fixture(scope="module")
def limited(slurm, tmp_path_factory):
    """A job that hits its limit of a minute again and again, while the other tests go on.

    It trains on data that come slowly, and leaves the cores to the others.
    """
    folder = tmp_path_factory.mktemp("limited")
    text = (ROOT / "train_ddp_torchrun.py").read_text()
    text = text.replace(
        '    """A batch as the network takes', '    time.sleep(0.1)\n    """A batch as'
    )
    (folder / "train_ddp_torchrun.py").write_text(text)
    options = ["-c", "1", "--time=1", f"--chdir={folder}", "--nodes=1", "--nodelist=node0"]
    path_ = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["sbatch", "--parsable", *options, path("ddp_torchrun"), *long_flags("out", EPOCHS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path_)
        return folder, command(*map(str, words))


@pytest.mark.slow
def test_every_file_to_its_end(submit, limited, data, work):
    """All at once, and one of them twice: two jobs on the same machines do not meet."""
    jobs = {name: submit(name, *job_flags(data, work / name)) for name in FILES}
    jobs["twice"] = submit("ddp_torchrun", *job_flags(data, work / "twice"), options=ONE_GPU)
    ended(*jobs.values())
    for name, job in jobs.items():
        found = re.findall(r"rank (\d+): host \S+, device cpu", log(job))
        assert found == [str(i) for i in range(RANKS.get(name, 2))], log(job)
        assert len(metrics(work / name)) == 2 and weights(work / name)
        assert show(job, "Restarts") == "0"


@pytest.mark.slow
def test_any_number_of_machines(submit, work):
    """--epochs 0 as the check of a new cluster; the command line's options win."""
    names = ["ddp_torchrun", "ddp_multigpu_proc"]
    options = ["--nodes=1", "--gres=gpu:4"]
    jobs = [submit(name, "--epochs", "0", options=options) for name in names]
    ended(*jobs)
    for count, job in zip((4, 1), jobs):
        assert f"all-reduce over {count}" in log(job) and log(job).count("host ") == count


@pytest.mark.slow
def test_cores_are_shared_out(submit, work):
    """From what Slurm granted, as this cluster does not bind processes to cores."""
    jobs = {}
    for name, cores in ("single", 1), ("ddp_spawn", 6):
        text = (ROOT / f"train_{name}.py").read_text()
        text = text.replace("def load_data(args, device):\n", PRINT_THREADS)
        Path(f"train_{name}.py").write_text(text)
        flags = "--dataset", "synthetic", "--epochs", "1"
        job = submit(name, *flags, options=["-c", str(cores)], file=path(name))
        jobs[job] = max(1, cores // 2)
    for job, threads in jobs.items():
        wait_for_text(f"threads={threads}\n", job)


PRINT_THREADS = """def load_data(args, device):
    print(f"threads={torch.get_num_threads()}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_pair_in_both_orders(submit, data, work, order):
    """The files as they are: machine 0 is known by its name."""
    flags = job_flags(data, work / "out")
    first = submit(PAIR[order[0]], *flags)
    wait_for_text("waiting for 2 machines at tcp://node0:23456 until ", first)
    second = submit(PAIR[order[1]], *flags)
    ended(first, second)
    text = log(first) + log(second)
    assert re.findall(r"rank (\d): host", text) == ["0", "1", "2", "3"], text
    assert len(metrics("out")) == 2 and weights("out")


@pytest.mark.slow
def test_the_pair_with_another_script_and_a_file(submit, data, work, monkeypatch):
    """An init file that an earlier run left behind does not matter, whoever comes first."""
    monkeypatch.setenv("INIT_METHOD", f"file://{work}/init")
    flags = ["train_ddp_multigpu_proc.py", *job_flags(data, work / "out")]
    killed = submit("node0", *flags)  # leaves a file in which it waits for the other
    wait_until(lambda: Path("init").exists() and Path("init").stat().st_size > 0, "the init file")
    time.sleep(2)
    command("scancel", "--signal=KILL", "--full", killed)
    ended(killed, state="CANCELLED")
    assert Path("init").exists()
    for order in (1, 0), (0, 1):
        stale = Path("init").stat().st_ino if Path("init").exists() else None
        first = submit(PAIR[order[0]], *flags)
        wait_for_text("waiting for 2 machines at file://", first)
        second = submit(PAIR[order[1]], *flags)
        ended(first, second)
        assert (log(first) + log(second)).count("rank 1: host") == 1
        assert len(metrics("out")) == 2 and weights("out")
        Path("init").write_bytes(b"not what torch would write")
        shutil.rmtree("out")
        assert stale is None or Path("init").stat().st_ino != stale or order == (0, 1)


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """What a run on one process and on two comes to: on two it is the same, whoever starts them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for count in 1, 2:
        flags = [*long_flags(folder / str(count), EPOCHS), "--nproc-per-node", count]
        words = [sys.executable, ROOT / "train_ddp_spawn.py", *flags]
        words = words if count == 2 else [sys.executable, ROOT / "train_single.py", *flags[:-2]]
        one_core = os.environ | {"SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in words], env=one_core, check=True)
    return folder


EPOCHS = 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, "pair"])
def test_a_warned_job_goes_on(submit, work, undisturbed, name):
    """The signal that Slurm sends before a time limit, here sent at once; in each file."""
    names = PAIR if name == "pair" else [name]
    options = [] if name == "ddp_spawn" else ONE_GPU
    jobs = [submit(each, *long_flags(work / "out", EPOCHS), options=options) for each in names]
    wait_until(lambda: "epoch 2/" in log(jobs[0]), "the second epoch")
    command("scancel", "--signal=USR1", "--batch", jobs[-1])
    wait_until(lambda: all(show(job, "Restarts") == "1" for job in jobs), "a second start")
    ended(*jobs)
    text = log(jobs[0])
    stop = re.search(r"stopped after step (\d+) of epoch (\d+)", text)
    assert stop and text.index("host ") < stop.start() < text.rindex("host ")  # one log
    assert "has saved and goes back into the queue" in log(jobs[-1])
    same_run("out", undisturbed / ("1" if name in FILES[:2] else "2"), EPOCHS)


@pytest.mark.slow
def test_preemption(submit, work, undisturbed):
    """A job of a higher partition takes the machine: Slurm requeues, the run has saved."""
    options = ["--nodelist=node1"]
    job = submit("ddp_spawn", *long_flags(work / "out", EPOCHS), options=options)
    wait_until(lambda: "epoch 2/" in log(job), "the second epoch")
    options += ["--partition=urgent", "--gres=gpu:4"]
    urgent = submit("single", "--epochs", 0, options=options)
    ended(urgent, job)
    assert show(job, "Restarts") == "1" and "PREEMPTION" in log(job)
    assert "stopped after step " in log(job)  # it had the time to save
    same_run("out", undisturbed / "2", EPOCHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp_spawn", "ddp_torchrun", "ddp_multigpu_proc"])
def test_a_killed_task_ends_the_job(submit, work, name):
    """SIGKILL for one process: not 0, not requeued, the log says which rank where."""
    job = submit(name, *long_flags(work / "out", 10000))
    wait_for_text("epoch 1/10000 step 10/", job)
    kind = b"spawn_main" if name == "ddp_spawn" else b"train_"
    victims = [p for p in processes() if kind in Path(f"/proc/{p}/cmdline").read_bytes()]
    os.kill(victims[-1], signal.SIGKILL)  # the youngest, which is nobody's parent
    ended(job, state="FAILED", limit=60)
    assert show(job, "Restarts") == "0" and show(job, "ExitCode") != "0:0"
    told = {
        "single": r"srun: error: node0: task 0: Killed",
        "ddp_spawn": r"process 1 terminated with signal SIGKILL[\s\S]*srun: error: node0: task 0",
        "ddp_torchrun": r"host +: \S+\s+rank +: \d[\s\S]*Signal 9[\s\S]*srun: error: node[01]: ",
        "ddp_multigpu_proc": r"srun: error: node[01]: task [01]: Killed",
    }
    assert re.search(told[name], log(job)), log(job)
    assert all_ended()


@pytest.mark.slow
def test_failures_are_not_requeued(submit, work):
    """A wrong flag, and a script with an error in it, fail once and for all."""
    Path("broken.py").write_text("raise KeyError('my own mistake')\n")
    text = path("single").read_text().replace("script=train_single.py", "script=broken.py")
    Path("broken.sh").write_text(text)
    names = ["single", "ddp_spawn", "ddp_torchrun"]
    jobs = [submit(n, "--lr", "-1", "--output", work / "out", options=ONE_GPU) for n in names]
    broken = submit("broken", file="broken.sh")
    missing_script = submit("single", options=[], file=path("single"))  # none in this folder
    ended(*jobs, broken, missing_script, state="FAILED")
    for job in [*jobs, broken, missing_script]:
        assert show(job, "Restarts") == "0"
    codes = [show(job, "ExitCode") for job in [*jobs[:2], broken, missing_script]]
    assert codes == ["2:0", "2:0", "1:0", "2:0"]
    assert all("--lr" in log(job) for job in jobs) and "my own mistake" in log(broken)
    assert "train_single.py" in log(missing_script) and not Path("out").exists()


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(submit, work):
    job = submit("ddp_torchrun", *long_flags(work / "out", 10000))
    wait_for_text("epoch 1/10000 step 10/", job)
    assert show(job, "JobState") == "RUNNING"  # and its log can be read already
    command("scancel", job)
    ended(job, state="CANCELLED", limit=60)
    time.sleep(3)
    assert show(job, "JobState") == "CANCELLED" and show(job, "Restarts") == "0"
    assert Path("out/last.pt").exists()  # saved all the same


@pytest.mark.slow
def test_a_container(submit, data, work, monkeypatch):
    """The command line that apptainer gets; a stand-in runs it without any container."""
    links = work / "elsewhere" / "sets"
    links.parent.mkdir()
    links.symlink_to(data)
    monkeypatch.setenv("CONTAINER", "/images/torch.sif")
    job = submit("single", "--epochs", "0")
    ended(job, state="FAILED")
    assert "no apptainer" in log(job) and show(job, "ExitCode") == "2:0"

    Path("bin").mkdir()
    monkeypatch.setenv("PATH", f"{work}/bin:{os.environ['PATH']}")
    for tool, name in ("singularity", "single"), ("apptainer", "ddp_torchrun"):
        stand_in = Path("bin", tool)
        stand_in.write_text(f'#!/bin/sh\necho "{tool}: $*"\nshift 5\nexec "$@"\n')
        stand_in.chmod(0o755)
        flags = job_flags(links, work / "new" / tool, 1)
        job = submit(name, *flags, options=[*ONE_GPU, "--nodes=1"])
        ended(job)
        words = re.search(rf"{tool}: exec --nv --bind (\S+) /images/torch.sif python3 ", log(job))
        assert words, log(job)
        folders = set(words[1].split(","))
        assert folders >= {str(ROOT), str(data)} and folders & {str(work), f"{work}/new"}
        assert weights(f"new/{tool}")


@pytest.mark.slow
def test_a_named_python(submit, work, monkeypatch):
    python = Path("my python")
    python.write_text(f'#!/bin/sh\necho this one\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(work / python))
    job = submit("single", "--epochs", "0")
    ended(job)
    assert "this one" in log(job)


@pytest.mark.slow
def test_two_time_limits(submit, limited, undisturbed):
    """The real thing: a minute each, and warned as the file says."""
    folder, job = limited
    ended(job, limit=900)
    text = (folder / f"ddp_torchrun-{job}.out").read_text()
    assert int(show(job, "Restarts")) >= 2, text
    assert text.count("goes back into the queue") == int(show(job, "Restarts"))
    same_run(folder / "out", undisturbed / "2", EPOCHS)


@pytest.mark.slow
def test_the_message_of_a_time_limit(submit):
    """What the README shows for a job that was not warned is what Slurm says."""
    Path("mine.sh").write_text("#!/bin/bash\nsleep 600\n")
    job = submit("", options=["--time=1", "--nodelist=node1"], file=Path("mine.sh").resolve())
    ended(job, state="TIMEOUT")
    (message,) = re.findall(
        r"`(CANCELLED AT \S+ DUE TO TIME LIMIT)`", (ROOT / "README.md").read_text()
    )
    pattern = r"\d+".join(map(re.escape, re.split(r"\d+", message)))
    assert re.search(pattern, log(job)), log(job)

"""The sbatch files, submitted as they are to a real Slurm, which only holds a requeued job for 5 s
instead of 120. Nothing here goes by the clock: a job is disturbed when its log shows how far it is.
Trainings run copies of the scripts that stand still before step 3 in the lives that STANDS names:
life 0 is a job's first, and each requeue and each task of an array is one more."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from cluster import cluster, missing, start_machine
from helpers import *

PAIR = ["node0", "node1"]
FILES = {name: ROOT / "slurm" / f"{name}.sh" for name in SCRIPTS + PAIR}
CODE = {name: f"train_{name}.py" for name in SCRIPTS} | dict.fromkeys(PAIR, "train_ddp_spawn.py")
CODE["array"] = "train_single.py"
FLAGS = "--dataset synthetic --epochs 2 --checkpoint-minutes 0 --log-every 1".split()
OPTIONS = {"ddp_torchrun": ["--partition=frail", "--nodes=2", "--gres=gpu:1"]}
OPTIONS |= {"dp": ["--partition=spare"], "ddp_spawn": ["--partition=patient"]}
OPTIONS |= {"array": ["--array=0-1%1", "--job-name=array", "--output=array-%A.out"]}
HEAD = """\
class datasets:
    CIFAR10 = FashionMNIST = None
LIFE = sum(int(os.environ.get(f"SLURM_{name}", 0)) for name in ("RESTART_COUNT", "ARRAY_TASK_ID"))
STAND = 9999 * (str(LIFE) in os.environ["STANDS"])
"""
# Without torchvision and with less data a start takes half the time.
CHANGES = {"from torchvision import datasets, models\n": HEAD, "from torchvision.t": "# "}
CHANGES |= {"(10_000, seed": "(640, seed", "(2_000, seed": "(203, seed"}
CHANGES |= {"loss.backward()": "time.sleep(STAND * (step == 3)); loss.backward()"}
STAND_IN = """\
import os, sys, time
import beside
print(f"arguments {sys.argv}\\n", end="")  # in one piece
if "fail" in sys.argv and int(os.environ["SLURM_PROCID"]) + 1 == int(os.environ["SLURM_NTASKS"]):
    raise KeyError("mine")
time.sleep(9999 * ("wrong" not in sys.argv))
sys.exit(2)
"""
SRUN = """\
#!/usr/bin/env bash
#SBATCH --job-name=srun --ntasks=2 --output=%x-%j.out
export MASTER_ADDR=$(hostname) MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) WORLD_SIZE=2
srun --ntasks 2 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$PYTHON" -u "$@"' \\
    bash train_ddp_torchrun.py --output "runs/srun-$SLURM_JOB_ID" "$@"
"""


class Job:
    patience = LIMIT  # seconds; a slow machine gets more

    def __init__(self, name, *flags, folder=".", options=(), file=None):
        words = ["sbatch", "--parsable", f"--chdir={Path(folder).resolve()}", *options]
        self.number = self.task = command(*words, file or FILES[name], *flags)
        self.name, self.file = name, Path(folder, f"{name}-{self.number}.out").resolve()
        self.output = f"runs/{name}-{self.number}" if name not in PAIR else "runs/pair"

    def show(self, field):
        return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", self.task))[1]

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def over(self):
        return self.show("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def wait_for(self, text, times=1):
        wait_until(lambda: self.log().count(text) >= times or self.over(), self.patience, 0.2)
        assert self.log().count(text) >= times, self.log()

    def wait_for_restart(self):
        assert wait_until(lambda: self.show("Restarts") == "1", self.patience, 0.2), self.log()

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, self.patience, 0.2)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()

    def warn(self):
        """As Slurm does 60 s before the time limit."""
        command("scancel", "--signal=USR1", "--batch", self.task)


@pytest.fixture(scope="module")
def cluster_and_trainings(tmp_path_factory):
    """The cluster's machines, and {name: job} of the trainings, which are on their way."""
    if missing() or torch.accelerator.is_available():
        pytest.skip(missing() or "its pretended GPUs would be mixed up with the real ones")
    folder = tmp_path_factory.mktemp("train")
    for name in SCRIPTS:
        text = Path(script(name)).read_text()
        for old, new in CHANGES.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / CODE[name]).write_text(text)
    (folder / "srun.sh").write_text(SRUN)

    def train(name, *flags, stands="0", file=None):
        options = [f"--export=ALL,STANDS={stands}", *OPTIONS.get(name, [])]
        return Job(name, *FLAGS, *flags, folder=folder, options=options, file=file)

    with cluster(tmp_path_factory.mktemp("slurm")) as machines:  # puts the environment back
        os.environ.update(PYTHON=sys.executable, OMP_NUM_THREADS="1")
        begin, jobs = time.monotonic(), {"quiet": train("single", stands="")}
        jobs["quiet"].wait_for("into ")
        start = time.monotonic() - begin
        Job.patience, timeout = max(LIMIT, 60 * start), ["--timeout", round(30 * start)]
        jobs["srun"] = train("srun", stands="", file=folder / "srun.sh")
        for name in SCRIPTS:
            flags = timeout * (name in DDP) + ["--nproc-per-node", 2] * (name == "ddp_spawn")
            jobs[name] = train(name, *flags, stands="01" if name == "single" else "0")
        jobs["array"] = train("array", stands="01", file=FILES["single"])
        jobs["array"].task += "_1"
        jobs["node1"] = train("node1", *timeout, stands="")  # rank 0 standing, it waits
        jobs["node1"].wait_for("machine 1 waits for machine 0 at tcp://node0:23456")
        jobs["node0"] = train("node0", *timeout)
        yield machines, jobs


@pytest.fixture(scope="module")
def trainings(cluster_and_trainings):
    """Once all stand, their scripts are edited and each is disturbed."""
    machines, jobs = cluster_and_trainings
    for name, job in jobs.items():
        if name != "node1":  # rank 0 alone prints
            job.wait_for("epoch 1/2 step 2/")  # then the checkpoint of step 1 is whole
    for name in SCRIPTS:
        (jobs["quiet"].file.parent / CODE[name]).write_text("raise SystemExit('edited')\n")
    limited = [jobs[name] for name in ("single", "ddp_multigpu_proc", "node0")]
    for job in limited:
        command("scontrol", "update", f"job={job.number}", "timelimit=1")  # minute
    # Preempts dp at once, and ddp_spawn with a SIGTERM and a GraceTime.
    command(*"sbatch -p urgent --nodes=2 --gres=gpu:20 --output=/dev/null --wrap=hostname".split())
    command("scancel", f"{jobs['array'].number}_0")
    # torchrun starts all ranks anew when one dies, and Slurm the job when a machine does.
    elastic = jobs["ddp_torchrun"]
    processes = command("pgrep", "-af", f"resume --output {elastic.output}").splitlines()
    ranks = [line for line in processes if "distributed.run" not in line]
    assert len(ranks) == 2
    kill(int(ranks[1].split()[0]))
    elastic.wait_for("into ", 2)
    assert elastic.show("Restarts") == "0"
    machines["node4"].kill()
    jobs["array"].wait_for("into ", 2)
    jobs["array"].warn()
    for job in limited:
        job.wait_for_restart()
        command("scontrol", "update", f"job={job.number}", "timelimit=60")
    jobs["single"].wait_for("into ", 2)
    command("scontrol", "requeue", jobs["single"].number)
    elastic.wait_for_restart()
    machines["node4"] = start_machine(Path(os.environ["SLURM_CONF"]).parent, "node4")
    return jobs


@pytest.mark.slow
def test_what_the_files_start(cluster_and_trainings, work, monkeypatch):
    """Arguments, cores, and what apptainer is told, of a stand-in. Edited, it goes on as it was,
    but for a new job. With a cap of 1, or where requeueing is forbidden, a warned job runs on to
    its limit. If the last task has a mistake, all end, and the log names task and host."""
    Path("apptainer").write_text('#!/bin/sh\necho "apptainer $*"\nshift 3\nexec "$@"\n')
    Path("apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{work}:{os.environ['PATH']}")
    monkeypatch.setenv("CONTAINER", "my image.sif")
    Path("beside.py").touch()
    for name in SCRIPTS:
        Path(CODE[name]).write_text(STAND_IN)
    jobs = [Job("single", "--output=mine", options=["--no-requeue"])]
    for name, file in FILES.items():
        Path(f"{name}.sh").write_text(file.read_text().replace("requeues=20", "requeues=1"))
        jobs.append(Job(name, "--lr", "a b", options=["--nodes=1"], file=f"{name}.sh"))
    failing = [Job(name, "fail", options=["--nodes=2"] * (name in SCRIPTS[3:])) for name in SCRIPTS]
    jobs[0].wait_for("arguments ['mine/")
    for job in jobs[1:]:
        job.wait_for("arguments", 4 if job.name == "ddp_torchrun" else 1)  # its GPUs
        code = f"{job.output}/{job.number}-{CODE[job.name]}"
        flags = rf"'{code}', '--resume', '--output', '{job.output}', (.*, )?'--lr', 'a b'"
        assert re.search(rf"arguments \[{flags}(, '--rank', '\d')?\]", job.log()), job.log()
        cores = {"single": 4, "ddp_torchrun": 16}.get(job.name, 8)
        assert command("pgrep", "-f", f"^srun --cpus-per-task={cores} .*{job.number}-.*--lr a b")
        assert f"apptainer exec --nv my image.sif {sys.executable} -u " in job.log()
    for name in SCRIPTS:
        Path(CODE[name]).write_text(STAND_IN.replace("arguments", "edited"))
    new = Job("single", "wrong", "--output", "mine")
    for job in jobs:
        job.warn()
    for job in jobs[1:]:
        job.wait_for("arguments", 8 if job.name == "ddp_torchrun" else 2)
        job.warn()
    for i, job in enumerate(jobs):
        job.wait_for("not requeued")
        assert (job.show("JobState"), job.show("Restarts")) == ("RUNNING", str(min(1, i)))
        command("scancel", job.number)
    new.ended("FAILED")
    assert f"edited ['mine/{new.number}-train_single.py'" in new.log()
    for job in failing:
        job.ended("FAILED")
        where = r"node(\d): task \1" if job.name in SCRIPTS[3:] else r"node\d: task 0"
        assert re.search(f"srun: error: {where}: Exited with exit code 1", job.log()), job.log()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, "array", "node0"])
def test_it_goes_on(trainings, name):
    """In its own folder, from a checkpoint, with the code that began it, to the end of an
    undisturbed run."""
    job, folder = trainings[name], trainings[name].file.parent
    job.ended(restarts=2 if name == "single" else 1)
    assert job.log().count("from epoch 1, step 1 on") == 1, job.log()
    assert re.search("from epoch 1, step [23] on", job.log()), job.log()
    quiet = trainings["srun" if name in [*DDP, "node0"] else "quiet"]
    quiet.ended()
    output, other = folder / job.output, folder / "runs" / f"{quiet.file.stem}"
    assert [row["epoch"] for row in metrics(output)] == [1, 2]
    close(output, other, 1e-6)
    assert same(weights(output), weights(other))
    numbers = [trainings[name].number for name in (PAIR if name == "node0" else [name])]
    files = {f"{number}-{CODE[name]}" for number in numbers}
    assert set(os.listdir(output)) == files | {"last.pt", "metrics.csv", "model.pt"}
    if name == "array":
        job.task = f"{job.number}_0"
        job.ended("CANCELLED")  # and the requeue of the other task was not this one's


@pytest.mark.slow
def test_the_end_of_a_pair(trainings, work):
    """A job that comes back when the run has ended sees that it did. After a wrong flag none comes
    back, after another failure only if the other job is still there."""
    one = trainings["node1"]
    one.ended(restarts=1)
    command("scontrol", "requeue", one.number)
    one.wait_for("runs/pair has a finished run")
    one.ended(restarts=2)
    Path("beside.py").touch()
    Path("train_ddp_spawn.py").write_text(STAND_IN)
    waiting = [Job(name) for name in PAIR]
    for job in waiting:
        job.wait_for("arguments")
    for job in [Job(name, "wrong") for name in PAIR]:
        job.ended("FAILED")
        assert job.show("ExitCode") == "2:0"
    failing = [Job(name, "fail") for name in PAIR]
    for job in failing:
        job.wait_for_restart()
    for job in waiting + failing:
        command("scancel", job.number)
        job.ended("CANCELLED", restarts=int(job in failing))
    for name in PAIR:
        Job(name, "fail").ended("FAILED")

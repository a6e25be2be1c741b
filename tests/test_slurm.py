"""The sbatch files, submitted as they are to a real Slurm, which only holds a requeued job for 5 s
instead of 120. Nothing goes by the clock: a job is disturbed when its log shows how far it is.
Trainings run copies of the scripts that stand still before step 3 after as many requeues as STANDS
names: "01" is in a job's first life, and in the second."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from cluster import cluster, missing, start_machine
from helpers import *

pytestmark = pytest.mark.slow
PAIR, TRAINED = ["node0", "node1"], SCRIPTS[:5]  # fsdp2.sh is ddp_torchrun.sh with another script
FILES = {name: ROOT / "slurm" / f"{name}.sh" for name in SCRIPTS + PAIR}
TORCHRUN_FILES = ["ddp_torchrun", "fsdp2"]  # for four GPUs and 16 cores
CODE = {name: f"train_{name}.py" for name in SCRIPTS} | dict.fromkeys(PAIR, "train_ddp_spawn.py")
WARN = ["scancel", "--signal=USR1", "--batch"]  # as Slurm does before a time limit
FLAGS = "--dataset synthetic --epochs 2 --checkpoint-minutes 0 --log-every 1".split()
OPTIONS = {"ddp_torchrun": ["--partition=frail", "--nodes=2", "--gres=gpu:1"]}
OPTIONS |= {"dp": ["--partition=spare"], "ddp_spawn": ["--partition=patient"]}
HEAD = """\
class datasets:
    CIFAR10 = FashionMNIST = None
STAND = 9999 * (os.environ.get("SLURM_RESTART_COUNT", "0") in os.environ["STANDS"])
"""
# Without torchvision and with less data a start takes half the time.
CHANGES = ["from torchvision import datasets, models\n", HEAD, "from torchvision.t", "# "]
CHANGES += ["(10_000, seed", "(640, seed", "(2_000, seed", "(203, seed"]
CHANGES += ["loss.backward()", "time.sleep(STAND * (step == 3)); loss.backward()"]
STAND_IN = """\
import os, sys, time
import beside
print(f"arguments {sys.argv}\\n", end="")  # in one piece
if "fail" in sys.argv and int(os.environ["SLURM_PROCID"]) + 1 == int(os.environ["SLURM_NTASKS"]):
    raise KeyError("mine")
time.sleep(9999 * ("wrong" not in sys.argv))
sys.exit(2)
"""


class Job:
    patience = LIMIT  # seconds; a slow machine gets more

    def __init__(self, name, *flags, options=(), file=None):
        words = ["sbatch", "--parsable", *options, file or FILES[name], *flags]
        self.name, self.number = name, command(*words)
        self.task, self.file = self.number, Path(f"{name}-{self.number}.out").resolve()
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

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, self.patience, 0.2)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """{name: job}. When all stand, their scripts are edited and each job is disturbed."""
    if missing() or torch.accelerator.is_available():
        pytest.skip(missing() or "its pretended GPUs would be mixed up with the real ones")
    folder, jobs = tmp_path_factory.mktemp("slurm"), {}
    with pytest.MonkeyPatch.context() as patch, cluster(folder) as machines:
        patch.chdir(tmp_path_factory.mktemp("train"))
        os.environ.update(PYTHON=sys.executable, OMP_NUM_THREADS="1")  # cluster puts them back
        for name in TRAINED:
            edited(name, *CHANGES).rename(CODE[name])

        def train(name, *flags, stands="0", options=(), file=None):
            options = [f"--export=ALL,STANDS={stands}", *OPTIONS.get(name, options)]
            return Job(name, *FLAGS, *flags, options=options, file=file)

        begin, jobs["quiet"] = time.monotonic(), train("single", stands="")
        jobs["quiet"].wait_for("into ")
        Job.patience = max(LIMIT, round(60 * (time.monotonic() - begin)))
        timeout = ["--timeout", Job.patience]
        jobs["srun"] = train("srun", stands="", file=ROOT / "tests" / "srun.sh")
        for name in TRAINED:
            flags = timeout * (name in DDP) + ["--nproc-per-node", 2] * (name == "ddp_spawn")
            jobs[name] = train(name, *flags, stands="01" if name == "single" else "0")
        jobs["array"] = train("single", options=["--array=0-1%1", "--output=%x-%A.out"])
        jobs["array"].task += "_1"
        jobs["node1"] = train("node1", *timeout, stands="")  # it waits in step 3 for rank 0
        jobs["node1"].wait_for("machine 1 waits for machine 0 at tcp://node0:23456")
        jobs["node0"] = train("node0", *timeout)
        for name in jobs.keys() - {"node1"}:  # which prints nothing
            jobs[name].wait_for("epoch 1/2 step 2/")  # then the checkpoint of step 1 is whole
        for name in TRAINED:
            Path(CODE[name]).write_text("raise SystemExit('edited')\n")
        # Preempts dp at once, and ddp_spawn with a SIGTERM and a GraceTime.
        urgent = "sbatch -p urgent --nodes=2 --gres=gpu:40 --output=/dev/null --wrap=hostname"
        command(*urgent.split())
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
        command(*WARN, jobs["array"].task)
        limited = [jobs[name] for name in ("single", "ddp_multigpu_proc", "node0")]
        for job in limited:
            command("scontrol", "update", f"job={job.number}", "endtime=now+80")  # USR1 within 30 s
        for job in limited:
            job.wait_for("DUE TO JOB REQUEUE")
            command("scontrol", "update", f"job={job.number}", "timelimit=60")  # of its next life
        jobs["single"].wait_for("into ", 2)
        command("scontrol", "requeue", jobs["single"].number)
        elastic.wait_for("DUE TO NODE FAILURE")
        machines["node4"] = start_machine(folder, "node4")
        yield jobs


def test_what_the_files_start(trainings, work, monkeypatch):
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
        job.wait_for("arguments", 4 if job.name in TORCHRUN_FILES else 1)  # its GPUs
        code = f"{job.output}/{job.number}-{CODE[job.name]}"
        flags = rf"'{code}', '--resume', '--output', '{job.output}', (.*, )?'--lr', 'a b'"
        assert re.search(rf"arguments \[{flags}(, '--rank', '\d')?\]", job.log()), job.log()
        cores = 4 if job.name == "single" else 16 if job.name in TORCHRUN_FILES else 8
        assert command("pgrep", "-f", f"^srun --cpus-per-task={cores} .*{job.number}-.*--lr a b")
        assert f"apptainer exec --nv my image.sif {sys.executable} -u " in job.log()
    for name in SCRIPTS:
        Path(CODE[name]).write_text(STAND_IN.replace("arguments", "edited"))
    new = Job("single", "wrong", "--output", "mine")
    for job in jobs:
        command(*WARN, job.number)
    for job in jobs[1:]:
        job.wait_for("arguments", 8 if job.name in TORCHRUN_FILES else 2)
        command(*WARN, job.number)
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


@pytest.mark.parametrize("name", [*TRAINED, "array", "node0"])
def test_it_goes_on(trainings, name, monkeypatch):
    """In its own folder, from a checkpoint, with the code that began it, to the end of an
    undisturbed run."""
    job, quiet = trainings[name], trainings["srun" if name in [*DDP, "node0"] else "quiet"]
    monkeypatch.chdir(job.file.parent)
    job.ended(restarts=2 if name == "single" else 1)
    assert job.log().count("from epoch 1, step 1 on") == 1, job.log()
    assert re.search("from epoch 1, step [23] on", job.log()), job.log()
    quiet.ended()
    assert [row["epoch"] for row in metrics(job.output)] == [1, 2]
    close(job.output, quiet.output, 1e-6)
    assert same(weights(job.output), weights(quiet.output))
    assert Path(job.output, f"{job.number}-{CODE[job.name]}").exists()
    if name == "array":
        job.task = f"{job.number}_0"
        job.ended("CANCELLED")  # and the requeue of the other task was not this one's


def test_the_end_of_a_pair(trainings, work, monkeypatch):
    """A job that comes back when the run has ended sees that it did. After a wrong flag none comes
    back, after another failure only if the other job is still there. Script and meeting place can
    be others."""
    one = trainings["node1"]
    one.ended(restarts=1)
    command("scontrol", "requeue", one.number)
    one.wait_for("runs/pair has a finished run")
    one.ended(restarts=2)
    Path("beside.py").touch()
    Path("mine.py").write_text(STAND_IN)
    monkeypatch.setenv("INIT_METHOD", "tcp://mine:1")
    waiting = [Job(name, "mine.py") for name in PAIR]
    flags = "'--resume', '--output', 'runs/pair', '--init-method', 'tcp://mine:1'"
    for job in waiting:
        job.wait_for(f"-mine.py', {flags}")
    for job in [Job(name, "mine.py", "wrong") for name in PAIR]:
        job.ended("FAILED")
        assert job.show("ExitCode") == "2:0"
    for name in PAIR:
        Path(f"{name}.sh").write_text(FILES[name].read_text().replace("requeues=20", "requeues=1"))
    for job in [Job(name, "mine.py", "fail", file=f"{name}.sh") for name in PAIR]:
        job.ended("FAILED", restarts=1)
    for job in waiting:
        command("scancel", job.number)
        job.ended("CANCELLED")
    for name in PAIR:
        Job(name, "mine.py", "fail").ended("FAILED")

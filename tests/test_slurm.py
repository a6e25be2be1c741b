"""The sbatch files on a real Slurm, which only holds a requeued job for 5 s instead of 120. Nothing
goes by the clock: a job is disturbed when its log shows how far it is. Trainings run copies of the
scripts that stand still before step 3 in their first life (in an array, in its first task)."""

import os
import re
import sys
import time
from pathlib import Path

import helpers
import pytest
import torch
from cluster import cluster, missing, start_machine
from helpers import DDP, LIMIT, ROOT, SCRIPTS, close, command, edited, wait_until, weights

pytestmark = pytest.mark.slow
PAIR, TRAINED = ["node0", "node1"], SCRIPTS[:5]  # fsdp2.sh is ddp_torchrun.sh with another script
CODE = {name: f"train_{name}.py" for name in SCRIPTS} | dict.fromkeys(PAIR, "train_ddp_spawn.py")
WARN = ["scancel", "--signal=USR1", "--batch"]  # as Slurm does before a time limit
FLAGS = "--dataset synthetic --epochs 2 --checkpoint-minutes 0 --log-every 1".split()
OPTIONS = {"dp": "-p spare", "ddp_spawn": "-p patient", "whole": "--gres=gpu:2"}
OPTIONS |= {"ddp_torchrun": "-p frail --nodes=2 --gres=gpu:1", "two": "--nodes=2 --gres=gpu:1"}
OPTIONS |= {"array": "--array=0-1%1 --no-requeue --output=%x-%A.out", "resume": "--gres=gpu:2"}
OUTPUTS = dict.fromkeys(PAIR, "runs/pair") | {"array": "runs/array", "whole": "runs/whole"}
STANDS = """
LIFE = os.environ.get("SLURM_ARRAY_TASK_ID", os.environ.get("SLURM_RESTART_COUNT", "0"))
STANDS = os.environ["STANDS"] == LIFE
"""
# Without torchvision and with less data a start takes half the time.
CHANGES = ["from torchvision import datasets, models\n", STANDS, "from torchvision.t", "# "]
CHANGES += ["(10_000, ", "(640, ", "(2_000, ", "(203, "]
CHANGES += ["loss.backward()", "time.sleep(9999 * (STANDS and step == 3)); loss.backward()"]
MINIMAL = ['"num_workers": 4, "persistent_workers": True', '"num_workers": 0']
MINIMAL += ["import os\n", "import os\nimport time\n" + STANDS]
MINIMAL += ["sampler.set", "time.sleep(9999 * (STANDS and epoch == 2)); sampler.set"]
# For a GraceTime (slurm/README.md): srun ends first, and Slurm requeues no job that has ended.
GRACE = 'scontrol show job "$SLURM_JOB_ID" | grep PreemptTime=2 && scontrol requeue "$SLURM_JOB_ID"'
EDITS = {"ddp_spawn": ["wait $! # ... so", f"wait $! || ({GRACE}) #"]}
EDITS |= {"resume": [CODE["ddp_torchrun"], "minimal/ddp_resume.py"]}
EDITS |= {"array": [CODE["single"], "in_array.py"]}
STAND_IN = """\
import os, sys, time
import beside
print(f"arguments {sys.argv}, {os.environ['SLURM_CPUS_PER_TASK']} cores\\n", end="")  # in one piece
if "fail" in sys.argv and int(os.environ["SLURM_PROCID"]) + 1 == int(os.environ["SLURM_NTASKS"]):
    raise KeyError("mine")
time.sleep(9999 * ("wrong" not in sys.argv))
sys.exit(2)
"""


def changed(path, *changes):
    """The path of a copy of the file, with these changes."""
    text = (ROOT / path).read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text)
    return path


class Job:
    def __init__(self, name, *flags, options=(), file=None):
        file = file or ROOT / "slurm" / f"{name}.sh"
        words = ["sbatch", "--parsable", f"--job-name={name}", *options, file, *flags]
        self.name, self.number = name, command(*words)
        self.task, self.file = self.number, Path(f"{name}-{self.number}.out").resolve()
        self.output = OUTPUTS.get(name, f"runs/{name}-{self.number}")

    def show(self, field):
        return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", self.task))[1]

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def over(self):
        return self.show("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def wait_for(self, text, times=1):
        wait_until(lambda: self.log().count(text) >= times or self.over(), 2 * LIMIT, 0.2)
        assert self.log().count(text) >= times, self.log()

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, 2 * LIMIT, 0.2)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, data):
    """{name: job}. When all stand, their scripts are edited and each job is disturbed."""
    if missing() or torch.accelerator.is_available():
        pytest.skip(missing() or "its pretended GPUs would be mixed up with the real ones")
    folder, jobs = tmp_path_factory.mktemp("slurm"), {}
    with pytest.MonkeyPatch.context() as patch, cluster(folder) as machines:
        patch.chdir(tmp_path_factory.mktemp("train"))
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # until the end
        os.environ.update(PYTHON=sys.executable, OMP_NUM_THREADS="1")
        os.symlink(data, "data")
        for name in "ddp", "ddp_resume":
            changed(f"minimal/{name}.py", *MINIMAL)
        for name, code in [("single", "in_array.py"), *list(CODE.items())[:5]]:
            edited(name, *CHANGES).rename(code)

        def train(name, *flags, file=None, stands="0"):
            if isinstance(file, str):
                file = changed(f"slurm/{file}.sh", "--device cuda ", "", *EDITS.get(name, []))
            options = [f"--export=ALL,STANDS={stands}", *OPTIONS.get(name, "").split()]
            jobs[name] = Job(name, *flags, options=options, file=file)

        minimal, srun = ROOT / "slurm" / "minimal.sh", ROOT / "tests" / "srun.sh"
        train("quiet", *FLAGS, file="single", stands="")
        train("srun", *FLAGS, file=srun, stands="")
        train("whole", "minimal/ddp_resume.py", "--output", "runs/whole", file=minimal, stands="")
        train("two", "minimal/ddp.py", file=minimal, stands="")
        for name in TRAINED:
            train(name, *FLAGS, *["--nproc-per-node", 2] * (name == "ddp_spawn"), file=name)
        train("resume", file="ddp_torchrun")
        train("array", *FLAGS, "--output", "runs/array", file="single")
        train("node0", *FLAGS, file="node0")
        train("node1", *FLAGS, file="node1", stands="")
        jobs["array"].task += "_0"
        for name in ["array", "node0", *TRAINED]:
            jobs[name].wait_for("epoch 1/2 step 2/")  # then the checkpoint of step 1 is whole
        jobs["resume"].wait_for("epoch 1:")
        for name in ["minimal/ddp_resume.py", *(CODE[name] for name in TRAINED)]:
            Path(name).write_text("raise SystemExit('edited')\n")
        # Preempts dp at once, and ddp_spawn with a SIGTERM and a GraceTime.
        urgent = "sbatch -p urgent --nodes=2 --gres=gpu:40 --output=/dev/null --wrap=hostname"
        command(*urgent.split())
        machines["node4"].kill()
        command(*WARN, jobs["array"].task)
        jobs["array"].wait_for("presently disabled")  # its requeueing
        command("scancel", jobs["array"].task)
        limited = [jobs[name] for name in ("single", "ddp_multigpu_proc", "resume", "node0")]
        for job in limited:
            command("scontrol", "update", f"job={job.number}", "endtime=now+80")  # USR1 within 30 s
        for job in limited:
            job.wait_for("DUE TO JOB REQUEUE")
            command("scontrol", "update", f"job={job.number}", "timelimit=60")  # of its next life
        jobs["ddp_torchrun"].wait_for("DUE TO NODE FAILURE")
        machines["node4"] = start_machine(folder, "node4")
        jobs["array"].task = f"{jobs['array'].number}_1"
        yield jobs


def test_what_the_files_start(trainings, work):
    """Arguments of a stand-in. A job that is warned comes back with the code that began it, once as
    `requeues` is 1 here. If the last task fails, all end, and the log names it. Without the GPUs
    that the file asks for, the script ends in a line."""
    Path("beside.py").touch()
    for name in SCRIPTS:
        Path(CODE[name]).write_text(STAND_IN)
    jobs = []
    for name, code in CODE.items():
        file = changed(f"slurm/{name}.sh", "COUNT < 20", "COUNT < 1")
        jobs.append(Job(name, "--lr", "a b", options=["--nodes=1"], file=file))
    failing = [Job(name, "fail", options=["--nodes=2"]) for name in SCRIPTS[3:]]
    lives = [4 if job.name in ("ddp_torchrun", "fsdp2") else 1 for job in jobs]  # its GPUs
    for job, processes in zip(jobs, lives):
        job.wait_for("arguments", processes)
        code = f"{job.number}-{CODE[job.name]}" if job.name in PAIR else CODE[job.name]
        flags = f"'--device', 'cuda', '--resume', '--output', '{job.output}', (.*, )?'--lr', 'a b'"
        line = rf"arguments \['{job.output}/{code}', {flags}(, '--rank', '0')?\], (4|16) cores"
        assert re.search(line, job.log()), job.log()
    for name in SCRIPTS:
        Path(CODE[name]).write_text(STAND_IN.replace("arguments", "edited"))
    for job in jobs:
        command(*WARN, job.number)
    for job, processes in zip(jobs, lives):
        job.wait_for("arguments", 2 * processes)
        command(*WARN, job.number)
    time.sleep(1)
    for job in jobs:
        assert (job.show("JobState"), job.show("Restarts")) == ("RUNNING", "1")
        command("scancel", job.number)
    for job in failing:
        job.ended("FAILED")
        assert re.search(r"srun: error: node(\d): task \1: Exited with exit code 1", job.log())
    Path(CODE["single"]).write_bytes((ROOT / CODE["single"]).read_bytes())
    refused = Job("single")
    refused.ended("FAILED")
    assert "argument --device: invalid choice: 'cuda'" in refused.log()


@pytest.mark.parametrize("name", [*TRAINED, "array", "node0"])
def test_it_continues(trainings, name, monkeypatch):
    """In its own folder, from a checkpoint, with the code that began it, to the end of an
    undisturbed run."""
    job, quiet = trainings[name], trainings["srun" if name in [*DDP, "node0"] else "quiet"]
    monkeypatch.chdir(job.file.parent)
    job.ended(restarts=0 if name == "array" else 1)
    assert job.log().count(": 0 epochs and 0 steps are done") == 1, job.log()
    assert re.search(": 0 epochs and [12] steps are done", job.log()), job.log()
    quiet.ended()
    assert len(helpers.metrics(job.output)) == 2
    close(job.output, quiet.output, 1e-6)
    assert helpers.same(weights(job.output), weights(quiet.output))


def test_minimal(trainings, monkeypatch):
    """minimal/ddp_resume.py over a time limit, and minimal.sh on one machine and on two."""
    resume, whole, two = (trainings[name] for name in ("resume", "whole", "two"))
    monkeypatch.chdir(resume.file.parent)
    for job in resume, whole, two:
        job.ended(restarts=1 if job is resume else 0)
        assert re.findall(r"epoch (\d)", job.log()) == list("01234")
    assert re.findall("epoch.*", resume.log()) == re.findall("epoch.*", whole.log())
    assert helpers.same(weights(resume.output), weights(whole.output))


def test_the_end_of_a_pair(trainings, work):
    """If one is gone the other comes back, too, but not after a wrong flag, and not if the other
    job has left the queue."""
    trainings["node1"].ended(restarts=1)
    Path("beside.py").touch()
    Path("train_ddp_spawn.py").write_text(STAND_IN)
    files = [changed(f"slurm/{name}.sh", "COUNT < 20", "COUNT < 1") for name in PAIR]
    waiting = [Job(name) for name in PAIR]
    for job in waiting:
        job.wait_for("arguments")
    for job in [Job(name, "wrong") for name in PAIR]:
        job.ended("FAILED")
        assert job.show("ExitCode") == "2:0"
    for job in [Job(name, "fail", file=file) for name, file in zip(PAIR, files)]:
        job.ended("FAILED", restarts=1)
    for job in waiting:
        command("scancel", job.number)
        job.ended("CANCELLED")
    for name in PAIR:
        Job(name, "fail").ended("FAILED")

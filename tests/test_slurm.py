"""The sbatch files, submitted as they are to a real Slurm, which only holds a requeued job for 5 s
instead of 120. Most jobs train with copies of the scripts that sleep at every step while
OUTPUT.slow has a byte left, and each start takes one: they last until they have been disturbed, and
leave the cores to others. Less data and no torchvision make them start sooner."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from cluster import cluster, missing, start_machine
from helpers import ROOT, SCRIPTS, command, kill, same_run, script, wait_until

PAIR = ["node0", "node1"]
FILES = {name: ROOT / "slurm" / f"{name}.sh" for name in SCRIPTS + PAIR}
EPOCHS, STEP = 5, "epoch 1/5 step 1"  # the files' --resume wins over --overwrite
FLAGS = ["--dataset", "synthetic", "--epochs", EPOCHS, "--checkpoint-minutes", 0, "--log-every", 1]
FLAGS += ["--overwrite", "--output"]
# On two processes all runs have the same bits. A job of a pair that is struck while it meets the
# other leaves it waiting for the whole of --timeout.
EXTRA = {"ddp_spawn": ["--nproc-per-node", 2]} | dict.fromkeys(PAIR, ["--timeout", 30])
SLOW = 'time.sleep(4 * (os.path.getsize(f"{args.output}.slow") > 0)); '
LESS = 'slow = Path(f"{args.output}.slow"); slow.write_text(slow.read_text()[1:]); '
CHANGES = {"loss.backward()": SLOW + "loss.backward()", 'print(f"into ': LESS + 'print(f"into '}
CHANGES |= {"(10_000, seed": "(640, seed", "(2_000, seed": "(203, seed"}
DATASETS = "class datasets:\n    CIFAR10 = FashionMNIST = None\n"
CHANGES |= {"from torchvision import datasets, models\n": DATASETS, "from torchvision.t": "# "}
STAND_IN = """\
import os, sys, time
print("arguments", sys.argv[1:])
if "fail" in sys.argv and int(os.environ["SLURM_PROCID"]) + 1 == int(os.environ["SLURM_NTASKS"]):
    raise KeyError("mine")
time.sleep(999)
"""


class Job:
    def __init__(self, name, *flags, folder=".", options=(), file=None):
        words = ["sbatch", "--parsable", f"--chdir={Path(folder).resolve()}", *options]
        self.number = command(*words, file or FILES[name], *flags)
        self.name, self.file = name, Path(folder, f"{name}-{self.number}.out").resolve()

    def show(self, field):
        return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", self.number))[1]

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def over(self):
        return self.show("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def wait_for(self, text, times=1):
        wait_until(lambda: self.log().count(text) >= times or self.over(), 300, 0.2)
        assert self.log().count(text) >= times, self.log()

    def ended(self, state="COMPLETED", restarts=(0,)):
        wait_until(self.over, 300, 0.2)
        assert self.show("JobState") == state and int(self.show("Restarts")) in restarts, self.log()

    def went_on(self, restarts=(1,)):
        """It has restarted, not always from the beginning, and ended as an undisturbed run."""
        self.ended(restarts=restarts)
        assert self.log().count("from epoch 1, step 1 on") <= int(self.show("Restarts")), self.log()
        quiet = self.output.parent / ("quiet1" if self.name in SCRIPTS[:2] else "quiet2")
        wait_until((quiet / "model.pt").exists, pause=0.2)
        same_run(self.output, quiet, EPOCHS)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function that submits a training whose first `times` starts are slow."""
    if missing() or torch.accelerator.is_available():
        pytest.skip(missing() or "its pretended GPUs would be mixed up with the real ones")
    folder = tmp_path_factory.mktemp("train")
    for name in SCRIPTS:
        text = Path(script(name)).read_text()
        for old, new in CHANGES.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / f"train_{name}.py").write_text(text)

    def train(name, output, *first, options=(), times=1):
        Path(folder, f"{output}.slow").write_text("s" * (times + 1))
        gpus = ["--gres=gpu:1"] if name == "ddp_torchrun" else []
        flags = [*first, *EXTRA.get(name, []), *FLAGS, output]
        job = Job(name, *flags, folder=folder, options=[*gpus, *options])
        job.output = folder / output
        return job

    train.cluster = tmp_path_factory.mktemp("slurm")
    with cluster(train.cluster) as train.machines:  # it puts the environment back at its end
        os.environ.update(PYTHON=sys.executable, OMP_NUM_THREADS="1")
        yield train


@pytest.fixture(scope="module")
def limited(train):
    """Jobs of two minutes, of which the warning takes one; they go on beside the other tests.
    Of one pair only machine 1 has a limit, and comes first; of the other, machine 0."""

    def start(*words, minutes=2):
        return train(*words, options=[f"--time={minutes}"], times=2)

    train("single", "quiet1", times=0)
    train("ddp_spawn", "quiet2", times=0)
    jobs = [start(name, name) for name in SCRIPTS]
    late = start("node1", "pair1")
    late.wait_for("machine 1 waits for machine 0 at tcp://node0:23456")
    jobs += [start("node0", "pair1", minutes=20), late]
    with pytest.MonkeyPatch.context() as patch:
        Path(f"{late.output}.meet").write_text("what an earlier run left")
        patch.setenv("INIT_METHOD", f"file://{late.output}.meet")
        jobs.append(start("node0", "pair0", "train_ddp_multigpu_proc.py"))
        jobs[-1].wait_for("machine 0 waits for machine 1 at file://")
        jobs.append(start("node1", "pair0", "train_ddp_multigpu_proc.py", minutes=20))
    return jobs


@pytest.mark.slow
def test_command_lines_the_cap_and_failures(limited, work, monkeypatch):
    """Arguments, cores, and what apptainer is told: a stand-in, which starts the rest. With a cap
    of 1, or where requeueing is forbidden, a warned job goes on to its limit. If the last task has
    a mistake in it, the others end too, and the log names task and host."""
    for name in SCRIPTS:
        Path(f"train_{name}.py").write_text(STAND_IN)
    Path("apptainer").write_text('#!/bin/sh\necho "apptainer $*"\nshift 3\nexec "$@"\n')
    Path("apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{work}:{os.environ['PATH']}")
    monkeypatch.setenv("CONTAINER", "my image.sif")
    jobs = [Job("single", options=["--no-requeue"])]
    for name, file in FILES.items():
        Path(f"{name}.sh").write_text(file.read_text().replace("requeues=20", "requeues=1"))
        jobs.append(Job(name, "--lr", "a b", options=["--nodes=1"], file=f"{name}.sh"))
    for job in jobs[1:]:
        job.wait_for("arguments")
        cores = 4 if job.name == "single" else 8
        assert command("pgrep", "-f", f"^srun --cpus-per-task={cores} .*--lr a b")
        assert f"apptainer exec --nv my image.sif {sys.executable} -u " in job.log()
        assert re.search(r"\['--resume', (.*, )?'--lr', 'a b'(, '--rank', '\d')?\]", job.log())
        command("scancel", "--signal=USR1", "--batch", job.number)
    for job in jobs:
        job.wait_for("apptainer exec", 1 if job is jobs[0] else 2)
        command("scancel", "--signal=USR1", "--batch", job.number)
    time.sleep(8)
    for i, job in enumerate(jobs):
        assert job.show("JobState") == "RUNNING" and job.show("Restarts") == str(min(1, i))
        command("scancel", job.number)
    for job in [Job(name, "fail") for name in SCRIPTS]:
        job.ended("FAILED")
        where = r"node(\d): task \1" if job.name in SCRIPTS[3:] else r"node\d: task 0"
        assert re.search(f"srun: error: {where}: Exited with exit code 1", job.log()), job.log()


@pytest.mark.slow
def test_preempted_and_requeued(limited, train):
    """A preemption kills at once, or leaves a GraceTime after a SIGTERM (partition patient)."""
    jobs = [train("dp", "killed", options=["-p", "spare"]), train("single", "again")]
    jobs.append(train("ddp_spawn", "patient", options=["-p", "patient"]))
    for job in jobs:
        job.wait_for(STEP)
    command(*"sbatch -p urgent --nodes=2 --gres=gpu:20 --output=/dev/null --wrap=hostname".split())
    command("scontrol", "requeue", jobs[1].number)
    for job in jobs:
        job.went_on()


@pytest.mark.slow
def test_a_rank_and_a_machine_that_die(limited, train):
    """torchrun starts all ranks anew when one dies, and Slurm the job when a machine does."""
    job = train("ddp_torchrun", "died", options=["-p", "spare"], times=2)
    job.wait_for(STEP)
    commands = command("pgrep", "-af", "torchrun.py .*--output died").splitlines()
    ranks = [line for line in commands if "distributed.run" not in line]
    assert len(ranks) == 2
    kill(int(ranks[1].split()[0]))
    job.wait_for("into ", 2)
    assert job.show("Restarts") == "0"
    train.machines["node3"].kill()
    assert wait_until(lambda: job.show("Restarts") == "1", pause=0.2), "Slurm keeps node3"
    train.machines["node3"] = start_machine(train.cluster, "node3")
    job.went_on()


@pytest.mark.slow
def test_the_time_limits_and_the_end_of_a_pair(limited, train):
    """A job that comes back alone, as its limit struck when the run ended, sees that it did. A
    wrong flag ends both jobs of a pair and torchrun's, and a `scancel` of one ends the other."""
    for job in limited:
        job.went_on(restarts=range(2, 9))
    model = limited[-1].output.parent / "pair1" / "model.pt"
    written = model.stat()
    for job in [train(name, "pair1") for name in PAIR]:
        job.ended()
        assert "pair1 has a finished run" in job.log() and model.stat() == written
    wrong = "wrong", "--lr", "-1"
    for job in [train(name, *wrong, options=["--nodes=1"]) for name in [*PAIR, "ddp_torchrun"]]:
        job.ended("FAILED")
        assert "--lr: -1 is less than 0" in job.log() and job.show("ExitCode") in ("1:0", "2:0")
    zero, one = (train(name, "cancelled") for name in PAIR)
    zero.wait_for(STEP)
    command("scancel", zero.number)
    one.ended("FAILED")
    zero.ended("CANCELLED")

"""The sbatch files on a real Slurm, which only holds a requeued job for 5 s instead of 120. Nothing
goes by the clock: a job is disturbed when its log shows how far it is. Trainings run copies of the
scripts that stand still before step 3 in their first life."""

import os
import re
import shutil
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import helpers
import pytest
import torch
from helpers import DDP, LIMIT, ROOT, SCRIPTS, Cold, changed, close, command, wait_until, weights

pytestmark = pytest.mark.slow
MACHINES = ["node0", "node1", "node2", "node3"]
HOSTS = "127.0.0.1 node0\n127.0.0.2 node1\n127.0.0.3 node2\n127.0.0.4 node3\n"
PAIR, TRAINED = MACHINES[:2], SCRIPTS[1:5]  # fsdp2.sh is ddp_torchrun.sh with another script
CODE = {name: f"train_{name}.py" for name in SCRIPTS} | dict.fromkeys(PAIR, "train_ddp_spawn.py")
WARN = ["scancel", "--signal=USR1", "--batch"]  # as Slurm does before a time limit
FLAGS = "--dataset synthetic --epochs 2 --checkpoint-minutes 0 --log-every 1".split()
OPTIONS = {"dp": "-p spare", "ddp_spawn": "-p patient", "whole": "--gres=gpu:2"}
OPTIONS |= {"ddp_torchrun": "--nodes=2 --gres=gpu:1", "two": "--nodes=2 --gres=gpu:1"}
OPTIONS |= {"resume": "--gres=gpu:2"}
OUTPUTS = dict.fromkeys(PAIR, "runs/pair") | {"whole": "runs/whole"}
PAGE = (ROOT / "slurm" / "README.md").read_text()  # with the last line for a GraceTime
EDITS = {"ddp_spawn": ["wait $! # ... so", re.search(r"^wait .*sleep .*", PAGE, re.M)[0] + " #"]}
EDITS |= {"resume": [CODE["ddp_torchrun"], "minimal/ddp_resume.py"]}
STANDS = """
STANDS = os.environ["STANDS"] == os.environ.get("SLURM_RESTART_COUNT", "0")
"""
# Without torchvision and with less data a start takes half the time.
CHANGES = ["from torchvision import datasets, models\n", STANDS, "from torchvision.t", "# "]
CHANGES += ["(10_000, ", "(640, ", "(2_000, ", "(203, "]
CHANGES += ["loss.backward()", "time.sleep(9999 * (STANDS and step == 3)); loss.backward()"]
MINIMAL = ["import os\n", "import os\nimport time\n" + STANDS]
MINIMAL += ["sampler.set", "time.sleep(9999 * (STANDS and epoch == 2)); sampler.set"]
STAND_IN = """\
import os, sys, time
import beside, here
if os.environ.get("LOCAL_RANK", "0") == "0":
    print("arguments", sys.argv)
time.sleep(9999 * (sys.argv[-1] not in "12"))
sys.exit(int(sys.argv[-1]))
"""


@contextmanager
def cluster(folder, patch):
    """Four machines on this one, each with its own name, process numbers, and pretended cores and
    GPUs. SLURM_CONF points Slurm's commands at them. All that they write is in the folder."""
    folder = Path(folder).resolve()  # Slurm's daemons look for relative paths elsewhere
    for name in "munge", "state", *(f"spool-{machine}" for machine in MACHINES):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    for number in range(40):
        command("mknod", folder / f"gpu{number}", "c", 1, 3)
    ports = [helpers.free_port() for _ in range(5)]
    line = "NodeName={} NodeAddr=127.0.0.1 Port={} CPUs=199 Gres=gpu:40\n"
    nodes = "".join(map(line.format, MACHINES, ports))
    host, version = socket.gethostname(), 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
    conf = (ROOT / "tests" / "slurm.conf").read_text()
    (folder / "slurm.conf").write_text(conf.format(**locals()))
    (folder / "gres.conf").write_text(f"Name=gpu AutoDetect=off File={folder}/gpu[0-39]\n")
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + HOSTS)
    patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")
    patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "-F", "--force", "-S", folder / "munge" / "socket", *munge]
    daemons = [Cold(munge, folder / "munged.out")]
    try:
        assert wait_until((folder / "munge" / "socket").exists), "munged"
        daemons.append(Cold(["slurmctld", "-D"], folder / "slurmctld.out"))
        own = "unshare --mount --uts --pid --fork --mount-proc --kill-child sh -c".split()
        for name in MACHINES:
            hosts = f"hostname {name}; mount --bind {folder}/hosts /etc/hosts"
            words = [*own, f"{hosts}; slurmd -D -N {name}; exit"]
            daemons.append(Cold(words, folder / f"{name}.out"))
        ready = "sinfo -h -o '%t %D' 2> /dev/null | grep -qx 'idle 4'"
        assert wait_until(lambda: os.system(ready) == 0, pause=0.2), "the machines"
        yield
    finally:
        for daemon in reversed(daemons):
            helpers.kill(daemon.pid)
            helpers.finish([daemon])


class Job:
    def __init__(self, name, *flags, file, options=()):
        self.number = command("sbatch", "--parsable", f"--job-name={name}", *options, file, *flags)
        self.file = Path(f"{name}-{self.number}.out").resolve()
        self.output = OUTPUTS.get(name, f"runs/{name}-{self.number}")

    def show(self, field):
        return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", self.number))[1]

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def over(self):
        return self.show("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def wait_for(self, text, times=1):
        wait_until(lambda: self.log().count(text) >= times or self.over(), 2 * LIMIT, 0.2)
        assert wait_until(lambda: self.log().count(text) >= times, 5), self.log()

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, 2 * LIMIT, 0.2)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, data):
    """{name: job}. When all stand, each job is disturbed."""
    installed = all(shutil.which(name, path="/usr/sbin") for name in ("slurmctld", "munged"))
    if os.getuid() or not installed or torch.accelerator.is_available():
        pytest.skip("needs root, no GPU, and apt-get install slurm-wlm munge")
    folder, jobs = tmp_path_factory.mktemp("slurm"), {}
    with pytest.MonkeyPatch.context() as patch, cluster(folder, patch):
        patch.chdir(tmp_path_factory.mktemp("train"))
        patch.setenv("PYTHON", sys.executable)
        os.symlink(data, "data")
        for name in "ddp", "ddp_resume":
            changed(f"minimal/{name}.py", *MINIMAL)
        for name in SCRIPTS[:5]:
            changed(CODE[name], *CHANGES)

        def train(name, *flags, file=None, stands="0"):
            if isinstance(file, str):
                file = changed(f"slurm/{file}.sh", "--device cuda ", "", *EDITS.get(name, []))
            options = [f"--export=ALL,STANDS={stands}", *OPTIONS.get(name, "").split()]
            jobs[name] = Job(name, *flags, options=options, file=file)

        minimal = ROOT / "slurm" / "minimal.sh"
        train("quiet", *FLAGS, file="single", stands="")
        train("srun", *FLAGS, file=ROOT / "tests" / "srun.sh", stands="")
        train("whole", "minimal/ddp_resume.py", "--output", "runs/whole", file=minimal, stands="")
        train("two", "minimal/ddp.py", file=minimal, stands="")
        for name in TRAINED:
            train(name, *FLAGS, *["--nproc-per-node", 2] * (name == "ddp_spawn"), file=name)
        train("resume", file="ddp_torchrun")
        train("node0", *FLAGS, file="node0")
        train("node1", *FLAGS, file="node1", stands="")
        for name in ["node0", *TRAINED]:
            jobs[name].wait_for("epoch 1/2 step 2/")  # then the checkpoint of step 1 is whole
        jobs["resume"].wait_for("epoch 1:")
        # Preempts dp at once, and ddp_spawn with a SIGTERM and a GraceTime.
        command(*"sbatch -p urgent --nodes=2 --gres=gpu:40 -o /dev/null --wrap=hostname".split())
        limited = [jobs[name] for name in ("resume", *TRAINED[2:], "node0")]
        for job in limited:
            command("scontrol", "update", f"job={job.number}", "endtime=now+80")  # USR1 within 30 s
        for job in limited:
            job.wait_for("DUE TO JOB REQUEUE")
            command("scontrol", "update", f"job={job.number}", "timelimit=60")  # of its next life
        yield jobs


def test_what_the_files_start(trainings, work):
    """A stand-in, with these arguments. A job that is warned comes back with the code that began
    it, once as `requeues` is 1 here. One of a pair comes back, too, if it fails while the other is
    there, but not after a wrong flag."""
    os.mkdir("own")
    command("touch", "here.py", "own/beside.py")
    for name in SCRIPTS:
        Path("own", CODE[name]).write_text(STAND_IN)
    edits = ["COUNT < 20", "COUNT < 1", "script=", "script=own/"]
    files = {name: changed(f"slurm/{name}.sh", *edits) for name in CODE}
    jobs = [Job(name, "--lr", "a b", options=["--nodes=1"], file=files[name]) for name in CODE]
    for job in jobs:
        job.wait_for("arguments")
        words = rf"'{job.output}/\S+', '--device', 'cuda', '--resume', '--output', '{job.output}'"
        assert re.search(rf"arguments \[{words}, .*'--lr', 'a b'", job.log()), job.log()
    for name in PAIR:
        Job(name, 2, file=files[name]).ended("FAILED")
        Job(name, 1, file=files[name]).ended("FAILED", restarts=1)
    for name in SCRIPTS:
        Path("own", CODE[name]).write_text(STAND_IN.replace("arguments", "edited"))
    for job in jobs:
        command(*WARN, job.number)
    for job in jobs:
        job.wait_for("arguments", 2)
        command(*WARN, job.number)
    time.sleep(1)
    for job in jobs:
        command("scancel", job.number)
        job.ended("CANCELLED", restarts=1)
    wait_until(trainings["node1"].over, 2 * LIMIT, 0.2)  # while it is there, node0 is requeued
    Job("node0", 1, file=files["node0"]).ended("FAILED")


@pytest.mark.parametrize("name", [*TRAINED, "node0"])
def test_it_continues(trainings, name, monkeypatch):
    """In its own folder, from a checkpoint, to the end of an undisturbed run."""
    job, quiet = trainings[name], trainings["srun" if name in [*DDP, "node0"] else "quiet"]
    monkeypatch.chdir(job.file.parent)
    job.ended(restarts=1)
    assert re.search(": 0 epochs and [12] steps are done", job.log()), job.log()
    quiet.ended()
    close(job.output, quiet.output, 1e-6)
    assert helpers.same(weights(job.output), weights(quiet.output))


def test_minimal(trainings, monkeypatch):
    """minimal/ddp_resume.py over a time limit, and minimal.sh on one machine and on two."""
    resume, whole, two = (trainings[name] for name in ("resume", "whole", "two"))
    monkeypatch.chdir(resume.file.parent)
    for job, restarts in (resume, 1), (whole, 0), (two, 0):
        job.ended(restarts=restarts)
        assert re.findall(r"epoch (\d)", job.log()) == list("01234")
    assert helpers.same(weights(resume.output), weights(whole.output))

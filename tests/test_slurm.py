"""The job files on a real Slurm, in clusters of several kinds, in a folder with a space in its
name. What they start is a stand-in (stand_in.py), which takes no time; jobs train only where
training is the point. What needs no Slurm is in test_long.py."""

import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import helpers
import pytest
import stand_in
import torch
from altered import edit, replaced
from helpers import LIMIT, ROOT, Cold, by_mark, command, wait_until

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster at a time
MACHINES = ["node0", "node1", "node2", "node3"]
HOSTS = "127.0.0.1 node0\n127.0.0.2 node1\n127.0.0.3 node2\n127.0.0.4 node3\n"
PAGES = "".join((ROOT / "slurm" / name).read_text() for name in ("README.md", "clusters.md"))
NEWER = os.environ.get("NEWER_SLURM")  # the folder of a Debian with Slurm 24.05 or newer
KINDS = {  # changes of slurm.conf
    "plain": {},
    "newer": {},
    # Two threads a core, which are CPUs; memory is shared out, and little of it without --mem. When
    # a task has failed, or has ended two seconds ago, Slurm ends the others. It requeues no job
    # that does not ask for it.
    "threads": {
        "KillWait=5": "KillWait=5\nKillOnBadExit=1\nWaitTime=2\nJobRequeue=0",
        "CR_Core": "CR_CPU_Memory\nDefMemPerCPU=256",
        "CPUs=200": "Sockets=1 CoresPerSocket=100 ThreadsPerCore=2",
    },
    "no gres": {"GresTypes=gpu\n": "", " Gres=gpu:40": ""},
}
OUTPUT = "--resume --output runs/{job}"
SPAWN = "python train_ddp_spawn.py"
PAIR = f" --init-method tcp://node0:{10000 + os.getuid() % 20000} --nnodes 2 --node-rank "
STARTS = {  # what each file starts, once per node; $R is the node's number
    "single": f"python train_single.py {OUTPUT}",
    "dp": f"python train_dp.py --workers 16 {OUTPUT}",
    "ddp_spawn": SPAWN + " --init-method tcp://127.0.0.1:{port} " + OUTPUT,
    "ddp_torchrun": f"torchrun --standalone --nproc-per-node gpu train_ddp_torchrun.py {OUTPUT}",
    "ddp_torchrun_nodes": "torchrun --node-rank $R --nnodes {nodes} --nproc-per-node gpu "
    "--master-addr {host} --master-port {port} train_ddp_torchrun.py " + OUTPUT,
    "ddp_multigpu_proc": "python train_ddp_multigpu_proc.py --node-rank $R --nnodes {nodes} "
    "--init-method tcp://{host}:{port} --workers 16 " + OUTPUT,
    "node0": f"{SPAWN}{PAIR}0 --output runs/pair",
    "node1": f"{SPAWN}{PAIR}1 --output runs/pair",
    "long": "torchrun --node-rank $R --nnodes {nodes} --nproc-per-node gpu --master-addr {host} "
    "--master-port {port} complete/train.py FLAGS --resume --output {folder}",
}
SEVERAL = ["ddp_torchrun_nodes", "ddp_multigpu_proc", "long"]  # nodes
NODES = {name: 2 if name in SEVERAL[:2] else 1 for name in STARTS}


# Runs a command in another Debian ($0), with this machine's processes, devices and temporary files.
# The mounts are those of this command alone, and end with it.
INSIDE = """for place in proc dev sys tmp; do mount --rbind /$place "$0/$place"; done
exec chroot "$0" env -C "$PWD" PATH="${PATH#*:}" "$@" # without the first folder, see cluster
"""
CLIENTS = ["sbatch", "scontrol", "squeue", "scancel", "sinfo", "srun", "sacct"]


def configure(folder, kind):
    """Four machines on this one, with pretended CPUs and GPUs."""
    for number in range(40):
        command("mknod", folder / f"gpu{number}", "c", 1, 3)
    ports = [helpers.free_port() for _ in range(5)]
    line = "NodeName={} NodeAddr=127.0.0.1 Port={} CPUs=200 RealMemory=400000 Gres=gpu:40\n"
    nodes, host = "".join(map(line.format, MACHINES, ports)), socket.gethostname()
    conf = (ROOT / "tests" / "slurm.conf").read_text().format(**locals())
    (folder / "slurm.conf").write_text(replaced(conf, *itertools.chain(*KINDS[kind].items())))
    if kind != "no gres":
        (folder / "gres.conf").write_text(f"Name=gpu AutoDetect=off File={folder}/gpu[0-39]\n")
    version = 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    for number, name in enumerate(MACHINES, 1):  # only the machine itself knows its other name
        hosts = f"{Path('/etc/hosts').read_text()}{HOSTS}127.0.0.{number} lost-{name}\n"
        (folder / f"hosts-{name}").write_text(hosts)


@contextmanager
def cluster(folder, kind):
    """Slurm's daemons. Each machine's own has the machine's name and process numbers. SLURM_CONF
    points Slurm's commands at them. All that they write is in the folder."""
    folder = Path(folder).resolve()  # Slurm's daemons look for relative paths elsewhere
    for name in "munge", "state", "bin", *(f"spool-{machine}" for machine in MACHINES):
        (folder / name).mkdir()
    configure(folder, kind)
    inside, etc = [], "/etc"
    if kind == "newer":
        inside, etc = ["sh", "-c", INSIDE, NEWER], f"{NEWER}/etc"
        for name in CLIENTS:
            words = shlex.join(["unshare", "--mount", *inside, name])
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "-F", "--force", "-S", folder / "munge" / "socket", *munge]
    mounted = ["unshare", "--mount", *inside]
    machine = "unshare --mount --uts --pid --fork --mount-proc --kill-child sh -c".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # another Debian has no other of our folders
        patch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}:/usr/sbin")
        patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
        daemons = [Cold([*mounted, *munge], folder / "munged.out")]
        try:
            assert wait_until((folder / "munge" / "socket").exists), "munged"
            daemons.append(Cold([*mounted, "slurmctld", "-D"], folder / "slurmctld.out"))
            for name in MACHINES:
                lines = f"hostname {name}; mount --bind {folder}/hosts-{name} {etc}/hosts; "
                lines += shlex.join([*inside, "slurmd", "-D", "-N", name]) + "; exit"
                daemons.append(Cold([*machine, lines], folder / f"{name}.out"))
            ready = "sinfo -h -p whole -o '%t %D' 2> /dev/null | grep -qx 'idle 4'"
            assert wait_until(lambda: os.system(ready) == 0, pause=0.2), "the machines"
            yield
        finally:
            for daemon in reversed(daemons):
                helpers.kill(daemon.pid)
                helpers.finish([daemon])


@pytest.fixture(scope="module", params=by_mark(slow=KINDS))
def kind(request, tmp_path_factory):
    """A cluster of each kind, one after the other."""
    installed = all(shutil.which(name, path="/usr/sbin") for name in ("slurmctld", "munged"))
    if os.getuid() or not installed or torch.accelerator.is_available():
        pytest.skip("needs root, no GPU, and apt-get install slurm-wlm munge")
    if request.param == "newer" and not NEWER:
        pytest.skip("needs a Debian with Slurm 24.05 or newer, in the folder NEWER_SLURM")
    with cluster(tmp_path_factory.mktemp("slurm"), request.param):
        yield request.param


@pytest.fixture
def clone(kind, tmp_path, monkeypatch):
    """The clone in which a user works, here with stand-ins."""
    folder = tmp_path / "my work"
    folder.mkdir()
    stand_in.make_clone(ROOT, folder)
    monkeypatch.chdir(folder)
    edit(
        "slurm/long.sh",
        "sleep 5\n",
        "sleep 0.5\n",
        "sleep 15\n",
        "sleep 2\n",
        "{1..40}",
        "{1..9}",
    )
    yield folder
    command("scancel", "--user", "root")
    assert wait_until(lambda: not command("squeue", "-h"), 60, 0.2), command("squeue")


def on(*kinds, mark="slow"):
    params = by_mark(**{mark: kinds})
    return pytest.mark.parametrize("kind", params, indirect=True, scope="module")


class Job:
    """A job file that is submitted with these flags, of which long.sh's first is its folder; or the
    job of this number."""

    def __init__(self, name, *flags, options=(), number=None, **environment):
        self.name, self.folder = name, flags[0] if flags else ""
        words = ["sbatch", "--parsable", *options, f"slurm/{name}.sh", *flags]
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            self.number = number or command(*words)
        self.file = Path(f"{name}-{self.number}.out").resolve()

    def show(self, field):
        return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", self.number))[1]

    def tasks(self):
        """What Slurm knows of each."""
        return command("scontrol", "show", "job", self.number)

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def over(self):
        unfinished = "PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"
        return self.show("JobState") not in unfinished

    def wait_for(self, text):
        wait_until(lambda: text in self.log() or self.over(), LIMIT, 0.2)
        assert wait_until(lambda: text in self.log(), 5), self.log()

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, LIMIT, 0.1)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()
        return self

    def starts(self, count=0):
        """What the stand-ins have written down: words, folder and environment of each."""
        wait_until(lambda: len(starts(self.number)) >= count or self.over(), 60, 0.2)
        assert len(starts(self.number)) >= count, (self.name, count, self.log())
        return starts(self.number)


def starts(number="*"):
    """Of a job, or of all."""
    files = [path.read_text() for path in Path().glob(f"starts-{number}")]
    return [json.loads(line) for line in "".join(files).splitlines()]


def check(job, *flags, nodes=1, gres=True, whole=False, restarts=0):
    """It has started what it should, once per node, in this folder, with its environment."""
    all_starts = job.starts()
    names = {env["SLURMD_NODENAME"] for *_, env in all_starts}
    place = {"job": job.number, "port": 10000 + (int(job.number) + 997 * restarts) % 20000}
    place |= {"host": min(names), "folder": job.folder}
    words, _, more = STARTS[job.name].format(**place, nodes=nodes).partition("FLAGS")
    words = [[*words.replace("$R", str(i)).split(), *flags, *more.split()] for i in range(nodes)]
    assert sorted(start[0] for start in all_starts) == words and len(names) == nodes, job.log()
    assert names == {job.name} or not job.name.startswith("node")
    for _, folder, env in all_starts:
        assert folder == os.getcwd() and env["PATH"].startswith(f"{folder}/.venv/bin:")
        if job.name in SEVERAL:  # started by srun
            assert env["SLURM_STEP_NUM_TASKS"] == str(nodes)
            assert env["SLURM_CPUS_ON_NODE"] == "16"  # the step's
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").count(",") + 1
        granted = 40 if whole and job.name not in SEVERAL else 1 if job.name == "single" else 4
        assert gpus == granted or not gres


FOLDERS = (f"runs/folder-{number}" for number in itertools.count())


def folder(name):
    """The words with which a file gets a folder of its own."""
    return [next(FOLDERS)] if name == "long" else []


# ---- What the files start


def test_each_file_starts_once_per_node(kind, clone, monkeypatch):
    """In a login shell, which knows `module`."""
    monkeypatch.setenv("HOME", str(clone))
    Path(".bash_profile").write_text("export PROFILE=read\n")
    gres = kind != "no gres"
    for name in [] if gres else STARTS:  # "if sinfo -o %G shows none, delete this line"
        edit(f"slurm/{name}.sh", "#SBATCH --gres", "# no gres: ")
    jobs = [Job(name, *folder(name), "--lr", "a b") for name in STARTS]
    two = [Job(name, *folder(name), options=["--nodes=2"]) for name in SEVERAL]
    for job in jobs:
        check(job.ended(), "--lr", "a b", nodes=NODES[job.name], gres=gres)
        assert job.starts()[0][2]["PROFILE"] == "read"
    for job in two:
        check(job.ended(), nodes=2, gres=gres)


@on("plain")
def test_whole_nodes_without_the_environment(kind, clone):
    """The files for one node use all its GPUs; the others say that they do not. Without a
    --cpus-per-task in its header, a step has all CPUs."""
    options = ["--partition=whole", "--export=NONE"]
    jobs = [Job(name, *folder(name), options=options) for name in STARTS]
    edit("slurm/long.sh", "#SBATCH --cpus-per-task=16", "#SBATCH")
    all_cpus = Job("long", *folder("long"), options=options[:1], SLURM_CPUS_PER_TASK="1")
    for job in jobs:
        check(job.ended(), nodes=NODES[job.name], whole=True)
        warning = "the job has 40 GPUs on its first node, and trains on 4: edit --gres"
        assert (warning in job.log()) == (job.name in SEVERAL), job.log()
    assert all_cpus.ended().starts()[0][2]["SLURM_CPUS_ON_NODE"] == "200"


@on("threads")
def test_a_late_node(kind, clone):
    """It is not ended with the first, whatever slurm.conf says. The step has the memory of --mem,
    where a CPU has little of it. Where Slurm requeues only jobs that ask for it, long.sh does."""
    again = Job("long", "runs/again", TRAIN="save(); exit(3 * (life == 0))")
    late, two = {"TRAIN": "if rank == 1: time.sleep(3); save()"}, ["--nodes=2"]
    jobs = [Job(name, *folder(name), options=two, **late) for name in SEVERAL]
    for job in jobs:
        assert job.ended().show("MinMemoryNode") == "64G"
        output = job.folder or f"runs/{job.number}"
        assert Path(output, "checkpoint.pt").exists()
    again.ended(restarts=1)


@on("no gres")
def test_gpus_that_slurm_does_not_know(kind, clone):
    """The page's message and command."""
    refused = subprocess.run(["sbatch", "slurm/single.sh"], capture_output=True, text=True)
    assert refused.returncode and "Invalid generic resource (gres)" in refused.stderr
    assert command("sinfo", "-h", "-o", "%G") == "(null)"


@on("plain")
def test_simple_files_are_requeued(kind, clone):
    """By Slurm, and continue, in the same log; but neither half of the pair alone. A node that
    fails ends the others."""
    fail = {"TRAIN": "exit(3) if rank else stand()"}
    failing = [Job(name, *folder(name), options=["--nodes=2"], **fail) for name in SEVERAL]
    stand = {"TRAIN": "if life == 0: stand()"}
    jobs = [Job(name, **stand) for name in STARTS if name not in ("long", "node0", "node1")]
    half = Job("node0", **stand)
    for job in [*jobs, half]:
        job.starts(NODES[job.name])
        subprocess.run(["scontrol", "requeue", job.number], check=job is not half)
    for job in jobs:
        words = [start[0] for start in job.ended(restarts=1).starts()]
        words = [[re.sub(r"node\d|\d{5}", "", word) for word in start] for start in words]
        first, second = words[: NODES[job.name]], words[NODES[job.name] :]
        assert sorted(second) == sorted(first)
        assert "DUE TO JOB REQUEUE" in job.log()
    assert (half.show("JobState"), half.show("Restarts")) == ("RUNNING", "0")
    for job in failing:
        job.ended("FAILED")


@on("plain")
def test_simple_files_are_preempted(kind, clone, monkeypatch):
    """Also after a grace, in which Slurm ends the processes first."""
    monkeypatch.setenv("TRAIN", "if life == 0: stand()")
    jobs = [Job(name, options=["-p", "grace", "--nodes=1"]) for name in ("single", *SEVERAL[:2])]
    for job in jobs:
        job.starts(1)
    command(*"sbatch -p urgent --nodes=2 --gres=gpu:40 -o /dev/null --wrap=true".split())
    for job in jobs:
        job.ended(restarts=1)


@on("plain")
def test_submitted_inside_a_job(kind, clone, monkeypatch):
    """sbatch passes on the variables of the job in which it is called: each file has its own GPUs
    all the same, its number of starts, and long.sh requeues itself."""
    parent = Job("long", "runs/%a", options=["--array=7"], TRAIN="stand()")
    parent.starts(1)
    inherited = {
        "ARRAY_JOB_ID": parent.number,
        "ARRAY_TASK_ID": "7",
        "RESTART_COUNT": "15",
        "GPUS": "1",
        "GPUS_PER_NODE": "1",
        "CPUS_PER_TASK": "1",
        "MEM_PER_CPU": "100",
        "LABELIO": "1",
        "CPU_BIND": "quiet,mask_cpu:0x1",
        "DISTRIBUTION": "arbitrary",
        "OVERCOMMIT": "1",
        "TIMELIMIT": "0:01",
        "WORKING_DIR": "/tmp",
    }
    for name, value in inherited.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    child = Job("long", "runs/child", TRAIN="if life == 0: save(); exit(3)")
    for job in [Job(name, *folder(name)) for name in STARTS]:
        restarts = 0 if job.name == "long" else 15  # the port
        check(job.ended(), nodes=NODES[job.name], restarts=restarts)
    child.ended(restarts=1)
    assert "life 1 of 8, in runs/child" in child.log()
    assert (parent.show("JobState"), parent.show("Restarts")) == ("RUNNING", "0")


@on("plain")
def test_srun_instead_of_torchrun(kind, clone):
    """The page's lines."""
    [lines] = re.findall(r"^(export MASTER_ADDR.*\nsrun .*\n)", PAGES, re.M)
    head = "#!/bin/bash\n#SBATCH --ntasks-per-node=4 --cpus-per-task=4 --gres=gpu:4 -o %x-%j.out\n"
    Path("slurm/srun.sh").write_text(f"{head}source .venv/bin/activate\n{lines}")
    job = Job("srun", options=["--job-name=srun"]).ended()
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"
    places = sorted([env[name] for name in names] for *_, env in job.starts())
    assert places == [[str(i), str(i), "4", "node0"] for i in range(4)]


# ---- Lives of long.sh


def warn(number):
    command("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before a time limit


@on("plain", "newer")
def test_long_is_requeued(kind, clone, monkeypatch):
    """When it is warned; of an array, the task that is. Not if that is forbidden, or if it is
    cancelled; nor by a second job in a folder that is taken. The same command continues."""
    forbidden = Job("long", "runs/x", options=["--no-requeue"], TRAIN="save(); exit(3)")
    monkeypatch.setenv("TRAIN", "if life == 0: save(); stand()")
    job, cancelled = Job("long", "runs/a b", "--lr", "a b"), Job("long", "runs/c")
    array = Job("long", "runs/array/%a", options=["--array=1-3"])
    alike = Job("long", "runs/array", options=["--array=1"])
    for one in job, cancelled:
        one.starts(1)
    second = Job("long", "runs/c").ended("FAILED")
    assert f"is job {cancelled.number} on test's" in second.log() and not second.starts()
    running = ["squeue", "-h", "-j", array.number, "-t", "RUNNING", "-o", "%A %K"]
    assert wait_until(lambda: command(*running).count("\n") == 2, 60)
    tasks = dict(line.split() for line in command(*running).splitlines())
    array.starts(1)  # of the task that has the array's number
    where = subprocess.run(["bash", "slurm/where.sh", array.number], capture_output=True, text=True)
    assert where.returncode == 2 and where.stderr.count(f"where.sh {array.number}_") == 3
    warn(job.number)
    warn(f"{array.number}_{tasks[array.number]}")
    command("scancel", cancelled.number)
    first, again = job.ended(restarts=1).starts()
    words = [[word for word in start[0] if not word.isdigit()] for start in (first, again)]
    assert words[0] == words[1] and first[0] != again[0]  # another port
    assert "Slurm may not requeue" in forbidden.ended("FAILED").log() and not forbidden.starts()
    assert "FOLDER/%a" in alike.ended("FAILED").log() and not alike.starts()
    assert len(cancelled.ended("CANCELLED").starts()) == 1
    third = Job("long", "runs/c", TRAIN="").ended()
    assert Path("runs/c/job").read_text() == f"{third.number} on test\n"
    assert wait_until(lambda: len(starts(array.number)) == 2, 60, 0.2)
    text = command("scontrol", "show", "job", array.number)
    assert sorted(re.findall(r"Restarts=(\d)", text)) == ["0", "0", "1"]
    owners = [Path(f"runs/array/{task}/job").read_text().split()[0] for task in (1, 2, 3)]
    assert f"{array.number}_{tasks[array.number]}" in owners and len({*owners}) == 3


@on("plain", "newer")
def test_long_is_preempted(kind, clone, monkeypatch):
    """Twice, which is more than max_batch_requeue, with and without a GraceTime, also where jobs
    are cancelled after it; warned by USR1, or only by SIGTERM for its processes. Where they are
    cancelled without a grace, the page's next job of that name continues."""
    if kind == "newer":
        assert command("sbatch", "--version").split()[1] >= "24.05"
    monkeypatch.setenv("TRAIN", "if life < 2: stand()")
    edit("slurm/long.sh", "lives=8 ", "lives=3 ")  # each start counts
    [line] = re.findall("^(for i in .*singleton.*)$", PAGES, re.M)
    chain = command("bash", "-c", replaced(line, "sbatch", "sbatch -p cancel", "FLAGS", "--lr 1"))
    chain = [Job("", number=number) for number in re.findall(r"job (\d+)", chain)]
    names = ["requeue", "grace", "cancel_grace"]
    jobs = [Job("long", *folder("long"), options=["-p", name]) for name in names]
    edit("slurm/long.sh", "#SBATCH --signal", "# no --signal")  # no preempt_send_user_signal
    jobs += [Job("long", *folder("long"), options=["-p", name]) for name in names[1:]]
    for life in 1, 2:
        assert wait_until(lambda: len(starts()) == 6 * life, LIMIT, 0.2), command("squeue")
        command(*"sbatch -p urgent --nodes=2 --gres=gpu:40 -o /dev/null --wrap=true".split())
    for job in jobs:
        wait_until(job.over, LIMIT, 0.2)
        state, restarts = job.show("JobState"), int(job.show("Restarts"))
        # A job that has been preempted in its grace keeps a mark in 24.11: when it has finished, it
        # is started once more, or called preempted.
        later = [("COMPLETED", 3), ("PREEMPTED", 2)] if kind == "newer" else []
        assert (state, restarts) in [("COMPLETED", 2), *later], job.log()
        first, *others = job.starts()
        assert len(others) == restarts and all(start[0][-4:] == first[0][-4:] for start in others)
    assert [job.show("JobState") for job in chain[:2]] == ["PREEMPTED"] * 2
    assert chain[2].show("JobState") == "RUNNING"
    assert Path("runs/mine/job").read_text() == f"{chain[2].number} on test\n"


@on("plain")
def test_preempted_in_the_check(kind, clone):
    """Importing torch from a slow disk takes a minute. No node is blamed, and it is no failure."""
    stand = {"TORCH": "if life == 0: time.sleep(999)"}
    job = Job("long", "runs/x", options=["-p", "grace"], **stand)
    job.wait_for("long.sh: no checkpoint.pt")
    steps = ["squeue", "-h", "--steps", "-j", job.number, "-o", "%i"]
    assert wait_until(lambda: f"{job.number}.0" in command(*steps), 60)
    command(*"sbatch -p urgent --nodes=2 --gres=gpu:40 -o /dev/null --wrap=true".split())
    assert len(job.ended(restarts=1).starts()) == 1
    assert "failed" not in job.log() and Path("runs/x/job").read_text().count("\n") == 1


def end_soon(job, seconds):
    """In as many seconds as its warning comes before the limit: it is warned within 30 s. The next
    life has an hour."""
    command("scontrol", "update", f"job={job.number}", f"endtime=now+{seconds}")
    job.wait_for("DUE TO JOB REQUEUE")
    command("scontrol", "update", f"job={job.number}", "timelimit=60")


@on("plain", "newer", mark="long")
def test_a_time_limit(kind, clone):
    """Past it, the job continues; so does a real script below."""
    options = ["--signal=B:USR1@60", "--nodes=2"]
    train = {"TRAIN": "if life == 0: save(); stand()"}
    job = Job("long", "runs/x", "--lr", "a b", options=options, **train)
    job.starts(2)
    end_soon(job, 60)
    words = [start[0] for start in job.ended(restarts=1).starts(4)]
    words = [[word for word in start if not re.fullmatch(r"\d{5}", word)] for start in words]
    assert sorted(words[:2]) == sorted(words[2:]) and "DUE TO JOB REQUEUE" in job.log()


@on("plain", "newer")
def test_a_bad_node(kind, clone):
    """One where torch cannot use the GPUs is named, and nothing is trained; by the page's option
    the same command leaves it out."""
    bad = {"TORCH": "if node == 'node0': gpus = 0"}
    job = Job("long", "runs/x", options=["--nodes=2"], **bad).ended("FAILED")
    assert "node0: torch can use only 0 of 4 GPUs" in job.log() and not job.starts()
    [option] = re.findall(r"`(--exclude=NODE)` after `sbatch`", PAGES)
    options = ["-p", "all", option.replace("NODE", "node0")]
    job = Job("long", "runs/x", options=options, **bad).ended()
    assert job.starts()[0][2]["SLURMD_NODENAME"] == "node1"


@on("plain", "newer")
def test_a_dead_node(kind, clone):
    """Slurm starts the job again, on nodes that work."""
    train = {"TRAIN": "if life == 0: stand()"}
    job = Job("long", "runs/x", options=["-p", "all", "--nodes=2"], **train)
    lost = job.starts(2)[1][2]["SLURMD_NODENAME"]
    command("scontrol", "update", f"node={lost}", "state=down", "reason=test")  # it comes back
    assert len(job.ended(restarts=1).starts()) == 4
    assert "long.sh: life 2 of 8" in job.log()


@on("plain", "newer")
def test_slurmctld_is_away(kind, clone):
    """At the start of a life, and over the warning: the job asks until it has an answer. Here, it
    has a slurm.conf of its own, with a wrong port."""
    good, own = Path(os.environ["SLURM_CONF"]).read_text(), Path("slurm.conf").resolve()
    own.write_text(re.sub("(SlurmctldPort|MessageTimeout)=.*", r"\1=1", good))
    bad = own.read_text()
    with Path(".venv/bin/activate").open("a") as file:
        file.write(f"export SLURM_CONF='{own}'\n")
    job = Job("long", "runs/x", TRAIN="if life == 0: save(); stand()")
    job.wait_for("slurm_load_jobs error")
    own.write_text(good)
    job.starts(1)
    own.write_text(bad)
    warn(job.number)
    job.wait_for("warned of")
    count = job.log().count("\n")
    assert wait_until(lambda: job.log().count("\n") > count + 9, 60)  # it asks
    own.write_text(good)
    job.ended(restarts=1)


# ---- Commands of the pages

INSTEAD = {r"--array=1-\d+": "--array=1-3", "FLAGS": "--lr 1", "--nodes=4": "--nodes=4 -p all"}


@on("plain")
def test_commands_of_the_pages(kind, clone):
    """Each of Slurm's runs, and the jobs that it submits end well."""
    blocks = re.findall(r"^ *```sh\n((?:.*\n)*?) *```$", PAGES, re.M)
    lines = [line.strip() for code in blocks for line in code.splitlines()]
    lines = [line for line in lines if re.match("(for .* )?sbatch", line)]
    lines += re.findall(r"`((?:sbatch|sinfo|squeue) [^`]+)`", PAGES)
    assert len(lines) > 10
    first, jobs = Job("long", "runs/first").ended(), []
    for line in lines:
        for old, new in {**INSTEAD, "12345": first.number}.items():
            line = re.sub(old, new, line)
        if "long.sh" in line:  # a folder that another job of the page has is refused
            assert wait_until(lambda: not command("squeue", "-h"), 60, 0.2), command("squeue")
        text = command("bash", "-c", line)
        jobs += [(line, number) for number in re.findall("Submitted batch job (.*)", text)]
    assert wait_until(lambda: not command("squeue", "-h"), 60, 0.2), command("squeue")
    for line, number in jobs:
        assert states(Job("", number=number)) == {"COMPLETED"}, line


@on("plain")
def test_repairs_of_the_page(kind, clone):
    """A job that hangs is requeued, without a bad node, and one that is held goes on."""
    job = Job("long", "runs/x", options=["-p", "all"], TRAIN="if life < 2: stand()")
    bad = job.starts(1)[0][2]["SLURMD_NODENAME"]
    [release] = re.findall("`(scontrol release 12345)`", PAGES)
    [requeue] = re.findall("`(scontrol requeue 12345)`", PAGES)
    [exclude] = re.findall("`(scontrol update jobid=12345 excnodelist=NODE)`", PAGES)
    for words in requeue, exclude:
        command(*words.replace("12345", job.number).replace("NODE", bad).split())
    assert job.starts(2)[1][2]["SLURMD_NODENAME"] != bad
    command("scontrol", "requeuehold", job.number)
    assert wait_until(lambda: job.show("Reason") == "job_requeued_in_held_state", 60)
    command(*release.replace("12345", job.number).split())
    job.ended(restarts=2)


@on("plain")
def test_a_header_for_a_cluster(kind, clone, monkeypatch):
    """The page's variables override the files' lines, and its link brings results to scratch."""
    [variables] = re.findall("^export (SBATCH_.*)$", PAGES, re.M)
    for name, value in re.findall(r"(\w+)=(\w+)", variables.replace("=gpu", "=all")):
        monkeypatch.setenv(name, value)
    for path in Path("slurm").glob("*.sh"):
        edit(path, "##SBATCH --acc", "#SBATCH --acc") if path.stem != "where" else None
    [link] = re.findall("^mkdir -p /scratch.*$", PAGES, re.M)
    monkeypatch.setenv("USER", "me")
    command("bash", "-c", link.replace("/scratch", shlex.quote(f"{clone.parent}/scratch")))
    train = {"TRAIN": "save(); exit(life == 0)"}
    jobs = [
        Job("single", **train).ended("FAILED"),
        Job("long", "runs/x", **train).ended(restarts=1),
    ]
    for job in jobs:
        output = job.folder or f"runs/{job.number}"
        assert Path(clone.parent, "scratch/me", output, "checkpoint.pt").exists()
        assert job.show("Partition") == "all" and job.show("Account") == "ml101"


def states(array):
    """Of an array's tasks."""
    return set(re.findall(r"JobState=(\w*)", array.tasks()))


# ---- Training


PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then exec "{folder}/pretends/python" "$@"; fi
exec "{real}" "$@"
"""


@pytest.fixture
def real(clone):
    """The clone with the scripts, and the Python that runs the tests; but where a job file asks
    whether torch can use the GPUs, it can."""
    for name in "python", "torchrun":
        Path("pretends").mkdir(exist_ok=True)
        Path(".venv/bin", name).rename(f"pretends/{name}")
    Path(".venv/bin/python").write_text(PYTHON.format(folder=clone, real=sys.executable))
    Path(".venv/bin/python").chmod(0o755)
    edit(".venv/bin/activate", ":$PATH", f":{Path(sys.executable).parent}:$PATH")
    for name in "large", "own_loop":
        shutil.copytree(ROOT / name, name)
    for path in ROOT.glob("train_*.py"):
        shutil.copy(path, clone)


@on("plain")
def test_a_small_script_trains_on_two_nodes(kind, real, data):
    """By the page's change where a node's own name leads nowhere. (test_network.py's
    test_small_scripts starts two hosts as the pair does; the next test, torchrun on two nodes.)"""
    edit("slurm/ddp_multigpu_proc.sh", "$(hostname)", "$SLURMD_NODENAME")
    flags = ["--dataset", data / "pictures", "--batch-size", 16, "--workers", 0, "--epochs", 1]
    rename = ["srun", "--nodes=2", "bash", "-c"]
    command(*rename, "hostname lost-$SLURMD_NODENAME")
    try:
        job = Job("ddp_multigpu_proc", *flags).ended()
    finally:
        command(*rename, "hostname $SLURMD_NODENAME")
    assert job.log().count("epoch 0:") == 1, job.log()
    script = "train_ddp_multigpu_proc.py"
    helpers.run(script, *flags, "--output", "runs/here", processes=2)
    trained, here = map(model_and_progress, (job.number, "here"))
    torch.testing.assert_close(trained, here, rtol=0, atol=0)


STANDS = """\
            if step == 3 and os.environ["SLURM_RESTART_COUNT"] == "0":
                time.sleep(9999)
"""


AT_A_WARNING = """\
import os, signal, sys, time
checkpoint = os.path.join(sys.argv[-1], "checkpoint.pt")
if os.path.exists(checkpoint):
    sys.exit(print("continues"))
def save(*_):
    open(checkpoint, "w").write("x")
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
print("waits for SIGTERM")
time.sleep(9999)
"""


OFTEN = ["--checkpoint-minutes", 0]
IMAGES = ["--dataset", "synthetic", "--batch-size", 1000, "--log-every", 1, *OFTEN]


@pytest.fixture
def submit(real):
    """Submits a long.sh that runs this script, one process on each node."""
    edit("slurm/long.sh", "processes=gpu", "processes=1")
    good = Path("slurm/long.sh").read_text()

    def submit(script, checkpoint, *flags, options=(), pass_on="no"):
        changes = "complete/train.py)", f"{script})", "=checkpoint.pt", f"={checkpoint}"
        changes += "pass_on=no", f"pass_on={pass_on}"
        Path("slurm/long.sh").write_text(replaced(good, *changes))
        return Job("long", f"runs/{Path(script).stem}", *flags, options=options)

    return submit


@on("plain")
def test_a_real_script_beyond_a_time_limit(kind, submit):
    """A copy of complete/ is warned by Slurm while it stands still on two nodes, where where.sh
    shows its ranks, and not torchrun. It ends with the weights of an undisturbed run. A script that
    saves only when it is warned gets the warning."""
    shutil.copytree("complete", "mine")
    Path("mine/train.py").rename("mine/on_two_nodes.py")
    backward = "            scaler.scale("
    edit("mine/on_two_nodes.py", "import argparse\n", "import argparse, os, time\n")
    edit("mine/on_two_nodes.py", backward, STANDS + backward)
    Path("at_a_warning.py").write_text(AT_A_WARNING)
    flags = [*IMAGES, "--epochs", 1]
    copy = submit("mine/on_two_nodes.py", "checkpoint.pt", *flags, options=["--nodes=2"])
    saves = submit("at_a_warning.py", "checkpoint.pt", pass_on="yes")
    saves.wait_for("waits for SIGTERM")
    warn(saves.number)
    copy.wait_for("step 2/")
    lines = command("bash", "slurm/where.sh", copy.number).splitlines()
    ranks = [line[:12] for line in lines if "RANK=" in line]
    assert ranks == ["RANK=0 node0", "RANK=1 node1"], lines
    end_soon(copy, 300)
    assert re.search("0 epochs and [12] steps are done", copy.ended(restarts=1).log()), copy.log()
    assert "continues" in saves.ended(restarts=1).log()
    helpers.run("complete/train.py", *flags, "--output", "runs/quiet", processes=2)
    interrupted, undisturbed = map(model_and_progress, ("on_two_nodes", "quiet"))
    torch.testing.assert_close(interrupted, undisturbed, rtol=0, atol=0)


@on("plain", mark="long")
def test_other_scripts_beyond_a_time_limit(kind, submit):
    """Each is warned at once, requeued when it has a checkpoint of the name that long.sh is told,
    and continues."""
    edit("own_loop/after.py", "Discs(2_000", "Discs(500", "Discs(400", "Discs(16")
    Path("text.txt").write_text("".join(f"word {i} " for i in range(20_000)))
    prepare = ["text.txt", "--output", "tokens", "--tokenizer", "bytes", "--workers", 1]
    command(sys.executable, "large/prepare_texts.py", *prepare)
    small = ["--dataset", "synthetic", "--batch-size", 1000, "--epochs", 2]
    tokens = "--tokens tokens --layers 1 --width 64 --heads 2 --length 64 --batch-size 8".split()
    tokens += ["--steps", 300, "--log-every", 10, "--eval-tokens", 1000, *OFTEN]
    torchrun = submit("train_ddp_torchrun.py", "checkpoint.pt", *small)
    jobs = [
        torchrun,
        submit("complete/train.py", "checkpoint.pt", *IMAGES, "--epochs", 2),
        submit("large/train_lm.py", "latest.json", *tokens),
        submit("own_loop/after.py", "last.pt", "--epochs", 2, "--workers", 0),
    ]
    for job in jobs:
        job.wait_for("long.sh: life 1")
        warn(job.number)
    for job in jobs:
        log = job.ended(restarts=1).log()
        continued = r"[1-9]\d* steps are done|^epoch 1:"
        assert re.search(continued, log.partition("DUE TO JOB REQUEUE")[2], re.M), log
    assert torchrun.log().count("epoch 0:") == torchrun.log().count("epoch 1:") == 1
    helpers.run("train_ddp_torchrun.py", *small, "--output", "runs/small", processes=1)
    interrupted, undisturbed = map(model_and_progress, ("train_ddp_torchrun", "small"))
    torch.testing.assert_close(interrupted, undisturbed, rtol=0, atol=0)


def model_and_progress(name):
    return helpers.weights(f"runs/{name}", "checkpoint.pt")

"""The sbatch files on a real Slurm, in clusters of several kinds, in a folder with a space in its
name. A stand-in for python and torchrun shows what a file starts, in no time; jobs train only
where training is the point. Nothing goes by the clock."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import helpers
import pytest
import torch
from helpers import COMPLETE, LIMIT, ROOT, Cold, altered, command, wait_until
from runs import replaced

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]  # one cluster at a time
MACHINES = ["node0", "node1", "node2", "node3"]
HOSTS = "127.0.0.1 node0\n127.0.0.2 node1\n127.0.0.3 node2\n127.0.0.4 node3\n"
PAGE = (ROOT / "slurm" / "README.md").read_text()
NEWER = os.environ.get("NEWER_SLURM")  # the folder of a Debian with Slurm 24.05 or newer
KINDS = {  # changes of slurm.conf
    "plain": {},
    "newer": {},
    # Two threads a core, which are CPUs; memory is shared out, and little of it without --mem. When
    # a task has failed, or has ended two seconds ago, Slurm ends the others.
    "threads": {
        "KillWait=5": "KillWait=5\nKillOnBadExit=1\nWaitTime=2",
        "CR_Core": "CR_CPU_Memory\nDefMemPerCPU=256",
        "CPUs=200": "Sockets=1 CoresPerSocket=100 ThreadsPerCore=2",
    },
    "no gres": {"GresTypes=gpu\n": "", " Gres=gpu:40": ""},
}
# What is started writes down how. It stands still in the first STAND lives of a job. For the files'
# check of the GPUs, torch sees those that Slurm has granted, but no more than GPUS; on the nodes
# BAD, from life SICK on, none, or it never answers (HANGS), or they compute wrong sums (ECC); other
# nodes are LATE by so many seconds, also to end. Of the nodes, JOINED have joined.
STAND_IN = """#!/usr/bin/python3 -S
import json, os, resource, sys, time, types
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
granted = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").count(",") + 1
life = int(os.environ.get("SLURM_RESTART_COUNT", 0))
if words[1] == "-c":
    gpus, total = min(granted, int(os.environ.get("GPUS", granted))), 1000
    if life >= int(os.environ.get("SICK", 0)):
        if os.environ["SLURMD_NODENAME"] in os.environ.get("BAD", "").split():
            time.sleep(9999 * ("HANGS" in os.environ))
            gpus, total = (gpus, 999) if "ECC" in os.environ else (0, 0)
        else:
            time.sleep(int(os.environ.get("LATE", 0)))
    torch = sys.modules["torch"] = types.ModuleType("torch")
    some = types.SimpleNamespace
    kind = some(type="cuda", get_device_name=lambda gpu: "A")
    torch.accelerator = some(device_count=lambda: gpus, is_available=lambda: gpus > 0)
    torch.accelerator.current_accelerator = lambda: kind
    torch.device, torch.get_device_module = lambda *words: None, lambda gpu: kind
    torch.ones = lambda count, device: some(sum=lambda: some(item=lambda: total))
    sys.argv = words[2:]
    exec(words[2])
    sys.exit()
if "--no-python" in words:
    own = words.index("--no-python")
    os.environ["GROUP_WORLD_SIZE"] = os.environ.get("JOINED", os.environ["SLURM_NNODES"])
    os.environ["TORCHRUN"] = " ".join(words[:own])
    os.execvp(words[own + 1], words[own + 1 :])
if "TORCHRUN" in os.environ:
    words = [*os.environ["TORCHRUN"].split(), *words]
os.environ["CORE"] = str(resource.getrlimit(resource.RLIMIT_CORE)[0])
data = [os.listdir(word) for word in words if word.startswith("/") and os.path.isdir(word)]
start = json.dumps([words, os.getcwd(), dict(os.environ), data])
with open("starts-" + os.environ["SLURM_JOB_ID"], "ab", 0) as file:  # in one piece
    file.write(start.encode() + b"\\n")
if life < int(os.environ.get("PROGRESS", 0)):
    flags = " ".join(words).replace("--output=", "--output ")  # which the last one decides
    output = flags.split("--output ")[-1].split(" --")[0]
    os.makedirs(output, exist_ok=True)
    open(output + "/last.pt", "w").write("x")
if os.environ.get("FAILS") == os.environ["SLURM_PROCID"]:
    sys.exit(3)
if life < int(os.environ.get("STAND", 0)):
    time.sleep(9999)
if os.environ["SLURM_PROCID"] == "1":
    time.sleep(int(os.environ.get("LATE", 0)))
    open("late-" + os.environ["SLURM_JOB_ID"], "w").close()
"""
TORCHRUN = "torchrun --nnodes {nodes} --nproc-per-node gpu --rdzv-backend c10d --rdzv-id {job} "
TORCHRUN += "--rdzv-conf read_timeout=600 --rdzv-endpoint {host}:{port} python -u "
SPAWN = "python -u train_ddp_spawn.py"
PAIR = " --init-method tcp://node0:23456 --timeout 240 --nnodes 2 --node-rank {} "
PAIR += "--output runs/pair --resume"
STARTS = {  # what each file starts, once per node; $R is the node's number
    "single": "python -u train_single.py --workers 4",
    "dp": "python -u train_dp.py --workers 16",
    "ddp_spawn": SPAWN,
    "ddp_torchrun": "torchrun --standalone --nproc-per-node gpu train_ddp_torchrun.py",
    "ddp_torchrun_nodes": TORCHRUN + "train_ddp_torchrun.py",
    "ddp_multigpu_proc": "python -u train_ddp_multigpu_proc.py --node-rank $R --nnodes {nodes} "
    "--init-method tcp://{host}:{port} --workers 16",
    "node0": SPAWN + PAIR.format(0),
    "node1": SPAWN + PAIR.format(1),
    "complete": TORCHRUN.replace("--rdzv", "--max-restarts 3 --rdzv", 1)
    + "runs/complete-{job}/job-{job}/train.py FLAGS --resume --output runs/complete-{job}",
}
SEVERAL = ["ddp_torchrun_nodes", "ddp_multigpu_proc", "complete"]  # nodes
NODES = {name: 2 if name in SEVERAL[:2] else 1 for name in STARTS}


# Runs a command in another Debian ($0), with this machine's processes, devices and temporary files.
# The mounts are those of this command alone, and end with it.
INSIDE = """for place in proc dev sys tmp; do mount --rbind /$place "$0/$place"; done
exec chroot "$0" env -C "$PWD" PATH="${PATH#*:}" "$@" # without the first folder, see cluster
"""
RUNNING = []  # the daemons of the cluster, and the command of slurmctld
CLIENTS = ["sbatch", "scontrol", "squeue", "scancel", "sinfo", "srun", "sacct"]


@contextmanager
def cluster(folder, kind):
    """Four machines on this one, each with its own name, process numbers, disk, and pretended CPUs
    and GPUs. SLURM_CONF points Slurm's commands at them. All that they write is in the folder."""
    folder = Path(folder).resolve()  # Slurm's daemons look for relative paths elsewhere
    for name in "munge", "state", "disk", "bin", *(f"spool-{machine}" for machine in MACHINES):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    for number in range(40):
        command("mknod", folder / f"gpu{number}", "c", 1, 3)
    ports = [helpers.free_port() for _ in range(5)]
    line = "NodeName={} NodeAddr=127.0.0.1 Port={} CPUs=200 RealMemory=400000 Gres=gpu:40\n"
    nodes = "".join(map(line.format, MACHINES, ports))
    host, version = socket.gethostname(), 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
    conf = (ROOT / "tests" / "slurm.conf").read_text().format(**locals())
    for old, new in KINDS[kind].items():
        assert old in conf, old
        conf = conf.replace(old, new)
    (folder / "slurm.conf").write_text(conf)
    if "gres" not in kind:
        (folder / "gres.conf").write_text(f"Name=gpu AutoDetect=off File={folder}/gpu[0-39]\n")
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    for number, name in enumerate(MACHINES, 1):  # only the machine itself knows its other name
        hosts = f"{Path('/etc/hosts').read_text()}{HOSTS}127.0.0.{number} lost-{name}\n"
        (folder / f"hosts-{name}").write_text(hosts)
    inside, etc = [], "/etc"
    if kind == "newer":
        inside, etc = ["sh", "-c", INSIDE, NEWER], f"{NEWER}/etc"
        for name in CLIENTS:
            words = shlex.join(["unshare", "--mount", *inside, name])
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # core dumps, as on many clusters
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "-F", "--force", "-S", folder / "munge" / "socket", *munge]
    own = "unshare --mount --uts --pid --fork --mount-proc --kill-child".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # another Debian has no other of our folders
        patch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}:/usr/sbin")
        patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
        patch.setenv("DISK", f"{folder}/disk")  # each machine has its own there
        controller = ["unshare", "--mount", *inside, "slurmctld", "-D"]
        daemons = [Cold(["unshare", "--mount", *inside, *munge], folder / "munged.out")]
        try:
            assert wait_until((folder / "munge" / "socket").exists), "munged"
            daemons.append(Cold(controller, folder / "slurmctld.out"))
            for name in MACHINES:
                slurmd = shlex.join([*inside, "slurmd", "-D", "-N", name])
                lines = [f"hostname {name}", f"mount --bind {folder}/hosts-{name} {etc}/hosts"]
                lines += [f"mount -t tmpfs disk {folder}/disk", slurmd, "exit"]
                daemons.append(Cold([*own, "sh", "-c", "; ".join(lines)], folder / f"{name}.out"))
            ready = "sinfo -h -p whole -o '%t %D' 2> /dev/null | grep -qx 'idle 4'"
            assert wait_until(lambda: os.system(ready) == 0, pause=0.2), "the machines"
            yield daemons, controller
        finally:
            for daemon in reversed(daemons):
                helpers.kill(daemon.pid)
                helpers.finish([daemon])


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """A cluster of each kind, one after the other."""
    installed = all(shutil.which(name, path="/usr/sbin") for name in ("slurmctld", "munged"))
    if os.getuid() or not installed or torch.accelerator.is_available():
        pytest.skip("needs root, no GPU, and apt-get install slurm-wlm munge")
    if request.param == "newer" and not NEWER:
        pytest.skip("needs a Debian with Slurm 24.05 or newer, in the folder NEWER_SLURM")
    with cluster(tmp_path_factory.mktemp("slurm"), request.param) as daemons:
        RUNNING[:] = daemons
        yield request.param


@pytest.fixture
def clone(kind, tmp_path, monkeypatch):
    """The clone in which a user works, here with stand-ins."""
    folder = tmp_path / "my work"
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    shutil.copytree(ROOT / "complete", folder / "complete")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in "python", "torchrun":
        path = folder / ".venv" / "bin" / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    (folder / ".venv" / "bin" / "python3").symlink_to("/usr/bin/python3")
    activate = 'PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd):$PATH"\n'
    (folder / ".venv" / "bin" / "activate").write_text(activate)
    monkeypatch.chdir(folder)
    settings(LOOK_SECONDS=0.5, MOST_FAILED=0)
    yield folder
    command("scancel", "--user", "root")
    assert wait_until(lambda: not command("squeue", "-h"), 60, 0.2), command("squeue")


def edit(name, *changes):
    """Edit slurm/NAME.sh. Changes: what stands there, its replacement, and so on."""
    path = Path(f"slurm/{name}.sh")
    path.write_text(replaced(path.read_text(), *changes))


def settings(**values):
    """Jobs that are submitted from now on have these in their requeue.py."""
    [old] = re.findall(r"slurm/requeue.*?\.py", Path("slurm/complete.sh").read_text())
    text = Path(old).read_text()
    for name, value in values.items():
        text, count = re.subn(rf"^{name} = [\d.]+", f"{name} = {value}", text, flags=re.M)
        assert count == 1, name
    new = f"slurm/requeue-{len(list(Path('slurm').glob('requeue*')))}.py"
    Path(new).write_text(text)
    edit("complete", old, new)


class Job:
    def __init__(self, name, *flags, options=(), number=None):
        self.name = name
        words = ["sbatch", "--parsable", *options, f"slurm/{name}.sh", *flags]
        self.number = number or command(*words)
        self.file = Path(f"{name}-{self.number}.out").resolve()

    def show(self, field):
        return re.search(rf"\b{field}=(\S*)", command("scontrol", "show", "job", self.number))[1]

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def over(self):
        return self.show("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def wait_for(self, text):
        wait_until(lambda: text in self.log() or self.over(), LIMIT, 0.2)
        assert wait_until(lambda: text in self.log(), 5), self.log()

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, LIMIT, 0.1)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()
        return self

    def starts(self, count=0):
        """What the stand-ins have written down: words, folder, environment and data of each."""
        path = self.file.with_name(f"starts-{self.number}")

        def lines():
            return path.read_text().splitlines() if path.exists() else []

        wait_until(lambda: len(lines()) >= count or self.over(), 60, 0.2)
        assert len(lines()) >= count, (self.name, count, self.log())
        return [json.loads(line) for line in lines()]


def check(job, *flags, nodes=1, gres=True):
    """It has started what it should, once per node, in this folder, with its environment."""
    starts = job.starts()
    names = {env["SLURMD_NODENAME"] for *_, env, _ in starts}
    place = {"job": job.number, "port": 10000 + int(job.number) % 20000, "host": min(names)}
    words, _, more = STARTS[job.name].format(**place, nodes=nodes).partition("FLAGS")
    ends = [*flags, *more.split()]
    words = [[*words.replace("$R", str(i)).split(), *ends] for i in range(nodes)]
    assert sorted(start[0] for start in starts) == words and len(names) == nodes, job.log()
    assert names == {job.name} or not job.name.startswith("node")
    for _, folder, env, _ in starts:
        assert folder == os.getcwd() and env["PATH"].startswith(f"{folder}/.venv/bin:")
        assert env["SLURM_STEP_NUM_TASKS"] == str(nodes)
        assert env["SLURM_CPUS_ON_NODE"] == ("4" if job.name == "single" else "16")  # the step's
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").count(",") + 1
        assert gpus == (1 if job.name == "single" else 4) or not gres
        assert (env["CORE"] == "0") == (job.name == "complete")


[IMAGE] = set(re.findall(r"apptainer exec --nv --bind /shared \S+\.sif", PAGE)) or [""]


def on(*kinds):
    return pytest.mark.parametrize("kind", kinds, indirect=True, scope="module")


def test_each_file_starts_once(kind, clone, monkeypatch):
    """On nodes that are shared or given whole, also where jobs do not get the environment; with
    the memory of its CPUs, or what --mem says."""
    if kind == "no gres":
        refused = subprocess.run(["sbatch", "slurm/single.sh"], capture_output=True, text=True)
        assert refused.returncode and "gres" in refused.stderr and not list(Path().glob("*.out"))
        assert command("sinfo", "-h", "-o", "%G") == "(null)"
        for name in STARTS:  # "if sinfo -o %G shows none, delete this line"
            edit(name, "#SBATCH --gres", "# no gres: ")
    jobs = [Job(name, "--lr", "a b") for name in STARTS]
    if kind == "plain":
        for options in ["--export=NONE"], ["-p", "whole"]:
            jobs += [Job(name, "--lr", "a b", options=options) for name in STARTS]
        monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
        jobs += [Job(name, "--lr", "a b") for name in STARTS]
        monkeypatch.delenv("SLURM_EXPORT_ENV")
    monkeypatch.setenv("LATE", "4" if kind == "threads" else "0")
    two = [Job(name, options=["--nodes=2"]) for name in SEVERAL]
    for job in jobs:
        check(job.ended(), "--lr", "a b", nodes=NODES[job.name], gres=kind != "no gres")
    for job in two:
        check(job.ended(), nodes=2, gres=kind != "no gres")
        assert Path(f"late-{job.number}").exists()  # this node was not ended with the first
    if kind == "threads":
        assert jobs[1].starts()[0][2]["SLURM_MEM_PER_NODE"] == str(64 * 1024)


@on("plain")
def test_jobs_that_cannot_train(kind, clone, tmp_path, monkeypatch):
    """Submitted from another folder, without an environment, or where torch cannot use the GPUs, a
    job ends with a line; so does one of two nodes of which one has joined, or fails."""
    jobs = []
    for gpus, line in enumerate(["no GPU", "only 1 GPUs"]):
        monkeypatch.setenv("GPUS", str(gpus))
        names = SEVERAL[:2] if gpus else ["single", "dp", "ddp_spawn", "node0", "node1"]
        jobs += [(Job(name), f"AssertionError: torch can use {line}") for name in names]
    monkeypatch.delenv("GPUS")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "slurm").symlink_to(clone / "slurm")
    os.chdir(tmp_path / "elsewhere")
    jobs += [(Job(name), "No such file or directory") for name in STARTS]
    os.chdir(clone)
    for job, _ in jobs:
        job.ended("FAILED")  # some start late, and need the environment
    activate = Path(".venv/bin/activate").read_text()
    Path(".venv/bin/activate").write_text("echo no environment; return 3\n")
    jobs += [(Job(name), "no environment") for name in STARTS]
    for job, line in jobs:
        assert line in job.ended("FAILED").log() and not job.starts(), job.log()
        assert job.log().count("\n") == 1 or "GPU" in line, job.log()
    assert not list(tmp_path.glob("elsewhere/runs"))
    Path(".venv/bin/activate").write_text(activate)
    monkeypatch.setenv("JOINED", "1")
    for job in [Job(name, options=["--nodes=2"]) for name in (SEVERAL[0], SEVERAL[2])]:
        assert "nodes are missing" in job.ended("FAILED").log() and not job.starts(), job.log()
    monkeypatch.delenv("JOINED")
    monkeypatch.setenv("STAND", "1")
    monkeypatch.setenv("FAILS", "1")
    for job in [Job(name, options=["--nodes=2"]) for name in SEVERAL]:
        job.ended("FAILED")


@on("plain")
def test_data(kind, clone, monkeypatch):
    """An archive is unpacked once per node, and a job that cannot do that does not train."""
    for part in "train", "test":
        Path("my_images", part).mkdir(parents=True)
    command("tar", "-cf", "my_images.tar", "my_images")
    Path("broken.tar").write_bytes(Path("my_images.tar").read_bytes()[:700] + b"?" * 700)
    Path(".venv/bin/tar").write_text('#!/bin/sh\necho unpacks; exec /bin/tar "$@"\n')
    Path(".venv/bin/tar").chmod(0o755)
    [lines] = re.findall(r"^```bash\n(data=.*\nstage=.*\nflags=.*\n)```$", PAGE, re.M)
    lines = lines.replace("/shared/my_images.tar", "my_images.tar")
    edit("complete", 'flags=""', f"{lines}# was:", 'stage=""', "# was:")
    disks = {"SLURM_TMPDIR": os.environ["DISK"], "TMPDIR": os.environ["DISK"], "neither": "/tmp"}
    jobs, options = {}, ["--nodes=2", "-p", "whole"]
    for place, disk in disks.items():
        monkeypatch.delenv("SLURM_TMPDIR", raising=False)
        monkeypatch.delenv("TMPDIR", raising=False)
        if place != "neither":
            monkeypatch.setenv(place, disk)
        jobs[Job("complete", options=options)] = disk
    edit("complete", "my_images.tar", "broken.tar")
    assert not Job("complete", options=options).ended("FAILED").starts()
    for job, disk in jobs.items():
        folder = f"{disk}/data-{job.number}"
        check(job.ended(), "--dataset", f"{folder}/my_images", nodes=2)
        shutil.rmtree(folder, ignore_errors=True)
        assert [sorted(data[0]) for *_, data in job.starts()] == [["test", "train"]] * 2
        assert job.log().count("unpacks") == 2


@on("plain")
def test_environments(kind, clone, monkeypatch):
    """Each file's other ways to an environment, here with stand-ins for conda and apptainer."""
    monkeypatch.setenv("BASH_FUNC_module%%", '() { [ "$*" = "load conda" ]; }')
    monkeypatch.setenv("PATH", f"{clone}/bin:{os.environ['PATH']}")
    # An environment that is active at the login is activated again in its old place in PATH.
    conda = 'conda() { case "$*" in deactivate) inactive=1 ;; "activate NAME") '
    conda = f"echo '{conda}[ $inactive ] && PATH=\"{clone}/.venv/bin:$PATH\" ;; esac; }}'"
    apptainer = f'PATH="{clone}/.venv/bin:$PATH"; shift 5; CONTAINER="$PPID" exec "$@"'
    Path("bin").mkdir()
    for name, line in ("conda", conda), ("apptainer", apptainer):
        Path("bin", name).write_text(f"#!/bin/bash\n{line}\n")
        Path("bin", name).chmod(0o755)
    jobs = []
    for name in STARTS:
        text = Path(f"slurm/{name}.sh").read_text()
        [venv] = re.findall("^source .venv/bin/activate .*\n", text, re.M)
        [module] = re.findall(r"^# (module load .*)", text, re.M)
        edit(name, venv, "", f"# {module}", module)
        jobs.append((Job(name, "--lr", "a b"), False))
        edit(name, module, f"# {module}")
        if name == "complete":
            [words] = re.findall(r'^container="" # EDIT: or (".*"),', text, re.M)
            edit(name, 'container=""', f"container={words}")
        else:
            text = Path(f"slurm/{name}.sh").read_text()
            program = r"^(srun --export=ALL |    )(python|torchrun|bash) (?=-)"
            text = re.sub(program, rf"\1{IMAGE} \2 ", text, flags=re.M)
            Path(f"slurm/{name}.sh").write_text(text)
        jobs.append((Job(name, "--lr", "a b"), True))
    for job, contained in jobs:
        starts = job.ended().starts()
        assert "--lr" in starts[0][0] and "a b" in starts[0][0], job.log()
        assert all(("CONTAINER" in env) == contained for *_, env, _ in starts)


def warn(number):
    command("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before a time limit


@on("plain")
def test_complete_is_requeued(kind, clone, monkeypatch):
    """At its time limit, with the code and folder that it began with; a task of an array without
    the others; and not without a new checkpoint."""
    monkeypatch.setenv("STAND", "2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("complete/beside.py").write_text("")
    hangs = Job("complete")
    monkeypatch.setenv("PROGRESS", "2")
    job = Job("complete", "--lr", "a b")
    array = Job("complete", options=["--array=1-3"])
    written = [".", "-name", "starts-*", "-size", "+0"]
    assert wait_until(lambda: command("find", *written).count("starts-") == 5, 60, 0.2)
    tasks = {}  # of the array: job number, and Slurm's other name for it
    for path in Path().glob("starts-*"):
        env = json.loads(path.read_text())[2]
        if task := env.get("SLURM_ARRAY_TASK_ID"):
            tasks[env["SLURM_JOB_ID"]] = f"{array.number}_{task}"
    code = Path(f"runs/complete-{job.number}/job-{job.number}/train.py")
    before = code.read_text()
    for name in "train.py", "beside.py":
        Path("complete", name).write_text("other code")
    for number in job.number, hangs.number, tasks[array.number]:  # the array's own number
        warn(number)
    first, second = job.starts(2)
    assert first[0] == second[0] and second[2]["SLURM_RESTART_COUNT"] == "1"
    assert code.read_text() == before
    assert code.with_name("beside.py").read_text() == ""
    assert second[2]["PYTHONPATH"] == str(clone / "complete")  # not ":", the working folder
    assert second[2]["TORCHINDUCTOR_CACHE_DIR"] == str(code.resolve().parent / "compiled")
    array.starts(2)
    for name in job.number, hangs.number, *tasks.values():
        state = Job("complete", number=name)
        restarts = str(int(name in (job.number, tasks[array.number])))
        assert (state.show("JobState"), state.show("Restarts")) == ("RUNNING", restarts), name
    command("scancel", job.number, hangs.number, array.number)


@on("plain")
def test_simple_files_are_requeued(kind, clone, monkeypatch):
    """By Slurm, and continue, in the same log; but neither half of the pair alone."""
    monkeypatch.setenv("STAND", "1")
    jobs = [Job(name) for name in STARTS if name not in ("complete", "node0", "node1")]
    half = Job("node0")
    nodes = {job: NODES[job.name] for job in [*jobs, half]}
    for job in nodes:
        job.starts(nodes[job])
        subprocess.run(["scontrol", "requeue", job.number], check=job is not half)
    for job in jobs:
        starts = [start[0] for start in job.ended(restarts=1).starts()]
        starts = [[re.sub(r"node\d:", "node:", word) for word in start] for start in starts]
        first, second = starts[: nodes[job]], starts[nodes[job] :]
        assert sorted(second) == sorted([*start, "--resume"] for start in first)
        assert "DUE TO JOB REQUEUE" in job.log()
    assert (half.show("JobState"), half.show("Restarts")) == ("RUNNING", "0")


@on("plain", "threads", "newer")
def test_complete_leaves_bad_nodes(kind, clone, monkeypatch):
    """Nodes where torch cannot use the GPUs, hangs or computes wrong sums are excluded: each once,
    a bad one alone, also later, and for all tasks of an array; but not for ever."""
    options = ["-p", "all"]
    monkeypatch.setenv("BAD", "node0")
    monkeypatch.setenv("LATE", "4" if kind == "threads" else "0")  # where Slurm would not wait
    jobs = {Job("complete", options=[*options, "--nodes=2"]): (1, "node0")}
    with monkeypatch.context() as patch:
        patch.setenv("ECC", "1")
        jobs[Job("complete", options=[*options, "--exclude=node3"])] = 1, "node0 node3"
    if kind != "threads":
        settings(CHECK_SECONDS=3)
        with monkeypatch.context() as patch:
            patch.setenv("HANGS", "1")
            jobs[Job("complete", options=options)] = 1, "node0"
        settings(CHECK_SECONDS=600)
        monkeypatch.setenv("BAD", "node0 node1")
        with monkeypatch.context() as patch:
            for name in "SICK", "STAND", "PROGRESS":
                patch.setenv(name, "1")
            later = Job("complete", options=[*options, "--exclude=node3"])
        jobs[later] = 3, "node0 node1 node3"
        chain = Job("complete", "--output", "runs/chain", options=[*options, "--array=1-3%1"])
        settings(MOST_BAD_STARTS=1)
        several = Job("complete", options=options)
        later.starts(1)
        warn(later.number)
        several.ended("FAILED", 1)
        assert wait_until(lambda: not command("squeue", "-h", "-j", chain.number), 120, 0.5)
        logs = [path.read_text() for path in Path().glob("complete-*.out")]
        logs = [text for text in logs if f"jobid={chain.number} ExcNodeList" in text]
        assert 1 <= len(logs) <= 3 and "node0,node1" in "".join(logs).replace(
            "node1,node0", "node0,node1"
        )
    for job, (restarts, excluded) in jobs.items():
        nodes = job.ended(restarts=restarts).show("ExcNodeList")
        assert sorted(command("scontrol", "show", "hostnames", nodes).split()) == excluded.split()


def states(array):
    """Of an array's tasks."""
    return set(re.findall(r"JobState=(\w*)", command("scontrol", "show", "job", array.number)))


@on("plain", "newer")
def test_arrays_end(kind, clone, monkeypatch):
    """After success, and after a failure without progress; where requeueing is refused, the next
    task continues. Each task of a sweep ends alone."""
    tasks = "--array=1-3%1"
    good = Job("complete", "--output", "runs/good", options=[tasks])
    sweep = Job("complete", options=["--array=1-3"])
    with monkeypatch.context() as patch:
        patch.setenv("FAILS", "0")
        bad = Job("complete", "--output", "runs/bad", options=[tasks])
        settings(REQUEUE_SECONDS=0)
        scontrol = shutil.which("scontrol")
        Path(".venv/bin/scontrol").write_text(
            f'#!/bin/sh\n[ "$1" = requeue ] && exit 1\nexec {scontrol} "$@"\n'
        )
        Path(".venv/bin/scontrol").chmod(0o755)
        patch.setenv("PROGRESS", "1")
        refused = Job("complete", "--output", "runs/refused", options=[tasks])
        alone = Job("complete")
    assert "Submit it again, with --output runs/complete-" in alone.ended("FAILED").log()
    jobs = {good: {"CANCELLED", "COMPLETED"}, bad: {"CANCELLED", "FAILED"}}
    jobs |= {sweep: {"COMPLETED"}, refused: {"FAILED"}}
    for job, expected in jobs.items():
        assert wait_until(lambda: states(job) == expected, 60, 0.5), (job.number, states(job))
    envs = [json.loads(path.read_text())[2] for path in Path().glob("starts-*")]
    arrays = [env["SLURM_ARRAY_JOB_ID"] for env in envs if "SLURM_ARRAY_JOB_ID" in env]
    counts = [arrays.count(job.number) for job in (good, bad, sweep, refused)]
    assert counts == [1, 1, 3, 3]
    assert len(list(Path("runs/refused").glob("job-*/train.py"))) == 1


@on("plain")
def test_lives_meet(kind, clone, monkeypatch):
    """Slurm starts an array's next task while the one before is ending: it waits. A second job in
    the folder of one that runs ends the first, which does not come back."""
    monkeypatch.setenv("STAND", "9")
    first = Job("complete", "--output", "runs/same")
    first.starts(1)
    monkeypatch.delenv("STAND")
    second = Job("complete", "--output", "runs/same")
    assert "A newer job, or life of this one" in first.ended("FAILED").log()
    second.ended()
    edit("complete", "exec python3", "trap : TERM\npython3")
    with open("slurm/complete.sh", "a") as file:
        file.write('sleep 3 # within KillWait\ntouch "ended-$SLURM_JOB_ID"\n')
    monkeypatch.setenv("STAND", "1")
    tasks = Job("complete", "--output", "runs/tasks", options=["--array=1-2%1"])
    begun = set(Path().glob("starts-*"))

    def new():
        return set(Path().glob("starts-*")) - begun

    assert wait_until(new, 60, 0.2)
    [first] = new()
    command("scancel", f"{tasks.number}_1")
    assert wait_until(lambda: len(new()) == 2, 60, 0.2)
    [second] = new() - {first}
    ended = Path(first.name.replace("starts", "ended"))
    assert ended.stat().st_mtime < second.stat().st_mtime
    command("scancel", tasks.number)


@on("plain")
def test_failed_lives(kind, clone, monkeypatch):
    """Two failures in a row are followed by another life; the third ends the job. For the last
    one, the nodes are changed."""
    settings(MOST_FAILED=2)
    monkeypatch.setenv("FAILS", "0")
    monkeypatch.setenv("PROGRESS", "1")
    job = Job("complete", options=["-p", "all"]).ended("FAILED", 3)
    nodes = [env["SLURMD_NODENAME"] for *_, env, _ in job.starts(4)]
    assert nodes[3] != nodes[2] and job.show("ExcNodeList") == nodes[2], job.log()


@on("plain")
def test_submitted_inside_a_job(kind, clone, monkeypatch):
    """sbatch passes on the variables of the job in which it is called: each file has its own GPUs
    all the same, complete.sh requeues itself, and the page's command leaves all of them out."""
    monkeypatch.setenv("STAND", "9")
    parent = Job("complete", options=["--array=7"])
    monkeypatch.delenv("STAND")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", parent.number)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    for name in "FAILS", "PROGRESS":
        monkeypatch.setenv(name, "0" if name == "FAILS" else "1")
    child = Job("complete")
    parent.starts(1)
    assert child.ended("FAILED", 1).show("ExitCode") == "3:0"
    assert (parent.show("JobState"), parent.show("Restarts")) == ("RUNNING", "0")
    monkeypatch.delenv("FAILS")
    monkeypatch.delenv("PROGRESS")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "1")
    [line] = re.findall(r"`(\(unset .* sbatch) \.\.\.\)`", PAGE)
    text = command("bash", "-c", f"{line} slurm/dp.sh)")
    clean = Job("dp", number=text.split()[-1])
    for job in [Job(name) for name in STARTS]:
        check(job.ended(), nodes=NODES[job.name])
    assert "SLURM_ARRAY_TASK_ID" not in clean.ended().starts()[0][2]


@on("plain")
def test_complete_fails(kind, clone, monkeypatch):
    """It is requeued if there is a newer checkpoint than at its start, where its flags put it, and
    not more often than the file says; else it ends with its status. If cancelled, it stays so."""
    settings(MOST_LIVES=2)
    monkeypatch.setenv("FAILS", "0")
    jobs = {Job("complete"): 0}
    monkeypatch.setenv("PROGRESS", "1")
    outputs = ["--output=a", "--output", "runs/ours"], ["--output", "a", "--output=runs/my own"]
    jobs |= {Job("complete", *flags): 1 for flags in outputs}
    forbidden = Job("complete", options=["--no-requeue"])
    jobs[forbidden] = 0
    monkeypatch.setenv("PROGRESS", "9")
    jobs[Job("complete")] = 2
    monkeypatch.delenv("FAILS")
    monkeypatch.setenv("STAND", "9")
    cancelled = Job("complete")
    cancelled.starts(1)
    command("scancel", cancelled.number)
    for job, restarts in jobs.items():
        assert job.ended("FAILED", restarts).show("ExitCode") == "3:0"
    for output in "runs/ours", "runs/my own":
        assert len(list(Path(output).glob("job-*/train.py"))) == 1
    assert forbidden.log().count("Requested operation is presently disabled") == 1
    assert len(cancelled.ended("CANCELLED").starts()) == 1


@on("plain")
def test_slurmctld_does_not_answer(kind, clone, tmp_path, monkeypatch):
    """The job asks again until it does."""
    monkeypatch.setenv("STAND", "1")
    monkeypatch.setenv("PROGRESS", "1")
    job = Job("complete")
    job.starts(1)
    daemons, controller = RUNNING
    os.kill(daemons[1].pid, signal.SIGTERM)
    helpers.finish([daemons[1]])
    mark = f"SLURM_JOB_ID={job.number}\0".encode()
    [shell] = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"/requeue" in path.read_bytes() and mark in Path(path.parent, "environ").read_bytes()
    ]
    os.kill(shell, signal.SIGUSR1)
    asked = wait_until(lambda: f" for job {job.number}" in job.log(), 120)  # scontrol's complaint
    monkeypatch.delenv("TEST_FOLDER")  # or it would end with this test
    daemons[1] = Cold(controller, Path(os.environ["SLURM_CONF"]).parent / "again.out")
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    assert wait_until(lambda: os.system("scontrol ping | grep -q UP") == 0, 60, 0.5)
    assert asked, job.log()
    job.starts(2)
    job.ended(restarts=1)


def preempt():
    command(*"sbatch -p urgent --nodes=2 --gres=gpu:40 -o /dev/null --wrap=true".split())


@on("plain", "newer")
def test_complete_is_preempted(kind, clone, monkeypatch):
    """Six times in a row, which is more than MaxBatchRequeue; with and without a GraceTime, also
    where jobs are cancelled after it; by SIGTERM for its processes, or USR1 for itself. Cancelled
    without a grace, it continues in a new job."""
    if kind == "newer":
        assert command("sbatch", "--version").split()[1] >= "24.05"
    monkeypatch.setenv("STAND", "6")
    settings(MOST_LIVES=0)
    names = ["requeue", "grace", "cancel_grace"]
    cancelled = Job("complete", options=["-p", "cancel"])
    jobs = [Job("complete", options=["-p", name]) for name in names]
    edit("complete", "#SBATCH --signal", "# no --signal")  # for send_user_signal
    jobs += [Job("complete", options=["-p", name]) for name in names[1:]]
    cancelled.starts(1)
    for life in range(1, 7):
        for job in jobs:
            job.starts(life)
        preempt()
    for job in jobs:
        wait_until(job.over, LIMIT, 0.2)
        state, restarts = job.show("JobState"), int(job.show("Restarts"))
        # A job that has been preempted in its grace keeps a mark in 24.11: when it has finished, it
        # is started once more, or called preempted.
        later = [("COMPLETED", 7), ("PREEMPTED", 6)] if kind == "newer" else []
        assert (state, restarts) in [("COMPLETED", 6), *later], job.log()
        first, *others = job.starts()
        assert len(others) == restarts and all(start[0] == first[0] for start in others)
    cancelled.ended("PREEMPTED")
    output = f"runs/complete-{cancelled.number}"
    monkeypatch.delenv("STAND")
    again = Job("complete", "--output", output).ended()
    assert again.starts()[0][0][-5:] == ["--output", output, "--resume", "--output", output]
    assert Path(output, f"job-{again.number}", "train.py").exists()


INSTEAD = {r"--array=1-\d+": "--array=1-3", "FLAGS": "--lr 1", "--nodes=4": "--nodes=4 -p all"}


@on("plain")
def test_commands_of_the_page(kind, clone):
    """Each of Slurm's runs, and the jobs that it submits end well, an array's with their seeds."""
    blocks = re.findall(r"^ *```sh\n((?:.*\n)*?) *```$", PAGE, re.M)
    lines = [line.strip() for code in blocks for line in code.splitlines()]
    lines.remove("python3 -m venv .venv && .venv/bin/pip install -r requirements.txt")
    assert all(re.match("(for .* )?sbatch", line) for line in lines)
    inline = re.findall(r"`((?:sbatch|sinfo|squeue|scontrol show) [^`]+)`", PAGE)
    lines += inline
    [flags] = re.findall('`(flags=".*")`', PAGE)
    edit("complete", 'flags=""', flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND", "1")
        running = Job("complete")
    running.starts(1)
    INSTEAD["12345"] = running.number
    jobs = []
    for line in lines:
        for old, new in INSTEAD.items():
            line = re.sub(old, new, line)
        text = command("bash", "-c", line)
        jobs += [(line, number) for number in re.findall("Submitted batch job (.*)", text)]
    command("scancel", running.number)
    assert wait_until(lambda: not command("squeue", "-h"), 60, 0.2), command("squeue")
    for line, number in jobs:
        text = command("scontrol", "show", "job", number)
        states = set(re.findall(r"JobState=(\w*)", text))
        assert states - {"CANCELLED"} == {"COMPLETED"}, line
        assert "%1" in line or "CANCELLED" not in states, line  # a chain has ended
    lines = [line for path in Path().glob("starts-*") for line in path.read_text().splitlines()]
    words = [json.loads(line)[0] for line in lines]
    seeds = [start[start.index("--seed") + 1] for start in words if "--seed" in start]
    assert [seeds.count(seed) for seed in "123"] == [2, 1, 1]  # of a chain, and many runs


@on("plain", "newer")
def test_repairs_of_the_page(kind, clone, monkeypatch):
    """A node that is lost, a mended script, a bad node, a job that is held."""
    monkeypatch.setenv("STAND", "3")
    job = Job("complete", options=["-p", "requeue"])
    lost = job.starts(1)[0][2]["SLURMD_NODENAME"]
    command("scontrol", "update", f"node={lost}", "state=down", "reason=test")
    node = job.starts(2)[1][2]["SLURMD_NODENAME"]
    os.system(f"scontrol update node={lost} state=resume")  # it may have come back by itself
    Path("complete/train.py").write_text("mended")

    def run(start):
        [line] = set(re.findall(f"`({start}[^`]*)`", PAGE))
        command("bash", "-c", line.replace("12345", job.number).replace("NODE", node))

    run("cp complete")
    run("scontrol requeue")
    assert wait_until(lambda: job.show("JobState") == "PENDING", 60)
    run(r"scontrol update jobid=12345 ExcNodeList=\$")
    run("scontrol update jobid=12345 Time")
    assert job.show("TimeLimit") == "08:00:00"
    first, _, third = job.starts(3)
    assert third[0][-3:] == first[0][-3:] and third[2]["SLURMD_NODENAME"] != node
    assert Path(third[0][third[0].index("-u") + 1]).read_text() == "mended"
    command("scontrol", "requeuehold", job.number)
    assert wait_until(lambda: job.show("Reason") == "job_requeued_in_held_state", 60)
    run(r"scontrol update jobid=12345 ExcNodeList=(?!\$)")
    assert job.show("ExcNodeList") == "(null)"
    run("scontrol release")
    job.ended(restarts=3)


@on("plain")
def test_srun_instead_of_torchrun(kind, clone):
    """The lines of docs/launching.md."""
    text = (ROOT / "docs" / "launching.md").read_text()
    [lines] = re.findall(r"^(export MASTER_ADDR.*\nsrun .*\n)", text, re.M)
    head = "#!/bin/bash\n#SBATCH --ntasks-per-node=4 --cpus-per-task=4 --gres=gpu:4 -o %x-%j.out\n"
    Path("slurm/srun.sh").write_text(f"{head}source .venv/bin/activate\n{lines}")
    starts = Job("srun", options=["--job-name=srun"]).ended().starts()
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"
    places = sorted([env[name] for name in names] for *_, env, _ in starts)
    assert places == [[str(i), str(i), "4", "node0"] for i in range(4)]


@on("plain")
def test_where(kind, clone):
    """A rank that is elsewhere, of several tasks on each of two nodes, without torchrun."""
    Path("stuck.py").write_text(
        "import os, time\n"
        "def other():\n"
        "    time.sleep(999)\n"
        "def backward():\n"
        "    time.sleep(999)\n"
        "print('here', flush=True)\n"
        "other() if os.environ['SLURM_PROCID'] == '2' else backward()\n"
    )
    options = "--nodes=2 --ntasks-per-node=2 -o %x-%j.out --job-name=stuck".split()
    line = "srun /usr/bin/python3 stuck.py"
    number = command("sbatch", "--parsable", *options, f"--wrap={line}")
    log = Path(f"stuck-{number}.out")
    assert wait_until(lambda: log.exists() and log.read_text().count("here") == 4, 60)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "slurm/where.sh", number]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    places = re.findall(
        r"^SLURM_PROCID=(\d) (node\d) (?:(\w+) \(.*stuck.py:\d\)|no stack)", done.stdout, re.M
    )
    assert sorted(place[:2] for place in places) == [
        ("0", "node0"),
        ("1", "node0"),
        ("2", "node1"),
        ("3", "node1"),
    ], done
    if shutil.which("py-spy", path=env["PATH"]):
        functions = {rank: function for rank, _, function in places}
        assert functions == {"0": "backward", "1": "backward", "2": "other", "3": "backward"}
    command("scancel", number)


@pytest.fixture
def real(clone):
    """The clone without stand-ins: the scripts, and the Python that runs the tests."""
    shutil.rmtree(".venv/bin")
    Path(".venv/bin").mkdir()
    Path(".venv/bin/activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    for path in ROOT.glob("train_*.py"):
        shutil.copy(path, clone)


def weights(name):
    saved = torch.load(f"runs/{name}/model.pt", weights_only=True)
    return saved.get("model", saved)  # complete/'s also has the names of the classes and more


def on_cpus(name, *changes):
    """Without the check of the GPUs, and with other changes."""
    text = Path(f"slurm/{name}.sh").read_text()
    for check in re.findall(r'^srun --export=ALL python -c "\$check" .*\n', text, re.M):
        changes += check, ""
    edit(name, *changes)


@on("plain")
def test_names_that_lead_nowhere(kind, real):
    """Nodes train together by the page's line if the others do not know a node's own name."""
    Path("meet.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ones = torch.ones(1)\n"
        "dist.all_reduce(ones)\n"
        "print('sum', ones.item())\n"
        "dist.destroy_process_group()\n"
    )
    [torchrun] = re.findall(r"`(bash -c 'torchrun --local-addr .*? bash)`", PAGE)
    name = "ddp_torchrun_nodes"
    on_cpus(name, "torchrun --nnodes", f"{torchrun} --nnodes", " gpu ", " 1 ")
    edit(name, "script=train_ddp_torchrun.py", "script=meet.py")
    edit(name, "$(hostname)", "$SLURMD_NODENAME")
    rename = "srun bash -c 'hostname {}$SLURMD_NODENAME'\n"
    edit(name, "srun --export", f"{rename.format('lost-')}srun --export")
    edit(name, "COUNT:+--resume}\n", f"COUNT:+--resume}}\n{rename.format('')}")
    job = Job(name).ended()
    assert job.log().count("sum 2.0") == 2, job.log()


@on("plain")
def test_small_scripts_train(kind, real, data):
    """Not on the CPU, unless that is asked for; then on two nodes, which are given whole, and the
    pair. test_small.py starts all scripts."""
    without_gpu = Job("single")
    port = helpers.free_port()
    for name in "node0", "node1":
        on_cpus(name, "23456", str(port))
    for name in "single", "ddp_multigpu_proc":
        on_cpus(name)
    on_cpus(SEVERAL[0], "--nproc-per-node gpu", "--nproc-per-node 1")
    on_cpus("ddp_torchrun", "--nproc-per-node gpu", "--nproc-per-node 2")
    flags = ["--dataset", data / "pictures", "--batch-size", 16, "--workers", 0, "--epochs", 1]
    options = ["-p", "whole"]
    names = ["single", "ddp_multigpu_proc", "node1", "node0"]
    jobs = [Job("ddp_torchrun", *flags, "--output", "runs/one_node", options=options)]
    jobs.append(Job(SEVERAL[0], *flags, options=options))
    for job in [*jobs, *(Job(name, *flags, options=options) for name in names)]:
        assert job.ended().log().count("epoch 0:") == (job.name != "node1"), job.log()
    for name in "ddp_torchrun", "one_node", "ddp_multigpu_proc", "pair":
        torch.testing.assert_close(weights(name), weights("single"), rtol=0, atol=1e-5)
    log = without_gpu.ended("FAILED").log()
    assert "AssertionError: torch can use no GPU" in log and "rank 0" not in log, log


@on("plain")
def test_complete_trains(kind, real, monkeypatch):
    """Beyond a time limit on two nodes, to the weights of an undisturbed run; and beyond a failure
    after a checkpoint, but not the same failure again. A loop of one's own does so, too."""
    [line] = re.findall(r"^ *scaler\.scale\(\w+", Path("complete/train.py").read_text(), re.M)
    indent, first = line[: line.index("s")], "'SLURM_RESTART_COUNT' not in os.environ"
    stand = f"if step == 3 and 'STAND' in os.environ and {first}: __import__('time').sleep(9999)"
    more = ["import argparse\n", "import beside, argparse, os\n", line]  # a module of the user's
    shutil.copytree("complete", "mine")
    Path("mine/beside.py").touch()
    altered(COMPLETE, *more, f"{indent}{stand}\n{line}").rename("mine/long.py")
    altered(COMPLETE, *more, f"{indent}assert step < 3\n{line}").rename("mine/fails.py")
    more = ["Discs(2_000", "Discs(64", "Discs(400", "Discs(16", line := "        model.train()\n"]
    more += [f"        assert epoch < 1 or not ({first})\n{line}"]
    altered("own_loop/after.py", *more).rename("mine/loop.py")

    def submit(script, processes, *flags, options=()):
        shutil.copy(ROOT / "slurm" / "complete.sh", "slurm")
        edit("complete", "complete/train.py", f"mine/{script}.py")
        edit("complete", "processes=gpu", f"processes={processes}")
        settings(LOOK_SECONDS=0.5, MOST_FAILED=0)
        if script != "long":  # it need not fail four times
            [path] = re.findall(r"slurm/requeue.*?\.py", Path("slurm/complete.sh").read_text())
            text = replaced(
                Path(path).read_text(), '"--max-restarts", "3"', '"--max-restarts", "0"'
            )
            Path(path).write_text(text)
        return Job("complete", *flags, options=options)

    flags = ["--dataset", "synthetic", "--batch-size", 1000, "--epochs", 1, "--log-every", 1]
    flags += ["--checkpoint-minutes", 0]
    monkeypatch.setenv("STAND", "1")
    long = submit("long", 1, *flags, options=["--nodes=2"])
    monkeypatch.delenv("STAND")
    long.wait_for("step 2/")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # py-spy
    if shutil.which("py-spy"):

        def places():  # of two ranks, among which are neither torchrun nor requeue.py
            lines = command("bash", "slurm/where.sh", long.number).splitlines()
            return [re.match(r"RANK=(\d) node(\d) train_epoch \(", line) for line in lines]

        assert wait_until(lambda: all(places()), 60)
        assert [place.groups() for place in places()] == [("0", "0"), ("1", "1")]
    command("scontrol", "update", f"job={long.number}", "endtime=now+305")  # USR1 within 30 s
    fails, quiet = submit("fails", 1, *flags), submit("long", 2, *flags)
    loop = submit("loop", 2, "--epochs", 2, "--workers", 0)
    long.wait_for("DUE TO JOB REQUEUE")
    command("scontrol", "update", f"job={long.number}", "timelimit=60")  # of its next life
    assert "0 epochs and 2 steps are done" in fails.ended("FAILED", 1).log()
    quiet.ended()
    assert re.search("0 epochs and [12] steps are done", long.ended(restarts=1).log()), long.log()
    names = [f"complete-{job.number}" for job in (long, quiet)]
    torch.testing.assert_close(*map(weights, names), rtol=0, atol=0)
    assert re.findall(r"^epoch (\d)", loop.ended(restarts=1).log(), re.M) == ["0", "1"], loop.log()
    assert Path(f"runs/complete-{loop.number}/best.pt").exists()

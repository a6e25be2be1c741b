"""The sbatch files on a real Slurm, in clusters of several kinds, in a folder with a space in its
name. A stand-in for python and torchrun shows what a file starts, in no time; jobs train only
where training is the point. Nothing goes by the clock."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import helpers
import pytest
import torch
from helpers import LIMIT, ROOT, Cold, command, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]  # one cluster at a time
MACHINES = ["node0", "node1", "node2", "node3"]
HOSTS = "127.0.0.1 node0\n127.0.0.2 node1\n127.0.0.3 node2\n127.0.0.4 node3\n"
PAGE = (ROOT / "slurm" / "README.md").read_text()
NEWER = os.environ.get("NEWER_SLURM")  # the folder of a Debian with Slurm 24.05 or newer
KINDS = {  # changes of slurm.conf
    "plain": {},
    "newer": {},
    # Two threads a core, which are CPUs; memory is shared out, and little of it without --mem.
    "threads": {
        "CR_Core": "CR_CPU_Memory\nDefMemPerCPU=256",
        "CPUs=200": "Sockets=1 CoresPerSocket=100 ThreadsPerCore=2",
    },
    "no gres": {"GresTypes=gpu\n": "", " Gres=gpu:40": ""},
}
# What is started writes down how. It stands still in the first STAND lives of a job. For the files'
# check of the GPUs, torch sees those that Slurm has granted, but no more than GPUS.
STAND_IN = """#!/usr/bin/python3 -S
import json, os, sys, time, types
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
granted = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").count(",") + 1
if words[1] == "-c":
    gpus = min(granted, int(os.environ.get("GPUS", granted)))
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].accelerator = types.SimpleNamespace(device_count=lambda: gpus)
    exec(words[2])
    sys.exit()
data = [os.listdir(word) for word in words if word.startswith("/") and os.path.isdir(word)]
start = json.dumps([words, os.getcwd(), dict(os.environ), data])
with open("starts-" + os.environ["SLURM_JOB_ID"], "ab", 0) as file:  # in one piece
    file.write(start.encode() + b"\\n")
life = int(os.environ.get("SLURM_RESTART_COUNT", 0))
if life < int(os.environ.get("PROGRESS", 0)):
    open(words[words.index("--output") + 1] + "/last.pt", "w").close()
if os.environ.get("FAILS") == os.environ["SLURM_PROCID"]:
    sys.exit(3)
if life < int(os.environ.get("STAND", 0)):
    time.sleep(9999)
"""
TORCHRUN = "torchrun --nnodes {nodes} --nproc-per-node gpu --rdzv-backend c10d "
TORCHRUN += "--rdzv-id {job} --rdzv-endpoint {host}:{port} --rdzv-conf read_timeout=600 "
SPAWN = "python -u train_ddp_spawn.py"
PAIR = " --init-method tcp://node0:23456 --timeout 240 --nnodes 2 --node-rank {} "
PAIR += "--output runs/pair --resume"
STARTS = {  # what each file starts, once per node; $R is the node's number
    "single": "python -u train_single.py --workers 4",
    "dp": "python -u train_dp.py --workers 16",
    "ddp_spawn": SPAWN,
    "ddp_torchrun": TORCHRUN + "train_ddp_torchrun.py",
    "fsdp2": TORCHRUN + "train_fsdp2.py",
    "ddp_multigpu_proc": "python -u train_ddp_multigpu_proc.py --node-rank $R --nnodes {nodes} "
    "--init-method tcp://{host}:{port} --workers 16",
    "node0": SPAWN + PAIR.format(0),
    "node1": SPAWN + PAIR.format(1),
    "complete": TORCHRUN.replace("--rdzv", "--max-restarts 3 --rdzv", 1)
    + "runs/complete-{job}/job-{job}/script.py --resume --output runs/complete-{job}",
}
SEVERAL = ["ddp_torchrun", "fsdp2", "ddp_multigpu_proc", "complete"]  # nodes


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
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "-F", "--force", "-S", folder / "munge" / "socket", *munge]
    own = "unshare --mount --uts --pid --fork --mount-proc --kill-child".split()
    with pytest.MonkeyPatch.context() as patch:
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
    activate = 'PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd):$PATH"\n'
    (folder / ".venv" / "bin" / "activate").write_text(activate)
    monkeypatch.chdir(folder)
    yield folder
    command("scancel", "--user", "root")
    assert wait_until(lambda: not command("squeue", "-h"), 60, 0.2), command("squeue")


def edit(name, *changes):
    """Edit slurm/NAME.sh. Changes: what stands there, its replacement, and so on."""
    text = Path(f"slurm/{name}.sh").read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    Path(f"slurm/{name}.sh").write_text(text)


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

    def wait_for(self, text, times=1):
        wait_until(lambda: self.log().count(text) >= times or self.over(), 2 * LIMIT, 0.2)
        assert wait_until(lambda: self.log().count(text) >= times, 5), self.log()

    def ended(self, state="COMPLETED", restarts=0):
        wait_until(self.over, 2 * LIMIT, 0.1)
        assert (self.show("JobState"), self.show("Restarts")) == (state, str(restarts)), self.log()
        return self

    def starts(self, count=None):
        """What the stand-ins have written down: words, folder, environment and data of each."""
        path = self.file.parent / f"starts-{self.number}"

        def read():
            return (
                [json.loads(line) for line in path.read_text().splitlines()]
                if path.exists()
                else []
            )

        if count:
            wait_until(lambda: len(read()) >= count or self.over(), 60, 0.2)
            assert len(read()) >= count, (self.name, count, self.log())
        return read()


def check(job, *flags, nodes=1, gres=True):
    """It has started what it should, once per node, in this folder, with its environment."""
    starts = job.starts()
    names = {env["SLURMD_NODENAME"] for *_, env, _ in starts}
    place = {"job": job.number, "port": 10000 + int(job.number) % 20000, "host": min(names)}
    words = STARTS[job.name].format(**place, nodes=nodes)
    words = [[*words.replace("$R", str(i)).split(), *flags] for i in range(nodes)]
    assert sorted(start[0] for start in starts) == words and len(names) == nodes, job.log()
    assert names == {job.name} or not job.name.startswith("node")
    for _, folder, env, _ in starts:
        assert folder == os.getcwd() and env["PATH"].startswith(f"{folder}/.venv/bin:")
        assert env["SLURM_STEP_NUM_TASKS"] == str(nodes)
        assert env["SLURM_CPUS_ON_NODE"] == ("4" if job.name == "single" else "16")  # the step's
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").count(",") + 1
        assert gpus == (1 if job.name == "single" else 4) or not gres


def only(kind):
    return pytest.mark.parametrize("kind", [kind], indirect=True, scope="module")


def test_each_file_starts_once(kind, clone, monkeypatch):
    """On nodes that are shared or given whole, also where jobs do not get the environment."""
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
    two = [Job(name, options=["--nodes=2"]) for name in SEVERAL]
    for job in jobs:
        nodes = 2 if job.name == "ddp_multigpu_proc" else 1
        check(job.ended(), "--lr", "a b", nodes=nodes, gres=kind != "no gres")
    for job in two:
        check(job.ended(), nodes=2, gres=kind != "no gres")


@only("threads")
def test_memory(kind, clone):
    """Without --mem a job has the cluster's default for each of its CPUs."""
    small = Job("ddp_torchrun").ended()
    edit("ddp_torchrun", "##SBATCH --mem", "#SBATCH --mem")
    large = Job("ddp_torchrun").ended()
    assert small.starts()[0][2]["SLURM_MEM_PER_CPU"] == "256"
    assert large.starts()[0][2]["SLURM_MEM_PER_NODE"] == str(64 * 1024)


@only("plain")
def test_nothing_is_half_done(kind, clone, tmp_path):
    """Submitted from another folder, or without an environment, a job ends with a line."""
    jobs = []
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "slurm").symlink_to(clone / "slurm")
    os.chdir(tmp_path / "elsewhere")
    jobs += [Job(name) for name in STARTS]
    os.chdir(clone)
    Path(".venv/bin/activate").write_text("echo no such environment; return 3\n")
    jobs += [Job(name) for name in STARTS]
    for job in jobs:
        job.ended("FAILED")
        assert job.log().count("\n") == 1 and not job.starts(), job.log()
    assert not list(tmp_path.glob("*/runs"))


@only("plain")
def test_what_fails_on_one_node_ends_the_job(kind, clone, monkeypatch):
    monkeypatch.setenv("STAND", "1")
    monkeypatch.setenv("FAILS", "1")
    for job in [Job(name, options=["--nodes=2"]) for name in SEVERAL]:
        wait_until(job.over, 60, 0.2)
        assert job.show("JobState") == "FAILED", job.name


def block(text):
    """The only block of bash on the page that has this in it."""
    blocks = re.findall(r"^ *```bash\n((?:.*\n)*?) *```$", PAGE, re.M)
    [found] = [code for code in blocks if text in code]
    return found


@only("plain")
@pytest.mark.parametrize("place", ["SLURM_TMPDIR", "TMPDIR", "neither", "broken"])
def test_data(kind, clone, place, monkeypatch):
    """An archive is unpacked once per node, and a job that cannot do that does not train."""
    for part in "train", "test":
        Path("my_images", part).mkdir(parents=True)
    command("tar", "-cf", "my_images.tar", "my_images")
    if place == "broken":
        Path("my_images.tar").write_bytes(Path("my_images.tar").read_bytes()[:700] + b"?" * 700)
    tar = '#!/bin/sh\necho unpacks; exec /bin/tar "$@"\n'
    Path(".venv/bin/tar").write_text(tar)
    Path(".venv/bin/tar").chmod(0o755)
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    if place != "neither":
        monkeypatch.setenv("TMPDIR" if place == "TMPDIR" else "SLURM_TMPDIR", os.environ["DISK"])
    lines = block("tar -xf").replace("/shared/my_images.tar", "my_images.tar")
    flags = '--dataset "$data/my_images" "$@"'
    edit("complete", "# torch must", f"{lines}# torch must", '"$output" "$@"', f'"$output" {flags}')
    job = Job("complete", options=["--nodes=2", "-p", "whole"])
    if place == "broken":
        assert not job.ended("FAILED").starts(), job.log()
    else:
        disk = Path("/tmp" if place == "neither" else os.environ["DISK"], f"data-{job.number}")
        check(job.ended(), "--dataset", f"{disk}/my_images", nodes=2)
        shutil.rmtree(disk, ignore_errors=True)
        assert [sorted(data[0]) for *_, data in job.starts()] == [["test", "train"]] * 2
        assert job.log().count("unpacks") == 2


def warn(*numbers):
    for number in numbers:
        command("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before a time limit


@only("plain")
def test_gpus_that_torch_cannot_use(kind, clone, monkeypatch):
    """The job ends in a line, instead of training on the CPU, or on fewer GPUs."""
    jobs = []
    for gpus in range(2):
        monkeypatch.setenv("GPUS", str(gpus))
        jobs += [(Job(name), gpus) for name in list(STARTS)[gpus:]]  # single.sh asks for one
    for job, gpus in jobs:
        job.ended("FAILED")
        assert f"AssertionError: torch can use only {gpus} GPUs" in job.log() and not job.starts()


@only("plain")
@pytest.mark.parametrize("way", ["conda", "container"])
def test_environments(kind, clone, way, monkeypatch):
    """Each file's other ways to an environment, here with stand-ins for conda and apptainer."""
    monkeypatch.setenv("BASH_FUNC_module%%", '() { [ "$*" = "load miniforge" ]; }')
    monkeypatch.setenv("PATH", f"{clone}/bin:{os.environ['PATH']}")
    conda = f'echo \'conda() {{ [ "$*" = "activate NAME" ] && PATH="{clone}/.venv/bin:$PATH"; }}\''
    apptainer = f'PATH="{clone}/.venv/bin:$PATH"; shift 5; CONTAINER="$PPID" exec "$@"'
    Path("bin").mkdir()
    for name, line in ("conda", conda), ("apptainer", apptainer):
        Path("bin", name).write_text(f"#!/bin/bash\n{line}\n")
        Path("bin", name).chmod(0o755)
    for name in STARTS:
        text = Path(f"slurm/{name}.sh").read_text()
        [venv] = re.findall("^source .venv/bin/activate .*\n", text, re.M)
        [module] = re.findall(r"^# (module load .*)", text, re.M)
        [container] = re.findall(r"^inside=\(\) # EDIT: or a container: (\(.*\)),", text, re.M)
        edit(name, venv, "")
        if way == "conda":
            edit(name, f"# {module}", module)
        else:
            edit(name, "inside=()", f"inside={container}")
    jobs = [Job(name, "--lr", "a b") for name in STARTS]
    for job in jobs:
        starts = job.ended().starts()
        assert starts[0][0][-2:] == ["--lr", "a b"], job.log()
        assert all(("CONTAINER" in env) == (way == "container") for *_, env, _ in starts)


@only("plain")
def test_complete_is_requeued(kind, clone, monkeypatch):
    """At its time limit, with the code and folder that it began with, as often as the file says;
    a task of an array without the others; and not at all where requeueing is forbidden."""
    edit("complete", "requeues=20", "requeues=1")
    monkeypatch.setenv("STAND", "2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = Job("complete", "--lr", "a b")
    forbidden = Job("complete", options=["--no-requeue"])
    array = Job("complete", options=["--array=1-3"])
    assert wait_until(lambda: len(list(Path().glob("starts-*"))) == 5, 60)
    tasks = {}  # of the array: job number, and Slurm's other name for it
    for path in Path().glob("starts-*"):
        env = json.loads(path.read_text())[2]
        if task := env.get("SLURM_ARRAY_TASK_ID"):
            tasks[env["SLURM_JOB_ID"]] = f"{array.number}_{task}"
    code = Path(f"runs/complete-{job.number}/job-{job.number}/script.py")
    before = code.read_text()
    Path("complete/train.py").write_text("other code")
    warn(job.number, forbidden.number, tasks[array.number])  # this one has the array's own number
    first, second = job.starts(2)
    assert first[0] == second[0] and second[2]["SLURM_RESTART_COUNT"] == "1"
    assert code.read_text() == before and code.stat().st_mode & 0o777 == 0o600
    assert second[2]["PYTHONPATH"] == str(clone / "complete")  # not ":", the working folder
    assert second[2]["TORCHINDUCTOR_CACHE_DIR"] == f"{code.parent}/compiled"
    array.starts(2)
    warn(job.number)
    time.sleep(1)
    assert "Requested operation is presently disabled" in forbidden.log()
    for name in job.number, forbidden.number, *tasks.values():
        state = Job("complete", number=name)
        restarts = str(int(name in (job.number, tasks[array.number])))
        assert (state.show("JobState"), state.show("Restarts")) == ("RUNNING", restarts), name
    command("scancel", job.number, forbidden.number, array.number)


@only("plain")
def test_complete_fails(kind, clone, monkeypatch):
    """It is requeued if there is a newer checkpoint than at its start, where its flags put it, and
    not more often than the file says; else it ends with its status. If cancelled, it stays so."""
    monkeypatch.setenv("FAILS", "0")
    never = Job("complete")
    monkeypatch.setenv("PROGRESS", "1")
    once = Job("complete")
    other = Job("complete", "--output", "runs/other")
    monkeypatch.setenv("PROGRESS", "9")
    edit("complete", "requeues=20", "requeues=2")
    often = Job("complete")
    monkeypatch.delenv("FAILS")
    monkeypatch.setenv("STAND", "9")
    cancelled = Job("complete")
    cancelled.starts(1)
    command("scancel", cancelled.number)
    for job, restarts in (never, 0), (once, 1), (other, 1), (often, 2):
        job.ended("FAILED", restarts)
        assert job.show("ExitCode") == "3:0"
    assert Path("runs/other/last.pt").exists()
    cancelled.ended("CANCELLED")
    assert len(cancelled.starts()) == 1


@only("plain")
def test_slurmctld_does_not_answer(kind, clone, tmp_path, monkeypatch):
    """The job asks again until it does."""
    monkeypatch.setenv("STAND", "1")
    job = Job("complete")
    job.starts(1)
    daemons, controller = RUNNING
    os.kill(daemons[1].pid, signal.SIGTERM)
    helpers.finish([daemons[1]])
    shells = [  # the script's, and that of its part in the background
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().endswith(f"job{int(job.number):05}/slurm_script\0".encode())
    ]
    os.kill(min(shells), signal.SIGUSR1)
    assert wait_until(lambda: "Unable to contact slurm controller" in job.log(), 60)
    monkeypatch.delenv("TEST_FOLDER")  # or it would end with this test
    daemons[1] = Cold(controller, Path(os.environ["SLURM_CONF"]).parent / "again.out")
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    assert wait_until(lambda: os.system("scontrol ping | grep -q UP") == 0, 60, 0.5)
    job.ended(restarts=1)


def preempt():
    command(*"sbatch -p urgent --nodes=2 --gres=gpu:40 -o /dev/null --wrap=true".split())


@pytest.mark.parametrize("kind", ["plain", "newer"], indirect=True, scope="module")
def test_complete_is_preempted(kind, clone, monkeypatch):
    """Six times in a row, which is more than MaxBatchRequeue; with and without a GraceTime, also
    where jobs are cancelled after it; by SIGTERM for its processes, or USR1 for itself."""
    if kind == "newer":
        assert command("sbatch", "--version").split()[1] >= "24.05"
    monkeypatch.setenv("STAND", "6")
    edit("complete", "requeues=20", "requeues=0")  # of its own
    names = ["requeue", "grace", "cancel_grace"]
    jobs = [Job("complete", options=["-p", name]) for name in names]
    edit("complete", " --signal=B:USR1@120", "")  # for send_user_signal
    jobs += [Job("complete", options=["-p", name]) for name in names[1:]]
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
        if job is not jobs[0]:  # which Slurm requeues as it sends USR1
            assert not Path(f"runs/complete-{job.number}/job-{job.number}/requeued").read_text()


@pytest.mark.parametrize("kind", ["plain", "newer"], indirect=True, scope="module")
def test_complete_is_stopped(kind, clone, monkeypatch):
    """Cancelled without a grace, it continues when it is submitted again. A node that is lost has
    it requeued."""
    monkeypatch.setenv("STAND", "1")
    cancelled = Job("complete", options=["-p", "cancel"])
    cancelled.starts(1)
    preempt()
    cancelled.ended("PREEMPTED")
    failed = Job("complete", options=["-p", "requeue"])
    node = failed.starts(1)[0][2]["SLURMD_NODENAME"]
    command("scontrol", "update", f"node={node}", "state=down", "reason=test")
    failed.ended(restarts=1)
    os.system(f"scontrol update node={node} state=resume")  # it may have come back by itself
    first, second = failed.starts()
    assert first[0] == second[0]
    output = f"runs/complete-{cancelled.number}"
    monkeypatch.setenv("STAND", "0")
    again = Job("complete", "--output", output).ended()
    words = again.starts()[0][0]
    assert "--resume" in words and words[-1] == output
    assert Path(output, f"job-{again.number}", "script.py").exists()


INSTEAD = {r"--array=1-\d+": "--array=1-3", "nvidia-smi": "hostname", "FLAGS": "--lr 1"}


@only("plain")
def test_commands_of_the_page(kind, clone):
    """Each of Slurm's runs, and the jobs that it submits end well, an array's with their seeds."""
    blocks = re.findall(r"^ *```sh\n((?:.*\n)*?) *```$", PAGE, re.M)
    lines = [line.strip() for code in blocks for line in code.splitlines()]
    assert all(
        re.match(r"(for .* )?sbatch|\.venv/bin/python complete/pack_images", line) for line in lines
    )
    inline = re.findall(r"`((?:sbatch|srun|sinfo|squeue|scontrol show) [^`]+)`", PAGE)
    lines = [line for line in lines if "sbatch" in line] + inline
    assert '`--seed "$SLURM_ARRAY_TASK_ID"` before `"$@"`' in PAGE
    edit("complete", '"$@"', '--seed "$SLURM_ARRAY_TASK_ID" "$@"')
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
        assert set(re.findall(r"JobState=(\w*)", text)) == {"COMPLETED"}, line
    lines = [line for path in Path().glob("starts-*") for line in path.read_text().splitlines()]
    words = [json.loads(line)[0] for line in lines]
    seeds = [start[start.index("--seed") + 1] for start in words if start[-1] == "resnet18"]
    assert sorted(seeds) == list("112233")  # of two arrays


@only("plain")
def test_repairs_of_the_page(kind, clone, monkeypatch):
    """A mended script, a bad node, a job that is held, by the page's commands."""
    monkeypatch.setenv("STAND", "2")
    job = Job("complete", options=["-p", "requeue"])
    node = job.starts(1)[0][2]["SLURMD_NODENAME"]
    Path("complete/train.py").write_text("mended")

    def run(start):
        [line] = set(re.findall(f"`({start} [^`]*)`", PAGE))
        command("bash", "-c", line.replace("12345", job.number).replace("NODE", node))

    run("cp")
    run("scontrol requeue")
    assert wait_until(lambda: job.show("JobState") == "PENDING", 60)
    run("scontrol update")
    second = job.starts(2)[1]
    assert second[2]["SLURMD_NODENAME"] != node
    assert Path(second[0][second[0].index("--resume") - 1]).read_text() == "mended"
    command("scontrol", "requeuehold", job.number)
    assert wait_until(lambda: job.show("Reason") == "job_requeued_in_held_state", 60)
    run("scontrol release")
    job.ended(restarts=2)


@only("plain")
def test_lines_of_the_pages(kind, clone):
    """One run per GPU in one job; srun instead of torchrun."""
    last = "\n".join(Path("slurm/single.sh").read_text().splitlines()[-2:])
    edit("single", last, block("CUDA_VISIBLE_DEVICES"))
    four = Job("single", "--epochs", 1, options=["--gres=gpu:4"])
    text = (ROOT / "docs" / "launching.md").read_text()
    [lines] = re.findall(r"^(export MASTER_ADDR.*\nsrun .*\n)", text, re.M)
    head = "#!/bin/bash\n#SBATCH --ntasks-per-node=4 --cpus-per-task=4 --gres=gpu:4 -o %x-%j.out\n"
    Path("slurm/srun.sh").write_text(f"{head}source .venv/bin/activate\n{lines}")
    ranks = Job("srun", options=["--job-name=srun"])
    starts = four.ended().starts()
    assert sorted(env["CUDA_VISIBLE_DEVICES"] for *_, env, _ in starts) == ["0", "1", "2", "3"]
    assert len({words[words.index("--output") + 1] for words, *_ in starts}) == 4
    places = [
        [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
        for *_, env, _ in ranks.ended().starts()
    ]
    assert sorted(places) == [[str(i), str(i), "4", "node0"] for i in range(4)]


@pytest.fixture
def real(clone):
    """The clone without stand-ins: the scripts, and the Python that runs the tests."""
    shutil.rmtree(".venv/bin")
    Path(".venv/bin").mkdir()
    Path(".venv/bin/activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    for path in ROOT.glob("train_*.py"):
        shutil.copy(path, clone)


def close(job, other):
    """Two runs have the same weights, up to rounding."""
    a, b = (torch.load(f"runs/{name}/model.pt", weights_only=True) for name in (job, other))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=1e-5), (job, name)


def on_cpus(name, *changes):
    """Without the check of the GPUs, and with other changes."""
    text = Path(f"slurm/{name}.sh").read_text()
    [check] = re.findall(r"^srun .*device_count\(\)\n.*\n", text, re.M)
    edit(name, check, "", *changes)


@only("plain")
def test_without_gpus(kind, real):
    """The scripts do not train on the CPU unless that is asked for."""
    single, complete = Job("single"), Job("complete")
    for job in single, complete:
        job.ended("FAILED")
        assert "AssertionError: torch can use only 0 GPUs" in job.log(), job.log()
        assert "rank 0" not in job.log()


@only("plain")
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
    on_cpus("ddp_torchrun", "torchrun --nnodes", f"{torchrun} --nnodes", " gpu ", " 1 ")
    edit("ddp_torchrun", "train_ddp_torchrun.py", "meet.py", "$(hostname)", "$SLURMD_NODENAME")
    edit(
        "ddp_torchrun",
        "srun --export",
        "srun bash -c 'hostname lost-$SLURMD_NODENAME'\nsrun --export",
    )
    edit("ddp_torchrun", '"$@" #', "\nsrun bash -c 'hostname $SLURMD_NODENAME' #")
    job = Job("ddp_torchrun", options=["--nodes=2"]).ended()
    assert job.log().count("sum 2.0") == 2, job.log()


@only("plain")
def test_small_scripts_train(kind, real, data):
    """On two nodes, which are given whole; and the pair. test_small.py starts all scripts."""
    port = helpers.free_port()
    for name in "node0", "node1":
        on_cpus(name, "23456", str(port))
    for name in "single", "ddp_multigpu_proc":
        on_cpus(name)
    on_cpus("ddp_torchrun", "--nproc-per-node gpu", "--nproc-per-node 1")
    flags = ["--dataset", data / "pictures", "--batch-size", 16, "--workers", 0, "--epochs", 1]
    options = ["-p", "whole"]
    names = ["single", "ddp_multigpu_proc", "node1", "node0"]
    jobs = [Job("ddp_torchrun", *flags, options=[*options, "--nodes=2"])]
    for job in [*jobs, *(Job(name, *flags, options=options) for name in names)]:
        assert job.ended().log().count("epoch 0:") == (job.name != "node1"), job.log()
    for name in "ddp_torchrun", "ddp_multigpu_proc", "pair":
        close(name, "single")


@only("plain")
def test_complete_trains(kind, real, monkeypatch):
    """Past a time limit on two nodes, to the weights of an undisturbed run; a loop of one's own;
    and a run that fails before its first checkpoint, which is not requeued."""
    first = "os.environ.get('STAND') and 'SLURM_RESTART_COUNT' not in os.environ"
    stand = f"if {{}} and {first}:\n{' ' * 24}__import__('time').sleep(9999)\n"
    script = Path("complete/train.py").read_text()
    line = "                    scaler.scale(loss)"
    if line not in script:
        line = "                scaler.scale(loss)"
    assert line in script
    indent = " " * (len(line) - len(line.lstrip()))
    script = script.replace(line, indent + stand.format("step == 3") + line)
    script = script.replace("import argparse\n", "import beside, argparse\n", 1)
    Path("mine").mkdir()
    Path("mine/beside.py").touch()  # a module of the user's
    Path("mine/long.py").write_text(script)
    Path("mine/fails.py").write_text(script.replace(line, f"{indent}1 / 0\n{line}"))
    loop = (ROOT / "own_loop" / "after.py").read_text()
    for old, new in (
        ("Discs(2_000", "Discs(64"),
        ("Discs(400", "Discs(16"),
        ("        model.train()\n", f"        {stand.format('epoch == 1')}        model.train()\n"),
    ):
        assert loop.count(old) == 1, old
        loop = loop.replace(old, new)
    Path("mine/loop.py").write_text(loop)
    text = (ROOT / "slurm" / "complete.sh").read_text()

    def submit(script, processes, *flags, options=()):
        Path("slurm/complete.sh").write_text(text)
        on_cpus("complete", "complete/train.py", f"mine/{script}.py")
        edit("complete", "--nproc-per-node gpu", f"--nproc-per-node {processes}")
        if script == "fails":  # it need not do so four times
            edit("complete", "--max-restarts 3", "--max-restarts 1")
        return Job("complete", *flags, options=options)

    flags = ["--dataset", "synthetic", "--batch-size", 1000, "--epochs", 1, "--log-every", 1]
    flags += ["--checkpoint-minutes", 0]
    monkeypatch.setenv("STAND", "1")
    long = submit("long", 1, *flags, options=["--nodes=2"])
    own = submit("loop", 2, "--epochs", 2, "--workers", 0)
    monkeypatch.delenv("STAND")
    long.wait_for("step 2/")
    command("scontrol", "update", f"job={long.number}", "endtime=now+125")  # USR1 within 30 s
    own.wait_for("epoch 0:")
    warn(own.number)
    quiet = submit("long", 2, *flags)
    for job in long, own:
        job.wait_for("DUE TO JOB REQUEUE")
    command("scontrol", "update", f"job={long.number}", "timelimit=60")  # of its next life
    fails = submit("fails", 1, *flags).ended("FAILED")
    assert "ZeroDivisionError" in fails.log() and fails.log().count("steps are done") == 2
    quiet.ended()
    long.ended(restarts=1)
    assert re.search("0 epochs and [12] steps are done", long.log()), long.log()
    weights = [
        torch.load(f"runs/complete-{job.number}/model.pt", weights_only=True)
        for job in (long, quiet)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    own.ended(restarts=1)
    assert re.findall(r"^epoch (\d)", own.log(), re.M) == ["0", "1"], own.log()
    assert Path(f"runs/complete-{own.number}/best.pt").exists()

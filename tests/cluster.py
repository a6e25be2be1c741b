"""A real Slurm cluster of two nodes on this machine, each with two CPUs and four pretend GPUs.

`python tests/cluster.py` brings it up to try things on, and takes it down on Ctrl-C.
Needs root and Debian's packages slurm-wlm and munge; everything it writes is in one folder.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare"

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={node0} CPUs=8 Gres=gpu:4
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=8 Gres=gpu:4
PartitionName=main Nodes=node[0-1] Default=YES PriorityTier=1
PartitionName=urgent Nodes=node[0-1] PriorityTier=2
"""


def missing():
    """Why there can be no cluster here, or an empty string."""
    names = [
        name for name in PROGRAMS if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    ]
    if names:
        return f"Slurm is not installed (no {', '.join(names)}): apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "a Slurm cluster can be started by root only"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def cluster(folder):
    """The cluster, as long as the block lasts. SLURM_CONF points the commands at it."""
    folder = Path(folder).resolve()  # Slurm's daemons look for relative paths elsewhere
    for name in "munge", "state", "spool-node0", "spool-node1":
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for number in range(4):
        subprocess.run(["mknod", folder / f"gpu{number}", "c", "1", "3"], check=True)
    host, ports = socket.gethostname().split(".")[0], free_ports(3)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(folder=folder, host=host, ctld=ports[0], node0=ports[1], node1=ports[2])
    )
    gres = f"AutoDetect=off\nNodeName=node[0-1] Name=gpu File={folder}/gpu[0-3]\n"
    (folder / "gres.conf").write_text(gres)
    version = 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    hosts = folder / "hosts"  # that of the nodes, where each knows the other by name
    hosts.write_text(Path("/etc/hosts").read_text() + "127.0.0.1 node0 node1\n")

    munge = folder / "munge"
    daemons = [
        ["munged", "-F", "-S", munge / "socket", f"--key-file={key}", "--force"]
        + [f"--{name}-file={munge / name}" for name in ("pid", "log", "seed")],
        ["slurmctld", "-D", "-f", conf],
    ]
    for node in "node0", "node1":
        words = ["slurmd", "-D", "-f", conf, "-N", node]
        bind = f'mount --bind {hosts} /etc/hosts && exec "$0" "$@"'
        daemons.append(["unshare", "--mount", "sh", "-c", bind, *words])
    before = dict(os.environ)
    os.environ.update(SLURM_CONF=str(conf), PATH=os.environ["PATH"] + ":/usr/sbin")
    started = []
    try:
        for i, words in enumerate(daemons):
            log = open(folder / f"daemon{i}.log", "wb")
            started.append(subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True))
            if i == 0:
                wait_until((munge / "socket").exists, "munged")
        wait_until(lambda: command("sinfo", "-h", "-o", "%t %D") == "idle 2", "two idle nodes")
        yield folder
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            command("scancel", "--user=root", "--signal=KILL", "--full")
            command("scancel", "--user=root")
            wait_until(lambda: not command("squeue", "-h"), "an empty queue", 60)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()
        os.environ.clear()
        os.environ.update(before)


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout.strip()


def wait_until(condition, what, limit=120):
    end = time.monotonic() + limit
    while True:
        with contextlib.suppress(subprocess.CalledProcessError):
            if condition():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit} s for {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, cluster(place):
        print(f"export SLURM_CONF={os.environ['SLURM_CONF']}")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)

"""A real Slurm cluster of two machines, node0 and node1, on this one; their GPUs are pretended.

`python tests/cluster.py` brings it up to try things on, and takes it down on Ctrl-C.
Needs root and Debian's packages slurm-wlm and munge; everything it writes is in one folder.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare"

# cred_expire: seconds that a requeued job is held, 120 by default. Each machine has a host name,
# /etc/hosts and process numbers of its own, so that killing its first process takes it away.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout=6
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node0 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=99 Gres=gpu:20
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=99 Gres=gpu:20
PartitionName=main Nodes=node[0-1] Default=YES PriorityTier=1
PartitionName=urgent Nodes=node[0-1] PriorityTier=2
"""
MACHINE = 'hostname {0}; mount --bind {1}/hosts /etc/hosts; "$@"; exit'


def missing():
    """Why there can be no cluster here, or an empty string."""
    path = os.environ["PATH"] + ":/usr/sbin"
    names = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if names:
        return f"Slurm is not installed (no {', '.join(names)}): apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "a Slurm cluster can be started by root only"


class Cluster:
    """SLURM_CONF points the commands at it, from its start to its end."""

    def __init__(self, folder):
        self.folder = folder = Path(folder).resolve()  # Slurm looks for relative paths elsewhere
        for name in "munge", "state", "spool-node0", "spool-node1":
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for number in range(20):
            subprocess.run(["mknod", folder / f"gpu{number}", "c", "1", "3"], check=True)
        with ExitStack() as stack:
            servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
            ports = [stack.enter_context(server).getsockname()[1] for server in servers]
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(folder=folder, host=host, ports=ports)
        version = 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
        hosts = Path("/etc/hosts").read_text() + "127.0.0.1 node0\n127.0.0.2 node1\n"
        gres = f"AutoDetect=off\nNodeName=node[0-1] Name=gpu File={folder}/gpu[0-19]\n"
        texts = {"slurm": conf, "gres": gres, "cgroup": f"CgroupPlugin=cgroup/v{version}\n"}
        for name, text in texts.items():
            (folder / f"{name}.conf").write_text(text)
        (folder / "hosts").write_text(hosts)
        os.environ.update(SLURM_CONF=f"{folder}/slurm.conf")
        os.environ["PATH"] += ":/usr/sbin"
        self.daemons = {}
        munge = ["munged", "-F", "-S", folder / "munge" / "socket", f"--key-file={key}", "--force"]
        files = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
        self.start("munged", *munge, *files)
        wait_until((folder / "munge" / "socket").exists, "munged")
        self.start("slurmctld", "slurmctld", "-D")
        self.start_machine("node0")
        self.start_machine("node1")
        wait_until(lambda: command("sinfo", "-h", "-o", "%t %D") == "idle 2", "two idle nodes")

    def start(self, name, *words):
        with open(self.folder / f"{name}.out", "ab") as log:
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            self.daemons[name] = subprocess.Popen(words, **streams)

    def start_machine(self, name):
        own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        script = MACHINE.format(name, self.folder)
        self.start(name, *own, "sh", "-c", script, "sh", "slurmd", "-D", "-N", name)

    def take_away(self, name):
        """SIGKILL for all of a machine's processes, in the same moment."""
        self.daemons[name].kill()
        self.daemons[name].wait()


@contextmanager
def cluster(folder):
    before = dict(os.environ)
    made = Cluster.__new__(Cluster)
    try:
        made.__init__(folder)
        yield made
    finally:
        for process in reversed(getattr(made, "daemons", {}).values()):
            process.kill()
            process.wait()
        os.environ.clear()
        os.environ.update(before)


def command(*words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout.strip()


def wait_until(condition, what, limit=120):
    end = time.monotonic() + limit
    while True:
        with suppress(subprocess.CalledProcessError):
            if condition():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit} s for {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, cluster(place):
        print(f"export SLURM_CONF={os.environ['SLURM_CONF']}")
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)

"""A real Slurm cluster of five machines on this one, each with pretended cores and GPUs. Needs root
and Debian's packages slurm-wlm and munge. Everything that it writes is in one folder."""

import os
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

from helpers import wait_until

MACHINES = ["node0", "node1", "node2", "node3", "node4"]
HOSTS = "".join(f"127.0.0.{number + 1} {name}\n" for number, name in enumerate(MACHINES))
CONF = Path(__file__).with_name("slurm.conf").read_text()


def missing():
    """Why there can be no cluster here, or an empty string."""
    path, names = os.environ["PATH"] + ":/usr/sbin", ["munged", "slurmctld", "slurmd"]
    installed = all(shutil.which(name, path=path) for name in names) and os.getuid() == 0
    return "" if installed else "a Slurm cluster needs root: apt-get install slurm-wlm munge"


def write_files(folder):
    for name in "munge", "state", *(f"spool-{machine}" for machine in MACHINES):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    for number in range(20):
        subprocess.run(["mknod", folder / f"gpu{number}", "c", "1", "3"], check=True)
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(6)]
    ports = [server.getsockname()[1] for server in servers]
    line = "NodeName={} NodeAddr=127.0.0.1 Port={} CPUs=99 Gres=gpu:20\n"
    nodes = "".join(map(line.format, MACHINES, ports))
    host, version = socket.gethostname(), 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
    gpus = f"NodeName=node[0-4] Name=gpu AutoDetect=off File={folder}/gpu[0-19]\n"
    (folder / "slurm.conf").write_text(CONF.format(**locals()))
    (folder / "gres.conf").write_text(gpus)
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + HOSTS)


def start(folder, name, *words):
    log, env = open(folder / f"{name}.out", "ab"), dict(os.environ)
    env.pop("TEST_FOLDER", None)  # or it ends with the test that starts it
    return subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)


def start_machine(folder, name):
    """A machine has its own name and process numbers. Killing what is returned takes it away."""
    own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    script = f"hostname {name}; mount --bind {folder}/hosts /etc/hosts; slurmd -D -N {name}; exit"
    return start(folder, name, *own, "sh", "-c", script)


@contextmanager
def cluster(folder):
    """Yields its machines, {name: process}. SLURM_CONF points Slurm's commands at it."""
    folder = Path(folder).resolve()  # Slurm's daemons look for relative paths elsewhere
    write_files(folder)
    before, daemons, machines = dict(os.environ), [], {}
    os.environ.update(SLURM_CONF=f"{folder}/slurm.conf", PATH=before["PATH"] + ":/usr/sbin")
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "-F", "--force", "-S", folder / "munge" / "socket", *munge]
    try:
        daemons.append(start(folder, "munged", *munge))
        assert wait_until((folder / "munge" / "socket").exists), "munged"
        daemons.append(start(folder, "slurmctld", "slurmctld", "-D"))
        machines.update({name: start_machine(folder, name) for name in MACHINES})
        ready = "sinfo -h -o '%t %D' 2> /dev/null | grep -qx 'idle 5'"
        assert wait_until(lambda: os.system(ready) == 0, pause=0.2), "the machines"
        yield machines
    finally:
        for process in [*machines.values(), *reversed(daemons)]:
            process.kill()
            process.wait()
        os.environ.clear()
        os.environ.update(before)

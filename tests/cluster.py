"""A real Slurm cluster of four machines on this one, each with pretended cores and GPUs. Needs root
and Debian's packages slurm-wlm and munge. Everything that it writes is in one folder."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from helpers import wait_until

MACHINES = ["node0", "node1", "node2", "node3"]
HOSTS = "127.0.0.1 node0\n127.0.0.2 node1\n127.0.0.3 node2\n127.0.0.4 node3\n"


def write_files(folder):
    for name in "munge", "state", *(f"spool-{machine}" for machine in MACHINES):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    for number in range(40):
        subprocess.run(["mknod", folder / f"gpu{number}", "c", "1", "3"], check=True)
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    ports = [server.getsockname()[1] for server in servers]
    line = "NodeName={} NodeAddr=127.0.0.1 Port={} CPUs=199 Gres=gpu:40\n"
    nodes = "".join(map(line.format, MACHINES, ports))
    host, version = socket.gethostname(), 1 if Path("/sys/fs/cgroup/cpuset").exists() else 2
    conf = Path(__file__).with_name("slurm.conf").read_text()
    (folder / "slurm.conf").write_text(conf.format(**locals()))
    (folder / "gres.conf").write_text(f"Name=gpu AutoDetect=off File={folder}/gpu[0-39]\n")
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + HOSTS)


def start(folder, name, *words):
    log, env = open(folder / f"{name}.out", "ab"), dict(os.environ)
    env.pop("TEST_FOLDER", None)  # or it ends with the test that starts it
    return subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)


@contextmanager
def cluster(folder, patch):
    """SLURM_CONF points Slurm's commands at it. A machine has its own name and process numbers."""
    folder = Path(folder).resolve()  # Slurm's daemons look for relative paths elsewhere
    write_files(folder)
    patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")
    patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    munge = ["munged", "-F", "--force", "-S", folder / "munge" / "socket", *munge]
    daemons = [start(folder, "munged", *munge)]
    try:
        assert wait_until((folder / "munge" / "socket").exists), "munged"
        daemons.append(start(folder, "slurmctld", "slurmctld", "-D"))
        own = "unshare --mount --uts --pid --fork --mount-proc --kill-child sh -c".split()
        for name in MACHINES:
            hosts = f"hostname {name}; mount --bind {folder}/hosts /etc/hosts"
            daemons.append(start(folder, name, *own, f"{hosts}; slurmd -D -N {name}; exit"))
        ready = "sinfo -h -o '%t %D' 2> /dev/null | grep -qx 'idle 4'"
        assert wait_until(lambda: os.system(ready) == 0, pause=0.2), "the machines"
        yield
    finally:
        for process in reversed(daemons):
            process.kill()
            process.wait()

"""Trains beyond Slurm's time limit. complete.sh starts it on the first node of the job:

    python3 slurm/requeue.py [--container WORDS] [--stage WORDS] ... SCRIPT [FLAGS OF THE SCRIPT]

On all nodes, torchrun starts SCRIPT with its flags and --resume --output FOLDER. Before the time
limit, and after a preemption or a failure, the job puts itself back into the queue; the script then
continues from its newest checkpoint in FOLDER. The job ends when the script has ended well, or when
another start would only repeat a failure: `plan_next_life` decides. Each start is called a life.

This needs only the standard library, and runs on Python 3.6, which old clusters have outside of
containers.
"""

import argparse
import fcntl
import fnmatch
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

MOST_LIVES = 200  # then the job requeues itself only if it is preempted
MOST_FAILED = 2  # lives in a row without a new checkpoint, once there is one
MOST_BAD_STARTS = 5  # lives in a row that meet a node with broken GPUs
CHECK_SECONDS = 600  # to import torch and to compute on each GPU
CHECKPOINT_SECONDS = 200  # for a new checkpoint, after a warning: less than --signal's 300
REQUEUE_SECONDS = 240  # to be requeued, while Slurm's controller answers
AWAY_SECONDS = 3600  # for it to come back: meanwhile, nobody ends this job at its limit
EARLIER_TASK_SECONDS = 300  # for an array's earlier task to end
KILL_SECONDS = 60  # for srun to end when it is told to
LOOK_SECONDS = 5  # between two looks at what has happened while the training runs

# Files that a run can continue from. A name that is missing here ends the job at its first limit,
# with a line in the log. *.distcp are whole only once .metadata is there; a resumed run may write
# best.pt again.
CHECKPOINTS = "*.pt *.pth *.pth.tar *.ckpt *.bin *.safetensors *.npz *.pkl *.h5 .metadata".split()
NO_CHECKPOINTS = "best* *tmp*".split()

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--container", default="", help="what starts a command in a container")
parser.add_argument("--stage", default="", help="a command for each node, before training")
parser.add_argument("--flags", default="", help="flags of the script that this task alone has")
parser.add_argument("--processes", default="gpu", help="per node: gpu, xpu or a number")
parser.add_argument("script", type=Path)
parser.add_argument("script_flags", nargs=argparse.REMAINDER)


def main(args):
    job = Job(args)
    use_own_copy(job)
    signal.signal(signal.SIGUSR1, job.note_warning)
    wait_for_earlier_task(job)
    try:
        status = live(job, args)
    except OSError as error:  # such as a full disk
        say(error)
        status = 1
    if job.requeued:
        say("This job was requeued while it was running.")
    elif status == 0:
        end_array(job)
    elif job.field("%T") == "COMPLETING":
        say("Slurm is ending this job: by scancel, or at its limit.")
    else:
        continue_or_end(job)
    return status


def live(job, args):
    """One life of the job. Returns the exit status of the first step that fails, or 0."""
    copy_code(job, args.script)
    claim_folder(job)
    set_environment(job, args.script)
    steps = [check_nodes, stage_data, train]
    for step in steps:
        status = step(job, args)
        if status != 0 or job.requeued:
            return status
    return 0


def continue_or_end(job):
    """After a failure, and when Slurm warns that it will end this life."""
    try:
        nodes_to_avoid = plan_next_life(job)
    except InVain as reason:
        say(reason)
        end_array(job)
    else:
        requeue(job, nodes_to_avoid)


class InVain(Exception):
    """Why the job is not requeued."""


def plan_next_life(job):
    """Returns the nodes that the next life is not to use, often none; raises InVain."""
    if job.is_preempted():
        say("This job is preempted.")
        return ""
    if job.life >= MOST_LIVES:
        raise InVain(f"This job has been requeued {job.life} times, which is enough.")
    if job.bad_nodes:
        return plan_without_bad_nodes(job)
    now = checkpoints(job.output)
    if now - job.checkpoints_before:
        return ""
    if not now:
        names = " ".join(CHECKPOINTS)
        raise InVain(f"No checkpoint in {job.output} ({names}): another life would end like this.")
    return plan_after_failure(job)


def plan_without_bad_nodes(job):
    bad = ",".join(job.bad_nodes)
    lives = count_life(job, "bad")
    if lives > MOST_BAD_STARTS:
        raise InVain(f"The last {lives} starts met bad nodes: ask an administrator.")
    if not nodes_remain_without(job, bad):
        raise InVain(f"The partition has too few nodes without {bad}.")
    return bad


def plan_after_failure(job):
    """The first minutes of a life, or its nodes, may be at fault: the second time, use others."""
    lives = count_life(job, "failed")
    if lives > MOST_FAILED:
        raise InVain(f"No new checkpoint in the last {lives} lives: see above.")
    say(f"No new checkpoint in this life, number {lives} in a row of at most {MOST_FAILED}.")
    if lives == MOST_FAILED and nodes_remain_without(job, job.nodes):
        return job.nodes
    return ""


# ---- The job, and what it asks Slurm ----


def say(text):
    print(f"requeue.py: {text}", flush=True)


def ask(*words):
    """What one of Slurm's commands prints, or None if it fails. It prints its errors to the log."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(error)
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


class Job:
    def __init__(self, args):
        for name in list(os.environ):
            if name.startswith(("SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT")):
                del os.environ[name]  # the user's own settings of what these commands print
        number = os.environ["SLURM_JOB_ID"]
        array = os.environ.get("SLURM_ARRAY_JOB_ID", number)
        # Ask: a job that was submitted inside an array's task has inherited its variables.
        answer = ask("squeue", "--noheader", "--jobs", number, "--format", "%F")
        self.array = answer.split()[0] if answer else array  # a line for each task, or one
        self.id = number
        if self.array == os.environ.get("SLURM_ARRAY_JOB_ID"):  # Slurm's name for one task
            self.id = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        self.life = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self.life_name = f"{number}-{self.life}"
        self.nodes = os.environ["SLURM_JOB_NODELIST"]  # such as node[0-3]
        self.node_count = int(os.environ["SLURM_NNODES"])
        self.partition = os.environ["SLURM_JOB_PARTITION"]

        own_folder = f"runs/{os.environ['SLURM_JOB_NAME']}-{number}"  # the same in each life
        own_flags = shlex.split(args.flags)
        self.flags = own_flags + args.script_flags
        self.output = Path(find_output(self.flags) or own_folder)
        # With --output on sbatch's command line, an array's tasks continue one another's run.
        self.shares_folder = find_output(args.script_flags) is not None
        self.code = self.output / f"job-{self.array}"  # the job's own files
        self.checkpoints_before = checkpoints(self.output)

        self.bad_nodes = []
        self.is_warned = False
        self.decides_at = None  # after a warning: by time.monotonic, at the latest
        self.requeued = False

    def note_warning(self, number, frame):
        self.is_warned = True

    def field(self, name):
        return ask("squeue", "--noheader", "--jobs", self.id, "--format", name)

    def is_preempted(self):
        """In this life: since Slurm 24.05, the time of an earlier preemption may be kept."""
        form = "PreemptTime,StartTime"
        answer = ask("squeue", "--noheader", "--jobs", self.id, "--Format", form) or ""
        preempted, started = (answer.split() + ["", ""])[:2]
        return ":" in preempted and preempted >= started  # without a preemption, it says N/A

    def requeue_setting(self):
        """0 if sbatch --no-requeue, or the cluster, forbids it; None if no controller answers."""
        return ask("squeue", "--noheader", "--jobs", self.id, "--Format", "Requeue")

    def waiting_tasks(self):
        """The array's tasks that would continue this run."""
        if not self.shares_folder:
            return ""
        return ask("squeue", "--noheader", "--jobs", self.array, "--states=PENDING")


def find_output(flags):
    """The script's --output, as it reads it: the last one counts."""
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output")
    return output.parse_known_args(flags)[0].output


def hostnames(nodes):
    return (ask("scontrol", "show", "hostnames", nodes) or "").split()


# ---- What a life does ----


def wait_for_earlier_task(job):
    """Slurm may start an array's next task while the one before still writes its last files."""
    if not job.shares_folder:
        return
    end = time.monotonic() + EARLIER_TASK_SECONDS
    while ask("squeue", "--noheader", "--jobs", job.array, "--states=COMPLETING"):
        if time.monotonic() > end:
            say("An earlier task of this array is still ending. This one starts.")
            return
        time.sleep(5)


def use_own_copy(job):
    """Of this file, as in its first life: in five days, the clone may get another version."""
    own = job.code / "slurm" / "requeue.py"
    if own.exists() and not own.samefile(__file__):
        os.execv(sys.executable, [sys.executable, str(own), *sys.argv[1:]])


def copy_code(job, script):
    """The run keeps the code that it began with, while its user edits the next version."""
    if job.code.exists():
        return
    new = job.code.with_name(job.code.name + ".new")
    (new / "slurm").mkdir(parents=True, exist_ok=True)
    # In a folder of its own: the script's may have a requeue.py, too, or a signal.py.
    shutil.copyfile(__file__, str(new / "slurm" / "requeue.py"))
    for path in [script, *script.resolve().parent.glob("*.py")]:
        shutil.copyfile(str(path), str(new / path.name))
    new.rename(job.code)


def claim_folder(job):
    """The newest life owns the folder. An older one, on a node that Slurm has lost, ends itself."""
    (job.output / "owner.txt").write_text(f"{job.array} {job.life_name}")


def owner(job):
    """The array, and the life, that own the folder."""
    try:
        words = (job.output / "owner.txt").read_text().split()
    except OSError:  # the disk does not answer: the training will find out
        words = []
    return words if len(words) == 2 else [job.array, job.life_name]


def set_environment(job, script):
    """For all that srun starts."""
    path = [str(script.resolve().parent)]  # for packages, which are not copied
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = ":".join(path)
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a crash, or where.sh --abort, prints where it was
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or restarts can hang (pytorch#135712)
    if can_lock(job.code):  # --compile then finds in a new life what it has compiled before
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.code.resolve() / "compiled")
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK"):
        os.environ.pop(name, None)  # srun would use those of a job in which sbatch was called


def can_lock(folder):
    """Some disks, such as Lustre without -o flock, cannot, and compiling would fail."""
    try:
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def follow(job, words, stdout=None):
    """Wait for a command, and return its exit status. Meanwhile, answer Slurm's warnings."""
    process = subprocess.Popen(words, stdout=stdout)
    while not has_ended(process, LOOK_SECONDS):
        if not job.requeued:
            answer_warning(job)
        array, life_name = owner(job)
        if life_name != job.life_name:
            process.terminate()  # srun passes it on to torchrun, which ends all ranks
            if not has_ended(process, KILL_SECONDS):  # such as in a node that Slurm has lost
                process.kill()
            if array != job.array:  # or the next task would end the other array's, and so on
                end_array(job)
            raise SystemExit(f"A newer job, or life of this one, uses {job.output}: this one ends.")
    return process.returncode


def answer_warning(job):
    """At a preemption, decide at once, as it may be soon. Before the time limit, the training may
    still save a checkpoint: decide when there is a new one, or when time is short."""
    if job.is_warned:
        job.is_warned = False
        say("Slurm warns: the time limit is near, or a preemption.")
        job.decides_at = time.monotonic()
        if not job.is_preempted():
            job.decides_at += CHECKPOINT_SECONDS
    if job.decides_at is None:
        return
    if time.monotonic() >= job.decides_at or checkpoints(job.output) - job.checkpoints_before:
        job.decides_at = None
        continue_or_end(job)


def has_ended(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


# Runs on each node. A node that prints no "works" is bad, unless none prints "started".
CHECK = """
import os, sys, torch
node, on_cpus = os.environ["SLURMD_NODENAME"], sys.argv[1].isdigit()
print("started", node, flush=True)
gpus = 0 if on_cpus else torch.accelerator.device_count()
granted = 0 if on_cpus else int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
assert gpus >= granted, f"torch can use only {gpus} GPUs"
for i in range(gpus):
    gpu = torch.device(torch.accelerator.current_accelerator().type, i)
    total = torch.ones(1000, device=gpu).sum().item()
    assert total == 1000, f"GPU {i} adds 1000 ones to {total}"
    print("kind", torch.get_device_module(gpu).get_device_name(gpu))
print("works", node, gpus, flush=True)
"""


def check_nodes(job, args):
    """Can torch compute on the GPUs of each node? If not, job.bad_nodes has those where it cannot.
    Where it starts nowhere, the environment or the shared disk is at fault, and no node."""
    answers = job.code / "nodes.txt"
    # Whatever slurm.conf says, a node that fails is not to end the check of the others.
    words = ["timeout", "-k", "60", str(CHECK_SECONDS)]
    words += ["srun", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
    words += [*shlex.split(args.container), "python", "-c", CHECK, args.processes]
    with answers.open("w") as file:
        status = follow(job, words, stdout=file)
    lines = [line.split() for line in answers.read_text(errors="replace").splitlines()]
    say_kinds([" ".join(line[1:]) for line in lines if line[:1] == ["kind"]])
    gpus = {line[1]: int(line[2]) for line in lines if line[:1] == ["works"]}
    hangs = status in (124, 137)  # of timeout
    if hangs:
        say(f"The check of the nodes did not end within {CHECK_SECONDS} s.")
    starts = any(line[:1] == ["started"] for line in lines)
    if not starts and not (hangs and job.node_count == 1):  # one node that hangs: try another
        say("srun, python or torch does not start on any node: see above. No node is called bad.")
        return 1
    least = 0
    if "SLURM_GPUS_ON_NODE" not in os.environ:  # without --gres: as many as the other nodes have
        least = max(gpus.values(), default=0)
    good = [node for node in gpus if gpus[node] >= least]
    if len(good) == job.node_count:
        return 0
    job.bad_nodes = [node for node in hostnames(job.nodes) if node not in good]
    say(f"torch cannot use the GPUs of {','.join(job.bad_nodes)}, or these have fewer: {gpus}")
    return 1


def say_kinds(kinds):
    if len(set(kinds)) > 1:
        say(f"GPUs of different kinds, of which all wait for the slowest: {dict(Counter(kinds))}")


def stage_data(job, args):
    if not args.stage:
        return 0
    return follow(job, [*srun_with_cpus(), *shlex.split(args.stage)])


def srun_with_cpus():
    """With all CPUs of the job; a node that fails ends all."""
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--wait=0"]
    if "SLURM_CPUS_PER_TASK" in os.environ:  # srun may not take it by itself
        words += ["--cpus-per-task", os.environ["SLURM_CPUS_PER_TASK"]]
    return words


# Runs for each process. If not all nodes have joined, each would train alone.
START = """
ulimit -c 0 # no core dumps
if [ "$GROUP_WORLD_SIZE" -ne "$SLURM_NNODES" ]; then
    echo "nodes are missing: do their clocks differ?"
    exit 1
fi
exec python -u "$@"
"""


def train(job, args):
    """torchrun restarts all ranks up to three times, without a new life of the job."""
    port = 10000 + int(os.environ["SLURM_JOB_ID"]) % 20000
    words = [*srun_with_cpus(), *shlex.split(args.container)]
    words += ["torchrun", "--nnodes", str(job.node_count), "--nproc-per-node", args.processes]
    words += ["--max-restarts", "3", "--rdzv-backend", "c10d"]
    words += ["--rdzv-id", os.environ["SLURM_JOB_ID"], "--rdzv-conf", "read_timeout=600"]
    words += ["--rdzv-endpoint", f"{socket.gethostname()}:{port}"]
    words += ["--no-python", "bash", "-c", START, "bash", str(job.code / args.script.name)]
    words += [*job.flags, "--resume", "--output", str(job.output)]
    return follow(job, words)


# ---- What it knows about earlier lives ----


def checkpoints(output):
    """Each checkpoint's path and when it was written. The job's own folders have none."""
    found = set()
    for folder, folders, names in os.walk(str(output)):
        if Path(folder) == output:
            folders[:] = [name for name in folders if not name.startswith("job-")]
        for name in names:
            path = Path(folder, name)
            if is_checkpoint(name):
                with suppress(FileNotFoundError):  # the training has just removed it
                    status = path.stat()
                    if status.st_size > 0:  # an empty file may only reserve the folder
                        found.add((path, status.st_mtime))
    return found


def is_checkpoint(name):
    if any(fnmatch.fnmatch(name, pattern) for pattern in NO_CHECKPOINTS):
        return False
    return any(fnmatch.fnmatch(name, pattern) for pattern in CHECKPOINTS)


def count_life(job, kind):
    """How many lives in a row, with this one, were of this kind? An empty file for each, which a
    newer checkpoint ends: its life may have ended before it could tell."""
    newest = max((written for path, written in checkpoints(job.output)), default=0)
    try:
        for path in job.code.glob(f"{kind}-*"):
            if path.stat().st_mtime < newest:
                path.unlink()
        (job.code / f"{kind}-{job.life_name}").touch()
    except OSError as error:  # a full disk
        raise InVain(error)
    return len(list(job.code.glob(f"{kind}-*")))


def nodes_remain_without(job, nodes):
    """Otherwise the job would wait for ever. (This ignores --constraint.)"""
    form = "%N %T"
    answer = ask("sinfo", "--noheader", "--Node", "--partition", job.partition, "--format", form)
    if not answer:  # unknown: try
        return True
    excluded = hostnames(",".join([nodes, job.field("%x") or ""]).strip(","))
    lines = [line.split() for line in answer.splitlines()]
    working = {node for node, state in lines if is_working(state)}
    return len(working.difference(excluded)) >= job.node_count


def is_working(state):
    """As sinfo names it: a * says that the node does not answer."""
    return state.startswith(("alloc", "idle", "mix", "comp")) and not state.endswith("*")


# ---- The end of a life ----


def requeue(job, nodes_to_avoid):
    if nodes_to_avoid:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends a job that it requeues, and ...
    begin = time.monotonic()
    end = begin + REQUEUE_SECONDS
    while True:
        if ask("scontrol", "requeue", "incomplete", job.id) is not None:
            job.requeued = True
            exclude(job, nodes_to_avoid)  # ... it refuses this before
            break
        setting = job.requeue_setting()
        if setting is None and shutil.which("squeue"):  # some clusters have it on no node
            end = min(time.monotonic(), begin + AWAY_SECONDS) + REQUEUE_SECONDS
        if setting == "0" or time.monotonic() > end:
            say(f"Slurm has not requeued this job. Submit it again, with --output {job.output}")
            if job.waiting_tasks():
                say("The array's next task continues.")
                exclude(job, nodes_to_avoid)
            break
        time.sleep(10)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exclude(job, nodes):
    """From the next life, which may be that of an array's next task."""
    if not nodes:
        return
    before = job.field("%x")
    if before is None:  # Slurm replaces the list: leave it rather than lose it
        return
    target = job.array if job.shares_folder else job.id
    everything = ",".join([nodes, before]).strip(",")
    say(f"The next life is not to use {everything} (scontrol update jobid={target} ExcNodeList=)")
    ask("scontrol", "update", f"jobid={target}", f"ExcNodeList={everything}")


def end_array(job):
    """Its other tasks would find nothing to do, or fail as this one did."""
    if job.waiting_tasks():
        say(f"The tasks of {job.array} that wait are cancelled.")
        ask("scancel", "--state=PENDING", job.array)


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))

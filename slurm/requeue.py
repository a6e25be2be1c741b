"""Trains beyond Slurm's time limit. complete.sh starts this on the first node of the job. A life,
which is one start of the job:

    waits -> node test -> stage -> torchrun on all nodes -> has ended well: the job ends
      ^          |          |         |
      |          +----------+---------+--> fails, or is warned: time limit, or preemption
      |                                             |
      +-- is preempted (which is not counted) ------+
      +-- has a new checkpoint ---------------------+
      +-- torch cannot compute: without that node --+
      +-- has only an older one: in an hour --------+
                                                    +--> has no checkpoint yet, or no new one for
                                                         three lives, or no `lives`: the job ends

The job's own requeues are lines of runs/JOB-lives.txt. All else is asked of Slurm, and nothing is
decided while it does not answer. Outside of a job, this prints what a life would start. It needs
only the standard library, and Python 3.6, which old clusters have.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

MOST_IN_VAIN = 3  # requeues since the newest checkpoint
CHECK_SECONDS = 600  # to import torch and to compute on each GPU
STAGE_SECONDS = 7200  # for --stage
WARNING_SECONDS = 300  # before the time limit: complete.sh's --signal
CHECKPOINT_SECONDS = 200  # for a first checkpoint in this life, after a warning
AWAY_SECONDS = 3600  # for Slurm's controller to come back
MOST_REFUSED = 3  # tries to be requeued, while it answers
LOOK_SECONDS = 5  # between two looks at what has happened
REQUEUE, LATER, END = "Requeue it", "Requeue it, in an hour", "It ends"

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--environment", default="found", help="or missing: it cannot be activated")
parser.add_argument("--lives", type=int, default=15, help="at most so many starts")
parser.add_argument("--checkpoint", default="checkpoint.pt", help="its name, or a pattern")
parser.add_argument("--container", default="", help="what starts a command in a container")
parser.add_argument("--stage", default="", help="a line of bash for each node, before training")
parser.add_argument("--flags", default="", help="flags of the script that this task alone has")
parser.add_argument("--processes", default="gpu", help="per node: gpu, xpu or a number")
parser.add_argument("script", type=Path)
parser.add_argument("script_flags", nargs=argparse.REMAINDER)


def main(args):
    if "SLURM_JOB_ID" not in os.environ:
        return rehearse(args)
    job = Job(args)
    signal.signal(signal.SIGUSR1, job.note_warning)
    try:
        status = live(job)
    except OSError as error:  # such as a disk that does not answer
        say(error)
        status = 1
    if not job.has_decided:
        if status == 0:
            cancel_other_tasks(job)
        else:
            decide(job)
    return status


def live(job):
    """Returns the exit status of the first step that fails, or 0."""
    if job.array and job.running_tasks() > 1:
        say(f"Other tasks run in {job.output}, too: submit them one after another, --array=1-100%1")
        job.has_decided = True
        return 2
    job.newest_before = newest_checkpoint(job)
    if job.limit == float("inf"):
        job.look_at_limit()
    if job.args.environment == "missing":
        say("The environment cannot be activated: see above.")
        return 1
    check, *others = commands(job)
    status = check_nodes(job, check)
    for words in others:
        if status == 0 and not job.has_decided:
            status = follow(job, words)
            if status == 124 and words[0] == "timeout":
                say(f"The stage did not end within {STAGE_SECONDS} s.")
    return status


# ---- The job, and what Slurm knows of it ----


def say(text):
    with suppress(OSError):  # the log's disk may be full
        os.write(1, f"requeue.py: {text}\n".encode())  # print would fail again at the exit


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
        self.args = args
        number, array = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_JOB_ID")
        self.id = number
        if array == number:  # one task has its array's number, which to Slurm is all tasks
            self.id = f"{number}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        self.life = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self.nodes = int(os.environ["SLURM_NNODES"])
        # With --output on sbatch's command line, an array's tasks continue one another's run. Ask:
        # a job that was submitted inside an array's task has inherited its variables.
        shares_folder = array and find_output(args.script_flags)
        self.array = self.facts().get("ArrayJobId") if shares_folder else None
        self.flags = shlex.split(args.flags) + args.script_flags
        self.output = Path(find_output(self.flags) or f"runs/{number}")
        self.record = Path(f"runs/{self.array or number}-lives.txt")
        self.newest_before = float("inf")  # of the checkpoints, until it is known
        self.limit = float(os.environ.get("SLURM_JOB_END_TIME", "inf"))  # since Slurm 23.02
        self.has_signal = False
        self.warned_at = None
        self.bad_nodes = []
        self.has_decided = False

    def note_warning(self, number, frame):
        self.has_signal = True

    def facts(self):
        """What Slurm knows of this job; nothing while it does not answer."""
        answer = ask("scontrol", "--oneliner", "show", "job", self.id) or ""
        facts = {}
        for name, value in re.findall(r"(\w+)=(\S*)", answer):
            facts.setdefault(name, value)  # the first of a name counts
        return facts

    def running_tasks(self):
        """How many of the array run now, with this one; 0 if Slurm does not answer."""
        answer = ask("scontrol", "--oneliner", "show", "job", self.array) or ""
        return len(re.findall(r" JobState=RUNNING ", answer))

    def state(self):
        """requeued, ending, preempted or running; None as long as Slurm does not answer."""
        facts = self.facts()
        if not facts:
            return None
        if int(facts["Restarts"]) > self.life:
            return "requeued"
        if facts["JobState"] == "COMPLETING":
            return "ending"
        # An earlier life's preemption may be kept. Without any, it says None.
        preempted = facts.get("PreemptTime", "None")
        return "preempted" if ":" in preempted and preempted >= facts["StartTime"] else "running"

    def look_at_limit(self):
        """Its user may have changed it by scontrol."""
        end = self.facts().get("EndTime", "")
        if ":" in end:  # or Unknown
            self.limit = time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S"))


def wait_for_answer(job):
    """The job's state. As long as Slurm's controller is away, nobody ends this job at its limit."""
    end = time.time() + AWAY_SECONDS
    state = job.state()
    while state is None and time.time() < end:
        time.sleep(LOOK_SECONDS)
        state = job.state()
    return state


def find_output(flags):
    """The script's --output, as it reads it: the last one counts."""
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output")
    return output.parse_known_args(flags)[0].output


def newest_checkpoint(job):
    """When it was written; 0 if there is none. An empty file may only reserve the folder."""
    newest = 0
    for path in job.output.glob(job.args.checkpoint):
        with suppress(FileNotFoundError):  # the training has just removed it
            if path.stat().st_size > 0:
                newest = max(newest, path.stat().st_mtime)
    return newest


# ---- The steps of a life ----

# On each node. Without torch.accelerator, torch is older than 2.6, which is not the node's fault.
CHECK = """
import os, sys
from torch import accelerator, device, ones
node, on_cpus = os.environ["SLURMD_NODENAME"], sys.argv[1].isdigit()
print("started", node, flush=True)
gpus = 0 if on_cpus else accelerator.device_count()
granted = 0 if on_cpus else int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
assert gpus >= granted, f"torch can use only {gpus} of {granted} GPUs"
for i in range(gpus):
    total = ones(1000, device=device(accelerator.current_accelerator().type, i)).sum().item()
    assert total == 1000, f"GPU {i} adds 1000 ones to {total}"
print("works", node, flush=True)
"""

# For each process. If not all nodes have joined, each would train alone.
START = """
ulimit -c 0 # no core dumps
if [ "$GROUP_WORLD_SIZE" -ne "$SLURM_NNODES" ]; then
    echo "nodes are missing: do their clocks differ?"
    exit 1
fi
exec python -u "$@"
"""


def commands(job):
    """The test of the nodes, the stage if there is one, and the training."""
    args, number = job.args, os.environ["SLURM_JOB_ID"]
    container, srun = shlex.split(args.container), ["srun", "--export=ALL", "--wait=0"]
    # Whatever slurm.conf says, a node that fails does not end the test of the others, ...
    check = ["timeout", "-k", "60", str(CHECK_SECONDS), *srun, "--kill-on-bad-exit=0"]
    check += [*container, "python", "-c", CHECK, args.processes]
    srun += ["--kill-on-bad-exit=1"]  # ... but it ends all else
    if "SLURM_CPUS_PER_TASK" in os.environ:  # srun may not take it by itself
        srun += ["--cpus-per-task", os.environ["SLURM_CPUS_PER_TASK"]]
    stage = ["timeout", "-k", "60", str(STAGE_SECONDS), *srun, "bash", "-c", args.stage]
    # torchrun restarts all ranks up to three times, without a new life of the job.
    train = [*srun, *container, "torchrun", "--nnodes", str(job.nodes)]
    train += ["--nproc-per-node", args.processes, "--max-restarts", "3"]
    train += ["--rdzv-backend", "c10d", "--rdzv-id", number, "--rdzv-conf", "read_timeout=600"]
    train += ["--rdzv-endpoint", f"{socket.gethostname()}:{10000 + int(number) % 20000}"]
    train += ["--no-python", "bash", "-c", START, "bash", str(args.script), *job.flags]
    train += ["--resume", "--output", str(job.output)]
    return [check, stage, train] if args.stage else [check, train]


def check_nodes(job, words):
    """A node that does not print "works" is bad. If none prints "started", the environment or the
    shared disk is at fault, and no node."""
    with tempfile.TemporaryFile() as file:
        status = follow(job, words, stdout=file)
        file.seek(0)
        lines = [line.split() for line in file.read().decode(errors="replace").splitlines()]
    works = {line[1] for line in lines if line[:1] == ["works"]}
    if len(works) == job.nodes:
        return 0
    if status == 124:  # of timeout
        say(f"The test of the nodes did not end within {CHECK_SECONDS} s.")
    if any(line[:1] == ["started"] for line in lines):
        nodes = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]) or ""
        job.bad_nodes = [node for node in nodes.split() if node not in works]
    else:
        say("srun, python or torch does not start on any node: see above. No node is called bad.")
    return 1


def follow(job, words, stdout=None):
    """Wait for a command, and return its exit status. Meanwhile, answer warnings."""
    process = subprocess.Popen(words, stdout=stdout)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_SECONDS)
        with suppress(OSError):  # if the disk does not answer, look again
            if not job.has_decided:
                answer_warning(job)


def answer_warning(job):
    """Without a new checkpoint in this life, the script still has time to save one before the
    limit; not if this is a preemption."""
    if job.warned_at is None:
        if not is_warned(job):
            return
        say("A warning: the time limit is near, or a preemption.")
        job.warned_at = time.time()
    is_late = time.time() > job.warned_at + CHECKPOINT_SECONDS
    if is_late or newest_checkpoint(job) > job.newest_before or job.state() == "preempted":
        decide(job)


def is_warned(job):
    """By Slurm, or by the clock, as Slurm does not warn while its controller is away."""
    if job.has_signal:
        return True
    if time.time() > job.limit - WARNING_SECONDS:
        job.look_at_limit()
    return time.time() > job.limit - WARNING_SECONDS


# ---- What follows a life that has not ended well ----


def decide(job):
    job.has_decided = True
    state = wait_for_answer(job)
    if state in ("requeued", "ending", None):
        say(f"Nothing is decided: to Slurm, this job is {state or 'unknown, for an hour'}.")
        return
    try:
        what, why = plan(job, state)
        if what != END and state != "preempted":
            note_requeue(job, why)
    except OSError as error:  # the disk is full, or away, and cannot count: Slurm counts all lives
        what, why = LATER, error
        if job.life + 1 >= job.args.lives:
            what = END
    say(f"{why}. {what}.")
    if what == END:
        cancel_other_tasks(job)
    else:
        requeue(job, what)


def plan(job, state):
    """What follows, and why."""
    if state == "preempted":  # whatever its disk says
        return REQUEUE, "This job is preempted"
    name, newest, requeues = job.args.checkpoint, newest_checkpoint(job), read_requeues(job)
    if len(requeues) + 1 >= job.args.lives:
        return END, f"This was the last of its {job.args.lives} lives (lives= in complete.sh)"
    if newest > job.newest_before:
        return REQUEUE, f"This life has a new {name}"
    in_vain = sum(before >= newest for before in requeues)
    if in_vain >= MOST_IN_VAIN:
        return END, f"The last {in_vain} requeues have brought no new {name}"
    if job.bad_nodes:
        return REQUEUE, f"torch cannot compute on all GPUs of {','.join(job.bad_nodes)}"
    if newest == 0:
        return END, f"There is no {name} in {job.output}: another life would end like this"
    return LATER, f"This life has no new {name}"


def note_requeue(job, why):
    """Each line begins with the time of the newest checkpoint: by the disk's clock, as a node's may
    be another."""
    job.record.parent.mkdir(exist_ok=True)
    with job.record.open("a") as file:
        file.write(f"{newest_checkpoint(job)} {time.ctime()}, life {job.life}: {why}\n")


def read_requeues(job):
    """The time of the newest checkpoint at each of them."""
    text = job.record.read_text() if job.record.exists() else ""
    lines = re.findall(r"^(\d+(?:\.\d+)?) .*, life \d", text, re.M)  # a full disk may cut one off
    return [float(line) for line in lines]


def requeue(job, what):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends a job that it requeues
    for _ in range(MOST_REFUSED):
        ask("scontrol", "requeue", "incomplete", job.id)  # succeeds, too, for a job that has ended
        state = wait_for_answer(job)
        if state in ("requeued", "ending", None):
            break
        time.sleep(2)
    if state != "requeued":
        say(f"Slurm has not requeued it. If no task follows, submit it with --output {job.output}")
    # For the next life, or the array's next task. Slurm accepts it only for what waits.
    changes = ["StartTime=now+1hour"] if what == LATER else []
    excluded = job.facts().get("ExcNodeList") if job.bad_nodes else None
    if excluded is not None:  # Slurm replaces the list: leave it rather than lose it
        others = [] if excluded == "(null)" else [excluded]
        changes.append("ExcNodeList=" + ",".join(job.bad_nodes + others))
    if changes and (state == "requeued" or job.array):
        say(f"scontrol update jobid={job.array or job.id} {' '.join(changes)}")
        ask("scontrol", "update", f"jobid={job.array or job.id}", *changes)


def cancel_other_tasks(job):
    """Those of the array would find nothing to do, or fail as this one did."""
    if job.array:
        ask("scancel", "--state=PENDING", job.array)


# ---- Outside of a job ----


def rehearse(args):
    """What a job would start, and what would follow. Slurm is not asked."""
    if not args.script.is_file():
        parser.error(f"there is no {args.script}")
    os.environ.update(SLURM_JOB_ID="12345", SLURM_NNODES="1")
    job = Job(args)
    say("This is no job. As job 12345, on one node, each life would start")
    for words in commands(job):
        say(" ".join("CODE" if "\n" in word else shlex.quote(word) for word in words))
    newest = newest_checkpoint(job)
    say(f"{job.output / args.checkpoint} was written: {time.ctime(newest) if newest else 'never'}")
    what, why = plan(job, "running")
    say(f"If a life failed now: {why}. {what}.")
    say(f"At most {args.lives} lives, preempted ones aside: at worst {args.lives} x --time x GPUs.")
    return 0


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))

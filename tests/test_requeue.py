"""slurm/requeue.py's decisions, in this process, with a stand-in for what Slurm's commands answer;
then the job files and where.sh, with stand-ins for the commands themselves. What only a real Slurm
shows is in test_slurm.py."""

import ast
import errno
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import stand_in
from helpers import ROOT
from runs import replaced

SLURM = ROOT / "slurm"
PAGE = (SLURM / "README.md").read_text()
spec = importlib.util.spec_from_file_location("requeue", SLURM / "requeue.py")
requeue = importlib.util.module_from_spec(spec)
spec.loader.exec_module(requeue)

ENVIRONMENT = {
    "SLURM_JOB_ID": "100",
    "SLURM_JOB_NAME": "complete",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "16",
}
NOW, EARLIER = "2026-01-02T00:00:00", "2026-01-01T00:00:00"
WORKS = "started node0\nworks node0\nstarted node1\nworks node1\n"
BROKEN = "a banner\nstarted node0\nworks node0\nstarted node1\n"
REQUEUE = "scontrol requeue incomplete 100"
LATER = "scontrol update jobid=100 StartTime=now+1hour"
EXCLUDE = "scontrol update jobid=100 ExcNodeList="
OUTPUT = Path("runs/100")
SHOW = "scontrol --oneliner show job "
CHANGES = ("scontrol requeue", "scontrol update", "scancel")  # in Slurm; all else only asks


FUNCTIONS = ["ctime", "mktime", "strptime"]


class Slurm:
    """What Slurm knows, and what a job's steps do; `ask` and `follow` stand in for requeue.py's.
    A command in `fails` fails so many times, or, if `requeues` is false, does nothing. `train` is a
    function that returns an exit status, or a command for bash, which the real `follow` follows.
    Its clock is `clock` seconds ahead, and each look at it takes `tick` s."""

    ctime, mktime, strptime = [staticmethod(getattr(time, name)) for name in FUNCTIONS]

    def __init__(self):
        self.preempted, self.life_began, self.state = "None", NOW, "RUNNING"
        self.requeues, self.excluded, self.array, self.end = True, "(null)", "100", "Unknown"
        self.check, self.check_status, self.stage_status = WORKS, 0, 0
        self.others = ()  # the states of the array's other tasks
        self.train = lambda: 0
        self.fails, self.clock, self.tick, self.life, self.place = {}, 0, 0, 0, {}

    def run(self, *flags, options=(), **environment):
        """A life of the job. Returns its exit status."""
        self.asked, self.steps = [], []
        self.clock += 100
        environment |= {"SLURM_RESTART_COUNT": str(self.life)} | self.place
        with mock.patch.dict(os.environ, environment):
            args = requeue.parser.parse_args([*options, "complete/train.py", *flags])
            return requeue.main(args)

    def lives(self, *trainings):
        """For lives with these trainings, what each changes in Slurm."""
        changes = []
        for self.train in trainings:
            self.run()
            changes.append(self.changes)
            self.life += 1
        return changes

    @property
    def changes(self):
        return [line for line in self.asked if line.startswith(CHANGES)]

    def ask(self, *words):
        line, command = " ".join(words), " ".join(words[:2])
        if command == "scontrol update" and self.restarts() > self.life:
            # Or Slurm would have ended the job before.
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        for start, times in self.fails.items():
            if line.startswith(start) and times > 0:
                self.fails[start] -= 1
                self.asked.append(f"{line} fails")
                return None
        self.asked.append(line)
        if words[:3] == ("scontrol", "show", "hostnames"):
            return "node0\nnode1"
        if line.startswith(SHOW):
            facts = f"JobState={self.state} Restarts={self.restarts()} PreemptTime={self.preempted}"
            facts += f" StartTime={self.life_began} EndTime={self.end} ArrayJobId={self.array}"
            facts += f" ExcNodeList={self.excluded}" if self.excluded else ""
            others = [f"JobId=9 JobName=b JobState={state} Restarts=0" for state in self.others]
            return "\n".join([f"JobName=a {facts} Command=x --flag Restarts=99", *others])
        return ""

    def restarts(self):
        accepted = any(
            re.fullmatch(r"scontrol requeue incomplete \S+", line) for line in self.asked
        )
        return self.life + (accepted and self.requeues)

    def follow(self, job, words, stdout=None, follow=requeue.follow):
        self.steps.append(" ".join(words))
        if stdout:
            stdout.write((self.check(job) if callable(self.check) else self.check).encode())
            return self.check_status
        if "torchrun" not in words:
            return self.stage_status
        return self.train() if callable(self.train) else follow(job, ["bash", "-c", self.train])

    def sleep(self, seconds):
        self.clock += seconds

    def time(self):
        self.clock += self.tick
        return time.time() + self.clock

    def save(self, name="checkpoint.pt", output=OUTPUT, ahead=0):
        path = Path(output, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        os.utime(path, (self.time() + ahead, self.time() + ahead))
        return 3

    def save_others(self):
        """What a finished run may write again in each life."""
        self.save("model.pt")
        return self.save("best.pt")


@pytest.fixture
def slurm(work, monkeypatch):
    """In a clone, as a job of two nodes."""
    Path("complete").mkdir()
    Path("complete/train.py").write_text("")
    slurm = Slurm()
    monkeypatch.setattr(requeue, "ask", slurm.ask)
    monkeypatch.setattr(requeue, "follow", slurm.follow)
    monkeypatch.setattr(requeue, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(requeue, "time", slurm)
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield slurm
    for number, handler in zip((signal.SIGUSR1, signal.SIGTERM), before):
        signal.signal(number, handler)


def fail():
    return 3


def refuse(number):
    def function(*words, **options):
        raise OSError(number, os.strerror(number))

    return function


# ---- What a life starts


def test_a_life(slurm, capfd):
    """It checks the nodes, stages the data and trains, whatever slurm.conf says of srun. The script
    finds its folder empty; nothing is changed in Slurm, and nothing said."""
    options = ["--container=enter --bind '/a b'", "--flags=--seed '7 8'"]
    slurm.train = lambda: int(Path("runs").exists())
    assert slurm.run("--lr", "a b", options=[*options, "--stage=mkdir -p x && cp 'a b' x"]) == 0
    check, stage, train = slurm.steps
    srun = "srun --export=ALL --wait=0 --kill-on-bad-exit="
    assert check.startswith(f"timeout -k 60 600 {srun}0 enter --bind /a b python -c")
    srun += "1 --cpus-per-task 16"
    assert stage == f"timeout -k 60 7200 {srun} bash -c mkdir -p x && cp 'a b' x"
    torchrun = "torchrun --nnodes 2 --nproc-per-node gpu --max-restarts 3 --rdzv-backend c10d"
    assert train.startswith(f"{srun} enter --bind /a b {torchrun}")
    assert train.endswith(f" complete/train.py --seed 7 8 --lr a b --resume --output {OUTPUT}")
    assert not slurm.changes and capfd.readouterr().out == ""


def test_outside_of_a_job(slurm, capfd, monkeypatch):
    """It prints what a life would start, and starts and asks nothing."""
    monkeypatch.delenv("SLURM_JOB_ID")
    slurm.save("a/last.pt", "runs/mine")
    options = ["--stage=mkdir 'a b'", "--checkpoint=*/last.pt"]
    assert slurm.run("--output", "runs/mine", options=options) == 0
    said = capfd.readouterr().out
    assert "bash -c 'mkdir '\"'\"'a b'\"'\"''\n" in said and "complete/train.py --output" in said
    assert f"runs/mine/*/last.pt was written: {time.ctime()[:10]}" in said
    assert "Requeue it, in an hour" in said and "At most 15 lives" in said
    assert not slurm.asked and not slurm.steps
    Path("complete/train.py").unlink()
    with pytest.raises(SystemExit, match="2"):
        slurm.run()


@pytest.mark.parametrize("processes", ["1", "gpu"])
def test_real_torch(monkeypatch, capsys, processes):
    """That of this machine, which has no GPU."""
    monkeypatch.setenv("SLURMD_NODENAME", "node0")
    monkeypatch.setattr(sys, "argv", ["-c", processes])
    refused = pytest.raises(AssertionError, match="only 0 of 1 GPUs")
    with nullcontext() if processes == "1" else refused:
        exec(requeue.CHECK, {})
    assert ("works node0" in capsys.readouterr().out) == (processes == "1")


def test_what_is_a_checkpoint(slurm):
    """What the user names; not an empty file, by which complete/train.py reserves its folder, or a
    dangling link, as editors make."""
    args = requeue.parser.parse_args(["--checkpoint=*.pt", "complete/train.py"])
    job = requeue.Job(args)
    OUTPUT.mkdir(parents=True)
    (OUTPUT / ".#last.pt").symlink_to("nowhere")
    (OUTPUT / "empty.pt").touch()
    slurm.save("metrics.csv")
    slurm.save("a/b.pt")
    assert requeue.newest_checkpoint(job) == 0
    slurm.save("last.pt")
    assert requeue.newest_checkpoint(job) == (OUTPUT / "last.pt").stat().st_mtime
    args.checkpoint = "*/b.pt"
    assert requeue.newest_checkpoint(job) == (OUTPUT / "a/b.pt").stat().st_mtime


# ---- Whether there is another life


def test_lives_without_a_new_checkpoint(slurm):
    """Each is followed by an hour's pause. The third in a row is the last."""
    changes = slurm.lives(slurm.save, fail, fail, slurm.save, fail, slurm.save_others, fail)
    pause = [REQUEUE, LATER]
    assert changes == [[REQUEUE], pause, pause, [REQUEUE], pause, pause, []]


@pytest.mark.parametrize("ahead", [-86400, 86400])
def test_another_clock(slurm, ahead):
    """The disk's differs from the node's, by which the lives are written down."""
    changes = slurm.lives(lambda: slurm.save(ahead=ahead), fail, fail, fail)
    assert changes == [[REQUEUE], [REQUEUE, LATER], [REQUEUE, LATER], []]


def test_lives_are_counted(slurm, capfd):
    """The job's own requeues: as many as the user says."""
    slurm.life = 300  # Slurm's own
    assert slurm.lives(*[slurm.save] * 15) == [[REQUEUE]] * 14 + [[]]
    assert "last of its 15 lives" in capfd.readouterr().out
    slurm.preempted = NOW
    assert slurm.lives(slurm.save) == [[REQUEUE]]
    assert Path("runs/100-lives.txt").read_text().count("has a new checkpoint.pt\n") == 14
    slurm.preempted, slurm.train = "None", fail
    slurm.run(options=["--lives=16"])
    assert slurm.changes == [REQUEUE, LATER]


def test_what_a_finished_run_rewrites_is_no_progress(slurm):
    assert slurm.lives(slurm.save_others) == [[]]


BAD, HANG = {"check": BROKEN}, {"check_status": 124}
LIVES = {  # what is different in this life, what changes in Slurm, what is said
    "a new checkpoint": ("save", {}, [REQUEUE], "has a new checkpoint.pt. Requeue it."),
    "no checkpoint": (fail, {}, [], f"no checkpoint.pt in {OUTPUT}"),
    "preempted": (fail, {"preempted": NOW}, [REQUEUE], "is preempted"),
    "preempted in an earlier life": (fail, {"preempted": EARLIER}, [], "no checkpoint.pt in"),
    "ended by scancel": ("save", {"state": "COMPLETING"}, [], "this job is ending"),
    "staging fails": (None, {"stage_status": 2}, [], "no checkpoint.pt in"),
    "staging takes too long": (
        None,
        {"stage_status": 124},
        [],
        "The stage did not end within 7200 s",
    ),
    "staging, preempted": (None, {"stage_status": 2, "preempted": NOW}, [REQUEUE], "preempted"),
    "a bad node": (None, BAD, [REQUEUE, f"{EXCLUDE}node1"], "all GPUs of node1. Requeue it."),
    "all are bad": (None, {"check": "started node0\n"}, [REQUEUE, f"{EXCLUDE}node0,node1"], ""),
    "others are excluded": (
        None,
        BAD | {"excluded": "node[5-6]"},
        [REQUEUE, f"{EXCLUDE}node1,node[5-6]"],
        "",
    ),
    "others may be excluded": (None, BAD | {"excluded": None}, [REQUEUE], ""),
    "a node hangs": (None, HANG | BAD, [REQUEUE, f"{EXCLUDE}node1"], "not end within 600 s"),
    "several hang: the disk": (None, HANG | {"check": ""}, [], "No node is called bad"),
    "torch starts nowhere": (None, {"check": "a banner\n"}, [], "No node is called bad"),
}


@pytest.mark.parametrize(("train", "state", "changes", "says"), LIVES.values(), ids=LIVES)
def test_how_a_life_ends(slurm, capfd, train, state, changes, says):
    """Where a step fails, the next is not started."""
    slurm.train = slurm.save if train == "save" else train
    vars(slurm).update(state)
    assert slurm.run(options=["--stage=tar"]) != 0
    assert slurm.changes == changes and says in capfd.readouterr().out
    assert any("torchrun" in step for step in slurm.steps) == (train is not None)


def test_bad_starts(slurm):
    """After three in a row, there is no fourth."""
    slurm.check = BROKEN
    assert [len(changes) for changes in slurm.lives(*[fail] * 4)] == [2, 2, 2, 0]


def test_full_disks(slurm, monkeypatch, capfd):
    """That of the log changes nothing. On that of runs/, the requeues cannot be counted: Slurm's
    count of all lives takes their place, and there is time to make room."""
    slurm.train = slurm.save
    Path("runs").mkdir()
    Path("runs/100-lives.txt").write_text("1764314400.1")  # a line that was cut off
    with monkeypatch.context() as patch:
        patch.setattr(requeue.os, "write", refuse(errno.ENOSPC))
        assert slurm.run() == 3 and slurm.changes == [REQUEUE]
    slurm.train, open_file = fail, Path.open

    def no_room(path, mode="r", *more, **options):
        return (refuse(errno.ENOSPC) if mode == "a" else open_file)(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", no_room)
    for slurm.life in 13, 14:
        assert slurm.run() == 3
        assert slurm.changes == ([REQUEUE, LATER] if slurm.life == 13 else [])
        assert "No space left" in capfd.readouterr().out


def test_a_disk_that_does_not_answer(slurm, monkeypatch):
    """At the start, and while the training runs: the job is requeued later, or goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", refuse(errno.EIO))
        assert slurm.run() == 1 and slurm.changes == [REQUEUE, LATER] and not slurm.steps
        slurm.preempted = NOW  # which no disk is asked about
        assert slurm.run() == 1 and slurm.changes == [REQUEUE]
        slurm.preempted = "None"
    slurm.life, glob, errors = 1, Path.glob, [errno.EIO] * 2

    def sometimes(path, pattern):
        if Path("trains").exists() and errors:
            refuse(errors.pop())()
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", sometimes)
    slurm.train = f"{SAVE}: > trains; {WARN}exit 5"
    assert slurm.run() == 5 and slurm.changes == [REQUEUE] and not errors


# ---- Requeueing

EVER = 10**9


@pytest.mark.parametrize(
    ("refused", "away", "requeues", "tries", "says"),
    [
        (2, 0, True, 3, ""),
        (2, 9, True, 3, ""),  # slurmctld is away,
        (2, EVER, True, 0, "unknown, for an hour"),
        (EVER, 0, True, 3, f"submit it with --output {OUTPUT}"),  # or refuses,
        (0, 0, False, 3, f"submit it with --output {OUTPUT}"),  # or only says that it does
    ],
)
def test_scontrol_fails(slurm, capfd, refused, away, requeues, tries, says):
    slurm.train, slurm.requeues = slurm.save, requeues
    slurm.fails = {"scontrol requeue": refused, SHOW: away}
    assert slurm.run() == 3 and len(slurm.changes) == tries
    assert says in capfd.readouterr().out


def test_nothing_is_decided_while_slurm_does_not_answer(slurm, capfd):
    """A first life may be preempted."""
    slurm.train, slurm.preempted, slurm.fails = fail, NOW, {SHOW: 20}
    assert slurm.run() == 3 and slurm.changes == [REQUEUE]
    assert "no checkpoint" not in capfd.readouterr().out


def test_a_job_that_is_not_requeued_is_not_changed(slurm):
    slurm.lives(slurm.save)
    slurm.requeues = False
    assert slurm.lives(fail) == [[REQUEUE] * 3]


def test_commands_that_fail():
    """`ask` tells an answer that is empty from none."""
    assert [requeue.ask("true"), requeue.ask("echo", "a b")] == ["", "a b"]
    assert [requeue.ask("false"), requeue.ask("/no such command")] == [None, None]


# ---- While the training runs

WARN = "kill -USR1 $PPID; sleep 0.4; "  # as Slurm does before a time limit
SAVE = f"mkdir -p {OUTPUT}; echo x > {OUTPUT}/checkpoint.pt; "
AHEAD = f"touch -d '+9 years' {OUTPUT}/checkpoint.pt; "


def test_warning(slurm, capfd):
    """The job is requeued once, as soon as there is a new checkpoint."""
    slurm.train = f"{WARN}{SAVE}sleep 0.4"
    assert slurm.run() == 0 and slurm.changes == [REQUEUE]
    slurm.train, slurm.life = f"{SAVE}{AHEAD}{WARN}{WARN}exit 5", 1
    assert slurm.run() == 5 and slurm.changes == [REQUEUE]
    assert capfd.readouterr().out.count("A warning") == 2


FORMAT = "%Y-%m-%dT%H:%M:%S"


@pytest.mark.parametrize(
    ("left", "later", "away", "warnings"),
    [
        (250, 250, 0, 1),
        (250, 250, EVER, 1),  # slurmctld, which would warn, is away
        (400, 400, 0, 0),
        (250, 9000, 0, 0),  # the limit has been extended
        (None, 250, 0, 1),  # before Slurm 23.02
        (None, 400, 0, 0),
        (None, None, 0, 0),  # no limit
    ],
)
def test_it_warns_itself(slurm, capfd, left, later, away, warnings):
    """300 s before the limit."""
    slurm.train = f"{SAVE}sleep 0.4; exit 5"
    now, environment = slurm.time() + 100, {}
    if left:
        environment = {"SLURM_JOB_END_TIME": str(int(now + left))}
    if later:
        slurm.end = time.strftime(FORMAT, time.localtime(now + later))
    slurm.fails = {SHOW: away}
    assert slurm.run(**environment) == 5 and slurm.changes == ([] if away else [REQUEUE])
    assert capfd.readouterr().out.count("A warning") == warnings


def test_warning_and_preemption(slurm):
    """It does not wait for a checkpoint."""
    slurm.train, slurm.preempted = WARN, NOW
    assert slurm.run() == 0 and slurm.changes == [REQUEUE]


def test_warning_without_a_checkpoint(slurm, monkeypatch):
    """When time is short, the array ends, while its task still runs to its limit."""
    slurm.array, slurm.tick = "90", 50
    slurm.train = f"{WARN}for i in {{1..99}}; do [ -e decided ] && exit 5; sleep 0.1; done"

    def ask(*words):
        if words[0] == "scancel":
            Path("decided").touch()
        return slurm.ask(*words)

    monkeypatch.setattr(requeue, "ask", ask)
    assert slurm.run("--output", "runs/mine", SLURM_ARRAY_JOB_ID="90") == 5
    assert slurm.changes == [CANCEL]


def test_a_missing_environment(slurm, capfd):
    """Nothing is started. The disk may be back in an hour, if this is not the first life."""
    missing = ["--environment=missing"]
    assert slurm.run(options=missing) == 1 and not slurm.changes
    slurm.save()
    assert slurm.run(options=missing) == 1 and slurm.changes == [REQUEUE, LATER]
    assert not slurm.steps and "environment cannot be activated" in capfd.readouterr().out


def test_requeued_in_the_check(slurm):
    """Nothing is trained then."""

    def check(job):
        job.has_decided = True
        return WORKS

    slurm.check = check
    assert slurm.run() == 0 and len(slurm.steps) == 1 and not slurm.changes


# ---- Arrays

MINE = ["--output", "runs/mine"]
CANCEL = "scancel --state=PENDING 90"
REQUEUE_TASK = "scontrol requeue incomplete 103"


@pytest.fixture
def task(slurm, monkeypatch):
    for name, value in ("ARRAY_JOB_ID", "90"), ("ARRAY_TASK_ID", "3"), ("JOB_ID", "103"):
        monkeypatch.setenv(f"SLURM_{name}", value)
    slurm.array = "90"
    return slurm


def test_array_ends(task):
    """After success, and after a failure that would only be repeated."""
    assert task.run(*MINE) == 0 and task.changes == [CANCEL]
    task.train = fail
    assert task.run("--output=runs/mine") == 3 and task.changes == [CANCEL]


def test_array_continues(task):
    """After progress; the next task does where requeueing is refused. All tasks are one run."""
    task.train = lambda: task.save(output="runs/mine")
    assert task.run(*MINE) == 3 and task.changes == [REQUEUE_TASK]
    task.requeues, task.train = False, fail
    for number in "104", "105":
        task.run(*MINE, SLURM_JOB_ID=number)
        later = "scontrol update jobid=90 StartTime=now+1hour"
        assert task.changes == [f"scontrol requeue incomplete {number}"] * 3 + [later]
    task.run(*MINE, SLURM_JOB_ID="106")
    assert task.changes == [CANCEL]


def test_tasks_that_run_at_once(task, capfd):
    """Without %1, they would overwrite one another's checkpoints; not with folders of their own."""
    task.others = ["PENDING", "RUNNING"]
    assert task.run(*MINE) == 2 and not task.changes and not task.steps
    assert "Other tasks run in runs/mine, too" in capfd.readouterr().out
    assert task.run() == 0 and task.run(options=["--flags=--output runs/seed-3"]) == 0
    task.others = ["PENDING", "COMPLETED"]
    assert task.run(*MINE) == 0


def test_tasks_of_many_runs_end_alone(task):
    """With an --output of each task's own, or without."""
    task.train = fail
    assert task.run(options=["--flags=--output runs/seed-3"]) == 3 and not task.changes
    assert "--output runs/seed-3 --resume --output runs/seed-3" in task.steps[1]
    assert task.run() == 3 and not task.changes and "--output runs/103" in task.steps[1]


def test_whose_number(task):
    """One task has its array's number. A job that a task submits inherits the array's variables."""
    task.train = lambda: task.save(output="runs/90")
    task.run(SLURM_JOB_ID="90")
    assert task.changes == ["scontrol requeue incomplete 90_3"]
    task.train, task.array = (lambda: task.save(output="runs/mine")), "103"
    task.run(*MINE)
    assert task.changes == [REQUEUE_TASK] and Path("runs/103-lives.txt").exists()


def test_find_output():
    """As argparse reads it: the last one counts, and may be abbreviated."""
    assert requeue.find_output("--output a --lr 1 --output=b -x".split()) == "b"
    assert requeue.find_output(["--outp", "b c"]) == "b c"
    assert requeue.find_output(["--outputs", "a", "--optimizer", "b"]) is None


def test_python_of_old_clusters():
    """With a container, the job runs on what the node has."""
    ast.parse((SLURM / "requeue.py").read_text(), feature_version=(3, 6))


# ---- The files, with stand-ins for the commands

FILES = sorted(path.stem for path in SLURM.glob("*.sh") if path.stem != "where")
SEVERAL = ["complete", "ddp_multigpu_proc", "ddp_torchrun_nodes"]  # nodes
SRUN = """
export SRUN="$*"
while [ "${1#-}" != "$1" ]; do
    if [ "$1" = --cpus-per-task ] || [ "$1" = --jobid ]; then shift; fi
    shift
done
exec "$@"
"""


SCONTROL = """
if [ "$1" = requeue ]; then touch requeued; fi
restarts=0
if [ -e requeued ]; then restarts=99; fi
if [ "$1" = show ]; then echo "$FACTS"; fi
if [ "$1" = --oneliner ]; then echo "JobState=RUNNING Restarts=$restarts EndTime=Unknown"; fi
"""


def command(name, text, folder="bin"):
    path = Path(folder, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def edit(path, *changes):
    """Changes: what stands there, its replacement, and so on."""
    Path(path).write_text(replaced(Path(path).read_text(), *changes))


ONE_NODE_OF_FOUR_GPUS = ENVIRONMENT | {
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "node0",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "CONSTANTS": '{"LOOK_SECONDS": 0.05}',
}


@pytest.fixture
def run(work, monkeypatch):
    """Runs a job file as a job does, in a clone with a space in its name. Returns its exit status,
    what it prints, and the words and environment with which a training was started, if it was."""
    folder = work / "my work"
    folder.mkdir()
    stand_in.make_clone(ROOT, folder)
    monkeypatch.chdir(folder)
    command("srun", SRUN)
    command("scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")

    def run(name, *flags, **environment):
        starts = Path("starts-100")
        for path in starts, Path("requeued"):
            path.unlink(missing_ok=True)
        words = ["bash", f"slurm/{name}.sh", *flags]
        environment = os.environ | ONE_NODE_OF_FOUR_GPUS | environment
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(words, env=environment, timeout=300, **output)
        [words, _, environment] = (
            json.loads(starts.read_text()) if starts.exists() else [[], "", {}]
        )
        return done.returncode, done.stdout, words, environment

    return run


@pytest.mark.parametrize("name", FILES)
def test_each_file(run, name):
    """It passes on flags and the exit status. On several nodes it has all CPUs of the job. Its
    folder is its own, which its next start finds again, or the user's; that of chain.sh is edited
    in the file. With fewer GPUs than granted, or without an environment, it does not train."""
    mine = ["--lr", "a b", "--output", "runs/mine"]
    if name == "chain":
        for flags in mine, ["--output=runs/mine"]:
            status, log, words, _ = run(name, *flags)
            assert status == 2 and "edit folder=" in log and not words
        edit("slurm/chain.sh", "folder=runs/$SLURM_JOB_ID", "folder=runs/mine")
        mine = ["--lr", "a b", "--outputs", "c"]
    status, log, words, environment = run(name, *mine, TRAIN="exit(4)")
    assert status == 4 and {"--resume", *mine} <= {*words}, log
    folders = [word for before, word in zip(words, words[1:]) if before == "--output"]
    if name in ("chain", "complete", "node0", "node1"):
        assert folders[-1] == "runs/mine"
    else:
        assert folders == ["runs/100", "runs/mine"]
    srun = environment.get("SRUN", "")
    assert bool(srun) == (name in SEVERAL)
    assert not srun or re.match("--export=ALL .*--cpus-per-task[ =]16 ", srun)
    status, log, words, _ = run(name, TORCH="gpus = 3")
    assert status == 1 and "AssertionError: " in log and not words, log
    Path(".venv/bin/activate").unlink()
    status, log, words, _ = run(name)
    assert status == 1 and "No such file or directory" in log and not words, log


def test_nodes_that_do_not_join(run):
    status, log, words, _ = run("complete", JOINED="0")
    assert status == 1 and "do their clocks differ?" in log and not words


CHAIN = {  # what training does, in which life, and whether it is requeued
    "a new checkpoint": ("save(); warn(); stand()", 0, True),
    "an old one": ("if life == 0: save()\nelse: warn()", 1, False),
    "none": ("warn(); time.sleep(1)", 0, False),
    "an empty one": ("empty(); warn(); time.sleep(1)", 0, False),
    "the last life": ("save(); warn(); time.sleep(1)", 14, False),
    "a failure": ("save(); exit(3)", 0, False),
    "the end": ("save()", 0, False),
}


@pytest.mark.parametrize(("train", "life", "requeues"), CHAIN.values(), ids=CHAIN)
def test_chain(run, train, life, requeues):
    requeued = 'if [ "$1" = requeue ]; then echo $* > requeued; kill $(cat training); fi'
    command("scontrol", requeued)
    warn = """
import os, signal
open("training", "w").write(str(os.getpid()))
def warn(): os.kill(os.getppid(), signal.SIGUSR1); time.sleep(1)
def empty(): os.makedirs("runs/100"); open("runs/100/checkpoint.pt", "w")
"""
    for number in range(life % 14 + 1):
        life_number = str(number if life < 14 else life)
        status, log, *_ = run("chain", TRAIN=warn + train, SLURM_RESTART_COUNT=life_number)
    assert Path("requeued").exists() == requeues, log
    assert status == (3 if "exit" in train else 143 if requeues else 0), log
    assert not requeues or Path("requeued").read_text() == "requeue 100\n"


def test_chain_in_an_array(run):
    """Its last task would requeue them all. Slurm tells a task from a job that one has submitted,
    which inherits its variables."""
    facts = "JobId=100 ArrayJobId=100 ArrayTaskId=7 JobName=chain"
    status, log, words, _ = run("chain", FACTS=facts)
    assert status == 2 and "use complete.sh" in log and not words
    status, log, words, _ = run("chain", FACTS="JobId=100 JobName=chain", SLURM_ARRAY_TASK_ID="7")
    assert status == 0 and words, log


def test_complete(run):
    """Its processes leave no core dumps, and no other job's settings reach srun. A warning does not
    end the job before requeue.py can answer it. GPUs that miscalculate do not train."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # core dumps, as on many clusters
    users = {"SLURM_GPUS_PER_NODE": "9", "SLURM_CLUSTERS": "a,b", "SLURM_TIME_FORMAT": "%s"}
    status, log, _, environment = run("complete", **users)
    assert status == 0 and not log and environment["CORE"] == "0"
    assert not users.keys() & environment.keys() and environment["PYTHONFAULTHANDLER"] == "1"
    with Path(".venv/bin/activate").open("a") as file:
        file.write("kill -USR1 $$\n")
    status, log, words, _ = run("complete", SLURM_RESTART_COUNT="1")
    assert status == 0 and words, log
    status, log, words, _ = run("complete", SLURM_RESTART_COUNT="2", TORCH="total = 999")
    assert status == 1 and "adds 1000 ones to 999" in log and not words


def test_what_complete_decides(run):
    """Its lives, and the name of the checkpoint."""
    edit(
        "slurm/complete.sh", "checkpoint=checkpoint.pt", 'checkpoint="*.pt"', "lives=15", "lives=2"
    )
    logs = [run("complete", TRAIN="save(); exit(3)")[1] for life in range(2)]
    assert "a new *.pt. Requeue it" in logs[0] and "last of its 2 lives" in logs[1]


@pytest.mark.parametrize("name", FILES)
def test_conda(run, name):
    """By a file's other line. An environment that is active at the login is left first, or it would
    be activated again in its old place in PATH."""
    text = Path(f"slurm/{name}.sh").read_text()
    [venv] = re.findall("^source .venv/bin/activate .*\n", text, re.M)
    conda = re.findall(r"^# (module load conda; .*|conda activate .*)", text, re.M)
    edit(f"slurm/{name}.sh", venv, "\n".join([*conda, ""]))
    module = {"BASH_FUNC_module%%": '() { [ "$*" = "load conda" ]; }'}
    function = 'conda() { case "$*" in deactivate) inactive=1 ;; "activate NAME") '
    function += '[ $inactive ] && PATH="$PWD/.venv/bin:$PATH" ;; esac; }'
    command("conda", f"echo '{function}'")
    status, log, words, _ = run(name, "--lr", "a b", **module)
    assert status == 0 and "a b" in words, log


@pytest.mark.parametrize("name", FILES)
def test_container(run, name):
    """As complete.sh and the page say: without `source`, and before all that srun starts."""
    command("apptainer", 'export PATH="$PWD/.venv/bin:$PATH" CONTAINER=1; shift 5; exec "$@"')
    complete, text = (Path(f"slurm/{file}.sh").read_text() for file in ("complete", name))
    [container] = re.findall(r'^container="" # EDIT: or "(.*?)"', complete, re.M)
    [venv] = re.findall("^source .venv/bin/activate .*\n", text, re.M)
    edit(f"slurm/{name}.sh", venv, "")
    if name == "complete":
        edit(f"slurm/{name}.sh", 'container=""', f'container="{container}"')
        Path(".venv/bin/python3").rename("bin/python3")
    started = r'^(srun "\$\{options\[@\]\}" |)(python|torchrun|bash) '
    text = re.sub(started, rf"\1{container} \2 ", Path(f"slurm/{name}.sh").read_text(), flags=re.M)
    Path(f"slurm/{name}.sh").write_text(text)
    status, log, words, environment = run(name, "--lr", "a b")
    assert status == 0 and "a b" in words and "CONTAINER" in environment, log


def test_unpacking(run):
    """The page's lines, on a disk whose name has a space; a broken archive does not train."""
    for part in "train", "test":
        Path("my_images", part).mkdir(parents=True)
    subprocess.run("tar -cf my_images.tar my_images", shell=True, check=True)
    [lines] = re.findall(r"^```bash\n(data=.*\nstage=.*\nflags=.*\n)```$", PAGE, re.M)
    lines = lines.replace("/shared/my_images.tar", "my_images.tar")
    edit("slurm/complete.sh", 'flags=""', f"{lines}#", 'stage=""', "#")
    disk = Path("a disk").resolve()
    disk.mkdir()
    status, log, words, _ = run("complete", SLURM_TMPDIR=str(disk))
    images = Path(words[words.index("--dataset") + 1])
    assert status == 0 and images.is_relative_to(disk), log
    assert sorted(path.name for path in images.iterdir()) == ["test", "train"]
    Path("my_images.tar").write_bytes(b"?" * 2000)
    status, log, words, _ = run("complete", SLURM_TMPDIR=str(disk))
    assert status and not words, log


# ---- where.sh

STACK = """Thread 1 (idle): "Thread-1 (pin)"
    pin (/home/me/other.py:3)
Thread 2 (idle): "MainThread"
    all_reduce (/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:1)
    train_epoch (/home/me/my train.py:10)
    main (/home/me/my train.py:20)
"""

# Without an argument, where.sh asks for processes that are not this test's.
PY_SPY = """
pid=${*: -1}
if grep -qx END "stack-$pid"; then kill -9 "$pid"; fi
cat "stack-$pid"
"""

LOADS_TORCH = "import mmap, time; file = open('libtorch.so'); "
LOADS_TORCH += "library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
LOADS_TORCH += "print(1, flush=True); time.sleep(99)"


@pytest.fixture
def processes(run):
    """Of a job, each with what py-spy says of it: two ranks, of which one has only libraries' code
    in its stack; a task of srun's without a stack; what is no rank; and a rank of another job."""
    job = str(7_000_000 + os.getpid())
    command("srun", f"export SLURM_JOB_ID={job} SLURMD_NODENAME=node0\n{SRUN}")
    command("squeue", f'echo "{job} 1"')
    command("sleep", "")
    command("py-spy", PY_SPY)
    Path("libtorch.so").write_text("x")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    started = {}

    def start(name, stack, *words, **environment):
        program = [sys.executable, "-c", LOADS_TORCH]
        environment = os.environ | {"SLURM_JOB_ID": job, "SLURM_PROCID": "5"} | environment
        process = subprocess.Popen([*program, *words], env=environment, stdout=subprocess.PIPE)
        process.stdout.readline()  # it runs Python now
        Path(f"stack-{process.pid}").write_text(stack.replace("PID", str(process.pid)))
        started[name] = process

    nameless = STACK.replace('2 (idle): "MainThread"', "PID (idle)")  # as py-spy may have it
    start("rank", nameless, RANK="2")
    start("library", STACK.replace("/home/me/", "/venv/lib/python3.11/site-packages/"), RANK="9")
    start("task", "")
    start("ends meanwhile", "END")
    start("worker", STACK.replace("train_epoch", "_worker_loop"))
    start("requeue", STACK, "slurm/requeue.py", "script")
    start("torchrun", STACK, ".venv/bin/torchrun", "--nnodes")
    start("other job", STACK, SLURM_JOB_ID=job + "1")
    yield job, started
    for process in started.values():
        process.kill()
        process.wait()


def test_where(processes):
    """A line for each rank; without Slurm, too. --abort ends the ranks, and nothing else."""
    job, started = processes

    def where(*flags):
        words = ["bash", "slurm/where.sh", *flags]
        done = subprocess.run(words, capture_output=True, text=True)
        assert not done.stderr
        return done.stdout

    lines, advice = where(job).split("\n\n")
    rank, task, library = sorted(lines.splitlines(), key=lambda line: line.split()[0][-1])
    assert library.startswith("RANK=9 node0 all_reduce (/venv/lib/"), library
    assert rank.startswith("RANK=2 node0 train_epoch (/home/me/my train.py:10) "), rank
    assert task.startswith("SLURM_PROCID=5 node0 no stack: busy ") and "(sleeping)" in task
    assert "ptrace_scope" in advice and "all_reduce (" in Path(rank.split(") ")[1]).read_text()
    lines = where().splitlines()  # of all processes on this machine
    for name, number in {"rank": "RANK=2", "task": "SLURM_PROCID=5"}.items():
        [line] = [line for line in lines if line.endswith(f"-{started[name].pid}")]
        assert line.startswith(f"{number} "), line
    assert where(job, "--abort").count("aborted") == 4  # a worker cannot be told without a stack
    ended = [started.pop(name) for name in ("rank", "library", "task", "worker")]
    assert {process.wait(30) for process in ended} == {-signal.SIGABRT}
    assert started.pop("ends meanwhile").wait(30) == -signal.SIGKILL
    assert {process.poll() for process in started.values()} == {None}

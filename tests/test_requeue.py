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
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import stand_in
from runs import replaced
from same_text import ROOT

SLURM = ROOT / "slurm"
PAGE = (SLURM / "README.md").read_text()
spec = importlib.util.spec_from_file_location("requeue", SLURM / "requeue.py")
requeue = importlib.util.module_from_spec(spec)
spec.loader.exec_module(requeue)

ENVIRONMENT = {
    "SLURM_JOB_ID": "100",
    "SLURM_JOB_NAME": "complete",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "16",
}
NOW, EARLIER = "2026-01-02T00:00:00", "2026-01-01T00:00:00"
WORKS = "started node0\nkind A\nworks node0 4\nstarted node1\nkind A\nworks node1 4\n"
BROKEN = "started node0\nkind A\nworks node0 4\nstarted node1\n"
STARTED = "started node0\nstarted node1\n"
REQUEUE = "scontrol requeue incomplete 100"
EXCLUDE = "scontrol update jobid=100 ExcNodeList="
OUTPUT = Path("runs/complete-100")
CHANGES = ("scontrol requeue", "scontrol update", "scancel")  # in Slurm; all else only asks


def names(match):
    """Of node[0-2]: node0,node1,node2."""
    return ",".join(f"node{i}" for i in range(int(match[1]), int(match[2]) + 1))


class Slurm:
    """What Slurm knows, and what a job's steps do; `ask` and `follow` stand in for requeue.py's.
    A command in `fails` fails so many times. `train` is a function that returns an exit status,
    or a command for bash, which the real `follow` follows. A look at the clock takes `tick` s."""

    def __init__(self):
        self.preempted, self.life_began, self.may_requeue = "N/A", NOW, "1"
        self.state, self.excluded, self.nodes = "RUNNING", "", [f"node{i} idle" for i in range(8)]
        self.array, self.waiting_tasks, self.ending_tasks = "100", "", []
        self.check, self.check_status, self.stage_status = WORKS, 0, 0
        self.train = lambda: 0
        self.fails, self.clock, self.tick = {}, 0, 0
        self.life, self.place = 0, {}

    def run(self, *flags, options=(), **environment):
        """A life of the job. Returns its exit status."""
        self.asked, self.steps = [], []
        for path in Path("runs").rglob("*") if self.life else []:  # the life before was earlier
            earlier = path.stat().st_mtime - 10
            os.utime(path, (earlier, earlier))
        environment |= {"SLURM_RESTART_COUNT": str(self.life)} | self.place
        with mock.patch.dict(os.environ, environment):
            args = requeue.parser.parse_args([*options, "complete/train.py", *flags])
            return requeue.main(args)

    def lives(self, *trainings):
        """For lives with these trainings, what each changes in Slurm."""
        changes = []
        for self.life, self.train in enumerate(trainings):
            self.run()
            changes.append(self.changes)
        return changes

    @property
    def changes(self):
        return [line for line in self.asked if line.startswith(CHANGES)]

    def ask(self, *words):
        line, command = " ".join(words), " ".join(words[:2])
        if command == "scontrol update" and any("requeue" in change for change in self.changes):
            # Or Slurm would have ended the job before.
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        self.asked.append(line)
        for start, times in self.fails.items():
            if line.startswith(start) and times > 0:
                self.fails[start] -= 1
                return None
        if command == "scontrol show":  # hostnames
            return re.sub(r"node\[(\d)-(\d)\]", names, words[3]).replace(",", "\n")
        if words[0] == "sinfo":
            return "\n".join(self.nodes)
        if words[0] != "squeue":
            return ""
        if words[-1] == "--states=COMPLETING":
            return self.ending_tasks.pop() if self.ending_tasks else ""
        return {
            "PreemptTime,StartTime": f"{self.preempted} {self.life_began}",
            "--states=PENDING": self.waiting_tasks,
            "Requeue": self.may_requeue,
            "%x": self.excluded,
            "%F": self.array,
            "%T": self.state,
        }[words[-1]]

    def follow(self, job, words, stdout=None, follow=requeue.follow):
        self.steps.append(" ".join(words))
        self.environment = dict(os.environ)
        if stdout:
            stdout.write(self.check(job) if callable(self.check) else self.check)
            return self.check_status
        if "torchrun" not in words:
            return self.stage_status
        return self.train() if callable(self.train) else follow(job, ["bash", "-c", self.train])

    def sleep(self, seconds):
        self.clock += seconds

    def monotonic(self):
        self.clock += self.tick
        return self.clock


@pytest.fixture
def slurm(work, monkeypatch):
    """In a clone, as a job of two nodes."""
    Path("complete").mkdir()
    Path("complete/train.py").write_text("first")
    slurm = Slurm()
    monkeypatch.setattr(requeue, "ask", slurm.ask)
    monkeypatch.setattr(requeue, "follow", slurm.follow)
    monkeypatch.setattr(requeue, "use_own_copy", lambda job: None)
    monkeypatch.setattr(requeue, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(requeue, "time", slurm)
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    names = [name for name in os.environ if not name.startswith(("SLURM", "PYTHON", "TORCH"))]
    environment = {name: os.environ[name] for name in names}
    with mock.patch.dict(os.environ, environment | ENVIRONMENT, clear=True):
        yield slurm
    for number, handler in zip((signal.SIGUSR1, signal.SIGTERM), before):
        signal.signal(number, handler)


def fail():
    return 3


def save_and_fail(output=OUTPUT):
    Path(output).mkdir(parents=True, exist_ok=True)
    Path(output, "checkpoint.pt").write_text("x")
    return 3


def save_in_an_earlier_life():
    save_and_fail()
    os.utime(OUTPUT / "checkpoint.pt", (1, 1))


# ---- What a life starts


def test_a_life(slurm, capfd):
    """It checks the nodes, stages the data and trains, whatever slurm.conf and the user's variables
    say of srun and squeue; nothing is changed in Slurm, and nothing said."""
    users = {"SLURM_GPUS_PER_NODE": "9", "SQUEUE_STATES": "PENDING", "PYTHONPATH": "mine"}
    options = ["--container=enter --bind '/a b'", "--stage=tar -xf 'a b'", "--flags=--seed '7 8'"]
    assert slurm.run("--lr", "a b", options=options, **users) == 0
    check, stage, train = slurm.steps
    srun = "srun --export=ALL --kill-on-bad-exit={} --wait=0 "
    assert check.startswith(f"timeout -k 60 600 {srun.format(0)}enter --bind /a b python -c")
    assert stage == f"{srun.format(1)}--cpus-per-task 16 tar -xf a b"
    torchrun = "torchrun --nnodes 2 --nproc-per-node gpu --max-restarts 3"
    assert train.startswith(f"{srun.format(1)}--cpus-per-task 16 enter --bind /a b {torchrun}")
    flags = f"--seed 7 8 --lr a b --resume --output {OUTPUT}"
    assert train.endswith(f" {OUTPUT}/job-100/train.py {flags}")
    environment, compiled = slurm.environment, (OUTPUT / "job-100/compiled").resolve()
    assert environment["PYTHONPATH"] == f"{Path('complete').resolve()}:mine"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(compiled)
    assert not {"SLURM_GPUS_PER_NODE", "SQUEUE_STATES"} & environment.keys()
    assert (OUTPUT / "owner.txt").read_text() == "100 100-0"
    assert not slurm.changes and capfd.readouterr().out == ""


def test_later_lives_run_the_code_of_the_first(slurm):
    """All files of the script's folder, even if one is named as ours is."""
    Path("complete/requeue.py").write_text("mine")
    slurm.run()
    Path("complete/train.py").write_text("second")
    slurm.life = 1
    slurm.run()
    copies = [(OUTPUT / "job-100" / name).read_text() for name in ("train.py", "requeue.py")]
    assert copies == ["first", "mine"]
    assert (OUTPUT / "job-100/slurm/requeue.py").read_text() == (SLURM / "requeue.py").read_text()


def test_disks(slurm, monkeypatch, capfd):
    """One that cannot lock trains, but compiles on the node. Where the copy of the code cannot be
    written, or the file that counts a failed life, the job ends and says why."""

    def refuse(number):
        def function(*words, **options):
            raise OSError(number, os.strerror(number))

        return function

    monkeypatch.setattr(requeue.fcntl, "flock", refuse(errno.ENOSYS))
    assert slurm.run() == 0 and "TORCHINDUCTOR_CACHE_DIR" not in slurm.environment
    shutil.rmtree("runs")
    with monkeypatch.context() as patch:
        patch.setattr(requeue.shutil, "copyfile", refuse(errno.ENOSPC))
        assert slurm.run() == 1 and not slurm.changes
        assert "No space left" in capfd.readouterr().out
    save_in_an_earlier_life()
    slurm.train = fail
    monkeypatch.setattr(Path, "touch", refuse(errno.ENOSPC))
    assert slurm.run() == 3 and not slurm.changes and "No space left" in capfd.readouterr().out


# ---- Whether there is another life

CHECKPOINTS = "checkpoint.pt a/b/last.ckpt model.pth.tar step-9/.metadata step-9/model.safetensors"
OTHERS = "metrics.csv events.out.tfevents.1 flags.json last.pt.tmp tmp-last.pt step-9/__0_0.distcp "
OTHERS += "best.pt job-100/compiled/a.bin"


def test_what_is_a_checkpoint(work):
    """No logs, unfinished saves, what a resumed run may write again, the job's own files, or the
    empty file by which complete/train.py reserves its folder. The folder may be a link."""
    for name in f"{CHECKPOINTS} {OTHERS}".split():
        path = Path("scratch", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    Path("scratch/empty.pt").touch()
    Path("link").symlink_to("scratch")
    found = requeue.checkpoints(Path("link"))
    assert {path for path, _ in found} == {Path("link", name) for name in CHECKPOINTS.split()}


def test_a_removed_checkpoint_is_no_progress(slurm, capfd):
    """As when a resumed script deletes an interrupted save."""
    save_in_an_earlier_life()
    (OUTPUT / "interrupted.pt").write_text("x")
    slurm.train = lambda: (OUTPUT / "interrupted.pt").unlink() or 3
    slurm.run()
    assert "No new checkpoint in this life" in capfd.readouterr().out


def test_failed_lives(slurm):
    """Of three in a row, the last uses other nodes, if there are any, and ends the job."""
    save_in_an_earlier_life()
    slurm.excluded = "node7"
    first, second, third = [REQUEUE], [REQUEUE, EXCLUDE + "node[0-1],node7"], []
    changes = slurm.lives(fail, fail, save_and_fail, fail, fail, fail)
    assert changes == [first, second, first, first, second, third]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nodes_are_kept_where_no_others_work(slurm):
    """A node that does not answer (*) is none. sinfo may be silent: then other nodes are tried."""
    save_in_an_earlier_life()
    slurm.nodes = ["node0 allocated", "node1 mixed", "node2 idle", "node3 drained", "node4 down*"]
    slurm.nodes += ["node5 idle*", "node6 mixed*"]
    assert slurm.lives(fail, fail) == [[REQUEUE], [REQUEUE]]
    slurm.nodes = []
    slurm.run()  # the same life counts once
    assert slurm.changes == [REQUEUE, EXCLUDE + "node[0-1]"]


BAD, HANG = {"check": BROKEN}, {"check_status": 124}
ONE_NODE = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node0"}
LIVES = {  # what is different in this life, what changes in Slurm, what is said
    "a new checkpoint": ({"train": save_and_fail, "life": 199}, [REQUEUE], ""),
    "too many lives": ({"train": save_and_fail, "life": 200}, [], "which is enough"),
    "no checkpoint": ({"train": fail}, [], f"No checkpoint in {OUTPUT} (*.pt "),
    "preempted": ({"train": fail, "preempted": NOW, "life": 200}, [REQUEUE], "is preempted"),
    "preempted in an earlier life": ({"train": fail, "preempted": EARLIER}, [], "No checkpoint"),
    "ended by scancel": ({"train": save_and_fail, "state": "COMPLETING"}, [], "is ending this job"),
    "staging fails": ({"stage_status": 2}, [], "No checkpoint"),
    "preempted while staging": ({"stage_status": 2, "preempted": NOW}, [REQUEUE], "is preempted"),
    "a bad node": (BAD, [REQUEUE, f"{EXCLUDE}node1"], "GPUs of node1,"),
    "all are bad": ({"check": STARTED}, [REQUEUE, f"{EXCLUDE}node0,node1"], ""),
    "others are excluded": (
        BAD | {"excluded": "node[5-6]"},
        [REQUEUE, f"{EXCLUDE}node1,node[5-6]"],
        "",
    ),
    "others may be excluded": (BAD | {"excluded": None}, [REQUEUE], ""),
    "no nodes remain": (BAD | {"excluded": "node[2-7]"}, [], "too few nodes"),
    "preempted in the check": (BAD | {"preempted": NOW}, [REQUEUE], "is preempted"),
    "a node hangs": (HANG | BAD, [REQUEUE, f"{EXCLUDE}node1"], "did not end within 600 s"),
    "several hang: the disk": (HANG | {"check": ""}, [], "No node is called bad"),
    "the only node hangs": (
        HANG | {"check": "", "place": ONE_NODE},
        [REQUEUE, f"{EXCLUDE}node0"],
        "",
    ),
    "torch starts nowhere": ({"check": "a banner\n"}, [], "No node is called bad"),
}


@pytest.mark.parametrize(("state", "changes", "says"), LIVES.values(), ids=LIVES)
def test_how_a_life_ends(slurm, capfd, state, changes, says):
    vars(slurm).update(state)
    assert slurm.run(options=["--stage=tar"]) != 0
    assert slurm.changes == changes and says in capfd.readouterr().out
    assert any("torchrun" in step for step in slurm.steps) == ("train" in state)


def test_unequal_gpus(slurm, capfd, monkeypatch):
    """The job trains, if it was granted them, and says that all wait for the slowest kind."""
    slurm.check = WORKS.replace("kind A\nworks node1 4", "kind B C\nworks node1 3")
    assert slurm.run() == 0 and "{'A': 1, 'B C': 1}" in capfd.readouterr().out
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")  # of whole nodes without --gres
    assert slurm.run() == 1 and slurm.changes == [REQUEUE, f"{EXCLUDE}node1"]


def test_an_environment_that_stays_broken(slurm):
    save_in_an_earlier_life()
    slurm.check = ""
    first, second, third = slurm.lives(fail, fail, fail)
    assert first == [REQUEUE] and REQUEUE in second and third == []


def test_most_bad_starts(slurm):
    """Five in a row; a life that wrote a checkpoint, and that Slurm itself ended, is between."""
    slurm.train = save_and_fail
    bad, good = {"check": BROKEN, "state": "RUNNING"}, {"check": WORKS, "state": "COMPLETING"}
    for slurm.life, kind in enumerate([bad] * 4 + [good] + [bad] * 6):
        vars(slurm).update(kind)
        slurm.run()
        assert len(slurm.changes) == (2 if kind is bad and slurm.life < 10 else 0), slurm.life


# ---- Requeueing


@pytest.mark.parametrize(
    ("scontrol", "squeue", "may_requeue", "tries"),
    [
        (3, 0, "1", 4),
        (99, 999, "1", 100),  # slurmctld is away for a quarter of an hour,
        (9999, 9999, "1", 386),  # or for ever: it is waited for, for an hour
        (9999, 0, "1", 26),  # scontrol is refused or missing: within the time of Slurm's warning
        (9999, 0, "0", 1),  # requeueing is forbidden
        (9999, "missing", "1", 26),
    ],
)
def test_scontrol_fails(slurm, monkeypatch, capfd, scontrol, squeue, may_requeue, tries):
    found = None if squeue == "missing" else "/usr/bin/squeue"
    monkeypatch.setattr(requeue.shutil, "which", lambda name: found)
    slurm.train, slurm.may_requeue = save_and_fail, may_requeue
    slurm.fails = {"scontrol requeue": scontrol, "squeue": 9999 if found is None else squeue}
    assert slurm.run() == 3 and slurm.changes == [REQUEUE] * tries
    says = f"has not requeued this job. Submit it again, with --output {OUTPUT}"
    assert (says in capfd.readouterr().out) == (scontrol == 9999)


def test_commands_that_fail():
    """`ask` tells an answer that is empty from none."""
    assert [requeue.ask("true"), requeue.ask("echo", "a b")] == ["", "a b"]
    assert [requeue.ask("false"), requeue.ask("/no such command")] == [None, None]


# ---- While the training runs

WARN = "kill -USR1 $PPID; sleep 0.4; "  # as Slurm does before a time limit
SAVE = f"echo x > {OUTPUT}/last.pt; "
CANCEL = "scancel --state=PENDING 90"


def test_warning(slurm, capfd):
    """The job is requeued once, as soon as there is a new checkpoint."""
    slurm.train = f"{WARN}{SAVE}sleep 0.4"
    assert slurm.run() == 0 and slurm.changes == [REQUEUE]
    slurm.train, slurm.life = f"{SAVE}{WARN}{WARN}exit 5", 1
    assert slurm.run() == 5 and slurm.changes == [REQUEUE]
    assert "was requeued while it was running" in capfd.readouterr().out


def test_warning_and_preemption(slurm):
    """It does not wait for a checkpoint."""
    slurm.train, slurm.preempted = WARN, NOW
    assert slurm.run() == 0 and slurm.changes == [REQUEUE]


def test_warning_without_a_checkpoint(slurm):
    """When time is short, the array ends, while its task still runs to its limit."""
    slurm.array, slurm.waiting_tasks, slurm.tick = "90", "90_4", 50
    slurm.train = f"{WARN}exit 5"
    assert slurm.run("--output", str(OUTPUT)) == 5 and slurm.changes == [CANCEL] * 2


def test_requeued_in_the_check(slurm):
    """Nothing is trained then."""

    def check(job):
        job.requeued = True
        return WORKS

    slurm.check = check
    assert slurm.run() == 0 and len(slurm.steps) == 1 and not slurm.changes


@pytest.mark.parametrize(
    ("array", "owner", "changes"),
    [("100", "100 100-1", []), ("90", "90 101-0", []), ("90", "200 200-0", [CANCEL])],
)
def test_the_newer_owns_the_folder(slurm, monkeypatch, array, owner, changes):
    """A life that Slurm has lost, or an array's task, ends when another begins, and asks for
    nothing; if that is another array's, its own array ends. Processes that stay are killed."""
    monkeypatch.setattr(requeue, "KILL_SECONDS", 0.5)
    slurm.array, slurm.waiting_tasks = array, "90_4"
    slurm.train = f"{SAVE}trap ': > told' TERM; echo {owner} > {OUTPUT}/owner.txt; echo $$ > pid; "
    slurm.train += "for i in 1 2; do sleep 9 & wait; done"
    with pytest.raises(SystemExit, match="A newer job, or life of this one") as error:
        slurm.run("--output", str(OUTPUT))
    status = os.waitpid(int(Path("pid").read_text()), 0)[1]
    assert Path("told").exists() and os.WIFSIGNALED(status), error
    assert slurm.changes == changes


# ---- Arrays

MINE = ["--output", "runs/mine"]
REQUEUE_TASK = "scontrol requeue incomplete 90_3"


@pytest.fixture
def task(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "90")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    slurm.array, slurm.waiting_tasks = "90", "90_[4-9] gpu complete"
    return slurm


def test_array_ends(task):
    """After success, and after a failure that would only be repeated."""
    assert task.run(*MINE) == 0 and task.changes == [CANCEL]
    task.train = fail
    assert task.run("--output=runs/mine") == 3 and task.changes == [CANCEL]
    task.waiting_tasks = ""
    assert task.run(*MINE) == 3 and not task.changes


def test_array_continues(task, capfd):
    """After progress; the next task does where requeueing is refused, on other nodes after a second
    failure in a row. The third ends the array."""
    task.train = lambda: save_and_fail("runs/mine")
    assert task.run(*MINE) == 3 and task.changes == [REQUEUE_TASK]
    task.may_requeue, task.fails = "0", {"scontrol requeue": 99}
    assert task.run(*MINE) == 3 and task.changes == [REQUEUE_TASK]
    assert "next task continues" in capfd.readouterr().out
    task.train = fail
    exclude = "scontrol update jobid=90 ExcNodeList=node[0-1]"
    expected = {"101": [REQUEUE_TASK], "102": [REQUEUE_TASK, exclude], "103": [CANCEL]}
    for number, changes in expected.items():
        task.run(*MINE, SLURM_JOB_ID=number)
        assert task.changes == changes


def test_tasks_of_many_runs_end_alone(task):
    """With an --output of each task's own, or without."""
    task.train = fail
    assert task.run(options=["--flags=--output runs/seed-3"]) == 3 and not task.changes
    assert Path("runs/seed-3/job-90/train.py").exists()
    assert task.run() == 3 and not task.changes and Path("runs/complete-100").exists()


def test_tasks_share_the_code(task):
    """Another array that continues the run has a copy of its own."""
    task.run(*MINE)
    Path("complete/train.py").write_text("second")
    task.run(*MINE, SLURM_JOB_ID="101", SLURM_ARRAY_TASK_ID="4")
    assert [path.read_text() for path in Path("runs/mine").glob("job-*/train.py")] == ["first"]
    task.array = "200"
    task.run(*MINE, SLURM_JOB_ID="200", SLURM_ARRAY_JOB_ID="200")
    assert Path("runs/mine/job-200/train.py").read_text() == "second"


def test_whose_number(task):
    """One task has its array's number. A job that a task submits inherits the array's variables."""
    task.train, task.array = save_and_fail, "100\n100\n100"
    task.run(SLURM_ARRAY_JOB_ID="100")
    assert task.changes == ["scontrol requeue incomplete 100_3"]
    task.array, task.life = "100", 1
    task.run()
    assert task.changes == [REQUEUE]


def test_an_earlier_task_is_waited_for(task, capfd):
    """But not for ever."""
    task.ending_tasks = ["90_2", "90_2"]
    assert task.run(*MINE) == 0 and task.clock == 10
    task.ending_tasks = ["90_2"] * 99
    assert task.run(*MINE) == 0 and "still ending" in capfd.readouterr().out


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
SRUN = """
export SRUN="$*"
while [ "${1#-}" != "$1" ]; do
    if [ "$1" = --cpus-per-task ] || [ "$1" = --jobid ]; then shift; fi
    shift
done
exec "$@"
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
    command("squeue", f'case "$*" in *PreemptTime*) echo N/A {NOW} ;; *%F*) echo 100 ;; esac')
    command("scontrol", "")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")

    def run(name, *flags, **environment):
        starts = Path("starts-100")
        starts.unlink(missing_ok=True)
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
    """It passes on flags and the exit status, has all CPUs of the job, and continues when it was
    requeued. Without GPUs (which torchrun alone refuses) or an environment, it does not train."""
    requeued = {"SLURM_RESTART_COUNT": "1", "TRAIN": "exit(4)"}
    status, log, words, environment = run(name, "--lr", "a b", **requeued)
    assert status == 4 and {"a b", "--resume"} <= {*words}, log
    assert re.match("--export=ALL .*--cpus-per-task[ =]16 ", environment["SRUN"])
    if name != "ddp_torchrun":
        status, log, words, _ = run(name, TORCH="gpus = 0")
        assert status == 1 and "AssertionError: torch can use " in log and not words, log
    Path(".venv/bin/activate").unlink()
    status, log, words, _ = run(name)
    assert status == 1 and log.count("\n") == 1 and not words, log


@pytest.mark.parametrize("name", ["ddp_torchrun_nodes", "complete"])
def test_nodes_that_do_not_meet(run, name):
    status, log, words, _ = run(name, JOINED="0")
    assert status == 1 and "do their clocks differ?" in log and not words


def test_complete(run):
    """A later life uses the first one's requeue.py. Its processes leave no core dumps. A warning
    does not end the job before requeue.py can answer it. GPUs that miscalculate do not train."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # core dumps, as on many clusters
    status, log, _, environment = run("complete")
    assert status == 0 and not log and environment["CORE"] == "0"
    edit("slurm/requeue.py", "status = live(job, args)", "status = 9")  # a newer version
    with Path(".venv/bin/activate").open("a") as file:
        file.write("kill -USR1 $$\n")
    status, log, words, _ = run("complete", SLURM_RESTART_COUNT="1")
    assert status == 0 and words, log
    status, log, words, _ = run("complete", SLURM_RESTART_COUNT="2", TORCH="total = 999")
    assert status == 1 and "adds 1000 ones to 999" in log and not words


@pytest.mark.parametrize("name", FILES)
def test_conda(run, name):
    """By a file's other line. An environment that is active at the login is left first, or it would
    be activated again in its old place in PATH."""
    text = Path(f"slurm/{name}.sh").read_text()
    [venv] = re.findall("^source .venv/bin/activate .*\n", text, re.M)
    [conda] = re.findall(r"^# (module load conda; .*)", text, re.M)
    edit(f"slurm/{name}.sh", venv, "", f"# {conda}", conda)
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
    started = r"^(srun --export=ALL |    )(python|torchrun|bash) (?=-)"
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
    command("py-spy", 'cat "stack-${*: -1}"')
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
        return subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout

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
    assert {process.poll() for process in started.values()} == {None}

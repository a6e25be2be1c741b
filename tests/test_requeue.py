"""slurm/requeue.py's decisions and flow, in this process, with a stand-in for what Slurm's commands
answer; then complete.sh, where.sh and the plain files, with stand-ins for the commands themselves.
What only a real Slurm shows is in test_slurm.py."""

import ast
import errno
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import wait_until
from same_text import ROOT

SLURM = ROOT / "slurm"
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


class Slurm:
    """What Slurm knows; `ask` and `follow` stand in for those of requeue.py. A command that is in
    `fails` fails so many times. The check prints `check`; the training calls `train`."""

    def __init__(self):
        self.preempted, self.started, self.may_requeue = "N/A", NOW, "1"
        self.excluded, self.array, self.pending, self.ending = "", "100", "", []
        self.state = "RUNNING"
        self.nodes = [f"node{i} idle" for i in range(8)]
        self.fails, self.changes, self.commands = {}, [], []
        self.check, self.check_status, self.stage_status = WORKS, 0, 0
        self.train = lambda: 0
        self.handler = self.job = None

    def ask(self, *words):
        self.commands.append(" ".join(words))
        command = " ".join(words[:2]) if words[0] == "scontrol" else words[0]
        if command in ("scontrol requeue", "scontrol update") or words[0] == "scancel":
            self.changes.append(" ".join(words))
            if command == "scontrol update" and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
                assert not any(change.startswith("scontrol requeue") for change in self.changes)
        if self.fails.get(command, 0) > 0:
            self.fails[command] -= 1
            return None
        if words[0] == "sinfo":
            return "\n".join(self.nodes)
        if command == "scontrol show":
            text = words[3]
            for old, new in re.findall(r"(node\[(\d-\d)\])", text):
                first, last = map(int, new.split("-"))
                text = text.replace(old, ",".join(f"node{i}" for i in range(first, last + 1)))
            return text.replace(",", "\n")
        if words[0] == "squeue":
            return self.squeue(words)
        return ""

    def squeue(self, words):
        if "--states=PENDING" in words:
            return self.pending
        if "--states=COMPLETING" in words:
            return self.ending.pop() if self.ending else ""
        return {
            "PreemptTime,StartTime": f"{self.preempted} {self.started}",
            "Requeue": self.may_requeue,
            "%x": self.excluded,
            "%F": self.array,
            "%T": self.state,
        }[words[-1]]

    def follow(self, job, words, stdout=None):
        self.job = job
        self.commands.append(" ".join(words))
        if stdout:
            stdout.write(self.check)
            return self.check_status
        return self.train() if "torchrun" in words else self.stage_status


@pytest.fixture
def slurm(work, monkeypatch):
    """In a clone; what goes by the clock goes at once."""
    Path("complete").mkdir()
    Path("complete/train.py").write_text("first")
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    for name in "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR":
        monkeypatch.delenv(name, raising=False)
    for name in "PYTHONFAULTHANDLER", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE":
        monkeypatch.setenv(name, "")  # and back to what it was
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    slurm, clock = Slurm(), [0]
    monkeypatch.setattr(requeue, "ask", slurm.ask)
    monkeypatch.setattr(requeue, "follow", slurm.follow)
    monkeypatch.setattr(requeue, "use_own_copy", lambda job: None)
    monkeypatch.setattr(
        requeue.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    monkeypatch.setattr(requeue.time, "monotonic", lambda: clock[0])
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]

    def run(*flags, life=0, options=(), **environment):
        """One life: its exit status. What it changes in Slurm is in `changes`."""
        with monkeypatch.context() as patch:
            patch.setenv("SLURM_RESTART_COUNT", str(life))
            for name, value in environment.items():
                patch.setenv(name, value)
            slurm.changes.clear()
            slurm.commands.clear()
            for path in Path("runs").rglob("*") if life else []:  # the life before was earlier
                earlier = path.stat().st_mtime - 10
                os.utime(path, (earlier, earlier))
            args = requeue.parser.parse_args([*options, "complete/train.py", *flags])
            return requeue.main(args)

    slurm.run = run
    yield slurm
    for number, handler in zip((signal.SIGUSR1, signal.SIGTERM), before):
        signal.signal(number, handler)


REQUEUE = "scontrol requeue incomplete 100"
UPDATE = "scontrol update jobid=100 ExcNodeList="
OUTPUT = Path("runs/complete-100")


def write(name="checkpoint.pt", status=0, output=OUTPUT):
    """A training that writes this file, and ends."""

    def train():
        path = Path(output, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        return status

    return train


def fail():
    return 3


def old_checkpoint(output=OUTPUT, name="checkpoint.pt"):
    write(name, output=output)()
    os.utime(output / name, (1, 1))


# ---- The flow


def test_success(slurm, capfd):
    """One copy of the code for all lives; nothing is changed in Slurm, and nothing said."""
    assert slurm.run("--lr", "a b", options=["--flags=--seed '7 8'"]) == 0 and not slurm.changes
    [train] = [line for line in slurm.commands if "torchrun" in line]
    assert "--nnodes 2 --nproc-per-node gpu --max-restarts 3" in train
    more = f"--seed 7 8 --lr a b --resume --output {OUTPUT}"
    assert train.endswith(f"{OUTPUT}/job-100/train.py {more}")
    Path("complete/train.py").write_text("second")
    slurm.run(life=1)
    assert (OUTPUT / "job-100/train.py").read_text() == "first" and capfd.readouterr().out == ""


def test_the_user_has_a_requeue_too(slurm):
    Path("complete/requeue.py").write_text("mine")
    assert slurm.run() == 0 and (OUTPUT / "job-100/requeue.py").read_text() == "mine"
    own = OUTPUT / "job-100/slurm/requeue.py"
    assert own.read_text() == (SLURM / "requeue.py").read_text()


def test_options_of_srun(slurm):
    """Neither KillOnBadExit nor WaitTime of slurm.conf ends the check of other nodes, or ranks that
    still write when others have ended; a rank that fails ends all."""
    slurm.run()
    check, train = [line for line in slurm.commands if "srun" in line]
    assert " --kill-on-bad-exit=0 --wait=0 python -c" in check
    assert "--kill-on-bad-exit=1 --wait=0 --cpus-per-task 16 torchrun" in train
    slurm.run(options=["--container=enter --bind '/a b'"])
    check, train = [line for line in slurm.commands if "srun" in line]
    assert "enter --bind /a b python -c" in check and "enter --bind /a b torchrun" in train


def test_environment_of_the_training(slurm, monkeypatch):
    environment = {}
    slurm.train = lambda: environment.update(os.environ) or 0
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "9")
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    slurm.run()
    assert environment["PYTHONPATH"] == f"{Path('complete').resolve()}:mine"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str((OUTPUT / "job-100/compiled").resolve())
    assert not {"SLURM_GPUS_PER_NODE", "SQUEUE_STATES"} & environment.keys()


def test_a_disk_without_locks(slurm, monkeypatch):
    """There, what --compile compiles stays on the node."""

    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(requeue.fcntl, "flock", flock)
    assert slurm.run() == 0 and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_failure_without_a_checkpoint(slurm, capfd):
    slurm.train = fail
    assert slurm.run() == 3 and not slurm.changes
    assert f"No checkpoint in {OUTPUT} (*.pt " in capfd.readouterr().out


CHECKPOINTS = ["checkpoint.pt", "step-100/.metadata", "a/b/last.ckpt", "model.pth.tar"]


@pytest.mark.parametrize("name", [*CHECKPOINTS, "checkpoint-500/model.safetensors"])
def test_failure_after_a_new_checkpoint(slurm, name):
    slurm.train = write(name, 3)
    assert slurm.run() == 3 and slurm.changes == [REQUEUE]


NO_PROGRESS = ["metrics.csv", "log.jsonl", "events.out.tfevents.1", "flags.json", "last.pt.tmp"]
NO_PROGRESS += ["step-100/__0_0.distcp", "best.pt", "job-100/compiled/a.bin", "tmp-last.pt"]


@pytest.mark.parametrize("name", NO_PROGRESS)
def test_what_is_no_progress(slurm, name):
    """Logs, unfinished saves, what a resumed run writes again, the job's own files."""
    old_checkpoint()
    slurm.train = write(name, 3)
    for life in range(2):
        assert slurm.run(life=life) == 3 and REQUEUE in slurm.changes
    assert slurm.run(life=2) == 3 and not slurm.changes


def test_an_empty_file_is_no_checkpoint(slurm):
    """complete/train.py reserves its folder by one."""
    OUTPUT.mkdir(parents=True)
    slurm.train = lambda: (OUTPUT / "checkpoint.pt").touch() or 3
    assert slurm.run() == 3 and not slurm.changes


def test_a_removed_checkpoint_is_no_progress(slurm, capfd):
    """As when a resumed script deletes an interrupted save."""
    old_checkpoint()
    old_checkpoint(name="interrupted.pt")
    slurm.train = lambda: (OUTPUT / "interrupted.pt").unlink() or 3
    slurm.run()
    assert "No new checkpoint in this life" in capfd.readouterr().out


def test_failed_lives(slurm, capfd):
    """Two in a row are followed by another; the second's nodes are left, with those before."""
    old_checkpoint()
    slurm.train, slurm.excluded = fail, "node7"
    second = [REQUEUE, UPDATE + "node[0-1],node7"]
    assert slurm.run() == 3 and slurm.changes == [REQUEUE]
    assert slurm.run(life=1) == 3 and slurm.changes == second
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    slurm.train = write(status=3)
    assert slurm.run(life=2) == 3 and slurm.changes == [REQUEUE]
    slurm.train = fail
    slurm.run(life=3)
    slurm.run(life=4)
    assert slurm.changes == second
    assert slurm.run(life=5) == 3 and not slurm.changes
    assert "No new checkpoint in the last 3 lives" in capfd.readouterr().out


def test_no_nodes_remain(slurm):
    """Nodes are kept where there are no others that work; sinfo may be silent."""
    old_checkpoint()
    slurm.train = fail
    slurm.nodes = ["node0 allocated", "node1 mixed", "node2 idle", "node3 drained", "node4 down*"]
    slurm.nodes += ["node5 idle*", "node6 mixed*"]  # these do not answer
    slurm.run()
    slurm.run(life=1)
    assert slurm.changes == [REQUEUE]
    slurm.nodes = []
    slurm.run(life=1)  # the same life counts once
    assert slurm.changes == [REQUEUE, UPDATE + "node[0-1]"]


def test_ended_by_slurm(slurm):
    """If srun ends before this does, it neither comes back nor ends an array."""
    slurm.train, slurm.state, slurm.pending = write(status=143), "COMPLETING", "100_[2-3]"
    assert slurm.run("--output", "runs/mine") == 143 and not slurm.changes


def test_most_lives(slurm):
    slurm.train = write(status=3)
    slurm.run(life=200)
    assert not slurm.changes
    slurm.preempted = NOW
    slurm.run(life=200)
    assert slurm.changes == [REQUEUE]


def test_preempted(slurm):
    """In this life: Slurm may keep the time of an earlier preemption."""
    slurm.train, slurm.preempted = fail, NOW
    assert slurm.run() == 3 and slurm.changes == [REQUEUE]
    slurm.preempted = EARLIER
    assert slurm.run(life=1) == 3 and not slurm.changes


def test_staging(slurm):
    """A failure does not train; a preemption meanwhile is requeued."""
    stage = ["--stage=tar -xf 'a b.tar'"]
    assert slurm.run(options=stage) == 0
    started = "srun --export=ALL --kill-on-bad-exit=1 --wait=0 --cpus-per-task 16 tar -xf a b.tar"
    assert slurm.commands.index(started) < len(slurm.commands) - 1
    slurm.stage_status = 2
    assert slurm.run(options=stage) == 2 and not slurm.changes
    assert "torchrun" not in " ".join(slurm.commands)
    slurm.preempted = NOW
    slurm.run(options=stage)
    assert slurm.changes == [REQUEUE]


def test_a_full_disk(slurm, monkeypatch, capfd):
    """The copy fails, or the file that counts a life: the job ends, and an array with it."""
    Path("runs").write_text("no folder")
    assert slurm.run() == 1 and not slurm.changes and "Not a directory" in capfd.readouterr().out
    Path("runs").unlink()
    old_checkpoint()
    slurm.train = fail

    def touch(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", touch)
    assert slurm.run() == 3 and not slurm.changes and "No space left" in capfd.readouterr().out


def test_no_such_script(slurm, capfd):
    Path("complete/train.py").unlink()
    assert slurm.run() == 1 and "complete/train.py" in capfd.readouterr().out


# ---- Requeueing


def test_slurmctld_does_not_answer(slurm, monkeypatch):
    """It is waited for, for an hour."""
    monkeypatch.setattr(requeue.shutil, "which", lambda name: f"/usr/bin/{name}")
    slurm.train, slurm.fails = write(status=3), {"scontrol requeue": 3}
    assert slurm.run() == 3 and slurm.changes == [REQUEUE] * 4
    slurm.fails = {"scontrol requeue": 99, "squeue": 999}  # for a quarter of an hour
    assert slurm.run() == 3 and slurm.changes == [REQUEUE] * 100
    slurm.fails = {"scontrol requeue": 9999, "squeue": 9999}
    assert slurm.run() == 3 and 300 < len(slurm.changes) < 500


@pytest.mark.parametrize("may_requeue", ["1", "0"])
def test_requeueing_is_refused(slurm, capfd, may_requeue):
    """It ends within the time of Slurm's warning, at once where that is forbidden, and says so."""
    slurm.train, slurm.fails, slurm.may_requeue = (
        write(status=3),
        {"scontrol requeue": 999},
        may_requeue,
    )
    assert slurm.run() == 3
    assert len(slurm.changes) == (1 if may_requeue == "0" else 26)
    assert (
        f"has not requeued this job. Submit it again, with --output {OUTPUT}"
        in capfd.readouterr().out
    )


# ---- The check of the nodes

BROKEN = "started node0\nkind A\nworks node0 4\nstarted node1\n"


def test_bad_node(slurm, capfd):
    """Excluded after the requeue; what was excluded before stays."""
    slurm.check, slurm.excluded, slurm.check_status = BROKEN, "node[5-6]", 1
    assert slurm.run() == 1 and slurm.changes == [REQUEUE, UPDATE + "node1,node[5-6]"]
    assert "GPUs of node1," in capfd.readouterr().out
    assert "torchrun" not in " ".join(slurm.commands)


def test_what_was_excluded_is_unknown(slurm):
    """If squeue does not answer, nothing is replaced."""
    slurm.check, slurm.excluded, slurm.check_status = BROKEN, None, 1
    slurm.run()
    assert slurm.changes == [REQUEUE]


def test_all_nodes_are_bad_or_hang(slurm, capfd, monkeypatch):
    """If several nodes import no torch in time, it is the disk; a single one is left."""
    slurm.check, slurm.check_status = "started node0\nstarted node1\n", 1
    slurm.run()
    assert slurm.changes == [REQUEUE, UPDATE + "node0,node1"]
    old_checkpoint()
    slurm.check, slurm.check_status = "", 124
    slurm.run(life=1)
    assert slurm.changes == [REQUEUE]
    log = capfd.readouterr().out
    assert "did not end within 600 s" in log and "No node is called bad" in log
    monkeypatch.setenv("SLURM_NNODES", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node0")
    slurm.run(life=2)
    assert slurm.changes == [REQUEUE, UPDATE + "node0"]


def test_some_nodes_hang(slurm):
    slurm.check, slurm.check_status = BROKEN.replace("started node1\n", ""), 124
    slurm.run()
    assert slurm.changes == [REQUEUE, UPDATE + "node1"]


def test_broken_environment(slurm, capfd):
    """No node is bad; a run with a checkpoint tries again, and ends after its third failure."""
    slurm.check, slurm.check_status = "a banner\n", 1
    assert slurm.run() == 1 and not slurm.changes
    assert "No node is called bad" in capfd.readouterr().out
    old_checkpoint()
    ends = [slurm.run(life=life) and slurm.changes[:1] for life in range(3)]
    assert ends == [[REQUEUE], [REQUEUE], []]


def test_whole_nodes_without_gres(slurm, monkeypatch):
    """A node with fewer GPUs than the others is excluded; granted unequally, all are good."""
    slurm.check = WORKS.replace("node1 4", "node1 3")
    assert slurm.run() == 0
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    assert slurm.run() == 1 and slurm.changes == [REQUEUE, UPDATE + "node1"]
    slurm.check = WORKS
    assert slurm.run(life=1) == 0


def test_two_kinds(slurm, capfd):
    slurm.check = WORKS.replace("kind A\nworks node1", "kind B C\nworks node1")
    assert slurm.run() == 0 and "{'A': 1, 'B C': 1}" in capfd.readouterr().out


def test_preempted_in_the_check(slurm):
    slurm.check, slurm.check_status, slurm.preempted = BROKEN, 143, NOW
    slurm.run()
    assert slurm.changes == [REQUEUE]


def test_most_bad_starts(slurm, capfd):
    slurm.check, slurm.check_status = BROKEN, 1
    for life in range(5):
        slurm.run(life=life)
        assert len(slurm.changes) == 2
    slurm.run(life=5)
    assert not slurm.changes and "ask an administrator" in capfd.readouterr().out


def test_bad_starts_are_not_in_a_row(slurm):
    """A life between them wrote a checkpoint, and was ended by Slurm itself."""
    slurm.train = write(status=143)
    for life in range(0, 14, 2):
        slurm.check, slurm.check_status = BROKEN, 1
        slurm.state = "RUNNING"
        slurm.run(life=life)
        assert len(slurm.changes) == 2
        slurm.check, slurm.check_status, slurm.state = WORKS, 0, "COMPLETING"
        assert slurm.run(life=life + 1) == 143 and not slurm.changes


TORCH = """
class Sum:
    def sum(self): return self
    def item(self): return {total}
class Device:
    def __init__(self, type, index): pass
class accelerator:
    device_count = staticmethod(lambda: {count})
    current_accelerator = staticmethod(lambda: type("Type", (), {{"type": "cuda"}}))
device, ones = Device, lambda count, device: Sum()
get_device_module = lambda gpu: type("Module", (), {{"get_device_name": lambda gpu: "A"}})
"""


@pytest.mark.parametrize(
    ("count", "total", "processes", "last", "error"),
    [
        (4, 1000, "gpu", "works node0 4", ""),
        (3, 1000, "gpu", "started node0", "torch can use only 3 GPUs"),
        (4, 999, "gpu", "started node0", "GPU 0 adds 1000 ones to 999"),
        (0, 1000, "2", "works node0 0", ""),
    ],
)
def test_what_the_check_computes(work, count, total, processes, last, error):
    Path("torch.py").write_text(TORCH.format(count=count, total=total))
    words = [sys.executable, "-S", "-c", requeue.CHECK, processes]
    environment = {"SLURMD_NODENAME": "node0", "SLURM_GPUS_ON_NODE": "4", "PYTHONPATH": "."}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stdout.split("\n")[-2] == last and error in done.stderr, done


# ---- Arrays

MINE = ["--output", "runs/mine"]
CANCEL = "scancel --state=PENDING 90"


@pytest.fixture
def task(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "90")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    slurm.array, slurm.pending = "90", "90_[4-9] gpu complete"
    return slurm


def test_array_ends(task):
    """After success, and after a failure that would only be repeated."""
    assert task.run(*MINE) == 0 and task.changes == [CANCEL]
    task.train = fail
    assert task.run("--output=runs/mine") == 3 and task.changes == [CANCEL]
    task.pending = ""
    assert task.run(*MINE) == 3 and not task.changes


def test_array_continues(task, capfd):
    """After progress, and where requeueing is refused: then the next task does."""
    task.train = write(status=3, output="runs/mine")
    assert task.run(*MINE) == 3 and task.changes == ["scontrol requeue incomplete 90_3"]
    task.may_requeue, task.fails = "0", {"scontrol requeue": 99}
    assert task.run(*MINE) == 3 and task.changes == ["scontrol requeue incomplete 90_3"]
    assert "next task continues" in capfd.readouterr().out
    task.train = fail
    for number in "101", "102", "103":
        task.run(*MINE, SLURM_JOB_ID=number)
        if number == "102":
            update = "scontrol update jobid=90 ExcNodeList=node[0-1]"
            assert task.changes == ["scontrol requeue incomplete 90_3", update]
    assert task.changes == [CANCEL]


def test_many_runs(task):
    """With --output among the flags of each task, or without, they end alone."""
    task.train = fail
    assert task.run(options=["--flags=--output runs/seed-3"]) == 3 and not task.changes
    assert Path("runs/seed-3/job-90/train.py").exists()
    assert task.run() == 3 and not task.changes and Path("runs/complete-100").exists()


def test_tasks_share_the_code(task):
    """And another array has a copy of its own."""
    task.run(*MINE)
    Path("complete/train.py").write_text("second")
    task.run(*MINE, SLURM_JOB_ID="101", SLURM_ARRAY_TASK_ID="4")
    assert [path.read_text() for path in Path("runs/mine").glob("job-*/train.py")] == ["first"]
    task.array = "200"
    task.run(*MINE, SLURM_JOB_ID="200", SLURM_ARRAY_JOB_ID="200")
    assert Path("runs/mine/job-200/train.py").read_text() == "second"


def test_the_task_with_the_number_of_the_array(task):
    task.train, task.array = write(status=3), "100\n100\n100"
    task.run(SLURM_ARRAY_JOB_ID="100")
    assert task.changes == ["scontrol requeue incomplete 100_3"]


def test_submitted_inside_a_task(task):
    """The variables are those of another job, whose array stays as it is."""
    task.array, task.pending = "100", ""
    assert task.run(*MINE) == 0 and not task.changes
    assert Path("runs/mine/job-100").exists()


def test_an_earlier_task_is_ending(task, capfd):
    """Its task waits, though not for ever."""
    task.ending = ["90_2", "90_2"]
    assert task.run(*MINE) == 0
    assert sum("COMPLETING" in line for line in task.commands) == 3
    task.ending = ["90_2"] * 99
    assert task.run(*MINE) == 0 and "still ending" in capfd.readouterr().out


# ---- Functions


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        ([], None),
        (["--output", "a"], "a"),
        (["--output=a", "--output", "b c"], "b c"),
        (["--output", "a", "--lr", "1", "--output=b c", "-x"], "b c"),
        (["--outp", "a"], "a"),
        (["--outputs", "a", "--optimizer", "b"], None),
    ],
)
def test_find_output(flags, output):
    assert requeue.find_output(flags) == output


def test_checkpoints_behind_a_link(slurm):
    Path("scratch").mkdir()
    Path("scratch/a.pt").write_text("x")
    Path("link").symlink_to("scratch")
    assert len(requeue.checkpoints(Path("link"))) == 1


def test_python_of_old_clusters():
    """With a container, the job runs on what the node has."""
    ast.parse((SLURM / "requeue.py").read_text(), feature_version=(3, 6))


# ---- The files, with stand-ins for the commands

STUBS = {
    "squeue": 'case "$*" in *PreemptTime*) cat "$STATE/times" ;; *%F*) echo 100 ;; esac',
    "scontrol": "",
    "sinfo": "",
    "srun": """
        while [ "${1#-}" != "$1" ]; do
            if [ "$1" = --cpus-per-task ]; then shift; fi
            shift
        done
        exec "$@" """,
    "torchrun": """
        while [ $# -gt 0 ] && [ "$1" != --no-python ]; do shift; done
        if [ $# = 0 ]; then exit; fi
        shift
        GROUP_WORLD_SIZE=${JOINED:-$SLURM_NNODES} exec "$@" """,
    "python": """
        if [ "$1" = -c ]; then
            if [ "${3:-}" = gpu ]; then . "$STATE/check"; fi
            exit
        fi
        output=${*: -1}
        . "$STATE/train" """,
}
WAIT = 'touch "$STATE/stands"; while [ ! -e "$STATE/go" ]; do sleep 0.02; done; '


class Clone:
    """A clone in a folder with a space in its name."""

    def __init__(self, folder):
        self.folder, self.state, self.bin = folder / "my work", folder / "state", folder / "bin"
        for path in self.folder / "complete", self.folder / ".venv/bin", self.state, self.bin:
            path.mkdir(parents=True)
        for name, text in STUBS.items():
            self.command(name, f'echo "{name} $*" >> "$STATE/calls"\n{text}')
        self.command("python3", f'exec "{sys.executable}" "$@"')
        (self.folder / ".venv/bin/activate").touch()
        (self.folder / "complete/train.py").touch()
        shutil.copytree(SLURM, self.folder / "slurm")
        self.set(times=f"N/A {NOW}", train="exit 0", calls="")
        self.set(check="echo started node0; echo works node0 4")
        self.environment = ENVIRONMENT | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(folder),
            "STATE": str(self.state),
            "TEST_FOLDER": os.environ["TEST_FOLDER"],
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "node0",
        }

    def command(self, name, text):
        (self.bin / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def edit(self, old, new):
        path = self.folder / "slurm/requeue.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def set(self, **files):
        for name, text in files.items():
            (self.state / name).write_text(text + "\n")

    def start(self, name, *flags, **environment):
        self.set(calls="")
        environment = self.environment | environment
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = ["bash", f"slurm/{name}.sh", *flags]
        return subprocess.Popen(words, cwd=self.folder, env=environment, **options)

    def run(self, name, *flags, **environment):
        process = self.start(name, *flags, **environment)
        self.log = process.communicate(timeout=60)[0]
        return process.returncode

    def calls(self, start=""):
        lines = (self.state / "calls").read_text().splitlines()
        return [line for line in lines if line.startswith(start)]

    def wait(self, name):
        assert wait_until((self.state / name).exists, 30)


@pytest.fixture
def clone(work):
    return Clone(work)


def test_complete(clone):
    """complete.sh passes on its flags; torchrun's processes leave no core dumps. Nodes that do not
    meet do not train. A later life uses the requeue.py of the first."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # core dumps, as on many clusters
    clone.set(train='ulimit -c > "$STATE/core"')
    assert clone.run("complete", "--lr", "a b") == 0, clone.log
    [python] = clone.calls("python -u")
    assert python.endswith(f"job-100/train.py --lr a b --resume --output {OUTPUT}")
    assert (clone.state / "core").read_text() == "0\n" and clone.log == ""
    clone.edit("def main(args):", "def main(args):\n    print('new version')")
    assert clone.run("complete", SLURM_RESTART_COUNT="2") == 0 and clone.log == ""
    assert clone.run("complete", JOINED="0") == 1 and "do their clocks differ?" in clone.log
    (clone.folder / ".venv/bin/activate").unlink()
    assert clone.run("complete") and clone.log.count("\n") == 1


@pytest.fixture
def quick(clone):
    """With a requeue.py that looks more often."""
    clone.edit("LOOK_SECONDS = 5", "LOOK_SECONDS = 0.05")
    return clone


def test_scontrol_is_missing(quick):
    """Where squeue does not forbid requeueing either, it tries for some time, and says so."""
    (quick.bin / "scontrol").unlink()
    quick.edit("REQUEUE_SECONDS = 240", "REQUEUE_SECONDS = 0")
    quick.set(train='echo x > "$output/a.pt"; exit 3')
    for name in "bash", "env", "timeout", "cat":
        (quick.bin / name).symlink_to(shutil.which(name))
    assert quick.run("complete", PATH=str(quick.bin)) == 3, quick.log
    assert "No such file or directory: 'scontrol'" in quick.log
    assert "Slurm has not requeued this job" in quick.log
    (quick.bin / "squeue").unlink()
    assert quick.run("complete", SLURM_RESTART_COUNT="1", PATH=str(quick.bin)) == 3, quick.log
    assert "Slurm has not requeued this job" in quick.log


def test_warning(quick):
    """While the training runs: the job is requeued, once."""
    quick.set(train='echo x > "$output/a.pt"; ' + WAIT + "exit 5")
    process = quick.start("complete")
    quick.wait("stands")
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        assert wait_until(lambda: quick.calls("scontrol requeue"), 30)
    time.sleep(0.3)
    assert process.poll() is None and len(quick.calls("scontrol requeue")) == 1
    (quick.state / "go").touch()
    log = process.communicate()[0]
    assert process.returncode == 5 and len(quick.calls("scontrol requeue")) == 1, log
    assert "was requeued while it was running" in log


@pytest.mark.parametrize("saves", [True, False])
def test_warning_before_the_first_checkpoint(quick, saves):
    """It is waited for. Without one, the array ends, as late as possible."""
    quick.command("squeue", "case $* in *PENDING*) echo 90_4 ;; *%F*) echo 90 ;; esac")
    quick.command("scancel", 'echo "scancel $*" >> "$STATE/calls"')
    if not saves:
        quick.edit("CHECKPOINT_SECONDS = 200", "CHECKPOINT_SECONDS = 2")
    save = 'mkdir -p "$output"; echo x > "$output/a.pt"; sleep 1'
    quick.set(train=WAIT + (save if saves else "exit 5"))
    process = quick.start("complete", "--output", "runs/x")
    quick.wait("stands")
    process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    assert not quick.calls("scontrol requeue") and not quick.calls("scancel")
    if saves:
        (quick.state / "go").touch()
        assert wait_until(lambda: quick.calls("scontrol requeue"), 30)
        assert not quick.calls("scancel")
    else:
        assert wait_until(lambda: quick.calls("scancel --state=PENDING 90"), 30)
        (quick.state / "go").touch()
    process.communicate(timeout=30)


def test_warning_in_the_check(quick):
    """At a preemption, at once; nothing is trained then."""
    quick.set(times=f"{NOW} {EARLIER}", check=WAIT + "echo started node0; echo works node0 4")
    process = quick.start("complete")
    quick.wait("stands")
    process.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: quick.calls("scontrol requeue"), 30)
    (quick.state / "go").touch()
    process.communicate()
    assert not quick.calls("torchrun") and len(quick.calls("scontrol requeue")) == 1


def test_warning_before_requeue_starts(quick):
    """While the environment is activated, it is not answered, and does not end the job."""
    (quick.folder / ".venv/bin/activate").write_text(WAIT)
    process = quick.start("complete")
    quick.wait("stands")
    process.send_signal(signal.SIGUSR1)
    (quick.state / "go").touch()
    log = process.communicate()[0]
    assert process.returncode == 0 and quick.calls("torchrun"), log


def test_cancelled(quick):
    """TERM ends the job at once, and nothing is asked for."""
    quick.set(train='echo x > "$output/a.pt"; ' + WAIT)
    process = quick.start("complete")
    quick.wait("stands")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM and not quick.calls("scontrol")
    (quick.state / "go").touch()


def test_two_lives(quick):
    """An older life, which Slurm has lost, ends when a newer one begins, and asks for nothing."""
    quick.set(train='echo x > "$output/a.pt"; touch "$STATE/stands"; exec sleep 99')
    first = quick.start("complete")
    quick.wait("stands")
    quick.set(train="exit 0")
    assert quick.run("complete", SLURM_RESTART_COUNT="1") == 0, quick.log
    log = first.communicate(timeout=30)[0]
    assert first.returncode == 1 and "A newer job, or life of this one" in log
    assert not quick.calls("scontrol requeue")


def test_an_older_life_does_not_end(quick):
    """It is killed, after some time."""
    quick.edit("KILL_SECONDS = 60", "KILL_SECONDS = 0.5")
    quick.set(train="""trap '' TERM; touch "$STATE/stands"; exec sleep 99""")
    first = quick.start("complete")
    quick.wait("stands")
    (quick.folder / OUTPUT / "owner.txt").write_text("100 100-1")
    log = first.communicate(timeout=30)[0]
    assert first.returncode == 1 and "A newer job, or life of this one" in log


@pytest.mark.parametrize(("array", "cancelled"), [("90", 0), ("200", 1)])
def test_two_arrays_in_a_folder(quick, array, cancelled):
    """The older one ends as a whole; a task of the same array leaves the others."""
    answers = "case $* in *PENDING*) echo 90_4 ;; *%F*) echo 90 ;; esac"
    quick.command("squeue", answers)
    quick.command("scancel", 'echo "scancel $*" >> "$STATE/calls"')
    quick.set(train='touch "$STATE/stands"; exec sleep 99')
    first = quick.start("complete", "--output", "runs/x")
    quick.wait("stands")
    (quick.folder / "runs/x/owner.txt").write_text(f"{array} 201-0")
    log = first.communicate(timeout=30)[0]
    calls = quick.calls("scancel --state=PENDING 90")
    assert first.returncode == 1 and len(calls) == cancelled, log


# ---- The plain files


def test_one_node(clone):
    clone.run("ddp_torchrun", "--lr", "a b", SLURM_GPUS_PER_NODE="9")
    words = "torchrun --standalone --nproc-per-node gpu train_ddp_torchrun.py --lr a b"
    assert clone.calls()[1:] == [f"srun --export=ALL --cpus-per-task=16 {words}", words]
    clone.run("ddp_torchrun", SLURM_RESTART_COUNT="1")
    assert clone.calls("torchrun")[0].endswith("torchrun.py --resume")


@pytest.mark.parametrize("name", ["ddp_torchrun_nodes", "ddp_multigpu_proc"])
def test_several_nodes(clone, name):
    clone.set(train="exit 4")
    assert clone.run(name, SLURM_NODEID="1", SLURM_RESTART_COUNT="1") == 4, clone.log
    [python] = clone.calls("python -u")
    assert python.endswith(" --resume") and ("--node-rank 1" in python) == ("proc" in name)
    assert "--kill-on-bad-exit=1 --wait=0" in clone.calls("srun")[-1]


def test_not_all_nodes_have_joined(clone):
    assert clone.run("ddp_torchrun_nodes", JOINED="0") == 1
    assert "do their clocks differ?" in clone.log and not clone.calls("python -u")


@pytest.mark.parametrize("name", sorted(path.stem for path in SLURM.glob("*.sh")))
def test_no_gpu(clone, name):
    """No file trains on the CPU unasked: torchrun refuses that by itself."""
    if name in ("where", "complete", "ddp_torchrun"):
        return
    clone.command("python", 'echo "python $*" >> "$STATE/calls"; exec "$PYTHON" -S "$@"')
    (clone.folder / "torch.py").write_text(
        "class accelerator:\n"
        "    is_available = staticmethod(lambda: False)\n"
        "    device_count = staticmethod(lambda: 0)\n"
    )
    assert clone.run(name, PYTHON=sys.executable, PYTHONPATH=".") == 1
    assert "AssertionError: torch can use " in clone.log and not clone.calls("python -u")


# ---- where.sh

STACK = """Thread 1 (idle): "Thread-1 (pin)"
    pin (/home/me/other.py:3)
Thread 2 (idle): "MainThread"
    all_reduce (/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:1)
    train_epoch (/home/me/my train.py:10)
    main (/home/me/my train.py:20)
"""


def test_where(clone):
    """Each process of this job but helpers, with and without py-spy; or their end."""
    job = str(7_000_000 + os.getpid())
    enter = 'while [ "${1#-}" != "$1" ]; do if [ "$1" = --jobid ]; then shift; fi; shift; done\n'
    clone.command("srun", f'{enter}SLURM_JOB_ID={job} SLURMD_NODENAME=node0 exec "$@"')
    clone.command("squeue", f'echo "{job} 1"')
    clone.command("sleep", "")
    clone.command(
        "py-spy", 'pid=${*: -1}; if [ -e "$STATE/no" ]; then exit 1; fi; cat "$STATE/$pid"'
    )
    words = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(99)"]
    environment = clone.environment | {"SLURM_JOB_ID": job, "SLURM_PROCID": "5"}
    environments = {"rank": {"RANK": "2"}, "task": {}, "worker": {}, "requeue.py": {}}
    environments["library"] = {"RANK": "9"}  # all of whose code is installed
    environments["other"] = {"SLURM_JOB_ID": job + "1"}
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    processes = {}
    for name, more in environments.items():
        last = ["slurm/requeue.py", "script"] if name == "requeue.py" else []
        process = subprocess.Popen(words + last, env=environment | more, stdout=subprocess.PIPE)
        process.stdout.readline()  # it runs Python now
        stack = {"task": "", "worker": STACK.replace("train_epoch", "_worker_loop")}
        if name == "rank":  # py-spy may not know the main thread's name
            stack[name] = STACK.replace('2 (idle): "MainThread"', f"{process.pid} (idle)")
        stack["library"] = re.sub("/home/me/", "/venv/lib/python3.11/site-packages/", STACK)
        (clone.state / str(process.pid)).write_text(stack.get(name, STACK))
        processes[name] = process

    def where(*flags):
        words = ["bash", "slurm/where.sh", *flags]
        environment = {key: clone.environment[key] for key in ("PATH", "HOME", "STATE")}
        done = subprocess.run(
            words, cwd=clone.folder, env=environment, capture_output=True, text=True
        )
        return done.stdout

    first, second, third, empty, *advice = where(job).splitlines()
    *lines, library = sorted([first, second, third], key=lambda line: "RANK=9" in line)
    lines.sort()
    assert library.startswith("RANK=9 node0 all_reduce (/venv/lib/"), library
    assert lines[0].startswith("RANK=2 node0 train_epoch (/home/me/my train.py:10) ")
    assert lines[1].startswith("SLURM_PROCID=5 node0 no stack: busy ") and "(sleeping)" in lines[1]
    assert not empty and "ptrace_scope" in " ".join(advice)
    assert "all_reduce (" in Path(lines[0].split(") ")[1]).read_text()
    without_slurm = [line for line in where().splitlines() if str(processes["rank"].pid) in line]
    assert len(without_slurm) == 1 and "RANK=2" in without_slurm[0]
    (clone.state / "no").touch()
    assert where(job, "--abort").count("aborted") == 4  # a worker cannot be told without py-spy
    assert processes["rank"].wait(30) == -signal.SIGABRT
    assert processes["other"].poll() is None and processes["requeue.py"].poll() is None
    for process in processes.values():
        process.kill()
        process.wait()
    assert where(job) == "none node0 no Python process of this job\n"

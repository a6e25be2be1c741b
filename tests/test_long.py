"""The job files and where.sh, with stand-ins for Slurm's commands and for what they start. What
only a real Slurm shows is in test_slurm.py."""

import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in
from altered import edit, replaced
from helpers import LIMIT, ROOT, some_fast, wait_until

SLURM = ROOT / "slurm"
FILES = sorted(path.stem for path in SLURM.glob("*.sh") if path.stem != "where")
PAIR = ["node0", "node1"]
SEVERAL = ["ddp_multigpu_proc", "ddp_torchrun_nodes", "long"]  # nodes
JOB_FILE = "spool/slurm_script"  # the name of Slurm's copy
OF_SRUN = """GPUS GRES HINT LABELIO CLUSTERS GPUS_PER_NODE MEM_PER_CPU CPU_BIND_TYPE TRES_PER_TASK
CPUS_PER_GPU NTASKS_PER_GPU NTASKS_PER_CORE TIMELIMIT TRES_BIND GPU_BIND EXACT OVERCOMMIT
DISTRIBUTION THREADS_PER_CORE STDOUTMODE WORKING_DIR NETWORK MEM_BIND HET_SIZE CORE_SPEC MPI_TYPE"""
OF_SRUN = ["SRUN_CPUS_PER_TASK", *(f"SLURM_{name}" for name in OF_SRUN.split())]  # it reads these
CONDA = """module load conda || exit
eval "$(conda shell.bash hook)"
conda deactivate
conda activate NAME || exit
"""
JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "node0",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "SLURM_CPUS_PER_TASK": "16",
}
# The variables in these are a test's.
SRUN = """
echo "srun $*" >> calls
export SLURM_NODEID=0 SLURM_PROCID=0 SLURM_GPUS_ON_NODE=4
while [ "${1#-}" != "$1" ]; do
    if [ "$1" = --jobid ]; then shift; fi
    shift
done
exec "$@"
"""
SCONTROL = """
echo "scontrol $*" >> calls
if [ "$1" = show ]; then
    if [ "$(grep -c "^scontrol show" calls)" -le "${SHOW_FAILS:-0}" ]; then exit 1; fi
    echo "JobId=$SLURM_JOB_ID ${TASK:+ArrayTaskId=$TASK }JobName=long"
    echo "   Requeue=${REQUEUE:-1} Restarts=${RESTARTS:-${SLURM_RESTART_COUNT:-0}} BatchFlag=1"
    echo "   NumNodes=1 NumCPUs=16 NumTasks=1 CPUs/Task=${CPUS:-16}"
    exit
fi
if [ "$(grep -c "^scontrol requeue" calls)" -le "${AWAY:-0}" ]; then
    echo "Unable to contact slurm controller" >&2
    exit 1
fi
if [ -z "$IGNORED" ]; then kill "$BATCH_SHELL"; fi # as Slurm ends a job that it requeues
"""
SQUEUE = """
echo "squeue $* $SLURM_TIME_FORMAT" >> calls
if [ "$(grep -c "^squeue" calls)" -le "${SILENT:-0}" ]; then exit 1; fi
if [ -n "$SQUEUE_STATES$SQUEUE_PARTITION$SLURM_CLUSTERS" ]; then exit; fi # it finds none of these
case $* in
    *PreemptTime*) # the life has begun at 1000
        if [ "$SLURM_TIME_FORMAT" != %s ]; then exit 1; fi
        echo "${PREEMPTED:-N/A}  1000"
        ;;
    *) # until the job of the folder leaves
        if [ "$(grep -c "^squeue" calls)" -gt "${LEAVES:-99}" ]; then UNFINISHED=$SLURM_JOB_ID; fi
        printf "%s\\n" $UNFINISHED
        ;;
esac
"""


def add_command(name, text):
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


class Done:
    """A job file that has run: exit status, log, how it has started a training (if it has), and the
    commands of Slurm that it has called."""

    def __init__(self, status):
        self.status = status
        self.log = Path("log").read_text()
        starts = Path("starts-77")
        last = starts.read_text().splitlines()[-1:] if starts.exists() else []
        self.words, _, self.env = json.loads(last[0]) if last else ([], "", {})
        self.calls = Path("calls").read_text() if Path("calls").exists() else ""
        self.requeues = self.calls.count("scontrol requeue incomplete")

    def failures(self, folder="runs/mine"):
        """Counted in the folder's file `job`, below the job that has it."""
        path = Path(folder, "job")
        return path.read_text().count("\n") - 1 if path.exists() else None


@pytest.fixture
def run(work, monkeypatch):
    """Runs a job file as a job does, by another name, in a clone with a space in its name."""
    folder = work / "my work"
    folder.mkdir()
    stand_in.make_clone(ROOT, folder)
    monkeypatch.chdir(folder)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
        add_command(name, text)
    add_command("scancel", 'echo "scancel $*" >> calls')
    with Path(".venv/bin/activate").open("a") as file:
        file.write('eval "$ACTIVATE"\n')
    add_command(
        "sleep", "case $1 in 15) ;; 600) exec /bin/sleep 1 ;; *) exec /bin/sleep 0.03 ;; esac"
    )
    add_command("timeout", 'echo "timeout $*" >> calls; exec /usr/bin/timeout "$@"')
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)

    def run(name, *flags, log="log", file=JOB_FILE, **environment):
        for path in "starts-77", "calls", "log":
            Path(path).unlink(missing_ok=True)
        Path("log").touch()
        Path("spool").mkdir(exist_ok=True)
        shutil.copy(f"slurm/{name}.sh", "spool/slurm_script")
        subprocess.run(["bash", "-c", environment.pop("BEFORE", "")], check=True)
        if "OWNER" in environment:
            Path("runs/mine").mkdir(parents=True)
            Path("runs/mine/job").write_text(environment.pop("OWNER") + "\n")
        shell = ["bash"]
        if "PROFILE" in environment:
            Path(".bash_profile").write_text(
                f"PATH='{os.environ['PATH']}'; {environment['PROFILE']}"
            )
            environment["HOME"] = str(folder)
            shell.append("-l")
        words = ["bash", "-c", 'BATCH_SHELL=$$ exec "$@"', "bash", *shell, file, *flags]
        with open(log, "w") as output:
            options = {"stdout": output, "stderr": output, "start_new_session": True}
            job = subprocess.Popen(words, env=os.environ | JOB | environment, **options)
        try:
            return Done(job.wait(120))
        finally:  # a training that stands still
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    return run


# ---- All files


@pytest.mark.parametrize("name", FILES)
def test_each_file(run, name):
    """It passes on flags and the exit status. On several nodes it has all CPUs of the job, and no
    settings of another. Its folder is its own, which its next start finds again, or the user's.
    With fewer GPUs than granted, or without an environment, it does not train."""
    inherited = dict.fromkeys(OF_SRUN, "1")
    mine = ["runs/mine"] if name == "long" else ["--output", "runs/mine"]
    done = run(name, *mine, "--lr", "a b", TRAIN="exit(4)", **inherited)
    assert done.status == 4 and {"--lr", "a b"} <= {*done.words}, done.log
    folders = [word for before, word in zip(done.words, done.words[1:]) if before == "--output"]
    assert folders[-1] == "runs/mine" and ("--resume" in done.words) == (name[:4] != "node")
    if name in SEVERAL:
        options = (
            "--nodes=1 --ntasks=1 --cpus-per-task=16 --export=ALL --kill-on-bad-exit=1 --wait=0"
        )
        assert {*options.split()} <= {*done.calls.split()}
        assert not inherited.keys() & done.env.keys()
    done = run(name, *mine, TORCH="gpus = 3", PYTHONOPTIMIZE="1")
    assert done.status and "torch can use only 3 of 4 GPUs" in done.log and not done.words
    assert "timeout -k 60 900 " in done.calls  # a GPU may also hang
    Path(".venv/bin/activate").unlink()
    done = run(name, *mine)
    assert done.status == 1 and "No such file or directory" in done.log and not done.words


@pytest.mark.parametrize("name", [name for name in FILES if name not in SEVERAL])
def test_one_node_of_several(run, name):
    done = run(name, SLURM_NNODES="4")
    assert done.status == 2 and f"{name}.sh is for one node" in done.log and not done.words


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("long", *PAIR)])
def test_a_number_that_was_there_before(run, name):
    """A simple file continues its own run when it is requeued, and no older job's."""
    assert run(name, TRAIN="save()").words
    assert run(name, SLURM_RESTART_COUNT="1").words
    done = run(name)
    assert done.status == 2 and "runs/77 is of an older job" in done.log and not done.words


def test_all_files_are_on_the_page():
    page = (SLURM / "README.md").read_text()
    names = {path.name for path in SLURM.glob("*.sh")}
    assert names and names == set(re.findall(r"\[(\w+\.sh)\]\(\1\)", page))


@pytest.mark.slow
def test_ports(run):
    """Two jobs on a node do not share one, nor two starts of a job; the two of a pair do."""
    for name in "ddp_spawn", "ddp_multigpu_proc", "ddp_torchrun_nodes", "long":
        for restarts, port in ("0", 10077), ("1", 11074):
            words = " ".join(run(name, "runs/mine", SLURM_RESTART_COUNT=restarts).words)
            assert re.search(rf":{port}\b|port {port}\b", words), words
    pair = [run(name).words for name in PAIR]
    assert pair[0][3] == pair[1][3] == f"tcp://node0:{10000 + os.getuid() % 20000}"
    edit("slurm/node1.sh", "script=train_ddp_spawn.py #", "script=train_ddp_multigpu_proc.py #")
    assert run("node1").words[1] == "train_ddp_multigpu_proc.py"


@pytest.mark.parametrize("name", some_fast(FILES, "long", "ddp_torchrun"))
def test_conda(run, name):
    """By a file's other lines. An environment that is active at the login is left first: it would
    be activated again in its old place in PATH."""
    text = Path(f"slurm/{name}.sh").read_text()
    text = re.sub(r"^source .*\n", "", text, flags=re.M)
    text = re.sub(r"^# ((module load|eval|conda) .*)", r"\1", text, flags=re.M)
    assert CONDA in re.sub(" # what .*", "", text)
    Path(f"slurm/{name}.sh").write_text(text)
    module = {"BASH_FUNC_module%%": '() { [ "$*" = "load conda" ]; }'}
    function = 'conda() { case "$*" in deactivate) inactive=1 ;; "activate NAME") '
    function += '[ $inactive ] && PATH="$PWD/.venv/bin:$PATH" ;; esac; }'
    add_command("conda", f"echo '{function}'")
    done = run(name, "runs/mine", "--lr", "a b", **module)
    assert done.status == 0 and "a b" in done.words, done.log


@pytest.mark.parametrize("name", some_fast(FILES, "long", "ddp_torchrun"))
def test_container(run, name):
    """As long.sh and the page say: without `source`, and before all that srun starts."""
    add_command("apptainer", 'export PATH="$PWD/.venv/bin:$PATH" CONTAINER=1; shift 5; exec "$@"')
    [container] = re.findall(r"`source`: \((.*)\)", Path("slurm/long.sh").read_text())
    text = re.sub(r"^source .*\n", "", Path(f"slurm/{name}.sh").read_text(), flags=re.M)
    if name == "long":
        text = text.replace("container=()", f"container=({container})")
    started = r'^((?:timeout \S+ \S+ \S+ )?(?:srun "\$\{options\[@\]\}" )?)(python|torchrun|bash) '
    text = re.sub(started, rf"\1{container} \2 ", text, flags=re.M)
    Path(f"slurm/{name}.sh").write_text(text)
    done = run(name, "runs/mine", "--lr", "a b")
    assert done.status == 0 and "a b" in done.words and "CONTAINER" in done.env, done.log


# ---- long.sh: one life

EARLIER, NOW = "900", "2000"  # the life has begun at 1000
KILL = "import os, signal; os.kill(int(os.environ['BATCH_SHELL']), signal.{})"
SAVED = {"BEFORE": "mkdir -p runs/mine; echo x > runs/mine/checkpoint.pt; /bin/sleep 0.1"}
LIVES = {  # environment, exit status, what the log says, requeues, failures in runs/mine/job
    "ends well": ({"TRAIN": "save()"}, 0, "life 1 of 8, in runs/mine, on node0", 0, 0),
    "ends well, and never saves": ({}, 0, "no checkpoint.pt there yet: starts new", 0, 0),
    "saves, then fails": ({"TRAIN": "save(); exit(3)"}, -15, "life 1", 1, 0),
    "saves, then fails with 99": ({"TRAIN": "save(); exit(99)"}, -15, "life 1", 1, 0),
    "saves a copy with an old date": (
        {"TRAIN": "import os; save(); os.utime('runs/mine/checkpoint.pt', (1, 1)); exit(3)"},
        -15,
        "life 1",
        1,
        0,
    ),
    "fails at once, the first time": (
        {"TRAIN": "exit(3)"},
        3,
        "the training failed with status 3: within a minute, and there is no checkpoint.pt yet",
        0,
        0,
    ),
    "an empty file": ({"TRAIN": "save(text=''); exit(3)"}, 3, "within a minute", 0, 0),
    "fails at once, later": ({"TRAIN": "exit(3)"} | SAVED, -15, "life 1", 1, 1),
    "the GPU check fails, the first time": (
        {"TORCH": "broken = 2"},
        1,
        "the GPU check failed with status 1: within a minute",
        0,
        0,
    ),
    "the GPU check fails, later": ({"TORCH": "broken = 2"} | SAVED, -15, "off the bus", 1, 1),
    # warned
    "warned while the environment is activated": (
        {"ACTIVATE": "kill -USR1 $$", "TRAIN": "save(); stand()"},
        -15,
        "warned of",
        1,
        0,
    ),
    "warned in the check": (
        {"TORCH": KILL.format("SIGUSR1"), "TRAIN": "save(); stand()"},
        -15,
        "warned of",
        1,
        0,
    ),
    "warned, saved": ({"TRAIN": "save(); warn(); stand()"}, -15, "warned of", 1, 0),
    "warned twice": ({"TRAIN": "save(); warn(); warn(); stand()"}, -15, "warned of", 1, 0),
    "warned, saves later": (
        {"TRAIN": "warn(); time.sleep(0.5); save(); stand()"},
        -15,
        "warned of",
        1,
        0,
    ),
    "warned, ends well": ({"TRAIN": "warn(); time.sleep(0.5)"}, 0, "warned of", 0, 0),
    "warned, fails": (
        {"TRAIN": "warn(); time.sleep(0.5); exit(5)"},
        5,
        "status 5: within a minute",
        0,
        0,
    ),
    "warned, never saves, ended at the limit": (
        {"TRAIN": "warn(); time.sleep(0.5); " + KILL.format("SIGTERM")},
        -15,
        "warned of",
        0,
        0,
    ),
    "warned while it is requeued": (
        {"IGNORED": "1", "TRAIN": "save(); warn(); time.sleep(0.5); warn()"},
        0,
        "warned of",
        1,
        0,
    ),
    # cancelled
    "cancelled while the environment is activated": ({"ACTIVATE": "kill $$"}, -15, "", 0, None),
    "cancelled": ({"TRAIN": "save(); " + KILL.format("SIGTERM") + "; stand()"}, -15, "", 0, 0),
    # preempted
    "preempted": ({"TRAIN": "warn(); stand()", "PREEMPTED": NOW}, -15, "warned of", 1, 0),
    "preempted by SIGTERM alone": ({"TRAIN": "exit(1)", "PREEMPTED": NOW}, -15, "life 1", 1, 0),
    "preempted in the check": (
        {"TORCH": "raise SystemExit(143)", "PREEMPTED": NOW},
        -15,
        "life 1",
        1,
        0,
    ),
    "warned of it in the check": (
        {"TORCH": KILL.format("SIGUSR1") + "; raise SystemExit(143)", "PREEMPTED": NOW},
        -15,
        "life 1",
        1,
        0,
    ),
    "preempted, saves at SIGTERM and ends": (
        {"TRAIN": "save()", "PREEMPTED": NOW},
        0,
        "life 1",
        0,
        0,
    ),
    "preempted earlier": ({"TRAIN": "exit(1)", "PREEMPTED": EARLIER}, 1, "within a minute", 0, 0),
    "preempted while squeue is away": (
        {"TRAIN": "exit(1)", "PREEMPTED": NOW, "SILENT": "5"},
        -15,
        "life 1",
        1,
        0,
    ),
    # the controller
    "away at the start": ({"SHOW_FAILS": "2"}, 0, "life 1", 0, 0),
    "away at the requeue": ({"TRAIN": "save(); exit(3)", "AWAY": "2"}, -15, "Unable to", 3, 0),
    "away at the warning": (
        {"TRAIN": "save(); warn(); stand()", "AWAY": "61"},  # longer than it asks at a time
        -15,
        "warned of",
        62,
        0,
    ),
    "away for ever": (
        {"TRAIN": "save(); exit(3)", "AWAY": "99"},
        3,
        "failed with status 3: Slurm does not requeue it",
        60,
        0,
    ),
    "not ended": ({"TRAIN": "save(); exit(3)", "IGNORED": "1"}, 3, "does not requeue it", 1, 0),
    "requeueing is forbidden": ({"REQUEUE": "0"}, 2, "Slurm may not requeue this job", 0, None),
    # what it inherits
    "restarts of the job in which it was submitted": (
        {"SLURM_RESTART_COUNT": "15", "RESTARTS": "0", "TRAIN": "exit(life)"},
        0,
        "life 1 of 8",
        0,
        0,
    ),
    "CDPATH": ({"CDPATH": "/tmp:.", "TRAIN": "save(); exit(3)"}, -15, "life 1", 1, 0),
    "filters of squeue": (
        {"SQUEUE_STATES": "FAILED", "SLURM_CLUSTERS": "other", "TRAIN": "exit(1)"}
        | {"PREEMPTED": NOW},
        -15,
        "life 1",
        1,
        0,
    ),
    "names in use": ({"warned": "yes", "pass_on": "yes"}, 0, "life 1", 0, 0),
    "set -u in the profile": ({"PROFILE": "set -u"}, 0, "life 1", 0, 0),
    "set -e in the profile": ({"PROFILE": "set -e"}, 0, "life 1", 0, 0),
    "noclobber in the profile": (
        {"PROFILE": "set -C", "OWNER": "1 on test", "UNFINISHED": "77"},
        0,
        "life 1",
        0,
        0,
    ),
    # where it runs
    "no environment": ({"ACTIVATE": "return 1"}, 1, "", 0, None),
    "runs/ is on a disk that is away": ({"BEFORE": "ln -s /nowhere runs"}, 1, "mkdir: ", 0, None),
    "the last life": (
        {"RESTARTS": "7", "TRAIN": "save(); exit(3)"},
        3,
        "the training failed with status 3: this was the last of 8 lives",
        0,
        0,
    ),
    "the last life is warned": (
        {"RESTARTS": "7", "TRAIN": "save(); warn(); time.sleep(0.5)"},
        0,
        "warned of",
        0,
        0,
    ),
    "one life more, by Slurm": ({"RESTARTS": "8"}, 2, "this was the last of 8 lives", 0, None),
}
USUAL = "ends well", "saves, then fails", "fails at once, the first time", "warned, saved"


@pytest.mark.parametrize("life", some_fast(LIVES, *USUAL))
def test_life(run, life):
    environment, status, text, requeues, failures = LIVES[life]
    done = run("long", "runs/mine", **environment)
    assert (done.status, done.requeues) == (status, requeues), done.log
    assert text in done.log and done.failures() == failures, done.log
    assert not (done.words and status == 2)  # nothing is trained after a refusal


@pytest.mark.slow
def test_failures_in_a_row(run):
    """Three end the job. A checkpoint begins the count again, also that of a life that Slurm has
    ended; a preemption is no failure; a job submitted by the same command has three again."""
    edit("slurm/long.sh", "lives=8 ", "lives=20 ")
    run("long", "runs/mine", TRAIN="save(); exit(3)")
    lives = "fail", "fail", "preempted", "ended after a save", "fail", "fail", "fail"
    for life, what in enumerate(lives, 1):
        train = {"TRAIN": "exit(3)", "PREEMPTED": NOW if what == "preempted" else "N/A"}
        if what == "ended after a save":
            train = {"TRAIN": "save(); " + KILL.format("SIGTERM") + "; stand()"}
        done = run("long", "runs/mine", RESTARTS=str(life), **train)
        assert done.requeues == (what in ("fail", "preempted") and life < 7), (life, done.log)
    assert done.status == 3 and "three lives in a row without a new checkpoint.pt" in done.log
    done = run("long", "runs/mine", TRAIN="exit(3)", SLURM_JOB_ID="78", UNFINISHED="78")
    assert done.requeues == 1 and done.failures() == 1
    edit("slurm/long.sh", '"$SECONDS" -lt 60', '"$SECONDS" -lt 0')  # not at once
    assert run("long", "runs/new", TRAIN="exit(3)").requeues == 1


@pytest.mark.slow
def test_checkpoints(run):
    """A pattern; the folder of a sharded one counts when it is complete. Any name of FOLDER."""
    edit("slurm/long.sh", "checkpoint=checkpoint.pt ", 'checkpoint="*/.metadata" ')
    for folder in "runs/a 'b' \"c\"/", "runs/[1]*", str(Path("runs/absolute").resolve()):
        done = run("long", folder, TRAIN="save('step 1/rank0.distcp'); exit(3)")
        assert done.requeues == 0, done.log
        done = run("long", folder, "--name", "$(touch x)", TRAIN="save('2/.metadata'); exit(3)")
        assert done.requeues == 1 and "$(touch x)" in done.words, done.log
    assert not Path("x").exists()


@pytest.mark.slow
def test_one_job_per_folder(run):
    """A second one ends while the first waits or runs, while Slurm does not answer, and where Slurm
    cannot know: on another cluster. Once the first is over, it waits for one that Slurm still
    ends."""
    edit("slurm/long.sh", "{1..40}", "{1..4}")
    run("long", "runs/mine", TRAIN="save(); exit(3)")
    for listed in "77 78", "":
        done = run("long", "runs/mine", SLURM_JOB_ID="78", UNFINISHED=listed)
        assert done.status == 2 and "runs/mine is job 77 on test's, which still" in done.log
        assert not done.words and Path("runs/mine/job").read_text() == "77 on test\n"
    done = run("long", "runs/mine", SLURM_CLUSTER_NAME="other")  # which has a job 77, too
    assert done.status == 2 and "if that is over, rm runs/mine/job" in done.log and not done.words
    done = run("long", "runs/mine", SLURM_JOB_ID="78", UNFINISHED="77 78", LEAVES="3")
    assert done.status == 0 and "waits up to 10 minutes for job 77" in done.log
    assert Path("runs/mine/job").read_text() == "78 on test\n"
    take = "open('runs/mine/job', 'w').write('79 on test')"
    done = run("long", "runs/mine", TORCH=take, SLURM_JOB_ID="78")
    assert done.status == 2 and "another job has begun" in done.log and not done.words
    for text in "", "77 on test\nlife 1 has":  # the disk was full
        Path("runs/mine/job").write_text(text)
        assert run("long", "runs/mine", UNFINISHED="77 78").words


@pytest.mark.slow
def test_arrays(run):
    """A folder for each task. The last task has the array's number, which to Slurm is all of its
    tasks. A job that is submitted by a task is no task."""
    train = {"TRAIN": "save(); exit(3)", "SLURM_ARRAY_TASK_ID": "9"}
    edit("slurm/long.sh", "script=(complete/train.py) ", 'script=(a.py "$SLURM_ARRAY_TASK_ID") ')
    for array, requeued in ("77", "77_9"), ("70", "77"):
        done = run("long", "runs/a/%a", SLURM_ARRAY_JOB_ID=array, TASK="9", **train)
        assert f"requeue incomplete {requeued}\n" in done.calls and "9" in done.words
        assert Path("runs/a/9/job").read_text() == f"{requeued} on test\n"
        Path("runs/a/9/job").unlink()
    done = run("long", "runs/a", SLURM_ARRAY_JOB_ID="70", TASK="9", **train)
    assert done.status == 2 and "FOLDER/%a" in done.log and not done.words
    done = run("long", "runs/b", SLURM_ARRAY_JOB_ID="70", **train)
    assert done.requeues == 1 and Path("runs/b/job").read_text() == "77 on test\n"


def test_outside_of_a_job(run):
    """Where no warning would arrive, and without a folder, it says how to call it."""
    for file, words in [
        ("slurm/long.sh", ["runs/mine"]),
        (JOB_FILE, []),
        (JOB_FILE, ["--lr", "1"]),
    ]:
        done = run("long", *words, file=file)
        assert done.status == 2 and "usage: sbatch slurm/long.sh FOLDER" in done.log
        assert not done.calls and not Path("runs").exists()


def test_flags(run):
    """The script's own for resuming. On a warning, it gets SIGTERM if it wants to, and is requeued
    when it has ended."""
    edit("slurm/long.sh", '(--resume --output "$folder")', '(--output_dir "$folder")')
    edit("slurm/long.sh", "pass_on=no ", "pass_on=yes ")
    done = run("long", "runs/mine", "--lr", "a b", TRAIN="warn(); time.sleep(0.5); save(); exit(1)")
    assert done.words[-4:] == ["--lr", "a b", "--output_dir", "runs/mine"]
    assert "scancel --signal=TERM 77\n" in done.calls and done.requeues == 1, done.log
    assert done.calls.index("scancel") < done.calls.index("requeue")


@pytest.mark.slow
def test_cpus_and_gpus(run):
    """All CPUs of the job, also where none are asked for. A step has the GPUs of --gres, a whole
    node's job may have more: the log says so."""
    assert "--cpus-per-task=16" in run("long", "runs/mine").calls
    for cpus in "1", "N/A":
        done = run("long", "runs/mine", CPUS=cpus, SLURM_CPUS_PER_TASK="2")
        assert "--cpus-per-task" not in done.calls and "integer" not in done.log
    for name in SEVERAL:
        done = run(name, "runs/mine", SLURM_GPUS_ON_NODE="8")
        assert re.search("job has 8 GPUs .*trains on 4: edit --gres", done.log), done.log
        assert "edit --gres" not in run(name, "runs/mine").log


def test_full_log(run):
    """What cannot be said ends the job all the same."""
    assert run("long", "runs/mine", log="/dev/full", REQUEUE="0").status == 2
    assert not Path("starts-77").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_full_disk(run):
    """At the start, nothing is trained; later, the job ends with the training's status."""
    Path("runs/mine").mkdir(parents=True)

    def mount(inodes):
        options = f"size=8k,nr_inodes={inodes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "runs/mine"], check=True)

    mount(1)
    try:
        done = run("long", "runs/mine")
        assert done.status == 1 and "No space left" in done.log and not done.words
    finally:
        subprocess.run(["umount", "runs/mine"], check=True)
    mount(9)
    try:  # a page for the file `job`, and one for a checkpoint of an earlier job
        Path("runs/mine/checkpoint.pt").write_text("x" * 4096)
        done = run(
            "long", "runs/mine", TRAIN="open('runs/mine/job', 'a').write('x' * 4080); exit(3)"
        )
        assert (done.status, done.requeues) == (3, 0)
        assert "runs/mine/job cannot be written" in done.log
    finally:
        subprocess.run(["umount", "runs/mine"], check=True)


def test_data_on_each_node(run):
    """The page's lines, on a disk whose name has a space; a broken archive does not train."""
    for part in "train", "test":
        Path("my_images", part).mkdir(parents=True)
    subprocess.run("tar -cf my_images.tar -C my_images train test", shell=True, check=True)
    page = (SLURM / "clusters.md").read_text()
    [lines] = re.findall(r"^```bash\n(data=(?:.*\n)*?)```$", page, re.M)
    lines = replaced(lines, "/shared/my_images.tar", "my_images.tar")
    [place] = re.findall("Below `(# .*)`, ", page)
    edit("slurm/long.sh", place, f"{place}\n{lines}")
    disk = Path("a disk").resolve()
    disk.mkdir()
    done = run("long", "runs/mine", SLURM_TMPDIR=str(disk))
    images = Path(done.words[done.words.index("--dataset") + 1])
    assert done.status == 0 and images.is_relative_to(disk), done.log
    assert sorted(path.name for path in images.iterdir()) == ["test", "train"]
    assert re.search("^timeout .* srun .*tar", done.calls, re.M)  # a disk may hang
    done = run("long", "runs/mine", SLURM_TMPDIR=str(disk), TORCH="gpus = 3")
    assert done.status == 1 and "tar -xf" not in done.calls  # nothing before the checks
    Path("my_images.tar").write_bytes(b"?" * 2000)
    done = run("long", "runs/mine", SLURM_TMPDIR=str(disk))
    assert done.status and not done.words and "the data failed with status" in done.log, done.log


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
LOADS_TORCH += "print(1, flush=True); time.sleep(900)"


@pytest.fixture
def processes(run):
    """Of a job, each with what py-spy says of it: two ranks, of which one has only libraries' code
    in its stack; a task of srun's without a stack; what is no rank; and a rank of another job."""
    job = str(7_000_000 + os.getpid())
    unset = "$SLURM_LABELIO$SLURM_GRES$SLURM_CPUS_PER_TASK$SLURM_MEM_PER_NODE"
    add_command(
        "srun", f"[ ! {unset} ] || exit\nexport SLURM_JOB_ID={job} SLURMD_NODENAME=node0\n{SRUN}"
    )
    add_command("squeue", f'echo "{job} 1 {job}"')
    add_command("sleep", "")
    add_command("py-spy", PY_SPY)
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
    start("torchrun", STACK, ".venv/bin/torchrun", "--nnodes")
    start("other job", STACK, SLURM_JOB_ID=job + "1")
    yield job, started
    for process in started.values():
        process.kill()
        process.wait()


def test_where(processes, monkeypatch):
    """A line for each rank, also if called within another job; without Slurm, too. --abort ends the
    ranks, and nothing else."""
    job, started = processes
    for name in "LABELIO", "GRES", "CPUS_PER_TASK", "MEM_PER_NODE":
        monkeypatch.setenv(f"SLURM_{name}", "1")

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
    assert {process.wait(LIMIT) for process in ended} == {-signal.SIGABRT}
    assert started.pop("ends meanwhile").wait(LIMIT) == -signal.SIGKILL
    assert {process.poll() for process in started.values()} == {None}


def test_where_of_an_array(run):
    """It names the tasks that run."""
    add_command("squeue", r'printf "80 1 77_1\n77 2 77_9\n"')
    done = subprocess.run(["bash", "slurm/where.sh", "77"], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and not list(Path().glob("where-*"))
    assert done.stderr.splitlines()[-2:] == ["bash slurm/where.sh 77_1", "bash slurm/where.sh 77_9"]


def test_where_on_a_terminal(run):
    """Neither srun nor what it starts is stopped, nor reads what is typed."""
    add_command("py-spy", "")
    add_command("squeue", 'echo "77 1 77"')
    add_command("srun", 'echo "srun $*" >> calls; stty sane < /dev/tty; echo "RANK=0 ok x"')
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("bash", ["bash", "slurm/where.sh", "77"])
    state = Path(f"/proc/{child}/stat")
    assert wait_until(lambda: state.read_text().split()[2] == "Z")
    os.waitpid(child, 0)
    os.close(terminal)
    assert "--input=none" in Path("calls").read_text()

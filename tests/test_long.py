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
from helpers import ROOT, some_fast, wait_until
from runs import replaced

SLURM = ROOT / "slurm"
FILES = sorted(path.stem for path in SLURM.glob("*.sh") if path.stem != "where")
PAIR = ["node0", "node1"]
SEVERAL = ["ddp_multigpu_proc", "ddp_torchrun_nodes", "long"]  # nodes
CONDA = """module load conda || exit
eval "$(conda shell.bash hook)"
conda deactivate
conda activate NAME || exit
"""
JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "node0",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "SLURM_CPUS_PER_TASK": "16",
}
# The variables in these are a test's. A step is refused so many times, as by a busy controller.
SRUN = """
echo "srun $*" >> calls
if [ "$(grep -c "^srun .*torchrun" calls)" -gt 0 ] && [ "${BUSY:-0}" -gt 0 ]; then
    if [ "$(grep -c "^srun .*torchrun" calls)" -le "$BUSY" ]; then exit "$SLURM_EXIT_ERROR"; fi
fi
while [ "${1#-}" != "$1" ]; do
    if [ "$1" = --jobid ]; then shift; fi
    shift
done
exec "$@"
"""
SCONTROL = """
echo "scontrol $*" >> calls
if [ "$1" = show ]; then echo "Requeue=${REQUEUE:-1}"; exit; fi
if [ "$(grep -c "^scontrol requeue" calls)" -le "${AWAY:-0}" ]; then
    echo "Unable to contact slurm controller" >&2
    exit 1
fi
if [ -z "$IGNORED" ]; then kill "$BATCH_SHELL"; fi # as Slurm ends a job that it requeues
"""
SQUEUE = """
echo "squeue $* $SLURM_TIME_FORMAT" >> calls
if [ "$(grep -c "^squeue" calls)" -le "${SILENT:-0}" ]; then exit 1; fi
case $* in
    *PreemptTime*) # the life has begun at 1000
        if [ "$SLURM_TIME_FORMAT" != %s ]; then exit 1; fi
        echo "${PREEMPTED:-N/A}  1000"
        ;;
    *%l*) echo 1-00:00:00 ;;
    *) # until the job of the folder leaves
        if [ "$(grep -c "^squeue" calls)" -gt "${LEAVES:-99}" ]; then UNFINISHED=$SLURM_JOB_ID; fi
        printf "%s\\n" $UNFINISHED
        ;;
esac
"""


def command(name, text):
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def edit(path, *changes):
    """Changes: what stands there, its replacement, and so on."""
    Path(path).write_text(replaced(Path(path).read_text(), *changes))


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


@pytest.fixture
def run(work, monkeypatch):
    """Runs a job file as a job does, by another name, in a clone with a space in its name."""
    folder = work / "my work"
    folder.mkdir()
    stand_in.make_clone(ROOT, folder)
    monkeypatch.chdir(folder)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
        command(name, text)
    command("sleep", 'if [ "$1" != 15 ]; then exec /bin/sleep 0.03; fi')
    command("timeout", 'echo "timeout $*" >> calls; exec /usr/bin/timeout "$@"')
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)

    def run(name, *flags, log="log", file="spool/slurm_script", **environment):
        for path in "starts-77", "calls", "log":
            Path(path).unlink(missing_ok=True)
        Path("log").touch()
        Path("spool").mkdir(exist_ok=True)
        shutil.copy(f"slurm/{name}.sh", "spool/slurm_script")
        words = ["bash", "-c", 'BATCH_SHELL=$$ exec bash "$@"', "bash", file, *flags]
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


def lines(folder="runs/77"):
    """Of the file `job`: the job that has the folder, and its counted requeues."""
    path = Path(folder, "job")
    return path.read_text().count("\n") if path.exists() else 0


# ---- All files


@pytest.mark.parametrize("name", FILES)
def test_each_file(run, name):
    """It passes on flags and the exit status. On several nodes it has all CPUs of the job, and no
    settings of another. Its folder is its own, which its next start finds again, or the user's.
    With fewer GPUs than granted, or without an environment, it does not train."""
    inherited = {"SLURM_GPUS": "1", "SLURM_GRES": "x", "SLURM_HINT": "x", "SLURM_LABELIO": "1"}
    inherited |= {"SLURM_GPUS_PER_NODE": "1", "SLURM_MEM_PER_CPU": "1", "SLURM_CPU_BIND_TYPE": "x"}
    inherited |= {"SLURM_TRES_PER_TASK": "gpu:1", "SLURM_CPUS_PER_GPU": "1", "SLURM_CLUSTERS": "x"}
    inherited |= {"SLURM_NTASKS_PER_GPU": "1"}
    mine = ["--lr", "a b", "--output", "runs/mine"]
    done = run(name, *mine, TRAIN="exit(4)", **inherited)
    assert done.status == 4 and {*mine} <= {*done.words}, done.log
    folders = [word for before, word in zip(done.words, done.words[1:]) if before == "--output"]
    assert folders[-1] == "runs/mine" and ("--resume" in done.words) == (name[:4] != "node")
    if name in SEVERAL:
        assert re.search("^srun .*--export=ALL .*--cpus-per-task=16 ", done.calls, re.M)
        assert "--kill-on-bad-exit=1" in done.calls and "--wait=0" in done.calls
        assert not inherited.keys() & done.env.keys()
    done = run(name, TORCH="gpus = 3", PYTHONOPTIMIZE="1")
    assert done.status and "torch can use only 3 of 4 GPUs" in done.log and not done.words
    assert "timeout -k 60 900 " in done.calls  # a GPU may also hang
    Path(".venv/bin/activate").unlink()
    done = run(name)
    assert done.status == 1 and "No such file or directory" in done.log and not done.words


@pytest.mark.parametrize("name", [name for name in FILES if name not in SEVERAL])
def test_one_node_of_several(run, name):
    done = run(name, SLURM_NNODES="4")
    assert done.status == 2 and f"{name}.sh is for one node" in done.log and not done.words


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("long", *PAIR)])
def test_requeued_for_ever(run, name):
    """A simple file ends when it has often been started, as a job that makes nodes fail."""
    assert run(name, SLURM_RESTART_COUNT="9").words
    done = run(name, SLURM_RESTART_COUNT="10")
    assert done.status == 2 and "sacct -D -j 77" in done.log and not done.words


def test_ports(run):
    """Two jobs on a node do not share one; the two of a pair do."""
    for name in "ddp_spawn", "ddp_multigpu_proc", "ddp_torchrun_nodes", "long":
        words = " ".join(run(name).words)
        assert re.search(r":10077\b|port 10077\b", words), words
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
    command("conda", f"echo '{function}'")
    done = run(name, "--lr", "a b", **module)
    assert done.status == 0 and "a b" in done.words, done.log


@pytest.mark.parametrize("name", some_fast(FILES, "long", "ddp_torchrun"))
def test_container(run, name):
    """As long.sh and the page say: without `source`, and before all that srun starts."""
    command("apptainer", 'export PATH="$PWD/.venv/bin:$PATH" CONTAINER=1; shift 5; exec "$@"')
    [container] = re.findall(r"`source`: \((.*)\)", Path("slurm/long.sh").read_text())
    text = re.sub(r"^source .*\n", "", Path(f"slurm/{name}.sh").read_text(), flags=re.M)
    if name == "long":
        text = text.replace("container=()", f"container=({container})")
    started = r'^((?:timeout \S+ \S+ \S+ )?(?:srun "\$\{options\[@\]\}" )?)(python|torchrun|bash) '
    text = re.sub(started, rf"\1{container} \2 ", text, flags=re.M)
    Path(f"slurm/{name}.sh").write_text(text)
    done = run(name, "--lr", "a b")
    assert done.status == 0 and "a b" in done.words and "CONTAINER" in done.env, done.log


# ---- long.sh: one life

EARLIER, NOW = "900", "2000"  # the life has begun at 1000
LIVES = {  # environment, exit status, what the log says, requeues, lines in runs/77/job
    "ends well": ({"TRAIN": "save()"}, 0, "life 1 of 5, in runs/77, on node0", 0, 1),
    "a new folder": ({}, 0, "no checkpoint.pt there yet: starts new", 0, 1),
    "cost": ({}, 0, "x 1-00:00:00 x 4 GPUs = 480 GPU hours, preemptions aside; in an array", 0, 1),
    "saves, then fails": ({"TRAIN": "save(); exit(3)"}, -15, "life 1", 1, 2),
    "fails": ({"TRAIN": "exit(3)"}, 3, "ends with status 3: no new checkpoint.pt in", 0, 1),
    "an empty file": ({"TRAIN": "save(text=''); exit(3)"}, 3, "no new", 0, 1),
    "warned, saved": ({"TRAIN": "save(); warn(); stand()"}, -15, "warned of", 1, 2),
    "warned, saves later": (
        {"TRAIN": "warn(); time.sleep(0.5); save(); stand()"},
        -15,
        "not requeued so far: no new checkpoint.pt",
        1,
        2,
    ),
    "warned, ends well": ({"TRAIN": "warn(); time.sleep(0.5)"}, 0, "so far: no new", 0, 1),
    "warned, fails": ({"TRAIN": "warn(); time.sleep(0.5); exit(5)"}, 5, "status 5: no new", 0, 1),
    "warned in the check": (
        {"TORCH": "import os; os.kill(int(os.environ['BATCH_SHELL']), 10)", "TRAIN": "stand()"}
        | {"PREEMPTED": NOW},
        -15,
        "warned of",
        1,
        1,
    ),
    "preempted": ({"TRAIN": "warn(); stand()", "PREEMPTED": NOW}, -15, "warned of", 1, 1),
    "preempted by SIGTERM alone": ({"TRAIN": "exit(1)", "PREEMPTED": NOW}, -15, "life 1", 1, 1),
    "preempted earlier": ({"TRAIN": "exit(1)", "PREEMPTED": EARLIER}, 1, "no new", 0, 1),
    "squeue fails five times": (
        {"TRAIN": "exit(1)", "PREEMPTED": NOW, "SILENT": "5"},
        -15,
        "life 1 of 5",
        1,
        1,
    ),
    "the step is refused": ({"TRAIN": "save()", "BUSY": "2"}, 0, "life 1", 0, 1),
    "the step is refused for ever": ({"TRAIN": "save()", "BUSY": "9"}, 99, "no new", 0, 1),
    "slurmctld is away": ({"TRAIN": "save(); exit(3)", "AWAY": "2"}, -15, "Unable to", 3, 2),
    "away at the warning": (
        {"TRAIN": "save(); warn(); stand()", "AWAY": "61"},  # longer than it asks at a time
        -15,
        "so far: Slurm does not requeue it",
        62,
        2,
    ),
    "away for ever": ({"TRAIN": "save(); exit(3)", "AWAY": "99"}, 3, "does not requeue", 60, 2),
    "not ended": ({"TRAIN": "save(); exit(3)", "IGNORED": "1"}, 3, "does not requeue", 1, 2),
    "requeueing is forbidden": ({"REQUEUE": "0"}, 2, "Slurm may not requeue this job", 0, 0),
    "a GPU is broken": (
        {"TORCH": "broken = 2"},
        2,
        "sbatch --exclude=NODE slurm/long.sh FLAGS --output runs/77",
        0,
        1,
    ),
    "CDPATH": ({"CDPATH": "/tmp:.", "TRAIN": "exit(3)"}, 3, "no new checkpoint.pt", 0, 1),
    "names in use": (
        {"preempted": "yes", "warned": "yes", "counted": "yes", "TRAIN": "exit(3)"},
        3,
        "no new checkpoint.pt",
        0,
        1,
    ),
    "started too often": ({"SLURM_RESTART_COUNT": "15"}, 2, "submit it again with", 0, 0),
    "started often": ({"SLURM_RESTART_COUNT": "14", "TRAIN": "save()"}, 0, "life 1 of 5", 0, 1),
}


WAITING = "away at the warning", "away for ever"  # some seconds


@pytest.mark.parametrize("life", some_fast(LIVES, *(life for life in LIVES if life not in WAITING)))
def test_life(run, life):
    environment, status, text, requeues, count = LIVES[life]
    done = run("long", **environment)
    assert (done.status, done.requeues, lines()) == (status, requeues, count), done.log
    assert text in done.log
    assert not (done.words and status == 2)  # nothing is trained after a refusal


def test_lives(run):
    """Each is counted that has saved, and the last one ends the job, also with a warning: it then
    trains on until its limit. Which checkpoint is new is a matter of this life alone."""
    edit("slurm/long.sh", "lives=5", "lives=3")
    save, fail = "save(); exit(3)", "exit(3)"
    for life, (train, count) in enumerate([(save, 2), (fail, 2), (save, 3), (save, 3)]):
        done = run("long", TRAIN=train, SLURM_RESTART_COUNT=str(life))
        assert done.requeues == (train == save and life < 3) and lines() == count, done.log
    assert "ends with status 3: this was the last of 3 lives" in done.log
    done = run("long", TRAIN="save(); warn(); time.sleep(0.5)")
    assert done.status == 0 and done.log.count("this was the last of 3 lives") == 1
    assert "starts new" not in done.log
    done = run("long", PREEMPTED=NOW, TRAIN=fail)  # which is not counted
    assert done.requeues == 1 and lines() == 3
    assert re.search(r"^77\nlife 0 is requeued, .*\nlife 2", Path("runs/77/job").read_text())


def test_checkpoints(run):
    """A pattern; the folder of a sharded one counts when it is complete."""
    edit("slurm/long.sh", "checkpoint=checkpoint.pt", 'checkpoint="*/.metadata"')
    assert run("long", TRAIN="save('step 1/rank0.distcp'); exit(3)").requeues == 0
    assert run("long", TRAIN="save('step 1/.metadata'); exit(3)").requeues == 1
    assert run("long", TRAIN="exit(3)").requeues == 0


def test_one_job_per_folder(run):
    """A second one ends while the first waits or runs, and while Slurm does not answer. Once the
    first is over, the second begins with all its lives: it waits for one that Slurm still ends."""
    mine = ["--output=runs/my run"]
    edit("slurm/long.sh", "{1..40}", "{1..4}")
    run("long", *mine, TRAIN="save(); exit(3)")
    done = run("long", *mine, SLURM_JOB_ID="78", UNFINISHED="77 78", LEAVES="3")
    assert done.status == 0 and "waits up to 10 minutes for job 77" in done.log
    assert Path("runs/my run/job").read_text() == "78\n"
    Path("runs/my run/job").write_text("77\nlife 0 is requeued\n")
    for listed in "77 78", "":
        done = run("long", *mine, SLURM_JOB_ID="78", UNFINISHED=listed)
        assert done.status == 2 and "runs/my run is job 77's, which still" in done.log
        assert "torchrun" not in done.calls and lines("runs/my run") == 2
    done = run("long", *mine, SLURM_JOB_ID="78", UNFINISHED="78")
    assert done.status == 0 and Path("runs/my run/job").read_text() == "78\n"
    done = run("long", *mine, TORCH="open('runs/my run/job', 'w').write('79')", UNFINISHED="77")
    assert done.status == 2 and "another job has begun" in done.log and not done.words


def test_arrays(run):
    """The last task has the array's number, which to Slurm is all of its tasks."""
    train = {"TRAIN": "save(); exit(3)", "SLURM_ARRAY_TASK_ID": "9"}
    edit("slurm/long.sh", "script=(complete/train.py)", 'script=(a.py "$SLURM_ARRAY_TASK_ID")')
    for array, requeued in ("77", "77_9"), ("70", "77"):
        done = run("long", SLURM_ARRAY_JOB_ID=array, **train)
        assert f"requeue incomplete {requeued}\n" in done.calls and "9" in done.words
        assert Path("runs/77/job").read_text().startswith(f"{requeued}\n")
        Path("runs/77/job").unlink()


def test_outside_of_a_job(run, monkeypatch):
    """It prints what a life would run, and what all may cost, as on the page for its edits, and
    starts and writes nothing."""
    file = {"file": "slurm/long.sh"}
    edit("slurm/long.sh", "time=04:00:00", "time=24:00:00", "lives=5", "lives=8")
    [cost] = re.findall("`(at most .* GPU hours)`", (SLURM / "README.md").read_text())
    assert cost in run("long", **file).log
    edit("slurm/long.sh", "gres=gpu:4 ", "gres=gpu:a100:8 ", "time=24:00:00", "time=1-12:30:00")
    edit("slurm/long.sh", "--nodes=1", "--nodes=2", "task=16", "task=32")
    inside = run("long", "--lr", "a b", **file)  # a terminal of another job, such as Jupyter's
    monkeypatch.setattr(sys.modules[__name__], "JOB", {})
    done = run("long", "--lr", "a b", **file)
    assert done.status == 0 and not done.calls and not Path("runs").exists()
    assert not inside.calls and inside.log == done.log
    assert "srun --nodes=2 --ntasks=2 " in done.log and "--cpus-per-task=32 " in done.log
    assert "complete/train.py --lr a\\ b --resume --output runs/JOBID" in done.log
    assert "at most 8 lives x 1-12:30:00 x 16 GPUs = 4672 GPU hours" in done.log
    edit("slurm/long.sh", "#SBATCH --gres=", "#SBATCH --gpus-per-node=")
    assert "for the cost, lines #SBATCH must have" in run("long", **file).log


def test_a_header_for_a_cluster(run):
    """With results on scratch, the page's next job finds the folder of the one before."""
    [code] = re.findall(
        r"^```sh\n(account=(?:.*\n)*?)```$", (SLURM / "clusters.md").read_text(), re.M
    )
    subprocess.run(["bash", "-c", replaced(code, "=/scratch", f"={Path.cwd().parent}")], check=True)
    run("long", USER="me", TRAIN="save(); exit(3)")
    [line] = re.findall(
        "^ *(sbatch .* --output .*12345 FLAGS)$", Path("slurm/README.md").read_text(), re.M
    )
    command("sbatch", """if [ "$1" = --mail-type=END,FAIL ]; then shift; fi; echo "$3" > folder""")
    subprocess.run(["bash", "-c", line], env=os.environ | {"USER": "me"}, check=True)
    folder = Path("folder").read_text().strip().replace("12345", "77")
    assert Path(folder, "checkpoint.pt").exists()


def test_full_log(run):
    """What cannot be said ends the job all the same."""
    assert run("long", log="/dev/full", REQUEUE="0").status == 2
    assert not Path("starts-77").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_full_disk(run):
    """At the start, nothing is trained; later, the job ends with the training's status."""
    Path("runs/77").mkdir(parents=True)

    def mount(inodes):
        options = f"size=8k,nr_inodes={inodes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "runs/77"], check=True)

    mount(1)
    try:
        done = run("long")
        assert done.status == 1 and "No space left" in done.log and not done.words
    finally:
        subprocess.run(["umount", "runs/77"], check=True)
    mount(9)
    try:  # one page for each file
        done = run("long", TRAIN="open('runs/77/job', 'a').write('x' * 4093); save(); exit(3)")
        assert (done.status, done.requeues) == (3, 0)
        assert "runs/77/job cannot be written" in done.log
    finally:
        subprocess.run(["umount", "runs/77"], check=True)


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
    done = run("long", SLURM_TMPDIR=str(disk))
    images = Path(done.words[done.words.index("--dataset") + 1])
    assert done.status == 0 and images.is_relative_to(disk), done.log
    assert sorted(path.name for path in images.iterdir()) == ["test", "train"]
    assert re.search("^timeout .* srun .*tar", done.calls, re.M)  # a disk may hang
    done = run("long", SLURM_TMPDIR=str(disk), TORCH="gpus = 3")  # nothing before the checks
    assert done.status == 2 and "tar" not in done.calls
    Path("my_images.tar").write_bytes(b"?" * 2000)
    done = run("long", SLURM_TMPDIR=str(disk))
    assert done.status and not done.words, done.log


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
    unset = "$SLURM_LABELIO$SLURM_GRES$SLURM_CPUS_PER_TASK$SLURM_MEM_PER_NODE"
    command(
        "srun", f"[ ! {unset} ] || exit\nexport SLURM_JOB_ID={job} SLURMD_NODENAME=node0\n{SRUN}"
    )
    command("squeue", f'echo "{job} 1 {job}"')
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
    assert {process.wait(30) for process in ended} == {-signal.SIGABRT}
    assert started.pop("ends meanwhile").wait(30) == -signal.SIGKILL
    assert {process.poll() for process in started.values()} == {None}


def test_where_of_an_array(run):
    """It names the tasks that run."""
    command("squeue", r'printf "80 1 77_1\n77 2 77_9\n"')
    done = subprocess.run(["bash", "slurm/where.sh", "77"], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and not list(Path().glob("where-*"))
    assert done.stderr.splitlines()[-2:] == ["bash slurm/where.sh 77_1", "bash slurm/where.sh 77_9"]


def test_where_on_a_terminal(run):
    """Neither srun nor what it starts is stopped, nor reads what is typed."""
    command("py-spy", "")
    command("squeue", 'echo "77 1 77"')
    command("srun", 'echo "srun $*" >> calls; stty sane < /dev/tty; echo "RANK=0 ok x"')
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("bash", ["bash", "slurm/where.sh", "77"])
    state = Path(f"/proc/{child}/stat")
    assert wait_until(lambda: state.read_text().split()[2] == "Z", 30)
    os.waitpid(child, 0)
    os.close(terminal)
    assert "--input=none" in Path("calls").read_text()

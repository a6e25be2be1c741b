"""Files of libraries that write in C, and how a run is started, watched and ended: in forks of this
process, or by parts of ddp_check alone."""

import argparse
import json
import math
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import free_port
from test_ddp_check_cpu import GROUP, START, in_fork, run_line
from test_ddp_check_files import users_content, watched
from test_ddp_check_parts import FakeRuns, notes, of_loader, step_notes
from watched import FACTS, notes_of

from ddp_check import child, command, cpu, launchers, pairs, progress, runs, script
from ddp_check.compare import judge as judging
from ddp_check.compare import starts
from ddp_check.kept import files
from ddp_check.kept.made import Made, as_line, open_path, remove_made, wait_for_end
from ddp_check.notes import PROGRAM, TRIED, Cut, File, Finding, Notes, Printed, Said
from ddp_check.patches import STOPPED
from ddp_check.process import Process
from ddp_check.runs import NothingCompared

# ---- files


@pytest.fixture
def users(work):
    """Files that were there before."""
    np.arange(4000, dtype=np.float32).tofile("data.bin")
    for name in "data.db", "a%20b.db":
        with sqlite3.connect(name) as database:
            database.execute("create table samples (x)")
            database.execute("insert into samples values (1)")
        database.close()
    os.makedirs("images")
    for name in "images/data.mdb", "images.mdb":
        Path(name).write_text("user's")
    Path("empty").touch()
    os.mkfifo("pipe")
    return users_content()


def run_each(users, lines, status, start=""):
    """Nothing of the user's is changed, and all that is made goes."""
    for line in lines.strip().splitlines():
        assert watched(start + line.replace(r" \n ", "\n"))[0] == status, line
        assert not remove_made(str(Path("notes").resolve())), line
        assert users_content() == users, line
        Path("notes/refused").unlink(missing_ok=True)


ALLOWED = r"""
sqlite3.connect("file:data.db?mode=memory", uri=True).execute("create table other (x)")
sqlite3.Connection(":memory:"); sqlite3.Connection("new.db"); c = sqlite3.connect(":memory:"); \
c.execute("attach ? as u", ["data.db"]); c.execute("create table samples (x)")
assert list(sqlite3.Connection("file:data.db?mode=ro", uri=True).execute("select x from samples"))
c = sqlite3.connect("a", uri=True); c.execute("attach 'file:data.db?mode=ro' as u"); \
c.executescript("attach 'b' as n; create table n.samples as select x from u.samples")
mmap.mmap(-1, 9)[0] = 7; open("new.lock", "w").close()
import socket as s; s.socket().bind(("127.0.0.1", 0)); s.socket(s.AF_UNIX).bind(f"\0{os.getpid()}")
try: open("no/folder", "r+") \n except FileNotFoundError: pass \n else: raise SystemExit(7)
os.mkfifo("new"); os.stat("new")
os.open("pipe", os.O_RDWR)
"""


def test_allowed(users):
    run_each(users, ALLOWED.replace("\\\n", ""), 0)


@pytest.mark.slow
def test_safetensors(users):
    """It writes a new file, and gives it the name of the one before."""
    pytest.importorskip("safetensors")
    code = "from safetensors.torch import save_file\n"
    code += "for size in 1, 2: save_file({'a': torch.ones(size)}, 'new')"
    run_each(users, code.replace("\n", r" \n "), 0)


def test_attached(users):
    """A database that is attached to one that is only read is written to."""
    for options in "'data.db'", "'file:data.db?mode=ro', uri=True":
        code = f"c = sqlite3.connect({options}); c.execute(\"attach 'a%20b.db' as u\")\n"
        refused = watched(code + "c.execute('delete from u.samples'); c.commit()")[1]
        assert "would write into a%20b.db, which" in refused
    assert users_content() == users


def test_pragma(users):
    """SQLite does not say that it writes: it fails, as the database is opened to be read."""
    run_each(users, "sqlite3.connect('data.db').execute('pragma user_version = 3')", 1)


def test_words(users):
    for mode, what in {"a": "append to data.bin", "w": "overwrite empty"}.items():
        refused = watched(f"open({what.split()[-1]!r}, {mode!r})")[1]
        assert f"would {what}, which was there before" in refused


def test_map_that_is_read(users):
    code = "file = open('data.bin', 'r+b'); mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[0]"
    assert watched(code)[::2] == (0, "")
    private = code.replace("prot=mmap.PROT_READ)[0]", "flags=mmap.MAP_PRIVATE)[0] = 7")
    assert watched(private)[::2] == (0, "") and users_content() == users


# Stand-ins, which open files unheard, as those in C do
LIBRARIES = {
    "_gdbm": """
import ctypes, os
error, c, HOW = OSError, ctypes.CDLL(None), {"r": 0, "w": 2, "c": 66, "n": 66 | 512}
class open:
    def __init__(self, path, flag="r", mode=0o600):
        self.file = c.open(os.fsencode(path), HOW[flag[0]], mode)
        if self.file < 0:
            raise error("no such file")
    def __setitem__(self, name, value):
        os.write(self.file, value)
""",
    "lmdb": """
import ctypes, os
c = ctypes.CDLL(None)
class Environment:
    def __init__(self, path, map_size=0, subdir=True, readonly=False, lock=True):
        if subdir and not readonly:
            c.mkdir(path.encode(), 0o700)
        data, locks = ("/data.mdb", "/lock.mdb") if subdir else ("", "-lock")
        self.file = c.open((path + data).encode(), 0 if readonly else 66, 0o600)
        if self.file < 0:
            raise OSError("no such file")
        if lock:
            c.open((path + locks).encode(), 66, 0o600)
    def write(self):
        os.write(self.file, b"other")
open = Environment
""",
}
DATABASES = r"""
dbm.gnu.open("data.bin"); dbm.gnu.open("data.bin", "c")
try: dbm.gnu.open("data.bin", "w")["a"] = b"1" \n except OSError: pass
dbm.gnu.open("new", "c")["a"] = b"1"; dbm.gnu.open("new", "w"); dbm.gnu.open("new")
lmdb.open("images", readonly=True); lmdb.open("images.mdb", 99, False); lmdb.Environment("images")
try: lmdb.open("images.mdb", subdir=False).write() \n except OSError: pass
lmdb.open("new").write(); lmdb.open("new2", subdir=False).write(); lmdb.Environment("new")
"""
KILLED = """
open("new", "w").close(); os.kill(os.getpid(), 9)
torch.save(1, "new"); os.kill(os.getpid(), 9)
os.mkfifo("new"); os.kill(os.getpid(), 9)
dbm.gnu.open("new", "n"); os.kill(os.getpid(), 9)
lmdb.open("new"); os.kill(os.getpid(), 9)
"""


@pytest.fixture
def libraries(work, monkeypatch):
    folder = work / "notes" / "libraries"
    folder.mkdir(parents=True)
    for name, text in LIBRARIES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_databases_in_c(libraries, users):
    """The user's are only read; new ones go, also where the script is killed just then."""
    run_each(users, DATABASES, 0, "import dbm.gnu, lmdb\n")
    run_each(users, KILLED, -signal.SIGKILL, "import dbm.gnu, lmdb\n")
    run_each(users, "dbm.gnu.open('data.bin', 'n')", STOPPED, "import dbm.gnu\n")


def test_a_database_that_is_not_there(libraries):
    """Another program may create it later."""
    of_sqlite = "sqlite3.connect('file:missing?mode=ro', uri=True)"
    for opens in "dbm.gnu.open('missing')", of_sqlite:
        code = f"import dbm.gnu\ntry: {opens}\nexcept (OSError, sqlite3.Error): pass\n"
        assert watched(code + "subprocess.run(['touch', 'missing']); open('new', 'w')")[0] == 0
        assert not remove_made(str(Path("notes").resolve()))
        os.remove("missing")


def test_a_folder_with_a_librarys_name(work):
    """It is the user's, and no module."""
    os.mkdir("av"), Path("lmdb.py").touch()
    assert watched("sys.path[0] = os.getcwd(); import av, lmdb; assert av.__path__")[0] == 0


def test_caches(work):
    """As numba's: what is written or moved there stays."""
    os.mkdir("__pycache__")
    Path("__pycache__/train.nbi").write_text("old")
    code = "open('__pycache__/train.nbi', 'w').write('new'); torch.save(1, '__pycache__/a')\n"
    assert watched(code + "torch.save(1, 'new'); os.rename('new', '__pycache__/b')")[0] == 0
    assert not remove_made(str(Path("notes").resolve()))
    assert sorted(os.listdir("__pycache__")) == ["a", "b", "train.nbi"]


def test_another_program_replaces_a_file(work):
    """Then it is not the script's any more, whatever that does next."""
    code = "open('new', 'w').close(); open('other.lock', 'w').close()\n"
    assert watched(code + "subprocess.run(['mv', 'other.lock', 'new']); open('x', 'w')")[0] == 0
    assert len(remove_made(str(Path("notes").resolve()))) == 1


def test_programs_of_a_librarys_thread(work):
    """What it starts is not the script's."""
    code = "thread = threading.Thread(target=subprocess.run, args=(['true'],)); thread.start()"
    assert watched(code + "; thread.join()")[::2] == (0, "")


def test_half_a_line(tmp_path):
    """Of a file that another process is noting just now."""
    made, line = Made(str(tmp_path)), as_line("/new", None, "output")
    for part, found in (line[:9], {}), (line[9:], {"/new": [None, "output"]}):
        with open(made.file, "a") as file:
            file.write(part)
        assert made.update() == found


def test_open_files_on_macos(monkeypatch):
    """Which has no /proc."""
    stand_in = SimpleNamespace(F_GETPATH=50, fcntl=lambda number, what, size: b"/data\0\0")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "fcntl", stand_in)
    assert open_path(3) == "/data"


# ---- processes


def test_waiting_for_processes(monkeypatch):
    """As long as one of them is still there."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    ends = iter([lambda: None, process.kill, process.wait])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(ends)())
    wait_for_end([process.pid])
    assert not list(ends)


def test_what_is_printed(work):
    """By the script itself, not by its threads and forks, whose end is not its own."""
    code = """
import os, threading
thread = threading.Thread(target=print, args=("a thread's",))
thread.start(), thread.join()
fork = os.fork()
if fork == 0:
    print("a fork's", flush=True)
    os._exit(0)
os.waitpid(fork, 0)
print("its own", flush=True)
os.kill(os.getpid(), 9)
"""
    (one,) = notes_of(code)
    assert [(note.text, note.line) for _, note in one[Printed]] == [("its own", "train.py:10")]
    assert not os.path.exists("notes/one.draws")


def test_exit_without_cleanup(work):
    assert notes_of("import os\nos._exit(3)")[0].end() == "os._exit(3)"
    process, said = SimpleNamespace(pid=os.getpid()), []
    process.end, ended = said.append, SimpleNamespace(is_set=lambda: False)
    child.before_exit(process, ended, said.append, 0)
    assert said == ["its end", 0]


def test_where_it_is(work):
    """It is known at once: it may be busy in C, soon after its start."""
    code = """
import os, time
for _ in range(8):
    time.sleep(0.1 * (not os.path.exists("notes/one.0.where")))
print(os.path.exists("notes/one.0.where"))
"""
    assert [note.text for _, note in notes_of(code)[0][Printed]] == ["True"]


def facts_of(**more):
    Path("notes").mkdir(exist_ok=True)
    return FACTS | vars(runs.Options(20)) | {"folder": os.path.abspath("notes"), **more}


def test_other_numbers_of_processes(work):
    args = argparse.Namespace(**facts_of(run="all", spawns=True))
    for number, remedy in {0: "does it count GPUs?", 3: "in a flag, as {n}"}.items():
        assert in_fork(child.check_number, args, number) == STOPPED
        refused = json.loads(Path("notes/refused").read_text())
        assert remedy in refused["remedy"]


def join():
    dist.init_process_group("gloo")
    sys.exit(3)


def start_a_rank():
    os.environ |= runs.environment(0, 1, free_port())
    cpu.install(child.options())
    files.patch(Process("parent"))
    child.control_processes()
    process = multiprocessing.get_context("fork").Process(target=join)
    process.start()
    process.join()
    return process.exitcode


def test_a_rank_that_the_script_starts(work, monkeypatch):
    """By multiprocessing, with its rank in the environment alone."""
    facts = facts_of(run="one", spawns=True, script="train.py")
    monkeypatch.setenv("DDP_CHECK", json.dumps(facts))
    assert in_fork(start_a_rank) == 3
    assert Notes(Path("notes"), "one", 0).end() == "SystemExit 3"


def wait_for_go():
    parents = iter([1])
    os.getppid = lambda: next(parents, 2)
    signal.alarm(9)
    child.child()


def test_the_command_is_killed(work, monkeypatch):
    """Just as it has started a process, which ends then."""
    monkeypatch.setenv("DDP_CHECK", json.dumps(facts_of(run="one")))
    assert in_fork(wait_for_go) == 1


def test_a_rank_that_waits_for_another(work, monkeypatch):
    """One that has failed, silently: then the run ends."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    run = runs.Run(argparse.Namespace(), str(work), "all", 2)
    run.processes = [SimpleNamespace(poll=lambda status=status: status) for status in (None, 1)]
    rounds = iter([False, False, True])
    looked = []
    look = SimpleNamespace(look=lambda: looked.append(1), is_silent=lambda: True, steps=lambda: 0)
    look.hangs = lambda: next(rounds)
    assert run.wait(look, None) == ({1: 1}, None) and looked


def test_the_next_start(work, monkeypatch):
    """After some steps it is asked for once; a file that is refused ends the run."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    run = runs.Run(argparse.Namespace(), str(work), "all", 2)
    run.processes = [SimpleNamespace(poll=lambda: None)] * 2
    look = SimpleNamespace(look=lambda: None, is_silent=lambda: True, hangs=lambda: next(rounds))
    for others, steps in ("options", [0, TRIED]), (None, [0, TRIED, TRIED + 1]):
        rounds, made, asked = iter([False] * len(steps) + [True]), iter(steps), []
        look.steps = lambda made=made: next(made)
        assert run.wait(look, lambda notes: asked.append(notes) or others) == ({}, others)
        assert [len(notes) for notes in asked] == [2]
    Path("refused").touch()
    assert run.wait(look, None) == ({}, None)


def test_progress(work, monkeypatch):
    """That of the rank which is behind; what they say gets old while they are busy in C."""
    now, age, said = [0.0], [0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: os.stat("0.where").st_mtime + age[0])
    run = SimpleNamespace(nproc=2, options=runs.Options(20), say=said.append)
    run.files = lambda suffix: [f"{rank}.{suffix}" for rank in range(2)]
    of_run = progress.Progress(run, "run 1 of 2")
    for seconds, old, texts, noted, steps, moved in (
        (1, 0, [], "", 0, 1),
        (2, 0, ["7 a < train.py:1"], "", 0, 2),
        (3, 0, ["7 a < train.py:1", "2 b < train.py:2"], "", 2, 3),
        (4, 0, ["7 a < train.py:1", "2 b < train.py:2"], "", 2, 3),
        (5, 6, ["7 a < train.py:1", "2 b < train.py:2"], "", 2, 5),
        (6, 0, ["7 a < train.py:1", "2 b < train.py:2"], "new", 2, 6),
        (11, 0, ["7 a < train.py:1", "2 b < train.py:2"], "new", 2, 6),
        (13, 0, ["7 a < train.py:1", "7 b < train.py:2"], "new", 7, 13),
        (23, 0, ["7 a < train.py:1", "7 b < train.py:2"], "new", 7, 13),
    ):
        now[0], age[0] = seconds, old
        for rank, text in enumerate(texts):
            Path(f"{rank}.where").write_text(text)
        Path("1.notes").write_text(noted)
        of_run.look()
        if texts and not noted and not steps:
            assert of_run.where() == "step 0 of 20, 0 s, at train.py:1"
        assert (of_run.steps(), of_run.moved) == (steps, moved), seconds
        assert of_run.is_silent() == (seconds - of_run.noted > 3) == (seconds in (5, 11, 13, 23))
    assert said == [
        "run 1 of 2: step 2 of 20, 11 s, at train.py:1",
        "run 1 of 2: step 7 of 20, 23 s, 52 s to go at most, at train.py:1",
    ]


def test_why_it_failed(work):
    """The rank that has failed by itself, and what it printed but for our lines."""
    ours = f'  File "{script.FOLDER}child.py", line 1, in child\n    run()\n'
    by_torch = "".join(f"[rank1]: {line}\n" for line in ours.splitlines())
    Path("0.log").write_text("rank 0's")
    Path("1.log").write_text(f"step 1\rstep 2\n{ours}{by_torch}killed")
    ends = [SimpleNamespace(end=lambda end=end: end) for end in ("Connection closed", "")]
    run = SimpleNamespace(files=lambda suffix: ["0.log", "1.log"], folder=".")
    for failed, says in {
        ((0, 1), (1, -9)): "rank 1 failed (killed by SIGKILL: is there too little memory?)",
        ((0, 1),): "rank 0 failed (exit status 1)",
        ((1, -15),): "rank 1 failed (killed by SIGTERM)",
    }.items():
        first, *lines = progress.why_it_failed(run, dict(failed), ends).splitlines()
        assert first == f"{says}; it printed:"
        assert lines == (["rank 0's"] if "rank 0" in says else ["step 2", "killed"])
    assert progress.why_it_failed(run, {1: 1}, ends).endswith(
        "(exit status 1); it printed the same"
    )


def test_hangs(work, monkeypatch):
    """Nothing is new for --wait; or only the line is, for ten times as long, as in a loop."""
    now, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = SimpleNamespace(args=argparse.Namespace(wait=60), say=said.append)
    of_run = progress.Progress(run, "run 1 of 2")
    for seconds, moved, hangs in (50, 0, False), (70, 0, True), (90, 80, False), (601, 600, True):
        now[0], of_run.moved = seconds, moved
        assert of_run.hangs() == hangs
    assert said[-1] == "nothing new for 601 s; if it is only slow, --wait 300"


def test_new_outputs(work):
    """Which flag names the folder of a file that was there before."""
    file = str(work / "out" / "model.pt")
    for flags, new in {
        ("--output=", "out"): "out-{run} for out",
        ("--epochs=1", "--output=out"): "--output=out-{run} for --output=out",
        ("--output=",): "as by --output {run}",
    }.items():
        assert new in progress.new_output(file, flags)


# ---- which runs there are


class FakeRun:
    """Gives these results in turn; and makes this file."""

    def __init__(self, *results, file=None):
        self.results, self.started, self.said, self.stopped = list(results), [], [], 0
        self.say, self.file = self.said.append, file

    def start(self, options):
        self.started.append(options)

    def stop(self):
        self.stopped += 1

    def run(self, count, other_options=None):
        result = self.results.pop(0)
        if self.file:
            self.file.touch()
        return result if other_options is None else (result, other_options(result))


@pytest.fixture
def runs_of(tmp_path):
    def make(one, *of_ranks, draws=True, **options):
        found = pairs.Runs.__new__(pairs.Runs)
        found.folder, found.options, found.made = str(tmp_path), runs.Options(20, **options), 0
        found.one = FakeRun(*one, file=tmp_path / "one.draws" if draws else None)
        found.all, found.again = FakeRun(*of_ranks), FakeRun(([1], None))
        return found

    return make


def ended(state, *said):
    """The notes of one process that has made no step, and what a Run gives."""
    programs = [(0, Said("note", PROGRAM + line)) for line in said]
    of = notes((0, Said("note", "float32 is kept")), *programs)
    of.end = lambda: state
    return [of], None


def test_a_script_that_makes_no_step(runs_of):
    """Its end; and if another program may be why, how to check that."""

    def text(*words, draws=True):
        found = runs_of([ended(*words)], [], draws=draws)
        with pytest.raises(pairs.NothingCompared) as error:
            found.pair()
        assert found.one.stopped == found.all.stopped == 1
        return str(error.value)

    line = "train.py:3: subprocess.run(words)"
    assert text("SystemExit 1", line, draws=False) == "on one process: SystemExit 1"
    assert text("SystemExit 1") == "no optimizer.step() on one process; then SystemExit 1"
    starts = f"; does it start its ranks here: {line}? Then check what that starts"
    for state in "SystemExit 1", "os._exit(1)", f"a crash at {line}", f"CalledError at {line}: no":
        assert starts in text(state, line)
    for state in "its end", "a crash at train.py:9: f()", "ImportError at train.py:1: import y: no":
        assert starts not in text(state, line)


def test_how_it_is_started_again(runs_of, tmp_path):
    """One process too, but where only the ranks' turns are others; with other batches, if it fails
    with those of all ranks."""
    one = notes(*step_notes())
    for change, number in ({"turns": ["train.py:3", "rand"]}, 1), ({"cuts": False}, 2):
        found, asked = runs_of([([one], None)] * number, "a", "b"), []

        def other_options(options, first, ranks):
            asked.append((first is one, ranks))
            return None if asked[1:] else (replace(options, **change), "why")

        assert found.pair(other_options) == (one, "b") and asked == [(True, "a"), (True, "b")]
        assert found.all.said == ["starts again: why"] and len(found.one.started) == number
        assert found.all.started == [runs.Options(20), replace(runs.Options(20), **change)]
    fails = runs_of([ended("a crash"), ([one], None)], "a", scaled=["loader"])
    assert fails.pair() == (one, "a") and not fails.options.scaled and not fails.options.scales
    assert "the script fails with the batches of all ranks" in fails.all.said[0]
    for name, scaled in ("one.draws", []), ("refused", ["loader"]):
        fails = runs_of([ended("a crash")], "a", scaled=scaled)
        fails.one.file = tmp_path / name
        with pytest.raises(pairs.NothingCompared):
            fails.pair()


def test_further_runs(runs_of, tmp_path):
    """With the values of lines, of so many steps; and one more on one process."""
    one = notes(*step_notes())
    ranks = [one, one]
    found = runs_of([([one], None)], ranks)
    assert found.lines(3) == (one, ranks) and found.options == runs.Options(20)
    assert found.one.started == found.all.started == [runs.Options(3, lines=3)]
    assert found.all.said == ["starts again, to name lines: 3 steps"]
    assert found.once_more(2, further=1) == 1 and found.again.started[0].lines == 2
    assert found.made == 3
    (died,), _ = ended("a crash at train.py:3")
    with pytest.raises(pairs.NothingCompared, match="rank 1: a crash at train.py:3"):
        runs_of([([one], None)], [one, died]).lines(3)
    for name in "all.0.notes", "one.0.notes", "made":
        (tmp_path / name).touch()
    pairs.remove_notes(str(tmp_path), "all.")
    assert {path.name for path in tmp_path.iterdir()} == {"one.draws", "one.0.notes", "made"}
    pairs.remove_notes(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


# ---- the command


def test_too_few_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for flags, text in {(): "1 GPU for 2 processes: all run on CPUs", ("--cpu",): ""}.items():
        args = command.parser.parse_args([*flags, "train.py"])
        assert pairs.Runs(args, "nowhere").too_few_gpus == text
    assert set(runs.visible_gpus(2, 2, cpu=True).values()) == {"-1,-1"}
    found = pairs.Runs(args, "nowhere")
    found.one.seconds, found.again.seconds = 1, 2
    assert found.seconds() == {"on one process": 1, "on one process again": 2}


def test_notes_of_a_check():
    """By --noise there is one more run; a batch size per process that a library has cut needs no
    remedy; and it is said that there are too few GPUs."""
    one, ranks = of_loader(4, 4, (0, Cut("loader", 4))), [of_loader(2, 2)] * 2
    found = FakeRuns(one, ranks)
    found.too_few_gpus = "1 GPU for 2 processes"
    args = command.parser.parse_args(["--noise", "train.py"])
    result = command.check(args, found)
    assert found.made == ["pair", "noise"]
    gpus, size = result.findings[:2]
    assert gpus.text == found.too_few_gpus
    assert size.text.endswith("one process was given the samples of all") and not size.remedy


def test_blocks_that_lines_show(monkeypatch):
    """All is checked again, with that layout."""
    options = [runs.Options(20, layout="blocks"), None]
    monkeypatch.setattr(starts, "other_layout", lambda *words: options.pop(0))
    right, wrong = [notes(*step_notes([1, factor])) for factor in (1.0, 1.5)]
    found, said = FakeRuns(right, [wrong, wrong]), []
    found.start_again = lambda *words: said.append(words)
    assert command.check(command.parser.parse_args(["train.py"]), found).of("WRONG")
    assert said == [(runs.Options(20, layout="blocks"), "each rank has a block of a batch")]
    assert found.made.count("pair") == 2 and options == []


def test_rounding_of_outputs(monkeypatch):
    """It is seen in the values of lines: then they are compared with another run on one process,
    unless there was one."""
    results = [mock.Mock(lines=2, may_be_noise=False, may_be_rounding=n > 0) for n in range(3)]
    for result in results:
        result.of.return_value, result.measured = [], [mock.Mock()]
    monkeypatch.setattr(judging, "judge", lambda one, ranks, **known: next(given))
    right = notes(*step_notes())
    for flags, made in {
        (): ["pair", "lines of 2", "noise, lines"],
        ("--noise",): ["pair", "noise, lines", "lines of 2"],
    }.items():
        given, found = iter(results), FakeRuns(right, [right, right])
        assert command.check(command.parser.parse_args([*flags, "train.py"]), found) is results[2]
        assert found.made == made


def test_what_the_command_says(work, monkeypatch, capsys):
    """Of a launcher; of a flag that is missing, if processes may not know that they are ranks; of
    Windows."""
    monkeypatch.setattr(command, "report", lambda args, folder, path: results[0])
    monkeypatch.setattr(script, "START", str(work))
    monkeypatch.setattr(script, "SCRIPT_FOLDER", [""])
    Path("train.py").write_text('parser.add_argument("--local_rank", required=True)')
    question = "does a launcher pass --local_rank?"
    for words, *results, says in (
        ("torchrun --nproc-per-node 2 train.py", (0, ""), "without the launcher: train.py"),
        ("train.py", (1, question), question),
        ("train.py", (1, ""), ""),
    ):
        with pytest.raises(SystemExit):
            command.main(words.split())
        said = capsys.readouterr().err
        assert says in said and ("without" in said) == ("torchrun" in words)
        assert ("does a launcher" in said) == (says == question)
    monkeypatch.delattr(os, "fork")
    with pytest.raises(SystemExit):
        command.main(["train.py"])
    assert "on Windows, WSL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "is_alone"),
    [
        ("on one process: ImportError at a.py:2", (2, False)),
        ("on one process: ImportError at a.py:2: if args.local_rank > 0:", (2, True)),
        ("on one process: SystemExit 2", (2, True)),
        ("by ddp_check itself", (2, True)),
        ("averaging", (1, True)),
        ("random", (1, False)),
    ],
)
def test_what_tells_a_missing_rank(found, is_alone, work, monkeypatch):
    """No error that has nothing to do with it, nor what is WRONG among ranks that communicate."""

    def check(args, runs):
        if " " in found:
            raise ZeroDivisionError if "itself" in found else NothingCompared(found)
        wrong = Finding("WRONG", found, 0, "of all ranks")
        return judging.Result([wrong], 1, 2, {}, math.inf, 0)

    monkeypatch.setattr(command, "check", check)
    Path("train.py").write_text('parser.add_argument("--local_rank")')
    args = command.parser.parse_args(["train.py"])
    status, proposal = command.report(args, str(work), "train.py")
    assert (status, "--local_rank {rank}" in proposal) == is_alone
    note = 0, Said("file", "env.py")  # which reads it from the environment
    Path("one.0.notes").write_bytes(pickle.dumps(note))
    Path("env.py").write_text('os.environ["LOCAL_RANK"]')
    assert command.report(args, str(work), "train.py") == (status, "")


def accelerates_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--num_processes")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def test_accelerate(work, monkeypatch):
    """Its own parser says which words are the script's; of its other commands, none are."""
    for name in "accelerate", "accelerate.commands", "accelerate.commands.launch":
        stand_in = SimpleNamespace(launch_command_parser=accelerates_parser)
        monkeypatch.setitem(sys.modules, name, stand_in)
    for words, module in {
        "accelerate launch --num_processes 2 train --lr 1": False,
        "-m accelerate.commands.launch -m train --lr 1": True,
    }.items():
        args = command.parser.parse_args(words.split())
        launchers.without_launcher(args)
        assert (args.script, args.flags, args.m) == ("train", ["--lr", "1"], module)
    with pytest.raises(launchers.NotSure, match="is this the launcher's command"):
        launchers.without_launcher(command.parser.parse_args(["accelerate", "launch"]))
    with pytest.raises(launchers.NotSure, match="itself, without accelerate"):
        launchers.without_launcher(command.parser.parse_args(["accelerate", "config"]))


def test_launch_without_a_flag(work):
    """torch.distributed.launch passes --local-rank to each script."""
    Path("train.py").write_text("")
    args = command.parser.parse_args(["-m", "torch.distributed.launch", "train.py"])
    launchers.without_launcher(args)
    assert args.flags == ["--local-rank={rank}"]


# ---- the script's files


def test_scripts_in_packages(work, monkeypatch):
    """Of python -m: its file, and the folder whose lines are its own."""
    monkeypatch.setattr(script, "START", str(work))
    monkeypatch.setattr(script, "SCRIPT_FOLDER", [""])
    monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path])
    for name in "single.py", "package/__main__.py", "package/__init__.py", "package/a/train.py":
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for module, file, folder in (
        ("single", "single.py", ""),
        ("package", "package/__main__.py", "package/"),
        ("package.a.train", "package/a/train.py", "package/"),
    ):
        path = script.find_script(argparse.Namespace(m=True, script=module))
        assert (path, script.SCRIPT_FOLDER[0]) == (f"{work}/{file}", f"{work}/{folder}")


def test_a_script_around_python(monkeypatch):
    """As one in the home folder, where Python is, too."""
    monkeypatch.setattr(script, "SCRIPT_FOLDER", [os.sep])
    assert script.is_library(os.__file__) and not script.is_library("/train.py")
    monkeypatch.setattr(script, "SCRIPT_FOLDER", [f"{script.STANDARD[0]}site-packages/package/"])
    assert not script.is_library(f"{script.SCRIPT_FOLDER[0]}train.py")  # as of python -m


# ---- GPUs


def use_gpus():
    torch.cuda.is_available = lambda: True
    said = []
    cpu.install(SimpleNamespace(cpu=False), said.append)
    assert not cpu.MODES and not cpu.needs_gpu(RuntimeError("CUDA error"))


def test_where_there_are_gpus():
    """Nothing is imitated."""
    assert in_fork(use_gpus) == 0


def use_other_torch(text):
    del dist.ProcessGroupNCCL
    run_line(text)


def test_torch_for_cpus_alone(work):
    """Has no options for nccl."""
    group = GROUP.replace("FILE", str(Path("store").resolve()))
    assert in_fork(use_other_torch, START + group) == 0


def test_written_files(work):
    """No folders; no store of torch, which is for all ranks; and nothing by a rename that fails, as
    another rank has already done it."""
    code = """
import contextlib, os, torch
torch.distributed.FileStore("store", 1).set("a", "b")
os.mkdir("new")
for _ in range(2):
    open("log", "a").close()
open("new.tmp", "w").close()
os.rename("new.tmp", "new.pt")
with contextlib.suppress(FileNotFoundError):
    os.rename("new.tmp", "other.pt")
"""
    (one,) = notes_of(code)
    written = {(os.path.basename(note.path), note.mode) for _, note in one[File]}
    assert written == {("log", "a"), ("new.tmp", "w"), ("new.pt", "w")}

"""ddp_check changes no file that was there before, and leaves none of those that a script creates.

Here the guard alone is in a fork of this process; test_ddp_check_command.py has whole runs."""

import gc
import json
import os
import re
import shelve
import shutil
import sqlite3
import subprocess
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import wait_until

from ddp_check import script
from ddp_check.kept import files
from ddp_check.kept.made import Janitor, Made, identity, remove_made
from ddp_check.patches import STOPPED

gc.freeze()  # as child() does; in a fork, looking through all that is here would take longest

START = """\
import csv, dbm, io, json, logging, logging.handlers, mmap, os, pickle, shelve, shutil, sqlite3
import subprocess, sys, tempfile, threading, zipfile
from pathlib import Path
import numpy as np
import torch
from torch.utils.data import DataLoader
"""


def watched(code, steps=1):
    """Run code in a fork, as a script whose files are watched. Returns its exit status, the line
    that was refused, and what was said."""
    notes = Path("notes").resolve()
    notes.mkdir(exist_ok=True)
    Path("script.py").write_text(START + code)
    pid = os.fork()
    if pid == 0:
        status, said = 1, open(notes / "said", "a")
        try:
            script.START = os.getcwd()
            script.own_file.cache_clear()
            process = SimpleNamespace(folder=str(notes), steps=steps)
            process.say = lambda text: print(text, file=said, flush=True)
            process.note_once = lambda note: None
            files.patch(process)
            exec(compile(START + code, os.path.abspath("script.py"), "exec"), {"process": process})
            process.settle()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    refused = notes / "refused"
    return status, refused.read_text() if refused.exists() else "", (notes / "said").read_text()


def users_content():
    """{path: its bytes} of all below the current folder but the script and its notes."""
    paths = [path for path in Path().rglob("*") if path.parts[0] not in ("notes", "script.py")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def users(work):
    """Files that were there before: a model, a log, data, a database, links and an empty folder."""
    os.makedirs("out/empty")
    torch.save({"weight": torch.ones(3)}, "out/model.pt")
    Path("out/log.csv").write_text("epoch,loss\n")
    np.arange(4000, dtype=np.float32).tofile("data.bin")
    Path("data.zip").write_bytes(b"PK\5\6" + bytes(18))
    with shelve.open("shelf") as shelf:
        shelf["a"] = 1
    with sqlite3.connect("data.db") as database:
        database.execute("create table samples (x)")
        database.execute("insert into samples values (1)")
    database.close()
    os.symlink("out", "latest")
    return users_content()


REFUSED = r"""
open("out/model.pt", "w")
open("out/model.pt", "wb", buffering=0)
open("latest/log.csv", "a")
open("data.bin", "r+b").write(b"1234")
open("out/log.csv", "r+").write("1234")
open("data.bin", "r+b", buffering=0).write(b"1234")
open("data.bin", "r+b").truncate(0)
io.open("out/log.csv", "w+")
Path("out/model.pt").write_bytes(b"")
Path("out/log.csv").open("a")
os.open("out/model.pt", os.O_WRONLY | os.O_TRUNC)
os.open("out/model.pt", os.O_RDWR)
os.remove("out/model.pt")
Path("out/model.pt").unlink()
os.unlink("latest/model.pt")
os.remove("latest")
os.rmdir("out/empty")
os.removedirs("out/empty")
os.rename("out/model.pt", "out/old.pt")
open("new", "w").close(); os.replace("new", "out/model.pt")
Path("out/model.pt").rename("old.pt")
os.rename("out", "old")
os.truncate("data.bin", 10)
os.symlink("data.bin", "link"); os.truncate("link", 10)
os.symlink("data.bin", "link"); open("link", "w")
os.link("data.bin", "link"); open("link", "w")
shutil.rmtree("out")
shutil.move("out/model.pt", "old.pt")
shutil.copy("script.py", "out/model.pt")
shutil.copyfile("script.py", "out/log.csv")
os.chdir("out"); open("model.pt", "w")
os.remove("model.pt", dir_fd=os.open("out", os.O_RDONLY))
torch.save(1, "out/model.pt")
torch.save(obj=1, f=Path("out/model.pt"))
torch.jit.save(torch.jit.script(torch.nn.ReLU()), "out/model.pt")
torch.jit.script(torch.nn.ReLU()).save("out/model.pt")
torch.serialization.save(1, "out/model.pt")
torch.UntypedStorage.from_file("data.bin", True, 4).fill_(1)
os.open("model.pt", os.O_WRONLY | os.O_TRUNC, dir_fd=os.open("out", os.O_RDONLY))
import torchvision; torchvision.io.write_png(torch.zeros(3, 2, 2).byte(), "out/model.pt")
with torch.profiler.profile() as p: pass \n p.export_chrome_trace("out/model.pt")
np.save("out/array.npy", 1); os.rename("out/array.npy", "data.bin")
np.arange(3).tofile("data.bin")
np.memmap("data.bin", mode="w+", shape=3)
torch.from_file("data.bin", shared=True, size=10).fill_(1)
csv.writer(open("out/log.csv", "a")).writerow([1])
logging.FileHandler("out/log.csv")
sqlite3.connect("data.db").execute("insert into samples values (2)")
sqlite3.connect("data.db").execute("drop table samples")
sqlite3.connect("file:data.db?mode=rw", uri=True).execute("delete from samples")
sqlite3.connect("data.db").executescript("create table other (x)")
sqlite3.connect(":memory:").executescript("attach 'data.db' as u; delete from u.samples")
c = sqlite3.connect("new"); c.execute("attach ? as u", ["data.db"]).execute("drop table u.samples")
sqlite3.Connection("data.db").execute("delete from samples").connection.commit()
open(b"data.bin", "r+b").write(b"1234")
os.remove(b"out/model.pt")
os.rename(Path("out/model.pt"), b"old")
io.FileIO("data.bin", "r+").write(b"1234")
os.chmod("data.bin", 0o600)
os.chmod(os.open("data.bin", os.O_RDONLY), 0o600)
os.utime("out/model.pt")
Path("data.bin").touch()
os.setxattr("data.bin", "user.a", b"1")
shutil.copy2("script.py", "out/model.pt")
os.mkdir("new"); open("new/log.csv", "w"); shutil.copytree("new", "out", dirs_exist_ok=True)
file = open("data.bin", "r+"); os.truncate(file.fileno(), 1)
os.symlink("out", "link"); open("new", "w").close(); os.replace("new", "link/model.pt")
file = tempfile.NamedTemporaryFile(dir="out", delete=False); os.rename(file.name, "out/model.pt")
zipfile.ZipFile("data.zip", "a").writestr("a", "b")
json.dump({}, open("out/log.csv", "w"))
pickle.dump({}, open("out/model.pt", "wb"))
buffer = io.BytesIO(); torch.save(1, buffer); open("out/model.pt", "wb").write(buffer.getvalue())
logging.handlers.RotatingFileHandler("out/log.csv", maxBytes=9, backupCount=2)
torch.save(1, "out/model.pt", _use_new_zipfile_serialization=False)
torch._C.PyTorchFileWriter("out/model.pt").write_end_of_file()
torch.jit.script(torch.nn.ReLU())._save_for_lite_interpreter("out/model.pt")
from torch.package import PackageExporter; PackageExporter("out/model.pt")
with torch.autograd.profiler.profile() as p: pass \n p.export_chrome_trace("out/model.pt")
torch.distributed.FileStore("data.bin", 1).set("a", "b")
import torchvision; torchvision.io.write_file("out/model.pt", torch.zeros(3).byte())
np.savez(open("out/model.pt", "wb"), np.zeros(3))
thread = threading.Thread(target=open, args=("out/model.pt", "w")); thread.start(); thread.join()
""".strip().splitlines()


@pytest.mark.parametrize("code", REFUSED)
def test_refused(users, code):
    """Before anything is done; the file is named, and the script's line."""
    modes = {path: os.stat(path).st_mode for path in users}
    status, refused, _ = watched(code.replace(r" \n ", "\n"))
    refused = json.loads(refused)
    assert status == STOPPED and refused["steps"] == 1
    assert re.match(r"script.py:[78]: ", refused["line"]) or "threading" in code
    assert re.fullmatch(r"would .*, which was there before; nothing was changed", refused["text"])
    assert os.path.basename(refused["path"]) in refused["text"]
    assert modes == {path: os.stat(path).st_mode for path in users}
    after = users_content()
    assert {path: after.get(path) for path in users} == users
    remove_made(str(Path("notes").resolve()))
    assert users_content() == users


def test_mpi(users):
    """MPI's own library gets no variables by which it would end the process; another module of
    that name does."""
    event = "os.environ['PMI_RANK'] = '1'; sys.audit('import', 'mpi4py.MPI', {}, None, None, None)"
    for library, has_variables in ("'MPI.so'", False), (None, True):
        code = f"{event.format(library)}\nassert ('PMI_RANK' in os.environ) == {has_variables}"
        assert watched(code)[0] == 0
    other = event.replace("mpi4py", "h5py").format("'MPI.so'")
    assert watched(f"{other}\nassert 'PMI_RANK' in os.environ and os.environ['PATH']")[0] == 0


ALLOWED = r"""
assert type(print) is type(open); print("a script may ask for that, before it replaces print")
assert open("data.bin", "r+b").read(4) == bytes(4)
assert open("out/log.csv", "r+", newline="").readline() == "epoch,loss\n"
np.memmap("data.bin", np.float32)[:] = 1
np.lib.format.open_memmap("new.npy", "w+", shape=(3,))[:] = 1
torch.load("out/model.pt", mmap=True)["weight"].fill_(2)
assert list(sqlite3.connect("file:data.db?mode=ro", uri=True).execute("select x from samples"))
sqlite3.connect("data.db").executescript("create temp table a (x); insert into a values (1)")
assert list(sqlite3.connect("data.db").execute("select x from samples")) == [(1,)]
sqlite3.connect("").executescript("attach 'data.db' as u; create table a as select x from samples")
sqlite3.connect("new").executescript("vacuum; attach 'other' as o; create table o.samples (x)")
sqlite3.connect("data.db").execute("vacuum into 'copy'")
shelf = shelve.open("shelf"); assert shelf["a"] == 1; shelf.close()
shelf = shelve.open("new"); shelf["a"] = 1; shelf.close(); shelve.open("new")["b"] = 2
assert open(b"data.bin", "r+b").read(4) == bytes(4)
file = open("data.bin", "r+b"); data = mmap.mmap(file.fileno(), 0); data[0] = 7  # mapped
file = open("data.bin", "rb"); mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[0]
file = open("x", "w+b"); file.truncate(9); mmap.mmap(file.fileno(), 9)[0] = 7; assert file.read(1)
open("new", "w").close(); os.chmod("new", 0o600); os.utime("new"); Path("new").touch()
os.chmod("data.bin", os.stat("data.bin").st_mode & 0o7777)
os.mkdir("a"); open("a/b", "w").close(); shutil.copytree("a", "out/empty", dirs_exist_ok=True)
os.mkfifo("pipe")
torch.distributed.FileStore("new", 1).set("a", "b")
torch.jit.script(torch.nn.ReLU()).save("new"); torch.jit.save(torch.jit.load("new"), "x")
torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(1),)), "new.pt2")
sqlite3.connect("new.db").execute("create table samples (x)").connection.commit()
sqlite3.connect(":memory:").execute("create table samples (x)").connection.commit()
os.makedirs("out/new/folder"); torch.save(1, "out/new/folder/model.pt")
for i in range(9): torch.save(i, "out/new.pt"); os.replace("out/new.pt", f"out/{i % 3}.pt")
for i in range(9): open("out/x", "x").close(); os.rename("out/x", "out/y"); os.remove("out/y")
os.makedirs("a/b/c"); open("a/b/c/d", "w").close(); os.rename("a", "e"); shutil.rmtree("e/b")
os.makedirs("a/b"); open("a/b/c", "w").close(); shutil.copytree("a", "out/a"); shutil.move("a", "z")
import socket; socket.socket(socket.AF_UNIX).bind("s"); os.remove("s")
os.symlink("data.bin", "link"); os.remove("link"); os.symlink("out", "link"); open("link/new", "w")
open("a", "w").close(); os.link("a", "b"); os.rename("b", "x"); open("x", "a")
os.open("new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600); assert os.stat("new").st_mode & 1 == 0
try: open("out/model.pt", "x") \n except FileExistsError: pass
try: os.rmdir("out") \n except OSError: pass
try: open("no/such/folder", "w") \n except FileNotFoundError: pass
os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=os.open("out", os.O_RDONLY)))
os.mkdir("m"); os.close(os.open("data.bin", os.O_CREAT | os.O_RDWR, dir_fd=os.open("m", 0)))
""".strip().splitlines()


@pytest.mark.parametrize(
    "code", ['shelve.open("shelf")["b"] = 2', 'dbm.open("shelf", "w")["b"] = "2"']
)
def test_databases_of_the_library(users, code):
    """Refused; or, where Python has one in C, it is opened to be read, and its write fails."""
    _, refused, _ = watched(f"try: {code}\nexcept dbm.error: pass\nelse: raise SystemExit(7)")
    assert not refused or "shelf" in json.loads(refused)["text"]
    after = users_content()
    assert {path: after.get(path) for path in users} == users
    remove_made(str(Path("notes").resolve()))
    assert users_content() == users


@pytest.mark.parametrize("code", ALLOWED)
def test_allowed(users, code):
    """What the script has created it may change; all of it goes, and nothing else."""
    status, refused, said = watched(code.replace(r" \n ", "\n"))
    assert status == 0 and not refused
    after = users_content()
    assert {path: after.get(path) for path in users} == users
    is_mapped = 'np.memmap("data' in code or "# mapped" in code
    assert ("what is written stays there" in said) == is_mapped
    assert not remove_made(str(Path("notes").resolve()))
    assert users_content() == users


def test_writers_in_c(users):
    """Modules that are imported later; h5py and cv2 are stand-ins."""
    os.mkdir("modules")
    h5py = "class File:\n    def __init__(self, name, mode='r'): open(name, mode).close()"
    Path("modules/h5py.py").write_text(h5py)
    Path("modules/cv2.py").write_text("def imwrite(filename, image): pass")
    start = "sys.path.insert(0, 'modules'); "
    for code in (
        "import h5py; h5py.File('data.bin', 'a')",
        "import cv2; cv2.imwrite('data.bin', 1)",
    ):
        assert watched(start + code)[0] == STOPPED, code
    allowed = "import h5py; h5py.File('data.bin'); h5py.File('new', 'x'); h5py.File('new', 'a')"
    assert watched(start + allowed)[0] == 0


def test_temporary_folders_of_imports(users):
    """Made before the files are watched, as in a process that the script starts; another's stay."""
    with tempfile.TemporaryDirectory() as folder:
        names = f"os.rmdir({folder!r})"
        assert watched(names)[0] == 0
    (empty := Path("empty")).mkdir()
    assert watched(f"os.rmdir({str(empty)!r})")[0] == STOPPED


def test_other_programs_are_said(users):
    said = watched("subprocess.run(['true', 'x']); os.system('true y'); import platform")[2]
    assert "does to files is not seen: script.py:7: subprocess.run(['true', 'x']); os" in said
    os.mkdir("site-packages"), Path("notes/said").unlink()
    Path("site-packages/starts.py").write_text("import os\nos.system('true')\n")
    assert watched("import sys; sys.path.append('site-packages')\nimport starts")[2] == ""


def test_another_programs_files(users):
    """What it has put in the place of the script's, or into its folders, stays."""
    code = "os.mkdir('new'); [open(f'new/{n}', 'w').close() for n in 'abc']"
    assert watched(code)[0] == 0
    os.rename("data.bin", "new/a")
    Path("new/mine").write_text("another program's")
    left = remove_made(str(Path("notes").resolve()))
    assert left == [f"{Path('new/a').resolve()} is left: it may be another program's"]
    assert sorted(os.listdir("new")) == ["a", "mine"]
    status, refused, _ = watched("open('new/a', 'w')")  # it is not the script's any more
    assert status == STOPPED and "new/a" in refused


def test_files_that_could_not_be_created(users):
    """Another program may create them later."""
    code = "try: open('out/later/log', 'w')\nexcept FileNotFoundError: pass\n"
    code += (
        "subprocess.run('mkdir out/later; echo 1 > out/later/log', shell=True); open('x', 'w')\n"
    )
    assert watched(code + "os.rename('x', 'y')")[0] == 0
    left = remove_made(str(Path("notes").resolve()))
    assert Path("out/later/log").exists() and len(left) == 1
    shutil.rmtree("out/later")
    assert watched(f"{code}open('out/later/log', 'a')")[0] == STOPPED  # nor by the same script
    remove_made(str(Path("notes").resolve()))
    assert watched("open('out/later/log', 'w')")[0] == STOPPED


@pytest.mark.parametrize("cache", ["", "."])
def test_caches_around_the_script(users, cache, monkeypatch):
    """An empty variable is the current folder; neither that nor one around it is a cache."""
    monkeypatch.setenv("TORCH_HOME", cache and os.path.dirname(os.getcwd()))
    assert watched("open('out/model.pt', 'w')")[0] == STOPPED


def test_downloads_stay(users):
    """What is large and read before the first step, with all in its folder; but no outputs."""
    code = "os.mkdir('data'); open('data/names', 'w').write('1')\n"
    code += "np.save('data/images.npy', np.zeros(9000)); np.load('data/images.npy')\n"
    code += "torch.save(torch.zeros(90000), 'first.pt'); torch.load('first.pt')\n"
    code += "open('small', 'w').write('1'); open('small'); np.load('data/images.npy')\n"
    code += "process.steps = 1; np.save('data/out.npy', np.zeros(9000)); np.load('data/out.npy')"
    status, _, said = watched(code, steps=0)
    assert status == 0 and said.count("data is downloaded or prepared data: it stays") == 1
    for _ in range(2):  # also after the next run
        remove_made(str(Path("notes").resolve()))
        assert users_content().keys() - users.keys() == {"data", "data/names", "data/images.npy"}
    assert watched("open('data/names', 'a')")[0] == 0  # which has created them


def test_janitor(work):
    """It ends what still runs, and removes what was created, when the command is killed."""
    folder = Path("notes").resolve()
    folder.mkdir()
    new = os.path.abspath("new")
    command = os.fork()
    if command == 0:
        try:
            Janitor(str(folder))
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(folder, "one.0.pid").write_text(str(child.pid))
            Path(folder, "all.0.pid").touch()  # just before its number is written
            Path(new).touch()
            Made(str(folder)).add(new, "output", identity(new))
            Path("child").write_text(str(child.pid))
        finally:
            os.kill(os.getpid(), 9)
    os.waitpid(command, 0)
    child = Path("/proc", Path("child").read_text(), "cmdline")  # empty: it waits to be fetched
    assert wait_until(lambda: not child.exists() or not child.read_bytes(), 20)
    assert wait_until(lambda: not folder.exists(), 20) and not os.path.exists(new)

"""Files that are changed without a word to Python's audit hook: in place, in memory, and in C++."""

import builtins
import io
import mmap
import os
import sys

from ..imports import when_imported
from ..patches import wrap
from .made import full, identity, open_path

NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
TEXT_OPTIONS = "encoding", "errors", "newline"  # of open, after its buffering

# Functions, and classes, that write a file in C++: (module, name): position and name of the
# argument with its path, and of one with the mode, if there is one. torch.save, torch.export and
# torch.package are among them by PyTorchFileWriter.
WRITERS = {
    ("torch._C", "PyTorchFileWriter"): (0, "file_name"),
    ("torch.jit", "RecursiveScriptModule.save"): (1, "f"),
    ("torch.jit", "RecursiveScriptModule._save_for_lite_interpreter"): (1, "f"),
    ("torch.jit._serialization", "save_jit_module_to_flatbuffer"): (1, "f"),
    ("torch.autograd.profiler", "profile.export_chrome_trace"): (1, "path"),
    ("torch.profiler", "ExecutionTraceObserver.register_callback"): (1, "output_file_path"),
    ("torch.distributed", "FileStore"): (0, "file_name"),
    ("torch", "from_file"): (0, "filename", 1, "shared"),
    ("torch", "UntypedStorage.from_file"): (0, "filename", 1, "shared"),
    ("torchvision.io.image", "write_png"): (1, "filename"),
    ("torchvision.io.image", "write_jpeg"): (1, "filename"),
    ("torchvision.io.image", "write_file"): (0, "filename"),
    ("torchvision.io.video", "write_video"): (0, "filename"),
    ("torchaudio", "save"): (0, "uri"),
    ("safetensors", "serialize_file"): (1, "filename"),
    ("tokenizers", "Tokenizer.save"): (1, "path"),
    ("pyarrow", "OSFile"): (0, "path", 1, "mode"),
    ("pyarrow", "memory_map"): (0, "path", 1, "mode"),
    ("pyarrow.parquet", "ParquetWriter.__init__"): (1, "where"),
    ("pyarrow.csv", "write_csv"): (1, "output_file"),
    ("pyarrow.feather", "write_feather"): (1, "dest"),
    ("h5py", "File.__init__"): (1, "name", 2, "mode"),
    ("av", "open"): (0, "file", 1, "mode"),
    ("soundfile", "SoundFile.__init__"): (1, "file", 2, "mode"),
    ("faiss", "write_index"): (1, "fname"),
    ("SimpleITK", "WriteImage"): (1, "fileName"),
    ("cv2", "imwrite"): (0, "filename"),
    ("cv2", "imwritemulti"): (0, "filename"),
    ("cv2", "VideoWriter"): (0, "filename"),
}


def watch_writer(module, function, guard):
    position, name, *mode = WRITERS[module, function]
    owner = sys.modules[module]
    *classes, function = function.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
    if not hasattr(owner, function):  # in another version of the library
        return

    def argument(args, kwargs, position, name):
        return args[position] if len(args) > position else kwargs.get(name)

    original = getattr(owner, function)
    shown = "" if function == "FileStore" else "w"  # that is for all ranks

    @wrap(owner, function)
    def write(original, *args, **kwargs):
        path = argument(args, kwargs, position, name)
        reads = mode and argument(args, kwargs, *mode) in (None, False, "r", "rb")
        if reads or not isinstance(path, (str, bytes, os.PathLike)):
            return original(*args, **kwargs)
        guard.hook("open", (path, shown, NEW))
        try:
            return original(*args, **kwargs)
        finally:
            guard.made.settle()
            note_renamed(guard.made, os.path.realpath(os.fsdecode(path)))

    for other in list(sys.modules.values()):  # some have imported it by its name
        if getattr(other, "__dict__", {}).get(function) is original:
            setattr(other, function, getattr(owner, function))


def note_renamed(made, path):
    """As safetensors writes a new file, and gives it the name of one that the script has made."""
    number, kind = made.paths.get(path, (None, ""))
    if kind and number != identity(path):
        made.add(path, kind, identity(path))


class UsersFile(io.BufferedReader):
    """A file of the user's that is opened r+: it can be read; before it is changed, refuse is
    called."""

    def __init__(self, path, refuse):
        super().__init__(io.FileIO(path))
        self.path, self.refuse = path, refuse

    def writable(self):
        return True

    def write(self, data):
        self.refuse("write into", self.path)

    def truncate(self, size=None):
        self.refuse("truncate", self.path)


def map_users_files(guard):
    """A file of the user's that was opened r+, see above, can be mapped into memory."""
    real, writes = mmap.mmap, (mmap.ACCESS_DEFAULT, mmap.ACCESS_WRITE)

    class Mapped(real):
        def __new__(cls, fileno, length, *args, **kwargs):
            more = dict(zip(("flags", "prot", "access", "offset"), args)) | kwargs
            is_private = more.get("flags", mmap.MAP_SHARED) & mmap.MAP_PRIVATE
            is_written = more.get("prot", mmap.PROT_WRITE) & mmap.PROT_WRITE and not is_private
            is_written &= more.get("access", mmap.ACCESS_DEFAULT) in writes
            path = open_path(fileno) if fileno >= 0 and is_written else ""
            if not guard.is_users(path):
                return super().__new__(cls, fileno, length, *args, **kwargs)
            guard.process.say(f"{path} is mapped into memory; what is written stays there")
            offset = more.get("offset", 0)
            return super().__new__(cls, fileno, length, access=mmap.ACCESS_COPY, offset=offset)

    mmap.mmap = Mapped


def patch(guard):
    for module, function in WRITERS:
        when_imported(module, lambda _, key=(module, function): watch_writer(*key, guard))
    map_users_files(guard)

    def is_users(path):
        return guard.is_users(os.path.realpath(os.fsdecode(path)))

    def open_and_settle(original, file, mode="r", buffering=-1, *args, **kwargs):
        if isinstance(file, int) or "r" in mode and "+" not in mode:
            return original(file, mode, buffering, *args, **kwargs)
        if "r" in mode and is_users(file):
            binary = UsersFile(os.path.realpath(os.fsdecode(file)), guard.refuse)
            if "b" in mode:
                return binary
            more = dict(zip(TEXT_OPTIONS, args)) | kwargs
            options = {name: more.get(name) for name in TEXT_OPTIONS}
            return io.TextIOWrapper(binary, **options, write_through=True)
        try:
            return original(file, mode, buffering, *args, **kwargs)
        except OSError:
            guard.made.failed(os.path.realpath(os.fsdecode(file)))
            raise
        finally:
            guard.made.settle()

    for owner in (builtins, io):
        wrap(owner, "open")(open_and_settle)
    # A script may replace print only where it is of the type that open has.
    wrap(builtins, "print")(lambda original, *args, **kwargs: original(*args, **kwargs))

    @wrap(os, "open")
    def open_in_folder(original, path, flags, mode=0o777, *, dir_fd=None):
        """Of an open folder, the hook is not told."""
        if dir_fd is None:
            return original(path, flags, mode)
        guard.hook("open", (full(path, dir_fd), None, flags))
        with guard.unheard():
            return original(path, flags, mode, dir_fd=dir_fd)

    for name in "mkfifo", "mknod":

        @wrap(os, name)
        def make_file(original, path, *args, **kwargs):
            guard.note(full(path))
            original(path, *args, **kwargs)
            guard.made.settle()

"""ddp_check starts the processes itself, so a launcher in front of the script is left out, where it
is sure what is the launcher's and what the script's."""

import contextlib
import os
import re
import shlex

PYTHON = re.compile(r"python[\d.]*$")
MPI = "srun", "mpirun", "mpiexec", "mpiexec.hydra"
OTHERS = "deepspeed", "horovodrun", "accelerate", "bash", "sh", "uv", "conda", "fabric"
LOCAL_RANK = re.compile(r"""["'](--local[_-]rank)["']""")
RANK = re.compile(r"""["'](--(?:global[_-]|local[_-])?rank)["'][^)]*required\s*=\s*True""")
TORCHRUN, LAUNCH = "torch.distributed.run", "torch.distributed.launch"
ACCELERATE = "accelerate.commands.launch"


class NotSure(Exception):
    """Its text says what to type."""


def without_launcher(args):
    """Let args.script and args.flags be the script's, and args.m whether it is a module."""
    words = [args.script, *args.flags]
    while True:
        name, rest = os.path.basename(words[0]), words[1:]
        if args.m and name in (TORCHRUN, LAUNCH):
            words, args.m = after_torchrun(name, rest)
        elif name == "torchrun":
            words, args.m = after_torchrun(TORCHRUN, rest)
        elif args.m and name == ACCELERATE:
            words, args.m = after_accelerate(rest)
        elif name == "accelerate" and rest[:1] == ["launch"]:
            words, args.m = after_accelerate(rest[1:])
        elif is_python(name):
            words, args.m = after_python(rest)
        elif name in MPI and any(map(is_python, rest)):
            words = rest[[is_python(word) for word in rest].index(True) :]
        elif name in (*MPI, *OTHERS):
            raise NotSure(what_to_type(name, rest))
        else:
            break
    if words[0].endswith(".ipynb"):
        new = words[0].removesuffix(".ipynb") + ".py"
        text = f"{words[0]} is a notebook: jupyter nbconvert --to script {words[0]}, then "
        raise NotSure(f"{text}python ddp_check {shlex.join([new, *words[1:]])}")
    args.script, args.flags = words[0], words[1:]


def is_python(word):
    return bool(PYTHON.match(os.path.basename(word)))


def after_python(words):
    """The script or module of python's command, and whether it is a module."""
    while words and words[0].startswith("-"):
        option, *words = words
        if option == "-m" and words:
            return words, True
        if option in ("-X", "-W"):
            words = words[1:]
        elif option == "-c":
            raise NotSure("python -c has no script: write it to a file")
    if not words:
        raise NotSure("which script?")
    return words, False


def after_torchrun(name, words):
    from torch.distributed import launch

    with no_exit(f"torchrun {shlex.join(words)}"):
        given = launch.parse_args(words)  # torchrun's flags, and --use-env
    flags = list(given.training_script_args)
    if name == LAUNCH and not given.use_env:  # it passes a flag
        flags.insert(0, f"{local_rank_flag(given.training_script) or '--local-rank'}={{rank}}")
    return [given.training_script, *flags], given.module


def after_accelerate(words):
    try:
        from accelerate.commands.launch import launch_command_parser
    except ImportError as error:
        raise NotSure(what_to_type("accelerate", words)) from error
    with no_exit(f"accelerate launch {shlex.join(words)}"):
        given = launch_command_parser().parse_args(words)
    return [given.training_script, *given.training_script_args], bool(given.module)


@contextlib.contextmanager
def no_exit(command):
    """The launcher's own parser has already said what is wrong."""
    try:
        yield
    except SystemExit as end:
        raise NotSure(f"is this the launcher's command? {command}") from end


def what_to_type(name, words):
    first = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    rest = shlex.join(words[first:]) if first is not None else "my_script.py --its --flags"
    flag = " --local_rank {rank}" if name == "deepspeed" else ""
    return f"ddp_check starts the processes itself, without {name}: python ddp_check {rest}{flag}"


def text_of(path):
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def local_rank_flag(path):
    """What torch.distributed.launch passes to a script, as it is written there; None if nothing."""
    found = LOCAL_RANK.search(text_of(path))
    return found[1] if found else None


def proposal(args, files):
    """For a script that needs a rank as a flag, which is not given; "" for others. `files`: of the
    script, itself first."""
    text = text_of(files[0])
    needed = [found[1] for found in RANK.finditer(text)]
    if not any("LOCAL_RANK" in text_of(file) for file in files):  # of the environment
        needed += [found[1] for found in LOCAL_RANK.finditer(text)]
    given = [word.partition("=")[0].replace("_", "-") for word in args.flags]
    missing = [flag for flag in dict.fromkeys(needed) if flag.replace("_", "-") not in given]
    if not missing:
        return ""
    words = ["-m"] * args.m + [args.script, *args.flags]
    words += [word for flag in missing for word in (flag, "{rank}")]
    return f"does a launcher pass {missing[0]}? Then: python ddp_check {' '.join(words)}"

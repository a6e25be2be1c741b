"""Functions of torch, Python and libraries are replaced; before the script does what it must not,
both runs are stopped."""

import contextlib
import functools
import inspect
import json
import os
import sys
import types

import torch

from .script import own_file

LEAVE = os._exit
STOPPED = 76  # exit status
REPLACED = {}  # {id of a function: (the function, what has replaced it)}


def wrap(owner, name):
    """A decorator: the function replaces owner.name, and gets the original as its first argument.
    What torch.compile traces is left alone."""

    def decorate(function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        if hasattr(original, "__self__"):  # which a library may ask for, as of np.random.random
            replacement.__self__ = original.__self__
        with contextlib.suppress(ValueError, TypeError):  # as of what is written in C
            replacement.__signature__ = inspect.signature(original)  # getfullargspec() asks for it
        setattr(owner, name, replacement)
        REPLACED[id(original)] = original, replacement

    return decorate


def replace_names():
    """Also where the script has imported a function by its name before it was replaced, as it has
    in a process that it starts itself."""
    for module in list(sys.modules.values()):
        if not own_file(getattr(module, "__file__", None) or "<"):
            continue
        functions = [f for f in vars(module).values() if isinstance(f, types.FunctionType)]
        own = [f.__globals__ for f in functions if own_file(f.__code__.co_filename)]
        for scope in (vars(module), *own):
            for name, value in list(scope.items()):
                while id(value) in REPLACED:
                    scope[name] = value = REPLACED[id(value)][1]


def stop_both_runs(folder, name, facts):
    """Before the script does something. The command ends all processes as soon as there is a file
    of this name, "refused" or "spawns"."""
    new = f"{folder}/{name}.{os.getpid()}"
    with open(new, "w") as file:
        json.dump(facts, file)
    os.replace(new, f"{folder}/{name}")
    LEAVE(STOPPED)

"""Functions that are called as soon as a module is imported, before the script can use it."""

import importlib.abc
import importlib.machinery
import sys

CALLS = {}  # {name of a module: functions, which get it}


class WhenImported(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CALLS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for call in CALLS[name]:
                call(module)

        spec.loader.exec_module = exec_module
        return spec


def when_imported(name, call):
    """Now, if it is imported already."""
    if not CALLS:
        sys.meta_path.insert(0, WhenImported())
    CALLS.setdefault(name, []).append(call)
    if name in sys.modules:
        call(sys.modules[name])

"""The private names of torch and Python that are used here, as there is no public one.

A new torch that lacks one fails in a test, with the line of this table."""

import pkgutil

PRIVATE = {
    "torch.utils._python_dispatch.TorchDispatchMode": "given/draws.py: operators of any call",
    "torch.ops.aten.rand.default._schema": "given/draws.py: the names of an operator's arguments",
    "tempfile._RandomNameSequence": "seen/scalars.py: whose generator is not the script's",
    "sys._current_frames": "child.py: where the script is, from another thread",
}


def missing():
    """The lines of those that are not there."""
    lines = []
    for name, use in PRIVATE.items():
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            lines.append(f"{name} is gone: {use}")
    return lines

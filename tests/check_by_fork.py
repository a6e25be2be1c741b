"""The command ddp_check, whose processes are forks, which need not import torch again.

start("tests/check_by_fork.py", "my_script.py", "--its", "--flags", processes=0)
"""

import functools
import os

from faults import Forked

from ddp_check import command, runs


@functools.cache
def close_in_children():
    """As with exec: the pipe to the janitor is the command's alone."""
    is_script = functools.partial(os.environ.__contains__, "DDP_CHECK")
    os.register_at_fork(after_in_child=lambda: is_script() or os.closerange(3, 64))


def launch(*words):
    close_in_children()
    return Forked(*words)


runs.launch = launch
command.main()

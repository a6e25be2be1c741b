"""The command ddp_check, whose processes are forks, which need not import torch again.

start("tests/check_by_fork.py", "my_script.py", "--its", "--flags", processes=0)
"""

import os

from faults import Forked

from ddp_check import command, runs


class Janitor(command.Janitor):
    """As with exec, its pipe is the command's alone: no process of a run has it open."""

    def __init__(self, folder):
        super().__init__(folder)
        os.register_at_fork(after_in_child=self.close_pipe)

    def close_pipe(self):
        if "DDP_CHECK" not in os.environ:  # or a process of a run is forked again
            os.close(self.pipe)


runs.launch, command.Janitor = Forked, Janitor
command.main()

"""The command ddp_check, whose processes are forks, which need not import torch again.

start("tests/check_by_fork.py", "my_script.py", "--its", "--flags", processes=0)
"""

from faults import Forked

from ddp_check import command, runs

runs.launch = Forked
command.main()

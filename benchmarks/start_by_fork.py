"""train_ddp_spawn.py with processes that are forked, as in articles with start_processes: each is a
copy of the first one, and need not import torch again. The flags are train_ddp_spawn.py's.

python benchmarks/start_by_fork.py --dataset synthetic --nproc-per-node 2
"""

import functools
import runpy
from pathlib import Path

import torch

torch.multiprocessing.spawn = functools.partial(
    torch.multiprocessing.start_processes, start_method="fork"
)
runpy.run_path(str(Path(__file__).parents[1] / "train_ddp_spawn.py"), run_name="__main__")

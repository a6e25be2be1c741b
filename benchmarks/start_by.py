"""train_ddp_spawn.py with processes that are started otherwise. The flags are train_ddp_spawn.py's.

python benchmarks/start_by.py fork --dataset synthetic --nproc-per-node 2
    as in articles with start_processes: each process is a copy of the first one, and need not
    import torch again. Not where the first one has used CUDA.
python benchmarks/start_by.py forkserver --dataset synthetic --nproc-per-node 2
    as in articles with mp.Process: copies of a server, which is a process without CUDA.
"""

import runpy
import sys
from pathlib import Path

import torch.multiprocessing as mp


def spawn(function, args=(), nprocs=1, join=True):
    """In the place of torch.multiprocessing.spawn."""
    if method == "fork":
        return mp.start_processes(function, args, nprocs, join, start_method="fork")
    context = mp.get_context(method)
    processes = [context.Process(target=function, args=(i, *args)) for i in range(nprocs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a process has failed")


if __name__ == "__main__":
    method = sys.argv.pop(1)
    mp.spawn = spawn
    runpy.run_path(str(Path(__file__).parents[1] / "train_ddp_spawn.py"), run_name="__main__")

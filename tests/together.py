"""complete/train.py as a module of a user's calls it, which imports it and replaces or wraps
functions there: `together.py FOLDER CODE RUNS`. FOLDER has train.py; RUNS are a port and flags
each, one after the other, also where one ends by SystemExit."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
import train  # noqa: E402

exec(compile(Path(sys.argv[2]).read_text(), sys.argv[2], "exec"), vars(train))


def run(flags):
    train.args = train.parser.parse_args(flags)
    if train.args.epochs and os.environ.get("LOCAL_RANK", "0") == "0":
        train.check_flags(train.args, int(os.environ.get("WORLD_SIZE", 1)))
    train.main(train.args)


if __name__ == "__main__":  # loader workers import this file too
    runs = json.loads(sys.argv[3])
    for i, (port, flags) in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port)
        try:
            run(flags)
        except SystemExit as end:
            if i == len(runs) - 1:
                raise
            print(f"SystemExit: {end}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if i < len(runs) - 1:
            print("next run", flush=True)

"""nerv: a sampler that can be resumed."""

from made import own_loop

REPOSITORY = "Wuziyi616/nerv"
BEFORE, AFTER = "ccc8a8d^", "ccc8a8d"
FAULT = "each rank takes its share of a permutation of its own (SlotFormer's issue 9)"
LINES = ["nerv/training/datamodule.py:136"]
REMARK = "true: the mended sampler draws the second epoch's order before it knows its number"
PATHS = ["nerv/training"]
ENVIRONMENT = {"PYTHONPATH": PATHS[0]}
COMMAND = "--cpu --steps 6 own_sampler.py"

if __name__ == "__main__":
    own_loop("own_sampler.py")

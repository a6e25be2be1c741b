"""solo-learn: SimCLR's loss, with the negatives of all ranks."""

from made import own_loop

REPOSITORY = "vturrisi/solo-learn"
BEFORE, AFTER = "06dd435^", "06dd435"
FAULT = "all ranks take rank 0's places of a sample's own similarity out of the positives"
LINES = ["solo/losses/simclr.py:51"]
REMARK = """true: the gather's backward takes the rank's own gradient, which is 1/N (gradient), as
    lightly's did (mended_lightly_gather)"""
PATHS = ["solo/losses/simclr.py", "solo/utils/misc.py"]
COMMAND = "--cpu --steps 4 two_views.py solo.losses.simclr.simclr_loss_func --takes labels"

if __name__ == "__main__":
    own_loop("two_views.py")

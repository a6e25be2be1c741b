"""SIGReg, LeJEPA's regularization, of lightly: sums over all ranks."""

from made import own_loop
from of_lightly import FILES, NAME, NEEDS, NO_REQUESTS

REPOSITORY = NAME
BEFORE, AFTER = "753643fd^", "753643fd"
FAULT = "two all_reduce that are not differentiated: gradients are 1/N (issue 1920)"
LINES = ["lightly/loss/lejepa_loss.py:93", "lightly/loss/lejepa_loss.py:94"]
PATHS, PACKAGES, ENVIRONMENT = FILES, NEEDS, NO_REQUESTS
COMMAND = """--cpu --steps 4 two_views.py --takes all lightly.loss.lejepa_loss.SIGReg
    gather_distributed=True num_vectors=16"""

if __name__ == "__main__":
    own_loop("two_views.py")

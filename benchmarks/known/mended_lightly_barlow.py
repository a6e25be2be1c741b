"""Barlow Twins' loss of lightly, with the correlation of all ranks."""

from made import own_loop
from of_lightly import FILES, NAME, NEEDS, NO_REQUESTS

REPOSITORY = NAME
BEFORE, AFTER = "d8a260d5^", "d8a260d5"
FAULT = "an all_reduce that is not differentiated: gradients are 1/N (issue 1977)"
LINES = ["lightly/loss/barlow_twins_loss.py:80"]
PATHS, PACKAGES, ENVIRONMENT = FILES, NEEDS, NO_REQUESTS
COMMAND = """--cpu --steps 4 two_views.py lightly.loss.barlow_twins_loss.BarlowTwinsLoss
    gather_distributed=True"""

if __name__ == "__main__":
    own_loop("two_views.py")

"""Barlow Twins' loss of lightly, with the correlation of all ranks."""

import lightly_loss

REPOSITORY = lightly_loss.NAME
BEFORE, AFTER = "d8a260d5^", "d8a260d5"
FAULT = "an all_reduce that is not differentiated: gradients are 1/N (issue 1977)"
LINES = ["lightly/loss/barlow_twins_loss.py:80"]
PATHS, PACKAGES = lightly_loss.PATHS, lightly_loss.PACKAGES
ENVIRONMENT = lightly_loss.ENVIRONMENT
COMMAND = """--cpu --steps 4 two_views.py lightly.loss.barlow_twins_loss.BarlowTwinsLoss
    gather_distributed=True"""

if __name__ == "__main__":
    lightly_loss.copy_loop()

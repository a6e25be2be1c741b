"""SimCLR, of 2021."""

import simclr
from made import cifar10

REPOSITORY, PACKAGES, EDITS = simclr.REPOSITORY, simclr.PACKAGES, simclr.EDITS
BEFORE, AFTER = "de910ae^", "de910ae"
FAULT = "no set_epoch: each epoch has the same order (pull request 26)"
LINES = ["main.py:25", "main.py:80"]
COMMAND = simclr.COMMAND

if __name__ == "__main__":
    cifar10(32)

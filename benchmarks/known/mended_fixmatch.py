"""FixMatch, of 2021: loaders without an end."""

import fixmatch
from made import cifar10

REPOSITORY, PACKAGES = fixmatch.REPOSITORY, fixmatch.PACKAGES
BEFORE, AFTER = "1c6fe04^", "ced3590"
FAULT = "no set_epoch: each epoch has the same order"
LINES = [
    "train.py:314",
    "train.py:315",
    "train.py:326",
    "train.py:332",
    "train.py:234",
    "train.py:241",
]
EDITS = fixmatch.EDITS
COMMAND = fixmatch.COMMAND.replace("--steps 6", "--steps 11").replace("steps 8", "steps 12")

if __name__ == "__main__":
    cifar10(40)

"""PyTorch's tutorial "Distributed data parallel training"."""

REPOSITORY = "pytorch/examples"
BEFORE, AFTER = "2ee8d43^", "2ee8d43"
FAULT = "no set_epoch: each epoch has the same order (pull request 1076)"
LINES = ["multigpu_torchrun.py:54", "multigpu_torchrun.py:87"]
PATHS = ["distributed"]
FOLDER = "distributed/ddp-tutorial-series"
COMMAND = "--cpu --short 3 --steps 8 multigpu_torchrun.py 4 1"

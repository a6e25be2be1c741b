"""PyTorch's tutorial "Distributed data parallel training": one layer, 2,048 random samples."""

REPOSITORY = "pytorch/examples"
COMMIT = "77f55b9"
PATHS = ["distributed"]
FOLDER = "distributed/ddp-tutorial-series"
COMMAND = "--cpu --short 4 --steps 10 multigpu_torchrun.py 4 1"

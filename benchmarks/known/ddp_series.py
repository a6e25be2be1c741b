"""PyTorch's tutorial "Distributed data parallel training": one layer, 2,048 random samples."""

REPOSITORY = "pytorch/examples"
COMMIT = "77f55b9"
PATHS = ["distributed"]
FOLDER = "distributed/ddp-tutorial-series"
COMMAND = "--cpu --short 4 --steps 10 multigpu_torchrun.py 4 1"
VERDICTS = {
    "parameters multigpu_torchrun.py:51": (
        "true",
        "cross_entropy over one output is 0, and so is each gradient, on one process, too",
        "shows.py ddp_series; no report found",
    ),
}

"""pytorch-metric-learning: a loss over the outputs of all ranks."""

from made import own_loop

REPOSITORY = "KevinMusgrave/pytorch-metric-learning"
BEFORE, AFTER = "e4902ea^", "e4902ea"
FAULT = "each rank's gradient is of its own outputs: DDP's average is 1/N (pull request 364)"
LINES = [
    "src/pytorch_metric_learning/utils/distributed.py:23",
    "src/pytorch_metric_learning/utils/distributed.py:59",
]
PATHS = ["src"]
ENVIRONMENT = {"PYTHONPATH": "src"}
PACKAGES = ["scikit-learn", "tqdm"]
COMMAND = "--cpu --steps 4 two_views.py metric_loss.nt_xent --takes labels"

if __name__ == "__main__":
    own_loop("two_views.py", "metric_loss.py")

"""cellarium-ml's all_gather with gradients, in InfoNCE."""

from made import own_loop

REPOSITORY = "cellarium-ai/cellarium-ml"
BEFORE, AFTER = "4e73c9e^", "4e73c9e"
FAULT = "an all_gather whose backward reduces other ranks' gradients (pull request 184)"
LINES = ["cellarium/ml/distributed/gather.py:14", "cellarium/ml/distributed/gather.py:19"]
PATHS = ["cellarium/ml/distributed"]
ENVIRONMENT = {"PYTHONPATH": PATHS[0]}
COMMAND = "--cpu --steps 4 two_views.py info_nce.info_nce"

if __name__ == "__main__":
    own_loop("two_views.py", "info_nce.py")

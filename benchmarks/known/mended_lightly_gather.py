"""NT-Xent, SimCLR's loss, of lightly, with the negatives of all ranks."""

from made import own_loop
from of_lightly import FILES, NAME, NEEDS, NO_REQUESTS

REPOSITORY = NAME
BEFORE, AFTER = "80fa5b5c^", "80fa5b5c"
FAULT = "an all_gather whose backward does not sum over the ranks (issue 1528)"
LINES = ["lightly/utils/dist.py:19", "lightly/utils/dist.py:25"]
PATHS, PACKAGES, ENVIRONMENT = FILES, NEEDS, NO_REQUESTS
COMMAND = """--cpu --steps 4 two_views.py lightly.loss.ntx_ent_loss.NTXentLoss
    gather_distributed=True"""

if __name__ == "__main__":
    own_loop("two_views.py")

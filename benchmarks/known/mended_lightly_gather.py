"""NT-Xent, SimCLR's loss, of lightly, with the negatives of all ranks."""

import lightly_loss

REPOSITORY = lightly_loss.NAME
BEFORE, AFTER = "80fa5b5c^", "80fa5b5c"
FAULT = "an all_gather whose backward does not sum over the ranks (issue 1528)"
LINES = ["lightly/utils/dist.py:19", "lightly/utils/dist.py:25"]
PATHS, PACKAGES = lightly_loss.PATHS, lightly_loss.PACKAGES
ENVIRONMENT = lightly_loss.ENVIRONMENT
COMMAND = """--cpu --steps 4 two_views.py lightly.loss.ntx_ent_loss.NTXentLoss
    gather_distributed=True"""

if __name__ == "__main__":
    lightly_loss.copy_loop()

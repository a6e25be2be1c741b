"""SIGReg, LeJEPA's regularization, of lightly: sums over all ranks."""

import lightly_loss

REPOSITORY = lightly_loss.NAME
BEFORE, AFTER = "753643fd^", "753643fd"
FAULT = "two all_reduce that are not differentiated: gradients are 1/N (issue 1920)"
LINES = ["lightly/loss/lejepa_loss.py:93", "lightly/loss/lejepa_loss.py:94"]
PATHS, PACKAGES = lightly_loss.PATHS, lightly_loss.PACKAGES
ENVIRONMENT = lightly_loss.ENVIRONMENT | {"LOSS_TAKES": "one"}
COMMAND = """--cpu --steps 4 two_views.py lightly.loss.lejepa_loss.SIGReg gather_distributed=True
    num_vectors=16"""

if __name__ == "__main__":
    lightly_loss.copy_loop()

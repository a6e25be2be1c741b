"""solo-learn: Barlow Twins' loss."""

from made import own_loop

REPOSITORY = "vturrisi/solo-learn"
COMMIT = "9187ea3"
PATHS = ["solo/losses"]
ENVIRONMENT = {"PYTHONPATH": PATHS[0]}
COMMAND = "--cpu --steps 4 two_views.py barlow.barlow_loss_func"

if __name__ == "__main__":
    own_loop("two_views.py")

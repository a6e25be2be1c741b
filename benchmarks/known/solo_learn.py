"""solo-learn: Barlow Twins' loss."""

from made import own_loop

REPOSITORY = "vturrisi/solo-learn"
COMMIT = "9187ea3"
PATHS = ["solo/losses"]
ENVIRONMENT = {"PYTHONPATH": PATHS[0]}
COMMAND = "--cpu --steps 4 two_views.py barlow.barlow_loss_func"
VERDICTS = {
    "gradient solo/losses/barlow.py:52": (
        "true",
        "the all_reduce at solo/losses/barlow.py:52 is not differentiated: each gradient is 1/N",
        "shows.py barlowtwins; lightly's was mended for it, issue 1977; no report here was found",
    ),
}

if __name__ == "__main__":
    own_loop("two_views.py")

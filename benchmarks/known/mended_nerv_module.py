"""nerv: a trainer, whose loss is computed by a method of the model."""

from made import own_loop

REPOSITORY = "Wuziyi616/nerv"
BEFORE, AFTER = "d3fe9c5^", "d3fe9c5"
FAULT = "the model is not called through DDP: gradients are not averaged (SlotFormer's issue 9)"
LINES = ["nerv/training/method.py:289", "nerv/training/method.py:305"]
REMARK = "true: the sampler draws the second epoch's order before it knows its number (order)"
PATHS = ["nerv"]
PACKAGES = ["wandb", "tqdm", "torchmetrics", "opencv-python-headless", "matplotlib", "six"]
PACKAGES += ["pyyaml", "moviepy<2"]
COMMAND = "--cpu --steps 6 nerv_method.py"

if __name__ == "__main__":
    own_loop("nerv_method.py")

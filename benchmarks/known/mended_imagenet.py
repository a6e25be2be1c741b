"""PyTorch's ImageNet example, of 2018: a process for each GPU."""

from made import image_folder

REPOSITORY = "pytorch/examples"
BEFORE, AFTER = "15e2771^", "15e2771"
FAULT = "every process writes the checkpoint (pull request 462)"
LINES = ["main.py:238"]
PATHS, FOLDER = ["imagenet"], "imagenet"
EDITS = [
    ("imagenet/main.py", "RandomResizedCrop(224)", "RandomResizedCrop(64)"),
    ("imagenet/main.py", "Resize(256)", "Resize(72)"),
    ("imagenet/main.py", "CenterCrop(224)", "CenterCrop(64)"),
    ("imagenet/main.py", "[:k].view(-1)", "[:k].reshape(-1)"),  # as PyTorch wants today
]
COMMAND = """--cpu --wait 500 --steps 4 main.py data -a shufflenet_v2_x0_5 -j 0 -b 8 --epochs 2
    --dist-url tcp://127.0.0.1:23471 --multiprocessing-distributed --world-size 1 --rank 0"""

if __name__ == "__main__":
    image_folder("data", train=16, val=8, size=64)

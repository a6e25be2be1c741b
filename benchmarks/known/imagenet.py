"""PyTorch's ImageNet example, by torchrun's variables."""

from made import image_folder

REPOSITORY = "pytorch/examples"
COMMIT = "77f55b9"
PATHS = ["imagenet"]
FOLDER = "imagenet"
EDITS = [
    ("imagenet/main.py", "RandomResizedCrop(224)", "RandomResizedCrop(64)"),
    ("imagenet/main.py", "Resize(256)", "Resize(72)"),
    ("imagenet/main.py", "CenterCrop(224)", "CenterCrop(64)"),
]
COMMAND = """--cpu --wait 500 --short 2 --steps 5 main.py data -a shufflenet_v2_x0_5 -j 1 -b 8
    --epochs 3 --dist-url env://"""
VERDICTS = {
    "files main.py:430": (
        "true",
        "under torchrun, without --multiprocessing-distributed, every rank saves the checkpoint",
        "read: the condition before save_checkpoint; mended for mp.spawn in pull request 462",
    ),
}

if __name__ == "__main__":
    image_folder("data", train=64, val=15, size=64)

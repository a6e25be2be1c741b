"""Barlow Twins: its loss is of the cross-correlation over all ranks."""

from made import image_folder

REPOSITORY = "facebookresearch/barlowtwins"
COMMIT = "8e8d284c"
EDITS = [
    ("main.py", "resnet50", "resnet18"),
    ("main.py", "2048", "512"),
    ("main.py", "RandomResizedCrop(224", "RandomResizedCrop(64"),
]
COMMAND = """--cpu --wait 500 --steps 2 main.py data --workers 1 --epochs 2 --batch-size 8
    --projector 32-32 --checkpoint-dir out/{run} --print-freq 1"""
VERDICTS = {
    "gradient main.py:216": (
        "true",
        "the all_reduce at main.py:216 is not differentiated: each gradient is 1/N",
        "shows.py barlowtwins; lightly's copy of the loss was mended for it, issue 1977",
    ),
}

if __name__ == "__main__":
    image_folder("data")

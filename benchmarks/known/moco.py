"""MoCo: a queue of keys from all ranks, shuffled between them."""

from made import image_folder

REPOSITORY = "facebookresearch/moco"
COMMIT = "78b69ca"
EDITS = [
    ("main_moco.py", "RandomResizedCrop(224", "RandomResizedCrop(64"),
    ("main_moco.py", "].view(-1)", "].reshape(-1)"),  # as PyTorch wants today
]
COMMAND = """--cpu --wait 500 --short 2 --steps 3 main_moco.py data -a shufflenet_v2_x0_5 -j 1 -b 8
    --epochs 4 --moco-k 16 --moco-dim 16 --dist-url tcp://127.0.0.1:23466
    --multiprocessing-distributed --world-size 1 --rank 0"""

if __name__ == "__main__":
    image_folder("data")

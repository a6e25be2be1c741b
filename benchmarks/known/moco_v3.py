"""MoCo v3: keys of all ranks, a momentum encoder."""

from made import image_folder

REPOSITORY = "facebookresearch/moco-v3"
COMMIT = "c349e6e"
PACKAGES = ["timm==0.4.12", "tensorboard"]
EDITS = [("main_moco.py", "RandomResizedCrop(224", "RandomResizedCrop(32")]
COMMAND = """--cpu --wait 400 --short 2 --steps 4 main_moco.py data -a resnet18 -j 0 -b 8 --epochs 3
    --moco-dim 16 --moco-mlp-dim 32 --dist-url tcp://127.0.0.1:23473
    --multiprocessing-distributed --world-size 1 --rank 0"""

if __name__ == "__main__":
    image_folder("data")

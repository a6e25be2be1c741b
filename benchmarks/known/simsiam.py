"""SimSiam."""

from made import image_folder

REPOSITORY = "facebookresearch/simsiam"
COMMIT = "a7bc177"
EDITS = [("main_simsiam.py", "RandomResizedCrop(224", "RandomResizedCrop(64")]
COMMAND = """--cpu --wait 500 --short 2 --steps 3 main_simsiam.py data -a resnet18 -j 1 -b 8
    --epochs 4 --dim 32 --pred-dim 16 --dist-url tcp://127.0.0.1:23467
    --multiprocessing-distributed --world-size 1 --rank 0"""

if __name__ == "__main__":
    image_folder("data")

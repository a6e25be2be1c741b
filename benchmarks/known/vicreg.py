"""VICReg: variances and covariances over all ranks."""

from made import image_folder

REPOSITORY = "facebookresearch/vicreg"
COMMIT = "4e12602"
EDITS = [("augmentations.py", "224,", "32,")]
COMMAND = """--cpu --wait 400 --short 2 --steps 4 main_vicreg.py --data-dir data --exp-dir out-{run}
    --arch resnet34 --mlp 16-16 --epochs 3 --batch-size 8 --num-workers 0"""

if __name__ == "__main__":
    image_folder("data")

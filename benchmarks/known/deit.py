"""DeiT: repeated augmentation, mixup, an EMA."""

from made import image_folder

REPOSITORY = "facebookresearch/deit"
COMMIT = "7e160fe"
PACKAGES = ["timm==0.4.12"]
COMMAND = """--cpu --wait 400 --short 3 --steps 6 --one "--batch-size 8" main.py
    --data-path data --data-set IMNET --model deit_tiny_patch16_224 --batch-size 4
    --epochs 3 --warmup-epochs 1 --num_workers 0 --mixup 0 --cutmix 0 --output_dir out-{run}"""

if __name__ == "__main__":
    image_folder("data", train=256, val=9, size=16)  # its sampler takes a multiple of 256

"""timm's train.py, with an EMA."""

from made import image_folder

REPOSITORY = "huggingface/pytorch-image-models"
COMMIT = "aa4b5850"
PACKAGES = ["huggingface_hub", "safetensors", "pyyaml"]
COMMAND = """--cpu --wait 400 --short 4 --steps 6 --one "-b 16" train.py data --device cpu
    --model test_efficientnet --num-classes 4 --img-size 32 -b 8 -j 1 --epochs 4 --output
    out/{run} --model-ema --dist-bn reduce --sched cosine --log-interval 1"""

if __name__ == "__main__":
    image_folder("data", train=64, val=15)

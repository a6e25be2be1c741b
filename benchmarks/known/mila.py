"""The multi-GPU example of Mila's documentation, by Slurm's variables."""

from made import cifar10

REPOSITORY = "mila-iqia/mila-docs"
COMMIT = "12229ef"
PATHS = ["docs/examples/distributed/multi_gpu"]
FOLDER = PATHS[0]
PACKAGES = ["rich", "tqdm"]
EDITS = [(f"{FOLDER}/main.py", "from torchvision.datasets import", "from small_cifar10 import")]
COMMAND = """--cpu --wait 400 --short 3 --steps 6 main.py --epochs 3 --batch-size 4"""

if __name__ == "__main__":
    cifar10(train=50)

"""SimCLR: its loss takes the outputs of all ranks."""

from made import cifar10

REPOSITORY = "Spijkervet/SimCLR"
COMMIT = "2738efa"
PACKAGES = ["pyyaml", "tensorboard"]
EDITS = [
    ("main.py", "torchvision.datasets.CIFAR10", '__import__("small_cifar10").CIFAR10'),
    ("main.py", "args.nodes > 1", "args.gpus > 1"),  # processes of one machine
]
COMMAND = """--cpu --wait 400 --short 2 --steps 4 --one "--batch_size 8" main.py --gpus {n}
    --batch_size 4 --image_size 32 --epochs 3 --workers 0 --model_path out-{run}"""
VERDICTS = {
    "gradient simclr/modules/gather.py:12": (
        "true",
        "the gather's backward takes the rank's own gradient: DDP's average is 1/N",
        "shows.py simclr; lightly's was mended for it, issue 1528; no report here was found",
    ),
    "random main.py:28": (
        "true",
        "one seed on all ranks: the same crops and colours",
        "shows.py dino",
    ),
    "files main.py:128": (
        "true",
        "nr, by which it is chosen who logs and saves, is the machine's number: each rank does",
        "read: the conditions before SummaryWriter and save_model",
    ),
}

if __name__ == "__main__":
    cifar10(32)

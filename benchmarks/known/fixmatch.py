"""FixMatch: labeled and unlabeled images, two loaders without an end, an EMA."""

from made import cifar10

REPOSITORY = "kekmodel/FixMatch-pytorch"
COMMIT = "98cedd6"
PACKAGES = ["tqdm", "tensorboard"]
EDITS = [
    ("train.py", "_iter.next()", "_iter.__next__()"),  # as PyTorch wants today
    ("dataset/cifar.py", "datasets.CIFAR10(", '__import__("small_cifar10").CIFAR10('),
    ("dataset/cifar.py", "(datasets.CIFAR10)", '(__import__("small_cifar10").CIFAR10)'),
    ("train.py", "args.model_depth = 28", "args.model_depth = 10"),
    ("train.py", "args.model_width = 2", "args.model_width = 1"),
]
COMMAND = """--cpu --wait 400 --steps 6 train.py --local_rank {rank} --num-workers 0
    --num-labeled 20 --batch-size 4 --mu 2 --total-steps 8 --eval-step 4 --seed 5 --no-progress
    --out out-{run}"""
VERDICTS = {
    "random train.py:330": (
        "true",
        "--seed, which its page gives, is one seed on all ranks: the same crops and flips",
        "shows.py dino; no report found",
    ),
}

if __name__ == "__main__":
    cifar10(40)

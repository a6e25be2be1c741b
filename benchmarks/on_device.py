"""complete/train.py without a loader: on random images that are on the device. The flags are
train.py's, and --steps-per-epoch.

python benchmarks/on_device.py --model resnet50 --image-size 224 --batch-size 256 --amp
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "complete"))
import train  # noqa: E402


def random_images(args, count):
    """Each image is the one before, 64 bytes further on: so many take little memory."""
    side = args.image_size
    numbers = torch.randint(256, (64 * count + 3 * side**2,), dtype=torch.uint8, device=args.device)
    images = numbers.as_strided((count, 3, side, side), (64, side**2, side, 1))
    return TensorDataset(images, torch.arange(count, device=args.device) % 10)


def load_data(args):
    count = args.batch_size * args.steps_per_epoch
    return random_images(args, count), random_images(args, max(64, args.batch_size)), 10


train.load_data = load_data
train.parser.add_argument("--steps-per-epoch", type=int, default=50)

if __name__ == "__main__":
    train.main(train.parser.parse_args())

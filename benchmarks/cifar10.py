"""complete/train.py with a ResNet-18 for images of 32 pixels. Of a folder of files, all images are
decoded once, and kept on the device. The flags are train.py's.

python benchmarks/cifar10.py --dataset FOLDER --batch-size 512 --amp --augment --lr 0.2
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchvision import datasets, models
from torchvision.transforms.functional import pil_to_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "complete"))
import train  # noqa: E402


def build_model(args, inputs, classes):
    """The last stages of torchvision's own model would have 2 x 2 pixels, and 1 x 1."""
    model = models.resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def load_data(args):
    if args.dataset == "cifar10":
        return load_from_torchvision(args)
    train_files = datasets.ImageFolder(f"{args.dataset}/train", pil_to_tensor)
    test_files = datasets.ImageFolder(f"{args.dataset}/test", pil_to_tensor)
    train_set, test_set = in_memory(train_files), in_memory(test_files)
    train_set.classes = train_files.classes
    return train_set, test_set, len(train_set.classes)


def in_memory(files):
    images = torch.stack([image for image, label in files])
    return TensorDataset(images, torch.tensor(files.targets))


load_from_torchvision = train.load_data
train.build_model, train.load_data = build_model, load_data

if __name__ == "__main__":
    train.main(train.parser.parse_args())

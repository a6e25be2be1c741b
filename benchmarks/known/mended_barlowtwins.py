"""Barlow Twins: the evaluation of its features, by fine-tuning."""

import torch
import torchvision
from made import image_folder

REPOSITORY = "facebookresearch/barlowtwins"
BEFORE, AFTER = "a7a74fc^", "a7a74fc"
FAULT = "the backbone is not wrapped in DDP: its gradients are not averaged (issue 22)"
LINES = ["evaluate.py:157", "evaluate.py:158"]  # which the mended commit replaces
EDITS = [
    ("evaluate.py", "resnet50()", "shufflenet_v2_x2_0()"),
    ("evaluate.py", "RandomResizedCrop(224)", "RandomResizedCrop(32)"),
    ("evaluate.py", "Resize(256)", "Resize(36)"),
    ("evaluate.py", "CenterCrop(224)", "CenterCrop(32)"),
]
COMMAND = """--cpu --wait 400 --steps 2 evaluate.py data weights.pth --weights finetune --workers 0
    --epochs 2 --batch-size 8 --lr-backbone 0.01 --checkpoint-dir out/{run} --print-freq 1"""

if __name__ == "__main__":
    image_folder("data")
    # Of 2,048 features, as theirs, and without the last layer.
    weights = torchvision.models.shufflenet_v2_x2_0().state_dict()
    torch.save({name: each for name, each in weights.items() if "fc." not in name}, "weights.pth")

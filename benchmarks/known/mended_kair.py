"""KAIR: super-resolution, options in a file."""

import json
import re
from pathlib import Path

from made import image_folder, write

REPOSITORY = "cszn/KAIR"
BEFORE, AFTER = "f4573f3^", "f4573f3"
FAULT = "no set_epoch: each epoch has the same order (pull request 106)"
LINES = ["main_train_psnr.py:118", "main_train_psnr.py:168"]
REMARK = "true: all ranks have one seed, and so the same crops and flips (random)"
PATHS = ["main_train_psnr.py", "options", "utils", "data", "models"]
PACKAGES = ["opencv-python-headless", "matplotlib", "scipy", "requests", "timm==0.4.12", "einops"]
EDITS = [("models/model_base.py", "torch.cuda.current_device()", "0")]
COMMAND = """--cpu --wait 400 --short 3 --steps 8 --one "--dist ''" main_train_psnr.py --dist yes
    --opt small-{run}.json"""

if __name__ == "__main__":
    text = Path("options/train_msrresnet_psnr.json").read_text()
    settings = json.loads(re.sub("//.*", "", text))
    settings["gpu_ids"] = [0, 1]  # divides the batch size, with --dist
    settings["netG"] |= {"nc": 8, "nb": 1}
    settings["train"] |= {"manual_seed": 1}
    settings["datasets"]["train"] |= {"H_size": 32, "dataroot_H": "images/train/n00000000"}
    settings["datasets"]["train"] |= {"dataloader_batch_size": 4, "dataloader_num_workers": 0}
    settings["datasets"]["test"] |= {"dataroot_H": "images/val/n00000000"}
    for run in "one", "all", "again":  # the folder of its output is in the options
        settings["path"]["root"] = f"out-{run}"
        write(f"small-{run}.json", json.dumps(settings, indent=1))
    image_folder("images", train=16, val=2, classes=1, suffix="png")

"""pytorch-distributed, the scripts of a Chinese tutorial: ImageNet by torch.distributed.launch."""

from made import image_folder

REPOSITORY = "tczhangzhi/pytorch-distributed"
COMMIT = "cd12856"
EDITS = [
    ("distributed.py", "RandomResizedCrop(224)", "RandomResizedCrop(64)"),
    ("distributed.py", "Resize(256)", "Resize(72)"),
    ("distributed.py", "CenterCrop(224)", "CenterCrop(64)"),
    ("distributed.py", "].view(-1)", "].reshape(-1)"),  # as PyTorch wants today
]
COMMAND = """--cpu --wait 500 --steps 3 distributed.py --data data -a shufflenet_v2_x0_5 -b 8
    --epochs 4 --local_rank {rank}"""

if __name__ == "__main__":
    image_folder("data", val=7)

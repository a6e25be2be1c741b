"""SwAV: codes by Sinkhorn-Knopp over the scores of all ranks."""

from pathlib import Path

from made import image_folder, write

REPOSITORY = "facebookresearch/swav"
COMMIT = "06b1b7c"
PACKAGES = ["pandas", "scipy"]
COMMAND = """--cpu --wait 500 --short 2 --steps 4 main_swav.py --data_path data/train --epochs 3
    --batch_size 4 --size_crops 32 --nmb_crops 2 --nmb_prototypes 8 --feat_dim 16 --hidden_mlp 32
    --workers 0 --use_fp16 false --warmup_epochs 1 --freeze_prototypes_niters 1 --base_lr 0.1
    --dump_path out-{run}"""

LARC = """
class LARC:
    def __init__(self, optimizer, trust_coefficient, clip):
        self.optim = optimizer

    def __getattr__(self, name):
        return getattr(self.optim, name)
"""
VERDICTS = {
    "random main_swav.py:268": (
        "true",
        "one seed on all ranks: the same crops and colours",
        "shows.py dino; no report found",
    ),
    "files src/utils.py:84": (
        "true",
        "each rank writes its flags, among them its rank, to one file: the last one's stay",
        "read: initialize_exp, which every rank calls",
    ),
}

if __name__ == "__main__":
    write("apex/__init__.py", "amp = None\n")  # for GPUs; without its rates for each layer
    write("apex/parallel/__init__.py", "")
    write("apex/parallel/LARC.py", LARC)
    for run in "one", "all", "again":
        Path(f"out-{run}").mkdir()
    image_folder("data")

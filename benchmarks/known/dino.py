"""DINO: a student, a teacher that follows it, a centre of the teacher's outputs over all ranks."""

from made import image_folder

REPOSITORY = "facebookresearch/dino"
COMMIT = "7c446df"
EDITS = [("main_dino.py", '+ torch.hub.list("facebookresearch/xcit:main")', "")]  # a download
COMMAND = """--cpu --wait 500 --short 2 --steps 5 main_dino.py --arch vit_tiny --patch_size 32
    --out_dim 64 --local_crops_number 1 --batch_size_per_gpu 2 --epochs 4 --warmup_epochs 1
    --warmup_teacher_temp_epochs 1 --data_path data/train --output_dir out/{run} --num_workers 1"""
VERDICTS = {
    "random utils.py:377": (
        "true",
        "fix_random_seeds gives all ranks one seed: the same crops and the same drop path",
        "shows.py dino; DeiT and DETR add the rank to the seed for this (detr, issue 297)",
    ),
}

if __name__ == "__main__":
    image_folder("data", size=64)

"""Masked autoencoders: pretraining."""

from made import image_folder

REPOSITORY = "facebookresearch/mae"
COMMIT = "efb2a80"
PACKAGES = ["timm==0.4.12", "tensorboard"]
EDITS = [
    ("main_pretrain.py", "0.3.2", "0.4.12"),
    ("util/misc.py", "torch._six", "math"),
    ("util/pos_embed.py", "np.float)", "float)"),
    ("models_mae.py", "qk_scale=None, ", ""),
    ("models_mae.py", " embed_dim=768, depth=12", " embed_dim=36, depth=1"),
    ("models_mae.py", "embed_dim=512, decoder_depth=8", "embed_dim=32, decoder_depth=1"),
]
COMMAND = """--cpu --wait 400 --short 3 --steps 6 --one "--batch_size 8" main_pretrain.py
    --data_path data --model mae_vit_base_patch16 --batch_size 4 --epochs 3 --warmup_epochs 1
    --num_workers 0 --output_dir out-{run} --log_dir out-{run}"""

if __name__ == "__main__":
    image_folder("data", train=32)

"""modded-nanogpt, of the summer of 2024: one file of tokens, split by position."""

import numpy as np

REPOSITORY = "KellerJordan/modded-nanogpt"
COMMIT = "b9d141ea"
EDITS = [("train_gpt2.py", "n_layer=12, n_head=12, n_embd=768", "n_layer=2, n_head=2, n_embd=32")]
COMMAND = """--cpu --steps 6 --one "--batch_size 8" train_gpt2.py --input_bin train.bin
    --input_val_bin val.bin --output_dir {run} --model d12 --batch_size 4 --sequence_length 32
    --num_iterations 8 --val_loss_every 3 --val_max_steps 4 --warmup_iters 2 --warmdown_iters 2
    --save_every 100"""


def make_data():
    for seed, split in enumerate(["train", "val"]):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, 6000
        tokens = np.random.default_rng(seed).integers(0, 50257, 6000).astype(np.uint16)
        with open(f"{split}.bin", "wb") as file:
            file.write(header.tobytes() + tokens.tobytes())


if __name__ == "__main__":
    make_data()

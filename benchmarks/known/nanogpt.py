"""nanoGPT: micro-batches at random places of a file of tokens."""

import pickle
from pathlib import Path

import numpy as np

REPOSITORY = "karpathy/nanoGPT"
COMMIT = "3adf61e1"
COMMAND = """--cpu --steps 6 train.py --dataset=tiny --compile=False --dtype=float32 --n_layer=2
    --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=4
    --eval_interval=5 --eval_iters=2 --warmup_iters=0 --out_dir={run}"""

if __name__ == "__main__":
    Path("data/tiny").mkdir()
    random = np.random.default_rng(0)
    for split, tokens in ("train", 20_000), ("val", 3_000):
        random.integers(0, 65, tokens).astype(np.uint16).tofile(f"data/tiny/{split}.bin")
    with open("data/tiny/meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": 65}, file)

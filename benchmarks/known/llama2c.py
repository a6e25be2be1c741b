"""llama2.c: a stream of tokens, shuffled by a generator for each rank and worker."""

from pathlib import Path

import numpy as np

REPOSITORY = "karpathy/llama2.c"
COMMIT = "350e04f"
REMARK = """the look at the batch size is false: passes in a step are divided by the ranks, so that
    the batch is the same"""
PACKAGES = ["sentencepiece", "requests", "tqdm"]
COMMAND = """--cpu --steps 6 train.py --out_dir={run} --vocab_source=custom --vocab_size=512
    --dim=32 --n_layers=2 --n_heads=2 --n_kv_heads=2 --max_seq_len=32 --batch_size=4
    --gradient_accumulation_steps=4 --eval_interval=4 --eval_iters=2 --max_iters=8
    --dtype=float32 --compile=False --warmup_iters=1"""

if __name__ == "__main__":
    Path("data/tok512").mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(3):
        tokens = random.integers(0, 512, 6000).astype(np.uint16)
        tokens.tofile(f"data/tok512/data{number:02d}.bin")

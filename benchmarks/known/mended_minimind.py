"""minimind: pretraining."""

import minimind
from made import write

REPOSITORY = minimind.REPOSITORY
BEFORE, AFTER = "463044e^", "463044e"
FAULT = "no set_epoch: each epoch has the same order"
LINES = ["train_pretrain.py:180", "train_pretrain.py:36"]
REMARK = "a known deviation: each rank divides by its own number of tokens (value)"
PATHS, FOLDER, PACKAGES = minimind.PATHS, "trainer", minimind.PACKAGES
COMMAND = """--cpu --steps 6 --short 3 train_pretrain.py --data_path pre.jsonl --out_dir {run}
    --batch_size 4 --accumulation_steps 1 --num_workers 0 --hidden_size 32 --num_hidden_layers 1
    --max_seq_len 64 --log_interval 1 --save_interval 50 --epochs 3 --dtype float32"""

if __name__ == "__main__":
    write("pre.jsonl", minimind.lines(48, lambda: {"text": minimind.words(3, 25)}))

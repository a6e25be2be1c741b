"""PyTorch's minGPT-ddp: characters of a text, hydra, a random part for the test."""

from pathlib import Path

from made import text, write

REPOSITORY = "pytorch/examples"
COMMIT = "77f55b9"
PATHS = ["distributed"]
FOLDER = "distributed/minGPT-ddp/mingpt"
EDITS = [("distributed/minGPT-ddp/mingpt/main.py", "count = 2", "count = 1")]  # one process, too
PACKAGES = ["hydra-core", "fsspec"]
COMMAND = """--cpu --short 4 --steps 6 main.py data_config.path=input.txt data_config.truncate=1.0
    data_config.block_size=16 gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=32
    trainer_config.batch_size=8 trainer_config.use_amp=False trainer_config.save_every=1
    trainer_config.data_loader_workers=0"""

if __name__ == "__main__":
    Path("boto3.py").write_text("")  # for S3, which is not used
    write("input.txt", text())

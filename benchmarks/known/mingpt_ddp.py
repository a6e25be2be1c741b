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
SPLIT = (
    "true",
    "random_split without a generator: each rank has its own split, trains on others' test samples",
    "shows.py mingpt_ddp; no report found",
)
VERDICTS = {
    "samples trainer.py:120": SPLIT,
    "split main.py:28": SPLIT,
    "files main.py:57": (
        "known deviation",
        "hydra writes its folder on each rank: the same text to the same file",
        "read: hydra.main is around main, which every rank calls",
    ),
}

if __name__ == "__main__":
    Path("boto3.py").write_text("")  # for S3, which is not used
    write("input.txt", text())

"""FunASR: a trainer that adds up gradients over batches."""

from made import own_loop

REPOSITORY = "modelscope/FunASR"
BEFORE, AFTER = "d410a5652^", "d410a5652"
FAULT = "no_sync() around the batch before the step: gradients are not averaged (pull request 3472)"
LINES = ["funasr/train_utils/trainer_ds.py:651"]
PATHS = ["funasr/train_utils", "funasr/utils"]
PACKAGES = ["omegaconf", "tqdm"]
COMMAND = "--cpu --steps 6 funasr_trainer.py"

if __name__ == "__main__":
    own_loop("funasr_trainer.py")

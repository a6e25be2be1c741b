"""Lambda's distributed training guide, chapter 2, of 2024."""

import lambda_ddp

REPOSITORY, PACKAGES = lambda_ddp.REPOSITORY, [*lambda_ddp.PACKAGES, "wandb"]
BEFORE, AFTER = "574444a^", "574444a"
FAULT = "no set_epoch: each epoch has the same order (issue 40)"
LINES = ["train_llm.py:78", "train_llm.py:141"]
REMARK = "true: all ranks have one seed, and so the same dropout (random)"
FOLDER = "02-multi-gpu"
EDITS = [(f"{FOLDER}/train_llm.py", "torch.bfloat16", "torch.float32")]
COMMAND = lambda_ddp.COMMAND.replace("--seq-length 32 --log-freq 1", "--log-freq 1000")

if __name__ == "__main__":
    lambda_ddp.make_data()

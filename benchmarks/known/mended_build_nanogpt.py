"""build-nanogpt: gradients are accumulated over micro-batches."""

import build_nanogpt

REPOSITORY = build_nanogpt.REPOSITORY
BEFORE, AFTER = "f6d194b^", "f6d194b"
FAULT = "require_backward_grad_sync set after forward: gradients are not averaged (pull request 30)"
LINES = ["train_gpt2.py:497", "train_gpt2.py:498", "train_gpt2.py:499"]
EDITS = build_nanogpt.EDITS
PACKAGES = build_nanogpt.PACKAGES
COMMAND = build_nanogpt.COMMAND

if __name__ == "__main__":
    build_nanogpt.make_data()

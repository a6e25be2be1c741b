"""modded-nanogpt, before its losses were those of all ranks."""

import modded_nanogpt

REPOSITORY = modded_nanogpt.REPOSITORY
BEFORE, AFTER = "b9d141ea^", "b9d141ea"
FAULT = "the losses that are printed are of rank 0's share alone (issue 2)"
LINES = ["train_gpt2.py:375", "train_gpt2.py:378", "train_gpt2.py:416", "train_gpt2.py:417"]
REMARK = """its tokens here are random, so that all losses are nearly one: what rank 0 prints of its
    share is within a printed number's limit"""
EDITS = modded_nanogpt.EDITS
COMMAND = modded_nanogpt.COMMAND

if __name__ == "__main__":
    modded_nanogpt.make_data()

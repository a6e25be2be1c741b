"""Build a Large Language Model From Scratch, appendix A."""

REPOSITORY = "rasbt/LLMs-from-scratch"
BEFORE, AFTER = "7513360^", "7513360"
FAULT = "no set_epoch: each epoch has the same order"
LINES = ["DDP-script.py:112", "DDP-script.py:138"]
PATHS = ["appendix-A"]
FOLDER = "appendix-A/01_main-chapter-code"
COMMAND = "--cpu --steps 6 DDP-script.py"

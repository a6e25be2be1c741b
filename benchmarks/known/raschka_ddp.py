"""Build a Large Language Model From Scratch, appendix A: DDP on five points in a plane."""

REPOSITORY = "rasbt/LLMs-from-scratch"
COMMIT = "28c65cd"
PATHS = ["appendix-A"]
FOLDER = "appendix-A/01_main-chapter-code"
COMMAND = "--cpu --steps 4 DDP-script-torchrun.py"

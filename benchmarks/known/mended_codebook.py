"""vector-quantize-pytorch: a codebook that follows averages of what is assigned to it."""

from made import own_loop

REPOSITORY = "lucidrains/vector-quantize-pytorch"
BEFORE, AFTER = "315098f^", "315098f"
FAULT = "by default, the codebook follows rank 0's share alone"
LINES = ["vector_quantize_pytorch/vector_quantize_pytorch.py"]
PACKAGES = ["einops", "einx"]
COMMAND = """--cpu --steps 4 codebook.py
    vector_quantize_pytorch.vector_quantize_pytorch.VectorQuantize codebook_size=8"""

if __name__ == "__main__":
    own_loop("codebook.py")

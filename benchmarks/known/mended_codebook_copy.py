"""vector-quantize-pytorch: sums for a codebook, over all ranks."""

from made import own_loop

REPOSITORY = "lucidrains/vector-quantize-pytorch"
BEFORE, AFTER = "e84e394^", "e84e394"
FAULT = "all_reduce of a contiguous copy, which is then not used (issue 101)"
LINES = ["vector_quantize_pytorch/vector_quantize_pytorch.py:496"]
PACKAGES = ["einops", "einx"]
COMMAND = """--cpu --steps 4 codebook.py
    vector_quantize_pytorch.vector_quantize_pytorch.VectorQuantize codebook_size=8"""

if __name__ == "__main__":
    own_loop("codebook.py")

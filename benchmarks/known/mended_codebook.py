"""vector-quantize-pytorch: a codebook that follows averages of what is assigned to it."""

from made import own_loop

REPOSITORY = "lucidrains/vector-quantize-pytorch"
BEFORE, AFTER = "315098f^", "315098f"
FAULT = "by default, the codebook follows rank 0's share alone"
LINES = [  # an all_reduce that is none, by default; and what its sum goes into
    f"vector_quantize_pytorch/vector_quantize_pytorch.py:{number}"
    for number in (492, 493, 496, 497)
]
PACKAGES = ["einops", "einx"]
COMMAND = """--cpu --steps 4 codebook.py
    vector_quantize_pytorch.vector_quantize_pytorch.VectorQuantize codebook_size=8"""

if __name__ == "__main__":
    own_loop("codebook.py")

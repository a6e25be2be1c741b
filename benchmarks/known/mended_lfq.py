"""vector-quantize-pytorch: a loss of the codes' average over all ranks."""

from made import own_loop

REPOSITORY = "lucidrains/vector-quantize-pytorch"
BEFORE, AFTER = "7c7c69f^", "c302cf3"
FAULT = "an all_reduce that is not differentiated: gradients are 1/N (issue 158)"
LINES = ["vector_quantize_pytorch/lookup_free_quantization.py:39"]
REMARK = "after it, all_reduce's result is not taken: a look (vector_quantize in known.csv)"
PACKAGES = ["einops", "einx"]
COMMAND = """--cpu --steps 4 codebook.py
    vector_quantize_pytorch.lookup_free_quantization.LFQ codebook_size=256"""

if __name__ == "__main__":
    own_loop("codebook.py")

"""vector-quantize-pytorch: a codebook with an optimizer of its own, which steps in forward."""

from made import own_loop

REPOSITORY = "lucidrains/vector-quantize-pytorch"
BEFORE, AFTER = "2b367e5^", "721e1e4"
FAULT = "each rank's optimizer of the codebook steps by its own gradients (issue 222)"
LINES = ["vector_quantize_pytorch/vector_quantize_pytorch.py:1066"]
REMARK = "the first mend (2b367e5) raises AttributeError; this one is the next that runs"
PACKAGES = ["einops", "einx"]
COMMAND = """--cpu --steps 4 codebook.py
    vector_quantize_pytorch.vector_quantize_pytorch.VectorQuantize codebook_size=8
    learnable_codebook=True ema_update=False
    'in_place_codebook_optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)'"""

if __name__ == "__main__":
    own_loop("codebook.py")

"""build-nanogpt: shards of tokens, split by position, and HellaSwag."""

import json

import numpy as np
from made import write

REPOSITORY = "karpathy/build-nanogpt"
COMMIT = "6104ab1"
EDITS = [
    ("train_gpt2.py", "524288", "512"),  # the batch; then the model
    ("train_gpt2.py", "B = 64", "B = 4"),
    ("train_gpt2.py", "T = 1024", "T = 32"),
    ("train_gpt2.py", "vocab_size=50304", "vocab_size=50304, n_layer=1, n_head=2, n_embd=16"),
]
PACKAGES = ["requests", "tqdm"]
COMMAND = "--cpu --steps 4 train_gpt2.py"
VERDICTS = {
    "files train_gpt2.py:373": (
        "true",
        "every rank opens the log to write, and so clears what rank 0 has written",
        "shows.py build_nanogpt; no report found",
    ),
}

TOKENIZER = """
class Encoding:
    encode = staticmethod(lambda text: [ord(character) % 256 for character in text])
    decode = staticmethod(lambda tokens: "".join(chr(32 + token % 90) for token in tokens))

def get_encoding(name):
    return Encoding()
"""


def make_data():
    write("tiktoken.py", TOKENIZER)  # the real one downloads its words
    random = np.random.default_rng(0)
    write("edu_fineweb10B/README", "")
    for name in "val_000000", "train_000001", "train_000002":
        tokens = random.integers(0, 50257, 12_000).astype(np.uint16)
        np.save(f"edu_fineweb10B/edufineweb_{name}.npy", tokens)
    words = "the a man dog runs eats over house very big small red".split()
    lines = []
    for _ in range(11):
        context, *endings = (" ".join(random.choice(words, count)) for count in (3, 2, 2, 2, 2))
        example = {"ctx": context, "label": int(random.integers(4)), "endings": endings}
        lines.append(json.dumps(example))
    write("hellaswag/hellaswag_val.jsonl", "\n".join(lines) + "\n")


if __name__ == "__main__":
    make_data()

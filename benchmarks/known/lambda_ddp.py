"""Lambda's distributed training guide, chapter 2: DDP, and ZeRO's optimizer."""

from made import text, write

REPOSITORY = "LambdaLabsML/distributed-training-guide"
COMMIT = "aed7489"
FOLDER = "02-distributed-data-parallel"
PACKAGES = ["transformers", "datasets", "tokenizers", "tqdm"]
EDITS = [(f"{FOLDER}/train_llm.py", "torch.bfloat16", "torch.float32")]
COMMAND = """--cpu --wait 400 --short 3 --steps 6 train_llm.py --dataset-name texts
    --model-name tiny_gpt2 --num-epochs 3 --batch-size 2 --seq-length 32 --log-freq 1
    --experiment-name {run} --save-dir out"""
VERDICTS = {
    "random train_llm.py:150": (
        "true",
        "one seed on all ranks, and so the same dropout",
        "shows.py dino, for crops; no report found",
    ),
}


def make_data():
    """A GPT-2 with one layer, its tokenizer, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = text(900).split()
    tokens = {word: number for number, word in enumerate(["[UNK]", *sorted({*words})])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = {"unk_token": "[UNK]", "model_max_length": 32}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    fast.save_pretrained("tiny_gpt2")
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2Config(vocab_size=len(tokens), **settings).save_pretrained("tiny_gpt2")
    lines = [" ".join(words[start : start + 30]) for start in range(0, 900, 30)]
    write("texts/train.txt", "\n".join(lines))


if __name__ == "__main__":
    make_data()

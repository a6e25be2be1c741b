"""Turn a finished run of train_lm.py into a folder that Hugging Face's transformers loads.

pip install transformers
python large/export_hf.py runs/lm my_model

Its model is a Qwen3 without grouped queries: RMSNorm, rotary positions, normalized queries and
keys, SwiGLU, a head of its own. If you change LanguageModel, this no longer fits. Its tokenizer
encodes a text as prepare_texts.py does. Neither needs a network.
"""

import argparse
import base64
import os
import sys
import tempfile
from pathlib import Path

import torch
from prepare_texts import END_OF_TEXT, build_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

NAMES = {  # of a block's weights, here and there; of several, the parts of one matrix
    "attention_norm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "query_norm": ["self_attn.q_norm"],
    "key_norm": ["self_attn.k_norm"],
    "attention_out": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp_out": ["mlp.down_proj"],
}
parser = argparse.ArgumentParser(description="Turn a run into a folder that transformers loads.")
parser.add_argument("run", type=Path, help="folder of a finished run")
parser.add_argument("output", type=Path, help="folder for the model: new, or empty")


def convert(saved):
    """A Qwen3ForCausalLM from what model.pt has."""
    config, weights = saved["config"], saved["model"]
    end_of_text = build_tokenizer(saved["tokenizer"]).end_of_text
    theirs = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["head.norm.weight"],
        "lm_head.weight": weights["head.scores.weight"],
    }
    for layer in range(config["layers"]):
        for name, names in NAMES.items():
            parts = weights[f"blocks.{layer}.{name}.weight"].chunk(len(names))
            for other, part in zip(names, parts, strict=True):
                theirs[f"model.layers.{layer}.{other}.weight"] = part.contiguous()
    description = Qwen3Config(
        vocab_size=config["vocabulary"],
        hidden_size=config["width"],
        intermediate_size=theirs["model.layers.0.mlp.gate_proj.weight"].shape[0],
        num_hidden_layers=config["layers"],
        num_attention_heads=config["heads"],
        num_key_value_heads=config["heads"],
        head_dim=config["width"] // config["heads"],
        max_position_embeddings=saved["length"],
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=end_of_text,  # train_lm.py has it before each document
        eos_token_id=end_of_text,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(description)
    model.load_state_dict(theirs)
    return model


def convert_tokenizer(description, length):
    """A tokenizer of transformers from what tokenizer.json says (see prepare_texts.py)."""
    if description["name"] == "bytes":
        ids = {bytes([byte]): byte for byte in range(256)}
        special, split = {END_OF_TEXT: 256}, []
    else:
        ids = {base64.b64decode(x): i for x, i in description["mergeable_ranks"].items()}
        special = description["special_tokens"]
        pattern = Regex(for_oniguruma(description["pat_str"]))
        split = [pre_tokenizers.Split(pattern, "isolated")]
    # Theirs writes a byte as a letter. Whole words that are tokens need no merges, as in tiktoken.
    letters = bytes_to_unicode()

    def spelled(token):
        return "".join(letters[byte] for byte in token)

    # All pairs: transformers needs each one by name, tiktoken none.
    merges = [tuple(map(spelled, pair)) for pair in find_merges(ids)]
    vocabulary = special | {spelled(token): i for token, i in ids.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )


def find_merges(ids):
    """The pairs that become each token of several bytes, in the order of their ids. tiktoken merges
    whatever two parts become the token of the lowest id."""
    for token in sorted(ids, key=ids.get):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        yield from sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def for_oniguruma(pattern):
    """tiktoken's pattern for the library that finds words here. There, `$` is also the end of a
    line, and `{1,3}+` is one or more times; without the plus it is the same at the end of a branch.
    """
    return pattern.replace("$", r"\z").replace("{1,3}+", "{1,3}")


if __name__ == "__main__":
    args = parser.parse_args()
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        parser.error(f"{args.output} is there already: remove it, or choose another folder")
    if not (args.run / "model.pt").exists():
        parser.error(f"{args.run} has no model.pt: only a run that has ended can be exported")
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal cannot show
    saved = torch.load(args.run / "model.pt", mmap=True, weights_only=True)
    output = args.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside it until it is whole: half a model looks like a model.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{output.name}.") as folder:
        whole = Path(folder) / "model"
        convert(saved).save_pretrained(whole)
        convert_tokenizer(saved["tokenizer"], saved["length"]).save_pretrained(whole)
        os.rename(whole, output)
    print(f"{args.output}: load it by AutoModelForCausalLM and AutoTokenizer.from_pretrained")
    print(f'begin each prompt with {END_OF_TEXT}, as in tokenizer("{END_OF_TEXT}To be")')

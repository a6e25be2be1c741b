"""Turn a finished run of train_lm.py into a folder that Hugging Face's transformers loads.

pip install transformers
python large/export_hf.py runs/lm my_model

Its model is a Qwen3 without grouped queries: RMSNorm, rotary positions, normalized queries and
keys, SwiGLU, a head of its own. If you change LanguageModel, this no longer fits.
"""

import argparse
from pathlib import Path

import torch
from prepare_texts import build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

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
parser.add_argument("output", type=Path, help="folder for the model")


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


if __name__ == "__main__":
    args = parser.parse_args()
    saved = torch.load(args.run / "model.pt", mmap=True, weights_only=True)
    convert(saved).save_pretrained(args.output)
    print(f"{args.output}: load it by AutoModelForCausalLM.from_pretrained")

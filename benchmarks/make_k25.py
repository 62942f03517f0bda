"""A K2.5 checkpoint with the released geometry of its tower and random weights, as transformers writes it.

    python benchmarks/make_k25.py build/k25-random

Its text model is a small one: only the tower and the projector are for benchmarks.
"""

import argparse
import json
from pathlib import Path

import torch

TEXT = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "n_routed_experts": 2,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}  # fmt: skip
PIXELS = {
    "image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 16384, "patch_size": 14, "merge_size": 2,
    "size": {"max_height": 512, "max_width": 512}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def main() -> None:
    from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=TEXT))
    for name, parameter in model.model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0, 0.02)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PIXELS, indent=2) + "\n")


if __name__ == "__main__":
    main()

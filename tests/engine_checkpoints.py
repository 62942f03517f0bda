"""Small random checkpoints of every family, whole, and the models that were saved into them."""

import json
import shutil
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import parity_helpers as parity

WORDS = ("the ", "in", "on", "er", "th", "pict", "ure", "what", " is", " this", "?")
"""Merged tokens of the small vocabularies, so that text is not bytes alone."""

QWEN_MARKS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
KIMI_MARKS = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>",
    "<|media_end|>", "<|media_pad|>", "<|media_start|>", "<think>", "</think>",
)  # fmt: skip
VOCABULARY = 256 + len(WORDS) + 32
"""Bytes, words and room for marks; a few ids at the end stand for nothing."""

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY, "n_routed_experts": 4,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "eos_token_id": 1,
}  # fmt: skip


def mark_ids(marks: Sequence[str]) -> dict[str, int]:
    return {mark: 256 + len(WORDS) + number for number, mark in enumerate(marks)}


@dataclass
class Whole:
    """A checkpoint and the model that was saved into it."""

    directory: Path
    model: torch.nn.Module
    family: str


def lively(model: torch.nn.Module, seed: int, memory: float = 1.0, tied: bool = False) -> torch.nn.Module:
    """Random weights under which greedy text is not one token for ever and depends on the picture.

    `memory` scales what attention brings, against what the last token alone says.
    """
    parity.randomize(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("embed_tokens.weight"):
                scale = value.shape[1] ** -0.5 if tied else 1.0  # or the last token would be the next
                value.copy_(scale * torch.randn(value.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
            elif name.endswith("self_attn.o_proj.weight"):
                value.mul_(memory)
            elif ".experts." in name and value.ndim == 3:
                value.copy_(torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5)
    return model.eval()


def write_qwen_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_alphabet()
    vocabulary = {character: byte for byte, character in alphabet.items()}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        symbols = "".join(alphabet[byte] for byte in word.encode())
        for end in range(2, len(symbols) + 1):
            if symbols[:end] not in vocabulary:
                vocabulary[symbols[:end]] = -1
                merges.append((symbols[: end - 1], symbols[end - 1]))
    kept = [token for token, number in vocabulary.items() if number < 0][: len(WORDS)]
    vocabulary = {token: number for token, number in vocabulary.items() if number >= 0}
    vocabulary.update({token: 256 + number for number, token in enumerate(kept)})
    merges = [pair for pair in merges if "".join(pair) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in QWEN_MARKS])
    assert {mark: tokenizer.token_to_id(mark) for mark in QWEN_MARKS} == mark_ids(QWEN_MARKS)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def write_kimi_tokenizer(directory: Path) -> None:
    ranks: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
    pieces = dict.fromkeys(word.encode()[:end] for word in WORDS for end in range(2, len(word.encode()) + 1))
    for piece in list(pieces)[: len(WORDS)]:
        ranks[piece] = len(ranks)
    lines = [f"{b64encode(piece).decode()} {rank}" for piece, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    decoder = {
        str(number): {"content": mark, "special": True} for mark, number in mark_ids(KIMI_MARKS).items()
    }
    settings = {"added_tokens_decoder": decoder, "tokenizer_class": "TikTokenTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def qwen_marks_in_config() -> dict[str, int]:
    ids = mark_ids(QWEN_MARKS)
    return {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip


PIXELS = {**parity.QWEN_PIXELS, "min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}
VIDEO_PIXELS = {**PIXELS, "max_pixels": 24 * 28 * 28}


def _saved_qwen(model: torch.nn.Module, directory: Path, family: str, patch: int, seed: int) -> Whole:
    tied = bool(model.config.tie_word_embeddings)
    lively(model, seed, memory=2.0 if tied else 1.0, tied=tied).save_pretrained(directory)
    for name, pixels in (("preprocessor_config", PIXELS), ("video_preprocessor_config", VIDEO_PIXELS)):
        (directory / f"{name}.json").write_text(json.dumps({**pixels, "patch_size": patch}))
    write_qwen_tokenizer(directory)
    return Whole(directory, model, family)


def qwen2_vl(directory: Path) -> Whole:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 2, "embed_dim": 48, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=dict(TEXT), vision_config=vision, **qwen_marks_in_config())
    return _saved_qwen(Qwen2VLForConditionalGeneration(config), directory, "qwen2_vl", 14, 71)


def qwen2_5_vl(directory: Path) -> Whole:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 2, "hidden_size": 48, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 80,
        "window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 4,
    }  # fmt: skip
    text = {**TEXT, "tie_word_embeddings": True}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **qwen_marks_in_config()
    )
    return _saved_qwen(Qwen2_5_VLForConditionalGeneration(config), directory, "qwen2_5_vl", 14, 32)


def qwen3_vl(directory: Path) -> Whole:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {
        "depth": 3, "hidden_size": 48, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 80,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = {**TEXT, "head_dim": 16}
    text["rope_parameters"] = {**TEXT["rope_parameters"], "mrope_interleaved": True}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **qwen_marks_in_config())
    return _saved_qwen(Qwen3VLForConditionalGeneration(config), directory, "qwen3_vl", 16, 23)


def kimi_k25(directory: Path, layout: str = "released") -> Whole:
    """`layout`: "native" is transformers' own, "raw" what it takes for the released one."""
    from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    vision = {
        "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 2, "intermediate_size": 80,
        "pos_emb_height": 8, "pos_emb_width": 8,
    }  # fmt: skip
    config = Kimi_K25Config(
        text_config=dict(DEEPSEEK), vision_config=vision, projection_hidden_size=48,
        tie_word_embeddings=False, image_token_id=mark_ids(KIMI_MARKS)["<|media_pad|>"],
        video_token_id=VOCABULARY - 1, vision_start_token_id=mark_ids(KIMI_MARKS)["<|media_begin|>"],
        vision_end_token_id=mark_ids(KIMI_MARKS)["<|media_end|>"],
    )  # fmt: skip
    model = lively(Kimi_K25ForConditionalGeneration(config), 54, memory=2.0)
    with torch.no_grad():  # transformers takes a pad that is written for id 0, so that none must be
        model.lm_head.weight[[config.image_token_id, config.video_token_id]] = 0
    model.save_pretrained(directory, save_original_format=layout != "native")
    if layout == "released":
        file = directory / "model.safetensors"
        tensors = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor.clone()
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file)
    stored = json.loads((directory / "config.json").read_text())
    stored["media_placeholder_token_id"] = config.image_token_id
    (directory / "config.json").write_text(json.dumps(stored))
    media = {**parity.K25_MEDIA, "in_patch_limit": 256}
    (directory / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    write_kimi_tokenizer(directory)
    return Whole(directory, model, "kimi_k25")


class KimiVL(torch.nn.Module):
    """Kimi-VL, which transformers does not have: nemo-automodel's tower before transformers' DeepSeek-V3."""

    def __init__(self, tower: Any, text: torch.nn.Module, pad: int) -> None:
        super().__init__()
        self.tower, self.text, self.pad = tower, text, pad

    def embedded(self, input_ids: torch.Tensor, pixel_values: Any, image_grid_thw: Any) -> torch.Tensor:
        embeds = self.text.get_input_embeddings()(input_ids)
        if pixel_values is None:
            return embeds
        rows = torch.cat(self.tower(pixel_values, image_grid_thw.tolist()))
        return embeds.masked_scatter((input_ids == self.pad)[..., None], rows)

    def generate(self, input_ids, pixel_values=None, image_grid_thw=None, **how: Any) -> torch.Tensor:
        embeds = self.embedded(input_ids, pixel_values, image_grid_thw)
        return self.text.generate(inputs_embeds=embeds, **how)

    def forward(self, input_ids, pixel_values=None, image_grid_thw=None, **_: Any) -> Any:
        return self.text(inputs_embeds=self.embedded(input_ids, pixel_values, image_grid_thw))


def kimi_vl(directory: Path) -> Whole:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    _, tower = parity.kimi_vl_pair(directory / "vision", width=64)
    text = {**DEEPSEEK, "q_lora_rank": None}
    model = lively(DeepseekV3ForCausalLM(DeepseekV3Config(**text)), 55)
    model.save_pretrained(directory / "text")
    tensors = load_file(directory / "vision" / "model.safetensors")
    for name, tensor in load_file(directory / "text" / "model.safetensors").items():
        tensors[f"language_model.{name}"] = tensor
    pad = mark_ids(KIMI_MARKS)["<|media_pad|>"]
    stored = json.loads((directory / "vision" / "config.json").read_text())
    stored |= {"text_config": text, "media_placeholder_token_id": pad}
    pixels = {**parity.KIMI_VL_PIXELS, "in_token_limit": 256}
    parity.write_checkpoint(directory, stored, pixels, tensors)
    for part in ("vision", "text"):
        shutil.rmtree(directory / part)
    write_kimi_tokenizer(directory)
    return Whole(directory, KimiVL(tower, model, pad).eval(), "kimi_vl")


MAKERS = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "kimi_k25": kimi_k25,
    "kimi_vl": kimi_vl,
}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Smooth random colours."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

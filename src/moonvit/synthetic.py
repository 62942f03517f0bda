"""Checkpoints with random weights in the released layout, to try things out without the real one."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from moonvit.config import VisionConfig
from moonvit.presets import model_config, preprocessor_config
from moonvit.towers.kimi_k3 import KimiK3Vision
from moonvit.weights.index import index_bytes
from moonvit.weights.load import expected_shapes
from moonvit.weights.place import new_directory
from moonvit.weights.writer import SafetensorsWriter

TOY_MARKS = (
    "[BOS]", "[EOS]", "[PAD]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
)  # fmt: skip
"""Markers of the toy tokenizer, behind its 256 single bytes."""


def make_checkpoint(directory: Path, preset: str = "full", seed: int = 0, text: bool = False) -> int:
    """Write a bfloat16 checkpoint of two shards; returns the bytes of its tensors.

    The same preset and seed give the same bytes. The directory appears only when complete;
    `MoonvitError` if there is something under that name already.

    Args:
        directory: to make.
        preset: the geometry; see `moonvit.presets`.
        seed: of the weights.
        text: add a toy tokenizer of single bytes in the released form, and a text embedding for it, so that
            prompts can be made; the pad's id in `config.json` is then the toy's.
    """
    config = model_config(preset)
    with torch.device("meta"):
        shapes = expected_shapes(KimiK3Vision(VisionConfig.from_dict(config)))
    files: dict[str, Any] = {"config.json": config, "preprocessor_config.json": preprocessor_config()}
    if text:
        files["tokenizer_config.json"] = _toy_text(config, shapes)
    with new_directory(directory) as partial:
        total = _write_shards(partial, shapes, seed)
        if text:
            ranks = (b"%s %d\n" % (b64encode(bytes([rank])), rank) for rank in range(256))
            (partial / "tiktoken.model").write_bytes(b"".join(ranks))
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")
    return total


def _toy_text(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Adds the toy's ids to the config and its table to the shapes; gives its `tokenizer_config.json`."""
    config["media_placeholder_token_id"] = 256 + TOY_MARKS.index("<|media_pad|>")
    config["text_config"]["vocab_size"] = 512
    shapes["language_model.model.embed_tokens.weight"] = (512, config["text_config"]["hidden_size"])
    added = {str(256 + number): {"content": mark} for number, mark in enumerate(TOY_MARKS)}
    return {"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer"}


def _write_shards(directory: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> int:
    names = list(shapes)
    middle = len(names) // 2
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate((names[:middle], names[middle:]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        with SafetensorsWriter(directory / shard) as writer:
            writer.metadata["format"] = "pt"
            for name in part:
                tensor = random_tensor(name, shapes[name], seed)
                writer.add(name, tensor)
                total += tensor.nbytes
        weight_map.update(dict.fromkeys(part, shard))
    (directory / "model.safetensors.index.json").write_bytes(index_bytes(weight_map, total))
    return total


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Bfloat16 values that keep activations near unit size; they depend on name, shape and seed only.

    Norm weights lie around 1, position tables at 0.5, matrices at fan_in^-0.5.
    """
    generator = torch.Generator("cpu").manual_seed(crc32(f"{seed} {name}".encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        values = 1 + 0.1 * values
    elif name.endswith("pos_emb.weight"):
        values = 0.5 * values
    else:
        values = values / values[0].numel() ** 0.5
    return values.to(torch.bfloat16)

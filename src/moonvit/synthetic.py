"""Checkpoints with random weights in the released layout, to try things out without the real one."""

import json
from pathlib import Path
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


def make_checkpoint(directory: Path, preset: str = "full", seed: int = 0) -> int:
    """Write a bfloat16 checkpoint of two shards; returns the bytes of its tensors.

    The same preset and seed give the same bytes. The directory appears only when complete;
    `MoonvitError` if there is something under that name already.
    """
    config = model_config(preset)
    with torch.device("meta"):
        shapes = expected_shapes(KimiK3Vision(VisionConfig.from_dict(config)))
    with new_directory(directory) as partial:
        total = _write_shards(partial, shapes, seed)
        for name, content in (("config.json", config), ("preprocessor_config.json", preprocessor_config())):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")
    return total


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

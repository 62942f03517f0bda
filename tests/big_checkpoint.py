"""A checkpoint of 96 shards with realistic headers, its text part in sparse files."""

import json
from pathlib import Path

import torch

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def text_tensors(shard: int, count: int, nbytes: int) -> list[tuple[str, str, list[int], int]]:
    """(name, type, shape, bytes) of the experts that fill a shard."""
    rows = []
    for number in range(count):
        name = f"language_model.model.layers.{shard}.block_sparse_moe.experts.{number}.w1"
        rows.append((f"{name}.weight_packed", "I32", [nbytes // 4], nbytes))
        rows.append((f"{name}.weight_scale", "F8_E4M3", [64], 64))
    return rows


def make_big_checkpoint(
    directory: Path,
    vision: dict[str, torch.Tensor],
    shards: int = 96,
    experts: int = 40,
    expert_bytes: int = 300_000_000,
) -> dict[str, Path]:
    """Write the shards; vision tensors lie in the last two, text tensors between them. {name: path}."""
    weight_map: dict[str, str] = {}
    names = list(vision)
    halves = {shards - 2: names[: len(names) // 2], shards - 1: names[len(names) // 2 :]}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:06}.safetensors"
        rows = text_tensors(shard, experts, expert_bytes)
        held = halves.get(shard, [])
        for position, name in enumerate(held):
            tensor = vision[name]
            place = 2 + position + (position // 7) * 2
            rows.insert(min(place, len(rows)), (name, NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes))
        _write_shard(directory / file, rows, vision)
        weight_map.update((name, file) for name, *_ in rows)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return {path.name: path for path in sorted(directory.iterdir())}


def _write_shard(path: Path, rows: list, vision: dict[str, torch.Tensor]) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, nbytes in rows:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        for name, *_ in rows:
            if name in vision:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(vision[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())

"""Rows of the text model's embedding table, for handing whole prompts to an engine."""

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from moonvit.errors import WeightsError
from moonvit.weights.index import TORCH_DTYPES, Checkpoint, as_tensor, check_name

TABLE_NAMES = (
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "model.embed_tokens.weight",
)


def embedding_rows(checkpoint: Checkpoint, ids: Sequence[int] | Tensor) -> Tensor:
    """[len(ids), text_hidden_size] in the stored type; only the rows asked for are read.

    On a hub, neighbouring rows are one request. `WeightsError` if there is no such table, or an id is
    outside it.
    """
    name = next((name for name in TABLE_NAMES if name in checkpoint.weight_map), None)
    if name is None:
        raise WeightsError(
            checkpoint.where, [f"no text embedding table; looked for {', '.join(TABLE_NAMES)}"]
        )
    shard = checkpoint.weight_map[name]
    check_name(shard)
    entry = checkpoint.header(shard).tensors.get(name)
    if entry is None:
        raise WeightsError(checkpoint.where, [f"{name}: not in {shard}, where the index places it"])
    if entry.dtype not in TORCH_DTYPES or len(entry.shape) != 2:
        raise WeightsError(
            checkpoint.where, [f"{name}: {entry.dtype} of shape {list(entry.shape)} is no table"]
        )
    rows, width = entry.shape
    ids = [index(token) for token in ids]
    for token in ids:
        if not 0 <= token < rows:
            raise WeightsError(checkpoint.where, [f"token id {token} is outside the table of {rows} rows"])
    size = width * TORCH_DTYPES[entry.dtype].itemsize
    found: dict[int, Tensor] = {}
    for first, last in _neighbours(sorted(set(ids))):
        data = checkpoint.data(shard, entry.start + first * size, entry.start + (last + 1) * size)
        block = as_tensor(data, entry.dtype, (last + 1 - first, width))
        found.update((first + offset, row) for offset, row in enumerate(block))
    if not ids:
        return torch.empty((0, width), dtype=TORCH_DTYPES[entry.dtype])
    return torch.stack([found[token] for token in ids])


def _neighbours(ids: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for token in ids:
        if runs and token == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], token)
        else:
            runs.append((token, token))
    return runs

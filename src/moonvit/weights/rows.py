"""Rows of the text model's embedding table, for handing whole prompts to an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from moonvit.errors import ConfigError, WeightsError
from moonvit.weights.header import TensorEntry
from moonvit.weights.index import TORCH_DTYPES, Checkpoint, as_tensor, check_name

TABLE_NAMES = (
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "model.embed_tokens.weight",
)
"""As Kimi's checkpoints, transformers' and Qwen's own name it."""

TIED_NAMES = ("language_model.lm_head.weight", "model.lm_head.weight", "lm_head.weight")
"""Where it lies if a checkpoint with tied embeddings keeps only the other end's name."""


@dataclass(frozen=True)
class Table:
    """Where the text embedding lies; nothing of it is read."""

    name: str
    shard: str
    entry: TensorEntry

    @property
    def rows(self) -> int:
        return self.entry.shape[0]

    @property
    def width(self) -> int:
        return self.entry.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.entry.dtype]


def embedding_table(checkpoint: Checkpoint) -> Table:
    """The table of a checkpoint, by the header of its shard; `WeightsError` if there is none."""
    names = TABLE_NAMES + (TIED_NAMES if _is_tied(checkpoint) else ())
    stored = {
        inner: name for name in checkpoint.weight_map if (inner := checkpoint.reading.inner(name)) in names
    }
    name = next((stored[name] for name in names if name in stored), None)
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
    return Table(name, shard, entry)


def embedding_rows(checkpoint: Checkpoint, ids: Sequence[int] | Tensor, table: Table | None = None) -> Tensor:
    """[len(ids), text_hidden_size] in the stored type; only the rows asked for are read.

    On a hub, neighbouring rows are one request. `table` spares looking for it again. `WeightsError` if there
    is no such table, or an id is outside it.
    """
    table = table or embedding_table(checkpoint)
    width, dtype = table.width, table.dtype
    ids = [index(token) for token in ids]
    check_ids(checkpoint, table, ids)
    size = width * dtype.itemsize
    start = table.entry.start
    found: dict[int, Tensor] = {}
    for first, last in _neighbours(sorted(set(ids))):
        data = checkpoint.data(table.shard, start + first * size, start + (last + 1) * size)
        block = as_tensor(data, table.entry.dtype, (last + 1 - first, width))
        found.update((first + offset, row) for offset, row in enumerate(block))
    if not ids:
        return torch.empty((0, width), dtype=dtype)
    return torch.stack([found[token] for token in ids])


def check_ids(checkpoint: Checkpoint, table: Table, ids: Sequence[int]) -> None:
    """`WeightsError` for an id outside the table."""
    for token in ids:
        if not 0 <= token < table.rows:
            raise WeightsError(
                checkpoint.where, [f"token id {token} is outside the table of {table.rows} rows"]
            )


def _is_tied(checkpoint: Checkpoint) -> bool:
    try:
        config: Mapping[str, Any] = checkpoint.config
    except ConfigError:
        return False
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    return any(place.get("tie_word_embeddings") is True for place in places)


def _neighbours(ids: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for token in ids:
        if runs and token == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], token)
        else:
            runs.append((token, token))
    return runs

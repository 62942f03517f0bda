"""The text half of a checkpoint, read strictly into a model of `transformers`.

Released names differ from family to family and from version to version of `transformers`; inside they are
the text model's own (`embed_tokens.weight`, `layers.0.…`, `norm.weight`) and `lm_head.weight`. Tensors of
the vision half are neither opened nor read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moonvit.errors import WeightsError
from moonvit.weights.header import TensorEntry
from moonvit.weights.index import TORCH_DTYPES, Checkpoint, as_tensor, check_adapter, check_name
from moonvit.weights.load import converted

PREFIXES = {
    "model.language_model.": "",
    "language_model.model.": "",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "model.": "",
}
"""How a text tensor's name may begin, and what that becomes; the first that fits decides."""

BLOCKS = "blocks."
"""Layers, as transformers 5.24 calls them where it writes a `kimi_k25` in its original format."""

EXPERTS = re.compile(r"(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""Tensors in which transformers stacks the experts of a layer; released checkpoints keep them apart."""

IGNORED = re.compile(r".*rotary_emb\.inv_freq")
"""Tables that older checkpoints store and every model makes for itself."""

LAYER = re.compile(r"layers\.(\d+)\.")

PREDICTS = re.compile(r"layers\.(\d+)\.eh_proj\.weight")
"""What only a layer has that predicts a token further ahead (DeepSeek-V3)."""


@dataclass(frozen=True)
class Stored:
    """Where a text tensor lies."""

    shard: str
    entry: TensorEntry


class TextWeights:
    """The text tensors of a checkpoint by their names inside.

    Args:
        checkpoint: whole, or at least its text half.
        layers: of the text model; layers behind them that predict further tokens are left alone.

    Attributes:
        stored: {name inside: where it lies}.
        faults: one line for each thing that is wrong with the files.
    """

    def __init__(self, checkpoint: Checkpoint, layers: int) -> None:
        self.checkpoint = checkpoint
        self.layers = layers
        self.stored: dict[str, Stored] = {}
        self.faults: list[str] = []
        self._lost: set[str | None] = set()
        check_adapter(checkpoint, text=True)
        heads = (PREDICTS.fullmatch(self._inner(name) or "") for name in checkpoint.weight_map)
        self._ahead = {int(head[1]) for head in heads if head and int(head[1]) >= layers}
        vision = checkpoint.reading.stored
        by_shard: dict[str, list[str]] = {}
        for name, shard in checkpoint.weight_map.items():
            if name not in vision:
                by_shard.setdefault(shard, []).append(name)
        for shard, names in sorted(by_shard.items()):
            self._open(shard, names)

    def _inner(self, name: str) -> str | None:
        return inner_name(self.checkpoint.reading.inner(name))

    def _open(self, shard: str, names: Iterable[str]) -> None:
        try:
            check_name(shard)
            header = self.checkpoint.header(shard)
        except WeightsError as error:
            self.faults.extend(f"{shard[:200]}: {fault}" for fault in error.faults)
            self._lost.update(map(self._inner, names))
            return
        for name in names:
            inner = self._inner(name)
            if inner is None:
                self.faults.append(f"{name}: in {shard}, but no part of this family")
            elif name not in header.tensors:
                self.faults.append(f"{name}: not in {shard}, where the index places it")
                self._lost.add(inner)
            elif inner in self.stored:
                self.faults.append(f"{name}: a second {inner}, in {shard}")
            elif not self._left_alone(inner):
                self.stored[inner] = Stored(shard, header.tensors[name])

    def _left_alone(self, inner: str) -> bool:
        layer = LAYER.match(inner)
        return bool(IGNORED.fullmatch(inner)) or (layer is not None and int(layer[1]) in self._ahead)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """`WeightsError`, holding every fault, unless the tensors are exactly those expected."""
        where = f"{self.checkpoint.where}: text model"
        if not self.stored and not self.faults:
            raise WeightsError(where, ["no text tensors"], "this checkpoint is the vision half alone")
        shapes = self.as_stored(expected)
        faults = list(self.faults)
        for name, shape in shapes.items():
            faults += self._tensor_faults(name, shape)
        for name in sorted(self.stored.keys() - shapes.keys()):
            stored = self.stored[name]
            faults.append(f"{stored.entry.name}: in {stored.shard}, but this text model has no such tensor")
        if faults:
            raise WeightsError(where, faults, "the text half of a checkpoint is needed whole")

    def _tensor_faults(self, name: str, shape: tuple[int, ...]) -> list[str]:
        stored = self.stored.get(name)
        if stored is None:
            return [] if name in self._lost else [f"{name}: missing, expected shape {list(shape)}"]
        entry, where = stored.entry, f"in {stored.shard}"
        faults = []
        if entry.dtype not in TORCH_DTYPES:
            faults.append(
                f"{entry.name}: type {entry.dtype} {where}, expected one of {', '.join(TORCH_DTYPES)}"
            )
        if entry.shape != shape:
            faults.append(f"{entry.name}: shape {list(entry.shape)} {where}, expected {list(shape)}")
        return faults

    def as_stored(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The expected shapes as this checkpoint splits them: experts stacked, or each apart."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in expected.items():
            if name in self.stored or name in self._lost or not EXPERTS.fullmatch(name):
                shapes[name] = shape
                continue
            parts = expert_parts(name)
            rows = shape[1] // len(parts)
            for expert in range(shape[0]):
                shapes.update({part.format(expert): (rows, shape[2]) for part in parts})
        return shapes

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in that type; mapped, not copied, where it is stored so."""
        if name in self.stored:
            return converted(name, self._mapped(name), dtype)
        stacked = torch.empty(shape, dtype=dtype, device="cpu")
        parts = expert_parts(name)
        for expert, rows in enumerate(stacked):
            for part, place in zip(parts, rows.chunk(len(parts)), strict=True):
                single = part.format(expert)
                place.copy_(converted(single, self._mapped(single), dtype))
        return stacked

    def _mapped(self, name: str) -> Tensor:
        stored = self.stored[name]
        data = self.checkpoint.data(stored.shard, stored.entry.start, stored.entry.stop)
        return as_tensor(data, stored.entry.dtype, stored.entry.shape)


def inner_name(name: str) -> str | None:
    """The name inside of a stored one, or None for one that no family has."""
    for old, new in PREFIXES.items():
        if name.startswith(old):
            inner = new + name.removeprefix(old)
            return "layers." + inner.removeprefix(BLOCKS) if inner.startswith(BLOCKS) else inner
    return None


def expert_parts(name: str) -> list[str]:
    """The tensors of one expert that a stacked one holds, one above the other; `{}` is its number."""
    match = EXPERTS.fullmatch(name)
    assert match is not None
    kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    return [f"{match[1]}.{{}}.{kind}.weight" for kind in kinds]

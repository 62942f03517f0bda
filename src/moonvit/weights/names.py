"""Tensor names of checkpoints in the wild, mapped to the released checkpoint's, family by family.

Literal tables, read from the top; the first prefix that fits decides. `{}` stands for the number of a
layer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

PREFIXES = {
    "vision_tower.": "vision_tower.",
    "mm_projector.": "mm_projector.",
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.": "mm_projector.",
}
"""A tensor under one of these belongs to the vision half, whatever else its name says."""

BARE_PREFIXES = {
    "patch_embed.": "vision_tower.patch_embed.",
    "encoder.": "vision_tower.encoder.",
    "proj.": "mm_projector.proj.",
    "post_norm.": "mm_projector.post_norm.",
    "linear_1.": "mm_projector.proj.0.",
    "linear_2.": "mm_projector.proj.2.",
}
"""Names of a tower or projector saved alone; understood only where no name has a prefix above."""

RENAMED = {
    "mm_projector.linear_1.": "mm_projector.proj.0.",
    "mm_projector.linear_2.": "mm_projector.proj.2.",
}

K25_RENAMED = {
    **RENAMED,
    "mm_projector.in_proj.": "mm_projector.proj.0.",
    "mm_projector.out_proj.": "mm_projector.proj.2.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "vision_tower.patch_embed.pos_emb.position_embeddings": "vision_tower.patch_embed.pos_emb.weight",
    "vision_tower.final_layernorm.": "vision_tower.encoder.final_layernorm.",
    "vision_tower.layers.{}.norm1.": "vision_tower.encoder.blocks.{}.norm0.",
    "vision_tower.layers.{}.norm2.": "vision_tower.encoder.blocks.{}.norm1.",
    "vision_tower.layers.{}.mlp.fc1.": "vision_tower.encoder.blocks.{}.mlp.fc0.",
    "vision_tower.layers.{}.mlp.fc2.": "vision_tower.encoder.blocks.{}.mlp.fc1.",
    "vision_tower.layers.{}.attn.proj.": "vision_tower.encoder.blocks.{}.wo.",
    "vision_tower.layers.{}.attn.q_proj.": "vision_tower.encoder.blocks.{}.wqkv.q.",
    "vision_tower.layers.{}.attn.k_proj.": "vision_tower.encoder.blocks.{}.wqkv.k.",
    "vision_tower.layers.{}.attn.v_proj.": "vision_tower.encoder.blocks.{}.wqkv.v.",
}
"""Transformers' own `kimi_k25`; `moonvit.weights.load` joins the split q, k and v."""


@dataclass(frozen=True)
class NameMap:
    """How one family's tensors may be named; see `PREFIXES`, `BARE_PREFIXES` and `RENAMED`."""

    prefixes: Mapping[str, str]
    bare_prefixes: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def roots(self) -> list[str]:
        """What released names of this family begin with."""
        return sorted(set(self.prefixes.values()))


KIMI_K3 = NameMap(PREFIXES, BARE_PREFIXES, RENAMED)

KIMI_K25 = NameMap(PREFIXES, {**BARE_PREFIXES, "pre_norm.": "mm_projector.pre_norm."}, K25_RENAMED)

KIMI_VL = NameMap(
    {
        "vision_tower.": "vision_tower.",
        "multi_modal_projector.": "multi_modal_projector.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    {
        "patch_embed.": "vision_tower.patch_embed.",
        "encoder.": "vision_tower.encoder.",
        "pre_norm.": "multi_modal_projector.pre_norm.",
        "linear_1.": "multi_modal_projector.linear_1.",
        "linear_2.": "multi_modal_projector.linear_2.",
    },
)

QWEN = NameMap(
    {
        "visual.": "visual.",
        "model.visual.": "visual.",
        "vision_tower.": "visual.",
        "model.vision_tower.": "visual.",
    },
    {
        name: f"visual.{name}"
        for name in ("patch_embed.", "pos_embed.", "blocks.", "merger.", "deepstack_merger_list.")
    },
)


def canonical_names(names: Iterable[str], family: NameMap = KIMI_K3) -> dict[str, str]:
    """{name as stored: name as released} for the vision tensors among `names`; others are left out."""
    names = list(names)
    found = {name: new for name in names if (new := replaced(name, family.prefixes)) is not None}
    if not found:
        found = {name: new for name in names if (new := replaced(name, family.bare_prefixes)) is not None}
    return {name: replaced(new, family.renamed) or new for name, new in found.items()}


def replaced(name: str, prefixes: Mapping[str, str]) -> str | None:
    """The name with the first prefix that fits replaced, or None."""
    for old, new in prefixes.items():
        if match := _pattern(old).match(name):
            return new.format(*match.groups()) + name[match.end() :]
    return None


@cache
def _pattern(prefix: str) -> re.Pattern[str]:
    return re.compile(re.escape(prefix).replace(r"\{\}", r"(\d+)"))

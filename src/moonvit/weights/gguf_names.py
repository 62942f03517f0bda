"""How llama.cpp's mmproj files name and lay out a vision half, one literal table a projector type.

Sources, all of llama.cpp (github.com/ggml-org/llama.cpp): `conversion/kimivl.py` (commit 32e9e0448790, there
`kimi_vl.py`), `conversion/qwenvl.py` and `qwen3vl.py` (06e514f61476) write these files, `tools/mtmd/clip.cpp`
and `tools/mtmd/models/*.cpp` read them, `gguf-py/gguf/tensor_mapping.py` has the names. `kimik3` is known
from a branch alone: unslothai/llama.cpp, `conversion/kimivl.py` (6dd34743ef2e) and
`tools/mtmd/models/kimik3.cpp` (f64afa898f67).

Tables go from the name in the file to the released one, read from the top, the first prefix that fits
decides; `{}` stands for the number of a layer. Where one released tensor lies in several of the file, the
name of a part has one word more, such as `wqkv.q.weight`: see `PARTS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "wqkv": ("q", "k", "v"),
    "proj": ("frame0", "frame1"),
}
"""Released tensors that may lie in parts: queries, keys and values; the patch matrix of either frame."""

_MOONVIT = {
    "v.patch_embd.": "vision_tower.patch_embed.proj.",
    "v.position_embd.": "vision_tower.patch_embed.pos_emb.",
    "v.blk.{}.ln1.": "vision_tower.encoder.blocks.{}.norm0.",
    "v.blk.{}.ln2.": "vision_tower.encoder.blocks.{}.norm1.",
    "v.blk.{}.attn_out.": "vision_tower.encoder.blocks.{}.wo.",
    "v.blk.{}.ffn_up.": "vision_tower.encoder.blocks.{}.mlp.fc0.",
    "v.blk.{}.ffn_down.": "vision_tower.encoder.blocks.{}.mlp.fc1.",
    "v.post_ln.": "vision_tower.encoder.final_layernorm.",
}

KIMI_VL = {
    **_MOONVIT,
    "v.blk.{}.attn_q.": "vision_tower.encoder.blocks.{}.wqkv.q.",
    "v.blk.{}.attn_k.": "vision_tower.encoder.blocks.{}.wqkv.k.",
    "v.blk.{}.attn_v.": "vision_tower.encoder.blocks.{}.wqkv.v.",
    "mm.input_norm.": "multi_modal_projector.pre_norm.",
    "mm.1.": "multi_modal_projector.linear_1.",
    "mm.2.": "multi_modal_projector.linear_2.",
}

KIMI_K25 = {
    **_MOONVIT,
    "v.blk.{}.attn_qkv.": "vision_tower.encoder.blocks.{}.wqkv.",
    "mm.input_norm.": "mm_projector.pre_norm.",
    "mm.1.": "mm_projector.proj.0.",
    "mm.2.": "mm_projector.proj.2.",
}

KIMI_K3 = {
    **_MOONVIT,
    "v.blk.{}.attn_qkv.": "vision_tower.encoder.blocks.{}.wqkv.",
    "mm.1.": "mm_projector.proj.0.",
    "mm.2.": "mm_projector.proj.2.",
    "mm.post_norm.": "mm_projector.post_norm.",
}

_QWEN = {
    "v.patch_embd.weight.1": "visual.patch_embed.proj.frame1.weight",
    "v.patch_embd.weight": "visual.patch_embed.proj.frame0.weight",
    "v.blk.{}.ln1.": "visual.blocks.{}.norm1.",
    "v.blk.{}.ln2.": "visual.blocks.{}.norm2.",
    "v.blk.{}.attn_out.": "visual.blocks.{}.attn.proj.",
}

_QWEN2 = {
    **_QWEN,
    "v.blk.{}.attn_q.": "visual.blocks.{}.attn.qkv.q.",
    "v.blk.{}.attn_k.": "visual.blocks.{}.attn.qkv.k.",
    "v.blk.{}.attn_v.": "visual.blocks.{}.attn.qkv.v.",
    "v.post_ln.": "visual.merger.ln_q.",
    "mm.0.": "visual.merger.mlp.0.",
    "mm.2.": "visual.merger.mlp.2.",
}

QWEN2_VL = {
    **_QWEN2,
    "v.blk.{}.ffn_up.": "visual.blocks.{}.mlp.fc1.",
    "v.blk.{}.ffn_down.": "visual.blocks.{}.mlp.fc2.",
}

QWEN2_5_VL = {
    **_QWEN2,
    "v.blk.{}.ffn_gate.": "visual.blocks.{}.mlp.gate_proj.",
    "v.blk.{}.ffn_up.": "visual.blocks.{}.mlp.up_proj.",
    "v.blk.{}.ffn_down.": "visual.blocks.{}.mlp.down_proj.",
}

QWEN3_VL = {
    **_QWEN,
    "v.patch_embd.bias": "visual.patch_embed.proj.bias",
    "v.position_embd.": "visual.pos_embed.",
    "v.blk.{}.attn_qkv.": "visual.blocks.{}.attn.qkv.",
    "v.blk.{}.ffn_up.": "visual.blocks.{}.mlp.linear_fc1.",
    "v.blk.{}.ffn_down.": "visual.blocks.{}.mlp.linear_fc2.",
    "v.post_ln.": "visual.merger.norm.",
    "mm.0.": "visual.merger.linear_fc1.",
    "mm.2.": "visual.merger.linear_fc2.",
    "v.deepstack.{}.norm.": "visual.deepstack_merger_list.{}.norm.",
    "v.deepstack.{}.fc1.": "visual.deepstack_merger_list.{}.linear_fc1.",
    "v.deepstack.{}.fc2.": "visual.deepstack_merger_list.{}.linear_fc2.",
}
"""DeepStack's numbers are those of layers in the file and places in the list as released."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One projector type.

    Attributes:
        projector: what `clip.projector_type` says.
        family: the family of the tower.
        names: name in the file to released name.
        by_axis: rows of queries and keys lie column pairs first, then row pairs; see `rows_by_axis`.
        flat_table: the position table lies as [height·width, D].
        swaps: old files have `ffn_up` and `ffn_down` swapped; `clip.cpp` looks at their shapes and so do we.
        unused: placeholders of old files.
        experimental: known from a branch alone.
    """

    projector: str
    family: str
    names: Mapping[str, str]
    by_axis: bool = False
    flat_table: bool = False
    swaps: bool = False
    unused: frozenset[str] = field(default_factory=frozenset)
    experimental: bool = False


_PLACEHOLDER = frozenset({"v.position_embd.weight"})

LAYOUTS = (
    Layout(projector="kimivl", family="kimi_vl", names=KIMI_VL, flat_table=True),
    Layout(projector="kimik25", family="kimi_k25", names=KIMI_K25, by_axis=True),
    Layout(projector="kimik3", family="kimi_k3", names=KIMI_K3, by_axis=True, experimental=True),
    Layout(projector="qwen2vl_merger", family="qwen2_vl", names=QWEN2_VL, swaps=True, unused=_PLACEHOLDER),
    Layout(
        projector="qwen2.5vl_merger", family="qwen2_5_vl", names=QWEN2_5_VL, swaps=True, unused=_PLACEHOLDER
    ),
    Layout(projector="qwen3vl_merger", family="qwen3_vl", names=QWEN3_VL),
)

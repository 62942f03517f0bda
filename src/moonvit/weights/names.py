"""Tensor names of checkpoints in the wild, mapped to the released checkpoint's, family by family.

Literal tables first, `{}` standing for a number; then how a stored name is read with them. What trainers
and wrappers add is taken out of a name (`WRAPPERS`), whatever stands before a family's own names is the
prefix, and the rest must be a name that the family knows. Names that lie beside the known ones under the
same prefix are kept, so that nothing that changes the numbers is passed over.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

WRAPPERS = (
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module", "_forward_module",
    "_module", "module", "base_layer", "original_module", r"modules_to_save\.[^.]+",
)  # fmt: skip
"""Parts of names that stand for a wrapped module: `torch.compile`; FSDP, new and old; checkpointing;
Lightning's strategies; Opacus; DDP, DeepSpeed and averaged models; PEFT's layers and saved modules."""

ROOTS = {"vision_tower.": "vision_tower.", "mm_projector.": "mm_projector."}
"""A tensor under one of these belongs to the vision half, whatever else its name says."""

BARE_PREFIXES = {
    "patch_embed.": "vision_tower.patch_embed.",
    "encoder.": "vision_tower.encoder.",
    "proj.": "mm_projector.proj.",
    "post_norm.": "mm_projector.post_norm.",
    "linear_1.": "mm_projector.proj.0.",
    "linear_2.": "mm_projector.proj.2.",
}
"""Names of a tower or projector saved alone; understood only where no known name has its root above."""

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


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


MOONVIT_TENSORS = (
    "vision_tower.patch_embed.pos_emb.weight",
    *_both(
        "vision_tower.patch_embed.proj",
        "vision_tower.encoder.blocks.{}.norm0",
        "vision_tower.encoder.blocks.{}.norm1",
        "vision_tower.encoder.blocks.{}.wqkv",
        "vision_tower.encoder.blocks.{}.wo",
        "vision_tower.encoder.blocks.{}.mlp.fc0",
        "vision_tower.encoder.blocks.{}.mlp.fc1",
        "vision_tower.encoder.final_layernorm",
    ),
)
"""A tower of any of the Kimi families; K3's has no biases."""

K25_TENSORS = (
    *MOONVIT_TENSORS,
    *(
        f"vision_tower.encoder.blocks.{{}}.wqkv.{part}.{kind}"
        for part in "qkv"
        for kind in ("weight", "bias")
    ),
    *_both("mm_projector.pre_norm", "mm_projector.proj.{}"),
)


@dataclass(frozen=True)
class NameMap:
    """How one family's tensors may be named.

    Attributes:
        roots: {what a stored name of the vision half begins with: what the released one does}.
        tensors: every released name.
        bare: {beginning of a name without its root: of the released one}.
        renamed: {beginning of a released name in another spelling: as released}.
    """

    roots: Mapping[str, str]
    tensors: tuple[str, ...] = ()
    bare: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def released_roots(self) -> list[str]:
        """What released names of this family begin with, the projector's first."""
        return sorted(set(self.roots.values()))

    def released(self, name: str) -> str:
        return replaced(name, self.renamed) or name

    def knows(self, released: str) -> bool:
        return self._known.fullmatch(released) is not None

    @cached_property
    def _known(self) -> re.Pattern[str]:
        patterns = (re.escape(name).replace(r"\{\}", r"\d+") for name in self.tensors)
        return re.compile("|".join(patterns))


KIMI_K3 = NameMap(
    ROOTS,
    (*MOONVIT_TENSORS, "mm_projector.post_norm.weight", *_both("mm_projector.proj.{}")),
    BARE_PREFIXES,
    RENAMED,
)

KIMI_K25 = NameMap(
    ROOTS,
    K25_TENSORS,
    {
        **BARE_PREFIXES,
        "pre_norm.": "mm_projector.pre_norm.",
        "in_proj.": "mm_projector.in_proj.",
        "out_proj.": "mm_projector.out_proj.",
    },
    K25_RENAMED,
)

KIMI_VL = NameMap(
    {"vision_tower.": "vision_tower.", "multi_modal_projector.": "multi_modal_projector."},
    (
        *MOONVIT_TENSORS,
        *_both(
            "multi_modal_projector.pre_norm",
            "multi_modal_projector.linear_1",
            "multi_modal_projector.linear_2",
        ),
    ),
    {
        "patch_embed.": "vision_tower.patch_embed.",
        "encoder.": "vision_tower.encoder.",
        "pre_norm.": "multi_modal_projector.pre_norm.",
        "linear_1.": "multi_modal_projector.linear_1.",
        "linear_2.": "multi_modal_projector.linear_2.",
    },
)

QWEN = NameMap(
    {"visual.": "visual.", "vision_tower.": "visual."},
    (
        "visual.pos_embed.weight",
        *_both(
            "visual.patch_embed.proj",
            "visual.blocks.{}.norm1",
            "visual.blocks.{}.norm2",
            "visual.blocks.{}.attn.qkv",
            "visual.blocks.{}.attn.proj",
            "visual.blocks.{}.mlp.fc1",
            "visual.blocks.{}.mlp.fc2",
            "visual.blocks.{}.mlp.gate_proj",
            "visual.blocks.{}.mlp.up_proj",
            "visual.blocks.{}.mlp.down_proj",
            "visual.blocks.{}.mlp.linear_fc1",
            "visual.blocks.{}.mlp.linear_fc2",
            "visual.merger.ln_q",
            "visual.merger.mlp.{}",
            "visual.merger.norm",
            "visual.merger.linear_fc1",
            "visual.merger.linear_fc2",
            "visual.deepstack_merger_list.{}.norm",
            "visual.deepstack_merger_list.{}.linear_fc1",
            "visual.deepstack_merger_list.{}.linear_fc2",
        ),
    ),
    {
        name: f"visual.{name}"
        for name in ("patch_embed.", "pos_embed.", "blocks.", "merger.", "deepstack_merger_list.")
    },
)
"""Of Qwen2-VL, 2.5 and 3, whose towers differ in what a block's feed-forward and the merger hold."""

MAPS = {"Kimi K3": KIMI_K3, "Kimi K2.5": KIMI_K25, "Kimi-VL": KIMI_VL, "Qwen-VL": QWEN}


@dataclass(frozen=True)
class Reading:
    """The vision tensors among a checkpoint's names.

    Attributes:
        names: {name as stored: name as released}; no two have the same released one.
        doubled: {released name: names as stored}, of those that are there more than once.
        prefixes: what stands before the family's own names, sorted.
        wrappers: what wrappers had put into the names, sorted.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    doubled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()

    @property
    def stored(self) -> set[str]:
        """Every stored name that belongs to the vision half."""
        return {*self.names, *(name for names in self.doubled.values() for name in names)}

    def inner(self, name: str) -> str:
        """A stored name, of whichever half, as it was before the model was wrapped and put into another.

        A prefix ends in what the released layouts have themselves, `model.` or `model.language_model.`, which
        stays.
        """
        name = unwrapped(name)
        for prefix in self.prefixes:
            outer = re.sub(r"(?<![^.])model\.(language_model\.)?$", "", prefix)
            if outer and name.startswith(outer):
                return name.removeprefix(outer)
        return name

    def faults(self) -> list[str]:
        """One line where tensors are there more than once, naming the sets."""
        if not self.doubled:
            return []
        released, stored = min(self.doubled.items())
        sets = " and ".join(stored)
        count = len(self.doubled)
        more = f", as are {count - 1} more" if count > 1 else ""
        return [f"{released}: named twice, as {sets}{more}; keep one set"]


@dataclass(frozen=True)
class _Found:
    prefix: str
    released: str
    known: bool


def read_names(names: Iterable[str], family: NameMap = KIMI_K3) -> Reading:
    """Which of the names are vision tensors, and of which released name; others are left out."""
    plain = {name: unwrapped(name) for name in names}
    found = {name: at for name, rest in plain.items() if (at := _rooted(rest, family)) is not None}
    held = {_root(at.released, family) for at in found.values() if at.known}
    lacking = [root for root in family.released_roots if root not in held]
    if lacking:
        found = _bare(plain, family, lacking) | found
    stored: dict[str, list[str]] = {}
    for name, at in found.items():
        stored.setdefault(at.released, []).append(name)
    wrappers = {part for name in found if plain[name] != name for part in _wrappers(name)}
    return Reading(
        {name: at.released for name, at in found.items() if len(stored[at.released]) == 1},
        {released: tuple(sorted(same)) for released, same in stored.items() if len(same) > 1},
        tuple(sorted({at.prefix for at in found.values() if at.known})),
        tuple(sorted(wrappers)),
    )


def unwrapped(name: str) -> str:
    """The name without what wrappers put into it."""
    return _WRAPPER.sub("", name)


def replaced(name: str, beginnings: Mapping[str, str]) -> str | None:
    """The name with the first beginning that fits replaced, or None."""
    for old, new in beginnings.items():
        if match := _pattern(old).match(name):
            return new.format(*match.groups()) + name[match.end() :]
    return None


def _rooted(name: str, family: NameMap) -> _Found | None:
    """Read from one of the family's roots on: the first that gives a known name, else the first."""
    first = None
    for position in _starts(name, tuple(family.roots)):
        released = family.released(replaced(name[position:], family.roots) or "")
        at = _Found(name[:position], released, family.knows(released))
        if at.known:
            return at
        first = first or at
    return first


def _bare(plain: Mapping[str, str], family: NameMap, roots: list[str]) -> dict[str, _Found]:
    """Names without a root, for the halves that no rooted name gives.

    A prefix counts that has a known name behind it and no number in it, which a text layer's has; what else
    begins alike behind such a prefix belongs to it.
    """
    beginnings = {old: new for old, new in family.bare.items() if new.startswith(tuple(roots))}
    candidates: dict[str, dict[str, _Found]] = {}
    for name, rest in plain.items():
        for position in _starts(rest, tuple(beginnings)):
            released = family.released(replaced(rest[position:], beginnings) or "")
            at = _Found(rest[:position], released, family.knows(released))
            if not _NUMBERED.search(at.prefix):
                candidates.setdefault(at.prefix, {}).setdefault(name, at)
    found: dict[str, _Found] = {}
    for group in candidates.values():
        if any(at.known for at in group.values()):
            found |= {name: at for name, at in group.items() if at.known or name not in found}
    return found


def _starts(name: str, beginnings: tuple[str, ...]) -> Iterator[int]:
    """Positions at the start of a part of the name from which one of the beginnings follows."""
    position = 0
    while position >= 0:
        if name.startswith(beginnings, position):
            yield position
        position = name.find(".", position) + 1 or -1


def _root(released: str, family: NameMap) -> str:
    return next(root for root in family.released_roots if released.startswith(root))


def _wrappers(name: str) -> list[str]:
    return [match[1] for match in _WRAPPER.finditer(name)]


_WRAPPER = re.compile(rf"(?<![^.])({'|'.join(WRAPPERS)})\.")
_NUMBERED = re.compile(r"(?<![^.])\d+\.")

_COMPANIONS = {
    r"\.(lora|ia3|hada|lokr|oft|boft|vera|hra|ada|shira|bone|miss|randlora|road|c3a|waveft)_\w+(\.|$)": (
        "an adapter's tensor: merge the adapter into the weights first (peft: merge_and_unload)"
    ),
    r"\.(parametrizations\.|weight_[guv]$|weight_orig$|weight_mask$)": (
        "part of a parametrised weight: remove the parametrisation first"
    ),
    r"[._](packed|scales?|scale_inv|scale_2|scale_shape|zero_point|zeros|qweight|qzeros|biases|g_idx|absmax|"
    r"quant_map|amax|SCB|weight_format|weight_shape|qdata)$|\.(nested_|quant_state|_packed_params)": (
        "a quantised weight's: dequantise the vision tensors first"
    ),
    r"\b_?flat_param|[._]shard_\d+$|\.__\d+$": "of a distributed run: save the whole state first",
    r"\.(exp_avg|exp_avg_sq|momentum_buffer|step)$": "an optimizer's: save the model alone",
}
"""{pattern of a name: what such a tensor beside the known ones is, and what to do}."""


def companion(name: str) -> str:
    """What a tensor beside the known ones is and what to do, or "" where its name does not tell."""
    return next((what for pattern, what in _COMPANIONS.items() if re.search(pattern, name)), "")


@cache
def _pattern(beginning: str) -> re.Pattern[str]:
    return re.compile(re.escape(beginning).replace(r"\{\}", r"(\d+)"))

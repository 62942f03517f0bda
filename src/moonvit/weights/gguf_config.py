"""Between the keys of a mmproj file and the JSON of a checkpoint, in both directions.

Sources: llama.cpp's `MmprojModel.set_gguf_parameters` in `conversion/base.py` and its children (see
`moonvit.weights.gguf_names`), which write the keys, and `tools/mtmd/clip.cpp`, which reads them.

What the files never say is what the family means by it, and the only exceptions to the rule that a missing
value is refused: Qwen's `spatial_merge_size` 2 (clip.cpp's own default), window of 112 pixels, limits of
pixels as released; Kimi's limits of patches as released, its 4 frames, and K3's background and plan.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moonvit.config import PatchRules, PixelConfig, TowerConfig, VisionConfig
from moonvit.configs.qwen import NORM_EPS, QwenConfig, QwenPixels
from moonvit.errors import ConfigError
from moonvit.fields import Fields, shown
from moonvit.presets import K3_VISION, preprocessor_config
from moonvit.weights.gguf_names import Layout

V = "clip.vision."
HEADS = f"{V}attention.head_count"
EPSILON = f"{V}attention.layer_norm_epsilon"
HEAD_DIM = f"{V}attention.head_dim"
MERGE = f"{V}projector.scale_factor"
QWEN_MERGE = f"{V}spatial_merge_size"
PATTERN = f"{V}n_wa_pattern"
WINDOW = f"{V}window_size"
DEEPSTACK = f"{V}is_deepstack_layers"
LOWEST, HIGHEST = f"{V}image_min_pixels", f"{V}image_max_pixels"
FRAMES = "vision.pos_emb_time"
"""Without `clip.`, as the converter writes it."""

TABLE, DOWN, UP = "v.position_embd.weight", "v.blk.0.ffn_down.weight", "v.blk.0.ffn_up.weight"

QWEN_WINDOW = 112
QWEN_LIMITS = {"qwen2_vl": (3136, 12845056), "qwen2_5_vl": (3136, 12845056), "qwen3_vl": (65536, 16777216)}
KIMI_LIMITS = {"kimi_vl": 4096, "kimi_k25": 16384, "kimi_k3": 65536}
"""Released limits: least and most pixels, and most patches."""

KIMI_FRAMES = 4
KIMI_SIDE = 512


@dataclass(frozen=True)
class Mmproj:
    """What the two halves of the JSON are made from."""

    layout: Layout
    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]

    def count(self, key: str, high: int = 2**20) -> int:
        return self.fields.integer(key, 1, high)

    def get(self, key: str, default: Any) -> "Fields":
        """The keys with a default for one of them."""
        return Fields({key: default, **self.fields.values}, self.fields.where)

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self.shapes.get(name)
        if shape is None or len(shape) != rank:
            fault = "missing" if shape is None else f"shape {list(shape)}"
            raise ConfigError(f"{self.fields.where}: {name}: {fault}, expected {rank} dimensions")
        return shape

    def blocks(self) -> int:
        """How many there are, which cannot be more than the tensors say."""
        stated = self.count(f"{V}block_count", 1000)
        words = (name.split(".") for name in self.shapes if name.startswith("v.blk."))
        numbers = {word[2] for word in words if len(word) > 3}
        if str(stated - 1) not in numbers:
            fault = f"{V}block_count is {stated}, but there is no tensor v.blk.{stated - 1}.*"
            raise ConfigError(f"{self.fields.where}: {fault}")
        return stated

    def numbers(self) -> dict[str, Any]:
        """Mean and deviation, as every preprocessor config has them."""
        mean = self.fields.numbers(f"{V}image_mean", 3, -1e3, 1e3)
        std = self.fields.numbers(f"{V}image_std", 3, 1e-6, 1e3)
        return {"image_mean": list(mean), "image_std": list(std)}

    def gelu(self) -> None:
        """Refuse a MoonViT with another activation than the one it has."""
        self.fields.choice("clip.use_gelu", True)


def config_json(mmproj: Mmproj) -> dict[str, Any]:
    """`config.json` in the family's released spelling; `ConfigError` names a missing or senseless key."""
    vision = _VISION[mmproj.layout.family](mmproj)
    return {"model_type": mmproj.layout.family, "vision_config": vision}


def preprocessor_json(mmproj: Mmproj) -> dict[str, Any]:
    """`preprocessor_config.json` in the family's released spelling."""
    return _PIXELS[mmproj.layout.family](mmproj)


def swapped(layout: Layout, shapes: Mapping[str, tuple[int, ...]], width: object) -> bool:
    """Whether `ffn_up` and `ffn_down` stand for each other; clip.cpp's `is_ffn_swapped`."""
    down = shapes.get(DOWN)
    return layout.swaps and down is not None and len(down) == 2 and down[1] == width


def _moonvit(mmproj: Mmproj) -> dict[str, Any]:
    mmproj.gelu()
    return {
        "patch_size": mmproj.count(f"{V}patch_size", 256),
        "merge_kernel_size": [mmproj.count(MERGE, 16)] * 2,
        "vt_hidden_size": mmproj.count(f"{V}embedding_length", 65536),
        "vt_intermediate_size": mmproj.count(f"{V}feed_forward_length"),
        "vt_num_hidden_layers": mmproj.blocks(),
        "vt_num_attention_heads": mmproj.count(HEADS, 1024),
        "text_hidden_size": mmproj.count(f"{V}projection_dim"),
        "projector_ln_eps": mmproj.fields.number(EPSILON, 0.0, 1.0),
    }


def _kimi_k25(mmproj: Mmproj) -> dict[str, Any]:
    height, width, _ = mmproj.shape(TABLE, 3)
    frames = mmproj.get(FRAMES, KIMI_FRAMES).integer(FRAMES, 1, 4096)
    table = {"init_pos_emb_height": height, "init_pos_emb_width": width, "init_pos_emb_time": frames}
    return _moonvit(mmproj) | table


def _kimi_k3(mmproj: Mmproj) -> dict[str, Any]:
    vision = K3_VISION | _kimi_k25(mmproj)
    vision["mm_hidden_size"] = vision["vt_hidden_size"]
    vision["qkv_hidden_size"] = vision["vt_num_attention_heads"] * mmproj.count(HEAD_DIM, 65536)
    return vision


def _kimi_vl(mmproj: Mmproj) -> dict[str, Any]:
    side = _square(mmproj)
    return _moonvit(mmproj) | {"init_pos_emb_height": side, "init_pos_emb_width": side}


def _square(mmproj: Mmproj) -> int:
    places = mmproj.shape(TABLE, 2)[0]
    side = math.isqrt(places)
    if side**2 != places:
        raise ConfigError(f"{mmproj.fields.where}: {TABLE}: {places} places, expected a square number")
    return side


def _qwen(mmproj: Mmproj) -> dict[str, Any]:
    epsilon = mmproj.fields.number(EPSILON, 0.0, 1.0)
    if epsilon != NORM_EPS:  # the towers have it fixed; the converter writes the text model's
        raise ConfigError(f"{mmproj.fields.where}: {EPSILON} is {epsilon:g}, expected {NORM_EPS:g}")
    return {
        "depth": mmproj.blocks(),
        "num_heads": mmproj.count(HEADS, 1024),
        "patch_size": mmproj.count(f"{V}patch_size", 256),
        "spatial_merge_size": mmproj.get(QWEN_MERGE, 2).integer(QWEN_MERGE, 1, 16),
        "temporal_patch_size": 2,
        "in_channels": 3,
        "hidden_act": _activation(mmproj),
    }


def _activation(mmproj: Mmproj) -> str:
    """As clip.cpp: quick_gelu unless a key says otherwise."""
    gelu, silu = (mmproj.get(key, False).flag(key) for key in ("clip.use_gelu", "clip.use_silu"))
    if gelu and silu:
        raise ConfigError(f"{mmproj.fields.where}: clip.use_gelu and clip.use_silu are both true")
    return "gelu_pytorch_tanh" if gelu else "silu" if silu else "quick_gelu"


def _inner(mmproj: Mmproj, width: int) -> int:
    """Rows of the first matrix of the feed-forward; the converter's `feed_forward_length` is the text's."""
    return mmproj.shape(DOWN if swapped(mmproj.layout, mmproj.shapes, width) else UP, 2)[0]


def _qwen2_vl(mmproj: Mmproj) -> dict[str, Any]:
    width = mmproj.count(f"{V}embedding_length", 65536)
    inner = _inner(mmproj, width)
    ratio = inner / width
    ratio = ratio if int(width * ratio) == inner else math.nextafter(ratio, math.inf)
    sizes = {"embed_dim": width, "hidden_size": mmproj.count(f"{V}projection_dim"), "mlp_ratio": ratio}
    return _qwen(mmproj) | sizes


def _wide(mmproj: Mmproj, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": mmproj.count(f"{V}embedding_length", 65536),
        "intermediate_size": inner,
        "out_hidden_size": mmproj.count(f"{V}projection_dim"),
    }


def _qwen2_5_vl(mmproj: Mmproj) -> dict[str, Any]:
    common, every = _qwen(mmproj), mmproj.count(PATTERN, 1001)
    inner = _inner(mmproj, mmproj.count(f"{V}embedding_length", 65536))
    full = [layer for layer in range(common["depth"]) if (layer + 1) % every == 0]
    window = mmproj.get(WINDOW, QWEN_WINDOW).integer(WINDOW, 1, 65536)
    return common | _wide(mmproj, inner) | {"window_size": window, "fullatt_block_indexes": full}


def _qwen3_vl(mmproj: Mmproj) -> dict[str, Any]:
    common = _qwen(mmproj)
    inner = mmproj.count(f"{V}feed_forward_length")
    flags = mmproj.fields.values.get(DEEPSTACK, [False] * common["depth"])
    if not isinstance(flags, list) or len(flags) != common["depth"]:
        raise ConfigError(
            f"{mmproj.fields.where}: {DEEPSTACK} is {shown(flags)}, expected {common['depth']} flags"
        )
    more = {
        "num_position_embeddings": mmproj.shape(TABLE, 2)[0],
        "deepstack_visual_indexes": deepstack_layers(mmproj.fields.values, mmproj.shapes),
    }
    return common | _wide(mmproj, inner) | more


def deepstack_layers(metadata: Mapping[str, Any], names: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers with DeepStack features, from the key or, without it, from the tensors."""
    flags = metadata.get(DEEPSTACK)
    if isinstance(flags, list):
        return [layer for layer, flag in enumerate(flags) if flag]
    numbers = {name.split(".")[2] for name in names if name.startswith("v.deepstack.")}
    return sorted(int(number) for number in numbers if number.isdecimal() and len(number) < 5)


def _patch_limit(mmproj: Mmproj) -> int:
    limit = KIMI_LIMITS[mmproj.layout.family]
    area = mmproj.count(f"{V}patch_size", 256) ** 2
    pixels = mmproj.get(HIGHEST, limit * area).integer(HIGHEST, 1, 2**40)
    if pixels % area:
        raise ConfigError(f"{mmproj.fields.where}: {HIGHEST} is {pixels}, expected whole patches of {area}")
    return pixels // area


def _kimi_media(mmproj: Mmproj) -> dict[str, Any]:
    return {
        "in_patch_limit": _patch_limit(mmproj),
        "patch_size": mmproj.count(f"{V}patch_size", 256),
        "merge_kernel_size": mmproj.count(MERGE, 16),
        "patch_limit_on_one_side": KIMI_SIDE,
        "fixed_output_tokens": None,
        **mmproj.numbers(),
    }


def _kimi_k25_pixels(mmproj: Mmproj) -> dict[str, Any]:
    return {"media_proc_cfg": _kimi_media(mmproj)}


def _kimi_k3_pixels(mmproj: Mmproj) -> dict[str, Any]:
    return {"media_proc_cfg": preprocessor_config()["media_proc_cfg"] | _kimi_media(mmproj)}


def _kimi_vl_pixels(mmproj: Mmproj) -> dict[str, Any]:
    media = _kimi_media(mmproj)
    return {
        "in_token_limit": media["in_patch_limit"],
        "patch_size": media["patch_size"],
        "merge_kernel_size": [media["merge_kernel_size"]] * 2,
        "pad_input": True,
        **mmproj.numbers(),
    }


def _qwen_pixels(mmproj: Mmproj) -> dict[str, Any]:
    low, high = QWEN_LIMITS[mmproj.layout.family]
    return {
        "min_pixels": mmproj.get(LOWEST, low).integer(LOWEST, 1, 2**40),
        "max_pixels": mmproj.get(HIGHEST, high).integer(HIGHEST, 1, 2**40),
        "patch_size": mmproj.count(f"{V}patch_size", 256),
        "merge_size": mmproj.get(QWEN_MERGE, 2).integer(QWEN_MERGE, 1, 16),
        "temporal_patch_size": 2,
        **mmproj.numbers(),
    }


_VISION: Mapping[str, Callable[[Mmproj], dict[str, Any]]] = {
    "kimi_vl": _kimi_vl,
    "kimi_k25": _kimi_k25,
    "kimi_k3": _kimi_k3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
_PIXELS: Mapping[str, Callable[[Mmproj], dict[str, Any]]] = {
    "kimi_vl": _kimi_vl_pixels,
    "kimi_k25": _kimi_k25_pixels,
    "kimi_k3": _kimi_k3_pixels,
    "qwen2_vl": _qwen_pixels,
    "qwen2_5_vl": _qwen_pixels,
    "qwen3_vl": _qwen_pixels,
}


def metadata_of(layout: Layout, config: TowerConfig, pixels: PatchRules) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for such a tower.

    Python's types say how they are stored: int as uint32, float as float32, lists as arrays of these.
    """
    common = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": layout.projector,
        f"{V}projection_dim": config.text_hidden_size,
        f"{V}patch_size": config.patch_size,
        f"{V}embedding_length": config.hidden_size,
        f"{V}feed_forward_length": config.intermediate_size,
        f"{V}block_count": config.num_layers,
        HEADS: config.num_heads,
        f"{V}image_mean": list(pixels.mean),
        f"{V}image_std": list(pixels.std),
    }
    if isinstance(config, VisionConfig) and isinstance(pixels, PixelConfig):
        return common | _kimi_keys(config, pixels)
    assert isinstance(config, QwenConfig)
    assert isinstance(pixels, QwenPixels)
    return common | _qwen_keys(config, pixels)


def _kimi_keys(config: VisionConfig, pixels: PixelConfig) -> dict[str, Any]:
    area = config.patch_size**2
    keys: dict[str, Any] = {
        f"{V}image_size": config.pos_emb_height * config.patch_size,
        "clip.use_gelu": True,
        EPSILON: config.projector_eps,
        MERGE: config.merge_size,
    }
    limits = {LOWEST: 8 * area, HIGHEST: pixels.in_patch_limit * area}
    if config.model_type == "kimi_vl":
        return keys | (limits if pixels.in_patch_limit != KIMI_LIMITS["kimi_vl"] else {})
    keys["vision.pos_emb_height"], keys["vision.pos_emb_width"] = config.pos_emb_height, config.pos_emb_width
    keys[FRAMES] = config.pos_emb_time
    return keys | limits | ({HEAD_DIM: config.head_dim} if config.model_type == "kimi_k3" else {})


def _qwen_keys(config: QwenConfig, pixels: QwenPixels) -> dict[str, Any]:
    side = config.table_side * config.patch_size
    keys: dict[str, Any] = {
        f"{V}image_size": side or 560,
        EPSILON: config.norm_eps,
        QWEN_MERGE: config.merge_size,
        "clip.use_gelu": config.activation == "gelu_pytorch_tanh",
        "clip.use_silu": config.activation == "silu",
    }
    if config.model_type == "qwen2_5_vl":
        keys[PATTERN] = min(config.full_layers, default=config.num_layers) + 1
    if config.model_type == "qwen3_vl":
        keys[DEEPSTACK] = [layer in config.deepstack_layers for layer in range(config.num_layers)]
    low, high = QWEN_LIMITS[config.model_type]
    if (pixels.min_pixels, pixels.max_pixels) != (low, high):
        keys |= {LOWEST: pixels.min_pixels, HIGHEST: pixels.max_pixels}
    return keys

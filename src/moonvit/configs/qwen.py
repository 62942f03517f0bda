"""`config.json` and `preprocessor_config.json` of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Source of names and of the few defaults: the `transformers` package, which is the reference for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonvit.config import PatchRules, TowerConfig
from moonvit.errors import ConfigError
from moonvit.fields import Fields

NORM_EPS = 1e-6
ROPE_THETA = 10000.0
ACTIVATIONS = ("quick_gelu", "silu", "gelu_pytorch_tanh", "gelu")


@dataclass(frozen=True, kw_only=True)
class QwenConfig(TowerConfig):
    """Geometry of a Qwen tower.

    `temporal_patch_size` frames make one patch. Qwen2.5: windows are `window_cells` merged cells a side,
    and `full_layers` attend over whole frames. Qwen3: the position table has `table_side` rows and
    columns, and `deepstack_layers` give features of their own, in that order.
    """

    temporal_patch_size: int
    activation: str
    rope_theta: float
    window_cells: int = 0
    full_layers: tuple[int, ...] = ()
    table_side: int = 0
    deepstack_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QwenPixels(PatchRules):
    """How a picture becomes patches: pixels of the resized picture lie between the two limits."""

    min_pixels: int
    max_pixels: int
    temporal_patch_size: int
    rescale_factor: float


def qwen2_vl(config: Mapping[str, Any], where: str = "config.json") -> QwenConfig:
    """Qwen2-VL's geometry; without `hidden_act` it is quick_gelu, as released."""
    vision = Fields(config, where).section("vision_config")
    width = vision.integer("embed_dim", 4, 65536)
    return QwenConfig(
        **_common(vision, "qwen2_vl", width, "quick_gelu"),
        intermediate_size=int(width * vision.number("mlp_ratio", 0.0, 64.0)),
        text_hidden_size=vision.integer("hidden_size", 1, 2**20),
    )


def qwen2_5_vl(config: Mapping[str, Any], where: str = "config.json") -> QwenConfig:
    """Qwen2.5-VL's geometry."""
    vision = Fields(config, where).section("vision_config")
    common = _common(vision, "qwen2_5_vl", vision.integer("hidden_size", 4, 65536), "silu")
    window = vision.integer("window_size", 1, 65536)
    cells = window // common["merge_size"] // common["patch_size"]
    if cells < 1:
        raise ConfigError(f"{vision.where}: field 'window_size' is {window}, less than one merged cell")
    return QwenConfig(
        **common,
        intermediate_size=vision.integer("intermediate_size", 1, 2**20),
        text_hidden_size=vision.integer("out_hidden_size", 1, 2**20),
        window_cells=cells,
        full_layers=_layers(vision, "fullatt_block_indexes", None),
    )


def qwen3_vl(config: Mapping[str, Any], where: str = "config.json") -> QwenConfig:
    """Qwen3-VL's geometry."""
    vision = Fields(config, where).section("vision_config")
    common = _common(vision, "qwen3_vl", vision.integer("hidden_size", 4, 65536), "gelu_pytorch_tanh")
    places = vision.integer("num_position_embeddings", 1, 2**24)
    side = round(places**0.5)
    if side**2 != places:
        raise ConfigError(
            f"{vision.where}: field 'num_position_embeddings' is {places}, expected a square number"
        )
    return QwenConfig(
        **common,
        intermediate_size=vision.integer("intermediate_size", 1, 2**20),
        text_hidden_size=vision.integer("out_hidden_size", 1, 2**20),
        table_side=side,
        deepstack_layers=_layers(vision, "deepstack_visual_indexes", common["num_layers"]),
    )


def _common(vision: Fields, family: str, width: int, activation: str) -> dict[str, Any]:
    heads = vision.integer("num_heads", 1, 1024)
    if width % (4 * heads):
        raise ConfigError(f"{vision.where}: width {width}, expected a multiple of 4 x {heads} heads")
    for name in ("in_channels", "in_chans"):
        if name in vision.values:
            vision.integer(name, 3, 3)
    fields = Fields({"hidden_act": activation, **vision.values}, vision.where)
    return {
        "model_type": family,
        "patch_size": vision.square("patch_size", 1, 256),
        "merge_size": vision.integer("spatial_merge_size", 1, 16),
        "temporal_patch_size": vision.integer("temporal_patch_size", 1, 16),
        "hidden_size": width,
        "num_layers": vision.integer("depth", 1, 1000),
        "num_heads": heads,
        "activation": fields.choice("hidden_act", *ACTIVATIONS),
        "rope_theta": _rope_theta(vision),
        "norm_eps": NORM_EPS,
    }


def _rope_theta(vision: Fields) -> float:
    if vision.values.get("rope_parameters") is None:
        return ROPE_THETA
    rope = vision.section("rope_parameters")
    rope.choice("rope_type", "axial")
    return rope.number("rope_theta", 0.0, 1e12)


def _layers(vision: Fields, name: str, limit: int | None) -> tuple[int, ...]:
    """Numbers of layers; some released lists go past the last layer of a smaller model."""
    value = vision.raw(name)
    good = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if not good or len(set(value)) != len(value) or (limit is not None and max(value, default=0) >= limit):
        raise ConfigError(f"{vision.where}: field '{name}' is {value!r}, expected numbers of layers")
    return tuple(value)


def qwen_pixels(config: Mapping[str, Any], where: str = "preprocessor_config.json") -> QwenPixels:
    """Pixel rules; limits by `min_pixels`/`max_pixels` or by `size`'s `shortest_edge`/`longest_edge`."""
    top = Fields(config, where)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if name in top.values:
            top.choice(name, True)
    low = _limit(top, "min_pixels", "shortest_edge")
    high = _limit(top, "max_pixels", "longest_edge")
    if low > high:
        raise ConfigError(f"{where}: at least {low} and at most {high} pixels cannot both be kept")
    scale = Fields({"rescale_factor": 1 / 255, **top.values}, where)
    return QwenPixels(
        min_pixels=low,
        max_pixels=high,
        patch_size=top.square("patch_size", 1, 256),
        merge_size=top.square("merge_size", 1, 16),
        temporal_patch_size=top.integer("temporal_patch_size", 1, 16),
        mean=top.numbers("image_mean", 3, -1e3, 1e3),
        std=top.numbers("image_std", 3, 0.0, 1e3),
        rescale_factor=scale.number("rescale_factor", 0.0, 1.0),
    )


def _limit(top: Fields, name: str, edge: str) -> int:
    if top.values.get(name) is not None:
        return top.integer(name, 1, 2**40)
    size = top.section("size") if top.values.get("size") is not None else top
    return size.integer(edge if edge in size.values else name, 1, 2**40)


def video_limits(config: Mapping[str, Any], where: str = "video_preprocessor_config.json") -> tuple[int, int]:
    """Least and most pixels of a video, as `qwen_pixels` reads those of a picture."""
    top = Fields(config, where)
    return _limit(top, "min_pixels", "shortest_edge"), _limit(top, "max_pixels", "longest_edge")

"""`config.json` and the rules for pictures and videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Source of names and defaults: the `transformers` package, which is the reference for them. It has written
`vision_config` without what equals its defaults (`to_diff_dict`), so what is absent there has its numbers.
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
BICUBIC = 3
"""Pillow's number of the filter that all released checkpoints name."""

_COMMON: dict[str, Any] = {"num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN2_DEFAULTS: dict[str, Any] = {
    **_COMMON, "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14,
    "hidden_act": "quick_gelu",
}  # fmt: skip
QWEN25_DEFAULTS: dict[str, Any] = {
    **_COMMON, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "out_hidden_size": 3584,
    "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
}  # fmt: skip
QWEN3_DEFAULTS: dict[str, Any] = {
    **_COMMON, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 3584,
    "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
WITHOUT_DEEPSTACK = ("qwen3_5", "qwen3_5_moe")
"""Values of `model_type` that have Qwen3-VL's tower and give no DeepStack features."""


@dataclass(frozen=True, kw_only=True)
class QwenConfig(TowerConfig):
    """Geometry of a Qwen tower.

    `temporal_patch_size` frames make one patch. Qwen2.5: windows are `window_cells` merged cells a side,
    and `full_layers` attend over whole frames. Qwen3: the position table has `table_side` rows and
    columns, and `deepstack_layers` give features of their own, each by the projector at its place here.
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
    resample: int = BICUBIC


@dataclass(frozen=True, kw_only=True)
class QwenVideo:
    """How a video is sampled and sized: `pixels` has the limits, of a frame or (Qwen3) of all together.

    `fps` frames a second are taken, at least `min_frames` and at most `max_frames`. `frame_tokens` bounds
    the pixels of a frame further (transformers' `cap_pixels_per_frame`); None does not.
    """

    pixels: QwenPixels
    fps: float
    min_frames: int
    max_frames: int
    frame_tokens: int | None


def qwen2_vl(config: Mapping[str, Any], where: str = "config.json") -> QwenConfig:
    """Qwen2-VL's geometry."""
    vision = _vision(config, where, QWEN2_DEFAULTS)
    width = vision.integer("embed_dim", 4, 65536)
    return QwenConfig(
        **_common(vision, "qwen2_vl", width),
        intermediate_size=int(width * vision.number("mlp_ratio", 0.0, 64.0)),
        text_hidden_size=vision.integer("hidden_size", 1, 2**20),
    )


def qwen2_5_vl(config: Mapping[str, Any], where: str = "config.json") -> QwenConfig:
    """Qwen2.5-VL's geometry."""
    vision = _vision(config, where, QWEN25_DEFAULTS)
    common = _common(vision, "qwen2_5_vl", vision.integer("hidden_size", 4, 65536))
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
    """Qwen3-VL's geometry, and that of Qwen3.5, which has its tower without DeepStack."""
    plain = Fields(config, where).values.get("model_type") in WITHOUT_DEEPSTACK
    vision = _vision(
        config, where, {**QWEN3_DEFAULTS, "deepstack_visual_indexes": []} if plain else QWEN3_DEFAULTS
    )
    common = _common(vision, "qwen3_vl", vision.integer("hidden_size", 4, 65536))
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


def _vision(config: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> Fields:
    """`vision_config` completed from transformers' defaults."""
    vision = Fields(config, where).section("vision_config")
    return Fields({**defaults, **vision.values}, vision.where)


def _common(vision: Fields, family: str, width: int) -> dict[str, Any]:
    heads = vision.integer("num_heads", 1, 1024)
    if width % (4 * heads):
        raise ConfigError(f"{vision.where}: width {width}, expected a multiple of 4 x {heads} heads")
    for name in ("in_channels", "in_chans"):
        if name in vision.values:
            vision.integer(name, 3, 3)
    return {
        "model_type": family,
        "patch_size": vision.square("patch_size", 1, 256),
        "merge_size": vision.integer("spatial_merge_size", 1, 16),
        "temporal_patch_size": vision.integer("temporal_patch_size", 1, 16),
        "hidden_size": width,
        "num_layers": vision.integer("depth", 1, 1000),
        "num_heads": heads,
        "activation": vision.choice("hidden_act", *ACTIVATIONS),
        "rope_theta": _rope_theta(vision),
        "norm_eps": NORM_EPS,
    }


def _rope_theta(vision: Fields) -> float:
    if vision.values.get("rope_parameters") is None:
        return ROPE_THETA
    rope = vision.section("rope_parameters")
    if rope.values.get("rope_type") is not None:
        rope.choice("rope_type", "axial", "default")  # two names of one thing
    return rope.number("rope_theta", 0.0, 1e12) if rope.values.get("rope_theta") is not None else ROPE_THETA


def _layers(vision: Fields, name: str, limit: int | None) -> tuple[int, ...]:
    """Numbers of layers; some released lists go past the last layer of a smaller model."""
    value = vision.raw(name)
    good = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if not good or len(set(value)) != len(value) or (limit is not None and max(value, default=0) >= limit):
        raise ConfigError(f"{vision.where}: field '{name}' is {value!r}, expected numbers of layers")
    return tuple(value)


def qwen_pixels(config: Mapping[str, Any], where: str = "preprocessor_config.json") -> QwenPixels:
    """Rules for pictures; the limits are `min_pixels`/`max_pixels` or `size.shortest_edge`/`longest_edge`."""
    given = Fields(config, where).values
    top = Fields({"rescale_factor": 1 / 255, "resample": BICUBIC, **given}, where)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if top.values.get(name) is not None:
            top.choice(name, True)
    low = _limit(top, "min_pixels", "shortest_edge")
    high = _limit(top, "max_pixels", "longest_edge")
    if low > high:
        raise ConfigError(f"{where}: at least {low} and at most {high} pixels cannot both be kept")
    return QwenPixels(
        min_pixels=low,
        max_pixels=high,
        patch_size=top.square("patch_size", 1, 256),
        merge_size=top.square("merge_size", 1, 16),
        temporal_patch_size=top.integer("temporal_patch_size", 1, 16),
        mean=top.numbers("image_mean", 3, -1e3, 1e3),
        std=top.numbers("image_std", 3, 0.0, 1e3),
        rescale_factor=top.number("rescale_factor", 0.0, 1.0),
        resample=top.integer("resample", 0, 5),
    )


def _limit(top: Fields, name: str, edge: str) -> int:
    if top.values.get(name) is not None:
        return top.integer(name, 1, 2**40)
    size = top.section("size") if top.values.get("size") is not None else top
    return size.integer(edge if edge in size.values else name, 1, 2**40)


def qwen_video(rules: Fields | None, pictures: QwenPixels, newest: bool) -> QwenVideo:
    """Rules for videos; without rules of their own, `pictures`' limits and transformers' defaults.

    `newest` is Qwen3-VL's kind, whose limits bound all frames together.
    """
    given = {name: value for name, value in (rules.values if rules else {}).items() if value is not None}
    defaults = _as_json(pictures)
    if rules is not None:
        cell = pictures.cell**2
        defaults["size"] = {"shortest_edge": 128 * cell, "longest_edge": 768 * cell}
    sampling = {"fps": 2, "min_frames": 4, "max_frames": 768, "max_video_tokens": 768 if newest else 128000}
    top = Fields({**defaults, **sampling, **given}, rules.where if rules else "videos")
    pixels = qwen_pixels(top.values, top.where)
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        if getattr(pixels, name) != getattr(pictures, name):
            top.choice(name, getattr(pictures, name))
    capped = top.values.get("cap_pixels_per_frame") is not None and top.flag("cap_pixels_per_frame")
    return QwenVideo(
        pixels=pixels,
        fps=top.number("fps", 0.0, 1000.0),
        min_frames=top.integer("min_frames", 1, 2**20),
        max_frames=top.integer("max_frames", pixels.temporal_patch_size, 2**20),
        frame_tokens=top.integer("max_video_tokens", 1, 2**30) if capped else None,
    )


def _as_json(pixels: QwenPixels) -> dict[str, Any]:
    """Rules for pictures as a file has them, for what a video's leave out."""
    size = {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels}
    rest = {"image_mean": list(pixels.mean), "image_std": list(pixels.std), "size": size}
    names = ("patch_size", "merge_size", "temporal_patch_size", "rescale_factor", "resample")
    return {**rest, **{name: getattr(pixels, name) for name in names}}

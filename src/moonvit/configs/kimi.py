"""`config.json` and the rules for pictures and videos of Kimi K2.5, K2.6 and Kimi-VL.

What these checkpoints leave out has one documented meaning for the family (K2.5: bicubic table,
LayerNorm, biases, qkv as wide as the tower); everything else that is missing is refused.
"""

from collections.abc import Mapping
from typing import Any

from moonvit.config import (
    FLOAT32_EPS,
    MAX_SIDE,
    ROPE_THETA,
    ClipRules,
    PixelConfig,
    VisionConfig,
    check_geometry,
)
from moonvit.errors import ConfigError
from moonvit.fields import Fields

LAYERNORM_EPS = 1e-5

OTHER_NAMES = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
    "hidden_act": "activation_func",
}
"""Fields as transformers' own `kimi_k25` and Kimi-VL spell them, and their released names."""

TOP_LEVEL_NAMES = {
    "projector_ln_eps": "projector_ln_eps",
    "projection_layer_norm_eps": "projector_ln_eps",
    "mm_hidden_size": "mm_hidden_size",
    "projection_hidden_size": "mm_hidden_size",
}
"""Fields of the projector that some checkpoints keep beside `vision_config`."""

K25_DEFAULTS: dict[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bicubic",
    "norm_type": "layernorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "attn_bias": True,
    "linear_bias": True,
    "patch_embed_proj_bias": True,
}

KIMI_VL_DEFAULTS: dict[str, Any] = {**K25_DEFAULTS, "init_pos_emb_time": 1}


def kimi_k25(config: Mapping[str, Any], where: str = "config.json") -> VisionConfig:
    """K2.5's and K2.6's geometry, in the released spelling or transformers' own."""
    return _sibling(config, where, "kimi_k25", K25_DEFAULTS)


def kimi_vl(config: Mapping[str, Any], where: str = "config.json") -> VisionConfig:
    """Kimi-VL's geometry: one frame only."""
    return _sibling(config, where, "kimi_vl", KIMI_VL_DEFAULTS)


def _sibling(config: Mapping[str, Any], where: str, family: str, defaults: dict[str, Any]) -> VisionConfig:
    top = Fields(config, where)
    vision = _released_names(top, defaults)
    _require(vision)
    norm = vision.choice("norm_type", "layernorm", "rmsnorm")
    norm_eps = LAYERNORM_EPS if norm == "layernorm" else FLOAT32_EPS
    result = VisionConfig.from_fields(vision, model_type=family, norm=norm, norm_eps=norm_eps)
    check_geometry(result, top, vision)
    return result


def _released_names(top: Fields, defaults: dict[str, Any]) -> Fields:
    """`vision_config` with released field names, completed from the places where siblings keep them."""
    vision = top.section("vision_config")
    found: dict[str, Any] = {}
    for name, value in vision.values.items():
        _take(found, OTHER_NAMES.get(name, name), value, vision.where)
    for name, released in TOP_LEVEL_NAMES.items():
        if name in top.values:
            _take(found, released, top.values[name], top.where)
    if "text_hidden_size" not in found:
        found["text_hidden_size"] = top.section("text_config").raw("hidden_size")
    values = {**defaults, **{name: value for name, value in found.items() if value is not None}}
    values.setdefault("mm_hidden_size", values.get("vt_hidden_size"))
    values.setdefault("qkv_hidden_size", values.get("vt_hidden_size"))
    if values["qkv_hidden_size"] is None:
        vision.raw("vt_hidden_size")
    return Fields(values, vision.where)


def _take(found: dict[str, Any], name: str, value: Any, where: str) -> None:
    if found.get(name) is not None and value is not None and found[name] != value:
        raise ConfigError(f"{where}: field '{name}' is given twice, as {found[name]!r} and {value!r}")
    found[name] = value if value is not None else found.get(name)


def _require(vision: Fields) -> None:
    vision.choice("pos_emb_type", "divided_fixed")
    vision.choice("mlp_type", "mlp2")
    vision.choice("activation_func", "gelu_pytorch_tanh")
    vision.choice("merge_type", "sd2_tpool")
    vision.choice("mm_projector_type", "patchmerger")
    vision.choice("projector_hidden_act", "gelu")
    if vision.values.get("video_attn_type") is not None:
        vision.choice("video_attn_type", "spatial_temporal")
    if vision.values.get("rope_parameters") is not None:
        rope = vision.section("rope_parameters")
        if rope.values.get("rope_theta", ROPE_THETA) != ROPE_THETA:
            rope.choice("rope_theta", ROPE_THETA)


def kimi_pixels(config: Mapping[str, Any], where: str = "preprocessor_config.json") -> PixelConfig:
    """K2.5's rules for pictures: released (`media_proc_cfg`) or transformers' own (`max_patches`)."""
    top = Fields(config, where)
    if "media_proc_cfg" in top.values or "max_patches" not in top.values:
        return PixelConfig.from_dict(config, where)
    _require_steps(top)
    size = top.section("size")
    side = size.integer("max_height", 1, MAX_SIDE)
    if size.raw("max_width") != side:
        size.choice("max_width", side)
    return PixelConfig(
        in_patch_limit=top.integer("max_patches", 1, 2**24),
        side_limit=side,
        patch_size=top.square("patch_size", 1, 256),
        merge_size=top.square("merge_size", 1, 16),
        mean=top.numbers("image_mean", 3, -1e3, 1e3),
        std=top.numbers("image_std", 3, 0.0, 1e3),
        background=None,
        fill_before_resize=True,
    )


def _require_steps(top: Fields) -> None:
    """Refuse what transformers' processor can be told and this one does not do."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if top.values.get(name) is not None:
            top.choice(name, True)
    if top.values.get("resample") is not None:
        top.choice("resample", 3)
    if top.values.get("rescale_factor") is not None and top.values["rescale_factor"] != 1 / 255:
        top.choice("rescale_factor", 1 / 255)


def kimi_clip(rules: Fields) -> ClipRules:
    """Rules for videos as transformers' own `kimi_k25` writes them; absent ones are its defaults."""
    _require_steps(rules)
    defaults = {"max_patches": 4096, "fps": 2, "temporal_patch_size": 4}
    given = {name: value for name, value in rules.values.items() if value is not None}
    top = Fields({**defaults, **given}, rules.where)
    return ClipRules(
        frame_limit=top.integer("max_patches", 1, 2**24),
        clip_limit=None,
        sample_fps=top.number("fps", 0.0, 1000.0),
        frames=top.integer("temporal_patch_size", 1, 64),
        timestamp_mode="hh:mm:ss.fff",
    )


def kimi_vl_pixels(config: Mapping[str, Any], where: str = "preprocessor_config.json") -> PixelConfig:
    """Kimi-VL's rules for pictures; they are made RGB after resizing."""
    top = Fields({"merge_kernel_size": [2, 2], **Fields(config, where).values}, where)
    top.choice("pad_input", True)
    return PixelConfig(
        in_patch_limit=top.integer("in_token_limit", 1, 2**24),
        side_limit=MAX_SIDE - 1,
        patch_size=top.square("patch_size", 1, 256),
        merge_size=top.square("merge_kernel_size", 1, 16),
        mean=top.numbers("image_mean", 3, -1e3, 1e3),
        std=top.numbers("image_std", 3, 0.0, 1e3),
        background=None,
        fill_before_resize=False,
    )

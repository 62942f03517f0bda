"""The geometry of a tower and the rules of its pixels, parsed strictly from a checkpoint's JSON.

No field has a default: what a checkpoint leaves out and would change the result is an error. The
released geometry stands in `moonvit.presets`; K3's siblings are parsed in `moonvit.configs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

from moonvit.errors import ConfigError
from moonvit.fields import Fields

FLOAT32_EPS = 2.0**-23
"""1.1920928955078125e-07: what `nn.RMSNorm(dim)` without `eps` computes with since PyTorch 2.7."""

MODEL_TYPES = ("kimi_k3",)
ROPE_THETA = 10000.0
TIMESTAMP_MODES = ("hh:mm:ss.fff", "mm:ss.fff", "mm:ss")
MAX_SIDE = 512
"""The reference's rotary table has 512 rows and columns; larger grids are outside the model."""


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """What the geometry of every family has.

    Sizes are counts of features, except `patch_size` (pixels) and `merge_size` (patches along a side of a
    merged cell). `norm_eps` is the epsilon of the tower's norms, which no checkpoint stores.
    """

    model_type: str
    patch_size: int
    merge_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    text_hidden_size: int
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Features of one merged row: merge_size² patches side by side."""
        return self.merge_size**2 * self.hidden_size

    def with_norm_eps(self, norm_eps: float) -> Self:
        """The same geometry with another norm epsilon; `ConfigError` unless 0 < norm_eps < 1."""
        good = isinstance(norm_eps, Real) and 0 < norm_eps < 1
        if not good:
            raise ConfigError(f"norm_eps is {norm_eps!r}, expected a number between 0 and 1")
        return replace(self, norm_eps=float(norm_eps))


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TowerConfig):
    """Geometry of a Kimi tower and its projector.

    `pos_emb_*` count the cells of the position table, in time the most frames of a clip. `norm` is
    "rmsnorm" or "layernorm"; `projector_eps` is the projector's `projector_ln_eps`.
    """

    qkv_hidden_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    interpolation: str
    norm: str
    attn_bias: bool
    linear_bias: bool
    patch_bias: bool
    projector_eps: float

    @property
    def head_dim(self) -> int:
        """Features of one head: qkv_hidden_size / num_heads, not hidden_size / num_heads."""
        return self.qkv_hidden_size // self.num_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "config.json") -> "VisionConfig":
        """K3's config from a parsed `config.json`; `ConfigError` names field, value and file."""
        top = Fields(config, where)
        model_type = top.choice("model_type", *MODEL_TYPES)
        vision = top.section("vision_config")
        _require_k3(vision)
        result = cls.from_fields(vision, model_type=model_type, norm="rmsnorm", norm_eps=FLOAT32_EPS)
        check_geometry(result, top, vision)
        return result

    @classmethod
    def from_fields(cls, vision: Fields, *, model_type: str, norm: str, norm_eps: float) -> "VisionConfig":
        """The fields of a Kimi `vision_config` under their released names, each checked by itself."""
        return cls(
            model_type=model_type,
            patch_size=vision.square("patch_size", 1, 256),
            merge_size=vision.square("merge_kernel_size", 2, 2),
            hidden_size=vision.integer("vt_hidden_size", 2, 65536),
            intermediate_size=vision.integer("vt_intermediate_size", 1, 2**20),
            num_layers=vision.integer("vt_num_hidden_layers", 1, 1000),
            num_heads=vision.integer("vt_num_attention_heads", 1, 1024),
            qkv_hidden_size=vision.integer("qkv_hidden_size", 4, 65536),
            pos_emb_height=vision.integer("init_pos_emb_height", 1, 4096),
            pos_emb_width=vision.integer("init_pos_emb_width", 1, 4096),
            pos_emb_time=vision.integer("init_pos_emb_time", 1, 4096),
            interpolation=vision.choice("pos_emb_interpolation_mode", "bilinear", "bicubic"),
            norm=norm,
            attn_bias=vision.flag("attn_bias"),
            linear_bias=vision.flag("linear_bias"),
            patch_bias=vision.flag("patch_embed_proj_bias"),
            projector_eps=vision.number("projector_ln_eps", 0.0, 1.0),
            text_hidden_size=vision.integer("text_hidden_size", 1, 2**20),
            norm_eps=norm_eps,
        )


def _require_k3(vision: Fields) -> None:
    """Refuse a checkpoint that asks for an operation which the K3 tower does not have."""
    vision.choice("pos_emb_type", "divided_fixed")
    vision.choice("norm_type", "rmsnorm")
    vision.choice("mlp_type", "mlp2")
    vision.choice("activation_func", "gelu_pytorch_tanh")
    vision.choice("merge_type", "sd2_tpool")
    vision.choice("mm_projector_type", "patchmergerv2")
    vision.choice("projector_hidden_act", "gelu")


def check_geometry(config: VisionConfig, top: Fields, vision: Fields) -> None:
    """`ConfigError` where sizes cannot go together; field names are the released ones."""
    where = vision.where
    if config.hidden_size % 2:
        raise ConfigError(f"{where}: field 'vt_hidden_size' is {config.hidden_size}, expected an even number")
    if config.qkv_hidden_size % (4 * config.num_heads):
        raise ConfigError(
            f"{where}: field 'qkv_hidden_size' is {config.qkv_hidden_size}, expected a multiple of "
            f"4 x {config.num_heads} heads (vt_num_attention_heads)"
        )
    if vision.integer("mm_hidden_size", 1, 65536) != config.hidden_size:
        raise ConfigError(
            f"{where}: field 'mm_hidden_size' is {vision.raw('mm_hidden_size')}, "
            f"but vt_hidden_size is {config.hidden_size}"
        )
    if "text_config" in top.values:
        text = top.section("text_config")
        if "hidden_size" in text.values and text.raw("hidden_size") != config.text_hidden_size:
            raise ConfigError(
                f"{text.where}: field 'hidden_size' is {text.raw('hidden_size')}, "
                f"but vision_config.text_hidden_size is {config.text_hidden_size}"
            )


@dataclass(frozen=True, kw_only=True)
class Chessboard:
    """The background that shows through transparent pixels: squares of two greys.

    `square` in pixels; `white_first` says that the square at (0, 0) is the white one.
    """

    square: int
    white_first: bool
    white: int
    gray: int


@dataclass(frozen=True, kw_only=True)
class PatchRules:
    """How every family cuts pixels; `mean` and `std` are for pixels scaled to 0..1."""

    patch_size: int
    merge_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def cell(self) -> int:
        """Pixels along a side of one merged cell, which is what one token sees."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class ClipRules:
    """How a Kimi checkpoint takes videos.

    `frame_limit` bounds the patches of a frame, `clip_limit` those of a chunk (None: no bound);
    `sample_fps` frames a second are taken, at most `frames` to a chunk.
    """

    frame_limit: int
    clip_limit: int | None
    sample_fps: float
    frames: int
    timestamp_mode: str


@dataclass(frozen=True, kw_only=True)
class PixelConfig(PatchRules):
    """How a picture becomes patches for a Kimi tower.

    `in_patch_limit` bounds the patches of the resized picture (before padding), `side_limit` those
    along one side. `background` is None where transparency is dropped; `fill_before_resize` says when
    it is filled. `clip` is None for a checkpoint that says nothing of videos.
    """

    in_patch_limit: int
    side_limit: int
    background: Chessboard | None
    fill_before_resize: bool
    clip: ClipRules | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "preprocessor_config.json") -> "PixelConfig":
        """The config of a parsed `preprocessor_config.json`; `ConfigError` names field, value and file."""
        media = Fields(config, where).section("media_proc_cfg")
        if media.values.get("fixed_output_tokens") is not None:
            media.choice("fixed_output_tokens", None)
        stage = "before_resize"
        if "transparent_bg_fill_stage" in media.values:
            stage = media.choice("transparent_bg_fill_stage", "before_resize", "after_resize")
        return cls(
            in_patch_limit=media.integer("in_patch_limit", 1, 2**24),
            side_limit=media.integer("patch_limit_on_one_side", 1, MAX_SIDE),
            patch_size=media.square("patch_size", 1, 256),
            merge_size=media.square("merge_kernel_size", 1, 16),
            mean=media.numbers("image_mean", 3, -1e3, 1e3),
            std=media.numbers("image_std", 3, 1e-6, 1e3),
            background=_background(media),
            fill_before_resize=stage == "before_resize",
            clip=_clip(media) if "sample_fps" in media.values else None,
        )


def _background(media: Fields) -> Chessboard | None:
    if media.values.get("transparent_bg_config") is None:
        return None
    fields = media.section("transparent_bg_config")
    fields.choice("pattern", "chessboard")
    return Chessboard(
        square=fields.integer("chessboard_square_size", 1, 65536),
        white_first=fields.flag("chessboard_square_on_top_left"),
        white=fields.integer("chessboard_white_value", 0, 255),
        gray=fields.integer("chessboard_gray_value", 0, 255),
    )


def _clip(media: Fields) -> ClipRules:
    for name in ("max_num_frames_each_video", "fixed_output_tokens_each_frame"):
        if media.values.get(name) is not None:
            media.choice(name, None)
    limits = {"in_patch_limit_each_frame": None, "in_patch_limit_video": None} | dict(media.values)
    each, whole = limits["in_patch_limit_each_frame"], limits["in_patch_limit_video"]
    return ClipRules(
        frame_limit=media.integer(
            "in_patch_limit" if each is None else "in_patch_limit_each_frame", 1, 2**24
        ),
        clip_limit=None if whole is None else media.integer("in_patch_limit_video", 1, 2**30),
        sample_fps=media.number("sample_fps", 0.0, 1000.0),
        frames=media.integer("temporal_merge_kernel_size", 1, 64),
        timestamp_mode=media.choice("timestamp_mode", *TIMESTAMP_MODES),
    )


def check_agreement(vision: TowerConfig, pixels: PatchRules, where: str) -> None:
    """`ConfigError` where the two halves of a checkpoint cut pictures differently."""
    for name in ("patch_size", "merge_size"):
        ours, theirs = getattr(pixels, name), getattr(vision, name)
        if ours != theirs:
            field = {"merge_size": "merge_kernel_size"}.get(name, name)
            raise ConfigError(
                f"{where}: the rules for pictures have {field} {ours}, config.json has {theirs}"
            )

"""The mistakes that ports have made, each as a change to the right tower and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonvit.config import FLOAT32_EPS, VisionConfig


@dataclass(frozen=True, eq=False)
class Mistake:
    """`title` says what the port does, `advice` what it should do; `changes` are fields of `Variant`."""

    key: str
    title: str
    changes: Mapping[str, Any]
    advice: str


_ROTARY = (
    "turn adjacent pairs (2j, 2j+1): pair 2k by column*f_k, pair 2k+1 by row*f_k, f_k = 10000^(-4k/head_dim)"
)
_TABLE = "resample bilinearly at half-pixel centres, align_corners=False, no antialias, edges clamped"
_PIXELS = "(x/255 - 0.5)/0.5 on RGB; transparency over the chessboard; pad with 0 before normalising"
_MERGE = "each 2x2 cell as (0,0),(0,1),(1,0),(1,1), cells row by row"
_EPS = "the tower's RMS norms take 1.1920928955078125e-07 (2^-23)"
_BF16 = "compute these tables in float32 (or wider) and keep them so in a bfloat16 model"


def known_mistakes(config: VisionConfig) -> list[Mistake]:
    """All that are tried; those whose change is no change for this config are left out."""
    return [
        *_pixel_mistakes(),
        *_position_mistakes(config),
        *_norm_mistakes(config),
        *_rotary_mistakes(),
        *_attention_mistakes(config),
        *_merger_mistakes(config),
    ]


def _pixel_mistakes() -> list[Mistake]:
    pixels = {
        "clip": "pixels are normalised with CLIP's mean and std",
        "imagenet": "pixels are normalised with ImageNet's mean and std",
        "unit": "pixels are left at 0..1",
        "bytes": "pixels are left at 0..255",
        "bgr": "channels are BGR",
        "alpha-dropped": "alpha is dropped, the colours under transparent pixels show",
        "alpha-black": "transparent pixels are laid over black",
        "alpha-white": "transparent pixels are laid over white",
        "pad-zero": "padding is 0 after normalising (gray)",
        "pad-gray-127": "padding is gray 127 before normalising",
        "pad-gray-128": "padding is gray 128 before normalising",
        "pad-white": "padding is white",
    }
    layouts = {
        "patch-channel-last": ("row,column,channel", "patches are flattened channel-last"),
        "patch-transposed": ("channel,column,row", "patches are flattened column before row"),
    }
    found = [Mistake(f"pixels-{key}", title, {"pixels": key}, _PIXELS) for key, title in pixels.items()]
    advice = "flatten each patch as (channel, row, column)"
    found += [Mistake(k, title, {"patch_layout": how}, advice) for k, (how, title) in layouts.items()]
    return found


def _position_mistakes(config: VisionConfig) -> list[Mistake]:
    ways = ["bicubic", "bilinear", "antialiased", "bicubic antialiased", "align_corners"]
    ways += ["bicubic align_corners", "nearest"]
    titles = {way: f"the position table is resampled {way}" for way in ways if way != config.interpolation}
    titles["align_corners"] = "the position table is resampled with align_corners"
    titles["corner"] = "the position table's corner is taken untouched"
    found = [
        Mistake(f"table-{way.replace(' ', '-')}", title, {"table": way}, _TABLE)
        for way, title in titles.items()
    ]
    still = "a still picture gets no time row, not even row 0"
    clip = "in a clip, frame f gets row f of the [sin | cos] time table"
    return [
        *found,
        Mistake("table-transposed", "the position table is transposed", {"table_transposed": True}, _TABLE),
        Mistake("time-row-added", "time row 0 is added to still pictures", {"time_rows": "always"}, still),
        Mistake("time-rows-missing", "frames get no time rows", {"time_rows": "never"}, clip),
        Mistake(
            "table-bfloat16",
            "the position tables are rounded to bfloat16",
            {"position_dtype": torch.bfloat16},
            _BF16,
        ),
    ]


def _norm_mistakes(config: VisionConfig) -> list[Mistake]:
    names = {
        2.0**-7: "2^-7",
        2.0**-10: "2^-10",
        1e-5: "1e-5",
        1e-6: "1e-6",
        FLOAT32_EPS: "2^-23",
    }
    found = [
        Mistake(f"eps-{name}", f"the tower's RMS epsilon is {name}", {"norm_eps": eps}, _EPS)
        for eps, name in names.items()
        if eps != config.norm_eps
    ]
    advice = "the tower's norms are RMS norms: no mean is taken off"
    found.append(Mistake("layer-norm", "the norms take the mean off", {"norm": "layer"}, advice))
    gelu = "the tower's GELU is the tanh formula"
    for kind, title in {"erf": "exact (erf)", "quick": "x*sigmoid(1.702x)", "silu": "SiLU"}.items():
        found.append(Mistake(f"gelu-{kind}", f"the tower's GELU is {title}", {"gelu": kind}, gelu))
    return found


def _rotary_mistakes() -> list[Mistake]:
    half, swap = {"rotary_pairs": "half"}, {"rotary_axes": "row,column"}
    blocks = {"rotary_angles": "halves"}
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "rotary-half": ("rotary pairs are half-split", half),
        "rotary-swapped": ("rotary rows and columns are swapped", swap),
        "rotary-half-swapped": ("rotary pairs are half-split, rows and columns swapped", half | swap),
        "rotary-blocks": ("rotary angles are all columns, then all rows", blocks),
        "rotary-blocks-swapped": ("rotary angles are all rows, then all columns", blocks | swap),
        "rotary-half-blocks": ("rotary pairs are half-split, all columns, then all rows", half | blocks),
        "rotary-half-blocks-swapped": (
            "rotary pairs are half-split, all rows, then all columns",
            half | blocks | swap,
        ),
        "rotary-backwards": ("rotary pairs turn the other way", {"rotary_sign": -1}),
        "rotary-half-steps": ("rotary frequencies are theta^(-2k/d)", {"rotary_angles": "half steps"}),
    }
    thetas = (100.0, 1000.0, 50000.0, 100000.0, 500000.0, 1000000.0)
    found = [Mistake(key, title, changes, _ROTARY) for key, (title, changes) in ways.items()]
    found += [Mistake(f"theta-{t:g}", f"rotary theta is {t:g}", {"theta": t}, _ROTARY) for t in thetas]
    bf16 = torch.bfloat16
    return [
        *found,
        Mistake("rope-bfloat16", "the rotary tables are rounded to bfloat16", {"rope_dtype": bf16}, _BF16),
        Mistake(
            "tables-bfloat16",
            "position and rotary tables are rounded to bfloat16",
            {"rope_dtype": bf16, "position_dtype": bf16},
            _BF16,
        ),
        Mistake(
            "frequencies-bfloat16",
            "the rotary frequencies are rounded to bfloat16",
            {"rotary_angles": "bfloat16 frequencies"},
            _BF16,
        ),
    ]


def _attention_mistakes(config: VisionConfig) -> list[Mistake]:
    d, narrow = config.head_dim, config.hidden_size / config.num_heads
    scales = {"(D/heads)^-0.5": narrow**-0.5, "1": 1.0, "1/head_dim": 1 / d}
    if narrow != int(narrow):
        scales[f"{int(narrow)}^-0.5, from D//heads"] = int(narrow) ** -0.5
    advice = "scale scores by head_dim^-0.5, head_dim = qkv_hidden_size/heads"
    found = [
        Mistake(f"scale-{name}", f"attention's scale is {name}", {"scale": scale}, advice)
        for name, scale in scales.items()
        if scale != d**-0.5
    ]
    rows = "the rows of wqkv are q, then k, then v, each by head"
    found += [
        Mistake("qkv-per-head", "wqkv is split per head", {"qkv": "per head"}, rows),
        Mistake("qkv-per-channel", "wqkv is split per channel", {"qkv": "per channel"}, rows),
    ]
    scopes = {
        "batch": "attention runs over the whole batch",
        "frame": "attention stays within a frame",
        "causal": "attention is causal",
    }
    advice = "every patch sees all patches of its own picture or clip, and nothing else"
    return found + [Mistake(f"attention-{k}", t, {"attention": k}, advice) for k, t in scopes.items()]


def _merger_mistakes(config: VisionConfig) -> list[Mistake]:
    merges = {
        "raster": ("rows are merged four in raster order", "raster"),
        "column-major": ("patches of a cell are merged column by column", "column by column"),
        "cells-column-major": ("merged cells run column by column", "cells column by column"),
        "interleaved": ("channels of a cell's patches are interleaved", "channels interleaved"),
    }
    found = [Mistake(f"merge-{k}", title, {"merge": how}, _MERGE) for k, (title, how) in merges.items()]
    frames = "the mean over frames is taken before merging"
    gelu = "the projector's GELU is exact (erf)"
    post = "the projector's RMS norm comes last, over the text width, with its weight"
    found += [
        Mistake("frames-first", "only the first frame is merged", {"frames": "first"}, frames),
        Mistake("frames-sum", "frames are summed", {"frames": "sum"}, frames),
        Mistake("no-final-norm", "the final norm is missing", {"final_norm": False}, "apply final_layernorm"),
        Mistake("projector-gelu-tanh", "the projector's GELU is tanh", {"projector_gelu": "tanh"}, gelu),
        Mistake(
            "projector-gelu-quick",
            "the projector's GELU is x*sigmoid(1.702x)",
            {"projector_gelu": "quick"},
            gelu,
        ),
    ]
    for key, how in {
        "before": "before",
        "before-scaled": "before, weight after",
        "missing": "missing",
    }.items():
        title = "the projector's norm is missing" if key == "missing" else f"the projector's norm comes {how}"
        found.append(Mistake(f"post-norm-{key}", title, {"post_norm": how}, post))
    for eps, name in {2.0**-7: "2^-7", 1e-6: "1e-6", FLOAT32_EPS: "2^-23"}.items():
        if eps != config.projector_eps:
            title = f"the projector's RMS epsilon is {name}"
            advice = f"the projector's norm takes {config.projector_eps:g} (projector_ln_eps)"
            found.append(Mistake(f"projector-eps-{name}", title, {"projector_eps": eps}, advice))
    return found

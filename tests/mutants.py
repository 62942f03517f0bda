"""The NumPy reference with one mistake written into its text: ports as they have gone wrong.

Nothing here knows `moonvit.trace.variants`; the mutants are made from the reference's source alone.
"""

import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file as load_torch

from moonvit import reference

DATA = Path(__file__).parent / "data"
CHECKPOINT = DATA / "k3-tiny"
SOURCE = Path(reference.__file__).read_text()
FLOAT32_EPS = 1.1920928955078125e-07

Edit = tuple[str, str]

HALF = (
    ("a_NHP, b_NHP = x_NHd[..., 0::2], x_NHd[..., 1::2]", "a_NHP, b_NHP = np.split(x_NHd, 2, axis=-1)"),
    ("return np.stack(turned, axis=-1).reshape(x_NHd.shape)", "return np.concatenate(turned, axis=-1)"),
)
SWAP = (("np.stack([column_N1 * f_k, row_N1 * f_k]", "np.stack([row_N1 * f_k, column_N1 * f_k]"),)
_TABLE_OLD = "np.repeat(resample(table_yxD, h, w)[None], t, axis=0)"


def _table(call: str) -> Edit:
    return (_TABLE_OLD, f"np.repeat(np.asarray({call})[None], t, axis=0)")


_BF16 = "MUTANT_BF16"

MUTANTS: dict[str, Sequence[Edit]] = {
    "rotary-half": HALF,
    "rotary-swapped": SWAP,
    "rotary-half-swapped": (*HALF, *SWAP),
    "theta-500000": (("f_k = 10000.0 **", "f_k = 500000.0 **"),),
    "scale-(D/heads)^-0.5": (("T / math.sqrt(d)", "T / math.sqrt(64 / 3)"),),
    "table-bicubic": (_table("MUTANT_TORCH(table_yxD, h, w, mode='bicubic')"),),
    "table-antialiased": (_table("MUTANT_TORCH(table_yxD, h, w, mode='bilinear', antialias=True)"),),
    "table-align_corners": (
        (
            "(np.arange(wanted) + 0.5) * (size / wanted) - 0.5",
            "np.arange(wanted) * (size - 1) / (wanted - 1)",
        ),
    ),
    "table-transposed": (_table("resample(table_yxD.swapaxes(0, 1), h, w)"),),
    "table-corner": (_table("table_yxD[:h, :w]"),),
    "time-row-added": (("if t > 1:", "if t > 0:"),),
    "time-rows-missing": (("if t > 1:", "if False:"),),
    "eps-2^-7": (("+ eps)", "+ (2.0**-7 if eps < 1e-6 else eps))"),),
    "eps-1e-5": (("+ eps)", "+ (1e-5 if eps < 1e-6 else eps))"),),
    "eps-1e-6": (("+ eps)", "+ (1e-6 if eps < 1e-6 else eps))"),),
    "gelu-erf": (('.mlp_hidden", gelu_tanh(', '.mlp_hidden", gelu_erf('),),
    "projector-gelu-tanh": (('emit("proj_hidden", gelu_erf(', 'emit("proj_hidden", gelu_tanh('),),
    "merge-raster": (
        (
            "    corners = [x_hwD[row::mh",
            "    return x_hwD.reshape(h * w // 4, -1)\n    corners = [x_hwD[row::mh",
        ),
    ),
    "merge-column-major": (
        ("for row in range(mh) for column in range(mw)]", "for column in range(mw) for row in range(mh)]"),
    ),
    "qkv-per-head": (
        ("reshape(len(x_ND), 3, g.num_heads, -1)", "reshape(len(x_ND), g.num_heads, 3, -1).swapaxes(1, 2)"),
    ),
    "patch-channel-last": (
        ("pixels.reshape(N, -1) @", "pixels.transpose(0, 2, 3, 1).reshape(N, -1) @"),
    ),
    "no-final-norm": (
        ("emit(\"final_norm\", rms_norm(x_ND, final_D, config.norm_eps))", "emit(\"final_norm\", x_ND)"),
    ),
    "post-norm-before": (
        ("gelu_erf(x_MC @ load", "gelu_erf(rms_norm(x_MC, 1.0, config.projector_eps) @ load"),
        ('emit("projected", rms_norm(out_ME, post_E, config.projector_eps))', 'emit("projected", out_ME)'),
    ),
    "rope-bfloat16": (
        ("emit(\"rope_cos\", np.cos(angle_NP)), emit(\"rope_sin\", np.sin(angle_NP))",
         f"emit(\"rope_cos\", {_BF16}(np.cos(angle_NP))), emit(\"rope_sin\", {_BF16}(np.sin(angle_NP)))"),
    ),
    "tables-bfloat16": (
        ("emit(\"rope_cos\", np.cos(angle_NP)), emit(\"rope_sin\", np.sin(angle_NP))",
         f"emit(\"rope_cos\", {_BF16}(np.cos(angle_NP))), emit(\"rope_sin\", {_BF16}(np.sin(angle_NP)))"),
        _table(f"{_BF16}(resample(table_yxD, h, w))"),
        ("grid_thwD += np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, None, None]",
         f"grid_thwD += {_BF16}(np.concatenate([np.sin(angle), np.cos(angle)], axis=1))[:, None, None]"),
    ),
    "attention-frame": (
        ("attention(q_NHd, k_NHd, v_NHd) @", "MUTANT_FRAMES(attention, q_NHd, k_NHd, v_NHd) @"),
    ),
}  # fmt: skip
"""{key of the mistake: edits of the reference's text}."""

ONLY_STILL = {"time-row-added"}
ONLY_CLIP = {"time-rows-missing", "attention-frame"}


def build(edits: Sequence[Edit], frame: int = 0) -> Any:
    """A module with the reference's text, edited; `frame` is h·w, for attention within frames."""
    text = SOURCE
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the reference"
        text = text.replace(old, new)
    module = types.ModuleType("mutant")
    vars(module).update(MUTANT_TORCH=_interpolate, MUTANT_BF16=_bfloat16)
    vars(module)["MUTANT_FRAMES"] = lambda attend, *qkv: _by_frame(attend, frame, *qkv)
    import sys

    sys.modules["mutant"] = module  # dataclasses look their module up
    exec(compile(text, "mutant", "exec"), vars(module))
    return module


def tiny_weights() -> dict[str, Any]:
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    vision = {n: f for n, f in index.items() if n.startswith(("vision_tower.", "mm_projector."))}
    files = {f: load_torch(CHECKPOINT / f) for f in set(vision.values())}
    return {n: files[f][n].float().numpy() for n, f in vision.items()}


def run(module: Any, weights: Any, pixels: Any, grid: tuple[int, int, int]) -> dict[str, Any]:
    """Every stage of a mutant, float64."""
    geometry = module.Geometry(num_heads=3, num_layers=3, norm_eps=FLOAT32_EPS, projector_eps=1e-5)
    seen: dict[str, Any] = {}
    module.trace(weights, geometry, pixels, grid, seen.__setitem__)
    return seen


def batch_wide(module: Any) -> None:
    """Make a mutant take several pictures at once, as one sequence for attention."""
    one = {name: getattr(module, name) for name in ("positions", "rotary_angles", "merge_cells")}

    def split(x: Any, grids: Any) -> list[Any]:
        return np.split(x, np.cumsum([t * h * w for t, h, w in grids])[:-1])

    module.positions = lambda table, grids: np.concatenate([one["positions"](table, g) for g in grids])
    module.rotary_angles = lambda grids, d: np.concatenate([one["rotary_angles"](g, d) for g in grids])
    module.merge_cells = lambda x, grids, merge: np.concatenate(
        [one["merge_cells"](part, g, merge) for part, g in zip(split(x, grids), grids, strict=True)]
    )


BATCH_EDITS: Sequence[Edit] = (
    ("N, (t, h, w) = len(pixel_values), grid_thw", "N = len(pixel_values)"),
    (
        "    if min(t, h, w) < 1 or t * h * w != N or h % config.merge[0] or w % config.merge[1]:\n",
        "    if False:\n",
    ),
)


def _interpolate(table: Any, h: int, w: int, **how: Any) -> Any:
    import torch
    from torch.nn import functional as F

    if table.shape[:2] == (h, w):
        return table
    planes = torch.from_numpy(np.ascontiguousarray(table)).permute(2, 0, 1)[None]
    return F.interpolate(planes, size=(h, w), align_corners=False, **how)[0].permute(1, 2, 0).numpy()


def _bfloat16(x: Any) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).double().numpy()


def _by_frame(attend: Any, frame: int, q: Any, k: Any, v: Any) -> Any:
    parts = [slice(i, i + frame) for i in range(0, len(q), frame)]
    return np.concatenate([attend(q[p], k[p], v[p]) for p in parts])

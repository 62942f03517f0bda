"""Other implementations of the towers, holding an encoder's own tensors."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moonvit.encoder import Encoder
from moonvit.ops.grid import as_grids
from moonvit.ops.positions import grid_positions
from moonvit.ops.rotary import rope_table

Tower = Callable[[Tensor, Tensor], Tensor]
"""Patches and a grid [1, 3] of one picture to its embeddings."""


def reference_module() -> Any:
    package = importlib.util.find_spec("nemo_automodel")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("nemo-automodel is not installed")
    path = Path(package.submodule_search_locations[0]) / "components/models/kimi_k3/vision.py"
    spec = importlib.util.spec_from_file_location("kimi_k3_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(encoder: Encoder, model: Path) -> Tower:
    """The published reference of K3: eager attention with a mask over the whole batch."""
    from transformers import PretrainedConfig

    module = reference_module()
    vision = json.loads((model / "config.json").read_text())["vision_config"]
    config = PretrainedConfig(**{key.removeprefix("vt_"): value for key, value in vision.items()})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        tower = module.MoonViT3dPretrainedModel(config).eval()
        projector = module.PatchMergerMLPV2(
            SimpleNamespace(
                mm_hidden_size=vision["mm_hidden_size"],
                merge_kernel_size=vision["merge_kernel_size"],
                hidden_size=vision["text_hidden_size"],
                projector_ln_eps=vision["projector_ln_eps"],
            )
        ).eval()
    tower.load_state_dict(encoder.model.vision_tower.state_dict(), assign=True)
    projector.load_state_dict(encoder.model.mm_projector.state_dict(), assign=True)
    table = tower.patch_embed.pos_emb
    times = module.get_1d_sincos_pos_embed(table.dim, table.num_frames)
    table.time_weight = torch.from_numpy(times).to(encoder.dtype).unsqueeze(1)
    return lambda pixels, grid: projector(tower(pixels.to(encoder.dtype), grid))[0]


def plain_sdpa(encoder: Encoder) -> Tower:
    """K3 as a good engine writes it in plain PyTorch: fused norms, complex rotation, one SDPA a block."""
    config, weights = encoder.config, dict(encoder.model.state_dict())

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[name].flatten(1))

    def norm(x: Tensor, name: str, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[name], eps)

    def turned(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    def run(pixels: Tensor, grid: Tensor) -> Tensor:
        grids = as_grids(grid)
        x = linear(pixels.flatten(1).to(encoder.dtype), "vision_tower.patch_embed.proj.weight")
        table = weights["vision_tower.patch_embed.pos_emb.weight"]
        x = (x + grid_positions(table, grids, "bilinear", torch.float32)).to(encoder.dtype)
        cos, sin = rope_table(grids, config.head_dim, 10000.0, torch.float32)
        turns = torch.complex(cos, sin)[:, None]
        for number in range(config.num_layers):
            block = f"vision_tower.encoder.blocks.{number}."
            qkv = linear(norm(x, block + "norm0.weight", config.norm_eps), block + "wqkv.weight")
            q, k, v = qkv.unflatten(-1, (3, -1, config.head_dim)).unbind(1)
            q, k, v = (part.transpose(0, 1)[None] for part in (turned(q, turns), turned(k, turns), v))
            mixed = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
            x = x + linear(mixed, block + "wo.weight")
            hidden = linear(norm(x, block + "norm1.weight", config.norm_eps), block + "mlp.fc0.weight")
            x = x + linear(F.gelu(hidden, approximate="tanh"), block + "mlp.fc1.weight")
        x = norm(x, "vision_tower.encoder.final_layernorm.weight", config.norm_eps)
        _, h, w = grids[0]
        cells = x.view(h // 2, 2, w // 2, 2, -1).transpose(1, 2).reshape(h * w // 4, -1)
        out = linear(F.gelu(linear(cells, "mm_projector.proj.0.weight")), "mm_projector.proj.2.weight")
        return norm(out, "mm_projector.post_norm.weight", config.projector_eps)

    return run

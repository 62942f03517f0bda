"""Random checkpoints of every family, the reference that each is held against, and their figures."""

import ast
import copy
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moonvit.encoder import Encoder

KIMI_BATCHES = [
    [(1, 4, 6)],
    [(1, 2, 10), (1, 12, 2), (1, 8, 8)],
    [(1, 2, 2), (1, 6, 10), (1, 20, 18)],
]
"""Below, at and above the 8x8 table; never square alone."""
KIMI_CLIPS = [[(2, 4, 6)], [(1, 4, 4), (3, 2, 6), (4, 10, 12)]]
QWEN_BATCHES = [
    [(1, 4, 6)],
    [(1, 2, 10), (1, 12, 2), (1, 8, 8)],
    [(1, 2, 2), (1, 10, 6), (1, 18, 22)],
]
QWEN_CLIPS = [[(2, 4, 6)], [(1, 4, 4), (3, 2, 6), (4, 10, 14)]]

HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
K25_MEDIA = {
    "in_patch_limit": 16384, "patch_size": 14, "merge_kernel_size": 2, "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None, **HALVES,
}  # fmt: skip
KIMI_VL_PIXELS = {
    "in_token_limit": 4096, "patch_size": 14, "merge_kernel_size": [2, 2], "pad_input": True, **HALVES,
}  # fmt: skip


def randomize(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights that keep activations near unit size and biases far from zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                values = 0.2 * values + (1 if name.endswith("weight") else 0)
            elif "pos_emb" in name:
                values = 0.5 * values
            else:
                values = values / values[0].numel() ** 0.5
            parameter.copy_(values)
    return module.eval()


def nemo_classes(model: str, names: set[str]) -> SimpleNamespace:
    """Those classes and functions of a nemo-automodel module, without the rest of it and its imports."""
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package nemo-automodel is not installed (make test installs it)")
    from transformers.activations import GELUActivation

    path = Path(spec.submodule_search_locations[0]) / f"components/models/{model}/model.py"
    tree = ast.parse(path.read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name in names]
    missing = names - {node.name for node in wanted}
    assert not missing, missing
    space: dict[str, Any] = {
        "torch": torch, "nn": torch.nn, "F": torch.nn.functional, "np": np, "math": math,
        "GELUActivation": GELUActivation, "FLASH_ATTN_AVAILABLE": False,
        "List": list, "Tuple": tuple, "Dict": dict, "Any": Any,
    }  # fmt: skip
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def write_checkpoint(directory: Path, config: dict, pixels: dict, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def kimi_geometry() -> dict[str, Any]:
    return {
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed", "num_attention_heads": 3, "num_hidden_layers": 3,
        "hidden_size": 72, "intermediate_size": 160, "merge_kernel_size": [2, 2],
        "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool",
    }  # fmt: skip


def kimi_k25_pair(directory: Path) -> tuple[Encoder, Any]:
    """Our encoder over a raw-layout K2.5 checkpoint, and nemo-automodel's tower and projector."""
    ref = nemo_classes("kimi_k25_vl", {
        "get_1d_sincos_pos_embed_from_grid", "get_1d_sincos_pos_embed", "_apply_rope_vision",
        "vision_attention_sdpa", "Learnable2DInterpPosEmbDividedFixed", "Rope2DPosEmbRepeated",
        "MoonViT3dMLP", "MoonViT3dEncoderLayer", "MoonViT3dEncoder", "MoonVision3dPatchEmbed",
        "tpool_patch_merger", "MoonViT3dPretrainedModel", "KimiK25VLMultiModalProjector",
    })  # fmt: skip
    geometry = kimi_geometry()
    vision = SimpleNamespace(**geometry, _attn_implementation="sdpa")
    tower = randomize(ref.MoonViT3dPretrainedModel(vision), 1)
    whole = SimpleNamespace(
        vision_config=vision, text_config=SimpleNamespace(hidden_size=40), mm_hidden_size=72,
        projector_ln_eps=1e-5,
    )  # fmt: skip
    projector = randomize(ref.KimiK25VLMultiModalProjector(whole), 2)
    spelled = {
        f"vt_{key}" if key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        else key: value
        for key, value in geometry.items()
    }  # fmt: skip
    spelled |= {"mm_hidden_size": 72, "text_hidden_size": 40, "projector_ln_eps": 1e-5}
    config = {"model_type": "kimi_k25", "vision_config": spelled, "text_config": {"hidden_size": 40}}
    tensors = {f"vision_tower.{k}": v for k, v in tower.state_dict().items()}
    for key, value in projector.state_dict().items():
        released = key.replace("linear_1", "proj.0").replace("linear_2", "proj.2")
        tensors[f"mm_projector.{released}"] = value
    write_checkpoint(directory, config, {"media_proc_cfg": K25_MEDIA}, tensors)

    def reference(pixels: torch.Tensor, grids: list) -> list[torch.Tensor]:
        return projector(tower(pixels, torch.tensor(grids)))

    return Encoder.from_pretrained(directory, dtype="float32"), reference


def kimi_vl_pair(directory: Path, width: int = 40) -> tuple[Encoder, Any]:
    """Our encoder over a Kimi-VL checkpoint, and nemo-automodel's tower and projector."""
    ref = nemo_classes("kimivl", {
        "_apply_rope_vision", "vision_attention_sdpa", "Learnable2DInterpPosEmb", "Rope2DPosEmb",
        "MoonVitMLP", "MoonVitEncoderLayer", "MoonVitEncoder", "MoonVisionPatchEmbed", "patch_merger",
        "MoonVitPretrainedModel", "KimiVLMultiModalProjector",
    })  # fmt: skip
    dropped = ("init_pos_emb_time", "pos_emb_type", "video_attn_type", "merge_type")
    geometry = {key: value for key, value in kimi_geometry().items() if key not in dropped}
    vision = SimpleNamespace(**geometry, _attn_implementation="sdpa")
    tower = randomize(ref.MoonVitPretrainedModel(vision), 3)
    whole = SimpleNamespace(vision_config=vision, text_config=SimpleNamespace(hidden_size=width))
    projector = randomize(ref.KimiVLMultiModalProjector(whole), 4)
    config = {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl",
        "vision_config": {"model_type": "moonvit", **geometry}, "text_config": {"hidden_size": width},
    }  # fmt: skip
    tensors = {f"vision_tower.{k}": v for k, v in tower.state_dict().items()}
    tensors |= {f"multi_modal_projector.{k}": v for k, v in projector.state_dict().items()}
    write_checkpoint(directory, config, KIMI_VL_PIXELS, tensors)

    def reference(pixels: torch.Tensor, grids: list) -> list[torch.Tensor]:
        merged = tower(pixels, torch.tensor(grids)[:, 1:])
        return list(projector(merged).split([len(part) for part in merged]))

    return Encoder.from_pretrained(directory, dtype="float32"), reference


TEXT = {
    "hidden_size": 40, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 20,
}  # fmt: skip
QWEN_PIXELS = {
    "min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    **HALVES,
}  # fmt: skip


def saved(model: torch.nn.Module, directory: Path, pixels: dict, **how: Any) -> Encoder:
    """Our encoder over what transformers' own `save_pretrained` writes."""
    model.save_pretrained(directory, **how)
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    return Encoder.from_pretrained(directory, dtype="float32")


def qwen_reference(visual: torch.nn.Module, cell: int) -> Any:
    def reference(pixels: torch.Tensor, grids: list) -> list[torch.Tensor]:
        out = visual(pixels, grid_thw=torch.tensor(grids))
        return list(out.pooler_output.split([t * h * w // cell for t, h, w in grids]))

    reference.visual = visual
    return reference


def qwen2_vl_pair(directory: Path) -> tuple[Encoder, Any]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 3, "embed_dim": 72, "hidden_size": 40, "num_heads": 3, "mlp_ratio": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT, vision_config=vision))
    randomize(model.model.visual, 6)
    return saved(model, directory, QWEN_PIXELS), qwen_reference(model.model.visual, 4)


def qwen2_5_vl_pair(directory: Path) -> tuple[Encoder, Any]:
    """Windows of 4x4 cells, so that the larger grids have cut-off windows; one layer sees whole frames."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3, "hidden_size": 72, "out_hidden_size": 40, "num_heads": 3, "intermediate_size": 100,
        "window_size": 112, "fullatt_block_indexes": [1],
    }  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision))
    randomize(model.model.visual, 7)
    return saved(model, directory, QWEN_PIXELS), qwen_reference(model.model.visual, 4)


QWEN3_VISION = {
    "depth": 4, "hidden_size": 72, "out_hidden_size": 40, "num_heads": 3, "intermediate_size": 100,
    "num_position_embeddings": 64,
}  # fmt: skip


def qwen3_pair(directory: Path, model: torch.nn.Module) -> tuple[Encoder, Any]:
    randomize(model.model.visual, 8)
    pixels = {**QWEN_PIXELS, "patch_size": 16}
    return saved(model, directory, pixels), qwen_reference(model.model.visual, 4)


def qwen3_vl_pair(directory: Path, layers: tuple[int, ...] = (0, 2)) -> tuple[Encoder, Any]:
    """An 8x8 table, DeepStack from two layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {**QWEN3_VISION, "deepstack_visual_indexes": list(layers)}
    config = Qwen3VLConfig(text_config=TEXT, vision_config=vision)
    return qwen3_pair(directory, Qwen3VLForConditionalGeneration(config))


def qwen3_vl_moe_pair(directory: Path) -> tuple[Encoder, Any]:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {**TEXT, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    vision = {**QWEN3_VISION, "deepstack_visual_indexes": [1, 3]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return qwen3_pair(directory, Qwen3VLMoeForConditionalGeneration(config))


def qwen3_5_pair(directory: Path) -> tuple[Encoder, Any]:
    """Qwen3-VL's tower, without DeepStack."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**TEXT, "layer_types": ["full_attention"]}
    config = Qwen3_5Config(text_config=text, vision_config=QWEN3_VISION)
    return qwen3_pair(directory, Qwen3_5ForConditionalGeneration(config))


DEEPSEEK_TEXT = {
    "model_type": "deepseek_v3", "hidden_size": 40, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "n_routed_experts": 2,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}  # fmt: skip
K25_NATIVE_PIXELS = {
    "image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 16384, "patch_size": 14,
    "merge_size": 2, "size": {"max_height": 512, "max_width": 512}, **HALVES,
}  # fmt: skip


def native_k25(directory: Path, raw: bool) -> tuple[Encoder, Any]:
    """Our encoder over what transformers writes for its own `kimi_k25`: its layout or the raw one."""
    from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    vision = {
        "num_hidden_layers": 3, "hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 160,
        "pos_emb_height": 8, "pos_emb_width": 8,
    }  # fmt: skip
    config = Kimi_K25Config(text_config=DEEPSEEK_TEXT, vision_config=vision, projection_hidden_size=72)
    model = Kimi_K25ForConditionalGeneration(config)
    tower, projector = randomize(model.model.vision_tower, 9), randomize(model.model.mm_projector, 10)

    def reference(pixels: torch.Tensor, grids: list) -> list[torch.Tensor]:
        rows = projector(tower(pixels, torch.tensor(grids)).pooler_output).reshape(-1, 40)
        return list(rows.split([h * w // 4 for _, h, w in grids]))

    return saved(model, directory, K25_NATIVE_PIXELS, save_original_format=raw), reference


def kimi_k25_native_pair(directory: Path) -> tuple[Encoder, Any]:
    return native_k25(directory, raw=False)


def kimi_k25_saved_raw_pair(directory: Path) -> tuple[Encoder, Any]:
    return native_k25(directory, raw=True)


PAIRS = {
    "kimi_k25": kimi_k25_pair,
    "kimi_k25 (transformers)": kimi_k25_native_pair,
    "kimi_k25 (transformers, raw)": kimi_k25_saved_raw_pair,
    "kimi_vl": kimi_vl_pair,
    "qwen2_vl": qwen2_vl_pair,
    "qwen2_5_vl": qwen2_5_vl_pair,
    "qwen3_vl": qwen3_vl_pair,
    "qwen3_vl (mixture of experts)": qwen3_vl_moe_pair,
    "qwen3_vl (Qwen3.5)": qwen3_5_pair,
}


def stills_of(name: str) -> list[list[tuple[int, int, int]]]:
    return KIMI_BATCHES if name.startswith("kimi") else QWEN_BATCHES


def clips_of(name: str) -> list[list[tuple[int, int, int]]]:
    if name == "kimi_vl":
        return []
    return KIMI_CLIPS if name.startswith("kimi") else QWEN_CLIPS


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def least_cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1).min())


def patches_for(encoder: Encoder, grids: list[tuple[int, int, int]], seed: int = 5) -> torch.Tensor:
    total = sum(t * h * w for t, h, w in grids)
    shape = (total, *encoder.processor.patch_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bfloat16_figures(ours: Encoder, batches: list) -> tuple[float, float]:
    """Worst relative error of a picture and least cosine of a token in bfloat16, against float32.

    Both runs have the weights rounded to bfloat16, as released checkpoints have them.
    """
    half = Encoder.from_pretrained(ours.checkpoint.directory, dtype="bfloat16")
    exact = copy.deepcopy(half.model).float()
    worst, least = 0.0, 1.0
    for grids in batches:
        pixels = patches_for(ours, grids)
        with torch.no_grad():
            pairs = zip(half.model(pixels, grids), exact(pixels, grids), strict=True)
        for mine, theirs in pairs:
            worst = max(worst, relative_error(mine, theirs))
            least = min(least, least_cosine(mine, theirs))
    return worst, least

"""`vision_config` as released checkpoints have it, and cut short as transformers has saved it.

Every number is held against transformers' own config class, every tensor's shape against its own tower, both
at released size, on the meta device.
"""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from moonvit.configs.kimi import kimi_k25, kimi_vl
from moonvit.errors import ConfigError
from moonvit.families import family_of
from moonvit.weights.load import expected_shapes

QWEN2 = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "patch_size": 14,
    "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
}  # fmt: skip
QWEN25 = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16, "in_chans": 3, "patch_size": 14,
    "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN3 = {
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "model_type": "qwen3_vl",
    "num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}

CONFIGS = {
    "Qwen2-VL-2B": ("qwen2_vl", {**QWEN2, "hidden_size": 1536}),
    "Qwen2-VL-7B": ("qwen2_vl", {**QWEN2, "hidden_size": 3584}),
    "Qwen2-VL-72B": ("qwen2_vl", {**QWEN2, "hidden_size": 8192}),
    "Qwen2-VL-2B, cut short": (
        "qwen2_vl",
        {"hidden_size": 1536, "in_chans": 3, "model_type": "qwen2_vl", "spatial_patch_size": 14},
    ),
    "Qwen2.5-VL-3B": ("qwen2_5_vl", {**QWEN25, "intermediate_size": 3420, "out_hidden_size": 2048}),
    "Qwen2.5-VL-7B": ("qwen2_5_vl", {**QWEN25, "intermediate_size": 3420, "out_hidden_size": 3584}),
    "Qwen2.5-VL-32B": ("qwen2_5_vl", {**QWEN25, "intermediate_size": 3456, "out_hidden_size": 5120}),
    "Qwen2.5-VL-72B": ("qwen2_5_vl", {**QWEN25, "intermediate_size": 3456, "out_hidden_size": 8192}),
    "Qwen2.5-VL-7B, cut short": (
        "qwen2_5_vl",
        {
            "hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl", "spatial_patch_size": 14,
            "tokens_per_second": 2, "torch_dtype": "bfloat16",
        },
    ),
    "Qwen3-VL-2B": ("qwen3_vl", {**QWEN3, **SMALL, "out_hidden_size": 2048}),
    "Qwen3-VL-4B": ("qwen3_vl", {**QWEN3, **SMALL, "out_hidden_size": 2560}),
    "Qwen3-VL-8B": ("qwen3_vl", {**QWEN3, **LARGE, "out_hidden_size": 4096}),
    "Qwen3-VL-8B, cut short": ("qwen3_vl", {"out_hidden_size": 4096, "model_type": "qwen3_vl"}),
    "Qwen3-VL-32B": ("qwen3_vl", {**QWEN3, **LARGE, "out_hidden_size": 5120}),
    "Qwen3-VL-30B-A3B": ("qwen3_vl_moe", {**QWEN3, **LARGE, "out_hidden_size": 2048}),
    "Qwen3-VL-235B-A22B": ("qwen3_vl_moe", {**QWEN3, **LARGE, "out_hidden_size": 4096}),
    "Qwen3.5-27B": (
        "qwen3_5",
        {**QWEN3, **LARGE, "model_type": "qwen3_5", "out_hidden_size": 5120, "deepstack_visual_indexes": []},
    ),
    "Qwen3.5-35B-A3B, resaved": (
        "qwen3_5_moe",
        {
            "model_type": "qwen3_5_moe_vision", "out_hidden_size": 2048, "depth": 27, "hidden_size": 1152,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        },
    ),
}  # fmt: skip

TOWERS = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
    "qwen3_vl_moe": Qwen3VLMoeVisionModel,
    "qwen3_5": Qwen3_5VisionModel,
    "qwen3_5_moe": Qwen3_5MoeVisionModel,
}


def theirs(model_type, vision):
    """transformers' own config of the tower."""
    given = {key: value for key, value in vision.items() if key != "model_type"}
    return AutoConfig.for_model(model_type, vision_config=given).vision_config


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_is_transformers(name):
    model_type, vision = CONFIGS[name]
    family, want = family_of({"model_type": model_type}), theirs(model_type, vision)
    ours = family.vision({"model_type": model_type, "vision_config": vision}, "config.json")
    assert ours.model_type == family.name == model_type.removesuffix("_moe").replace("qwen3_5", "qwen3_vl")
    pairs = {
        "num_layers": want.depth,
        "num_heads": want.num_heads,
        "patch_size": want.patch_size,
        "merge_size": want.spatial_merge_size,
        "temporal_patch_size": want.temporal_patch_size,
        "activation": want.hidden_act,
        "rope_theta": want.rope_parameters["rope_theta"],
        "deepstack_layers": tuple(getattr(want, "deepstack_visual_indexes", ())),
        "full_layers": tuple(getattr(want, "fullatt_block_indexes", ())),
    }
    assert {field: getattr(ours, field) for field in pairs} == pairs
    assert ours.window_cells == getattr(want, "window_size", 0) // 28
    assert ours.table_side**2 == getattr(want, "num_position_embeddings", 0)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "7B" not in name and "32B" not in name])
def test_every_shape_is_transformers(name):
    model_type, vision = CONFIGS[name]
    family = family_of({"model_type": model_type})
    ours = family.vision({"model_type": model_type, "vision_config": vision}, "config.json")
    with torch.device("meta"):
        tower = TOWERS[model_type](theirs(model_type, vision))
    shapes = {f"visual.{key}": tuple(value.shape) for key, value in tower.state_dict().items()}
    assert expected_shapes(family.empty_model(ours)) == shapes
    assert [name for name in shapes if not family.names.knows(name)] == []
    named = ("eps", "variance_epsilon")
    epsilons = {getattr(part, name) for part in tower.modules() for name in named if hasattr(part, name)}
    assert epsilons == {ours.norm_eps}


def test_an_unsupported_number_is_refused():
    for change, field in [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"in_chans": 4}, "in_chans"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_heads": 7}, "7 heads"),
    ]:
        config = {"model_type": "qwen2_vl", "vision_config": {**QWEN2, "hidden_size": 1536, **change}}
        with pytest.raises(ConfigError, match=field):
            family_of(config).vision(config, "config.json")


def test_default_names_the_same_rotation():
    """transformers takes the rope type "default" of older files for "axial"."""
    vision = {**QWEN2, "hidden_size": 1536, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config = {"model_type": "qwen2_vl", "vision_config": vision}
    assert family_of(config).vision(config, "config.json").rope_theta == 500.0


K25 = {
    "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger", "model_type": "",
    "patch_size": 14, "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05, "text_hidden_size": 7168, "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}  # fmt: skip
KIMI_VL = {
    "model_type": "moonvit", "patch_size": 14, "num_attention_heads": 16, "num_hidden_layers": 27,
    "hidden_size": 1152, "intermediate_size": 4304, "merge_kernel_size": [2, 2], "init_pos_emb_height": 64,
    "init_pos_emb_width": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_kimi_as_released():
    k25 = kimi_k25({"model_type": "kimi_k25", "vision_config": K25, "text_config": {"hidden_size": 7168}})
    vl = kimi_vl({"model_type": "kimi_vl", "vision_config": KIMI_VL, "text_config": {"hidden_size": 2048}})
    for config, text in ((k25, 7168), (vl, 2048)):
        sizes = (config.hidden_size, config.intermediate_size, config.num_layers, config.head_dim)
        assert sizes == (1152, 4304, 27, 72)
        assert (config.interpolation, config.norm, config.norm_eps) == ("bicubic", "layernorm", 1e-5)
        assert config.text_hidden_size == text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"video_attn_type": "temporal"}, "video_attn_type"),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "axial"}}, "rope_theta"),
        ({"merge_type": "avg"}, "merge_type"),
        ({"mm_hidden_size": 1024}, "mm_hidden_size"),
        ({"merge_kernel_size": [2, 4]}, "merge_kernel_size"),
    ],
    ids=str,
)
def test_kimi_that_computes_otherwise_is_refused(change, field):
    with pytest.raises(ConfigError, match=field):
        kimi_k25({"vision_config": {**K25, **change}, "text_config": {"hidden_size": 7168}})

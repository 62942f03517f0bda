"""Released and miniature geometries as the JSON a checkpoint carries."""

from copy import deepcopy
from typing import Any

K3_VISION: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "qkv_hidden_size": 1536,
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 1024,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168,
}

K3_PIXELS: dict[str, Any] = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fixed_output_tokens": None,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}

_SMALLER: dict[str, dict[str, int]] = {
    "full": {},
    "mid": {
        "vt_num_hidden_layers": 4,
        "vt_num_attention_heads": 4,
        "vt_hidden_size": 256,
        "mm_hidden_size": 256,
        "vt_intermediate_size": 768,
        "qkv_hidden_size": 384,
        "init_pos_emb_height": 16,
        "init_pos_emb_width": 16,
        "text_hidden_size": 320,
    },
    "tiny": {
        "vt_num_hidden_layers": 3,
        "vt_num_attention_heads": 3,
        "vt_hidden_size": 64,
        "mm_hidden_size": 64,
        "vt_intermediate_size": 128,
        "qkv_hidden_size": 96,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "text_hidden_size": 48,
    },
}

PRESETS = tuple(_SMALLER)


def model_config(preset: str) -> dict[str, Any]:
    """`config.json` of a preset: `full` is the released geometry, `mid` and `tiny` are miniatures."""
    vision = {**deepcopy(K3_VISION), **_SMALLER[preset]}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "media_placeholder_token_id": 163605,
        "text_config": {"model_type": "kimi_linear", "hidden_size": vision["text_hidden_size"]},
        "vision_config": vision,
    }


def preprocessor_config() -> dict[str, Any]:
    """The released `preprocessor_config.json`."""
    return {"media_proc_cfg": deepcopy(K3_PIXELS)}

"""Configs are parsed strictly: a field missing or nonsensical is named."""

import copy
import json

import pytest

from conftest import TINY
from moonvit.config import PixelConfig, VisionConfig, check_agreement
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError
from moonvit.presets import PRESETS, model_config, preprocessor_config

HARMLESS = {"_attn_implementation"}
VISION = json.loads((TINY / "config.json").read_text())
NONSENSE = (0, -14, 10**9, float("nan"), float("inf"), "14", None, True, [14, 15], {})


@pytest.mark.parametrize("field", [k for k in VISION["vision_config"] if k not in HARMLESS])
def test_each_vision_field_is_needed(field):
    config = copy.deepcopy(VISION)
    del config["vision_config"][field]
    with pytest.raises(ConfigError, match=rf"config\.json: vision_config: field '{field}' is missing"):
        VisionConfig.from_dict(config)


@pytest.mark.parametrize("field", HARMLESS)
def test_fields_that_change_nothing_may_be_absent(field):
    config = copy.deepcopy(VISION)
    del config["vision_config"][field]
    assert VisionConfig.from_dict(config) == VisionConfig.from_dict(VISION)


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
@pytest.mark.parametrize(
    "field",
    ["patch_size", "vt_hidden_size", "vt_num_hidden_layers", "vt_num_attention_heads", "qkv_hidden_size"]
    + [
        "init_pos_emb_height",
        "init_pos_emb_time",
        "merge_kernel_size",
        "text_hidden_size",
        "projector_ln_eps",
    ],
)
def test_nonsense_in_vision_config(field, value):
    config = copy.deepcopy(VISION)
    config["vision_config"][field] = value
    if field == "projector_ln_eps" and value is not True and isinstance(value, float):
        assert value != value or value == float("inf")
    with pytest.raises(ConfigError, match=field):
        VisionConfig.from_dict(config)


@pytest.mark.parametrize(
    "field",
    ["norm_type", "mlp_type", "activation_func", "merge_type", "mm_projector_type", "pos_emb_type"]
    + ["pos_emb_interpolation_mode", "projector_hidden_act"],
)
def test_unknown_operations_are_refused(field):
    config = copy.deepcopy(VISION)
    config["vision_config"][field] = "surprise"
    with pytest.raises(ConfigError, match=rf"'{field}' is \"surprise\", expected"):
        VisionConfig.from_dict(config)


def test_heads_must_divide():
    config = copy.deepcopy(VISION)
    config["vision_config"]["vt_num_attention_heads"] = 5
    with pytest.raises(ConfigError, match="qkv_hidden_size"):
        VisionConfig.from_dict(config)


def test_head_dim_is_from_qkv():
    full = VisionConfig.from_dict(model_config("full"))
    assert (full.head_dim, full.merged_size, full.norm_eps) == (128, 4096, 1.1920928955078125e-07)


def test_text_width_must_agree():
    config = copy.deepcopy(VISION)
    config["text_config"]["hidden_size"] = 49
    with pytest.raises(ConfigError, match="49, but vision_config.text_hidden_size is 48"):
        VisionConfig.from_dict(config)


def test_another_family_is_refused():
    with pytest.raises(ConfigError, match='model_type\' is "llama", expected "kimi_k3"'):
        VisionConfig.from_dict({**VISION, "model_type": "llama"})


@pytest.mark.parametrize("eps", [0, -1e-6, float("nan"), 1.0, "1e-6"])
def test_norm_eps_nonsense(eps):
    with pytest.raises(ConfigError, match="norm_eps"):
        VisionConfig.from_dict(VISION).with_norm_eps(eps)


def test_configs_are_frozen_and_keyword_only():
    config = VisionConfig.from_dict(VISION)
    with pytest.raises(AttributeError):
        config.patch_size = 16
    with pytest.raises(TypeError):
        VisionConfig("kimi_k3")


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
@pytest.mark.parametrize(
    "field", ["in_patch_limit", "patch_size", "merge_kernel_size", "patch_limit_on_one_side"]
)
def test_nonsense_in_pixel_config(field, value):
    config = preprocessor_config()
    config["media_proc_cfg"][field] = value
    with pytest.raises(ConfigError, match=rf"preprocessor_config\.json: media_proc_cfg: field '{field}'"):
        PixelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_std", [0.5, 0, 0.5]),
        ("image_std", [0.5, float("nan"), 0.5]),
        ("image_std", [1e-46] * 3),
        ("image_mean", [10**400] * 3),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", "0.5"),
        ("transparent_bg_fill_stage", "sometime"),
        ("fixed_output_tokens", 64),
        ("transparent_bg_config", []),
    ],
)
def test_more_nonsense_in_pixel_config(field, value):
    config = preprocessor_config()
    config["media_proc_cfg"][field] = value
    with pytest.raises(ConfigError, match=field):
        PixelConfig.from_dict(config)


@pytest.mark.parametrize("field", ["in_patch_limit", "patch_size", "image_mean", "image_std"])
def test_each_pixel_field_is_needed(field):
    config = preprocessor_config()
    del config["media_proc_cfg"][field]
    with pytest.raises(ConfigError, match=rf"field '{field}' is missing"):
        PixelConfig.from_dict(config)


def test_halves_must_agree():
    config = preprocessor_config()
    config["media_proc_cfg"]["patch_size"] = 16
    with pytest.raises(ConfigError, match="patch_size 16, config.json has 14"):
        check_agreement(VisionConfig.from_dict(VISION), PixelConfig.from_dict(config), "here")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_parse(preset):
    assert VisionConfig.from_dict(model_config(preset)).num_layers > 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "expected an object"),
        ("config.json", '{"a": 1, "a": 2}', "named twice: a"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("preprocessor_config.json", "{}", "field 'media_proc_cfg' is missing"),
        ("preprocessor_config.json", None, "no such file"),
    ],
)
def test_broken_files_are_named(tiny_copy, name, text, message):
    (tiny_copy / name).unlink()
    if text is not None:
        (tiny_copy / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Encoder.from_pretrained(tiny_copy)
    assert name in str(caught.value)

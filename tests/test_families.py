"""The registry, the configs of the families, and the same encoder and command line over all of them."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

import parity_helpers as helpers
from moonvit.cli import group
from moonvit.configs.kimi import K25_DEFAULTS, kimi_k25, kimi_vl
from moonvit.configs.qwen import qwen2_5_vl, qwen2_vl, qwen3_vl
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError, WeightsError
from moonvit.families import FAMILIES, family_of
from moonvit.weights.export import export

NAMES = ("kimi_k25", "kimi_k25 (transformers)", "kimi_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = helpers.PAIRS[name](tmp_path_factory.mktemp("family"))[0].checkpoint.directory
        return made[name]

    return get


def run(*arguments):
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_either_name(family):
    assert family_of({"model_type": family.name}) is family
    for other in family.others:
        assert family_of({"model_type": other}) is family
    for architecture in family.architectures:
        assert family_of({"architectures": [architecture]}) is family


@pytest.mark.parametrize("config", [{"model_type": "llava"}, {"architectures": ["LlavaModel"]}, {}], ids=str)
def test_an_unknown_family_is_refused(config):
    with pytest.raises(ConfigError, match="model_type"):
        family_of(config)


@pytest.mark.parametrize("name", NAMES)
def test_encode_count_and_info(checkpoints, name, tmp_path):
    """One picture through library and command line: tokens as counted, in and out of order alike."""
    directory = checkpoints(name)
    encoder = Encoder.from_pretrained(directory, dtype="float32")
    pictures = [Image.effect_noise(size, 80) for size in [(100, 60), (60, 130)]]
    found = encoder.encode(pictures)
    for picture, embedding in zip(pictures, found, strict=True):
        assert embedding.shape == (encoder.count_tokens(picture), 40)
        alone = encoder.encode(picture)
        assert helpers.relative_error(torch.from_numpy(alone), torch.from_numpy(embedding)) < 1e-5
    pictures[0].save(tmp_path / "a.png")
    output = tmp_path / "out.safetensors"
    done = run("encode", tmp_path / "a.png", "--model", directory, "--dtype", "float32", "-o", output)
    assert done.exit_code == 0, done.output
    stored = load_file(output)
    assert torch.equal(stored["embeddings/0"], torch.from_numpy(encoder.encode(tmp_path / "a.png")))
    assert ("deepstack/1/0" in stored) == (name == "qwen3_vl")
    counted = json.loads(run("count", tmp_path / "a.png", "--model", directory, "--format", "json").stdout)
    assert counted["images"][0]["tokens"] == len(stored["embeddings/0"])
    told = run("info", directory, "--format", "json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["family"] == encoder.family == name.partition(" ")[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_half_loads_alike(checkpoints, name, tmp_path):
    """Only vision tensors are written, under released names, and rules of videos go along."""
    directory = tmp_path / "with_video"
    shutil.copytree(checkpoints(name), directory)
    (directory / "video_preprocessor_config.json").write_text('{"min_pixels": 4096, "max_pixels": 25165824}')
    whole = Encoder.from_pretrained(directory, dtype="float32")
    export(whole.checkpoint, tmp_path / "half")
    half = Encoder.from_pretrained(tmp_path / "half", dtype="float32")
    for (key, mine), theirs in zip(
        half.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), key
    assert (tmp_path / "half" / "video_preprocessor_config.json").exists()
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert not [key for key in stored if "language" in key or "lm_head" in key]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(checkpoints, name, tmp_path):
    directory = checkpoints(name)
    tensors = load_file(directory / "model.safetensors")
    vision = [key for key in tensors if "norm" in key and ("vision_tower" in key or "visual" in key)]
    del tensors[vision[0]]
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_text((directory / file).read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"norm.*missing, expected shape"):
        Encoder.from_pretrained(tmp_path)


OPTIONAL = {
    "kimi_k25": {*K25_DEFAULTS, "qkv_hidden_size", "mm_hidden_size", "text_hidden_size", "video_attn_type"},
    "kimi_vl": {"model_type"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_each_field_deleted(checkpoints, name):
    """It is refused by name, or it has the family's documented meaning and nothing changes."""
    config = json.loads((checkpoints(name) / "config.json").read_text())
    parse = {"kimi_k25": kimi_k25, "kimi_vl": kimi_vl}[name]
    whole = parse(config)
    refused = set()
    for field in config["vision_config"]:
        vision = {key: value for key, value in config["vision_config"].items() if key != field}
        try:
            assert parse({**config, "vision_config": vision}) == whole, field
        except ConfigError as error:
            assert f"'{field}'" in str(error) or f"'vt_{field}'" in str(error)
            refused.add(field)
    assert refused == set(config["vision_config"]) - OPTIONAL[name]


@pytest.mark.parametrize("parse", [qwen2_vl, qwen2_5_vl, qwen3_vl], ids=lambda parse: parse.__name__)
def test_each_field_deleted_has_transformers_default(checkpoints, parse):
    from transformers import AutoConfig

    config = json.loads((checkpoints(parse.__name__) / "config.json").read_text())
    defaults = AutoConfig.for_model(parse.__name__).vision_config.to_dict()

    def parsed(vision):
        try:
            return parse({**config, "vision_config": vision})
        except ConfigError as error:
            return str(error)

    for field in set(config["vision_config"]) & set(defaults) - {"rope_parameters"}:
        vision = {key: value for key, value in config["vision_config"].items() if key != field}
        default = list(defaults[field]) if isinstance(defaults[field], tuple) else defaults[field]
        assert parsed(vision) == parsed({**vision, field: default}), field


def test_a_field_given_twice_is_refused(checkpoints):
    config = json.loads((checkpoints("kimi_k25") / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 80
    with pytest.raises(ConfigError, match="vt_hidden_size"):
        kimi_k25(config)


def test_clips_are_refused_by_kimi_vl(checkpoints):
    encoder = Encoder.from_pretrained(checkpoints("kimi_vl"), dtype="float32")
    with pytest.raises(ValueError, match="at most 1 frames"):
        encoder.model(torch.zeros(8, 3, 14, 14), [(2, 2, 2)])


@pytest.mark.parametrize("prefix", ["visual.", "model.visual.", "vision_tower.", "model.vision_tower.", ""])
def test_qwen_under_every_prefix(checkpoints, prefix, tmp_path):
    """As released, as transformers 5 saves, as MLX names it (its kernels channels-last), and alone."""
    source = checkpoints("qwen3_vl")
    whole = Encoder.from_pretrained(source, dtype="float32").model.state_dict()
    tensors = {prefix + name.removeprefix("visual."): value.clone() for name, value in whole.items()}
    how = {"format": "pt"}
    if prefix == "vision_tower.":
        kernel = f"{prefix}patch_embed.proj.weight"
        tensors[kernel] = tensors[kernel].permute(0, 2, 3, 4, 1).contiguous()
        how = {"format": "mlx"}
    for file in ("config.json", "preprocessor_config.json"):
        shutil.copy(source / file, tmp_path / file)
    save_file(tensors, tmp_path / "model.safetensors", metadata=how)
    found = Encoder.from_pretrained(tmp_path, dtype="float32").model.state_dict()
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(found[name], value), name

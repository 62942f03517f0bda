"""Whole checkpoints for `moonvit.engine`: what is read, and what is refused; repositories."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine_checkpoints as helpers
from conftest import TINY
from hub_server import HubServer
from moonvit.engine import Generator
from moonvit.engine import library as library
from moonvit.engine.families import TEXT_FAMILIES
from moonvit.errors import ConfigError, MoonvitError, PromptError, TokenizerError, WeightsError
from moonvit.families import FAMILIES

pytest.importorskip("transformers")
pytest.importorskip("tiktoken")

pytestmark = pytest.mark.usefixtures("one_thread")
PICTURE = helpers.picture(90, 60, 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return helpers.qwen2_vl(tmp_path_factory.mktemp("qwen")).directory


@pytest.fixture(scope="module")
def generator(place):
    return Generator.from_pretrained(place, dtype="float32")


@pytest.fixture
def copy(place, tmp_path):
    shutil.copytree(place, tmp_path / "copy")
    return tmp_path / "copy"


def edit(path, **fields):
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


# Checkpoints


def test_without_tokenizer(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="tokenizer"):
        Generator.from_pretrained(copy)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight: missing"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight: missing"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"model\.norm\.weight: shape \[5\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "type I8"),
        (lambda t: t.update({"model.layers.0.extra": torch.zeros(1)}), "has no such tensor"),
        (lambda t: t.update({"model.layers.4.norm.weight": torch.zeros(1)}), "has no such tensor"),
        (lambda t: t.update({"audio.weight": torch.zeros(1)}), "no part of this family"),
        (lambda t: t.update({"language_model.model.norm.weight": torch.zeros(64)}), r"a second norm\.weight"),
        (lambda t: [t.pop(n) for n in list(t) if not n.startswith("visual")], "no text tensors"),
    ],
)  # fmt: skip
def test_wrong_tensors(copy, change, match):
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, copy / "model.safetensors")
    with pytest.raises(WeightsError, match=match) as caught:
        Generator.from_pretrained(copy, dtype="float32")
    assert len(caught.value.faults) == 1


def test_what_older_and_longer_checkpoints_hold(copy, generator):
    """Rotary tables that were stored once, and layers that predict further tokens, are left alone."""
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(8)
    tensors["model.layers.4.enorm.weight"] = torch.zeros(8)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, copy / "model.safetensors")
    found = Generator.from_pretrained(copy, dtype="float32").generate("what?", PICTURE, max_new_tokens=5)
    assert found.ids == generator.generate("what?", PICTURE, max_new_tokens=5).ids


def test_an_absent_text_shard(copy):
    tensors = load_file(copy / "model.safetensors")
    weight_map = {n: "a.safetensors" if n.startswith("visual") else "b.safetensors" for n in tensors}
    save_file({n: t for n, t in tensors.items() if n.startswith("visual")}, copy / "a.safetensors")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=r"text model: b\.safetensors: no such file") as caught:
        Generator.from_pretrained(copy)
    assert len(caught.value.faults) == 1


def test_configs(copy):
    config = copy / "config.json"
    whole = json.loads(config.read_text())
    edit(config, text_config={**whole["text_config"], "num_attention_heads": "many"})
    with pytest.raises(ConfigError, match="text_config"):
        Generator.from_pretrained(copy)
    edit(config, text_config={**whole["text_config"], "hidden_size": 128})
    with pytest.raises(MoonvitError, match="128"):
        Generator.from_pretrained(copy)
    edit(config, text_config=whole["text_config"], quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"quantised \(fp8\)"):
        Generator.from_pretrained(copy)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_configs_as_released(tmp_path, family):
    """Released files spell the rotary fields in an older way; the first two keep the text's at the top."""
    whole = helpers.MAKERS[family](tmp_path)
    expected = Generator.from_pretrained(tmp_path, dtype="float32").generate(
        "what?", PICTURE, max_new_tokens=8
    )
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    if family == "qwen3_vl":
        text["rope_scaling"] = rope
        changed = {"text_config": text}
    else:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        text.pop("model_type")
        changed = {**text, "text_config": ...}
    edit(tmp_path / "config.json", **changed)
    found = Generator.from_pretrained(whole.directory, dtype="float32")
    assert found.text.config.rope_parameters["rope_theta"] == 10000.0
    assert found.generate("what?", PICTURE, max_new_tokens=8).ids == expected.ids


def test_config_of_kimi_vl_as_released(tmp_path):
    whole = helpers.kimi_vl(tmp_path)
    expected = Generator.from_pretrained(tmp_path, dtype="float32").generate(
        "what?", PICTURE, max_new_tokens=8
    )
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    released = {
        "rope_theta": 10000.0, "rope_scaling": None, "ep_size": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "seq_aux": True, "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "pad_token_id": 0,
    }  # fmt: skip
    edit(tmp_path / "config.json", text_config=text | released)
    found = Generator.from_pretrained(whole.directory, dtype="float32")
    assert found.generate("what?", PICTURE, max_new_tokens=8).ids == expected.ids
    edit(tmp_path / "config.json", text_config=text | {"rope_theta": 800000.0})
    found = Generator.from_pretrained(whole.directory, dtype="float32")
    assert found.text.config.rope_parameters["rope_theta"] == 800000.0
    edit(tmp_path / "config.json", text_config=text | {"scoring_func": "softmax"})
    with pytest.raises(ConfigError, match=r"scoring_func.*softmax.*sigmoid"):
        Generator.from_pretrained(whole.directory)


@pytest.mark.parametrize(
    "wrong", [{"hidden_act": "nope"}, {"num_attention_heads": 0, "head_dim": None}, {"head_dim": -1}]
)
def test_what_transformers_cannot_build(copy, wrong):
    whole = json.loads((copy / "config.json").read_text())
    edit(copy / "config.json", text_config={**whole["text_config"], **wrong})
    with pytest.raises(ConfigError, match="text_config"):
        Generator.from_pretrained(copy)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"model_type": "qwen3_vl_moe"}, "qwen3_vl_moe"),
        ({"model_type": "qwen3_5"}, "qwen3_5"),
        ({"model_type": "qwen3_vl", "text": "qwen3_5_text"}, "qwen3_5_text"),
        ({"model_type": "qwen3_vl", "text": "qwen3_vl_moe_text"}, "qwen3_vl_moe_text"),
    ],
)
def test_towers_with_other_text_models(tmp_path, wrong, match):
    """Their towers are read here, but the text model behind them is another."""
    helpers.qwen3_vl(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {**config["text_config"], "model_type": wrong.pop("text", "qwen3_vl_text")}
    edit(tmp_path / "config.json", text_config=text, **wrong)
    with pytest.raises(ConfigError, match=match):
        Generator.from_pretrained(tmp_path)


def test_ids_that_stand_for_nothing(tmp_path):
    """A Kimi model may write ids that its tokenizer does not have; they are no text."""
    whole = helpers.kimi_k25(tmp_path)
    form = Generator.from_pretrained(whole.directory).format
    form.size = 10**6
    last = form.vocabulary.size
    assert form.decode([104, last, last + 7, 105]) == form.decode([104, 105])


def test_text_beyond_the_vocabulary(copy):
    """Words of the tokenizer for which the model has no row."""
    generator = Generator.from_pretrained(copy)
    generator.format.size = max(generator.format.vocabulary.encode("é"))
    with pytest.raises(PromptError, match="outside the vocabulary of"):
        generator.stream("é")
    assert not generator.text.loaded


def test_a_text_model_that_is_not_deepseek(tmp_path):
    whole = helpers.kimi_k25(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", text_config={**config["text_config"], "model_type": "kimi_linear"})
    with pytest.raises(ConfigError, match=r"kimi_linear.*deepseek_v3"):
        Generator.from_pretrained(whole.directory)


def test_every_family_is_known_or_refused():
    assert {family.name for family in FAMILIES} == {*TEXT_FAMILIES, "kimi_k3"}
    with pytest.raises(MoonvitError, match=r"no text model of Kimi K3.*moonvit prompt"):
        Generator.from_pretrained(TINY)


def test_without_transformers(place, monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(MoonvitError, match=r"pip install 'moonvit\[engine\]'"):
        Generator.from_pretrained(place)


def test_old_transformers(place, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.3.1")
    with pytest.raises(MoonvitError, match=r"transformers 5\.3\.1 is too old, expected 5\.24"):
        Generator.from_pretrained(place)


# Repositories


@pytest.fixture
def hub(place, tmp_path, monkeypatch):
    repos = {name: {p.name: p for p in home.iterdir()} for name, home in (("q/vl", place), ("k/3", TINY))}
    with HubServer(repos) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


def test_a_repository_is_fetched_whole(hub, generator, tmp_path, monkeypatch):
    first = Generator.from_pretrained("q/vl", dtype="float32", cache_dir=tmp_path)
    expected = generator.generate("what?", PICTURE, max_new_tokens=5).ids
    assert first.generate("what?", PICTURE, max_new_tokens=5).ids == expected
    hub.requests.clear()
    again = Generator.from_pretrained("q/vl", dtype="float32", cache_dir=tmp_path, local_files_only=True)
    assert again.generate("what?", PICTURE, max_new_tokens=5).ids == expected
    assert not hub.requests
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    Generator.from_pretrained("q/vl", dtype="float32", cache_dir=tmp_path)
    with pytest.raises(MoonvitError, match="the hub cannot be reached"):
        Generator.from_pretrained("q/other", cache_dir=tmp_path)


def test_a_repository_is_refused_by_its_config(hub, tmp_path):
    with pytest.raises(MoonvitError, match="no text model of Kimi K3"):
        Generator.from_pretrained("k/3", cache_dir=tmp_path)
    assert not [request for request in hub.requests if "safetensors" in request.path]
    with pytest.raises(MoonvitError, match="no such repository"):
        Generator.from_pretrained("no/such", cache_dir=tmp_path)

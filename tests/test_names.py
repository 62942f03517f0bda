"""Names as trainers, wrappers and converters write them: read by one prefix, or refused by name."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from conftest import IMAGES, TINY
from hub_server import HubServer
from moonvit.cli.info import describe_checkpoint
from moonvit.encoder import Encoder
from moonvit.errors import WeightsError
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.names import KIMI_K3, KIMI_K25, MAPS, companion, read_names, unwrapped
from moonvit.weights.rows import embedding_table

PICTURE = IMAGES / "rgba_120x90.png"
TEXT = [
    "language_model.model.layers.0.self_attn.q_proj.weight", "language_model.lm_head.weight",
    "model.language_model.layers.3.mlp.experts.gate_up_proj", "model.layers.1.post_norm.weight",
    "model.encoder.layers.0.norm1.weight", "lm_head.weight", "model.norm.weight",
]  # fmt: skip
WRAPPERS = (
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module", "_module",
    "base_layer", "original_module", "modules_to_save.default",
)  # fmt: skip
PREFIXES = (
    "", "model.", "model.language_model.", "base_model.model.", "base_model.model.model.", "module.",
    "net.", "model.model.", "student.backbone.", "policy.", "_forward_module.model.",
)  # fmt: skip


def stored_names(family) -> list[str]:
    """The family's released names, two layers each, joined q, k and v only."""
    patterns = [name for name in family.tensors if not name.rpartition(".")[0].endswith((".q", ".k", ".v"))]
    return [name.format(number) for name in patterns for number in ((0, 2) if "{}" in name else (0,))]


@pytest.mark.parametrize("family", MAPS.values(), ids=MAPS.keys())
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_prefix_and_any_wrapper_anywhere(family, data):
    prefixes = {root: data.draw(st.sampled_from(PREFIXES)) for root in family.released_roots}
    wrapper = data.draw(st.sampled_from(WRAPPERS))
    stored = {}
    for name in stored_names(family):
        parts = name.split(".")
        for _ in range(data.draw(st.integers(0, 2))):
            parts.insert(data.draw(st.integers(0, len(parts) - 1)), wrapper)
        root = next(root for root in family.released_roots if name.startswith(root))
        stored[prefixes[root] + ".".join(parts)] = name
    reading = read_names([*TEXT, *stored], family)
    assert reading.names == stored
    assert not reading.doubled
    assert set(reading.prefixes) == {unwrapped(prefix) for prefix in prefixes.values()}


@pytest.mark.parametrize("family", MAPS.values(), ids=MAPS.keys())
@pytest.mark.parametrize("prefix", ["", "tower.", "student.backbone.", "module.encoder_q."])
def test_names_without_their_root_behind_any_prefix(family, prefix):
    tower = family.released_roots[-1]
    bare = {prefix + n.removeprefix(tower): n for n in stored_names(family) if n.startswith(tower)}
    assert read_names([*TEXT, *bare], family).names == bare


def test_transformers_own_kimi_k25_behind_a_prefix():
    spelled = {
        "x.model.vision_tower.layers.0.attn.q_proj.weight": "vision_tower.encoder.blocks.0.wqkv.q.weight",
        "x.model.vision_tower.layers.0.norm2.bias": "vision_tower.encoder.blocks.0.norm1.bias",
        "x.model.mm_projector.in_proj.weight": "mm_projector.proj.0.weight",
    }
    reading = read_names(spelled, KIMI_K25)
    assert (reading.names, reading.prefixes) == (spelled, ("x.model.",))


@pytest.mark.parametrize("family", MAPS.values(), ids=MAPS.keys())
def test_text_alone_holds_no_vision_tensor(family):
    assert not read_names(TEXT, family).stored


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.", "ema_model."),
        ("", "module."),
        ("model.", "model.language_model."),
        ("student.", "teacher."),
        ("exp_avg.", ""),
    ],
)
def test_two_sets_are_both_named(one, other):
    names = stored_names(KIMI_K3)
    reading = read_names([one + name for name in names] + [other + name for name in names], KIMI_K3)
    assert not reading.names
    (fault,) = reading.faults()
    first = min(names)
    assert f"{first}: named twice, as " in fault
    assert {*fault.partition("as ")[2].partition(", as")[0].split(" and ")} == {one + first, other + first}
    assert f"as are {len(names) - 1} more; keep one set" in fault


COMPANIONS = {
    "lora_A.default.weight": "merge", "lora_B.weight": "merge", "lora_magnitude_vector.default": "merge",
    "lora_embedding_A.default": "merge", "ia3_l.default": "merge", "hada_w1_a": "merge", "oft_r.default": "merge",
    "vera_lambda_b.default": "merge", "weight_packed": "dequantise", "weight_scale": "dequantise",
    "weight_scale_inv": "dequantise", "weight_scale_2": "dequantise", "weight_zero_point": "dequantise",
    "input_scale": "dequantise", "weight_global_scale": "dequantise", "qweight": "dequantise",
    "qzeros": "dequantise", "scales": "dequantise", "g_idx": "dequantise", "biases": "dequantise",
    "SCB": "dequantise", "weight.absmax": "dequantise", "weight.quant_map": "dequantise",
    "weight.nested_absmax": "dequantise", "weight.quant_state.bitsandbytes__nf4": "dequantise",
    "weight_shape": "dequantise", "weight_format": "dequantise", "weight_g": "parametrisation",
    "parametrizations.weight.original0": "parametrisation", "_flat_param": "whole state",
    "weight.exp_avg": "optimizer", "extra_state": "no such tensor",
}  # fmt: skip


@pytest.mark.parametrize("family", MAPS.values(), ids=MAPS.keys())
def test_companions_are_kept_and_explained(family):
    names = [f"model.{name}" for name in stored_names(family)]
    layer = next(name for name in names if name.endswith(("wqkv.weight", "qkv.weight"))).rpartition(".")[0]
    beside = [f"{layer}.{tail}" for tail in COMPANIONS]
    reading = read_names(names + beside, family)
    assert reading.stored == {*names, *beside}
    for name, (tail, word) in zip(beside, COMPANIONS.items(), strict=True):
        assert word in (companion(name) or "no such tensor"), tail
    assert not any(companion(name) for name in names)


@pytest.fixture(scope="module")
def tensors():
    checkpoint = LocalCheckpoint(TINY)
    return {name: checkpoint.read(name).clone() for name in checkpoint.tensors}


def folder(directory, **files):
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(TINY / name, directory)
    for name, content in files.items():
        save_file({n: t.contiguous() for n, t in content.items()}, directory / f"{name}.safetensors")
    return directory


@pytest.mark.parametrize(
    ("respell", "prefixes", "wrappers"),
    [
        (lambda n: f"model.language_model.{n}", ["model.language_model."], []),
        (lambda n: f"base_model.model.{n}", ["base_model.model."], []),
        (lambda n: f"module.module.{n}", [""], ["module"]),
        (lambda n: n.replace(".wqkv.", ".wqkv._orig_mod.base_layer."), [""], ["_orig_mod", "base_layer"]),
    ],
)
def test_read_and_said(tmp_path, tensors, respell, prefixes, wrappers):
    directory = folder(tmp_path / "m", model={respell(name): t for name, t in tensors.items()})
    found = Encoder.from_pretrained(directory).encode(PICTURE)
    assert (found == Encoder.from_pretrained(TINY).encode(PICTURE)).all()
    document = describe_checkpoint(LocalCheckpoint(directory))
    assert not document["faults"]
    assert document["names"] == {"prefixes": tuple(prefixes), "wrappers": tuple(wrappers)}


def test_read_from_a_hub(tmp_path, tensors, monkeypatch):
    repo = folder(tmp_path / "m", model={f"module.model.{name}": t for name, t in tensors.items()})
    with HubServer({"org/k3": {path.name: path for path in repo.iterdir()}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        encoder = Encoder.from_pretrained("org/k3", cache_dir=tmp_path / "cache")
    assert (encoder.encode(PICTURE) == Encoder.from_pretrained(TINY).encode(PICTURE)).all()


def test_compiled_and_saved(tmp_path, encoder):
    """What torch.compile's own state dict says, block by block and whole."""
    model = encoder.model
    whole = torch.compile(model).state_dict()
    assert all(name.startswith("_orig_mod.") for name in whole)
    directory = folder(tmp_path / "m", model=dict(whole))
    found = Encoder.from_pretrained(directory, dtype="float32").encode(PICTURE)
    assert (found == encoder.encode(PICTURE)).all()


def test_saved_modules_beside_their_originals_are_two_sets(tmp_path, tensors):
    def both(name):
        head, _, tail = name.partition("mm_projector.")
        kinds = ("original_module", "modules_to_save.default") if tail else ()
        return [f"{head}mm_projector.{kind}.{tail}" for kind in kinds] or [name]

    directory = folder(tmp_path / "m", model={new: t.clone() for n, t in tensors.items() for new in both(n)})
    with pytest.raises(WeightsError) as caught:
        Encoder.from_pretrained(directory)
    assert "modules_to_save.default.post_norm.weight and mm_projector.original_module" in str(caught.value)
    assert "missing" not in str(caught.value)


def test_another_familys_tensors_are_not_called_text_only(tmp_path):
    qwen = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}
    with pytest.raises(WeightsError, match="is named as Qwen-VL's are; does config.json belong"):
        Encoder.from_pretrained(folder(tmp_path / "m", model=qwen))
    text = folder(tmp_path / "text", model={name: torch.zeros(1) for name in TEXT})
    with pytest.raises(WeightsError, match="this checkpoint is text only"):
        Encoder.from_pretrained(text)


def test_single_file_beside_an_outdated_index_is_read_as_transformers_does(tiny_copy, tensors, caplog):
    save_file(
        {n: t * 2 if "post_norm" in n else t for n, t in tensors.items()}, tiny_copy / "model.safetensors"
    )
    checkpoint = LocalCheckpoint(tiny_copy)
    name = "mm_projector.post_norm.weight"
    assert torch.equal(checkpoint.read(name), tensors[name] * 2)
    assert "model.safetensors is read, as transformers does, and model.safetensors.index.json" in caplog.text
    for shard in tiny_copy.glob("model-*"):
        shard.unlink()
    assert not describe_checkpoint(LocalCheckpoint(tiny_copy))["faults"]


def test_an_adapter_of_the_tower_is_not_passed_over(tiny_copy):
    (tiny_copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    layer = "vision_tower.encoder.blocks.0.wqkv.lora_A.weight"
    save_file({f"base_model.model.{layer}": torch.zeros(2, 2)}, tiny_copy / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors: an adapter.*merge_and_unload"):
        Encoder.from_pretrained(tiny_copy)
    text = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({text: torch.zeros(2, 2)}, tiny_copy / "adapter_model.safetensors")
    assert Encoder.from_pretrained(tiny_copy)
    (tiny_copy / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"adapter_config\.json: an adapter"):
        Encoder.from_pretrained(tiny_copy)


def test_an_adapter_alone_is_called_one(tmp_path):
    directory = folder(tmp_path / "m", adapter_model={"base_model.model.x.lora_A.weight": torch.zeros(2, 2)})
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors: an adapter"):
        LocalCheckpoint(directory)


def test_text_table_behind_the_same_prefix_and_wrapper(tmp_path, k3_text):
    content = {}
    for file in k3_text.glob("*.safetensors"):
        content |= {f"net.{name}".replace("net.", "net.module."): t for name, t in load_file(file).items()}
    directory = folder(tmp_path / "m", model=content)
    assert embedding_table(LocalCheckpoint(directory)).rows == 512

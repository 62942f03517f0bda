"""Local checkpoints: what is read, and what is refused, by name and all at once."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import TINY
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError, WeightsError
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.load import fingerprint

LAST = "model-00003-of-000003.safetensors"
FIRST_VISION = "model-00002-of-000003.safetensors"
QKV = "vision_tower.encoder.blocks.0.wqkv.weight"
PATCH = "vision_tower.patch_embed.proj.weight"


def respell(directory: Path, change) -> None:
    """Rewrite the last shard with its tensors changed."""
    tensors = load_file(directory / LAST)
    change(tensors)
    (directory / LAST).unlink()
    save_file(tensors, directory / LAST, metadata={"format": "pt"})


def edit_index(directory: Path, change) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def refusal(directory: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        Encoder.from_pretrained(directory)
    return caught.value


def test_values_are_the_files(tiny_copy):
    encoder = Encoder.from_pretrained(tiny_copy)
    stored = load_file(TINY / LAST) | load_file(TINY / FIRST_VISION)
    state = encoder.model.state_dict()
    assert set(state) == {n for n in stored if n.startswith(("vision_tower.", "mm_projector."))}
    for name, tensor in state.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, stored[name])


def test_float32_is_exact():
    state = Encoder.from_pretrained(TINY, dtype="float32").model.state_dict()
    stored = load_file(TINY / LAST)
    assert torch.equal(state[QKV], stored[QKV].float())


def test_weights_are_mapped_and_files_stay_as_they_are(tiny_copy):
    before = (tiny_copy / LAST).read_bytes()
    encoder = Encoder.from_pretrained(tiny_copy)
    with torch.no_grad():
        for parameter in encoder.model.parameters():
            parameter.zero_()
    assert (tiny_copy / LAST).read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of memory maps on this system")
def test_no_copy_is_made(tiny_copy):
    encoder = Encoder.from_pretrained(tiny_copy)
    address = encoder.model.get_parameter(QKV).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            assert line.endswith(LAST)
            break
    else:
        pytest.fail("the weights lie in no map")


def test_text_shards_may_be_absent_and_are_not_opened(tiny_copy):
    assert not (tiny_copy / "model-00001-of-000003.safetensors").exists()
    (tiny_copy / "model-00001-of-000003.safetensors").write_text("not safetensors at all")
    Encoder.from_pretrained(tiny_copy)


def test_single_file(tiny_copy):
    tensors = load_file(tiny_copy / LAST) | load_file(tiny_copy / FIRST_VISION)
    for name in (LAST, FIRST_VISION, "model.safetensors.index.json"):
        (tiny_copy / name).unlink()
    save_file(tensors, tiny_copy / "model.safetensors")
    state = Encoder.from_pretrained(tiny_copy).model.state_dict()
    assert torch.equal(state[QKV], tensors[QKV])


def test_all_faults_in_one_message(tiny_copy):
    def spoil(tensors):
        del tensors["vision_tower.encoder.final_layernorm.weight"]
        tensors[QKV] = tensors[QKV].T.contiguous()
        tensors[PATCH] = tensors[PATCH].permute(0, 2, 3, 1).contiguous()
        tensors["vision_tower.encoder.blocks.0.norm0.weight"] = torch.zeros(64, dtype=torch.int32)
        tensors["vision_tower.encoder.blocks.0.norm1.weight"] = torch.zeros(64).to(torch.float8_e4m3fn)
        tensors["vision_tower.encoder.blocks.0.wqkv.bias"] = torch.zeros(288)

    respell(tiny_copy, spoil)
    error = refusal(tiny_copy)
    text = str(error)
    assert len(error.faults) == 6
    assert "final_layernorm.weight: not in model-00003" in text
    assert f"{QKV}: shape [64, 288] in {LAST}, expected [288, 64]" in text
    assert f"{PATCH}: shape [64, 14, 14, 3] in {LAST}, expected [64, 3, 14, 14]" in text
    assert "norm0.weight: type I32" in text
    assert "norm1.weight: type F8_E4M3" in text
    assert "wqkv.bias: in model-00003" in text


def test_missing_from_the_index(tiny_copy):
    edit_index(tiny_copy, lambda weight_map: weight_map.pop("mm_projector.post_norm.weight"))
    assert "mm_projector.post_norm.weight: in model-00002" in str(refusal(tiny_copy))
    respelled = load_file(tiny_copy / FIRST_VISION)
    respelled.pop("mm_projector.post_norm.weight")
    (tiny_copy / FIRST_VISION).unlink()
    save_file(respelled, tiny_copy / FIRST_VISION)
    assert refusal(tiny_copy).faults == ("mm_projector.post_norm.weight: missing, expected shape [48]",)


def test_bias_that_the_geometry_lacks_is_not_dropped(tiny_copy):
    name = "vision_tower.encoder.blocks.0.wo.bias"
    respell(tiny_copy, lambda tensors: tensors.update({name: torch.zeros(64)}))
    edit_index(tiny_copy, lambda weight_map: weight_map.update({name: LAST}))
    assert refusal(tiny_copy).faults == (f"{name}: in {LAST}, but this geometry has no such tensor",)


def test_absent_vision_shard(tiny_copy):
    (tiny_copy / LAST).unlink()
    assert refusal(tiny_copy).faults == (f"{LAST}: no such file",)


def test_named_twice_in_the_index(tiny_copy):
    path = tiny_copy / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{QKV}": "{LAST}",'))
    assert f"named twice: {QKV}" in str(refusal(tiny_copy))


def test_named_twice_under_two_prefixes(tiny_copy):
    double = "model." + QKV
    respell(tiny_copy, lambda tensors: tensors.update({double: tensors[QKV].clone()}))
    edit_index(tiny_copy, lambda weight_map: weight_map.update({double: LAST}))
    assert f"{QKV}: named twice" in str(refusal(tiny_copy))


def test_named_twice_in_two_files(tiny_copy):
    (tiny_copy / "model.safetensors.index.json").unlink()
    save_file({QKV: torch.zeros(1)}, tiny_copy / "extra.safetensors")
    assert f"{QKV}: named twice, in extra.safetensors and {LAST}" in str(refusal(tiny_copy))


def raw_edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "1 bytes missing"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "1 bytes to spare"),
        (lambda p: p.write_bytes(b""), "too short"),
        (
            lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]),
            "the limit is 100000000: damaged, or not a safetensors file",
        ),
        (
            lambda p: p.write_bytes((10**7).to_bytes(8, "little") + p.read_bytes()[8:]),
            "bytes: damaged, or not a safetensors file",
        ),
        (lambda p: raw_edit(p, b'"BF16"', b'"BF17"'), "unknown type"),
        (lambda p: raw_edit(p, b'"BF16"', b'"I64" '), "does not take"),
        (lambda p: raw_edit(p, b'"shape":[64]', b'"shape":[65]'), "does not take"),
        (lambda p: raw_edit(p, b'"shape":[64]', b'"shape":[-44'), "not valid JSON"),
        (lambda p: raw_edit(p, b'"dtype"', b'"dtyqe"'), "malformed header entry"),
    ],
)
def test_bad_shard_is_named(tiny_copy, spoil, message):
    spoil(tiny_copy / LAST)
    error = refusal(tiny_copy)
    assert len(error.faults) == 1
    assert error.faults[0].startswith(f"{LAST}: ")
    assert message in error.faults[0]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", "", "a\\b", "C:x\0"]
)
def test_index_cannot_lead_out(tiny_copy, name):
    edit_index(tiny_copy, lambda weight_map: weight_map.update({QKV: name}))
    assert "leads out of the checkpoint" in str(refusal(tiny_copy))


def test_link_cannot_lead_out(tiny_copy, tmp_path):
    outside = tmp_path / "outside.safetensors"
    os.replace(tiny_copy / LAST, outside)
    (tiny_copy / LAST).symlink_to(outside)
    assert "the link leads out" in str(refusal(tiny_copy))


def test_links_of_the_hub_cache_are_followed(tmp_path):
    """snapshots/REVISION/file -> ../../blobs/HASH, as huggingface-hub lays its cache out."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(TINY.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    Encoder.from_pretrained(snapshot)


def test_no_vision_tensors(tiny_copy):
    (tiny_copy / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "a.safetensors"}}'
    )
    assert "no vision tensors" in str(refusal(tiny_copy))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "'weight_map' is missing"), ('{"weight_map": [1]}', "expected a map"), ("{", "not valid JSON")],
)
def test_broken_index(tiny_copy, text, message):
    (tiny_copy / "model.safetensors.index.json").write_text(text)
    error = refusal(tiny_copy)
    assert message in str(error)
    assert "index.json" in str(error)


def test_two_indexes(tiny_copy):
    (tiny_copy / "model.safetensors.index.json").rename(tiny_copy / "a.safetensors.index.json")
    (tiny_copy / "b.safetensors.index.json").write_text("{}")
    assert "more than one index" in str(refusal(tiny_copy))


def test_no_such_directory(tmp_path):
    assert "no such directory" in str(refusal(tmp_path / "nowhere"))


def test_config_without_weights(tiny_copy):
    for path in tiny_copy.glob("*.safetensors*"):
        path.unlink()
    assert "no *.safetensors" in str(refusal(tiny_copy))


def test_halves_of_a_checkpoint_must_agree(tiny_copy):
    path = tiny_copy / "preprocessor_config.json"
    path.write_text(path.read_text().replace('"patch_size": 14', '"patch_size": 16'))
    with pytest.raises(ConfigError, match="patch_size 16, config.json has 14"):
        Encoder.from_pretrained(tiny_copy)


def test_copies_do_not_carry_the_files(tiny_copy):
    encoder = Encoder.from_pretrained(tiny_copy)
    before = len(pickle.dumps(encoder))
    assert encoder.fingerprint
    assert len(pickle.dumps(encoder)) < before + 1000
    assert pickle.loads(pickle.dumps(encoder)).fingerprint == encoder.fingerprint
    error = WeightsError("here", ["a", "b"], "do this")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_long_names_in_an_index(tiny_copy):
    edit_index(tiny_copy, lambda weight_map: weight_map.update({QKV: "x" * 5000}))
    assert "no such file" in str(refusal(tiny_copy))


def test_index_of_a_very_large_model(tiny_copy):
    """300,000 text tensors beside ours: 30 MB of index."""
    names = {
        f"language_model.model.layers.{n % 60}.mlp.experts.{n}.up_proj.weight_packed": "t.safetensors"
        for n in range(300_000)
    }
    edit_index(tiny_copy, lambda weight_map: weight_map.update(names))
    Encoder.from_pretrained(tiny_copy)


def test_fingerprint_tells_contents_apart(tiny_copy):
    first = fingerprint(LocalCheckpoint(tiny_copy))
    assert first == fingerprint(LocalCheckpoint(TINY))
    assert first.startswith("sha256:")
    data = bytearray((tiny_copy / LAST).read_bytes())
    data[-1] ^= 1
    (tiny_copy / LAST).write_bytes(data)
    assert fingerprint(LocalCheckpoint(tiny_copy)) != first

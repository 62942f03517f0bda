"""Layouts in the wild load to the same embeddings; export and verify; what is no vision half is refused."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import IMAGES, TINY
from moonvit.encoder import Encoder
from moonvit.errors import MoonvitError, WeightsError
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.export import export, verify
from moonvit.weights.load import fingerprint

PICTURE = IMAGES / "rgba_120x90.png"
PATCH = "vision_tower.patch_embed.proj.weight"
NORM = "vision_tower.encoder.blocks.0.norm0.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    checkpoint = LocalCheckpoint(TINY)
    return {name: checkpoint.read(name).clone() for name in checkpoint.tensors}


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return Encoder.from_pretrained(TINY).encode(PICTURE)


def written(directory: Path, files: dict[str, dict[str, torch.Tensor]], **metadata: str) -> Path:
    """A checkpoint of those files, with K3-tiny's configs and no index."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "preprocessor_config.json"):
        (directory / name).write_bytes((TINY / name).read_bytes())
    for file, content in files.items():
        content = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(content, directory / file, metadata={"format": "pt"} | metadata)
    return directory


def renamed(tensors, *pairs):
    result = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        result[name] = tensor
    return result


LAYOUTS = {
    "prefix model.": lambda t: {"model.safetensors": renamed(t, ("", "model."))},
    "linear_1/2": lambda t: {
        "model.safetensors": renamed(
            t,
            ("mm_projector.proj.0.", "mm_projector.linear_1."),
            ("mm_projector.proj.2.", "mm_projector.linear_2."),
        )
    },
    "beside text": lambda t: {
        "model.safetensors": t
        | {"language_model.lm_head.weight": torch.zeros(2, 2), "encoder.x": torch.zeros(1)}
    },
    "tower and projector files": lambda t: {
        "tower.safetensors": renamed({n: x for n, x in t.items() if n[0] == "v"}, ("vision_tower.", "")),
        "projector.safetensors": renamed({n: x for n, x in t.items() if n[0] == "m"}, ("mm_projector.", "")),
    },
    "bare tower, named projector": lambda t: {
        "tower.safetensors": renamed({n: x for n, x in t.items() if n[0] == "v"}, ("vision_tower.", "")),
        "projector.safetensors": {n: x for n, x in t.items() if n[0] == "m"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, tensors, expected, layout):
    directory = written(tmp_path / "m", LAYOUTS[layout](tensors))
    assert np.array_equal(Encoder.from_pretrained(directory).encode(PICTURE), expected)


def test_mlx_patch_matrix_is_turned(tmp_path, tensors, expected):
    turned = tensors | {PATCH: tensors[PATCH].permute(0, 2, 3, 1)}
    directory = written(tmp_path / "m", {"model.safetensors": turned}, format="mlx")
    encoder = Encoder.from_pretrained(directory)
    assert np.array_equal(encoder.encode(PICTURE), expected)
    export(LocalCheckpoint(directory), tmp_path / "out")
    assert torch.equal(LocalCheckpoint(tmp_path / "out").read(PATCH), tensors[PATCH])


def test_turned_patch_matrix_of_another_writer_is_refused(tmp_path, tensors):
    turned = tensors | {PATCH: tensors[PATCH].permute(0, 2, 3, 1)}
    with pytest.raises(
        WeightsError, match=r"shape \[64, 14, 14, 3\] in model.safetensors, expected \[64, 3, 14, 14\]"
    ):
        Encoder.from_pretrained(written(tmp_path / "m", {"model.safetensors": turned}))


def test_mlx_matrix_in_the_released_order_stays(tmp_path, tensors, expected):
    directory = written(tmp_path / "m", {"model.safetensors": tensors}, format="mlx")
    assert np.array_equal(Encoder.from_pretrained(directory).encode(PICTURE), expected)


def test_mixed_types(tmp_path, tensors, expected):
    mixed = tensors | {NORM: tensors[NORM].float(), PATCH: tensors[PATCH].double()}
    mixed["mm_projector.post_norm.weight"] = mixed["mm_projector.post_norm.weight"].half()
    directory = written(tmp_path / "m", {"model.safetensors": mixed})
    encoder = Encoder.from_pretrained(directory)
    assert {p.dtype for p in encoder.model.parameters()} == {torch.bfloat16}
    assert np.allclose(encoder.encode(PICTURE), expected, atol=0.02)


def test_tower_alone(tmp_path, tensors):
    tower = {name: tensor for name, tensor in tensors.items() if name.startswith("vision_tower.")}
    directory = written(tmp_path / "m", {"model.safetensors": renamed(tower, ("vision_tower.", ""))})
    encoder = Encoder.from_pretrained(directory, dtype="float32")
    batch = encoder.processor(PICTURE)
    whole = Encoder.from_pretrained(TINY, dtype="float32").model.vision_tower(
        batch.pixel_values, batch.grid_thws
    )
    found = encoder.model.vision_tower(batch.pixel_values, batch.grid_thws)
    assert torch.equal(found[0], whole[0])
    with pytest.raises(ValueError, match="no projector"):
        encoder.encode(PICTURE)
    done = cli("info", directory)
    assert done.returncode == 0
    assert "no projector" in done.stdout


def test_projector_alone_is_refused(tmp_path, tensors):
    half = {name: tensor for name, tensor in tensors.items() if name.startswith("mm_")}
    with pytest.raises(WeightsError, match=r"vision_tower\.patch_embed\.proj\.weight: missing"):
        Encoder.from_pretrained(written(tmp_path / "m", {"model.safetensors": half}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_packed_types_are_refused(tmp_path, tensors, dtype):
    packed = tensors | {NORM: torch.zeros(64).to(dtype)}
    with pytest.raises(WeightsError, match="norm0.weight: type .*expected one of BF16"):
        Encoder.from_pretrained(written(tmp_path / "m", {"model.safetensors": packed}))


def test_quantised_names_are_refused(tmp_path, tensors):
    name = "vision_tower.encoder.blocks.0.wqkv.weight"
    packed = {n: t for n, t in tensors.items() if n != name}
    packed |= {f"{name}_packed": torch.zeros(4, dtype=torch.int32), f"{name}_scale": torch.zeros(4)}
    with pytest.raises(WeightsError) as caught:
        Encoder.from_pretrained(written(tmp_path / "m", {"model.safetensors": packed}))
    assert f"{name}: missing" in str(caught.value)
    assert f"{name}_packed: in model.safetensors" in str(caught.value)


def cli(*words):
    return subprocess.run(
        [sys.executable, "-m", "moonvit", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )


@pytest.mark.parametrize("layout", ["prefix model.", "tower and projector files"])
def test_export_reads_back_bit_equal(tmp_path, tensors, layout):
    directory = written(tmp_path / "m", LAYOUTS[layout](tensors))
    done = cli("export", directory, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert fingerprint(LocalCheckpoint(tmp_path / "out")) == fingerprint(LocalCheckpoint(directory))
    again = cli("export", directory, "-o", tmp_path / "out")
    assert again.returncode == 1
    assert "exists already" in again.stderr


def test_export_in_another_type(tmp_path, tensors):
    export(LocalCheckpoint(TINY), tmp_path / "out", torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name].float()) for name in tensors)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(MoonvitError, match="exists already"):
        export(LocalCheckpoint(TINY), tmp_path / "out")


def test_values_too_large_for_float16_are_refused(tmp_path, tensors):
    huge = tensors | {NORM: torch.full((64,), 1e6)}
    directory = written(tmp_path / "m", {"model.safetensors": huge})
    with pytest.raises(WeightsError, match=r"norm0\.weight: values up to 1e\+06 do not fit into float16"):
        export(LocalCheckpoint(directory), tmp_path / "out", torch.float16)
    with pytest.raises(WeightsError, match="do not fit into float16"):
        Encoder.from_pretrained(directory, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_export_of_a_faulty_checkpoint(tiny_copy, tmp_path):
    (tiny_copy / "model-00003-of-000003.safetensors").unlink()
    done = cli("export", tiny_copy, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "no such file" in done.stderr
    assert not (tmp_path / "out").exists()


def test_verify(tmp_path, tensors):
    done = cli("verify", TINY, "--format", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["fingerprint"] == fingerprint(LocalCheckpoint(TINY))
    assert len(document["tensors"]) == 24
    checkpoint = LocalCheckpoint(TINY)
    for tensor in document["tensors"]:
        expected = hashlib.sha256(checkpoint.bytes_of(tensor["name"]).tobytes()).hexdigest()
        assert tensor["sha256"] == expected
    spoiled = tensors | {NORM: torch.full((64,), float("nan"), dtype=torch.bfloat16)}
    done = cli("verify", written(tmp_path / "m", {"model.safetensors": spoiled}))
    assert done.returncode == 1
    assert f"fault: {NORM}: 64 values are NaN or infinite" in done.stdout
    assert [t.not_finite for t in verify(LocalCheckpoint(tmp_path / "m")) if t.name == NORM] == [64]

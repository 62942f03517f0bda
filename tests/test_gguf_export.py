"""What may not be written as a mmproj file, or not without a word, and what is needed for it."""

import sys

import gguf
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from gguf_helpers import assert_same, load, make, maker, rewritten
from moonvit.errors import MoonvitError
from moonvit.mmproj import export_gguf
from moonvit.weights.source import local_checkpoint

TYPES = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return maker(tmp_path_factory.mktemp("gguf"))


REFUSED = {
    "window_cells 2": ("qwen2_5_vl", {"window_size": 56}),
    "full_layers": ("qwen2_5_vl", {"fullatt_block_indexes": [0, 3]}),
    "deepstack_layers": ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}),
    "activation gelu": ("qwen2_vl", {"hidden_act": "gelu"}),
    "intermediate_size": ("qwen2_vl", {"mlp_ratio": 1}),
    "norm rmsnorm": ("kimi_k25", {"norm_type": "rmsnorm"}),
    "pos_emb": ("kimi_vl", {"init_pos_emb_height": 2}),
    "temporal_patch_size 3": ("qwen2_vl", {"temporal_patch_size": 3}),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_file_cannot_say_is_refused(tmp_path, word):
    family, changes = REFUSED[word]
    directory = make(tmp_path / "m", family, **changes)
    with pytest.raises(MoonvitError, match=word.replace("pos_emb", "pos_emb|position_embd")):
        export_gguf(local_checkpoint(directory), tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_other_refusals(files, tmp_path, caplog):
    checkpoint = local_checkpoint(files("kimi_k3")[0])
    with pytest.raises(MoonvitError, match="no released llama.cpp reads .*--experimental"):
        export_gguf(checkpoint, tmp_path / "x.gguf")
    export_gguf(checkpoint, tmp_path / "x.gguf", experimental=True)
    assert "experimental" not in caplog.text
    load(tmp_path / "x.gguf")
    assert "kimik3 is an experimental layout" in caplog.text
    with pytest.raises(MoonvitError, match="exists already"):
        export_gguf(checkpoint, tmp_path / "x.gguf", experimental=True)
    with pytest.raises(MoonvitError, match="float64 has no place"):
        export_gguf(checkpoint, tmp_path / "y.gguf", torch.float64, experimental=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_without_the_package(files, tmp_path, monkeypatch):
    """Float types are read all the same; the rest says what to install."""

    def packed(name, data, kind):
        whole = data.ndim == 2 and data.shape[1] % 32 == 0
        return (name, quantize(data, TYPES.Q8_0), TYPES.Q8_0) if whole else (name, data, kind)

    path = rewritten(files("kimi_k3")[1], tmp_path / "q.gguf", tensors=packed)
    directory, plain = files("kimi_vl")
    for module in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert_same(load(plain), load(directory))
    with pytest.raises(
        MoonvitError, match=r"Q8_0, which needs the package gguf \(pip install 'moonvit\[gguf\]'\)"
    ):
        load(path)
    with pytest.raises(MoonvitError, match=r"pip install 'moonvit\[gguf\]'"):
        export_gguf(local_checkpoint(directory), tmp_path / "x.gguf")


def test_a_checkpoint_without_projector(files, tmp_path):
    directory = make(tmp_path / "m", "kimi_k25")
    tensors = load_file(directory / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "vision_tower" in k}, directory / "model.safetensors")
    with pytest.raises(MoonvitError, match="no projector"):
        export_gguf(local_checkpoint(directory), tmp_path / "x.gguf")


def test_queries_and_keys_as_transformers_has_them(files, tmp_path):
    """Apart and half-split: the file is the one made of the raw layout."""
    directory, path = files("kimi_k25")
    split = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if ".wqkv." not in name:
            split[name] = tensor
            continue
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            if part != "v":  # adjacent pairs to halves: rows 0 2 4 ... then 1 3 5 ... of each head
                rows = rows.view(3, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
            new = name.replace("encoder.blocks", "layers").replace("wqkv", f"attn.{part}_proj")
            split[new] = rows.contiguous()
    native = make(tmp_path / "m", "kimi_k25")
    save_file(split, native / "model.safetensors")
    export_gguf(local_checkpoint(native), tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == path.read_bytes()


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """A value beyond float16 is found half way."""
    directory = make(tmp_path / "m", "kimi_vl")
    tensors = load_file(directory / "model.safetensors")
    tensors["multi_modal_projector.linear_2.weight"] *= 1e9
    save_file(tensors, directory / "model.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(MoonvitError, match="do not fit into float16"):
        export_gguf(local_checkpoint(directory), tmp_path / "out" / "x.gguf", torch.float16)
    assert not list((tmp_path / "out").iterdir())

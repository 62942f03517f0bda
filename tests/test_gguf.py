"""mmproj files of llama.cpp: written, read back, and read as other writers leave them.

No real file is used: the reference is the `gguf` package, its tables, its reader and its quantisers.
"""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from PIL import Image
from safetensors.torch import load_file

from conftest import TINY
from gguf_helpers import FAMILIES, assert_same, keys_of, load, make, maker, rewritten
from moonvit.errors import ConfigError, MoonvitError, WeightsError
from moonvit.mmproj import export_gguf
from moonvit.ops.rotary import rope_table, rotate_pairs
from moonvit.weights.export import export
from moonvit.weights.gguf import QUANTISED, GgufCheckpoint
from moonvit.weights.gguf_config import KIMI_LIMITS
from moonvit.weights.gguf_header import TENSOR_TYPES, as_written
from moonvit.weights.gguf_layout import rows_by_axis, rows_by_pair
from moonvit.weights.gguf_names import LAYOUTS
from moonvit.weights.load import fingerprint
from moonvit.weights.source import local_checkpoint

TYPES = gguf.GGMLQuantizationType
PICTURES = [Image.effect_noise(size, 80) for size in [(100, 60), (60, 130)]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return maker(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_there_and_back(files, family):
    """Weights, embeddings, geometry, pixel rules and fingerprint are those of the checkpoint, bit for bit."""
    directory, path = files(family)
    mine, theirs = load(path), load(directory)
    assert mine.family == family
    assert mine.config == theirs.config
    assert mine.processor.config == theirs.processor.config
    assert_same(mine, theirs)
    assert fingerprint(mine.checkpoint) == fingerprint(theirs.checkpoint)
    for a, b in zip(mine.encode(PICTURES), theirs.encode(PICTURES), strict=True):
        assert np.array_equal(a, b)
    assert [mine.count_tokens(p) for p in PICTURES] == [theirs.count_tokens(p) for p in PICTURES]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k25", "qwen2_5_vl", "qwen3_vl"])
def test_half_precision(files, tmp_path, family, kind):
    """Matrices in the type asked for, vectors and position table in float32, as the converter has it."""
    dtype = getattr(torch, kind)
    export_gguf(local_checkpoint(files(family)[0]), tmp_path / "x.gguf", dtype)
    assert_same(load(tmp_path / "x.gguf", kind), load(files(family)[0], kind))
    short = {"float16": TYPES.F16, "bfloat16": TYPES.BF16}[kind]
    for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors:
        patch = tensor.name.startswith("v.patch_embd.weight")
        single = len(tensor.shape) == 1 or "position_embd" in tensor.name or (patch and kind == "bfloat16")
        assert tensor.tensor_type == (TYPES.F32 if single else short), tensor.name
    assert keys_of(tmp_path / "x.gguf")["general.file_type"] == {"float16": 1, "bfloat16": 32}[kind]


def test_as_stored(tmp_path):
    """The released type, bfloat16, loses nothing."""
    export_gguf(local_checkpoint(TINY), tmp_path / "x.gguf", experimental=True)
    assert GgufCheckpoint(tmp_path / "x.gguf").stored_types == ["BF16", "F32"]
    assert_same(load(tmp_path / "x.gguf"), load(TINY))


def test_rows_of_a_head_of_eight():
    """Pairs (0 1) (2 3) (4 5) (6 7) turn by column, row, column, row: columns come first."""
    rows = torch.arange(16)
    expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert rows_by_axis(rows, heads=2).tolist() == expected
    assert rows_by_pair(torch.tensor(expected), heads=2).tolist() == rows.tolist()


def test_rows_in_the_file_and_their_rotation(files):
    """Turned as llama.cpp turns them, halves by axis, the file's rows give the very same scores."""
    directory, path = files("kimi_k25")
    heads, dim = 3, 24
    stored = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}["v.blk.0.attn_qkv.weight"]
    released = load_file(directory / "model.safetensors")["vision_tower.encoder.blocks.0.wqkv.weight"]
    assert np.array_equal(stored[:8], released[[0, 1, 4, 5, 8, 9, 12, 13]])
    assert np.array_equal(stored[12:16], released[[2, 3, 6, 7]])
    assert np.array_equal(stored[2 * heads * dim :], released[2 * heads * dim :])
    x = torch.randn(6, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def scores(matrix, turn):
        q, k = ((x @ part.T).view(6, heads, dim) for part in matrix.double().split(heads * dim)[:2])
        return torch.einsum("nhd,mhd->hnm", turn(q), turn(k))

    def by_axis(x_NHd):
        column, row = torch.arange(6) % 3, torch.arange(6) // 3
        speeds = 10000.0 ** (-2 * torch.arange(dim // 4, dtype=torch.float64) / (dim // 2))
        angles = torch.cat([column[:, None] * speeds, row[:, None] * speeds], 1)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(torch.view_as_complex(x_NHd.unflatten(-1, (-1, 2))) * turns).flatten(2)

    tables = rope_table([(1, 2, 3)], dim, 10000.0, torch.float64)
    ours = scores(released, lambda x_NHd: rotate_pairs(x_NHd, *tables))
    assert torch.allclose(scores(torch.from_numpy(stored), by_axis), ours, rtol=0, atol=1e-12)


def test_rows_that_stay(files):
    """Kimi-VL's and Qwen's parts are the released rows; frames, places and DeepStack's layers by their names."""
    pairs = {}
    for family in ("kimi_vl", "qwen2_vl", "qwen3_vl"):
        directory, path = files(family)
        stored = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}
        pairs[family] = stored, load_file(directory / "model.safetensors")
    for family, name, rows in (
        ("kimi_vl", "vision_tower.encoder.blocks.1.wqkv", 72),
        ("qwen2_vl", "visual.blocks.1.attn.qkv", 48),
    ):
        stored, released = pairs[family]
        for number, part in enumerate("qkv"):
            for kind in ("weight", "bias"):
                expected = released[f"{name}.{kind}"][number * rows : (number + 1) * rows]
                assert np.array_equal(stored[f"v.blk.1.attn_{part}.{kind}"], expected)
    stored, released = pairs["kimi_vl"]
    table = released["vision_tower.patch_embed.pos_emb.weight"]
    assert np.array_equal(stored["v.position_embd.weight"][8 * 3 + 5], table[3, 5])
    stored, released = pairs["qwen3_vl"]
    patch = released["visual.patch_embed.proj.weight"]
    assert np.array_equal(stored["v.patch_embd.weight"], patch[:, :, 0])
    assert np.array_equal(stored["v.patch_embd.weight.1"], patch[:, :, 1])
    norm = released["visual.deepstack_merger_list.1.norm.weight"]
    assert np.array_equal(stored["v.deepstack.2.norm.weight"], norm)
    assert np.array_equal(stored["v.blk.3.attn_qkv.weight"], released["visual.blocks.3.attn.qkv.weight"])


CONVERTER = {
    "kimi_vl": {".wqkv.q": ".wq", ".wqkv.k": ".wk", ".wqkv.v": ".wv"},
    "kimi_k25": {
        "projector.proj.0": "projector.proj.linear_1",
        "projector.proj.2": "projector.proj.linear_2",
    },
    "qwen2_vl": {".qkv.q": ".q", ".qkv.k": ".k", ".qkv.v": ".v", ".frame0.weight": ""},
    "qwen2_5_vl": {".qkv.q": ".q", ".qkv.k": ".k", ".qkv.v": ".v", ".frame0.weight": ""},
    "qwen3_vl": {"visual.deepstack": "model.visual.deepstack", ".frame0.weight": "", "proj.bias": "proj"},
}
"""What the converter makes of released names before it looks them up in the package's table."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.projector)
def test_names_are_those_of_the_package(layout):
    """Every row of the tables against the package's own map from released names."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 4)
    known = {name.format(bid=3) for name in gguf.TENSOR_NAMES.values()}
    looked_up = 0
    for stored, released in layout.names.items():
        stored, released = stored.format(3).rstrip("."), released.format(3).rstrip(".")
        stored = stored.removesuffix(".weight").removesuffix(".bias")
        if stored.endswith(".weight.1"):  # the converter writes it out
            continue
        assert stored in known or stored.rpartition(".")[0] == "mm", stored
        for ours, theirs in CONVERTER.get(layout.family, {}).items():
            released = released.replace(ours, theirs)
        found = table.get_name(released)
        if found is not None:
            assert found == stored
            looked_up += 1
    assert looked_up >= len(layout.names) - {"kimi_k3": 3, "qwen3_vl": 4}.get(layout.family, 1)


def test_types_are_those_of_the_package():
    assert {(TYPES(n).name, *gguf.GGML_QUANT_SIZES[TYPES(n)]) for n in TENSOR_TYPES} == set(
        TENSOR_TYPES.values()
    )
    assert set(TENSOR_TYPES) == {int(t) for t in TYPES}
    assert set(gguf.quants._type_traits) == {TYPES[name] for name in QUANTISED | {"BF16"}}


def test_keys_are_those_of_the_package(files):
    """Every key is one of the package's constants, but for the three that the converter writes without `clip.`."""
    names = set()
    for group in (gguf.Keys.General, gguf.Keys.Clip, gguf.Keys.ClipVision):
        names |= {v for v in vars(group).values() if isinstance(v, str)}
    names |= {gguf.Keys.ClipVision.Attention.HEAD_COUNT, gguf.Keys.ClipVision.Attention.LAYERNORM_EPS}
    names |= {gguf.Keys.ClipVision.Projector.SCALE_FACTOR, "clip.vision.attention.head_dim"}
    for family in FAMILIES:
        keys = keys_of(files(family)[1])
        assert {key for key in keys if key not in names and not key.startswith("vision.pos_emb_")} == set()
    projectors = {
        vars(gguf.VisionProjectorType)[n] for n in ("QWEN2VL", "QWEN25VL", "QWEN3VL", "KIMIVL", "KIMIK25")
    }
    assert {layout.projector for layout in LAYOUTS} == projectors | {"kimik3"}


def test_what_the_keys_say(files):
    keys = keys_of(files("qwen2_5_vl")[1])
    assert keys["clip.vision.n_wa_pattern"] == 2
    assert keys["clip.use_silu"] is True
    assert "clip.vision.image_max_pixels" not in keys  # the released ones
    assert keys_of(files("qwen2_vl")[1])["clip.vision.image_max_pixels"] == 1003520
    keys = keys_of(files("qwen3_vl")[1])
    assert keys["clip.vision.is_deepstack_layers"] == [True, False, True, False]
    assert keys["clip.vision.image_size"] == 128
    assert as_written(keys["clip.vision.attention.layer_norm_epsilon"]) == 1e-6
    keys = keys_of(files("kimi_k25")[1])
    assert (keys["vision.pos_emb_height"], keys["vision.pos_emb_width"]) == (6, 8)
    assert keys["clip.vision.image_max_pixels"] == 12345 * 196
    assert keys["clip.vision.projector.scale_factor"] == 2
    keys = keys_of(files("kimi_k3")[1])
    assert keys["clip.vision.attention.head_dim"] == 32
    assert "clip.vision.image_max_pixels" not in keys_of(files("kimi_vl")[1])


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Qwen2-VL of whose matrices every row fills blocks of 256."""
    root = tmp_path_factory.mktemp("wide")
    directory = make(root / "m", "qwen2_vl", depth=1, embed_dim=256, mlp_ratio=2)
    export_gguf(local_checkpoint(directory), root / "wide.gguf")
    return directory, root / "wide.gguf"


WORST = {
    "Q8_0": 0.0045, "Q5_1": 0.034, "Q5_0": 0.064, "Q4_1": 0.069, "Q4_0": 0.126, "MXFP4": 0.26,
    "TQ1_0": 0.51, "TQ2_0": 0.51,
}  # fmt: skip
"""Largest error of a value by the largest value of its block: half a step, or one where the scale has a sign."""


@pytest.mark.parametrize("name", WORST)
def test_quantised(wide, tmp_path, name):
    """Close to the weights by that type's step, and exactly what the package's own dequantiser gives."""
    kind, block = TYPES[name], gguf.GGML_QUANT_SIZES[TYPES[name]][0]
    known = {}

    def quantised(stored, data, old):
        if data.ndim != 2 or not stored.startswith("v.blk"):
            return stored, data, old
        packed = quantize(data, kind)
        known[stored] = dequantize(packed, kind)
        step = np.abs(data).reshape(-1, block).max(1, keepdims=True)
        assert np.all(np.abs(known[stored] - data).reshape(-1, block) <= WORST[name] * step)
        return stored, packed, kind

    def plain(stored, data, old):
        return stored, known.get(stored, data), old

    path = rewritten(wide[1], tmp_path / "q.gguf", tensors=quantised)
    same = rewritten(wide[1], tmp_path / "f.gguf", tensors=plain)
    assert name in GgufCheckpoint(path).stored_types
    assert_same(load(path), load(same))
    assert np.array_equal(load(path).encode(PICTURES[0]), load(same).encode(PICTURES[0]))
    assert not np.array_equal(load(path).encode(PICTURES[0]), load(wide[0]).encode(PICTURES[0]))


@pytest.mark.parametrize("name", sorted(QUANTISED - set(WORST)))
def test_types_that_are_only_read(wide, tmp_path, name):
    """Any bytes give what the package's dequantiser gives, NaN where it does."""
    kind = TYPES[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (512, 256 // block * size), np.uint8)

    def changed(stored, data, old):
        return (stored, raw, kind) if stored == "v.blk.0.ffn_up.weight" else (stored, data, old)

    checkpoint = GgufCheckpoint(rewritten(wide[1], tmp_path / "x.gguf", tensors=changed))
    found = checkpoint.read("visual.blocks.0.mlp.fc1.weight").numpy()
    with np.errstate(all="ignore"):
        assert np.array_equal(found, dequantize(raw, kind), equal_nan=True)


def test_float_tensors_are_mapped(files):
    checkpoint = GgufCheckpoint(files("qwen3_vl")[1])
    found = checkpoint.read("visual.blocks.0.mlp.linear_fc1.weight").numpy()
    assert np.shares_memory(found, checkpoint._map)


def test_old_qwen_files(files, tmp_path):
    """`ffn_up` and `ffn_down` swapped, no `feed_forward_length`, a placeholder for positions: as clip.cpp has it."""
    swap = {"ffn_up": "ffn_xx", "ffn_down": "ffn_up", "ffn_xx": "ffn_down"}

    def old(name, data, kind):
        for before, after in swap.items():
            if f".{before}." in name:
                return name.replace(before, after if after != "ffn_xx" else "ffn_down"), data, kind
        return name, data, kind

    directory, path = files("qwen2_vl")
    keys = {
        "clip.vision.feed_forward_length": 0,
        "general.type": None,
        "clip.vision.spatial_merge_size": None,
    }
    changed = rewritten(path, tmp_path / "old.gguf", keys, old)
    assert "ffn_up" in {t.name.split(".")[3] for t in gguf.GGUFReader(changed).tensors if "blk" in t.name}
    assert_same(load(changed), load(directory))


def test_the_placeholder_of_old_qwen_files(files, tmp_path):
    directory, path = files("qwen2_vl")
    more = {
        "v.position_embd.weight": np.zeros((10, 10), np.float32),
        "a.conv1d.0.bias": np.zeros(3, np.float32),
    }
    assert_same(load(rewritten(path, tmp_path / "old.gguf", more=more)), load(directory))
    more = {"v.class_embd": np.zeros(48, np.float32)}
    with pytest.raises(WeightsError, match="v.class_embd.*qwen2vl_merger has no such tensor"):
        load(rewritten(path, tmp_path / "new.gguf", more=more))


def test_deepstack_without_its_key(files, tmp_path):
    path = rewritten(files("qwen3_vl")[1], tmp_path / "x.gguf", {"clip.vision.is_deepstack_layers": None})
    assert load(path).config.deepstack_layers == (0, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_deleted(files, tmp_path, family):
    """It is refused by name, or it has a documented meaning: the released one."""
    path = files(family)[1]
    meaning = set()
    for key in keys_of(path):
        if key == "general.architecture":
            continue
        changed = rewritten(path, tmp_path / "x.gguf", {key: None})
        try:
            load(changed)
            meaning.add(key)
        except MoonvitError as error:
            assert key in str(error) or "silu" in key or "gelu" in key, key
    limits = {"clip.vision.image_min_pixels", "clip.vision.image_max_pixels"}
    free = {"general.type", "general.file_type", "clip.has_vision_encoder", "clip.vision.image_size"}
    ours = {
        "kimi_vl": set(),
        "kimi_k25": limits | {"vision.pos_emb_height", "vision.pos_emb_width", "vision.pos_emb_time"},
        "qwen2_vl": limits | {"clip.vision.spatial_merge_size", "clip.vision.feed_forward_length", "clip.use_gelu", "clip.use_silu"},
        "qwen2_5_vl": {"clip.vision.spatial_merge_size", "clip.vision.feed_forward_length", "clip.use_gelu", "clip.use_silu"},
        "qwen3_vl": limits | {"clip.vision.spatial_merge_size", "clip.use_gelu", "clip.use_silu", "clip.vision.is_deepstack_layers"},
    }  # fmt: skip
    assert meaning == free | ours.get(family, ours["kimi_k25"])


@pytest.mark.parametrize("family", KIMI_LIMITS)
def test_released_limits_where_the_file_says_none(files, tmp_path, family):
    changed = rewritten(files(family)[1], tmp_path / "x.gguf", {"clip.vision.image_max_pixels": None})
    assert load(changed).processor.config.in_patch_limit == {"kimi_vl": 4096, "kimi_k25": 16384}.get(
        family, 65536
    )


@pytest.mark.parametrize("family", ["kimi_k25", "qwen3_vl"])
def test_back_to_a_checkpoint(files, tmp_path, family):
    """`export` of a mmproj file is the checkpoint that it was made of."""
    directory, path = files(family)
    export(GgufCheckpoint(path), tmp_path / "half")
    assert_same(load(tmp_path / "half"), load(directory))
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert found.keys() == load_file(directory / "model.safetensors").keys()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["model_type"] == family


def test_another_epsilon_of_qwen_is_refused(files, tmp_path):
    key = "clip.vision.attention.layer_norm_epsilon"
    path = rewritten(files("qwen2_vl")[1], tmp_path / "x.gguf", {key: 1e-5})
    with pytest.raises(ConfigError, match=f"{key} is 1e-05, expected 1e-06"):
        load(path)


def test_another_window_is_read(files, tmp_path):
    path = rewritten(files("qwen2_5_vl")[1], tmp_path / "x.gguf", {"clip.vision.window_size": 56})
    assert load(path).config.window_cells == 2

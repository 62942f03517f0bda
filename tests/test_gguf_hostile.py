"""Damaged and hostile mmproj files: one clear error each, no crash, no memory by what a file states."""

import random
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import IMAGES
from gguf_helpers import make, rewritten
from moonvit.cli import group, one_line
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError, MoonvitError, TokenizerError, WeightsError
from moonvit.mmproj import export_gguf
from moonvit.prompt import PromptFormat
from moonvit.weights.gguf import GgufCheckpoint
from moonvit.weights.gguf_header import HEADER_LIMIT, parse_gguf
from moonvit.weights.source import local_checkpoint

PICTURE = IMAGES / "rgba_120x90.png"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    path = root / "mmproj.gguf"
    export_gguf(local_checkpoint(make(root / "m", "kimi_k25")), path)
    return path


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name, kind=8, value=None):
    return text(name) + struct.pack("<I", kind) + (text("clip") if value is None else value)


def tensor(name="v.x", sides=(4,), kind=0, offset=0, dims=None):
    return (
        text(name)
        + struct.pack("<I", len(sides) if dims is None else dims)
        + struct.pack(f"<{len(sides)}Q", *sides)
        + struct.pack("<IQ", kind, offset)
    )


CLIP = key("general.architecture")


def file(keys=(CLIP,), tensors=(), data=b"", counts=None, version=3, magic=b"GGUF"):
    head = magic + struct.pack("<I", version)
    head += struct.pack("<QQ", *(counts or (len(tensors), len(keys)))) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


BAD = {
    "empty": (b"", "is empty"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "magic alone": (b"GGUF", "4 bytes stated, 0 are left"),
    "version 1": (file(version=1), "version 1, expected 2 or 3"),
    "version 4": (file(version=4), "version 4"),
    "big-endian": (file(version=0x03000000), "big-endian"),
    "2^60 tensors": (file(counts=(2**60, 1)), f"{2**60} tensors, the limit"),
    "2^60 keys": (file(counts=(0, 2**60)), f"{2**60} keys, the limit"),
    "more keys than there are": (file(counts=(0, 60000)), "is there twice"),
    "a name of 2^60 bytes": (file([struct.pack("<Q", 2**60)]), "bytes of a key's name, the limit"),
    "a name past the end": (file([struct.pack("<Q", 90000)]), "90000 bytes stated"),
    "a name of no text": (file([struct.pack("<Q", 2) + b"\xff\xfe"]), "not UTF-8"),
    "an array of 2^60": (file([CLIP, key("a", 9, struct.pack("<IQ", 4, 2**60))]), "values of key \"a\", the limit"),
    "an array past the end": (file([CLIP, key("a", 9, struct.pack("<IQ", 10, 60000))]), "480000 bytes stated"),
    "an array of arrays": (file([CLIP, key("a", 9, struct.pack("<IQ", 9, 3))]), "unknown type of value 9"),
    "an unknown kind of value": (file([key("a", 77, b"")]), "unknown type of value 77"),
    "a key twice": (file([CLIP, CLIP]), "is there twice"),
    "a text model": (file([key("general.architecture", 8, text("llama"))]), "expected \"clip\".*mmproj"),
    "no architecture": (file([key("a", 4, bytes(4))]), "general.architecture is missing"),
    "one of several": (file([CLIP, key("split.count", 2, b"\x03\x00")]), "one part of several"),
    "no projector": (file(), "field 'clip.projector_type' is missing"),
    "no vision": (file([CLIP, key("clip.has_vision_encoder", 7, b"\0")]), "has_vision_encoder' is False, expected true"),
    "a foreign projector": (file([CLIP, key("clip.projector_type", 8, text("pixtral"))]), "is \"pixtral\", expected"),
    "a projector of lists": (file([CLIP, key("clip.projector_type", 9, struct.pack("<IQ", 4, 0))]), "expected"),
    "no dimensions": (file(tensors=[tensor(sides=())]), "0 dimensions"),
    "2^31 dimensions": (file(tensors=[tensor(dims=2**31)]), "2147483648 dimensions"),
    "a side of 2^63": (file(tensors=[tensor(sides=(2**63,))]), "shape"),
    "a product that wraps": (file(tensors=[tensor(sides=(2**32, 2**32))]), "shape"),
    "a side of nothing": (file(tensors=[tensor(sides=(4, 0))]), "shape"),
    "a petabyte": (file(tensors=[tensor(sides=(2**40, 256))]), "bytes missing"),
    "an unknown type": (file(tensors=[tensor(kind=99)]), "unknown type of tensor 99"),
    "a row of no whole blocks": (file(tensors=[tensor(sides=(33,), kind=8)]), "no multiple of Q8_0's 32"),
    "an offset far away": (file(tensors=[tensor(offset=2**62)]), "leaves a gap"),
    "an offset of 2^64-1": (file(tensors=[tensor(offset=2**64 - 1)]), "leaves a gap"),
    "an offset unaligned": (file(tensors=[tensor(offset=16)], data=bytes(64)), "leaves a gap"),
    "two on the same bytes": (file(tensors=[tensor(), tensor("v.y")], data=bytes(64)), "overlaps"),
    "a tensor twice": (file(tensors=[tensor(), tensor(offset=32)], data=bytes(64)), "is there twice"),
    "cut data": (file(tensors=[tensor()], data=bytes(15)), "1 bytes missing"),
    "bytes to spare": (file(tensors=[tensor()], data=bytes(33)), "1 bytes to spare"),
    "alignment 0": (file([CLIP, key("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "alignment 3": (file([CLIP, key("general.alignment", 4, b"\x03\0\0\0")]), "general.alignment is 3"),
    "alignment 2^31": (file([CLIP, key("general.alignment", 4, b"\0\0\0\x80")]), "general.alignment"),
    "alignment as text": (file([CLIP, key("general.alignment", 8, text("32"))]), "general.alignment"),
    "a header without end": (file([CLIP, *(key(f"k{n}", 8, text("x" * 2**20)) for n in range(5))]), "header of more"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file(tmp_path, name):
    """By library and command line alike, at once and within a few megabytes."""
    data, message = BAD[name]
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(MoonvitError, match=message) as caught:
        Encoder.from_pretrained(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * HEADER_LIMIT
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    done = CliRunner().invoke(group, ["info", str(path)])
    assert isinstance(done.exception, MoonvitError)


def changed(path, target, **changes):
    """The file with keys such as embedding_length changed."""
    return rewritten(path, target, {f"clip.vision.{name}": value for name, value in changes.items()})


WRONG = {
    "embedding_length": [0, 2**32 - 1, 70, "72"],
    "block_count": [0, 4, 2, 2**31],
    "attention.head_count": [0, 5, 7, 1000000],
    "feed_forward_length": [0, 159, 2**31],
    "projection_dim": [0, 41],
    "patch_size": [0, 15, 4096],
    "projector.scale_factor": [0, 1, 3],
    "attention.layer_norm_epsilon": [0.0, -1e-5, float("nan"), float("inf"), 5.0],
    "image_mean": [[0.5], [0.5, 0.5, float("nan")], [0.5] * 4],
    "image_std": [[0.0] * 3, ["a"] * 3],
    "image_max_pixels": [0, 197],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_key(good, tmp_path, name):
    for value in WRONG[name]:
        path = good.with_name("wrong.gguf")
        source = rewritten(good, path, {f"clip.vision.{name}": None})
        target = changed(source, tmp_path / "x.gguf", **{name: value})
        with pytest.raises(MoonvitError) as caught:
            Encoder.from_pretrained(target)
        assert len(str(caught.value).splitlines()) < 80
        told = CliRunner().invoke(group, ["info", str(target)])
        assert told.exit_code == 1


def test_every_tensor_missing_or_misshapen(good, tmp_path):
    """All faults in one message, by their names."""

    def spoiled(name, data, kind):
        if name == "v.blk.1.ln1.weight":
            return None
        if name in ("v.blk.0.attn_qkv.weight", "mm.1.weight"):
            return name, data[:-1], kind
        if name == "v.post_ln.bias":
            return name, data.astype(np.int32), None
        return ("v.blk.9.ln2.bias" if name == "v.blk.2.ln2.bias" else name), data, kind

    path = rewritten(good, tmp_path / "x.gguf", tensors=spoiled)
    with pytest.raises(WeightsError) as caught:
        Encoder.from_pretrained(path)
    faults = "\n".join(caught.value.faults)
    for words in (
        "blocks.0.wqkv.weight: v.blk.0.attn_qkv.weight: 215 rows, expected a multiple of 12 for each head",
        "blocks.1.norm0.weight: missing, expected shape [72]",
        "blocks.2.norm1.bias: missing",
        "final_layernorm.bias: type I32 in x.gguf, expected one of",
        "mm_projector.proj.0.weight: shape [287, 288] in x.gguf, expected [288, 288]",
        "v.blk.9.ln2.bias: in x.gguf, but this geometry has no such tensor",
    ):
        assert words in faults, faults
    assert len(caught.value.faults) == 6
    told = cli("verify", path)
    assert told.exit_code == 1
    assert "type I32" in told.stdout
    with pytest.raises(WeightsError, match="type I32, expected one of BF16"):
        GgufCheckpoint(path).read("vision_tower.encoder.final_layernorm.bias")


def opened(data, path):
    """Whether it loads; any error but ours is a failure."""
    path.write_bytes(data)
    try:
        encoder = Encoder.from_pretrained(path, dtype="float32")
        encoder.encode(torch.zeros(3, 28, 28), layout="CHW")
        return True
    except MoonvitError as error:
        assert len(str(error)) < 100_000
        return False


def test_cut_anywhere(good, tmp_path):
    data = good.read_bytes()
    for size in [*range(0, 4000, 61), *range(4000, len(data), 50021), len(data) - 1]:
        assert not opened(data[:size], tmp_path / "x.gguf"), size


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), wild=st.booleans())
def test_bytes_of_the_header_changed(good, tmp_path_factory, seed, count, wild):
    """Loads, or says what is wrong, whatever a few bytes of the header become."""
    rng, data = random.Random(seed), bytearray(good.read_bytes())
    for _ in range(count):
        place = rng.randrange(4, 4800)
        data[place] = rng.choice([0, 1, 8, 255]) if wild else rng.randrange(256)
    opened(bytes(data), tmp_path_factory.getbasetemp() / "mutant.gguf")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes(data):
    for start in (b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0\x02" + bytes(7) + b"\x02" + bytes(7)):
        with pytest.raises(WeightsError):
            parse_gguf(start + data, "x.gguf")


def cli(*words):
    return CliRunner().invoke(group, [str(word) for word in words])


def test_the_command_line(good, tmp_path):
    """Every verb takes the file where it takes a checkpoint."""
    for words in (
        ["encode", PICTURE, "--model", good, "-o", tmp_path / "e.safetensors"],
        ["info", good],
        ["count", PICTURE, "--model", good],
        ["verify", good],
        ["export", good, "-o", tmp_path / "half"],
        ["trace", PICTURE, "--model", good, "-o", tmp_path / "t.safetensors"],
        ["export", tmp_path / "half", "-o", tmp_path / "again.gguf"],
    ):
        done = cli(*words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    assert (tmp_path / "again.gguf").read_bytes() == good.read_bytes()
    told = cli("info", good).stdout
    assert '"kimi_k25"' in told
    assert "F32" in told
    assert "complete" in told


REFUSALS = {
    "none.gguf: no such file": ["info", "none.gguf"],
    "name the file: mmproj-x.gguf": ["info", "folder"],
    "exists already": ["export", "folder/mmproj-x.gguf", "-o", "folder/mmproj-x.gguf"],
    "--experimental is for -o x.gguf": ["export", "folder/mmproj-x.gguf", "-o", "d", "--experimental"],
    "is a mmproj file, which has no tokenizer": ["prompt", "folder/mmproj-x.gguf", "What is this?"],
    "no place in a mmproj file": ["export", "folder/mmproj-x.gguf", "-o", "d.gguf", "--dtype", "float64"],
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_of_the_command_line(good, tmp_path, monkeypatch, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mmproj-x.gguf").write_bytes(good.read_bytes())
    monkeypatch.chdir(tmp_path)
    done = cli(*REFUSALS[message])
    assert isinstance(done.exception, MoonvitError)
    assert message in one_line(done.exception)


def test_there_is_no_tokenizer(good):
    with pytest.raises(TokenizerError, match="is a mmproj file, which has no tokenizer"):
        PromptFormat.open(good)


def test_one_line_and_exit_code(tmp_path):
    (tmp_path / "x.gguf").write_bytes(BAD["2^60 tensors"][0])
    words = [sys.executable, "-m", "moonvit", "encode", str(PICTURE), "--model", str(tmp_path / "x.gguf")]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert "the limit is 65536" in run.stderr


def test_an_encoder_can_be_copied(good):
    import pickle

    checkpoint = pickle.loads(pickle.dumps(GgufCheckpoint(good)))
    assert torch.equal(
        checkpoint.read("mm_projector.proj.0.bias"), GgufCheckpoint(good).read("mm_projector.proj.0.bias")
    )


def test_values_that_are_not_finite_are_found(good, tmp_path):
    def spoiled(name, data, kind):
        return name, np.where(data == data.max(), np.nan, data).astype(data.dtype), kind

    done = cli("verify", rewritten(good, tmp_path / "x.gguf", tensors=spoiled))
    assert done.exit_code == 1
    assert "values are NaN or infinite" in done.output


def test_a_config_error_names_the_key(good, tmp_path):
    with pytest.raises(ConfigError, match=r"x\.gguf: field 'clip\.vision\.block_count' is 1000000"):
        Encoder.from_pretrained(changed(good, tmp_path / "x.gguf", block_count=1000000))

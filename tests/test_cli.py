"""The command line as a user meets it: real processes, stdout for data, stderr for talk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moonvit
from conftest import IMAGES, TINY
from moonvit.cli.sources import expand
from moonvit.encoder import Encoder
from moonvit.weights.checkpoint import LocalCheckpoint

PHOTO = str(IMAGES / "photo_130x80.jpg")
WIDE = str(IMAGES / "rgb_300x200.png")


def moonvit_cli(*arguments, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "moonvit", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | environment,
    )


def test_help_and_version():
    done = moonvit_cli("--help")
    assert done.returncode == 0
    for verb in ("encode", "info", "count", "make-checkpoint", "doctor"):
        assert verb in done.stdout
    assert moonvit.__version__ in moonvit_cli("--version").stdout


def test_encode_writes_embeddings_and_where_they_came_from(tmp_path):
    output = tmp_path / "out.safetensors"
    done = moonvit_cli("encode", PHOTO, WIDE, "--model", TINY, "-o", output, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "103 tokens" in done.stdout
    assert str(output) in done.stdout
    encoder = Encoder.from_pretrained(TINY, dtype="float32")
    tensors = load_file(output)
    assert sorted(tensors) == ["embeddings/0", "embeddings/1", "grid_thws", "sizes"]
    for number, path in enumerate((PHOTO, WIDE)):
        np.testing.assert_allclose(
            tensors[f"embeddings/{number}"], encoder.encode(path), rtol=1e-5, atol=1e-5
        )
    assert tensors["grid_thws"].tolist() == [[1, 6, 10], [1, 16, 22]]
    assert tensors["sizes"].tolist() == [[130, 80], [300, 200]]
    with safe_open(output, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["sources"]) == [PHOTO, WIDE]
    assert metadata["model"] == encoder.fingerprint
    assert float(metadata["norm_eps"]) == 2.0**-23
    assert (metadata["dtype"], metadata["version"]) == ("float32", moonvit.__version__)
    assert (metadata["exif"], metadata["failures"]) == ('"apply"', "[]")


def test_store_in_the_models_type(tmp_path):
    output = tmp_path / "out.safetensors"
    assert moonvit_cli("encode", PHOTO, "--model", TINY, "-o", output, "--store", "model").returncode == 0
    assert load_file(output)["embeddings/0"].dtype == torch.bfloat16


def test_json_is_the_only_thing_on_stdout():
    done = moonvit_cli("encode", PHOTO, "--model", TINY, "--format", "json", "--norm-eps", "1e-5")
    document = json.loads(done.stdout)
    assert document["images"][0]["tokens"] == 15
    assert document["images"][0]["shape"] == [15, 48]
    assert document["norm_eps"] == 1e-5
    assert done.stderr == ""


def test_quiet_says_nothing():
    done = moonvit_cli("encode", PHOTO, "--model", TINY, "--format", "quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_bad_picture_among_good_ones(tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    output = tmp_path / "out.safetensors"
    done = moonvit_cli(
        "encode", PHOTO, bad, WIDE, tmp_path / "gone.png", "--model", TINY, "-o", output, "--format", "json"
    )
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert [i["source"] for i in document["images"]] == [PHOTO, WIDE]
    assert [i["name"] for i in document["images"]] == ["embeddings/0", "embeddings/1"]
    assert [f["source"] for f in document["failures"]] == [str(bad), str(tmp_path / "gone.png")]
    assert len(done.stderr.splitlines()) == 2
    assert len(load_file(output)["sizes"]) == 2
    with safe_open(output, "pt") as file:
        assert len(json.loads(file.metadata()["failures"])) == 2


def test_nothing_but_bad_pictures(tmp_path):
    output = tmp_path / "out.safetensors"
    done = moonvit_cli("encode", tmp_path / "gone.png", "--model", TINY, "-o", output)
    assert done.returncode == 1
    assert load_file(output)["grid_thws"].shape == (0, 3)


def test_directories_and_patterns(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.png", "a.JPG", "sub/c.png", "notes.txt", "odd[1].png", ".hidden.png"):
        (tmp_path / name).write_bytes(b"x")
    names = [os.path.relpath(p, tmp_path) for p in expand([str(tmp_path)])]
    assert names == ["a.JPG", "b.png", "odd[1].png", "sub/c.png"]
    assert expand([f"{tmp_path}/*.png"]) == [f"{tmp_path}/b.png", f"{tmp_path}/odd[1].png"]
    assert expand([f"{tmp_path}/**/c.png"]) == [f"{tmp_path}/sub/c.png"]
    assert expand([f"{tmp_path}/odd[1].png"]) == [f"{tmp_path}/odd[1].png"]
    assert expand(["nothing*.png", "gone.png"]) == ["nothing*.png", "gone.png"]


def test_directory_without_pictures(tmp_path):
    done = moonvit_cli("encode", tmp_path, "--model", TINY)
    assert done.returncode == 1
    assert "is a directory" in done.stderr
    assert "find those that end in .jpg" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["encode"], 2, "Missing argument"),
        (["encode", PHOTO], 2, "--model"),
        (["encode", PHOTO, "--model", "nowhere/at/all"], 1, "nowhere/at/all"),
        (["encode", PHOTO, "--model", TINY, "--dtype", "int8"], 2, "int8"),
        (["encode", PHOTO, "--model", TINY, "--max-tokens", "0"], 2, "max-tokens"),
        (["encode", PHOTO, "--model", TINY, "--norm-eps", "-1"], 1, "norm_eps is -1.0"),
        (["encode", PHOTO, "--model", TINY, "--device", "toaster"], 1, "toaster"),
        (["encode", PHOTO, "--model", TINY, "-o", "/proc/nothing/out"], 1, "nothing"),
        (["encode", PHOTO, "--model", TINY, "--max-pixels", "5"], 1, "limit is 5"),
        (["frobnicate"], 2, "No such command"),
        (["count", "gone.png"], 1, "gone.png: no such file"),
        (["count", PHOTO, "--model", "nowhere"], 1, "nowhere"),
        (["info", "nowhere/at/all"], 1, "nowhere/at/all"),
        (["make-checkpoint", TINY], 1, "exists already"),
        (["make-checkpoint", "x", "--preset", "huge"], 2, "huge"),
    ],
    ids=str,
)
def test_errors_are_one_line_on_stderr(arguments, code, message, tmp_path):
    done = moonvit_cli(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("error: ")


def test_debug_shows_the_traceback():
    done = moonvit_cli("info", "nowhere/at/all", MOONVIT_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_count_agrees_with_encode():
    done = moonvit_cli("count", PHOTO, WIDE, "--format", "json")
    assert [i["tokens"] for i in json.loads(done.stdout)["images"]] == [15, 88]
    done = moonvit_cli("count", PHOTO, WIDE, "--max-tokens", "9", "--model", TINY)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].split()[-1] == "total"


def test_info_of_a_good_and_a_bad_checkpoint(tiny_copy):
    done = moonvit_cli("info", tiny_copy, "--format", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["faults"] == []
    assert document["tensors"] == {"found": 24, "expected": 24}
    assert document["geometry"]["head_dim"] == 32
    assert {s["file"] for s in document["shards"]} == {f"model-0000{n}-of-000003.safetensors" for n in (2, 3)}
    (tiny_copy / "model-00003-of-000003.safetensors").unlink()
    (tiny_copy / "preprocessor_config.json").write_text("{}")
    done = moonvit_cli("info", tiny_copy)
    assert done.returncode == 1
    assert "fault: model-00003-of-000003.safetensors: no such file" in done.stdout
    assert "media_proc_cfg" in done.stdout


def test_many_faults_stay_one_line(tiny_copy):
    for name in tiny_copy.glob("*.safetensors"):
        name.unlink()
    index = tiny_copy / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"vision_tower.x": "model.safetensors"}}')
    shutil.copy(TINY / "model-00003-of-000003.safetensors", tiny_copy / "model.safetensors")
    done = moonvit_cli("encode", PHOTO, "--model", tiny_copy)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "more" in done.stderr
    assert "moonvit info" in done.stderr


def test_made_checkpoints_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        assert (
            moonvit_cli("make-checkpoint", tmp_path / name, "--preset", "tiny", "--seed", 5).returncode == 0
        )
    assert moonvit_cli("make-checkpoint", tmp_path / "c", "--preset", "tiny", "--seed", 6).returncode == 0
    a, b, c = (Encoder.from_pretrained(tmp_path / name).fingerprint for name in "abc")
    assert a == b
    assert a != c
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_doctor():
    document = json.loads(moonvit_cli("doctor", "--format", "json").stdout)
    assert document["versions"]["torch"] == torch.__version__
    assert document["processor"]["threads"] >= 1
    assert set(document["codecs"]) >= {"jpg", "webp", "zlib"}
    assert "moonvit" in moonvit_cli("doctor").stdout


def test_options_reach_the_pictures(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (280, 56)).save(tmp_path / "turned.png", exif=exif)
    for verb in ("count", "encode"):
        more = ["--model", TINY, "--format", "json"]
        sizes, tokens = [], []
        for options in ([], ["--exif", "ignore"], ["--max-tokens", "4"]):
            row = json.loads(moonvit_cli(verb, tmp_path / "turned.png", *more, *options).stdout)["images"][0]
            sizes.append(row["size"])
            tokens.append(row["tokens"])
        assert sizes == [[56, 280], [280, 56], [56, 280]]
        assert tokens[:2] == [20, 20]
        assert tokens[2] <= 4


def test_epsilon_and_exif_are_recorded(tmp_path):
    output = tmp_path / "out.safetensors"
    moonvit_cli("encode", PHOTO, "--model", TINY, "-o", output, "--norm-eps", "1e-5", "--exif", "ignore")
    with safe_open(output, "pt") as file:
        assert float(file.metadata()["norm_eps"]) == 1e-5
        assert file.metadata()["exif"] == '"ignore"'


def test_one_picture_that_overflows(tmp_path):
    """Reported by name; the others are done."""
    source = LocalCheckpoint(TINY)
    tensors = {name: source.read(name).clone() for name in source.tensors}
    tensors["vision_tower.patch_embed.proj.weight"].fill_(400)
    directory = tmp_path / "m"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(TINY / name, directory / name)
    for name, level in (("grey", 128), ("white", 255)):
        Image.new("L", (56, 56), level).save(tmp_path / f"{name}.png")
    words = [tmp_path / f"{name}.png" for name in ("grey", "white", "grey")]
    output = tmp_path / "out.safetensors"
    done = moonvit_cli(
        "encode", *words, "--model", directory, "--dtype", "float16", "-o", output, "--format", "json"
    )
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert [Path(i["source"]).name for i in document["images"]] == ["grey.png", "grey.png"]
    assert [Path(f["source"]).name for f in document["failures"]] == ["white.png"]
    assert "white.png" in done.stderr
    assert sorted(load_file(output)) == ["embeddings/0", "embeddings/1", "grid_thws", "sizes"]


def test_output_must_be_a_place_for_a_file(tmp_path):
    shutil.copy(PHOTO, tmp_path / "a.jpg")
    before = (tmp_path / "a.jpg").read_bytes()
    done = moonvit_cli("encode", tmp_path / "a.jpg", "--model", TINY, "-o", tmp_path / "a.jpg")
    assert done.returncode == 2
    assert (tmp_path / "a.jpg").read_bytes() == before
    os.mkfifo(tmp_path / "pipe")
    done = moonvit_cli("encode", PHOTO, "--model", TINY, "-o", tmp_path / "pipe")
    assert done.returncode == 1
    assert "no regular file" in done.stderr
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert moonvit_cli("encode", PHOTO, "--model", TINY, "-o", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert "embeddings/0" in load_file(tmp_path / "real")


def test_odd_arguments_spoil_nothing(tmp_path):
    shutil.copy(PHOTO, tmp_path / "a.jpg")
    done = moonvit_cli("count", "", "x" * 300 + ".png", "a.jpg", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.split()[0] == "15"
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_nothing_behind(tmp_path, number):
    words = [sys.executable, "-m", "moonvit", "make-checkpoint", str(tmp_path / "big")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".big.*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.strip() == "error: interrupted"
    assert not list(tmp_path.iterdir())


def test_pipe_closed_early():
    script = f"{sys.executable} -m moonvit count {' '.join([PHOTO] * 50)} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr

"""What engines get: read back as they read it, and refused before anything is written."""

import base64
import io
import json
import os
import stat
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import parity_helpers as helpers
from moonvit.encoder import Encoder
from moonvit.errors import MoonvitError, PromptError
from moonvit.payloads import sglang_image, vllm_images, vllm_prompt
from moonvit.prompt.embeds import PromptEmbeds
from prompt_helpers import PHOTO, WIDE, build, run, write_tokenizer
from test_video import make_video

REPO = "org/k3-tiny"
TABLE = "language_model.model.embed_tokens.weight"


# Payloads


def read_for_vllm(text):
    """As `safe_load_prompt_embeds` reads it."""
    data = io.BytesIO(base64.b64decode(text, validate=True))
    return torch.load(data, weights_only=True, map_location=torch.device("cpu"))


def test_vllm_reads_the_prompt_back(k3_text, tmp_path):
    plain, payload = tmp_path / "plain.safetensors", tmp_path / "vllm.json"
    assert run(k3_text, "What?", PHOTO, "-o", plain).exit_code == 0
    assert run(k3_text, "What?", PHOTO, "-o", payload, "--payload", "vllm-prompt").exit_code == 0
    document = json.loads(payload.read_text())
    assert list(document) == ["prompt_embeds"]
    tensor = read_for_vllm(document["prompt_embeds"])
    assert tensor.ndim == 2
    assert torch.equal(tensor, load_file(plain)["inputs_embeds"])


def test_a_view_is_written_alone(k3_text):
    _, _, embeds = build(k3_text, [PHOTO])
    whole = vllm_prompt(embeds)["prompt_embeds"]
    wide = torch.zeros(len(embeds.prompt.ids), 4800, dtype=embeds.inputs_embeds.dtype)
    wide[:, :48] = embeds.inputs_embeds
    view = PromptEmbeds(**{**vars(embeds), "inputs_embeds": wide[:, :48]})
    assert len(vllm_prompt(view)["prompt_embeds"]) == len(whole)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_vllm_image_embeds(family, qwen_text, tmp_path):
    """What vLLM's `_merge_embeds` makes of the parts: rows one behind the other, grids stacked, then split."""
    directory = qwen_text(family)
    encoder, _, embeds = build(directory, [PHOTO, WIDE])
    parts = vllm_images(embeds)
    assert [part["type"] for part in parts] == ["image_embeds"] * 2
    rows = torch.cat([read_for_vllm(part["image_embeds"]["image_embeds"]) for part in parts])
    grids = torch.stack([read_for_vllm(part["image_embeds"]["image_grid_thw"]) for part in parts])
    features = encoder.features(encoder.processor([PHOTO, WIDE]))
    assert grids.tolist() == encoder.processor([PHOTO, WIDE]).grid_thws.tolist()
    sizes = (grids.prod(-1) // 4).tolist()
    assert [len(part) for part in rows.split(sizes)] == [len(part) for part in features.embeddings]
    levels = len(features.deepstack)
    main, deep = rows.split([40, 40 * levels], dim=-1)
    torch.testing.assert_close(main, torch.cat(features.embeddings), rtol=1e-5, atol=1e-5)
    for level, expected in zip(deep.split(40, dim=-1) if levels else [], features.deepstack, strict=True):
        torch.testing.assert_close(level, torch.cat(expected), rtol=1e-5, atol=1e-5)
    output = tmp_path / "parts.json"
    done = run(
        directory, "What?", PHOTO, WIDE, "-o", output, "--payload", "vllm-images", "--dtype", "float32"
    )
    assert done.exit_code == 0, done.output
    assert len(json.loads(output.read_text())) == 2


def test_sglang_item(qwen_text, k3_text, tmp_path):
    encoder, _, embeds = build(qwen_text("qwen3_vl"), [PHOTO, WIDE])
    item = sglang_image(embeds)
    assert item["format"] == "precomputed_embedding"
    assert item["image_grid_thw"].tolist() == encoder.processor([PHOTO, WIDE]).grid_thws.tolist()
    assert item["feature"].shape == (sum(map(len, embeds.embeddings)), 40 * 3)
    assert torch.equal(item["feature"][:, :40], torch.cat(embeds.embeddings))
    output = tmp_path / "sglang.safetensors"
    assert run(k3_text, "What?", PHOTO, "-o", output, "--payload", "sglang").exit_code == 0
    tensors = load_file(output)
    assert set(tensors) == {"feature", "image_grid_thw", "input_ids"}
    assert tensors["input_ids"].tolist().count(266) == len(tensors["feature"]) == 15


def test_kimi_vl_in_sglang(tmp_path):
    helpers.kimi_vl_pair(tmp_path)
    write_tokenizer(tmp_path, "kimi_vl")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, TABLE: torch.randn(600, 40)}, tmp_path / "model.safetensors")
    _, _, embeds = build(tmp_path, [PHOTO, WIDE])
    assert sglang_image(embeds)["image_grid_hws"].tolist() == embeds.grids[:, 1:].tolist()
    assert embeds.grids[:, 0].tolist() == [1, 1]
    coarse = PromptEmbeds(**{**vars(embeds), "merge_size": 1})
    with pytest.raises(PromptError, match="picture 0: .* its grid"):
        sglang_image(coarse)


@pytest.mark.parametrize(
    ("family", "payload", "media", "message"),
    [
        (
            "k3",
            "vllm-images",
            [PHOTO],
            "kimi_k3: vLLM takes image_embeds for the Qwen families only (use the payload vllm-prompt)",
        ),
        ("k3", "sglang", [], "sglang: the prompt has no pictures"),
        ("qwen2_vl", "vllm-prompt", [PHOTO], "qwen2_vl: prompt embeddings carry no 3-D positions"),
        ("qwen2_vl", "vllm-images", [], "vllm-images: the prompt has no pictures"),
        ("qwen2_vl", "vllm-images", [PHOTO, "clip.mp4"], "pictures only, the prompt has a video"),
        ("qwen3_vl", "sglang", ["clip.mp4"], "pictures only, the prompt has a video"),
    ],
)
def test_payloads_refused_before_any_work(
    family, payload, media, message, k3_text, qwen_text, tmp_path, monkeypatch
):
    directory = k3_text if family == "k3" else qwen_text(family)
    media = [make_video(tmp_path / name) if name == "clip.mp4" else name for name in media]
    monkeypatch.setattr(Encoder, "from_pretrained", None)
    done = run(directory, "Hi", *media, "-o", tmp_path / "out", "--payload", payload)
    assert isinstance(done.exception, PromptError)
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("payload", ["safetensors", "vllm-prompt", "sglang"])
def test_where_nothing_can_be_written(payload, k3_text, tmp_path, monkeypatch):
    """A device or pipe is not replaced by a file, and the tower is not loaded in vain."""
    monkeypatch.setattr(Encoder, "from_pretrained", None)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for name, message in (
        ("pipe", "is no regular file"),
        ("file/out", "is no directory"),
        ("a" * 300, "cannot be written"),
        ("link", "cannot be written"),
    ):
        done = run(k3_text, "Hi", PHOTO, "-o", tmp_path / name, "--payload", payload)
        assert isinstance(done.exception, MoonvitError), (name, done.output)
        assert message in str(done.exception)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    done = run(k3_text, "Hi", PHOTO, "-o", tmp_path / "out", "--payload", payload)
    assert "no permission in" in str(done.exception)
    own = k3_text / "tiktoken.model"
    before = own.read_bytes()
    done = run(k3_text, "Hi", PHOTO, "-o", own, "--payload", payload)
    assert done.exit_code == 2
    assert "is a file of the checkpoint" in done.output
    assert own.read_bytes() == before


@pytest.mark.parametrize("payload", ["safetensors", "vllm-prompt", "sglang"])
def test_missing_directories_are_made(payload, k3_text, tmp_path):
    output = tmp_path / "a" / "b" / "out"
    for _ in range(2):  # the second time over the first
        assert run(k3_text, "Hi", PHOTO, "-o", output, "--payload", payload).exit_code == 0
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_shapes_are_checked_before_writing(qwen_text):
    _, _, embeds = build(qwen_text("qwen3_vl"), [PHOTO, WIDE])
    fields = vars(embeds)

    def spoiled(**change):
        return PromptEmbeds(**{**fields, **change})

    rows = embeds.embeddings
    with pytest.raises(PromptError, match="2 slots, but 1 grids and 2 embeddings"):
        vllm_images(spoiled(grids=embeds.grids[:1]))
    with pytest.raises(PromptError, match=r"picture 1: \[.*, 40\] for .* pads, its grid"):
        vllm_images(spoiled(embeddings=[rows[0], rows[1][1:]]))
    with pytest.raises(PromptError, match="picture 0: .* its grid"):
        vllm_images(spoiled(grids=embeds.grids.flip(0)))
    with pytest.raises(PromptError, match="picture 0: "):
        sglang_image(spoiled(deepstack=[[level[0][:, :7], level[1]] for level in embeds.deepstack]))
    with pytest.raises(PromptError, match=r"inputs_embeds is \[.*\], the prompt has .* ids"):
        sglang_image(spoiled(inputs_embeds=embeds.inputs_embeds[1:]))
    slot = replace(embeds.prompt.slots[1], start=len(embeds.prompt.ids) - 1)
    beyond = replace(embeds.prompt, slots=(embeds.prompt.slots[0], slot))
    with pytest.raises(PromptError, match=f"slots lie beyond the {len(embeds.prompt.ids)} ids"):
        sglang_image(spoiled(prompt=beyond))
    with pytest.raises(PromptError, match="inputs_embeds is not finite"):
        sglang_image(spoiled(inputs_embeds=embeds.inputs_embeds / 0))
    with pytest.raises(PromptError, match="expected a floating type"):
        sglang_image(spoiled(inputs_embeds=embeds.inputs_embeds.long()))

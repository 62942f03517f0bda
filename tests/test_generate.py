"""Sampling, streaming, loading and refusals of `moonvit.engine`, and `moonvit generate`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import engine_helpers as helpers
from conftest import TINY
from hub_server import HubServer
from moonvit.cli import group
from moonvit.engine import Clip, Generator, Sampling
from moonvit.engine import library as library
from moonvit.engine.families import TEXT_FAMILIES
from moonvit.engine.media import Eyes
from moonvit.engine.sampling import Sampler, kept
from moonvit.engine.streaming import UNFINISHED, TextStream
from moonvit.errors import ConfigError, ImageError, MoonvitError, PromptError, TokenizerError, WeightsError
from moonvit.families import FAMILIES
from moonvit.prompt import Turn
from moonvit.weights.checkpoint import LocalCheckpoint

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


# Which token comes next


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_kept_tokens_are_those_of_transformers(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_V = torch.randn(100, generator=torch.Generator().manual_seed(3))
    expected = TemperatureLogitsWarper(temperature)(None, logits_V[None])
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    found = kept(logits_V, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(found, expected[0])


def test_choices_follow_the_probabilities():
    logits_V = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(Sampling(temperature=1.0, seed=5))
    counts = torch.bincount(torch.tensor([sampler.choose(logits_V) for _ in range(3000)]), minlength=3)
    assert torch.allclose(counts / 3000, logits_V.softmax(0), atol=0.03)
    assert Sampler(Sampling()).choose(logits_V) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1},
     {"max_new_tokens": 0}, {"stop": ("",)}],
)  # fmt: skip
def test_sampling_refuses(wrong):
    with pytest.raises(MoonvitError, match=next(iter(wrong))):
        Sampling(**wrong)


# Tokens into text


def as_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


@given(data=st.binary(max_size=40))
def test_streamed_bytes_are_the_whole_text(data):
    stream = TextStream(as_bytes)
    pieces = [stream.push(byte) for byte in data]
    assert "".join(pieces) + stream.finish() == as_bytes(data)


@given(text=st.text(max_size=12))
def test_no_half_characters(text):
    stream = TextStream(as_bytes)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text.removesuffix(UNFINISHED) or UNFINISHED in text
    assert UNFINISHED in text or not any(UNFINISHED in piece for piece in pieces)


@given(text=st.text("ab", max_size=14), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_stop(text, stop):
    stream = TextStream(as_bytes, stop)
    out = ""
    for byte in text.encode():
        out += stream.push(byte)
        if stream.stopped:
            break
    out += stream.finish()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stream.stopped == bool(ends)
    if ends:  # the stop that is whole first; of two at once, the longer
        first = min(ends)
        starts = [text.find(s) for s in stop if s in text and text.find(s) + len(s) == first]
        assert out == text[: min(starts)]
    else:
        assert out == text


# Ends of a reply


def test_ends(generator, monkeypatch):
    whole = generator.generate("what is this?", PICTURE, max_new_tokens=12)
    assert whole.finish == "length"
    assert len(whole.ids) == 12
    stop = whole.text[4:6]
    cut = generator.generate("what is this?", PICTURE, max_new_tokens=12, stop=(stop,))
    assert cut.finish == "stop"
    assert cut.text == whole.text[: whole.text.find(stop)]
    end = whole.ids[5]
    monkeypatch.setattr(generator.format, "end_ids", frozenset({end}))
    ended = generator.generate("what is this?", PICTURE, max_new_tokens=12)
    assert ended.finish == "end"
    assert ended.ids == whole.ids[: whole.ids.index(end) + 1]
    assert ended.text == generator.format.decode(ended.ids[:-1])
    assert set(ended.seconds) == {"pictures", "weights", "prefill", "decode"}


def test_a_stream_left_early_leaves_no_trace(generator):
    chat, other = generator.chat(), generator.chat()
    stream = chat.stream("what is this?", PICTURE, max_new_tokens=20)
    next(stream)
    stream.close()
    assert not chat.turns
    assert not chat.media
    assert (
        chat.ask("what?", PICTURE, max_new_tokens=6).ids == other.ask("what?", PICTURE, max_new_tokens=6).ids
    )


# Media


def test_a_picture_is_encoded_once(place, tmp_path):
    eyes = Generator.from_pretrained(place, dtype="float32").eyes
    generator = Generator(eyes, None, None)
    PICTURE.save(tmp_path / "a.png")
    first, second, other = generator.see([tmp_path / "a.png", PICTURE, helpers.picture(90, 60, 2)])
    assert first is second
    assert eyes.encoded == 2
    assert generator.see((tmp_path / "a.png").read_bytes())[0] is first
    assert generator.see([first, other]) == [first, other]
    assert eyes.encoded == 2
    small = Eyes(eyes.encoder, limit=other.nbytes)
    Generator(small, None, None).see([PICTURE, helpers.picture(90, 60, 2)])
    assert list(small.kept) == [other.key]


def test_a_video_file_is_encoded_once(generator, tmp_path):
    pytest.importorskip("av")
    from test_video import make_video

    path = make_video(tmp_path / "clip.mp4")
    (first,) = generator.see(str(path))
    encoded = generator.eyes.encoded
    assert generator.see(path)[0] is first
    assert generator.eyes.encoded == encoded
    assert first.tokens == sum(slot.length for slot in prompt_of(generator, first).slots)
    assert first.name == str(path)


def prompt_of(generator, *media):
    return generator.format.encode([Turn("user", tuple(item.part for item in media))])


# Only what is needed is read, and late


def test_text_weights_are_read_last(place, monkeypatch):
    read: list[tuple[int, int]] = []
    data = LocalCheckpoint.data
    monkeypatch.setattr(
        LocalCheckpoint, "data", lambda self, *span: read.append(span[1:]) or data(self, *span)
    )
    generator = Generator.from_pretrained(place, dtype="float32")
    header = generator.eyes.encoder.checkpoint.header("model.safetensors")
    entries = {(entry.start, entry.stop): name for name, entry in header.tensors.items()}
    stream = generator.stream("what is this?", PICTURE, max_new_tokens=2)
    names = [entries[span] for span in read]
    assert names
    assert all("visual." in name for name in names)
    assert not generator.text.loaded
    read.clear()
    next(stream)
    assert generator.text.loaded
    assert not any("visual." in entries[span] for span in read)


@pytest.mark.parametrize(
    ("text", "media", "how", "error", "match"),
    [
        ("what?", [b"no picture"], {}, ImageError, "bytes"),
        ("what?", ["absent.png"], {}, ImageError, r"absent\.png"),
        ("what?", ["absent.mp4"], {}, ImageError, r"absent\.mp4"),
        ("what? " * 900, [], {}, PromptError, r"do not fit into the model's 2048 \(max_position_embeddings\)"),
        ("what?", [PICTURE], {"max_new_tokens": 2040}, PromptError, r"lower max_new_tokens to \d+"),
        ("what?", [], {"warmth": 1}, MoonvitError, "no such option: warmth"),
        ("what?", [], {"thinking": True}, PromptError, "thinking"),
    ],
)  # fmt: skip
def test_refused_before_the_weights_are_read(place, text, media, how, error, match):
    generator = Generator.from_pretrained(place, dtype="float32")
    with pytest.raises(error, match=match) as caught:
        generator.stream(text, media, **how)
    assert "\n" not in str(caught.value)
    assert not generator.text.loaded


def test_counts_must_agree(generator):
    first, second = generator.see([PICTURE, helpers.picture(30, 300, 1)])
    prompt = prompt_of(generator, first)
    with pytest.raises(PromptError, match="1 slots in the prompt, but 2 embeddings"):
        generator.request(prompt, [first, second])
    with pytest.raises(PromptError, match="1 slots in the prompt, but 0 embeddings"):
        generator.request(prompt, [])
    with pytest.raises(
        PromptError, match=f"slot 0: {first.tokens} pads, but an embedding of {second.tokens}"
    ):
        generator.request(prompt, [second])
    more = generator.format.expand([generator.format.pad_id("image")], [first.tokens + 1])
    with pytest.raises(PromptError, match=f"{first.tokens + 1} pads, but an embedding of {first.tokens}"):
        generator.request(more, [first])


def test_a_typed_pad_is_text(generator):
    reply = generator.generate("<|image_pad|> what is this?", max_new_tokens=4)
    assert len(reply.ids) == 4
    assert generator.format.pad_id("image") not in prompt_ids(generator, "<|image_pad|>")


def prompt_ids(generator, text):
    return generator.format.encode([Turn("user", (text,))]).ids


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


# The command line and the page on it


def test_the_code_of_the_page(place, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "generate.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "M").symlink_to(place)
    PICTURE.save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec(code, space)
    assert capsys.readouterr().out
    assert len(space["chat"].turns) == 5
    assert space["generator"].eyes.encoded == 1


def test_help_needs_no_transformers():
    code = "import sys\nfrom moonvit.cli import group\n"
    code += (
        "group.main(['generate', '--help'], standalone_mode=False)\nassert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_error_is_one_line(place):
    words = [sys.executable, "-m", "moonvit", "generate", str(place), "what?", "absent.png"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: absent.png: no such file\n"


def call(*arguments, stdin=None):
    return CliRunner().invoke(group, ["generate", *map(str, arguments)], input=stdin)


def test_command(place, tmp_path, generator):
    PICTURE.save(tmp_path / "a.png")
    expected = generator.generate("what is this?", PICTURE, max_new_tokens=6)
    options = ("--dtype", "float32", "--max-new-tokens", 6)
    done = call(place, "what is this?", tmp_path / "a.png", *options)
    assert done.exit_code == 0, done.output
    assert done.stdout == expected.text + "\n"
    assert "6 written" in done.stderr
    done = call(place, "what is this?", tmp_path / "a.png", *options, "--format", "json")
    document = json.loads(done.stdout)
    assert document["family"] == "qwen2_vl"
    assert document["replies"][0]["ids"] == list(expected.ids)
    assert document["media"] == [
        {"source": str(tmp_path / "a.png"), "tokens": document["media"][0]["tokens"], "grids": [[1, 4, 6]]}
    ]


def test_command_goes_on(place, generator):
    chat = generator.chat("Be brief.")
    expected = [chat.ask(text, max_new_tokens=4).text for text in ("what?", "and?", "so?")]
    options = ("--dtype", "float32", "--max-new-tokens", 4, "--system", "Be brief.", "--chat")
    done = call(place, "what?", *options, stdin="and?\n\nso?\n")
    assert done.stdout == "".join(text + "\n" for text in expected)


def test_command_samples(place):
    options = ("--dtype", "float32", "--max-new-tokens", 8, "--temperature", 1.5, "--top-k", 90)
    texts = [call(place, "what?", *options, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_command_refuses():
    done = call(TINY, "what?")
    assert isinstance(done.exception, MoonvitError)
    assert "no text model of Kimi K3" in str(done.exception)


def test_clips_are_not_recognised_again(generator):
    clip = Clip([helpers.picture(56, 56, seed) for seed in range(4)], fps=2.0)
    (first,), (second,) = generator.see(clip), generator.see(clip)
    assert first.key != second.key
    assert all(torch.equal(a, b) for a, b in zip(first.embeddings, second.embeddings, strict=True))

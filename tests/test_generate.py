"""Replies of `moonvit.engine`, what is refused before, and `moonvit generate`."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import engine_checkpoints as helpers
from conftest import TINY
from moonvit.cli import group
from moonvit.engine import Clip, Generator, Look
from moonvit.engine import library as library
from moonvit.engine.media import Eyes
from moonvit.engine.positions import Positions
from moonvit.engine.session import Session
from moonvit.engine.text import TextModel
from moonvit.errors import ImageError, MoonvitError, PromptError
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


def test_streams_of_one_conversation_do_not_mix(generator):
    expected = generator.generate("two", max_new_tokens=6)
    chat = generator.chat()
    first = chat.stream("one", max_new_tokens=6)
    next(first)
    second = chat.stream("two", max_new_tokens=6)
    next(second)
    with pytest.raises(MoonvitError, match="a later question of this conversation"):
        next(first)
    assert second.reply.ids == expected.ids
    assert [turn.role for turn in chat.turns] == ["user", "assistant"]
    with pytest.raises(MoonvitError, match="no reply"):
        _ = first.reply


def test_a_closed_stream_has_no_reply(generator):
    stream = generator.stream("one", max_new_tokens=6)
    next(stream)
    stream.close()
    with pytest.raises(MoonvitError, match="no reply: the stream was closed"):
        _ = stream.reply


def test_what_is_gone_on_from(generator, monkeypatch):
    """All but the last token of the same; nothing at other places, nor where a cache cannot be cut back."""
    request = generator.load().request(generator.format.encode([Turn("user", ("what?",))]), [])
    moved = replace(request, positions=Positions(request.positions.prompt + 1))
    whole = len(request.prompt.ids)
    session = Session(generator.text)
    first = session.prefill(request, ())
    again = session.prefill(request, ())
    assert session.computed == 1
    assert torch.allclose(first, again, atol=1e-5)
    session.prefill(moved, ())
    assert session.computed == whole
    monkeypatch.setattr(TextModel, "croppable", False)
    session.prefill(moved, ())
    assert session.computed == whole


# Media


def test_a_picture_is_encoded_once(place, tmp_path):
    eyes = Generator.from_pretrained(place, dtype="float32").eyes
    generator = Generator(eyes, None, None)
    PICTURE.save(tmp_path / "a.png")
    first, second, other = generator.see([tmp_path / "a.png", PICTURE, helpers.picture(90, 60, 2)])
    assert first.key == second.key
    assert first.embeddings[0] is second.embeddings[0]
    assert (first.name, second.name) == (str(tmp_path / "a.png"), "PIL image 90x60")
    assert eyes.encoded == 2
    assert generator.see((tmp_path / "a.png").read_bytes())[0].key == first.key
    assert generator.see([first, other]) == [first, other]
    assert eyes.encoded == 2
    small = Eyes(eyes.encoder, limit=other.nbytes)
    Generator(small, None, None).see([PICTURE, helpers.picture(90, 60, 2)])
    assert list(small.kept) == [other.key]


def test_a_picture_that_changes_on_disk_is_seen_anew(generator, tmp_path):
    keys = []
    for seed in (1, 2):
        helpers.picture(90, 60, seed).save(tmp_path / "a.png")
        keys.append(generator.see(tmp_path / "a.png")[0].key)
    assert keys[0] != keys[1]


def test_what_is_kept_is_all_that_is_held(place):
    """No view of a batch, which would hold the whole of it beyond the limit."""
    generator = Generator.from_pretrained(place, dtype="float32")
    for media in generator.see([helpers.picture(90, 60, seed) for seed in range(6)]):
        assert media.embeddings[0].untyped_storage().nbytes() == media.nbytes


def test_media_of_another_tower_are_refused(place):
    generator = Generator.from_pretrained(place, dtype="float32")
    (media,) = generator.see(PICTURE)
    other = replace(media, family="qwen3_vl")
    with pytest.raises(PromptError, match="encoded by the tower of qwen3_vl, not of qwen2_vl"):
        generator.stream("what?", other)
    narrow = replace(media, embeddings=(media.embeddings[0][:, :32],))
    with pytest.raises(PromptError, match="embeddings of 32, but the text model's width is 64"):
        generator.stream("what?", narrow)
    assert not generator.text.loaded


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


def test_clips_are_not_recognised_again(generator):
    clip = Clip([helpers.picture(56, 56, seed) for seed in range(4)], fps=2.0)
    (first,), (second,) = generator.see(clip), generator.see(clip)
    assert first.key != second.key
    assert all(torch.equal(a, b) for a, b in zip(first.embeddings, second.embeddings, strict=True))


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


def test_command_keeps_what_was_answered(place):
    options = ("--dtype", "float32", "--max-new-tokens", 2, "--chat", "--format", "json")
    done = call(place, "what?", *options, stdin="and?\n" + "x" * 3000 + "\nso?\n")
    assert done.exit_code != 0
    assert "do not fit" in str(done.exception)
    assert len(json.loads(done.stdout)["replies"]) == 2


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_command_with_a_closed_stream(place, closed):
    words = [sys.executable, "-m", "moonvit", "generate", str(place), "what?", "--max-new-tokens", "2"]
    shell = 'exec "$@" --chat <&-' if closed == "stdin" else 'exec "$@" >&-'
    done = subprocess.run(["sh", "-c", shell, "sh", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "2 written" in done.stderr) == (0, True), done.stderr


def test_command_samples(place):
    options = ("--dtype", "float32", "--max-new-tokens", 8, "--temperature", 1.5, "--top-k", 90)
    texts = [call(place, "what?", *options, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_command_refuses():
    done = call(TINY, "what?")
    assert isinstance(done.exception, MoonvitError)
    assert "no text model of Kimi K3" in str(done.exception)


def test_the_budget_holds_for_videos(generator):
    clip = Clip([helpers.picture(112, 112, seed) for seed in range(4)], fps=2.0)
    (whole,), (small,) = generator.see(clip), generator.see(clip, Look(max_tokens=4))
    assert small.tokens < whole.tokens

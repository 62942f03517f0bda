"""Prompts: typed markers, slots found again, and everything that is refused."""

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonvit.errors import ConfigError, MoonvitError, PromptError, TokenizerError, WeightsError
from moonvit.prompt import FORMS, Chunk, Image, PromptFormat, ToolCall, Turn, Video
from prompt_helpers import (
    KIMI_MARKS,
    QWEN_MARKS,
    Folder,
    kimi_files,
    kimi_id,
    open_format,
    qwen_files,
)

FAMILIES = list(FORMS)
KIMI = [family for family in FAMILIES if family.startswith("kimi")]
QWEN = [family for family in FAMILIES if family.startswith("qwen")]
PICTURE = Image((640, 427), 3)
CLIP = Video((Chunk("00:00:00.000", 2), Chunk("00:00:02.000", 4)))
HOSTILE = "".join([*KIMI_MARKS, *QWEN_MARKS, "<tool_call>", "<|reserved_token_300|>"])


@pytest.fixture(scope="module")
def formats() -> dict[str, PromptFormat]:
    return {family: open_format(family) for family in FAMILIES}


# Markers typed by users


@pytest.mark.parametrize("family", FAMILIES)
def test_typed_markers_are_text(family, formats):
    form = formats[family]
    plain = form.encode([Turn("user", (PICTURE, "x"))])
    typed = form.encode([Turn("system", (HOSTILE,)), Turn("user", (HOSTILE, PICTURE, HOSTILE))])
    assert form.count(typed.ids) == form.count(plain.ids) == (3,)
    assert [slot.length for slot in typed.slots] == [3]
    specials = [token for token in typed.ids if token in set(form.vocabulary.marks.values())]
    clean = form.encode([Turn("system", ("a",)), Turn("user", ("a", PICTURE, "a"))])
    assert specials == [token for token in clean.ids if token in set(form.vocabulary.marks.values())]
    assert HOSTILE in form.decode(typed.ids)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=40)
    | st.lists(st.sampled_from([*KIMI_MARKS, *QWEN_MARKS, "\n", " ", "a"])).map("".join)
)
@pytest.mark.parametrize("family", ["kimi_k3", "kimi_k25", "qwen3_vl"])
def test_any_text_leaves_slots_alone(family, text, formats):
    prompt = formats[family].encode([Turn("user", (text, PICTURE, text, CLIP, text))])
    assert formats[family].count(prompt.ids) == (3, 2, 4)
    for slot in prompt.slots:
        pad = formats[family].pad_id(slot.kind)
        assert prompt.ids[slot.start : slot.start + slot.length] == (pad,) * slot.length


def test_long_runs_do_not_break_the_tokenizer(formats):
    text = "a" * 60_000 + " " * 60_000 + "ab " * 200_000
    prompt = formats["kimi_k3"].encode([Turn("user", (text,))])
    assert text in formats["kimi_k3"].decode(prompt.ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["\x00", "\U0001f600\u0301", "\u200b\ufeff"])
def test_odd_text_survives(family, text, formats):
    prompt = formats[family].encode([Turn("user", (text,))])
    assert text in formats[family].decode(prompt.ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_is_no_unicode(family, formats):
    with pytest.raises(PromptError, match="text that is not Unicode: surrogates not allowed"):
        formats[family].encode([Turn("user", ("a\udcff",))])


# Slots, counts, expansion


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_found_again(family, formats):
    form = formats[family]
    parts = (PICTURE, "x", Image((8, 8), 1))
    if family != "kimi_vl":
        parts += (CLIP, PICTURE)
    prompt = form.encode([Turn("user", parts)])
    lengths = [slot.length for slot in prompt.slots]
    assert lengths == ([3, 1] if family == "kimi_vl" else [3, 1, 2, 4, 3])
    assert [slot.part for slot in prompt.slots] == ([0, 1] if family == "kimi_vl" else [0, 1, 2, 2, 3])
    found = form.slots(prompt.ids, lengths)
    assert [(s.start, s.length, s.kind) for s in found] == [(s.start, s.length, s.kind) for s in prompt.slots]
    runs = form.count(prompt.ids)
    if family.startswith("qwen2"):
        assert runs == (3, 1, 6, 3)
        assert [s.kind for s in form.slots(prompt.ids)] == ["image", "image", "video", "image"]
    else:
        assert runs == tuple(lengths)
        assert form.slots(prompt.ids) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_expansion_of_single_pads(family, formats):
    form = formats[family]
    prompt = form.encode([Turn("user", (PICTURE, "x", Image((640, 427), 5)))])
    single = form.encode([Turn("user", (Image((640, 427), 1), "x", Image((640, 427), 1)))])
    expanded = form.expand(single.ids, [3, 5])
    assert expanded.ids == prompt.ids
    assert expanded.slots == prompt.slots
    assert expanded.text == prompt.text == single.text
    assert form.decode(prompt.ids) == form.expand_text(single.text, [3, 5])
    for counts in ([3], [3, 5, 1], []):
        with pytest.raises(PromptError, match=f"2 pads to expand, but {len(counts)} counts"):
            form.expand(single.ids, counts)
        with pytest.raises(PromptError, match=f"2 pads to expand, but {len(counts)} counts"):
            form.expand_text(single.text, counts)
    with pytest.raises(PromptError, match="at least 1"):
        form.expand(single.ids, [3, 0])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3], "9 pads, but embeddings of 3 rows"),
        ([3, 6, 1], "2 slots, but embeddings for 3"),
        ([4, 5], "slot 0 has 3 pads, its embeddings 4 rows"),
        ([2, 7], "slot 1 has 1 pads, its embeddings 7 rows"),
        ([], "9 pads, but embeddings of 0 rows"),
        ([0, 3, 6], "slot 0 has 3 pads, its embeddings 0 rows"),
    ],
)
def test_wrong_counts_name_both_numbers(counts, message, formats):
    prompt = formats["kimi_k3"].encode([Turn("user", (PICTURE, Image((8, 8), 6)))])
    with pytest.raises(PromptError, match=message):
        formats["kimi_k3"].slots(prompt.ids, counts)


def test_counts_without_pads(formats):
    ids = formats["qwen2_vl"].encode([Turn("user", ("x",))]).ids
    assert formats["qwen2_vl"].slots(ids) == formats["qwen2_vl"].slots(ids, []) == ()
    with pytest.raises(PromptError, match="0 slots, but embeddings for 1"):
        formats["qwen2_vl"].slots(ids, [1])


def test_the_size_is_the_pictures(formats):
    text = formats["kimi_k3"].encode([Turn("user", (Image((1, 20000), 256),))]).text
    assert "<|media_begin|>image 1x20000<|media_content|><|media_pad|><|media_end|>" in text
    assert "image 1x20000" not in formats["kimi_k25"].encode([Turn("user", (Image((1, 20000), 256),))]).text


def test_ends(formats):
    assert formats["kimi_k3"].end_ids == {kimi_id("<|end_of_msg|>")}
    assert formats["kimi_k25"].end_ids == {kimi_id("<|im_end|>")}
    files = {**qwen_files(), "generation_config.json": b'{"eos_token_id": [264, 1]}'}
    form = PromptFormat.open(Folder(files), "qwen3_vl")
    assert form.end_ids == {264, 1, form.vocabulary.marks["<|im_end|>"]}
    files["generation_config.json"] = b'{"eos_token_id": "x"}'
    with pytest.raises(ConfigError, match="field 'eos_token_id' is"):
        PromptFormat.open(Folder(files), "qwen3_vl")
    files["generation_config.json"] = b'{"eos_token_id": [-1, 264, 275, 151645]}'
    form = PromptFormat.open(Folder(files), "qwen3_vl")
    assert form.size == 275
    assert form.end_ids == {264, form.vocabulary.marks["<|im_end|>"]}


@pytest.mark.parametrize("family", ["kimi_k3", "qwen2_vl"])
def test_ids_as_tensors_and_arrays(family, formats):
    form = formats[family]
    prompt = form.encode([Turn("user", (PICTURE, "x"))])
    single = form.encode([Turn("user", (Image((640, 427), 1), "x"))])
    for ids in (torch.tensor(prompt.ids), np.array(prompt.ids)):
        assert form.slots(ids) == form.slots(ids, torch.tensor([3])) == form.slots(prompt.ids)
        assert form.count(ids) == (3,)
        assert form.decode(ids) == form.decode(prompt.ids)
    assert form.expand(torch.tensor(single.ids), np.array([3])) == form.expand(single.ids, [3])
    assert type(form.slots(prompt.ids, torch.tensor([3]))[0].length) is int
    for ids, counts in ((["a"], None), ([1.5], None), (prompt.ids, [3.0]), (prompt.ids, ["3"])):
        with pytest.raises(PromptError, match="are not whole numbers"):
            form.slots(ids, counts)


# Refusals


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_checked_against_the_config(family):
    right = open_format(family)
    for literal, names in FORMS[family].fields.items():
        for name in names:
            good = {name: right.vocabulary.marks[literal]}
            assert open_format(family, good).pad_id("image") == right.pad_id("image")
            with pytest.raises(ConfigError, match=f"'{name}' is 7, but the tokenizer has .* at {good[name]}"):
                open_format(family, {name: 7})
    size = right.vocabulary.size
    assert open_format(family, {"text_config": {"vocab_size": size + 64}}).size == size + 64
    with pytest.raises(ConfigError, match="'vocab_size' is 9"):
        open_format(family, {"text_config": {"vocab_size": 9}})
    with pytest.raises(ConfigError, match="'vocab_size' is 9"):
        open_format(family, {"vocab_size": 9})
    highest = max(right.vocabulary.marks[literal] for literal in FORMS[family].needed)
    assert open_format(family, {"vocab_size": highest + 1}).size == highest + 1
    with pytest.raises(
        ConfigError, match=f"'vocab_size' is {highest}, but the tokenizer has .* at {highest}"
    ):
        open_format(family, {"vocab_size": highest})


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_outside_the_vocabulary(family, formats):
    form = formats[family]
    for bad in (-1, form.size, 10**9):
        for call in (form.decode, form.slots, lambda ids, form=form: form.expand(ids, [])):
            with pytest.raises(PromptError, match=f"id {bad} is outside the vocabulary of {form.size}"):
                call([1, bad])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_that_will_not_do(family):
    with pytest.raises(TokenizerError, match="no tiktoken.model and no tokenizer.json"):
        PromptFormat.open(Folder({}), family)
    other = kimi_files() if family.startswith("qwen") else qwen_files()
    with pytest.raises(TokenizerError, match="has no marker .*is it the tokenizer of a"):
        PromptFormat.open(Folder(other), family)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tiktoken.model", b"", "ranks do not run"),
        ("tiktoken.model", b"!!! 0\n", "line 1 is not a token"),
        ("tiktoken.model", b"YQ== 0\nYg==\n", "line 2 is not a token"),
        ("tiktoken.model", b"YQ== 0\nYg== 5\n", "ranks do not run from 0 to 1"),
        ("tiktoken.model", b"YQ== 0\nYQ== 1\n", "line 2 has the token of an earlier one"),
        ("tiktoken.model", b"YQ== -1\n", "line 1 is not a token"),
        ("tiktoken.model", b"YQ== " + b"9" * 5000, "line 1 is not a token"),
        ("tiktoken.model", b"YQ== 1_0\n", "line 1 is not a token"),
        ("tiktoken.model", b"YQ== 0\n", "no token for the byte 0"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder holds"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"0300": {"content": "a"}}}', "holds .*0300"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"%s": {"content": "a"}}}' % (b"9" * 5000), "decoder holds"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"300": {"content": "a"}, "301": {"content": "a"}}}', "named twice"),
    ],
)  # fmt: skip
def test_broken_tiktoken_files(name, data, message):
    with pytest.raises(TokenizerError, match=message):
        PromptFormat.open(Folder({**kimi_files(), name: data}), "kimi_k3")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"model": 1, "model": 2}'])
def test_broken_tokenizer_json(data):
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        PromptFormat.open(Folder({"tokenizer.json": data}), "qwen2_vl")


def test_a_tokenizer_json_that_cuts_or_fills_up():
    """Truncation and padding that training left in the file are not the prompt's."""
    content = json.loads(qwen_files()["tokenizer.json"])
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    form = PromptFormat.open(Folder({"tokenizer.json": json.dumps(content).encode()}), "qwen2_vl")
    turns = [Turn("user", ("a question longer than three", PICTURE))]
    assert form.encode(turns) == open_format("qwen2_vl").encode(turns)


def test_a_tokenizer_that_panics(capfd):
    content = json.loads(qwen_files()["tokenizer.json"])
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a|a)*$"}
    form = PromptFormat.open(Folder({"tokenizer.json": json.dumps(content).encode()}), "qwen2_vl")
    with pytest.raises(TokenizerError, match="tokenizer.json: fails on this text"):
        form.encode([Turn("user", ("a" * 26 + "b",))])


def test_markers_that_are_words_are_refused():
    """A vocabulary in which ordinary text makes a marker cannot keep typed ones out."""
    content = json.loads(qwen_files()["tokenizer.json"])
    marker = next(t["id"] for t in content["added_tokens"] if t["content"] == "<|image_pad|>")
    del content["model"]["vocab"]["x"]
    content["model"]["vocab"]["x"] = marker
    form = PromptFormat.open(Folder({"tokenizer.json": json.dumps(content).encode()}), "qwen2_vl")
    with pytest.raises(TokenizerError, match=f"makes the marker of id {marker} out of ordinary text"):
        form.encode([Turn("user", ("an x",))])


def test_a_directory_without_weights(tmp_path):
    for name, data in {**kimi_files(), "config.json": b'{"model_type": "kimi_k25"}'}.items():
        (tmp_path / name).write_bytes(data)
    form = PromptFormat.open(tmp_path)
    assert form.family == "kimi_k25"
    assert form.encode([Turn("user", (PICTURE,))]).slots[0].length == 3
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        PromptFormat.open(tmp_path)
    with pytest.raises(WeightsError, match="no such directory"):
        PromptFormat.open(tmp_path / "absent")


def test_unknown_families():
    with pytest.raises(PromptError, match="family is 'llava', expected one of kimi_k3"):
        PromptFormat.open(Folder(kimi_files()), "llava")
    with pytest.raises(ConfigError, match="'model_type' is \"llava\""):
        PromptFormat.open(Folder(kimi_files(), {"model_type": "llava"}))
    assert PromptFormat.open(Folder(kimi_files(), {"model_type": "kimi_k25"})).family == "kimi_k25"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Image((0, 5), 1), "size is"),
        (lambda: Image((1.5, 5), 1), "size is"),
        (lambda: Image((5,), 1), "size is"),
        (lambda: Image((5, 5), 0), "tokens is 0"),
        (lambda: Image((5, 5), True), "tokens is True"),
        (lambda: Chunk("0", -1), "tokens is -1"),
        (lambda: Video(()), "without chunks"),
        (lambda: Turn("bot"), "role is 'bot'"),
        (lambda: Turn("user", "text"), "in a tuple"),
        (lambda: Turn("user", (3,)), "in a tuple"),
        (lambda: Turn("user", (), reasoning="x"), "only an assistant"),
        (lambda: ToolCall("f", None), "arguments of a tool call are NoneType"),
    ],
)
def test_parts_that_make_no_sense(build, message):
    with pytest.raises(PromptError, match=message):
        build()


@pytest.mark.parametrize(
    ("family", "turns", "how", "message"),
    [
        ("kimi_vl", [Turn("user", (CLIP,))], {}, "takes no videos"),
        ("kimi_vl", [Turn("tool")], {}, "knows no tools"),
        ("qwen2_vl", [Turn("tool")], {}, "know no tools"),
        ("qwen2_5_vl", [], {"tools": [{}]}, "know no tools"),
        ("qwen3_vl", [], {"tools": [{}]}, "not written here"),
        ("qwen3_vl", [Turn("user"), Turn("system")], {}, "comes first"),
        ("kimi_k25", [], {"tools": [{}]}, "not written here"),
        ("qwen3_vl", [], {"thinking": True}, "no thinking mode"),
        ("kimi_k3", [], {"thinking_effort": "some"}, "expected one of low"),
        ("kimi_k3", [Turn("tool")], {}, "names no tool"),
        ("kimi_k3", [Turn("assistant", (), tool_calls=(ToolCall("f", "[1]"),))], {}, "not a JSON object"),
        ("kimi_k3", [Turn("assistant", (), tool_calls=(ToolCall("f", "[" * 100_000),))], {}, "too deep"),
        ("kimi_k3", [Turn("assistant", (), tool_calls=(ToolCall("f", {"a": object()}),))], {}, "must be JSON"),
        ("kimi_k25", [Turn("assistant", (), tool_calls=(ToolCall("f", {"a": {1}}),))], {}, "must be JSON"),
        ("qwen3_vl", [Turn("assistant", (), tool_calls=(ToolCall("f", {"a": b""}),))], {}, "must be JSON"),
        ("kimi_k3", [], {"tools": [{"a": object()}]}, "must be JSON"),
        ("kimi_k3", [], {"tools": [{"a": 1, 2: 3}]}, "must be JSON"),
        *((family, turns, {}, "a sequence of Turn") for family in FAMILIES for turns in ("abc", None, [{"role": "user"}])),
    ],
)  # fmt: skip
def test_what_a_form_does_not_have(family, turns, how, message, formats):
    with pytest.raises(PromptError, match=message):
        formats[family].encode(turns, **how)


@pytest.mark.parametrize(("library", "family"), [("tiktoken", "kimi_k3"), ("tokenizers", "qwen2_vl")])
def test_without_the_extra(library, family, monkeypatch):
    folder = Folder(kimi_files() if library == "tiktoken" else qwen_files())
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        MoonvitError, match=rf"{library}, which is not installed \(pip install 'moonvit\[engine\]'"
    ):
        PromptFormat.open(folder, family)

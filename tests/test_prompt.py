"""Prompts of every family against what their own tokenizers, templates and processors make."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DATA
from moonvit.errors import ConfigError, MoonvitError, PromptError, TokenizerError
from moonvit.prompt import FORMS, Chunk, Image, PromptFormat, ToolCall, Turn, Video
from moonvit.prompt.vocabulary import KIMI_PATTERN
from prompt_helpers import (
    KIMI_MARKS,
    QWEN_MARKS,
    Folder,
    kimi_files,
    kimi_id,
    open_format,
    qwen_files,
    qwen_tokenizer,
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


# Against the references


def messages(turns: list[Turn]) -> list[dict[str, Any]]:
    """The turns as transformers' templates and K3's own encoding take them."""
    found = []
    for turn in turns:
        content = []
        for part in turn.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "image" if isinstance(part, Image) else "video"})
        message: dict[str, Any] = {"role": turn.role, "content": content}
        if turn.name:
            message["tool" if turn.role == "tool" else "name"] = turn.name
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in turn.tool_calls
            ]
        if turn.tool_call_id:
            message["tool_call_id"] = turn.tool_call_id
        found.append(message)
    return found


def k3_encoding() -> ModuleType:
    """K3's own `encoding.py` as nemo-automodel carries it, by itself."""
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package nemo-automodel is not installed (make test installs it)")
    path = Path(spec.submodule_search_locations[0]) / "components/models/kimi_k3/encoding.py"
    spec = importlib.util.spec_from_file_location("k3_encoding", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["k3_encoding"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def k3_ids(turns: list[Turn], form: PromptFormat, **how: Any) -> list[int]:
    """Ids as K3's own tokenizer makes them of the segments of its encoding."""
    import tiktoken

    prompts = [
        f"<|media_begin|>image {p.size[0]}x{p.size[1]}<|media_content|>"
        + "<|media_pad|>" * p.tokens
        + "<|media_end|>"
        for turn in turns
        for p in turn.parts
        if isinstance(p, Image)
    ]
    how = {"thinking_effort": "max", **how}
    ranks = {token: rank for rank, token in enumerate(tokens())}
    model = tiktoken.Encoding(
        "k3", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=dict(form.vocabulary.marks)
    )
    ids: list[int] = []
    for segment in k3_encoding().build_chat_segments(messages(turns), image_prompts=prompts, **how):
        if segment.allow_special:
            ids += model.encode(segment.text, allowed_special="all")
        else:
            ids += model.encode(segment.text, disallowed_special=())
    return ids


def tokens() -> list[bytes]:
    from base64 import b64decode

    return [b64decode(line.split()[0]) for line in kimi_files()["tiktoken.model"].splitlines()]


K3_TALKS = {
    "question": [Turn("user", (PICTURE, "What is this?"))],
    "typed markers": [Turn("user", (HOSTILE, PICTURE, HOSTILE, Image((1, 20000), 1)))],
    "system": [Turn("system", ("Be brief.\n",)), Turn("user", ("the user is",), name='A "B" & C')],
    "answer": [
        Turn("user", ("Hi", "there")),
        Turn("assistant", ("Hello.", HOSTILE), reasoning="  they greet "),
        Turn("user", (PICTURE,)),
        Turn("assistant", ("An image",), reasoning="   "),
        Turn("user", ("",)),
    ],
    "tools": [
        Turn("user", ("Weather?",)),
        Turn(
            "assistant",
            (),
            tool_calls=(
                ToolCall("get<|sep|>", {"q": "a\"b", "n": 1.5, "t": True, "l": [1, {"ü": None}], "z": None}, "b"),
                ToolCall("look", '{"deep": {"b": 1, "a": 2}}', "a"),
                ToolCall("raw", "not json", "c"),
                ToolCall("empty", " "),
            ),
        ),
        Turn("tool", ("second", PICTURE), tool_call_id="a"),
        Turn("tool", ("first",), name="stale", tool_call_id="b"),
        Turn("tool", ("third",), tool_call_id="c"),
        Turn("user", ("So?",)),
    ],
    "results in order": [
        Turn("assistant", (), tool_calls=(ToolCall("one", {}), ToolCall("two", {}))),
        Turn("tool", ("1",)),
        Turn("tool", ("2",)),
        Turn("tool", ("3",), name="three"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("talk", K3_TALKS)
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("generation", [True, False])
def test_k3_is_its_own_encoding(talk, thinking, generation, formats):
    turns = K3_TALKS[talk]
    prompt = formats["kimi_k3"].encode(turns, thinking=thinking, add_generation_prompt=generation)
    expected = k3_ids(turns, formats["kimi_k3"], thinking=thinking, add_generation_prompt=generation)
    assert list(prompt.ids) == expected


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max", None])
def test_k3_effort_and_tools(effort, formats):
    tools = [{"type": "function", "function": {"name": "f", "description": HOSTILE, "b": [{"z": 1, "a": 2}]}}]
    turns = [Turn("user", ("Hi",))]
    prompt = formats["kimi_k3"].encode(turns, thinking_effort=effort, tools=tools)
    assert list(prompt.ids) == k3_ids(turns, formats["kimi_k3"], thinking_effort=effort, tools=tools)


def test_k3_pattern_is_the_published_one():
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package nemo-automodel is not installed (make test installs it)")
    path = Path(spec.submodule_search_locations[0]) / "components/models/kimi_k3/tokenization.py"
    tree = ast.parse(path.read_text())
    wanted = [node for node in tree.body if getattr(node, "name", "") == "_build_kimi_k3_pat_str"]
    space: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    assert space["_build_kimi_k3_pat_str"]() == KIMI_PATTERN


def rendered(turns: list[Turn], template: str, **how: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=qwen_tokenizer())
    template = (DATA / "templates" / f"{template}.jinja").read_text()
    return tokenizer.apply_chat_template(messages(turns), chat_template=template, tokenize=False, **how)


def expanded_by_transformers(text: str, turns: list[Turn], family: str) -> str:
    """The text with pads, by the processor's own methods; the rest of it needs torchvision."""
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    processor = object.__new__(Qwen3VLProcessor if family == "qwen3_vl" else Qwen2VLProcessor)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.tokenizer = None
    processor.image_processor = SimpleNamespace(merge_size=2)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    images, videos = [], []
    for part in (part for turn in turns for part in turn.parts if not isinstance(part, str)):
        if isinstance(part, Image):
            grid = torch.tensor([[1, 2, 2 * part.tokens]])
            images.append(processor.replace_image_token({"image_grid_thw": grid}, 0))
        else:
            grid = torch.tensor([[len(part.chunks), 2, 2 * part.chunks[0].tokens]])
            metadata = SimpleNamespace(fps=2.0, frames_indices=list(range(2 * len(part.chunks))))
            inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
            videos.append(processor.replace_video_token(inputs, 0))
    return processor.get_text_with_replacements([text], images, videos)[0][0]


# as transformers writes the times of frames 0 to 5 at two a second
QWEN_CLIP = Video((Chunk("<0.2 seconds>", 3), Chunk("<1.2 seconds>", 3), Chunk("<2.2 seconds>", 3)))
QWEN_TALKS = {
    "question": [Turn("user", (PICTURE, "What is this?"))],
    "two pictures": [Turn("user", ("\n\nfirst", PICTURE, Image((8, 8), 1), "the user\n"))],
    "turns": [
        Turn("system", ("Be brief. ",)),
        Turn("user", (PICTURE, QWEN_CLIP, "both")),
        Turn("assistant", (" It is\n", "a picture")),
        Turn("user", (QWEN_CLIP, "é e\u0301 it's   all")),
    ],
}


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("talk", QWEN_TALKS)
@pytest.mark.parametrize("generation", [True, False])
def test_qwen_is_transformers(family, talk, generation, formats):
    turns = QWEN_TALKS[talk]
    prompt = formats[family].encode(turns, add_generation_prompt=generation)
    template = "qwen3_vl" if family == "qwen3_vl" else "qwen2_vl"
    text = rendered(turns, template, add_generation_prompt=generation)
    text = expanded_by_transformers(text, turns, family)
    assert list(prompt.ids) == qwen_tokenizer().encode(text, add_special_tokens=False).ids
    assert formats[family].expand_text(prompt.text, formats[family].count(prompt.ids)) == text


def test_qwen3_tools_are_transformers(formats):
    calls = (ToolCall("look", {"at": "ü", "n": [1]}), ToolCall("raw", "{}"))
    turns = [
        Turn("user", ("Look",)),
        Turn("assistant", ("I will",), tool_calls=calls),
        Turn("tool", ("one", PICTURE)),
        Turn("tool", ("two",)),
        Turn("assistant", (), tool_calls=calls),
        Turn("tool", ("three",)),
    ]
    text = rendered(turns, "qwen3_vl", add_generation_prompt=True)
    prompt = formats["qwen3_vl"].encode(turns)
    assert prompt.text == text
    expanded = expanded_by_transformers(text, turns, "qwen3_vl")
    assert list(prompt.ids) == qwen_tokenizer().encode(expanded, add_special_tokens=False).ids


@pytest.mark.parametrize("generation", [True, False])
def test_kimi_vl_is_its_template(generation, formats):
    turns = [
        Turn("user", (PICTURE, Image((8, 8), 1), "the  user\nis")),
        Turn("assistant", ("It",)),
        Turn("user", ("?",)),
    ]
    text = rendered(turns, "kimi_vl", add_generation_prompt=generation)
    prompt = formats["kimi_vl"].encode(turns, add_generation_prompt=generation)
    assert prompt.text == text
    with_system = [Turn("system", ("S",)), *turns]
    assert formats["kimi_vl"].encode(with_system).text == rendered(
        with_system, "kimi_vl", add_generation_prompt=True
    )


def test_k25_as_written_down(formats):
    """No reference for the turns can be run here; the form is that of the sources named in `prompt/kimi.py`."""
    calls = (ToolCall("f", {"a": 1}, "functions.f:0"),)
    turns = [
        Turn("system", ("S",)),
        Turn("user", (PICTURE, "What", CLIP)),
        Turn("assistant", ("old",), reasoning="gone"),
        Turn("user", ("now",), name="Ann"),
        Turn("assistant", ("call",), reasoning="kept", tool_calls=calls),
        Turn("tool", ("42",), tool_call_id="functions.f:0"),
    ]
    expected = (
        "<|im_system|>system<|im_middle|>S<|im_end|>"
        "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|><|media_end|>\nWhat"
        "00:00:00.000<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
        "00:00:02.000<|media_begin|>video<|media_content|><|media_pad|><|media_end|>\n<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>old<|im_end|>"
        "<|im_user|>Ann<|im_middle|>now<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>kept</think>call"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n42<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )
    form = formats["kimi_k25"]
    assert form.encode(turns).text == expected
    assert form.encode(turns, thinking=False).text == expected + "</think>"
    assert (
        form.encode(turns, add_generation_prompt=False).text + "<|im_assistant|>assistant<|im_middle|>"
        in expected
    )
    assert form.decode(form.encode(turns).ids) == form.expand_text(expected, [3, 2, 4])


def test_k25_chunks_are_transformers(formats):
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

    processor = object.__new__(Kimi_K25Processor)
    processor.video_token = "<|media_pad|>"
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=4)
    inputs = {
        "num_chunks_per_video": [2],
        "video_grid_thw": torch.tensor([[4, 2, 4], [4, 2, 4]]),
        "video_metadata": [SimpleNamespace(fps=2.0, timestamps=[n / 2 for n in range(8)])],
    }
    text = processor.replace_video_token(inputs, 0)
    clip = Video((Chunk("00:00:00.000", 2), Chunk("00:00:02.000", 2)))
    prompt = formats["kimi_k25"].encode([Turn("user", (clip,))])
    assert formats["kimi_k25"].expand_text(prompt.text, [2, 2]).count(text) == 1


def test_a_tokenizer_without_think_tags_writes_them_as_text():
    marks = [mark for mark in KIMI_MARKS if "think>" not in mark]
    form = PromptFormat.open(Folder(kimi_files(marks)), "kimi_k25")
    prompt = form.encode([Turn("user", ("Hi",))])
    assert prompt.text.endswith("<|im_middle|><think>")
    assert form.decode(prompt.ids) == prompt.text


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
        ("tiktoken.model", b"YQ== 0\nYQ== 1\n", "ranks do not run"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder holds"),
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


def test_markers_that_are_words_are_refused():
    """A vocabulary in which ordinary text makes a marker cannot keep typed ones out."""
    content = json.loads(qwen_files()["tokenizer.json"])
    marker = next(t["id"] for t in content["added_tokens"] if t["content"] == "<|image_pad|>")
    del content["model"]["vocab"]["x"]
    content["model"]["vocab"]["x"] = marker
    form = PromptFormat.open(Folder({"tokenizer.json": json.dumps(content).encode()}), "qwen2_vl")
    with pytest.raises(TokenizerError, match=f"makes the marker of id {marker} out of ordinary text"):
        form.encode([Turn("user", ("an x",))])


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
        (lambda: Image((5, 5), 0), "tokens is 0"),
        (lambda: Image((5, 5), True), "tokens is True"),
        (lambda: Chunk("0", -1), "tokens is -1"),
        (lambda: Video(()), "without chunks"),
        (lambda: Turn("bot"), "role is 'bot'"),
        (lambda: Turn("user", "text"), "in a tuple"),
        (lambda: Turn("user", (3,)), "in a tuple"),
        (lambda: Turn("user", (), reasoning="x"), "only an assistant"),
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

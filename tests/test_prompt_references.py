"""Prompts of every family against what their own encodings, templates and processors make."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import DATA
from moonvit.prompt import FORMS, Chunk, Image, PromptFormat, ToolCall, Turn, Video
from moonvit.prompt.kimi_k3 import kimi_k3
from moonvit.prompt.pieces import Choices
from moonvit.prompt.vocabulary import KIMI_PATTERN
from moonvit.prompt.vocabulary import _pieces as pieces_of
from prompt_helpers import (
    KIMI_MARKS,
    QWEN_MARKS,
    Folder,
    kimi_files,
    open_format,
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
    "two rounds of calls": [
        Turn("assistant", (), tool_calls=(ToolCall("one", {}), ToolCall("two", {}))),
        Turn("tool", ("1",)),
        Turn("tool", ("2",)),
        Turn("assistant", (), tool_calls=(ToolCall("three", {}),)),
        Turn("tool", ("3",)),
    ],
    "one result names no call": [
        Turn("assistant", (), tool_calls=(ToolCall("one", {}, "a"), ToolCall("two", {}, "b"))),
        Turn("tool", ("2",), tool_call_id="b"),
        Turn("tool", ("1",), name="stale", tool_call_id="a"),
        Turn("tool", ("0",), name="three", tool_call_id="c"),
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


def test_k3_as_its_released_tokenizer_encodes_it(formats):
    """Ids that the released tokenizer made of its own encoding, as SMG's tests record them (smg-project/smg,
    `k3_render_ids_fixtures.json`, case punctuation_attribute_value), as the pieces they stand for."""
    prompt = formats["kimi_k3"].encode([Turn("user", ("Hi",), name=".hidden")], thinking_effort=None)
    assert prompt.text == (
        '<|open|>message role="user" name=".hidden"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )
    pieces = kimi_k3([Turn("user", ("Hi",), name=".hidden")], Choices(thinking_effort=None))
    written = [getattr(piece, "literal", piece) for piece in pieces]
    assert written[:11] == [
        "<|open|>", "message", " role", '="', "user", '"', " name", '="', ".hidden", '"', "<|sep|>"
    ]  # fmt: skip


def test_k3_tools_as_its_released_tokenizer_writes_them(formats):
    """The text of the same file's case tool_call_round_trip."""
    weather = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    turns = [
        Turn("user", ("weather in Paris?",)),
        Turn("assistant", ("",), tool_calls=(ToolCall("get_weather", '{"city": "Paris"}', "call_1"),)),
        Turn("tool", ("sunny <|open|>x<|sep|>",), tool_call_id="call_1"),
    ]
    prompt = formats["kimi_k3"].encode(turns, tools=[{"type": "function", "function": weather}])
    assert prompt.text == (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"get_weather","parameters":{"properties":{"city":{"type":"string"}},'
        '"type":"object"}},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to '
        "think in your thinking channel (not including the response channel), supported values include "
        "`low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=max`."
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user"<|sep|>weather in Paris?<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>'
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="get_weather" index="1"<|sep|>sunny <|open|>x<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max", None])
def test_k3_effort_and_tools(effort, formats):
    tools = [{"type": "function", "function": {"name": "f", "description": HOSTILE, "b": [{"z": 1, "a": 2}]}}]
    turns = [Turn("user", ("Hi",))]
    prompt = formats["kimi_k3"].encode(turns, thinking_effort=effort, tools=tools)
    assert list(prompt.ids) == k3_ids(turns, formats["kimi_k3"], thinking_effort=effort, tools=tools)


def k3_tokenization(*names: str) -> dict[str, Any]:
    """Functions and static methods of K3's own `tokenization.py` as nemo-automodel carries it."""
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package nemo-automodel is not installed (make test installs it)")
    path = Path(spec.submodule_search_locations[0]) / "components/models/kimi_k3/tokenization.py"
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", "") in names]
    for node in nodes:
        node.decorator_list = []
    space: dict[str, Any] = {"Iterator": Iterator}
    exec(compile(ast.Module(nodes, []), str(path), "exec"), space)
    return space


def test_k3_pattern_is_the_published_one():
    name = "_build_kimi_k3_pat_str"
    assert k3_tokenization(name)[name]() == KIMI_PATTERN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "a" * 25_000,
        "a" * 25_001,
        " " * 80_000,
        "ab  " * 9_000,
        "a" * 30_000 + "\n" + " " * 30_000 + "b",
    ],
    ids=range(7),
)
def test_long_runs_are_cut_as_published(text):
    name = "_split_whitespaces_or_nonwhitespaces"
    expected = [piece for piece in k3_tokenization(name)[name](text, 25_000) if piece]
    assert list(pieces_of(text)) == expected


def test_long_text_is_cut_as_published():
    name = "_split_whitespaces_or_nonwhitespaces"
    source = Path(k3_tokenization(name)[name].__code__.co_filename).read_text()
    limit = int(re.search(r"TIKTOKEN_MAX_ENCODE_CHARS = ([\d_]+)", source)[1])
    assert [len(piece) for piece in pieces_of("ab " * 150_000)] == [limit, 450_000 - limit]


def rendered(turns: list[Turn], template: str, **how: Any) -> str:
    """The chat template of the released checkpoints (Qwen3-VL's without declarations of tools), run."""
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
    assert form.encode(turns, thinking=False).text == expected.replace("kept", "") + "</think>"
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

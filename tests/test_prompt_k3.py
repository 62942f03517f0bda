"""K3's prompts against its own encoding, and its tokenizer's rules against the published ones."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moonvit.prompt import Image, PromptFormat, ToolCall, Turn
from moonvit.prompt.kimi_k3 import kimi_k3
from moonvit.prompt.pieces import Choices
from moonvit.prompt.vocabulary import KIMI_PATTERN
from moonvit.prompt.vocabulary import _pieces as pieces_of
from prompt_helpers import KIMI_MARKS, QWEN_MARKS, kimi_files, messages, open_format

PICTURE = Image((640, 427), 3)
HOSTILE = "".join([*KIMI_MARKS, *QWEN_MARKS, "<tool_call>", "<|reserved_token_300|>"])


@pytest.fixture(scope="module")
def formats() -> dict[str, PromptFormat]:
    return {"kimi_k3": open_format("kimi_k3")}


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

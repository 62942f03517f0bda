"""How Kimi K3 writes a conversation: turns, thoughts, answers and tool calls as tagged elements.

Source: the checkpoint's own encoding as NVIDIA's NeMo Automodel 0.7 carries it
(`components/models/kimi_k3/encoding.py` and `tokenization.py`, published by Moonshot AI). A tag's name and
each of its attributes are tokenized apart, as there; so is every part of a turn.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moonvit.errors import PromptError
from moonvit.prompt.kimi import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, chunk_prompt
from moonvit.prompt.parts import Image, ToolCall, Turn, Video
from moonvit.prompt.pieces import Choices, Mark, Pads, Piece, as_json, numbered

OPEN, CLOSE, SEPARATOR = Mark("<|open|>"), Mark("<|close|>"), Mark("<|sep|>")
END = Mark("<|end_of_msg|>")
EFFORTS = ("low", "medium", "high", "max")


def kimi_k3(turns: Sequence[Turn], choices: Choices) -> Iterator[Piece]:
    """K3's form; with thinking, its default, every assistant's turn has a think element."""
    thinking = choices.thinking in (None, True)
    yield from _declaration(choices.tools) if choices.tools else ()
    yield from _effort(choices.thinking_effort) if thinking and choices.thinking_effort else ()
    calls: tuple[ToolCall, ...] = ()
    results = 0
    for turn, parts in numbered(in_call_order(turns)):
        attributes: list[tuple[str, Any]] = [("role", turn.role)]
        if turn.role == "tool":
            results += 1
            attributes += [("tool", _tool_name(turn, calls, results)), ("index", results)]
        elif turn.name:
            attributes.append(("name", turn.name))
        yield from _open("message", *attributes)
        if turn.role == "assistant":
            calls, results = turn.tool_calls, 0
            yield from _assistant(turn, parts, thinking)
        else:
            yield from _content(parts)
        yield from (*_close("message"), END)
    if choices.add_generation_prompt:
        yield from (*_open("message", ("role", "assistant")), *_open("think" if thinking else "response"))


def in_call_order(turns: Sequence[Turn]) -> list[Turn]:
    """Tool results put into the order of the calls they answer, and named by them.

    As in the source only where every one of a run names a call by its id; else all are left as they are.
    """
    ordered: list[Turn] = []
    places: dict[str, tuple[int, str]] = {}
    run: list[Turn] = []

    def settle() -> None:
        if all(turn.tool_call_id in places for turn in run):
            run.sort(key=lambda turn: places[turn.tool_call_id][0])
            run[:] = [replace(turn, name=places[turn.tool_call_id][1]) for turn in run]
        ordered.extend(run)
        run.clear()

    for turn in turns:
        if turn.role == "tool":
            run.append(turn)
            continue
        settle()
        if turn.role == "assistant":
            places = {}
            for place, call in enumerate(turn.tool_calls):
                places.setdefault(call.id, (place, call.name)) if call.id else None
        ordered.append(turn)
    settle()
    return ordered


def _tool_name(turn: Turn, calls: Sequence[ToolCall], index: int) -> str:
    if turn.name:
        return turn.name
    if index <= len(calls):
        return calls[index - 1].name
    raise PromptError("a tool's turn names no tool, and no call before it does", "set its name")


def _assistant(
    turn: Turn, parts: Iterable[str | tuple[int, Image | Video]], thinking: bool
) -> Iterator[Piece]:
    if thinking:
        reasoning = turn.reasoning if turn.reasoning.strip() else ""
        yield from (*_open("think"), reasoning, *_close("think"))
    yield from (*_open("response"), *_content(parts), *_close("response"))
    if not turn.tool_calls:
        return
    yield from _open("tools")
    for index, call in enumerate(turn.tool_calls, start=1):
        yield from _open("call", ("tool", call.name), ("index", index))
        yield from _arguments(call.arguments)
        yield from _close("call")
    yield from _close("tools")


def _arguments(arguments: Mapping[str, Any] | str) -> Iterator[Piece]:
    """One element an argument; text that is no JSON object is kept as one block."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except RecursionError as error:
            raise PromptError("arguments of a tool call are nested too deep") from error
        except ValueError:
            yield from (*_open("json", ("type", "object")), arguments, *_close("json"))
            return
        if not isinstance(parsed, dict):
            raise PromptError("arguments of a tool call are not a JSON object")
        arguments = parsed
    for key, value in arguments.items():
        yield from _open("argument", ("key", key), ("type", _type_name(value)))
        yield value if isinstance(value, str) else as_json(value)
        yield from _close("argument")


def _type_name(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kinds, name in (((int, float), "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kinds):
            return name
    return "array"


def _content(parts: Iterable[str | tuple[int, Image | Video]]) -> Iterator[Piece]:
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        number, medium = part
        if isinstance(medium, Image):
            width, height = medium.size
            yield from (MEDIA_BEGIN, f"image {width}x{height}", MEDIA_CONTENT)
            yield from (Pads("image", (medium.tokens,), number), MEDIA_END)
        else:
            for chunk in medium.chunks:
                yield from chunk_prompt(chunk, number)


def _declaration(tools: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    listed = as_json(list(tools), sort_keys=True, separators=(",", ":"))
    body = f"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{listed}\n```"
    yield from _system("tool-declare", body)


def _effort(effort: str) -> Iterator[Piece]:
    if effort not in EFFORTS:
        raise PromptError(f"thinking_effort is {effort!r}, expected one of {', '.join(EFFORTS)}")
    yield from _system(
        "thinking-effort",
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
        "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`.",
    )


def _system(kind: str, body: str) -> Iterator[Piece]:
    yield from (*_open("message", ("role", "system"), ("type", kind)), body, *_close("message"), END)


def _open(tag: str, *attributes: tuple[str, Any]) -> Iterator[Piece]:
    yield from (OPEN, tag)
    for key, value in attributes:
        quoted = str(value).replace("&", "&amp;").replace('"', "&quot;")
        yield from (f" {key}", '="', quoted, '"')
    yield SEPARATOR


def _close(tag: str) -> Iterator[Piece]:
    yield from (CLOSE, tag, SEPARATOR)

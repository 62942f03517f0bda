"""How Qwen2-VL, Qwen2.5-VL and Qwen3-VL write a conversation.

Sources: the chat templates of the released checkpoints and the processors of transformers 5.24
(`Qwen2VLProcessor`, `Qwen3VLProcessor`), which put pads in place of `<|image_pad|>` and, in Qwen3-VL,
timestamped blocks in place of `<|video_pad|>`, leaving the template's markers around them.
"""

from collections.abc import Iterable, Iterator, Sequence

from moonvit.errors import PromptError
from moonvit.prompt.parts import Image, ToolCall, Turn, Video
from moonvit.prompt.pieces import Choices, Mark, Pads, Piece, as_json, numbered

START, END = Mark("<|im_start|>"), Mark("<|im_end|>")
VISION_START, VISION_END = Mark("<|vision_start|>"), Mark("<|vision_end|>")
CALL, CALL_END = Mark("<tool_call>", optional=True), Mark("</tool_call>", optional=True)
RESPONSE, RESPONSE_END = Mark("<tool_response>", optional=True), Mark("</tool_response>", optional=True)
DEFAULT_SYSTEM = "You are a helpful assistant."


def qwen2(turns: Sequence[Turn], choices: Choices) -> Iterator[Piece]:
    """Qwen2-VL's and 2.5's form: a system turn comes first, given or not; a video is one run of pads."""
    _refuse_tools(turns, choices)
    if turns and turns[0].role != "system":
        yield from (START, f"system\n{DEFAULT_SYSTEM}", END, "\n")
    for turn, parts in numbered(turns):
        yield from (START, f"{turn.role}\n")
        yield from _content(parts, timestamped=False)
        yield from (END, "\n")
    if choices.add_generation_prompt:
        yield from (START, "assistant\n")


def qwen3(turns: Sequence[Turn], choices: Choices) -> Iterator[Piece]:
    """Qwen3-VL's form: no system turn of its own, tool results in a user's turn, timestamped videos."""
    if choices.tools:
        raise PromptError("qwen3_vl: tool declarations are not written here", "put them in a system turn")
    for place, (turn, parts) in enumerate(numbered(turns)):
        if turn.role == "tool":
            first = place == 0 or turns[place - 1].role != "tool"
            last = place + 1 == len(turns) or turns[place + 1].role != "tool"
            yield from (START, "user") if first else ()
            yield from ("\n", RESPONSE, "\n", *_content(parts, timestamped=True), "\n", RESPONSE_END)
            yield from (END, "\n") if last else ()
            continue
        if turn.role == "system" and place > 0:
            raise PromptError("qwen3_vl: a system turn comes first or not at all")
        yield from (START, f"{turn.role}\n", *_content(parts, timestamped=True))
        for number, call in enumerate(turn.tool_calls):
            yield from _call(call, newline=number > 0 or bool(parts))
        yield from (END, "\n")
    if choices.add_generation_prompt:
        yield from (START, "assistant\n")


def _content(parts: Iterable[str | tuple[int, Image | Video]], timestamped: bool) -> Iterator[Piece]:
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        number, medium = part
        yield VISION_START
        if isinstance(medium, Image):
            yield Pads("image", (medium.tokens,), number)
        elif timestamped:
            for chunk in medium.chunks:
                yield chunk.timestamp
                yield from (VISION_START, Pads("video", (chunk.tokens,), number), VISION_END)
        else:
            yield Pads("video", tuple(chunk.tokens for chunk in medium.chunks), number)
        yield VISION_END


def _call(call: ToolCall, newline: bool) -> Iterator[Piece]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else as_json(arguments)
    yield "\n" if newline else ""
    yield from (CALL, f'\n{{"name": "{call.name}", "arguments": {text}}}\n', CALL_END)


def _refuse_tools(turns: Sequence[Turn], choices: Choices) -> None:
    if choices.tools or any(turn.tool_calls or turn.role == "tool" for turn in turns):
        raise PromptError("Qwen2-VL and Qwen2.5-VL know no tools")

"""How Kimi K2.5, K2.6 and Kimi-VL write a conversation.

Sources: the processor of transformers 5.24 (`Kimi_K25Processor`) for pads and timestamps; for the turns the
checkpoints' chat templates as public ports carry them: the K2.5 renderers of Prime Intellect and of the
Tinker cookbook (think tags, tool calls, the line break behind a picture), ms-swift and vLLM's examples for
both. K2.5's declaration of tools is not written here.
"""

from collections.abc import Iterable, Iterator, Sequence

from moonvit.errors import PromptError
from moonvit.prompt.parts import Chunk, Image, ToolCall, Turn, Video
from moonvit.prompt.pieces import Choices, Mark, Pads, Piece, as_json, numbered

MIDDLE, END = Mark("<|im_middle|>"), Mark("<|im_end|>")
SPEAKERS = {
    "system": Mark("<|im_system|>"),
    "tool": Mark("<|im_system|>"),
    "user": Mark("<|im_user|>"),
    "assistant": Mark("<|im_assistant|>"),
}
MEDIA_BEGIN, MEDIA_START = Mark("<|media_begin|>"), Mark("<|media_start|>")
MEDIA_CONTENT, MEDIA_END = Mark("<|media_content|>"), Mark("<|media_end|>")
THINK, THINK_END = Mark("<think>", optional=True), Mark("</think>", optional=True)
CALLS, CALLS_END = Mark("<|tool_calls_section_begin|>"), Mark("<|tool_calls_section_end|>")
CALL, CALL_END = Mark("<|tool_call_begin|>"), Mark("<|tool_call_end|>")
ARGUMENTS = Mark("<|tool_call_argument_begin|>")
VL_SYSTEM = "You are a helpful assistant"


def kimi_vl(turns: Sequence[Turn], choices: Choices) -> Iterator[Piece]:
    """Kimi-VL's form: a system turn comes first, given or not; pictures only."""
    if choices.tools or any(turn.tool_calls or turn.role == "tool" for turn in turns):
        raise PromptError("kimi_vl knows no tools")
    if turns and turns[0].role != "system":
        yield from (SPEAKERS["system"], "system", MIDDLE, VL_SYSTEM, END)
    for turn, parts in numbered(turns):
        yield from (SPEAKERS[turn.role], turn.role, MIDDLE)
        for part in parts:
            if isinstance(part, str):
                yield part
            elif isinstance(part[1], Video):
                raise PromptError("kimi_vl takes no videos", "give frames as pictures")
            else:
                yield from (MEDIA_START, "image", MEDIA_CONTENT)
                yield from (Pads("image", (part[1].tokens,), part[0]), MEDIA_END)
        yield END
    if choices.add_generation_prompt:
        yield from (SPEAKERS["assistant"], "assistant", MIDDLE)


def kimi_k25(turns: Sequence[Turn], choices: Choices) -> Iterator[Piece]:
    """K2.5's form; its template leaves out thoughts up to the last answer, and all without thinking."""
    if choices.tools:
        raise PromptError("kimi_k25: tool declarations are not written here", "put them in a system turn")
    answers = [place for place, turn in enumerate(turns) if turn.role == "assistant" and not turn.tool_calls]
    last_answer = answers[-1] if answers else -1
    thinking = choices.thinking in (None, True)
    for place, (turn, parts) in enumerate(numbered(turns)):
        yield from (SPEAKERS[turn.role], turn.name or turn.role, MIDDLE)
        if turn.role == "assistant":
            yield from (THINK, turn.reasoning if thinking and place > last_answer else "", THINK_END)
        elif turn.role == "tool":
            yield f"## Return of {turn.tool_call_id}\n"
        yield from _content(parts)
        yield from _calls(turn.tool_calls)
        yield END
    if choices.add_generation_prompt:
        yield from (SPEAKERS["assistant"], "assistant", MIDDLE, THINK)
        yield from () if thinking else (THINK_END,)


def chunk_prompt(chunk: Chunk, number: int) -> Iterator[Piece]:
    """One timestamped chunk of a video."""
    yield from (chunk.timestamp, MEDIA_BEGIN, "video", MEDIA_CONTENT)
    yield from (Pads("video", (chunk.tokens,), number), MEDIA_END)


def _content(parts: Iterable[str | tuple[int, Image | Video]]) -> Iterator[Piece]:
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        number, medium = part
        if isinstance(medium, Image):
            yield from (MEDIA_BEGIN, "image", MEDIA_CONTENT)
            yield from (Pads("image", (medium.tokens,), number), MEDIA_END)
        else:
            for chunk in medium.chunks:
                yield from chunk_prompt(chunk, number)
        yield "\n"


def _calls(calls: Sequence[ToolCall]) -> Iterator[Piece]:
    if not calls:
        return
    yield CALLS
    for call in calls:
        arguments = call.arguments
        text = arguments if isinstance(arguments, str) else as_json(arguments)
        yield from (CALL, call.id, ARGUMENTS, text, CALL_END)
    yield CALLS_END

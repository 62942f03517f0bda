"""The families' ways to write prompts, one row each, with the literals that their tokenizers must have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moonvit.prompt import kimi, kimi_k3, qwen
from moonvit.prompt.parts import Kind, Turn
from moonvit.prompt.pieces import Choices, Piece


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a family writes prompts.

    Attributes:
        render: turns to pieces.
        pads: the pad of each kind.
        needed: literals that its tokenizer must have.
        ends: literals that end an assistant's turn.
        fields: literals and the fields of `config.json` that name their ids.
        thinks: whether it has a mode with and one without thoughts.
        joined: whether neighbouring texts are tokenized as one.
    """

    render: Callable[[Sequence[Turn], Choices], Iterator[Piece]]
    pads: Mapping[Kind, str]
    needed: tuple[str, ...]
    ends: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]
    thinks: bool = False
    joined: bool = True


_KIMI_PADS: Mapping[Kind, str] = {"image": "<|media_pad|>", "video": "<|media_pad|>"}
_KIMI_TURNS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
_KIMI_MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
_KIMI_FIELDS = {
    "<|media_pad|>": ("media_placeholder_token_id", "image_token_id"),
    "<|media_begin|>": ("vision_start_token_id",),
    "<|media_end|>": ("vision_end_token_id",),
}
_QWEN_FIELDS = {
    "<|image_pad|>": ("image_token_id",),
    "<|video_pad|>": ("video_token_id",),
    "<|vision_start|>": ("vision_start_token_id",),
    "<|vision_end|>": ("vision_end_token_id",),
}


def _qwen_form(render: Callable[[Sequence[Turn], Choices], Iterator[Piece]]) -> Form:
    return Form(
        render=render,
        pads={"image": "<|image_pad|>", "video": "<|video_pad|>"},
        needed=("<|im_start|>", "<|im_end|>", *_QWEN_FIELDS),
        ends=("<|im_end|>",),
        fields=_QWEN_FIELDS,
    )


FORMS = {
    "kimi_k3": Form(
        render=kimi_k3.kimi_k3,
        pads=_KIMI_PADS,
        needed=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", *_KIMI_MEDIA),
        ends=("<|end_of_msg|>",),
        fields=_KIMI_FIELDS,
        thinks=True,
        joined=False,
    ),
    "kimi_k25": Form(
        render=kimi.kimi_k25,
        pads=_KIMI_PADS,
        needed=(*_KIMI_TURNS, *_KIMI_MEDIA),
        ends=("<|im_end|>",),
        fields=_KIMI_FIELDS,
        thinks=True,
    ),
    "kimi_vl": Form(
        render=kimi.kimi_vl,
        pads=_KIMI_PADS,
        needed=(*_KIMI_TURNS, "<|media_start|>", *_KIMI_MEDIA[1:]),
        ends=("<|im_end|>",),
        fields={"<|media_pad|>": ("media_placeholder_token_id",)},
    ),
    "qwen2_vl": _qwen_form(qwen.qwen2),
    "qwen2_5_vl": _qwen_form(qwen.qwen2),
    "qwen3_vl": _qwen_form(qwen.qwen3),
}
"""By family, the names of `moonvit.families`."""

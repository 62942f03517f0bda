"""Prompts of the other families against what their own templates and processors make; K3 is in test_prompt_k3."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import DATA
from moonvit.prompt import FORMS, Chunk, Image, PromptFormat, ToolCall, Turn, Video
from prompt_helpers import (
    KIMI_MARKS,
    QWEN_MARKS,
    Folder,
    kimi_files,
    messages,
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

"""What every payload is held to before it is written."""

import torch
from torch import Tensor

from moonvit.errors import PromptError
from moonvit.prompt.embeds import PromptEmbeds
from moonvit.prompt.parts import Prompt

PAYLOADS = ("safetensors", "vllm-prompt", "vllm-images", "sglang")


def check_payload(payload: str, family: str, prompt: Prompt) -> None:
    """`PromptError` for a payload that cannot carry such a prompt; nothing need be encoded yet."""
    if payload not in PAYLOADS:
        raise PromptError(f"payload is {payload!r}, expected one of {', '.join(PAYLOADS)}")
    qwen = family.startswith("qwen")
    if payload == "vllm-prompt" and qwen:
        raise PromptError(
            f"{family}: prompt embeddings carry no 3-D positions", "use the payload vllm-images"
        )
    if payload == "vllm-images" and not qwen:
        raise PromptError(
            f"{family}: vLLM takes image_embeds for the Qwen families only", "use the payload vllm-prompt"
        )
    if payload in ("vllm-images", "sglang"):
        if not prompt.slots:
            raise PromptError(f"{payload}: the prompt has no pictures")
        if any(slot.kind != "image" for slot in prompt.slots):
            raise PromptError(f"{payload}: pictures only, the prompt has a video")


def check_whole(embeds: PromptEmbeds) -> None:
    """`PromptError` unless there is one finite row for each id, and each slot lies among them."""
    rows = embeds.inputs_embeds
    length = len(embeds.prompt.ids)
    if rows.ndim != 2 or len(rows) != length:
        raise PromptError(f"inputs_embeds is {list(rows.shape)}, the prompt has {length} ids")
    if not rows.is_floating_point():
        raise PromptError(f"inputs_embeds is {rows.dtype}, expected a floating type")
    if not torch.isfinite(rows).all():
        raise PromptError(
            f"inputs_embeds is not finite in {rows.dtype}", "a wider --dtype of the text table may help"
        )
    if any(slot.start + slot.length > length for slot in embeds.prompt.slots):
        raise PromptError(f"slots lie beyond the {length} ids")


def check_pictures(embeds: PromptEmbeds) -> None:
    """`PromptError` unless each picture's grid stands for its rows and its pads."""
    slots = embeds.prompt.slots
    if len(embeds.grids) != len(slots) or len(embeds.embeddings) != len(slots):
        raise PromptError(
            f"{len(slots)} slots, but {len(embeds.grids)} grids and {len(embeds.embeddings)} embeddings"
        )
    width = embeds.inputs_embeds.shape[1]
    for number, (slot, rows, grid) in enumerate(
        zip(slots, embeds.embeddings, embeds.grids.tolist(), strict=True)
    ):
        expected = grid[0] * grid[1] * grid[2] // embeds.merge_size**2
        levels = [level[number] for level in embeds.deepstack]
        for found in (rows, *levels):
            if list(found.shape) != [expected, width] or slot.length != expected:
                raise PromptError(
                    f"picture {number}: {list(found.shape)} for {slot.length} pads, "
                    f"its grid {grid} expects [{expected}, {width}]"
                )


def with_deepstack(embeds: PromptEmbeds, number: int) -> Tensor:
    """[tokens, D · (1 + layers)]: a picture's rows with those of Qwen3-VL's layers beside them."""
    return torch.cat([embeds.embeddings[number], *(level[number] for level in embeds.deepstack)], dim=-1)

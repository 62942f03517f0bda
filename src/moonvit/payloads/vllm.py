"""Payloads for vLLM's OpenAI-compatible server.

Sources (vLLM main, read in December 2026): `tensor2base64` in `vllm/utils/serial_utils.py`,
`safe_load_prompt_embeds` in `vllm/frontend/processing/renderers/embed_utils.py`,
`docs/features/prompt_embeds.md` and `docs/features/multimodal_inputs.md`, `_merge_embeds` in
`vllm/entrypoints/chat_utils.py`, and the split of DeepStack columns in
`vllm/model_executor/models/qwen3_vl.py`.
"""

import json
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonvit.payloads.shapes import check_payload, check_pictures, check_whole, with_deepstack
from moonvit.prompt.embeds import PromptEmbeds
from moonvit.weights.place import new_file


def vllm_prompt(embeds: PromptEmbeds) -> dict[str, Any]:
    """`{"prompt_embeds": …}` for the Completions API of a server with `--enable-prompt-embeds`.

    The whole prompt [T, D], chat form and pictures included, as base64 of what `torch.save` writes.
    `PromptError` for the Qwen families, whose 3-D positions and DeepStack rows it cannot carry.
    """
    check_payload("vllm-prompt", embeds.family, embeds.prompt)
    check_whole(embeds)
    return {"prompt_embeds": as_base64(embeds.inputs_embeds)}


def vllm_images(embeds: PromptEmbeds) -> list[dict[str, Any]]:
    """Parts of a chat message for a server with `--enable-mm-embeds`, one a picture; Qwen families only.

    `image_embeds` [n, D], for Qwen3-VL [n, D · (1 + layers)] with the DeepStack rows beside the others, and
    `image_grid_thw` [3]. The server writes the chat form and the pads itself.
    """
    check_payload("vllm-images", embeds.family, embeds.prompt)
    check_pictures(embeds)
    return [
        {
            "type": "image_embeds",
            "image_embeds": {
                "image_embeds": as_base64(with_deepstack(embeds, number)),
                "image_grid_thw": as_base64(grid),
            },
        }
        for number, grid in enumerate(embeds.grids)
    ]


def write_vllm_prompt(embeds: PromptEmbeds, path: Path) -> None:
    """`vllm_prompt` as a JSON file, to which a request's other fields can be added."""
    _write(vllm_prompt(embeds), path)


def write_vllm_images(embeds: PromptEmbeds, path: Path) -> None:
    """`vllm_images` as a JSON file."""
    _write(vllm_images(embeds), path)


def as_base64(tensor: Tensor) -> str:
    """Base64 of the tensor as `torch.save` writes it; of a view, only what it shows."""
    buffer = BytesIO()
    torch.save(tensor.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
    return b64encode(buffer.getvalue()).decode("ascii")


def _write(document: Any, path: Path) -> None:
    with new_file(path) as partial:
        partial.write_text(json.dumps(document))

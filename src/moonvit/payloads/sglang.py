"""The precomputed-embedding item of SGLang.

Sources (SGLang main, read in December 2026): `docs/advanced_features/vlm_query.md`, and in
`python/sglang/srt/multimodal/processors/base_processor.py` the rule that such an item stands alone, for all
pictures of a request.
"""

from pathlib import Path
from typing import Any

import torch

from moonvit.payloads.shapes import check_payload, check_pictures, check_whole, with_deepstack
from moonvit.prompt.embeds import PromptEmbeds
from moonvit.weights.writer import SafetensorsWriter

FORMAT = "precomputed_embedding"


def sglang_image(embeds: PromptEmbeds) -> dict[str, Any]:
    """The one item of `image_data`: all pictures' rows one behind the other.

    `feature` [rows, D], for Qwen3-VL [rows, D · (1 + layers)], and `image_grid_thw` int64 [pictures, 3]; for
    Kimi-VL `image_grid_hws` [pictures, 2].
    """
    check_payload("sglang", embeds.family, embeds.prompt)
    check_whole(embeds)
    check_pictures(embeds)
    feature = torch.cat([with_deepstack(embeds, number) for number in range(len(embeds.embeddings))])
    if embeds.family == "kimi_vl":
        return {"format": FORMAT, "feature": feature, "image_grid_hws": embeds.grids[:, 1:].contiguous()}
    return {"format": FORMAT, "feature": feature, "image_grid_thw": embeds.grids}


def write_sglang(embeds: PromptEmbeds, path: Path) -> None:
    """The item's tensors and `input_ids` [T] as safetensors; `format` and `text` are in the metadata."""
    item = sglang_image(embeds)
    with SafetensorsWriter(path) as writer:
        writer.add("input_ids", torch.tensor(embeds.prompt.ids, dtype=torch.int64))
        for name, value in item.items():
            if isinstance(value, torch.Tensor):
                writer.add(name, value)
        writer.metadata.update(format=FORMAT, family=embeds.family, text=embeds.prompt.text)

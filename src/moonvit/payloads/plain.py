"""A prompt's embeddings as a plain safetensors file."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from moonvit._version import __version__
from moonvit.payloads.shapes import check_whole
from moonvit.prompt.embeds import PromptEmbeds
from moonvit.weights.writer import SafetensorsWriter


def write_plain(embeds: PromptEmbeds, path: Path, **metadata: str) -> None:
    """Write `input_ids` [T], `inputs_embeds` [T, D], `slots` [n, 2] (start, length) and `grid_thws` [n, 3].

    For Qwen3-VL also `deepstack/{k}` [rows, D], the rows of all slots one behind the other. The metadata
    hold the text, the slots with kind and part as JSON, the family, and what else is given.
    """
    check_whole(embeds)
    slots = embeds.prompt.slots
    with SafetensorsWriter(path) as writer:
        writer.add("input_ids", torch.tensor(embeds.prompt.ids, dtype=torch.int64))
        writer.add("inputs_embeds", embeds.inputs_embeds)
        pairs = [[slot.start, slot.length] for slot in slots]
        writer.add("slots", torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2))
        writer.add("grid_thws", embeds.grids)
        for layer, level in enumerate(embeds.deepstack):
            writer.add(f"deepstack/{layer}", torch.cat(level))
        writer.metadata.update(
            family=embeds.family,
            text=embeds.prompt.text,
            slots=json.dumps([asdict(slot) for slot in slots]),
            version=__version__,
            **metadata,
        )

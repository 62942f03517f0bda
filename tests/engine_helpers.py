"""What `moonvit.engine` writes, beside the same models run wholly by `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine_checkpoints import MAKERS, Whole, picture
from moonvit.engine import Chat, Clip, Generator, Media
from moonvit.engine.session import Request, Session
from moonvit.pixels.base import PixelBatch


@dataclass
class Asked:
    """What `transformers` is given for a request of ours: ids, and pixels by our own processor."""

    ids: torch.Tensor
    inputs: dict[str, Any]


def as_asked(whole: Whole, request: Request, pixels: Sequence[PixelBatch]) -> Asked:
    """`pixels`: one batch a picture and one a video, in order; a video's holds all its chunks."""
    ids = list(request.prompt.ids)
    kinds = [0] * len(ids)
    for slot in request.prompt.slots:
        for place in range(slot.start, slot.start + slot.length):
            kinds[place] = 1 if slot.kind == "image" else 2
            if slot.kind == "video" and whole.family == "kimi_k25":
                ids[place] = whole.model.config.video_token_id  # transformers has a pad of its own for these
    stills = [batch for batch, media in zip(pixels, request.media, strict=True) if is_still(media)]
    clips = [
        (batch, media) for batch, media in zip(pixels, request.media, strict=True) if not is_still(media)
    ]
    inputs: dict[str, Any] = {}
    if stills:
        inputs["pixel_values"] = torch.cat([batch.pixel_values for batch in stills])
        inputs["image_grid_thw"] = torch.cat([batch.grid_thws for batch in stills])
    if clips:
        inputs["pixel_values_videos"] = torch.cat([batch.pixel_values for batch, _ in clips])
        grids = [batch.grid_thws for batch, _ in clips]
        if whole.family.startswith("qwen"):  # one grid a video, its patches of frames counted
            grids = [torch.tensor([[len(grid), *grid[0, 1:].tolist()]]) for grid in grids]
        inputs["video_grid_thw"] = torch.cat(grids)
        if whole.family == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([media.interval for _, media in clips])
    if whole.family.startswith("qwen"):
        inputs["mm_token_type_ids"] = torch.tensor([kinds])
    return Asked(torch.tensor([ids]), inputs)


def is_still(media: Media) -> bool:
    return not hasattr(media.part, "chunks")


def reference_reply(
    whole: Whole, asked: Asked, tokens: int, ends: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """Greedy ids by `generate`, and the logits [tokens, V] of every step."""
    with torch.no_grad():
        out = whole.model.generate(
            input_ids=asked.ids, attention_mask=torch.ones_like(asked.ids), **asked.inputs,
            do_sample=False, max_new_tokens=tokens, eos_token_id=list(ends), pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.sequences[0, -len(out.logits) :].tolist(), torch.cat(out.logits)


CLIP = Clip([picture(64, 48, seed) for seed in range(20, 28)], fps=4.0)
CASES: dict[str, list[Any]] = {
    "one picture": [picture(150, 90, 1)],
    "three pictures": [picture(60, 190, 2), picture(150, 90, 3), picture(57, 43, 4)],
    "video": [CLIP],
    "slow video": [Clip([picture(56, 56, seed) for seed in range(30, 46)], fps=1.0)],
    "pictures and video": [picture(90, 60, 5), CLIP, picture(43, 57, 6)],
    "text alone": [],
}


def cases() -> list[tuple[str, str]]:
    """Families with what they take."""
    return [
        (family, case) for family in MAKERS for case in CASES if not (family == "kimi_vl" and "video" in case)
    ]


@dataclass
class Compared:
    """A reply of ours beside the whole model's."""

    ids: list[int]
    expected: list[int]
    logits: torch.Tensor
    expected_logits: torch.Tensor

    @property
    def difference(self) -> float:
        """Of any logit of any step, at most."""
        return float((self.logits - self.expected_logits).abs().max())


@dataclass
class Pair:
    """A checkpoint's generator and the whole model, and the pixels that were made for each medium."""

    whole: Whole
    generator: Generator
    pixels: dict[str, list[PixelBatch]] = field(default_factory=dict)

    def see(self, sources: Sequence[Any]) -> list[Media]:
        return [self._see(source) for source in sources]

    def _see(self, source: Any) -> Media:
        encoder = self.generator.eyes.encoder
        taken: list[PixelBatch] = []
        features = encoder.features
        encoder.features = lambda batch: taken.append(batch) or features(batch)
        (media,) = self.generator.see(source)
        del encoder.features
        if taken:
            self.pixels[media.key] = taken
        return media

    def compare(self, chat: Chat, ids: Sequence[int], tokens: int) -> Compared:
        """The last reply of a conversation of ours, greedy, and what the whole model says there."""
        form = self.generator.format
        prompt = form.encode(chat.turns[:-1], thinking=chat.thinking)
        request = self.generator.request(prompt, chat.media)
        batches = []
        for media in request.media:
            parts = self.pixels[media.key]
            pixels, grids = (torch.cat([getattr(p, n) for p in parts]) for n in ("pixel_values", "grid_thws"))
            batches.append(PixelBatch(pixels, grids, []))
        asked = as_asked(self.whole, request, batches)
        expected, expected_logits = reference_reply(self.whole, asked, tokens, form.end_ids)
        session = Session(self.generator.text)
        logits = [session.prefill(request, (form.pad_id("image"), form.pad_id("video")))]
        logits += [session.advance(token) for token in expected[:-1]]
        return Compared(list(ids), expected, torch.stack(logits), expected_logits)


def make_pair(family: str, directory: Path) -> Pair:
    """Float32."""
    whole = MAKERS[family](directory)
    return Pair(whole, Generator.from_pretrained(whole.directory, dtype="float32"))

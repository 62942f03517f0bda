"""A whole prompt as embeddings: rows of the text model's table, with pictures in place of the pads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moonvit.clips import VideoChunk, check_videos
from moonvit.errors import PromptError
from moonvit.families import Family, family_of
from moonvit.pixels.base import PictureProcessor
from moonvit.pixels.decode import Exif, Limits
from moonvit.pixels.video import SUFFIXES, open_video
from moonvit.prompt.format import PromptFormat
from moonvit.prompt.parts import Chunk, Image, Part, Prompt, Turn, Video
from moonvit.splice import splice
from moonvit.weights.index import Checkpoint
from moonvit.weights.load import tower_only
from moonvit.weights.rows import Table, check_ids, embedding_rows, embedding_table

if TYPE_CHECKING:
    from moonvit.encoder import Encoder


@dataclass(frozen=True)
class Medium:
    """A picture or video, encoded.

    Attributes:
        part: its place in the prompt.
        embeddings: for each slot [tokens, text_hidden_size].
        deepstack: for each of Qwen3-VL's listed layers, such a list; else empty.
        grids: for each slot (t, h, w) in patches.
    """

    part: Image | Video
    embeddings: list[Tensor]
    grids: list[tuple[int, int, int]]
    deepstack: list[list[Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class PromptEmbeds:
    """A prompt as an engine takes it.

    Attributes:
        family: of the model.
        prompt: ids and slots.
        inputs_embeds: [T, text_hidden_size] in the text table's type.
        embeddings: for each slot [tokens, text_hidden_size], in the tower's type.
        grids: int64 [slots, 3], (t, h, w) in patches.
        deepstack: for each of Qwen3-VL's listed layers, for each slot such rows; else empty.
        merge_size: patches along a side of what one row stands for.
    """

    family: str
    prompt: Prompt
    inputs_embeds: Tensor
    embeddings: list[Tensor]
    grids: Tensor
    deepstack: list[list[Tensor]]
    merge_size: int


class PromptBuilder:
    """Everything of a checkpoint that a prompt needs but the tower; opening it moves no tensor.

    Attributes:
        checkpoint: with the text table's shard.
        format: the family's.
        processor: plans pictures.
        table: the text embedding.

    Raises on opening:
        TokenizerError, ConfigError: as `PromptFormat.open`.
        WeightsError: where there is no text embedding.
        PromptError: where the table's width is not that of the tower's embeddings.
    """

    def __init__(self, checkpoint: Checkpoint, limits: Limits | None = None) -> None:
        self.checkpoint = checkpoint
        self._family: Family = family_of(checkpoint.config, f"{checkpoint.where}/config.json")
        vision, pixels = self._family.read(checkpoint)
        self.processor: PictureProcessor = self._family.processor(pixels, limits)
        self.format = PromptFormat.open(checkpoint, self._family.name)
        self.table: Table = embedding_table(checkpoint)
        if tower_only(checkpoint):
            raise PromptError(
                f"{checkpoint.where}: has no projector, so that its embeddings are not the text model's"
            )
        if self.table.width != vision.text_hidden_size:
            raise PromptError(
                f"{checkpoint.where}: {self.table.name} is {self.table.width} wide, "
                f"the tower's embeddings {vision.text_hidden_size}"
            )
        self.merge_size = vision.merge_size

    @property
    def family(self) -> str:
        return self._family.name

    def plan(
        self,
        sources: Iterable[str],
        *,
        max_tokens: int | None = None,
        exif: Exif = "apply",
        experimental: bool = False,
    ) -> list[Image | None]:
        """Each picture's part from its header, None for a video; `ImageError` for one that is neither.

        `MoonvitError` for a video with a family that takes none; see `Encoder.encode_video`.
        """
        plans: list[Image | None] = []
        for source in sources:
            if is_video(source):
                check_videos(self.family, experimental)
                open_video(source, limits=self.processor.limits, exif=exif)
                plans.append(None)
            else:
                plan = self.processor.plan(source, max_tokens=max_tokens, exif=exif)
                plans.append(Image((plan.width, plan.height), plan.tokens))
        return plans

    def check(self, prompt: Prompt) -> None:
        """`WeightsError` for an id outside the text embedding, pads aside."""
        check_ids(self.checkpoint, self.table, sorted(set(self._text_ids(prompt))))

    def embed(self, prompt: Prompt, media: Sequence[Medium]) -> PromptEmbeds:
        """The prompt's embeddings; only the rows of its text are read.

        `PromptError` where slots and embeddings differ in number, length or width.
        """
        self.check(prompt)
        text = sorted(set(self._text_ids(prompt)))
        rows = embedding_rows(self.checkpoint, text, self.table)
        place = {token: number for number, token in enumerate(text)}
        pads = {slot.kind: self.format.pad_id(slot.kind) for slot in prompt.slots}.values()
        inputs_embeds = torch.zeros((len(prompt.ids), self.table.width), dtype=self.table.dtype)
        where = [number for number, token in enumerate(prompt.ids) if token in place]
        inputs_embeds[where] = rows[[place[prompt.ids[number]] for number in where]]
        embeddings = [embedding for medium in media for embedding in medium.embeddings]
        self.format.slots(prompt.ids, [len(embedding) for embedding in embeddings])
        ids = torch.tensor([prompt.ids], dtype=torch.int64).reshape(1, -1)
        whole = splice(inputs_embeds[None], ids, [embeddings], frozenset(pads))[0]
        levels = range(max((len(medium.deepstack) for medium in media), default=0))
        return PromptEmbeds(
            family=self.family,
            prompt=prompt,
            inputs_embeds=whole,
            embeddings=embeddings,
            grids=torch.tensor([g for m in media for g in m.grids], dtype=torch.int64).reshape(-1, 3),
            deepstack=[[rows for medium in media for rows in medium.deepstack[k]] for k in levels],
            merge_size=self.merge_size,
        )

    def _text_ids(self, prompt: Prompt) -> Iterable[int]:
        pads = {self.format.pad_id("image"), self.format.pad_id("video")}
        return (token for token in prompt.ids if token not in pads)


def encode_media(
    encoder: "Encoder",
    sources: Iterable[str],
    *,
    max_tokens: int | None = None,
    exif: Exif = "apply",
    experimental: bool = False,
) -> list[Medium]:
    """Pictures and, by their file names' endings, videos in order, encoded one at a time."""
    media: list[Medium] = []
    for source in sources:
        if is_video(source):
            chunks = list(encoder.encode_video(source, exif=exif, experimental=experimental))
            media.append(_as_video(chunks))
            continue
        prepared = encoder.processor.prepare(source, max_tokens=max_tokens, exif=exif)
        features = encoder.features(encoder.processor.pack([prepared]))
        plan = prepared.plan
        part = Image((plan.width, plan.height), plan.tokens)
        media.append(Medium(part, features.embeddings, [plan.grid], features.deepstack))
    return media


def question(text: str, parts: Sequence[Image | Video], system: str = "") -> tuple[Turn, ...]:
    """A conversation of one question: its pictures and videos, then its text."""
    asked: tuple[Part, ...] = (*parts, text) if text else tuple(parts)
    user = Turn("user", asked)
    return (Turn("system", (system,)), user) if system else (user,)


def is_video(source: str) -> bool:
    """By the ending of its name."""
    return source[:5].lower() != "data:" and Path(source).suffix.lower() in SUFFIXES


def _as_video(chunks: Sequence[VideoChunk]) -> Medium:
    levels = range(len(chunks[0].deepstack))
    return Medium(
        Video(tuple(Chunk(chunk.timestamp, len(chunk.embeddings)) for chunk in chunks)),
        [chunk.embeddings for chunk in chunks],
        [chunk.grid for chunk in chunks],
        [[chunk.deepstack[level] for chunk in chunks] for level in levels],
    )


def draft(plans: Sequence[Image | None]) -> list[Any]:
    """Parts to check a prompt with before anything is encoded; a video stands as one row."""
    return [plan if plan is not None else Video((Chunk("", 1),)) for plan in plans]

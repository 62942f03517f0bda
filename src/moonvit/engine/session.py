"""A request to the text model, and the keys and values of what it has seen."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moonvit.configs.qwen import QwenConfig
from moonvit.engine.media import Media
from moonvit.engine.positions import Positions, Span, axial_positions, plain_positions
from moonvit.engine.text import TextModel, cut_cache
from moonvit.errors import PromptError
from moonvit.prompt import Prompt, Slot
from moonvit.splice import splice


@dataclass(frozen=True)
class Request:
    """A prompt with the media of its slots and the places of its tokens."""

    prompt: Prompt
    media: tuple[Media, ...]
    positions: Positions

    @property
    def embeddings(self) -> list[Tensor]:
        """[tokens, width], one a slot."""
        return [rows for media in self.media for rows in media.embeddings]

    @property
    def deepstack(self) -> list[Tensor]:
        """For each of Qwen3-VL's listed layers, the rows of all slots, one behind the other."""
        layers = len(self.media[0].deepstack) if self.media else 0
        return [
            torch.cat([rows for media in self.media for rows in media.deepstack[layer]])
            for layer in range(layers)
        ]

    def keys(self) -> list[Hashable]:
        """What each token is: its id, or which row of which media."""
        keys: list[Hashable] = list(self.prompt.ids)
        rows = [(media.key, number) for media in self.media for number in range(len(media.embeddings))]
        for slot, (key, number) in zip(self.prompt.slots, rows, strict=True):
            for place in range(slot.length):
                keys[slot.start + place] = (key, number, place)
        return keys

    def is_picture(self) -> Tensor:
        """Bool [T], true in slots."""
        mask_T = torch.zeros(len(self.prompt.ids), dtype=torch.bool)
        for slot in self.prompt.slots:
            mask_T[slot.start : slot.start + slot.length] = True
        return mask_T


def make_request(
    prompt: Prompt, media: Sequence[Media], axial: QwenConfig | None, per_second: int
) -> Request:
    """`PromptError` where slots and embeddings do not go together, with both numbers.

    Args:
        prompt: expanded.
        media: of its slots, in order.
        axial: the tower's geometry where tokens have three axes.
        per_second: steps on the time axis in a second of a video; 0 counts patches of frames.
    """
    rows = [len(rows) for item in media for rows in item.embeddings]
    if len(rows) != len(prompt.slots):
        raise PromptError(f"{len(prompt.slots)} slots in the prompt, but {len(rows)} embeddings")
    for number, (slot, count) in enumerate(zip(prompt.slots, rows, strict=True)):
        if slot.length != count:
            raise PromptError(f"slot {number}: {slot.length} pads, but an embedding of {count} rows")
    length = len(prompt.ids)
    if axial is None:
        return Request(prompt, tuple(media), plain_positions(length))
    spans = spans_of(prompt.slots, media, axial.merge_size, per_second)
    return Request(prompt, tuple(media), axial_positions(length, spans))


def spans_of(
    slots: Sequence[Slot], media: Sequence[Media], merge_size: int, per_second: int = 0
) -> list[Span]:
    """The unbroken runs of slots: chunks of a video with nothing between them are frames of one run."""
    spans: list[Span] = []
    places = [(item, grid) for item in media for grid in item.grids]
    last: Media | None = None
    for slot, (item, (t, h, w)) in zip(slots, places, strict=True):
        if spans and item is last and slot.start == spans[-1].start + spans[-1].length:
            before = spans.pop()
            spans.append(Span(before.start, before.frames + t, before.rows, before.columns, before.interval))
        else:
            seconds = torch.tensor(item.interval, dtype=torch.float32)
            interval = float(seconds * per_second) if per_second and slot.kind == "video" else 1.0
            spans.append(Span(slot.start, t, h // merge_size, w // merge_size, interval))
        last = item
    return spans


class Session:
    """What a text model has seen of one conversation: keys and values, cut back and gone on from.

    Attributes:
        computed: tokens that went through the text model in the last `prefill`.
    """

    def __init__(self, text: TextModel) -> None:
        self.text = text
        self.computed = 0
        self._cache: Any = None
        self._keys: list[Hashable] = []
        self._places: Tensor | None = None
        self._request: Request | None = None

    def prefill(self, request: Request, pads: Sequence[int]) -> Tensor:
        """Logits [V] behind the prompt; what begins like the conversation so far is not computed again."""
        keys = request.keys()
        places = request.positions.model_input(0, len(keys))
        start = self._common(keys, places)
        if self._cache is None or start == 0:
            self._cache, start = self.text.new_cache(), 0
        cut_cache(self._cache, start)
        self._places, self._request = None, request  # a step cut short leaves nothing to go on from
        ids_T = torch.tensor(request.prompt.ids)
        embeddings_TD = self._spliced(request, ids_T, pads)
        pictures_T = request.is_picture()
        before = int(pictures_T[:start].sum())
        deepstack = [rows[before:] for rows in request.deepstack]
        logits_V = self.text.step(
            embeddings_TD[start:], places[..., start:], self._cache, pictures_T[start:], deepstack
        )
        self.computed = len(keys) - start
        self._keys, self._places = keys, places
        return logits_V

    def advance(self, token: int) -> Tensor:
        """Logits [V] behind one more token."""
        assert self._request is not None
        assert self._places is not None
        place = len(self._keys)
        position = self._request.positions.model_input(place, place + 1)
        places, self._places = torch.cat([self._places, position], dim=-1), None
        logits_V = self.text.step(self.text.embed(torch.tensor([token])), position, self._cache)
        self._keys.append(token)
        self._places = places
        return logits_V

    def _common(self, keys: list[Hashable], places: Tensor) -> int:
        """How many tokens are the same, at the same places, short of the last one."""
        if self._places is None or self._places.shape[:-1] != places.shape[:-1]:
            return 0
        most = min(len(keys) - 1, len(self._keys))
        same = (self._places[..., :most] == places[..., :most]).flatten(0, -2).all(dim=0).tolist()
        for place in range(most):
            if not same[place] or keys[place] != self._keys[place]:
                most = place
                break
        return most if self.text.croppable or most == len(self._keys) else 0

    @torch.inference_mode()
    def _spliced(self, request: Request, ids_T: Tensor, pads: Sequence[int]) -> Tensor:
        words_T = ids_T.masked_fill(request.is_picture(), 0)
        embeddings_TD = self.text.embed(words_T)
        return splice(embeddings_TD[None], ids_T[None], [request.embeddings], frozenset(pads))[0]

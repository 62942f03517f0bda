"""Places of tokens for the rotary embedding of text models; whole numbers only.

Kimi's are plain: 0, 1, 2, … Qwen's have three axes: time, row and column. Text counts the same on all three;
a picture's token stands at (start + frame, start + row, start + column), and what follows goes on behind the
picture's longer side. Source: `get_rope_index` of transformers 5.24. What is written behind a prompt goes on
from its last token, as in transformers' `generate`, even where a slow video's time has run further.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One unbroken run of a picture's or video's tokens, frame by frame, row by row.

    Attributes:
        start: place of its first token in the prompt.
        frames: patches of frames, one behind the other without text between.
        rows: of tokens in a frame.
        columns: of tokens in a frame.
        interval: steps on the time axis from one patch of frames to the next.
    """

    start: int
    frames: int
    rows: int
    columns: int
    interval: float = 1.0

    @property
    def length(self) -> int:
        """Tokens of the run."""
        return self.frames * self.rows * self.columns


@dataclass(frozen=True)
class Positions:
    """Places of a prompt's tokens; what is written behind it goes on from the last, axis by axis.

    Attributes:
        prompt: int64, [T], T at least 1, or [3, T] where a token has a time, a row and a column.
    """

    prompt: Tensor

    def model_input(self, start: int, stop: int) -> Tensor:
        """Places of tokens [start, stop), counted from the prompt's first, as [1, n] or [3, 1, n]."""
        length = self.prompt.shape[-1]
        own = self.prompt[..., start : min(stop, length)]
        later = self.prompt[..., -1:] + 1 + torch.arange(max(start - length, 0), max(stop - length, 0))
        return torch.cat([own, later], dim=-1).unsqueeze(-2)


def plain_positions(length: int) -> Positions:
    """0, 1, 2, …"""
    return Positions(torch.arange(length))


def axial_positions(length: int, spans: Sequence[Span]) -> Positions:
    """Three axes: `spans` in rising order of their starts, all else text.

    `ValueError` for a span that overlaps another or reaches past the end.
    """
    parts: list[Tensor] = []
    place = token = 0
    for span in spans:
        if not token <= span.start <= length - span.length:
            raise ValueError(f"tokens {span.start} to {span.start + span.length} do not fit into {length}")
        parts.append(_text(place, span.start - token))
        place += span.start - token
        parts.append(place + _vision(span))
        place += max(span.rows, span.columns)
        token = span.start + span.length
    parts.append(_text(place, length - token))
    return Positions(torch.cat(parts, dim=1))


def _text(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).expand(3, -1)


def _vision(span: Span) -> Tensor:
    """[3, frames·rows·columns]; times are cut off after a product in float32, as the reference does."""
    times = (torch.arange(span.frames, dtype=torch.float32) * span.interval).long()
    axes = torch.meshgrid(times, torch.arange(span.rows), torch.arange(span.columns), indexing="ij")
    return torch.stack(axes).flatten(1)

"""The pictures, clip or pattern that trace and diagnose run on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from PIL import Image

from moonvit.cli import options
from moonvit.cli.sources import expand
from moonvit.encoder import Encoder
from moonvit.pixels.decode import Exif, describe, read_image
from moonvit.pixels.kimi import PixelBatch
from moonvit.trace.patterns import PATTERNS, as_clip, frames, parse_size

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Given:
    """What was asked for: opened pictures in order, their names, and whether they are one clip."""

    pictures: Sequence[Image.Image]
    names: Sequence[str]
    clip: bool
    max_tokens: int | None

    def batch(self, encoder: Encoder) -> PixelBatch:
        batch = encoder.processor(list(self.pictures), max_tokens=self.max_tokens, exif="ignore")
        return as_clip(batch) if self.clip else batch

    def metadata(self) -> dict[str, str]:
        sizes = [list(picture.size) for picture in self.pictures]
        entries = {"sources": list(self.names), "sizes": sizes, "clip": self.clip}
        return {key: json.dumps(value) for key, value in entries.items()}


def picture_options(command: F) -> F:
    """`--pattern --size --frames --clip --exif --max-tokens`, as `given_pictures` takes them."""
    for option in reversed(
        (
            click.option("--pattern", type=click.Choice(PATTERNS), help="A drawn picture in place of IMG."),
            click.option(
                "--size", default="84x56", show_default=True, metavar="WxH", help="Of the pattern, in pixels."
            ),
            click.option(
                "--frames", "count", type=click.IntRange(1), default=1, help="Frames of a pattern's clip."
            ),
            click.option("--clip", is_flag=True, help="Several IMG are the frames of one clip."),
            options.exif,
            options.max_tokens,
        )
    ):
        command = option(command)
    return command


def given_pictures(
    encoder: Encoder,
    images: Sequence[str],
    pattern: str | None,
    size: str,
    count: int,
    clip: bool,
    exif: str,
    max_tokens: int | None,
) -> Given | None:
    """The pictures, read and upright; None if neither a file nor a pattern is named."""
    if images and pattern:
        raise click.UsageError("give pictures or --pattern, not both")
    if pattern:
        drawn = frames(pattern, parse_size(size), count)
        return Given(drawn, [f"pattern:{pattern}"] * count, count > 1, max_tokens)
    if not images:
        return None
    turn: Exif = "apply" if exif == "apply" else "ignore"
    sources = expand(images)
    pictures = [read_image(source, limits=encoder.processor.limits, exif=turn) for source in sources]
    return Given(pictures, [describe(source) for source in sources], clip, max_tokens)

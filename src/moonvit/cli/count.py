"""`moonvit count`."""

import json
import sys
from pathlib import Path

import click

from moonvit.cli import fail, one_line, options
from moonvit.cli.sources import expand
from moonvit.config import PixelConfig
from moonvit.errors import ImageError
from moonvit.fields import read_json
from moonvit.pixels.decode import Limits, describe, image_size
from moonvit.pixels.plan import ImagePlan, plan_image
from moonvit.presets import preprocessor_config


@click.command("count")
@click.argument("images", nargs=-1, required=True, metavar="IMG...")
@click.option("--model", metavar="M", help="Directory of a checkpoint. [default: K3's released limits]")
@options.max_tokens
@options.max_pixels
@options.max_bytes
@options.exif
@options.output_format("human", "json")
def command(
    images: tuple[str, ...],
    model: str | None,
    max_tokens: int | None,
    max_pixels: int | None,
    max_bytes: int | None,
    exif: str,
    kind: str,
) -> None:
    """Count the tokens of pictures; only their headers are read."""
    config = _pixel_config(model)
    limits = Limits(max_pixels=max_pixels or Limits.max_pixels, max_bytes=max_bytes or Limits.max_bytes)
    plans: list[tuple[str, ImagePlan]] = []
    failures: list[dict[str, str]] = []
    for source in expand(images):
        try:
            size = image_size(source, limits=limits, exif="apply" if exif == "apply" else "ignore")
            plans.append((describe(source), plan_image(*size, config, max_tokens)))
        except ImageError as error:
            failures.append({"source": describe(source), "error": one_line(error)})
            fail(one_line(error))
    _report(plans, failures, kind)
    sys.exit(1 if failures else 0)


def _pixel_config(model: str | None) -> PixelConfig:
    if model is None:
        return PixelConfig.from_dict(preprocessor_config())
    path = Path(model) / "preprocessor_config.json"
    return PixelConfig.from_dict(read_json(path), str(path))


def _report(plans: list[tuple[str, ImagePlan]], failures: list[dict[str, str]], kind: str) -> None:
    if kind == "json":
        rows = [
            {
                "source": source,
                "tokens": plan.tokens,
                "grid_thw": list(plan.grid),
                "size": [plan.width, plan.height],
                "resized": [plan.new_width, plan.new_height],
            }
            for source, plan in plans
        ]
        click.echo(json.dumps({"images": rows, "failures": failures}, indent=2))
        return
    for source, plan in plans:
        _, h, w = plan.grid
        click.echo(f"{plan.tokens:>7}  {plan.width}x{plan.height}  grid 1x{h}x{w}  {source}")
    if len(plans) > 1:
        click.echo(f"{sum(plan.tokens for _, plan in plans):>7}  total")

"""`moonvit count`."""

import json
import sys

import click

from moonvit.cli import fail, one_line, options
from moonvit.cli.sources import expand
from moonvit.config import PixelConfig
from moonvit.errors import ImageError
from moonvit.families import FAMILIES, family_of
from moonvit.pixels.base import PictureProcessor
from moonvit.pixels.decode import Exif, Limits, describe
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.plan import ImagePlan
from moonvit.presets import preprocessor_config
from moonvit.weights.source import config_files


@click.command("count")
@click.argument("images", nargs=-1, required=True, metavar="IMG...")
@click.option(
    "--model", metavar="M", help="Checkpoint, mmproj-*.gguf or repository. [default: K3's released limits]"
)
@options.revision
@options.max_tokens
@options.max_pixels
@options.max_bytes
@options.exif
@options.output_format("human", "json")
def command(
    images: tuple[str, ...],
    model: str | None,
    revision: str | None,
    max_tokens: int | None,
    max_pixels: int | None,
    max_bytes: int | None,
    exif: str,
    kind: str,
) -> None:
    """Count the tokens of pictures; only their headers are read."""
    limits = Limits(max_pixels=max_pixels or Limits.max_pixels, max_bytes=max_bytes or Limits.max_bytes)
    processor = _processor(model, revision, limits)
    plans: list[tuple[str, ImagePlan]] = []
    failures: list[dict[str, str]] = []
    for source in expand(images):
        try:
            turned: Exif = "apply" if exif == "apply" else "ignore"
            plans.append((describe(source), processor.plan(source, max_tokens=max_tokens, exif=turned)))
        except ImageError as error:
            failures.append({"source": describe(source), "error": one_line(error)})
            fail(one_line(error))
    _report(plans, failures, kind)
    sys.exit(1 if failures else 0)


def _processor(model: str | None, revision: str | None, limits: Limits) -> PictureProcessor:
    """The processor of that checkpoint's family; of K3 where there is no `config.json` beside its rules."""
    if model is None:
        return KimiProcessor(PixelConfig.from_dict(preprocessor_config()), limits)
    files = config_files(model, revision, cached=True)
    rules = files.picture_rules
    there = "config.json" in files.file_names()
    family = family_of(files.config, f"{model}/config.json") if there else FAMILIES[0]
    return family.processor(family.pixels(rules.values, rules.where), limits)


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

"""`moonvit diagnose`."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch

from moonvit.cli import options
from moonvit.cli.compare import parse_grids
from moonvit.cli.inputs import Given, given_pictures, picture_options
from moonvit.encoder import Encoder
from moonvit.errors import MoonvitError
from moonvit.ops.grid import Grid, as_grids, lengths
from moonvit.trace.budgets import ROUNDING
from moonvit.trace.diagnose import diagnose
from moonvit.trace.dump import Dump, DumpError, parse_renames
from moonvit.trace.known import known_tower
from moonvit.trace.layout import to_raster
from moonvit.trace.pixelways import PixelWays
from moonvit.trace.text import diagnosis_document, diagnosis_lines
from moonvit.trace.variants import Machine
from moonvit.trace.weights import Float64Weights


@click.command("diagnose")
@click.argument("mine", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, metavar="[IMG]...")
@options.model
@click.option(
    "--ref", "reference", type=click.Path(path_type=Path), help="A trace of the same picture, for its pixels."
)
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="THEIRS=OURS",
    help="Rename stages of MINE; {} stands for a block's number. Or a JSON file of such pairs.",
)
@click.option(
    "--order",
    type=click.Choice(["auto", "raster", "block"]),
    default="auto",
    show_default=True,
    help="Of patches in MINE.",
)
@click.option("--dtype", type=click.Choice(list(ROUNDING)), help="What MINE was computed in. [default: seen]")
@click.option("--grid", metavar="T,H,W", multiple=True, help="Of each picture, where no dump has grid_thws.")
@options.norm_eps
@picture_options
@options.output_format("human", "json")
def command(
    mine: Path,
    images: tuple[str, ...],
    model: str,
    reference: Path | None,
    maps: tuple[str, ...],
    order: str,
    dtype: str | None,
    grid: tuple[str, ...],
    norm_eps: float | None,
    kind: str,
    **picture: Any,
) -> None:
    """Say which known mistake explains the stages that MINE holds.

    The pixels are made from IMG or --pattern, or taken from --ref, or else from MINE itself, and then they
    are not judged. `projected` and block outputs are enough. The exit code is 1 unless MINE is right.
    """
    encoder = Encoder.from_pretrained(model, norm_eps=norm_eps, backend="eager")
    known_tower(encoder, "diagnose")
    dump = Dump(mine, parse_renames(maps))
    given = given_pictures(encoder, images, **picture)
    pixels, grids = _pixels(encoder, dump, given, reference, parse_grids(grid))
    machine = machine_for(encoder, pixels, grids, given)
    found = diagnose(dump, machine, dtype=dtype, order=order)
    if kind == "json":
        click.echo(json.dumps(diagnosis_document(found), indent=2))
    else:
        click.echo("\n".join(diagnosis_lines(found)))
    sys.exit(0 if found.good else 1)


def machine_for(
    encoder: Encoder, pixels: torch.Tensor, grids: list[Grid], given: Given | None = None
) -> Machine:
    """The right tower in float64 on those pixels; `ConfigError` for one that cannot be diagnosed."""
    config, rules, checkpoint = known_tower(encoder, "diagnose")
    pictures, tokens = (given.pictures, given.max_tokens) if given else ((), None)
    ways = PixelWays(pixels.double(), grids, rules, pictures, tokens)
    return Machine(config, Float64Weights(checkpoint), grids, ways)


def _pixels(
    encoder: Encoder, mine: Dump, given: Given | None, reference: Path | None, grids: list[Grid] | None
) -> tuple[torch.Tensor, list[Grid]]:
    if given is not None:
        batch = given.batch(encoder)
        return batch.pixel_values, as_grids(batch.grid_thws)
    for dump in [Dump(reference)] if reference else [mine]:
        found = grids or dump.grids() or mine.grids()
        if "pixels" in dump and found:
            patch, size = encoder.config.patch_size, encoder.config.merge_size
            values = dump.read("pixels")
            if values.size != sum(lengths(found)) * 3 * patch * patch:
                raise DumpError(f"{dump.path}: pixels {list(values.shape)} do not fit grids {found}")
            values = values.reshape(-1, 3, patch, patch)
            if dump.metadata.get("order") == "block":
                values = to_raster(values, found, size)
            return torch.from_numpy(values), found
    raise MoonvitError(
        f"{reference or mine}: no pixels and grid_thws", "name the picture: IMG, --pattern, or --ref TRACE"
    )

"""`moonvit compare`."""

import json
import sys
from pathlib import Path

import click

from moonvit.cli import options
from moonvit.ops.grid import as_grids
from moonvit.trace.budgets import ROUNDING
from moonvit.trace.compare import as_document, compare
from moonvit.trace.dump import Dump, parse_renames
from moonvit.trace.text import comparison_lines


@click.command("compare")
@click.argument("mine", type=click.Path(path_type=Path))
@click.argument("reference", metavar="REF", type=click.Path(path_type=Path))
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
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file, not stdout."
)
@options.output_format("human", "json", "html")
def command(
    mine: Path,
    reference: Path,
    maps: tuple[str, ...],
    order: str,
    dtype: str | None,
    grid: tuple[str, ...],
    output: Path | None,
    kind: str,
) -> None:
    """Compare the stages of MINE with those of REF, one by one, and say where they part.

    Either is a safetensors file, an .npz file, or a directory of raw float32 files with shapes.json. The
    exit code is 1 if a stage is over the budget of its type.
    """
    comparison = compare(
        Dump(mine, parse_renames(maps)), Dump(reference), grids=parse_grids(grid), dtype=dtype, order=order
    )
    if kind == "json":
        text = json.dumps(as_document(comparison), indent=2)
    elif kind == "html":
        from moonvit.trace.html import comparison_page

        text = comparison_page(comparison)
    else:
        text = "\n".join(comparison_lines(comparison))
    if output is None:
        click.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if comparison.good else 1)


def parse_grids(grid: tuple[str, ...]) -> list[tuple[int, int, int]] | None:
    """`1,4,6` once a picture, or None if there is none."""
    try:
        return as_grids([[int(side) for side in one.split(",")] for one in grid]) if grid else None
    except ValueError as error:
        raise click.UsageError(f"--grid: expected T,H,W in patches, found {', '.join(grid)}") from error

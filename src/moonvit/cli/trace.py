"""`moonvit trace`."""

import json
from pathlib import Path
from typing import Any

import click

from moonvit.cli import options
from moonvit.cli.inputs import given_pictures, picture_options
from moonvit.encoder import Encoder
from moonvit.trace.record import ORDERS, write_trace
from moonvit.trace.stages import Selection, parse_layers, stage_shape


@click.command("trace")
@click.argument("images", nargs=-1, metavar="[IMG]...")
@options.model
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write this safetensors file.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default="float32",
    show_default=True,
    help="Type of weights and activations.",
)
@options.norm_eps
@options.device
@click.option("--stages", default="*", metavar="GLOBS", help="Keep these, such as 'block.*.q,projected'.")
@click.option("--layers", metavar="LIST", help="Keep these blocks only, such as 0,5-7,26.")
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default="raster",
    show_default=True,
    help="Of patches in the file: row by row, or the patches of a merged cell side by side.",
)
@picture_options
@options.output_format("human", "json", "quiet")
def command(
    images: tuple[str, ...],
    model: str,
    output: Path,
    dtype: str,
    norm_eps: float | None,
    device: str,
    stages: str,
    layers: str | None,
    order: str,
    kind: str,
    **picture: Any,
) -> None:
    """Write every stage of the tower for IMG, or for a pattern, to a safetensors file.

    Several IMG are one batch, or with --clip the frames of one clip. Statistics of every stage are printed
    and stand in the file's metadata; docs/porting.md lists the stages.
    """
    globs = [glob.strip() for glob in stages.split(",")]
    selection = Selection(globs, parse_layers(layers) if layers else None)
    encoder = Encoder.from_pretrained(model, dtype=dtype, device=device, norm_eps=norm_eps, backend="eager")
    given = given_pictures(encoder, images, **picture)
    if given is None:
        raise click.UsageError("give a picture or --pattern")
    batch = given.batch(encoder)
    table = write_trace(encoder, batch, output, selection=selection, order=order, metadata=given.metadata())
    _report(output, table, batch.grid_thws.tolist(), encoder.config.norm_eps, kind)


def _report(
    output: Path, table: dict[str, dict[str, float]], grids: list[list[int]], norm_eps: float, kind: str
) -> None:
    if kind == "json":
        document = {"output": str(output), "grid_thws": grids, "norm_eps": norm_eps, "stages": table}
        click.echo(json.dumps(document, indent=2))
    elif kind == "human":
        click.echo(
            f"{'stage':<24} {'shape':<16} {'mean':>11} {'std':>11} {'min':>11} {'max':>11} {'rms':>11}"
        )
        for name, row in table.items():
            numbers = " ".join(f"{row[key]:>11.4g}" for key in ("mean", "std", "min", "max", "rms"))
            click.echo(f"{name:<24} {stage_shape(name):<16} {numbers}")
        click.echo(f"{output}: {len(table)} stages, grids {grids}, norm_eps {norm_eps!r}", err=True)

"""`moonvit export`."""

from pathlib import Path

import click

from moonvit.cli import options
from moonvit.cli.info import describe_checkpoint
from moonvit.encoder import DTYPES
from moonvit.errors import WeightsError
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.export import export
from moonvit.weights.source import find_checkpoint


@click.command("export")
@click.argument("model", metavar="M")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to make.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Convert. [default: as stored]")
@options.revision
def command(model: str, output: Path, dtype: str | None, revision: str | None) -> None:
    """Write the vision half of M as a checkpoint of its own, under the released names."""
    directory = find_checkpoint(model, revision=revision)
    document = describe_checkpoint(directory)
    if document["faults"]:
        raise WeightsError(model, document["faults"], "moonvit info lists what the checkpoint holds")
    total = export(LocalCheckpoint(directory), output, DTYPES[dtype] if dtype else None)
    click.echo(f"{output}: {document['tensors']['found']} tensors, {total:,} bytes")

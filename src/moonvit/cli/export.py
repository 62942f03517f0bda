"""`moonvit export`."""

from pathlib import Path

import click

from moonvit.cli import options
from moonvit.cli.info import describe_checkpoint
from moonvit.encoder import DTYPES
from moonvit.errors import MoonvitError, WeightsError
from moonvit.mmproj import export_gguf
from moonvit.weights.export import export
from moonvit.weights.gguf import SUFFIX
from moonvit.weights.source import find_checkpoint, local_checkpoint


@click.command("export")
@click.argument("model", metavar="M")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory, or x.gguf, to make."
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Convert. [default: as stored]")
@click.option(
    "--experimental", is_flag=True, help="Allow a GGUF layout that no released llama.cpp reads: K3's."
)
@options.revision
def command(model: str, output: Path, dtype: str | None, experimental: bool, revision: str | None) -> None:
    """Write the vision half of M as a checkpoint of its own, under the released names.

    With -o x.gguf it becomes a mmproj file for llama.cpp.
    """
    checkpoint = local_checkpoint(find_checkpoint(model, revision=revision))
    document = describe_checkpoint(checkpoint)
    if document["faults"]:
        raise WeightsError(model, document["faults"], "moonvit info lists what the checkpoint holds")
    kind = DTYPES[dtype] if dtype else None
    if output.suffix.lower() == SUFFIX:
        total = export_gguf(checkpoint, output, kind, experimental)
    elif experimental:
        raise MoonvitError("--experimental is for -o x.gguf")
    else:
        total = export(checkpoint, output, kind)
    click.echo(f"{output}: {document['tensors']['found']} tensors, {total:,} bytes")

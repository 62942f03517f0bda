"""`moonvit fetch`."""

import time
from pathlib import Path

import click

from moonvit.cli import options
from moonvit.cli.progress import fetch_bar
from moonvit.errors import MoonvitError, WeightsError
from moonvit.weights.hub import HubRepo
from moonvit.weights.source import fetch_to, find_checkpoint, local_checkpoint


@click.command("fetch")
@click.argument("repo", metavar="ORG/NAME")
@options.revision
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Make the checkpoint here. [default: the cache, where --model ORG/NAME finds it]",
)
def command(repo: str, revision: str | None, output: Path | None) -> None:
    """Fetch the vision half of a repository, and nothing else of it.

    A fetch that was cut off goes on where it ended.
    """
    began = time.perf_counter()
    if output is None:
        place = find_checkpoint(repo, revision=revision, report=fetch_bar)
    else:
        if output.exists():
            raise MoonvitError(f"{output}: exists already", "remove it or choose another place")
        place = output
        fetch_to(HubRepo(repo, revision), output, fetch_bar)
    held = local_checkpoint(place)
    if held.faults:
        raise WeightsError(str(place), held.faults)
    click.echo(f"{len(held.tensors)} vision tensors, {held.nbytes:,} bytes", err=True)
    click.echo(f"done in {time.perf_counter() - began:.1f} s", err=True)
    click.echo(place)

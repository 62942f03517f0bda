"""`moonvit make-checkpoint`."""

from pathlib import Path

import click

from moonvit.cli import options
from moonvit.synthetic import make_checkpoint


@click.command("make-checkpoint")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@options.preset
@click.option(
    "--seed", type=click.IntRange(0, 2**30), default=0, show_default=True, help="Of the random weights."
)
@click.option("--text", is_flag=True, help="With a toy tokenizer and text embedding, for moonvit prompt.")
def command(directory: Path, preset: str, seed: int, text: bool) -> None:
    """Write a checkpoint with random weights in the released layout to DIRECTORY.

    Its embeddings mean nothing, but sizes, speed and every step are those of the real one.
    """
    total = make_checkpoint(directory, preset, seed, text)
    click.echo(f"{directory}: {preset} geometry, {total:,} bytes of random weights (seed {seed})")

"""`moonvit bench`."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from moonvit._version import __version__
from moonvit.backends import BACKENDS
from moonvit.bench.plot import plot
from moonvit.bench.report import Row, as_document, as_text
from moonvit.bench.run import Contender, benchmark, of_encoder
from moonvit.cli import options
from moonvit.cli.doctor import kernel_features
from moonvit.encoder import Encoder
from moonvit.weights.source import find_checkpoint


def numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    """`224,448` as [224, 448]; a side given twice counts once."""
    parts = value.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is no list of sides in pixels, such as 224,448")
    return list(dict.fromkeys(int(part) for part in parts))


@click.command("bench")
@options.model
@options.revision
@click.option(
    "--sizes", default="224,448", show_default=True, callback=numbers, help="Sides of square pictures."
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    multiple=True,
    default=["bfloat16"],
    show_default=True,
    help="Can be given several times.",
)
@click.option(
    "--backend",
    "backends",
    type=click.Choice(BACKENDS),
    multiple=True,
    default=["auto"],
    show_default=True,
    help="Can be given several times.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Timed runs of each.")
@options.quantize
@options.device
@options.threads
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write all as JSON.")
@click.option("--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Write an SVG.")
@options.output_format("human", "json", "quiet")
def command(
    model: str,
    revision: str | None,
    sizes: list[int],
    dtypes: tuple[str, ...],
    backends: tuple[str, ...],
    rounds: int,
    quantize: str | None,
    device: str,
    threads: int | None,
    output: Path | None,
    picture: Path | None,
    kind: str,
) -> None:
    """Time the tower on square pictures, beside this machine's own matrix product.

    All backends and dtypes take turns, round after round, with PyTorch's product of one of the tower's
    matrices, so that "of ceiling" is the part of the machine's rate that was reached. The table has the
    medians; the spread is from the slowest to the fastest run. A row has the name of the backend that ran.
    --quantize adds a rounded model beside each of type bfloat16 or float32 that is not compiled.
    """
    for file in filter(None, (output, picture)):
        check_place(file)
    options.use_threads(threads)
    directory = str(find_checkpoint(model, revision=revision))
    found: dict[str, Contender] = {}
    for dtype, backend, rounding in wanted(dtypes, backends, quantize):
        encoder = Encoder.from_pretrained(
            directory, dtype=dtype, device=device, backend=backend, quantize=rounding
        )
        name = " ".join(filter(None, ("moonvit", encoder.backend, rounding, dtype)))
        found.setdefault(name, of_encoder(name, encoder))
    contenders = list(found.values())
    rows: list[Row] = []
    for row in benchmark(contenders, sizes, rounds):
        rows.append(row)
        if kind == "human":
            click.echo(f"{row.name} at {row.side}: {row.timing.median:.4f} s", err=True)
    document = as_document(rows, machine())
    if output is not None:
        output.write_text(json.dumps(document, indent=2) + "\n")
    if picture is not None:
        picture.write_text(plot(rows))
    if kind == "json":
        click.echo(json.dumps(document, indent=2))
    elif kind == "human":
        click.echo(as_text(rows))


def wanted(
    dtypes: Sequence[str], backends: Sequence[str], quantize: str | None
) -> Iterator[tuple[str, str, str | None]]:
    """Dtype, backend and rounding of each contender; the rounded ones where there are such."""
    for dtype in dict.fromkeys(dtypes):
        for backend in dict.fromkeys(backends):
            yield dtype, backend, None
            if quantize is not None and dtype in ("bfloat16", "float32") and backend != "compiled":
                yield dtype, backend, quantize


def check_place(file: Path) -> None:
    """Make the folder that the file is to be in; `click.ClickException` where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise click.ClickException(f"{file} cannot be written")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "moonvit": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "features": kernel_features(),
    }

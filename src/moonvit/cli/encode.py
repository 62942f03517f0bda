"""`moonvit encode`."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from moonvit._version import __version__
from moonvit.cli import fail, one_line, options
from moonvit.cli.progress import bar, fetch_bar
from moonvit.cli.sources import expand
from moonvit.encoder import Encoder
from moonvit.errors import ImageError, NumericsError
from moonvit.pixels.base import PixelBatch, Prepared
from moonvit.pixels.decode import Limits, describe
from moonvit.pixels.video import SUFFIXES as VIDEO_SUFFIXES
from moonvit.schedule import batches
from moonvit.towers.base import Features
from moonvit.weights.writer import SafetensorsWriter


@dataclass
class Row:
    """What is reported of one picture."""

    source: str
    tokens: int
    shape: list[int]
    grid_thw: list[int]
    size: list[int]
    name: str | None
    timestamp: str | None = None


@dataclass
class Job:
    """The pictures of one call: what was encoded and what failed."""

    encoder: Encoder
    rows: list[Row]
    failures: list[tuple[str, str]]

    def prepared(self, sources: list[str], **how: Any) -> Iterator[Prepared]:
        """Pictures that can be read; the others are reported at once and passed over."""
        for source in sources:
            try:
                yield self.encoder.processor.prepare(source, **how)
            except (ImageError, MemoryError) as error:
                self.failed(describe(source), error)

    def encoded(self, group: Sequence[Prepared], batch: PixelBatch) -> Iterator[tuple[Prepared, Features]]:
        """Each picture with its features; one whose numbers overflow is reported and the rest done."""
        try:
            features = self.encoder.features(batch)
        except NumericsError as error:
            if len(group) == 1:
                self.failed(group[0].name, error)
                return
            for picture in group:
                yield from self.encoded([picture], self.encoder.processor.pack([picture]))
            return
        for place, picture in enumerate(group):
            deepstack = [[rows[place]] for rows in features.deepstack]
            yield picture, Features([features.embeddings[place]], deepstack)

    def failed(self, source: str, error: BaseException) -> None:
        """Say and keep that a picture failed."""
        self.failures.append((source, one_line(error)))
        fail(one_line(error) if source in one_line(error) else f"{source}: {one_line(error)}")


@click.command("encode")
@click.argument("images", nargs=-1, required=True, metavar="IMG...")
@options.model
@options.revision
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a safetensors file."
)
@options.dtype
@options.norm_eps
@options.device
@options.backend
@options.quantize
@options.threads
@options.max_tokens
@options.max_pixels
@options.max_bytes
@options.exif
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Pictures a pass.")
@click.option(
    "--store",
    type=click.Choice(["float32", "model"]),
    default="float32",
    show_default=True,
    help="Type in the output: float32, or the model's own.",
)
@click.option("--experimental", is_flag=True, help="Take videos with K3, cut into clips as K2.5 does.")
@options.output_format("human", "json", "quiet")
def command(
    images: tuple[str, ...],
    model: str,
    revision: str | None,
    output: Path | None,
    dtype: str,
    norm_eps: float | None,
    device: str,
    backend: str,
    quantize: str | None,
    threads: int | None,
    max_tokens: int | None,
    max_pixels: int | None,
    max_bytes: int | None,
    exif: str,
    batch_size: int,
    store: str,
    experimental: bool,
    kind: str,
) -> None:
    """Encode pictures into embeddings for the text model.

    IMG is a file, a directory, a pattern or a data URL; videos by name (.mp4, .mov, .mkv, .webm, .avi) give
    one row for each timestamped chunk, behind the pictures. A picture that cannot be read is reported and the
    rest is done; the exit code is then 1.
    """
    began = time.perf_counter()
    options.use_threads(threads)
    limits = Limits(max_pixels=max_pixels or Limits.max_pixels, max_bytes=max_bytes or Limits.max_bytes)
    encoder = Encoder.from_pretrained(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        norm_eps=norm_eps,
        backend=backend,
        quantize=quantize,
        limits=limits,
        report=fetch_bar,
    )
    loaded = time.perf_counter()
    job = Job(encoder, [], [])
    sources = expand(images)
    videos = [source for source in sources if Path(source).suffix.lower() in VIDEO_SUFFIXES]
    sources = [source for source in sources if source not in videos]
    how = {"max_tokens": max_tokens, "exif": exif}
    if output is not None and any(_same_file(output, source) for source in [*sources, *videos]):
        raise click.UsageError(f"-o {output} is one of the pictures")
    if output is None:
        _run(job, sources, how, batch_size, store, kind, None)
        _run_videos(job, videos, how, experimental, store, None)
        encoded = time.perf_counter()
    else:
        with SafetensorsWriter(output, reserve=4096 + 256 * len(sources)) as writer:
            _run(job, sources, how, batch_size, store, kind, writer)
            _run_videos(job, videos, how, experimental, store, writer)
            encoded = time.perf_counter()
            _write_tables(job, writer, {**how, "store": store})
    seconds = {"load": loaded - began, "encode": encoded - loaded}
    _report(job, seconds, output, kind)
    sys.exit(1 if job.failures else 0)


def _same_file(output: Path, source: str) -> bool:
    try:
        return output.exists() and output.samefile(source)
    except (OSError, ValueError):
        return False


def _run(
    job: Job,
    sources: list[str],
    how: dict[str, Any],
    batch_size: int,
    store: str,
    kind: str,
    writer: SafetensorsWriter | None,
) -> None:
    with bar(len(sources), "picture", kind != "quiet" and len(sources) > 1) as shown:
        prepared = job.prepared(sources, **how)
        for group, batch in batches(job.encoder.processor, prepared, batch_size):
            for picture, features in job.encoded(group, batch):
                number = len(job.rows)
                (embedding,) = features.embeddings
                if writer:
                    _write(writer, f"embeddings/{number}", embedding, store)
                    for layer, (rows,) in enumerate(features.deepstack):
                        _write(writer, f"deepstack/{layer}/{number}", rows, store)
                plan = picture.plan
                job.rows.append(
                    Row(
                        source=picture.name,
                        tokens=len(embedding),
                        shape=list(embedding.shape),
                        grid_thw=list(plan.grid),
                        size=[plan.width, plan.height],
                        name=f"embeddings/{number}" if writer else None,
                    )
                )
            shown.update(len(group))


def _run_videos(
    job: Job,
    videos: list[str],
    how: dict[str, Any],
    experimental: bool,
    store: str,
    writer: SafetensorsWriter | None,
) -> None:
    for source in videos:
        try:
            for chunk in job.encoder.encode_video(source, experimental=experimental, **how):
                number = len(job.rows)
                if writer:
                    _write(writer, f"embeddings/{number}", chunk.embeddings, store)
                    for layer, rows in enumerate(chunk.deepstack):
                        _write(writer, f"deepstack/{layer}/{number}", rows, store)
                job.rows.append(
                    Row(
                        source=source,
                        tokens=len(chunk.embeddings),
                        shape=list(chunk.embeddings.shape),
                        grid_thw=list(chunk.grid),
                        size=list(chunk.size),
                        name=f"embeddings/{number}" if writer else None,
                        timestamp=chunk.timestamp,
                    )
                )
        except (ImageError, NumericsError) as error:
            job.failed(source, error)


def _write(writer: SafetensorsWriter, name: str, values: torch.Tensor, store: str) -> None:
    writer.add(name, values.float() if store == "float32" else values)


def _write_tables(job: Job, writer: SafetensorsWriter, how: dict[str, Any]) -> None:
    """Grids, sizes and where all of it came from."""
    grids = [row.grid_thw for row in job.rows]
    sizes = [row.size for row in job.rows]
    writer.add("grid_thws", torch.tensor(grids, dtype=torch.int64).reshape(-1, 3))
    writer.add("sizes", torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2))
    encoder = job.encoder
    writer.metadata.update(
        sources=json.dumps([row.source for row in job.rows]),
        timestamps=json.dumps([row.timestamp for row in job.rows]),
        failures=json.dumps([{"source": source, "error": error} for source, error in job.failures]),
        model=encoder.fingerprint,
        family=encoder.family,
        norm_eps=repr(encoder.config.norm_eps),
        dtype=str(encoder.dtype).removeprefix("torch."),
        backend=encoder.backend,
        quantize=encoder.quantize or "none",
        version=__version__,
        **{key: json.dumps(value) for key, value in how.items()},
    )


def _report(job: Job, seconds: dict[str, float], output: Path | None, kind: str) -> None:
    if kind == "json":
        document = {
            "images": [asdict(row) for row in job.rows],
            "failures": [{"source": source, "error": error} for source, error in job.failures],
            "norm_eps": job.encoder.config.norm_eps,
            "dtype": str(job.encoder.dtype).removeprefix("torch."),
            "backend": job.encoder.backend,
            "quantize": job.encoder.quantize,
            "seconds": {key: round(value, 4) for key, value in seconds.items()},
            "output": str(output) if output else None,
        }
        click.echo(json.dumps(document, indent=2))
    elif kind == "human":
        for row in job.rows:
            t, h, w = row.grid_thw
            place = f"  {row.name}" if row.name else ""
            width, height = row.size
            when = f"  at {row.timestamp}" if row.timestamp else ""
            click.echo(
                f"{row.source}{when}  {width}x{height}  grid {t}x{h}x{w}  "
                f"{row.tokens} tokens  shape {row.shape}{place}"
            )
        failed = f", {len(job.failures)} failed" if job.failures else ""
        tokens = sum(row.tokens for row in job.rows)
        click.echo(
            f"{len(job.rows)} picture{'s' * (len(job.rows) != 1)}, {tokens} tokens{failed}; "
            f"loaded in {seconds['load']:.2f} s, encoded in {seconds['encode']:.2f} s"
        )
        click.echo(f"embeddings: {output}" if output else "embeddings: not kept; -o FILE writes them")

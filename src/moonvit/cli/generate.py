"""`moonvit generate`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from moonvit.cli import options, printable
from moonvit.cli.sources import expand
from moonvit.engine.chat import Chat
from moonvit.engine.generator import Generator
from moonvit.engine.media import Look
from moonvit.engine.reply import Reply, Stream
from moonvit.engine.sampling import Sampling
from moonvit.pixels.decode import Exif, Limits, image_size
from moonvit.prompt.embeds import is_video


@click.command("generate")
@click.argument("model", metavar="MODEL")
@click.argument("text", metavar="TEXT")
@click.argument("media", nargs=-1, metavar="[IMG]...")
@click.option("--system", metavar="TEXT", help="A system turn before the question.")
@click.option(
    "--thinking/--no-thinking", default=None, help="With or without thoughts, for K2.5. [default: with]"
)
@click.option("--chat", "several", is_flag=True, help="Go on with further questions, one a line of stdin.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token every time.",
)
@click.option("--top-k", type=click.IntRange(0), default=0, metavar="K", help="Keep the K likeliest tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    metavar="P",
    help="Keep the likeliest tokens that together reach P.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Of the random choice. [default: another each time]"
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), metavar="N", help="Of a reply. [default: up to 512]"
)
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given again.")
@options.revision
@options.dtype
@options.norm_eps
@options.device
@options.backend
@options.max_tokens
@options.max_pixels
@options.max_bytes
@options.exif
@options.output_format("text", "json")
def command(
    model: str,
    text: str,
    media: tuple[str, ...],
    system: str | None,
    thinking: bool | None,
    several: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    max_new_tokens: int | None,
    stop: tuple[str, ...],
    revision: str | None,
    dtype: str,
    norm_eps: float | None,
    device: str,
    backend: str,
    max_tokens: int | None,
    max_pixels: int | None,
    max_bytes: int | None,
    exif: str,
    kind: str,
) -> None:
    """Answer TEXT about pictures with the text model of the checkpoint MODEL, run by transformers.

    The reply is written to stdout as it comes. Pictures and videos (by name: .mp4, .mov, .mkv, .webm, .avi)
    stand before the text. MODEL is needed whole; a repository is fetched whole. Kimi K3's own text model is
    not in transformers: moonvit prompt makes its prompts for other engines.
    """
    limits = Limits(max_pixels=max_pixels or Limits.max_pixels, max_bytes=max_bytes or Limits.max_bytes)
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop,
    )
    turned: Exif = "apply" if exif == "apply" else "ignore"
    look = Look(max_tokens=max_tokens, exif=turned)
    sources = expand(media)
    for source in sources:
        if not is_video(source):
            image_size(source, limits=limits, exif=turned)  # before transformers is imported
    generator = Generator.from_pretrained(
        model,
        dtype=dtype,
        device=device,
        norm_eps=norm_eps,
        backend=backend,
        revision=revision,
        limits=limits,
    )
    chat = generator.chat(system, thinking=thinking)
    replies = []
    try:
        for question, shown in _questions(text, sources, several):
            reply = _answered(chat.stream(question, shown, sampling=sampling, look=look), kind)
            replies.append(reply)
    finally:  # what was answered before a question that cannot be
        if kind == "json" and replies:
            click.echo(json.dumps(_document(chat, replies), indent=2))


def _questions(text: str, sources: list[str], several: bool) -> Iterator[tuple[str, list[str]]]:
    yield text, sources
    if several:
        for line in sys.stdin or ():  # None where it is closed
            if line.strip():
                yield line.rstrip("\n"), []


def _answered(stream: Stream, kind: str) -> Reply:
    if kind == "text":
        screen = sys.stdout is not None and sys.stdout.isatty()
        for piece in stream:
            click.echo(_safe(piece) if screen else piece, nl=False)
        click.echo()
    reply = stream.reply
    times = reply.seconds
    click.echo(
        f"{reply.prompt_tokens} tokens read ({reply.computed_tokens} anew), {len(reply.ids)} written; "
        f"pictures {times['pictures']:.2f} s, weights {times['weights']:.2f} s, "
        f"first token {times['prefill']:.2f} s, rest {times['decode']:.2f} s; ended by {reply.finish}",
        err=True,
    )
    return reply


def _safe(text: str) -> str:
    """Nothing that steers a terminal, but for line breaks and tabs."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def _document(chat: Chat, replies: list[Reply]) -> dict[str, Any]:
    media = [
        {"source": item.name, "tokens": item.tokens, "grids": [list(grid) for grid in item.grids]}
        for item in chat.media
    ]
    rows = [asdict(reply) for reply in replies]
    for row in rows:
        row["seconds"] = {stage: round(value, 4) for stage, value in row["seconds"].items()}
    return {"family": chat.generator.family, "media": media, "replies": rows}

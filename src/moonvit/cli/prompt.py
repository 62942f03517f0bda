"""`moonvit prompt`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from moonvit.cli import options, printable
from moonvit.cli.progress import fetch_bar
from moonvit.cli.sources import expand
from moonvit.encoder import Encoder
from moonvit.payloads import (
    PAYLOADS,
    check_payload,
    write_plain,
    write_sglang,
    write_vllm_images,
    write_vllm_prompt,
)
from moonvit.pixels.decode import Exif, Limits
from moonvit.prompt.embeds import PromptBuilder, PromptEmbeds, draft, encode_media, question
from moonvit.prompt.parts import Prompt
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.hub import HubCheckpoint
from moonvit.weights.index import Checkpoint
from moonvit.weights.place import check_output
from moonvit.weights.source import open_checkpoint


@click.command("prompt")
@click.argument("model", metavar="MODEL")
@click.argument("text", metavar="TEXT")
@click.argument("media", nargs=-1, metavar="[IMG]...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the prompt's embeddings."
)
@click.option(
    "--payload",
    type=click.Choice(PAYLOADS),
    default=PAYLOADS[0],
    show_default=True,
    help="What to write: plain tensors, or what an engine takes.",
)
@click.option("--system", default="", metavar="TEXT", help="A system turn before the question.")
@click.option(
    "--thinking/--no-thinking",
    default=None,
    help="With or without thoughts, for K3 and K2.5. [default: with]",
)
@options.revision
@options.dtype
@options.norm_eps
@options.device
@options.backend
@options.max_tokens
@options.max_pixels
@options.max_bytes
@options.exif
@click.option("--experimental", is_flag=True, help="Take videos with K3, cut into clips as K2.5 does.")
@options.output_format("human", "json", "quiet")
def command(
    model: str,
    text: str,
    media: tuple[str, ...],
    output: Path | None,
    payload: str,
    system: str,
    thinking: bool | None,
    revision: str | None,
    dtype: str,
    norm_eps: float | None,
    device: str,
    backend: str,
    max_tokens: int | None,
    max_pixels: int | None,
    max_bytes: int | None,
    exif: str,
    experimental: bool,
    kind: str,
) -> None:
    """Make a prompt of TEXT and pictures: ids, slots, and with -o all its embeddings.

    Of the checkpoint MODEL the tokenizer, the rows of the text embedding that the prompt needs and the vision
    half are read. Pictures and videos (by name: .mp4, .mov, .mkv, .webm, .avi) stand before the text, in one
    user turn. A picture that cannot be read ends the run. Without -o pictures are planned from their headers
    and not encoded.
    """
    limits = Limits(max_pixels=max_pixels or Limits.max_pixels, max_bytes=max_bytes or Limits.max_bytes)
    turned: Exif = "apply" if exif == "apply" else "ignore"
    sources = expand(media)
    checkpoint = open_checkpoint(model, revision=revision)
    if output is not None:
        _check_output(output, sources, checkpoint)
    if isinstance(checkpoint, HubCheckpoint):
        revision = checkpoint.repo.commit  # of one commit, whatever happens meanwhile
    builder = PromptBuilder(checkpoint, limits)

    def encoded(parts: list[Any]) -> Prompt:
        prompt = builder.format.encode(question(text, parts, system), thinking=thinking)
        builder.check(prompt)
        return prompt

    plans = builder.plan(sources, max_tokens=max_tokens, exif=turned, experimental=experimental)
    prompt = encoded(draft(plans))
    if output is not None:
        check_payload(payload, builder.family, prompt)
    if output is None and None not in plans:
        _report(builder.family, prompt, None, None, kind)
        return
    encoder = Encoder.from_pretrained(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        norm_eps=norm_eps,
        backend=backend,
        limits=limits,
        report=fetch_bar,
    )
    found = encode_media(encoder, sources, max_tokens=max_tokens, exif=turned, experimental=experimental)
    embeds = builder.embed(encoded([medium.part for medium in found]), found)
    if output is not None:
        _write(embeds, output, payload, encoder, sources)
    _report(builder.family, embeds.prompt, embeds, output, kind)


def _check_output(output: Path, sources: list[str], checkpoint: Checkpoint) -> None:
    """Refuse to write over what is read, or where nothing can be written."""
    if any(_same_file(output, source) for source in sources):
        raise click.UsageError(f"-o {output} is one of the pictures")
    own = checkpoint.file_names() if isinstance(checkpoint, LocalCheckpoint) else []
    if any(_same_file(output, Path(checkpoint.where, name)) for name in own):
        raise click.UsageError(f"-o {output} is a file of the checkpoint")
    check_output(output)


def _same_file(output: Path, source: str | Path) -> bool:
    try:
        return output.exists() and output.samefile(source)
    except (OSError, ValueError):
        return False


def _write(embeds: PromptEmbeds, output: Path, payload: str, encoder: Encoder, sources: list[str]) -> None:
    if payload == "safetensors":
        metadata = {
            "sources": json.dumps(sources),
            "model": encoder.fingerprint,
            "norm_eps": repr(encoder.config.norm_eps),
            "dtype": str(encoder.dtype).removeprefix("torch."),
        }
        write_plain(embeds, output, **metadata)
        return
    write = {"vllm-prompt": write_vllm_prompt, "vllm-images": write_vllm_images, "sglang": write_sglang}
    write[payload](embeds, output)


def _report(
    family: str,
    prompt: Prompt,
    embeds: PromptEmbeds | None,
    output: Path | None,
    kind: str,
) -> None:
    shape = list(embeds.inputs_embeds.shape) if embeds is not None else None
    if kind == "json":
        document = {
            "family": family,
            "text": prompt.text,
            "ids": list(prompt.ids),
            "slots": [asdict(slot) for slot in prompt.slots],
            "shape": shape,
            "output": str(output) if output else None,
        }
        click.echo(json.dumps(document, indent=2))
    elif kind == "human":
        click.echo("\n".join(printable(line) for line in prompt.text.split("\n")))
        for slot in prompt.slots:
            click.echo(f"{slot.kind} {slot.part}: {slot.length} pads from {slot.start}")
        pads = sum(slot.length for slot in prompt.slots)
        click.echo(f"{family}: {len(prompt.ids)} ids, {pads} of them pads")
        if output is not None:
            click.echo(f"embeddings: {output}, shape {shape}")
        else:
            click.echo("embeddings: not made; -o FILE writes them")

"""Options that several verbs share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from moonvit.presets import PRESETS

F = TypeVar("F", bound=Callable[..., Any])

model = click.option(
    "--model",
    required=True,
    metavar="M",
    help="Directory of a checkpoint, mmproj-*.gguf, or a repository ORG/NAME.",
)
revision = click.option("--revision", metavar="R", help="Branch, tag or commit of a repository.")
exif = click.option(
    "--exif",
    type=click.Choice(["apply", "ignore"]),
    default="apply",
    show_default=True,
    help="Turn pictures upright, or leave them as stored (the reference's way).",
)
max_tokens = click.option(
    "--max-tokens", type=click.IntRange(1), help="Lower the budget of each picture to N tokens.", metavar="N"
)
max_pixels = click.option(
    "--max-pixels",
    type=click.IntRange(1),
    metavar="N",
    help="Refuse pictures of more pixels. [default: 89478485]",
)
max_bytes = click.option(
    "--max-bytes", type=click.IntRange(1), metavar="N", help="Refuse files of more bytes. [default: 67108864]"
)
dtype = click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default="bfloat16",
    show_default=True,
    help="Type of weights and activations.",
)
norm_eps = click.option(
    "--norm-eps", type=float, metavar="EPS", help="RMS epsilon of the tower. [default: 2^-23 = 1.1920929e-07]"
)
device = click.option(
    "--device", default="cpu", show_default=True, help="Where the model runs: cpu, cuda, mps."
)
threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Processors to use. [default: those that the process may use, a container's quota included]",
)
backend = click.option(
    "--backend",
    type=click.Choice(["auto", "eager", "compiled", "native"]),
    default="auto",
    show_default=True,
    help="How the model is run: plain PyTorch, compiled by it, or native kernels.",
)
quantize = click.option(
    "--quantize",
    type=click.Choice(["int8"]),
    help="Round the linear layers to eight-bit integers: faster on a CPU, less exact. [default: no]",
)
preset = click.option(
    "--preset", type=click.Choice(PRESETS), default="full", show_default=True, help="Geometry; full is K3's."
)


def output_format(*kinds: str) -> Callable[[F], F]:
    """`--format`, the first kind being the default."""
    return click.option(
        "--format",
        "kind",
        type=click.Choice(kinds),
        default=kinds[0],
        show_default=True,
        help="What to print.",
    )


def use_threads(count: int | None) -> None:
    """Let PyTorch use that many processors, or those that the process may use."""
    import torch

    from moonvit.threads import usable_cores

    torch.set_num_threads(count or min(usable_cores(), torch.get_num_threads()))

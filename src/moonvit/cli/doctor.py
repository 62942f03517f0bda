"""`moonvit doctor`."""

import json
import platform
from typing import Any

import click
import huggingface_hub
import numpy
import PIL
import safetensors
import torch
from huggingface_hub import constants
from PIL import features

from moonvit._version import __version__
from moonvit.cli import options
from moonvit.native import cpu
from moonvit.native.build import is_built
from moonvit.places import cache_root
from moonvit.threads import usable_cores

_CODECS = ("jpg", "jpg_2000", "webp", "avif", "libtiff", "zlib")


@click.command("doctor")
@options.output_format("human", "json")
def command(kind: str) -> None:
    """Show what moonvit runs on: processor features in use, threads, libraries, codecs, cache places."""
    document = examine()
    if kind == "json":
        click.echo(json.dumps(document, indent=2))
        return
    for section, entries in document.items():
        click.echo(section)
        for key, value in entries.items():
            click.echo(f"  {key:<18} {value}")


def examine() -> dict[str, dict[str, Any]]:
    """The facts, by section."""
    return {
        "versions": {
            "moonvit": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "pillow": PIL.__version__,
            "safetensors": safetensors.__version__,
            "huggingface-hub": huggingface_hub.__version__,
        },
        "processor": {
            "machine": platform.machine(),
            "torch kernels": torch.backends.cpu.get_cpu_capability(),
            "native kernels": _native(),
            "features": " ".join(kernel_features()) or "unknown",
            "threads": torch.get_num_threads(),
            "usable cores": usable_cores(),
        },
        "devices": {
            "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "mps": bool(torch.backends.mps.is_available()),
        },
        "codecs": {name: _codec(name) for name in _CODECS},
        "places": {
            "HF_HOME": constants.HF_HOME,
            "hub cache": constants.HF_HUB_CACHE,
            "moonvit cache": str(cache_root()),
            "endpoint": constants.ENDPOINT,
            "offline": constants.HF_HUB_OFFLINE,
        },
    }


def kernel_features() -> list[str]:
    """The matrix and vector features that decide which kernels run, where the system tells them."""
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")
    return [flag for flag in wanted if flag in cpu.cpu_flags()]


def _native() -> str:
    """Whether native kernels run here; nothing is compiled for the answer."""
    return cpu.lacking() or (
        "built" if is_built() else "not built yet: the first use or moonvit build-native does"
    )


def _codec(name: str) -> str:
    if not features.check(name):
        return "missing"
    version = features.version(name)
    return f"yes ({version})" if version else "yes"

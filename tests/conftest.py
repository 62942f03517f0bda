"""Shared data and small builders."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# One backend whatever the machine; tests of the others name them.
os.environ.setdefault("MOONVIT_BACKEND", "eager")

import torch
from safetensors.torch import load_file

from moonvit.config import PixelConfig
from moonvit.encoder import Encoder
from moonvit.presets import preprocessor_config
from moonvit.synthetic import make_checkpoint

DATA = Path(__file__).parent / "data"
TINY = DATA / "k3-tiny"
IMAGES = DATA / "images"
CASES = ("wide", "tall", "square", "table", "large", "clip")


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> None:
    """A shell's background jobs ignore interrupts, and so would the processes that tests interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products of miniatures are far quicker without a second thread to wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    return load_file(DATA / "golden" / "k3_tiny.safetensors")


@pytest.fixture(scope="session")
def pixel_golden() -> dict[str, Any]:
    return json.loads((DATA / "golden" / "k3_pixels.json").read_text())


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    """The tiny checkpoint in float32."""
    return Encoder.from_pretrained(TINY, dtype="float32")


@pytest.fixture
def tiny_copy(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may spoil."""
    return Path(shutil.copytree(TINY, tmp_path / "k3-tiny"))


@pytest.fixture(scope="session")
def k3_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny K3 with a toy tokenizer and text embedding."""
    directory = tmp_path_factory.mktemp("text") / "k3"
    make_checkpoint(directory, "tiny", text=True)
    return directory


@pytest.fixture(scope="session")
def qwen_text(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Qwen checkpoints by family as transformers saves them, with a small tokenizer."""
    import parity_helpers as helpers
    from prompt_helpers import write_tokenizer

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp("text") / family
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(helpers.TEXT, "vocab_size", 320)
                getattr(helpers, f"{family}_pair")(directory)
            write_tokenizer(directory, family)
            config = json.loads((directory / "config.json").read_text())
            kept = {name: value for name, value in config.items() if not name.endswith("_token_id")}
            (directory / "config.json").write_text(json.dumps(kept))
            made[family] = directory
        return made[family]

    return make


def pixel_config(**media: Any) -> PixelConfig:
    """K3's released pixel rules with some fields changed."""
    config = preprocessor_config()
    config["media_proc_cfg"].update(media)
    return PixelConfig.from_dict(config)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 of the difference over L2 of the expected, in float64."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def random_pixels(grids: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
    """Float32 patches for those grids."""
    total = sum(t * h * w for t, h, w in grids)
    return torch.randn(total, 3, 14, 14, generator=torch.Generator().manual_seed(seed))

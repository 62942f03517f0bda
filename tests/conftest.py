"""Shared data and small builders."""

import json
import os
import shutil
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

DATA = Path(__file__).parent / "data"
TINY = DATA / "k3-tiny"
IMAGES = DATA / "images"
CASES = ("wide", "tall", "square", "table", "large", "clip")


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

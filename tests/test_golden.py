"""Every stage of the tiny checkpoint against numbers computed in float64."""

import copy

import pytest
import torch

from conftest import CASES, IMAGES, relative_error
from moonvit.encoder import Encoder

STAGES = ("patch_embed", "embed", "block.00", "block.01", "block.02", "final_norm", "merged", "projected")
# float32 is 1.2e-7 a step over some 60 steps; measured 7e-7. bf16 is 3.9e-3 a step; measured 1.1e-2.
BUDGET = {torch.float64: 1e-7, torch.float32: 5e-6, torch.bfloat16: 2e-2}


def traced(
    encoder: Encoder, dtype: torch.dtype, pixels: torch.Tensor, grid: torch.Tensor
) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(encoder.model).to(dtype)
    stages: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model(pixels, grid[None], tap=lambda name, value: stages.__setitem__(name, value))
    return stages


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_stages(encoder, golden, case, dtype):
    found = traced(encoder, dtype, golden[f"{case}/pixel_values"], golden[f"{case}/grid_thw"])
    errors = {stage: relative_error(found[stage], golden[f"{case}/{stage}"]) for stage in STAGES}
    assert max(errors.values()) <= BUDGET[dtype], errors
    assert found["projected"].dtype == dtype


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rotary_table(encoder, golden, case, dtype):
    """Rounded once from float64, whatever the weights' type."""
    found = traced(encoder, dtype, golden[f"{case}/pixel_values"], golden[f"{case}/grid_thw"])
    angles = golden[f"{case}/rope_angles"].double()
    assert found["rope_cos"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found["rope_cos"].double(), angles.cos(), rtol=0, atol=3e-6)
    torch.testing.assert_close(found["rope_sin"].double(), angles.sin(), rtol=0, atol=3e-6)


def test_picture_to_embeddings(encoder, pixel_golden):
    """The whole way for a file, against the tower run on the golden pixels' own batch."""
    path = IMAGES / "rgb_300x200.png"
    batch = encoder.processor(path)
    expected = encoder.model(batch.pixel_values, batch.grid_thws)[0]
    found = encoder.encode(path)
    assert found.shape == (88, 48)
    torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=0, atol=0)

"""How much there is to do: the products of a tower, counted, and the rate at which they could be done."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from moonvit.encoder import Encoder
from moonvit.families import family_of
from moonvit.ops.grid import Grid


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a product and a sum are two) of one picture.

    Attributes:
        linear: in matrices of weights; grows with the number of patches.
        quadratic: in scores and weighted sums of attention; grows with its square.
    """

    patches: int
    linear: int
    quadratic: int

    @property
    def total(self) -> int:
        return self.linear + self.quadratic


def square_grid(encoder: Encoder, side: int) -> Grid:
    """The grid of a picture of side x side pixels, rounded up to whole cells."""
    config = encoder.config
    cell = config.patch_size * config.merge_size
    count = -(-side // cell) * config.merge_size
    return 1, count, count


def patches_of(encoder: Encoder, grid: Grid, seed: int = 0) -> Tensor:
    """Random patches from -1 to 1, float32 on the encoder's device."""
    t, h, w = grid
    shape = (t * h * w, *encoder.processor.patch_shape)
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 2 - 1).to(encoder.device)


def work_of(encoder: Encoder, grid: Grid) -> Work:
    """Count the products of one picture, by PyTorch's own counter, on a model without memory."""
    model = family_of({"model_type": encoder.family}).empty_model(encoder.config)
    model.requires_grad_(False)  # the counter stumbles over parameters handed on as they are
    t, h, w = grid
    shape = (t * h * w, *encoder.processor.patch_shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(shape, device="meta"), [list(grid)])
    counts = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return Work(t * h * w, linear, counter.get_total_flops() - linear)


def matrix_product(encoder: Encoder, rows: int) -> tuple[Callable[[], object], int]:
    """The largest product of a block, `rows` patches high, and its operations; its rate is the ceiling.

    The product is PyTorch's own, in the model's dtype on its device: activations [rows, hidden] times a
    matrix [intermediate, hidden].
    """
    model = family_of({"model_type": encoder.family}).empty_model(encoder.config)
    shape = max((p.shape for p in model.parameters() if p.ndim == 2), key=lambda shape: shape.numel())
    x, matrix = (torch.randn(s).to(encoder.device, encoder.dtype) for s in ((rows, shape[1]), shape))
    return (lambda: F.linear(x, matrix)), 2 * rows * shape.numel()

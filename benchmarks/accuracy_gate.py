"""Every backend at the full geometry against float64, and whether it is exact enough.

    python benchmarks/accuracy_gate.py build/k3-random [--side 448] [--reference numpy]

float32: relative error (L2) at most 1.5 times plain PyTorch's, and at most 2e-5. bfloat16: the least cosine
of a token at most 0.0005 below plain PyTorch's. The truth is the model itself in float64 or, with
`--reference numpy`, the independent one in `moonvit.reference`, which takes minutes. Exit code 1 on failure.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from moonvit import reference
from moonvit.encoder import Encoder
from moonvit.trace.selftest import StoredWeights, geometry

LIMITS = {"times eager": 1.5, "float32": 2e-5, "cosine": 0.0005}


def run(encoder: Encoder, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
    with torch.no_grad():
        return encoder.model(pixels, [grid])[0].double()


def truth(path: Path, pixels: Tensor, grid: tuple[int, int, int], kind: str) -> Tensor:
    encoder = Encoder.from_pretrained(path, dtype="float64", backend="eager")
    if kind == "torch":
        return run(encoder, pixels, grid)
    weights = StoredWeights(encoder.checkpoint)
    return torch.from_numpy(reference.trace(weights, geometry(encoder.config), pixels.numpy(), grid))


def figures(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative error and least cosine of a token."""
    error = float((found - exact).norm() / exact.norm())
    return error, float(F.cosine_similarity(found, exact, dim=-1).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--reference", choices=["torch", "numpy"], default="torch")
    parser.add_argument("--backends", nargs="+", default=["native", "compiled"])
    arguments = parser.parse_args()
    h = w = arguments.side // 14
    pixels = torch.rand(h * w, 3, 14, 14, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact = truth(arguments.model, pixels, (1, h, w), arguments.reference)
    good = True
    for dtype in ("float32", "bfloat16"):
        plain: tuple[float, float] | None = None
        for backend in ("eager", *arguments.backends):
            encoder = Encoder.from_pretrained(arguments.model, dtype=dtype, backend=backend)
            error, cosine = figures(run(encoder, pixels, (1, h, w)), exact)
            plain = plain or (error, cosine)
            if dtype == "float32":
                passed = error <= min(LIMITS["times eager"] * plain[0], LIMITS["float32"])
            else:
                passed = cosine >= plain[1] - LIMITS["cosine"]
            passed = passed and encoder.backend == backend
            good = good and passed
            row = {"dtype": dtype, "backend": backend, "ran as": encoder.backend, "relative error": error,
                   "least token cosine": cosine, "passed": passed}  # fmt: skip
            print(json.dumps(row), flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

"""int8 against the model's own type, by backend, the same picture in turns; and what it costs in exactness.

    python benchmarks/int8.py build/k3-random [--sides 448] [--backends native eager] [--rounds 5]

Prints one JSON line a side. "times" is the median of the ratios of neighbouring runs. With `--clock cpu`
everything runs in one thread and its processor time counts: steady on a machine that others use too. With
`--exact`, the least cosine of a token and the relative error against float32 are added, the
truth by the eager backend.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moonvit.bench.measure import in_turns
from moonvit.encoder import Encoder

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def load(path: Path, dtype: str, backend: str, quantize: str | None, layers: int) -> Encoder:
    encoder = Encoder.from_pretrained(path, dtype=dtype, backend=backend, quantize=quantize)
    stack = encoder.model.vision_tower.encoder
    stack.blocks = stack.blocks[:layers]
    return encoder


def run(encoder: Encoder, pixels: Tensor, side: int) -> Tensor:
    with torch.no_grad():
        return encoder.model(pixels, [(1, side // 14, side // 14)])[0]


def compared(seconds: dict[str, tuple[float, ...]], backends: list[str], dtype: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for backend in backends:
        plain, rounded = seconds[f"{backend} {dtype}"], seconds[f"{backend} int8"]
        rows[backend] = {
            f"{dtype} s": round(statistics.median(plain), 3),
            "int8 s": round(statistics.median(rounded), 3),
            "times": round(statistics.median(a / b for a, b in zip(plain, rounded, strict=True)), 3),
        }
    return rows


def exactness(found: dict[str, Tensor], truth: Tensor) -> dict[str, Any]:
    truth = truth.double()
    return {
        name: {
            "least cosine": round(float(F.cosine_similarity(out.double(), truth, dim=-1).min()), 6),
            "relative error": float(f"{float((out.double() - truth).norm() / truth.norm()):.3g}"),
        }
        for name, out in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sides", type=int, nargs="+", default=[448])
    parser.add_argument("--backends", nargs="+", default=["native", "eager"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=27, help="Blocks to keep; a pass is linear in them.")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--exact", action="store_true")
    arguments = parser.parse_args()
    if arguments.clock == "cpu":
        torch.set_num_threads(1)
    encoders = {
        f"{backend} {quantize or arguments.dtype}": load(
            arguments.model, arguments.dtype, backend, quantize, arguments.layers
        )
        for backend in arguments.backends
        for quantize in (None, "int8")
    }
    for side in arguments.sides:
        pixels = torch.rand(side * side // 196, 3, 14, 14, generator=torch.Generator().manual_seed(0)) * 2 - 1
        runs = {name: lambda e=encoder, s=side, p=pixels: run(e, p, s) for name, encoder in encoders.items()}
        seconds = {
            name: timing.seconds
            for name, timing in in_turns(runs, arguments.rounds, clock=CLOCKS[arguments.clock]).items()
        }
        row = {"side": side, "layers": arguments.layers, "threads": torch.get_num_threads()}
        row |= compared(seconds, arguments.backends, arguments.dtype)
        if arguments.exact:
            precise = load(arguments.model, "float32", "eager", None, arguments.layers)
            found = {name: work() for name, work in runs.items()}
            row["exact"] = exactness(found, run(precise, pixels, side))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

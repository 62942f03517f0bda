"""The backends on the same picture in turn, against the rate of PyTorch's own matrix product in the same run.

    python benchmarks/backends.py build/k3-random [--sides 448 896] [--dtype bfloat16] [--layers 27]

Prints one JSON line a side: medians of seconds, best and spread; `of ceiling` is the time that all products
of the tower would take at the best rate seen in this run, over the time taken. With `--clock cpu` everything
runs in one thread and its processor time counts: slower, but steady on a machine that others use too.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from moonvit.backends import set_backend
from moonvit.encoder import Encoder

WARM = 1


def tower_flops(config: Any, patches: int, layers: int) -> float:
    """Two for each multiplication of the blocks, the attention and the projector, for one picture."""
    width, inner, hidden = config.hidden_size, config.qkv_hidden_size, config.intermediate_size
    block = 2 * patches * (4 * inner * width + 2 * width * hidden) + 4 * patches**2 * inner
    merged = config.merged_size
    projector = 2 * patches / config.merge_size**2 * (merged**2 + merged * config.text_hidden_size)
    return layers * block + projector


class Ceiling:
    """The best rate of PyTorch's product at the shapes of the tower, sampled between the runs."""

    def __init__(self, config: Any, dtype: torch.dtype, clock: Any) -> None:
        self.clock, self.best, self.seen = clock, 0.0, []
        x = torch.randn(4096, config.hidden_size).to(dtype)
        weight = torch.randn(3 * config.qkv_hidden_size, config.hidden_size).to(dtype)
        self.case = x, weight, torch.empty(len(x), len(weight), dtype=dtype)

    def sample(self) -> None:
        x, weight, out = self.case
        for _ in range(3):
            began = self.clock()
            torch.mm(x, weight.t(), out=out)
            self.seen.append(2 * x.shape[0] * x.shape[1] * len(weight) / (self.clock() - began))
        self.best = max(self.seen)


def measure(encoder: Encoder, side: int, backends: list[str], runs: int, clock: Any) -> dict[str, Any]:
    h = w = side // 14
    pixels = torch.rand(h * w, 3, 14, 14, generator=torch.Generator().manual_seed(0)) * 2 - 1
    layers = len(encoder.model.vision_tower.encoder.blocks)
    ceiling = Ceiling(encoder.config, encoder.dtype, clock)
    taken: dict[str, list[float]] = {backend: [] for backend in backends}
    for run in range(runs + WARM):
        for backend in backends:
            set_backend(encoder.model, backend)
            began = clock()
            with torch.no_grad():
                encoder.model(pixels, [(1, h, w)])
            if run >= WARM:
                taken[backend].append(clock() - began)
        ceiling.sample()
    floor = tower_flops(encoder.config, h * w, layers) / ceiling.best
    rows = {
        backend: {
            "median s": round(statistics.median(seconds), 3),
            "best s": round(min(seconds), 3),
            "worst s": round(max(seconds), 3),
            "of ceiling": round(floor / statistics.median(seconds), 3),
        }
        for backend, seconds in taken.items()
    }
    return {
        "side": side, "layers": layers, "dtype": str(encoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "product GFLOP/s": {"best": round(ceiling.best / 1e9),
                            "median": round(statistics.median(ceiling.seen) / 1e9)},
        "floor s": round(floor, 3), **rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sides", type=int, nargs="+", default=[448, 896])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backends", nargs="+", default=["native", "eager"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=27, help="Blocks to keep; a pass is linear in them.")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    if arguments.clock == "cpu":
        torch.set_num_threads(1)
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    encoder = Encoder.from_pretrained(arguments.model, dtype=arguments.dtype, backend="native")
    stack = encoder.model.vision_tower.encoder
    stack.blocks = stack.blocks[: arguments.layers]
    for side in arguments.sides:
        found = measure(encoder, side, arguments.backends, arguments.runs, clock)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""moonvit beside other implementations of its towers, on the same weights, in turns in one process.

    python benchmarks/peers.py build/k3-random [--sizes 448 896] [--dtype bfloat16] [--rounds 3]
        [--moonvit auto eager] [--peers reference:float32 sdpa compiled openvino]
        [-o FILE.json] [--plot FILE.svg]
    python benchmarks/peers.py build/k25-random --peers transformers    # of benchmarks/make_k25.py

The rate of PyTorch's own matrix product is measured in the same rounds. Prints medians, spreads, parts of
that ceiling, ratios to moonvit, and how far each result lies from moonvit's. The packages nemo-automodel
(without its dependencies) and transformers come with `make test`'s environment; openvino is only needed for
its own line.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from reference_models import Tower, plain_sdpa, reference, transformers_k25
from torch import Tensor

from moonvit.bench.measure import Run
from moonvit.bench.plot import plot
from moonvit.bench.report import Row, as_document, as_text
from moonvit.bench.run import Contender, benchmark, of_encoder
from moonvit.bench.work import patches_of, square_grid
from moonvit.cli.bench import machine
from moonvit.encoder import Encoder


def as_contender(name: str, encoder: Encoder, tower: Tower) -> Contender:
    def prepare(patches: Tensor, grids: list[list[int]]) -> Run:
        grid = torch.tensor(grids)

        def run() -> object:
            with torch.no_grad():
                return tower(patches, grid)

        return run

    return Contender(name, encoder, prepare)


def compiled(encoder: Encoder) -> Tower:
    """Plain PyTorch compiled and frozen for each size."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    return torch.compile(plain_sdpa(encoder, complex_rotation=False), dynamic=False)


def openvino(encoder: Encoder, model: Path) -> Tower:
    """Plain PyTorch in float32 converted by OpenVINO for each size; run in bfloat16 where the model is."""
    import openvino as ov

    models: dict[int, Callable[[Tensor], object]] = {}
    whole = Encoder.from_pretrained(model, dtype="float32", backend="eager")
    tower = plain_sdpa(whole, complex_rotation=False)

    class Module(torch.nn.Module):
        def __init__(self, grid: Tensor) -> None:
            super().__init__()
            self.grids = grid.tolist()

        def forward(self, pixels: Tensor) -> Tensor:
            return tower(pixels, self.grids)

    def run(pixels: Tensor, grid: Tensor) -> Tensor:
        if len(pixels) not in models:
            with torch.no_grad():
                converted = ov.convert_model(torch.export.export(Module(grid), (pixels,)))
            precision = "bf16" if encoder.dtype == torch.bfloat16 else "f32"
            settings = {
                "INFERENCE_PRECISION_HINT": precision,
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            }
            models[len(pixels)] = ov.Core().compile_model(converted, "CPU", settings)
        return torch.from_numpy(models[len(pixels)](pixels.numpy())[0])

    return run


PEERS: dict[str, Callable[[Encoder, Path], Tower]] = {
    "reference": reference,
    "sdpa": lambda encoder, _: plain_sdpa(encoder),
    "compiled": lambda encoder, _: compiled(encoder),
    "openvino": openvino,
    "transformers": transformers_k25,
}


def distances(contenders: list[Contender], side: int) -> list[str]:
    """Relative L2 and least token cosine of every contender's result to the first one's."""
    encoder = contenders[0].encoder
    grid = square_grid(encoder, side)
    patches = patches_of(encoder, grid)
    results = []
    for contender in contenders:
        result = contender.prepare(patches, [list(grid)])()
        results.append((result[0] if isinstance(result, list) else result).double())
    lines = []
    for contender, result in zip(contenders[1:], results[1:], strict=True):
        error = float((result - results[0]).norm() / results[0].norm())
        cosine = float(torch.nn.functional.cosine_similarity(result, results[0], dim=-1).min())
        lines.append(
            f"{contender.name} at {side}: {error:.1e} from {contenders[0].name}, least cosine {cosine:.6f}"
        )
    return lines


def ratios(rows: list[Row], first: str) -> list[str]:
    """How many times as long as moonvit each contender takes."""
    base = {row.side: row.timing.median for row in rows if row.name == first}
    return [
        f"{row.name} at {row.side}: {row.timing.median / base[row.side]:.2f} x {first}"
        for row in rows
        if row.name != first
    ]


def typed(name: str, dtype: str) -> tuple[str, str]:
    """ "sdpa:float32" in two; the dtype given where the name has none."""
    what, _, of = name.partition(":")
    return what, of or dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[448, 896])
    parser.add_argument("--dtype", default="bfloat16", help="Of those that name none.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--moonvit", nargs="+", default=["auto", "eager"], metavar="BACKEND[:DTYPE]")
    parser.add_argument("--peers", nargs="*", default=["reference", "sdpa"], metavar="PEER[:DTYPE]")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    contenders = []
    for backend, dtype in (typed(name, arguments.dtype) for name in arguments.moonvit):
        encoder = Encoder.from_pretrained(arguments.model, dtype=dtype, backend=backend)
        contenders.append(of_encoder(f"moonvit {encoder.backend} {dtype}", encoder))
    for peer, dtype in (typed(name, arguments.dtype) for name in arguments.peers):
        if peer not in PEERS:
            parser.error(f"no peer {peer}; there are {', '.join(PEERS)}")
        plain = Encoder.from_pretrained(arguments.model, dtype=dtype, backend="eager")
        contenders.append(as_contender(f"{peer} {dtype}", plain, PEERS[peer](plain, arguments.model)))
    rows: list[Row] = []
    for row in benchmark(contenders, arguments.sizes, arguments.rounds):
        rows.append(row)
        print(f"{row.name} at {row.side}: {row.timing.median:.4f} s", flush=True)
    print(as_text(rows))
    print("\n".join(ratios(rows, contenders[0].name)))
    for side in arguments.sizes:
        print("\n".join(distances(contenders, side)))
    if arguments.output:
        arguments.output.write_text(json.dumps(as_document(rows, machine()), indent=2) + "\n")
    if arguments.plot:
        arguments.plot.write_text(plot(rows))


if __name__ == "__main__":
    main()

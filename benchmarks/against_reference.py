"""moonvit against the published reference model on the same weights, in turn in one process.

    python benchmarks/against_reference.py build/k3-random [--sides 448 896] [--dtypes ...] [--runs 3]

Needs the packages nemo-automodel (without its dependencies) and transformers; `make test` installs both.
Prints medians of seconds, their ratio, and how far the two results lie apart.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moonvit.encoder import Encoder


def reference_module() -> Any:
    package = importlib.util.find_spec("nemo_automodel")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("nemo-automodel is not installed")
    path = Path(package.submodule_search_locations[0]) / "components/models/kimi_k3/vision.py"
    spec = importlib.util.spec_from_file_location("kimi_k3_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(encoder: Encoder, model: Path) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The reference's tower and projector, holding the encoder's own tensors."""
    from transformers import PretrainedConfig

    module = reference_module()
    vision = json.loads((model / "config.json").read_text())["vision_config"]
    config = PretrainedConfig(**{key.removeprefix("vt_"): value for key, value in vision.items()})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        tower = module.MoonViT3dPretrainedModel(config).eval()
        projector = module.PatchMergerMLPV2(
            SimpleNamespace(
                mm_hidden_size=vision["mm_hidden_size"],
                merge_kernel_size=vision["merge_kernel_size"],
                hidden_size=vision["text_hidden_size"],
                projector_ln_eps=vision["projector_ln_eps"],
            )
        ).eval()
    tower.load_state_dict(encoder.model.vision_tower.state_dict(), assign=True)
    projector.load_state_dict(encoder.model.mm_projector.state_dict(), assign=True)
    table = tower.patch_embed.pos_emb
    times = module.get_1d_sincos_pos_embed(table.dim, table.num_frames)
    table.time_weight = torch.from_numpy(times).to(encoder.dtype).unsqueeze(1)
    return lambda pixels, grid: projector(tower(pixels.to(encoder.dtype), grid))[0]


def seconds(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    with torch.no_grad():
        result = run()
    return time.perf_counter() - began, result


def compare(encoder: Encoder, theirs: Any, side: int, runs: int) -> dict[str, Any]:
    h = w = side // 14
    pixels = torch.rand(h * w, 3, 14, 14, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grid = torch.tensor([[1, h, w]])
    taken: dict[str, list[float]] = {"moonvit": [], "reference": []}
    results = {}
    for _ in range(runs):
        for name, run in (
            ("moonvit", lambda: encoder.model(pixels, grid)[0]),
            ("reference", lambda: theirs(pixels, grid)),
        ):
            spent, results[name] = seconds(run)
            taken[name].append(spent)
    ours, other = results["moonvit"].double(), results["reference"].double()
    return {
        "side": side,
        "dtype": str(encoder.dtype).removeprefix("torch."),
        **{f"{name} s": round(statistics.median(values), 3) for name, values in taken.items()},
        "ratio": round(statistics.median(taken["reference"]) / statistics.median(taken["moonvit"]), 2),
        "relative difference": float((ours - other).norm() / other.norm()),
        "minimum token cosine": float(torch.nn.functional.cosine_similarity(ours, other, dim=-1).min()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sides", type=int, nargs="+", default=[448, 896])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    torch._dynamo.config.disable = True
    for dtype in arguments.dtypes:
        encoder = Encoder.from_pretrained(arguments.model, dtype=dtype)
        theirs = reference(encoder, arguments.model)
        compare(encoder, theirs, 56, 1)
        for side in arguments.sides:
            print(json.dumps(compare(encoder, theirs, side, arguments.runs)), flush=True)


if __name__ == "__main__":
    main()

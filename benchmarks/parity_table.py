"""The families against their references as a table in Markdown.

Run from the repository: `python benchmarks/parity_table.py [--sizes 320]`. The references come with
`make test`'s environment: transformers, and nemo-automodel for the raw Kimi layouts; pixels are compared with
transformers' `Qwen2VLImageProcessorPil` and, for Kimi, with the written rules.
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from reference_models import reference  # noqa: E402

import parity_helpers as helpers  # noqa: E402
import test_pixels_families as pixels  # noqa: E402
from moonvit.configs.kimi import kimi_pixels, kimi_vl_pixels  # noqa: E402
from moonvit.configs.qwen import qwen_pixels  # noqa: E402
from moonvit.encoder import Encoder  # noqa: E402
from moonvit.pixels.kimi import KimiProcessor, KimiVLProcessor  # noqa: E402
from moonvit.pixels.qwen import QwenProcessor  # noqa: E402
from moonvit.synthetic import make_checkpoint  # noqa: E402

TOWERS = {
    "kimi_k3": ("moonvit.py", "kimi_k3.py"),
    "kimi_k25": ("moonvit.py", "kimi_k25.py"),
    "kimi_vl": ("moonvit.py", "kimi_k25.py"),
    "qwen2_vl": ("qwen.py", "qwen2_vl.py"),
    "qwen2_5_vl": ("qwen.py", "qwen2_5_vl.py"),
    "qwen3_vl": ("qwen.py", "qwen3_vl.py"),
}


Figures = tuple[float, float, int, float, float]


def tower_figures(name: str) -> Figures:
    """Worst relative error of a picture or clip, least cosine of a token, pictures and clips compared;
    error and cosine of bfloat16 against float32.
    """
    worst, least, count = 0.0, 1.0, 0
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        ours, reference = helpers.PAIRS[name](Path(directory) / "checkpoint")
        for grids in helpers.stills_of(name) + helpers.clips_of(name):
            patches = helpers.patches_for(ours, grids)
            for mine, theirs in zip(ours.model(patches, grids), reference(patches, grids), strict=True):
                worst = max(worst, helpers.relative_error(mine, theirs))
                least = min(least, helpers.least_cosine(mine, theirs))
                count += 1
        half = helpers.bfloat16_figures(ours, helpers.stills_of(name) + helpers.clips_of(name))
    return worst, least, count, *half


def k3_figures() -> Figures:
    """The same for K3's mid-size geometry, each picture and clip by itself."""
    worst, least, count = 0.0, 1.0, 0
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        path = Path(directory) / "mid"
        make_checkpoint(path, "mid", seed=3)
        ours = Encoder.from_pretrained(path, dtype="float32")
        theirs = reference(ours, path)
        for grid in [(1, 4, 6), (1, 16, 16), (1, 30, 4), (1, 40, 36), (2, 6, 10), (4, 4, 8)]:
            patches = helpers.patches_for(ours, [grid])
            mine, expected = ours.model(patches, [grid])[0], theirs(patches, torch.tensor([grid]))
            worst = max(worst, helpers.relative_error(mine, expected))
            least = min(least, helpers.least_cosine(mine, expected))
            count += 1
        half = helpers.bfloat16_figures(ours, helpers.KIMI_BATCHES + helpers.KIMI_CLIPS)
    return worst, least, count, *half


def pixels_equal(family: str, sizes: int) -> tuple[int, int]:
    """Pictures whose pixels are equal bit for bit, of all that were tried."""
    equal = tried = 0
    for picture in pixels.pictures(sizes, seed=11):
        if family.startswith("qwen") and max(picture.size) / min(picture.size) > 200:
            continue
        found, expected = both(family, picture)
        tried += 1
        equal += torch.equal(found, expected)
    return equal, tried


def both(family: str, picture) -> tuple[torch.Tensor, torch.Tensor]:
    if family.startswith("qwen"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        rules = pixels.QWEN[family]
        expected = Qwen2VLImageProcessorPil(**rules)(picture, return_tensors="pt")["pixel_values"]
        return QwenProcessor(qwen_pixels(rules))(picture).pixel_values, expected
    if family == "kimi_vl":
        ours = KimiVLProcessor(kimi_vl_pixels({**helpers.KIMI_VL_PIXELS, "in_token_limit": 300}))
    else:
        ours = KimiProcessor(kimi_pixels({"media_proc_cfg": {**helpers.K25_MEDIA, "in_patch_limit": 300}}))
    written = pixels.written_rule(picture, 300, family == "kimi_vl")
    return ours(picture).pixel_values, pixels.raster_patches(written)


def lines_of(family: str) -> str:
    """Lines of the shared part and of the family's own file."""
    return " + ".join(
        str(len((ROOT / "src/moonvit/towers" / file).read_text().splitlines())) for file in TOWERS[family]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, default=320, help="Random pictures a family.")
    sizes = parser.parse_args().sizes
    warnings.simplefilter("ignore")
    print(
        "| family | worst relative error | 1 - least token cosine | compared | bf16: worst relative error "
        "| bf16: least token cosine | pixels equal | tower lines |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in ["kimi_k3", *helpers.PAIRS]:
        family = name.partition(" ")[0]
        worst, least, count, half, cosine = k3_figures() if name == "kimi_k3" else tower_figures(name)
        equal, lines = "as above", "as above"
        if name == "kimi_k3":
            equal, lines = "see tests/test_pixels_golden.py", lines_of(family)
        elif name == family:
            equal, lines = "{} of {}".format(*pixels_equal(family, sizes)), lines_of(family)
        figures = f"{worst:.1e} | {1 - least:.1e} | {count} | {half:.1e} | {cosine:.5f}"
        print(f"| {name} | {figures} | {equal} | {lines} |", flush=True)


if __name__ == "__main__":
    main()

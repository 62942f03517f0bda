"""A folder of photographs of mixed sizes: one call for all beside one call for each.

    python benchmarks/mixed_folder.py build/k3-random [--rounds 3] [--max-tokens 256] [--dtype bfloat16]

The pictures are JPEGs made on the spot in the sizes of a usual photo folder (thumbnails, screenshots, phone
and camera pictures); results of both ways are compared bit by bit.
"""

import argparse
import io
import statistics
from pathlib import Path

import numpy as np
from PIL import Image

from moonvit.bench.measure import in_turns
from moonvit.encoder import Encoder

SIZES = [
    *((120, 90), (160, 120), (96, 96), (128, 128), (200, 150), (150, 200), (64, 64), (256, 144)) * 2,
    *((320, 240), (240, 320), (300, 200), (400, 300), (224, 224)),
    *((640, 480), (800, 600), (1280, 720), (1600, 1200), (3024, 4032)),
]


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A smooth picture with grain."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 255, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(
        np.int16
    )
    grain = generator.integers(-6, 7, smooth.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    encoder = Encoder.from_pretrained(arguments.model, dtype=arguments.dtype)
    order = np.random.default_rng(0).permutation(len(SIZES))
    pictures = [jpeg(*SIZES[i], seed=int(i)) for i in order]
    how = {"max_tokens": arguments.max_tokens}
    runs = {
        "one call each": lambda: [encoder.encode(picture, **how) for picture in pictures],
        "one call": lambda: encoder.encode(pictures, **how),
    }
    timings = in_turns(runs, arguments.rounds)
    for name, timing in timings.items():
        print(f"{name}: {timing.median:.3f} s ({', '.join(f'{s:.3f}' for s in timing.seconds)})")
    pairs = zip(*(timing.seconds for timing in timings.values()), strict=True)
    print(f"throughput of one call: {statistics.median(a / b for a, b in pairs):.2f} x (median of pairs)")
    alone, together = (run() for run in runs.values())
    equal = sum(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    worst = max(
        float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in zip(alone, together, strict=True)
    )
    print(f"{equal} of {len(pictures)} results equal bit by bit, worst relative difference {worst:.1e}")


if __name__ == "__main__":
    main()

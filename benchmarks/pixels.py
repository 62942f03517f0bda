"""What picture processing costs on top of Pillow's own decoding and resizing.

    python benchmarks/pixels.py [--rounds 9]

Each picture is decoded and resized by Pillow alone, and made into `pixel_values` by K3's processor, in turns.
"""

import argparse
import io

import numpy as np
from PIL import Image

from moonvit.bench.measure import in_turns
from moonvit.config import PixelConfig
from moonvit.pixels.kimi import KimiProcessor
from moonvit.presets import preprocessor_config

CASES = [
    ("JPEG", "RGB", (640, 427), None),
    ("JPEG", "RGB", (1920, 1080), None),
    ("JPEG", "RGB", (4000, 3000), None),
    ("JPEG", "RGB", (4000, 3000), 1024),
    ("PNG", "RGB", (1920, 1080), None),
    ("PNG", "RGBA", (1920, 1080), None),
    ("PNG", "RGBA", (1920, 1080), 256),
]


def smooth_picture(mode: str, size: tuple[int, int]) -> Image.Image:
    """Random colours a sixteenth of the size, enlarged, with grain."""
    generator = np.random.default_rng(0)
    width, height = size
    bands = len(mode)
    small = generator.integers(0, 255, (height // 16 + 2, width // 16 + 2, bands), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small, mode).resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
    grain = generator.integers(-6, 7, smooth.shape, dtype=np.int16)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8), mode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    processor = KimiProcessor(PixelConfig.from_dict(preprocessor_config()))
    print(f"{'':<24} {'new size':>10} {'Pillow ms':>10} {'ours on top ms':>15} {'part':>6}")
    for kind, mode, size, tokens in CASES:
        file = io.BytesIO()
        smooth_picture(mode, size).save(file, kind, **({"quality": 90} if kind == "JPEG" else {}))
        data = file.getvalue()
        plan = processor.plan_size(*size, tokens)
        new = (plan.new_width, plan.new_height)

        def pillow(data: bytes = data, new: tuple[int, int] = new) -> None:
            picture = Image.open(io.BytesIO(data))
            picture.load()
            if picture.size != new:
                picture.resize(new, Image.Resampling.BICUBIC)

        def whole(data: bytes = data, tokens: int | None = tokens) -> None:
            processor(data, max_tokens=tokens)

        taken = in_turns({"pillow": pillow, "whole": whole}, rounds)
        base = taken["pillow"].median * 1e3
        more = taken["whole"].median * 1e3 - base
        name = f"{kind} {mode} {size[0]}x{size[1]}"
        print(f"{name:<24} {f'{new[0]}x{new[1]}':>10} {base:>10.2f} {more:>15.2f} {more / base:>6.0%}")


if __name__ == "__main__":
    main()

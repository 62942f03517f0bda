"""The same pictures turned into pixels in wrong ways, by the real processor with other rules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from moonvit.config import Chessboard, PixelConfig
from moonvit.ops.grid import Grid
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.plan import plan_image

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass
class PixelWays(Mapping[str, Tensor]):
    """{way: float64 pixels [N, 3, patch, patch]}; ways that change nothing are left out.

    Args:
        right: normalised pixels as the checkpoint's processor makes them.
        grids: (t, h, w) of each picture or clip.
        config: the checkpoint's rules.
        pictures: what `right` was made from, one a picture or frame; without them, ways that need the
            picture itself (alpha, padding) are left out.
        max_tokens: the budget that `right` was made with.
    """

    right: Tensor
    grids: Sequence[Grid]
    config: PixelConfig
    pictures: Sequence[Image.Image] = ()
    max_tokens: int | None = None
    _made: dict[str, Tensor | None] = field(default_factory=dict)

    def __getitem__(self, way: str) -> Tensor:
        if way == "right":
            return self.right
        if way not in self._made:
            made = _WAYS[way](self)
            changed = made is not None and not torch.equal(made, self.right)
            self._made[way] = made if changed else None
        found = self._made[way]
        if found is None:
            raise KeyError(way)
        return found

    def __contains__(self, way: object) -> bool:
        try:
            self[str(way)]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return (way for way in ("right", *_WAYS) if way in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def unit(self) -> Tensor:
        """The pixels before normalising, 0..1."""
        mean, std = (torch.tensor(v, dtype=torch.float64) for v in (self.config.mean, self.config.std))
        return self.right * std[:, None, None] + mean[:, None, None]

    def normalised(self, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        shift, scale = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
        return (self.unit() - shift) / scale

    def processed(self, **changes: Any) -> Tensor | None:
        """The pictures through the processor with other rules."""
        if not self.pictures:
            return None
        processor = KimiProcessor(replace(self.config, **changes))
        batch = processor(list(self.pictures), max_tokens=self.max_tokens, exif="ignore")
        return batch.pixel_values.double()

    def padded(self, value: float) -> Tensor | None:
        """The padding set to `value`, in normalised units."""
        if not self.pictures:
            return None
        out, patch, start = self.right.clone(), self.config.patch_size, 0
        for picture in self.pictures:
            plan = plan_image(*picture.size, self.config, self.max_tokens)
            _, h, w = plan.grid
            plane = out[start : start + h * w].view(h, w, 3, patch, patch).permute(0, 3, 1, 4, 2).clone()
            plane = plane.reshape(h * patch, w * patch, 3)
            plane[plan.new_height :] = value
            plane[:, plan.new_width :] = value
            cut = plane.view(h, patch, w, patch, 3).permute(0, 2, 4, 1, 3)
            out[start : start + h * w] = cut.reshape(h * w, 3, patch, patch)
            start += h * w
        return out


def _board(gray: int) -> Chessboard:
    return Chessboard(square=8, white_first=True, white=gray, gray=gray)


_WAYS: dict[str, Callable[[PixelWays], Tensor | None]] = {
    "clip": lambda p: p.normalised(*CLIP),
    "imagenet": lambda p: p.normalised(*IMAGENET),
    "unit": lambda p: p.unit(),
    "bytes": lambda p: 255 * p.unit(),
    "bgr": lambda p: p.right.flip(1),
    "alpha-dropped": lambda p: p.processed(background=None),
    "alpha-black": lambda p: p.processed(background=_board(0)),
    "alpha-white": lambda p: p.processed(background=_board(255)),
    "pad-zero": lambda p: p.padded(0.0),
    "pad-gray-127": lambda p: p.padded((127 / 255 - p.config.mean[0]) / p.config.std[0]),
    "pad-gray-128": lambda p: p.padded((128 / 255 - p.config.mean[0]) / p.config.std[0]),
    "pad-white": lambda p: p.padded((1 - p.config.mean[0]) / p.config.std[0]),
}

"""What the picture processors of all families share: reading, planning, packing."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from moonvit.config import PatchRules
from moonvit.errors import ImageError
from moonvit.pixels.decode import Exif, Layout, Limits, describe, image_size, read_image
from moonvit.pixels.plan import ImagePlan


@dataclass(frozen=True)
class PixelBatch:
    """Pictures as a tower takes them.

    Attributes:
        pixel_values: float32, pictures one behind the other. Kimi: [N, 3, patch, patch] in raster order.
            Qwen: [N, 3·frames·patch²] in merge-block order, as its own processors make them.
        grid_thws: int64 [n, 3], (t, h, w) in patches.
        sizes: (width, height) in pixels before resizing, upright; the size that the prompt names.
    """

    pixel_values: Tensor
    grid_thws: Tensor
    sizes: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Prepared:
    """One picture or the frames of a clip, resized and free of transparency (mode RGB), not yet cut.

    `name` is what to call it in reports.
    """

    frames: tuple[Image.Image, ...]
    plan: ImagePlan
    name: str = ""


class PictureProcessor(ABC):
    """Turns pictures into a `PixelBatch` by a checkpoint's rules.

    Holds no state between calls. `limits` bound what is decoded at all. A family defines `plan_size`,
    `opaque`, `patch_shape` and `cut`.
    """

    config: PatchRules
    order: Literal["raster", "block"] = "raster"
    """How patches lie in `pixel_values`, and in every stage of the tower that a tap sees."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    @abstractmethod
    def plan_size(self, width: int, height: int, max_tokens: int | None = None) -> ImagePlan:
        """What becomes of a picture of that size; `ImageError` for one that the family refuses."""

    @abstractmethod
    def opaque(self, picture: Image.Image, plan: ImagePlan) -> Image.Image:
        """The picture at its new size without transparency, of mode RGB."""

    @property
    @abstractmethod
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of one patch in `pixel_values`."""

    @abstractmethod
    def cut(self, prepared: Prepared, out: NDArray[np.float32]) -> None:
        """Write the normalised patches of one picture or clip into `out`, [N, *patch_shape]."""

    def __call__(
        self,
        images: Any,
        *,
        max_tokens: int | None = None,
        exif: Exif = "apply",
        layout: Layout | None = None,
    ) -> PixelBatch:
        """The batch for one picture or a list of them.

        Args:
            images: what `moonvit.pixels.decode.read_image` takes, or a list or tuple of such.
            max_tokens: for each picture, lowers the checkpoint's budget.
            exif: "apply" turns pictures upright, "ignore" leaves them as stored (the reference's way).
            layout: "HWC" or "CHW", for arrays of three dimensions.

        Raises:
            ImageError: for a picture that cannot be read or is over a limit.
        """
        sources = list(images) if isinstance(images, list | tuple) else [images]
        prepared = [self.prepare(s, max_tokens=max_tokens, exif=exif, layout=layout) for s in sources]
        return self.pack(prepared)

    def prepare(
        self, image: Any, *, max_tokens: int | None = None, exif: Exif = "apply", layout: Layout | None = None
    ) -> Prepared:
        """One picture decoded, resized and composited."""
        picture = read_image(image, limits=self.limits, exif=exif, layout=layout)
        plan = self._named_plan(image, picture.size, max_tokens)
        try:
            return Prepared((self.opaque(picture, plan),), plan, describe(image))
        except (ValueError, OSError) as error:
            raise ImageError(
                f"{describe(image)}: mode {picture.mode} cannot be converted: {error}"
            ) from error

    def pack(self, prepared: Sequence[Prepared]) -> PixelBatch:
        """Normalise and cut prepared pictures into one batch."""
        total = sum(p.plan.patches for p in prepared)
        # numpy asks the system for huge pages; a page fault each 4 kB would take longer than the arithmetic
        out = np.empty((total, *self.patch_shape), np.float32)
        start = 0
        for picture in prepared:
            stop = start + picture.plan.patches
            self.cut(picture, out[start:stop])
            start = stop
        grids = [picture.plan.grid for picture in prepared]
        grid_thws = torch.tensor(grids, dtype=torch.int64, device="cpu").reshape(-1, 3)
        sizes = [(picture.plan.width, picture.plan.height) for picture in prepared]
        return PixelBatch(torch.from_numpy(out), grid_thws, sizes)

    def plan(
        self, image: Any, *, max_tokens: int | None = None, exif: Exif = "apply", layout: Layout | None = None
    ) -> ImagePlan:
        """Sizes and tokens of one picture, from its header alone."""
        size = image_size(image, limits=self.limits, exif=exif, layout=layout)
        return self._named_plan(image, size, max_tokens)

    def _named_plan(self, image: Any, size: tuple[int, int], max_tokens: int | None) -> ImagePlan:
        try:
            return self.plan_size(*size, max_tokens)
        except ImageError as error:
            raise ImageError(f"{describe(image)}: {error.message}", error.hint) from error


def resized(picture: Image.Image, plan: ImagePlan, resample: Image.Resampling) -> Image.Image:
    """The picture at its new size; itself where that is the old one."""
    size = (plan.new_width, plan.new_height)
    return picture if picture.size == size else picture.resize(size, resample)


def strips(picture: Image.Image, lines: int, count: int, width: int) -> Iterator[NDArray[np.uint8]]:
    """An RGB picture from its top down, `count` times uint8 [lines, 3, width].

    What lies right of it and below is black.
    """
    for top in range(0, lines * count, lines):
        band = picture.crop((0, top, width, top + lines))
        yield np.frombuffer(band.tobytes("raw", "RGB;L"), np.uint8).reshape(lines, 3, width)

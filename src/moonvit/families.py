"""The families of towers, one row each: what their checkpoints call themselves and what they need.

To add one: a tower in `towers/`, a processor in `pixels/`, a config parser in `configs/`, a name map in
`weights/names.py`, a row here, a parity test.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from moonvit.config import PatchRules, PixelConfig, TowerConfig, VisionConfig, check_agreement
from moonvit.configs import kimi, qwen
from moonvit.errors import ConfigError
from moonvit.fields import Fields, shown
from moonvit.pixels.base import PictureProcessor
from moonvit.pixels.decode import Limits
from moonvit.pixels.kimi import KimiProcessor, KimiVLProcessor
from moonvit.pixels.qwen import QwenProcessor
from moonvit.towers.base import VisionModel
from moonvit.towers.kimi_k3 import KimiK3Vision
from moonvit.towers.kimi_k25 import KimiK25Vision, KimiVLVision
from moonvit.towers.qwen2_5_vl import Qwen25VLVision
from moonvit.towers.qwen2_vl import Qwen2VLVision
from moonvit.towers.qwen3_vl import Qwen3VLVision
from moonvit.weights import names


class Source(Protocol):
    """A checkpoint as far as its JSON goes."""

    where: str

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def picture_rules(self) -> Fields: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row.

    Attributes:
        name: the family, which is its `model_type`.
        others: further values of `model_type` that have this tower, such as mixture-of-experts variants.
        architectures: names in a checkpoint's `architectures`, for one without a `model_type`.
        vision, pixels: parse `config.json` and the rules for pictures.
        model: the tower with its projector, from the parsed config and whether there is a projector.
        processor: pictures to pixels, from the parsed rules and limits.
        names: how tensors are named.
    """

    name: str
    architectures: tuple[str, ...]
    vision: Callable[[Mapping[str, Any], str], TowerConfig]
    pixels: Callable[[Mapping[str, Any], str], PatchRules]
    model: Callable[[Any, bool], VisionModel]
    processor: Callable[[Any, Limits | None], PictureProcessor]
    names: names.NameMap
    others: tuple[str, ...] = ()

    def read(self, source: Source) -> tuple[TowerConfig, PatchRules]:
        """Geometry and pixel rules of a checkpoint, checked against each other."""
        config = self.vision(source.config, str(Path(source.where) / "config.json"))
        pixels = self.pixels(source.picture_rules.values, source.picture_rules.where)
        check_agreement(config, pixels, source.where)
        return config, pixels

    def empty_model(self, config: TowerConfig, projector: bool = True) -> VisionModel:
        """The model without memory, on the meta device."""
        with torch.device("meta"):
            return self.model(config, projector)


FAMILIES = (
    Family(
        name="kimi_k3",
        architectures=("KimiK3ForConditionalGeneration",),
        vision=VisionConfig.from_dict,
        pixels=PixelConfig.from_dict,
        model=KimiK3Vision,
        processor=KimiProcessor,
        names=names.KIMI_K3,
    ),
    Family(
        name="kimi_k25",
        architectures=(
            "KimiK25ForConditionalGeneration",
            "Kimi_K25ForConditionalGeneration",
            "KimiK25VLForConditionalGeneration",
        ),
        vision=kimi.kimi_k25,
        pixels=kimi.kimi_pixels,
        model=KimiK25Vision,
        processor=KimiProcessor,
        names=names.KIMI_K25,
    ),
    Family(
        name="kimi_vl",
        architectures=("KimiVLForConditionalGeneration",),
        vision=kimi.kimi_vl,
        pixels=kimi.kimi_vl_pixels,
        model=KimiVLVision,
        processor=KimiVLProcessor,
        names=names.KIMI_VL,
    ),
    Family(
        name="qwen2_vl",
        architectures=("Qwen2VLForConditionalGeneration",),
        vision=qwen.qwen2_vl,
        pixels=qwen.qwen_pixels,
        model=Qwen2VLVision,
        processor=QwenProcessor,
        names=names.QWEN,
    ),
    Family(
        name="qwen2_5_vl",
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        vision=qwen.qwen2_5_vl,
        pixels=qwen.qwen_pixels,
        model=Qwen25VLVision,
        processor=QwenProcessor,
        names=names.QWEN,
    ),
    Family(
        name="qwen3_vl",
        others=("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        architectures=(
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        vision=qwen.qwen3_vl,
        pixels=qwen.qwen_pixels,
        model=Qwen3VLVision,
        processor=QwenProcessor,
        names=names.QWEN,
    ),
)


def family_of(config: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family of a parsed `config.json`, by `model_type` or, where that is absent, `architectures`.

    `ConfigError` for an unknown one, naming what there is.
    """
    top = Fields(config, where)
    model_type = top.values.get("model_type")
    for family in FAMILIES:
        if model_type in (family.name, *family.others):
            return family
    named = top.values.get("architectures") if model_type is None else None
    for family in FAMILIES:
        if isinstance(named, list) and set(family.architectures).intersection(map(str, named)):
            return family
    if model_type is None:
        top.raw("model_type")
    known = " or ".join(f'"{name}"' for family in FAMILIES for name in (family.name, *family.others))
    raise ConfigError(f"{where}: field 'model_type' is {shown(model_type)}, expected {known}")

"""Which text model of `transformers` goes with which family, and what its config says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonvit.engine.library import transformers_module
from moonvit.errors import ConfigError, MoonvitError
from moonvit.fields import Fields, shown

TO_PROMPT = "moonvit prompt writes the embeddings for an engine that has it; see docs/engines.md"


@dataclass(frozen=True)
class TextFamily:
    """A family's text model.

    Attributes:
        module: of transformers.
        model: class of the text model, without its head.
        config: class of the configuration.
        nested: whether `config` is that of the whole model, whose `text_config` is taken.
        axial: whether tokens have a time, a row and a column; see `moonvit.engine.positions`.
        timed: whether the time axis of a video counts seconds (`tokens_per_second`), not patches of frames.
    """

    module: str
    model: str
    config: str
    nested: bool = True
    axial: bool = True
    timed: bool = False


_DEEPSEEK = TextFamily(
    "models.deepseek_v3.modeling_deepseek_v3",
    "DeepseekV3Model",
    "DeepseekV3Config",
    nested=False,
    axial=False,
)

TEXT_FAMILIES: dict[str, TextFamily] = {
    "kimi_k25": _DEEPSEEK,
    "kimi_vl": _DEEPSEEK,
    "qwen2_vl": TextFamily("models.qwen2_vl.modeling_qwen2_vl", "Qwen2VLTextModel", "Qwen2VLConfig"),
    "qwen2_5_vl": TextFamily(
        "models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLTextModel", "Qwen2_5_VLConfig", timed=True
    ),
    "qwen3_vl": TextFamily("models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLTextModel", "Qwen3VLConfig"),
}

_DEEPSEEK_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "model_type": ("deepseek_v3", "kimi_k2"),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""What `text_config` of K2.5 and Kimi-VL may say: both are DeepSeek-V3's architecture, which knows one way
to route."""


def text_family(family: str) -> TextFamily:
    """`MoonvitError` for a family whose text model transformers does not have, saying why."""
    if family == "kimi_k3":
        raise MoonvitError(
            "kimi_k3: transformers has no text model of Kimi K3 (its kimi_linear is Kimi Linear, without "
            "K3's attention residuals, latent experts and situ activation), so no text can be generated here",
            TO_PROMPT,
        )
    if family not in TEXT_FAMILIES:
        raise MoonvitError(f"{family}: no text model is known, expected one of {', '.join(TEXT_FAMILIES)}")
    return TEXT_FAMILIES[family]


def check_text_config(family: str, config: Mapping[str, Any], where: str) -> None:
    """Refuse, before anything heavy is imported, what cannot be run."""
    top = Fields(config, where)
    holders = [top]
    if "text_config" in top.values or not text_family(family).nested:
        holders.append(top.section("text_config"))
    for holder in holders:
        quantised = holder.values.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
            raise ConfigError(
                f"{holder.where}: the text weights are quantised ({method or 'quantization_config'}); "
                "only bfloat16, float16 and float32 are read",
                TO_PROMPT,
            )
    if text_family(family).nested:
        _check_text_types(family, holders)
    else:
        text = top.section("text_config")
        for name, allowed in _DEEPSEEK_CHOICES.items():
            if text.values.get(name) is not None:
                text.choice(name, *allowed)


def _check_text_types(family: str, holders: Sequence[Fields]) -> None:
    """Refuse the text models that others have behind this tower: experts, Qwen3.5's linear attention."""
    for holder in holders:
        found = holder.values.get("model_type")
        if found not in (None, family, f"{family}_text"):
            raise ConfigError(
                f"{holder.where}: the text model is {shown(found)}; behind the tower of {family} "
                f"only {family} is run here",
                TO_PROMPT,
            )


def text_config(family: str, config: Mapping[str, Any], where: str) -> tuple[Any, bool]:
    """The configuration object of transformers, and whether the head shares the embedding table.

    `ConfigError` for one that transformers refuses.
    """
    from huggingface_hub.errors import StrictDataclassError

    kind = text_family(family)
    configuration = getattr(
        transformers_module(kind.module.replace("modeling", "configuration")), kind.config
    )
    try:
        if kind.nested:
            whole = configuration.from_dict(dict(config))
            found = whole.text_config
            return found, bool(whole.tie_word_embeddings or getattr(found, "tie_word_embeddings", False))
        found = configuration.from_dict({**config["text_config"], "model_type": "deepseek_v3"})
        return found, bool(config.get("tie_word_embeddings") or found.tie_word_embeddings)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"{where}: text_config: {' '.join(str(error).split())[:300]}") from error

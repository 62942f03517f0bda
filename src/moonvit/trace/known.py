"""Which towers the reference and the diagnosis know."""

from moonvit.config import PixelConfig, VisionConfig
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError
from moonvit.weights.index import Checkpoint


def known_tower(encoder: Encoder, verb: str) -> tuple[VisionConfig, PixelConfig, Checkpoint]:
    """Geometry, pixel rules and checkpoint of a K3 tower without biases; `ConfigError` for any other."""
    config, pixels = encoder.config, encoder.processor.config
    if (
        not isinstance(config, VisionConfig)
        or not isinstance(pixels, PixelConfig)
        or config.model_type != "kimi_k3"
    ):
        raise ConfigError(f"{verb} knows kimi_k3 only, this is {encoder.family}")
    if encoder.quantize is not None:
        raise ConfigError(f"{verb} needs the checkpoint's own weights: load it without quantize")
    if encoder.checkpoint is None or config.attn_bias or config.linear_bias or config.patch_bias:
        raise ConfigError(f"{verb} knows towers without biases, loaded from a checkpoint")
    return config, pixels, encoder.checkpoint

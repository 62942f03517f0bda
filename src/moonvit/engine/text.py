"""A text model of `transformers` that takes embeddings and gives logits, one sequence at a time.

Shape letters: T tokens of a step, D hidden_size, V vocabulary, n tokens of pictures.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonvit.engine.families import TextFamily
from moonvit.engine.library import transformers_module
from moonvit.engine.weights import TextWeights
from moonvit.errors import ConfigError
from moonvit.weights.checkpoint import LocalCheckpoint


class TextModel:
    """The decoder and its head.

    Built without weights; `load` reads them, so that everything else can be checked before. `ConfigError`
    for a config of which transformers cannot build it, `WeightsError` for tensors that are not its own.

    Attributes:
        config: of transformers.
        loaded: whether the weights are there.
    """

    def __init__(self, kind: TextFamily, config: Any, tied: bool, checkpoint: LocalCheckpoint) -> None:
        self.config = config
        module = transformers_module(kind.module)
        try:
            with torch.device("meta"):
                self.decoder: nn.Module = getattr(module, kind.model)(config).eval()
                self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ConfigError(
                f"{checkpoint.where}/config.json: text_config: transformers cannot build {kind.model}: {said}"
            ) from error
        self._cache_argument = cache_argument(self.decoder)
        self._weights = TextWeights(checkpoint, config.num_hidden_layers)
        self.tied = tied and "lm_head.weight" not in self._weights.stored
        self._weights.check(self._shapes())
        self.loaded = False

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.decoder.state_dict().items()}
        if not self.tied:
            shapes["lm_head.weight"] = tuple(self.head.weight.shape)
        return shapes

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        """Read the weights; tensors of that type already are mapped, not copied, on the CPU."""
        state = {
            name: self._weights.read(name, shape, torch.float32 if self._precise(name) else dtype).to(device)
            for name, shape in self._shapes().items()
        }
        head = state["embed_tokens.weight"] if self.tied else state.pop("lm_head.weight")
        self.decoder.load_state_dict(state, strict=True, assign=True)
        self.head.load_state_dict({"weight": head}, strict=True, assign=True)
        self._make_tables(device)
        choose_experts: Any = getattr(self.decoder, "set_experts_implementation", None)
        if dtype == torch.float64 and choose_experts is not None:
            choose_experts("eager")  # grouped products have no float64
        self.decoder.requires_grad_(False)
        self.head.requires_grad_(False)
        self.loaded = True

    def _precise(self, name: str) -> bool:
        """Whether transformers keeps the tensor in float32 whatever the type of the rest."""
        parts = getattr(self.decoder, "_keep_in_fp32_modules_strict", None) or ()
        return any(f".{part}." in f".{name}." for part in parts)

    def _make_tables(self, device: torch.device) -> None:
        """Rotary tables, which no checkpoint stores and the meta device does not hold."""
        rotary: Any = type(self.decoder.rotary_emb)
        with torch.device("cpu"):
            self.decoder.rotary_emb = rotary(config=self.config).to(device)
        empty = [n for n, t in (*self.decoder.named_parameters(), *self.decoder.named_buffers()) if t.is_meta]
        assert not empty, empty

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def croppable(self) -> bool:
        """Whether a cache can be cut back to any length, which windows do not allow."""
        kinds = getattr(self.config, "layer_types", None) or ()
        return all(kind == "full_attention" for kind in kinds)

    def new_cache(self) -> Any:
        """An empty cache of keys and values."""
        return transformers_module("cache_utils").DynamicCache(config=self.config)

    def embed(self, ids_T: Tensor) -> Tensor:
        """[T, D] of ids, int64."""
        embedding = self.decoder.get_submodule("embed_tokens")
        rows: Tensor = embedding(ids_T.to(self.device))
        return rows

    @torch.inference_mode()
    def step(
        self,
        embeddings_TD: Tensor,
        positions: Tensor,
        cache: Any,
        pictures_T: Tensor | None = None,
        deepstack_nD: Sequence[Tensor] = (),
    ) -> Tensor:
        """Logits [V] of the token that follows these; the cache grows by them.

        Args:
            embeddings_TD: pictures spliced in.
            positions: [1, T] or [3, 1, T]; see `moonvit.engine.positions`.
            cache: keys and values of all tokens before.
            pictures_T: which of these tokens are a picture's, bool; needed with `deepstack_nD`.
            deepstack_nD: what text layer k adds to those tokens, for Qwen3-VL.
        """
        more: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if pictures_T is not None and deepstack_nD and bool(pictures_T.any()):
            more["visual_pos_masks"] = pictures_T[None].to(self.device)
            more["deepstack_visual_embeds"] = list(deepstack_nD)
        positions = positions.to(self.device)
        hidden = self.decoder(inputs_embeds=embeddings_TD[None], position_ids=positions, **more)[0]
        logits: Tensor = self.head(hidden[0, -1])
        return logits


def cache_argument(decoder: nn.Module) -> str:
    """What this version of transformers calls the cache of keys and values."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def cut_cache(cache: Any, length: int) -> None:
    """Forget all but the first `length` tokens."""
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)

"""Which token comes next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from moonvit.errors import MoonvitError, NumericsError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when to stop.

    Attributes:
        temperature: 0 takes the likeliest token every time; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities reach this sum; 1 keeps all.
        max_new_tokens: at most so many; None: 512, or fewer where the model's context ends before.
        seed: the same seed gives the same tokens; None draws one.
        stop: texts at which to stop; they are not part of the reply.

    Raises:
        MoonvitError: for a value out of its range, naming it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        good = isinstance(stop, Iterable) and all(isinstance(text, str) and text for text in stop)
        _require("stop", self.stop, good, "texts that are not empty")
        object.__setattr__(self, "stop", tuple(stop))
        heat, most, seed = self.temperature, self.max_new_tokens, self.seed
        _require("temperature", heat, _real(heat) and 0 <= heat < float("inf"), "0 or more")
        _require("top_k", self.top_k, _whole(self.top_k) and self.top_k >= 0, "a whole number, 0 or more")
        _require("top_p", self.top_p, _real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        good = most is None or (_whole(most) and most >= 1)
        _require("max_new_tokens", most, good, "a whole number, at least 1")
        good = seed is None or (_whole(seed) and 0 <= seed < 2**63)
        _require("seed", seed, good, "a whole number, 0 to 2^63 - 1")


def _real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise MoonvitError(f"{name} is {value!r}, expected {expected}")


def as_sampling(sampling: Sampling | None, how: dict[str, Any]) -> Sampling:
    """The sampling with some fields replaced; `MoonvitError` for a field that there is not."""
    given = sorted(how.keys() - Sampling.__dataclass_fields__.keys())
    if given:
        known = ", ".join(Sampling.__dataclass_fields__)
        raise MoonvitError(f"no such option: {', '.join(given)}", f"there are {known}")
    return replace(sampling or Sampling(), **how)


class Sampler:
    """Chooses tokens by one `Sampling`; its random numbers come from the CPU, so that devices agree."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.random = torch.Generator("cpu")
        if sampling.seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(sampling.seed)

    def choose(self, logits_V: Tensor) -> int:
        """The next token's id from the logits of the vocabulary; `NumericsError` unless all are numbers."""
        dtype = str(logits_V.dtype).removeprefix("torch.")
        logits_V = logits_V.float().cpu()
        if not bool(torch.isfinite(logits_V).all()):
            hint = "it overflowed: use bfloat16 or float32" if dtype == "float16" else ""
            raise NumericsError(f"logits: NaN or infinity came out of the text model in {dtype}", hint)
        if self.sampling.temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = kept(logits_V, self.sampling).softmax(dim=-1)
        return int(torch.multinomial(probabilities_V, 1, generator=self.random))


def kept(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, minus infinity where top_k and then top_p leave a token out.

    The likeliest token always stays. Source: the warpers of transformers, in their order.
    """
    cooled_V = logits_V / sampling.temperature
    if not bool(torch.isfinite(cooled_V).all()):  # so cold that only the likeliest are left
        cooled_V = torch.where(logits_V == logits_V.max(), 0.0, float("-inf"))
    logits_V = cooled_V
    if 0 < sampling.top_k < len(logits_V):
        least = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    if sampling.top_p < 1:
        rising_V, order_V = logits_V.sort()
        left_out_V = rising_V.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        left_out_V[-1] = False
        logits_V = logits_V.masked_fill(left_out_V.scatter(0, order_V, left_out_V), float("-inf"))
    return logits_V

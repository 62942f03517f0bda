"""Which token comes next."""

from dataclasses import dataclass, replace
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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        _require("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more")
        _require("top_k", self.top_k, self.top_k >= 0, "0 or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        most = self.max_new_tokens
        _require("max_new_tokens", most, most is None or most >= 1, "at least 1")
        _require("stop", self.stop, all(stop), "texts that are not empty")


def _require(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise MoonvitError(f"{name} is {value!r}, expected {expected}")


def as_sampling(sampling: Sampling | None, how: dict[str, Any]) -> Sampling:
    """The sampling with some fields replaced; `MoonvitError` for a field that there is not."""
    try:
        return replace(sampling or Sampling(), **how)
    except TypeError as error:
        known = ", ".join(Sampling.__dataclass_fields__)
        given = ", ".join(how.keys() - Sampling.__dataclass_fields__.keys())
        raise MoonvitError(f"no such option: {given}", f"there are {known}") from error


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
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        least = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    if sampling.top_p < 1:
        rising_V, order_V = logits_V.sort()
        left_out_V = rising_V.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        left_out_V[-1] = False
        logits_V = logits_V.masked_fill(left_out_V.scatter(0, order_V, left_out_V), float("-inf"))
    return logits_V

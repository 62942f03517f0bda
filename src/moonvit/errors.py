"""The errors that moonvit raises for input it cannot use.

Each carries one clear sentence; `hint` says what to do about it. All are `ValueError`s, so that a
caller who knows nothing of moonvit's own classes still catches them.
"""

from collections.abc import Sequence

_FAULT_LENGTH = 600  # names in hostile files may be megabytes long


class MoonvitError(ValueError):
    """Base of all errors caused by input.

    Args:
        message: what is wrong, naming the file, field or tensor.
        hint: what to do, in one sentence; printed by the command line behind the message.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(MoonvitError):
    """A field of `config.json` or `preprocessor_config.json` is missing or makes no sense."""


class ImageError(MoonvitError):
    """A picture cannot be read, or is over a limit."""


class NumericsError(MoonvitError):
    """Values are not finite: NaN pixels on the way in, or an overflow on the way out."""


class TokenizerError(MoonvitError):
    """A checkpoint's tokenizer is missing, broken, or lacks a marker."""


class PromptError(MoonvitError):
    """Parts, pads, embeddings or ids of a prompt do not go together."""


class WeightsError(MoonvitError):
    """The checkpoint lacks tensors, or has wrong ones.

    `faults` holds one line a fault; the message holds them all.
    """

    def __init__(self, where: str, faults: Sequence[str], hint: str = "") -> None:
        self.where = where
        self.faults = tuple(f if len(f) <= _FAULT_LENGTH else f[: _FAULT_LENGTH - 3] + "..." for f in faults)
        if len(self.faults) == 1:
            message = f"{where}: {self.faults[0]}"
        else:
            message = f"{where}: {len(self.faults)} faults:\n" + "\n".join(f"  {f}" for f in self.faults)
        super().__init__(message, hint)

    def __reduce__(self) -> tuple[type["WeightsError"], tuple[str, tuple[str, ...], str]]:
        return type(self), (self.where, self.faults, self.hint)


class FetchError(WeightsError):
    """A hub does not answer as it must; says nothing of the checkpoint itself."""


class OfflineError(FetchError):
    """The hub cannot be reached, or may not be asked."""

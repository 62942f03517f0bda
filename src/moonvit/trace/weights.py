"""A checkpoint's tensors in float64, of which only the last few are kept."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moonvit.weights.index import Checkpoint


class Float64Weights(Mapping[str, Tensor]):
    """{released name: float64 tensor}, converted when asked for.

    Args:
        checkpoint: where they are.
        keep: bytes of converted tensors that are held; the least lately used go first.
    """

    def __init__(self, checkpoint: Checkpoint, keep: int = 2**30) -> None:
        self._checkpoint = checkpoint
        self._keep = keep
        self._held: OrderedDict[str, Tensor] = OrderedDict()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._held:
            self._held.move_to_end(name)
            return self._held[name]
        tensor = self._checkpoint.read(name).to(torch.float64)
        self._held[name] = tensor
        while len(self._held) > 1 and sum(t.nbytes for t in self._held.values()) > self._keep:
            self._held.popitem(last=False)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)

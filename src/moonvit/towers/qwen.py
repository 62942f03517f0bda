"""What the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL share; patches come in merge-block order.

Source: the `transformers` package; parameter names are the checkpoints'. Shape letters: N patches of a
packed batch, D hidden_size, H heads, d head size, F intermediate_size, M merged rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moonvit.configs.qwen import QwenConfig
from moonvit.ops.grid import Grid, lengths
from moonvit.ops.merging import merge_blocks
from moonvit.ops.rotary import half_table
from moonvit.towers.attend import Heads, Rope, rotary_attention
from moonvit.towers.base import Tap, no_tap, prefixed, table_dtype
from moonvit.towers.compiled import run_block
from moonvit.towers.inputs import checked_grids


def quick_gelu(x: Tensor) -> Tensor:
    """x·sigmoid(1.702·x)."""
    return x * (1.702 * x).sigmoid()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": F.gelu,
}


class PatchEmbed(nn.Module):
    """Each patch, flattened (channel, frame, row, column), through one matrix."""

    def __init__(self, config: QwenConfig, bias: bool) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(3, config.hidden_size, kernel, stride=kernel, bias=bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        weight = self.proj.weight
        return F.linear(pixel_values.to(weight.dtype), weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Attention within segments, with half-split rotary positions."""

    backend = "eager"

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def heads(self, x_ND: Tensor) -> Heads:
        qkv: Tensor = self.qkv(x_ND)
        q_NHd, k_NHd, v_NHd = qkv.view(len(x_ND), 3, -1, self.head_dim).unbind(1)
        return q_NHd, k_NHd, v_NHd

    def forward(self, x_ND: Tensor, rope: Rope, lengths: Sequence[int], tap: Tap) -> Tensor:
        q_NHd, k_NHd, v_NHd = self.heads(x_ND)
        mixed_NHd = rotary_attention(
            q_NHd, k_NHd, v_NHd, rope, lengths, tap, rotation="halves", backend=self.backend
        )
        out: Tensor = self.proj(mixed_NHd.flatten(1))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    backend = "eager"
    rotation = "halves"

    def __init__(self, config: QwenConfig, norm: type[nn.Module], mlp: type[nn.Module]) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, eps=config.norm_eps)
        self.norm2 = norm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp = mlp(config)

    def before(self, x_ND: Tensor) -> Heads:
        """Q, k and v, not turned yet."""
        return self.attn.heads(self.norm1(x_ND))

    def after(self, x_ND: Tensor, mixed_NHd: Tensor) -> Tensor:
        """The block's result from its input and the attention's."""
        return self.add(x_ND, self.attn.proj(mixed_NHd.flatten(1)), no_tap)

    def forward(self, x_ND: Tensor, rope: Rope, lengths: Sequence[int], tap: Tap) -> Tensor:
        if self.backend == "compiled" and (out_ND := run_block(self, x_ND, rope, lengths, tap)) is not None:
            return out_ND
        return self.add(x_ND, self.attn(self.norm1(x_ND), rope, lengths, tap), tap)

    def add(self, x_ND: Tensor, attn_ND: Tensor, tap: Tap) -> Tensor:
        tap("attn_out", attn_ND)
        x_ND = x_ND + attn_ND
        tap("attn_residual", x_ND)
        out: Tensor = x_ND + self.mlp(self.norm2(x_ND))
        return out


class Merger(nn.Module):
    """Qwen2 and 2.5: norm of each patch, then matrix, exact GELU, matrix over each merged row."""

    def __init__(self, config: QwenConfig, norm: type[nn.Module]) -> None:
        super().__init__()
        width = config.merged_size
        self.size = config.merge_size
        self.ln_q = norm(config.hidden_size, eps=config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, config.text_hidden_size)
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.mlp(merge_blocks(self.ln_q(x_ND), self.size))
        return out


class QwenTower(nn.Module):
    """The parts of a pass that all three share; a family puts them together."""

    def __init__(
        self, config: QwenConfig, norm: type[nn.Module], mlp: type[nn.Module], patch_bias: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, patch_bias)
        self.blocks = nn.ModuleList(Block(config, norm, mlp) for _ in range(config.num_layers))

    def embed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap) -> tuple[Tensor, list[Grid]]:
        """Checked grids and embedded patches [N, D]; see `checked_grids` for what is refused."""
        config = self.config
        flat = 3 * config.temporal_patch_size * config.patch_size**2
        grids = checked_grids(pixel_values, grid_thws, config, (flat,), max_side=None)
        tap("pixels", pixel_values)
        x_ND: Tensor = self.patch_embed(pixel_values)
        tap("patch_embed", x_ND)
        return x_ND, grids

    def rope(self, grids: Sequence[Grid], x_ND: Tensor) -> Rope:
        """Cosines and sines in merge-block order."""
        config = self.config
        tables = half_table(grids, config.head_dim, config.rope_theta, table_dtype(x_ND), config.merge_size)
        return tables[0].to(x_ND.device), tables[1].to(x_ND.device)

    def layers(
        self, x_ND: Tensor, rope: Rope, segments: Callable[[int], Sequence[int]], tap: Tap
    ) -> Iterator[Tensor]:
        """The patches after each layer; `segments` gives the lengths that layer attends within."""
        tap("embed", x_ND)
        tap("rope_cos", rope[0])
        tap("rope_sin", rope[1])
        for number, block in enumerate(self.blocks):
            x_ND = block(x_ND, rope, segments(number), prefixed(tap, f"block.{number:02}"))
            tap(f"block.{number:02}", x_ND)
            yield x_ND

    def split(self, rows: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Merged rows by picture."""
        cell = self.config.merge_size**2
        return list(torch.split(rows, [length // cell for length in lengths(grids)]))


def last(layers: Iterator[Tensor]) -> Tensor:
    """What comes out of the last layer."""
    *_, x_ND = layers
    return x_ND

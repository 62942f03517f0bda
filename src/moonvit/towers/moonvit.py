"""MoonViT, the vision tower of Kimi K3, K2.5 and Kimi-VL, with its merger.

The families differ in kind of norm, biases, resampling of the position table and projector. Follows the
released checkpoints' layout and the published reference models; parameter names are the checkpoints'.
Shape letters: N patches of a packed batch, L of one picture, D hidden_size, H heads,
d head_dim, P = d/2 rotary pairs, F intermediate_size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moonvit.config import ROPE_THETA, VisionConfig
from moonvit.ops.attention import Segments
from moonvit.ops.grid import Grid, lengths
from moonvit.ops.merging import merge_cells
from moonvit.ops.positions import grid_positions
from moonvit.ops.rotary import rope_table
from moonvit.towers import fused
from moonvit.towers.attend import Heads, Rope, rotary_attention, runs_native
from moonvit.towers.base import Tap, by_rows, no_tap, prefixed, table_dtype, unwatched
from moonvit.towers.compiled import run_block
from moonvit.towers.inputs import checked_kimi_grids


def make_norm(config: VisionConfig) -> nn.Module:
    """The tower's norm over hidden_size."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class PositionTable(nn.Module):
    """The learned [height, width, D] table; resampled afresh in float32 whatever its own dtype."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.mode = config.interpolation
        shape = (config.pos_emb_height, config.pos_emb_width, config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        return grid_positions(self.weight, grids, self.mode, table_dtype(self.weight))


class PatchEmbed(nn.Module):
    """Each patch, flattened (channel, row, column), through one matrix, plus its position."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.proj = nn.Conv2d(3, config.hidden_size, side, stride=side, bias=config.patch_bias)
        self.pos_emb = PositionTable(config)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid], tap: Tap) -> Tensor:
        positions_ND: Tensor = self.pos_emb(grids)
        if unwatched(tap):
            return by_rows(
                lambda pixels, added: self.added(self.embed(pixels), added), pixel_values, positions_ND
            )
        x_ND = self.embed(pixel_values)
        tap("patch_embed", x_ND)
        tap("pos_embed", positions_ND)
        return self.added(x_ND, positions_ND)

    def embed(self, pixel_values: Tensor) -> Tensor:
        weight = self.proj.weight
        return F.linear(pixel_values.flatten(1).to(weight.dtype), weight.flatten(1), self.proj.bias)

    def added(self, x_ND: Tensor, positions_ND: Tensor) -> Tensor:
        """The sum in the table's own type, rounded once."""
        return (x_ND + positions_ND).to(x_ND.dtype)


class FeedForward(nn.Module):
    """fc1(GELU_tanh(fc0(x)))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x_ND: Tensor, tap: Tap) -> Tensor:
        hidden_NF = F.gelu(self.fc0(x_ND), approximate="tanh")
        tap("mlp_hidden", hidden_NF)
        out: Tensor = self.fc1(hidden_NF)
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    backend = "eager"
    rotation = "pairs"

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm0 = make_norm(config)
        self.norm1 = make_norm(config)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.qkv_hidden_size, bias=config.attn_bias)
        self.wo = nn.Linear(config.qkv_hidden_size, config.hidden_size, bias=config.attn_bias)
        self.mlp = FeedForward(config)

    def heads(self, qkv: Tensor) -> Heads:
        q_NHd, k_NHd, v_NHd = qkv.view(len(qkv), 3, -1, self.head_dim).unbind(1)
        return q_NHd, k_NHd, v_NHd

    def before(self, x_ND: Tensor) -> Heads:
        """Q, k and v, not turned yet."""
        return self.heads(by_rows(lambda x_RD: self.wqkv(self.norm0(x_RD)), x_ND))

    def after(self, x_ND: Tensor, mixed_NHd: Tensor, tap: Tap = no_tap) -> Tensor:
        """The block's result from its input and the attention's."""
        attn_ND = self.wo(mixed_NHd.flatten(1))
        tap("attn_out", attn_ND)
        x_ND = x_ND + attn_ND
        tap("attn_residual", x_ND)
        normed_ND = self.norm1(x_ND)
        tap("norm1", normed_ND)
        mlp_ND: Tensor = self.mlp(normed_ND, tap)
        return x_ND + mlp_ND

    def forward(self, x_ND: Tensor, rope: Rope, lengths: Sequence[int], tap: Tap = no_tap) -> Tensor:
        if self.backend == "compiled" and (out_ND := run_block(self, x_ND, rope, lengths, tap)) is not None:
            return out_ND
        if unwatched(tap):
            q_NHd, k_NHd, v_NHd = self.before(x_ND)
        else:
            normed_ND = self.norm0(x_ND)
            tap("norm0", normed_ND)
            q_NHd, k_NHd, v_NHd = self.heads(self.wqkv(normed_ND))
            tap("q_unrotated", q_NHd)
            tap("k_unrotated", k_NHd)
        mixed_NHd = rotary_attention(
            q_NHd, k_NHd, v_NHd, rope, lengths, tap, rotation=self.rotation, backend=self.backend
        )
        del q_NHd, k_NHd, v_NHd  # the greatest part of all memory
        if unwatched(tap):
            return by_rows(self.after, x_ND, mixed_NHd)
        return self.after(x_ND, mixed_NHd, tap)


class BlockStack(nn.Module):
    """The blocks and the last norm."""

    backend = "eager"

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = make_norm(config)

    def rope(self, grids: Sequence[Grid], x_ND: Tensor) -> tuple[Tensor, Tensor]:
        cos_NP, sin_NP = rope_table(grids, self.head_dim, ROPE_THETA, table_dtype(x_ND))
        return cos_NP.to(x_ND.device), sin_NP.to(x_ND.device)

    def forward(self, x_ND: Tensor, grids: Sequence[Grid], tap: Tap = no_tap) -> Tensor:
        rope = self.rope(grids, x_ND)
        tap("rope_cos", rope[0])
        tap("rope_sin", rope[1])
        sizes = Segments(lengths(grids))
        if runs_native(self.backend, tap) and fused.fits_blocks(self, x_ND):
            return fused.run_blocks(self, x_ND, rope, sizes)
        for number, block in enumerate(self.blocks):
            x_ND = block(x_ND, rope, sizes, prefixed(tap, f"block.{number:02}"))
            tap(f"block.{number:02}", x_ND)
        out = by_rows(self.final_layernorm, x_ND)
        tap("final_norm", out)
        return out


class VisionTower(nn.Module):
    """Patches in, merged rows out."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = BlockStack(config)

    def forward(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> list[Tensor]:
        """Encode a packed batch of pictures and clips.

        Args:
            pixel_values: float [N, 3, patch, patch], raster order, frame by frame; cast to the weights'
                dtype here.
            grid_thws: [n, 3] (t, h, w) in patches, or [n, 2] (h, w); tensor, array or nested lists.
            tap: receives every stage by name.

        Returns:
            For each picture or clip, [h·w/4, 4·D] in the weights' dtype.

        Raises:
            ValueError: for shapes that do not fit together, or a grid the tower does not have.
            NumericsError: for pixels that are not finite.
        """
        grids = checked_kimi_grids(pixel_values, grid_thws, self.config)
        if not grids:
            return []
        tap("pixels", pixel_values)
        x_ND = self.patch_embed(pixel_values, grids, tap)
        tap("embed", x_ND)
        x_ND = self.encoder(x_ND, grids, tap)
        size = self.config.merge_size
        rows = [
            merge_cells(x, grid, size)
            for x, grid in zip(torch.split(x_ND, lengths(grids)), grids, strict=True)
        ]
        if tap is not no_tap:
            tap("merged", torch.cat(rows))
        return rows

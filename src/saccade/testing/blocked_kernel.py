"""`BlockedKernel`: blocked attention with a handwritten backward pass, whose steps mutants can change by name.

Without edits, the kernel is correct. It is structured like a GPU kernel, and each mutant changes one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Edit = Callable[[Tensor, "Block"], Tensor]
Edges = Callable[[int, int], list[slice]]


@dataclasses.dataclass(frozen=True)
class Block:
    """The indices of a block in the grid of blocks, and the size of the grid. Index -1 means all blocks."""

    row: int = -1
    rows: int = 1
    column: int = -1
    columns: int = 1


def even_edges(length: int, size: int) -> list[slice]:
    """Divide ``length`` tokens into blocks of ``size`` tokens; the last block may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class BlockedKernel:
    """Attention with a running maximum over blocks of keys, and the backward pass of FlashAttention.

    Args:
        block: number of rows and columns of a block.
        edits: functions ``(tensor, block) -> tensor`` that change the result of a step, by the step's name. The steps
            of the forward pass are "scores", "mask", "maximum", "correction", "powers", "total", "product", "output",
            "lse" and "group"; those of the backward pass are "weights", "delta", "value_gradient", "weight_gradient",
            "score_gradient", "query_gradient", "key_gradient" and "group_gradient".
        row_edges, column_edges: functions ``(length, block) -> slices`` that divide rows and columns into blocks.
    """

    def __init__(
        self,
        block: int = 64,
        edits: dict[str, Edit] | None = None,
        row_edges: Edges = even_edges,
        column_edges: Edges = even_edges,
    ):
        self.block, self.edits = block, edits or {}
        self.row_edges, self.column_edges = row_edges, column_edges

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = _Blocked.apply(query, key, value, mask, self)
        return out

    def edit(self, step: str, x: Tensor, block: Block | None = None) -> Tensor:
        """Return the result ``x`` of a step, changed by the step's edit if there is one."""
        edit = self.edits.get(step)
        return x if edit is None else edit(x, Block() if block is None else block)

    def repeated(self, x: Tensor, heads: int) -> Tensor:
        """Convert keys or values to float32 or wider, and repeat them for every query head."""
        group = torch.arange(heads, device=x.device) // (heads // x.shape[1])
        return x.to(torch.promote_types(x.dtype, torch.float32))[:, self.edit("group", group) % x.shape[1]]

    def blocks(self, q_len: int, kv_len: int) -> list[tuple[slice, list[tuple[slice, Block]]]]:
        """Return each slice of rows, with all slices of columns and the position of each block in the grid."""
        rows, columns = self.row_edges(q_len, self.block), self.column_edges(kv_len, self.block)
        return [
            (row, [(column, Block(i, len(rows), j, len(columns))) for j, column in enumerate(columns)])
            for i, row in enumerate(rows)
        ]

    def masked_scores(self, q: Tensor, k: Tensor, mask: Tensor, block: Block) -> Tensor:
        """Return the scores of a block, with -inf for masked pairs."""
        scores = self.edit("scores", q @ k.mT * q.shape[3] ** -0.5, block)
        return scores.masked_fill(~self.edit("mask", mask, block), -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the attention output and the lse of each row, in the dtype of the inputs."""
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full((*q.shape[:3], 1), torch.inf)
        for row, columns in self.blocks(q.shape[2], k.shape[2]):
            part = out[:, :, row]
            total = high = None
            for column, block in columns:
                scores = self.masked_scores(q[:, :, row], k[:, :, column], mask[:, :, row, column], block)
                largest = scores.amax(-1, keepdim=True)
                new = largest if high is None else torch.maximum(high, largest)
                new = self.edit("maximum", new, block)
                level = new.masked_fill(new.isneginf(), 0.0)
                powers = self.edit("powers", (scores - level).exp(), block)
                product = self.edit("product", powers @ v[:, :, column], block)
                summed = self.edit("total", powers.sum(-1, keepdim=True), block)
                if high is None or total is None:
                    part, total = product, summed
                else:
                    share = self.edit("correction", (high - level).exp(), block)
                    part, total = part * share + product, total * share + summed
                high = new
            if total is not None and high is not None:
                seen = total != 0
                whole = part / torch.where(seen, total, 1.0)
                out[:, :, row] = self.edit("output", whole, dataclasses.replace(columns[-1][1], column=-1))
                lse[:, :, row] = torch.where(seen, high + total.log(), torch.inf)
        return out, self.edit("lse", lse)

    def backward(self, saved: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the query and of the repeated keys and values."""
        q, k, v, mask, out, lse = saved
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = self.edit("delta", (out * gradient).sum(-1, keepdim=True))
        for row, columns in self.blocks(q.shape[2], k.shape[2]):
            flowing = gradient[:, :, row]
            for column, block in columns:
                scores = self.masked_scores(q[:, :, row], k[:, :, column], mask[:, :, row, column], block)
                weights = self.edit("weights", (scores - lse[:, :, row]).exp(), block)
                dv[:, :, column] += self.edit("value_gradient", weights.mT @ flowing, block)
                of_weights = self.edit("weight_gradient", flowing @ v[:, :, column].mT, block)
                of_scores = weights * (of_weights - delta[:, :, row]) * q.shape[3] ** -0.5
                of_scores = self.edit("score_gradient", of_scores, block)
                dq[:, :, row] += self.edit("query_gradient", of_scores @ k[:, :, column], block)
                dk[:, :, column] += self.edit("key_gradient", of_scores.mT @ q[:, :, row], block)
        return dq, dk, dv


class _Blocked(torch.autograd.Function):
    """The autograd function of `BlockedKernel`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kernel: BlockedKernel) -> Tensor:
        heads = query.shape[1]
        q = query.to(torch.promote_types(query.dtype, torch.float32))
        k, v = kernel.repeated(key, heads), kernel.repeated(value, heads)
        out, lse = kernel.forward(q, k, v, mask)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.kernel = kernel
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        kernel, heads = ctx.kernel, query.shape[1]
        k, v = kernel.repeated(key, heads), kernel.repeated(value, heads)
        saved = (query.to(out.dtype), k, v, mask, out, lse)
        dq, dk, dv = kernel.backward(saved, gradients[0].to(out.dtype))
        shared = [kernel.edit("group_gradient", x.unflatten(1, (key.shape[1], -1))).sum(2) for x in (dk, dv)]
        return dq.to(query.dtype), shared[0].to(key.dtype), shared[1].to(value.dtype), None, None

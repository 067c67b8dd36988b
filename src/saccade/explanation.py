"""Explanation: what a product will do, before it is done."""

from __future__ import annotations

import dataclasses
import math

from saccade.kernels import Choice
from saccade.score_matrix import ScoreMatrix

__all__ = ["Explanation"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which kernel runs ``A @ value``, why not the others, and what it costs; print it.

    Attributes:
        kernel: name of the kernel that runs.
        passed_over: faster kernels and every reason why they cannot run these inputs.
        shape: (batch, heads, q_len, kv_len).
        mask: the rule, as text.
        tiles: boxes that the plan computes.
        pairs: query-key pairs that the kernel computes, over batch and heads.
        flops: floating-point operations of the forward product (two per multiply-add).
        extra_bytes: largest amount of memory beside inputs and outputs in the forward pass, in bytes (estimate).
    """

    kernel: str
    passed_over: dict[str, tuple[str, ...]]
    shape: tuple[int, int, int, int]
    mask: str
    tiles: int
    pairs: int
    flops: int
    extra_bytes: int

    @classmethod
    def of(cls, scores: ScoreMatrix, choice: Choice, value_dim: int, dropout_p: float) -> Explanation:
        """Read off the plan; nothing is computed."""
        pairs, extra = choice.kernel.cost(scores, dropout_p)
        return cls(
            choice.kernel.name,
            choice.passed_over,
            scores.shape,
            str(scores.rule),
            len(scores.plan),
            pairs,
            2 * pairs * (scores.query.shape[3] + value_dim),
            extra,
        )

    def __str__(self) -> str:
        total = math.prod(self.shape)
        share = 100 * self.pairs / total if total else 100.0
        lines = [
            f"kernel   {self.kernel}",
            f"shape    {list(self.shape)}  [batch, heads, q_len, kv_len]",
            f"mask     {self.mask}",
            f"tiles    {self.tiles:,}, holding {self.pairs:,} of {total:,} pairs ({share:.3g} %)",
            f"cost     {self.flops / 1e9:.3g} GFLOP forward, {self.extra_bytes / 2**20:.3g} MiB besides tensors",
        ]
        for name, reasons in self.passed_over.items():
            lines += [f"not {name}: {reason}" for reason in reasons]
        return "\n".join(lines)

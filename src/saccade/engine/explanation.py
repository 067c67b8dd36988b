"""Explanation: what a product will do, before it is done."""

from __future__ import annotations

import dataclasses
import math

from saccade.engine import kernel_check, nonfinite
from saccade.engine.bias.sink_logit import bytes_of_sink
from saccade.engine.dispatch import Route
from saccade.engine.inputs import AttentionInputs
from saccade.engine.memory_accounting import Cost, Ledger
from saccade.masks import Mask

__all__ = ["Explanation"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which kernel runs ``A @ value``, why not the others, and what it costs; print it.

    Attributes:
        kernel: name of the kernel that runs.
        passed_over: faster kernels and every reason why they cannot run these inputs.
        shape: (batch, heads, q_len, kv_len).
        seen: what has been seen of the kernel where these tensors are, if its first use is checked; else empty.
        mask: the rule, as text; of a bool tensor also the rule that was found in it.
        tiles: boxes of [batch, heads, q_len, kv_len] that the kernel runs.
        pairs: query-key pairs whose scores the kernel computes, over batch and heads: all those that may attend, and
            those that are computed with them and then hidden. Of a causal mask the fused kernel leaves out the blocks
            of keys that stand after the last of a block of queries: a little more than half the pairs.
        operations: what each step takes: "QKᵀ" and "AV" floating-point operations, two for each multiplication and
            addition, "softmax" one exponential for each pair. With a score that is no dot product, "QKᵀ" is what one
            would take.
        extra_bytes: most memory that the forward product holds at any time beside its inputs and its outputs, in bytes:
            copies, blocks of scores, the buffers of compiled operations (which grow with the number of threads), and
            the hidden pairs that the plan keeps for the next product. What autograd records is not counted, and of
            the backward pass nothing is said.
    """

    kernel: str
    passed_over: dict[str, tuple[str, ...]]
    shape: tuple[int, int, int, int]
    seen: str
    mask: str
    tiles: int
    pairs: int
    operations: dict[str, int]
    extra_bytes: int

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products of the forward pass."""
        return self.operations["QKᵀ"] + self.operations["AV"]

    @classmethod
    def of(cls, inputs: AttentionInputs, route: Route, value_dim: int, dropout_p: float, *, mask: Mask) -> Explanation:
        """Read off what is going to run; nothing is computed, but for what a rule holds per pair.

        Args:
            inputs, route, value_dim, dropout_p: of the product.
            mask: as the user gave it; the ingredients hold what was found in its tensors.
        """
        own = inputs if route.reordered is None else route.reordered.inputs
        cost = route.kernel.cost(own, value_dim, dropout_p)
        return cls(
            route.kernel.name,
            route.passed_over,
            inputs.shape,
            kernel_check.seen(route.kernel, inputs),
            str(mask) if str(mask) == str(inputs.rule) else f"{mask}, the same as {inputs.rule}",
            cost.tiles,
            cost.pairs,
            {"QKᵀ": 2 * cost.pairs * inputs.query.shape[3], "softmax": cost.pairs, "AV": 2 * cost.pairs * value_dim},
            _extra_bytes(own, route, cost, value_dim),
        )

    def __str__(self) -> str:
        total = math.prod(self.shape)
        share = 100 * self.pairs / total if total else 100.0
        scores, exponentials, sums = (self.operations[name] / 1e9 for name in ("QKᵀ", "softmax", "AV"))
        lines = [
            f"kernel   {self.kernel}",
            f"shape    {list(self.shape)}  [batch, heads, q_len, kv_len]",
            f"mask     {self.mask}",
            f"tiles    {self.tiles:,}, holding {self.pairs:,} of {total:,} pairs ({share:.3g} %)",
            f"cost     {self.flops / 1e9:.3g} GFLOP forward, {self.extra_bytes / 2**20:.3g} MiB besides tensors",
            f"steps    QKᵀ {scores:.3g} GFLOP, softmax {exponentials:.3g} G exponentials, AV {sums:.3g} GFLOP",
        ]
        lines += [f"seen     {self.seen}"] if self.seen else []
        for name, reasons in self.passed_over.items():
            lines += [f"not {name}: {reason}" for reason in reasons]
        return "\n".join(lines)


def _extra_bytes(inputs: AttentionInputs, route: Route, cost: Cost, value_dim: int) -> int:
    """What a whole product holds beside inputs and outputs: the kernel's part, and what is done before and after."""
    (batch, heads, q_len, kv_len), query, wide = inputs.shape, inputs.query, inputs.compute_dtype
    rows, ledger = batch * heads * q_len, Ledger()
    out, lse = rows * value_dim * query.dtype.itemsize, rows * wide.itemsize
    look = nonfinite.bytes_of_look(route.kernel, inputs, value_dim)
    if query.dtype != inputs.dtype:  # scores are computed in float32 or wider, and some are prepared in it
        ledger.take(batch * inputs.key.shape[1] * kv_len * value_dim * query.dtype.itemsize)
    bias = None if inputs.bias is None or inputs.bias.source.shape[2] == 1 else inputs.bias.source
    copied = query.numel() * query.dtype.itemsize + (0 if bias is None else bias.numel() * bias.dtype.itemsize)
    with ledger.holding(0 if route.reordered is None else copied):
        if not route.kernel.by_hand:
            ledger.touch(look)
        ledger.step(cost.held)
        if route.kernel.by_hand:
            ledger.touch(look)
        ledger.touch(0 if route.reordered is None else out + lse)
    if inputs.sink_logit is not None:
        ledger.touch(bytes_of_sink(rows, value_dim, wide))
    if query.dtype != inputs.dtype:
        ledger.touch(rows * value_dim * inputs.dtype.itemsize)
    return ledger.most - rows * (value_dim * inputs.dtype.itemsize + wide.itemsize)

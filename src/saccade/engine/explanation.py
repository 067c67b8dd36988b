"""The report of `AttentionMatrix.explain`: which kernel would run, its cost, and why other kernels would not."""

from __future__ import annotations

import dataclasses
import math

from saccade.engine import first_use_check, nonfinite
from saccade.engine.bias.sink_logit import bytes_of_sink
from saccade.engine.dispatch import reasons_to_skip
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.engine.memory_accounting import Cost, Ledger
from saccade.engine.positions.row_permutation import FEWEST, reordered
from saccade.masks import Mask, Window


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A report on ``A @ value`` before it runs: the selected kernel, why other kernels are skipped, and the cost.

    Attributes:
        kernel: name of the kernel that runs.
        skipped: the reasons why each other kernel does not run; empty if the kernel was requested by name.
        shape: (batch, heads, q_len, kv_len).
        seen: result of the kernel's first-use check on this device; empty for kernels that need no such check.
        mask: the mask as text, including the pattern recognised in a bool tensor.
        window: number of visible keys of each window in the mask, as text, including the query's own key (which
            `Window` does not count); empty without a window.
        tiles: number of tiles (boxes of the matrix) that the kernel computes.
        pairs: number of query-key pairs whose scores the kernel computes, over batch and heads. It includes pairs that
            are computed together with allowed ones and then masked. For a causal mask, the fused kernel skips the
            blocks of keys after the last query of a block, so slightly more than half of the pairs remain.
        operations: operations by stage. "QKᵀ" and "AV" count floating-point operations, two for each multiplication and
            addition; "softmax" counts one exponential per pair. For scores other than dot products, "QKᵀ" counts what
            a dot product would take.
        extra_bytes: peak memory in bytes of the forward product in addition to its inputs and outputs: copies, blocks
            of scores, the buffers of compiled operations (which grow with the number of threads), and the masked pairs
            that the plan caches for the next product. Memory for autograd and the backward pass is not included.
    """

    kernel: str
    skipped: dict[str, tuple[str, ...]]
    shape: tuple[int, int, int, int]
    seen: str
    mask: str
    tiles: int
    pairs: int
    operations: dict[str, int]
    extra_bytes: int
    window: str = ""

    @property
    def flops(self) -> int:
        """Number of floating-point operations in both matrix products of the forward pass."""
        return self.operations["QKᵀ"] + self.operations["AV"]

    @classmethod
    def of(
        cls, inputs: AttentionInputs, kernel: Kernel, value_dim: int, request: Request, *, mask: Mask
    ) -> Explanation:
        """Return the explanation of ``A @ value`` without running it.

        Args:
            inputs, kernel, value_dim, request: inputs, kernel, width of the values and options of the product.
            mask: the user's mask. The mask in the inputs has recognised patterns in place of bool tensors.
        """
        permutation = reordered(inputs, kernel, request.dropout_p) if inputs.shape[2] >= FEWEST else None
        ordered = inputs if permutation is None else permutation.inputs
        cost = kernel.cost(ordered, value_dim, request.dropout_p)
        return cls(
            kernel.name,
            reasons_to_skip(inputs, request, kernel),
            inputs.shape,
            first_use_check.seen(kernel, inputs),
            str(mask) if str(mask) == str(inputs.rule) else f"{mask}, the same as {inputs.rule}",
            cost.tiles,
            cost.pairs,
            {"QKᵀ": 2 * cost.pairs * inputs.query.shape[3], "softmax": cost.pairs, "AV": 2 * cost.pairs * value_dim},
            _extra_bytes(ordered, kernel, cost, value_dim, is_reordered=permutation is not None),
            _windows(inputs.rule),
        )

    def __str__(self) -> str:
        total = math.prod(self.shape)
        share = 100 * self.pairs / total if total else 100.0
        scores, exponentials, sums = (self.operations[name] / 1e9 for name in ("QKᵀ", "softmax", "AV"))
        lines = [
            f"kernel   {self.kernel}",
            f"shape    {list(self.shape)}  [batch, heads, q_len, kv_len]",
            f"mask     {self.mask}",
            *([f"window   {self.window}"] if self.window else []),
            f"tiles    {self.tiles:,}, computing {self.pairs:,} of {total:,} pairs ({share:.3g} %)",
            f"cost     {self.flops / 1e9:.3g} GFLOP forward, {self.extra_bytes / 2**20:.3g} "
            "MiB beyond inputs and outputs",
            f"steps    QKᵀ {scores:.3g} GFLOP, softmax {exponentials:.3g} G exponentials, AV {sums:.3g} GFLOP",
        ]
        lines += [f"checked  {self.seen}"] if self.seen else []
        names: dict[str, list[str]] = {}
        for name, reasons in self.skipped.items():
            for reason in reasons:
                names.setdefault(reason, []).append(name)
        lines += [f"not {', '.join(kernels)}: {reason}" for reason, kernels in names.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _windows(mask: Mask) -> str:
    """Return the number of visible keys of each window in a mask, as text; empty if the mask has no window."""
    counts = sorted({atom.keys for atom in mask.atoms() if isinstance(atom, Window) and atom.keys is not None})
    if not counts:
        return ""
    keys = "key" if counts == [1] else "keys"
    return f"{' and '.join(f'{count:,}' for count in counts)} {keys}, the query's own included"


def _extra_bytes(inputs: AttentionInputs, kernel: Kernel, cost: Cost, value_dim: int, *, is_reordered: bool) -> int:
    """Return the peak memory of ``A @ value`` beyond inputs and outputs, in bytes, before, in and after the kernel."""
    (batch, heads, q_len, kv_len), query, wide = inputs.shape, inputs.query, inputs.compute_dtype
    rows, ledger = batch * heads * q_len, Ledger()
    out, lse = rows * value_dim * query.dtype.itemsize, rows * wide.itemsize
    check_bytes = nonfinite.bytes_of_check(kernel, inputs, value_dim)
    if query.dtype != inputs.dtype:  # the score prepared query and key in float32
        ledger.allocate(batch * inputs.key.shape[1] * kv_len * value_dim * query.dtype.itemsize)
    bias = None if inputs.bias is None or inputs.bias.source.shape[2] == 1 else inputs.bias.source
    copied = query.numel() * query.dtype.itemsize + (0 if bias is None else bias.numel() * bias.dtype.itemsize)
    with ledger.holding(copied if is_reordered else 0):
        if not kernel.has_backward:
            ledger.touch(check_bytes)
        ledger.step(cost.held)
        if kernel.has_backward:
            ledger.touch(check_bytes)
        ledger.touch(out + lse if is_reordered else 0)
    if inputs.sink_logit is not None:
        ledger.touch(bytes_of_sink(rows, value_dim, wide))
    if query.dtype != inputs.dtype:
        ledger.touch(rows * value_dim * inputs.dtype.itemsize)
    return ledger.most - rows * (value_dim * inputs.dtype.itemsize + wide.itemsize)

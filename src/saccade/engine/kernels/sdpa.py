"""Sdpa: torch's ``scaled_dot_product_attention``, for full and causal masks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request, Verdict, disabled_reasons, reasons_unless_dot_product
from saccade.engine.memory_accounting import Cost, MemoryUse
from saccade.plan import ALL, Box, Triangle
from saccade.support.torch_modes import is_transformed


class Sdpa(Kernel):
    """Exact attention with torch's ``scaled_dot_product_attention``, for full and causal masks.

    Torch selects a kernel for the device. Torch's causal flag aligns the first row with the first key, whereas
    saccade's mask aligns the last row with the last key. A causal mask must therefore be square or have a single row,
    which attends to every key. No lse is returned.

    Cost: the same as torch's kernel on the device. Beyond inputs and outputs, most of these kernels need memory that is
    linear in the length.
    """

    name = "sdpa"
    has_second_derivatives = False
    supports_masked_rows = False
    is_checked = True

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why torch's SDPA does not support these inputs, or why ``impl="auto"`` should skip it."""
        if request.impl == "auto" and inputs.device.type in ("cpu", "meta"):
            return Verdict((), ("on CPUs the other kernels are faster",))
        why = []
        if 0 in inputs.shape:
            why.append("it does not accept empty inputs")
        elif _shape_of_mask(inputs) is None:
            why.append("it supports full masks, and causal masks with as many queries as keys")
        if not inputs.scale > 0.0:
            why.append("it needs a scale above 0")
        if request.dropout_p > 0.0:
            why.append("its dropout is not a function of positions")
        if inputs.softcap is not None:
            why.append("it has no softcap")
        if inputs.bias is not None:
            why.append("it would need a dense bias, which takes memory for every pair")
        why += reasons_unless_dot_product(inputs)
        if is_transformed():
            why.append("it is not run inside transforms of torch.func")
        if request.needs_lse:
            why.append("it does not return the lse, which is needed here")
        return Verdict(tuple(why), disabled_reasons(inputs))

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of visible query-key pairs: for a causal mask, slightly more than half of all pairs."""
        batch, heads, q_len, kv_len = inputs.shape
        return batch * heads * (q_len * (q_len + 1) // 2 if _shape_of_mask(inputs) == "causal" else q_len * kv_len)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the number of pairs and the bytes of the results. The memory that torch uses internally is unknown."""
        batch, heads, q_len, _ = inputs.shape
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + inputs.compute_dtype.itemsize)
        return Cost(1, self.pairs(inputs), MemoryUse(results, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        """Run torch's SDPA and return its output, with None as the lse."""
        is_causal = _shape_of_mask(inputs) == "causal"
        is_grouped = inputs.query.shape[1] != inputs.key.shape[1]
        return F.scaled_dot_product_attention(
            inputs.query, inputs.key, value, is_causal=is_causal, scale=inputs.scale, enable_gqa=is_grouped
        ), None


def _shape_of_mask(inputs: AttentionInputs) -> str | None:
    """Return "full" or "causal" for a mask that torch's SDPA supports; None for any other mask."""
    if inputs.plan.is_full:
        return "full"
    (_, _, q_len, kv_len), (q_first, kv_first) = inputs.shape, inputs.origin
    if inputs.row_positions is not None:
        return None
    box = Box(ALL, range(q_first, q_first + q_len), range(kv_first, kv_first + kv_len))
    partial = inputs.rule.partial(box)
    return "causal" if isinstance(partial, Triangle) and partial.is_square else None

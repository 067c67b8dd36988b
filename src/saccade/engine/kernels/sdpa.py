"""Torch's own ``scaled_dot_product_attention``, for what it does exactly."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.gpu_setting import left_out
from saccade.engine.kernels.kernel import Kernel, reasons_of_dot_products
from saccade.engine.memory_accounting import Cost, Held
from saccade.plan import ALL, Box, Triangle
from saccade.support.torch_modes import is_transformed

__all__ = ["Sdpa"]


class Sdpa(Kernel):
    """Exact attention by torch's public operation, where every key may be seen, or all up to the query's own.

    Torch picks a kernel of the device behind it. With fewer rows than keys its causal flag begins at the first key, and
    ours at the last; so causal rows must be as many as keys, or a single one, which sees all. It gives no lse.

    Cost: that of torch's kernel on the device; most take memory beside inputs and outputs that grows with the length
    alone.
    """

    name = "sdpa"
    is_choosy = True
    has_second_derivatives = False
    hides = False
    is_checked = True

    def suits(self, inputs: AttentionInputs, dropout_p: float) -> bool:
        """On every device but CPUs, which have kernels of their own; tensors without memory are taken for theirs."""
        return inputs.device.type not in ("cpu", "meta")

    def drawbacks(self, inputs: AttentionInputs, dropout_p: float) -> tuple[str, ...]:
        """Why ``impl="auto"`` passes it over."""
        return left_out(inputs)

    def reasons(self, inputs: AttentionInputs, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs; empty if it can."""
        why = []
        if 0 in inputs.shape:
            why.append("it takes no empty inputs")
        elif _shape_of_mask(inputs) is None:
            why.append("it takes full masks, and causal ones of as many rows as keys")
        if not inputs.scale > 0.0:
            why.append("it takes scales above 0")
        if dropout_p > 0.0:
            why.append("its dropout is not a function of positions")
        if inputs.softcap is not None:
            why.append("it has no softcap")
        if inputs.bias is not None:
            why.append("it gets no bias: written out, that would take memory for every pair")
        why += reasons_of_dot_products(inputs)
        if is_transformed():
            why.append("it is not run inside transforms of torch.func")
        return tuple(why)

    def reasons_of_lse(self, inputs: AttentionInputs) -> tuple[str, ...]:
        """It never gives one."""
        return ("it gives no lse, and the lse is asked for",)

    def pairs(self, inputs: AttentionInputs) -> int:
        """All of them, or a little more than half."""
        batch, heads, q_len, kv_len = inputs.shape
        return batch * heads * (q_len * (q_len + 1) // 2 if _shape_of_mask(inputs) == "causal" else q_len * kv_len)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Pairs and results; what torch's kernel holds besides is not known here."""
        batch, heads, q_len, _ = inputs.shape
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + inputs.compute_dtype.itemsize)
        return Cost(1, self.pairs(inputs), Held(results, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        """Output, and None."""
        is_causal = _shape_of_mask(inputs) == "causal"
        is_grouped = inputs.query.shape[1] != inputs.key.shape[1]
        return F.scaled_dot_product_attention(
            inputs.query, inputs.key, value, is_causal=is_causal, scale=inputs.scale, enable_gqa=is_grouped
        ), None


def _shape_of_mask(inputs: AttentionInputs) -> str | None:
    """Whether a mask is "full" or "causal"; None for any other."""
    if inputs.plan.is_full:
        return "full"
    (_, _, q_len, kv_len), (q_first, kv_first) = inputs.shape, inputs.origin
    if inputs.row_positions is not None:
        return None
    box = Box(ALL, range(q_first, q_first + q_len), range(kv_first, kv_first + kv_len))
    residual = inputs.rule.residual(box)
    return "causal" if isinstance(residual, Triangle) and residual.is_square else None

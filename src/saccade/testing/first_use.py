"""`first_use`: run saccade's first-use check, which compares a few rows and gradients of a kernel with a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.engine.check_inputs import check_value
from saccade.engine.dispatch import KERNELS
from saccade.engine.dropout import Dropped
from saccade.engine.first_use_check import FirstUse
from saccade.engine.first_use_check.check_kernel import check_kernel
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request, Verdict
from saccade.engine.tiles.tile_scores import allowed
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.scores import Score
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_choice


def first_use(
    kernel: str | Kernel | Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object = None,
    *,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | None = None,
    q_positions: GivenPositions = None,
    kv_positions: GivenPositions = None,
    gradients: bool = True,
    masks: Literal["dense", "objects"] = "dense",
) -> FirstUse:
    """Check a kernel as saccade does at its first use, by comparing some rows and gradients with the definition.

    saccade runs this check when a compiled kernel is first used. The check detects errors of a compiler, a driver or a
    new kernel, and is cheap at any length. `check` is more thorough, but tests only the cases of this package.

    Example:
        >>> import torch.nn.functional as F
        >>> from saccade.masks import Causal
        >>> query, key, value = torch.randn(3, 1, 2, 100, 16)
        >>> print(first_use(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask), query, key, value).ok)
        True
        >>> def shifted(q, k, v, mask):
        ...     return F.scaled_dot_product_attention(q, k, v, mask.roll(1, -1))
        >>> first_use(shifted, query, key, value, Causal()).ok
        False

    Args:
        kernel: a name as for ``impl=``, a kernel, or a function ``(query, key, value, mask) -> out`` or
            ``-> (out, lse)``. A function gets ``bias``, ``scale`` and ``softcap`` as keyword arguments if they are set.
        query, key, value: ``[batch, heads, len, width]``, as for `saccade.attention`; finite, and not empty.
        mask, bias, scale, softcap, score, q_positions, kv_positions: as for `saccade.attention`. A score requires a
            kernel, because functions compute only dot products.
        gradients: whether to check the gradients.
        masks: the form in which a function receives its mask: a bool tensor ``[batch, heads, q_len, kv_len]``, or a
            `saccade.masks.Mask` in terms of indices instead of positions.

    Returns:
        The result, with ``ok``, the errors and, in `warning`, code that reproduces a failure.

    Raises:
        ValueError, TypeError: the inputs are inconsistent.
        UnsupportedError: the kernel cannot run these inputs.

    Cost: a forward and a backward pass of the kernel, and the definition on a few rows of five heads.
    """
    check_choice("masks", masks, ("dense", "objects"))
    tensors = [x.detach().requires_grad_(gradients) for x in (query, key, value)]
    # fmt: off
    inputs = AttentionInputs.of(
        tensors[0], tensors[1], mask, bias=bias, scale=scale, softcap=softcap, score=score, q_positions=q_positions,
        kv_positions=kv_positions,
    )
    # fmt: on
    check_value(tensors[2], inputs.query, inputs.key, inputs.dtype)
    if 0 in inputs.shape or not all(bool(torch.isfinite(x).all()) for x in (query, key, value)):
        raise value_error("query, key and value", "be finite and not empty", list(inputs.shape))
    options = {"bias": bias, "scale": scale, "softcap": softcap}
    checked = _as_kernel(kernel, masks, {name: option for name, option in options.items() if option is not None})
    reasons = checked.verdict(inputs, Request(impl=checked.name)).cannot
    if reasons:
        raise unsupported(checked.name, reasons)
    return check_kernel(checked, inputs, tensors[2].to(inputs.query.dtype), gradients=gradients)


def _as_kernel(kernel: str | Kernel | Callable[..., Any], masks: str, options: dict[str, Any]) -> Kernel:
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        by_name = {known.name: known for known in KERNELS}
        return by_name[check_choice("kernel", kernel, tuple(by_name))]
    if not callable(kernel):
        raise type_error("kernel", "be a name, a kernel or a function", type(kernel).__name__)
    return _FunctionKernel(kernel, masks, options)


class _FunctionKernel(Kernel):
    """A kernel that calls an attention function, so that the first-use check can run it."""

    def __init__(self, function: Callable[..., Any], masks: str, options: dict[str, Any]):
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function, self._masks, self._options = function, masks, options
        self._returns_lse = False

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        is_dot = inputs.tile_function is None and inputs.modification is None
        why = () if is_dot else ("a plain function computes only dot-product scores",)
        return Verdict(why if self._returns_lse or not request.needs_lse else (*why, "it returns no lse"))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        mask: object = inputs.rule
        if self._masks == "dense":
            dense = allowed(inputs, inputs.everything)
            if dense is None:
                dense = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device)
            mask = dense.expand(inputs.shape)
        result = self._function(inputs.query, inputs.key, value, mask, **self._options)
        out, lse = result if isinstance(result, tuple) else (result, None)
        self._returns_lse = lse is not None
        return out, lse

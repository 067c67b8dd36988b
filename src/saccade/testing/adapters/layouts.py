"""The adapter for kernels that take tensors in any axis order, and the mask as a bool or float tensor or as a flag."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.support.validation import check_choice
from saccade.testing.adapters.calling_convention import Form, check_kernel_callable
from saccade.testing.adapters.patterns import band_of, distances, in_band, one_mask

MaskForm = Literal["bool", "additive", "causal", "window", "none"]
_ORDERS = tuple("".join(axes) for axes in (*permutations("bhld"), *permutations("hld")))


def layout(
    kernel: Callable[..., Any],
    order: str = "bhld",
    *,
    masks: MaskForm = "bool",
    mask_name: str | None = None,
    names: Mapping[str, str] | None = None,
    offers: Collection[str] = (),
    gqa: bool = True,
    output: int | None = None,
) -> Form:
    """Adapt a kernel ``kernel(q, k, v, ...)`` that takes tensors in a different axis order.

    Example:
        >>> import torch.nn.functional as F
        >>> from saccade.testing import adapters
        >>> def mine(q, k, v, *, causal):  # [len, batch, heads, dim]
        ...     q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        ...     return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).permute(2, 0, 1, 3)
        >>> form = adapters.layout(mine, "lbhd", masks="causal")
        >>> report = form.check(cases=["causal", "causal-decode"], laws=["oracle"], dtypes=[torch.float32])
        >>> print(report.broken[0].case, report.broken[0].law)
        causal-decode oracle

    Args:
        kernel: the kernel.
        order: a permutation of the letters b (batch), h (heads), l (len) and d (dim); without b, the kernel is called
            once for each batch item.
        masks: how to pass the mask. "bool": as a bool tensor ``[batch, heads, q_len, kv_len]``, True = may attend.
            "additive": as a float tensor of 0 and -inf. "causal": as the keyword ``causal=``, so other masks are not
            supported. "window": as ``causal=`` and ``window_size=(left, right)``, with -1 for no limit, as in
            FlashAttention. "none": no mask is passed, so masks are not supported. With "causal" and "window", the last
            query is aligned with the last key.
        mask_name: the kernel's name for the mask or for ``causal``; if None, a mask is passed as the fourth argument.
        names: the kernel's names for options, such as ``{"scale": "softmax_scale"}``.
        offers: the options that the kernel supports.
        gqa: whether the kernel supports fewer key heads than query heads.
        output: index of the output in the tuple that the kernel returns; None if it returns one tensor.

    Raises:
        ValueError, TypeError: ``order`` is not a permutation of these letters, or the kernel is not callable.
    """
    check_choice("order", order, _ORDERS)
    check_choice("masks", masks, ("bool", "additive", "causal", "window", "none"))
    settings = {"order": order, "masks": masks, "mask_name": mask_name, "names": dict(names or {}), "output": output}
    parts = (distances, in_band, band_of, one_mask, _unbatched, _mask_arguments)
    return Form(check_kernel_callable(kernel), run, _reasons_against, settings, tuple(offers), gqa, parts)


def run(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    order: str,
    masks: str,
    mask_name: str | None,
    names: Mapping[str, str],
    output: int | None,
    **options: Any,
) -> Tensor:
    """Call the kernel with inputs in its axis order, and permute its output to ``[batch, heads, q_len, value_dim]``."""
    if "b" not in order:  # one call for each batch item
        outs = []
        for b in range(len(query)):
            item, more = slice(b, b + 1), dict(options)
            if "bias" in more and len(more["bias"]) > 1:
                more["bias"] = more["bias"][item]
            settings: dict[str, Any] = {"masks": masks, "mask_name": mask_name, "names": names, "output": output}
            outs.append(
                run(
                    _unbatched(kernel),
                    query[item],
                    key[item],
                    value[item],
                    mask[item],
                    order=f"b{order}",
                    **settings,
                    **more,
                )
            )
        return torch.cat(outs)
    axes = ["bhld".index(axis) for axis in order]
    back = [order.index(axis) for axis in "bhld"]
    tensors = [x.permute(axes) for x in (query, key, value)]
    place, keywords = _mask_arguments(mask, masks, mask_name, query.dtype)
    renamed = {names.get(name, name): option for name, option in options.items()}
    result = kernel(*tensors, *place, **keywords, **renamed)
    out: Tensor = result if output is None else result[output]
    return out.permute(back)


def _unbatched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel without a batch axis, so that it takes and returns tensors with a batch axis of length 1."""

    def call(*arguments: Tensor, **keywords: Any) -> Any:
        first = {name: x[0] if isinstance(x, Tensor) and x.dim() == 4 else x for name, x in keywords.items()}
        result = kernel(*(x[0] for x in arguments), **first)
        return result[None] if isinstance(result, Tensor) else tuple(x[None] for x in result)

    return call


def _mask_arguments(
    mask: Tensor, masks: str, mask_name: str | None, dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    """Convert the mask to arguments of the kernel; return the positional and the keyword arguments."""
    if masks in ("bool", "additive"):
        passed = mask
        if masks == "additive":
            passed = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        return ([passed], {}) if mask_name is None else ([], {mask_name: passed})
    if masks == "none":
        return [], {}
    whole = one_mask(mask)
    left, right = (-1, -1) if whole is None else band_of(whole) or (-1, -1)
    keywords: dict[str, Any] = {mask_name or "causal": right == 0}
    return [], keywords | ({"window_size": (left, right)} if masks == "window" else {})


def _reasons_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, order: str, masks: str, **settings: object
) -> tuple[str, ...]:
    """Return the reasons why the kernel cannot take the inputs; empty if it can."""
    if "b" not in order and not len(query):
        return ("takes at least one batch item",)
    if masks in ("bool", "additive"):
        return ()
    whole = one_mask(mask)
    band = None if whole is None else band_of(whole)
    known = {"none": ((-1, -1),), "causal": ((-1, -1), (-1, 0))}.get(masks)
    if masks == "none" and bool(mask.all()):
        return ()
    if band is None or (known is not None and band not in known):
        words = {"none": "no mask", "causal": "only causal masks or none", "window": "only causal masks and windows"}
        return (Message("takes {masks}", masks=Message(words[masks])),)
    return ()

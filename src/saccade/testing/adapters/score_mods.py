"""The adapter for kernels that take a mask function and a score function, like FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.testing.adapters.calling_convention import Form, check_kernel_callable


def score_mod(
    kernel: Callable[..., Any],
    *,
    block_mask: bool = False,
    names: Mapping[str, str] | None = None,
    offers: tuple[str, ...] = ("bias", "softcap", "scale"),
    gqa: bool = True,
    output: int | None = None,
) -> Form:
    """Adapt a kernel ``kernel(q, k, v, score_mod=, mask_mod=, scale=)`` that takes the same functions as FlexAttention.

    The mask is passed as a function ``mask_mod(b, h, q, kv) -> bool`` of index tensors. A bias and a softcap are passed
    as ``score_mod(score, b, h, q, kv) -> score``; without them, ``score_mod`` is None. Tensors are ``[batch, heads,
    len, dim]``.

    Args:
        kernel: the kernel.
        block_mask: whether the kernel takes torch's ``BlockMask`` as ``block_mask=`` instead of ``mask_mod=``.
        names: the kernel's names for the keywords above.
        offers: which of bias, softcap and scale the kernel supports.
        gqa: whether the kernel supports fewer key heads than query heads.
        output: index of the output in the tuple that the kernel returns; None if it returns one tensor.
    """
    settings = {"block_mask": block_mask, "names": dict(names or {}), "output": output}
    return Form(check_kernel_callable(kernel), run, _reasons_against, settings, offers, gqa)


def run(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    block_mask: bool,
    names: Mapping[str, str],
    output: int | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Convert the mask, the bias and the softcap to functions, and call the kernel with them."""
    added = None if bias is None else bias.expand(mask.shape)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask[b, h, q, kv]

    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[b, h, q, kv]

    keywords: dict[str, Any] = {"score_mod": None if bias is None and softcap is None else modify, "scale": scale}
    if block_mask:
        from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415  for scripts

        batch, heads, q_len, kv_len = mask.shape
        keywords["block_mask"] = create_block_mask(mask_mod, batch, heads, q_len, kv_len, device=str(mask.device))
    else:
        keywords["mask_mod"] = mask_mod
    result = kernel(query, key, value, **{names.get(name, name): option for name, option in keywords.items()})
    out: Tensor = result if output is None else result[output]
    return out


def _reasons_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, block_mask: bool, **settings: object
) -> tuple[str, ...]:
    """Return a reason if the inputs are empty and the kernel takes torch's ``BlockMask``; an empty tuple otherwise."""
    return ("takes no empty inputs",) if block_mask and 0 in mask.shape else ()

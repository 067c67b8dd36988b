"""The adapter for kernels that read a paged cache, ``(q, k_cache, v_cache, cache_seqlens=, block_table=, ...)``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.support.validation import check_int
from saccade.testing.adapters.calling_convention import Form, check_kernel_callable
from saccade.testing.adapters.patterns import distances, in_band, of_items


def paged(
    kernel: Callable[..., Any],
    *,
    page_size: int = 16,
    stale: float = 777.0,
    names: Mapping[str, str] | None = None,
    offers: Collection[str] = (),
    gqa: bool = True,
    output: int | None = None,
) -> Form:
    """Adapt a kernel that reads a paged cache and takes FlashAttention's arguments, for one or more new tokens.

    The call is ``kernel(q, k_cache, v_cache, cache_seqlens=, block_table=, causal=...)``: q is ``[batch, q_len, heads,
    dim]``, the caches are ``[pages, page_size, kv_heads, dim]``, and int32 ``block_table [batch, pages of an item]``
    lists the pages of each item in order. Pages are in random order in memory, and unused slots contain ``stale``.

    Args:
        kernel: the kernel.
        page_size: number of tokens in a page.
        stale: the value in unused slots of the caches.
        names: the kernel's names for options and for the keywords above; by default, the scale is ``softmax_scale``.
        offers: the options that the kernel supports.
        gqa: whether the kernel supports fewer key heads than query heads.
        output: index of the output in the tuple that the kernel returns; None if it returns one tensor.
    """
    check_int("page_size", page_size)
    chosen = {"scale": "softmax_scale"} | dict(names or {})
    settings = {"page_size": page_size, "stale": stale, "names": chosen, "output": output}
    parts = (distances, in_band, of_items, lengths_of)
    return Form(check_kernel_callable(kernel), run, _reasons_against, settings, tuple(offers), gqa, parts)


def run(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    page_size: int,
    stale: float,
    names: Mapping[str, str],
    output: int | None,
    **options: Any,
) -> Tensor:
    """Write keys and values into pages, call the kernel, and return ``[batch, heads, q_len, value_dim]``."""
    lengths, causal = lengths_of(mask) or ([], False)
    batch, _, kv_len, _ = key.shape
    pages = max(1, -(-kv_len // page_size))
    order = torch.randperm(batch * pages + 1, generator=torch.Generator().manual_seed(0))
    table = order[: batch * pages].view(batch, pages).to(query.device)
    places = [(b, j) for b, length in enumerate(lengths) for j in range(length)]
    item, place = torch.tensor(places, dtype=torch.int64, device=query.device).view(-1, 2).unbind(1)
    at = (table[item, place // page_size], place % page_size)

    def cache(x: Tensor) -> Tensor:
        empty = x.new_full((batch * pages + 1, page_size, x.shape[1], x.shape[3]), stale)
        return empty.index_put(at, x.transpose(1, 2)[item, place])

    keywords: dict[str, Any] = {
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=query.device),
        "block_table": table.to(torch.int32),
        "causal": causal,
    }
    keywords = {names.get(name, name): option for name, option in (keywords | options).items()}
    result = kernel(query.transpose(1, 2), cache(key), cache(value), **keywords)
    out: Tensor = result if output is None else result[output]
    return out.transpose(1, 2)


def lengths_of(mask: Tensor) -> tuple[list[int], bool] | None:
    """Return each item's number of keys and whether the mask is causal; None if these do not determine the mask."""
    items = of_items(mask)
    if items is None:
        return None
    q_len = items.shape[1]
    seen = items.any(1)
    lengths = [int(x.nonzero().max()) + 1 if bool(x.any()) else 0 for x in seen]
    for causal in (True, False):
        says = torch.zeros_like(items)
        for item, length in enumerate(lengths):
            says[item, :, :length] = in_band(q_len, length, (-1, 0 if causal else -1), items)
        if torch.equal(says, items):
            return lengths, causal
    return None


def _reasons_against(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: object) -> tuple[str, ...]:
    """Return the reasons why a kernel with a paged cache cannot take the inputs; empty if it can."""
    if 0 in mask.shape:
        return ("takes no empty inputs",)
    return () if lengths_of(mask) is not None else ("takes only masks with one length per item, full or causal",)
